"""The kernel's forkserver: started in the background, replaced when what it has imported is not what a run needs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import processes
from ..events import Reader, frame

PRELOAD = "AIR_MAGIC_PRELOAD"
"""The variable that names further modules to import, separated by commas."""

OWN = {
    # Without it numpy's BLAS starts a thread for each core when it is imported, and a fork has only one thread.
    "OPENBLAS_NUM_THREADS": "1",
    # Ditto pyarrow's allocator, which pandas and mlflow bring.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # Without it `import deepspeed` asks CUDA for its devices, and a fork could not use CUDA any more.
    "DS_ACCELERATOR": "cpu",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Variables of the forkserver alone; ranks have the notebook's."""

# What native code reads when it is loaded; what Python code reads is noted while it is imported.
_AT_IMPORT = (
    "ATEN_", "C10_", "CUBLAS", "CUDA_", "CUDNN_", "DNNL_", "GOMP_", "GLIBC_", "HSA_", "JE_", "KMP_", "LANG", "LC_",
    "LD_", "MALLOC_", "MKL_", "NPY_", "NUMEXPR_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_",
    "ROCM_", "TORCH_", "TZ", "VECLIB_",
)  # fmt: skip
# Of those, what is read later or is the launcher's own.
_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")

READY_IN = 3.0
"""Seconds in which a forkserver is expected to be ready, until this kernel has seen one become so."""
COLD = 1.5
"""Seconds that a cold start takes: a forkserver that needs longer than that is not waited for."""


@dataclass(frozen=True)
class Wanted:
    """What a rank must find: the interpreter with its flags, where it looks for modules, and its variables."""

    argv: Sequence[str]
    path: Sequence[str]
    env: Mapping[str, str]
    cwd: str


@dataclass
class _Serving:
    """One forkserver process, as far as this kernel knows it."""

    wanted: Wanted
    control: socket.socket
    skipped: frozenset[str]
    began: float
    reader: Reader = field(default_factory=Reader)
    report: dict[str, Any] | None = None


