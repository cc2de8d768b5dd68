"""Where a view's text goes: the cell that started the run, a terminal, or whatever ``sys.stdout`` is.

Every outlet outlives what it writes to. A closed stdout, a reader that left or a kernel that shuts down ends the
showing, silently: nobody is there to be told, and the run must go on.
"""

from __future__ import annotations

import os
import re
import sys
import time
import unicodedata
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

PLAIN_EVERY = 10.0
"""Seconds between two states of the same row where rows cannot be rewritten."""

_PIECE = re.compile(r"\x1b\[[0-9;:]*m|.", re.DOTALL)


class Outlet(Protocol):
    """Text that is appended, and a block of live rows that is replaced."""

    colour: bool
    """Whether a view may add colours of its own."""

    def write(self, text: str) -> None:
        """Append text, which ends with a newline."""

    def live(self, rows: Sequence[str]) -> None:
        """Replace the live block; no rows take it away."""

    def close(self) -> None:
        """Leave the live block standing as it is; what is written later comes after it."""


class PlainOutlet:
    """A file, a pipe or a buffer: live rows become occasional lines."""

    colour = False

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._rows: list[str] = []
        self._shown: dict[int, str] = {}
        self._shown_at: dict[int, float] = {}

    def write(self, text: str) -> None:
        """Append text."""
        _write(self._stream, text)

    def live(self, rows: Sequence[str]) -> None:
        """Write the rows whose last state is some time old."""
        self._rows = list(rows)
        now = self._clock()
        self._show([i for i in range(len(rows)) if now - self._shown_at.get(i, -PLAIN_EVERY) >= PLAIN_EVERY], now)

    def close(self) -> None:
        """Write the last state of the rows."""
        self._show(range(len(self._rows)), self._clock())
        self._rows = []

    def _show(self, due: Sequence[int], now: float) -> None:
        changed = [i for i in due if self._rows[i] != self._shown.get(i)]
        for i in changed:
            self._shown[i], self._shown_at[i] = self._rows[i], now
        if changed:
            self.write("".join(f"{self._rows[i]}\n" for i in changed))


class TtyOutlet:
    """A terminal: the live rows stand below the log and are rewritten in place."""

    def __init__(
        self,
        stream: TextIO,
        size: Callable[[], os.terminal_size] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.colour = not environ.get("NO_COLOR")
        self._stream = stream
        self._size = size or self._terminal_size
        self._rows: list[str] = []

    def write(self, text: str) -> None:
        """Append text above the live rows."""
        self._replace(text, self._rows)

    def live(self, rows: Sequence[str]) -> None:
        """Rewrite the live rows."""
        columns, lines = self._size()
        # A row that wraps, or more rows than the screen has, could not be moved back over.
        fitting = max(1, lines - 2)
        kept = [cut(row, columns - 1) for row in rows[:fitting]]
        if len(rows) > fitting:
            kept[-1] = f"… {len(rows) - fitting + 1} more"
        if kept != self._rows:
            self._replace("", kept)

    def close(self) -> None:
        """Leave the live rows where they are."""
        self._rows = []

    def _replace(self, text: str, rows: list[str]) -> None:
        clear = f"\r\x1b[{len(self._rows)}A\x1b[J" if self._rows else ""
        self._rows = rows
        _write(self._stream, clear + text + "".join(f"{row}\n" for row in rows))

    def _terminal_size(self) -> os.terminal_size:
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # not a real terminal, or closed by now
            columns = lines = 0
        return os.terminal_size((columns or 80, lines or 24))  # a serial line or a container's shell knows no size


class KernelOutlet:
    """The cell in which it was created, also from other threads and after that cell has ended.

    Args:
        stream: the kernel's ``sys.stdout``, an `ipykernel.iostream.OutStream`.
    """

    colour = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._parent = dict(stream.parent_header)
        self._display_id = f"air_magic-{uuid.uuid4().hex}"
        self._rows: list[str] | None = None  # None until the block exists

    def write(self, text: str) -> None:
        """Append text to the cell's output."""
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate would be no JSON
        self._send("stream", {"name": "stdout", "text": text}, self._stream.topic)

    def live(self, rows: Sequence[str]) -> None:
        """Show the rows in one output that is updated in place; it exists once there was a row."""
        if list(rows) == (self._rows or []):
            return
        kind = "display_data" if self._rows is None else "update_display_data"
        self._rows = list(rows)
        content = {
            "data": {"text/plain": "\n".join(rows).encode("utf-8", "replace").decode()},
            "metadata": {},
            "transient": {"display_id": self._display_id},
        }
        self._send(kind, content, b"display_data")

    def close(self) -> None:
        """Leave the rows as they are."""

    def _send(self, kind: str, content: dict[str, Any], topic: bytes) -> None:
        import zmq  # a kernel has it; others need not

        stream = self._stream
        if stream.closed:
            return
        try:
            stream.flush()  # what the cell printed before comes before
            # As OutStream does it, but with the parent of our cell instead of the cell that runs now.
            stream.session.send(stream.pub_thread, kind, content, parent=self._parent, ident=topic)
        except (ValueError, OSError, zmq.ZMQError):
            return  # the kernel is shutting down


def outlet(stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Outlet:
    """The outlet for what ``sys.stdout`` is now, in the calling thread."""
    stream = sys.stdout if stream is None else stream
    iostream = sys.modules.get("ipykernel.iostream")  # imported in every kernel, and nowhere else needed
    if iostream is not None and isinstance(stream, iostream.OutStream):
        return KernelOutlet(stream)
    if _is_terminal(stream) and environ.get("TERM") != "dumb":
        return TtyOutlet(stream, environ=environ)
    return PlainOutlet(stream)


def cut(row: str, columns: int) -> str:
    """The row's beginning that fits into ``columns`` of a terminal; its colours are closed."""
    kept, width, coloured = [], 0, False
    for piece in _PIECE.findall(row.expandtabs(4)):
        if piece[0] == "\x1b":
            coloured = True
        elif not unicodedata.combining(piece):
            width += 2 if unicodedata.east_asian_width(piece) in "WF" else 1
        if width > columns:
            break
        kept.append(piece)
    return "".join(kept) + ("\x1b[0m" if coloured else "")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a notebook's own stdout, or one that is closed
        return False


def _write(stream: TextIO, text: str) -> None:
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (ValueError, OSError):
        return  # closed, or its reader is gone; see above
