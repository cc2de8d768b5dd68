"""The notebooks run from top to bottom and show what their text says."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
QUICKSTART = NOTEBOOKS / "01_quickstart.ipynb"
FAILURES = NOTEBOOKS / "02_results_and_failures.ipynb"
TAGGED = ["failure", "killed", "timeout", "capture", "unknown"]
"""The cells of the second notebook that are meant to fail."""


class Ran:
    """A notebook after its execution; cells are found by their id."""

    def __init__(self, notebook):
        self.cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}

    def _outputs(self, ident, kind):
        return [output for output in self.cells[ident].outputs if output.output_type == kind]

    def text(self, ident):
        """What the cell printed."""
        return "".join(output.text for output in self._outputs(ident, "stream"))

    def value(self, ident):
        """The text of its value."""
        (output,) = self._outputs(ident, "execute_result")
        return output.data["text/plain"]

    def error(self, ident):
        """The name of its exception, and its whole report without colours."""
        (output,) = self._outputs(ident, "error")
        return output.ename, re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))

    def failed(self):
        """The cells that ended by an exception."""
        return [ident for ident in self.cells if self._outputs(ident, "error")]


@pytest.fixture
def ran(tmp_path):
    """Executes a notebook in an empty folder."""

    def ran(path):
        notebook = nbformat.read(path, nbformat.NO_CONVERT)
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
        return Ran(notebook)

    return ran


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_stored_clean(path):
    """Format 4.5, the kernel every machine has, no outputs, no numbers, no names of a machine."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)
    meant = [cell.id for cell in code if "raises-exception" in cell.metadata.get("tags", [])]
    assert meant == (TAGGED if path == FAILURES else [])
    assert re.findall(r"/home/|/root/|/work/|/tmp/|/Users/", path.read_text()) == []


@pytest.mark.slow
def test_quickstart_trains_to_95_percent(ran):
    """A cell says hello from every rank and sums over them; a function trains on digits and returns its model."""
    notebook = ran(QUICKSTART)
    sums = eval(notebook.value("cell"))
    ranks = len(sums)
    assert sums == [ranks * (ranks + 1) / 2] * ranks
    hello, trained = notebook.text("cell"), notebook.text("call")
    for rank in range(ranks):
        assert f"[rank {rank}] hello from rank {rank} of {ranks} on " in hello
    assert len(re.findall(r"^\[ranks? [0-9,-]+\] epoch 5: loss 0\.", trained, re.MULTILINE)) >= 1
    assert "no rank created a process group" not in hello + trained
    (percent,) = re.findall(
        r"^([\d.]+)% of the test digits are read correctly$", notebook.text("accuracy"), re.MULTILINE
    )
    assert float(percent) > 95
    read, true = (line.split()[1:] for line in notebook.text("use").splitlines())
    assert sum(a == b for a, b in zip(read, true, strict=True)) >= 10
    assert notebook.value("use") == "True"
    assert re.findall(r"^epoch \d", notebook.text("record"), re.MULTILINE) == [f"epoch {epoch}" for epoch in range(6)]


@pytest.mark.slow
def test_results_and_failures_show_what_they_say(ran):
    """Values of all ranks, runs in the background, every kind of failure, names for a cell, progress bars."""
    notebook = ran(FAILURES)
    assert notebook.failed() == TAGGED

    assert notebook.value("values") == (
        "[(Metrics(rank=0, loss=10.0), tensor([0., 0., 0.])),\n (Metrics(rank=1, loss=5.0), tensor([1., 1., 1.]))]"
    )
    assert notebook.text("together") == "True 15.0\n"
    assert notebook.value("together") == "tensor([0.5000, 0.5000, 0.5000])"
    assert "value['batches'] is a generator and cannot be pickled" in notebook.text("stand-in")
    assert re.search(r"'loss': 0\.5,\s+'batches': <generator .* could not leave rank 0: ", notebook.value("stand-in"))

    assert re.search(r"^False$", notebook.text("submit"), re.MULTILINE)
    assert "Metrics(rank=1, loss=10.0)" in notebook.text("result")
    assert "\nrank 1 evaluates\n" in notebook.text("result")
    assert re.fullmatch(r"<Run [0-9a-f]{8} of evaluate: succeeded, 2 ranks>", notebook.value("result"))
    assert re.search(r"^[0-9a-f]{8}  succeeded .* evaluate$", notebook.text("runs"), re.MULTILINE)

    name, report = notebook.error("failure")
    assert (name, report.count("1 other rank stopped.")) == ("ValueError", 1)
    assert "rank 1 of 2 failed: ValueError: rank 1 has no shard" in report
    assert re.search(r"-> +5 +raise ValueError", report)
    told = "caught: rank 1 has no shard\nTrue 1 failed\n{0: 'stopped', 1: 'raised'}\n"
    assert notebook.text("except").endswith(told)
    expected = {
        "killed": ("RankFailed", "rank 1 of 2 was killed by SIGKILL"),
        "timeout": ("RunTimedOut", "endless was stopped after its timeout of 5 s"),
        "capture": ("CaptureError", "`train → log → config['log']` is an open file ('/dev/null')"),
        "unknown": ("CaptureError", "Add `--with Metrics,rate,names` to the %%distributed line"),
    }
    found = {ident: notebook.error(ident) for ident in expected}
    assert {ident: (name, text in found[ident][1]) for ident, (name, text) in expected.items()} == {
        ident: (found[ident][0], True) for ident in expected
    }
    assert notebook.value("cancel") == "'cancelled'"
    assert "clean up" in notebook.text("cancel")
    assert notebook.value("cure") == "['done']"

    assert notebook.text("check").endswith("the cell can run\n")
    assert "['a', 'b']" in notebook.text("out")
    assert notebook.value("best") == "[Metrics(rank=0, loss=0.1), Metrics(rank=1, loss=0.1)]"
    assert notebook.value("fresh") == "[False, False]"
    bars = re.findall(r"^\[rank (\d)\] training: 100%\|█+\| 30/30 ", notebook.text("progress"), re.MULTILINE)
    assert sorted(bars) == ["0", "1"]


@pytest.mark.slow
def test_papermill_runs_the_failing_cells_too(tmp_path):
    """Every cell is executed; papermill itself reports a tagged failure at its end, and no other."""
    words = ["papermill", str(FAILURES), str(tmp_path / "out.ipynb"), "--no-progress-bar"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    notebook = nbformat.read(tmp_path / "out.ipynb", nbformat.NO_CONVERT)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.metadata.papermill.status for cell in code] == ["completed"] * len(code), done.stderr
    assert Ran(notebook).failed() == TAGGED
