"""Run: the loop on a table of named histories, with a scripted node and a clock that only the script turns."""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from air_magic import values
from air_magic.errors import RankFailed, RunCancelled, RunError, RunTimedOut
from air_magic.events import NodeLost, NodeStarted, Output, RankExited, RankStarted
from air_magic.result import Ending
from air_magic.run import RUNS, Run
from air_magic.rundir import RunDir
from air_magic.state import Phase, RunState, Status
from air_magic.views.text import Line

from .histories import HISTORIES, START, asked, died, ended, obeyed, raised, returned, up


class Script:
    """An inbox and a clock: whoever waits for an event is at the time when it comes."""

    def __init__(self, events: list[tuple[float, Any]]) -> None:
        self.now = START
        self._events = [(START + at, event) for at, event in events]

    def clock(self) -> float:
        return self.now

    def put(self, event: Any) -> None:
        self._events.insert(0, (self.now, event))

    def set_back(self, seconds: float) -> None:
        self.now -= seconds
        self._events = [(at - seconds, event) for at, event in self._events]

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        assert self._events, "the loop waits for events that never come"
        at, event = self._events[0]
        if at > self.now + timeout:
            self.now += timeout
            raise queue.Empty
        del self._events[0]
        self.now = max(self.now, at)
        if not callable(event):
            return event
        event()  # something that a user does at this moment
        return self.get(block, 0.0)


class Node:
    """Remembers when and how it was stopped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.stops: list[tuple[float, str, bool]] = []

    def stop(self, reason: str, *, kill: bool) -> None:
        self.stops.append((round(self._clock() - START, 3), reason, kill))


class View:
    """Remembers all that it was shown."""

    def __init__(self) -> None:
        self.shots: list[dict[str, Any]] = []
        self.lines: list[Line] = []
        self.finished = 0

    def publish(self, snapshot: dict[str, Any], lines: list[Line]) -> None:
        self.shots.append(snapshot)
        self.lines += lines

    def finish(self, snapshot: dict[str, Any]) -> None:
        self.shots.append(snapshot)
        self.finished += 1


@dataclass
class World:
    """A run with everything around it."""

    run: Run[Any]
    node: Node
    view: View
    script: Script

    def play(self) -> None:
        """Runs it to its end."""
        self.run.begin(lambda deliver: self.node, publish=True)
        assert self.run.wait(30), "the loop never ended"


def run_of(folder: Path, events: list[tuple[float, Any]], **fields: Any) -> World:
    """A run that has not begun."""
    script = Script(events)
    state = RunState("0123abcd", "train", 2, "CPU", str(folder), START, **fields)
    view = View()
    return World(Run(state, [], view, script, script.clock), Node(script.clock), view, script)


def played(folder: Path, events: list[tuple[float, Any]], **fields: Any) -> World:
    """A run that has ended."""
    world = run_of(folder, events, **fields)
    world.play()
    return world


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_comes_to_its_end(name: str, tmp_path: Path) -> None:
    """Stops with their times, status, cause, ranks, notes and summary follow from the events alone."""
    expected = HISTORIES[name]
    for _, event in expected.events:
        if isinstance(event, RankExited) and event.outcome and event.outcome["value"]:
            event.outcome["value"] = event.outcome["value"].replace("FOLDER", str(tmp_path))
    world = played(tmp_path, expected.events, timeout=expected.timeout, notes=list(expected.before))
    shot = world.run.snapshot()
    told = replace(
        expected,
        stops=world.node.stops,
        status=Status(shot["status"]),
        cause=shot["failure"] and shot["failure"]["rank"],
        ranks=" ".join(rank["state"] for rank in shot["ranks"]),
        notes=shot["notes"],
        summary=shot["summary"].removeprefix("train: ").removesuffix(f" · logs: {tmp_path}"),
    )
    assert told == expected
    assert (world.view.finished, world.view.shots[-1]) == (1, shot)
    assert sorted(world.run.outcomes) == [0, 1]
    assert (world.run.exception() is None) == (expected.status is Status.SUCCEEDED)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("one rank fails and the other is stopped after the grace", RankFailed, "rank 1 of 2 failed: ValueError: boom"),
        ("a rank dies by a signal", RankFailed, "rank 0 of 2 was killed by SIGKILL"),
        ("no rank can be started", RankFailed, "rank 0 of 2 was lost: the ranks could not be started: no such folder"),
        (
            "the second rank cannot be started and the first is killed for it",
            RankFailed,
            "rank 1 of 2 was lost: the ranks could not be started: too many processes",
        ),
        ("the supervisor is lost while ranks run", RankFailed, "rank 1 of 2 was lost: the supervisor was killed"),
        (
            "the payload can be loaded by no rank",
            RankFailed,
            "rank 1 of 2 could not load what was sent to it: ModuleNotFoundError: No module named 'mine'",
        ),
        (
            "the timeout strikes",
            RunTimedOut,
            "train was stopped after its timeout of 5 s; pass a longer one, or timeout=None",
        ),
        ("a second request kills", RunCancelled, "train was cancelled after 2.2 s; no process of it is left"),
        (
            "the first reason to stop counts",
            KeyboardInterrupt,
            "train was interrupted after 2.2 s; no process of it is left",
        ),
        (
            "a rank names a file that is not its own",
            RunError,
            "train ended without its values: rank 0 names a file outside of its run's folders: /etc/passwd",
        ),
    ],
)
def test_an_end_without_values_raises(name: str, kind: type[BaseException], text: str, tmp_path: Path) -> None:
    """One exception, whose first line says what happened; it comes again at every call."""
    history = HISTORIES[name]
    world = played(tmp_path, history.events, timeout=history.timeout)
    for _ in range(2):
        with pytest.raises(kind) as caught:
            world.run.result()
        assert (type(caught.value), str(caught.value).split("\n")[0]) == (kind, text)
    if isinstance(caught.value, RunError):
        assert caught.value.run is world.run


def test_a_value_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """The run fails with the file's name, though every rank returned."""
    path = tmp_path / "rank-1.value"
    world = played(tmp_path, [*up(0, 1), returned(0, 1.0), returned(1, 1.0, value=str(path)), ended(1.1)])
    with pytest.raises(RunError, match=f"No such file or directory: '{path}'"):
        world.run.result()


