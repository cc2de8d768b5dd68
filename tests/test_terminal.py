"""Terminal: the lines of a rank's output as a terminal would show them."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from air_magic.terminal import LINE, ROWS, Terminal


def shown(text: str) -> list[str]:
    """All lines of one output, fed at once."""
    terminal = Terminal()
    return terminal.feed(text) + terminal.close()


class Bar(tqdm):
    """A bar without tqdm's monitor thread."""

    monitor_interval = 0


class Recorder(io.StringIO):
    """What tqdm would write to a pipe, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\n\na\n", ["", "", "a"]),
        ("\ta\tb\n", ["\ta\tb"]),
        ("abc\rX\n", ["Xbc"]),
        ("abc\b\bX\n", ["aXc"]),
        ("\b\b\ba\n", ["a"]),
        ("12%\r\x1b[K34%\n", ["34%"]),
        ("abcdef\x1b[3D\x1b[K!\n", ["abc!"]),
        ("abcdef\x1b[3D\x1b[1KX\n", ["   Xef"]),
        ("abc\x1b[2KX\n", ["   X"]),
        ("abc\x1b[1GX\x1b[CY\n", ["XbY"]),
        ("a\x1b[3Cb\n", ["a   b"]),
        ("a\0b\x01c\x0bd\x7fe\x9bf\n", ["abcdef"]),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", ["alink"]),
        ("\x1b[2J\x1b[H\x1b[10;20Ha\x1b7\x1b(B\x1bMb\n", ["ab"]),
        ("\x1b]never closed\nb\n", ["", "b"]),
        ("a\x1b[?25lb\x1b[>4;2mc\n", ["abc"]),
        ("long bar 100%\rok           \n", ["ok"]),
        ("tail", ["tail"]),
        ("grüße 日本 🙂\u2028x\n", ["grüße 日本 🙂\u2028x"]),
    ],
)
def test_text_is_shown_as_by_a_terminal(text: str, lines: list[str]) -> None:
    """Cursor moves and erasing act on the line; what is no colour is dropped."""
    assert shown(text) == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("\x1b[32mok\x1b[0m done\n", ["\x1b[32mok\x1b[0m done"]),
        ("\x1b[1m\x1b[31mno\x1b[m\n", ["\x1b[1;31mno\x1b[0m"]),
        ("\x1b[31mred\nstill\x1b[39m plain\n", ["\x1b[31mred\x1b[0m", "\x1b[31mstill\x1b[0m plain"]),
        ("\x1b[38;5;208mx\x1b[48;2;1;2;3my\x1b[0m\n", ["\x1b[38;5;208mx\x1b[0m\x1b[38;5;208;48;2;1;2;3my\x1b[0m"]),
        ("\x1b[1;4mx\x1b[22;24my\n", ["\x1b[1;4mx\x1b[0my"]),
        ("abcd\r\x1b[32mX\x1b[0m\n", ["\x1b[32mX\x1b[0mbcd"]),
        ("\x1b[38;5mx\x1b[99mz\n", ["xz"]),
        ("\x1b[97mx\x1b[0m\x1b[103my\x1b[0m\n", ["\x1b[97mx\x1b[0m\x1b[103my\x1b[0m"]),
    ],
)
def test_colours_are_kept_and_every_line_is_closed(text: str, lines: list[str]) -> None:
    """A line that left colours open is reset at its end; the next one goes on with them."""
    assert shown(text) == lines


def test_any_split_of_the_text_gives_the_same_lines() -> None:
    """Escape sequences and line ends may be cut anywhere between two feeds."""
    text = "a\x1b[1;32mb\x1b[0m\r\nX\x1b]0;t\x1b\\\x1b[K 1%\r 2%\x1b[2;3H\b!\ntab\tend"
    for cut in range(len(text) + 1):
        terminal = Terminal()
        assert terminal.feed(text[:cut]) + terminal.feed(text[cut:]) + terminal.close() == shown(text)


def test_one_character_at_a_time_gives_the_same_lines() -> None:
    """The smallest feeds are as good as one large one."""
    text = "plain\nx\x1b[31mred\x1b[0m\r\n 1%\r 2%\n\x1b[12;5Hend"
    terminal = Terminal()
    lines = [line for char in text for line in terminal.feed(char)]
    assert lines + terminal.close() == shown(text)


def test_live_text_is_a_bar_once_it_was_written_over() -> None:
    """A prompt or a partial line is live but not rewritten; a progress bar is."""
    terminal = Terminal()
    assert terminal.feed("loading ") == []
    assert (terminal.live, terminal.rewritten) == (("loading ",), False)
    assert terminal.feed("\r 50%") == []
    assert (terminal.live, terminal.rewritten) == ((" 50%ing",), True)
    assert terminal.feed("\r100%   \ndone\n") == ["100%", "done"]
    assert (terminal.live, terminal.rewritten) == ((), False)


def test_close_gives_what_is_left_once() -> None:
    """The live line becomes final when the rank is gone."""
    terminal = Terminal()
    terminal.feed("no newline")
    assert (terminal.close(), terminal.close(), terminal.live) == (["no newline"], [], ())


def test_a_tqdm_bar_is_one_live_line_and_one_final_line() -> None:
    """Every refresh is live, the last one is final."""
    out = Recorder()
    terminal = Terminal()
    seen, lines = set(), []
    with Bar(total=3, file=out, mininterval=0, bar_format="{n_fmt}/{total_fmt}") as bar:
        for _ in range(3):
            bar.update()
    for write in out.writes:
        lines += terminal.feed(write)
        seen.update(terminal.live)
    assert (lines, seen, terminal.live) == (["3/3"], {"0/3", "1/3", "2/3", "3/3"}, ())


def test_nested_tqdm_bars_stand_on_rows_of_their_own() -> None:
    """The inner bar does not make a line of every refresh of the outer one."""
    out = Recorder()
    terminal = Terminal()
    form = "{desc} {n_fmt}/{total_fmt}"
    outer = Bar(total=2, desc="outer", file=out, mininterval=0, bar_format=form, position=0)
    inner = Bar(total=2, desc="inner", file=out, mininterval=0, bar_format=form, position=1, leave=False)
    inner.update()
    assert terminal.feed("".join(out.writes)) == []
    assert (terminal.live, terminal.rewritten) == (("outer 0/2", "inner 1/2"), True)
    out.writes.clear()
    inner.close()
    outer.update(2)
    outer.close()
    assert terminal.feed("".join(out.writes)) + terminal.close() == ["outer 2/2"]


def test_messages_above_nested_bars_become_final() -> None:
    """tqdm.write pushes the bars down; its messages are lines, the bars stay live."""
    terminal = Terminal()
    bars = "\router\n\rinner\x1b[A"
    lines = terminal.feed(bars)
    for n in range(20):
        lines += terminal.feed(f"\n\r     \x1b[A\r     \rmessage {n}\n" + bars)
    assert lines == [f"message {n}" for n in range(20)]
    assert terminal.live == ("outer", "inner")


def test_a_bar_at_a_lower_position_leaves_no_blank_lines() -> None:
    """``tqdm(position=rank)`` moves down over rows that are other ranks' in a shared terminal."""
    terminal = Terminal()
    for percent in (0, 50, 100):
        assert terminal.feed(f"\n\n\n\r{percent:3d}%\x1b[A\x1b[A\x1b[A") == []
        assert terminal.live == (f"{percent:3d}%",)
    assert terminal.close() == ["100%"]


