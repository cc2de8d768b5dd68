"""The magics in a real kernel, in a terminal's IPython and under papermill."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest

from .kernel import DEADLINE

pytestmark = pytest.mark.usefixtures("start")

ROOT = Path(__file__).parents[1]

TIME = "give a time above 0 such as 90, 90s, 15m or 3h, or none"
COUNT = "give a whole number from 1, or all"
TYPE = "give GPU_<n>x<model> such as GPU_8xH100, or CPU, or None to detect it"
NAME = "give one line of at most 200 characters"
USAGE = "%%distributed? shows what it takes"
NO_NODES = "this version runs on one node; leave --num-nodes out"

REFUSED = {
    "-n 0": f"--num-accelerators '0': {COUNT}",
    "-n -1": f"--num-accelerators '-1': {COUNT}",
    "-n two": f"--num-accelerators 'two': {COUNT}",
    "-n 1.5": f"--num-accelerators '1.5': {COUNT}",
    "-n NaN": f"--num-accelerators 'NaN': {COUNT}",
    "-n ''": f"--num-accelerators '': {COUNT}",
    "-n": f"%%distributed: argument -n/--num-accelerators: expected one argument; {USAGE}",
    "--accelerator-type CPU -n 9999": "--num-accelerators 9999: a node takes at most 64 CPU ranks",
    "-n 2 -n 0": f"--num-accelerators '0': {COUNT}",
    "-t 0": f"--timeout '0': {TIME}",
    "-t -5": f"--timeout '-5': {TIME}",
    "-t nan": f"--timeout 'nan': {TIME}",
    "--timeout inf": f"--timeout 'inf': {TIME}",
    "--timeout soon": f"--timeout 'soon': {TIME}",
    "--timeout ''": f"--timeout '': {TIME}",
    "--accelerator-type H-100": f"--accelerator-type 'H-100': {TYPE}",
    "--accelerator-type ''": f"--accelerator-type '': {TYPE}",
    "--accelerator-type SIMULATED": "--accelerator-type SIMULATED: simulated accelerators are not part of this version; "
    "give CPU, or leave --accelerator-type out",
    "--env A": "--env 'A': give NAME=VALUE",
    "--env =1": "--env: '' cannot name a variable; give text without '=' and NUL",
    "--env RANK=1": "--env: RANK is set by the launcher; leave it out",
    "--env": f"%%distributed: argument --env: expected one argument; {USAGE}",
    "--env 'A=1": "no closing quotation in: --env 'A=1",
    "--name ''": f"--name '': {NAME}",
    f"--name {'x' * 201}": f"--name 'xxxxxxxxxxxx...xxxxxxxxxxxxx': {NAME}",
    "--out 1x": "--out 1x: give a Python name, for instance --out losses",
    "--out class": "--out class: give a Python name, for instance --out losses",
    "--out ''": "--out : give a Python name, for instance --out losses",
    "--engine ray": "--engine 'ray': the Ray engine is not part of this version; leave --engine out",
    "--engine slurm": "--engine 'slurm': there is no such engine; give 'local' or leave --engine out",
    "--num-nodes 2": f"--num-nodes 2: {NO_NODES}",
    "--num-nodes ²": f"--num-nodes '²': {NO_NODES}",
    "--num-nodes ''": f"--num-nodes '': {NO_NODES}",
    "--export /no/such/folder/x.py": "--export /no/such/folder/x.py: No such file or directory; "
    "give the name of a file to write",
    "--export ''": "--export : Is a directory; give the name of a file to write",
    "--num 3": f"%%distributed: unrecognized arguments: --num 3; {USAGE}",
    "--detach=1": f"%%distributed: argument --detach: ignored explicit argument '1'; {USAGE}",
    "--no-such-flag": f"%%distributed: unrecognized arguments: --no-such-flag; {USAGE}",
    "word": f"%%distributed: unrecognized arguments: word; {USAGE}",
    "--with nowhere,gone": "--with nowhere,gone: the notebook has no such name; is its cell run?",
}


def test_bad_options_are_refused_in_one_line(kernel_of_module):
    """Each error names the option and what it accepts, and nothing has been started."""
    kernel = kernel_of_module
    kernel.run(
        """
        def tried(line):
            try:
                return get_ipython().run_cell_magic("distributed", line, "pass")
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        """
    )
    before = sorted(kernel.runs.iterdir())
    reply = kernel.run(f"import json; print(json.dumps({{line: tried(line) for line in {list(REFUSED)!r}}}))")
    kinds = {line: "CaptureError" if line.startswith("--with") else "RequestError" for line in REFUSED}
    assert json.loads(reply.text) == {line: f"{kinds[line]}: {text}" for line, text in REFUSED.items()}
    assert sorted(kernel.runs.iterdir()) == before
    shown = kernel.run("%%distributed -n none-of-these\npass", check=False)
    text = f"--num-accelerators 'none-of-these': {COUNT}"
    assert (shown.ename, shown.evalue, shown.traceback) == ("RequestError", text, f"RequestError: {text}")


def test_good_options_reach_the_ranks(kernel_of_module):
    """Long and short forms, quotes, spaces and equal signs in values, and flags that ask for what is so anyway."""
    kernel = kernel_of_module
    cell = """
        import os
        print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
        [os.environ.get(name) for name in ("A", "B", "C")]
    """
    line = """--num-accelerators 3 --accelerator-type cpu --timeout 90s --env "A=x = 'y z'" --env B= --env C=1 --env C=ü
        --name "two words" --cold --no-track --engine local --num-nodes 1 --out found"""
    reply = kernel.run(f"%%distributed {' '.join(line.split())}\n{dedent(cell)}")
    assert [f"[rank {rank}] {rank} of 3" in reply.text for rank in range(3)] == [True] * 3
    assert "two words: 3 ranks returned after" in reply.text
    assert reply.result == ""
    assert eval(kernel.run("found").result) == [["x = 'y z'", "", "ü"]] * 3
    assert kernel.run("%%distributed -n 1 -t none\n7").result == "[7]"
    assert kernel.run("%%air_distributed -n 1 -o short\n8").result == ""
    assert kernel.run("short").result == "[8]"


def test_the_value_is_that_of_the_last_expression(kernel_of_module):
    """A list in rank order; nothing if all are None or the cell ends in a semicolon; --out binds even None."""
    kernel = kernel_of_module
    assert kernel.run("%%distributed -n 2\nimport os\nint(os.environ['RANK']) * 10").result == "[0, 10]"
    assert kernel.run("_").result == "[0, 10]"
    assert kernel.run("%%distributed -n 1\n1 + 1;").result == ""
    assert kernel.run("%%distributed -n 1 -o nothing\nx = 5").result == ""
    assert kernel.run("nothing is None").result == "True"
    mixed = kernel.run("%%distributed -n 2\nimport os\nNone if os.environ['RANK'] == '0' else 1")
    assert mixed.result == "[None, 1]"


def test_the_cell_is_a_script_in_a_fresh_namespace(kernel_of_module):
    """Nothing of the notebook is there, the notebook gets nothing, IPython's syntax works, `%%time` may stand above."""
    kernel = kernel_of_module
    cell = """
        %%time
        %%distributed -n 2
        import __main__, sys
        names = sorted(name for name in dir() if not name.startswith("_"))
        own = 1
        assert __main__.own == 1 and __name__ == "__main__" and "ipykernel" not in sys.modules
        !echo hello from {names}
        listed = !printf 'a\\nb'
        %time y = 3
        %cd -q /
        (list(listed), y, __import__("os").getcwd())
    """
    reply = kernel.run(dedent(cell).strip())
    assert re.search(r"^\[ranks? [01-]+\] hello from \[get_ipython, sys\]$", reply.text, re.MULTILINE)
    assert re.search(r"^\[ranks? [01-]+\] Wall time: ", reply.text, re.MULTILINE)
    assert len(re.findall(r"^Wall time: ", reply.text, re.MULTILINE)) == 1
    assert kernel.run("_").result == "[(['a', 'b'], 3, '/'), (['a', 'b'], 3, '/')]"
    assert kernel.run("'own' in globals(), 'listed' in globals()").result == "(False, False)"


