"""Transcript: what the ranks have written, as lines."""

from __future__ import annotations

from air_magic.events import Output
from air_magic.state import RunState
from air_magic.transcript import Transcript
from air_magic.views.text import Line


def transcript_of(*outputs: Output, kept: int = 100) -> tuple[Transcript, RunState]:
    """A transcript of two ranks that was fed with these."""
    state = RunState("0123abcd", "train", 2, "CPU", "/runs", 0.0)
    transcript = Transcript(state, kept)
    for output in outputs:
        transcript.feed(output)
    return transcript, state


def test_lines_are_given_once_and_in_order() -> None:
    """An unfinished line is given when it is final, at the latest at the end."""
    transcript, state = transcript_of(Output(0, "a\nb"), Output(1, "c\n10%"), Output(1, "\r20%"))
    assert [(rank.last_line, rank.live, rank.bar) for rank in state.ranks] == [("a", "b", False), ("c", "20%", True)]
    assert (transcript.take(), transcript.take()) == ([Line(0, "a"), Line(1, "c")], [])
    transcript.close()
    assert transcript.take() == [Line(0, "b"), Line(1, "20%")]
    assert [(rank.last_line, rank.live, rank.bar) for rank in state.ranks] == [("b", "", False), ("20%", "", False)]


def test_lines_that_only_the_file_has_are_counted() -> None:
    """Before the line that they were left out before."""
    transcript, state = transcript_of(Output(0, "a\n"), Output(0, "half", 5), Output(0, "\nb\n"), Output(1, "c\n", 2))
    assert transcript.take() == [Line(0, "a"), Line(0, "half", 5), Line(0, "b"), Line(1, "c", 2)]
    assert [rank.lines for rank in state.ranks] == [8, 3]


def test_lines_that_nobody_took_are_counted_too() -> None:
    """A view that is held up gets the newest, and how many it has missed of each rank."""
    transcript, state = transcript_of(*[Output(n % 2, f"{n}\n") for n in range(12)], Output(1, "last\n", 3), kept=4)
    assert transcript.take() == [Line(1, "9", 4), Line(0, "10", 5), Line(1, "11"), Line(1, "last", 3)]
    transcript.feed(Output(0, "next\n"))
    assert transcript.take() == [Line(0, "next")]
    assert [rank.lines for rank in state.ranks] == [7, 10]
