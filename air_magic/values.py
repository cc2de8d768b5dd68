"""How a rank's value travels by file: one pickle, and beside it the big buffers, which the kernel maps.

The layout is head, buffers (each on a multiple of 64 bytes), pickle, index. Buffers come first, so that
each is written when it is met, and a model on a GPU passes through the CPU's memory piece by piece.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import re
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .unpicklable import Unpicklable, parts, paths, reason, safe_text, type_name
from .value_pickler import CarefulPickler, Pickler, Unpickler

__all__ = ["Unpicklable", "dump", "dump_exception", "load"]

_HEAD = struct.Struct("<8sQQ")  # magic with the version, where the pickle starts, where the index starts
_MAGIC = b"airval\x00\x01"
_ALIGNMENT = 64
_SMALL = 1 << 16  # a smaller buffer stays in the pickle: a loss that is kept must not keep the mapping
_DEPTH = 8
_MOST_WARNINGS = 20


def dump(value: object, path: Path, known: Sequence[type] = (), origin: str = "its rank") -> list[str]:
    """Writes ``value`` to ``path``, whole or not at all; returns warnings, one line each.

    Args:
        value: what cannot be pickled in it is replaced by an `Unpicklable`.
        path: a full disk is an OSError, and leaves nothing behind.
        known: the classes that came from the notebook, in the notebook's order.
        origin: who writes, in words: "rank 1".
    """
    with _replacing(path) as file:
        try:
            notes = _write(file, value, known, origin, None)
        except Exception:  # whatever the user's own code raises while it is pickled
            try:
                notes = _write(file, value, known, origin, _salvage(value, known, origin))
            except Exception as error:  # it fails only now and then
                notes = _write(file, value, known, origin, {id(value): Unpicklable.of(value, error, origin)})
    found = paths(value, (thing for thing, _ in notes.values()))
    lines = [f"{found.get(key, 'a part of value')} {text}" for key, (_, text) in notes.items()]
    left_out = len(lines) - _MOST_WARNINGS
    return lines[:_MOST_WARNINGS] + ([f"{left_out} more parts of value were replaced"] if left_out > 0 else [])


def dump_exception(exc: BaseException, path: Path, known: Sequence[type] = (), origin: str = "its rank") -> bool:
    """Writes ``exc`` to ``path`` if it can be rebuilt with its type and text; False, and no file, if not."""
    stand_ins = _salvage(exc, known, origin)
    try:
        rebuilt = _round_trip(exc, known, origin, stand_ins)
    except Exception:  # it fails only now and then
        return False
    if type(rebuilt) is not type(exc) or _text(rebuilt) != _text(exc):
        return False
    with _replacing(path) as file:
        _write(file, exc, known, origin, stand_ins)
    return True


def load(path: Path, known: Sequence[type] = ()) -> tuple[Any, list[str]]:
    """The value in a file of `dump`, or an `Unpicklable` if it cannot be rebuilt here; and warnings.

    Its arrays and tensors are writable, and live in a private mapping that outlasts the file's name.

    Args:
        path: the file; it must not be changed in place afterwards.
        known: the notebook's own classes, in the order that `dump` had.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        if not head.startswith(_MAGIC):
            raise ValueError(f"{path} holds no value of this version of air_magic: restart the kernel after an upgrade")
        _, start, index_start = _HEAD.unpack(head)
        file.seek(index_start)
        index = json.loads(file.read())
        memory = memoryview(_map(file)) if index["buffers"] else memoryview(b"")
        buffers = [memory[offset : offset + size] for offset, size in index["buffers"]]
        file.seek(start)
        try:
            return Unpickler(file, known, buffers).load(), []
        except Exception as error:  # whatever the user's own code raises while it is rebuilt
            why = f"it could not be rebuilt in the notebook: {reason(error)}"
            name, origin = index["type"], index["origin"]
            stand_in = Unpicklable(name, f"<{name} object>", why, origin)
            return stand_in, [f"the {name} of {origin} was replaced by a stand-in: {why}"]


def _map(file: BinaryIO) -> mmap.mmap:
    if sys.version_info >= (3, 13):  # else every value that is kept holds a descriptor too
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class _WriteFailed(BaseException):
    """The disk failed, not the user's code; so that no ``except Exception`` between takes it for the other."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def _replacing(path: Path) -> Iterator[io.FileIO]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, _WriteFailed):
            raise error.error from None
        raise


def _write(
    file: io.FileIO, value: object, known: Sequence[type], origin: str, stand_ins: Mapping[int, Unpicklable] | None
) -> dict[int, tuple[object, str]]:
    """Writes the whole file; strictly if ``stand_ins`` is None. Returns what was replaced."""
    buffers: list[tuple[int, int]] = []

    def put(data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:  # one call writes 2 GB at most
            try:
                rest = rest[file.write(rest) :]
            except OSError as error:
                raise _WriteFailed(error) from None

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL:
            return True
        put(bytes(-file.tell() % _ALIGNMENT))
        buffers.append((file.tell(), raw.nbytes))
        put(raw)
        return False

    file.seek(0)
    file.truncate()  # of what a first try left
    put(bytes(_HEAD.size))
    stream = io.BytesIO()
    if stand_ins is None:
        pickler = Pickler(stream, keep, known)
    else:
        pickler = CarefulPickler(stream, keep, known, origin, stand_ins)
    pickler.dump(value)
    start = file.tell()
    put(stream.getbuffer())
    index_start = file.tell()
    put(json.dumps({"type": type_name(type(value)), "origin": origin, "buffers": buffers}).encode())
    file.seek(0)
    put(_HEAD.pack(_MAGIC, start, index_start))
    return pickler.notes


def _round_trip(value: object, known: Sequence[type], origin: str, stand_ins: Mapping[int, Unpicklable]) -> Any:
    """``value`` as it would be loaded, in memory; big buffers are shared, not copied."""
    stream = io.BytesIO()
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        buffers.append(buffer.raw())
        return False

    CarefulPickler(stream, keep, known, origin, stand_ins).dump(value)
    stream.seek(0)
    return Unpickler(stream, known, buffers).load()


def _salvage(value: object, known: Sequence[type], origin: str) -> dict[int, Unpicklable]:
    """What must be replaced beyond what `CarefulPickler` does by itself, so that ``value`` loads again."""
    stand_ins: dict[int, Unpicklable] = {}
    seen = {id(value)}

    def failure(part: object) -> Exception | None:
        try:
            _round_trip(part, known, origin, stand_ins)
        except Exception as error:  # user code again
            return error
        return None

    def cut(part: object, depth: int) -> None:
        error = failure(part)
        if error is None:
            return
        for _, child in parts(part) if depth else ():
            if id(child) not in seen:
                seen.add(id(child))
                cut(child, depth - 1)
        error = failure(part)
        if error is not None:
            stand_ins[id(part)] = Unpicklable.of(part, error, origin)

    cut(value, _DEPTH)
    return stand_ins


def _text(exc: BaseException) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", safe_text(str, exc))  # the copy's parts are at other addresses
