"""A payload dumped by one process gives the same call in another."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from air_magic.errors import CaptureError
from air_magic.payload import Payload, load

ROOT = Path(__file__).parents[1]

# Runs cells in its __main__ as a notebook would, then dumps the payload that an expression makes.
KERNEL = """
import json, linecache, sys
from pathlib import Path
from air_magic.errors import CaptureError
from air_magic.payload import Payload
cells, expression, options = json.loads(sys.argv[1])
for number, text in enumerate(cells, 1):
    filename = f"<ipython-input-{number}-abc>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec", dont_inherit=True), globals())
try:
    payload = eval(expression)
    payload.dump(Path("payload.pkl"), **options)
    report = {"name": payload.name, "classes": [c.__qualname__ for c in payload.classes], "notes": payload.notes}
except CaptureError as error:
    report = {"error": str(error)}
print(json.dumps(report))
"""

# Loads the payload and calls it; the last expression may look at ``loaded``, ``value`` and ``main``.
RANK = """
import json, sys
from pathlib import Path
from air_magic import payload
loaded = payload.load(Path("payload.pkl"))
value = loaded.call()
import __main__ as main
print(json.dumps(eval(sys.argv[1])))
"""


class Processes:
    """A notebook's process and a rank's, both in one folder."""

    def __init__(self, folder):
        self.folder = folder

    def _run(self, script, argument):
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(self.folder)])}
        environ["PYTHONDONTWRITEBYTECODE"] = "1"  # an edit within the same second must count
        done = subprocess.run(
            [sys.executable, "-c", script, argument], cwd=self.folder, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def kernel(self, *cells, payload="Payload.of_function(train, (), {})", **options):
        return self._run(KERNEL, json.dumps([[dedent(cell).lstrip("\n") for cell in cells], payload, options]))

    def rank(self, look="value"):
        return self._run(RANK, look)


@pytest.fixture
def processes(tmp_path):
    return Processes(tmp_path)


def test_function_takes_its_globals_along(processes):
    """Values, functions that it calls, and modules imported only in the notebook arrive with the function."""
    report = processes.kernel(
        "import math as m, os.path, xml.dom.minidom",
        "scale = {'by': 3}",
        "def helper(x):\n    return scale['by'] * x",
        """
        def train(x, *, y=1):
            inner = lambda: helper(x) + y
            return [inner(), m.floor(2.5), os.path.basename('a/b'), xml.dom.minidom.parseString('<a/>').nodeName]
        """,
        payload="Payload.of_function(train, (2,), {'y': 10})",
    )
    assert report == {"name": "train", "classes": [], "notes": []}
    assert processes.rank() == [16, 2, "b", "#document"]


def test_closures_and_defaults_arrive(processes):
    """A closure, a default DataFrame, a default dataclass and keyword defaults are sent by value."""
    processes.kernel(
        """
        import pandas as pd
        from dataclasses import dataclass

        @dataclass
        class Settings:
            rate: float = 0.5

        def make(factor):
            def train(frame=pd.DataFrame({'a': range(100_000)}), settings=Settings(0.25), *, extra=[1]):
                return [int(frame['a'].sum()), settings.rate, type(settings) is Settings, extra, factor]
            return train
        """,
        payload="Payload.of_function(make(7), (), {})",
    )
    assert processes.rank() == [4999950000, 0.25, True, [1], 7]


def test_torch_values_arrive(processes):
    """A torch.device as default, a module class of the notebook and its parameters are sent by value."""
    processes.kernel(
        """
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3))

            def forward(self, x):
                return super().__call__ is not None and x @ self.weight

        model = Model()

        def train(device=torch.device('cpu')):
            return [model(torch.ones(3)).item(), str(device)]
        """
    )
    assert processes.rank() == [3.0, "cpu"]


def test_classes_have_twins_in_the_same_order(processes):
    """Classes of other cells, their bases and enums are noted, and the rank's twins come in that order."""
    report = processes.kernel(
        "import abc, enum\nclass Base(abc.ABC):\n    kind = 'base'",
        "class Colour(enum.Enum):\n    RED = 1",
        "class Model(Base):\n    class Inner:\n        pass\n    colour = Colour.RED\n    def run(self): return super().kind",
        "def train():\n    return [Model().run(), issubclass(Model, Base), Model.colour is Colour.RED]",
    )
    assert report["classes"] == ["Model", "Base", "Model.Inner", "Colour"]
    look = "[value, [c.__qualname__ for c in loaded.classes], loaded.classes[0] is main.Model]"
    assert processes.rank(look) == [[True and "base", True, True], report["classes"], True]


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_annotations_name_notebook_classes(processes, future):
    """`typing.get_type_hints` works in the rank, also where annotations are text."""
    processes.kernel(
        "import typing, dataclasses\nfrom typing import Optional\nclass Batch: pass",
        future + "@dataclasses.dataclass\nclass Loop:\n    batch: Optional[Batch] = None\n    other: 'Loop' = None",
        future
        + dedent("""
            def train(batch: Batch = None) -> Optional[Loop]:
                kind = typing.get_type_hints(train)
                return [kind['batch'].__name__, str(kind['return']), sorted(typing.get_type_hints(Loop))]
            """),
    )
    assert processes.rank() == ["Batch", "typing.Optional[__main__.Loop]", ["batch", "other"]]


