"""A supervisor as a process of its own, with small commands for ranks: events, stops, faults, hostile output."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from air_magic.engines.local import command
from air_magic.events import NodeEnded, NodeLost, NodeStarted, Output, RankExited, RankStarted, Reader, decode, frame
from air_magic.rundir import RunDir

from .waiting import below, wait_for

PAUSE = [sys.executable, "-ISc", "import signal; signal.pause()"]
HEAR = "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})"
SAY_AND_WAIT = "import time; print('up', flush=True); time.sleep(1000)"


class Supervised:
    """The kernel's end of a supervisor."""

    def __init__(self, pid: int, ours: socket.socket, folder: RunDir) -> None:
        self.pid = pid
        self.folder = folder
        self.socket = ours
        self._reader = Reader()
        self.events = []

    def read(self, seconds: float = 60.0):
        """Takes the next events; None at the end."""
        assert select.select([self.socket], [], [], seconds)[0], f"nothing more came after {self.events}"
        data = self.socket.recv(1 << 18)
        self.events += [decode(message) for message in self._reader.feed(data)]
        return data or None

    def until(self, *kinds: type, count: int = 1):
        """Reads until so many events of these kinds have come; the last of them."""
        while len(found := self.all(*kinds)) < count:
            assert self.read(), self.events
        return found[-1]

    def all(self, *kinds: type):
        """The events of these kinds so far."""
        return [event for event in self.events if isinstance(event, kinds)]

    def text(self, rank: int) -> str:
        """What has been told of a rank's output."""
        return "".join(event.text for event in self.all(Output) if event.rank == rank)

    def to_the_end(self):
        """Reads all there is; the last event."""
        while self.read():
            pass
        return self.events[-1]

    def ask(self, *, kill: bool = False) -> None:
        """Asks for a stop."""
        self.socket.sendall(frame({"stop": "cancel", "kill": kill}))


@pytest.fixture
def supervise(tmp_path):
    """Starts a supervisor whose ranks are Python programs; waits for its end, after which nothing may be left."""
    before = below()
    started = []

    def start(*programs: str, first: bytes = b"", **changes) -> Supervised:
        folder = RunDir(tmp_path)
        spec = {
            "run_id": "1",
            "node": 0,
            "run_dir": str(tmp_path),
            "cwd": "/",
            "env": dict(os.environ),
            "ranks": [{"rank": rank, "env": {"RANK": str(rank)}} for rank in range(len(programs))],
            "argv": [sys.executable, "-Sc", f"{HEAR}; import os; exec({list(programs)!r}[int(os.environ['RANK'])])"],
            "store_argv": PAUSE,
            "umask": 0o022,
            "log_cap": 1 << 30,
        } | changes
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # what waits for the kernel, waits in the channel
            argv = [*command("supervisor"), str(theirs.fileno())]
            process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        started.append((process, ours))
        ours.sendall(frame({name: value for name, value in spec.items() if value is not None}) + first)
        return Supervised(process.pid, ours, folder)

    yield start
    for process, ours in started:
        ours.close()
        assert process.wait(30) == 0
    assert below() == before


def test_a_run_is_told_from_its_start_to_its_end(supervise):
    """One event for each thing that happens, the last word last."""
    node = supervise("print('hello')", "import sys; print('world', file=sys.stderr); sys.exit(3)")
    assert node.to_the_end() == NodeEnded(0)
    assert node.events[0] == NodeStarted(0, node.pid, node.events[0].port)
    ranks = {event.rank: event for event in node.all(RankStarted)}
    assert ranks.keys() == {0, 1}
    assert [node.text(rank) for rank in (0, 1)] == ["hello\n", "world\n"]
    exits = {event.rank: event for event in node.all(RankExited)}
    assert [(exits[rank].returncode, exits[rank].outcome) for rank in (0, 1)] == [(0, None), (3, None)]
    assert [node.folder.log(rank).read_text() for rank in (0, 1)] == ["hello\n", "world\n"]


def test_a_rank_has_dev_null_as_stdin_and_a_session_of_its_own_and_hears_every_signal(supervise):
    """What a rank inherits does not depend on how the kernel was started."""
    program = (
        "import os, signal, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), "
        "[n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_IGN])"
    )
    node = supervise(program)
    node.to_the_end()
    assert node.folder.log(0).read_text() == "True '' []\n"


