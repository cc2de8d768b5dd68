"""The line of Python by which another interpreter runs a module of exactly this package, wherever it lies."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def boot(module: str, call: str = "main()") -> str:
    """Code for ``python -c`` that imports ``air_magic.<module>`` and calls a function of it.

    The package is loaded by its place: another copy may come first on that interpreter's path, and to put this one's
    parent first could shadow the standard library.
    """
    name, _, _ = call.partition("(")
    return (
        "import importlib.util as util, sys; "
        f"spec = util.spec_from_file_location('air_magic', {str(_PACKAGE / '__init__.py')!r}); "
        "package = sys.modules['air_magic'] = util.module_from_spec(spec); spec.loader.exec_module(package); "
        f"from air_magic.{module} import {name}; {call}"
    )
