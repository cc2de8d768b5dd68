"""What shall run: a function with its arguments, or a cell with the names given to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cell import Cell


@dataclass(frozen=True)
class FunctionCall:
    """A call that has not happened yet."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's qualified name; for an object that is called, its class's."""
        function: Any = self.function
        while hasattr(function, "func") and not hasattr(function, "__qualname__"):  # a partial
            function = function.func
        return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]

    @property
    def is_coroutine(self) -> bool:
        """Whether calling the function would run none of it."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - not whether it can be called, but how
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def arguments(self) -> dict[str, object]:
        """The arguments by parameter name; by position where the signature is unknown."""
        try:
            return inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):  # a builtin, or a call that will fail in the rank as it would here
            return {str(index): value for index, value in enumerate(self.args)} | self.kwargs

    def parts(self) -> Iterator[tuple[str, object]]:
        """Everything sent, with the text that stands for it behind the call's name."""
        yield "", self.function
        for name, value in self.arguments().items():
            yield f"(argument {name!r})", value

    def run(self, main: ModuleType) -> Any:  # noqa: ARG002 - a function brings its own globals
        """Calls the function; what it returns."""
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class CellCall:
    """A cell that has not run yet."""

    cell: Cell
    given: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As the notebook numbers the cell."""
        return "cell" if self.cell.number is None else f"cell [{self.cell.number}]"

    @property
    def place(self) -> str:
        """Where to create what cannot be sent."""
        return "the cell"

    @property
    def is_coroutine(self) -> bool:
        """Never: a cell's own `await` is the cell's business."""
        return False

    def arguments(self) -> dict[str, object]:
        """The given names and their values."""
        return dict(self.given)

    def parts(self) -> Iterator[tuple[str, object]]:
        """Everything sent, with the text that stands for it behind the cell's name."""
        for name, value in self.given.items():
            yield f" → {name}", value

    def run(self, main: ModuleType) -> Any:
        """Runs the cell in ``main`` as a script; the value of its last expression."""
        namespace = vars(main)
        namespace.update(self.given)
        if self.cell.needs_shell:
            namespace["get_ipython"] = shell(namespace).get_ipython
        if "display" in self.cell.source:
            namespace.setdefault("display", _display)
        module_code, value_code = self.cell.exec_parts()
        exec(module_code, namespace)  # noqa: S102 - running the user's code is the purpose
        return None if value_code is None else eval(value_code, namespace)  # noqa: S307 - ditto


Call = FunctionCall | CellCall


def shell(namespace: dict[str, Any] | None = None) -> Any:
    """This process's IPython shell, made at its first use: it stands in for the notebook's."""
    import sys

    from IPython.core.getipython import get_ipython

    from .cell import new_shell

    return get_ipython() or new_shell(vars(sys.modules["__main__"]) if namespace is None else namespace)


def _display(*objects: Any, **options: Any) -> Any:
    from IPython.display import display

    return display(*objects, **options)  # type: ignore[no-untyped-call]