CALLS = {
    "method": ("Trainer(2).fit, (3,), {}", "Trainer.fit", 6),
    "class method": ("Trainer.make, (4,), {}", "Trainer.make", 4),
    "callable object": ("Trainer(5), (3,), {}", "Trainer", 15),
    "partial": ("partial(partial(plain, 1), 2), (), {'c': 3}", "plain", [1, 2, 3]),
    "lambda": ("(lambda c: c(7).n), (Trainer,), {}", "<lambda>", 7),
    "builtin": ("sorted, ([2, 1],), {'reverse': True}", "sorted", [2, 1]),
    "builtin method": ("'a,b'.split, (',',), {}", "str.split", ["a", "b"]),
    "library function": ("json.dumps, ([1],), {}", "dumps", "[1]"),
    "wrapped": ("cached, (2,), {}", "cached", 3),
    "dispatched": ("dispatched, (2,), {}", "dispatched", "int"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_every_callable_can_be_sent(processes, kind):
    """Methods, callable objects, partials, lambdas, builtins and wrapped functions run as they do here."""
    expression, name, value = CALLS[kind]
    report = processes.kernel(
        """
        import functools, json
        from functools import partial

        class Trainer:
            def __init__(self, n):
                self.n = n
            @functools.cached_property
            def twice(self):
                return 2 * self.n
            def fit(self, x):
                return self.twice * x // 2
            @classmethod
            def make(cls, n):
                return cls(n).n
            __call__ = fit

        def plain(a, b, c):
            return [a, b, c]

        @functools.lru_cache(maxsize=8)
        def cached(n):
            return n + cached(n - 1) if n else 0

        @functools.singledispatch
        def dispatched(x):
            return 'object'

        @dispatched.register
        def _(x: int):
            return 'int'
        """,
        payload=f"Payload.of_function({expression})",
    )
    assert report["name"] == name
    assert processes.rank() == value


def test_class_is_a_callable_and_generators_generate(processes):
    """A class that is called gives an object, a generator function a generator."""
    processes.kernel("class Model:\n    n = 1\n", payload="Payload.of_function(Model, (), {})")
    assert processes.rank("[value.n, type(value) is loaded.classes[0]]") == [1, True]
    processes.kernel("def train():\n    yield from (1, 2)\n")
    assert processes.rank("list(value)") == [1, 2]


def test_coroutine_function_is_refused():
    """Nothing would run, so the call is refused before a rank starts."""

    async def train():
        pass

    class Trainer:
        async def __call__(self):
            pass

    for function, name in ((train, "train"), (Trainer(), "Trainer")):
        with pytest.raises(CaptureError) as caught:
            Payload.of_function(function, (), {})
        assert str(caught.value) == f"{name} is a coroutine function; wrap it in asyncio.run"


WRAPPER = """
class Distributed:
    def __init__(self, function):
        self.__wrapped__ = function
    def __call__(self, *args):
        return self.__wrapped__(*args)
    def __reduce__(self):
        return Distributed, (self.__wrapped__,)
"""


def test_decorated_function_calls_itself_by_its_name(processes):
    """The function's own name leads to its wrapper, which leads back to the function."""
    processes.kernel(
        WRAPPER + "@Distributed\ndef train(n):\n    return n + train(n - 1) if n else 0",
        payload="Payload.of_function(train.__wrapped__, (3,), {})",
    )
    assert processes.rank("[value, main.train.__qualname__]") == [6, "train"]


def test_local_module_is_read_from_disk_by_the_rank(processes):
    """Functions of modules go by name, decorated ones too, so that the rank runs what was edited last."""
    (processes.folder / "wrapper.py").write_text(WRAPPER)
    source = (
        "from wrapper import Distributed\nRATE = 1\n@Distributed\ndef train():\n    return [RATE, train is not None]\n"
    )
    (processes.folder / "local.py").write_text(source + "def plain():\n    return RATE\n")
    processes.kernel("import local", payload="Payload.of_function(local.train.__wrapped__, (), {})")
    (processes.folder / "local.py").write_text(source.replace("RATE = 1", "RATE = 2"))
    assert processes.rank() == [2, True]
    (processes.folder / "local.py").write_text(source.replace("@Distributed\n", ""))
    assert processes.rank() == [1, True]

    (processes.folder / "local.py").write_text(source + "def plain():\n    return RATE\n")
    processes.kernel("from local import plain\ndef train():\n    return plain()")
    (processes.folder / "local.py").write_text("def plain():\n    return 'edited'")
    assert processes.rank() == "edited"


def test_script_is_not_run_again(processes):
    """The functions of a script's __main__ are sent by value."""
    script = processes.folder / "script.py"
    script.write_text(
        dedent("""
            import sys
            from pathlib import Path
            from air_magic.payload import Payload

            assert not Path("payload.pkl").exists(), "run again"

            def train():
                return [__name__, Path(__file__).name, sys.modules["__main__"] is not None]

            Payload.of_function(train, (), {}).dump(Path("payload.pkl"))
            """)
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "script.py"], cwd=processes.folder, env=environ, check=True)
    look = "value + [hasattr(main, '__file__'), main.__spec__, main.train is loaded._call.function]"
    assert processes.rank(look) == ["__main__", "script.py", True, False, None, True]


def test_sources_of_cells_arrive(processes):
    """Tracebacks and `inspect.getsource` show notebook code in the rank."""
    processes.kernel(
        "def helper(x):\n    return 1 / x\n",
        """
        import inspect, linecache, traceback

        def train():
            linecache.checkcache()
            try:
                helper(0)
            except ZeroDivisionError as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
            return [frame.filename, frame.lineno, frame.line, inspect.getsource(helper)]
        """,
    )
    assert processes.rank() == ["<ipython-input-1-abc>", 2, "return 1 / x", "def helper(x):\n    return 1 / x\n"]


def test_pickles_by_name_find_main(processes):
    """What was sent by value stands in the rank's __main__, where plain pickle looks for it."""
    processes.kernel(
        "import pickle\nclass Batch: pass\ndef collate(): pass",
        "def train():\n    return [pickle.loads(pickle.dumps(x)) is x for x in (Batch, collate)]",
    )
    assert processes.rank() == [True, True]


def test_shell_of_the_notebook_is_replaced_by_the_ranks(processes):
    """Functions typed into a real IPython shell work, with its streams and its get_ipython among their globals."""
    script = """
        import io, sys
        from pathlib import Path
        from IPython.core.interactiveshell import InteractiveShell
        from air_magic.payload import Payload

        shell = InteractiveShell.instance(user_module=sys.modules["__main__"])
        shell.run_cell("from __future__ import annotations\\nimport sys, inspect\\nclass Model: pass").raise_error()
        shell.run_cell('''
        def train(model: Model, out=sys.stderr):
            return [get_ipython().getoutput('echo hi'), out is sys.stderr, inspect.getsource(train).splitlines()[0], type(model) is Model]
        ''').raise_error()
        payload = Payload.of_function(shell.user_ns["train"], (shell.user_ns["Model"](),), {})
        payload.dump(Path("payload.pkl"))
        """
    environ = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(processes.folder / "ipython")}
    subprocess.run([sys.executable, "-c", dedent(script)], cwd=processes.folder, env=environ, check=True)
    assert processes.rank() == [["hi"], True, "def train(model: Model, out=sys.stderr):", True]


