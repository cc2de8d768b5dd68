"""Calls back once a named module has been imported, so that nothing is imported for the sake of a patch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls ``callback`` with the module, at once if it is there, else right after its first import."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, callback))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module by asking the other finders, and runs the callback after its code."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback
        self._asking = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec as the others find it, with a loader that calls back."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_call_back(module: ModuleType) -> None:
            execute(module)
            # Not before: whoever only asks whether the module is there (`find_spec`) has not imported it.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback(module)

        spec.loader.exec_module = then_call_back  # type: ignore[method-assign] # this spec's own loader object
        return spec
