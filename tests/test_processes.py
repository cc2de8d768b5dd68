"""The process table, with real processes."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from air_magic import processes

from .kernel import wait_until_gone

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process; it and all below it are gone after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def popen(*argv: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(argv, bufsize=0, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        started.append(process)
        return process

    yield popen
    for process in started:
        for below in processes.descendants(process.pid):
            processes.kill(below)
        process.kill()
        with process:  # which closes its pipes and waits
            pass


def line(process: subprocess.Popen[bytes]) -> str:
    """The next line that the process prints, by which it says that it is ready."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 30)[0], "it says nothing"
    return process.stdout.readline().decode().strip()


def seen(pid: int) -> processes.Process:
    """The process, which exists."""
    process = processes.read(pid)
    assert process is not None
    return process


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys; sys.path.append({str(Path(__file__).parents[1])!r})\n{code}"]


def test_a_process_is_read_as_it_is() -> None:
    """Parent, session and start; one that does not exist is None."""
    me = seen(os.getpid())
    assert (me.pid, me.parent, me.session, me.zombie) == (os.getpid(), os.getppid(), os.getsid(0), False)
    ticks = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
    assert 0 < me.started <= ticks
    assert processes.read(1 << 30) is None


def test_a_name_cannot_fool_the_reader(tmp_path: Path, start: Start) -> None:
    """The name stands in parentheses amid the numbers, and may hold any."""
    program = tmp_path / ") Z 1 (a"
    shutil.copy(shutil.which("sleep") or "", program)
    process = start(str(program), "60")
    assert (seen(process.pid).parent, seen(process.pid).zombie) == (os.getpid(), False)


def test_descendants_are_found_at_any_depth(start: Start) -> None:
    """Parents first; not in a branch that is left out."""
    shell = start("sh", "-c", "(sleep 60 & echo $!; wait) & echo $!; wait")
    pids = {int(line(shell)), int(line(shell))}
    found = [process.pid for process in processes.descendants(shell.pid)]
    assert set(found) == pids
    middle = next(process.pid for process in processes.descendants(shell.pid) if process.parent == shell.pid)
    assert found[0] == middle
    assert processes.descendants(shell.pid, but=[middle]) == []
    assert [process.pid for process in processes.descendants(shell.pid, but=[found[1]])] == [middle]
    assert {shell.pid, *pids} <= {process.pid for process in processes.descendants(os.getpid())}


def test_a_signal_reaches_the_process_that_was_seen(start: Start) -> None:
    """And none that has its pid by now."""
    process = start("sleep", "60")
    it = seen(process.pid)
    assert not processes.kill(replace(it, started=it.started - 1))
    assert process.poll() is None
    assert processes.kill(it, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_nobody_is_signalled_in_the_place_of_the_dead(start: Start) -> None:
    """A zombie is as gone as one that was waited for."""
    process = start("cat")
    it = seen(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert seen(process.pid).zombie
    assert not processes.kill(it)
    process.wait()
    assert not processes.kill(it)


SWEEPER = """
import json, os, subprocess
from air_magic import processes

processes.adopt_orphans()
daemon = 'import os, signal, sys, time\\n' + (
    'if os.fork(): os._exit(0)\\n'
    'os.setsid()\\n'
    'if os.fork(): os._exit(0)\\n'
    'for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\\n'
    'os.fork()\\n'
    'os.write(1, b"up\\\\n")\\n'
    'time.sleep(60)\\n'
)
read, write = os.pipe()
for _ in range(2):
    subprocess.run([sys.executable, '-S', '-c', daemon], stdout=write, check=True)
kept = subprocess.Popen(['sh', '-c', 'sleep 60 & wait'])
with os.fdopen(read, 'rb', buffering=0) as ups:
    for _ in range(4 * len(b'up\\n')):
        ups.read(1)
me = os.getpid()
orphans = [process.pid for process in processes.descendants(me, but=[kept.pid]) if not process.zombie]
reaped = []
killed = [process.pid for process in processes.sweep(but=[kept.pid], reaped=lambda pid, status: reaped.append([pid, status]))]
left = [process.pid for process in processes.descendants(me, but=[kept.pid])]
print(json.dumps([sorted(orphans), sorted(killed), sorted(reaped), left, kept.poll(), kept.pid]), flush=True)
processes.sweep()
print(json.dumps([process.pid for process in processes.descendants(me)]), flush=True)
"""


def test_a_sweep_leaves_nothing_but_what_it_is_told_to(start: Start) -> None:
    """Daemons that have forked twice, lead sessions of their own and ignore signals are killed and reaped."""
    sweeper = start(*python(SWEEPER))
    orphans, killed, reaped, left, code, kept = json.loads(line(sweeper))
    assert len(orphans) == 4
    assert (killed, left, code) == (orphans, [], None)
    assert {tuple(one) for one in reaped} >= {(pid, signal.SIGKILL) for pid in orphans}
    assert kept not in [pid for pid, _ in reaped]
    assert json.loads(line(sweeper)) == []
    assert sweeper.wait(30) == 0


def test_a_sweep_gives_up_at_its_deadline() -> None:
    """With none left to kill it ends at once; with none to be killed in time it ends as well."""
    assert processes.sweep(but=[process.pid for process in processes.descendants(os.getpid())]) == []
    assert processes.sweep(deadline=-1.0) == []


def test_the_end_of_a_stranger_can_be_waited_for(start: Start) -> None:
    """Not only of a child; one that is gone or never was has ended."""
    shell = start("sh", "-c", "sleep 60 & echo $!; wait")
    stranger = seen(int(line(shell)))
    assert not processes.await_end(stranger.pid, 0.0)
    processes.kill(stranger)
    assert processes.await_end(stranger.pid, 30.0)
    assert [processes.await_end(pid, 0.0) for pid in (0, 1 << 30)] == [True, True]


def test_a_process_can_die_with_its_parent(start: Start) -> None:
    """However that ends."""
    child = "import os, signal; from air_magic import processes; processes.die_with_parent(os.getppid()); print(os.getpid(), flush=True); signal.pause()"
    parent = start(*python(f"import subprocess; subprocess.run({python(child)!r})"))
    pid = int(line(parent))
    parent.kill()
    wait_until_gone({pid})


def test_a_process_whose_parent_is_gone_already_does_not_begin(start: Start) -> None:
    """The signal would never come."""
    process = start(*python("from air_magic import processes; processes.die_with_parent(1 << 30); print('alive')"))
    assert (process.wait(30), line(process)) == (1, "")
