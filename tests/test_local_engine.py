"""The local engine: one warden for a kernel, whoever asks for it, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from air_magic.engines.local import LocalEngine
from air_magic.events import NodeEnded, NodeStarted

from .test_supervisor import HEAR, PAUSE, SAY_AND_WAIT
from .waiting import below, wait_for


@pytest.fixture
def engine():
    """An engine of its own; at the end its warden and all below are gone."""
    before = below()
    made = LocalEngine()
    yield made
    made.shutdown()
    assert below() == before


def spec_in(folder, program="pass"):
    """A supervisor's orders for one rank that is a small program."""
    return {
        "run_id": "1",
        "node": 0,
        "run_dir": str(folder),
        "cwd": "/",
        "env": dict(os.environ),
        "ranks": [{"rank": 0, "env": {"RANK": "0"}}],
        "argv": [sys.executable, "-ISc", f"{HEAR}\n{program}"],
        "store_argv": PAUSE,
        "umask": 0o022,
        "log_cap": 1 << 20,
    }


def test_launches_from_several_threads_share_one_warden(engine, tmp_path):
    """Whoever comes first starts it; nobody's runs end with another's warden."""
    folders = [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        folder.mkdir()
    events = [[] for _ in folders]
    before = below()
    barrier = threading.Barrier(len(folders))

    def launch(folder, heard):
        barrier.wait(30)
        engine.start(spec_in(folder), heard.append)

    with ThreadPoolExecutor(len(folders)) as pool:
        list(pool.map(launch, folders, events))
    wait_for(lambda: all(heard and isinstance(heard[-1], NodeEnded) for heard in events))
    assert len(below() - before) == 1
    assert [heard[-1] for heard in events] == [NodeEnded(0)] * len(folders)


def test_the_last_word_comes_when_the_supervisor_is_gone(engine, tmp_path):
    """A caller that hears of the end finds no process of the run."""
    left = []

    def deliver(event):
        if isinstance(event, NodeEnded):
            left.append(len(below() - before))

    before = below()
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine.start(spec_in(folder), deliver)
        wait_for(lambda number=number: len(left) > number)
    assert left == [1] * 10, "the warden alone"


def test_shutdown_ends_runs_though_a_child_of_the_kernel_holds_the_sockets(engine, tmp_path):
    """A forked child has copies of every descriptor; it keeps nothing alive."""
    heard = []
    before = below()
    engine.start(spec_in(tmp_path, SAY_AND_WAIT), heard.append)
    wait_for(lambda: heard and isinstance(heard[0], NodeStarted))
    release, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        os.read(release, 1)
        os._exit(0)
    try:
        engine.shutdown()
        assert below() - before == {child}
    finally:
        os.close(hold)
        os.close(release)
        os.waitpid(child, 0)


def test_a_forked_child_of_the_kernel_has_a_warden_of_its_own(engine, tmp_path):
    """The copy of the engine in the child does not speak to the parent's warden."""
    heard = []
    folders = [tmp_path / "parent", tmp_path / "child"]
    for folder in folders:
        folder.mkdir()
    engine.start(spec_in(folders[0]), heard.append)
    wait_for(lambda: heard and isinstance(heard[-1], NodeEnded))
    child = os.fork()
    if child == 0:
        try:
            mine = []
            engine.start(spec_in(folders[1]), mine.append)
            wait_for(lambda: mine and isinstance(mine[-1], NodeEnded))
            assert len(below()) == 1
            engine.shutdown()
            assert not below()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.sweep(deadline=10.0)


def test_shutdown_of_an_engine_that_never_started_anything_does_nothing(engine):
    """And a second shutdown neither."""
    engine.shutdown()
    engine.shutdown()


@pytest.mark.slow
def test_an_interrupt_at_any_moment_of_a_launch_leaves_nothing():
    """Before, while and after the ranks are started; the interrupt is told when they are gone."""
    command = [sys.executable, "-m", "tests.interrupting", "60", "0.06"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=200)
    told = [line for line in done.stderr.splitlines() if " left after round " in line]
    assert told == [f"[] left after round {number}" for number in range(60)]