def test_a_stop_that_comes_with_the_orders_is_heard(supervise):
    """Both in one packet: no further message will wake the supervisor."""
    node = supervise(SAY_AND_WAIT, first=frame({"stop": "cancel", "kill": True}))
    assert node.to_the_end() == NodeEnded(0)
    assert node.all(RankExited)[0].returncode == -signal.SIGKILL


def test_output_reaches_a_kernel_that_reads_late(supervise):
    """What waited while nobody read is sent once there is room, though nothing else happens."""
    text = "".join(f"{number}\n" for number in range(10_000))
    node = supervise(f"import time; print(end={text!r}, flush=True); time.sleep(1000)")
    wait_for(lambda: node.folder.log(0).exists() and node.folder.log(0).stat().st_size == len(text))
    while len(node.text(0)) < len(text):
        node.read()
    assert node.text(0) == text
    node.ask(kill=True)
    node.to_the_end()


def test_a_kernel_that_goes_takes_its_ranks_along(supervise):
    """The end of the socket is a stop, also for a rank that hears no signal."""
    deaf = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n" + SAY_AND_WAIT
    node = supervise(deaf, SAY_AND_WAIT)
    node.until(Output, count=2)
    assert len(below(node.pid)) == 3
    node.socket.close()
    wait_for(lambda: not below(node.pid), 4)


def test_a_supervisor_asked_to_end_stops_its_ranks_and_says_so(supervise):
    """SIGTERM from somewhere is no silent end."""
    node = supervise(SAY_AND_WAIT)
    node.until(Output)
    os.kill(node.pid, signal.SIGTERM)
    assert node.to_the_end() == NodeLost(0, "its supervisor was asked to end")
    assert node.all(RankExited) == []


def test_ranks_that_cannot_be_started_are_a_note(supervise):
    """A folder that is gone is named."""
    node = supervise("pass", cwd="/no/such/folder")
    last = node.to_the_end()
    assert last == NodeEnded(
        0, ("the ranks could not be started: [Errno 2] No such file or directory: '/no/such/folder'",)
    )


def test_a_fault_of_the_supervisor_ends_the_ranks_and_is_told(supervise):
    """A bug of ours leaves a traceback in the run's folder, and no process."""
    node = supervise(SAY_AND_WAIT, store_argv=None)
    assert node.to_the_end() == NodeLost(
        0, f"air_magic's supervisor failed, which is a bug; see {node.folder.supervisor_log}"
    )
    assert node.folder.supervisor_log.read_text().splitlines()[-1] == "KeyError: 'store_argv'"


def test_a_store_that_dies_is_a_note(supervise):
    """The log of the rendezvous store is named while ranks still need it."""
    program = "import time\n" + SAY_AND_WAIT
    node = supervise(program, store_argv=[sys.executable, "-ISc", "print('no torch'); raise SystemExit(1)"])
    node.until(Output)
    wait_for(lambda: len(below(node.pid)) == 1)
    node.ask()
    note = f"the rendezvous store ended early; its log is {node.folder.store_log}"
    assert node.to_the_end() == NodeEnded(0, (note,))
    assert node.folder.store_log.read_text() == "no torch\n"


def test_a_rank_s_end_does_not_wait_for_what_it_left(supervise):
    """A process that holds the rank's output open, without its variables and session, is killed at the end."""
    program = "import subprocess; subprocess.Popen(['sleep', '1000'], env={}, start_new_session=True); print('bye')"
    node = supervise(program)
    assert node.to_the_end() == NodeEnded(0, ("killed a process that ranks had left behind",))
    assert node.text(0) == "bye\n"


def test_what_a_rank_left_is_gone_while_the_others_run(supervise):
    """Children, daemons and processes in sessions of their own go with their rank, not with the run."""
    program = (
        "import subprocess\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 1000 &'])\n"
    )
    node = supervise(program, SAY_AND_WAIT)
    gone = node.until(RankExited)
    assert (gone.rank, gone.returncode, gone.descendants) == (0, 0, 3)
    node.until(Output)
    assert len(below(node.pid)) == 2  # the other rank and the store
    node.ask()
    node.to_the_end()


