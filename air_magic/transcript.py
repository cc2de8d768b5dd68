"""What the ranks have written, as lines: those that no view has taken yet, and where each rank stands."""

from __future__ import annotations

from collections import deque

from .events import Output
from .state import RunState
from .terminal import Terminal
from .views.text import Line

KEPT = 20_000
"""Lines that wait for a view; when more come, the oldest are only in the log files."""


class Transcript:
    """Reads each rank's output as a terminal would; one thread feeds it, another may take.

    Args:
        state: is told of each rank's last and live line.
        kept: see `KEPT`.
    """

    def __init__(self, state: RunState, kept: int = KEPT) -> None:
        self._state = state
        self._terminals = [Terminal() for _ in state.ranks]
        # Each with its number among its rank's lines, so that a gap says how many were left out.
        self._waiting: deque[tuple[int, Line]] = deque(maxlen=kept)
        self._expected = [0 for _ in state.ranks]

    def feed(self, output: Output) -> None:
        """Takes in what a rank wrote."""
        self._add(output.rank, self._terminals[output.rank].feed(output.text), output.skipped)

    def close(self) -> None:
        """Makes every live line final: the ranks write no more."""
        for rank, terminal in enumerate(self._terminals):
            self._add(rank, terminal.close())

    def take(self) -> list[Line]:
        """The lines that have become final since the last time."""
        lines = []
        for _ in range(len(self._waiting)):
            number, line = self._waiting.popleft()
            lines.append(line._replace(skipped=number - self._expected[line.rank]))
            self._expected[line.rank] = number + 1
        return lines

    def _add(self, rank: int, texts: list[str], skipped: int = 0) -> None:
        first = self._state.ranks[rank].lines + skipped
        self._waiting.extend((number, Line(rank, text)) for number, text in enumerate(texts, first))
        terminal = self._terminals[rank]
        live = terminal.live[-1] if terminal.live else ""
        self._state.heard(rank, skipped + len(texts), texts[-1] if texts else "", live, terminal.rewritten)
