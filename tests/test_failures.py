"""Failures of ranks, each made for real: what is raised, what is told, what is in the log, how the ranks ended."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time

import pytest

from air_magic import RankFailed, distributed
from air_magic.result import Ending

pytestmark = pytest.mark.usefixtures("start")

pytestmark = pytest.mark.usefixtures("start")

NO_EXCEPTION = "Hint: no exception left the rank: something called os._exit or a library ended the process.\n"


def ended(function, *args, ranks=2, **options):
    """Runs the function on ranks to its failure; the error and the run."""
    wrapped = distributed(num_accelerators=ranks, **options)(function)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which, is what the tests are about
        wrapped.distributed(*args)
    return caught.value, wrapped.last_run


def report_of(error):
    """The report with paths and line numbers made equal for every machine."""
    failed = error if isinstance(error, RankFailed) else error.__cause__
    text = str(failed).replace(failed.run.log_dir, "<logs>").replace(__file__, "<here>").replace(sys.prefix, "<prefix>")
    return re.sub(r"line \d+", "line N", text)


def traceback_in(log):
    """The log's text, without what differs between Python versions, paths and line numbers made equal."""
    text = re.sub(r"^ *[~^]+\n", "", log, flags=re.MULTILINE).replace(__file__, "<here>")
    return re.sub(r"line \d+", "line N", text)


def outcomes_of(run):
    """How every rank ended, in rank order."""
    return [(run.outcomes[rank].ending, run.outcomes[rank].stopped) for rank in range(run.world_size)]


def test_a_rank_s_exception_is_raised_as_its_own_type_and_the_others_are_stopped():
    """The first failure ends the run with the rank's own exception, whose cause carries run, failure and report."""

    def helper(number):
        raise ValueError(f"bad number {number}")

    def work():
        if os.environ["RANK"] == "1":
            helper(3)
        time.sleep(1000)

    error, run = ended(work)
    assert (type(error), str(error)) == (ValueError, "bad number 3")
    assert type(error.__cause__) is RankFailed
    assert error.__cause__.run is run
    failure = error.__cause__.failure
    assert (failure.rank, failure.ending, failure.type_name, failure.returncode) == (1, Ending.RAISED, "ValueError", 1)
    assert report_of(error) == (
        "rank 1 of 2 failed: ValueError: bad number 3\n"
        "  <here>, line N, in work\n"
        "    helper(3)\n"
        "  <here>, line N, in helper\n"
        '    raise ValueError(f"bad number {number}")\n'
        "1 other rank stopped.\n"
        "Full log: <logs>/rank-1.log"
    )
    assert traceback_in(run.logs(1)) == (
        "Traceback (most recent call last):\n"
        '  File "<here>", line N, in work\n'
        "    helper(3)\n"
        '  File "<here>", line N, in helper\n'
        '    raise ValueError(f"bad number {number}")\n'
        "ValueError: bad number 3\n"
    )
    assert (run.status, outcomes_of(run)) == ("failed", [(Ending.RAISED, True), (Ending.RAISED, False)])
    assert run.outcomes[0].failure.type_name == "KeyboardInterrupt"
    assert run.exception() is error
    with pytest.raises(ValueError, match="bad number 3"):
        run.result()


