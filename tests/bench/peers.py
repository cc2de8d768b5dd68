"""The launchers that are measured; each measurement is a process of its own, which calls its launcher a few times.

``python -m tests.bench.peers LAUNCHER BODY RANKS CALLS FOLDER`` is that process; it leaves ``FOLDER/measured.json``.
What a launcher needs before it can be called (torch imported, a kernel started) is `ready_after`, not in the times.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bodies

Launch = Callable[[str, int, str], "float | None"]
"""Runs (body, ranks, folder) to its end; may return when the last rank's line was visible to the user."""


@dataclass(frozen=True)
class Launcher:
    """One contender."""

    title: str
    ready: Callable[[int], contextlib.AbstractContextManager[Launch]]
    """Prepares, for so many ranks, what a user of it has before the call."""
    bodies: tuple[str, ...] = ("hello", "gloo")
    needs: str = ""
    """The package that it comes with."""
    note: str = ""
    """What a reader of the table must know."""
    again: bool = True
    """Whether a later call of the same process can differ from the first."""


@contextlib.contextmanager
def interpreters(_ranks: int) -> Iterator[Launch]:
    """No launcher: the floor under every one that starts fresh interpreters."""
    code = {"hello": "", "imports": "import torch; "}
    say = "import time, sys; now = time.time(); print('hello', flush=True); open(sys.argv[1], 'w').write(repr(now))"

    def launch(body: str, ranks: int, folder: str) -> None:
        started = [
            subprocess.Popen([sys.executable, "-c", code[body] + say, f"{folder}/rank-{rank}"]) for rank in range(ranks)
        ]
        assert [process.wait() for process in started] == [0] * ranks

    yield launch


@contextlib.contextmanager
def function(_ranks: int) -> Iterator[Launch]:
    """``distributed(num_accelerators=N)(f).distributed()``, from a script."""
    from air_magic import distributed

    def launch(body: str, ranks: int, folder: str) -> None:
        distributed(num_accelerators=ranks)(bodies.of_rank).distributed(body, folder)

    yield launch


@contextlib.contextmanager
def warm(_ranks: int) -> Iterator[Launch]:
    """The same once the forkserver is ready, which in a notebook ``%load_ext`` has started."""
    from tests.warmth import until_warm

    os.environ["AIR_MAGIC_WARM"] = "1"
    until_warm()
    with function(_ranks) as launch:
        yield launch


@contextlib.contextmanager
def cell(_ranks: int) -> Iterator[Launch]:
    """``%%distributed`` in a real kernel, by the clock of its front-end."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute_interactive("%load_ext air_magic", timeout=60)

        def launch(body: str, ranks: int, folder: str) -> float | None:
            missing, visible = {str(rank) for rank in range(ranks)}, None

            def show(message: dict[str, Any]) -> None:
                nonlocal visible
                missing.difference_update(re.findall(r"hello from rank (\d+)", str(message["content"].get("text", ""))))
                if visible is None and not missing:
                    visible = time.time()

            source = f"%%distributed -n {ranks}\n{bodies.as_cell(body, folder)}"
            reply = client.execute_interactive(source, timeout=600, output_hook=show)
            assert reply["content"]["status"] == "ok", reply["content"]
            return visible

        yield launch
    finally:
        client.stop_channels()
        with contextlib.suppress(queue.Empty):
            manager.shutdown_kernel()


@contextlib.contextmanager
def torchrun(_ranks: int) -> Iterator[Launch]:
    """``torchrun --nproc-per-node N script.py``, from a shell."""

    def launch(body: str, ranks: int, folder: str) -> None:
        port = str(free_port())  # its own default is one port for everybody
        agent = [sys.executable, "-m", "torch.distributed.run", "--master-port", port, "--nproc-per-node", str(ranks)]
        subprocess.run([*agent, "-m", "tests.bench.bodies", body, folder], check=True)

    yield launch


@contextlib.contextmanager
def spawn(_ranks: int) -> Iterator[Launch]:
    """``torch.multiprocessing.spawn`` of a function in a module."""
    import torch.multiprocessing

    def launch(body: str, ranks: int, folder: str) -> None:
        args = (ranks, free_port(), body, folder)
        torch.multiprocessing.spawn(bodies.of_local_rank, args, nprocs=ranks)

    yield launch


@contextlib.contextmanager
def accelerate(_ranks: int) -> Iterator[Launch]:
    """Accelerate's ``notebook_launcher``."""
    import accelerate as package

    def launch(body: str, ranks: int, folder: str) -> None:
        package.notebook_launcher(bodies.of_rank, (body, folder), num_processes=ranks, use_port=str(free_port()))

    yield launch


