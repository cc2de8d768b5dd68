"""What a finished run raises: the report that a reader sees, and the rank's exception as its own type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from .errors import RankFailed, RunCancelled, RunError, RunTimedOut
from .hints import hint
from .result import Ending, Frame, RankFailure
from .rundir import RunDir
from .state import RunState, Status

SHOWN_FRAMES = 12
"""Frames of a deep recursion that the report shows; the log has them all."""


def summary(state: RunState) -> str:
    """The run's last line: ranks, time, log folder."""
    seconds = (state.ended_at or state.started_at) - state.started_at
    cause = state.cause()
    if state.status is Status.FAILED and cause is not None:
        what = f"rank {cause.rank} of {state.world_size} failed"
    elif state.values_lost:
        what = "its values were lost"
    else:
        told = {Status.SUCCEEDED: "returned", Status.TIMED_OUT: "stopped by the timeout"}
        what = f"{_count(state.world_size, 'rank')} {told.get(state.status, state.status.value)}"
    return f"{state.name}: {what} after {seconds:.1f} s · logs: {state.log_dir}"


def conclude(state: RunState) -> None:
    """Adds to an ended run what it has to say besides its values: its summary, and warnings as notes."""
    said = [f"rank {outcome.rank}: {note}" for outcome in state.outcomes.values() for note in outcome.notes]
    grouped = any(record["process_group"] for record in state.records.values())
    if state.status is Status.SUCCEEDED and state.world_size > 1 and not grouped:
        said.append(
            f"no rank created a process group, so {state.world_size} ranks ran side by side without each other; "
            "training code calls torch.distributed.init_process_group()"
        )
    state.notes += said
    state.summary = summary(state)


def standing(snapshot: Mapping[str, Any]) -> str:
    """Where a run stands, with the last line of every rank."""
    head = (
        f"{snapshot['name']} ({snapshot['run_id']}): {snapshot['status']} after {snapshot['elapsed']:.1f} s"
        f" · logs: {snapshot['log_dir']}"
    )
    ranks = [
        f"rank {rank['rank']}: {rank['state']}, {_count(rank['lines'], 'line')} · {rank['live'] or rank['last_line']}"
        for rank in snapshot["ranks"]
    ]
    return "\n".join([head, *ranks])


def report(state: RunState, label: Callable[[str], str] = str) -> str:
    """The failure report: which rank, what, where, how many others, a hint, where the logs are.

    Args:
        state: a run that has ended without success.
        label: turns a file name of a traceback into what the user calls it, for instance ``Cell In[3]``.
    """
    failure = state.cause()
    lines = [_headline(state, failure)]
    if failure is not None:
        lines += _frame_lines(failure, label)
        lines += _others(state, failure)
        if advice := hint(failure, state.facts):
            lines.append(f"Hint: {advice}.")
        lines.append(f"Full log: {RunDir.at(state.log_dir).log(failure.rank)}")
    else:
        lines.append(f"Full logs: {state.log_dir}")
    return "\n".join(lines)


def exception(
    state: RunState, run: Any, rebuild: Callable[[RankFailure], BaseException | None], label: Callable[[str], str]
) -> BaseException | None:
    """What `Run.result` raises, or None for a run that succeeded.

    Args:
        state: the run, ended.
        run: goes into the error's ``run``.
        rebuild: gives a rank's exception as an object, where that is possible.
        label: see `report`.
    """
    if state.status is Status.SUCCEEDED:
        return None
    text = report(state, label)
    if state.status is Status.INTERRUPTED:
        return interruption(text)
    if state.status is Status.TIMED_OUT:
        return RunTimedOut(text, run)
    if state.status is Status.CANCELLED:
        return RunCancelled(text, run)
    failure = state.cause()
    if failure is None:
        return RunError(text, run)
    failed = RankFailed(text, run, failure)
    original = rebuild(failure) if failure.ending is Ending.RAISED else None
    # Only an Exception may pass for the rank's: a KeyboardInterrupt or SystemExit would speak to the notebook.
    if not isinstance(original, Exception):
        return failed
    original.__cause__ = failed
    return original.with_traceback(rebuild_traceback(_shown(failure.frames)))


