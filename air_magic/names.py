"""Which names a cell needs from outside: those its code reads and nothing in it binds.

Scoping is the compiler's own: the code is compiled, and its instructions say which names are looked
up among the globals, and on which lines. So code that is never run (``if False:``) uses no name.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import TypeGuard

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"})
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_TERMINATORS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))

# What every module has, and what the compiler of some Python version reads for itself.
_MODULE_NAMES = frozenset(
    {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__loader__", "__package__", "__cached__"}
    | {"__debug__", "__dict__", "__annotations__", "__annotate__", "__conditional_annotations__"}
)


@dataclass(frozen=True)
class Unbound:
    """A global name that code reads and does not bind."""

    name: str
    lineno: int
    """The line of its first use."""


def unbound(tree: ast.Module) -> tuple[Unbound, ...]:
    """The names that the code needs from outside, by line, each once.

    A name that is read in a ``try`` with ``except NameError``, or looked up with ``"name" in globals()``,
    is not needed. A name that is bound only by the statement that needs it (``model = model.to(device)``),
    or only after it, is.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        module = compile(tree, "<names>", "exec", dont_inherit=True)
    scopes = [_Scope(code, within) for code, within in _codes(module)]
    of_functions = {name for scope in scopes for name, op in scope.stored if op == "STORE_GLOBAL"}
    bound = of_functions | {name for name, _ in scopes[0].stored}
    ignored = _builtin_names() | _MODULE_NAMES | _looked_up(tree)
    probed = _probed_lines(tree)

    first: dict[str, int] = {}
    for scope in scopes:
        for name, lineno, early in scope.reads():
            known = name in of_functions if early and scope is scopes[0] else name in bound
            if not known and name not in ignored and lineno not in probed:
                first[name] = min(lineno, first.get(name, lineno))
    return tuple(Unbound(name, lineno) for name, lineno in sorted(first.items(), key=lambda item: (item[1], item[0])))


def is_open(tree: ast.Module) -> bool:
    """Whether names can appear that no analysis sees: a star import, `exec`, `globals`, module-level `locals`."""
    everywhere = any(_calls(node, {"exec", "globals"}) for node in ast.walk(tree))
    own = any(_calls(node, {"locals", "vars"}) and not node.args for node in _outside_functions(tree))
    return everywhere or own or any(map(_is_star_import, ast.walk(tree)))


def star_names(tree: ast.Module) -> set[str]:
    """What the star imports of the code bind, as far as this process has the modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if _is_star_import(node):
            exported = getattr(sys.modules.get(node.module or ""), "__dict__", {})
            names.update(exported.get("__all__", [name for name in exported if not name.startswith("_")]))
    return names


def import_text(name: str, value: object) -> str | None:
    """The statement that imports a value under a name, from as high up as it can be had; None if it is no import."""
    if isinstance(value, ModuleType):
        origin = value.__name__
        if sys.modules.get(origin) is not value or origin == "__main__":
            return None
        return f"import {origin}" if origin == name else f"import {origin} as {name}"
    home, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(home, str) or not isinstance(own, str) or home == "__main__":
        return None
    parts = home.split(".")
    for origin in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        if getattr(sys.modules.get(origin), own, None) is value:
            return f"from {origin} import {own}" if own == name else f"from {origin} import {own} as {name}"
    return None


def explain_missing(missing: Sequence[Unbound], namespace: Mapping[str, object]) -> str:
    """What the cell does not know of the notebook's namespace, and how it gets to know it."""
    values = {each.name: namespace[each.name] for each in missing}
    kinds = ["class" if isinstance(value, type) else type(value).__name__ for value in values.values()]
    known = ", ".join(f"{each.name} (line {each.lineno}: {kind})" for each, kind in zip(missing, kinds, strict=True))
    imports = {name: text for name, value in values.items() if (text := import_text(name, value))}
    others = [name for name in values if name not in imports]
    text = f"this cell runs in a fresh namespace, like a script; it does not know {known} from the notebook."
    if imports:
        text += f" Import in the cell: `{'; '.join(imports.values())}`."
    if others:
        them = "it" if len(others) == 1 else "them"
        text += f" Add `--with {','.join(others)}` to the %%distributed line, or define {them} in the cell."
    return text


