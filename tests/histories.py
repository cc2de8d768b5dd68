"""What can happen to a run: its events in seconds after the start, and named histories with what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from air_magic.events import NodeEnded, NodeLost, NodeStarted, Output, RankExited, RankStarted, StopAsked
from air_magic.result import Ending, RankFailure
from air_magic.state import Status

START = 1000.0
LOST_PEER = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def up(*ranks: int) -> list[tuple[float, Any]]:
    """The node comes up at 0.0, its ranks at 0.1."""
    return [(0.0, NodeStarted(0, 50, 29500)), *[(0.1, RankStarted(rank, 100 + rank, START + 0.1)) for rank in ranks]]


def record(ending: Ending = Ending.RETURNED, **fields: Any) -> dict[str, Any]:
    """What a rank writes of itself."""
    blank = {"value": None, "error": None, "notes": [], "failure": None, "process_group": True}
    return {**blank, "ending": ending.value, **fields}


def returned(rank: int, at: float, returncode: int = 0, **fields: Any) -> tuple[float, RankExited]:
    """The rank's code returned."""
    return at, RankExited(rank, returncode, START + at, record(**fields))


def raised(
    rank: int, at: float, message: str = "boom", caught: float | None = None, kind: str = "ValueError", **fields: Any
) -> tuple[float, RankExited]:
    """The rank's code raised at ``caught``, and the process was gone at ``at``."""
    time_ns = round((START + (at if caught is None else caught)) * 1e9)
    ending = fields.pop("ending", Ending.RAISED)
    failure = RankFailure(rank, ending, kind, message, time_ns).to_json()
    return at, RankExited(rank, 1, START + at, record(ending, failure=failure, **fields))


def died(rank: int, at: float, returncode: int) -> tuple[float, RankExited]:
    """The process ended without a record."""
    return at, RankExited(rank, returncode, START + at)


def obeyed(rank: int, at: float) -> tuple[float, RankExited]:
    """The rank got SIGINT and let it pass."""
    return raised(rank, at, "", kind="KeyboardInterrupt")


def asked(at: float, reason: str = "cancel") -> tuple[float, StopAsked]:
    """Somebody wants the run to end."""
    return at, StopAsked(reason, START + at)


def ended(at: float, *notes: str) -> tuple[float, NodeEnded]:
    """The supervisor's last word."""
    return at, NodeEnded(0, notes)


@dataclass(frozen=True)
class History:
    """What happens to a run of two ranks, and what is expected of it."""

    events: list[tuple[float, Any]]
    ranks: str
    """How each rank stands at the end."""
    summary: str
    """Without the run's name and its log folder."""
    status: Status = Status.FAILED
    cause: int | None = None
    stops: list[tuple[float, str, bool]] = field(default_factory=list)
    """When the node was told to stop, why, and whether to kill."""
    timeout: float | None = None
    notes: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    """Notes of the launch."""


