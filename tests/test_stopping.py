"""Stopping, in every way and in every phase, on the real process table: nothing of a run is ever left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from air_magic import RankFailed, RunCancelled, RunTimedOut, distributed
from air_magic.result import Ending

from .kernel import wait_until_gone
from .resting import rest
from .waiting import below, of_runs, parent_of, ranks_of, wait_for, wait_for_files, warden_of

pytestmark = pytest.mark.usefixtures("start")

SLOW = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("start")

ROOT = Path(__file__).parents[1]


def submit(function, *args, ranks=2, **kwargs):
    """Starts the function on ranks; the run."""
    return distributed(num_accelerators=ranks)(function).submit(*args, **kwargs)


def test_cancel_lets_the_ranks_tidy_up_and_leaves_no_process(tmp_path):
    """SIGINT runs the ranks' finally blocks; what they had started goes with them, and each rank has its own session."""
    run = submit(rest, tmp_path)
    wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
    ranks = ranks_of(run)
    assert len(of_runs()) >= 1 + 2 * 5  # a supervisor, and of each rank: itself, three processes, a daemon
    family = [*ranks, supervisor := parent_of(ranks[0]), parent_of(supervisor)]
    assert [os.getsid(pid) for pid in family] == family
    assert run.cancel() is True
    with pytest.raises(RunCancelled) as caught:
        run.result()
    assert of_runs() == set()
    assert (tmp_path / "tidy-0").exists()
    assert (tmp_path / "tidy-1").exists()
    assert caught.value.run is run
    assert re.sub(r"[\d.]+ s", "N s", str(caught.value)) == (
        f"rest was cancelled after N s; no process of it is left\nFull logs: {run.log_dir}"
    )
    assert (run.status, run.cancel()) == ("cancelled", False)
    assert [(o.ending, o.stopped) for o in (run.outcomes[0], run.outcomes[1])] == [(Ending.RAISED, True)] * 2


def test_a_second_cancel_kills_ranks_that_ignore_every_signal(tmp_path):
    """The first request asks, the second one waits for nobody."""
    run = submit(rest, tmp_path, obey=False)
    wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
    run.cancel()
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result(30)
    assert of_runs() == set()
    assert [run.outcomes[rank].returncode for rank in (0, 1)] == [-signal.SIGKILL] * 2


@SLOW
def test_one_cancel_is_enough_for_ranks_that_ignore_every_signal(tmp_path):
    """The ladder goes from SIGINT over SIGTERM to SIGKILL by itself."""
    run = submit(rest, tmp_path, obey=False)
    wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result(30)
    assert of_runs() == set()
    assert [run.outcomes[rank].returncode for rank in (0, 1)] == [-signal.SIGKILL] * 2


@SLOW
def test_a_failure_ends_ranks_that_ignore_every_signal(tmp_path):
    """The failing rank's own exception comes back within ten seconds whatever the others do."""

    def work(folder):
        if os.environ["RANK"] == "0":
            rest(folder, obey=False)
        while not (folder / "up-0").exists():
            time.sleep(0.01)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as caught:
        distributed(num_accelerators=2)(work).distributed(tmp_path)
    assert time.time() - caught.value.__cause__.failure.time_ns / 1e9 < 12  # the budget is 10
    assert of_runs() == set()


def test_the_timeout_stops_the_run_and_says_how_to_have_a_longer_one(tmp_path):
    """A run that outlives its timeout ends as RunTimedOut, a TimeoutError."""

    def work():
        time.sleep(1000)

    wrapped = distributed(num_accelerators=2, timeout=1.5)(work)
    with pytest.raises(RunTimedOut) as caught:
        wrapped.distributed()
    assert isinstance(caught.value, TimeoutError)
    assert str(caught.value) == (
        "work was stopped after its timeout of 1.5 s; pass a longer one, or timeout=None\n"
        f"Full logs: {wrapped.last_run.log_dir}"
    )
    assert of_runs() == set()


def test_waiting_for_a_result_with_a_timeout_leaves_the_run_alone(tmp_path):
    """result(timeout) gives up waiting, not the run."""

    def work(flag):
        while not flag.exists():
            time.sleep(0.01)
        return "value"

    run = submit(work, tmp_path / "go", ranks=1)
    with pytest.raises(TimeoutError, match=r"work has not ended within 0\.01 s; it goes on"):
        run.result(0.01)
    (tmp_path / "go").touch()
    assert run.result() == ["value"]


@pytest.mark.parametrize("moment", ["at once", "when the ranks' processes exist", "while they load"])
def test_a_run_can_be_cancelled_while_it_starts(tmp_path, moment):
    """A request that comes before the user's code runs is heard, too."""

    class Slow:
        def __reduce__(self):
            return loading, (tmp_path / "loading",)

    def loading(flag):
        flag.touch()
        time.sleep(1000)

    def work(_):
        (tmp_path / "worked").touch()

    run = submit(work, Slow() if moment == "while they load" else None)
    if moment == "when the ranks' processes exist":
        ranks_of(run)
    elif moment == "while they load":
        wait_for_files(tmp_path / "loading")
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result()
    assert run.outcomes.keys() == {0, 1}
    assert of_runs() == set()
    assert not (tmp_path / "worked").exists() or moment != "while they load"


def test_a_run_can_be_cancelled_while_its_values_are_written(tmp_path):
    """The values are given up, and nothing of them stays in shared memory."""

    class Slow:
        def __reduce__(self):
            (tmp_path / f"writing-{os.environ['RANK']}").touch()
            time.sleep(1000)

    def work():
        return Slow()

    run = submit(work)
    wait_for_files(tmp_path / "writing-0", tmp_path / "writing-1")
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result()
    assert of_runs() == set()


