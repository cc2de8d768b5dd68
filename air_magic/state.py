"""Events in, snapshot and decisions out: what is known of a run, without I/O and without a clock."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

from .events import Event, NodeEnded, NodeLost, NodeStarted, Output, RankExited, RankStarted, StopAsked
from .result import Ending, RankFailure, RankOutcome

GRACE = 0.5
"""Seconds from the first failure to the first signal, so that other ranks' own records arrive."""


class Phase(enum.Enum):
    """Where a run stands. STARTING → RUNNING → ENDED, with STOPPING between from wherever a stop is asked."""

    STARTING = "starting"  # until every rank's process exists
    RUNNING = "running"
    STOPPING = "stopping"  # a stop was asked; the supervisors climb their ladder
    ENDED = "ended"  # no process of the run is left


class StopReason(enum.Enum):
    """Why a run was stopped; the first one counts."""

    FAILURE = "failure"
    TIMEOUT = "timeout"
    CANCEL = "cancel"
    INTERRUPT = "interrupt"


class Status(enum.Enum):
    """What a run amounts to."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


_STATUS_OF = {
    StopReason.FAILURE: Status.FAILED,
    StopReason.TIMEOUT: Status.TIMED_OUT,
    StopReason.CANCEL: Status.CANCELLED,
    StopReason.INTERRUPT: Status.INTERRUPTED,
}


@dataclass(frozen=True, slots=True)
class Stop:
    """The decision to have every supervisor stop its ranks."""

    reason: StopReason
    kill: bool
    """Without asking first."""


@dataclass
class RankState:
    """What is known of one rank."""

    rank: int
    state: str = "starting"
    """starting, running, returned, failed or stopped."""
    pid: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    last_line: str = ""
    live: str = ""
    """The line that is not final yet: a progress bar or an unfinished print."""
    bar: bool = False
    """Whether the live line has been rewritten, as progress bars are."""
    lines: int = 0
    """How many lines it has written, those included that only its log file has."""


@dataclass
class RunState:
    """A run as its events tell it; fold events in, ask for decisions and snapshots."""

    run_id: str
    name: str
    world_size: int
    accelerator: str
    log_dir: str
    started_at: float
    """Seconds since the epoch."""
    timeout: float | None = None
    """Seconds; None for none."""
    notes: list[str] = field(default_factory=list)
    ranks: list[RankState] = field(default_factory=list)
    outcomes: dict[int, RankOutcome] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What each rank wrote of itself; see `air_magic.rank`."""
    facts: dict[str, Any] = field(default_factory=dict)
    reason: StopReason | None = None
    ended_at: float | None = None
    values_lost: str = ""
    """Why the values cannot be had though every rank has returned; empty if they can."""
    summary: str = ""
    """The run's last line, once it has ended."""
    _failed_at: float | None = None
    _stopping_since: float | None = None
    _stops: list[Stop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [RankState(rank) for rank in range(self.world_size)]

    @property
    def phase(self) -> Phase:
        """Where the run stands."""
        if self.ended_at is not None:
            return Phase.ENDED
        if self.reason is not None:
            return Phase.STOPPING
        return Phase.STARTING if any(rank.pid is None for rank in self.ranks) else Phase.RUNNING

    @property
    def status(self) -> Status:
        """What the run amounts to so far."""
        if self.phase is not Phase.ENDED:
            return Status.RUNNING
        if self.reason is not None:
            return _STATUS_OF[self.reason]
        return Status.FAILED if self.values_lost else Status.SUCCEEDED

    def fold(self, event: Event, now: float) -> None:
        """Takes one event in; ``now`` is seconds since the epoch."""
        match event:
            case NodeStarted() | Output():  # output becomes lines first; see `heard`
                return
            case RankStarted(rank, pid, at):
                state = self.ranks[rank]
                state.state, state.pid, state.started_at = "running", pid, at
            case RankExited():
                self._rank_exited(event, now)
            case NodeEnded(_, notes):
                self.notes += notes
                self._end(now, notes[-1] if notes else "it was never started")
            case NodeLost(_, reason):
                self._end(now, reason)
            case StopAsked(reason):
                self._ask(StopReason(reason), now, kill=self.reason is not None)

    def heard(self, rank: int, lines: int, last_line: str, live: str, bar: bool) -> None:
        """Notes what a rank's output has come to."""
        state = self.ranks[rank]
        state.lines += lines
        state.last_line = last_line or state.last_line
        state.live, state.bar = live, bar

    def decide(self, now: float) -> list[Stop]:
        """What is to be done now; each decision is given once."""
        if self.phase is not Phase.ENDED and self.reason is None:
            if self._failed_at is not None and now >= self._failed_at + GRACE:
                self._ask(StopReason.FAILURE, now)
            elif self.timeout is not None and now >= self.started_at + self.timeout:
                self._ask(StopReason.TIMEOUT, now)
        stops, self._stops = self._stops, []
        return stops

    def due_at(self) -> float:
        """When `decide` has something to say by time alone, in seconds since the epoch; infinity for never."""
        if self.phase is Phase.ENDED or self.reason is not None:
            return float("inf")
        times = [self.started_at + self.timeout] if self.timeout is not None else []
        if self._failed_at is not None:
            times.append(self._failed_at + GRACE)
        return min(times, default=float("inf"))

    def cause(self) -> RankFailure | None:
        """The first failure in time that is not the consequence of another, or None."""
        failures = [o.failure for o in self.outcomes.values() if o.failure and not o.stopped]
        return min(failures, key=lambda f: (f.is_consequence, f.time_ns), default=None)

    def snapshot(self, now: float) -> dict[str, Any]:
        """The run as one JSON object, the only thing that views see; durations are in seconds."""
        elapsed = (self.ended_at or now) - self.started_at
        cause = self.cause()
        return {
            "schema": 1,
            "run_id": self.run_id,
            "name": self.name,
            "phase": self.phase.value,
            "status": self.status.value,
            "reason": self.reason.value if self.reason else None,
            "started_at": self.started_at,
            "elapsed": elapsed,
            "timeout": self.timeout,
            "time_left": None if self.timeout is None else max(0.0, self.timeout - elapsed),
            "world_size": self.world_size,
            "accelerator": self.accelerator,
            "log_dir": self.log_dir,
            "notes": list(self.notes),
            "failure": cause.to_json() if cause else None,
            "ranks": [asdict(rank) for rank in self.ranks],
            "summary": self.summary,
        }

    def _rank_exited(self, event: RankExited, now: float) -> None:
        state = self.ranks[event.rank]
        state.ended_at = event.at
        if event.outcome is not None:
            self.records[event.rank] = event.outcome
        self.facts = event.facts or self.facts
        outcome = RankOutcome.of_exit(
            event.rank, event.returncode, event.outcome, event.at, stopping_since=self._stopping_since
        )
        self._settle(outcome, now)

    def _settle(self, outcome: RankOutcome, now: float) -> None:
        self.outcomes[outcome.rank] = outcome
        state = self.ranks[outcome.rank]
        if outcome.ending is Ending.RETURNED:
            state.state = "returned"
        elif outcome.stopped:
            state.state = "stopped"
        else:
            state.state = "failed"
            self._failed_at = now if self._failed_at is None else self._failed_at
            if self.reason is not None:  # it had failed before the stop, and only took long to exit
                self.reason = StopReason.FAILURE

    def _end(self, now: float, why: str) -> None:
        """Nothing of the run is left; ``why`` is what became of ranks whose exit nobody saw."""
        stopped = self.reason is not None
        for state in self.ranks:
            if state.rank not in self.outcomes:
                # A rank that never came to be is why the others were killed, whenever we hear of it.
                failed_at = now if state.pid is not None else self.started_at
                failure = RankFailure(state.rank, Ending.DIED, message=why, time_ns=int(failed_at * 1e9))
                self._settle(RankOutcome(state.rank, Ending.DIED, None, failure, stopped), now)
        if self._failed_at is not None and self.reason is None:
            self.reason = StopReason.FAILURE
        self._stops.clear()
        self.ended_at = now

    def _ask(self, reason: StopReason, now: float, *, kill: bool = False) -> None:
        if self.phase is Phase.ENDED:
            return
        if self.reason is None:
            # Whoever stops a run that is failing already must still be told of the failure.
            self.reason = StopReason.FAILURE if self._failed_at is not None else reason
            self._stopping_since = now
        self._stops.append(Stop(reason, kill))