@pytest.mark.parametrize(
    ("end", "report", "returncode"),
    [
        (
            lambda: sys.exit(3),
            "rank 0 of 1 failed: SystemExit: 3\n  <here>, line N, in <lambda>\n    lambda: sys.exit(3),\n",
            3,
        ),
        (
            lambda: sys.exit("no such data"),
            "rank 0 of 1 failed: SystemExit: no such data\n"
            '  <here>, line N, in <lambda>\n    lambda: sys.exit("no such data"),\n',
            1,
        ),
        (lambda: os._exit(3), "rank 0 of 1 ended by exit code 3, without an exception\n" + NO_EXCEPTION, 3),
        (lambda: os._exit(0), "rank 0 of 1 ended by exit code 0, without an exception\n" + NO_EXCEPTION, 0),
        (
            lambda: ctypes.string_at(0),
            "rank 0 of 1 was killed by SIGSEGV\nHint: native code crashed; env={'PYTHONFAULTHANDLER': '1'} "
            "writes the Python stack into the rank's log.\n",
            -signal.SIGSEGV,
        ),
        (lambda: os.abort(), "rank 0 of 1 was killed by SIGABRT\n", -signal.SIGABRT),
        (
            lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1),
            f"rank 0 of 1 was killed by signal {signal.SIGRTMIN + 1}\n",
            -(signal.SIGRTMIN + 1),
        ),
    ],
    ids=["sys.exit(3)", "sys.exit(text)", "os._exit(3)", "os._exit(0)", "SIGSEGV in C", "SIGABRT", "real-time signal"],
)
def test_a_rank_that_ends_without_an_exception_of_its_own_is_reported_by_how_it_ended(end, report, returncode):
    """Exit codes and signals are told by number and name; the error is RankFailed."""
    error, run = ended(end, ranks=1)
    assert type(error) is RankFailed
    assert error.__cause__ is None
    assert (error.run, error.failure.returncode) == (run, returncode)
    assert report_of(error) == report + "Full log: <logs>/rank-0.log"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (
            signal.SIGKILL,
            r"something killed the rank from outside; Linux reports no out-of-memory kill here \(see dmesg\)",
        ),
        (
            signal.SIGBUS,
            r"a bus error is most often a full /dev/shm \(it has [\d,]+ MiB, [\d,]+ free\): start the container with "
            r"a larger one \(docker run --shm-size=8g\) or use num_workers=0 in the DataLoader",
        ),
    ],
    ids=["SIGKILL", "SIGBUS"],
)
def test_a_signal_s_hint_says_what_the_node_s_memory_says(number, hint):
    """SIGKILL and SIGBUS are explained by the out-of-memory counter and the size of shared memory."""

    def work(number):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        time.sleep(1000)

    error, run = ended(work, number)
    assert re.fullmatch(
        rf"rank 1 of 2 was killed by {number.name}\n1 other rank stopped\.\nHint: {hint}\.\n"
        r"Full log: <logs>/rank-1\.log",
        report_of(error),
    )
    assert outcomes_of(run) == [(Ending.RAISED, True), (Ending.DIED, False)]


def test_exit_code_zero_is_success_without_a_value():
    """sys.exit(), sys.exit(0) and a plain return all end well."""

    def work():
        rank = int(os.environ["RANK"])
        if rank == 0:
            sys.exit()
        if rank == 1:
            sys.exit(0)
        return rank

    assert distributed(num_accelerators=3)(work).distributed() == [None, None, 2]


def test_system_exit_and_errors_in_threads_and_exit_hooks_leave_the_value_alone():
    """What happens beside or after the function is in the log, as in a plain script, and fails nothing."""

    def work():
        import atexit
        import threading

        for target in (lambda: sys.exit(5), lambda: 1 / 0):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        atexit.register(lambda: [][1])
        return "value"

    wrapped = distributed(num_accelerators=1)(work)
    assert wrapped.distributed() == ["value"]
    errors = re.findall(r"^\w+Error: .*", wrapped.last_run.logs(0), flags=re.MULTILINE)
    assert errors == ["ZeroDivisionError: division by zero", "IndexError: list index out of range"]


def test_a_rank_that_hangs_after_its_return_ends_within_a_bound_and_keeps_its_value():
    """A thread that never ends is cut off; the value counts, and a note says what happened."""

    def work():
        import threading

        import air_magic.rank

        air_magic.rank.LEAVE_RETURNED = 1
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return "value"

    wrapped = distributed(num_accelerators=1)(work)
    assert wrapped.distributed() == ["value"]
    outcome = wrapped.last_run.outcomes[0]
    assert (outcome.ending, outcome.returncode) == (Ending.RETURNED, -signal.SIGALRM)
    assert outcome.notes == ("had returned its value when it ended by SIGALRM",)


def test_a_rank_that_hangs_after_its_failure_is_reported_soon():
    """A thread that never ends does not hide an exception."""

    def work():
        import threading

        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("bad")

    error, run = ended(work, ranks=1)
    assert (type(error), run.outcomes[0].returncode) == (ValueError, -signal.SIGALRM)


def test_a_rank_that_closes_its_output_is_served_as_any_other():
    """Without stdout and stderr a value still comes back, and so does a failure."""

    def work():
        os.close(1)
        os.close(2)
        if os.environ["RANK"] == "1":
            sys.exit("told to nobody")
        return "value"

    error, run = ended(work)
    assert report_of(error).startswith("rank 1 of 2 failed: SystemExit: told to nobody\n")
    assert outcomes_of(run)[0] == (Ending.RETURNED, False)


class Plain(Exception):
    """Defined in a module; tests that need a notebook's class define it inside."""


def test_a_class_defined_beside_the_function_is_caught_by_its_name_with_its_attributes():
    """The notebook's own exception classes work in except clauses, also with arguments that pickle cannot guess."""

    class Refused(Exception):
        def __init__(self, code, *, detail):
            super().__init__(f"code {code}")
            self.code, self.detail = code, detail

    def work():
        raise Refused(3, detail={"a": [1]})

    with pytest.raises(Refused) as caught:
        distributed(num_accelerators=1)(work).distributed()
    assert (str(caught.value), caught.value.code, caught.value.detail) == ("code 3", 3, {"a": [1]})


