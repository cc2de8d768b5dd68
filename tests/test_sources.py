"""Names of a notebook become source text that makes them again."""

import linecache
from textwrap import dedent

import pytest

from air_magic.errors import RequestError
from air_magic.sources import sources


@pytest.fixture
def notebook():
    """Runs cells as a kernel does: their text is known to linecache only."""
    namespace = {"__name__": "__main__"}
    filenames = []

    def run(*cells):
        for cell in cells:
            text = dedent(cell).lstrip("\n")
            filename = f"/tmp/ipykernel_1/{len(filenames)}.py"
            filenames.append(filename)
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            exec(compile(text, filename, "exec"), namespace)
        return namespace

    yield run
    for filename in filenames:
        linecache.cache.pop(filename, None)


def again(namespace, *names):
    """The names as the text makes them in a namespace of its own."""
    fresh = {"__name__": "__main__"}
    exec("\n".join(sources(names, namespace).values()), fresh)
    return fresh


def test_plain_values_are_written_as_they_are(notebook):
    """Numbers, text and containers of them; infinity and not-a-number too."""
    namespace = notebook(
        "a = 1; b = -2.5; c = 'x\\ny'; d = {'k': [1, (2, None)], 3: {True}}; e = b'\\0'; f = float('-inf')"
    )
    fresh = again(namespace, *"abcdef")
    assert {name: fresh[name] for name in "abcdef"} == {name: namespace[name] for name in "abcdef"}
    nan = again(notebook("g = float('nan')"), "g")["g"]
    assert nan != nan


def test_what_can_be_imported_is_imported(notebook):
    """Modules under their own or another name, and what a module holds."""
    namespace = notebook(
        "import math as m, os.path\nfrom collections import OrderedDict as Ordered\nfrom json import dumps"
    )
    assert sources(["m", "os", "Ordered", "dumps"], namespace) == {
        "m": "import math as m",
        "os": "import os",
        "Ordered": "from collections import OrderedDict as Ordered",
        "dumps": "from json import dumps",
    }


def test_a_function_brings_what_its_code_needs(notebook):
    """Names come before what needs them, once each; functions may call each other."""
    namespace = notebook(
        "import math\nSCALE = 3\nclass Base:\n    factor = SCALE",
        """
        def mark(function):
            function.marked = True
            return function

        @mark
        class Child(Base):
            def area(self, r): return self.factor * math.floor(r)
        """,
        """
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def train(r, kind=Child): return kind().area(r), even(4), kind.marked
        """,
    )
    texts = sources(["train"], namespace)
    assert list(texts) == ["mark", "SCALE", "Base", "math", "Child", "odd", "even", "train"]
    assert again(namespace, "train")["train"](2.5) == (6, True, True)


def test_another_name_for_a_definition_is_kept(notebook):
    """A function or class under a second name, and a lambda."""
    namespace = notebook("def f(): return 'f'\nclass C: pass\ng = f\nD = C\nh = lambda x: x + 1")
    fresh = again(namespace, "g", "D", "h")
    assert (fresh["g"](), fresh["D"].__name__, fresh["h"](1)) == ("f", "C", 2)


def test_the_latest_definition_of_a_class_with_methods_is_meant(notebook):
    """Its methods say which cell it is from."""
    namespace = notebook("class C:\n    def f(self): return 1", "class C:\n    def f(self): return 2")
    assert again(namespace, "C")["C"]().f() == 2


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["import threading; x = threading.Lock()"],
            "--export cannot write the value of x (a lock); make it in the cell",
        ),
        (
            ["def make(n):\n    def f(): return n\n    return f\nx = make(1)"],
            "--export cannot write x: it is a function made by another; make it in the cell",
        ),
        (["exec('def x(): pass')"], "--export: the source of x is not known; define it in the cell"),
        (["x = type('X', (), {})"], "--export: the source of x is not known; define it in the cell"),
        (["x = (lambda: 1, lambda: 2)[0]"], "--export: the source of x is not known; define it in the cell"),
        (["class x: a = 1", "class x: a = 2"], "--export: the source of x is not known; define it in the cell"),
    ],
)
def test_what_no_text_makes_is_refused(notebook, cells, message):
    """The error names the name and says what to do; a guess between two definitions is not made."""
    namespace = notebook(*cells)
    with pytest.raises(RequestError) as caught:
        sources(["x"], namespace)
    assert str(caught.value) == message
