"""Stopping real kernels as front-ends do: whatever ends a run or its kernel, nothing of the run is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .kernel import Kernel, wait_until_gone
from .waiting import of_runs, wait_for, wait_for_files

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["cold", pytest.param("warm", marks=pytest.mark.slow)], scope="module")
def start(request):
    """How runs start: cold unless slow tests are wanted, for each kernel would have to warm up first."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cold":
            patch.setenv("AIR_MAGIC_WARM", "0")
        yield request.param


pytestmark = pytest.mark.usefixtures("start")

SLOW = pytest.mark.slow

RESTING = """
import sys
sys.path.append({root!r})
from pathlib import Path
from air_magic import distributed
from tests.resting import rest
folder = Path({folder!r})
resting = distributed(num_accelerators=2)(rest)
"""


def rest_in(kernel, folder, *, obey):
    """Has the kernel run `rest` in a cell; the cell's id and every process of the run."""
    kernel.run(RESTING.format(root=str(ROOT), folder=str(folder)))
    cell = kernel.begin(f"resting.distributed(folder, obey={obey})")
    wait_for_files(folder / "up-0", folder / "up-1")
    return cell, kernel.pids() - {kernel.pid}


def answer_of(kernel):
    """The next cell's answer."""
    message = kernel.client.get_shell_msg(timeout=60)
    return {message["parent_header"]["msg_id"]: message["content"]["status"]}


def to_the_kernel(kernel):
    """An interrupt as sent by a front-end that knows only the kernel's process."""
    os.kill(kernel.pid, signal.SIGINT)


def to_its_group(kernel):
    """An interrupt as sent to the kernel's process group."""
    os.killpg(os.getpgid(kernel.pid), signal.SIGINT)


def to_the_manager(kernel):
    """An interrupt as sent by Jupyter."""
    kernel.manager.interrupt_kernel()


@pytest.mark.parametrize(
    "interrupt", [to_its_group, pytest.param(to_the_kernel, marks=SLOW), pytest.param(to_the_manager, marks=SLOW)]
)
def test_an_interrupt_ends_the_run_and_the_queue_and_leaves_the_kernel_usable(kernel, tmp_path, interrupt):
    """The cell ends as KeyboardInterrupt when all is gone, cells behind it do not run, and the next run works."""
    cell, _ = rest_in(kernel, tmp_path, obey=True)
    queued = kernel.client.execute("raise SystemError('ran')")
    interrupt(kernel)
    reply = kernel.wait(cell)
    assert of_runs(kernel.pid) == set()
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    log = re.search(r"logs: (\S+)", reply.text).group(1)
    assert re.sub(r"[\d.]+ s;", "N s;", reply.traceback) == (
        f"KeyboardInterrupt: rest was interrupted after N s; no process of it is left\nFull logs: {log}"
    )
    assert (tmp_path / "tidy-0").exists()
    assert (tmp_path / "tidy-1").exists()
    answers = {}
    wait_for(lambda: queued in answers or answers.update(answer_of(kernel)))
    assert answers[queued] == "aborted"
    assert kernel.run("distributed(num_accelerators=2)(lambda: 5).distributed()").result == "[5, 5]"


def test_a_second_interrupt_kills(kernel, tmp_path):
    """Ranks that do not end on the first interrupt end on the second."""
    cell, _ = rest_in(kernel, tmp_path, obey=False)
    kernel.manager.interrupt_kernel()
    wait_for_files(tmp_path / "asked-0", tmp_path / "asked-1")
    kernel.manager.interrupt_kernel()
    reply = kernel.wait(cell)
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert of_runs(kernel.pid) == set()
    assert kernel.run("[o.returncode for o in resting.last_run.outcomes.values()]").result == "[-9, -9]"


def restart(kernel):
    """As the Restart button."""
    kernel.manager.restart_kernel(now=False)


def shut_down(kernel):
    """As the Shut Down button."""
    kernel.manager.shutdown_kernel(now=False)


def kill(kernel):
    """As the out-of-memory killer."""
    os.kill(kernel.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "obey"),
    [
        pytest.param(restart, True, id="restart, obeying ranks"),
        pytest.param(restart, False, id="restart, deaf ranks", marks=SLOW),
        pytest.param(shut_down, True, id="shutdown, obeying ranks", marks=SLOW),
        pytest.param(shut_down, False, id="shutdown, deaf ranks", marks=SLOW),
        pytest.param(kill, True, id="SIGKILL, obeying ranks", marks=SLOW),
        pytest.param(kill, False, id="SIGKILL, deaf ranks"),
    ],
)
def test_nothing_outlives_its_kernel(kernel, tmp_path, end, obey):
    """Restart, shutdown and SIGKILL of the kernel leave no process, whatever the ranks do about it."""
    _, started = rest_in(kernel, tmp_path, obey=obey)
    end(kernel)
    wait_until_gone(started, 4)  # the budget is 2
    if end is not kill:
        assert (tmp_path / "tidy-0").exists() == obey


@SLOW
def test_a_kernel_s_end_leaves_another_kernel_s_run_alone(kernel, tmp_path, tmp_path_factory, runs_root):
    """Kernels share nothing."""
    with Kernel(tmp_path_factory.mktemp("other"), runs_root) as other:
        other.run("%load_ext air_magic")
        folder = tmp_path_factory.mktemp("resting")
        _, started = rest_in(other, folder, obey=False)
        code = (
            "import time\nfrom pathlib import Path\nfrom air_magic import distributed\n"
            "@distributed(num_accelerators=1)\ndef work(flag):\n    print('up')\n"
            "    while not flag.exists():\n        time.sleep(0.01)\n    return 5\n"
            f"work.distributed(Path({str(tmp_path / 'go')!r}))"
        )
        cell = kernel.begin(code)
        kernel.until(cell, "up")
        kill(other)
        wait_until_gone(started, 4)
        (tmp_path / "go").touch()
        assert kernel.wait(cell).result == "[5]"
