"""Pickles what a notebook defines by value: cloudpickle, taught what it refuses or loses without need."""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import os
import pickle
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, GenericAlias, ModuleType, UnionType
from typing import IO, Any

import cloudpickle

from .call import shell

TRACE = 200
"""How many of the last pickled objects `Pickler.seen` holds."""

_STREAMS = ("stdout", "stderr", "stdin", "__stdout__", "__stderr__", "__stdin__")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


class RefusedError(pickle.PicklingError):
    """Pickle would take the object, the ranks have no use for it."""


class TooLargeError(Exception):
    """The pickle has grown beyond its sink's limit."""


class Sink:
    """Counts the bytes written, passes them on to ``file`` if there is one, and refuses more than ``limit``."""

    def __init__(self, file: IO[bytes] | None = None, limit: float = float("inf")) -> None:
        self.size = 0
        self._file = file
        self._limit = limit

    def write(self, data: bytes | memoryview) -> None:
        """Takes what a pickler writes; TooLargeError beyond the limit."""
        self.size += memoryview(data).nbytes
        if self.size > self._limit:
            raise TooLargeError
        if self._file is not None:
            self._file.write(data)


def on_cuda(obj: object) -> bool:
    """Whether the object is a CUDA tensor; torch is never imported for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, getattr(torch, "Tensor", ())) and bool(obj.is_cuda)  # type: ignore[attr-defined]


def findable(obj: object) -> bool:
    """Whether a function or class is what its module holds under its name, so that standard pickle finds it here."""
    found: object = sys.modules.get(getattr(obj, "__module__", None) or "")
    for part in getattr(obj, "__qualname__", "<unnamed>").split("."):
        found = getattr(found, part, None)
    return found is obj


def by_reference(obj: object) -> bool:
    """Whether a function or class goes to another process by its name alone."""
    return findable(obj) and getattr(obj, "__module__", None) != "__main__"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes objects to ``sink``; several `dump` calls share one memo, for an `Unpickler` that loads as often.

    Args:
        sink: where the bytes go.
        refused: objects that must not be sent though they could be pickled.
        annotations: whether to send also the classes that annotations name as text.
    """

    def __init__(
        self, sink: Sink | IO[bytes], refused: Callable[[object], bool] = on_cuda, annotations: bool = True
    ) -> None:
        super().__init__(sink, protocol=5)
        self.classes: list[type] = []
        """The classes sent by value, in order of first appearance."""
        self.main_names: dict[str, object] = {}
        """What the receiver's ``__main__`` needs for pickles by name and for annotations kept as text."""
        self.seen: deque[object] = deque(maxlen=TRACE)
        """The last objects met: after an error the last of them is its cause."""
        self._refused = refused
        self._annotations = annotations
        self._plain: set[type] = set()
        self._filenames: dict[str, None] = {}

    def sources(self) -> dict[str, str]:
        """The text of the notebook code sent so far, by file name: what no file holds but linecache knows."""
        texts = {name: "".join(linecache.getlines(name)) for name in self._filenames if not os.path.exists(name)}
        return {name: text for name, text in texts.items() if text}

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle ``obj``; NotImplemented leaves it to its own type."""
        self.seen.append(obj)
        if self._refused(obj):
            raise RefusedError(f"a {type(obj).__name__} that must not be sent")
        if type(obj) in self._plain:
            return NotImplemented
        if isinstance(obj, CodeType):
            self._filenames[obj.co_filename] = None
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj)[1])
        if isinstance(obj, FunctionType):
            return self._reduce_function(obj)
        if isinstance(obj, type):
            reduced = super().reducer_override(obj)
            if isinstance(reduced, tuple) and len(reduced) > 2:  # two would be a name in another dress
                self.classes.append(obj)
                reduced[2][0]["__qualname__"] = obj.__qualname__  # cloudpickle forgets it
                self._note(obj, self._annotated(obj, _main()))
            return reduced
        if isinstance(obj, io.IOBase):
            for name in _STREAMS:
                if obj is getattr(sys, name, None):
                    return getattr, (sys, name)
            if isinstance(obj, io.TextIOWrapper):  # cloudpickle would send the whole text instead
                raise RefusedError("an open file")
        if reducer := _REDUCERS.get(type(obj)):
            return reducer(obj)
        shells = sys.modules.get("IPython.core.interactiveshell")
        if shells is not None and isinstance(obj, shells.InteractiveShell):
            return shell, ()
        self._plain.add(type(obj))
        return NotImplemented

    def _reduce_function(self, function: FunctionType) -> Any:
        if depth := _depth_below_name(function):
            return _unwrapped, (function.__module__, function.__qualname__, depth)
        reduced = super().reducer_override(function)
        if isinstance(reduced, tuple):
            named = self._annotated(function, function.__globals__)
            reduced[2][1]["__globals__"].update(named)
            self._note(function, {})
        return reduced

    def _annotated(self, obj: type | FunctionType, namespace: Mapping[str, object]) -> dict[str, object]:
        """The classes and modules that annotations name as text (``from __future__ import annotations``)."""
        if not self._annotations:
            return {}
        try:
            texts = [text for text in inspect.get_annotations(obj).values() if isinstance(text, str)]
        except Exception:  # Python 3.14 evaluates them only now
            return {}
        named = {name: namespace.get(name) for text in texts for name in _IDENTIFIER.findall(text)}
        return {name: value for name, value in named.items() if _is_annotation(value) and pickles(value, self._refused)}

    def _note(self, obj: type | FunctionType, annotations: Mapping[str, object]) -> None:
        """Notes what the receiver's ``__main__`` needs because of ``obj``."""
        if obj.__module__ == "__main__":
            name = obj.__qualname__
            if name.isidentifier() and (name not in self.main_names or _main().get(name) is obj):
                self.main_names[name] = obj
            for name, value in annotations.items():
                self.main_names.setdefault(name, value)


