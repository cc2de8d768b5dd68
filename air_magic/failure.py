"""An exception in a rank, described for the kernel: plain data that no missing class can break."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import time
import traceback
from types import TracebackType

from .result import Ending, Frame, RankFailure

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def describe(error: BaseException, rank: int, ending: Ending, time_ns: int | None = None) -> RankFailure:
    """The failure that ``error`` is; its traceback without our own frames."""
    error.__traceback__ = own = _without_ours(error.__traceback__)
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return RankFailure(
        rank=rank,
        ending=ending,
        type_name=name,
        message=_text(error),
        time_ns=time.time_ns() if time_ns is None else time_ns,
        frames=tuple(_frames(own)),
        traceback="".join(traceback.format_exception(kind, error, own)),
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's __str__ is the user's code
        return f"(its text cannot be shown: {type(broken).__name__})"


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not this package's."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def _frames(trace: TracebackType | None) -> list[Frame]:
    frames = []
    for frame, lineno in traceback.walk_tb(trace):
        code = frame.f_code
        if code.co_filename.startswith(_OURS):  # a decorated function that is called in the rank
            continue
        lineno = lineno or code.co_firstlineno  # code that a compiler made may have no line
        line = linecache.getline(code.co_filename, lineno, frame.f_globals).strip()
        users = _is_users(code.co_filename)
        frames.append(Frame(code.co_filename, lineno, code.co_name, line, code.co_firstlineno, users))
    return frames


def _is_users(filename: str) -> bool:
    if filename.startswith("<frozen "):
        return False
    return not os.path.abspath(filename).startswith(_LIBRARIES) and f"{sys.prefix}{os.sep}lib" not in filename
