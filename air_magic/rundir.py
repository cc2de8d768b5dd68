"""Every file name of a run, and the folder that holds the last runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from . import processes

KEPT = 20
"""Finished runs whose folders, and so whose logs, are kept."""

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")  # AIR_MAGIC_RUNS may name a folder that holds other things too


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that readers see whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunDir:
    """The folder of one run; names are made here and nowhere else.

    Args:
        path: the folder; it need not exist to ask for names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.payload = path / "payload.pkl"
        self.setup = path / "setup.pkl"
        self.owner = path / "owner.json"
        self.store_log = path / "store.log"
        self.supervisor_log = path / "supervisor.log"  # written if it fails
        # Results are large and short-lived: in memory where it fits.
        self.shared = Path("/dev/shm") / f"air_magic-{os.getuid()}-{path.name}"  # noqa: S108 - 0700, made by us

    @classmethod
    def at(cls, path: str) -> RunDir:
        """The folder of this name."""
        return cls(Path(path))

    def log(self, rank: int) -> Path:
        """All that the rank wrote to its stdout and stderr."""
        return self.path / f"rank-{rank}.log"

    def record(self, rank: int) -> Path:
        """How the rank ended, as JSON."""
        return self.path / f"rank-{rank}.json"

    def values(self, rank: int) -> tuple[Path, Path]:
        """Where the rank's value may lie: in memory, or beside the logs."""
        return self.shared / f"rank-{rank}.value", self.path / f"rank-{rank}.value"

    def error(self, rank: int) -> Path:
        """The rank's exception as an object."""
        return self.path / f"rank-{rank}.error"

    def remove(self) -> None:
        """Deletes everything of the run."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.rmtree(self.shared, ignore_errors=True)

    def remove_values(self) -> None:
        """Deletes what only a run that goes on needs; what the kernel has mapped stays readable."""
        shutil.rmtree(self.shared, ignore_errors=True)
        for pattern in (self.owner.name, "*.pkl", "rank-*.value", "rank-*.error"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)


def runs_root(environ: Mapping[str, str]) -> Path:
    """The folder of all runs: ``AIR_MAGIC_RUNS``, else below ``XDG_STATE_HOME``, else ``~/.local/state``."""
    if named := environ.get("AIR_MAGIC_RUNS"):
        return Path(named).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "air_magic" / "runs"


def create(run_id: str, root: Path) -> RunDir:
    """Makes the folder of a new run, readable by its owner alone, and forgets the oldest ones.

    Where ``root`` cannot be written, the folder comes to the system's temporary folder.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _forget_old(root)
        path = root / name
        path.mkdir(mode=0o700)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix=f"air_magic-{name}-"))
    folder = RunDir(path)
    me = processes.read(os.getpid())
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": me.started if me else 0}
    write_whole(folder.owner, json.dumps(owner).encode())
    return folder


def _forget_old(root: Path) -> None:
    """Removes all but the newest finished runs; one that may still go on, its kernel living, is left alone."""
    runs = [path for path in sorted(root.iterdir(), reverse=True) if _NAME.fullmatch(path.name) and path.is_dir()]
    finished = [path for path in runs if not _owned(path)]
    for path in finished[KEPT:]:
        RunDir(path).remove()


def _owned(path: Path) -> bool:
    try:
        owner = json.loads((path / "owner.json").read_bytes())
    except (OSError, ValueError):
        return False
    if owner["host"] != socket.gethostname():
        return True
    process = processes.read(owner["pid"])
    return process is not None and process.started == owner["started"]
