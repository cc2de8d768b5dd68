"""The code keeps to its own rules: linter, formatter, types; and the README's test command is CI's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=lambda words: " ".join(words)
)
def test_the_checker_has_nothing_to_say(words):
    """Linter, formatter and type checker pass on the whole tree."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_the_command_that_the_readme_gives():
    """What CI runs is what a reader is told to run, word for word."""
    command = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert command in (ROOT / "README.md").read_text()