def test_an_exception_that_holds_what_cannot_be_sent_keeps_its_type():
    """The lock becomes a stand-in; the exception stays what it is."""

    class Holding(Exception):
        def __init__(self, text):
            super().__init__(text)
            import threading

            self.lock = threading.Lock()

    def work():
        raise Holding("held")

    error, _ = ended(work, ranks=1)
    assert (type(error), str(error)) == (Holding, "held")
    assert type(error.lock).__name__ == "Unpicklable"


def test_an_exception_that_cannot_be_rebuilt_is_told_in_full():
    """Where the object does not travel, RankFailed carries its type, text and frames."""

    def work():
        class Stubborn(Exception):
            def __reduce_ex__(self, protocol):
                raise TypeError("not me")

        raise Stubborn("text")

    error, _ = ended(work, ranks=1)
    assert type(error) is RankFailed
    assert report_of(error) == (
        "rank 0 of 1 failed: tests.test_failures."
        "test_an_exception_that_cannot_be_rebuilt_is_told_in_full.<locals>.work.<locals>.Stubborn: text\n"
        '  <here>, line N, in work\n    raise Stubborn("text")\n'
        "Full log: <logs>/rank-0.log"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is a builtin from Python 3.11 on")
def test_an_exception_group_arrives_with_its_parts():
    """except* and .exceptions work on what a rank raised; the log has every part's traceback."""

    def work():
        raise ExceptionGroup("both", [ValueError("a"), TypeError("b")])  # noqa: F821 - not in Python 3.10

    error, run = ended(work, ranks=1)
    assert (type(error).__name__, error.message) == ("ExceptionGroup", "both")
    assert [(type(part), str(part)) for part in error.exceptions] == [(ValueError, "a"), (TypeError, "b")]
    assert "ValueError: a" in run.logs(0)
    assert "TypeError: b" in run.logs(0)


def test_the_log_has_the_chain_of_an_exception():
    """What an exception was raised from is in the log, before it."""

    def work():
        try:
            {}["key"]
        except KeyError as error:
            raise Plain("no key") from error

    error, run = ended(work, ranks=1)
    assert type(error) is Plain
    assert traceback_in(run.logs(0)) == (
        "Traceback (most recent call last):\n"
        '  File "<here>", line N, in work\n'
        '    {}["key"]\n'
        "KeyError: 'key'\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "<here>", line N, in work\n'
        '    raise Plain("no key") from error\n'
        "tests.test_failures.Plain: no key\n"
    )


def test_an_exception_s_text_may_be_anything():
    """A __str__ that raises and text that is no Unicode are told as well as they can be."""

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    def work(mute):
        raise Mute() if mute else ValueError("file \udcff\x00 \ud800")

    error, run = ended(work, True, ranks=1)
    assert type(error) is Mute
    first, *_, log = report_of(error).splitlines()
    assert first.endswith("Mute: (its text cannot be shown: ValueError)")
    assert log == "Full log: <logs>/rank-0.log"
    error, run = ended(work, False, ranks=1)
    assert (type(error), str(error)) == (ValueError, "file \udcff\x00 \ud800")
    assert run.logs(0).endswith("ValueError: file \\udcff\x00 \\ud800\n")


def test_a_keyboard_interrupt_raised_by_user_code_is_a_failure_and_no_interrupt():
    """The notebook is not interrupted by what a rank raises."""

    def work():
        raise KeyboardInterrupt("mine")

    error, run = ended(work, ranks=1)
    assert (type(error), run.status) == (RankFailed, "failed")
    assert report_of(error) == (
        "rank 0 of 1 failed: KeyboardInterrupt: mine\n"
        '  <here>, line N, in work\n    raise KeyboardInterrupt("mine")\n'
        "Full log: <logs>/rank-0.log"
    )


def test_a_deep_recursion_is_reported_in_a_few_lines():
    """Equal frames are counted, not repeated, and our own frames between them are left out."""

    def work(depth):
        return deeper.distributed(depth) if depth < 0 else again(depth)

    def again(depth):
        return again(depth + 1)

    deeper = distributed(num_accelerators=1)(work)
    error, _ = ended(work, 0, ranks=1)
    assert type(error) is RecursionError
    assert re.fullmatch(
        r"rank 0 of 1 failed: RecursionError: maximum recursion depth exceeded.*\n"
        r"  <here>, line N, in work\n"
        r"    return deeper\.distributed\(depth\) if depth < 0 else again\(depth\)\n"
        r"  <here>, line N, in again\n"
        r"    return again\(depth \+ 1\)\n"
        r"    … and \d+ times more\n"
        r"Full log: <logs>/rank-0\.log",
        report_of(error),
    )


def test_a_decorated_function_called_in_a_rank_shows_no_frame_of_ours():
    """The report goes from the user's function to the user's function."""

    @distributed
    def inner():
        raise ValueError("deep")

    def outer():
        inner()

    error, _ = ended(outer, ranks=1)
    assert report_of(error) == (
        "rank 0 of 1 failed: ValueError: deep\n"
        "  <here>, line N, in outer\n    inner()\n"
        '  <here>, line N, in inner\n    raise ValueError("deep")\n'
        "Full log: <logs>/rank-0.log"
    )


def test_of_two_failures_the_first_in_time_is_the_cause_and_the_other_is_counted(tmp_path):
    """Rank 0 fails after rank 1, so rank 1's failure is the one that is told."""

    def work(flag):
        if os.environ["RANK"] == "1":
            try:
                raise ValueError("first")
            finally:
                import atexit

                atexit.register(flag.touch)
        while not flag.exists():
            time.sleep(0.01)
        raise TypeError("second")

    error, run = ended(work, tmp_path / "failed")
    assert (type(error), str(error)) == (ValueError, "first")
    assert report_of(error) == (
        "rank 1 of 2 failed: ValueError: first\n"
        '  <here>, line N, in work\n    raise ValueError("first")\n'
        "1 other rank failed too.\n"
        "Full log: <logs>/rank-1.log"
    )
    assert outcomes_of(run) == [(Ending.RAISED, False), (Ending.RAISED, False)]


def test_a_payload_that_no_rank_can_load_is_one_error(capsys):
    """None of the user's code runs, and the reader sees one report instead of a traceback per rank."""

    class Elsewhere:
        def __reduce__(self):
            return __import__, ("a_module_of_the_notebook",)

    def work(_):
        print("never")

    error, run = ended(work, Elsewhere())
    assert type(error) is RankFailed
    first = error.failure.rank
    assert report_of(error) == (
        f"rank {first} of 2 could not load what was sent to it: "
        "ModuleNotFoundError: No module named 'a_module_of_the_notebook'\n"
        "1 other rank failed too.\n"
        "Hint: none of your code ran: the ranks could not load what was sent. A module that only the notebook can "
        "import must be importable from its folder or sys.path.\n"
        f"Full log: <logs>/rank-{first}.log"
    )
    shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("air_magic:")]
    assert [re.sub(r" after .*", "", line) for line in shown] == [f"work: rank {first} of 2 failed"]
    assert [run.outcomes[rank].ending for rank in (0, 1)] == [Ending.UNLOADED] * 2


