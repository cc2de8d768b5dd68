"""What ranks inherit, and the variables that torchrun would give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accelerators import Allotment

OWNED = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "AIR_MAGIC_RUN_ID", "AIR_MAGIC_RUN_DIR"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    }
)
"""The variables that the launcher alone sets; a user's ``env`` must not."""

# torch's flight recorder, newest name first. The buffer's older name is never set here: every rank
# of a newer torch would warn of it.
_RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def rank_environment(
    base: Mapping[str, str],
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    node_rank: int = 0,
    num_nodes: int = 1,
    master_addr: str,
    master_port: int,
    run_id: str,
    run_dir: str,
    cores: float,
    allotment: Allotment,
    extra: Mapping[str, str],
    executable: str,
) -> dict[str, str]:
    """All variables of one rank.

    What the launcher owns wins over the user's ``env``, that over the kernel's variables, and
    those over our defaults.

    Args:
        base: the kernel's variables.
        rank: among all ranks of the run.
        local_rank: among the ranks of its node.
        world_size: the number of ranks of the run.
        local_world_size: the number of ranks of its node.
        node_rank: the number of its node.
        num_nodes: the number of nodes of the run.
        master_addr: where the store listens.
        master_port: where the store listens.
        run_id: the run's name for torch and for `air_magic.runtime`.
        run_dir: the run's folder.
        cores: what the ranks of the node share, from `accelerators.usable_cores`.
        allotment: what they compute on.
        extra: the user's ``env``.
        executable: the interpreter.
    """
    owned = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node_rank),  # not torchrun's, but Lightning and many scripts read it
        "GROUP_RANK": str(node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": f"{run_dir}/rank-{rank}.error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        # Every rank sees every chosen GPU and binds by LOCAL_RANK; CPU ranks see none.
        "CUDA_VISIBLE_DEVICES": ",".join(device.visible_as for device in allotment.devices),
        "AIR_MAGIC_RUN_ID": run_id,
        "AIR_MAGIC_RUN_DIR": run_dir,
    }
    chosen = {**base, **extra}
    if "PATH" not in extra:
        chosen["PATH"] = _path(base.get("PATH", "/bin:/usr/bin"), executable)
    return {**_defaults(chosen, run_dir, local_world_size, num_nodes, cores, allotment), **chosen, **owned}


def _defaults(
    chosen: Mapping[str, str],
    run_dir: str,
    local_world_size: int,
    num_nodes: int,
    cores: float,
    allotment: Allotment,
) -> dict[str, str]:
    """What a rank gets where neither the kernel's variables nor the user's ``env`` say otherwise."""
    defaults = {
        # One thread per core in every rank would make N ranks many times slower.
        "OMP_NUM_THREADS": str(max(1, int(cores // local_world_size))),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    # A user who set one of two names has decided: adding the newer one would overrule the older.
    if chosen.keys().isdisjoint(_RECORDER_SIZE):
        defaults[_RECORDER_SIZE[0]] = "2000"
    if chosen.keys().isdisjoint(_RECORDER_FILE):
        defaults |= dict.fromkeys(_RECORDER_FILE, f"{run_dir}/flight-rank-")  # torch appends the rank
    if num_nodes == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo listens on what the host name resolves to, else
    if allotment.kind == "cpu":
        # Without these Accelerate, the HF Trainer and Lightning silently train N separate models.
        defaults |= {
            "ACCELERATE_USE_CPU": "true",
            "PL_TRAINER_ACCELERATOR": "cpu",
            "PL_TRAINER_DEVICES": str(local_world_size),
            "DS_ACCELERATOR": "cpu",
        }
    return defaults


def _path(path: str, executable: str) -> str:
    """``path`` with the interpreter's folder: DeepSpeed, for one, must find the ``ninja`` in it."""
    folder = str(PurePosixPath(executable).parent)
    return path if folder in path.split(":") else f"{folder}:{path}"
