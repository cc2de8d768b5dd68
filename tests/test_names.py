"""Which names a cell needs from outside."""

import ast
import builtins
import json
import pathlib
import sys
import types
import xml.dom.minicompat
import xml.etree.ElementTree

import pytest

from air_magic.names import Unbound, import_text, is_open, star_names, unbound


def needs(source):
    return [(each.name, each.lineno) for each in unbound(ast.parse(source))]


NEEDS_NOTHING = {
    "empty": "",
    "comment": "# only this",
    "builtins": "print(len([1]), Ellipsis, NotImplemented, __debug__, __import__, exit, input, open, help)",
    "module names": "print(__name__, __file__, __doc__, __builtins__, __spec__, __loader__, __package__, __annotations__)",
    "import": "import torch\ntorch.nn",
    "import as": "import numpy as np\nnp.zeros",
    "import dotted": "import os.path\nos.path.join",
    "from import as": "from os import path as p\np",
    "star target": "a, (b, *c) = 1, (2, 3)\na, b, c",
    "for target": "for i, j in []:\n    i + j\ni",
    "with target": "with open('x') as f:\n    f.read()\nf",
    "walrus": "if (n := 10) > 5:\n    n",
    "walrus in comprehension": "any((last := x) for x in [1])\nlast",
    "comprehensions": "[x for x in range(3) if x]\n{k: v for k, v in {}.items()}\n{y for y in ()}\nlist(z for z in ())",
    "nested comprehension": "[[y for y in x] for x in [[1]] for _ in x]",
    "lambda": "f = lambda a, *b, c=1, **d: (a, b, c, d)",
    "function arguments": "def f(a, /, b, *c, d, **e):\n    return a, b, c, d, e",
    "closure": "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n        return n\n    return g",
    "defined later": "def f():\n    return later()\ndef later():\n    return 1",
    "class before use in a method": "def f():\n    return A()\nclass A:\n    pass",
    "recursion": "def f(n):\n    return f(n - 1)",
    "global in function": "def setup():\n    global device\n    device = 'cpu'\nsetup()\nprint(device)",
    "global import in function": "def setup():\n    global np\n    import numpy as np\nsetup()\nnp",
    "global def in function": "def setup():\n    global f\n    def f(): ...\nsetup()\nf()",
    "class body": "class A:\n    x = 1\n    y = x + 1\n    def f(self):\n        return __class__, super().f()\n    z = __qualname__, __module__",
    "class attribute by self": "class A:\n    size = 1\n    def f(self):\n        return self.size",
    "except as": "try:\n    pass\nexcept ValueError as error:\n    print(error)",
    "conditional": "import sys\nif sys.argv:\n    x = 1\nelse:\n    y = 2\nx",
    "try import": "try:\n    import tomllib\nexcept ImportError:\n    tomllib = None\ntomllib",
    "read in a later iteration": "for i in range(3):\n    if i:\n        print(last)\n    last = i",
    "read in a while loop": "import sys\nwhile True:\n    if sys.argv:\n        best = 1\n    if sys.platform:\n        break\nbest",
    "loop with continue": "for i in range(3):\n    if i == 0:\n        best = 0\n        continue\n    best = best + i",
    "handler then use": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    x = 1\nprint(x)",
    "nested handlers": "try:\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        x = 1\n        raise\nexcept Exception:\n    print(x)",
    "finally by two ways": "for i in range(2):\n    try:\n        if i < 0:\n            continue\n        x = 1\n    finally:\n        print(x)",
    "finally": "try:\n    x = 1\nfinally:\n    print(x)",
    "probe": "try:\n    model\nexcept NameError:\n    model = 1\nmodel",
    "probe in tuple": "try:\n    amp\nexcept (ImportError, NameError):\n    pass",
    "looked up": "if 'model' in globals():\n    del model\nif 'cfg' not in dir():\n    cfg = 1",
    "suppress": "import contextlib\nwith contextlib.suppress(NameError):\n    del model",
    "dead code": "if False:\n    never\nwhile 0:\n    never",
    "future annotations": "from __future__ import annotations\nx: Missing = 1\ndef f(a: Missing) -> Missing: ...",
    "local annotation": "def f():\n    x: Missing = 1\n    return x",
    "string annotation": "x: 'Missing' = 1",
    "match": "match [1, 2]:\n    case [a, *rest]:\n        print(a, rest)\n    case {'k': v, **others}:\n        print(v, others)\n    case str() as s:\n        print(s)",
    "augmented": "x = 1\nx += 1\nfor i in range(3):\n    x += i",
    "del": "x = 1\ndel x",
    "f-string": "x = 1\nf'{x!r:>{x}} {x=}'",
    "attributes and keywords": "dict(lr=1).items().nothing_known",
    "format spec": "print(f'{1:02d}')",
    "async": "import asyncio\nasync def main():\n    async with a() as b:\n        async for c in b:\n            yield c\nasync def a(): ...\nasyncio.run",
    "decorator": "import functools\n@functools.cache\ndef f(): ...",
    "underscore": "for _ in range(3):\n    pass\n_",
    "global at module level": "global x\nx = 1\nx",
    "guard": "if __name__ == '__main__':\n    main = 1\n    main",
    "name mangling": "class A:\n    __x = 1\n    y = __x",
}


