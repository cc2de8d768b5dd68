"""What a rank changes in torch.distributed: one key prefix per init, and groups that outlive their end.

Both are for faults of torch itself; see the two functions. User code is never asked to know.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .imports import when_imported


class Groups:
    """Whether this rank ever made a process group, and the groups that are kept alive."""

    def __init__(self) -> None:
        self.inits = 0
        """How many times a process group was made from torchrun's variables."""
        self._kept: list[Any] = []

    def watch(self) -> None:
        """Applies the changes as soon as torch.distributed is imported, and imports nothing itself."""
        when_imported("torch.distributed", self._change)

    def _change(self, dist: ModuleType) -> None:
        if dist.is_available():
            self._prefix_each_init()
            self._keep_groups(dist)

    def _prefix_each_init(self) -> None:
        """Gives each ``init_process_group`` keys of its own in the store.

        ``destroy_process_group`` resets torch's counter of groups, so that a second init on the same store
        reads the first one's addresses and fails about every second time (pytorch issues 55967, 119196).
        """
        # By import_module: the attribute of this name in torch.distributed is a function.
        rendezvous = importlib.import_module("torch.distributed.rendezvous")
        original = rendezvous._rendezvous_handlers["env"]

        def env(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined] # by way of a star import

            self.inits += 1
            for store, rank, world_size in original(url, *args, **kwargs):
                yield PrefixStore(f"init{self.inits}", store), rank, world_size

        rendezvous._rendezvous_handlers["env"] = env

    def _keep_groups(self, dist: ModuleType) -> None:
        """Holds every group that is destroyed until the process ends.

        On torch 2.13 with gloo the destructor of a group joins a thread that waits for the GIL which the
        destructor's caller holds: one in three launches hung for ever when the training function returned.
        """
        c10d = importlib.import_module("torch.distributed.distributed_c10d")
        original = c10d.destroy_process_group

        def destroy_process_group(group: Any = None) -> None:
            self._kept += list(c10d._world.pg_map)
            original(group)

        destroy_process_group.__doc__ = original.__doc__
        for module in (c10d, dist):
            module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined] # modules have no such slot
