"""How one rank ended: the words that the rank writes and the kernel reads."""

from __future__ import annotations

import enum
import signal
from dataclasses import asdict, dataclass, replace
from typing import Any

# What a rank says when a peer has gone: gloo's, NCCL's and the store's texts.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connectFullMesh failed",
    "Timed out waiting",
    "Broken pipe",
    "Socket Timeout",
    "remote process exited",
    "ncclRemoteError",
    "recvValue failed",
    "failed to recv, got 0 bytes",
)


class Ending(enum.Enum):
    """How a rank came to its end."""

    RETURNED = "returned"  # its code returned; a value was written
    RAISED = "raised"  # its code raised an exception (SystemExit with a code other than 0 included)
    DIED = "died"  # the process ended without a record: a signal, or os._exit
    UNLOADED = "unloaded"  # the payload could not be loaded, so none of the user's code ran


@dataclass(frozen=True)
class Frame:
    """One line of a rank's traceback."""

    filename: str
    lineno: int
    function: str
    line: str
    """The source line, stripped; empty where the source is unknown."""
    first_lineno: int
    """Where the function's code begins; tools that show source need it."""
    user: bool
    """Whether the user wrote it: not the standard library, not an installed package, not us."""


@dataclass(frozen=True)
class RankFailure:
    """Why one rank failed; rank 0's and rank 3's are compared by ``time_ns``."""

    rank: int
    ending: Ending
    type_name: str = ""
    """The exception's qualified type name; empty for a death without exception."""
    message: str = ""
    time_ns: int = 0
    """When the exception was caught in the rank, or the death was seen; `time.time_ns`."""
    frames: tuple[Frame, ...] = ()
    traceback: str = ""
    """The whole traceback as Python prints it."""
    returncode: int | None = None
    """As in `subprocess.Popen.returncode`: negative for a signal; None while unknown."""

    @property
    def signal_name(self) -> str:
        """``SIGKILL`` and the like, or an empty string when no signal ended the rank."""
        if self.returncode is None or self.returncode >= 0:
            return ""
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.returncode}"

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone, so that it is not the cause."""
        return any(text in self.message for text in _LOST_PEER) or self.signal_name in ("SIGTERM", "SIGABRT")

    @property
    def summary(self) -> str:
        """One line: the exception with its message, the signal, or the exit code."""
        if self.type_name:
            first = self.message.strip().split("\n")[0]
            return f"{self.type_name}: {first}" if first else self.type_name
        return self.signal_name or f"exit code {self.returncode}, without an exception"

    def to_json(self) -> dict[str, Any]:
        """The failure as plain data."""
        return asdict(self) | {"ending": self.ending.value, "frames": [asdict(frame) for frame in self.frames]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankFailure:
        """The failure that `to_json` gave."""
        frames = tuple(Frame(**frame) for frame in data["frames"])
        return cls(**data | {"ending": Ending(data["ending"]), "frames": frames})


@dataclass(frozen=True)
class RankOutcome:
    """How one rank of a finished run ended."""

    rank: int
    ending: Ending
    returncode: int | None = None
    failure: RankFailure | None = None
    stopped: bool = False
    """Whether the rank ended because the run was being stopped: a consequence, not a cause."""
    notes: tuple[str, ...] = ()
    """What is worth a line but no error, for instance a death after the value was written."""

    @classmethod
    def of_exit(
        cls, rank: int, returncode: int, record: dict[str, Any] | None, at: float, *, stopping_since: float | None
    ) -> RankOutcome:
        """The outcome that follows from how the process went and what it wrote of itself.

        Args:
            rank: which rank.
            returncode: as in `subprocess.Popen.returncode`.
            record: what `air_magic.rank` wrote, or None if it died before.
            at: when the process ended, seconds since the epoch.
            stopping_since: when the run began to be stopped, if it did; what failed before is no consequence.
        """
        ending = Ending.DIED if record is None else Ending(record["ending"])
        notes = () if record is None else tuple(record["notes"])
        if ending is Ending.RETURNED:
            if returncode:
                death = RankFailure(rank, Ending.DIED, returncode=returncode)
                notes += (f"had returned its value when it ended by {death.summary}",)
            return cls(rank, ending, returncode, None, False, notes)
        if record is None:
            failure = RankFailure(rank, ending, time_ns=int(at * 1e9), returncode=returncode)
        else:
            failure = replace(RankFailure.from_json(record["failure"]), returncode=returncode)
        stopped = stopping_since is not None and failure.time_ns >= stopping_since * 1e9
        return cls(rank, ending, returncode, failure, stopped, notes)
