"""Folder and TextView: a run's log as text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from air_magic.views.outlet import PlainOutlet
from air_magic.views.text import Folder, Line, TextView, clip, ranges


class Clock:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Record:
    """An outlet that remembers what it got."""

    def __init__(self, colour: bool = False) -> None:
        self.colour = colour
        self.lines: list[str] = []
        self.rows: list[list[str]] = []

    def write(self, text: str) -> None:
        assert text.endswith("\n")
        self.lines += text[:-1].split("\n")

    def live(self, rows: Sequence[str]) -> None:
        self.rows.append(list(rows))

    def close(self) -> None:
        self.lines.append("<closed>")


def snapshot(
    *live: str, bar: bool = True, summary: str = "", notes: Sequence[str] = (), phase: str = "running"
) -> dict[str, Any]:
    ranks = [{"live": text, "bar": bar and bool(text)} for text in live]
    return {"ranks": ranks, "summary": summary, "notes": list(notes), "phase": phase}


def fold(*lines: tuple[int, str], ranks: int = 2) -> list[tuple[tuple[int, ...], str]]:
    folder = Folder(ranks)
    for rank, text in lines:
        folder.feed(Line(rank, text), 0.0)
    return folder.take(0.0, flush=True)


def test_one_rank_never_waits() -> None:
    """With nobody to fold with, a line is given at once."""
    folder = Folder(1)
    folder.feed(Line(0, "a"), 0.0)
    folder.feed(Line(0, "a"), 0.0)
    assert folder.take(0.0) == [((0,), "a"), ((0,), "a")]


def test_a_line_of_all_ranks_is_given_once_and_at_once() -> None:
    """As soon as every rank has it, there is nothing to wait for."""
    folder = Folder(3)
    folder.feed(Line(0, "a"), 0.0)
    folder.feed(Line(2, "a"), 0.01)
    assert folder.take(0.02) == []
    folder.feed(Line(1, "a"), 0.03)
    assert folder.take(0.03) == [((0, 1, 2), "a")]


def test_a_line_waits_for_the_window_and_no_longer() -> None:
    """A rank that has nothing to say holds up nobody for long."""
    folder = Folder(3, window=0.2)
    folder.feed(Line(0, "a"), 1.0)
    folder.feed(Line(0, "b"), 1.1)
    folder.feed(Line(2, "a"), 1.1)
    assert folder.take(1.15) == []
    assert folder.take(1.25) == [((0, 2), "a")]
    assert folder.take(1.29) == []
    assert folder.take(1.35) == [((0,), "b")]


def test_lines_between_lines_of_one_rank_do_not_prevent_folding() -> None:
    """What only one rank wrote is given first, so that the others' common line meets its own."""
    assert fold((1, "common"), (0, "own"), (0, "common")) == [((0,), "own"), ((0, 1), "common")]
    assert fold((0, "loss 1"), (0, "done"), (1, "loss 2"), (1, "done")) == [
        ((0,), "loss 1"),
        ((1,), "loss 2"),
        ((0, 1), "done"),
    ]


def test_the_order_of_a_rank_is_kept_even_where_ranks_disagree() -> None:
    """Crossed lines cannot be folded both; none is lost or moved before its predecessor."""
    lines = fold((0, "a"), (0, "b"), (1, "b"), (1, "a"))
    for rank, own in enumerate([["a", "b"], ["b", "a"]]):
        assert [text for ranks, text in lines if rank in ranks] == own


def test_repeated_lines_are_folded_one_to_one() -> None:
    """A line that each rank wrote twice is shown twice."""
    assert fold(*[(0, "x")] * 2, *[(1, "x")] * 3) == [((0, 1), "x"), ((0, 1), "x"), ((1,), "x")]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0-1"), ((0, 2), "0,2"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")],
)
def test_ranks_are_written_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert ranges(ranks) == text


@pytest.mark.parametrize(
    ("text", "clipped"),
    [
        ("abcd", "abcd"),
        ("abcdefg", "abcd… (3 more characters)"),
        ("\x1b[31mred\x1b[0m", "… (8 more characters)"),
        ("\x1b[mred", "\x1b[mr\x1b[0m… (2 more characters)"),
        ("abc\x1b[31md", "abc… (5 more characters)"),
    ],
)
def test_a_long_line_is_cut_and_says_so(text: str, clipped: str) -> None:
    """No colour sequence is cut in its middle, and none is left open."""
    assert clip(text, 4) == clipped


def test_lines_are_labelled_with_their_ranks() -> None:
    """One form for one rank, one for several; the label is dim where colours are wanted."""
    for colour, labels in [
        (False, ("[rank 1]", "[ranks 0-1]")),
        (True, ("\x1b[2m[rank 1]\x1b[0m", "\x1b[2m[ranks 0-1]\x1b[0m")),
    ]:
        out = Record(colour)
        view = TextView(out, 2, Clock())
        view.note("train on 2 ranks")
        view.publish(snapshot("", ""), [Line(1, "own"), Line(0, "same"), Line(1, "same"), Line(0, ""), Line(1, "")])
        view.finish(snapshot("", "", summary="done in 1 s"))
        assert out.lines == [
            "train on 2 ranks",
            f"{labels[0]} own",
            f"{labels[1]} same",
            f"{labels[1]} ",
            "<closed>",
            "done in 1 s",
        ]