def test_a_stopped_rank_hears_a_cancel(tmp_path):
    """A rank under SIGSTOP is woken, so that it can tidy up."""

    def work(folder):
        try:
            (folder / "up").touch()
            time.sleep(1000)
        finally:
            (folder / "tidy").touch()

    run = submit(work, tmp_path, ranks=1)
    wait_for_files(tmp_path / "up")
    os.kill(ranks_of(run)[0], signal.SIGSTOP)
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result()
    assert (tmp_path / "tidy").exists()


def test_a_with_block_that_ends_by_an_exception_cancels_its_run(tmp_path):
    """The block's exception goes on when no process of the run is left; without one the run goes on."""

    def work():
        time.sleep(1000)

    with pytest.raises(LookupError), submit(work) as run:
        raise LookupError
    assert (run.status, of_runs()) == ("cancelled", set())
    with submit(lambda: 5, ranks=1) as run:
        pass
    assert run.result() == [5]


def test_a_run_whose_supervisor_is_killed_says_so_and_leaves_nothing(tmp_path):
    """The warden clears away what the supervisor owned, and the next run is served as ever."""
    run = submit(rest, tmp_path, obey=False)
    wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
    os.kill(parent_of(ranks_of(run)[0]), signal.SIGKILL)
    with pytest.raises(RankFailed) as caught:
        run.result()
    assert str(caught.value) == (
        "rank 0 of 2 was lost: the run's supervisor process was killed\n"
        f"1 other rank failed too.\nFull log: {run.log_dir}/rank-0.log"
    )
    assert of_runs() == set()
    assert submit(lambda: 5, ranks=1).result() == [5]
    assert of_runs() == set()


def test_a_run_whose_warden_is_killed_says_so_and_leaves_nothing(tmp_path):
    """The supervisor ends the run by itself; the next run has a new warden."""
    run = submit(rest, tmp_path)
    wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
    started, warden = below(), warden_of(run)
    os.kill(warden, signal.SIGKILL)
    with pytest.raises(RankFailed) as caught:
        run.result()
    wait_until_gone(started, 4)
    assert (tmp_path / "tidy-0").exists()
    assert re.sub("warden process|forkserver", "<parent>", str(caught.value)) == (  # which goes with the warden
        "rank 0 of 2 was lost: air_magic's <parent> was killed\n"
        f"1 other rank failed too.\nFull log: {run.log_dir}/rank-0.log"
    )
    assert submit(lambda: 5, ranks=1).result() == [5]
    assert of_runs() == set()
    assert warden not in below()


def test_of_two_runs_at_once_the_failing_one_leaves_the_other_alone(tmp_path):
    """Two submits in one process share a warden and nothing else."""

    def waits(flag):
        (flag.parent / f"up-{os.environ['RANK']}").touch()
        while not flag.exists():
            time.sleep(0.01)
        return 2

    def fails():
        raise ValueError("bad")

    good = submit(waits, tmp_path / "go")
    wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
    bad = submit(fails)
    with pytest.raises(ValueError, match="bad"):
        bad.result()
    assert not good.done()
    (tmp_path / "go").touch()
    assert good.result() == [2, 2]


def test_ranks_blocked_in_torch_are_stopped_with_their_workers(tmp_path):
    """init_process_group, a collective and DataLoader workers of both kinds end with a cancel."""

    class Items:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return index

    def work(folder):
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader

        rank = int(os.environ["RANK"])
        loader = iter(DataLoader(Items(), num_workers=2, persistent_workers=True, multiprocessing_context="fork"))
        next(loader)
        if rank == 2:
            (folder / "up-2").touch()
            dist.init_process_group("gloo")  # the others are in a group of two, so nobody comes
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
        dist.init_process_group("gloo", store=dist.PrefixStore("pair", store), rank=rank, world_size=2)
        (folder / f"up-{rank}").touch()
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        time.sleep(1000)

    run = submit(work, tmp_path, ranks=3)
    wait_for_files(*(tmp_path / f"up-{rank}" for rank in range(3)))
    assert len(of_runs()) >= 1 + 1 + 3 * 3  # supervisor, store, and of each rank: itself and two workers
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result(30)
    assert of_runs() == set()
    assert [run.outcomes[rank].ending for rank in range(3)] == [Ending.RAISED] * 3


@pytest.mark.parametrize("end", ["SIGKILL", pytest.param("SIGTERM", marks=SLOW), pytest.param("sys.exit", marks=SLOW)])
def test_a_script_that_ends_takes_its_runs_with_it(tmp_path, end):
    """A submitted run ends with its process, however that ends, daemons and deaf ranks included."""
    command = [sys.executable, "-m", "tests.resting", str(tmp_path)]
    script = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with script:
        wait_for_files(tmp_path / "up-0", tmp_path / "up-1")
        started = below(script.pid)
        assert len(started) >= 2 + 2 * 5
        if end == "sys.exit":
            script.stdin.write(b"\n")
            script.stdin.flush()
        else:
            script.send_signal(getattr(signal, end))
        wait_until_gone({script.pid}, 10)
        wait_until_gone(started, 4)  # the budget is 2


@SLOW
def test_a_hundred_launches_leave_nothing_growing(runs_root):
    """Descriptors, threads, processes and files are after a hundred runs what they were after twenty-five."""

    def sizes():
        wait_for(lambda: not of_runs())
        import threading

        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir(runs_root))

    wrapped = distributed(num_accelerators=1)(lambda: os.environ["RANK"])
    for _ in range(25):
        assert wrapped.distributed() == ["0"]
    before = sizes()
    for _ in range(75):
        assert wrapped.distributed() == ["0"]
    assert sizes() == before