def test_lines_after_nested_bars_are_final_at_once_again() -> None:
    """Bars that are over hold up the log for a few lines at most."""
    terminal = Terminal()
    terminal.feed("\n\rinner\x1b[A\router\n")
    terminal.feed("".join(f"line {n}\n" for n in range(ROWS + 1)))
    assert terminal.feed("next\n")[-1] == "next"
    assert terminal.feed("plain\n") == ["plain"]


def test_live_rows_are_bounded() -> None:
    """However far the cursor goes up, at most eight rows are kept."""
    terminal = Terminal()
    for n in range(50):
        terminal.feed(f"\n\n\nrow {n}\x1b[9999A\x1b[9999Ax\x1b[9999C\x1b[99999D")
        assert len(terminal.live) <= ROWS


def test_a_long_line_is_made_final_in_pieces() -> None:
    """Memory is bounded; a line that fits exactly stays one line."""
    assert shown("x" * LINE + "\n") == ["x" * LINE]
    assert shown("x" * (2 * LINE + 1) + "\ny\n") == ["x" * LINE, "x" * LINE, "x", "y"]
    assert shown("y\n" + "x" * (LINE + 1) + "\nz") == ["y", "x" * LINE, "x", "z"]
    assert shown("\r" + "x" * (LINE + 1) + "\n") == ["x" * LINE, "x"]


@pytest.mark.parametrize(
    "text",
    [
        "x" * 64,
        "x\b" * 32,
        "x\r" * 32,
        "\x1b[1" * 20,
        "\x1b[3",
        "9" * 64,
        "\x1b]" + "x" * 62,
        "\x1b[A\x1b[31mx",
        "\r",
        "\n\x1b[A",
    ],
)
@pytest.mark.timeout(60)
def test_hostile_output_takes_linear_time(text: str) -> None:
    """A megabyte without a newline, in one feed and in many, ends; in quadratic time it would not."""
    whole = Terminal()
    whole.feed(text * (500_000 // len(text)))
    pieces = Terminal()
    for _ in range(50):
        pieces.feed(text * (10_000 // len(text)))