def plain(text):
    """The text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_syntax_error_looks_like_any_cells(kernel_of_module):
    """Type, cell number, line, source and caret; compared with the same mistake in a plain cell."""
    kernel = kernel_of_module
    mistake = "x = 1\ny = 2 +* 3"
    ours = kernel.run(f"%%distributed -n 1\n{mistake}", check=False)
    theirs = kernel.run(f"# a comment\n{mistake}", check=False)
    assert ours.ename == "SyntaxError"
    assert re.sub(r"In\[\d+\]", "In[n]", plain(ours.traceback)) == re.sub(
        r"In\[\d+\]", "In[n]", plain(theirs.traceback)
    )
    assert re.search(r"Cell In\[\d+\], line 3\n    y = 2 \+\* 3\n +\^\n", plain(ours.traceback))
    assert kernel.run("'no harm done'").result == "'no harm done'"


def test_an_exception_names_the_cell_and_its_line(kernel_of_module):
    """It is the rank's own type; the report and the traceback have the execution number and the source."""
    reply = kernel_of_module.run(
        "%%distributed -n 2\n\ndef train(rate):\n    if rate < 0:\n        raise ValueError(rate)\ntrain(-1)",
        check=False,
    )
    (number,) = {
        message["content"]["execution_count"] for message in reply.messages if message["msg_type"] == "execute_input"
    }
    assert (reply.ename, reply.evalue) == ("ValueError", "-1")
    text = plain(reply.traceback)
    assert (
        f"ValueError: -1\n  Cell In[{number}], line 6\n    train(-1)\n"
        f"  Cell In[{number}], line 5, in train\n    raise ValueError(rate)\n"
    ) in text
    assert re.search(rf"Cell In\[{number}\], line 5\n.*-> 5 +raise ValueError\(rate\)", text, re.DOTALL)
    assert "air_magic/" not in text.replace("runs/", "").replace("/air_magic-", "")


