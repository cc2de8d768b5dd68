"""Events on the wire."""

from __future__ import annotations

import pytest

from air_magic.events import (
    Event,
    NodeEnded,
    NodeLost,
    NodeStarted,
    Output,
    RankExited,
    RankStarted,
    Reader,
    StopAsked,
    decode,
    encode,
    frame,
)

from .histories import record

EVENTS: list[Event] = [
    NodeStarted(0, 50, 29500),
    RankStarted(1, 101, 1000.25),
    Output(1, "grüße\r\n\x1b[1m日本\udcff\0", 3),
    RankExited(1, -9, 1001.5, record(notes=["slow"]), 2, {"oom_kills": 1}),
    RankExited(0, 0, 1001.5),
    NodeEnded(0, ("two", "notes")),
    NodeEnded(0),
    NodeLost(0, "gone"),
    StopAsked("cancel", 1000.5),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1 << 20])
def test_events_come_as_they_were_sent(size: int) -> None:
    """However the stream is cut."""
    stream = b"".join(encode(event) for event in EVENTS)
    reader = Reader()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [decode(message) for piece in pieces for message in reader.feed(piece)] == EVENTS


def test_half_a_message_waits_for_the_rest() -> None:
    """Nothing is given before it is whole."""
    data = frame({"stop": "cancel", "kill": False})
    reader = Reader()
    assert list(reader.feed(data[:-1])) == []
    assert list(reader.feed(data[-1:] + data)) == [{"stop": "cancel", "kill": False}] * 2


def test_a_kind_of_another_version_is_refused() -> None:
    """By name, as a KeyError."""
    with pytest.raises(KeyError, match="RankMelted"):
        decode({"event": "RankMelted", "rank": 0})
