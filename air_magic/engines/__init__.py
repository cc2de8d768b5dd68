"""Where supervisors are started: on this node, and in a later version on the nodes of a cluster."""

from __future__ import annotations

from typing import Protocol


class Node(Protocol):
    """One node's supervisor, wherever an engine started it."""

    def stop(self, reason: str, *, kill: bool) -> None:
        """Has it begin its stop ladder, or kill at once; does nothing if it is gone."""