class Warmth:
    """Lends supervisors from a forkserver that fits, and says why when there is none.

    Args:
        start: has the warden start `air_magic.engines.forkserver.boot` on a socket.
        clock: seconds.
    """

    def __init__(self, start: Callable[[socket.socket], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._start = start
        self._clock = clock
        self._serving: _Serving | None = None
        self._skipped: frozenset[str] = frozenset()
        self._ready_in = READY_IN
        self.notes: list[str] = []
        """What the user should read once: modules that could not be imported ahead."""

    def begin(self, wanted: Wanted) -> None:
        """Starts a forkserver in the background, unless one that fits is there."""
        if self._serving is not None and self._stale(self._serving, wanted):
            self.end()
        if self._serving is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._start(theirs)
            place = {"argv": list(wanted.argv), "env": {**wanted.env, **OWN}, "cwd": wanted.cwd}
            with contextlib.suppress(OSError):  # it is gone already: whoever waits for its report hears so
                ours.sendall(frame(place) + frame({"path": list(wanted.path), "preload": self._preload(wanted)}))
            self._serving = _Serving(wanted, ours, self._skipped, self._clock())

    def lend(self, wanted: Wanted, channel: socket.socket) -> str:
        """Has a supervisor forked that serves ``channel``; an empty string, or why there is none."""
        for _ in range(2):  # the forkserver may have died, or be replaced, once
            self.begin(wanted)
            serving = self._serving
            assert serving is not None
            reason = self._await_ready(serving)
            if reason == "":
                reason = self._fork(serving, channel)
            if reason is not None:
                return reason
            self.end()
        return "the forkserver ends as soon as it is started"

    def end(self, *, its_own: bool = True) -> None:
        """Lets the forkserver go: it ends when the runs that came from it have ended.

        Args:
            its_own: false in a fork of the kernel, which must not end its parent's.
        """
        if self._serving is not None:
            if its_own:
                with contextlib.suppress(OSError):  # it is gone already
                    self._serving.control.shutdown(socket.SHUT_RDWR)  # a fork of the kernel may hold it too
            self._serving.control.close()
            self._serving = None

    def _preload(self, wanted: Wanted) -> list[str]:
        named = (name.strip() for name in wanted.env.get(PRELOAD, "").split(","))
        return [name for name in named if name and name not in self._skipped]

    def _await_ready(self, serving: _Serving) -> str | None:
        """Waits for the report if that is sooner than a cold start; None if the process is gone."""
        if serving.report is None:
            left = max(0.0, serving.began + self._ready_in - self._clock())
            message = self._message(serving, left + COLD if left <= COLD else 0.0)
            if message == {}:
                return f"the forkserver is not ready yet; it was expected to be in about {left:.0f} s"
            if message is None:
                return None
            serving.report = message
            # By its own clock, which is the whole machine's: it may have been ready long before anybody asked.
            self._ready_in = message["ready_at"] - serving.began
            self._heed(message)
        unfit = serving.report["unfit"]
        return f"{serving.report['culprit']} cannot be imported ahead: after it, {unfit}" if unfit else ""

    def _heed(self, report: Mapping[str, Any]) -> None:
        for name, reason in report["failed"].items():
            self.notes.append(f"{PRELOAD}: {name} could not be imported ahead ({reason})")
        if report["unfit"]:
            self.notes.append(f"{report['culprit']} is not imported ahead any more: after it, {report['unfit']}")
            self._skipped |= {report["culprit"]}

    def _fork(self, serving: _Serving, channel: socket.socket) -> str | None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [channel.fileno()]))]
        try:
            serving.control.sendmsg([b"."], rights)
        except OSError:
            return None
        message = self._message(serving, 5.0)
        if message == {}:
            return "the forkserver does not answer"
        return None if message is None else str(message["refused"])

    def _message(self, serving: _Serving, patience: float) -> dict[str, Any] | None:
        """The forkserver's next message; empty if none comes in time (seconds), None if it is gone."""
        end, data = self._clock() + patience, b""
        while True:
            for message in serving.reader.feed(data):
                return message
            if not processes.readable(serving.control.fileno(), max(0.0, end - self._clock())):
                return {}
            try:
                data = serving.control.recv(1 << 18)
            except OSError:
                return None
            if not data:
                return None

    def _stale(self, serving: _Serving, wanted: Wanted) -> bool:
        """Whether what that forkserver has imported may differ from what a fresh interpreter would import now."""
        had = serving.wanted
        if list(had.argv) != list(wanted.argv) or serving.skipped != self._skipped:
            return True
        report = serving.report or {"read": [], "files": {}}
        changed = {name for name in {*had.env, *wanted.env} if had.env.get(name) != wanted.env.get(name)}
        if any(self._is_read_at_import(name, report["read"]) for name in changed):
            return True
        return _files_changed(report["files"]) or _shadowed(had.path, wanted.path, report["files"])

    def _is_read_at_import(self, name: str, read: Sequence[str]) -> bool:
        if name == PRELOAD:
            return True
        return not name.startswith(_LATER) and (name.startswith(_AT_IMPORT) or name in read)


def _files_changed(files: Mapping[str, int]) -> bool:
    """Whether an imported file is newer than when it was imported."""
    for name, modified in files.items():
        try:
            if os.stat(name).st_mtime_ns != modified:
                return True
        except OSError:
            return True
    return False


def _shadowed(had: Sequence[str], now: Sequence[str], files: Mapping[str, int]) -> bool:
    """Whether a folder that came to the path holds a module of a name that is imported already."""
    new = [folder for folder in now if folder and folder not in had]
    names = (
        {os.path.basename(os.path.dirname(name)) for name in files if name.endswith("__init__.py")} if new else set()
    )
    return any(
        os.path.exists(os.path.join(folder, name)) or os.path.exists(os.path.join(folder, f"{name}.py"))
        for folder in new
        for name in names
        if any(os.path.join(root, name, "__init__.py") in files for root in sys.path)
    )
