"""What of a call could not be sent to the ranks, where it hangs, and how big its names are."""

from __future__ import annotations

import functools
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from .advice import advice_for, label
from .call import CellCall, FunctionCall
from .errors import CaptureError
from .pickler import Pickler, Sink, by_reference, on_cuda, pickles
from .references import ATOMS, references

OBJECTS, SECONDS = 20_000, 5.0
"""The search for the way to an object ends after so many objects, or so long."""
STEPS = 8
"""A longer path is shown without its middle."""

_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_ARGUMENT = re.compile(r".*\((?:argument|default of) '(.*)'\)")


@dataclass(frozen=True)
class _Node:
    """An object, and the node that refers to it."""

    text: str
    value: object
    parent: _Node | None = None

    def chain(self) -> list[_Node]:
        """The way from the root to this object."""
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def explain(
    root: object,
    root_name: str,
    error: BaseException,
    *,
    refused: Callable[[object], bool] = on_cuda,
    clock: Callable[[], float] = time.monotonic,
) -> CaptureError:
    """The error to raise for a root that could not be pickled: the culprit, the way to it, what to do.

    Args:
        root: a call, or any object.
        root_name: what the reader calls it.
        error: what the pickler raised.
        refused: the objects that the pickler was told not to send.
        clock: seconds, for the limit of the search.
    """
    deadline = clock() + SECONDS
    parts = root.parts() if isinstance(root, FunctionCall | CellCall) else [("", root)]
    nodes = [_Node(f"{root_name}{text}", value) for text, value in parts]
    place = root.place if isinstance(root, CellCall) else "the function"
    seen = _trace([node.value for node in nodes], refused)
    too_deep = isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)
    find = _find_deep if too_deep else _find
    node = find(nodes, seen, refused, lambda: clock() < deadline)
    own = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if node is None:
        return CaptureError(f"cannot send {root_name}: {own}")
    chain = node.chain()
    if too_deep:
        what = f"`{_path(chain)}` is nested too deeply to be pickled; build it inside {place}."
    elif refused(node.value):
        what = _about_cuda(chain)
    else:
        # A lock deep inside a thread says less than the thread.
        telling = next((index for index, step in enumerate(chain) if advice_for(step.value, place)), None)
        if telling is not None:
            value = chain[telling].value
            what = f"`{_path(chain[: telling + 1])}` is {label(value)}; {advice_for(value, place)}."
        else:
            reason = f"which cannot be pickled ({own[:200]})"
            what = f"`{_path(chain)}` is {label(node.value)}, {reason}; create it inside {place}."
    return CaptureError(f"cannot send {root_name}: {what}")


def sizes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, int]]:
    """The names that a call takes along, with type and pickled size, biggest first; each object counts once."""
    call = FunctionCall(function, args, kwargs)
    return _sizes([*call.arguments().items(), *_captured(function, "", set())])


def sizes_of_names(names: Mapping[str, object]) -> list[tuple[str, str, int]]:
    """The same for the names given to a cell."""
    return _sizes(names.items())


def _sizes(named: Iterable[tuple[str, object]]) -> list[tuple[str, str, int]]:
    found = {}
    for name, value in named:
        if id(value) not in found:
            sink = Sink()
            try:
                Pickler(sink, annotations=False).dump(value)
            except Exception:  # noqa: S112 - what cannot be sent has no size; `explain` is for that
                continue
            found[id(value)] = (name, type(value).__name__, sink.size)
    return sorted(found.values(), key=lambda entry: -entry[2])


def _captured(value: object, name: str, visited: set[int]) -> Iterator[tuple[str, object]]:
    """The data behind a function: through the functions that it calls, with the way there as name."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, _FUNCTIONS):
        for text, child in references(value):
            yield from _captured(child, f"{name}{text}".removeprefix(" → ").strip("()"), visited)
    elif name and not isinstance(value, ModuleType) and not (isinstance(value, type) and by_reference(value)):
        yield name, value


def _trace(values: list[object], refused: Callable[[object], bool]) -> list[object]:
    """The last objects that the pickler met before it failed, the culprit at the end."""
    pickler = Pickler(Sink(), refused)
    try:
        pickler.dump(values)
    except Exception:
        return list(pickler.seen)
    return []


def _find(
    roots: list[_Node], seen: list[object], refused: Callable[[object], bool], in_time: Callable[[], bool]
) -> _Node | None:
    """The culprit with the way to it, or the innermost object on the way that a name leads to."""
    if not seen:
        return None
    nodes = _explore(roots, seen[-1], in_time)
    if id(seen[-1]) in nodes:
        return nodes[id(seen[-1])]
    # The culprit exists only while its owner is pickled. What comes after the owner pickles well.
    known = (nodes[id(value)] for value in reversed(seen) if id(value) in nodes)
    return next((node for node in known if not in_time() or not pickles(node.value, refused)), None)


def _find_deep(
    roots: list[_Node], _seen: list[object], refused: Callable[[object], bool], in_time: Callable[[], bool]
) -> _Node | None:
    """The outermost object that exhausts the stack by itself, behind the functions that use it."""
    nodes = _explore(roots, None, in_time).values()
    own = (node for node in nodes if in_time() and not isinstance(node.value, _FUNCTIONS))
    return next((node for node in own if not pickles(node.value, refused)), None)


def _explore(roots: list[_Node], goal: object, in_time: Callable[[], bool]) -> dict[int, _Node]:
    """The objects below the roots by identity, each with a shortest way to it; ends at the goal."""
    nodes = {id(node.value): node for node in roots}
    queue = deque(roots)
    while queue and id(goal) not in nodes and in_time():
        node = queue.popleft()
        try:
            for text, value in references(node.value):
                if id(value) not in nodes and not isinstance(value, ATOMS):
                    nodes[id(value)] = child = _Node(text, value, node)
                    queue.append(child)
                    if value is goal or len(nodes) >= OBJECTS:
                        return nodes
        except Exception:  # noqa: S112 - a user's property raised: there is no way through this object
            continue
    return nodes


def _path(chain: list[_Node]) -> str:
    texts = [node.text for node in chain]
    if len(texts) > STEPS:
        texts[STEPS // 2 : 1 - STEPS // 2] = [" → …"]
    return "".join(texts)


def _about_cuda(chain: list[_Node]) -> str:
    tensor = chain[-1].value
    # A whole model moves with one call.
    owner = next((index for index, node in enumerate(chain) if hasattr(node.value, "cpu")), len(chain) - 1)
    path = _path(chain[: owner + 1])
    kind = "is a CUDA tensor" if owner == len(chain) - 1 else "holds a CUDA tensor"
    segment = path.replace(" → .", ".").rpartition(" → ")[2]
    named = _ARGUMENT.sub(r"\1", segment)
    return f"`{path}` {kind} on {getattr(tensor, 'device', 'cuda')}; send {named}.cpu() and move it in the rank."