CELL = """
import pickle, traceback
class Own: pass
try:
    1 / len(())
except ZeroDivisionError as error:
    line = traceback.extract_tb(error.__traceback__)[-1].line
[__name__, n, type(net) is Net, pickle.loads(pickle.dumps(Own)) is Own, line, sorted(globals())]
"""


def test_cell_runs_in_a_fresh_main(processes):
    """The cell sees the names given to it and nothing else; its value is its last expression."""
    report = processes.kernel(
        "from air_magic.cell import Cell\nclass Net:\n    pass\nunused = 1",
        f"cell = Cell({CELL!r}, '<cell-12>', '%%distributed', 12, False)",
        payload="Payload.of_cell(cell, {'n': 3, 'net': Net(), 'Net': Net})",
    )
    assert report == {"name": "cell [12]", "classes": ["Net"], "notes": []}
    names = ["Net", "Own", "__builtins__", "__doc__", "__loader__", "__name__", "__package__", "__spec__"]
    assert processes.rank() == [
        *("__main__", 3, True, True, "1 / len(())"),
        [*names, "line", "n", "net", "pickle", "traceback"],
    ]


def test_cell_has_a_shell_and_display_where_it_uses_them(processes):
    """IPython syntax works in a rank; a cell without a value gives None."""
    source = "found = get_ipython().getoutput('echo hi')\ndisplay(1)\nfound = list(found);"
    report = processes.kernel(
        f"from air_magic.cell import Cell\ncell = Cell({source!r}, '<cell>', '', None, True)",
        payload="Payload.of_cell(cell, {})",
    )
    assert report["name"] == "cell"
    assert processes.rank("[value, main.found]") == [None, ["hi"]]