def test_an_address_that_is_in_use_gets_the_hint_to_leave_ports_alone():
    """The store needs no port of the user's."""

    def work():
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            socket.create_server(taken.getsockname())

    error, _ = ended(work, ranks=1)
    assert type(error) is OSError
    *_, hint, _ = report_of(error).splitlines()
    assert hint == (
        "Hint: another process listens on that port. Leave MASTER_PORT and init_method alone: this run has a store of "
        "its own, which init_process_group() finds by itself."
    )


def test_an_exception_while_the_others_wait_in_a_collective_is_the_cause():
    """The ranks that lose their peer in gloo are consequences, and everything is over soon after the failure."""

    def work():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("rank 1 alone")
        dist.all_reduce(torch.ones(1))

    error, run = ended(work)
    back = time.time()
    assert (type(error), str(error)) == (ValueError, "rank 1 alone")
    lost = run.outcomes[0]
    assert report_of(error) == (
        "rank 1 of 2 failed: ValueError: rank 1 alone\n"
        '  <here>, line N, in work\n    raise ValueError("rank 1 alone")\n'
        f"1 other rank {'stopped' if lost.stopped else 'failed too'}.\n"  # a busy machine may be late
        "Full log: <logs>/rank-1.log"
    )
    assert lost.stopped or lost.failure.is_consequence
    assert back - error.__cause__.failure.time_ns / 1e9 < 4  # the budget is 2


