"""A forked rank finds what a fresh one finds: the table of differences is empty."""

from __future__ import annotations

import os

import pytest

from air_magic import distributed


def state_of_the_interpreter():
    """Everything that a fork could have kept of its parent, as plain data."""
    import atexit
    import gc
    import locale
    import logging
    import multiprocessing
    import os
    import random
    import resource
    import signal
    import subprocess
    import sys
    import threading
    import time
    import warnings

    import numpy
    import torch  # first, for a fresh rank has imported nothing yet
    import torch._dynamo
    import torch.distributed

    # What the launch itself makes different for every run, or every process.
    own = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "AIR_MAGIC_RUN_ID", "AIR_MAGIC_RUN_DIR"}
    own |= {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    main = sys.modules["__main__"]
    return {
        "environ": {name: value for name, value in os.environ.items() if name not in own},
        "getenv in C": {
            name: subprocess.run(["printenv", name], capture_output=True).stdout
            for name in ("OPENBLAS_NUM_THREADS", "RANK")
        },
        "argv": sys.argv,
        "path": sys.path,
        "flags": {
            name: getattr(sys.flags, name)
            for name in dir(sys.flags)
            if name[0] != "_" and name != "count" and name != "index"
        },
        "executable": (sys.executable, sys.prefix),
        "cwd": os.getcwd(),
        "umask": [line for line in open("/proc/self/status") if line.startswith("Umask")],
        "masks": [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "handlers": {
            number.name: str(signal.getsignal(number)).split(" at ")[0]
            for number in signal.valid_signals()
            if isinstance(number, signal.Signals)
        },
        "wakeup": signal.set_wakeup_fd(-1),
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{n}").split(":")[0]
            for n in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{n}")
        ),
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")
        },
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": threading.active_count(),
        "filters": [str(entry) for entry in warnings.filters],
        "logging": (
            logging.root.level,
            logging.root.handlers,
            str(type(logging.lastResort)),
            logging.lastResort.level,
            sorted(
                name for name, logger in logging.root.manager.loggerDict.items() if getattr(logger, "handlers", None)
            ),
        ),
        "locale": (locale.getlocale(), sys.getfilesystemencoding()),
        "streams": [
            (s.name, s.encoding, s.errors, s.line_buffering, s.isatty(), s.fileno()) for s in (sys.stdout, sys.stderr)
        ]
        + [sys.stdin.read()],
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "bad fork": torch.cuda._is_in_bad_fork(),
        "cuda": (torch.cuda.is_available(), torch.cuda.is_initialized()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "recursion": sys.getrecursionlimit(),
        "main": (
            main.__name__,
            getattr(main, "__file__", None),
            main.__spec__,
            sorted(n for n in vars(main) if n[:2] != "__" and n != "state_of_the_interpreter"),
        ),
        "atexit": atexit._ncallbacks(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "hooks": (
            sys.excepthook is sys.__excepthook__,
            sys.gettrace(),
            sys.getprofile(),
            threading.excepthook.__name__,
            len(sys.meta_path),
        ),
        "death signal": __import__("ctypes")
        .CDLL(None)
        .prctl(2, __import__("ctypes").byref(death := __import__("ctypes").c_int()))
        or death.value,
        "default dtype": (
            str(torch.get_default_dtype()),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ),
        "time zone": time.tzname,
        "modules": sorted(
            name
            for name in sys.modules
            if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith("air_magic")
        ),
        "random": (random.random(), float(numpy.random.random()), float(torch.rand(())), torch.initial_seed()),
    }


@pytest.mark.slow
def test_a_warm_rank_finds_what_a_cold_one_finds(monkeypatch, tmp_path):
    """Every entry of the table is equal, but for what is random, and that differs everywhere."""
    monkeypatch.chdir(tmp_path)
    old = os.umask(0o027)
    try:
        warm = distributed(num_accelerators=2, env={"OMP_NUM_THREADS": "2", "MY_OWN": "1"})(
            state_of_the_interpreter
        ).distributed()
        again = distributed(num_accelerators=2, env={"OMP_NUM_THREADS": "2", "MY_OWN": "1"})(
            state_of_the_interpreter
        ).distributed()
        cold = distributed(num_accelerators=2, env={"OMP_NUM_THREADS": "2", "MY_OWN": "1"}, warm=False)(
            state_of_the_interpreter
        ).distributed()
    finally:
        os.umask(old)
    drawn = [found.pop("random") for found in (*warm, *again, *cold)]
    differences = {
        key: (value, cold[rank][key])
        for rank in (0, 1)
        for key, value in warm[rank].items()
        if value != cold[rank][key]
    }
    assert differences == {}
    assert all(len(set(column)) == 6 for column in zip(*drawn, strict=True))
