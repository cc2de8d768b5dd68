"""Ladder: which signal is due when, whoever asks and however often."""

from __future__ import annotations

import random
import signal
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from air_magic.ladder import ABANDONED, AT_ONCE, ORDERLY, Ladder, Rungs


def climbed(*requests: tuple[float, Rungs]) -> list[tuple[float, signal.Signals]]:
    """Every signal with its time, from the requests with theirs."""
    ladder, todo, sent = Ladder(), sorted(requests, key=lambda request: request[0]), []
    while todo or ladder.next_at < float("inf"):
        now = min(todo[0][0] if todo else float("inf"), ladder.next_at)
        while todo and todo[0][0] == now:
            ladder.climb(todo.pop(0)[1], now)
        sent += [(now, number) for number in ladder.due(now)]
    return sent


@pytest.mark.parametrize(
    ("requests", "signals"),
    [
        ([(0, ORDERLY)], [(0, SIGINT), (5, SIGTERM), (8, SIGKILL)]),
        ([(7, ABANDONED)], [(7, SIGINT), (8, SIGKILL)]),
        ([(3, AT_ONCE)], [(3, SIGKILL)]),
        ([(0, ORDERLY), (1, AT_ONCE)], [(0, SIGINT), (1, SIGKILL)]),
        ([(0, ORDERLY), (2, ABANDONED)], [(0, SIGINT), (3, SIGKILL)]),
        ([(0, ORDERLY), (6, ABANDONED)], [(0, SIGINT), (5, SIGTERM), (7, SIGKILL)]),
        ([(0, ABANDONED), (0.5, ORDERLY)], [(0, SIGINT), (1, SIGKILL)]),
        ([(0, ORDERLY), (2, ORDERLY)], [(0, SIGINT), (5, SIGTERM), (8, SIGKILL)]),
        ([(0, ORDERLY), (0, AT_ONCE)], [(0, SIGKILL)]),
        ([(0, AT_ONCE), (1, ORDERLY), (2, AT_ONCE)], [(0, SIGKILL)]),
        ([], []),
    ],
)
def test_signals_get_harder_and_come_in_time(requests: list[tuple[float, Rungs]], signals: object) -> None:
    """Nobody is asked twice, and a later request never makes the end later."""
    assert climbed(*requests) == signals


def test_stopping_began_with_the_first_request() -> None:
    """Later ones do not change that."""
    ladder = Ladder()
    assert (ladder.begun_at, ladder.due(1.0), ladder.next_at) == (None, [], float("inf"))
    ladder.climb(ORDERLY, 2.0)
    ladder.climb(AT_ONCE, 3.0)
    assert ladder.begun_at == 2.0


def test_signals_that_were_missed_come_gentlest_first() -> None:
    """A supervisor that was not scheduled for a while sends what is due, each once."""
    ladder = Ladder()
    ladder.climb(ORDERLY, 0.0)
    assert (ladder.due(6.0), ladder.next_at) == ([SIGINT, SIGTERM], 8.0)
    assert (ladder.due(60.0), ladder.next_at) == ([SIGKILL], float("inf"))


def test_any_requests_end_in_one_kill() -> None:
    """Whatever is asked when: no signal comes twice, none is softer than the one before, SIGKILL comes last."""
    for seed in range(500):
        dice = random.Random(seed)
        requests = [
            (dice.uniform(0, 10), dice.choice([ORDERLY, ABANDONED, AT_ONCE])) for _ in range(dice.randrange(1, 5))
        ]
        sent = climbed(*requests)
        numbers = [number for _, number in sent]
        assert numbers == sorted(set(numbers), key=[SIGINT, SIGTERM, SIGKILL].index), seed
        assert numbers[-1] is SIGKILL, seed
        assert sent[-1][0] == min(at + rungs[-1][0] for at, rungs in requests), seed