def test_bars_are_live_and_unfinished_lines_are_not() -> None:
    """One row per rank whose live line was rewritten; a prompt is not shown before it is final."""
    out = Record()
    view = TextView(out, 11, Clock())
    view.publish(snapshot(" 45%|██", "", *[""] * 8, "100%|███"), [])
    view.publish(snapshot("partial", *[""] * 10, bar=False), [])
    view.finish(snapshot("", " 99%", *[""] * 9))
    assert out.rows == [["rank  0  45%|██", "rank 10 100%|███"], [], ["rank  1  99%"]]
    assert out.lines == ["<closed>"]


def test_lines_beyond_the_rate_are_counted_and_the_last_ones_shown_at_the_end() -> None:
    """After the burst lines are held back; the end tells how many, and shows the last ten."""
    out = Record()
    view = TextView(out, 1, Clock(), rate=2, burst=5, log_dir="/runs/1")
    view.publish(snapshot(""), [Line(0, f"line {n}") for n in range(20)])
    assert out.lines == [f"[rank 0] line {n}" for n in range(5)]
    view.finish(snapshot(""))
    assert out.lines[5:] == [
        "… 5 lines not shown here (rank 0: 5); all of them are in /runs/1",
        *[f"[rank 0] line {n}" for n in range(10, 20)],
        "<closed>",
    ]


def test_output_resumes_after_a_second_with_what_was_left_out() -> None:
    """A rank that goes quiet again leaves no line unaccounted for, without waiting for the end."""
    clock, out = Clock(), Record()
    view = TextView(out, 2, clock, rate=20, burst=20)
    view.publish(snapshot("", ""), [Line(n % 2, f"line {n}") for n in range(56)])
    clock.now += 0.3
    view.publish(snapshot("", ""), [])
    assert len(out.lines) == 20
    clock.now += 0.5
    view.publish(snapshot("", ""), [])
    assert len(out.lines) == 20
    clock.now += 0.5
    view.publish(snapshot("", ""), [])
    assert out.lines[20:] == [
        "… 26 lines not shown here (rank 0: 13, rank 1: 13)",
        *[f"[rank {n % 2}] line {n}" for n in range(46, 56)],
    ]


def test_a_few_held_lines_are_only_late() -> None:
    """What fits into the tail is shown in full, without a notice."""
    clock, out = Clock(), Record()
    view = TextView(out, 1, clock, rate=2, burst=2)
    view.publish(snapshot(""), [Line(0, str(n)) for n in range(5)])
    clock.now += 1
    view.publish(snapshot(""), [])
    assert out.lines == [f"[rank 0] {n}" for n in range(5)]


def test_lines_that_are_only_in_the_file_are_counted() -> None:
    """They are told at most once a second, before the line that follows them."""
    clock, out = Clock(), Record()
    view = TextView(out, 1, clock)
    view.publish(snapshot(""), [Line(0, "", 1), Line(0, "a", 1200)])
    clock.now += 1
    view.publish(snapshot(""), [Line(0, "b", 33)])
    view.publish(snapshot(""), [Line(0, "c", 1)])
    view.finish(snapshot(""))
    assert out.lines == [
        "[rank 0] a",
        "… 1,234 lines not shown here (rank 0: 1,234)",
        "[rank 0] b",
        "[rank 0] c",
        "… 1 line not shown here (rank 0: 1)",
        "<closed>",
    ]


def test_a_notice_names_eight_ranks_at_most() -> None:
    """With many ranks the notice stays one line."""
    out = Record()
    view = TextView(out, 64, Clock())
    view.publish(snapshot(*[""] * 64), [Line(rank, "", 1) for rank in range(64)])
    view.finish(snapshot(*[""] * 64))
    first = ", ".join(f"rank {rank}: 1" for rank in range(8))
    assert out.lines == [f"… 64 lines not shown here ({first}, 56 more ranks)", "<closed>"]


def test_long_lines_are_cut_and_cost_more_of_the_rate() -> None:
    """A notebook server limits bytes as well as lines."""
    out = Record()
    view = TextView(out, 1, Clock(), burst=20)
    view.publish(snapshot(""), [Line(0, "x" * 5000)] * 3)
    assert out.lines == ["[rank 0] " + "x" * 4000 + "… (1,000 more characters)"] * 2


def test_a_flood_loses_no_count() -> None:
    """Shown, held back or not looked at: every line is in one number."""
    clock, out = Clock(), Record()
    view = TextView(out, 4, clock, rate=10, burst=10)
    for _ in range(20):
        view.publish(snapshot(*[""] * 4), [Line(n % 4, f"{n} of {n % 4}") for n in range(1000)])
        clock.now += 0.1
    view.finish(snapshot(*[""] * 4))
    told = sum(int(line.split()[1].replace(",", "")) for line in out.lines if line.startswith("…"))
    assert told + sum(line.startswith("[rank") for line in out.lines) == 20_000
    assert len(out.lines) < 100


def test_each_note_of_the_run_is_told_once() -> None:
    """Notes come as they arise, those of the end after the last lines, and never twice."""
    stream = io.StringIO()
    view = TextView(PlainOutlet(stream), 1)
    view.publish(snapshot("", notes=["2 CPU ranks"]), [Line(0, "a")])
    view.publish(snapshot("", notes=["2 CPU ranks"]), [])
    ended = snapshot("", notes=["2 CPU ranks", "no group"], summary="done", phase="ended")
    view.publish(ended, [Line(0, "b")])
    view.finish(ended)
    assert stream.getvalue() == "air_magic: 2 CPU ranks\n[rank 0] a\n[rank 0] b\nair_magic: no group\ndone\n"
