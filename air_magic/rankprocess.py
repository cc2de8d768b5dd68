"""One rank's process as its supervisor sees it: signal it, and clear away what it left."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

from . import processes
from .output import RankOutput


class RankProcess:
    """A rank's process, leader of its own session and process group, and its output."""

    def __init__(self, rank: int, pid: int, output: RankOutput) -> None:
        self.rank = rank
        self.pid = pid
        self.output = output
        self.exited_at: float | None = None
        """When it ended, by `time.monotonic`."""
        self.returncode = 0
        self.descendants = 0
        """How many processes it had left behind."""
        self.reported = False

    def signal(self, number: signal.Signals) -> None:
        """Signals the rank's group, as a terminal does: ``subprocess.run`` in it waits for its child."""
        if number is signal.SIGKILL:
            for process in processes.descendants(self.pid):
                processes.kill(process)
        os.killpg(self.pid, number)  # the rank was not waited for yet, so the number is its own
        os.killpg(self.pid, signal.SIGCONT)  # a stopped process hears nothing else

    def exited(self, returncode: int, now: float, others: Collection[int]) -> None:
        """Notes the end, and kills what is in the rank's session and orphans that carry its variables.

        Args:
            returncode: as in `subprocess.Popen.returncode`.
            now: `time.monotonic`.
            others: pids below which nothing is this rank's.
        """
        self.exited_at, self.returncode = now, returncode
        left = processes.descendants(os.getpid(), but=others)
        self.descendants = sum(processes.kill(p) for p in left if p.session == self.pid or self._started(p.pid))

    def _started(self, pid: int) -> bool:
        """Whether the process was started with this rank's variables, however far it has gone since."""
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"RANK=%d" % self.rank in variables
