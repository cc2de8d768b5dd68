"""RankFailure and RankOutcome: how one rank ended, in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from air_magic.result import Ending, Frame, RankFailure, RankOutcome

from .histories import LOST_PEER, record

RAISED = RankFailure(1, Ending.RAISED, "ValueError", "bad lr\nuse 0.1", 5_000_000_000)


@pytest.mark.parametrize(
    ("failure", "signal_name", "summary", "consequence"),
    [
        (RAISED, "", "ValueError: bad lr", False),
        (RankFailure(0, Ending.RAISED, "KeyboardInterrupt"), "", "KeyboardInterrupt", False),
        (RankFailure(0, Ending.RAISED, "SystemExit", "3", returncode=3), "", "SystemExit: 3", False),
        (RankFailure(0, Ending.RAISED, "RuntimeError", LOST_PEER), "", f"RuntimeError: {LOST_PEER}", True),
        (RankFailure(0, Ending.DIED, returncode=3), "", "exit code 3, without an exception", False),
        (RankFailure(0, Ending.DIED, returncode=0), "", "exit code 0, without an exception", False),
        (RankFailure(0, Ending.DIED, returncode=-9), "SIGKILL", "SIGKILL", False),
        (RankFailure(0, Ending.DIED, returncode=-11), "SIGSEGV", "SIGSEGV", False),
        # Both come from libraries that give up when a peer is gone, and from our own stopping.
        (RankFailure(0, Ending.DIED, returncode=-6), "SIGABRT", "SIGABRT", True),
        (RankFailure(0, Ending.DIED, returncode=-15), "SIGTERM", "SIGTERM", True),
        (RankFailure(0, Ending.DIED, returncode=-40), "signal 40", "signal 40", False),
    ],
)
def test_a_failure_is_told_in_a_line(failure: RankFailure, signal_name: str, summary: str, consequence: bool) -> None:
    """The exception with the first line of its text, the signal's name, or the exit code."""
    assert (failure.signal_name, failure.summary, failure.is_consequence) == (signal_name, summary, consequence)


def test_a_failure_travels_as_json() -> None:
    """All of it, as plain data."""
    frame = Frame("cell.py", 3, "train", "1 / 0", 1, True)
    failure = RankFailure(1, Ending.RAISED, "E", "text", 7, (frame, frame), "Traceback …", 1)
    data = failure.to_json()
    assert json.loads(json.dumps(data)) == data
    assert RankFailure.from_json(data) == failure


def died(returncode: int) -> RankFailure:
    return RankFailure(1, Ending.DIED, time_ns=6_000_000_000, returncode=returncode)


def raised(returncode: int) -> RankFailure:
    return RankFailure(1, Ending.RAISED, "ValueError", "bad lr\nuse 0.1", 5_000_000_000, returncode=returncode)


@pytest.mark.parametrize(
    ("returncode", "written", "stopping_since", "outcome"),
    [
        (0, record(), None, RankOutcome(1, Ending.RETURNED, 0)),
        (0, record(notes=["slow"]), 2.0, RankOutcome(1, Ending.RETURNED, 0, notes=("slow",))),
        (
            -6,
            record(),
            None,
            RankOutcome(1, Ending.RETURNED, -6, notes=("had returned its value when it ended by SIGABRT",)),
        ),
        (
            3,
            record(notes=["slow"]),
            None,
            RankOutcome(
                1,
                Ending.RETURNED,
                3,
                notes=("slow", "had returned its value when it ended by exit code 3, without an exception"),
            ),
        ),
        (-9, None, None, RankOutcome(1, Ending.DIED, -9, died(-9))),
        (0, None, None, RankOutcome(1, Ending.DIED, 0, died(0))),
        (-9, None, 5.5, RankOutcome(1, Ending.DIED, -9, died(-9), stopped=True)),
        (-9, None, 6.5, RankOutcome(1, Ending.DIED, -9, died(-9))),
        (1, record(Ending.RAISED, failure=RAISED.to_json()), None, RankOutcome(1, Ending.RAISED, 1, raised(1))),
        (1, record(Ending.RAISED, failure=RAISED.to_json()), 4.5, RankOutcome(1, Ending.RAISED, 1, raised(1), True)),
        (1, record(Ending.RAISED, failure=RAISED.to_json()), 5.5, RankOutcome(1, Ending.RAISED, 1, raised(1))),
    ],
)
def test_an_outcome_follows_from_exit_and_record(
    returncode: int, written: dict[str, Any] | None, stopping_since: float | None, outcome: RankOutcome
) -> None:
    """A record outweighs the exit code; what failed only after the run began to be stopped is a consequence."""
    assert RankOutcome.of_exit(1, returncode, written, 6.0, stopping_since=stopping_since) == outcome
