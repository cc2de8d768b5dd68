"""One ``%%distributed`` cell, as what a script under torchrun would be."""

from __future__ import annotations
import __future__

import ast
import contextlib
import inspect
import io
import linecache
import re
import tokenize
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from .errors import CaptureError
from .names import Unbound, explain_missing, is_open, star_names, unbound

_PROVIDED = frozenset({"display", "get_ipython"})
_FUTURES = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})

_SHELL_ALIASES = frozenset({"cat", "cp", "ldir", "lf", "lk", "ll", "ls", "lx", "mkdir", "mv", "rm", "rmdir"})
# IPython's own line magics that need no more than a process.
_RANK_MAGICS = _SHELL_ALIASES.union(
    {"cd", "dirs", "env", "popd", "precision", "prun", "pushd", "pwd", "run", "sc", "set_env", "sx", "system"},
    {"conda", "mamba", "matplotlib", "micromamba", "pip", "time", "timeit", "uv"},
)
# Those that run code which the analysis of names does not see.
_CODE_MAGICS = frozenset({"prun", "run", "sc", "time"})
_DRAWS_TO_FILES = frozenset({"agg", "cairo", "pdf", "ps", "svg"})


@dataclass(frozen=True)
class Cell:
    """One cell, made by `parse` in the notebook and run by `exec_parts` in every rank."""

    source: str
    """Plain Python after IPython's transform; its lines are numbered as the notebook's cell shows them."""
    filename: str
    """What tracebacks show: the kernel's own name for this cell."""
    text: str
    """The cell as the user sees it, with its ``%%distributed`` line."""
    number: int | None
    """The execution number."""
    needs_shell: bool
    """Whether the source uses `get_ipython`, from ``!`` or ``%`` syntax or by itself."""

    @classmethod
    def parse(cls, body: str, *, line: str, shell: Any) -> Cell:
        """The cell that ``shell``, the notebook's, called its magic with: ``%%distributed <line>``, then ``body``.

        SyntaxError as of any cell; CaptureError for magics that no rank has.
        """
        running = shell.displayhook.exec_result
        raw = (running.info.raw_cell or "") if running else ""
        number = (running and running.execution_count) or shell.execution_count
        text, above = _whole(raw, line, body)
        # IPython's transform takes blank lines off the top; the line numbers need them.
        code = re.sub(r"\A(?:[ \t]*\n)+", "", body)
        blank = "\n" * (body.count("\n") - code.count("\n"))
        source = re.sub(r"(?m)^(?=.)", "# ", above) + blank + shell.transform_cell(code)
        filename = shell.compile.cache(source, number, raw_code=text)
        try:
            compile(source, filename, "exec", dont_inherit=True)
        except SyntaxError as error:
            with contextlib.suppress(SyntaxError):
                compile(source, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                error.msg += "; a rank runs the cell like a script: put it into `async def main()`, asyncio.run(main())"
            raise
        tree = _tree(source)
        refusals = [reason for magic in _magics(tree) if (reason := _refusal(magic, shell))]
        if refusals:
            raise CaptureError("\n".join(refusals))
        uses_shell = any(isinstance(node, ast.Name) and node.id == "get_ipython" for node in ast.walk(tree))
        return cls(source, filename, text, number, uses_shell)

    def exec_parts(self) -> tuple[CodeType, CodeType | None]:
        """The code to exec, and, for a cell that ends in an expression without ``;``, the code to eval for its value.

        Tells linecache the source too, so that tracebacks and `inspect` have it in a rank.
        """
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)
        tree = _tree(self.source, self.filename)
        last = tree.body[-1] if tree.body else None
        value = last.value if isinstance(last, ast.Expr) and not _ends_in_semicolon(self.source) else None
        if value is not None:
            del tree.body[-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # shown once by `parse`, not again by every rank
            module_code = compile(tree, self.filename, "exec", dont_inherit=True)
            if value is None:
                return module_code, None
            flags = module_code.co_flags & _FUTURES
            return module_code, compile(ast.Expression(value), self.filename, "eval", flags, dont_inherit=True)

    def free(self, namespace: Mapping[str, object]) -> tuple[list[Unbound], list[Unbound]]:
        """The names that the cell needs and does not bind: those of the notebook's namespace, and those of nowhere."""
        tree = _tree(self.source)
        known = _PROVIDED | star_names(tree)
        missing = [each for each in unbound(tree) if each.name not in known]
        in_notebook = [each for each in missing if each.name in namespace]
        return in_notebook, [each for each in missing if each.name not in namespace]

    def check(self, namespace: Mapping[str, object], given: Collection[str]) -> None:
        """CaptureError with all names of the notebook's namespace that the cell lacks, if ``given`` are sent along."""
        tree = _tree(self.source)
        hidden = is_open(tree) or any(magic.name in _CODE_MAGICS for magic in _magics(tree))
        in_notebook, nowhere = ([each for each in found if each.name not in given] for found in self.free(namespace))
        lines = [explain_missing(in_notebook, namespace)] if in_notebook else []
        if nowhere and not hidden:
            names = ", ".join(f"`{each.name}` (line {each.lineno})" for each in nowhere)
            lines.append(f"{names} {'is' if len(nowhere) == 1 else 'are'} defined nowhere.")
        if lines:
            raise CaptureError("\n".join(lines))

    def export(self, given: Mapping[str, str] | None = None) -> str:
        """The text of a script that does under torchrun what the cell does here; ``given`` are source texts by name."""
        tree = _tree(self.source)
        before = []
        if any(each.name == "display" for each in unbound(tree)):
            before.append("from IPython.display import display\n")
        if self.needs_shell:
            before.append(f"\n{inspect.getsource(new_shell)}\n\nnew_shell(globals())\n")
        before += [f"{text.rstrip()}\n" for text in (given or {}).values()]
        lines = self.source.splitlines(keepends=True)
        first = _after_futures(tree)  # a docstring and `from __future__` stay on top
        origin = "a cell" if self.number is None else f"cell In[{self.number}] of a notebook"
        header = f"# Made by air_magic from {origin}.\n# Run it with: torchrun --nproc-per-node N train.py"
        parts = [header, "".join(lines[:first]), "\n".join(before), "".join(lines[first:]).rstrip() + "\n"]
        return "\n".join(part for part in parts if part)


def new_shell(namespace: dict[str, object]) -> object:
    """A small IPython shell for the ``!`` and ``%`` lines of ``namespace``, which gets its `get_ipython`.

    It has no history, reads no configuration and leaves the process as a script has it.
    """
    import sys
    import tempfile

    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        system = InteractiveShell.system_raw  # a command writes to our own file descriptors

        def get_ipython(self) -> object:
            sys.stdout.flush()  # what was printed so far comes before what a command prints
            sys.stderr.flush()
            return self

        # No change of sys.path; no sys.ps1, by which libraries know an interactive session; no event loop.
        init_virtualenv = init_prompts = enable_gui = lambda *_, **__: None

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    main = sys.modules["__main__"]
    before = dict(namespace)
    with tempfile.TemporaryDirectory() as folder:  # for a profile that nothing reads
        module = main if vars(main) is namespace else None
        shell = Shell.instance(config=config, ipython_dir=folder, user_module=module, user_ns=namespace)
    shell.db = {}
    for name in set(namespace) - set(before) - {"get_ipython", "_dh"}:  # %cd keeps its way in _dh
        del namespace[name]
    namespace.update(before)
    return shell


def _whole(raw: str, line: str, body: str) -> tuple[str, str]:
    """The cell as the user sees it, and the part above the body; ``raw`` is what the shell is running."""
    lines, below = raw.rstrip().split("\n"), body.rstrip().split("\n")
    above = lines[: -len(below)]
    # IPython may have changed white space.
    is_body = [each.strip() for each in lines[len(above) :]] == [each.strip() for each in below]
    if is_body and above and above[-1].lstrip().startswith("%%"):
        return raw, "\n".join([*above, ""])
    made = f"%%distributed {line}".rstrip() + "\n"  # the shell was called by code
    return made + body, made


def _tree(source: str, filename: str = "<cell>") -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return ast.parse(source, filename)


def _ends_in_semicolon(source: str) -> bool:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT}
    return [token.string for token in tokens if token.type not in blank][-1:] == [";"]


