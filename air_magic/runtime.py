"""Which rank this is, for code that runs on every rank; rank 0 of 1 where there is no run.

    from air_magic import runtime

    with runtime.local_rank_zero_first():
        dataset = download()

All but `local_rank_zero_first` work under plain torchrun as well.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02
_uses = itertools.count()


def get_global_rank(group: Any = None) -> int:
    """This rank among all ranks of the run, or among those of a `torch.distributed` process group."""
    if group is None:
        return int(os.environ.get("RANK", "0"))
    import torch.distributed

    return torch.distributed.get_rank(group)


def get_local_rank() -> int:
    """This rank among the ranks of its node: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size() -> int:
    """The number of ranks of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """The number of ranks on this rank's node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """The number of this rank's node, from 0; torchrun calls it the group rank."""
    return int(os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK", "0"))


def get_replica_rank() -> int:
    """Which copy of the model this rank belongs to where each node holds one copy, as in hybrid sharding.

    That is the global rank divided by the ranks per node, so 0 for all ranks of one node.
    """
    return get_global_rank() // get_local_world_size()


@contextmanager
def local_rank_zero_first() -> Iterator[None]:
    """Let local rank 0 of each node run the block first, and the others after it has left it.

    It needs no process group. All ranks of a node must come here equally often, in their main
    process. An exception in local rank 0 lets the others go on, too. Outside a run it does nothing.
    """
    run_dir = os.environ.get("AIR_MAGIC_RUN_DIR")
    if run_dir is None or get_local_world_size() == 1:
        yield
        return
    left = Path(run_dir, f"zero-first-{get_node_rank()}-{next(_uses)}")
    if get_local_rank() == 0:
        try:
            yield
        finally:
            left.touch()
        return
    while not left.exists():
        time.sleep(_POLL_SECONDS)
    yield
