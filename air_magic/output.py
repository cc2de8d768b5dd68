"""One rank's output on its way: every byte to the log file, a bounded part of it to the kernel."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
from pathlib import Path

_PIPE_SIZE = 1 << 20  # what an unprivileged process may ask for: a busy supervisor must not slow a rank
_READ_SIZE = 1 << 18

BATCH = 1 << 16
"""Characters of one rank that one batch takes to the kernel; the newest are kept."""


class RankOutput:
    """The read end of a rank's pipe, its log file, and what the kernel has not been told yet.

    Args:
        log: the file that gets every byte.
        cap: bytes after which the file ends with a notice.
    """

    def __init__(self, log: Path, cap: int) -> None:
        self._read_end, self.write_end = os.pipe()
        with contextlib.suppress(PermissionError):  # the user's pipes are many: the usual 64 KiB must do
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        os.set_blocking(self._read_end, False)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._room = cap
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._skipped = 0
        self.ended = False
        """Whether no process holds the pipe's other end any more."""
        self.note = ""
        """What went wrong with the log file, if anything did."""

    def fileno(self) -> int:
        """The pipe's descriptor, for a selector."""
        return self._read_end

    def started(self) -> None:
        """The rank has its end of the pipe: ours must go, or the pipe never ends."""
        os.close(self.write_end)

    def read(self) -> None:
        """Takes what the pipe holds."""
        try:
            data = os.read(self._read_end, _READ_SIZE)
        except BlockingIOError:
            return
        self.ended = not data
        self._keep(data)
        self._pending += self._decoder.decode(data, final=self.ended)
        if len(self._pending) > 4 * BATCH:
            self._shorten()

    def append(self, text: str) -> None:
        """Adds to the log file what the rank itself did not write: its traceback."""
        self._keep(text.encode("utf-8", "backslashreplace"))  # a message may hold lone surrogates

    def take(self) -> tuple[str, int]:
        """The newest text that the kernel has not been given, and how many lines before it are left out."""
        self._shorten()
        text, skipped = self._pending, self._skipped
        self._pending, self._skipped = "", 0
        return text, skipped

    @property
    def waiting(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._pending or self._skipped)

    def close(self) -> None:
        """Lets go of the pipe and the file."""
        os.close(self._read_end)
        os.close(self._log)

    def _keep(self, data: bytes) -> None:
        if self._room <= 0 or not data:
            return
        kept = data[: self._room]
        self._room -= len(kept)
        try:
            self._write(kept)
            if self._room <= 0:
                self.note = "its log file reached its cap"
                self._write(b"\n[air_magic: this file has reached its cap; later output was not kept]\n")
        except OSError as error:  # a full disk must not stop a training
            self._room = 0
            self.note = f"its log file is incomplete: {error.strerror}"

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._log, view) :]

    def _shorten(self) -> None:
        excess = len(self._pending) - BATCH
        if excess <= 0:
            return
        cut = self._pending.find("\n", excess - 1) + 1 or excess
        self._skipped += self._pending.count("\n", 0, cut) or 1
        self._pending = self._pending[cut:]
