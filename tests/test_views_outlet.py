"""Outlets: where a view's text goes in a kernel, a terminal and a plain stream."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from air_magic.views.outlet import PlainOutlet, TtyOutlet, cut, outlet

ROOT = str(Path(__file__).parent.parent)


class Tty(io.StringIO):
    """A terminal that keeps what was written to it."""

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def screen(stream: io.StringIO) -> list[str]:
    """What stands on a terminal after it got the text: enough of one for what TtyOutlet sends."""
    rows, row = [""], 0
    for text, up in re.findall(r"([^\r\n\x1b]+|\n)|\r\x1b\[(\d+)A\x1b\[J", stream.getvalue()):
        if up:
            row -= int(up)
            rows[row:] = [""]
        elif text == "\n":
            rows.append("")
            row += 1
        else:
            rows[row] += text
    assert rows.pop() == ""
    return rows


def of_size(columns: int, lines: int) -> Callable[[], os.terminal_size]:
    return lambda: os.terminal_size((columns, lines))


def test_plain_rows_are_written_at_most_every_ten_seconds_and_at_the_end() -> None:
    """A log file gets a bar now and then, and its last state once."""
    now = [0.0]
    stream = io.StringIO()
    out = PlainOutlet(stream, lambda: now[0])
    for tenth in range(251):
        now[0] = tenth / 10
        out.live([f"rank 0 {tenth}", "rank 1 waits"])
        if tenth == 150:
            out.write("a line\n")
    out.close()
    out.close()
    assert stream.getvalue().splitlines() == [
        "rank 0 0", "rank 1 waits", "rank 0 100", "a line", "rank 0 200", "rank 0 250",
    ]  # fmt: skip


def test_plain_rows_that_are_taken_away_have_no_last_state() -> None:
    """A bar that is over is a line of the log."""
    stream = io.StringIO()
    out = PlainOutlet(stream, lambda: 0.0)
    out.live(["50%"])
    out.live(["99%"])
    out.live([])
    out.close()
    assert stream.getvalue() == "50%\n"


def test_lines_stand_above_the_live_rows_of_a_terminal() -> None:
    """The block is moved down by what is written, rewritten in place, and left standing at the end."""
    stream = Tty()
    out = TtyOutlet(stream, of_size(80, 24), {})
    out.write("start\n")
    out.live(["rank 0 1%", "rank 1 1%"])
    out.write("[rank 0] a line\n")
    out.live(["rank 0 2%"])
    assert screen(stream) == ["start", "[rank 0] a line", "rank 0 2%"]
    out.live([])
    assert screen(stream) == ["start", "[rank 0] a line"]
    out.live(["rank 1 100%"])
    out.close()
    out.write("done\n")
    assert screen(stream) == ["start", "[rank 0] a line", "rank 1 100%", "done"]


def test_unchanged_rows_are_not_written_again() -> None:
    """A terminal over a slow line gets only what is new."""
    stream = Tty()
    out = TtyOutlet(stream, of_size(80, 24), {})
    out.live(["rank 0 1%"])
    written = stream.getvalue()
    out.live(["rank 0 1%"])
    assert stream.getvalue() == written


def test_live_rows_fit_the_terminal() -> None:
    """Rows are cut to its width and counted to its height, so that the cursor finds back."""
    stream = Tty()
    out = TtyOutlet(stream, of_size(8, 5), {})
    out.live([f"row {n} is long" for n in range(9)])
    out.live([f"row {n} is new" for n in range(9)])
    assert screen(stream) == ["row 0 i", "row 1 i", "… 7 more"]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("abcdef", "abcd"),
        ("ab", "ab"),
        ("日本語", "日本"),
        ("e\u0301e\u0301e\u0301e\u0301e", "e\u0301e\u0301e\u0301e\u0301"),
        ("\x1b[32mab\x1b[0mcdef", "\x1b[32mab\x1b[0mcd\x1b[0m"),
        ("a\tb", "a   "),
    ],
)
def test_a_row_is_cut_by_what_a_terminal_shows(row: str, shown: str) -> None:
    """Colours take no room, wide characters two columns, combining ones none."""
    assert cut(row, 4) == shown


def test_a_real_terminal_is_measured_and_written_to() -> None:
    """The outlet for a pty asks it for its size, and takes 80 columns where it does not know."""
    leader, follower = pty.openpty()
    with open(leader, "rb", buffering=0) as reader, open(follower, "w", encoding="utf-8") as stream:
        out = outlet(stream, {"TERM": "xterm"})
        out.live(["x" * 500])
        assert (type(out), out.colour) == (TtyOutlet, True)
        assert reader.read(1000) == b"x" * 79 + b"\r\n"
        fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
        out.live(["y" * 500])
        assert reader.read(1000) == b"\r\x1b[1A\x1b[J" + b"y" * 19 + b"\r\n"


@pytest.mark.parametrize(
    ("stream", "environ", "kind", "colour"),
    [
        (Tty(), {}, TtyOutlet, True),
        (Tty(), {"NO_COLOR": "1"}, TtyOutlet, False),
        (Tty(), {"TERM": "dumb"}, PlainOutlet, False),
        (io.StringIO(), {}, PlainOutlet, False),
        (object(), {}, PlainOutlet, False),
    ],
)
def test_the_outlet_fits_the_stream(stream: Any, environ: dict[str, str], kind: type, colour: bool) -> None:
    """Only a terminal that understands it gets cursor moves."""
    out = outlet(stream, environ)
    assert (type(out), out.colour) == (kind, colour)


def test_the_stdout_of_the_moment_is_kept() -> None:
    """What %%capture or redirect_stdout put in place gets the text, also after it was taken away."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        out = outlet()
    out.write("late\n")
    assert stream.getvalue() == "late\n"


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file"), OSError(5, "EIO")])
def test_a_stdout_that_is_gone_disturbs_nobody(error: Exception) -> None:
    """The run goes on when its reader has left."""
    for out in (PlainOutlet(Gone(error)), TtyOutlet(Gone(error), of_size(80, 24), {})):
        out.write("a\n")
        out.live(["b"])
        out.close()


