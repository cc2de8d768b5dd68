"""The supervisor: one per run and node, it starts the ranks, reads their output and stops them.

A single thread and one selector: rank output, the kernel's commands, children that exit, and time.
It imports nothing but the standard library and the words, so it is up at once and never holds a GPU.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from . import memory, processes
from .channel import Channel
from .events import NodeEnded, NodeLost, NodeStarted, Output, RankExited, RankStarted
from .ladder import ABANDONED, AT_ONCE, ORDERLY, Ladder
from .output import RankOutput
from .rankprocess import RankProcess
from .rundir import RunDir
from .starter import Fresh, Starter
from .storeprocess import StoreProcess

PIPE_HELD = 1.0
"""Seconds for which a rank's pipe is read after its exit, when a process that it left holds it open."""

BATCH_EVERY = 0.05
"""Seconds between two batches of output to the kernel."""


class Supervisor:
    """One run on one node, from the first rank's start to the last process's end."""

    def __init__(self, channel: Channel, spec: dict[str, Any], starter: Starter, parent: int) -> None:
        self._channel = channel
        self._spec = spec
        self._starter = starter
        self._parent = parent
        self._folder = RunDir(Path(spec["run_dir"]))
        self._ranks: list[RankProcess] = []
        self._store: StoreProcess | None = None
        self._lost = ""  # why the run goes down though its kernel lives
        self._ladder = Ladder()
        self._selector = selectors.DefaultSelector()
        self._notes: list[str] = []
        self._kills_before = memory.oom_kills()
        self._batch_at = 0.0

    def run(self) -> None:
        """Runs until nothing of the run is left."""
        woken = self._listen_for_signals()
        self._selector.register(self._channel, selectors.EVENT_READ)
        try:
            self._start()
        except OSError as error:  # no such folder, no memory, too many processes
            self._notes.append(f"the ranks could not be started: {error}")
            self._ladder.climb(AT_ONCE, time.monotonic())
        self._obey()  # no event will tell of a stop that came together with the spec
        while not all(rank.reported for rank in self._ranks):
            if self._channel.open:
                self._selector.modify(self._channel, self._channel.interest)
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._channel:
                    self._obey()
                elif key.fd == woken:
                    self._wake(os.read(woken, 4096))
                else:
                    self._read(key.data)
            now = time.monotonic()
            self._signal(now)
            self._send_output(now)
            self._report_exits(now)
            self._channel.flush()
        self._finish()

    def _listen_for_signals(self) -> int:
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        # Never SIG_IGN, which ranks inherit. SIGINT is blocked instead: one that comes while a rank starts waits
        # until the rank can take it as a KeyboardInterrupt, where the interpreter would die with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._selector.register(woken, selectors.EVENT_READ)
        return woken

    def _start(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # torch's own default listens on every interface
            listener.listen(4096)
            port = listener.getsockname()[1]
            self._channel.send(NodeStarted(self._spec["node"], os.getpid(), port))
            for description in self._spec["ranks"]:
                self._start_rank(description, port)
            # Last, for it may import torch while ranks already print; who comes early waits in the backlog.
            log = self._folder.store_log
            self._store = StoreProcess(self._starter.store(self._spec, listener.fileno(), log), log)

    def _start_rank(self, description: dict[str, Any], port: int) -> None:
        number = description["rank"]
        output = RankOutput(self._folder.log(number), self._spec["log_cap"])
        env = self._spec["env"] | description["env"] | {"MASTER_PORT": str(port)}
        try:
            pid = self._starter.rank(self._spec, number, env, output.write_end)
        except OSError:
            output.close()
            raise
        finally:
            output.started()
        rank = RankProcess(number, pid, output)
        self._ranks.append(rank)
        self._selector.register(output, selectors.EVENT_READ, rank)
        self._channel.send(RankStarted(number, pid, time.time()))

    def _patience(self) -> float:
        """Seconds until something is due by time alone."""
        times = [self._ladder.next_at]
        if self._store:
            times.append(self._store.ends_at(self._ladder.begun_at))
        for rank in self._ranks:
            if rank.output.waiting and not self._channel.crowded:
                times.append(self._batch_at)
            if rank.exited_at is not None and not rank.reported:
                times.append(rank.exited_at + PIPE_HELD)
        return max(0.0, min(min(times) - time.monotonic(), 3600.0))

    def _obey(self) -> None:
        now = time.monotonic()
        for message in self._channel.receive():
            self._ladder.climb(AT_ONCE if message["kill"] else ORDERLY, now)
        if not self._channel.open:
            self._selector.unregister(self._channel)
            shutil.rmtree(self._folder.shared, ignore_errors=True)  # first, for there may be little time left
            self._ladder.climb(ABANDONED, now)

    def _wake(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:  # the parent says that the kernel is gone, or is gone itself
            gone = os.getppid() != self._parent
            self._lost = f"air_magic's {self._starter.parent} was killed" if gone else "its supervisor was asked to end"
            self._ladder.climb(ABANDONED, time.monotonic())
        processes.reap(self._reaped)

    def _reaped(self, pid: int, status: int) -> None:
        if self._store and pid == self._store.pid:
            self._store.gone = True
            if self._ladder.begun_at is None and any(rank.exited_at is None for rank in self._ranks):
                self._notes.append(f"the rendezvous store ended early; its log is {self._store.log}")
        for rank in self._ranks:
            if rank.pid == pid:
                others = {other.pid for other in self._ranks if other.exited_at is None and other is not rank}
                others |= {self._store.pid} if self._store else set()
                rank.exited(os.waitstatus_to_exitcode(status), time.monotonic(), others)

    def _signal(self, now: float) -> None:
        for number in self._ladder.due(now):
            for rank in self._ranks:
                if rank.exited_at is None:
                    rank.signal(number)
        if self._store and now >= self._store.ends_at(self._ladder.begun_at):
            self._store.stop()

    def _read(self, rank: RankProcess) -> None:
        rank.output.read()
        if rank.output.ended:
            self._selector.unregister(rank.output)

    def _send_output(self, now: float) -> None:
        if now < self._batch_at or self._channel.crowded:
            return
        for rank in self._ranks:
            self._send_output_of(rank)
        self._batch_at = now + BATCH_EVERY

    def _send_output_of(self, rank: RankProcess) -> None:
        if rank.output.waiting:
            text, skipped = rank.output.take()
            self._channel.send(Output(rank.rank, text, skipped))

    def _report_exits(self, now: float) -> None:
        for rank in self._ranks:
            if rank.reported or rank.exited_at is None:
                continue
            if not rank.output.ended:
                if now < rank.exited_at + PIPE_HELD:
                    continue
                self._selector.unregister(rank.output)
            self._report_exit(rank, time.time() - (now - rank.exited_at))

    def _report_exit(self, rank: RankProcess, at: float) -> None:
        self._send_output_of(rank)
        try:
            record = json.loads(self._folder.record(rank.rank).read_bytes())
        except (OSError, ValueError):
            record = None
        if record and record["failure"]:
            rank.output.append(record["failure"]["traceback"])
        if rank.output.note:
            self._notes.append(f"rank {rank.rank}: {rank.output.note}")
        rank.output.close()
        facts = memory.facts(self._kills_before) if rank.returncode < 0 else {}
        if not self._lost:  # else it is the consequence of what `_finish` says
            self._channel.send(RankExited(rank.rank, rank.returncode, at, record, rank.descendants, facts))
        rank.reported = True

    def _finish(self) -> None:
        ours = self._store.pid if self._store else 0
        left = [process for process in processes.sweep() if process.pid != ours]
        if processes.descendants(os.getpid()):
            self._notes.append("a process of this run cannot be killed; the kernel holds it (is a disk hanging?)")
        elif left:
            what = "a process" if len(left) == 1 else f"{len(left)} processes"
            self._notes.append(f"killed {what} that ranks had left behind")
        if not self._channel.open:  # nobody is left to read the values
            shutil.rmtree(self._folder.shared, ignore_errors=True)
        node = self._spec["node"]
        self._channel.send(NodeLost(node, self._lost) if self._lost else NodeEnded(node, tuple(self._notes)))
        self._channel.finish()


def main() -> None:
    """Serves one cold run over the socket whose number is the last argument."""
    serve(int(sys.argv[-1]), Fresh())


def serve(handle: int, starter: Starter) -> NoReturn:
    """Serves one run over the socket ``handle``, in a process of its own, which it ends."""
    parent = os.getppid()
    processes.die_with_parent(parent, signal.SIGTERM)
    processes.adopt_orphans()
    channel = Channel(socket.socket(fileno=handle))
    spec = channel.first()
    if spec is not None:
        try:
            Supervisor(channel, spec, starter, parent).run()
        except Exception:  # a fault of ours: nothing may be left all the same, and it must be told
            processes.sweep()
            log = RunDir(Path(spec["run_dir"])).supervisor_log
            log.write_text(traceback.format_exc())
            channel.send(NodeLost(spec["node"], f"air_magic's supervisor failed, which is a bug; see {log}"))
            channel.finish()
    os._exit(0)  # at once: the kernel takes the channel's end for ours