def test_a_failure_before_the_process_group_frees_the_ranks_that_wait_for_it():
    """Ranks blocked in init_process_group hear no SIGINT; they come back when the store goes."""

    def work():
        import torch.distributed as dist

        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if os.environ["RANK"] == "1":
            store.wait(["the other rank is at the group"])
            raise ValueError("before the group")
        store.set("the other rank is at the group", "")
        dist.init_process_group("gloo")

    error, run = ended(work)
    back = time.time()
    assert (type(error), str(error)) == (ValueError, "before the group")
    assert outcomes_of(run) == [(Ending.RAISED, True), (Ending.RAISED, False)]
    assert back - error.__cause__.failure.time_ns / 1e9 < 4  # the budget is 2


def test_nccl_on_a_node_without_a_gpu_gets_the_line_that_works_on_both():
    """The hint is the code to write instead."""

    def work():
        import torch.distributed as dist

        dist.init_process_group("nccl")

    error, _ = ended(work, ranks=1, accelerator_type="CPU")
    assert type(error) in (RuntimeError, ValueError)
    *_, hint, _ = report_of(error).splitlines()
    assert hint == (
        "Hint: this node has no GPU, so the ranks are CPU ranks. Code for both: "
        'device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu"); '
        'dist.init_process_group("nccl" if device.type == "cuda" else "gloo").'
    )


def test_an_exception_in_a_data_loader_s_worker_is_raised_as_its_type():
    """The worker's traceback is in the text, as torch puts it there."""

    class Items:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise LookupError(f"no item {index}")

    def work():
        from torch.utils.data import DataLoader

        list(DataLoader(Items(), num_workers=1))

    error, _ = ended(work, ranks=1)
    assert type(error) is LookupError
    assert str(error).startswith("Caught LookupError in DataLoader worker process 0.\n")
    assert "LookupError: no item 0" in report_of(error)


FAILING = """
%%distributed -n 2
import os, time
def helper(x):
    raise OSError(f"no {x}")
if os.environ["RANK"] == "1":
    helper(3)
time.sleep(1000)
"""

OWN_CLASS = """
from air_magic import distributed
class Refused(Exception):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.code, self.detail = code, detail
@distributed(num_accelerators=2)
def train():
    import os, time
    if os.environ["RANK"] == "1":
        raise Refused(3, detail=[1])
    time.sleep(1000)
try:
    train.distributed()
except Refused as error:
    print("caught", error.code, error.detail, error.__cause__.failure.rank)
"""


def plain(text):
    """Text without a terminal's colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_failing_cell_is_an_error_reply_with_the_report_above_the_rank_s_own_lines(kernel_of_module):
    """Run all stops; the traceback names the cell, its number and source, and shows none of our frames."""
    kernel_of_module.run("1 + 1")
    reply = kernel_of_module.run(FAILING.strip(), check=False)
    assert (reply.status, reply.ename, reply.evalue) == ("error", "OSError", "no 3")
    shown = plain(reply.traceback)
    (number,) = set(re.findall(r"In\[(\d+)\]", shown))
    log = re.search(r"logs: (\S+)", reply.text).group(1)
    report = (
        "RankFailed: rank 1 of 2 failed: OSError: no 3\n"
        f"  Cell In[{number}], line 6\n    helper(3)\n"
        f'  Cell In[{number}], line 4, in helper\n    raise OSError(f"no {{x}}")\n'
        f"1 other rank stopped.\nFull log: {log}/rank-1.log\n"
    )
    above, _, below = shown.partition("The above exception was the direct cause of the following exception:")
    assert report in above
    assert re.search(r"^-+> 6 +helper\(3\)$", below, re.MULTILINE)
    assert re.search(r'^-+> 4 +raise OSError\(f"no {x}"\)$', below, re.MULTILINE)
    assert below.endswith("OSError: no 3")
    assert "air_magic/" not in shown.replace(log, "")


def test_a_notebook_s_own_exception_class_is_caught_in_the_notebook(kernel_of_module):
    """`except Refused` in the calling cell catches what a rank raised, attributes included."""
    reply = kernel_of_module.run(OWN_CLASS.strip())
    assert reply.text.splitlines()[-1] == "caught 3 [1] 1"


def test_a_death_in_a_notebook_is_shown_as_the_report_alone(kernel_of_module):
    """Where no exception came back there is no traceback to show."""
    code = "from air_magic import distributed\n@distributed(num_accelerators=1)\ndef die():\n    import os\n    os._exit(3)\ndie.distributed()"
    reply = kernel_of_module.run(code, check=False)
    assert (reply.status, reply.ename) == ("error", "RankFailed")
    log = re.search(r"logs: (\S+)", reply.text).group(1)
    assert plain(reply.traceback) == (
        f"RankFailed: rank 0 of 1 ended by exit code 3, without an exception\n{NO_EXCEPTION}Full log: {log}/rank-0.log"
    )
