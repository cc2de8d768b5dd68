"""Starts supervisors on this node, below the kernel's one warden."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from typing import Any

from .. import processes
from ..boot import boot
from ..errors import AirMagicError
from ..events import Event, NodeEnded, NodeLost, NodeStarted, Reader, decode, frame
from .warm import Wanted, Warmth

_LOG = logging.getLogger("air_magic")


def command(module: str, call: str = "main()") -> list[str]:
    """A small interpreter, free of the user's environment and of site-packages' start-up, for one of ours."""
    return [sys.executable, "-I", "-S", "-c", boot(module, call)]


class LocalEngine:
    """The warden of this kernel and the way to have it start a supervisor.

    One for the kernel's life; the warden is started at the first need and again if it died.
    """

    def __init__(self) -> None:
        self._warden: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0
        self._lock = threading.RLock()  # two threads that launch at once must not start two wardens
        self._warmth = Warmth(self._start_forkserver)

    def warm_up(self, wanted: Wanted) -> None:
        """Starts a forkserver in the background, so that a later run finds it ready."""
        with self._lock:
            self._living_warden()
            self._warmth.begin(wanted)

    def start(self, spec: dict[str, Any], deliver: Callable[[Event], None], wanted: Wanted | None = None) -> LocalNode:
        """Starts a supervisor for ``spec`` and delivers its events, from a thread, until it is gone.

        Args:
            spec: its orders; see `air_magic.launch`.
            deliver: takes each event.
            wanted: what a forkserver must have to serve; None for a cold start.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._living_warden()
                reason = "asked for" if wanted is None else self._warmth.lend(wanted, theirs)
                if reason:
                    _LOG.info("run %s starts cold: %s", spec["run_id"], reason)
                    self._send({"start": command("supervisor")}, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        return LocalNode(self, ours, spec, deliver)

    def sweep(self, deadline: float) -> bool:
        """Has the warden kill what dead supervisors left; False if it did not answer in time (seconds)."""
        heard, tell = os.pipe()
        try:
            self._send({"sweep": True}, tell)
            return processes.readable(heard, deadline)
        except OSError:
            return False
        finally:
            os.close(heard)
            os.close(tell)

    def notes(self) -> list[str]:
        """What is to be told once about modules that cannot be imported ahead."""
        with self._lock:
            told, self._warmth.notes[:] = list(self._warmth.notes), []
        return told

    def shutdown(self, deadline: float = 10.0) -> None:
        """Ends the warden and with it every run of this kernel."""
        self._warmth.end()
        self._warmth = Warmth(self._start_forkserver)
        if self._warden is None or self._control is None:
            return
        self._control.shutdown(socket.SHUT_RDWR)  # closing is not enough: a forked child may hold it too
        self._control.close()
        self._warden.wait(deadline)
        self._warden = self._control = None

    def _start_forkserver(self, theirs: socket.socket) -> None:
        self._send({"start": command("engines.forkserver", "become()")}, theirs.fileno())

    def _send(self, message: dict[str, Any], handle: int) -> None:
        packet = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [handle]))]
        for _ in range(2):
            with self._lock:
                control = self._living_warden()
                try:
                    control.sendmsg([packet], rights)
                    return
                except (BrokenPipeError, ConnectionResetError):  # it died since it was looked at
                    self._forget()
        raise AirMagicError("the warden process of air_magic ends as soon as it is started; is /proc mounted?")

    def _living_warden(self) -> socket.socket:
        # A kernel that forked (multiprocessing) has a copy of this object, but the warden is its parent's.
        if self._warden is not None and (self._owner != os.getpid() or self._warden.poll() is not None):
            self._forget()
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._warden = subprocess.Popen(
                    [*command("engines.warden"), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # the notebook's interrupt is a signal to the kernel's whole group
                )
            self._control = ours
            self._owner = os.getpid()
        return self._control

    def _forget(self) -> None:
        self._warmth.end(its_own=self._owner == os.getpid())
        if self._control is not None:
            self._control.close()
        if self._warden is not None and self._owner == os.getpid():
            self._warden.wait(1)
        self._warden = self._control = None


class LocalNode:
    """One run's supervisor on this node, as the run sees it."""

    def __init__(
        self,
        engine: LocalEngine,
        channel: socket.socket,
        spec: dict[str, Any],
        deliver: Callable[[Event], None],
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._node: int = spec["node"]
        self._deliver = deliver
        self._send(spec)
        threading.Thread(target=self._read, name=f"air_magic-{spec['run_id']}", daemon=True).start()

    def stop(self, reason: str, *, kill: bool) -> None:
        """Has the supervisor begin its stop ladder, or kill at once; does nothing if it is gone."""
        self._send({"stop": reason, "kill": kill})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.sendall(frame(message))
        except OSError:  # the supervisor is gone: the reader says so
            return

    def _read(self) -> None:
        reader = Reader()
        supervisor = 0
        last: Event | None = None  # told when the supervisor itself is gone: then nothing of the run is left
        with self._channel:
            while data := self._receive():
                for message in reader.feed(data):
                    event = decode(message)
                    if isinstance(event, NodeEnded | NodeLost):
                        last = event
                        continue
                    if isinstance(event, NodeStarted):
                        supervisor = event.pid
                    self._deliver(event)
            # Its socket closes a moment before it is gone, and before its children come to the warden.
            processes.await_end(supervisor, deadline=5.0)
            if last is None:
                swept = self._engine.sweep(deadline=5.0)
                left = "" if swept else "; processes of this run may be left"
                last = NodeLost(self._node, f"the run's supervisor process was killed{left}")
        self._deliver(last)

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(1 << 18)
        except ConnectionResetError:
            return b""
