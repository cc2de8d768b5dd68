"""What an object refers to, with the text that leads there: ``['lock']``, `` → .sampler``."""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from .pickler import by_reference

Reference: TypeAlias = tuple[str, object]
"""The text behind the owner's, and the object."""

ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type(...), type(NotImplemented), CodeType)


def references(obj: Any) -> Iterator[Reference]:
    """What is pickled together with ``obj``; nothing for what goes by its name."""
    if isinstance(obj, ATOMS):
        return
    if isinstance(obj, FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, type):
        yield from _of_class(obj)
    elif isinstance(obj, MethodType):
        yield "", obj.__func__
        yield " → self", obj.__self__
    elif isinstance(obj, functools.partial):
        yield " → .func", obj.func
        yield from ((f" → .args[{index}]", value) for index, value in enumerate(obj.args))
        yield from ((f" → .keywords[{key!r}]", value) for key, value in obj.keywords.items())
    elif isinstance(obj, staticmethod | classmethod):
        yield "", obj.__func__
    elif isinstance(obj, property):
        yield from (("", accessor) for accessor in (obj.fget, obj.fset, obj.fdel) if accessor is not None)
    elif not isinstance(obj, ModuleType):
        yield from _of_items(obj)
        yield from _of_attributes(obj)
        if not by_reference(type(obj)):
            yield f" → class {type(obj).__name__}", type(obj)


def _of_function(function: FunctionType) -> Iterator[Reference]:
    if by_reference(function):
        return
    code = function.__code__
    for name in _global_names(code):
        if name in function.__globals__:
            yield f" → {name}", function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        yield from ((f" → {name}", value) for value in _contents(cell))
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    named = dict(zip(code.co_varnames[first : code.co_argcount], defaults, strict=False))
    for name, value in (named | (function.__kwdefaults__ or {})).items():
        yield f"(default of {name!r})", value
    for name, value in function.__annotations__.items():
        yield f"(annotation of {name!r})", value
    for name, value in vars(function).items():
        yield f" → .{name}", value


def _of_class(cls: type) -> Iterator[Reference]:
    if by_reference(cls):
        return
    for base in cls.__bases__:
        yield f" → {base.__name__}", base
    for name, value in vars(cls).items():
        if name not in ("__dict__", "__weakref__"):
            yield f" → .{name}", value


def _of_items(obj: object) -> Iterator[Reference]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{_short(key)}]", value
        yield from ((" → a key", key) for key in obj)
    elif isinstance(obj, list | tuple | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from ((" → an element", value) for value in obj)
    elif isinstance(obj, CellType):
        yield from (("", value) for value in _contents(obj))


def _of_attributes(obj: object) -> Iterator[Reference]:
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f" → .{name}", value) for name, value in attributes.items())
    for cls in type(obj).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            if mangled not in ("__dict__", "__weakref__") and hasattr(obj, mangled):
                yield f" → .{name}", getattr(obj, mangled)


def _global_names(code: CodeType) -> dict[str, None]:
    """The globals that a function's code names, nested functions' included, in order."""
    names = {step.argval: None for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _contents(cell: CellType) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # still empty
        return ()


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, ATOMS) else f"<{type(key).__name__}>"
    return text if len(text) <= 40 else f"{text[:37]}…"
