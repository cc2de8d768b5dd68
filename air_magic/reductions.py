"""How torch's storages and objects, and exceptions, are taken apart in a rank and put together in the kernel."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

# module, class, and what to return instead: their parts are on different ranks.
_SHARDED = (
    (
        "torch.distributed.tensor",
        "DTensor",
        "a DTensor is spread over the ranks: return its full_tensor() or to_local()",
    ),
    (
        "torch.distributed.fsdp",
        "FullyShardedDataParallel",
        "an FSDP model is spread over the ranks: return a state dict",
    ),
)


def torch_reducers(unwrap: Callable[[Any], Any]) -> dict[type, Callable[[Any], Any]]:
    """What is pickled in another way than torch would; empty while torch is not imported.

    Args:
        unwrap: reduces a `DistributedDataParallel`, which cannot be rebuilt without its process group.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    reducers: dict[type, Callable[[Any], Any]] = {
        torch.UntypedStorage: _reduce_storage,
        torch.TypedStorage: _reduce_typed_storage,
        torch.Generator: _reduce_generator,
        torch.nn.parallel.DistributedDataParallel: unwrap,
    }
    for module, name, advice in _SHARDED:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            reducers[kind] = partial(_refuse, advice)
    return reducers


def itself(thing: Any) -> Any:
    """``thing``: for a reduction that puts another object in the place of the one reduced."""
    return thing


def _refuse(advice: str, _: Any) -> NoReturn:
    raise pickle.PicklingError(advice)


def _reduce_storage(storage: Any) -> Any:
    if storage.device.type == "meta":
        raise pickle.PicklingError("a storage on the meta device has no data")
    host = storage.cpu()  # itself, unless it is on an accelerator
    size = host.nbytes()
    if not size:
        return _storage, (b"",)
    memory = (ctypes.c_ubyte * size).from_address(host.data_ptr())
    memory.owner = host  # the array alone would not keep the storage alive
    return _storage, (pickle.PickleBuffer(memory),)


def _storage(data: Any) -> Any:
    import torch

    if not len(data):
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _reduce_typed_storage(storage: Any) -> Any:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def with_typed_storage(rebuild: Callable[..., Any], storage: Any, *rest: Any) -> Any:
    """Calls torch's ``_rebuild_tensor_v3``: it pickles untyped storages, but expects the typed ones of `torch.load`."""
    import torch

    return rebuild(_typed_storage(storage, torch.uint8), *rest)


def _reduce_generator(generator: Any) -> Any:
    if generator.device.type != "cpu":
        raise pickle.PicklingError(f"a generator on {generator.device} would open that device in the notebook")
    return generator.__reduce_ex__(5)


def reduce_exception(exc: BaseException) -> Any:
    """How an exception is rebuilt, with its cause and without calling a constructor that the user wrote."""
    reduction = exc.__reduce_ex__(5)
    if not isinstance(reduction, tuple) or len(reduction) > 3:
        return reduction
    build, args, state = (*reduction, None)[:3]
    kind = type(exc)
    own = (kind.__new__, kind.__reduce__, kind.__reduce_ex__)
    if build is kind and isinstance(kind.__init__, FunctionType) and not any(isinstance(f, FunctionType) for f in own):
        build, args = _exception, (kind, *args)
    if state is None and exc.__cause__ is None and not exc.__suppress_context__:
        return build, args
    return build, args, (state, exc.__cause__, exc.__suppress_context__), None, None, _set_exception_state


def _exception(kind: type[BaseException], *args: Any) -> BaseException:
    """The exception without its own ``__init__``, which rarely takes what it left in ``args``."""
    initialisers = ((base, vars(base).get("__init__")) for base in kind.__mro__)
    builtin = next(base for base, init in initialisers if init and not isinstance(init, FunctionType))
    exc = kind.__new__(kind, *args)
    builtin.__init__(exc, *args)  # type: ignore[misc]  # OSError and the like read their fields from args
    return exc


def _set_exception_state(exc: BaseException, state: tuple[Any, Any, bool]) -> None:
    attributes, cause, suppress = state
    if attributes:
        exc.__setstate__(attributes)
    exc.__cause__ = cause if isinstance(cause, BaseException) else None  # else a stand-in
    exc.__suppress_context__ = suppress
