"""describe: a rank's exception as plain data."""

from __future__ import annotations

import json
import linecache
import sys
import time
from typing import Any

import pytest

from air_magic import imports
from air_magic.failure import describe
from air_magic.result import Ending, Frame, RankFailure


def caught(call: Any, *args: Any) -> BaseException:
    """What the call raises, with a traceback that begins in it."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - the caller compares all of it
        call(*args)
    return raised.value.with_traceback(raised.tb.tb_next)


def fails(text: str) -> None:
    json.loads(text)


def test_the_whole_of_a_failure() -> None:
    """Frames with their source lines, which of them are the user's, and the traceback as Python prints it."""
    before = time.time_ns()
    failure = describe(caught(fails, "{"), 3, Ending.RAISED)
    assert before <= failure.time_ns <= time.time_ns()
    first, *library = failure.frames
    line = fails.__code__.co_firstlineno
    assert first == Frame(__file__, line + 1, "fails", "json.loads(text)", line, True)
    assert library
    assert {frame.user for frame in library} == {False}
    assert failure == RankFailure(
        3,
        Ending.RAISED,
        "json.decoder.JSONDecodeError",
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        failure.time_ns,
        failure.frames,
        failure.traceback,
    )
    lines = failure.traceback.splitlines()
    assert (lines[0], lines[-1]) == (
        "Traceback (most recent call last):",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    )


def test_a_cells_lines_are_shown() -> None:
    """A cell is no file; its source is where IPython puts it."""
    source = "def train():\n    x = 1\n    return x / 0\n\ntrain()\n"
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(keepends=True), "<cell 7>")
    try:
        failure = describe(caught(exec, compile(source, "<cell 7>", "exec"), {}), 0, Ending.RAISED, 5)
    finally:
        del linecache.cache["<cell 7>"]
    assert failure.frames == (
        Frame("<cell 7>", 5, "<module>", "train()", 1, True),
        Frame("<cell 7>", 3, "train", "return x / 0", 1, True),
    )
    assert failure.time_ns == 5


def test_our_own_frames_are_left_out() -> None:
    """Where we call the user's code, and where it calls us."""

    def mine(_: Any) -> None:
        raise KeyError("lr")

    failure = describe(caught(imports.when_imported, "json", mine), 0, Ending.RAISED)
    assert [frame.function for frame in failure.frames] == ["mine"]
    assert "imports.py" not in failure.traceback


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


Notebooks = type("Notebooks", (Exception,), {"__module__": "__main__", "__qualname__": "train.<locals>.Notebooks"})


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (ValueError(), "ValueError", ""),
        (KeyError("a"), "KeyError", "'a'"),
        (SystemExit(3), "SystemExit", "3"),
        (Mute(), f"{__name__}.Mute", "(its text cannot be shown: RuntimeError)"),
        (Notebooks("x"), "train.<locals>.Notebooks", "x"),
        (OSError(2, "gone", "f\udcff"), "FileNotFoundError", "[Errno 2] gone: 'f\\udcff'"),
        (ValueError("lone \udcff"), "ValueError", "lone \udcff"),
    ],
)
def test_any_exception_is_described(error: BaseException, name: str, message: str) -> None:
    """Whatever its text is, and without a traceback too; all of it is JSON."""
    failure = describe(error, 0, Ending.RAISED, 1)
    assert (failure.type_name, failure.message, failure.frames) == (name, message, ())
    assert RankFailure.from_json(json.loads(json.dumps(failure.to_json()))) == failure


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 gives every instruction a line")
def test_code_without_line_numbers_is_described() -> None:
    """A compiler of its own, as template engines have, need not give any."""
    code = compile("1 / 0", "<made>", "exec")
    nowhere = bytes([0x80 | 15 << 3]) * (len(code.co_code) // 2)  # of each instruction: it has no line
    code = code.replace(co_linetable=nowhere, co_firstlineno=4)
    assert describe(caught(exec, code, {}), 0, Ending.RAISED).frames == (Frame("<made>", 4, "<module>", "", 4, True),)