def test_values_come_in_rank_order_and_their_files_go(tmp_path: Path) -> None:
    """Whoever exits first; warnings become notes, and nothing but logs and records stays."""
    folder = RunDir(tmp_path)
    for rank in range(2):
        values.dump({"rank": rank}, folder.values(rank)[1])
    folder.log(0).write_text("log")
    places = [str(folder.values(rank)[1]) for rank in range(2)]
    events = [*up(0, 1), returned(1, 1.0, value=places[1]), returned(0, 1.2, value=places[0]), ended(1.3)]
    world = played(tmp_path, events)
    assert world.run.result() == [{"rank": 0}, {"rank": 1}]
    assert os.listdir(tmp_path) == ["rank-0.log"]


def test_a_ranks_exception_is_raised_as_itself(tmp_path: Path) -> None:
    """With the report as its cause; where its file is damaged, the report alone is raised."""
    path = RunDir(tmp_path).error(1)
    for written, kind in ((True, KeyError), (False, RankFailed)):
        if written:
            values.dump_exception(KeyError("lr"), path)
        else:
            path.write_bytes(b"half")
        events = [*up(0, 1), raised(1, 1.0, "'lr'", kind="KeyError", error=str(path)), obeyed(0, 1.6), ended(1.7)]
        error = played(tmp_path, events).run.exception()
        failed = error.__cause__ if written else error
        assert (type(error), type(failed)) == (kind, RankFailed)
        assert str(failed).startswith("rank 1 of 2 failed: KeyError: 'lr'\n")


