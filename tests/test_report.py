"""Report: what a reader sees of a run that went wrong, and what is raised."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

import pytest

from air_magic.errors import RankFailed
from air_magic.events import Event, RankExited
from air_magic.report import exception, rebuild_traceback, report, standing, summary
from air_magic.result import Ending, Frame, RankFailure
from air_magic.state import RunState

from .histories import START, died, ended, obeyed, raised, record, returned, up

CELL = "/tmp/ipykernel_7/3141.py"
SOURCE = "def train(lr):\n    if lr > 1:\n        raise ValueError('bad lr')\n\n\ntrain(2)\n"
FRAMES = (
    Frame(CELL, 6, "<module>", "train(2)", 1, True),
    Frame("/usr/lib/python3/contextlib.py", 81, "inner", "return func(*args)", 78, False),
    Frame(CELL, 3, "train", "raise ValueError('bad lr')", 1, True),
)


def label(filename: str) -> str:
    """What IPython calls the cell."""
    return "Cell In[3]" if filename == CELL else filename


def fails(
    rank: int, at: float, *frames: Frame, ending: Ending = Ending.RAISED, kind: str = "ValueError", text: str = "bad lr"
) -> tuple[float, RankExited]:
    """The rank failed with these frames."""
    failure = RankFailure(rank, ending, kind, text, int((START + at) * 1e9), frames)
    return at, RankExited(rank, 1, START + at, record(ending, failure=failure.to_json()))


def state_of(*events: tuple[float, Event], world_size: int = 2, **fields: Any) -> RunState:
    """A run that has seen these events, and decided in between."""
    state = RunState("0123abcd", "train", world_size, "CPU", "/runs/0123abcd", START, **fields)
    for at, event in events:
        state.decide(START + at)
        state.fold(event, START + at)
    return state


def test_the_whole_report() -> None:
    """Which rank, what, the user's frames with source, how many others, where the log is."""
    state = state_of(
        *up(0, 1, 2, 3),
        returned(3, 0.5),
        fails(1, 1.0, *FRAMES),
        fails(2, 1.25),
        obeyed(0, 1.75),
        ended(2.0),
        world_size=4,
    )
    assert report(state, label) == (
        "rank 1 of 4 failed: ValueError: bad lr\n"
        "  Cell In[3], line 6\n"
        "    train(2)\n"
        "  Cell In[3], line 3, in train\n"
        "    raise ValueError('bad lr')\n"
        "1 other rank had returned, 1 other rank failed too, 1 other rank stopped.\n"
        "Full log: /runs/0123abcd/rank-1.log"
    )
    assert summary(state) == "train: rank 1 of 4 failed after 2.0 s · logs: /runs/0123abcd"


def test_a_report_with_a_hint() -> None:
    """The death of a process has no frames, but often a known cause."""
    state = state_of(*up(0, 1, 2), died(1, 1.0, -11), obeyed(0, 1.75), obeyed(2, 1.75), ended(2.0), world_size=3)
    assert report(state) == (
        "rank 1 of 3 was killed by SIGSEGV\n"
        "2 other ranks stopped.\n"
        "Hint: native code crashed; env={'PYTHONFAULTHANDLER': '1'} writes the Python stack into the rank's log.\n"
        "Full log: /runs/0123abcd/rank-1.log"
    )


@pytest.mark.parametrize(
    ("event", "headline"),
    [
        (died(0, 1.0, 3), "rank 0 of 1 ended by exit code 3, without an exception"),
        (died(0, 1.0, -9), "rank 0 of 1 was killed by SIGKILL"),
        (raised(0, 1.0, "3", kind="SystemExit"), "rank 0 of 1 failed: SystemExit: 3"),
        (raised(0, 1.0, "", kind="KeyboardInterrupt"), "rank 0 of 1 failed: KeyboardInterrupt"),
        (raised(0, 1.0, "two\nlines"), "rank 0 of 1 failed: ValueError: two"),
        (
            fails(0, 1.0, ending=Ending.UNLOADED, kind="ModuleNotFoundError", text="No module named 'mine'"),
            "rank 0 of 1 could not load what was sent to it: ModuleNotFoundError: No module named 'mine'",
        ),
    ],
)
def test_the_first_line_says_what_happened(event: tuple[float, Event], headline: str) -> None:
    """In a sentence of its own for each kind of end."""
    assert report(state_of(*up(0), event, ended(1.25), world_size=1)).split("\n")[0] == headline


