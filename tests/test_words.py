"""Words: the line behind a magic."""

from __future__ import annotations

import pytest

from air_magic.errors import RequestError
from air_magic.words import Parser, split


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("  -n 2\t--out  x ", ["-n", "2", "--out", "x"]),
        ("--name 'my run' --env A=\"b c\"", ["--name", "my run", "--env", "A=b c"]),
        (r"--env A=b\ c", ["--env", "A=b c"]),
    ],
)
def test_a_line_is_split_as_in_a_shell(line: str, words: list[str]) -> None:
    """Quotes hold words together."""
    assert split(line) == words


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--name 'half", "no closing quotation in: --name 'half"),
        ("--name half\\", "no escaped character in: --name half\\"),
    ],
)
def test_a_quote_without_end_is_refused(line: str, text: str) -> None:
    """With the line that has it."""
    with pytest.raises(RequestError) as caught:
        split(line)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--num"], "unrecognized arguments: --num"),
        (["--number"], "argument --number: expected one argument"),
        (["-h"], "unrecognized arguments: -h"),
    ],
)
def test_a_fault_in_the_words_is_a_request_error(words: list[str], fault: str) -> None:
    """By itself argparse would end the kernel; abbreviations, whose meaning a later version might change, are faults too."""
    parser = Parser("%%some")
    parser.add_argument("--number")
    with pytest.raises(RequestError) as caught:
        parser.parse_args(words)
    assert str(caught.value) == f"%%some: {fault}; %%some? shows what it takes"
