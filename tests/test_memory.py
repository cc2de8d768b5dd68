"""Memory: out-of-memory kills as the node tells of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from air_magic import memory

V2 = "0::/user.slice/a\n"
V1 = "12:cpu,cpuacct:/b\n5:memory:/docker/c\n1:name=systemd:/d\n0::/e\n"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/a/memory.events": "low 0\noom 5\noom_kill 3\n"}, 3),
        # In a container the group is the top of what can be seen, whatever path the host gives it.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom 5\noom_kill 3\noom_group_kill 9\n"}, 3),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/docker/c/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            },
            2,
        ),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\noom_kill 6\n"}, 6),
        # An old Linux does not count by group.
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\n",
                "proc/vmstat": "nr_free_pages 1\noom_kill 7\n",
            },
            7,
        ),
        ({"proc/self/cgroup": V2, "proc/vmstat": "oom_kill 7\n"}, 7),
        ({"proc/vmstat": "nr_free_pages 1\n"}, 0),
        ({}, 0),
    ],
)
def test_kills_are_counted_where_the_node_counts_them(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    """In this process's group, of either version, or else on the whole node."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.oom_kills(tmp_path) == kills


def test_facts_are_of_this_run() -> None:
    """Kills since the run began, and the size of shared memory."""
    facts = memory.facts(memory.oom_kills() - 2)
    size = os.statvfs("/dev/shm")
    assert (facts["oom_kills"], facts["shm_size"]) == (2, size.f_blocks * size.f_frsize)
    assert 0 <= facts["shm_free"] <= facts["shm_size"]
