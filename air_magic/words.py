"""The line behind a magic, taken apart; every fault in it is a RequestError, never the kernel's end."""

from __future__ import annotations

import argparse
import shlex
from typing import NoReturn

from .errors import RequestError


class Parser(argparse.ArgumentParser):
    """An argument parser for a magic's line; ``prog`` is the magic's name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuses the line."""
        raise RequestError(f"{self.prog}: {message}; {self.prog}? shows what it takes")


def split(line: str) -> list[str]:
    """The words of a line, quotes as in a shell."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise RequestError(f"{str(error).lower()} in: {line.strip()}") from None