@pytest.mark.parametrize("source", NEEDS_NOTHING.values(), ids=NEEDS_NOTHING)
def test_a_cell_that_binds_what_it_reads_needs_nothing(source):
    """No false alarm."""
    assert needs(source) == []


NEEDS = {
    "expression": ("1\nmodel", [("model", 2)]),
    "each once by line": ("b\na\nb, a", [("b", 1), ("a", 2)]),
    "one line": ("b + a", [("a", 1), ("b", 1)]),
    "in a multi-line call": ("print(\n    1,\n    x,\n)", [("x", 3)]),
    "attribute": ("torch.nn.Linear(1)", [("torch", 1)]),
    "function": ("def f():\n    return g(h)", [("g", 2), ("h", 2)]),
    "nested function": ("def f():\n    def g():\n        return x\n    return g", [("x", 3)]),
    "local of another function": ("def f():\n    x = 1\ndef g():\n    return x", [("x", 4)]),
    "local in one, global in another": ("def f(x):\n    return x\n\nx", [("x", 4)]),
    "method does not see the class": ("class A:\n    x = 1\n    def f(self):\n        return x", [("x", 4)]),
    "comprehension does not see the class": ("class A:\n    x = 1\n    y = [x for _ in range(3)]", [("x", 3)]),
    "comprehension": ("[f(x) for x in data if ok]", [("data", 1), ("f", 1), ("ok", 1)]),
    "comprehension variable is gone": ("[i for i in ()]\ni", [("i", 2)]),
    "generator": ("sum(w * x for x in ())", [("w", 1)]),
    "lambda": ("f = lambda x: x + y", [("y", 1)]),
    "class body": ("class A(Base, metaclass=Meta):\n    x = y", [("Base", 1), ("Meta", 1), ("y", 2)]),
    "class body reads before it binds": ("class A:\n    x = x", [("x", 2)]),
    "decorator": ("@deco\ndef f(): ...", [("deco", 1)]),
    "class decorator": ("@deco(k)\nclass A: ...", [("deco", 1), ("k", 1)]),
    "default": ("def f(a=b, *, c=d): ...", [("b", 1), ("d", 1)]),
    "annotations": ("def f(a: A) -> B: ...\nx: C = 1", [("A", 1), ("B", 1), ("C", 2)]),
    "class annotation": ("class A:\n    T = int\n    x: T\n    y: U", [("U", 4)]),
    "f-string": ("f'{a} {b:{c}}'", [("a", 1), ("b", 1), ("c", 1)]),
    "walrus": ("(n := m)", [("m", 1)]),
    "except type": ("try:\n    pass\nexcept Trouble as error:\n    pass", [("Trouble", 3)]),
    "except name elsewhere": (
        "def f():\n    try:\n        pass\n    except ValueError as e:\n        pass\ne",
        [("e", 6)],
    ),
    "global": ("def f():\n    global n\n    return n", [("n", 3)]),
    "global augmented in function": ("def f():\n    global n\n    n += 1", []),
    "del": ("del model", [("model", 1)]),
    "del in a function": ("def f():\n    global model\n    del model", [("model", 3)]),
    "augmented": ("count += 1", [("count", 1)]),
    "augmented in a loop": ("for i in range(3):\n    total += i\ntotal", [("total", 2)]),
    "augmented in a condition in a loop": ("for i in range(3):\n    if i:\n        total += i\ntotal", [("total", 3)]),
    "rebinds what it reads": ("model = model.to('cpu')\nmodel.train()", [("model", 1)]),
    "reads above its binding": ("print(cfg)\ncfg = {}", [("cfg", 1)]),
    "binds in a branch after the read": ("x = y\nif x:\n    y = 1", [("y", 1)]),
    "for over itself": ("for x in x:\n    pass", [("x", 1)]),
    "subscript target": ("table['a'] = 1", [("table", 1)]),
    "attribute target": ("cfg.lr = 1", [("cfg", 1)]),
    "annotation alone binds nothing": ("x: int\nx", [("x", 2)]),
    "match value": ("match 1:\n    case K.a:\n        pass\n    case P(x=1):\n        pass", [("K", 2), ("P", 4)]),
    "read after a probe": ("try:\n    amp\nexcept NameError:\n    pass\namp", [("amp", 5)]),
    "no probe": ("try:\n    amp\nexcept ValueError:\n    pass", [("amp", 2)]),
    "in the handler of a probe": ("try:\n    a\nexcept NameError:\n    b", [("b", 4)]),
    "await": ("async def f():\n    await g()", [("g", 2)]),
    "star and double star": ("print(*a, **b)", [("a", 1), ("b", 1)]),
    "slices": ("[1][i:j]", [("i", 1), ("j", 1)]),
    "conditional expression": ("1 if c else d", [("c", 1), ("d", 1)]),
    "assert": ("assert ok, why", [("ok", 1), ("why", 1)]),
    "raise from": ("raise A from b", [("A", 1), ("b", 1)]),
    "return in nested class": ("def f():\n    class B(A):\n        pass\n    return B", [("A", 2)]),
    "last output": ("_", [("_", 1)]),
    "IPython's own": ("display(1)\nget_ipython()", [("display", 1), ("get_ipython", 2)]),
    "docstring first": ("'''doc'''\nx", [("x", 2)]),
    "blank lines": ("\n\n\nx", [("x", 4)]),
    "yield": ("def f():\n    yield x", [("x", 2)]),
    "with": ("with ctx as c, other(c):\n    pass", [("ctx", 1), ("other", 1)]),
}