def _after_futures(tree: ast.Module) -> int:
    """How many lines a module docstring and `from __future__` imports take from the top."""
    last = 0
    for place, node in enumerate(tree.body):
        docstring = place == 0 and ast.get_docstring(tree, clean=False) is not None
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        last = node.end_lineno or node.lineno
    return last


class _Magic(NamedTuple):
    """A magic of the cell, as IPython's transform writes it."""

    lineno: int
    name: str
    text: str
    is_cell_magic: bool


def _magics(tree: ast.Module) -> list[_Magic]:
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(ast.Call(ast.Name("get_ipython")), "run_line_magic" | "run_cell_magic" as method),
                [ast.Constant(str(name)), ast.Constant(str(text)), *_],
            ):
                found.append(_Magic(node.lineno, name, text, method == "run_cell_magic" or name.startswith("%")))
    return sorted(found)


def _refusal(magic: _Magic, shell: Any) -> str | None:
    """Why a rank cannot run the magic, or None."""
    name, where = magic.name.lstrip("%"), f"(line {magic.lineno})"
    if magic.is_cell_magic:
        return f"%%{name} {where} is a cell magic: put it above the %%distributed line."
    function = shell.find_line_magic(name)
    if function is None:
        return f"%{name} {where} is no line magic of this notebook: correct its name."
    owner = getattr(function, "__module__", None) or "this notebook"
    if owner == "IPython.core.alias" and name not in _SHELL_ALIASES:
        return f"%{name} {where} is an alias of this notebook: write `!{function.cmd}`."
    if owner.partition(".")[0] not in {"IPython", "ipykernel"}:
        return f"%{name} {where} comes from {owner}, which a rank does not load: call its functions instead."
    if name == "matplotlib" and magic.text.strip().lower() not in _DRAWS_TO_FILES:
        return f"%matplotlib {magic.text} {where} needs the notebook's page: use `%matplotlib agg`, and save figures."
    if "autoreload" in f"{name} {magic.text}":
        return f"%{name} {magic.text} {where} is of no use: leave it out, every rank imports modules afresh."
    if name not in _RANK_MAGICS:
        return f"%{name} {where} needs the notebook's session or page: run it in a cell without %%distributed."
    return None
