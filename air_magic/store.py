"""The process that hosts a cold run's TCPStore, on a socket that the supervisor has bound already.

The store outlives every rank, so no rank loses it when another ends. It is a process of its own, so that
the supervisor needs no torch: it is up in milliseconds and answers while torch is still being imported.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from .processes import die_with_parent
from .rundir import RunDir

WHOLE = "AIR_MAGIC_STORE_WHOLE"
"""A variable: this process is the second try and takes the store from the whole of torch."""


def main(run_dir: str, handle: int, parent: int) -> None:
    """Serves the store on the listening socket ``handle`` until killed.

    Args:
        run_dir: the run's folder, which holds the ranks' ``sys.path``, where their torch is.
        handle: descriptor of a socket that listens on the loopback.
        parent: pid of the supervisor, with which this process ends.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = pickle.loads(RunDir.at(run_dir).setup.read_bytes())["path"]
    problems: list[Exception] = []
    # Ranks import torch at the same moment: the store lets them go first. Priority is a thread's own on
    # Linux, and the store's threads come from this one, which keeps its priority.
    _weigh_session(19)
    importer = threading.Thread(target=_import_politely, args=(problems,))
    importer.start()
    importer.join()
    while not _weigh_session(0):  # the kernel takes ten of these a second, of all processes together
        time.sleep(0.02)
    if problems:  # what is half initialised cannot be initialised again
        os.execve(sys.executable, sys.orig_argv, os.environ | {WHOLE: "1"})  # noqa: S606 - no shell is the point

    serve(handle)


def serve(handle: int) -> NoReturn:
    """Serves the store on the listening socket ``handle``, in a process that has torch's C++ half."""
    from torch._C._distributed_c10d import TCPStore

    host, port = socket.socket(fileno=os.dup(handle)).getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
    while store:  # it serves from a thread of its own
        signal.pause()
    raise SystemExit


def _weigh_session(nice: int) -> bool:
    """Sets the weight of this process's session; False if the kernel asks to try again.

    Where Linux groups processes by session it shares the cores out among sessions first, and every rank and
    this process have one each: a thread's own priority counts only within.
    """
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # not this kernel
        return True
    return True


def _import_politely(problems: list[Exception]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    if WHOLE in os.environ or "torch" in sys.modules:
        import torch.distributed  # noqa: F401 - for its side effect: the import

        return
    try:
        _import_core()
    except Exception as error:  # another torch than those it was tried with
        problems.append(error)


def _import_core() -> None:
    """Imports torch's C++ half, under an empty Python half: a sixth of the time, and less than half of the memory."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("no torch")
    torch = ModuleType("torch")
    torch.__path__ = list(spec.submodule_search_locations)
    sys.modules["torch"] = torch
    sys.modules["torch.distributed"] = ModuleType("torch.distributed")
    sys.modules["numpy"] = None  # type: ignore[assignment] # so that an import of it, which torch can do without, fails
    import torch._C

    torch._C._c10d_init()
