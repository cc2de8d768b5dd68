"""``%%distributed``: a cell that runs on N ranks as a torchrun script would; and the magics' registration."""

from __future__ import annotations

import argparse
import contextlib
import keyword
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import capture
from .cell import Cell
from .errors import CaptureError, RequestError
from .options import Options, parse_count, parse_env, parse_timeout
from .payload import Payload
from .runs import distributed_line, shut_down
from .sources import sources
from .words import Parser, split

_OURS = "air_distributed"  # a name that stays ours when another extension takes %%distributed


def _parser() -> Parser:
    parser = Parser("%%distributed")
    add = parser.add_argument
    add("-n", "--num-accelerators", metavar="N", help="how many ranks; every visible GPU, or 2 CPU ranks, by default")
    add("--accelerator-type", metavar="TYPE", help="what the node must have: GPU_8xH100, GPU_1xA10, …, CPU")
    add("-t", "--timeout", metavar="S", default="3h", help="seconds until the run is stopped, or 'none'; also 15m, 3h")
    add("-w", "--with", dest="given", metavar="a,b,C", default="", help="names of the notebook to send, by value")
    add("-o", "--out", metavar="NAME", help="binds the cell's values (or the Run, with --detach) to this name")
    add("--env", metavar="K=V", action="append", default=[], help="a variable for every rank; may be given again")
    add("--name", metavar="TEXT", help="what the run is called in views")
    add("--detach", action="store_true", help="returns at once with a Run; the output stays with this cell")
    add("--no-track", action="store_true", help="no MLflow run; there is none in this version")
    add("--cold", action="store_true", help="fresh interpreters, also where a forkserver is ready")
    add("--engine", metavar="E", default="local", help="where ranks run: local")
    add("--num-nodes", metavar="K", default="1", help="how many nodes: 1")
    add("--export", metavar="FILE", help="writes the cell as a script for torchrun, and runs nothing")
    add("--check", action="store_true", help="reports what the cell takes from the notebook, and runs nothing")
    return parser


def distributed_cell(line: str, cell: str) -> Any:
    """Runs the cell on N ranks, each in a fresh namespace, as torchrun would run it as a script.

    The value is a list of the last expression's values in rank order, or nothing if all are None.
    """
    __tracebackhide__ = True
    shell = _shell()
    asked = _parse(line)
    options = _options(asked)
    try:
        parsed = Cell.parse(cell, line=line, shell=shell)
    except SyntaxError as error:
        raise _shown_as_a_cells(error, shell) from None
    wanted = [name.strip() for name in asked.given.split(",") if name.strip()]
    given = _given(wanted, shell.user_ns)
    parsed.check(shell.user_ns, wanted)
    if asked.check:
        print(_checked(Payload.of_cell(parsed, given), given))  # noqa: T201 - the report is what was asked for
        return None
    if asked.export is not None:
        path = _write(asked.export, parsed.export(sources(wanted, shell.user_ns)))
        print(f"wrote {path}; run it with: torchrun --nproc-per-node {options.num_accelerators or 2} {path}")  # noqa: T201
        return None
    from .launch import launch

    with _flags_named():
        run = launch(Payload.of_cell(parsed, given), options, publish=asked.detach)
    if asked.detach:
        return _bind(shell, asked.out, run)
    run.watch()
    results = run.result()
    return _bind(shell, asked.out, None if all(value is None for value in results) else results)


def register(shell: Any) -> None:
    """Adds the magics to a shell; says so if ``%%distributed`` was another extension's."""
    owner = shell.find_cell_magic("distributed")
    if owner is not None and owner is not distributed_cell:
        print(  # noqa: T201 - the user must know whose magic it is now
            f"air_magic: %%distributed was {getattr(owner, '__module__', 'another extension')}'s and is air_magic's "
            f"from now on; %%{_OURS} is always air_magic's"
        )
    from .launch import warm_up

    warm_up()
    for name in ("distributed", _OURS):
        shell.register_magic_function(distributed_cell, "cell", name)
        shell.register_magic_function(distributed_line, "line", name)


def unregister(shell: Any) -> None:
    """Takes the magics away and ends every process that was started."""
    for kind, function in (("cell", distributed_cell), ("line", distributed_line)):
        table = shell.magics_manager.magics[kind]
        for name in ("distributed", _OURS):
            if table.get(name) is function:
                del table[name]
    shut_down([])


def _parse(line: str) -> argparse.Namespace:
    return _parser().parse_args(split(line))


def _options(asked: argparse.Namespace) -> Options:
    if asked.out is not None and (not asked.out.isidentifier() or keyword.iskeyword(asked.out)):
        raise RequestError(f"--out {asked.out}: give a Python name, for instance --out losses")
    with _flags_named():
        return Options.checked(
            num_accelerators=None if asked.num_accelerators is None else parse_count(asked.num_accelerators),
            accelerator_type=asked.accelerator_type,
            timeout=parse_timeout(asked.timeout),
            env=parse_env(asked.env),
            name=asked.name,
            engine=asked.engine,
            warm=not asked.cold,
            num_nodes=int(asked.num_nodes) if asked.num_nodes.isdecimal() else asked.num_nodes,
        )


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """Has errors about an option name the flag that the user wrote, not the decorator's argument."""
    __tracebackhide__ = True
    try:
        yield
    except RequestError as error:
        options = "num_accelerators|accelerator_type|engine|num_nodes|name"
        text = re.sub(rf"^({options})=", r"--\1 ", str(error))
        text = re.sub(rf"\bleave ({options}) out", r"leave --\1 out", text)
        text = re.sub(r"--\w+", lambda flag: flag[0].replace("_", "-"), text)
        raise RequestError(text) from None


def _write(name: str, text: str) -> Path:
    path = Path(name).expanduser()
    try:
        path.write_text(text)
    except OSError as error:
        raise RequestError(f"--export {name}: {error.strerror}; give the name of a file to write") from None
    return path


def _given(wanted: list[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in wanted if name not in namespace]
    if missing:
        raise CaptureError(f"--with {','.join(missing)}: the notebook has no such name; is its cell run?")
    return {name: namespace[name] for name in wanted}


def _shown_as_a_cells(error: SyntaxError, shell: Any) -> Exception:
    """The same error for a reader; as itself IPython would show it below the magic's own stack."""
    lines = shell.SyntaxTB.structured_traceback(type(error), error, [])
    kind = type(type(error).__name__, (Exception,), {"_render_traceback_": lambda _self: lines})
    shown: Exception = kind(str(error))
    return shown


def _bind(shell: Any, name: str | None, value: Any) -> Any:
    if name is None:
        return value
    shell.user_ns[name] = value
    return None


def _checked(payload: Payload, given: Mapping[str, Any]) -> str:
    """The report of --check: what goes along, how large it is, and where it comes from."""
    with tempfile.TemporaryDirectory() as folder:
        payload.dump(Path(folder) / "payload")  # raises what a run would raise
    rows = []
    for name, kind, size in capture.sizes_of_names(given):
        home = getattr(given[name], "__module__", None)
        origin = "the notebook" if home in (None, "__main__") else f"module {home}"
        rows.append(f"  {name}: {kind}, {size / 1024:,.1f} KiB, from {origin}")
    sent = ["sent to every rank:", *rows] if rows else ["nothing of the notebook is sent"]
    return "\n".join([*sent, *payload.notes, "the cell can run"])


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()


distributed_cell.__doc__ = f"{distributed_cell.__doc__}\n{_parser().format_help()}"
