r"""What a terminal would show of one rank's output: lines that are final, and what still changes.

Ranks write progress bars for a terminal (``\r``, ``\b``, cursor up); a log wants lines. Colours are
kept, everything else that could steer the reader's terminal is dropped.
"""

from __future__ import annotations

import itertools
import re

LINE = 8192
"""A longer line is made final in pieces of this many characters, so that memory stays bounded."""
ROWS = 8
"""So many rows may be live at once (nested bars)."""

_SPECIAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x08\x0a-\x1f\x7f-\x9f]+)"
    r"|(?P<newline>\n)"
    r"|(?P<back>\r+|\x08+)"
    r"|(?P<csi>\x1b\[(?P<params>[0-?]{0,64})[ -/]{0,8}(?P<final>[@-~]))"
    r"|(?P<string>\x1b[\]PX^_])"
    # A control, another escape sequence, or one that is malformed.
    r"|(?P<dropped>\x1b\[[0-?]{0,64}[ -/]{0,8}|\x1b[ -/]{0,8}[0-~]?|[\x00-\x1f\x7f-\x9f])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}|[ -/]{0,8})\Z")
# ESC ends a string too: it begins the two-character terminator. A newline ends one that lacks it.
_STRING_END = re.compile(r"[\x07\n\x18\x1a\x1b]")
_CLIMB = re.compile(r"(?:\x1b\[\d{0,4}A(?:\x1b\[\d?K|\r)?)+")
_UP = re.compile(r"\x1b\[(\d{0,4})A")

# Which attributes a code takes back.
_CLEARS = {"22": "1 2", "23": "3", "24": "4 21", "25": "5 6", "27": "7", "28": "8", "29": "9", "39": "38", "49": "48"}


def _restyle(style: dict[str, str], params: str) -> None:
    """Apply one colour sequence to ``style``; foreground and background stand under 38 and 48."""
    codes = iter(params.split(";"))
    for raw in codes:
        code = raw.lstrip("0")
        if not code:
            style.clear()
        elif code in _CLEARS:
            for key in _CLEARS[code].split():
                style.pop(key, None)
        elif code in ("38", "48"):
            mode = next(codes, "")
            values = list(itertools.islice(codes, {"5": 1, "2": 3}.get(mode, 0)))
            if values and values[-1]:
                style[code] = ";".join([code, mode, *values])
        elif code.startswith(("38:", "48:")):
            style[code[:2]] = code
        elif code == "21" or (len(code) == 1 and code.isdigit()):
            style[code] = code
        elif code[:-1] in ("3", "9") and code[-1] < "8":
            style["38"] = code
        elif code[:-1] in ("4", "10") and code[-1] < "8":
            style["48"] = code


class _Row:
    """One row of cells: a character and its colours each."""

    __slots__ = ("chars", "rewritten", "styled", "styles")

    def __init__(self) -> None:
        self.chars: list[str] = []
        self.styles: list[str] = []
        self.styled = False
        self.rewritten = False

    def put(self, col: int, text: str, style: str) -> None:
        gap = col - len(self.chars)
        if gap > 0:
            self.chars += " " * gap
            self.styles += [""] * gap
        self.chars[col : col + len(text)] = text
        self.styles[col : col + len(text)] = [style] * len(text)
        self.styled = self.styled or bool(style)

    def erase(self, col: int, mode: str) -> None:
        if mode in ("", "0"):
            del self.chars[col:], self.styles[col:]
        elif mode == "1":
            self.put(0, " " * min(col + 1, len(self.chars)), "")
        elif mode == "2":
            self.chars, self.styles = [], []

    def render(self) -> str:
        text = "".join(self.chars)
        if self.rewritten:
            text = text.rstrip(" ")  # bars are padded with blanks to cover what they were before
        if not self.styled:
            return text
        pieces, start = [], 0
        for style, cells in itertools.groupby(self.styles[: len(text)]):
            end = start + sum(1 for _ in cells)
            pieces.append(f"{style}{text[start:end]}\x1b[0m" if style else text[start:end])
            start = end
        return "".join(pieces)