def test_a_closed_stdout_is_no_terminal() -> None:
    """A closed stream cannot be asked whether it is one."""
    stream = Tty()
    stream.close()
    outlet(stream).write("a\n")


def test_characters_that_the_encoding_lacks_are_replaced() -> None:
    """An ASCII stdout gets question marks instead of nothing."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    outlet(stream).write("45%|██\n")
    assert raw.getvalue() == b"45%|??\n"


class Notebook:
    """A real kernel; unlike `tests.kernel.Kernel` it keeps what belongs to other cells than the one that runs."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self.client = client

    def outputs(self, cell: str) -> list[tuple[str, str, dict[str, Any]]]:
        """(cell, type, content) of what all cells publish until this one has ended."""
        got = []
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            kind, content, parent = message["msg_type"], message["content"], message["parent_header"].get("msg_id", "")
            assert kind != "error", "\n".join(content["traceback"])
            if kind not in ("status", "execute_input"):
                got.append((parent, kind, content))
            if (parent, kind, content.get("execution_state")) == (cell, "status", "idle"):
                return got

    def run(self, code: str) -> list[tuple[str, str, dict[str, Any]]]:
        return self.outputs(self.client.execute(code))


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    manager.start_kernel(env={**os.environ, "PYTHONPATH": path})
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    notebook = Notebook(client)
    notebook.run("import sys, threading; from air_magic.views.outlet import *")
    yield notebook
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_cells_prints_and_the_outlets_text_keep_their_order(notebook: Notebook) -> None:
    """What was printed before stands before, what is printed after stands after."""
    got = notebook.run("out = outlet(); print('1'); out.write('2\\n'); print('3'); out.write('4\\n')")
    assert "".join(content["text"] for _, _, content in got) == "1\n2\n3\n4\n"
    assert {(kind, content["name"]) for _, kind, content in got} == {("stream", "stdout")}


def test_late_text_belongs_to_the_cell_that_started_the_run(notebook: Notebook) -> None:
    """A thread writes after its cell has ended and while another cell runs and prints."""
    first = notebook.client.execute(
        "out, go, gone = outlet(), threading.Event(), threading.Event()\n"
        "def late():\n"
        "    go.wait(); out.write('late\\n'); out.live(['50%']); gone.set()\n"
        "threading.Thread(target=late).start()"
    )
    notebook.outputs(first)
    second = notebook.client.execute("print('before'); go.set(); gone.wait(10); print('after')")
    got = notebook.outputs(second)
    texts = [(parent, content.get("text") or content["data"]["text/plain"]) for parent, _, content in got]
    assert texts == [(second, "before\n"), (first, "late\n"), (first, "50%"), (second, "after\n")]


def test_an_outlet_made_in_a_thread_belongs_to_the_threads_cell(notebook: Notebook) -> None:
    """User threads launch runs too."""
    cell = notebook.client.execute("t = threading.Thread(target=lambda: outlet().write('x\\n')); t.start(); t.join()")
    got = notebook.outputs(cell)
    assert [(parent, content["text"]) for parent, _, content in got] == [(cell, "x\n")]


def test_live_rows_are_one_output_that_is_updated(notebook: Notebook) -> None:
    """No output before there is a row, one display for all states, no message without a change."""
    got = notebook.run(
        "out = outlet()\nfor rows in [], ['1%', '2%'], ['1%', '2%'], ['3%'], []: out.live(rows)\nout.close()"
    )
    assert [(kind, content["data"]) for _, kind, content in got] == [
        ("display_data", {"text/plain": "1%\n2%"}),
        ("update_display_data", {"text/plain": "3%"}),
        ("update_display_data", {"text/plain": ""}),
    ]
    assert len({content["transient"]["display_id"] for _, _, content in got}) == 1


def test_text_that_is_no_unicode_is_sent_all_the_same(notebook: Notebook) -> None:
    """A lone surrogate in a message becomes a question mark."""
    got = notebook.run("out = outlet(); out.write('a\\ud800b\\n'); out.live(['\\ud800'])")
    assert [content.get("text") or content["data"]["text/plain"] for _, _, content in got] == ["a?b\n", "?"]


def test_captured_cells_get_the_text_in_their_capture(notebook: Notebook) -> None:
    """With %%capture, sys.stdout is no kernel's stream."""
    notebook.run("%%capture cap\noutlet().write('caught\\n')")
    got = notebook.run("print(cap.stdout, end='')")
    assert [content["text"] for _, _, content in got] == ["caught\n"]


def test_a_kernels_closed_stdout_disturbs_nobody(notebook: Notebook) -> None:
    """A run outlives the stream of a kernel that shuts down."""
    got = notebook.run(
        "from ipykernel.iostream import OutStream\n"
        "stream = OutStream(sys.stdout.session, sys.stdout.pub_thread, 'stdout', watchfd=False)\n"
        "out = outlet(stream); stream.close(); out.write('x\\n'); out.live(['y'])"
    )
    assert got == []
