"""The warden: one tiny process between the kernel and all that its runs start; nothing outlives it.

It holds one end of a socket whose other end only the kernel has, and adopts every orphan below it.
A supervisor adopts the orphans of its own run, so whatever comes to the warden itself was left by a
supervisor that is gone, and is killed. When the kernel goes, supervisors get a moment to stop their
ranks in order; then everything goes.

Messages from the kernel are single packets of JSON: ``{"start": argv}`` with one descriptor, whose
number the new process finds as its last argument; ``{"sweep": true}`` with one descriptor, to which a byte is written
when nothing is left that no supervisor owns.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import sys

from air_magic import processes

GRACE = 1.6
"""Seconds that supervisors have after the kernel's end; the budget for everything is 2."""


class Warden:
    """The warden's state: the socket to the kernel and the supervisors that it started."""

    def __init__(self, control: socket.socket, kernel: int) -> None:
        self._control = control
        # A child that the kernel forks keeps the socket's other end open; the pid does not lie.
        self._kernel = os.pidfd_open(kernel)
        self._supervisors: set[int] = set()

    def watch(self) -> None:
        """Serves the kernel until it is gone, then ends all that is left."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake)
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._kernel, woken], [], [])
            if woken in ready:
                numbers = os.read(woken, 4096)
                self._tidy()
                if signal.SIGTERM in numbers:
                    break
            if self._kernel in ready or (self._control.fileno() in ready and not self._serve()):
                break
        self._outlive(woken)

    def _serve(self) -> bool:
        """Answers one packet; False when the kernel is gone."""
        try:
            packet, ancillary, _, _ = self._control.recvmsg(65536, socket.CMSG_SPACE(4))
        except ConnectionResetError:
            return False
        if not packet:
            return False
        handles = array.array("i")
        for _, _, data in ancillary:
            handles.frombytes(data[:4])
        message = json.loads(packet)
        if "start" in message:
            self._start(message["start"], handles[0])
        else:
            self._tidy()
            os.write(handles[0], b".")
        for handle in handles:
            os.close(handle)
        return True

    def _start(self, argv: list[str], handle: int) -> None:
        pid = os.fork()
        if pid:
            self._supervisors.add(pid)
            return
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(handle, True)
            os.execv(argv[0], [*argv, str(handle)])  # noqa: S606 - no shell is the point
        finally:
            os._exit(127)

    def _tidy(self) -> None:
        """Reaps; then kills what a supervisor that is gone has left."""
        processes.reap(lambda pid, _status: self._supervisors.discard(pid))
        processes.sweep(but=self._supervisors, reaped=lambda pid, _status: self._supervisors.discard(pid))

    def _outlive(self, woken: int) -> None:
        for supervisor in self._supervisors:
            os.kill(supervisor, signal.SIGTERM)  # our own child, not yet waited for: the pid is its own
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, GRACE)
        while self._supervisors:
            select.select([woken], [], [])
            numbers = os.read(woken, 4096)
            self._tidy()
            if signal.SIGALRM in numbers:
                break
        processes.sweep()


def main() -> None:
    """Runs the warden on the socket that the last argument names."""
    kernel = os.getppid()
    processes.adopt_orphans()
    os.chdir("/")
    handle = int(sys.argv[-1])
    os.set_inheritable(handle, False)  # supervisors have a socket of their own
    Warden(socket.socket(fileno=handle), kernel).watch()
