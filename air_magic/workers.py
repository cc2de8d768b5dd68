"""Lets a rank's own worker processes (DataLoader, Pool) receive what exists only in the rank's ``__main__``."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.context
import multiprocessing.reduction
import os
import sys
from types import FunctionType
from typing import Any

import cloudpickle

from .pickler import Pickler, findable, remember_sources


def teach_multiprocessing(version: tuple[int, ...] = sys.version_info[:2]) -> None:
    """Makes `multiprocessing` send functions and classes of cells by value, to workers of every start method.

    Args:
        version: of Python; from 3.14 on a start method that nobody has chosen becomes ``fork`` again.
    """
    forking_pickler = multiprocessing.reduction.ForkingPickler
    if "reducer_override" in vars(forking_pickler):
        return
    home = os.getpid()

    def reducer_override(_self: Any, obj: Any) -> Any:
        if not isinstance(obj, FunctionType | type):
            return NotImplemented
        found = findable(obj)
        # A worker has __main__ from its rank, so that names are enough to answer it, and keep identities.
        answering = _is_worker(home) and multiprocessing.context.get_spawning_popen() is None
        if found and (obj.__module__ != "__main__" or answering):
            return NotImplemented
        sink = io.BytesIO()
        pickler = Pickler(sink, refused=lambda _: False)
        pickler.dump(obj)
        name = obj.__qualname__ if found else ""
        return _rebuild, (name, sink.getvalue(), pickler.sources())

    forking_pickler.reducer_override = reducer_override  # type: ignore[method-assign]
    os.register_at_fork(before=_track_classes)
    if version >= (3, 14) and multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("fork")


def _is_worker(home: int) -> bool:
    return os.getpid() != home or multiprocessing.parent_process() is not None


def _track_classes() -> None:
    """Gives the classes of ``__main__`` an identity that a forked worker shares, for functions that name them."""
    for value in list(vars(sys.modules["__main__"]).values()):
        if isinstance(value, type) and value.__module__ == "__main__":
            cloudpickle.cloudpickle._get_or_create_tracker_id(value)


def _rebuild(name: str, data: bytes, sources: dict[str, str]) -> Any:
    """The object that ``__main__`` has under ``name``, or else a twin, then known there by this name."""
    main = sys.modules["__main__"]
    found: Any = main if name else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not None:
        return found
    teach_multiprocessing()
    remember_sources(sources)
    twin = cloudpickle.loads(data)
    if name.isidentifier():
        setattr(main, name, twin)
    return twin
