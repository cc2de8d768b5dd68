"""A script that interrupts its own launches, each at another moment, and prints what was left of them."""

from __future__ import annotations

import signal
import sys
import time

from air_magic import distributed

from .waiting import of_runs


def sleep() -> None:
    """What the ranks do."""
    time.sleep(1000)


def main(rounds: int, longest: float) -> None:
    """Interrupts so many launches after ever longer times, up to ``longest`` seconds."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    launched = distributed(num_accelerators=2, warm=False)(sleep)
    for number in range(rounds):
        try:
            signal.setitimer(signal.ITIMER_REAL, (number + 1) / rounds * longest)
            launched.distributed()
        except KeyboardInterrupt:
            print(f"{sorted(of_runs())} left after round {number}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
