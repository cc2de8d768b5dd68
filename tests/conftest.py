"""Every test leaves the machine as it found it: no process, descriptor, shared memory or variable stays."""

from __future__ import annotations

import os
import threading
import time

import pytest
from jupyter_core.utils import ensure_event_loop

from air_magic import launch, processes

from . import warmth
from .kernel import Kernel, shared_memory, wait_until_gone
from .waiting import described, of_runs

ensure_event_loop()  # jupyter_client makes one at the first kernel, for the whole process: its sockets are no test's


def _open_files() -> set[str]:
    """Pipes and sockets of this process, but for the engine's own, which last as long as it."""
    engine = launch.ENGINE
    serving = engine._warmth._serving
    own = {control.fileno() for control in (engine._control, serving and serving.control) if control}
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if int(entry) not in own and (target.startswith(("pipe:", "socket:")) or "air_magic" in target):
            found.add(f"{entry} {target}")
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session", autouse=True)
def engine_ends():
    """When all tests are done, the engine leaves nothing either."""
    yield
    launch.ENGINE.shutdown()
    wait_until_gone({process.pid for process in processes.descendants(os.getpid()) if not process.zombie})


@pytest.fixture(autouse=True)
def runs_root(tmp_path_factory):
    """Run folders of a test lie below its own temporary folder."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIR_MAGIC_RUNS", str(root))
        yield root


@pytest.fixture(autouse=True)
def nothing_left(request, runs_root):
    """After the test, what was started in this process is gone."""
    before = (_open_files(), shared_memory(runs_root), of_runs(), set(threading.enumerate()))
    environment = _environment()
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("air_magic"):
            thread.join(10)
    kernels = [k for name in ("kernel", "kernel_of_module") if (k := request.node.funcargs.get(name))]
    # Only processes that are on their way out may take a moment.
    end = time.monotonic() + 5
    while of_runs() - before[2] - {pid for k in kernels for pid in k.pids()} and time.monotonic() < end:
        time.sleep(0.005)
    after = (_open_files(), shared_memory(runs_root), of_runs(), set(threading.enumerate()))
    names = ("descriptors", "shared memory", "processes", "threads")
    left = {name: now - was for name, was, now in zip(names, before, after, strict=True) if now - was}
    left["processes"] = left.get("processes", set()) - {pid for k in kernels for pid in k.pids()}
    left["processes"] = {described(pid) for pid in left["processes"]}
    if kernels:  # a kernel's client holds sockets and threads of its own until its fixture ends
        left.pop("descriptors", None)
        left.pop("threads", None)
    assert not any(left.values()), left
    assert _environment() == environment


@pytest.fixture(params=["warm", pytest.param("cold", marks=pytest.mark.slow)], scope="module")
def start(request):
    """How runs start in this process and in its kernels: a module that uses this is tested both ways."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cold":
            patch.setenv("AIR_MAGIC_WARM", "0")
        else:
            warmth.until_warm()
        yield request.param


@pytest.fixture
def kernel(request, tmp_path, runs_root):
    """A real kernel of its own, driven as a front-end would; it has loaded the extension."""
    with Kernel(tmp_path, runs_root) as started:
        _load(request, started)
        yield started


@pytest.fixture(scope="module")
def kernel_of_module(request, start, tmp_path_factory):
    """One kernel for a module's tests that do not hurt it, for each way to start."""
    with Kernel(tmp_path_factory.mktemp("notebook"), tmp_path_factory.mktemp("runs")) as started:
        _load(request, started)
        yield started


def _load(request, kernel):
    kernel.run("%load_ext air_magic")
    if "start" in request.fixturenames and request.getfixturevalue("start") == "warm":
        kernel.run(
            f"exec(open({warmth.__file__!r}).read(), _w := {{'__name__': '__main__'}}); _w['until_warm'](); del _w"
        )
