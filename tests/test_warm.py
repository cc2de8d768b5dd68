"""The forkserver: when it serves, when it is replaced, when a run goes cold instead, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest

from air_magic import distributed, launch, processes
from air_magic.engines.warm import Wanted, Warmth
from air_magic.events import frame

from .kernel import DEADLINE, wait_until_gone
from .warmth import origin, until_warm


@pytest.fixture
def variable():
    """Sets variables of this process, as a notebook does; they are gone after the test."""
    before = dict(os.environ)
    yield os.environ.__setitem__
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
def test_runs_share_one_forkserver_until_it_is_stale(variable, tmp_path):
    """What is read later is set after the fork; what is read at import, and what was imported, needs a new one."""
    first = until_warm()
    variable("NCCL_DEBUG", "INFO")
    variable("HF_HOME", "/tmp")
    variable("ANYTHING", "1")
    assert until_warm() == first
    (found,) = distributed(num_accelerators=1)(lambda: __import__("os").environ["ANYTHING"]).distributed()
    assert found == "1"
    variable("TORCH_LOGS", "+dynamo")
    second = until_warm()
    assert second != first
    module = tmp_path / "ahead_of_time.py"
    module.write_text("value = 1")
    variable("PYTHONPATH", str(tmp_path))
    variable("AIR_MAGIC_PRELOAD", "ahead_of_time")
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        third = until_warm()
        module.write_text("value = 22")
        os.utime(module, ns=(0, time.time_ns()))
        fourth = until_warm()
        (value,) = distributed(num_accelerators=1)(lambda: __import__("ahead_of_time").value).distributed()
    finally:
        sys.path.remove(str(tmp_path))
    assert (len({first, second, third, fourth}), value) == (4, 22)
    wait_until_gone({first, second, third})


def test_a_cold_run_is_cold():
    """warm=False gives a fresh interpreter also where a forkserver is ready."""
    until_warm()
    assert distributed(num_accelerators=2, warm=False)(origin).distributed() == [None, None]


@pytest.mark.slow
def test_a_killed_forkserver_is_replaced():
    """The next run finds a new one, and nothing of the old is left."""
    first = until_warm()
    os.kill(first, signal.SIGKILL)
    wait_until_gone({first})
    assert until_warm() != first


@pytest.mark.slow
def test_a_run_outlives_the_replacement_of_its_forkserver(variable, tmp_path):
    """A stale forkserver goes only after the runs that came from it."""
    first = until_warm()
    go = tmp_path / "go"

    def wait():
        while not go.exists():
            time.sleep(0.01)
        return "done"

    run = distributed(num_accelerators=2)(wait).submit()
    variable("TORCH_LOGS", "+dynamo")
    assert until_warm() != first
    assert not run.done()
    go.touch()
    assert run.result(DEADLINE) == ["done", "done"]
    wait_until_gone({first})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "threads"),
        ("raise ValueError('no licence')", "could not be imported ahead (ValueError: no licence)"),
    ],
)
def test_a_module_that_cannot_be_imported_ahead_is_named_once(variable, tmp_path, capsys, text, told):
    """Runs go on, warm again without that module, and the user reads once which it is."""
    launch.ENGINE.shutdown()  # which forgets what an earlier forkserver could not import
    (tmp_path / "awkward.py").write_text(text)
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        variable("AIR_MAGIC_PRELOAD", "awkward, json")
        until_warm()
        until_warm()
    finally:
        sys.path.remove(str(tmp_path))
    shown = capsys.readouterr().out
    assert (shown.count("awkward"), told in shown) == (1, True)


def test_the_forkserver_is_pristine():
    """It has one thread, and no descriptor but its socket and its wake-up pipe, also after runs from many threads."""
    pid = until_warm()
    threads = [threading.Thread(target=distributed(num_accelerators=2)(origin).distributed) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    kinds = sorted(os.readlink(f"/proc/{pid}/fd/{number}").split(":")[0] for number in os.listdir(f"/proc/{pid}/fd"))
    assert kinds == ["/dev/null", "/dev/null", "/dev/null", "pipe", "pipe", "socket"]
    assert len(os.listdir(f"/proc/{pid}/task")) == 1
    assert [p.pid for p in processes.descendants(pid) if not p.zombie] == []
    assert until_warm() == pid


@pytest.mark.slow
def test_shutdown_ends_the_forkserver():
    """Nothing is left of it, and a later run has a new one."""
    pid = until_warm()
    launch.ENGINE.shutdown()
    wait_until_gone({pid})
    assert until_warm() != pid


def test_a_kernel_has_its_forkserver_in_the_background(kernel):
    """It is started by %load_ext, which does not wait for it, and dies with the kernel."""
    servers = set()
    end = time.monotonic() + DEADLINE
    while not servers and time.monotonic() < end:
        servers = {p.pid for p in processes.descendants(kernel.pid) if "forkserver" in _command(p.pid)}
    assert len(servers) == 1
    everything = kernel.pids()
    os.kill(kernel.pid, signal.SIGKILL)
    wait_until_gone(everything)


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def test_another_interpreter_or_other_flags_need_another_forkserver():
    """What is imported there is not what would be imported here; the same wish twice starts nothing."""
    started = []
    warmth = Warmth(lambda theirs: started.append(theirs.dup()))
    for argv in (["python"], ["python"], ["python", "-O"], ["python3.13"]):
        warmth.begin(Wanted(argv, [], {}, "/"))
    warmth.end()
    for end in started:
        end.close()
    assert len(started) == 3


def test_a_forkserver_that_was_ready_long_ago_does_not_count_as_slow():
    """How long one needs is what it says itself, not when somebody asked; else the next one would not be waited for."""
    now, ends = [100.0], []
    warmth = Warmth(lambda theirs: ends.append(theirs.dup()), clock=lambda: now[0])
    wanted, channel = Wanted(["python"], [], {}, "/"), socket.socketpair()
    warmth.begin(wanted)
    ends[0].sendall(frame({"failed": {}, "unfit": "", "read": [], "files": {}, "ready_at": 102.0}))
    ends[0].sendall(frame({"refused": "no"}))
    now[0] = 1000.0
    assert warmth.lend(wanted, channel[0]) == "no"
    warmth.end()
    warmth.begin(wanted)
    ends[1].sendall(frame({"failed": {}, "unfit": "", "read": [], "files": {}, "ready_at": 1001.0}))
    ends[1].sendall(frame({"refused": ""}))
    assert warmth.lend(wanted, channel[0]) == ""
    warmth.end()
    for end in (*ends, *channel):
        end.close()


@pytest.mark.slow
def test_what_forking_breaks_elsewhere_works_in_a_warm_rank(tmp_path):
    """torch.compile, worker processes of every kind, event loops, subprocesses, threads, drawing: as in any process."""
    until_warm()

    @distributed(num_accelerators=2)
    def work(folder):
        import asyncio
        import concurrent.futures
        import os
        import subprocess

        import matplotlib as mpl
        import torch
        import torch.multiprocessing as mp

        mpl.use("Agg")
        from matplotlib import pyplot

        def double(x):
            return x * 2

        async def soon():
            await asyncio.sleep(0)
            return (await asyncio.to_thread(double, 2)) + 1

        rank = os.environ["RANK"]
        pyplot.plot([1, 2])
        pyplot.savefig(f"{folder}/{rank}.png")
        with mp.get_context("fork").Pool(2) as pool:
            pooled = pool.map(double, [1, 2])
        with concurrent.futures.ProcessPoolExecutor(1, mp.get_context("spawn")) as spawned:
            answer = spawned.submit(double, 21).result()
        big = torch.ones(1500, 1500)
        return (
            torch.compile(double)(torch.ones(2)).tolist(),
            pooled,
            answer,
            asyncio.run(soon()),
            subprocess.run(["echo", rank], capture_output=True, text=True).stdout,
            (big @ big).max().item(),  # OpenMP in a fork hangs where its parent has computed anything
        )

    expected = [([2.0, 2.0], [2, 4], 42, 5, f"{rank}\n", 1500.0) for rank in (0, 1)]
    assert work.distributed(str(tmp_path)) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png"]


@pytest.mark.slow
def test_five_hundred_warm_runs_leave_nothing_behind():
    """Descriptors, threads, processes and memory of this process stay what they were."""
    go = distributed(num_accelerators=2)(lambda: None)
    until_warm()

    def measure():
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        living = [process for process in processes.descendants(os.getpid()) if not process.zombie]
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(living), pages

    for _ in range(50):
        go.distributed()
    before = measure()
    for _ in range(450):
        go.distributed()
    after = measure()
    assert after[:3] == before[:3]
    assert (after[3] - before[3]) * 4096 < 16 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("warm", "times"), [(True, 200), (False, 50)], ids=["warm", "cold"])
def test_the_plain_shape_of_a_training_never_hangs_at_its_end(warm, times):
    """init, DDP, steps, destroy, return: on torch 2.13 with gloo one in three such launches hung or aborted."""

    @distributed(num_accelerators=2, warm=warm, timeout=60)
    def train():
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        dist.init_process_group("gloo")
        model = DDP(torch.nn.Linear(10, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 10)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
        return dist.is_initialized()

    for _ in range(times):
        assert train.distributed() == [False, False]
        notes = train.last_run.snapshot()["notes"]
        assert [note for note in notes if "no GPU" not in note] == []