def test_the_last_frame_is_shown_whoever_wrote_it() -> None:
    """Where a library raised is worth a line; what lies between is not."""
    library = Frame("/lib/torch/nn.py", 9, "forward", "raise TypeError", 1, False)
    state = state_of(*up(0, 1), fails(0, 1.0, FRAMES[0], library, library), ended(1.25))
    assert report(state, label).split("\n")[1:5] == [
        "  Cell In[3], line 6",
        "    train(2)",
        "  /lib/torch/nn.py, line 9, in forward",
        "    raise TypeError",
    ]


def test_a_deep_recursion_is_shortened() -> None:
    """Its beginning and its end are shown, and how much is not; an unknown source has no line."""
    frames = [Frame(CELL, n, "deep", "", 1, True) for n in range(1, 1001)]
    lines = report(state_of(*up(0), fails(0, 1.0, *frames), ended(1.25), world_size=1), label).split("\n")
    shown = [f"  Cell In[3], line {n}, in deep" for n in (*range(1, 7), *range(995, 1001))]
    assert lines[1:-1] == [*shown[:6], "  … 988 frames left out", *shown[6:]]


def raise_it(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames that a reader sees behind the one that raises here."""
    try:
        raise error
    except BaseException as caught:
        return list(traceback.extract_tb(caught.__traceback__))[1:]


def test_the_ranks_exception_comes_as_its_own_type() -> None:
    """With the report as its cause, and a traceback of the user's lines that shows their source."""
    state = state_of(*up(0, 1), fails(1, 1.0, *FRAMES), obeyed(0, 1.75), ended(2.0))
    original = ValueError("bad lr")
    asked_for: list[RankFailure] = []

    def rebuild(failure: RankFailure) -> BaseException:
        asked_for.append(failure)
        return original

    linecache.cache[CELL] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL)
    try:
        run = object()
        error = exception(state, run, rebuild, label)
        assert error is original
        frames = raise_it(error.with_traceback(error.__traceback__))
        assert [(frame.filename, frame.lineno, frame.name, frame.line) for frame in frames] == [
            (CELL, 6, "<module>", "train(2)"),
            (CELL, 3, "train", "raise ValueError('bad lr')"),
        ]
    finally:
        del linecache.cache[CELL]
    failed = error.__cause__
    assert isinstance(failed, RankFailed)
    assert (str(failed), failed.run, [failed.failure]) == (report(state, label), run, asked_for)


@pytest.mark.parametrize("rebuilt", [None, KeyboardInterrupt(), SystemExit(3)])
def test_what_cannot_be_raised_as_itself_is_a_rank_failed(rebuilt: BaseException | None) -> None:
    """An exception without an object; and one that would speak to the notebook instead of about the rank."""
    state = state_of(*up(0, 1), fails(1, 1.0, *FRAMES), obeyed(0, 1.75), ended(2.0))
    error = exception(state, None, lambda _: rebuilt, label)
    assert (type(error), str(error)) == (RankFailed, report(state, label))


def test_a_death_has_nothing_to_rebuild() -> None:
    """No file of the rank is looked at."""
    state = state_of(*up(0), died(0, 1.0, -9), ended(1.25), world_size=1)

    def rebuild(failure: RankFailure) -> BaseException:
        raise AssertionError("there is no exception")

    assert type(exception(state, None, rebuild, str)) is RankFailed


def test_success_raises_nothing() -> None:
    """And is summed up in a line."""
    state = state_of(*up(0), returned(0, 1.0), ended(1.25), world_size=1)
    assert exception(state, None, lambda _: None, str) is None
    assert summary(state) == "train: 1 rank returned after 1.2 s · logs: /runs/0123abcd"


def test_a_traceback_can_be_made_of_any_frames() -> None:
    """None at all, and lines before the function's first one."""
    assert rebuild_traceback([]) is None
    odd = [Frame("<made>", 3, "f", "", 9, True), Frame("<made>", 9, "g", "", 9, True)]
    frames = traceback.extract_tb(rebuild_traceback(odd))
    assert [(frame.filename, frame.lineno, frame.name) for frame in frames] == [("<made>", 3, "f"), ("<made>", 9, "g")]


def test_where_a_run_stands() -> None:
    """One line for the run and one for each rank, with what it shows now or said last."""
    state = state_of(*up(0, 1), returned(0, 1.0))
    state.heard(0, 1, "done", "", False)
    state.heard(1, 3, "epoch 1", " 40%|██", True)
    assert standing(state.snapshot(START + 2.0)) == (
        "train (0123abcd): running after 2.0 s · logs: /runs/0123abcd\n"
        "rank 0: returned, 1 line · done\n"
        "rank 1: running, 3 lines ·  40%|██"
    )
