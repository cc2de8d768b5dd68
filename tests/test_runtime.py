"""The rank helpers, in a run, under torchrun and in a notebook."""

import os
import subprocess
import sys

import pytest

from air_magic import runtime

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "AIR_MAGIC_RUN_DIR")


@pytest.fixture
def world(monkeypatch):
    """A function that makes exactly these variables a rank's."""

    def enter(**variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return enter


def answers():
    """What every helper says."""
    return {
        "global rank": runtime.get_global_rank(),
        "local rank": runtime.get_local_rank(),
        "world size": runtime.get_world_size(),
        "local world size": runtime.get_local_world_size(),
        "node rank": runtime.get_node_rank(),
        "replica rank": runtime.get_replica_rank(),
    }


def test_outside_a_run_this_is_rank_0_of_1(world):
    """So code that asks runs unchanged in the notebook."""
    world()
    assert answers() == {
        "global rank": 0,
        "local rank": 0,
        "world size": 1,
        "local world size": 1,
        "node rank": 0,
        "replica rank": 0,
    }


@pytest.mark.parametrize("node_variable", ["NODE_RANK", "GROUP_RANK"])
def test_a_rank_knows_its_place(world, node_variable):
    """Under torchrun, which sets no NODE_RANK, as well."""
    world(RANK="6", LOCAL_RANK="2", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", **{node_variable: "1"})
    assert answers() == {
        "global rank": 6,
        "local rank": 2,
        "world size": 8,
        "local world size": 4,
        "node rank": 1,
        "replica rank": 1,
    }


def test_the_block_runs_where_there_is_no_run(world):
    """And an exception passes through it."""
    world()
    with pytest.raises(KeyError), runtime.local_rank_zero_first():
        raise KeyError
    world(LOCAL_RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    with runtime.local_rank_zero_first():
        pass


def start(run_dir, local_rank, code, node_rank=0):
    """One rank of two on its node, as a process of its own."""
    variables = {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": str(node_rank),
        "AIR_MAGIC_RUN_DIR": str(run_dir),
    }
    return subprocess.Popen(
        [sys.executable, "-c", f"from air_magic.runtime import local_rank_zero_first\n{code}"],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def output(process):
    """What the process printed, once it has ended."""
    return process.communicate(timeout=30)[0].split()


def test_local_rank_0_goes_first_every_time(tmp_path):
    """Each of many blocks is entered by the other rank only after rank 0 has left it."""
    folder = tmp_path / "run"
    folder.mkdir()
    log = tmp_path / "log"
    code = f"""
import os
for use in range(3):
    with local_rank_zero_first(), open({str(log)!r}, "a") as log:
        log.write(f"{{use}}{{os.environ['LOCAL_RANK']}} ")
"""
    processes = [start(folder, local_rank, code) for local_rank in (1, 0)]
    assert [output(process) for process in processes] == [[], []]
    order = log.read_text().split()
    assert sorted(order) == ["00", "01", "10", "11", "20", "21"]
    assert all(order.index(f"{use}0") < order.index(f"{use}1") for use in range(3))


def test_the_others_wait_until_rank_0_has_left(tmp_path):
    """Being in the block is not enough."""
    first = start(
        tmp_path,
        0,
        "with local_rank_zero_first():\n print('in', flush=True)\n input()\n",
    )
    first_line = first.stdout.readline()
    assert first_line == "in\n"
    second = start(tmp_path, 1, "print('here', flush=True)\nwith local_rank_zero_first():\n print('in')\n")
    assert second.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=0.2)
    first.stdin.write("\n")
    first.stdin.flush()
    assert output(first) == []
    assert output(second) == ["in"]


def test_an_exception_in_rank_0_lets_the_others_go_on(tmp_path):
    """They meet their own failure, or none."""
    first = start(tmp_path, 0, "try:\n with local_rank_zero_first(): raise OSError\nexcept OSError: print('raised')\n")
    second = start(tmp_path, 1, "with local_rank_zero_first(): print('in')\n")
    assert [output(first), output(second)] == [["raised"], ["in"]]


def test_every_node_has_its_own_first(tmp_path):
    """Node 1's rank 0 does not free node 0's ranks, though they may share a folder."""
    assert output(start(tmp_path, 0, "with local_rank_zero_first(): print('in')\n", node_rank=1)) == ["in"]
    waiting = start(tmp_path, 1, "print('here', flush=True)\nwith local_rank_zero_first(): print('in')\n")
    assert waiting.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=0.2)
    assert output(start(tmp_path, 0, "with local_rank_zero_first(): print('in')\n")) == ["in"]
    assert output(waiting) == ["in"]


def test_a_group_has_ranks_of_its_own(tmp_path):
    """With a group the answer is torch's; only then torch is imported."""
    code = """
import sys
from air_magic.runtime import get_global_rank
assert "torch" not in sys.modules
import torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
print(get_global_rank(dist.group.WORLD))
"""
    assert output(start(tmp_path, 0, code)) == ["0"]
