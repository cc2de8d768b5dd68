"""The warden as a process of its own, with small programs for supervisors: what it starts, and what it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from array import array

import pytest

from air_magic.engines.local import command

from .kernel import wait_until_gone
from .waiting import below, parent_of, wait_for

DEAF = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]"


class Control:
    """The kernel's end of a warden."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [*command("engines.warden"), str(theirs.fileno())]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], start_new_session=True)
        self.pid = self.process.pid

    def send(self, message: dict) -> socket.socket:
        """Sends a packet with one end of a fresh socket; the other end."""
        ours, theirs = socket.socketpair()
        with theirs:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [theirs.fileno()]))]
            self.socket.sendmsg([json.dumps(message).encode()], rights)
        return ours

    def start(self, program: str) -> tuple[int, socket.socket]:
        """Has a program started that finds its end of the socket as ``channel``; its pid, and our end."""
        code = f"import os, socket, sys; channel = socket.socket(fileno=int(sys.argv[1]))\n{program}\n"
        code += "channel.send(str(os.getpid()).encode()); import time; time.sleep(1000)"
        ours = self.send({"start": [sys.executable, "-ISc", code]})
        return int(ours.recv(100)), ours


@pytest.fixture
def warden():
    """A warden; at the end it and all below it are gone."""
    before = below()
    control = Control()
    yield control
    control.socket.close()
    control.process.wait(30)
    assert below() == before


def test_what_it_starts_leads_a_session_and_hears_every_signal(warden):
    """A supervisor is a child of the warden and inherits none of its signal handling."""
    program = (
        "import signal\n"
        "names = 'SIGINT', 'SIGTERM', 'SIGHUP', 'SIGCHLD'\n"
        "channel.send(repr([os.getsid(0) == os.getpid(), *[signal.getsignal(getattr(signal, n)) for n in names]]).encode())"
    )
    ours = warden.send(
        {
            "start": [
                sys.executable,
                "-ISc",
                f"import os, socket, sys; channel = socket.socket(fileno=int(sys.argv[1]))\n{program}",
            ]
        }
    )
    with ours:
        handlers = "<built-in function default_int_handler>, <Handlers.SIG_DFL: 0>, <Handlers.SIG_DFL: 0>, <Handlers.SIG_DFL: 0>"
        assert ours.recv(1000).decode() == f"[True, {handlers}]"
        assert ours.recv(1) == b""


def test_a_program_that_cannot_be_started_closes_its_socket(warden):
    """The kernel sees the end at once instead of waiting."""
    with warden.send({"start": ["/no/such/program"]}) as ours:
        assert ours.recv(1) == b""


def test_orphans_of_a_supervisor_that_is_gone_are_killed_and_others_are_not(warden):
    """What comes to the warden has no owner any more; what is below a living supervisor has one."""
    leave = f"import subprocess\nchild = subprocess.Popen([sys.executable, '-ISc', {DEAF + '; import time; time.sleep(1000)'!r}], start_new_session=True)"
    first, one = warden.start(leave)
    second, other = warden.start(leave)
    with one, other:
        (orphan,) = below(first)
        (kept,) = below(second)
        os.kill(first, signal.SIGKILL)
        wait_until_gone({first, orphan}, 4)
        with warden.send({"sweep": True}) as ours:
            assert ours.recv(1) == b"."
        assert below(warden.pid) == {second, kept}
        assert parent_of(second) == warden.pid


@pytest.mark.parametrize("end", ["socket", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_its_end_is_the_end_of_everything_below(warden, end):
    """A supervisor that hears no SIGTERM, and a daemon below it, go with the rest."""
    fork = f"{DEAF}\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time; time.sleep(1000)\n    os._exit(0)\nos.wait()"
    with warden.start(fork)[1]:
        started = below(warden.pid)
        assert len(started) == 2
        if end == "socket":
            warden.socket.shutdown(socket.SHUT_RDWR)
        else:
            warden.process.terminate()
        wait_until_gone(started, 4)  # the budget is 2


def test_an_interrupt_and_a_hang_up_are_not_for_the_warden(warden):
    """Signals to a group that it may be in do not end it."""
    with warden.start("")[1]:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            warden.process.send_signal(number)
        with warden.send({"sweep": True}) as ours:
            assert ours.recv(1) == b"."
        assert len(below(warden.pid)) == 1


def test_the_kernel_s_death_counts_though_a_child_of_it_holds_the_socket(tmp_path):
    """A kernel that had forked a child takes its runs along; the child, which is the user's, lives on."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.test_warden import Control\n"
        "control = Control()\n"
        "pid, ours = control.start('')\n"
        "if os.fork() == 0:\n"
        "    time.sleep(1000)\n"
        "Path(sys.argv[1], 'up').touch()\n"
        "time.sleep(1000)\n"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    kernel = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": path})
    wait_for(lambda: (tmp_path / "up").exists())
    children = {pid for pid in below(kernel.pid) if parent_of(pid) == kernel.pid}
    (wardens,) = [pid for pid in children if below(pid)]
    started = {wardens} | below(wardens)
    (fork,) = children - {wardens}
    kernel.kill()
    kernel.wait(30)
    try:
        wait_until_gone(started, 4)
    finally:
        os.kill(fork, signal.SIGKILL)
