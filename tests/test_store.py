"""store: the process that hosts a cold run's TCPStore."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from air_magic import store
from air_magic.rundir import RunDir

# As the supervisor starts it, with the parent's pid last; then what a test asks of it is printed.
_SERVE = "import sys; from air_magic.store import main; main(sys.argv[-3], int(sys.argv[-2]), int(sys.argv[-1]))"
_ASK = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
store.set("key", "value")
print(store.get("key").decode())
"""
# A torch that gives way to the real one, but only when all of it is imported.
_REAL = """
import sys
del sys.path[0], sys.modules["torch"]
import torch
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True], ids=["torch's core suffices", "only the whole of torch will do"])
def test_clients_are_served_on_the_given_socket(tmp_path: Path, broken: bool) -> None:
    """Also by a torch whose core refuses to be imported alone."""
    path = [str(Path(store.__file__).parents[1]), *sys.path]
    if broken:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text(_REAL)
        (tmp_path / "torch/_C.py").write_text("raise ImportError('not alone')")
        path.insert(0, str(tmp_path))
    RunDir(tmp_path).setup.write_bytes(pickle.dumps({"path": path}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        serving = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(tmp_path), str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
        )
        try:
            asked = subprocess.run(
                [sys.executable, "-c", _ASK, str(listener.getsockname()[1])], capture_output=True, text=True, timeout=60
            )
        finally:
            serving.kill()
            serving.wait()
    assert (asked.stdout, asked.returncode) == ("value\n", 0)