def test_names_of_the_notebook_are_named_at_once(kernel_of_module):
    """Before anything starts: where each is used, what it is, and the import or the flag to add."""
    kernel = kernel_of_module
    kernel.run("import math as m\nclass Net: pass\ncfg = {'a': 1}")
    reply = kernel.run("%%distributed\nx = m.pi\nfor k in cfg: print(Net, k, nowhere)", check=False)
    text = (
        "this cell runs in a fresh namespace, like a script; it does not know m (line 2: module), "
        "Net (line 3: class), cfg (line 3: dict) from the notebook. Import in the cell: `import math as m`. "
        "Add `--with Net,cfg` to the %%distributed line, or define them in the cell.\n"
        "`nowhere` (line 3) is defined nowhere."
    )
    assert (reply.ename, reply.evalue, reply.text) == ("CaptureError", text, "")


def test_with_sends_names_by_value_and_check_reports_them(kernel_of_module):
    """--check says names, types, sizes and origins and runs nothing; --with refuses what cannot be sent."""
    kernel = kernel_of_module
    kernel.run(
        """
        import threading
        import json as codec
        class Net:
            def __init__(self, width): self.width = width
        cfg = {"widths": [1, 2], "data": bytes(20_480)}
        def build(index): return Net(cfg["widths"][index])
        lock = threading.Lock()
        """
    )
    body = (
        "import os\nmade = build(int(os.environ['RANK']))\n(type(made) is Net, made.width, codec.dumps([1]), len(cfg))"
    )
    before = sorted(kernel.runs.iterdir())
    report = kernel.run(f"%%distributed -n 2 --check -w build,Net,cfg,codec\n{body}").text
    assert re.search(r"^  cfg: dict, 20\.\d KiB, from the notebook$", report, re.MULTILINE)
    assert re.search(r"^  Net: type, \d\.\d KiB, from the notebook$", report, re.MULTILINE)
    assert re.search(r"^  build: function, \d+\.\d KiB, from the notebook$", report, re.MULTILINE)
    assert report.endswith("the cell can run\n")
    assert kernel.run("%%distributed --check\nprint(1)").text == "nothing of the notebook is sent\nthe cell can run\n"
    missing = kernel.run("%%distributed --check\nbuild(0)", check=False)
    assert (missing.ename, "--with build" in missing.evalue) == ("CaptureError", True)
    refused = kernel.run("%%distributed --check --with lock\nlock", check=False)
    locked = f"{refused.ename}: {refused.evalue}"
    assert re.fullmatch(
        r"CaptureError: cannot send cell \[\d+\]: `cell \[\d+\] → lock` is a `threading\.Lock`; create it inside the cell\.",
        locked,
    )
    assert sorted(kernel.runs.iterdir()) == before
    value = "[(True, 1, '[1]', 2), (True, 2, '[1]', 2)]"
    assert kernel.run(f"%%distributed -n 2 --with build,Net,cfg,codec\n{body}").result == value


def test_a_detached_runs_output_stays_with_its_cell(kernel_of_module, tmp_path):
    """The cell returns at once with a Run; its lines come to it while another cell runs."""
    kernel, go = kernel_of_module, tmp_path / "go"
    ident = kernel.begin(
        f"%%distributed -n 1 --detach --out run\nimport os, time\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('late line')\n'late value'"
    )
    assert (kernel.wait(ident).status, kernel.run("run.done(), run.status").result) == ("ok", "(False, 'running')")
    other = kernel.client.execute(f"open({str(go)!r}, 'w').close(); print(run.result())")
    texts, end = {ident: "", other: ""}, time.monotonic() + DEADLINE
    while "late value" not in texts[other] or "returned after" not in texts[ident]:
        message = kernel.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
        if message["msg_type"] == "stream":
            texts[message["parent_header"]["msg_id"]] += message["content"]["text"]
    assert kernel.client.get_shell_msg(timeout=DEADLINE)["content"]["status"] == "ok"
    assert "[rank 0] late line\n" in texts[ident]
    assert texts[other] == "['late value']\n"
    assert kernel.run("%%distributed -n 1 --detach\n3").result.startswith("<Run ")
    assert kernel.run("_.result()").result == "[3]"


