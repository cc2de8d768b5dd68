"""The source text that makes a notebook's names again, for a script that runs without the notebook."""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import os
import textwrap
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from .errors import RequestError
from .names import import_text, unbound


def sources(wanted: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, str]:
    """Source text by name, in an order in which it can be run: the wanted names and what their code needs.

    Args:
        wanted: names of ``namespace``.
        namespace: the notebook's.

    Raises:
        RequestError: for a value that no source text makes.
    """
    texts: dict[str, str] = {}
    for name in wanted:
        _add(name, namespace, texts, set())
    return texts


def _add(name: str, namespace: Mapping[str, Any], texts: dict[str, str], begun: set[str]) -> None:
    if name in texts or name in begun:
        return
    begun.add(name)  # functions may call each other
    value = namespace[name]
    text = import_text(name, value) or _literal(name, value) or _definition(name, value)
    for needed in unbound(ast.parse(text)):
        if needed.name in namespace:
            _add(needed.name, namespace, texts, begun)
    texts[name] = text


def _literal(name: str, value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} = float({str(value)!r})"
    try:
        again = ast.literal_eval(repr(value))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return f"{name} = {value!r}" if type(again) is type(value) and again == value else None


def _definition(name: str, value: Any) -> str:
    """The statement that defined a function or class, and one more if it is called otherwise here."""
    own = inspect.unwrap(value) if callable(value) else value
    if not isinstance(own, FunctionType | type):
        raise RequestError(f"--export cannot write the value of {name} (a {type(value).__name__}); make it in the cell")
    if isinstance(own, FunctionType) and own.__closure__ is not None:
        raise RequestError(f"--export cannot write {name}: it is a function made by another; make it in the cell")
    text = _class_text(own) if isinstance(own, type) else _function_text(own)
    bound = _bound_name(text)
    if text is None or bound is None:
        raise RequestError(f"--export: the source of {name} is not known; define it in the cell")
    return text if bound == name else f"{text}\n{name} = {bound}"


def _function_text(function: FunctionType) -> str | None:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()
    except (OSError, TypeError):
        return None


def _class_text(cls: type) -> str | None:
    """The class statement, found in the cells; `inspect` knows those of files only."""
    own = [member.__code__.co_filename for member in vars(cls).values() if isinstance(member, FunctionType)]
    cells = [name for name in (own or list(linecache.cache)) if not os.path.exists(name)]
    found = {text for name in cells for text in _class_statements(cls.__name__, linecache.getlines(name))}
    return found.pop() if len(found) == 1 else None  # of two different ones none is certain


def _class_statements(name: str, lines: list[str]) -> list[str]:
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    starts = [min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) for node in nodes]
    return [
        textwrap.dedent("".join(lines[start - 1 : node.end_lineno])).rstrip()
        for start, node in zip(starts, nodes, strict=True)
    ]


def _bound_name(text: str | None) -> str | None:
    """The name that a definition binds; None if it is no statement that binds just one."""
    try:
        statements = ast.parse(text or "").body
    except SyntaxError:  # a lambda amid other code
        return None
    match statements:
        case [ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name)]:
            return name
        case [ast.Assign([ast.Name(name)], ast.Lambda())]:
            return name
    return None
