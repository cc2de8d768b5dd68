"""A real Jupyter kernel, driven over the protocol as a front-end drives it."""

from __future__ import annotations

import os
import queue
import time
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_client.manager import KernelManager

from air_magic import processes
from air_magic.rundir import RunDir

DEADLINE = 90.0
"""Seconds after which a test gives up on an answer; generous, for the machine may be busy."""


@dataclass
class Reply:
    """What one cell came to."""

    status: str = "running"
    text: str = ""
    """Its stdout and stderr."""
    result: str = ""
    """The text of its Out."""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    displays: list[str] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)


class Kernel:
    """A kernel with its client; leaving the block ends it and checks that nothing of it is left."""

    def __init__(self, folder: Path, runs: Path, **environment: str) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "AIR_MAGIC_RUNS": str(runs),
            "IPYTHONDIR": str(folder / ".ipython"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        }
        self.runs = runs

    def __enter__(self) -> Kernel:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(self._folder), env=self._environment)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE)
        return self

    def __exit__(self, *_: object) -> None:
        before = self.pids()
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()
        wait_until_gone(before)
        assert not shared_memory(self.runs)

    @property
    def pid(self) -> int:
        """The kernel's pid."""
        return self.manager.provisioner.pid

    def pids(self) -> set[int]:
        """The kernel and every process below it."""
        if not self.manager.has_kernel or self.manager.provisioner.pid is None:
            return set()
        return {self.pid} | {p.pid for p in processes.descendants(self.pid) if not p.zombie}

    def run(self, code: str, *, check: bool = True) -> Reply:
        """Runs a cell to its end."""
        reply = self.wait(self.begin(code))
        if check:
            assert reply.status == "ok", f"{reply.ename}: {reply.evalue}\n{reply.text}\n{reply.traceback}"
        return reply

    def begin(self, code: str) -> str:
        """Sends a cell; its message id."""
        self._reply = Reply()
        return self.client.execute(code)

    def until(self, ident: str, text: str) -> Reply:
        """Waits until the cell's output holds the text."""
        return self._take(ident, lambda reply: text in reply.text)

    def wait(self, ident: str) -> Reply:
        """Waits for the cell's end."""
        self._take(ident, lambda reply: False)
        answer = self.client.get_shell_msg(timeout=DEADLINE)
        while answer["parent_header"].get("msg_id") != ident:
            answer = self.client.get_shell_msg(timeout=DEADLINE)
        self._reply.status = answer["content"]["status"]
        return self._reply

    def _take(self, ident: str, enough) -> Reply:
        reply, end = self._reply, time.monotonic() + DEADLINE
        while not enough(reply):
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"nothing more came; so far:\n{reply.text}") from None
            if message["parent_header"].get("msg_id") != ident:
                continue
            kind, content = message["msg_type"], message["content"]
            reply.messages.append(message)
            if kind == "stream":
                reply.text += content["text"]
            elif kind == "execute_result":
                reply.result += content["data"]["text/plain"]
            elif kind in ("display_data", "update_display_data"):
                reply.displays.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                reply.ename, reply.evalue = content["ename"], content["evalue"]
                reply.traceback = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                break
        return reply


def shared_memory(runs: Path) -> set[str]:
    """The shared memory that runs below this folder have left."""
    folders = (RunDir(path).shared for path in runs.iterdir())
    return {str(folder) for folder in folders if folder.exists()}


def wait_until_gone(pids: set[int], seconds: float = 10.0) -> float:
    """Waits until none of these processes lives; how long that took, in seconds."""
    began = time.monotonic()
    seen = {pid: process.started for pid in pids if (process := processes.read(pid)) is not None}
    while time.monotonic() < began + seconds:
        living = {
            pid
            for pid, started in seen.items()
            if (process := processes.read(pid)) is not None and process.started == started and not process.zombie
        }
        if not living:
            return time.monotonic() - began
        time.sleep(0.01)
    told = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120] for pid in living}
    raise AssertionError(f"still there after {seconds} s: {told}")