HISTORIES = {
    "all ranks return": History(
        [*up(0, 1), returned(0, 1.0), returned(1, 1.2), ended(1.3)],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 1.3 s",
    ),
    "a rank that has returned stops nobody": History(
        [*up(0, 1), returned(0, 1.0), returned(1, 100.0), ended(100.1)],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 100.1 s",
    ),
    "one rank fails and the other is stopped after the grace": History(
        [*up(0, 1), raised(1, 1.0), obeyed(0, 1.7), ended(1.8)],
        ranks="stopped failed",
        cause=1,
        stops=[(1.5, "failure", False)],
        summary="rank 1 of 2 failed after 1.8 s",
    ),
    "the last rank fails, so there is nobody to stop": History(
        [*up(0, 1), returned(0, 0.5), raised(1, 1.0), ended(1.1)],
        ranks="returned failed",
        cause=1,
        summary="rank 1 of 2 failed after 1.1 s",
    ),
    "of two failures the earlier exception is the cause, not the earlier exit": History(
        [*up(0, 1), raised(0, 1.0, caught=0.9), raised(1, 1.3, caught=0.8), ended(1.4)],
        ranks="failed failed",
        cause=1,
        summary="rank 1 of 2 failed after 1.4 s",
    ),
    "a rank that lost its peer exits first and is not the cause": History(
        [*up(0, 1), raised(0, 1.0, LOST_PEER, kind="RuntimeError"), raised(1, 1.1), ended(1.2)],
        ranks="failed failed",
        cause=1,
        summary="rank 1 of 2 failed after 1.2 s",
    ),
    "a rank that lost its peer is the cause if there is no other": History(
        [*up(0, 1), raised(0, 1.0, LOST_PEER, kind="RuntimeError"), obeyed(1, 1.6), ended(1.7)],
        ranks="failed stopped",
        cause=0,
        stops=[(1.5, "failure", False)],
        summary="rank 0 of 2 failed after 1.7 s",
    ),
    "the true cause takes so long to exit that the stop comes first": History(
        [*up(0, 1), raised(0, 1.0, LOST_PEER, kind="RuntimeError"), raised(1, 3.0, caught=0.9), ended(3.1)],
        ranks="failed failed",
        cause=1,
        stops=[(1.5, "failure", False)],
        summary="rank 1 of 2 failed after 3.1 s",
    ),
    "an exception of the clean-up after the stop is a consequence": History(
        [*up(0, 1), raised(1, 1.0), raised(0, 1.6, "disk full", kind="OSError"), ended(1.7)],
        ranks="stopped failed",
        cause=1,
        stops=[(1.5, "failure", False)],
        summary="rank 1 of 2 failed after 1.7 s",
    ),
    "a rank dies by a signal": History(
        [*up(0, 1), died(0, 1.0, -9), raised(1, 1.2, LOST_PEER, kind="RuntimeError"), ended(1.3)],
        ranks="failed failed",
        cause=0,
        summary="rank 0 of 2 failed after 1.3 s",
    ),
    "a rank that exits silently with 0 has not returned": History(
        [*up(0, 1), died(0, 1.0, 0), obeyed(1, 1.6), ended(1.7)],
        ranks="failed stopped",
        cause=0,
        stops=[(1.5, "failure", False)],
        summary="rank 0 of 2 failed after 1.7 s",
    ),
    "both ranks ignore the stop and are killed by the supervisor": History(
        [*up(0, 1), asked(1.0), died(0, 9.1, -9), died(1, 9.1, -9), ended(9.2)],
        ranks="stopped stopped",
        status=Status.CANCELLED,
        stops=[(1.0, "cancel", False)],
        summary="2 ranks cancelled after 9.2 s",
    ),
    "the timeout strikes": History(
        [*up(0, 1), obeyed(0, 5.1), obeyed(1, 5.2), ended(5.3)],
        timeout=5.0,
        ranks="stopped stopped",
        status=Status.TIMED_OUT,
        stops=[(5.0, "timeout", False)],
        summary="2 ranks stopped by the timeout after 5.3 s",
    ),
    "the timeout strikes and the user does not wait for the end of it": History(
        [*up(0, 1), asked(5.5), died(0, 5.6, -9), died(1, 5.6, -9), ended(5.7)],
        timeout=5.0,
        ranks="stopped stopped",
        status=Status.TIMED_OUT,
        stops=[(5.0, "timeout", False), (5.5, "cancel", True)],
        summary="2 ranks stopped by the timeout after 5.7 s",
    ),
    "the timeout strikes before any rank has started": History(
        [ended(0.3)],
        timeout=0.2,
        ranks="stopped stopped",
        status=Status.TIMED_OUT,
        stops=[(0.2, "timeout", False)],
        summary="2 ranks stopped by the timeout after 0.3 s",
    ),
    "the timeout strikes within the grace of a failure": History(
        [*up(0, 1), raised(0, 4.8), obeyed(1, 5.1), ended(5.2)],
        timeout=5.0,
        ranks="failed stopped",
        cause=0,
        stops=[(5.0, "timeout", False)],
        summary="rank 0 of 2 failed after 5.2 s",
    ),
    "the ranks return at the last moment before the timeout": History(
        [*up(0, 1), returned(0, 4.9), returned(1, 4.9), ended(4.95)],
        timeout=5.0,
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 5.0 s",
    ),
    "a run is cancelled before any rank has started": History(
        [asked(0.05), *up(0, 1), obeyed(0, 0.2), obeyed(1, 0.2), ended(0.3)],
        ranks="stopped stopped",
        status=Status.CANCELLED,
        stops=[(0.05, "cancel", False)],
        summary="2 ranks cancelled after 0.3 s",
    ),
    "a second request kills": History(
        [*up(0, 1), asked(1.0), asked(2.0), died(0, 2.1, -9), died(1, 2.1, -9), ended(2.2)],
        ranks="stopped stopped",
        status=Status.CANCELLED,
        stops=[(1.0, "cancel", False), (2.0, "cancel", True)],
        summary="2 ranks cancelled after 2.2 s",
    ),
    "the first reason to stop counts": History(
        [*up(0, 1), asked(1.0, "interrupt"), asked(2.0), died(0, 2.1, -9), died(1, 2.1, -9), ended(2.2)],
        timeout=1.5,
        ranks="stopped stopped",
        status=Status.INTERRUPTED,
        stops=[(1.0, "interrupt", False), (2.0, "cancel", True)],
        summary="2 ranks interrupted after 2.2 s",
    ),
    "a run is interrupted when one rank has returned already": History(
        [*up(0, 1), returned(0, 1.0), asked(2.0, "interrupt"), obeyed(1, 2.1), ended(2.2)],
        ranks="returned stopped",
        status=Status.INTERRUPTED,
        stops=[(2.0, "interrupt", False)],
        summary="2 ranks interrupted after 2.2 s",
    ),
    "ranks catch the stop and return": History(
        [*up(0, 1), asked(2.0), returned(0, 2.1), returned(1, 2.1), ended(2.2)],
        ranks="returned returned",
        status=Status.CANCELLED,
        stops=[(2.0, "cancel", False)],
        summary="2 ranks cancelled after 2.2 s",
    ),
    "who interrupts a run that is failing is told of the failure": History(
        [*up(0, 1), raised(0, 1.0), asked(1.2, "interrupt"), obeyed(1, 1.3), ended(1.4)],
        ranks="failed stopped",
        cause=0,
        stops=[(1.2, "interrupt", False)],
        summary="rank 0 of 2 failed after 1.4 s",
    ),
    "who cancels a run that has failed unseen is told of the failure": History(
        [*up(0, 1), asked(1.2), raised(0, 1.3, caught=1.0), obeyed(1, 1.4), ended(1.5)],
        ranks="failed stopped",
        cause=0,
        stops=[(1.2, "cancel", False)],
        summary="rank 0 of 2 failed after 1.5 s",
    ),
    "a rank's output comes after its exit": History(
        [*up(0, 1), returned(0, 1.0), (1.1, Output(0, "late\n")), returned(1, 1.2), ended(1.3)],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 1.3 s",
    ),
    "a rank's output comes before its start": History(
        [(0.0, Output(1, "early\n")), *up(0, 1), returned(0, 1.0), returned(1, 1.2), ended(1.3)],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 1.3 s",
    ),
    "the supervisor is lost before it has said anything": History(
        [(0.5, NodeLost(0, "the supervisor was killed"))],
        ranks="failed failed",
        cause=0,
        summary="rank 0 of 2 failed after 0.5 s",
    ),
    "the supervisor is lost while ranks run": History(
        [*up(0, 1), returned(0, 1.0), (2.0, NodeLost(0, "the supervisor was killed"))],
        ranks="returned failed",
        cause=1,
        summary="rank 1 of 2 failed after 2.0 s",
    ),
    "the supervisor is lost within the grace of a failure": History(
        [*up(0, 1), raised(1, 1.0), (1.2, NodeLost(0, "the supervisor was killed"))],
        ranks="failed failed",
        cause=1,
        summary="rank 1 of 2 failed after 1.2 s",
    ),
    "the supervisor is lost while it stops the ranks": History(
        [*up(0, 1), asked(1.0), (1.2, NodeLost(0, "the supervisor was killed"))],
        ranks="stopped stopped",
        status=Status.CANCELLED,
        stops=[(1.0, "cancel", False)],
        summary="2 ranks cancelled after 1.2 s",
    ),
    "the supervisor is lost after every rank has returned": History(
        [*up(0, 1), returned(0, 1.0), returned(1, 1.0), (1.2, NodeLost(0, "the supervisor was killed"))],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 1.2 s",
    ),
    "no rank can be started": History(
        [*up(), ended(0.2, "the ranks could not be started: no such folder")],
        ranks="failed failed",
        cause=0,
        before=["no GPU here"],
        notes=["no GPU here", "the ranks could not be started: no such folder"],
        summary="rank 0 of 2 failed after 0.2 s",
    ),
    "the second rank cannot be started and the first is killed for it": History(
        [*up(0), died(0, 0.2, -9), ended(0.3, "the ranks could not be started: too many processes")],
        ranks="failed failed",
        cause=1,
        notes=["the ranks could not be started: too many processes"],
        summary="rank 1 of 2 failed after 0.3 s",
    ),
    "the payload can be loaded by no rank": History(
        [
            *up(0, 1),
            raised(1, 1.1, "No module named 'mine'", 1.0, "ModuleNotFoundError", ending=Ending.UNLOADED),
            raised(0, 1.2, "No module named 'mine'", 1.1, "ModuleNotFoundError", ending=Ending.UNLOADED),
            ended(1.3),
        ],
        ranks="failed failed",
        cause=1,
        summary="rank 1 of 2 failed after 1.3 s",
    ),
    "a rank dies after it has returned": History(
        [*up(0, 1), returned(0, 1.0, returncode=-6), returned(1, 1.2), ended(1.3, "2 processes were killed")],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        notes=["2 processes were killed", "rank 0: had returned its value when it ended by SIGABRT"],
        summary="2 ranks returned after 1.3 s",
    ),
    "no rank has made a process group": History(
        [*up(0, 1), returned(0, 1.0, process_group=False), returned(1, 1.2, process_group=False), ended(1.3)],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        notes=[
            "no rank created a process group, so 2 ranks ran side by side without each other; "
            "training code calls torch.distributed.init_process_group()"
        ],
        summary="2 ranks returned after 1.3 s",
    ),
    "a value's file is gone": History(
        [*up(0, 1), returned(0, 1.0), returned(1, 1.0, value="FOLDER/rank-1.value"), ended(1.1)],
        ranks="returned returned",
        summary="its values were lost after 1.1 s",
    ),
    "a rank names a file that is not its own": History(
        [*up(0, 1), returned(0, 1.0, value="/etc/passwd"), returned(1, 1.0), ended(1.1)],
        ranks="returned returned",
        summary="its values were lost after 1.1 s",
    ),
    "a stop is asked in the moment of the end": History(
        [*up(0, 1), returned(0, 1.0), returned(1, 1.0), ended(1.1), asked(1.1)],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 1.1 s",
    ),
    "events come after the end": History(
        [*up(0, 1), returned(0, 1.0), returned(1, 1.0), ended(1.1), raised(0, 1.2), (2.0, NodeLost(0, "gone"))],
        ranks="returned returned",
        status=Status.SUCCEEDED,
        summary="2 ranks returned after 1.1 s",
    ),
}