def test_output_becomes_lines_and_the_live_line(tmp_path: Path) -> None:
    """Final lines go to the view once, unfinished ones stand in the snapshot and become final at the end."""
    events = [
        *up(0, 1),
        (0.2, Output(0, "a\nb", 0)),
        (0.2, Output(1, " 10%\r 20%", 0)),
        (0.5, Output(0, "c\n", 7)),
        returned(0, 1.0),
        returned(1, 1.0),
        ended(1.1),
    ]
    view = played(tmp_path, events).view
    assert view.lines == [Line(0, "a"), Line(0, "bc", 7), Line(1, " 20%")]
    shot = next(shot for shot in view.shots if shot["elapsed"] > 0.35)
    keys = ("last_line", "live", "bar", "lines")
    assert [[rank[key] for key in keys] for rank in shot["ranks"]] == [["a", "b", False, 1], ["", " 20%", True, 0]]
    assert [[rank[key] for key in keys] for rank in view.shots[-1]["ranks"]] == [
        ["bc", "", False, 9],
        [" 20%", "", False, 1],
    ]


def test_the_view_is_served_ten_times_a_second(tmp_path: Path) -> None:
    """Neither a flood of events nor silence changes that."""
    flood = [(0.2 + n / 10_000, Output(n % 2, f"{n}\n")) for n in range(10_000)]
    view = played(tmp_path, [*up(0, 1), *flood, returned(0, 3.0), returned(1, 3.0), ended(3.0)]).view
    elapsed = [shot["elapsed"] for shot in view.shots[:-2]]
    assert [round(later - earlier, 3) for earlier, later in itertools.pairwise(elapsed)] == [0.1] * 29
    assert view.lines == [Line(n % 2, str(n)) for n in range(10_000)]


def test_a_clock_that_is_set_back_does_not_stop_the_view(tmp_path: Path) -> None:
    """An hour less on the clock is not an hour without a sign."""
    events = [*up(0, 1), returned(0, 2.0), returned(1, 2.0), ended(2.0)]
    world = run_of(tmp_path, [*events[:3], (0.25, lambda: world.script.set_back(3600)), *events[3:]])
    world.play()
    assert len(world.view.shots) > 20


@pytest.mark.parametrize("times", [1, 2])
def test_cancel_stops_and_a_second_time_kills(tmp_path: Path, times: int) -> None:
    """It returns at once, whether the run heard it; after the end it does nothing."""
    answers: list[bool] = []
    cancels = [(1.0 + n, lambda: answers.append(world.run.cancel())) for n in range(times)]
    world = run_of(tmp_path, [*up(0, 1), *cancels, obeyed(0, 3.0), obeyed(1, 3.0), ended(3.1)])
    world.play()
    assert world.node.stops == [(1.0, "cancel", False), (2.0, "cancel", True)][:times]
    assert (answers, world.run.cancel()) == ([True] * times, False)


def test_a_run_behaves_like_a_future(tmp_path: Path) -> None:
    """Before the end it says that it goes on, after it what it came to."""
    world = run_of(tmp_path, HISTORIES["all ranks return"].events)
    run = world.run
    assert (run.done(), run.wait(0), run.status, run.outcomes) == (False, False, "running", {})
    for call in (run.result, run.exception):
        with pytest.raises(TimeoutError, match="train has not ended within 0 s; it goes on"):
            call(0)
    assert repr(run) == "<Run 0123abcd of train: running, 2 ranks>"
    world.play()
    assert (run.done(), run.status, run.exception(0), run.result(0)) == (True, "succeeded", None, [None, None])
    assert [(rank, outcome.ending) for rank, outcome in sorted(run.outcomes.items())] == [
        (0, Ending.RETURNED),
        (1, Ending.RETURNED),
    ]
    assert (run.id, run.name, run.world_size, run.log_dir) == ("0123abcd", "train", 2, str(tmp_path))
    assert RUNS["0123abcd"] is run