@pytest.mark.parametrize(("source", "expected"), NEEDS.values(), ids=NEEDS)
def test_a_cell_needs_the_globals_it_reads_and_does_not_bind(source, expected):
    """No miss, and the line of the first use."""
    assert needs(source) == expected


if sys.version_info >= (3, 12):  # the syntax came then

    def test_type_parameters_are_bound_and_their_bounds_are_read():
        """Type parameter scopes of new Pythons."""
        assert needs("def f[T: Bound](x: T) -> T: ...\nclass A[U]:\n    y: U\n    def g[V](self, v: V, u: U): ...") == [
            ("Bound", 1)
        ]
        assert needs("type Pair[T] = tuple[T, Other]") == [("Other", 1)]
        assert needs("class A:\n    T = int\n    def f[V](self, a: T, b: V): ...") == []


def test_what_a_tool_put_into_builtins_is_no_builtin_of_a_rank():
    """IPython, ipykernel and tools change the builtins of the kernel only."""

    def injected(): ...

    injected.__module__ = "icecream.builtins"
    replaced = builtins.input
    builtins.ic = builtins.display = builtins.input = injected
    try:
        assert needs("ic(1)\ndisplay(2)\ninput()") == [("ic", 1), ("display", 2)]
    finally:
        del builtins.ic, builtins.display
        builtins.input = replaced


def test_a_suspicious_cell_makes_no_warning(recwarn):
    """Analysis compiles the code, but its warnings come from the run."""
    assert unbound(ast.parse("x is 1")) == (Unbound("x", 1),)
    assert list(recwarn) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from math import *", True),
        ("exec('x = 1')", True),
        ("globals()['x'] = 1", True),
        ("def f():\n    globals().update(x=1)", True),
        ("locals()['x'] = 1", True),
        ("if 1:\n    vars().update(x=1)", True),
        ("def f():\n    return locals()", False),
        ("class A:\n    x = vars()", False),
        ("vars(object)", False),
        ("from math import pi", False),
        ("model.exec()", False),
        ("x = 1", False),
    ],
)
def test_a_cell_is_open_where_names_can_appear_unseen(source, expected):
    """Star imports and code that writes the namespace."""
    assert is_open(ast.parse(source)) is expected


def test_star_imports_bind_what_their_modules_export():
    """By `__all__` or by name, for modules that this process has imported."""
    module = types.ModuleType("exporting")
    module.__all__ = ["a"]
    module.b = module.a = 1
    plain = types.ModuleType("plain")
    plain.c = plain._d = 1
    sys.modules |= {"exporting": module, "plain": plain}
    try:
        assert star_names(ast.parse("from exporting import *\nfrom plain import *\nfrom nowhere_to_be import *")) == {
            "a",
            "c",
        }
    finally:
        del sys.modules["exporting"], sys.modules["plain"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ast", ast, "import ast"),
        ("tree", ast, "import ast as tree"),
        ("mc", xml.dom.minicompat, "import xml.dom.minicompat as mc"),
        ("Element", xml.etree.ElementTree.Element, "from xml.etree.ElementTree import Element"),
        ("Path", pathlib.Path, "from pathlib import Path"),
        ("P", pathlib.Path, "from pathlib import Path as P"),
        ("loads", json.loads, "from json import loads"),
        ("decode", json.decoder.JSONDecoder, "from json import JSONDecoder as decode"),
        ("method", "".join, None),
        ("made", types.ModuleType("made"), None),
        ("local", lambda: 1, None),
        ("number", 1, None),
        ("path", pathlib.Path("x"), None),
    ],
)
def test_an_imported_value_has_its_import_statement(name, value, expected):
    """From the highest package that has it; nothing for what is no import."""
    assert import_text(name, value) == expected
