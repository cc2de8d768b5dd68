"""How a supervisor brings a run's processes into being: as fresh interpreters, or as forks of itself."""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from .processes import die_with_parent


class Starter(Protocol):
    """Starts processes that lead a session of their own, with /dev/null as stdin."""

    parent: str
    """What the supervisor's parent process is called."""

    def rank(self, spec: Mapping[str, Any], rank: int, env: Mapping[str, str], output: int) -> int:
        """Starts a rank whose stdout and stderr are the descriptor ``output``; its pid. OSError if it cannot be."""

    def store(self, spec: Mapping[str, Any], listener: int, log: Path) -> int:
        """Starts the process that serves the store on the descriptor ``listener``; its pid."""


class Fresh:
    """Fresh interpreters: a cold start."""

    parent = "warden process"

    def rank(self, spec: Mapping[str, Any], rank: int, env: Mapping[str, str], output: int) -> int:
        """See `Starter`."""
        argv = [*spec["argv"], spec["run_dir"], str(rank), str(os.getpid())]
        return self._start(spec, argv, env, output, ())

    def store(self, spec: Mapping[str, Any], listener: int, log: Path) -> int:
        """See `Starter`."""
        argv = [*spec["store_argv"], spec["run_dir"], str(listener), str(os.getpid())]
        env = {**spec["env"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as file:
            return self._start(spec, argv, env, file.fileno(), (listener,))

    def _start(
        self, spec: Mapping[str, Any], argv: list[str], env: Mapping[str, str], output: int, keep: tuple[int, ...]
    ) -> int:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=spec["cwd"],
            umask=spec["umask"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=keep,
            start_new_session=True,  # an interrupt of the notebook signals the kernel's whole group
        )
        process.returncode = 0  # the supervisor waits for every child, adopted ones too; Popen must not
        return process.pid


class Forked:
    """Forks of a supervisor that was itself forked from the forkserver: a warm start.

    What a fresh interpreter would have of its own, a fork gets anew: descriptors, signals, variables, random
    generators, the number of threads. Everything else is the work of `air_magic.rank`, as in a cold start.

    Args:
        keep: descriptors that the imported libraries have opened.
        filters: warning filters that they have added.
    """

    parent = "forkserver"

    def __init__(self, keep: frozenset[int], filters: Sequence[Any]) -> None:
        self._keep = keep
        self._filters = filters

    def rank(self, spec: Mapping[str, Any], rank: int, env: Mapping[str, str], output: int) -> int:
        """See `Starter`."""
        from . import rank as life

        os.stat(spec["cwd"])  # what a fresh interpreter's start would raise
        live = lambda parent: life.main(spec["run_dir"], rank, parent, self._filters)  # noqa: E731 - what the child does
        return self._fork(live, spec, env, output, frozenset())

    def store(self, spec: Mapping[str, Any], listener: int, log: Path) -> int:
        """See `Starter`."""
        from . import store

        with log.open("wb") as file:
            return self._fork(lambda _: store.serve(listener), spec, spec["env"], file.fileno(), frozenset({listener}))

    def _fork(
        self,
        live: Callable[[int], object],
        spec: Mapping[str, Any],
        env: Mapping[str, str],
        output: int,
        keep: frozenset[int],
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(live, parent, spec, env, output, self._keep | keep)
        return pid


def _become(
    live: Callable[[int], object],
    parent: int,
    spec: Mapping[str, Any],
    env: Mapping[str, str],
    output: int,
    keep: frozenset[int],
) -> NoReturn:
    """In the child: takes on what is a fresh process's own, then lives."""
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (output, 1), (output, 2)):
            os.dup2(here, there)
        _close_all_but(keep)
        # Made when the forkserver's were /dev/null, the old ones take a pipe for something that can seek.
        sys.stdout = sys.__stdout__ = _stream(1, "<stdout>")  # type: ignore[misc] # final for users, not for us
        sys.stderr = sys.__stderr__ = _stream(2, "<stderr>")  # type: ignore[misc] # ditto
        os.environ.clear()
        os.environ.update(env)
        os.chdir(spec["cwd"])
        os.umask(spec["umask"])
        importlib.invalidate_caches()  # a module may have been written since the forkserver looked
        _reseed()
        _set_threads(env.get("OMP_NUM_THREADS", ""))
        gc.enable()
        live(parent)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # into the rank's log
    finally:
        sys.stderr.flush()
        os._exit(code)


def _stream(descriptor: int, name: str) -> io.TextIOWrapper:
    """A standard stream as the interpreter makes it for a pipe."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    raw.name = name
    errors = "strict" if descriptor == 1 else "backslashreplace"
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors, newline="\n", line_buffering=descriptor == 2)


def _close_all_but(keep: frozenset[int]) -> None:
    """Closes the run's descriptors, which the fork has copies of; ``keep`` are the imported libraries' own."""
    first = 3
    for descriptor in sorted(keep):
        if descriptor >= first:
            os.closerange(first, descriptor)
            first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _reseed() -> None:
    """Gives the generators a seed of their own; every fork of every run would draw the same numbers otherwise.

    Python's `random` does so by itself.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_threads(wanted: str) -> None:
    """As many threads as ``OMP_NUM_THREADS`` would have given libraries that read it when they were imported."""
    first = wanted.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(first))
    if int(first) > 1:  # the forkserver's own BLAS has one thread
        import threadpoolctl

        threadpoolctl.threadpool_limits(int(first))
