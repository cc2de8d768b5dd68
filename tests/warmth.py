"""Whether a rank was forked from a forkserver; for tests, which must know how a run has started."""

from __future__ import annotations

import time

from air_magic import distributed

DEADLINE = 90.0


def origin():
    """In a rank: the pid of the forkserver that it comes from, or None after a cold start."""
    import os

    supervisor = os.getppid()
    parent = int(open(f"/proc/{supervisor}/stat").read().rsplit(")", 1)[1].split()[1])
    return parent if b"engines.forkserver" in open(f"/proc/{parent}/cmdline", "rb").read() else None


def until_warm():
    """Runs until a run comes from a forkserver; that forkserver's pid."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        (found,) = distributed(num_accelerators=1)(origin).distributed()
        if found is not None:
            return found
    raise AssertionError("no run was ever warm")
