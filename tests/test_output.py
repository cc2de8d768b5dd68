"""RankOutput: one rank's pipe, its log file, and what goes to the kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from air_magic.output import BATCH, RankOutput


@contextmanager
def output_to(log: Path, cap: int = 1 << 30) -> Iterator[tuple[RankOutput, Callable[[bytes], None]]]:
    """An output whose rank has started, and a function that writes as the rank."""
    output = RankOutput(log, cap)
    rank = os.dup(output.write_end)
    output.started()

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(rank, data[: 1 << 16]) :]
            output.read()

    try:
        yield output, write
    finally:
        os.close(rank)
        output.close()


def test_the_file_gets_every_byte_and_the_kernel_text(tmp_path: Path) -> None:
    """Characters that come in pieces are put together; what is no UTF-8 is replaced in the text only."""
    log = tmp_path / "rank-0.log"
    with output_to(log) as (output, write):
        assert not output.waiting
        data = "grüße 日本\n".encode()
        for at in range(len(data)):
            write(data[at : at + 1])
        assert output.waiting
        assert output.take() == ("grüße 日本\n", 0)
        assert (output.waiting, output.take()) == (False, ("", 0))
        write(b"\xff\r\n\0")
        assert output.take() == ("\N{REPLACEMENT CHARACTER}\r\n\0", 0)
        output.append("Traceback \udcff …\n")
        assert not output.waiting
    assert log.read_bytes() == data + b"\xff\r\n\0" + b"Traceback \\udcff \xe2\x80\xa6\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_the_end_of_the_pipe_is_the_end_of_its_last_writer(tmp_path: Path) -> None:
    """A character that is cut off by it is told of, and an empty pipe is no end."""
    output = RankOutput(tmp_path / "log", 100)
    try:
        output.read()
        assert not output.ended
        os.write(output.write_end, "ü".encode()[:1])
        output.started()
        output.read()
        output.read()
        assert (output.ended, output.take()) == (True, ("\N{REPLACEMENT CHARACTER}", 0))
    finally:
        output.close()


def test_the_kernel_gets_the_newest_of_a_flood(tmp_path: Path) -> None:
    """It is bounded by characters, begins with a whole line, and says how many lines were left out."""
    log = tmp_path / "log"
    lines = [f"{n:09}\n" for n in range(200_000)]
    with output_to(log) as (output, write):
        write("".join(lines).encode())
        text, skipped = output.take()
        assert len(text) == BATCH // 10 * 10
        assert text == "".join(lines[skipped:])
        assert output.take() == ("", 0)
    assert log.read_text() == "".join(lines)


def test_a_line_without_end_is_bounded_too(tmp_path: Path) -> None:
    """Nothing of it is a whole line, so that one is counted as left out."""
    with output_to(tmp_path / "log") as (output, write):
        write(b"x" * (3 * BATCH))
        assert output.take() == ("x" * BATCH, 1)


@pytest.mark.parametrize("pieces", [[b"12345", b"67890", b"abc"], [b"1234567890abc"]])
def test_the_file_ends_at_its_cap_and_says_so(tmp_path: Path, pieces: list[bytes]) -> None:
    """The kernel still gets what comes."""
    log = tmp_path / "log"
    with output_to(log, cap=8) as (output, write):
        for piece in pieces:
            write(piece)
        assert output.take() == ("1234567890abc", 0)
        assert output.note == "its log file reached its cap"
    assert log.read_text() == "12345678\n[air_magic: this file has reached its cap; later output was not kept]\n"


def test_a_full_disk_does_not_stop_the_rank() -> None:
    """Its output is read on and reaches the kernel; a note says that the file is not whole."""
    with output_to(Path("/dev/full")) as (output, write):
        write(b"one\n")
        write(b"two\n")
        assert output.take() == ("one\ntwo\n", 0)
        assert output.note == f"its log file is incomplete: {os.strerror(errno.ENOSPC)}"
