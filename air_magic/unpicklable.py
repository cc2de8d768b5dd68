"""What stands in the kernel for an object that could not leave its rank, and where that object hung."""

from __future__ import annotations

import pickle
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

_LONGEST = 500
_MOST_VISITED = 100_000
_ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None)})

# Cuts long containers, deep ones and long strings before their whole text is built.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _LONGEST


@dataclass(frozen=True)
class Unpicklable:
    """Stands in the kernel for what could not leave its rank."""

    type_name: str
    text: str
    """The object's repr in its rank, at most 500 characters."""
    reason: str
    origin: str = "its rank"

    def __repr__(self) -> str:
        text = self.text[1:-1] if self.text[:1] + self.text[-1:] == "<>" else self.text
        return f"<{text} could not leave {self.origin}: {self.reason}>"

    @classmethod
    def of(cls, thing: object, error: Exception, origin: str) -> Unpicklable:
        """The stand-in for ``thing``, which failed with ``error``."""
        return cls(type_name(type(thing)), safe_text(_short.repr, thing), reason(error), origin)

    @property
    def notice(self) -> str:
        """What a warning says of it, behind the path to it."""
        article = "an" if self.type_name[:1].lower() in "aeiou" else "a"
        # "cannot pickle 'generator' object" would only say it twice.
        why = "" if self.reason.startswith("cannot pickle") else f" ({self.reason})"
        return f"is {article} {self.type_name} and cannot be pickled{why}; a stand-in with its text was returned"


def safe_text(how: Callable[[Any], str], thing: object) -> str:
    """``how(thing)``, at most 500 characters, also where the user's own method raises."""
    try:
        return how(thing)[:_LONGEST]
    except Exception:
        return object.__repr__(thing)


def type_name(kind: type) -> str:
    """The name of a class as its user would write it."""
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def reason(error: Exception) -> str:
    """An exception in one line."""
    first = next(iter(safe_text(str, error).strip().splitlines()), "")
    if first and isinstance(error, (TypeError, pickle.PicklingError)):
        return first  # pickle's own words need no class in front
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def parts(whole: object) -> Iterator[tuple[str, Any]]:
    """The objects that ``whole`` holds, each with the step that leads to it; atoms left out."""
    for step, part in _all_parts(whole):
        if type(part) not in _ATOMS:
            yield step, part


def _all_parts(whole: object) -> Iterator[tuple[str, Any]]:
    if isinstance(whole, dict):
        for key, part in list(dict.items(whole)):
            yield f"[{safe_text(_short.repr, key)}]", part
    elif isinstance(whole, (list, tuple, deque)):
        fields = getattr(type(whole), "_fields", None)
        for index, part in enumerate(list(whole)):
            yield f".{fields[index]}" if fields else f"[{index}]", part
    elif isinstance(whole, (set, frozenset)):
        for part in list(whole):
            yield "[...]", part
    elif isinstance(whole, (type, ModuleType, FunctionType)):
        return
    if isinstance(whole, BaseException):
        yield ".__cause__", whole.__cause__
    slots = getattr(type(whole), "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else tuple(slots):
        try:
            yield f".{name}", object.__getattribute__(whole, name)
        except AttributeError:
            continue  # a slot that was never filled, or a private name
    try:
        attributes = object.__getattribute__(whole, "__dict__")
    except AttributeError:
        return
    for name, part in list(attributes.items()):
        yield f".{name}", part


def paths(value: object, things: Iterable[object]) -> dict[int, str]:
    """The shortest way from ``value`` to each of ``things``, by identity, as an expression."""
    wanted = {id(thing) for thing in things}
    found: dict[int, str] = {}
    seen = {id(value)}
    queue: deque[tuple[Any, str]] = deque([(value, "value")])
    while queue and wanted - found.keys():
        whole, path = queue.popleft()
        if id(whole) in wanted:
            found[id(whole)] = path
        for step, part in parts(whole) if len(seen) < _MOST_VISITED else ():
            if id(part) not in seen:
                seen.add(id(part))
                queue.append((part, path + step))
    return found
