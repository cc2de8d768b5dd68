"""A decorated function runs on every rank, from notebooks, modules and scripts, and its Run is a future."""

import concurrent.futures
import functools
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from textwrap import dedent

import pytest

from air_magic import CaptureError, RequestError, RunCancelled, RunTimedOut, distributed
from air_magic.accelerators import usable_cores
from air_magic.run import RUNS

pytestmark = pytest.mark.usefixtures("start")

ROOT = Path(__file__).parents[1]
DEADLINE = 60

# A rank says that it runs by opening the pipe, and waits until a file is there.
WAITS = """
    import os, time
    def work(folder, value):
        print("started", flush=True)
        with open(f"{folder}/running", "w"):
            pass
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        return value, os.environ["RANK"]
"""


def cells(code, **names):
    """The namespace of a notebook after its cells have run: its functions go to ranks by value."""
    namespace = {"__name__": "__main__", "distributed": distributed, **names}
    exec(dedent(code), namespace)
    return namespace


@pytest.fixture
def waiting(tmp_path):
    """A function whose one rank waits for `go`, and a way to wait until it runs."""
    os.mkfifo(tmp_path / "running")
    work = distributed(num_accelerators=1)(cells(WAITS)["work"])

    def until_it_runs():
        with (tmp_path / "running").open() as pipe:
            pipe.read()

    return functools.partial(work.submit, str(tmp_path)), until_it_runs, (tmp_path / "go").touch


def test_every_form_of_the_decorator_runs_on_every_rank():
    """Bare, called, as a plain function; in an if, in a function, under an own decorator."""
    code = """
        import functools, os
        FACTOR = 10

        def rank():
            return int(os.environ["RANK"])

        if FACTOR > 1:
            @distributed
            def bare(x): return x + rank()

        @distributed()
        def called(x): return x * FACTOR + rank()

        def own(function):
            @functools.wraps(function)
            def wrapper(*args):
                return "own", function(*args)
            return wrapper

        @distributed(num_accelerators=3)
        @own
        def decorated(x): return x + rank()

        def main():
            base = 100
            @distributed(num_accelerators=1)
            def inside(x, *, y=1): return base + x + y
            def plain(x): return base + x
            return inside.distributed(1, y=5), distributed(num_accelerators=1)(plain).distributed(x=2)

        values = bare.distributed(1), called.distributed(2), decorated.distributed(3), main()
    """
    assert cells(code)["values"] == ([1, 2], [20, 21], [("own", 3), ("own", 4), ("own", 5)], ([106], [102]))


def test_the_function_is_still_the_function():
    """Name, docstring, signature and an ordinary call, here and without a rank, are unchanged."""

    def train(epochs: int, *, rate: float = 0.5) -> tuple[int, float, int]:
        """Trains."""
        return epochs, rate, os.getpid()

    decorated = distributed(train)
    assert (decorated.__name__, decorated.__doc__, decorated.__module__) == ("train", "Trains.", __name__)
    assert inspect.signature(decorated) == inspect.signature(train)
    assert inspect.unwrap(decorated) is train
    assert decorated(3) == (3, 0.5, os.getpid())
    assert decorated.last_run is None
    assert "train" in repr(decorated)


