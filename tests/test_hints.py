"""Hints: known causes, and silence where none is known."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from air_magic.hints import hint
from air_magic.result import Ending, RankFailure


def raised(text: str, kind: str = "RuntimeError") -> RankFailure:
    return RankFailure(0, Ending.RAISED, kind, text, returncode=1)


def died(returncode: int | None) -> RankFailure:
    return RankFailure(0, Ending.DIED, returncode=returncode)


@pytest.mark.parametrize(
    ("failure", "facts", "begins"),
    [
        (raised("Found no NVIDIA driver on your system."), {}, "this node has no GPU, so the ranks are CPU ranks."),
        (
            raised("ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "ValueError"),
            {},
            "this node has no GPU",
        ),
        (
            raised("CUDA out of memory. Tried to allocate 2 GiB", "torch.OutOfMemoryError"),
            {},
            "the GPU's memory was full:",
        ),
        (
            raised(
                "The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE, message: address already in use"
            ),
            {},
            "another process listens on that port.",
        ),
        (raised("_MultiProcessingLauncher.launch() …"), {}, "ddp_notebook forks the rank again;"),
        (
            raised("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that …"),
            {},
            "shared memory is full;",
        ),
        (
            raised("unable to mmap 128 bytes from file </torch_7_1>: Cannot allocate memory (12)"),
            {},
            "shared memory is full;",
        ),
        (
            raised("trying to initialize the default process group twice!", "ValueError"),
            {},
            "init_process_group was called twice",
        ),
        (
            raised(
                "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)",
                "torch.distributed.DistBackendError",
            ),
            {},
            "if these GPUs cannot talk to each other directly",
        ),
        (raised("shapes do not match"), {}, ""),
        (raised("", "KeyboardInterrupt"), {}, ""),
        (
            RankFailure(0, Ending.UNLOADED, "ModuleNotFoundError", "No module named 'mine'", returncode=1),
            {},
            "none of your code ran:",
        ),
        (died(3), {}, "no exception left the rank: something called os._exit"),
        (died(0), {}, "no exception left the rank: something called os._exit"),
        (died(None), {}, ""),
        (died(-9), {"oom_kills": 1}, "the node or container ran out of memory and Linux killed the rank:"),
        (died(-9), {"oom_kills": 0}, "something killed the rank from outside;"),
        (died(-9), {}, "something killed the rank from outside;"),
        (
            died(-7),
            {"shm_size": 64 << 20, "shm_free": 0},
            "a bus error is most often a full /dev/shm (it has 64 MiB, 0 free): start the container with a larger one",
        ),
        (died(-7), {}, "a bus error is most often a full /dev/shm: start"),
        (died(-11), {}, "native code crashed; env={'PYTHONFAULTHANDLER': '1'}"),
        (died(-6), {}, ""),
    ],
)
def test_a_known_cause_has_a_hint(failure: RankFailure, facts: dict[str, Any], begins: str) -> None:
    """One, which says what to do; an unknown cause has none."""
    given = hint(failure, facts)
    assert given[: len(begins)] == begins
    assert bool(given) == bool(begins)
    assert not given.endswith(".")


FAULTS = """
import json, os, socket
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def said(call):
    try:
        call()
    except BaseException as error:
        return [type(error).__name__, str(error)]

taken = socket.create_server(("127.0.0.1", 0))
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Linear(1, 1)
print(json.dumps({
    "no GPU": [
        said(lambda: dist.new_group([0], backend="nccl")),
        said(lambda: torch.zeros(1, device="cuda")),
        said(lambda: torch.cuda.set_device(0)),
        said(lambda: model.to("cuda")),
        said(lambda: DistributedDataParallel(model, device_ids=[0])),
    ],
    "twice": [said(lambda: dist.init_process_group("gloo", store=store, rank=0, world_size=1))],
    "port": [said(lambda: dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True))],
}))
os.sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_torch_says_it_as_we_know_it() -> None:
    """The installed torch's own texts on a node without a GPU find their hints."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    begins = {
        "no GPU": "this node has no GPU",
        "twice": "init_process_group was called twice",
        "port": "another process listens",
    }
    for cause, texts in json.loads(done.stdout).items():
        for kind, text in texts:
            assert hint(raised(text, kind), {}).startswith(begins[cause]), (kind, text)
