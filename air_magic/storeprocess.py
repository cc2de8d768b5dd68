"""The store's process as its supervisor sees it: started last, and ended before the ranks that wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

OUTLIVES_STOP = 1.0
"""Seconds after the first signal when the store goes, if ranks are left: a rank blocked in
``init_process_group`` waits for the store without hearing SIGINT, and comes back when it is gone."""


class StoreProcess:
    """The process of `air_magic.store`."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.gone = False
        """Whether it has been waited for."""
        self._stopped = False

    def ends_at(self, stop_begun_at: float | None) -> float:
        """When it is due to be stopped; infinity for not now."""
        if stop_begun_at is None or self._stopped or self.gone:
            return float("inf")
        return stop_begun_at + OUTLIVES_STOP

    def stop(self) -> None:
        """Kills it; it has nothing to save."""
        os.kill(self.pid, signal.SIGKILL)  # not waited for yet, so the pid is its own
        self._stopped = True
