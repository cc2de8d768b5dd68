"""What this node's memory limits say: out-of-memory kills, and the size of shared memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_ROOT = Path("/")


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has killed for memory in this process's cgroup, or on the node."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # A container may see the host's path of its group, but its own group where the host's top one would be.
        for events in (top / path.lstrip("/") / name, top / name):
            if (kills := _entry(events, "oom_kill")) is not None:
                return kills
    return _entry(root / "proc/vmstat", "oom_kill") or 0


def facts(kills_before: int) -> dict[str, Any]:
    """What a failure report may need to know of the node.

    Args:
        kills_before: `oom_kills` when the run began.
    """
    try:
        shared = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        sizes = {}
    else:
        sizes = {"shm_size": shared.f_blocks * shared.f_frsize, "shm_free": shared.f_bavail * shared.f_frsize}
    return {"oom_kills": oom_kills() - kills_before, **sizes}


def _entry(path: Path, name: str) -> int | None:
    """The number behind ``name`` in a file of names and numbers."""
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