def test_wrong_arguments_start_nothing(runs_root):
    """Arguments are checked against the signature as Python would, before there is a run."""

    @distributed
    def train(epochs, *, rate=0.5):
        raise AssertionError("not to be run")

    texts = {}
    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"rat": 2})]:
        for call in (train.distributed, train.submit):
            with pytest.raises(TypeError) as caught:
                call(*args, **kwargs)
            texts[str(caught.value)] = True
    assert list(texts) == [
        "missing a required argument: 'epochs'",
        "too many positional arguments",
        "got an unexpected keyword argument 'rat'",
    ]
    assert train.last_run is None
    assert list(runs_root.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"tracking": True}, "tracking=True"),
        ({"engine": "ray"}, "engine='ray'"),
        ({"engine": "slurm"}, "engine='slurm'"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"accelerator_type": "SIMULATED"}, "accelerator_type=SIMULATED"),
        ({"num_accelerators": 0}, "num_accelerators=0"),
        ({"num_accelerators": "2"}, "num_accelerators='2'"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"env": {"RANK": "7"}}, "env: RANK"),
        ({"name": ""}, "name=''"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_meant_is_refused_at_the_decoration(asked, names):
    """The error is one line that begins with the option."""
    with pytest.raises(RequestError) as caught:
        distributed(**asked)
    assert str(caught.value).startswith(names)
    assert "\n" not in str(caught.value)


def test_what_the_node_does_not_have_is_refused_at_the_call(runs_root):
    """Too many ranks, another accelerator: nothing is started and nothing is left."""
    for asked, names in (
        ({"num_accelerators": 100_000, "accelerator_type": "CPU"}, "num_accelerators=100000: "),
        ({"accelerator_type": "GPU_64xB300"}, "accelerator_type=GPU_64xB300: "),
    ):
        with pytest.raises(RequestError) as caught:
            distributed(**asked)(os.getpid).distributed()
        assert str(caught.value).startswith(names)
    assert list(runs_root.iterdir()) == []


def test_only_functions_can_be_decorated():
    """A positional option and an unknown option are TypeErrors, as for any Python function."""
    with pytest.raises(TypeError, match="options are given by name"):
        distributed(2)
    with pytest.raises(TypeError, match="num_gpus"):
        distributed(num_gpus=2)


def test_a_coroutine_function_is_refused():
    """It would return without having run; nothing is started."""

    @distributed
    async def train():
        pass

    with pytest.raises(CaptureError, match=r"train is a coroutine function; wrap it in asyncio\.run"):
        train.distributed()


def test_methods_run_with_their_object():
    """Methods of an object, static methods and class methods, in either order of the decorators."""
    code = """
        import os

        class Model:
            scale = 2

            def __init__(self, weight):
                self.weight = weight

            @distributed(num_accelerators=2)
            def fit(self, x):
                self.weight += x + int(os.environ.get("RANK", 0))
                return self.weight

            @staticmethod
            @distributed(num_accelerators=1)
            def inner_static(x): return "static", x

            @distributed(num_accelerators=1)
            @staticmethod
            def outer_static(x): return "static", x

            @distributed(num_accelerators=1)
            @classmethod
            def of(cls, weight): return cls.__name__, cls.scale * cls(weight).weight

        class Child(Model):
            scale = 3

        model = Model(10)
        fitted = model.fit.distributed(x=5)
        of_the_class = Model.fit.distributed(model, 5)
        static = Model.inner_static.distributed(1) + model.outer_static.distributed(2) + Model.outer_static.distributed(3)
        made = Model.of.distributed(4) + Child.of.distributed(4) + model.of.distributed(5)
        here = model.fit(1), Model.of(4), Model.outer_static(3), Child(0).of(4)
    """
    after = cells(code)
    assert (after["fitted"], after["of_the_class"]) == ([15, 16], [15, 16])
    assert after["static"] == [("static", 1), ("static", 2), ("static", 3)]
    assert after["made"] == [("Model", 8), ("Child", 12), ("Model", 10)]
    assert after["here"] == (11, ("Model", 8), ("static", 3), ("Child", 12))
    model = after["model"]
    assert model.fit.last_run is after["Model"].fit.last_run
    assert model.fit.last_run.result() == [15, 16]
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        model.fit.distributed()


def test_callable_objects_and_partials_are_functions_too():
    """What can be called can be distributed, and is named after what it is."""
    code = """
        import functools
        class Trainer:
            def __call__(self, x): return "called", x
        def train(a, b): return a, b
        trainer = distributed(num_accelerators=1)(Trainer())
        partial = distributed(num_accelerators=1)(functools.partial(train, 1))
        values = trainer.distributed(5) + partial.distributed(2)
    """
    after = cells(code)
    assert after["values"] == [("called", 5), (1, 2)]
    assert [after["trainer"].last_run.name, after["partial"].last_run.name] == ["Trainer", "train"]


def test_a_module_is_run_as_it_is_on_disk_now(tmp_path):
    """Ranks import an edited module afresh, whatever this process has loaded."""
    helper = tmp_path / "edited_helper.py"
    module = tmp_path / "edited_training.py"
    helper.write_text("VALUE = 'old'\n")
    module.write_text(
        "from air_magic import distributed\nimport edited_helper\n"
        "@distributed(num_accelerators=1)\ndef train(): return edited_helper.VALUE, 'before'\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setattr(sys, "dont_write_bytecode", True)  # an edit within the same second must count
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        import edited_training

        first = edited_training.train.distributed()
        helper.write_text("VALUE = 'new'\n")
        module.write_text(module.read_text().replace("before", "after"))
        second = edited_training.train.distributed()
    del sys.modules["edited_training"], sys.modules["edited_helper"]
    assert (first, second) == ([("old", "before")], [("new", "after")])


def test_a_script_needs_no_guard(tmp_path, runs_root):
    """A plain script without IPython runs once; its ranks get its arguments, output comes as lines with their rank."""
    script = tmp_path / "script.py"
    script.write_text(
        dedent("""
            import os, sys
            from air_magic import distributed

            print("top of the script")
            RATE = 0.5

            def main():
                @distributed(num_accelerators=2)
                def train(epochs):
                    print(f"epoch {epochs} of rank {os.environ['RANK']}")
                    return epochs * RATE, sys.argv[1:], __name__, "IPython" in sys.modules, sys.stdin.read()
                return train.distributed(4)

            print(main())
            print("IPython" in sys.modules, "torch" in sys.modules)
        """)
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, "--lr", "1"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines.count("top of the script") == 1
    assert sorted(line for line in lines if line.startswith("[rank")) == [
        "[rank 0] epoch 4 of rank 0",
        "[rank 1] epoch 4 of rank 1",
    ]
    value = (2.0, ["--lr", "1"], "__main__", False, "")
    assert lines[-2:] == [str([value, value]), "False False"]


def test_a_failing_script_ends_as_python_does(tmp_path, runs_root):
    """The rank's exception ends the script with a traceback of the user's lines, and exit code 1."""
    script = tmp_path / "script.py"
    script.write_text(
        "from air_magic import distributed\n"
        "@distributed(num_accelerators=2)\n"
        "def train():\n    raise ValueError('no data')\n"
        "train.distributed()\n"
        "print('not reached')\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert "not reached" not in done.stdout
    assert f'File "{script}", line 4, in train' in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: no data")


def test_a_run_is_a_future_while_it_runs(waiting, tmp_path, capfd):
    """done, wait, result and exception behave as those of `concurrent.futures.Future`."""
    submit, until_it_runs, go = waiting
    run = submit({"a": 1})
    assert run.logs(0) in ("", "started\n")
    until_it_runs()
    assert (run.done(), run.wait(0), run.status, run.world_size, run.name) == (False, False, "running", 1, "work")
    for ask in (run.result, run.exception):
        with pytest.raises(TimeoutError, match=r"work has not ended within 0 s; it goes on"):
            ask(timeout=0)
    assert run.outcomes == {}
    assert repr(run) == f"<Run {run.id} of work: running, 1 ranks>"
    assert RUNS[run.id] is run
    go()
    assert run.result(DEADLINE) == [({"a": 1}, "0")]
    assert (run.wait(), run.done(), run.exception(), run.status, run.cancel()) == (True, True, None, "succeeded", False)
    assert run.result() is run.result(timeout=0)
    assert {rank: (outcome.ending.value, outcome.failure) for rank, outcome in run.outcomes.items()} == {
        0: ("returned", None)
    }
    assert run.logs(0) == "started\n"
    for rank in (-1, 1):
        with pytest.raises(IndexError, match=f"rank {rank} of a run with ranks 0 to 0"):
            run.logs(rank)
    shot = run.snapshot()
    assert json.loads(json.dumps(shot)) == shot
    assert (shot["status"], shot["ranks"][0]["state"], shot["ranks"][0]["last_line"]) == (
        "succeeded",
        "returned",
        "started",
    )
    assert (Path(run.log_dir) / "rank-0.log").read_text() == "started\n"
    capfd.readouterr()
    run.show()
    shown = capfd.readouterr().out
    assert f"work ({run.id}): succeeded" in shown
    assert "rank 0: returned" in shown


def test_last_run_is_the_newest(waiting):
    """It is set as soon as the run exists, and stays after a failure."""

    @distributed(num_accelerators=1)
    def train(x):
        if x:
            raise LookupError(x)
        return x

    first = train.submit(0)
    assert train.last_run is first
    assert first.result(DEADLINE) == [0]
    with pytest.raises(LookupError, match="5"):
        train.distributed(5)
    assert train.last_run is not first
    assert (train.last_run.status, type(train.last_run.exception())) == ("failed", LookupError)
    assert train.last_run.outcomes[0].failure.summary == "LookupError: 5"


def test_cancel_stops_the_ranks(waiting):
    """The run ends as cancelled, every way of asking says so, and later cancels do nothing."""
    submit, until_it_runs, _ = waiting
    run = submit(1)
    until_it_runs()
    assert run.cancel()
    with pytest.raises(RunCancelled, match="work was cancelled after"):
        run.result(DEADLINE)
    assert isinstance(run.exception(), RunCancelled)
    assert run.exception().run is run
    assert (run.status, run.done(), run.cancel(), run.outcomes[0].stopped) == ("cancelled", True, False, True)


def test_leaving_the_block_by_an_exception_cancels(waiting):
    """As a context manager a run is cancelled by an exception only, and has ended when the block is left."""
    submit, until_it_runs, go = waiting

    def leave():
        with submit(1) as run:
            holder.append(run)
            until_it_runs()
            raise LookupError

    holder = []
    with pytest.raises(LookupError):
        leave()
    (run,) = holder
    assert (run.done(), run.status) == (True, "cancelled")
    with submit(2) as run:
        until_it_runs()
        go()
    assert run.result(DEADLINE) == [(2, "0")]


def test_a_timeout_ends_the_run():
    """It is a RunTimedOut, which is a TimeoutError, and says how long it was."""

    @distributed(num_accelerators=1, timeout=0.2)
    def forever():
        import time

        time.sleep(600)

    with pytest.raises(TimeoutError, match=r"was stopped after its timeout of 0\.2 s") as caught:
        forever.distributed()
    assert isinstance(caught.value, RunTimedOut)
    assert forever.last_run.status == "timed out"


def test_two_runs_at_once_do_not_disturb_each_other(waiting, tmp_path):
    """Each keeps its values, its log folder and its port."""
    submit, until_it_runs, go = waiting

    @distributed(num_accelerators=2)
    def other():
        return os.environ["MASTER_PORT"], os.environ["AIR_MAGIC_RUN_ID"]

    held = submit("held")
    until_it_runs()
    (port, ident), second = other.distributed()
    assert second == (port, ident) == (port, other.last_run.id)
    assert not held.done()
    go()
    assert held.result(DEADLINE) == [("held", "0")]
    assert held.log_dir != other.last_run.log_dir


def test_a_thread_may_call(capfd):
    """Blocking calls from several threads at once give each its own values."""

    @distributed(num_accelerators=1)
    def square(x):
        return x * x, threading.current_thread() is threading.main_thread()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(square.distributed, range(3)))
    assert found == [[(0, True)], [(1, True)], [(4, True)]]


def test_a_rank_cannot_launch():
    """The refusal says what to call instead; the plain call works in a rank."""
    code = """
        @distributed(num_accelerators=1)
        def inner(): return "inner"

        @distributed(num_accelerators=1)
        def outer(nested): return inner.distributed() if nested else inner()
    """
    outer = cells(code)["outer"]
    assert outer.distributed(False) == ["inner"]
    with pytest.raises(RequestError, match=r"a rank cannot launch ranks.*without \.distributed"):
        outer.distributed(True)


def test_ranks_have_what_the_notebook_has_now(tmp_path):
    """Folder, path, variables and warnings filters as edited a moment ago; env= on top; threads shared out."""
    code = """
        import os, sys, warnings

        @distributed(num_accelerators=2, env={"ONE": "a b=c", "TWO": ""})
        def look():
            with warnings.catch_warnings(record=True) as caught:
                warnings.warn("loud", UserWarning)
                warnings.warn("quiet", ResourceWarning)
            names = ("ONE", "TWO", "EDITED", "REMOVED", "WORLD_SIZE", "OMP_NUM_THREADS")
            return (
                [os.environ.get(name) for name in names], os.getcwd(), "/added/by/hand" in sys.path,
                [str(warning.message) for warning in caught], os.environ["PATH"].split(":").count(here),
            )
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("ONE", "of the notebook")
        patch.setenv("EDITED", "ü")
        patch.delenv("REMOVED", raising=False)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.chdir(tmp_path)
        patch.syspath_prepend("/added/by/hand")
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("always", ResourceWarning)
        found = cells(code, here=str(Path(sys.executable).parent))["look"].distributed()
    threads = str(max(1, int(usable_cores() // 2)))
    expected = (["a b=c", "", "ü", None, "2", threads], str(tmp_path), True, ["quiet"], 1)
    assert found == [expected, expected]


def test_a_users_omp_num_threads_stays():
    """What the user set, in os.environ or by env=, is not overruled."""
    look = cells("import os\ndef look(): return os.environ['OMP_NUM_THREADS']")["look"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert distributed(num_accelerators=2)(look).distributed() == ["7", "7"]
        assert distributed(num_accelerators=1, env={"OMP_NUM_THREADS": "5"})(look).distributed() == ["5"]


def test_a_name_is_shown_and_none_is_the_functions(capfd):
    """The run is called what `name` says, in its last line too."""
    named = distributed(num_accelerators=1, name="first try")(cells("def train(): pass")["train"])
    assert named.distributed() == [None]
    assert named.last_run.name == "first try"
    assert "first try: 1 rank returned after" in capfd.readouterr().out


@pytest.mark.slow
def test_a_notebook_function_takes_everything_it_needs_along(kernel):
    """Globals, closures, defaults, classes with their bases, annotations, methods, modules; local modules as on disk."""
    kernel.run("%%writefile beside.py\nimport os\nWORD = 'first'\ndef tell(): return WORD")
    kernel.run("import math as m, xml.dom.minidom\nimport numpy as np, pandas as pd, torch\nimport beside")
    kernel.run(
        """
        from dataclasses import dataclass, field
        class Base(torch.nn.Module):
            scale = torch.tensor(2.0)
        @dataclass
        class Settings:
            rate: float = 0.5
            names: list = field(default_factory=list)
        class Trainer:
            def __init__(self): self.seen = []
            def __call__(self, x): self.seen.append(x); return self.seen
            def fit(self, x): return self(x) + [len(self.seen)]
        """
    )
    kernel.run(
        """
        class Net(Base):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1, bias=False)
                torch.nn.init.constant_(self.layer.weight, 3.0)
            def forward(self, x): return self.layer(x) * self.scale
        cfg = {"depth": [1, {"deep": 2}]}
        net, trainer = Net(), Trainer()
        def inner(x): return cfg["depth"][1]["deep"] * x
        def outer(x): return inner(x) + m.floor(2.5)
        """
    )
    kernel.run(
        """
        from air_magic import distributed
        def make(offset):
            @distributed(num_accelerators=2)
            def train(kind: type[Net], settings: Settings = Settings(0.25), *, frame=pd.DataFrame({"a": range(100_000)}),
                      device=torch.device("cpu")) -> "Net":
                return {
                    "functions": outer(10) + offset,
                    "class": (kind is Net, type(net) is Net, issubclass(kind, Base), float(kind()(torch.ones(1, 2)))),
                    "defaults": (settings == Settings(0.25), int(frame["a"].sum()), str(device)),
                    "objects": (trainer(1), trainer.fit(2)),
                    "modules": (np.arange(3).sum().item(), xml.dom.minidom.parseString("<a/>").nodeName, beside.tell()),
                }
            return train
        train = make(100)
        one, two = train.distributed(Net)
        """
    )
    expected = {
        "functions": 122,
        "class": (True, True, True, 12.0),
        "defaults": (True, 4999950000, "cpu"),
        "objects": ([1, 2], [1, 2, 2]),
        "modules": (3, "#document", "first"),
    }
    assert eval(kernel.run("one == two, one").result) == (True, expected)
    kernel.run("%%writefile beside.py\nimport os\nWORD = 'second'\ndef tell(): return WORD.upper()")
    kernel.run("inner = lambda x: 0\ncfg['depth'] = None")
    after = expected | {"functions": 102, "modules": (3, "#document", "SECOND")}
    assert eval(kernel.run("train.distributed(Net)[0]").result) == after


def test_what_cannot_be_sent_is_named_before_anything_starts(kernel_of_module):
    """The error is one line with the way to the culprit; big data is a note; a failing load is one error."""
    kernel = kernel_of_module
    kernel.run(
        """
        import threading
        from air_magic import distributed
        cfg = {"lock": threading.Lock()}
        def helper(): return cfg
        @distributed
        def train(x=None): return helper()
        """
    )
    texts = [kernel.run(f"train.{call}", check=False) for call in ("distributed()", "submit(open('/dev/null'))")]
    text = "cannot send train: `train → helper → cfg['lock']` is a `threading.Lock`; create it inside the function."
    assert [(reply.ename, reply.evalue, reply.traceback, reply.text) for reply in texts] == [
        ("CaptureError", text, f"CaptureError: {text}", "")
    ] * 2
    kernel.run(
        """
        big = bytes(80_000_000)
        class Angry:
            def __reduce__(self): return eval, ("1 / 0",)
        @distributed
        def count(x=None): return len(big)
        """
    )
    assert (
        "`big` (a bytes, 80 MB) is sent to every rank; create or load it inside count() instead"
        in kernel.run("count.distributed()").text
    )
    reply = kernel.run("del big; big = b''; count.distributed(Angry())", check=False)
    assert reply.ename == "RankFailed"
    text = "could not load what was sent to it: ZeroDivisionError: division by zero"
    assert re.match(rf"rank [01] of 2 {text}\n", reply.evalue)
    assert reply.traceback.count("ZeroDivisionError") == 1


@pytest.mark.slow
def test_values_of_every_kind_come_back(kernel):
    """Tensors without a copy, shared and sparse ones, arrays, frames, objects of notebook classes; stand-ins for the rest."""
    kernel.run(
        """
        import threading, numpy as np, pandas as pd, torch
        from dataclasses import dataclass
        from air_magic import distributed

        class Net(torch.nn.Module):
            calls = 0
            def __init__(self, width):
                super().__init__()
                self.layer = torch.nn.Linear(width, 1)
            def forward(self, x): return self.layer(x)

        class Tagged(torch.Tensor): pass

        @dataclass
        class Metrics:
            loss: float
            history: list

        before = {cls: dict(vars(cls)) for cls in (Net, Tagged, Metrics)}

        @distributed(num_accelerators=2)
        def train():
            import os
            rank = int(os.environ["RANK"])
            Net.calls = 99
            base = torch.arange(6.0)
            value = {
                "big": torch.full((64 << 20,), float(rank)), "shared": (base, base[2:], base.view(2, 3)),
                "tagged": torch.ones(2).as_subclass(Tagged), "sparse": torch.eye(3).to_sparse(),
                "csr": torch.eye(3).to_sparse_csr(), "array": np.arange(5) + rank,
                "frame": pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}), "net": Net(4),
                "metrics": Metrics(0.5, [Metrics(1.0, [])]), "class": Net,
            }
            if rank == 1:
                value |= {"lock": threading.Lock(), "batches": [(i for i in range(3))]}
            return value
        """
    )
    text = kernel.run("values = train.distributed(); one, two = values").text
    assert (
        "rank 1: value['lock'] is a _thread.lock and cannot be pickled; a stand-in with its text was returned" in text
    )
    assert (
        "rank 1: value['batches'][0] is a generator and cannot be pickled; a stand-in with its text was returned"
        in text
    )
    assert text.count("stand-in") == 2
    kernel.run(
        """
        def maps(tensor):
            at = tensor.data_ptr()
            for line in open("/proc/self/maps"):
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if start <= at < end:
                    return line.split(maxsplit=5)[5]
        big = two["big"]
        mapped = "air_magic-" in maps(big)
        big += 1
        one["shared"][0][2] = 50.0
        """
    )
    checks = {
        "mapped, big.shape[0], float(big[-1]), float(one['big'][0])": (True, 64 << 20, 2.0, 0.0),
        "[t.tolist() for t in one['shared']]": [
            [0.0, 1.0, 50.0, 3.0, 4.0, 5.0],
            [50.0, 3.0, 4.0, 5.0],
            [[0.0, 1.0, 50.0], [3.0, 4.0, 5.0]],
        ],
        "type(one['tagged']) is Tagged, one['tagged'].tolist()": (True, [1.0, 1.0]),
        "one['sparse'].is_sparse, one['csr'].layout is torch.sparse_csr": (True, True),
        "torch.equal(one['sparse'].to_dense(), torch.eye(3)), torch.equal(one['csr'].to_dense(), torch.eye(3))": (
            True,
            True,
        ),
        "two['array'].tolist(), two['array'].flags.writeable": ([1, 2, 3, 4, 5], True),
        "one['frame'].to_dict('list')": {"a": [1, 2], "b": ["x", "y"]},
        "isinstance(one['net'], Net), one['net'](torch.ones(1, 4)).shape == (1, 1), one['class'] is Net": (
            True,
            True,
            True,
        ),
        "one['metrics'] == Metrics(0.5, [Metrics(1.0, [])]), isinstance(two['metrics'], Metrics)": (True, True),
        "before == {cls: dict(vars(cls)) for cls in (Net, Tagged, Metrics)}, Net.calls": (True, 0),
        "'could not leave' in repr(two['lock']), 'generator' in repr(two['batches'])": (True, True),
    }
    found = kernel.run(f"[repr(eval(text)) for text in {list(checks)!r}]").result
    assert eval(found) == [repr(value) for value in checks.values()]


@pytest.mark.slow
def test_data_loader_workers_know_the_notebooks_classes(kernel):
    """Workers started by fork and by spawn load datasets of the notebook's and of the function's own class."""
    kernel.run(
        """
        import torch
        from torch.utils.data import DataLoader, Dataset
        from air_magic import distributed
        SCALE = 3
        def scaled(x): return SCALE * x
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return torch.tensor(scaled(index * index))

        @distributed(num_accelerators=1)
        def load():
            class Local(Squares):
                def __getitem__(self, index): return super().__getitem__(index) + 1
            found = {}
            for method in ("fork", "spawn"):
                for kind in (Squares, Local):
                    loader = DataLoader(kind(), batch_size=4, num_workers=2, multiprocessing_context=method,
                                        collate_fn=lambda items: torch.stack(items))
                    found[method, kind.__name__] = int(sum(batch.sum() for batch in loader))
            return found
        """
    )
    expected = {("fork", "Squares"): 420, ("fork", "Local"): 428, ("spawn", "Squares"): 420, ("spawn", "Local"): 428}
    assert eval(kernel.run("load.distributed()[0]").result) == expected


@pytest.mark.slow
def test_an_mlp_trains_from_three_cells(kernel):
    """Helpers and a module in one cell, a decorated training function in the next, a call with keywords in the third."""
    kernel.run("%load_ext air_magic\nfrom air_magic import distributed")
    kernel.run(
        """
        import os
        import torch
        import torch.distributed as dist
        import torch.nn as nn

        def setup():
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
            if device.type != "cpu":
                device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
                torch.accelerator.set_device_index(device.index)
            dist.init_process_group(dist.get_default_backend_for_device(device))
            return device

        def cleanup():
            dist.destroy_process_group()

        class SimpleMLP(nn.Module):
            def __init__(self, input_dim=10, hidden_dim=64, output_dim=1):
                super().__init__()
                self.net = nn.Sequential(
                    nn.Linear(input_dim, hidden_dim), nn.ReLU(), nn.Dropout(0.2),
                    nn.Linear(hidden_dim, hidden_dim), nn.ReLU(), nn.Dropout(0.2),
                    nn.Linear(hidden_dim, output_dim),
                )
            def forward(self, x):
                return self.net(x)
        """
    )
    kernel.run(
        """
        @distributed()
        def run_train(num_epochs: int, batch_size: int) -> None:
            import torch.optim as optim
            from torch.nn.parallel import DistributedDataParallel as DDP
            from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

            device = setup()
            model = DDP(SimpleMLP().to(device), device_ids=None if device.type == "cpu" else [device])
            dataset = TensorDataset(torch.randn(5000, 10), torch.randn(5000, 1))
            sampler = DistributedSampler(dataset)
            dataloader = DataLoader(dataset, sampler=sampler, batch_size=batch_size)
            optimizer = optim.Adam(model.parameters(), lr=0.001)
            loss_fn = nn.MSELoss()
            for epoch in range(num_epochs):
                sampler.set_epoch(epoch)
                model.train()
                total_loss = 0.0
                for step, (xb, yb) in enumerate(dataloader):
                    xb, yb = xb.to(device), yb.to(device)
                    optimizer.zero_grad()
                    loss = loss_fn(model(xb), yb)
                    loss.backward()
                    optimizer.step()
                    total_loss += loss.item() * xb.size(0)
                print(f"Total loss for epoch {epoch}: {total_loss}")
            cleanup()
        """
    )
    reply = kernel.run("run_train.distributed(num_epochs=3, batch_size=64)")
    ranks = int(kernel.run("run_train.last_run.world_size").result)
    for rank in range(ranks):
        for epoch in range(3):
            assert f"[rank {rank}] Total loss for epoch {epoch}: " in reply.text
    assert reply.result == repr([None] * ranks)
    assert f"run_train: {ranks} ranks returned after" in reply.text
    assert "no rank created a process group" not in reply.text
