"""The stop ladder: ask, insist, kill; one for every reason to stop, and pure, so that it can be tested by the clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence

Rungs = Sequence[tuple[float, signal.Signals]]

ORDERLY: Rungs = ((0.0, signal.SIGINT), (5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
"""Seconds after the request, and the signal: SIGINT first, so that `finally` runs and checkpoints are saved."""

ABANDONED: Rungs = ((0.0, signal.SIGINT), (1.0, signal.SIGKILL))
"""When the kernel is gone: all must be over within two seconds."""

AT_ONCE: Rungs = ((0.0, signal.SIGKILL),)
"""A second request."""


class Ladder:
    """Which signals are due; it only ever gets harder, so it may be asked again in any phase."""

    def __init__(self) -> None:
        self._due: list[tuple[float, signal.Signals]] = []
        self._reached: signal.Signals | None = None
        self.begun_at: float | None = None
        """When stopping began, in the caller's seconds; None while nobody asked."""

    def climb(self, rungs: Rungs, now: float) -> None:
        """Begins to stop, or takes the given rungs from now on where they come sooner than those left."""
        first = self.begun_at is None
        if first:
            self.begun_at = now
        offered = [(now + delay, number) for delay, number in rungs]
        if not first:
            offered = [(at, number) for at, number in offered if number is not signal.SIGINT]
        by_signal: dict[signal.Signals, float] = {}
        for at, number in [*self._due, *offered]:
            by_signal[number] = min(at, by_signal.get(number, at))
        if self._reached is signal.SIGKILL:
            by_signal.clear()
        last = by_signal.get(signal.SIGKILL, float("inf"))
        self._due = sorted((at, number) for number, at in by_signal.items() if at < last or number is signal.SIGKILL)

    def due(self, now: float) -> list[signal.Signals]:
        """The signals to send now, gentlest first; each is named once."""
        ready = [number for at, number in self._due if at <= now]
        self._due = [(at, number) for at, number in self._due if at > now]
        if ready:
            self._reached = ready[-1]
        return ready

    @property
    def next_at(self) -> float:
        """When the next signal is due; infinity if none is."""
        return self._due[0][0] if self._due else float("inf")
