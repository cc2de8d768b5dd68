"""What shall run, as bytes in a file of the run folder: the kernel dumps it, every rank loads it."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from .advice import with_article
from .call import Call, CellCall, FunctionCall
from .capture import explain, sizes, sizes_of_names
from .errors import CaptureError
from .pickler import Pickler, Sink, TooLargeError, on_cuda, remember_sources

if TYPE_CHECKING:
    from .cell import Cell

__all__ = ["FunctionCall", "Loaded", "Payload", "load"]

LIMIT = 2 << 30
"""Bytes that a payload may have: every rank reads all of them into its memory."""
NOTED = 64 << 20
"""Bytes from which a payload is worth a note."""

_OFFSET = struct.Struct("!Q")


class Payload:
    """A call that can be sent, made by `of_function` or `of_cell`.

    Args:
        call: what shall run.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.name = call.name
        """For views: the function's qualified name, or ``cell [12]``."""
        self.classes: list[type] = []
        """After `dump`: the notebook's classes that were sent by value; `Loaded.classes` are their twins."""
        self.notes: list[str] = []
        """After `dump`: what is worth a line but no error."""

    @classmethod
    def of_function(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
        """The call of a function; CaptureError for a coroutine function, which would return without running."""
        call = FunctionCall(function, args, dict(kwargs))
        if call.is_coroutine:
            raise CaptureError(f"{call.name} is a coroutine function; wrap it in asyncio.run")
        return cls(call)

    @classmethod
    def of_cell(cls, cell: Cell, given: Mapping[str, object]) -> Payload:
        """The run of a cell with the names given to it by value."""
        return cls(CellCall(cell, dict(given)))

    def dump(
        self, path: Path, *, refused: Callable[[object], bool] = on_cuda, limit: int = LIMIT, noted: int = NOTED
    ) -> None:
        """Writes the payload, whole or not at all; CaptureError where something cannot be sent.

        Args:
            path: the file to write.
            refused: objects that must not be sent though they could be pickled.
            limit: bytes beyond which the payload is refused.
            noted: bytes beyond which a note names the biggest things.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                size = self._write(file, refused, limit)
            temporary.replace(path)
            self.notes = [biggest] if size > noted and (biggest := self._biggest()) else []
        except TooLargeError as error:
            bound = _size(limit) if limit != LIMIT else "2 GiB"
            text = f"cannot send {self.name}: it is larger than {bound}"
            raise CaptureError(f"{text}: {self._biggest() or 'its classes hold the data'}.") from error
        except Exception as error:
            raise explain(self.call, self.name, error, refused=refused) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _write(self, file: IO[bytes], refused: Callable[[object], bool], limit: int) -> int:
        """Call, names of ``__main__``, classes, sources, and in the last bytes where the sources begin."""
        sink = Sink(file, limit)
        pickler = Pickler(sink, refused)
        pickler.dump(self.call)
        sent: set[str] = set()
        while True:  # names may need more names
            names = {name: value for name, value in pickler.main_names.items() if name not in sent}
            pickler.dump(names)
            if not names:
                break
            sent |= names.keys()
        self.classes = list(pickler.classes)
        pickler.dump(self.classes)
        offset = sink.size
        sink.write(pickle.dumps(pickler.sources()))
        sink.write(_OFFSET.pack(offset))
        return sink.size

    def _biggest(self) -> str:
        """One line about the biggest things, with the advice to make them where they are needed."""
        call = self.call
        if isinstance(call, CellCall):
            place, every = "the cell", sizes_of_names(call.given)
        else:
            place, every = f"{call.name}()", sizes(call.function, call.args, call.kwargs)
        found = [entry for entry in every[:3] if entry[2] * 10 >= every[0][2]]
        if not found:
            return ""
        names = [f"`{name}` ({with_article(kind)}, {_size(size)})" for name, kind, size in found]
        verb, them = ("is", "it") if len(found) == 1 else ("are", "them")
        return f"{' and '.join(names)} {verb} sent to every rank; create or load {them} inside {place} instead"


class Loaded:
    """A payload in a rank."""

    def __init__(self, call: Call, classes: list[type], main: ModuleType) -> None:
        self.classes = classes
        """This process's twins of `Payload.classes`, in the same order."""
        self._call = call
        self._main = main

    def call(self) -> Any:
        """Runs what was sent, once; what it returns."""
        return self._call.run(self._main)


def load(path: Path) -> Loaded:
    """Reads a payload into a fresh ``__main__``; raises whatever its objects raise while they are built."""
    # Without __file__ and __spec__, so that spawned workers of multiprocessing have nothing to run again.
    main = sys.modules["__main__"] = ModuleType("__main__")
    with path.open("rb") as file:
        file.seek(-_OFFSET.size, os.SEEK_END)
        (offset,) = _OFFSET.unpack(file.read())
        file.seek(offset)
        remember_sources(pickle.load(file))  # first, for the traceback of a load that fails
        file.seek(0)
        unpickler = pickle.Unpickler(file)
        call = unpickler.load()
        while names := unpickler.load():
            vars(main).update(names)
        classes = unpickler.load()
    return Loaded(call, classes, main)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