def test_big_payload_is_noted(processes):
    """Above the threshold a note names the biggest things, wherever they hang."""
    report = processes.kernel(
        "import numpy as np\nframe = np.zeros(300_000)\nsmall = np.zeros(2)",
        "def helper():\n    return frame, small\ndef train(data):\n    return helper()",
        payload="Payload.of_function(train, (np.zeros(250_000),), {})",
        noted=1_000_000,
    )
    assert report["notes"] == [
        "`helper → frame` (an ndarray, 2 MB) and `data` (an ndarray, 2 MB) are sent to every rank; "
        "create or load them inside train() instead"
    ]


def test_too_big_payload_is_refused_and_leaves_no_file(processes):
    """Beyond the limit nothing is written, and the error names what is big."""
    report = processes.kernel(
        "import numpy as np\nframe = np.zeros(300_000)\ndef train():\n    return frame", limit=1_000_000
    )
    assert report == {
        "error": "cannot send train: it is larger than 1 MB: `frame` (an ndarray, 2 MB) is sent to every rank; "
        "create or load it inside train() instead."
    }
    assert list(processes.folder.iterdir()) == []


def test_unsendable_name_is_explained(processes):
    """What pickle refuses becomes a CaptureError that says where it hangs."""
    report = processes.kernel("import threading\ncfg = {'lock': threading.Lock()}\ndef train():\n    return cfg")
    assert report == {
        "error": "cannot send train: `train → cfg['lock']` is a `threading.Lock`; create it inside the function."
    }
    assert list(processes.folder.iterdir()) == []


def test_failing_load_raises_what_happened(tmp_path):
    """A module that the rank does not have is a ModuleNotFoundError there."""
    (tmp_path / "gone.py").write_text("class Model: pass")
    sys.path.insert(0, str(tmp_path))
    try:
        import gone

        Payload.of_function(print, (gone.Model,), {}).dump(tmp_path / "payload.pkl")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["gone"]
    (tmp_path / "gone.py").unlink()
    main = sys.modules["__main__"]
    try:
        with pytest.raises(ModuleNotFoundError, match="gone"):
            load(tmp_path / "payload.pkl")
    finally:
        sys.modules["__main__"] = main