class Terminal:
    """Reads one rank's output; gives the lines that became final and shows the ones that did not."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._row = self._col = 0
        self._moved = False  # the cursor went back since the last character
        self._style: dict[str, str] = {}
        self._sgr = ""  # the style as one sequence
        self._unfinished = ""  # an escape sequence whose end is still to come
        self._in_string = False  # within an operating system command or the like
        self._reach = 0  # how far up the cursor ever went: so many rows above the last may change
        self._climb = 0  # how far up it went since the last character or newline
        self._newlines = 0  # since it last went up
        self._final: list[str] = []

    def feed(self, text: str) -> list[str]:
        """The lines, without newline, that this text made final."""
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
        held = self._reach or self._moved or self._unfinished or self._in_string or self._sgr
        if not held and len(self._rows) == 1 and self._col == len(self._rows[0].chars) and not _SPECIAL.search(text):
            self._append(text)
        else:
            self._interpret(self._unfinished + text)
        final, self._final = self._final, []
        return final

    @property
    def live(self) -> tuple[str, ...]:
        """What stands on the line that is not final yet (several with nested bars), blank ones left out."""
        return tuple(text for text in (row.render() for row in self._rows) if text)

    @property
    def rewritten(self) -> bool:
        """Whether the live text was written over: a progress bar, not merely an unfinished line."""
        return any(row.rewritten for row in self._rows)

    def close(self) -> list[str]:
        """The live lines, now final: the rank writes no more."""
        live = list(self.live)
        self._rows, self._row, self._col, self._moved = [_Row()], 0, 0, False
        return live

    def _append(self, text: str) -> None:
        """The common case: text without controls behind text that was never moved over."""
        first, *lines = text.split("\n")
        self._put(first)
        if lines:
            self._newline()
            *lines, last = lines
            for line in lines:
                self._final += [line[at : at + LINE] for at in range(0, len(line), LINE)] or [line]
            self._put(last)

    def _interpret(self, text: str) -> None:
        self._unfinished = ""
        if tail := _UNFINISHED.search(text, max(0, len(text) - 80)):
            self._unfinished, text = tail[0], text[: tail.start()]
        # The first newline of nested bars comes before the first move up; look ahead for that.
        at = last_climb = 0
        for climb in _CLIMB.finditer(text):
            self._reach = max(self._reach, min(ROWS - 1, sum(int(n or 1) for n in _UP.findall(climb[0]))))
            last_climb = climb.end()
        while at < len(text):
            if self._in_string:
                if (end := _STRING_END.search(text, at)) is None:
                    return
                self._in_string = False
                at = end.start() if end[0] in "\n\x1b" else end.end()
                continue
            token = _TOKEN.match(text, at)
            assert token is not None, "the last alternative takes any character"
            at = token.end()
            if (kind := token.lastgroup) == "text":
                self._put(token[0])
            elif kind == "newline":
                if self._newlines >= ROWS and at > last_climb:
                    self._reach = 0  # the bars are over: their rows hold up the log no longer
                self._newline()
            elif kind == "back":
                self._back_to(0 if token[0][0] == "\r" else self._col - len(token[0]))
            elif kind == "csi":
                self._control(token["params"], token["final"])
            elif kind == "string":
                self._in_string = True

    def _control(self, params: str, final: str) -> None:
        if final == "m":
            if not params.strip("0123456789;:"):
                _restyle(self._style, params)
                self._sgr = f"\x1b[{';'.join(self._style.values())}m" if self._style else ""
        elif final == "K":
            self._rows[self._row].erase(self._col, params)
        elif final in "ACDG" and (not params or params.isdigit()):
            count = min(int(params or 1) or 1, LINE)
            if final == "A":
                self._up(count)
            elif final == "C":
                self._col = min(self._col + count, LINE - 1)
            else:
                self._back_to(self._col - count if final == "D" else count - 1)

    def _back_to(self, col: int) -> None:
        self._col, self._moved = max(0, min(col, LINE - 1)), True

    def _put(self, text: str) -> None:
        self._climb = at = 0
        while at < len(text):
            if self._col == LINE:
                self._finish(self._row + 1)
                self._rows.insert(0, _Row())
                self._row = self._col = 0
            row = self._rows[self._row]
            piece = text[at : at + LINE - self._col]
            row.put(self._col, piece, self._sgr)
            row.rewritten = row.rewritten or self._moved
            self._moved = False
            self._col += len(piece)
            at += len(piece)

    def _newline(self) -> None:
        self._climb, self._moved, self._col = 0, False, 0
        self._newlines += 1
        self._row += 1
        if self._reach == 0 and len(self._rows) == 1:
            self._final.append(self._rows[0].render())
            self._rows, self._row = [_Row()], 0
        elif self._row == len(self._rows):
            self._rows.append(_Row())
            self._finish(max(0, self._row - self._reach))

    def _up(self, count: int) -> None:
        count = min(count, ROWS - 1)
        self._climb = min(self._climb + count, ROWS - 1)
        self._reach = max(self._reach, self._climb)
        # Rows above the first one were made final before this rank was known to come back to them.
        missing = min(max(0, count - self._row), ROWS - len(self._rows))
        self._rows[:0] = [_Row() for _ in range(missing)]
        self._row = max(0, self._row + missing - count)
        self._moved, self._newlines = True, 0

    def _finish(self, count: int) -> None:
        """Make the first rows final; one that only a newline passed over shows nothing."""
        self._final += [text for text in (row.render() for row in self._rows[:count]) if text]
        del self._rows[:count]
        self._row -= count
