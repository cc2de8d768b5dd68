"""The log of a run as text: ranks named, identical lines told once, at a rate that a reader can bear."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .outlet import Outlet

LINE = 4000
"""A longer line is shown up to here; its rest is only in the log file."""
BAR = 300
"""Ditto for a progress bar."""
TAIL = 10
"""So many of the lines that were held back are shown when the output pauses or ends."""
NOTICE_EVERY = 1.0
"""Seconds between two lines that say how much is not shown."""
TOKEN = 500
"""Characters that one line's worth of the rate pays for; a notebook server limits characters too."""

Group = tuple[tuple[int, ...], str]
"""A line and the ranks that wrote it."""


class Line(NamedTuple):
    """One final line of a rank."""

    rank: int
    text: str
    skipped: int = 0
    """So many lines before this one are only in the log file; with an empty text there is no line but these."""


class Folder:
    """Tells the same line of several ranks once, if they wrote it within a short window.

    The order of each rank's lines is never changed, and no line waits for company longer than ``window`` seconds.
    """

    def __init__(self, world_size: int, window: float = 0.2) -> None:
        self._queues: list[deque[tuple[str, float, int]]] = [deque() for _ in range(world_size)]
        self._waiting: Counter[str] = Counter()
        self._window = window
        self._fed = 0

    def feed(self, line: Line, now: float) -> None:
        """Take in one line."""
        self._fed += 1
        self._queues[line.rank].append((line.text, now, self._fed))
        self._waiting[line.text] += 1

    def take(self, now: float, flush: bool = False) -> list[Group]:
        """The lines that are to be shown now, in order; with ``flush`` all there are."""
        taken = []
        while (text := self._next(float("inf") if flush else now)) is not None:
            ranks = tuple(rank for rank, queue in enumerate(self._queues) if queue and queue[0][0] == text)
            for rank in ranks:
                self._queues[rank].popleft()
            self._waiting[text] -= len(ranks)
            if not self._waiting[text]:
                del self._waiting[text]
            taken.append((ranks, text))
        return taken

    def _next(self, now: float) -> str | None:
        heads = [queue[0] for queue in self._queues if queue]
        if not heads:
            return None
        text, arrived, _ = min(heads, key=itemgetter(2))
        together = sum(head[0] == text for head in heads)
        if together == len(self._queues):
            return text
        if now - arrived < self._window:
            return None
        if self._waiting[text] > together:
            # Another rank has it further back: what stands before it there goes first, if no other rank has that.
            due = (head for head in heads if self._waiting[head[0]] == 1 and now - head[1] >= self._window)
            return min(due, key=itemgetter(2), default=(text,))[0]
        return text