@contextlib.contextmanager
def torchrunx(_ranks: int) -> Iterator[Launch]:
    """Torchrunx' ``Launcher`` on this host."""
    import torchrunx as package

    def launch(body: str, ranks: int, folder: str) -> None:
        backend = "gloo" if body == "gloo" else None
        package.Launcher(hostnames=["localhost"], workers_per_host=ranks, backend=backend).run(
            bodies.of_rank, body, folder
        )

    yield launch


@contextlib.contextmanager
def ipyparallel(_ranks: int) -> Iterator[Launch]:
    """An ipyparallel ``Cluster``, started by the first call and used again by the later ones."""
    import ipyparallel as package

    with contextlib.ExitStack() as started:
        engines: list[Any] = []

        def launch(body: str, ranks: int, folder: str) -> None:
            if not engines:
                client = started.enter_context(package.Cluster(n=ranks))
                engines.extend(client[rank] for rank in range(ranks))
            port = free_port()
            answers = [
                engine.apply_async(bodies.of_local_rank, rank, ranks, port, body, folder)
                for rank, engine in enumerate(engines)
            ]
            for answer in answers:
                answer.get()

        yield launch


LAUNCHERS = {
    "floor": Launcher(
        "N × python", interpreters, ("hello", "imports"), note="no launcher: N interpreters at once", again=False
    ),
    "warm": Launcher(
        "air_magic, warm",
        warm,
        ("hello", "imports", "gloo", "step"),
        note="once the forkserver is ready; until then a run starts cold",
    ),
    "ours": Launcher(
        "air_magic, cold",
        function,
        ("hello", "imports", "gloo", "step"),
        note="fresh interpreters; first: its warden starts too",
    ),
    "ours-cell": Launcher(
        "air_magic, cold, cell", cell, needs="jupyter_client", note="in a real kernel, fresh interpreters"
    ),
    "torchrun": Launcher("torchrun", torchrun, ("hello", "imports", "gloo", "step"), note="from a shell", again=False),
    "spawn": Launcher(
        "torch.multiprocessing.spawn", spawn, note="torch was imported before the call; the function lives in a module"
    ),
    "accelerate": Launcher(
        "accelerate notebook_launcher",
        accelerate,
        needs="accelerate",
        note="torch was imported before the call; forks the calling process",
    ),
    "torchrunx": Launcher("torchrunx", torchrunx, needs="torchrunx", note="torch was imported before the call"),
    "ipyparallel": Launcher(
        "ipyparallel",
        ipyparallel,
        needs="ipyparallel",
        note="first: with the cluster's start; later: on its warm engines",
    ),
}


def missing(launcher: Launcher) -> bool:
    """Whether the package that it needs is not installed."""
    return bool(launcher.needs) and importlib.util.find_spec(launcher.needs) is None


def free_port() -> int:
    """A port as users of these launchers choose one; somebody else may take it in between."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(name: str, body: str, ranks: int, calls: int, folder: Path) -> dict[str, Any]:
    """Calls the launcher; seconds from each call on."""
    began = time.time()
    with LAUNCHERS[name].ready(ranks) as launch:
        ready_after = time.time() - began
        measured = []
        for number in range(calls):
            place = folder / f"call-{number}"
            place.mkdir()
            called = time.time()
            visible = launch(body, ranks, str(place))
            returned = time.time()
            lines = bodies.stamps(place)
            assert len(lines) == ranks, f"{len(lines)} of {ranks} ranks have run"
            times = {"line": max(lines) - called, "return": returned - called}
            measured.append(times | ({"visible": visible - called} if visible is not None else {}))
    return {"ready_after": ready_after, "calls": measured}


if __name__ == "__main__":
    _name, _body, _ranks, _calls, _folder = sys.argv[1:]
    os.environ.pop("OMP_NUM_THREADS", None)
    _measured = measure(_name, _body, int(_ranks), int(_calls), Path(_folder))
    Path(_folder, "measured.json").write_text(json.dumps(_measured))
