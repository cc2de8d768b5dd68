"""What the ranks of the benchmark run: the same work under every launcher, and when its first line was printed.

Each rank writes the moment into a file of its own, so that it does not matter how a launcher passes output on.
As a script, ``python -m tests.bench.bodies BODY FOLDER`` is one rank, with its variables as torchrun sets them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def hello(folder: str, rank: int) -> None:
    """Prints a line; user code that needs no torch."""
    _say(folder, rank)


def imports(folder: str, rank: int) -> None:
    """Imports torch, then prints a line."""
    import torch  # noqa: F401 - the import is what is measured

    _say(folder, rank)


def gloo(folder: str, rank: int) -> None:
    """Imports torch, meets the other ranks in a process group, prints a line, leaves the group."""
    import torch.distributed as dist

    made = not dist.is_initialized()  # torchrunx makes the group itself
    if made:
        dist.init_process_group("gloo")
    dist.barrier()
    _say(folder, rank)
    if made:
        dist.destroy_process_group()


def step(folder: str, rank: int) -> None:
    """Takes the first optimizer step of a small DDP model, prints a line: what a user waits for."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    _say(folder, rank)
    dist.destroy_process_group()


BODIES = {"hello": hello, "imports": imports, "gloo": gloo, "step": step}


def of_rank(body: str, folder: str) -> None:
    """Runs a body in a rank whose launcher sets ``RANK``."""
    BODIES[body](folder, int(os.environ["RANK"]))


def of_local_rank(rank: int, world_size: int, port: int, body: str, folder: str) -> None:
    """Runs a body in a rank whose launcher leaves the variables to its user; ``rank`` comes first."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    BODIES[body](folder, rank)


def as_cell(body: str, folder: str) -> str:
    """A body as the source of a notebook cell."""
    work = {
        "hello": "",
        "imports": "import torch\n",
        "gloo": "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n",
    }
    say = (
        "import os, time\n"
        "rank, now = os.environ['RANK'], time.time()\n"
        "print(f'hello from rank {rank}', flush=True)\n"
        f"open(f'{folder}/rank-{{rank}}', 'w').write(repr(now))\n"
    )
    return work[body] + say + ("dist.destroy_process_group()\n" if body == "gloo" else "None\n")


def stamps(folder: Path) -> list[float]:
    """When each rank printed its line, by `time.time`, in rank order."""
    return [float((folder / f"rank-{rank}").read_text()) for rank in range(len(list(folder.iterdir())))]


def _say(folder: str, rank: int) -> None:
    now = time.time()
    print(f"hello from rank {rank}", flush=True)
    Path(folder, f"rank-{rank}").write_text(repr(now))


if __name__ == "__main__":
    of_rank(*sys.argv[1:])