def pickles(obj: object, refused: Callable[[object], bool] = on_cuda) -> bool:
    """Whether the object can be pickled, tried without keeping the bytes."""
    try:
        Pickler(Sink(), refused, annotations=False).dump(obj)
    except Exception:
        return False
    return True


def remember_sources(sources: Mapping[str, str]) -> None:
    """Lets tracebacks and `inspect` find the text of code that no file holds."""
    for name, text in sources.items():
        # No modification time: linecache then never looks for the file.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _is_annotation(value: object) -> bool:
    return isinstance(value, type | ModuleType | GenericAlias | UnionType) or type(value).__module__ == "typing"


def _main() -> dict[str, object]:
    return vars(sys.modules["__main__"])


def _depth_below_name(function: FunctionType) -> int:
    """How many ``__wrapped__`` lie between a decorated function and what its module holds under its name; 0 if none."""
    if function.__module__ == "__main__":
        return 0
    found: object = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    depth = 0
    while found is not None and found is not function and depth < TRACE:  # __wrapped__ may lead in a circle
        found = getattr(found, "__wrapped__", None)
        depth += 1
    return depth if found is function else 0


def _unwrapped(module: str, qualname: str, depth: int) -> Any:
    found: Any = cloudpickle.cloudpickle.subimport(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    for _ in range(depth):
        found = getattr(found, "__wrapped__", found)  # the module may have lost the decorator since
    return found


def _code(filename: str, *args: Any) -> CodeType:
    """A code object with its file name, for which cloudpickle writes ``<dynamic-code>``."""
    return CodeType(*args).replace(co_filename=filename)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached(obj: Any) -> Any:
    return NotImplemented if by_reference(obj) else (_cached, (obj.__wrapped__, obj.cache_parameters()))


def _reduce_property(obj: functools.cached_property[Any]) -> Any:
    return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}


def _reduce_weak(obj: Any) -> Any:
    return type(obj), (dict(obj),)


# Types of the standard library that go by value but for their locks and weak references.
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    functools._lru_cache_wrapper: _reduce_cached,
    functools.cached_property: _reduce_property,
    weakref.WeakKeyDictionary: _reduce_weak,
    weakref.WeakValueDictionary: _reduce_weak,
}