def test_a_run_is_known_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    """The registry keeps no run, with its values, alive."""
    world = played(tmp_path, HISTORIES["all ranks return"].events)
    known = "0123abcd" in RUNS
    for thread in threading.enumerate():
        if thread.name == "air_magic-run-0123abcd":
            thread.join(10)
    del world
    assert (known, "0123abcd" in RUNS) == (True, False)


def test_logs_are_a_ranks_whole_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are no text are replaced; a rank that the run does not have is an IndexError; `show` is short."""
    world = played(tmp_path, [*up(0, 1), (0.2, Output(1, "epoch 1\n50%")), *HISTORIES["all ranks return"].events[3:]])
    RunDir(tmp_path).log(1).write_bytes(b"epoch 1\n50%\xff")
    assert world.run.logs(1) == "epoch 1\n50%\N{REPLACEMENT CHARACTER}"
    with pytest.raises(IndexError, match="rank 2 of a run with ranks 0 to 1"):
        world.run.logs(2)
    world.run.show()
    assert capsys.readouterr().out == (
        f"train (0123abcd): succeeded after 1.3 s · logs: {tmp_path}\n"
        "rank 0: returned, 0 lines · \n"
        "rank 1: returned, 2 lines · 50%\n"
    )


def test_a_with_block_that_raises_cancels_the_run(tmp_path: Path) -> None:
    """And waits for its end; one that ends well leaves the run alone."""
    for raises in (False, True):
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        state = RunState("0123abcd", "train", 1, "CPU", str(tmp_path), START)
        run: Run[Any] = Run(state, [], View(), inbox)
        run.begin(lambda deliver, inbox=inbox: Obedient(inbox), publish=True)
        try:
            with run:
                if raises:
                    raise KeyError("mine")
                assert not run.done()
        except KeyError:
            assert (run.done(), run.status) == (True, "cancelled")
        else:
            assert run.cancel()
            assert run.wait(30)


class Obedient:
    """A node whose one rank ends at once when it is told to."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox

    def stop(self, reason: str, *, kill: bool) -> None:
        now = time.time() - START
        self._inbox.put(obeyed(0, now)[1])
        self._inbox.put(ended(now)[1])


class Interrupting(View):
    """A view during whose work the user presses the interrupt button."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self._when = when

    def publish(self, snapshot: dict[str, Any], lines: list[Line]) -> None:
        super().publish(snapshot, lines)
        self._press("publish")

    def finish(self, snapshot: dict[str, Any]) -> None:
        super().finish(snapshot)
        self._press("finish")

    def _press(self, when: str) -> None:
        if when == self._when:
            self._when = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["publish", "finish"])
def test_an_interrupt_reaches_the_caller_once_the_ranks_are_gone(tmp_path: Path, when: str) -> None:
    """Also one that comes too late to stop anything, so that "Run all" stops; its values are not lost."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    state = RunState("0123abcd", "train", 1, "CPU", str(tmp_path), START)
    run: Run[Any] = Run(state, [], Interrupting(when), inbox)
    if when == "finish":
        inbox.put(returned(0, 1.0)[1])
        inbox.put(ended(1.0)[1])
    run.begin(lambda deliver: Obedient(inbox), publish=False)

    def call() -> None:
        run.watch()
        run.result()

    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert run.done()
    if when == "finish":
        assert str(caught.value) == "train had returned already; its values are in the Run's result()"
        assert run.result() == [None]
    else:
        assert run.status == "interrupted"


def test_a_start_that_fails_is_the_callers(tmp_path: Path) -> None:
    """No loop is begun for a node that does not exist."""

    def start(deliver: Any) -> Node:
        raise OSError("no more processes")

    world = run_of(tmp_path, [])
    with pytest.raises(OSError, match="no more processes"):
        world.run.begin(start, publish=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("air_magic-run")]