def interruption(text: str) -> KeyboardInterrupt:
    """What an interrupt ends as; IPython shows its text instead of a traceback, as for an `AirMagicError`."""
    error = KeyboardInterrupt(text)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {text}"]  # type: ignore[attr-defined] # IPython's hook
    return error


def rebuild_traceback(frames: Sequence[Frame]) -> TracebackType | None:
    """A traceback whose lines are those frames; their source is found by file name, as usual."""
    trace: TracebackType | None = None
    for frame in reversed(frames):
        # The only way to a frame object is to run code that has the file name, function and line wanted.
        first = min(frame.first_lineno, frame.lineno)
        code = compile("\n" * (frame.lineno - first) + "raise LookupError", frame.filename, "exec")
        code = code.replace(co_name=frame.function, co_firstlineno=first)
        try:
            exec(code, {"__name__": "__main__"})  # noqa: S102 - our own statement
        except LookupError as error:
            made = error.__traceback__
            while made is not None and made.tb_next is not None:
                made = made.tb_next
            if made is not None:
                trace = TracebackType(trace, made.tb_frame, made.tb_lasti, frame.lineno)
    return trace


def _headline(state: RunState, failure: RankFailure | None) -> str:
    if failure is not None and state.status is Status.FAILED:
        place = f"rank {failure.rank} of {state.world_size}"
        if failure.ending is Ending.UNLOADED:
            return f"{place} could not load what was sent to it: {failure.summary}"
        if failure.ending is Ending.DIED and failure.returncode is None:
            return f"{place} was lost: {failure.message}"
        if failure.signal_name:
            return f"{place} was killed by {failure.signal_name}"
        if failure.ending is Ending.DIED:
            return f"{place} ended by {failure.summary}"
        return f"{place} failed: {failure.type_name}: {failure.message}".rstrip(": ")
    seconds = (state.ended_at or state.started_at) - state.started_at
    if state.status is Status.TIMED_OUT:
        return f"{state.name} was stopped after its timeout of {state.timeout:g} s; pass a longer one, or timeout=None"
    if state.status in (Status.CANCELLED, Status.INTERRUPTED):
        return f"{state.name} was {state.status.value} after {seconds:.1f} s; no process of it is left"
    return f"{state.name} ended without its values: {state.values_lost}"


def _shown(frames: Sequence[Frame]) -> list[Frame]:
    """The user's frames, and the last one whoever wrote it."""
    users = [frame for frame in frames[:-1] if frame.user]
    return [*users, *frames[-1:]]


def _frame_lines(failure: RankFailure, label: Callable[[str], str]) -> list[str]:
    frames = [(frame, len(list(same))) for frame, same in itertools.groupby(_shown(failure.frames))]
    lines = []
    for index, (frame, times) in enumerate(frames):
        if SHOWN_FRAMES // 2 <= index < len(frames) - SHOWN_FRAMES // 2:
            if index == SHOWN_FRAMES // 2:
                lines.append(f"  … {len(frames) - SHOWN_FRAMES} frames left out")
            continue
        function = "" if frame.function == "<module>" else f", in {frame.function}"
        lines.append(f"  {label(frame.filename)}, line {frame.lineno}{function}")
        if frame.line:
            lines.append(f"    {frame.line}")
        if times > 1:
            lines.append(f"    … and {_count(times - 1, 'time')} more")
    return lines


def _others(state: RunState, failure: RankFailure) -> list[str]:
    others = [outcome for outcome in state.outcomes.values() if outcome.rank != failure.rank]
    counts = (
        (sum(o.ending is Ending.RETURNED for o in others), "had returned"),
        (sum(o.failure is not None and not o.stopped for o in others), "failed too"),
        (sum(o.stopped and o.ending is not Ending.RETURNED for o in others), "stopped"),
    )
    told = [f"{_count(number, 'other rank')} {what}" for number, what in counts if number]
    return [", ".join(told) + "."] if told else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
