"""The supervisor's end of its socket to the kernel: it never blocks while ranks run, whatever the kernel does."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from typing import Any

from .events import Event, Reader, encode

BACKLOG = 4 << 20
"""Bytes that may wait for a kernel that does not read; output beyond stays in the log files."""


class Channel:
    """Events out, commands in."""

    def __init__(self, handle: socket.socket) -> None:
        self._socket = handle
        self._waiting = bytearray()
        self._reader = Reader()
        self.open = True
        """False once the kernel's end is closed."""

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._socket.fileno()

    def first(self) -> dict[str, Any] | None:
        """Waits for the first message, which says what to run; None if the kernel went before."""
        while data := self._socket.recv(1 << 18):
            for message in self._reader.feed(data):
                self._socket.setblocking(False)
                return message
        return None

    def receive(self) -> Iterator[dict[str, Any]]:
        """The commands that have come, also those that came together with the first message."""
        data = b""
        try:
            data = self._socket.recv(65536)
            self.open = bool(data)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.open = False
        yield from self._reader.feed(data)

    @property
    def interest(self) -> int:
        """What to wait for, as a selector's events: commands, and the kernel's reading if something waits for it."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._waiting else 0)

    @property
    def crowded(self) -> bool:
        """Whether so much waits for the kernel already that output is better kept back."""
        return len(self._waiting) > BACKLOG

    def send(self, event: Event) -> None:
        """Sends the event, or has it wait for `flush`."""
        if self.open:
            self._waiting += encode(event)
            self.flush()

    def flush(self) -> bool:
        """Sends what waits, as far as the kernel takes it; whether nothing waits any more."""
        while self._waiting and self.open:
            try:
                sent = self._socket.send(self._waiting[: 1 << 18])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self.open = False
                break
            del self._waiting[:sent]
        return True

    def finish(self) -> None:
        """Sends what still waits, however long a busy kernel takes to read it; returns when it is gone."""
        self._socket.setblocking(True)
        try:
            self._socket.sendall(self._waiting)
        except OSError:
            self.open = False
