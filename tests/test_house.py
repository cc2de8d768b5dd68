"""The house: who may import whom, what an import of the package costs, and the shape of its files."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import air_magic

ROOT = Path(air_magic.__file__).parent

KERNEL = set(
    "magic decorator runs launch run returns report hints state transcript terminal accelerators options environment "
    "words views views.text views.outlet engines.local engines.warm".split()
)
"""What only the kernel's process has."""

OWN_PROCESSES = ["engines.warden", "engines.forkserver", "supervisor", "store", "rank"]
"""Where the other processes of a run begin."""

BARE = ["engines.warden", "supervisor"]
"""Those that start without site-packages, so that they are up at once and need nothing that a user may break."""

PURE = "state options hints environment names ladder result events terminal report errors transcript".split()
"""No I/O and no clock."""

DOING = set(
    "os io time datetime random socket select selectors subprocess threading multiprocessing asyncio queue fcntl mmap "
    "shutil tempfile glob logging ctypes".split()
)
"""Modules of the standard library that do I/O, read the clock or start something."""


@cache
def tree_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes())


def modules() -> list[str]:
    """Every module of the package, below its name."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py")]
    return sorted(".".join(p.parts).removesuffix(".__init__") for p in paths if p.parts != ("__init__",))


def statements(node: ast.AST, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that are carried out: with the module, and if ``lazy`` in its functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif lazy or not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from statements(child, lazy)


@cache
def imports(module: str, lazy: bool = True) -> tuple[set[str], set[str]]:
    """The package's own modules that a module imports, and the top names of others."""
    own: set[str] = set()
    others: set[str] = set()
    inside = (ROOT / module.replace(".", "/")).is_dir()
    for statement in statements(tree_of(module), lazy):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            parts = ["air_magic", *module.split(".")]
            home = parts[: len(parts) - statement.level + inside] if statement.level else []
            full = ".".join([*home, *([statement.module] if statement.module else [])])
            names = [f"{full}.{alias.name}" for alias in statement.names] if full == "air_magic" else [full]
            names += [f"{full}.{a.name}" for a in statement.names if f"{full}.{a.name}"[10:] in modules()]
        for name in names:
            if name.startswith("air_magic."):
                own.add(name.removeprefix("air_magic."))
            else:
                others.add(name.split(".")[0])
    return own, others


def reached(module: str, lazy: bool = True) -> set[str]:
    """The module and all of the package that it brings along, at once or (``lazy``) later."""
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in found and name in modules():
            found.add(name)
            todo += imports(name, lazy)[0]
    return found


@pytest.mark.parametrize("module", OWN_PROCESSES)
def test_other_processes_have_nothing_of_the_kernels_side(module: str) -> None:
    """A rank or a supervisor knows no notebook, no options and no view."""
    assert reached(module) & KERNEL == set()


@pytest.mark.parametrize("module", BARE)
def test_what_starts_bare_needs_the_standard_library_alone(module: str) -> None:
    """There is no site-packages folder on its path."""
    needed = set().union(*(imports(name, lazy=False)[1] for name in reached(module, lazy=False)))
    assert needed - sys.stdlib_module_names == set()


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_do_nothing(module: str) -> None:
    """They are told the time and what was read."""
    assert imports(module)[1] & DOING == set()
    used = {node.id for node in ast.walk(tree_of(module)) if isinstance(node, ast.Name)}
    assert used & {"open", "print", "input"} == set()


def test_views_see_words_and_snapshots_alone() -> None:
    """They ask no run and no process."""
    views = {name for name in modules() if name.split(".")[0] == "views"}
    assert {name for view in views for name in imports(view)[0]} <= views | {"errors", "events", "result"}


def test_nothing_heavy_is_imported_with_a_module() -> None:
    """Of what is not Python's own, cloudpickle alone: the kernel needs no torch, and a rank not IPython."""
    needed = {name: imports(name, lazy=False)[1] - sys.stdlib_module_names for name in modules()}
    assert set().union(*needed.values()) == {"cloudpickle"}
    assert [name for name in KERNEL if "torch" in imports(name)[1]] == []


def test_files_can_be_held() -> None:
    """None is above 250 lines, each says what it is for, and none has a public function's name."""
    assert {name: lines for name in ROOT.rglob("*.py") if (lines := name.read_text().count("\n")) > 250} == {}
    assert [name for name in modules() if not ast.get_docstring(tree_of(name))] == []
    functions = {name for name in air_magic.__all__ if name != "runtime"}
    assert functions & set(modules()) == set()


def test_every_public_name_is_there() -> None:
    """The list is sorted, and an unknown name is an AttributeError."""
    assert air_magic.__all__ == sorted(air_magic.__all__)
    assert [name for name in air_magic.__all__ if getattr(air_magic, name) is None] == []
    with pytest.raises(AttributeError, match="module 'air_magic' has no attribute 'nothing'"):
        air_magic.nothing
    assert importlib.import_module("air_magic.runtime") is air_magic.runtime


STATE = """
import json, logging, os, signal, sys, threading
def state():
    handlers = [str(signal.getsignal(number)) for number in signal.valid_signals()]
    return [handlers, len(logging.root.handlers), logging.root.level, threading.active_count(), dict(os.environ)]
def heavy():
    names = "torch mlflow pynvml ipywidgets numpy pandas cloudpickle multiprocessing".split()
    return [name for name in names if name in sys.modules]
"""


def answer(code: str) -> object:
    """What a fresh interpreter prints last, as JSON."""
    done = subprocess.run([sys.executable, "-c", STATE + code], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout.splitlines()[-1])


def test_an_import_changes_nothing() -> None:
    """No heavy module, thread, process, signal handler, logging set-up or variable comes with it."""
    code = """
before = state()
import air_magic
children = open(f"/proc/self/task/{os.getpid()}/children").read()
print(json.dumps([state() == before, heavy(), children]))
"""
    assert answer(code) == [True, [], ""]


def test_to_load_the_extension_imports_no_torch() -> None:
    """The kernel's process must never hold a GPU, and the first cell should not wait."""
    code = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
handlers = state()[0]
shell.run_line_magic("load_ext", "air_magic")
print(json.dumps([state()[0] == handlers, [name for name in heavy() if name not in ("cloudpickle", "multiprocessing")]]))
"""
    assert answer(code) == [True, []]