def test_a_view_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    """It is shown no more, and the run says so."""

    class Broken(View):
        def publish(self, snapshot: dict[str, Any], lines: list[Line]) -> None:
            raise ZeroDivisionError("division by zero")

    script = Script(HISTORIES["all ranks return"].events)
    state = RunState("0123abcd", "train", 2, "CPU", str(tmp_path), START)
    view = Broken()
    run: Run[Any] = Run(state, [], view, script, script.clock)
    run.begin(lambda deliver: Node(script.clock), publish=True)
    assert run.result(30) == [None, None]
    assert run.snapshot()["notes"] == [
        "the output could not be shown any more: ZeroDivisionError('division by zero'); the log files have it"
    ]
    assert view.finished == 0


def test_a_fault_of_the_loop_reaches_whoever_waits(tmp_path: Path) -> None:
    """Its ranks are killed, and the caller gets the error instead of waiting for ever."""
    world = played(tmp_path, [*up(0, 1), (0.5, RankStarted(7, 107, START))])
    with pytest.raises(IndexError):
        world.run.result()
    shot = world.run.snapshot()
    assert world.node.stops == [(0.5, "failure", True)]
    assert (shot["phase"], shot["status"], shot["summary"]) == (
        "ended",
        "failed",
        "train: IndexError('list index out of range')",
    )
    assert world.view.finished == 1


def any_history(seed: int) -> list[tuple[float, Any]]:
    """Some legal sequence of events: whatever a node may send, and requests at any time."""
    dice = random.Random(seed)
    events: list[tuple[float, Any]] = [(0.0, NodeStarted(0, 50, 29500))]
    for rank in range(2):
        at = dice.uniform(0, 0.5)
        if dice.random() < 0.1:
            continue  # it could not be started
        events.append((at, RankStarted(rank, 100 + rank, START + at)))
        for _ in range(dice.randrange(4)):
            events.append(
                (dice.uniform(0, 4), Output(rank, dice.choice(["x\n", "1%\r", "", "part"]), dice.randrange(3)))
            )
        exits = (returned, raised, obeyed, lambda rank, at: died(rank, at, dice.choice([-9, -6, 0, 3])))
        if dice.random() < 0.9:
            events.append(dice.choice(exits)(rank, at + dice.uniform(0, 3)))
    for _ in range(dice.choice([0, 0, 1, 2, 3])):
        events.append(asked(dice.uniform(0, 4), dice.choice(["cancel", "interrupt"])))
    last = max(at for at, _ in events)
    events.append(ended(last) if dice.random() < 0.8 else (dice.uniform(0, last), NodeLost(0, "gone")))
    return sorted(events, key=lambda event: event[0])


def test_every_legal_history_ends_well(tmp_path: Path) -> None:
    """Stops only get harder, phases only go on, snapshots are JSON with the same keys, and every rank has an outcome."""
    order = [phase.value for phase in Phase]
    for seed in range(300):
        dice = random.Random(seed)
        world = played(tmp_path, any_history(seed), timeout=dice.choice([None, 0.3, 2.0]))
        kills = [kill for _, _, kill in world.node.stops]
        assert kills == sorted(kills), seed
        assert not kills or kills.count(False) == 1, seed
        shots = world.view.shots
        assert all(json.loads(json.dumps(shot)) == shot for shot in shots), seed
        assert {tuple(shot) for shot in shots} == {tuple(shots[0])}, seed
        assert {tuple(rank) for shot in shots for rank in shot["ranks"]} == {tuple(shots[0]["ranks"][0])}, seed
        phases = [order.index(shot["phase"]) for shot in shots]
        assert phases == sorted(phases), seed
        assert all(shot["status"] == "running" for shot in shots if shot["phase"] != "ended"), seed
        shot = world.run.snapshot()
        assert (shot["phase"], sorted(world.run.outcomes)) == ("ended", [0, 1]), seed
        succeeded = all(outcome.ending is Ending.RETURNED for outcome in world.run.outcomes.values()) and not kills
        assert (shot["status"] == "succeeded") == (world.run.exception(0) is None) == succeeded, seed
        if shot["status"] == "failed":
            assert shot["failure"] is not None, seed