def test_the_line_magic_looks_after_runs(kernel_of_module, tmp_path):
    """runs, show, logs and cancel, by id and for the latest run; mistakes are one line; shutdown ends everything."""
    kernel, go = kernel_of_module, tmp_path / "go"
    kernel.run(
        "%%distributed -n 2 --detach --out first --name early\nimport os\nprint('rank', os.environ['RANK'], 'was here')"
    )
    kernel.run("first.result()")
    kernel.run(
        "%%distributed -n 1 --detach -o second --name late\nimport os, time\nprint('waiting', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )
    first, second = eval(kernel.run("first.id, second.id").result)
    rows = kernel.run("%distributed runs").text.splitlines()
    assert re.fullmatch(rf"{second}  running +\d+\.\d s   1 ranks  late", rows[0])
    assert re.fullmatch(rf"{first}  succeeded +\d+\.\d s   2 ranks  early", rows[1])
    assert kernel.run("%distributed").text.splitlines()[1] == rows[1]
    assert kernel.run(f"%distributed logs {first} --rank 1").text == "rank 1 was here\n\n"
    assert f"early ({first}): succeeded" in kernel.run(f"%distributed show {first[:6]}").text
    assert f"late ({second}): running" in kernel.run("%distributed show").text
    mistakes = {
        "nonsense": "%distributed nonsense: there are cancel, logs, runs, show, shutdown",
        "show nonsense": "%distributed: nonsense names 0 runs; %distributed runs lists them",
        f"logs {first} --rank 2": "--rank 2: the run has ranks 0 to 1",
        f"logs {first} --rank ²": "--rank ²: the run has ranks 0 to 1",
        "logs 'open": "no closing quotation in: logs 'open",
        "runs 3": "%distributed runs takes nothing",
    }
    replies = {line: kernel.run(f"%distributed {line}", check=False) for line in mistakes}
    assert {line: (r.ename, r.evalue) for line, r in replies.items()} == {
        line: ("RequestError", text) for line, text in mistakes.items()
    }
    assert kernel.run("%distributed cancel").text == f"late ({second}) is asked to stop\n"
    assert kernel.run("type(second.exception()).__name__, second.status").result == "('RunCancelled', 'cancelled')"
    assert kernel.run(f"%distributed cancel {second}").text == f"late ({second}) has ended already\n"
    kernel.run("%%distributed -n 1 --detach -o third\nimport time\nwhile True: time.sleep(1)")
    assert kernel.run("%distributed shutdown").text == ""
    assert kernel.run("third.wait(60), third.status").result == "(True, 'failed')"
    assert kernel.run("%%distributed -n 1\n'works again'").result == "['works again']"


def test_help_shows_every_option(kernel_of_module):
    """`%%distributed?` and `%distributed?` say what they take."""
    client = kernel_of_module.client
    pages = {}
    for question in ("%%distributed?", "%distributed?"):
        client.execute(question)
        (page,) = client.get_shell_msg(timeout=DEADLINE)["content"]["payload"]
        pages[question] = plain(page["data"]["text/plain"])
    shown = pages["%%distributed?"]
    flags = (
        "-n N, --num-accelerators N|--accelerator-type TYPE|-t S, --timeout S|-w a,b,C, --with a,b,C|-o NAME, --out NAME|"
        "--env K=V|--name TEXT|--detach|--no-track|--cold|--engine E|--num-nodes K|--export FILE|--check"
    )
    assert [flag for flag in flags.split("|") if flag not in shown] == []
    assert "fresh namespace" in shown
    words = ("runs", "show [ID]", "logs [ID] [--rank R]", "cancel [ID]", "shutdown")
    assert [word for word in words if f"%distributed {word}" not in pages["%distributed?"]] == []


def test_loading_again_and_unloading(kernel_of_module):
    """Another extension's %%distributed is replaced with a word, ours silently; unloading takes the magics away."""
    kernel = kernel_of_module
    kernel.run(
        "%%writefile other_distributed.py\n"
        "def distributed(line, cell): print('the other one')\n"
        "def load_ipython_extension(shell): shell.register_magic_function(distributed, 'cell')\n"
    )
    assert kernel.run("%reload_ext air_magic").text == ""
    assert kernel.run("%%distributed -n 1\n1").result == "[1]"
    kernel.run("%load_ext other_distributed")
    assert kernel.run("%%distributed\n1").text == "the other one\n"
    assert kernel.run("%%air_distributed -n 1\n2").result == "[2]"
    assert kernel.run("%reload_ext air_magic").text == (
        "air_magic: %%distributed was other_distributed's and is air_magic's from now on; "
        "%%air_distributed is always air_magic's\n"
    )
    assert kernel.run("%%distributed -n 1\n3").result == "[3]"
    kernel.run("%unload_ext air_magic")
    gone = kernel.run("%%distributed\n1", check=False)
    assert "not found" in gone.text + gone.evalue
    kernel.run("%load_ext air_magic")
    assert kernel.run("%%distributed -n 1\n4").result == "[4]"


@pytest.mark.slow
def test_an_exported_cell_gives_the_same_output_under_torchrun(kernel_of_module, tmp_path):
    """Every rank prints the same lines in the same order; --with names of all kinds are written along."""
    kernel, script = kernel_of_module, tmp_path / "train.py"
    kernel.run(
        """
        import math as m
        SCALE = 3
        class Base:
            word = "base"
        def half(x): return x / 2
        class Net(Base):
            def area(self, r): return f"{self.word} {half(SCALE * m.floor(r))}"
        """
    )
    cell = dedent(
        """
        \"\"\"Trains.\"\"\"
        import os
        import torch
        import torch.distributed as dist

        print("before", __name__)
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}", Net().area(2.5), SCALE)
        !echo shell {total.item()}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            print(name, os.environ[name])
        dist.destroy_process_group()
        total.item()
        """
    ).strip()
    wrote = kernel.run(f"%%distributed -n 2 --with Net,SCALE --export {script}\n{cell}").text
    assert wrote == f"wrote {script}; run it with: torchrun --nproc-per-node 2 {script}\n"
    kernel.run(f"%%distributed -n 2 --with Net,SCALE --detach --out run\n{cell}")
    ours = eval(kernel.run("run.result(), [run.logs(rank) for rank in (0, 1)]").result)
    assert ours[0] == [3.0, 3.0]
    words = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--redirects",
        "3",
        "--log-dir",
        str(tmp_path / "logs"),
        str(script),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    theirs = [next(tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log")).read_text() for rank in (0, 1)]
    assert theirs == ours[1]
    assert theirs[1].splitlines() == [
        "before __main__",
        "rank 1 of 2: 3.0 base 3.0 3",
        "shell 3.0",
        "RANK 1",
        "WORLD_SIZE 2",
        "LOCAL_RANK 1",
    ]


def environ(tmp_path):
    """Variables for a program of its own."""
    return os.environ | {"IPYTHONDIR": str(tmp_path / ".ipython"), "PYTHONPATH": str(ROOT)}


def test_ipython_in_a_terminal(tmp_path):
    """Magics and decorated functions work in IPython's shell; ranks' lines come as text, an exception as usual."""
    session = dedent(
        """
        %load_ext air_magic
        %%distributed -n 2
        import os
        print("hello from", os.environ["RANK"])
        int(os.environ["RANK"]) + 5


        from air_magic import distributed
        SCALE = 2
        double = distributed(num_accelerators=1)(lambda x: SCALE * x)
        print("doubled", double.distributed(21))
        %%distributed -n 1
        raise KeyError("missing")


        print("still here")
        """
    ).lstrip()
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "--no-confirm-exit"],
        input=session,
        env=environ(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    for part in (
        "[rank 0] hello from 0",
        "[rank 1] hello from 1",
        ": [5, 6]",
        "doubled [42]",
        "KeyError: 'missing'",
        "still here",
    ):
        assert part in done.stdout, done.stdout + done.stderr


def test_papermill_runs_a_notebook_with_our_magics(tmp_path):
    """The output notebook has the ranks' lines and the value in the cell that launched them."""
    cells = [
        nbformat.v4.new_code_cell("%load_ext air_magic"),
        nbformat.v4.new_code_cell("%%distributed -n 2\nimport os\nprint('hello from', os.environ['RANK'])\n5"),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "in.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar"],
        env=environ(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    outputs = nbformat.read(tmp_path / "out.ipynb", 4).cells[1].outputs
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "[rank 0] hello from 0\n" in text
    assert "[rank 1] hello from 1\n" in text
    assert [output.data["text/plain"] for output in outputs if output.output_type == "execute_result"] == ["[5, 5]"]