class TextView:
    """Shows a run's log and its progress bars in an outlet."""

    def __init__(
        self,
        outlet: Outlet,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        rate: int = 200,
        burst: int = 1000,
        log_dir: str = "",
    ) -> None:
        self._outlet = outlet
        self._world_size = world_size
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._log_dir = log_dir
        self._folder = Folder(world_size)
        self._tokens = float(burst)
        self._filled = self._noticed = clock()
        self._muted = False
        self._tail: deque[Group] = deque()
        self._unshown: Counter[int] = Counter()
        self._told = 0  # notes of the run that stand in the outlet already

    def note(self, text: str) -> None:
        """Show something about the run itself."""
        self._outlet.write(f"{text}\n")

    def publish(self, snapshot: dict[str, Any], lines: Sequence[Line]) -> None:
        """Show what is new; called at most ten times a second."""
        now = self._clock()
        if snapshot["phase"] != "ended":  # what is noted of the end comes after the last lines
            self._tell(snapshot)
        # Of a flood only the newest lines are looked at, so that it costs the kernel little.
        flood = len(lines) - (self._rate if self._muted else 4 * self._burst)
        for index, line in enumerate(lines):
            self._unshown[line.rank] += line.skipped
            if line.skipped and not line.text:
                continue
            if index < flood:
                self._unshown[line.rank] += 1
            else:
                self._folder.feed(line, now)
        self._write(self._admit(self._folder.take(now), now))
        self._outlet.live(self._bars(snapshot))

    def finish(self, snapshot: dict[str, Any]) -> None:
        """Show what was held back, the last state of the bars, and the summary."""
        now = self._clock()
        shown = self._admit(self._folder.take(now, flush=True), now)
        self._write(shown + self._resume())
        self._outlet.live(self._bars(snapshot))
        self._outlet.close()
        self._tell(snapshot)
        if snapshot["summary"]:
            self.note(snapshot["summary"])

    def _tell(self, snapshot: dict[str, Any]) -> None:
        """Show the run's notes that are new."""
        for note in snapshot["notes"][self._told :]:
            self.note(f"air_magic: {note}")
        self._told = len(snapshot["notes"])

    def _write(self, lines: Iterable[str]) -> None:
        if text := "".join(f"{line}\n" for line in lines):
            self._outlet.write(text)

    def _admit(self, groups: Iterable[Group], now: float) -> list[str]:
        """What the rate allows of these lines; the others are counted and the last ones kept."""
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        shown: list[str] = []
        # Once held back, the log rests for a second: whole stretches are better to read than samples.
        if self._muted and self._tokens >= min(self._rate, self._burst):
            shown += self._resume()
        elif not self._muted and self._unshown.total() and now - self._noticed >= NOTICE_EVERY:
            shown.append(self._notice())
        for ranks, text in groups:
            cost = 1 + min(len(text), LINE) // TOKEN
            self._muted = self._muted or self._tokens < cost
            if self._muted:
                self._hold(ranks, text)
            else:
                self._tokens -= cost
                shown.append(self._labelled(ranks, text))
        return shown

    def _hold(self, ranks: tuple[int, ...], text: str) -> None:
        self._tail.append((ranks, text))
        if len(self._tail) > TAIL:
            self._unshown.update(self._tail.popleft()[0])

    def _resume(self) -> list[str]:
        """How many lines were left out, and the last of those that were held back."""
        shown = [self._notice()] if self._unshown.total() else []
        for ranks, text in self._tail:
            self._tokens -= 1 + min(len(text), LINE) // TOKEN
            shown.append(self._labelled(ranks, text))
        self._tail.clear()
        self._muted = False
        return shown

    def _notice(self) -> str:
        counts = [f"rank {rank}: {count:,}" for rank, count in sorted(self._unshown.items()) if count]
        if len(counts) > 8:
            counts[8:] = [f"{len(counts) - 8} more ranks"]
        total = self._unshown.total()
        where = f"; all of them are in {self._log_dir}" if self._log_dir else ""
        self._unshown.clear()
        self._noticed = self._filled
        return f"… {total:,} {'line' if total == 1 else 'lines'} not shown here ({', '.join(counts)}){where}"

    def _labelled(self, ranks: tuple[int, ...], text: str) -> str:
        label = f"[rank {ranks[0]}]" if len(ranks) == 1 else f"[ranks {ranges(ranks)}]"
        if self._outlet.colour:
            label = f"\x1b[2m{label}\x1b[0m"
        return f"{label} {clip(text, LINE)}"

    def _bars(self, snapshot: dict[str, Any]) -> list[str]:
        width = len(str(self._world_size - 1))
        return [
            f"rank {number:>{width}} {clip(rank['live'], BAR)}"
            for number, rank in enumerate(snapshot["ranks"])
            if rank["bar"] and rank["live"]
        ]


def ranges(ranks: Sequence[int]) -> str:
    """Ascending numbers as ``0-2,5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def clip(text: str, limit: int) -> str:
    """The text up to ``limit`` characters, and how many more there are; its colours are closed."""
    if len(text) <= limit:
        return text
    kept = re.sub(r"\x1b(\[[0-9;:]*)?\Z", "", text[:limit])
    reset = "\x1b[0m" if "\x1b" in kept else ""
    return f"{kept}{reset}… ({len(text) - limit:,} more characters)"
