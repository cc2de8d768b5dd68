"""``%distributed``: what the runs of this kernel are doing, and how to end them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import RequestError
from .report import standing
from .run import ENDED, RUNS
from .rundir import RunDir
from .words import Parser, split


def distributed_line(line: str) -> Any:
    """Looks after the runs of this kernel.

    %distributed runs                     the last runs, the latest first
    %distributed show [ID]                where a run stands, with its last lines
    %distributed logs [ID] [--rank R]     all that a rank has written
    %distributed cancel [ID]              asks a run to stop; a second time kills it
    %distributed shutdown                 ends every run and every process of air_magic

    Without ID the latest run is meant.
    """
    __tracebackhide__ = True
    word, *rest = split(line) or ["runs"]
    command = _COMMANDS.get(word)
    if command is None:
        raise RequestError(f"%distributed {word}: there are {', '.join(sorted(_COMMANDS))}")
    text = command(rest)
    if text:
        print(text)  # noqa: T201 - a magic's answer


def _known() -> list[dict[str, Any]]:
    """The last snapshot of every run, the latest last."""
    shots = {shot["run_id"]: shot for shot in ENDED} | {run.id: run.snapshot() for run in RUNS.values()}
    return sorted(shots.values(), key=lambda shot: float(shot["started_at"]))


def _meant(words: list[str]) -> dict[str, Any]:
    known = _known()
    if not words:
        if not known:
            raise RequestError("%distributed: no run is known in this notebook")
        return known[-1]
    found = [shot for shot in known if shot["run_id"].startswith(words[0])]
    if len(found) != 1:
        raise RequestError(f"%distributed: {words[0]} names {len(found)} runs; %distributed runs lists them")
    return found[0]


def _runs(words: list[str]) -> str:
    if words:
        raise RequestError("%distributed runs takes nothing")
    row = "{run_id}  {status:<11} {elapsed:>8.1f} s  {world_size:>2} ranks  {name}"
    rows = [row.format_map(shot) for shot in reversed(_known())]
    return "\n".join(rows) or "no run is known in this notebook"


def _show(words: list[str]) -> str:
    return standing(_meant(words))


def _logs(words: list[str]) -> str:
    parser = Parser("%distributed logs")
    parser.add_argument("id", nargs="?")
    parser.add_argument("--rank", default="0")
    asked = parser.parse_args(words)
    shot = _meant([asked.id] if asked.id else [])
    if not asked.rank.isdecimal() or int(asked.rank) >= shot["world_size"]:
        raise RequestError(f"--rank {asked.rank}: the run has ranks 0 to {shot['world_size'] - 1}")
    log = RunDir.at(shot["log_dir"]).log(int(asked.rank))
    return log.read_text("utf-8", "replace") if log.exists() else ""


def _cancel(words: list[str]) -> str:
    shot = _meant(words)
    run = RUNS.get(shot["run_id"])
    asked = run is not None and run.cancel()
    return f"{shot['name']} ({shot['run_id']}) {'is asked to stop' if asked else 'has ended already'}"


def shut_down(words: list[str]) -> None:
    """Ends every run of this kernel, the warden, and with it every process."""
    if words:
        raise RequestError("%distributed shutdown takes nothing")
    from .launch import ENGINE

    ENGINE.shutdown()


_COMMANDS: dict[str, Callable[[list[str]], str | None]] = {
    "runs": _runs,
    "show": _show,
    "logs": _logs,
    "cancel": _cancel,
    "shutdown": shut_down,
}
