"""What ranks do while tests stop them; standard library only, for every rank imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_NOT_OURS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, 32, 33}  # the last two are the C library's


def rest(folder: Path, *, obey: bool = True) -> None:
    """Leaves processes behind, says that it is up, and waits; where it obeys, it says that it could tidy up."""
    rank = os.environ["RANK"]
    if not obey:
        _hear_nothing()
        signal.signal(signal.SIGINT, lambda *_: (folder / f"asked-{rank}").touch())
    leave_everything_behind(folder / f"daemon-{rank}")
    try:
        (folder / f"up-{rank}").touch()
        time.sleep(1000)
    finally:
        (folder / f"tidy-{rank}").touch()


def leave_everything_behind(started: Path) -> None:
    """Starts four processes: a child, two in sessions of their own, and a daemon that hears no signal."""
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _hear_nothing()
            started.touch()
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not started.exists():
        time.sleep(0.01)


def _hear_nothing() -> None:
    for number in set(range(1, signal.NSIG)) - _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    # A plain script whose run goes on when it ends.
    from air_magic import distributed

    run = distributed(num_accelerators=2)(rest).submit(Path(sys.argv[1]), obey=False)
    sys.stdin.readline()
    sys.exit(3)