class _Scope:
    """One code object: which global names it stores, and which it reads."""

    def __init__(self, code: CodeType, class_names: frozenset[str]) -> None:
        self._instructions = list(dis.get_instructions(code))
        self._lines = {at: line for start, end, line in code.co_lines() for at in range(start, end, 2)}
        self._first_line = code.co_firstlineno
        self._is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        self._is_class = _is_class(code)
        self._class_names = class_names
        self.stored = [(step.argval, step.opname) for step in self._instructions if step.opname in _STORES]

    def reads(self) -> Iterator[tuple[str, int, bool]]:
        """Every read of a global: the name, the line, and whether nothing in this code can have stored it before."""
        stored_before: dict[tuple[str, int], bool] = {}
        for index, step in enumerate(self._instructions):
            if step.opname not in _READS:
                continue
            if step.opname == "LOAD_FROM_DICT_OR_GLOBALS" and step.argval in self._class_names:
                continue
            use = step.argval, self._lines.get(step.offset) or self._first_line
            if self._is_function or (self._is_class and step.opname == "LOAD_GLOBAL"):  # a comprehension, inlined
                yield *use, False
            else:
                # The compiler may copy a line (`finally`, a short end of the module) to where no store leads.
                stored_before[use] = stored_before.get(use, False) or self._may_follow_a_store(index)
        for use, stored in stored_before.items():
            if not stored:
                yield *use, True

    def _may_follow_a_store(self, index: int) -> bool:
        read = self._instructions[index]
        for at, step in enumerate(self._instructions):
            if step.opname in _STORES and step.argval == read.argval:
                if at < index:
                    return True
                if self._loops(read.offset, step.offset) and not self._straight(index, at):
                    return True
        return False

    def _loops(self, read: int, store: int) -> bool:
        """Whether control can go from the store back to the read above it."""
        return any(
            step.opcode in _JUMPS and step.argval <= read and store <= step.offset for step in self._instructions
        )

    def _straight(self, read: int, store: int) -> bool:
        """Whether the store is reached through the read only."""
        between = self._instructions[read : store + 1]
        return not any(step.is_jump_target for step in between[1:]) and not any(
            step.opname.startswith(_TERMINATORS) for step in between
        )


def _codes(code: CodeType, within: frozenset[str] = frozenset()) -> Iterator[tuple[CodeType, frozenset[str]]]:
    """The code and all code nested in it, each with the names stored by the classes around it."""
    yield code, within
    if _is_class(code):
        within |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant, within)


def _is_class(code: CodeType) -> bool:
    return not code.co_flags & inspect.CO_OPTIMIZED and code.co_name != "<module>"


def _builtin_names() -> set[str]:
    """The builtins of a fresh interpreter, whatever the notebook's has by now.

    IPython adds and hides some while a cell runs, ipykernel replaces `input`, tools install their own.
    """
    own = {
        name
        for name, value in vars(builtins).items()
        if (getattr(value, "__module__", None) or "builtins").partition(".")[0] in sys.stdlib_module_names
    }
    return (own | {"exit", "quit", "input"}) - {"_", "__IPYTHON__"}


def _probed_lines(tree: ast.Module) -> set[int]:
    """The lines where the code itself expects a NameError."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            probes = any(handler.type and _mentions_name_error(handler.type) for handler in node.handlers)
        elif isinstance(node, ast.With):
            probes = any(
                isinstance(item.context_expr, ast.Call)
                and ast.unparse(item.context_expr.func).endswith("suppress")
                and any(map(_mentions_name_error, item.context_expr.args))
                for item in node.items
            )
        else:
            continue
        if probes:
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1))
    return lines


def _looked_up(tree: ast.Module) -> set[str]:
    """The names whose presence the code tests itself."""
    return {
        str(node.left.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)
        if any(_calls(table, {"globals", "locals", "vars", "dir"}) for table in node.comparators)
    }


def _mentions_name_error(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "NameError" for part in ast.walk(node))


def _is_star_import(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _calls(node: ast.AST, names: set[str]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _outside_functions(child)
