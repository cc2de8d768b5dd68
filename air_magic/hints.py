"""Known causes of failures and what to do about them; one sentence of cause, one of cure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .result import Ending, RankFailure

_MIB = 1 << 20

_AGNOSTIC = (
    'device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu"); '
    'dist.init_process_group("nccl" if device.type == "cuda" else "gloo")'
)

# Pattern of "type: message", and the hint; the first that matches is given. The texts of torch on a node
# without a GPU were taken from torch 2.13 (CPU build) and 2.14 (CUDA build).
_TEXTS: tuple[tuple[str, str], ...] = (
    (
        r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs"
        r"|Torch not compiled with CUDA|Found no NVIDIA driver|_cuda_setDevice"
        r"|device_ids.*only work with",
        f"this node has no GPU, so the ranks are CPU ranks. Code for both: {_AGNOSTIC}",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError",
        "the GPU's memory was full: use a smaller batch per rank, mixed precision, or shard the model (FSDP)",
    ),
    (
        r"address already in use|EADDRINUSE",
        "another process listens on that port. Leave MASTER_PORT and init_method alone: "
        "this run has a store of its own, which init_process_group() finds by itself",
    ),
    (
        r"DistributedDataParallel.*not needed|strategy=.?ddp_notebook|_MultiProcessingLauncher",
        'ddp_notebook forks the rank again; the ranks exist already, so use strategy="ddp"',
    ),
    (
        r"bus error|insufficient shared memory|unable to mmap|No space left on device.*shm",
        "shared memory is full; start the container with more (docker run --shm-size=8g) or use num_workers=0",
    ),
    (
        r"initialize the default process group twice",
        "init_process_group was called twice in one rank: call it once, or destroy_process_group() in between",
    ),
    (
        r"NCCL.*(unhandled system error|unhandled cuda error|P2P|peer access)",
        "if these GPUs cannot talk to each other directly, pass env={'NCCL_P2P_DISABLE': '1'}; "
        "env={'NCCL_DEBUG': 'INFO'} shows where NCCL stops",
    ),
)


def hint(failure: RankFailure, facts: Mapping[str, Any]) -> str:
    """What is known about a failure like this one; an empty string for nothing.

    Args:
        failure: the run's first failure.
        facts: what the node says of its memory; see `air_magic.memory.facts`.
    """
    if failure.signal_name:
        return _of_signal(failure.signal_name, facts)
    if failure.ending is Ending.UNLOADED:
        return (
            "none of your code ran: the ranks could not load what was sent. A module that only the notebook can "
            "import must be importable from its folder or sys.path"
        )
    if failure.ending is Ending.DIED and failure.returncode is not None:
        return "no exception left the rank: something called os._exit or a library ended the process"
    said = f"{failure.type_name}: {failure.message}"
    return next((text for pattern, text in _TEXTS if re.search(pattern, said, re.IGNORECASE | re.DOTALL)), "")


def _of_signal(name: str, facts: Mapping[str, Any]) -> str:
    if name == "SIGKILL":
        if facts.get("oom_kills", 0) > 0:
            return (
                "the node or container ran out of memory and Linux killed the rank: use fewer ranks, "
                "a smaller batch or fewer DataLoader workers, or give the container more memory"
            )
        return "something killed the rank from outside; Linux reports no out-of-memory kill here (see dmesg)"
    if name == "SIGBUS":
        size = facts.get("shm_size")
        shown = "" if size is None else f" (it has {size / _MIB:,.0f} MiB, {facts['shm_free'] / _MIB:,.0f} free)"
        return (
            f"a bus error is most often a full /dev/shm{shown}: start the container with a larger one "
            "(docker run --shm-size=8g) or use num_workers=0 in the DataLoader"
        )
    if name == "SIGSEGV":
        return "native code crashed; env={'PYTHONFAULTHANDLER': '1'} writes the Python stack into the rank's log"
    return ""
