"""How a run is shown: each view gets snapshots and lines, and asks no process anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .text import Line


class View(Protocol):
    """Somebody who looks at a run: text, or in a later version a widget."""

    def publish(self, snapshot: dict[str, Any], lines: Sequence[Line]) -> None:
        """Shows what is new."""

    def finish(self, snapshot: dict[str, Any]) -> None:
        """Shows the end."""
