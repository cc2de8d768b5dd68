"""A Run: the one loop that takes a run's events, decides, and keeps what the run amounts to."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from . import report, returns
from .engines import Node
from .events import Event, Inbox, Output, StopAsked
from .result import RankOutcome
from .rundir import RunDir
from .state import Phase, RunState, Status, StopReason
from .transcript import Transcript
from .views import View

T = TypeVar("T")

PUBLISH_EVERY = 0.1
"""Seconds between two updates of a view; faster ones a browser cannot use."""

RUNS: weakref.WeakValueDictionary[str, Run[Any]] = weakref.WeakValueDictionary()
"""The runs of this kernel that somebody still holds, by id."""

ENDED: deque[dict[str, Any]] = deque(maxlen=50)
"""The last snapshots of the runs that have ended: they are known after nobody holds them any more."""


class Run(Generic[T]):
    """One launch of a function or a cell on N ranks; behaves like a `concurrent.futures.Future`.

    Used as a context manager it is cancelled when the block ends by an exception.
    """

    def __init__(
        self,
        state: RunState,
        classes: list[type],
        view: View,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.time,
        label: Callable[[str], str] = str,
    ) -> None:
        self._state = state
        self._classes = classes
        self._view: View | None = view
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._clock = clock
        self._label = label
        self._folder = RunDir.at(state.log_dir)
        self._transcript = Transcript(state)
        self._snapshot = state.snapshot(clock())
        self._values: list[Any] = []
        self._exception: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._ended = threading.Event()
        RUNS[state.run_id] = self

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that name the run, also in its folder's name."""
        return self._state.run_id

    @property
    def name(self) -> str:
        """What the run is called in views."""
        return self._state.name

    @property
    def world_size(self) -> int:
        """How many ranks the run has."""
        return self._state.world_size

    @property
    def status(self) -> str:
        """``running``, ``succeeded``, ``failed``, ``timed out``, ``cancelled`` or ``interrupted``."""
        return str(self._snapshot["status"])

    @property
    def log_dir(self) -> str:
        """The folder with ``rank-0.log`` and so on."""
        return self._state.log_dir

    @property
    def outcomes(self) -> Mapping[int, RankOutcome]:
        """How each rank ended, by rank; ranks that still run are not in it."""
        return dict(sorted(self._state.outcomes.items()))

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self.name}: {self.status}, {self.world_size} ranks>"

    def done(self) -> bool:
        """Whether the run has ended and no process of it is left."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds for the end; whether it came."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> list[T]:
        """One value per rank, in rank order, once the run has ended.

        Raises:
            TimeoutError: if the run has not ended within ``timeout`` seconds; it goes on.
            RankFailed: or the failing rank's own exception, whose cause this then is.
            RunTimedOut: if the run's own timeout struck.
            RunCancelled: if it was cancelled.
            KeyboardInterrupt: if the notebook was interrupted.
        """
        __tracebackhide__ = True
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(self._traceback)
        return self._values

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.name} has not ended within {timeout} s; it goes on")
        return self._exception

    def cancel(self) -> bool:
        """Asks the ranks to stop, and a second time kills them; returns at once, False if the run has ended."""
        return self._ask(StopReason.CANCEL)

    def snapshot(self) -> dict[str, Any]:
        """The state of the run as one JSON object; durations in seconds."""
        return self._snapshot

    def logs(self, rank: int) -> str:
        """All that a rank has written to its stdout and stderr."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a run with ranks 0 to {self.world_size - 1}")
        log = self._folder.log(rank)
        return log.read_text("utf-8", "replace") if log.exists() else ""  # the rank may not have been started yet

    def show(self) -> None:
        """Prints where the run stands, with the last lines of every rank, in this cell."""
        print(report.standing(self._snapshot))  # noqa: T201 - it was asked for

    def __enter__(self) -> Run[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and self.cancel():
            self._ended.wait()

    def begin(self, start: Callable[[Callable[[Event], None]], Node], *, publish: bool) -> None:
        """Starts the ranks and, in a thread, the loop.

        Args:
            start: has an engine start a supervisor that delivers its events to the callable it is given.
            publish: whether that thread serves the view too; if not, somebody must `watch`.
        """
        node = start(self._inbox.put)
        loop = threading.Thread(target=self.drive, args=(node, publish), name=f"air_magic-run-{self.id}", daemon=True)
        loop.start()

    def watch(self) -> None:
        """Serves the view in this thread until the run has ended; an interrupt stops the run, a second one kills."""
        __tracebackhide__ = True
        interrupted = False
        while True:
            try:
                while not self._ended.wait(PUBLISH_EVERY):
                    self._publish()
                self._publish(end=True)
                break
            except KeyboardInterrupt:
                interrupted = True
                self._ask(StopReason.INTERRUPT)
        if interrupted and self._exception is None:  # it came too late to stop anything, but "Run all" must stop
            raise report.interruption(f"{self.name} had returned already; its values are in the Run's result()")

    def drive(self, node: Node, publish: bool) -> None:
        """The loop: one event at a time until nothing of the run is left."""
        try:
            while self._state.ended_at is None:
                self._step(node)
                if publish:
                    self._publish()
            self._conclude()
        except BaseException as error:  # a fault of ours: no rank may go on unseen, and nobody wait for ever
            self._exception, self._traceback = error, error.__traceback__
            fault = {"phase": Phase.ENDED.value, "status": Status.FAILED.value, "summary": f"{self.name}: {error!r}"}
            self._snapshot = self._snapshot | fault
            node.stop(StopReason.FAILURE.value, kill=True)
        finally:
            if publish:
                self._publish(end=True)
            ENDED.append(self._snapshot)
            self._ended.set()

    def _step(self, node: Node) -> None:
        """Takes the events of a short while, and acts on what they make due."""
        state = self._state
        begun = now = self._clock()
        until = begun + PUBLISH_EVERY
        while begun <= now < until and state.ended_at is None:  # a clock may be set back
            with contextlib.suppress(queue.Empty):  # time alone may have made something due
                event = self._inbox.get(timeout=max(0.0, min(state.due_at(), until) - now))
                state.fold(event, self._clock())
                if isinstance(event, Output):
                    self._transcript.feed(event)
            now = self._clock()
            for stop in state.decide(now):
                node.stop(stop.reason.value, kill=stop.kill)
        self._snapshot = state.snapshot(now)

    def _conclude(self) -> None:
        """Loads the values, finds the exception, and lets go of what only this needed."""
        self._transcript.close()
        self._values = returns.values_of(self._state, self._classes)
        rebuild = partial(returns.error_of, self._state, known=self._classes)
        self._exception = report.exception(self._state, self, rebuild, self._label)
        self._traceback = getattr(self._exception, "__traceback__", None)
        report.conclude(self._state)
        self._snapshot = self._state.snapshot(self._clock())
        self._folder.remove_values()

    def _ask(self, reason: StopReason) -> bool:
        if self._ended.is_set():
            return False
        self._inbox.put(StopAsked(reason.value, self._clock()))
        return True

    def _publish(self, end: bool = False) -> None:
        if self._view is None:
            return
        try:
            self._view.publish(self._snapshot, self._transcript.take())
            if end:
                self._view.finish(self._snapshot)
        except Exception as error:  # a training must not die of its display
            self._view = None
            self._state.notes.append(f"the output could not be shown any more: {error!r}; the log files have it")
