"""Measures what N idle ranks cost in memory before user code: forked from the forkserver, or fresh with torch imported.

``python tests/bench/memory.py [RANKS]`` prints the sums over all ranks, in MiB: the proportional set size (shared pages
count by their share; the forkserver is one of the sharers) and what is private.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from air_magic import distributed
from tests.warmth import until_warm


def memory(folder: str) -> tuple[int, int]:
    """In a rank: PSS and private memory in KiB, measured while every rank has torch and none has ended."""
    import torch  # noqa: F401 - a fresh rank has it only now

    Path(folder, os.environ["RANK"]).touch()
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    figures = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    Path(folder, f"{os.environ['RANK']} measured").touch()
    while len(os.listdir(folder)) < 2 * int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    return figures["Pss"], figures["Private_Clean"] + figures["Private_Dirty"]


def main() -> None:
    """Measures both ways and prints."""
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    until_warm()
    for warm in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            found = distributed(num_accelerators=ranks, warm=warm)(memory).distributed(folder)
        pss, private = (sum(column) / 1024 for column in zip(*found, strict=True))
        print(f"{ranks} {'warm' if warm else 'cold'} ranks: {pss:.0f} MiB PSS, {private:.0f} MiB private")


if __name__ == "__main__":
    main()
