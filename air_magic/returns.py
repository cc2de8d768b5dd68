"""What comes back from the ranks by file: their values, and a failed rank's exception as an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import values
from .result import RankFailure
from .rundir import RunDir
from .state import RunState, Status


def values_of(state: RunState, known: Sequence[type]) -> list[Any]:
    """One value per rank of a run that succeeded, and none of another; a value that is lost makes a run fail.

    Args:
        state: the run, ended; warnings become notes of it.
        known: the notebook's own classes; see `air_magic.values`.
    """
    if state.status is not Status.SUCCEEDED:
        return []
    try:
        return [_value(state, rank, known) for rank in range(state.world_size)]
    except (OSError, ValueError) as error:  # a file is gone, or not what its rank should have written
        state.values_lost = str(error)
        return []


def error_of(state: RunState, failure: RankFailure, known: Sequence[type]) -> BaseException | None:
    """The exception that ended a rank, or None if only its text is known."""
    if state.records[failure.rank]["error"] is None:
        return None
    try:
        error, _ = values.load(RunDir.at(state.log_dir).error(failure.rank), known)
    except (OSError, ValueError):  # the report tells of it all the same
        return None
    return error if isinstance(error, BaseException) else None


def _value(state: RunState, rank: int, known: Sequence[type]) -> Any:
    place = state.records[rank]["value"]
    if place is None:
        return None
    path = next((path for path in RunDir.at(state.log_dir).values(rank) if str(path) == place), None)
    if path is None:
        raise ValueError(f"rank {rank} names a file outside of its run's folders: {place}")
    value, warnings = values.load(path, known)
    state.notes += [f"rank {rank}: {warning}" for warning in warnings]
    return value
