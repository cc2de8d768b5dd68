"""Groups: process groups that are made and destroyed again and again on one store, with the installed torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

RANK = """
import json, os, sys
from air_magic.groups import Groups

groups = Groups()
groups.watch()
imported = "torch" in sys.modules
import torch, torch.distributed as dist

rank, sums = int(os.environ["RANK"]), []
for n in range(6):
    dist.init_process_group("gloo")
    sub = dist.new_group([0, 1])
    for group in (None, sub):
        tensor = torch.full((1,), float(n + rank))
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    if n == 3:
        dist.destroy_process_group(sub)
    dist.destroy_process_group()
kept = {id(group) for group in groups._kept}
facts = [imported, sums, groups.inits, len(kept), dist.is_initialized(), bool(dist.destroy_process_group.__doc__)]
print(json.dumps(facts), flush=True)
os._exit(0)  # as a rank leaves: nothing native is torn down
"""

STORE = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_groups_can_be_made_again_and_again() -> None:
    """Six times on one store, subgroups included; every group that was destroyed is kept to the process's end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", STORE], env=environment, **pipes) as store:
        torchruns = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.stdout.readline().strip(),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK], env={**environment, **torchruns, "RANK": str(rank)}, **pipes)
            for rank in range(2)
        ]
        answers = [rank.communicate(timeout=120)[0] for rank in ranks]
        store.communicate()
    sums = [total for n in range(6) for total in (2.0 * n + 1, 2.0 * n + 1)]
    assert [json.loads(answer) for answer in answers] == [[False, sums, 6, 12, False, True]] * 2
