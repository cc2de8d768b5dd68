"""The forkserver: a clean interpreter that imported torch once; a run's supervisor is forked from it in milliseconds.

It has one thread, touches no GPU and computes nothing, so that what is forked from it is as good as fresh. It
serves its kernel over a socket: one message says what to import, then each message, with a descriptor, asks for
a supervisor on that descriptor. When the socket ends it forks no more and goes when its last supervisor has gone.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from air_magic import processes
from air_magic.events import HEAD, frame
from air_magic.starter import Forked

OURS = ("torch", "torch.distributed", "torch._dynamo", "air_magic.supervisor", "air_magic.rank")
"""Imported always. Without torch._dynamo, DDP with an optimizer imports 800 modules at its first use."""

_CAUGHT = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def become() -> NoReturn:
    """Becomes the kernel's interpreter with the kernel's variables: they do not fit into the warden's packet."""
    handle = int(sys.argv[-1])
    order = _receive(handle)
    if order is None:
        os._exit(0)
    os.set_inheritable(handle, True)
    os.chdir(order["cwd"])
    os.execve(order["argv"][0], [*order["argv"], str(handle)], order["env"])  # noqa: S606 - no shell is the point


def main(handle: int) -> None:
    """Imports, reports and serves, on the socket ``handle``."""
    processes.die_with_parent(os.getppid())
    order = _receive(handle)
    if order is None:
        return
    sys.path[:] = order["path"]
    before = _descriptors(), list(warnings.filters)
    report = _preload(order["preload"])
    opened = frozenset(_descriptors() - before[0])
    added = [entry for entry in warnings.filters if entry not in before[1]]
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, every page of what is imported
    control = socket.socket(fileno=handle)
    control.sendall(frame(report | {"ready_at": time.monotonic()}))
    Forkserver(control, Forked(opened, added)).serve()


class Forkserver:
    """Forks a supervisor for each message, and waits for those that it has forked."""

    def __init__(self, control: socket.socket, starter: Forked) -> None:
        self._control: socket.socket | None = control
        self._starter = starter
        self._supervisors: set[int] = set()

    def serve(self) -> None:
        """Serves until the kernel is gone, or has no more need of this process, and no supervisor is left."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        for number in _CAUGHT:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake)
        while self._control is not None or self._supervisors:
            watched = [woken] if self._control is None else [woken, self._control.fileno()]
            ready, _, _ = select.select(watched, [], [])
            if woken in ready:
                self._wake(os.read(woken, 4096))
            if self._control is not None and self._control.fileno() in ready:
                self._answer(self._control, (woken, wake))

    def _wake(self, numbers: bytes) -> None:
        processes.reap(lambda pid, _status: self._supervisors.discard(pid))
        if signal.SIGTERM in numbers:  # the warden says that the kernel is gone
            self._retire()
            for pid in self._supervisors:
                os.kill(pid, signal.SIGTERM)  # our own child, not yet waited for

    def _retire(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _answer(self, control: socket.socket, pipes: tuple[int, int]) -> None:
        try:
            packet, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4))
        except ConnectionResetError:
            packet, ancillary = b"", []
        handles = array.array("i")
        for _, _, data in ancillary:
            handles.frombytes(data[:4])
        if not packet or not handles:
            self._retire()
            return
        refusal = unfit()
        control.sendall(frame({"refused": refusal}))
        if not refusal:
            pid = os.fork()
            if pid == 0:
                _become_supervisor(handles[0], (*pipes, control.fileno()), self._starter)
            self._supervisors.add(pid)
        os.close(handles[0])


def unfit() -> str:
    """Why a fork of this process would not be as good as a fresh interpreter; empty if it would."""
    threads = [_read(f"/proc/self/task/{number}/comm") for number in os.listdir("/proc/self/task")]
    if len(threads) > 1:
        return f"it has {len(threads)} threads ({', '.join(threads)})"
    if any(
        os.path.realpath(f"/proc/self/fd/{number}").startswith("/dev/nvidia") for number in os.listdir("/proc/self/fd")
    ):
        return "it has opened a GPU"
    return ""


def _preload(extra: list[str]) -> dict[str, Any]:
    """Imports everything; what the kernel must know of it.

    Returns:
        ``read``: the variables that imports asked for; ``files``: what was imported, with modification times in
        ns; ``failed``: why a module could not be imported; ``unfit`` and ``culprit``: why nothing can be forked,
        and the module after which that was so.
    """
    report: dict[str, Any] = {"failed": {}, "unfit": "", "culprit": ""}
    with _watched_variables() as read:
        for name in [*OURS, *extra]:
            try:
                importlib.import_module(name)
            except Exception as error:
                report["failed"][name] = f"{type(error).__name__}: {error}"
            if reason := unfit() or _poisoned():
                report |= {"unfit": reason, "culprit": name}
                break
    standard = os.path.abspath(sysconfig.get_path("stdlib")) + os.sep
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    named = {name for name in files if name and not (name.startswith(standard) and "site-packages" not in name)}
    return report | {
        "read": sorted(read),
        "files": {name: os.stat(name).st_mtime_ns for name in named if os.path.exists(name)},
    }


def _poisoned() -> str:
    """Whether torch would say in a fork that CUDA was touched before it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return ""
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(pid, 0)
    return "it has touched CUDA" if os.waitstatus_to_exitcode(status) else ""


@contextlib.contextmanager
def _watched_variables() -> Iterator[set[str]]:
    """Notes every variable that Python code asks `os.environ` for."""
    read: set[str] = set()
    kind: Any = type(os.environ)
    original = kind.__getitem__

    def noting(self: Any, name: str) -> str:
        if isinstance(name, str):
            read.add(name)
        found: str = original(self, name)
        return found

    kind.__getitem__ = noting
    try:
        yield read
    finally:
        kind.__getitem__ = original


def _become_supervisor(handle: int, foreign: tuple[int, ...], starter: Forked) -> NoReturn:
    """In the child: forgets the forkserver's signals and descriptors and supervises one run."""
    from air_magic import supervisor

    try:
        signal.set_wakeup_fd(-1)
        for number in _CAUGHT:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for descriptor in foreign:
            os.close(descriptor)
        supervisor.serve(handle, starter)
    finally:
        os._exit(0)


def _descriptors() -> set[int]:
    numbers = os.listdir("/proc/self/fd")  # the listing's own is among them, and closed by now
    return {int(number) for number in numbers if os.path.exists(f"/proc/self/fd/{number}")}


def _receive(handle: int) -> dict[str, Any] | None:
    """One message, and not a byte more; None at the end."""
    head = _exactly(handle, HEAD.size)
    body = _exactly(handle, HEAD.unpack(head)[0]) if head else b""
    return json.loads(body) if body else None


def _exactly(handle: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(handle, size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:  # the thread has just ended
        return "?"
