"""Multi-GPU training from a notebook cell: ``%%distributed``, ``@distributed``.

The map of the package, in the order of a run:

    magic, decorator     the two faces; both make a payload and options, and call `launch`
    options, accelerators, environment, payload, capture, cell, names, sources
                         what is asked for, what this node has, what is sent
    launch               from these to a Run
    run, state           the one loop; what is known of the run, folded from events
    engines              where supervisors are started: `warden` owns every process, `forkserver` has torch ready
    supervisor           starts the ranks, reads and stops them (starter, ladder, output, channel, store)
    rank                 one rank's life (groups, imports, workers, values, failure)
    returns              the ranks' values and exceptions, read back
    report, hints        what the user reads when it went wrong
    transcript, terminal, views  what the user sees meanwhile
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import runtime as runtime
    from .accelerators import AcceleratorType as AcceleratorType
    from .decorator import distributed as distributed
    from .errors import AirMagicError as AirMagicError
    from .errors import CaptureError as CaptureError
    from .errors import RankFailed as RankFailed
    from .errors import RequestError as RequestError
    from .errors import RunCancelled as RunCancelled
    from .errors import RunError as RunError
    from .errors import RunTimedOut as RunTimedOut
    from .run import Run as Run

__version__ = "0.1.0"

# Public name: the module that has it. Imported at first use, for ranks import this package too and
# a notebook's first cell should not wait.
_HOMES = {
    "AcceleratorType": "accelerators",
    "AirMagicError": "errors",
    "CaptureError": "errors",
    "RankFailed": "errors",
    "RequestError": "errors",
    "Run": "run",
    "RunCancelled": "errors",
    "RunError": "errors",
    "RunTimedOut": "errors",
    "distributed": "decorator",
}

__all__ = [
    "AcceleratorType",
    "AirMagicError",
    "CaptureError",
    "RankFailed",
    "RequestError",
    "Run",
    "RunCancelled",
    "RunError",
    "RunTimedOut",
    "distributed",
    "load_ipython_extension",
    "runtime",
    "unload_ipython_extension",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "runtime":
        return importlib.import_module(f"{__name__}.runtime")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Registers the magics; called by ``%load_ext air_magic``."""
    from .magic import register

    register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Ends every run and takes the magics away; called by ``%unload_ext air_magic``."""
    from .magic import unregister

    unregister(shell)
