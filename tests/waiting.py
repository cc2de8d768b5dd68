"""Waits for an event with a deadline; and what there is to see of a run's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from air_magic import processes

DEADLINE = 60.0
"""Seconds after which a test gives up; generous, for the machine may be busy."""


def wait_for(condition: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def wait_for_files(*paths: Path) -> None:
    """Waits until all these files exist."""
    wait_for(lambda: all(path.exists() for path in paths))


def below(pid: int | None = None) -> set[int]:
    """Every living process below this one (by default below the tests)."""
    return {p.pid for p in processes.descendants(os.getpid() if pid is None else pid) if not p.zombie}


def of_runs(pid: int | None = None) -> set[int]:
    """Every living process below this one but for the warden and its forkserver, which outlive a run."""
    root = os.getpid() if pid is None else pid
    living = [process for process in processes.descendants(root) if not process.zombie]
    wardens = {p.pid for p in living if p.parent == root and _runs(p.pid, "engines.warden")}
    forkservers = {p.pid for p in living if p.parent in wardens and _runs(p.pid, "engines.forkserver")}
    # A forkserver forks within its own session, too, to find out whether its forks are as good as fresh.
    return {p.pid for p in living if p.session not in forkservers} - wardens


def described(pid: int) -> str:
    """A process for a person to read: what it is, whose child, in which state."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return f"{command[-120:]} (a child of {parent_of(pid)}): {processes.read(pid)}"
    except OSError:
        return f"{pid}, gone meanwhile"


def _runs(pid: int, module: str) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _session_of(pid: int) -> int:
    process = processes.read(pid)
    return process.session if process is not None else 0


def parent_of(pid: int) -> int:
    """The process's parent now; 0 for a process that is gone."""
    process = processes.read(pid)
    return process.parent if process is not None else 0


def warden_of(run) -> int:
    """The warden above a run that goes on, started from a forkserver or not."""
    ancestors = [ranks_of(run)[0]]
    while not _runs(ancestors[-1], "engines.warden"):
        ancestors.append(parent_of(ancestors[-1]))
    return ancestors[-1]


def ranks_of(run) -> list[int]:
    """The pids of a run's ranks, once all have been started."""
    wait_for(lambda: all(rank["pid"] for rank in run.snapshot()["ranks"]))
    return [rank["pid"] for rank in run.snapshot()["ranks"]]
