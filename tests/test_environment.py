"""What ranks inherit, against a list written by hand and against a real torchrun."""

import json
import os
import subprocess
import sys

import pytest

from air_magic.accelerators import Allotment, Device
from air_magic.environment import OWNED, rank_environment

CPU = Allotment("cpu", 2, (), "CPU", "")
GPU = Allotment(
    "gpu",
    2,
    tuple(Device(index, f"GPU-{index}", "NVIDIA A10", 0, token) for index, token in ((3, "3"), (1, "GPU-1"))),
    "GPU_2xA10",
    "",
)
BASE = {"PATH": "/usr/bin:/bin", "HOME": "/home/me"}


def environment(base=BASE, extra=None, **changed):
    """Rank 1 of 2 on one node, but for what is changed."""
    arguments = {
        "rank": 1,
        "local_rank": 1,
        "world_size": 2,
        "local_world_size": 2,
        "master_addr": "127.0.0.1",
        "master_port": 4711,
        "run_id": "calm-otter",
        "run_dir": "/runs/calm-otter",
        "cores": 9.5,
        "allotment": CPU,
        "extra": extra or {},
        "executable": "/venv/bin/python",
    }
    return rank_environment(base, **{**arguments, **changed})


def test_a_cpu_rank_gets_exactly_this():
    """Every variable, by name and value."""
    assert environment() == {
        "HOME": "/home/me",
        "PATH": "/venv/bin:/usr/bin:/bin",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "calm-otter",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/runs/calm-otter/rank-1.error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "CUDA_VISIBLE_DEVICES": "",
        "AIR_MAGIC_RUN_ID": "calm-otter",
        "AIR_MAGIC_RUN_DIR": "/runs/calm-otter",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/calm-otter/flight-rank-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/calm-otter/flight-rank-",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        "PL_TRAINER_ACCELERATOR": "cpu",
        "PL_TRAINER_DEVICES": "2",
        "DS_ACCELERATOR": "cpu",
    }


def test_a_gpu_rank_sees_the_chosen_gpus_and_no_cpu_mode():
    """In the user's order and words; the rest is a CPU rank's."""
    cpu, gpu = environment(), environment(allotment=GPU)
    assert gpu["CUDA_VISIBLE_DEVICES"] == "3,GPU-1"
    assert cpu.keys() - gpu.keys() == {
        "ACCELERATE_USE_CPU",
        "PL_TRAINER_ACCELERATOR",
        "PL_TRAINER_DEVICES",
        "DS_ACCELERATOR",
    }
    assert {name for name, value in gpu.items() if cpu[name] != value} == {"CUDA_VISIBLE_DEVICES"}


def test_a_rank_of_a_second_node_knows_its_node():
    """And gloo may leave the loopback."""
    here = environment()
    there = environment(rank=3, world_size=4, node_rank=1, num_nodes=2)
    assert {name: value for name, value in there.items() if here[name] != value} == {
        "RANK": "3",
        "ROLE_RANK": "3",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "ROLE_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_ERROR_FILE": "/runs/calm-otter/rank-3.error.json",
    }
    assert here.keys() - there.keys() == {"GLOO_SOCKET_IFNAME"}


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (7.9, 2, "3"), (0.5, 1, "1"), (2, 8, "1")])
def test_ranks_share_the_cores(cores, ranks, threads):
    """A rank has one thread at least."""
    assert environment(cores=cores, local_world_size=ranks)["OMP_NUM_THREADS"] == threads


DEFAULTS = (
    "OMP_NUM_THREADS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "GLOO_SOCKET_IFNAME",
    "ACCELERATE_USE_CPU",
    "PL_TRAINER_ACCELERATOR",
    "PL_TRAINER_DEVICES",
    "DS_ACCELERATOR",
)


def test_what_the_user_set_stays():
    """In the kernel's variables, and over those in env=."""
    mine = dict.fromkeys(DEFAULTS, "mine")
    theirs = dict.fromkeys(DEFAULTS, "theirs")
    assert mine.items() <= environment({**BASE, **mine}).items()
    assert mine.items() <= environment({**BASE, **theirs}, mine).items()


def test_an_older_name_is_a_decision_too():
    """Beside the newer one it would count for nothing."""
    older = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}
    result = environment({**BASE, **older})
    assert older.items() <= result.items()
    assert result.keys().isdisjoint({"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"})


def test_an_outer_launcher_leaves_no_trace():
    """A notebook may itself run under torchrun or in a rank; env= cannot touch these either."""
    stale = dict.fromkeys(OWNED, "stale")
    assert environment({**BASE, **stale}) == environment()
    assert environment(extra=stale) == environment()


def test_owned_is_what_no_user_can_change():
    """The list that requests are checked against is the list that is enforced."""
    everything = environment()
    assert {name for name in everything if environment(extra={name: "mine"})[name] != "mine"} == OWNED


@pytest.mark.parametrize(
    ("base", "extra", "path"),
    [
        ({"PATH": "/usr/bin"}, {}, "/venv/bin:/usr/bin"),
        ({"PATH": "/usr/bin:/venv/bin"}, {}, "/usr/bin:/venv/bin"),
        ({}, {}, "/venv/bin:/bin:/usr/bin"),
        ({"PATH": "/usr/bin"}, {"PATH": "/mine"}, "/mine"),
    ],
)
def test_the_interpreters_folder_is_on_the_path(base, extra, path):
    """Unless it is there already, or the user's env= says otherwise."""
    assert environment(base, extra)["PATH"] == path


def test_the_kernels_variables_are_not_touched():
    """What comes back is a copy."""
    base = dict(BASE)
    environment(base)["NEW"] = "1"
    assert base == BASE


DIFFERENCES = {
    "MASTER_ADDR": "the store is bound to the loopback's number, so that no name must be resolved",
    "MASTER_PORT": "chosen for every launch",
    "TORCHELASTIC_RUN_ID": "chosen for every launch",
    "TORCHELASTIC_ERROR_FILE": "lies in the run's folder",
    "OMP_NUM_THREADS": "torchrun gives 1 whatever the node has",
}


@pytest.mark.slow
def test_torchrun_sets_nothing_that_we_do_not_set_alike(tmp_path):
    """Variable by variable on both ranks of a real torchrun."""
    script = tmp_path / "dump.py"
    script.write_text(
        "import json, os, pathlib\n"
        "pathlib.Path(__file__).with_name('rank-' + os.environ['RANK']).write_text(json.dumps(dict(os.environ)))\n"
    )
    base = {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8", "HOME": str(tmp_path)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(torchrun, env=base, check=True, timeout=120, capture_output=True)
    for rank in range(2):
        dumped = json.loads((tmp_path / f"rank-{rank}").read_text())
        theirs = {name: value for name, value in dumped.items() if base.get(name) != value}
        ours = environment(base, rank=rank, local_rank=rank, executable=sys.executable)
        assert {name for name, value in theirs.items() if ours.get(name) != value} == DIFFERENCES.keys()
        assert theirs.keys() <= ours.keys()
