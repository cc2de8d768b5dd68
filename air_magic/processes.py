"""The process table: who descends from whom, and killing by identity, never by name (Linux).

Standard library only: the warden and the supervisor, which own the processes of a run, live on it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


@dataclass(frozen=True)
class Process:
    """One process; the start time tells it from a later one with the same pid."""

    pid: int
    parent: int
    session: int
    started: int
    """Clock ticks since boot, field 22 of proc(5) stat."""
    zombie: bool


def read(pid: int) -> Process | None:
    """The process with this pid, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, a parenthesis too: fields are counted from the last one.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in b"ZX")


def descendants(root: int, but: Collection[int] = ()) -> list[Process]:
    """Every process below ``root``, zombies included, parents first; nothing at or below ``but``."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read(int(entry))):
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.pid not in but:
                found.append(child)
                todo.append(child.pid)
    return found


def kill(process: Process, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signals exactly this process; False if it is gone (its pid may be another's by now)."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return False
        raise
    try:
        # The handle is pinned to one process; the start time says whether it is the one that was seen.
        now = read(process.pid)
        if now is None or now.started != process.started or now.zombie:
            return False
        signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def sweep(
    but: Collection[int] = (),
    deadline: float = 5.0,
    reaped: Callable[[int, int], None] = lambda _pid, _status: None,
) -> list[Process]:
    """Kills and reaps every descendant of this process until none is left; those that were killed.

    A process that forks while we look is met in the next round: its child comes to us, the subreaper.

    Args:
        but: pids of our own children that shall live, with all below them.
        deadline: seconds after which to give up, for a process that the kernel itself holds (a hung disk).
        reaped: told of each child waited for, by pid and wait status.
    """
    killed: dict[tuple[int, int], Process] = {}
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        targets = descendants(os.getpid(), but)
        for process in targets:
            if kill(process):
                killed[process.pid, process.started] = process
        reap(reaped)
        if not targets:
            break
        time.sleep(0.003)
    return list(killed.values())


def reap(reaped: Callable[[int, int], None]) -> None:
    """Waits for every child that has exited already."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        reaped(pid, status)


def await_end(pid: int, deadline: float) -> bool:
    """Waits until the process has ended and its children have a new parent; False if not in so many seconds."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # gone already, or never there
        return True
    try:
        return readable(handle, deadline)
    finally:
        os.close(handle)


def readable(handle: int, deadline: float) -> bool:
    """Waits until the descriptor can be read; False if not in so many seconds."""
    poll = select.poll()  # unlike select.select it takes descriptors above 1023, which a kernel may have
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(deadline * 1000))


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when its parent ends; exits at once if it already has.

    Call it in the main thread of a process started by the parent's main thread: the kernel ties the
    signal to the creating thread, prctl(2).
    """
    _prctl(_SET_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Orphans below this process come to it instead of to init."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
