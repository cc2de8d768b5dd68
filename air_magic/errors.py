"""Every exception of air_magic, in one file so that no module imports another for its errors.

AirMagicError
├── RequestError       asked for what cannot be; nothing was started
├── CaptureError       something the ranks need could not be sent; nothing was started
└── RunError           a run ended without its values (.run)
    ├── RankFailed     a rank raised, exited or was killed
    ├── RunTimedOut    the run's timeout struck
    └── RunCancelled   somebody asked the run to stop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import RankFailure


class AirMagicError(Exception):
    """Whatever air_magic itself raises; catch it to tell our errors from your code's."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback: where we raised is no help to anybody."""
        return [f"{type(self).__name__}: {self}"]


class RequestError(AirMagicError, ValueError):
    """The call asks for what cannot be: correct the named argument. No rank was started."""


class CaptureError(AirMagicError):
    """A name could not be sent to the ranks: follow the advice in the text. No rank was started."""


class RunError(AirMagicError):
    """A run ended without its values; ``run`` has the logs and every rank's outcome.

    Args:
        message: the report that a reader sees.
        run: the `Run` that ended.
    """

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)  # a Run holds sockets and threads; the report travels


class RankFailed(RunError):
    """A rank failed and the others were stopped; ``failure`` is the first failure in time."""

    def __init__(self, message: str, run: Any = None, failure: RankFailure | None = None) -> None:
        super().__init__(message, run)
        self.failure = failure


class RunTimedOut(RunError, TimeoutError):
    """The run outlived its ``timeout`` and was stopped; give a longer one, or ``None`` for none."""


class RunCancelled(RunError):
    """The run was stopped by `Run.cancel`, a Cancel button or the end of its `with` block."""