def test_a_death_is_dated_when_it_happened(supervise):
    """A pipe that stays open delays the report, not the time in it."""
    program = (
        "import os, subprocess, time; subprocess.Popen(['sleep', '1000'], env={}, start_new_session=True); "
        "print(time.time(), flush=True); os.kill(os.getpid(), 9)"
    )
    node = supervise(program)
    node.to_the_end()
    (gone,) = node.all(RankExited)
    assert gone.returncode == -signal.SIGKILL
    assert gone.at - float(node.folder.log(0).read_text()) < 0.9  # the pipe was read for one second more
    assert gone.facts.keys() >= {"oom_kills"}


def high_water(pid: int) -> int:
    """The most memory that the process ever had, in MiB."""
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) // 1024


FLOODS = {
    "many lines": "print(end=''.join(f'{number}\\n' for number in range(200_000)), flush=True)",
    "no line's end": "for _ in range(50): print(end='x' * 1_000_000, flush=True)",
    "no Unicode": "import os\nfor _ in range(100): os.write(1, bytes(range(256)) * 256)",
}
SIZES = {"many lines": 1_288_890, "no line's end": 50_000_000, "no Unicode": 6_553_600}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_complete_in_the_log_and_bounded_elsewhere(supervise, flood):
    """A kernel that does not read costs neither bytes of the log nor memory."""
    program = f"{FLOODS[flood]}\nprint()\n{SAY_AND_WAIT}"
    node = supervise(program, program)
    size = SIZES[flood] + len("\nup\n")
    wait_for(lambda: all(path.exists() and path.stat().st_size == size for path in map(node.folder.log, (0, 1))))
    assert high_water(node.pid) < 60
    node.ask(kill=True)
    assert node.to_the_end() == NodeEnded(0)
    assert [node.text(rank)[-3:] for rank in (0, 1)] == ["up\n", "up\n"]
    if flood == "many lines":  # of which the kernel knows how many it has not seen
        skipped = [sum(event.skipped for event in node.all(Output) if event.rank == rank) for rank in (0, 1)]
        assert [node.text(rank).count("\n") + skipped[rank] for rank in (0, 1)] == [200_002] * 2


@contextmanager
def busy_seconds(pid: int):
    """The processor time that a process spends in the block, in a list."""
    spent = []

    def used() -> float:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    begun = used()
    yield spent
    spent.append(used() - begun)


def test_a_kernel_that_does_not_read_costs_the_supervisor_no_time(supervise):
    """With more output than may wait for a kernel that reads none, the supervisor sleeps."""
    # Such bytes become six characters each on the wire, so that the channel's backlog is soon full.
    flood = "import os, time\nfor _ in range(60): os.write(1, b'\\xff' * 65536); time.sleep(0.02)\n"
    node = supervise(flood + SAY_AND_WAIT, flood + SAY_AND_WAIT)
    size = 60 * 65536 + len("up\n")
    wait_for(lambda: all(path.exists() and path.stat().st_size == size for path in map(node.folder.log, (0, 1))))
    with busy_seconds(node.pid) as busy:
        end = time.monotonic() + 0.5
        wait_for(lambda: time.monotonic() > end)
    assert busy[0] < 0.3
    node.ask(kill=True)
    node.to_the_end()


FLOODED = """
import re, sys
from air_magic import distributed

def high_water():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) // 1024

def flood():
    for number in range(200_000):
        print(number)
    for _ in range(50):
        print(end="x" * 1_000_000, flush=True)
    return "done"

flooded = distributed(num_accelerators=2, warm=False)(flood)
assert distributed(num_accelerators=1, warm=False)(lambda: 5).distributed() == [5]
before = high_water()
assert flooded.distributed() == ["done", "done"]
print(high_water() - before, [len(flooded.last_run.logs(rank)) for rank in (0, 1)], file=sys.stderr)
"""


def test_a_flood_costs_the_calling_process_little():
    """The logs are complete, what is shown is short, and memory is bounded."""
    done = subprocess.run([sys.executable, "-c", FLOODED], capture_output=True, text=True, timeout=100)
    more, logs = done.stderr.splitlines()[-1].split(maxsplit=1)
    assert logs == str([1_288_890 + 50_000_000] * 2)
    assert int(more) < 50
    assert len(done.stdout) < 1_000_000
