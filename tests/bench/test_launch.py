"""The benchmark of launches: it runs, and its figures have the shape that the README's table is made from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import launch


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """Runs the benchmark as a user would; its process and what it wrote."""
    target = folder / "figures.json"
    argv = [sys.executable, launch.__file__, "--json", str(target), *arguments]
    ended = subprocess.run(argv, capture_output=True, text=True, cwd=folder, timeout=280)
    return ended, json.loads(target.read_text())


@pytest.mark.slow
def test_every_call_of_every_launcher_is_measured(tmp_path):
    """Both bodies of the quick run; a later call where a launcher can have one; a line comes before the return."""
    ended, figures = run(tmp_path, "--quick", "--only", "ours,torchrun", "--ranks", "2")
    assert (ended.returncode, figures["absent"], figures["failures"]) == (0, [], [])
    measured = [(entry["launcher"], entry["body"], entry["ranks"], entry["call"]) for entry in figures["results"]]
    assert measured == [
        ("ours", "hello", 2, "first"),
        ("ours", "hello", 2, "later"),
        ("torchrun", "hello", 2, "first"),
        ("ours", "gloo", 2, "first"),
        ("ours", "gloo", 2, "later"),
        ("torchrun", "gloo", 2, "first"),
    ]
    for entry in figures["results"]:
        assert set(entry) == {"launcher", "body", "ranks", "call", "line", "return", "ready_after"}
        assert all(set(entry[kind]) == {"median", "min", "all"} for kind in ("line", "return", "ready_after"))
        assert 0 < entry["line"]["min"] < entry["return"]["min"]
    assert set(figures) == {
        *("date", "machine", "versions", "command", "repeat"),
        *("results", "cold_budget", "absent", "failures"),
    }


def test_a_launcher_that_nobody_knows_is_refused_by_name():
    """With the names that there are."""
    argv = [sys.executable, launch.__file__, "--only", "ours,mpirun"]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "launch.py: error: argument --only: mpirun: give some of "
        "floor, warm, ours, ours-cell, torchrun, spawn, accelerate, torchrunx, ipyparallel"
    )
