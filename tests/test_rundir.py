"""RunDir: the folder of a run, and which old ones go."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from air_magic import processes
from air_magic.rundir import KEPT, RunDir, create, runs_root, write_whole


def me() -> dict[str, object]:
    """This process as an owner."""
    process = processes.read(os.getpid())
    assert process is not None
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.started}


def gone() -> dict[str, object]:
    """A process of this host that has ended, as an owner."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = processes.read(ended.pid)
    assert process is not None
    ended.wait()
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.started}


def add(root: Path, number: int, owner: object = None) -> Path:
    """A folder of a run; the higher the number, the newer."""
    path = root / f"20200101-{number:06}-0123abcd"
    path.mkdir(parents=True)
    (path / "rank-0.log").write_text("log")
    if owner is not None:
        (path / "owner.json").write_text(json.dumps(owner))
    return path


def test_names_are_in_the_folder_but_large_values_may_be_in_memory() -> None:
    """Each name in one place."""
    folder = RunDir.at("/runs/r")
    shared = f"/dev/shm/air_magic-{os.getuid()}-r"
    assert [str(path) for path in (folder.log(3), folder.record(3), folder.error(3), *folder.values(3))] == [
        "/runs/r/rank-3.log",
        "/runs/r/rank-3.json",
        "/runs/r/rank-3.error",
        f"{shared}/rank-3.value",
        "/runs/r/rank-3.value",
    ]


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"AIR_MAGIC_RUNS": "/data/runs", "XDG_STATE_HOME": "/x"}, "/data/runs"),
        ({"AIR_MAGIC_RUNS": "~/runs"}, "~/runs"),
        ({"AIR_MAGIC_RUNS": "", "XDG_STATE_HOME": "/x"}, "/x/air_magic/runs"),
        ({"XDG_STATE_HOME": ""}, "~/.local/state/air_magic/runs"),
        ({}, "~/.local/state/air_magic/runs"),
    ],
)
def test_the_root_follows_the_environment(environ: dict[str, str], root: str) -> None:
    """Ours first, then the desktop's rule; empty is as good as unset."""
    assert runs_root(environ) == Path(root).expanduser()


def test_a_relative_root_is_of_the_folder_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change of the folder does not move it."""
    monkeypatch.chdir(tmp_path)
    assert runs_root({"AIR_MAGIC_RUNS": "runs"}) == tmp_path / "runs"


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """It says whose it is, so that nobody forgets it while that process lives."""
    folder = create("0123abcd", tmp_path / "deep" / "runs")
    assert re.fullmatch(r"\d{8}-\d{6}-0123abcd", folder.path.name)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert json.loads(folder.owner.read_text()) == me()
    assert os.listdir(folder.path) == ["owner.json"]


def test_a_root_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run takes place, with its folder in the system's temporary one."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = create("0123abcd", tmp_path / "file" / "runs")
    assert folder.path.parent == tmp_path
    assert re.fullmatch(r"air_magic-\d{8}-\d{6}-0123abcd-.*", folder.path.name)
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_only_the_last_finished_runs_are_kept(tmp_path: Path) -> None:
    """Whether or not they say whose they were; what they had in memory goes with them."""
    ended = gone()
    paths = [add(tmp_path, number, ended if number % 2 else None) for number in range(KEPT + 2)]
    shared = RunDir(paths[0]).shared
    shared.mkdir()
    new = create("0123abcd", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*paths[2:], new.path])
    assert not shared.exists()


def test_what_may_still_be_in_use_is_kept(tmp_path: Path) -> None:
    """The runs of processes that live, here or on another host that shares the folder; a reused pid is neither."""
    living = [add(tmp_path, 0, me()), add(tmp_path, 1, me() | {"host": "elsewhere"})]
    reused = add(tmp_path, 2, me() | {"started": 1})
    finished = [add(tmp_path, 3 + number) for number in range(KEPT)]
    new = create("0123abcd", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*living, *finished, new.path])
    assert not reused.exists()


def test_what_is_no_run_is_left_alone(tmp_path: Path) -> None:
    """The root may be a folder that the user has other things in."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "20200101-000000-0123abcd.txt").touch()
    others = [tmp_path / "thesis", tmp_path / "20200101-000000-0123abcd.txt"]
    for number in range(KEPT + 5):
        add(tmp_path, number)
    create("0123abcd", tmp_path)
    assert all(path.exists() for path in others)


def test_what_only_the_run_needed_goes(tmp_path: Path) -> None:
    """Logs and records stay, and are nobody's from now on, so that they may be forgotten one day."""
    folder = RunDir(tmp_path / f"test-{os.getpid()}")
    for path in (folder.path, folder.shared):
        path.mkdir()
    names = ["payload.pkl", "setup.pkl", "rank-0.value", "rank-1.error", "rank-0.log", "rank-0.json", "owner.json"]
    for name in names:
        (folder.path / name).touch()
    folder.values(0)[0].touch()
    for _ in range(2):
        folder.remove_values()
        assert sorted(os.listdir(folder.path)) == ["rank-0.json", "rank-0.log"]
        assert not folder.shared.exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    """A failed write leaves the old one, and nothing beside it."""
    path = tmp_path / "rank-0.json"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["rank-0.json"])
