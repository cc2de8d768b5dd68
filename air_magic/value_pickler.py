"""How one object leaves a rank: cloudpickle, with buffers beside the pickle and known classes by number."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import IO, Any, NoReturn

import cloudpickle
from cloudpickle import cloudpickle as machinery

from .reductions import itself, reduce_exception, torch_reducers, with_typed_storage
from .unpicklable import Unpicklable

# Where the classes are whose objects are useless with a part missing: they are replaced as a whole.
_INDIVISIBLE = (
    "asyncio.",
    "concurrent.",
    "logging.",
    "multiprocessing.",
    "queue.",
    "subprocess.",
    "tempfile.",
    "threading.",
    "torch.jit.",
    "tqdm.",
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle publishes no types
    """Pickles for the kernel; fails on what cannot be pickled.

    Args:
        file: takes the pickle.
        keep: takes a buffer and returns False, or returns True to leave it in the pickle.
        known: the classes that came from the notebook, here sent as their index.
    """

    def __init__(self, file: IO[bytes], keep: Callable[[pickle.PickleBuffer], bool], known: Sequence[type]) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)
        self._known = {id(kind): index for index, kind in enumerate(known)}
        self._reducers = torch_reducers(self._unwrap)
        self.notes: dict[int, tuple[object, str]] = {}
        """What was replaced, by id: the object and what a warning says of it."""

    def reducer_override(self, obj: Any) -> Any:
        """How ``obj`` is rebuilt, or NotImplemented for pickle's own way."""
        index = self._known.get(id(obj))
        if index is not None:
            return _known, (index,)
        kind = type(obj)
        reducer = self._reducers.get(kind)
        if reducer is not None:
            return reducer(obj)
        if issubclass(kind, BaseException):
            return reduce_exception(obj)
        return super().reducer_override(obj)

    def _unwrap(self, wrapper: Any) -> Any:
        self.notes[id(wrapper)] = wrapper, "is a DistributedDataParallel and was returned as its module"
        return itself, (wrapper.module,)


class CarefulPickler(Pickler):
    """Puts an `Unpicklable` in the place of whatever cannot be reduced, in one pass.

    Args:
        file: as for `Pickler`.
        keep: as for `Pickler`.
        known: as for `Pickler`.
        origin: who pickles, in words: "rank 1".
        stand_ins: what replaces an object whatever it reduces to, by the object's id.
    """

    def __init__(
        self,
        file: IO[bytes],
        keep: Callable[[pickle.PickleBuffer], bool],
        known: Sequence[type],
        origin: str,
        stand_ins: Mapping[int, Unpicklable],
    ) -> None:
        super().__init__(file, keep, known)
        self._classes = known
        self._origin = origin
        self._stand_ins = stand_ins

    def persistent_id(self, obj: Any) -> Unpicklable | None:
        """The stand-in that was settled for ``obj``; unlike a reducer this is asked for lists and dicts too."""
        stand_in = self._stand_ins.get(id(obj))
        if stand_in is not None:
            self.notes[id(obj)] = obj, stand_in.notice
        return stand_in

    def reducer_override(self, obj: Any) -> Any:
        """How ``obj`` is rebuilt, or its stand-in."""
        kind = type(obj)
        try:
            reduction = super().reducer_override(obj)
            if reduction is not NotImplemented or issubclass(kind, (type, FunctionType)):
                return reduction
            reducer = self.dispatch_table.get(kind)
            reduction = reducer(obj) if reducer else obj.__reduce_ex__(5)
            if any(f"{base.__module__}.".startswith(_INDIVISIBLE) for base in kind.__mro__):
                Pickler(io.BytesIO(), lambda _: False, self._classes).dump(reduction[:3])
        except Exception as error:
            stand_in = Unpicklable.of(obj, error, self._origin)
            self.notes[id(obj)] = obj, stand_in.notice
            return itself, (stand_in,)
        return reduction


class Unpickler(pickle.Unpickler):
    """Loads what `Pickler` wrote, and leaves every class that this process already has as it is."""

    def __init__(self, file: IO[bytes], known: Sequence[type], buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._known = known
        self._existing: set[int] = set()

    def persistent_load(self, pid: Any) -> Any:
        """The stand-in itself: it travels as the id."""
        return pid

    def find_class(self, module: str, name: str) -> Any:
        """The global, except where it would rebuild a class that exists."""
        if module == __name__ and name == _known.__name__:
            return self._known.__getitem__
        found = super().find_class(module, name)
        if found is machinery._make_skeleton_class or found is machinery._make_skeleton_enum:
            return partial(self._make_class, found)
        if found is machinery._class_setstate:
            return self._fill_class
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return partial(with_typed_storage, found)
        return found

    # cloudpickle knows a class that has been here before by its tracker's id, and then sets the
    # travelled methods on it: the notebook's own class would run the rank's copies.
    def _make_class(self, make: Callable[..., type], *args: Any) -> type:
        existing: type | None = machinery._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
        if existing is None:
            return make(*args)
        self._existing.add(id(existing))
        return existing

    def _fill_class(self, kind: type, state: Any) -> type:
        return kind if id(kind) in self._existing else machinery._class_setstate(kind, state)


def _known(index: int) -> NoReturn:
    """Stands in a pickle for a class of the notebook; `Unpickler.find_class` puts the class in its place."""
    raise pickle.UnpicklingError(f"class {index} of the notebook can only be loaded by air_magic.values.load")
