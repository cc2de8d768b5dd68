"""The things that can happen to a run: the only messages between supervisor, kernel and views.

On the wire an event is one JSON object, ``{"event": <class name>, ...fields}``, behind its length
as four bytes, big-endian. JSON, since the kernel must not unpickle what a socket brings.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias

HEAD = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class NodeStarted:
    """A supervisor is up and has bound the store's port."""

    node: int
    pid: int
    port: int


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank's process exists."""

    rank: int
    pid: int
    at: float
    """Seconds since the epoch, as every ``at`` here."""


@dataclass(frozen=True, slots=True)
class Output:
    """A rank wrote; ``skipped`` lines before this text are only in its log file."""

    rank: int
    text: str
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process is gone, its descendants too, and its output has been read."""

    rank: int
    returncode: int
    at: float
    outcome: dict[str, Any] | None = None
    """What the rank wrote of itself (see `air_magic.rank`), or None if it died before."""
    descendants: int = 0
    """How many processes it had left behind, now killed."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the node said of its memory, for a rank that a signal ended; see `air_magic.memory.facts`."""


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """A supervisor's last word: nothing of the run is left on its node."""

    node: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A supervisor is gone without a last word; the warden has killed what it left."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the run to end; a second request kills at once."""

    reason: str
    """A value of `air_magic.state.StopReason`."""
    at: float


Event: TypeAlias = NodeStarted | RankStarted | Output | RankExited | NodeEnded | NodeLost | StopAsked

_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (NodeStarted, RankStarted, Output, RankExited, NodeEnded, NodeLost, StopAsked)
}


class Inbox(Protocol):
    """Where a run's events come together; `queue.SimpleQueue` is one."""

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        """The next event; `queue.Empty` when none came within ``timeout`` seconds."""

    def put(self, item: Event) -> None:
        """Adds an event, from any thread."""


def frame(message: dict[str, Any]) -> bytes:
    """One message as it goes on the wire."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(body)) + body


def encode(event: Event) -> bytes:
    """One event as it goes on the wire."""
    return frame({"event": type(event).__name__, **asdict(event)})


def decode(message: dict[str, Any]) -> Event:
    """The event in a message; KeyError for a kind that this version does not know."""
    fields = dict(message)
    kind = _KINDS[fields.pop("event")]
    if "notes" in fields:
        fields["notes"] = tuple(fields["notes"])
    event: Event = kind(**fields)
    return event


class Reader:
    """Puts a byte stream back together into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that ``data`` completes."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._buffer)
            end = HEAD.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]  # before the message is given: its taker may want no more for now
            yield json.loads(body)
