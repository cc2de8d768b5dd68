"""RunState: events in, snapshot and decisions out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from air_magic.events import Event, RankExited
from air_magic.result import Ending, Frame, RankFailure
from air_magic.state import Phase, RunState, Status, Stop, StopReason

from .histories import START, asked, ended, obeyed, raised, record, returned, up

GOLDEN = Path(__file__).parent / "data" / "snapshot.json"
"""What the views in the browser are tested with, too."""


def state_of(*events: tuple[float, Event], world_size: int = 2, **fields: Any) -> RunState:
    """A run that has seen these events."""
    state = RunState("0123abcd", "train", world_size, "GPU_4xH100", "/runs/0123abcd", START, **fields)
    for at, event in events:
        state.fold(event, START + at)
    return state


def test_the_golden_snapshot() -> None:
    """Four ranks: one has failed, one has returned, one shows a bar and one has not said anything; a stop is asked."""
    frame = Frame("/tmp/ipykernel_7/1.py", 4, "train", "return 1 / 0", 1, True)
    failure = RankFailure(
        2, Ending.RAISED, "ZeroDivisionError", "division by zero", 1_001_500_000_000, (frame,), "Traceback …\n"
    )
    state = state_of(
        *up(0, 1, 2, 3),
        returned(3, 1.25),
        (1.5, RankExited(2, 1, START + 1.5, record(Ending.RAISED, failure=failure.to_json()))),
        world_size=4,
        timeout=60.0,
        notes=["4 of the 8 GPUs of this node"],
    )
    state.heard(0, 12, "epoch 3", " 40%|████      | 4/10", True)
    state.heard(2, 1, "\x1b[31mloss: nan\x1b[0m", "", False)
    assert (state.decide(START + 1.75), state.decide(START + 2.0)) == ([], [Stop(StopReason.FAILURE, kill=False)])
    snapshot = state.snapshot(START + 2.25)
    assert snapshot == json.loads(GOLDEN.read_text())
    assert json.loads(json.dumps(snapshot)) == snapshot


def test_phases_follow_one_another() -> None:
    """From the first process to the last; a stop may be asked in any of them but the last."""
    for stop in (0, 1, 3, 5, None):
        state = state_of()
        seen = [state.phase]
        for number, (at, event) in enumerate([*up(0, 1), returned(0, 1.0), returned(1, 1.0), ended(1.1)]):
            if number == stop:
                state.fold(asked(at)[1], START + at)
            state.fold(event, START + at)
            seen.append(state.phase)
        expected = [Phase.STARTING, Phase.STARTING, Phase.STARTING, Phase.RUNNING, Phase.RUNNING, Phase.RUNNING]
        if stop is not None:
            expected[stop + 1 :] = [Phase.STOPPING] * (len(expected) - stop - 1)
        assert seen == [*expected, Phase.ENDED]
        assert state.status is (Status.SUCCEEDED if stop is None else Status.CANCELLED)


def test_it_says_when_it_wants_to_be_asked() -> None:
    """The end of the grace or the timeout, whichever comes first; never, once a stop is asked or all is over."""
    assert state_of(*up(0, 1)).due_at() == float("inf")
    assert state_of(*up(0, 1), timeout=5.0).due_at() == START + 5.0
    assert state_of(*up(0, 1), raised(0, 1.0), timeout=5.0).due_at() == START + 1.5
    assert state_of(*up(0, 1), raised(0, 4.75), timeout=5.0).due_at() == START + 5.0
    assert state_of(*up(0, 1), raised(0, 1.0), raised(1, 1.25)).due_at() == START + 1.5
    assert state_of(*up(0, 1), raised(0, 1.0), asked(1.25), timeout=5.0).due_at() == float("inf")
    assert state_of(ended(1.0), timeout=5.0).due_at() == float("inf")


def test_each_decision_is_given_once() -> None:
    """And none once nothing of the run is left."""
    state = state_of(*up(0, 1), timeout=5.0)
    assert state.decide(START + 4.75) == []
    assert state.decide(START + 5.0) == [Stop(StopReason.TIMEOUT, kill=False)]
    assert state.decide(START + 6.0) == []
    state.fold(asked(7.0)[1], START + 7.0)
    state.fold(asked(7.0, "interrupt")[1], START + 7.0)
    assert state.decide(START + 7.0) == [Stop(StopReason.CANCEL, kill=True), Stop(StopReason.INTERRUPT, kill=True)]
    state.fold(asked(8.0)[1], START + 8.0)
    state.fold(ended(8.0)[1], START + 8.0)
    state.fold(asked(8.5)[1], START + 8.5)
    assert (state.decide(START + 9.0), state.status) == ([], Status.TIMED_OUT)


def test_the_timeout_counts_down() -> None:
    """To nothing and not below; without one there is nothing to count."""
    state = state_of(*up(0, 1), timeout=5.0)
    left = [state.snapshot(START + at)["time_left"] for at in (0.0, 1.5, 5.0, 6.0)]
    assert left == [5.0, 3.5, 0.0, 0.0]
    assert state_of().snapshot(START)["time_left"] is None


def test_time_stands_still_at_the_end() -> None:
    """The run took as long as it took, whenever somebody looks."""
    state = state_of(*up(0, 1), returned(0, 1.0), returned(1, 1.0), ended(1.25), timeout=5.0)
    shot = state.snapshot(START + 1000)
    assert (shot["elapsed"], shot["time_left"]) == (1.25, 3.75)


def test_what_a_rank_said_last_stays() -> None:
    """An empty batch takes no line away, but the live line is what it is now."""
    state = state_of(*up(0, 1))
    state.heard(1, 2, "epoch 1", "50%", True)
    state.heard(1, 0, "", "", False)
    state.heard(1, 3, "", "x", False)
    assert (state.ranks[1].lines, state.ranks[1].last_line, state.ranks[1].live) == (5, "epoch 1", "x")


def test_facts_are_the_last_that_a_node_told() -> None:
    """Only a rank that a signal ended brings them."""
    state = state_of(*up(0, 1), (1.0, RankExited(0, -9, START + 1.0, facts={"oom_kills": 1})), obeyed(1, 1.6))
    assert state.facts == {"oom_kills": 1}


def test_lost_values_make_a_failure_of_a_run() -> None:
    """Though every rank has returned; another reason to fail comes before it."""
    state = state_of(*up(0, 1), returned(0, 1.0), returned(1, 1.0), ended(1.1))
    assert state.status is Status.SUCCEEDED
    assert replace(state, values_lost="the disk is gone").status is Status.FAILED
    state = state_of(
        *up(0, 1), asked(1.0), returned(0, 1.0), returned(1, 1.0), ended(1.1), values_lost="the disk is gone"
    )
    assert state.status is Status.CANCELLED
