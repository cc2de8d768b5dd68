"""What cannot be sent is named, with the way to it and what to do."""

import asyncio
import logging
import socket
import sqlite3
import sys
import threading
import weakref
from textwrap import dedent

import pytest

from air_magic.capture import explain, sizes, sizes_of_names
from air_magic.errors import CaptureError
from air_magic.payload import Payload


class FakeTensor:
    """Stands in for a CUDA tensor where there is no GPU."""

    device = "cuda:0"

    def cpu(self):
        return 0


class FakeModule(FakeTensor):
    """Stands in for a module with such a tensor; it moves with one call."""

    def __init__(self):
        self.weight = FakeTensor()


def cells(code, **names):
    """The namespace of a notebook after its cells have run."""
    namespace = {"__name__": "__main__", **names}
    exec(dedent(code), namespace)
    return namespace


@pytest.fixture
def refusal(tmp_path):
    """The text of the CaptureError that sending a call ends with."""

    def refusal(code, call="train, (), {}", **names):
        function, args, kwargs = eval(call, namespace := cells(code, **names))
        assert namespace
        with pytest.raises(CaptureError) as caught:
            Payload.of_function(function, args, kwargs).dump(
                tmp_path / "payload", refused=lambda obj: type(obj) is FakeTensor
            )
        assert caught.value.__cause__ is not None
        assert list(tmp_path.iterdir()) == []
        return str(caught.value)

    return refusal


LOCK = "is a `threading.Lock`; create it inside the function."

PATHS = {
    "train → helper → cfg['lock']": "def helper(): return cfg\ndef train(): return helper()",
    "train → cfg['lock']": "def train():\n    def inner():\n        return [cfg for _ in ()]\n    return inner",
    "train → hidden": "def make(hidden):\n    def train(): return hidden\n    return train\ntrain = make(lock)",
    "train(default of 'x')": "def train(y, x=lock): pass",
    "train(default of 'z')[1]": "def train(*, z=(1, lock)): pass",
    "train → .note": "def train(): pass\ntrain.note = lock",
    "train → box → .inner → .key": "class Box: pass\nbox = Box(); box.inner = Box(); box.inner.key = lock\ndef train(): box",
    "train → slotted → .key": "class Slotted: __slots__ = 'key'\nslotted = Slotted(); slotted.key = lock\ndef train(): slotted",
    "train → Model → .shared": "class Model: shared = lock\ndef train(): Model",
    "train → Model → Base → .shared": "class Base: shared = lock\nclass Model(Base): pass\ndef train(): Model",
    "train → Model → .fit(default of 'x')": "class Model:\n    @staticmethod\n    def fit(x=lock): pass\ndef train(): Model",
    "train → model → class Model → .shared": "class Model: shared = lock\nmodel = Model()\ndef train(): model",
    "train → box[2][0]": "box = [0, 1, (lock,)]\ndef train(): box",
    "train → call → .args[0]": "import functools\ncall = functools.partial(print, lock)\ndef train(): call",
    "train → call → .keywords['file']": "import functools\ncall = functools.partial(print, file=lock)\ndef train(): call",
    "train → ring['self']": "ring = {}; ring['self'] = lock; ring['ring'] = ring\ndef train(): return ring, train",
}


@pytest.mark.parametrize("path", PATHS)
def test_path_leads_to_the_culprit(refusal, path):
    """Globals, closures, defaults, attributes, items, classes, bases and partials are followed."""
    lock = threading.Lock()
    assert refusal(PATHS[path], lock=lock, cfg={"n": 1, "lock": lock}) == f"cannot send train: `{path}` {LOCK}"


def test_paths_start_at_arguments_and_methods(refusal):
    """An argument is named by its parameter, a method's object is self."""
    code = "class Trainer:\n    def __init__(self): self.lock = lock\n    def fit(self, data=None, *rest): pass"
    lock = threading.Lock()
    expected = {
        "Trainer().fit, (), {}": f"cannot send Trainer.fit: `Trainer.fit → self → .lock` {LOCK}",
        "Trainer.fit, (1, {'a': lock}), {}": f"cannot send Trainer.fit: `Trainer.fit(argument 'data')['a']` {LOCK}",
        "Trainer.fit, (1, 2, 3, lock), {}": f"cannot send Trainer.fit: `Trainer.fit(argument 'rest')[1]` {LOCK}",
        "print, (), {'file': lock}": f"cannot send print: `print(argument 'file')` {LOCK}",
    }
    assert {call: refusal(code, call, lock=lock) for call in expected} == expected


def test_advice_fits_the_type(refusal, tmp_path_factory):
    """The text says what to do with this kind of thing."""
    path = tmp_path_factory.mktemp("data") / "log.txt"
    path.write_text("text")
    loop = asyncio.new_event_loop()
    with path.open() as text, path.open("rb") as binary, socket.socket() as sock, sqlite3.connect(":memory:") as base:
        things = {
            "text": (text, f"is an open file ({str(path)!r}); open it inside the function."),
            "binary": (binary, f"is an open file ({str(path)!r}); open it inside the function."),
            "sock": (sock, "is a `socket.socket`; connect inside the function."),
            "base": (base, "is a `sqlite3.Connection`; connect inside the function."),
            "items": (iter_items(), "is a `generator`; create it inside the function, or send a list of its items."),
            "worker": (threading.Thread(), "is a `threading.Thread`; start it inside the function."),
            "flag": (threading.Event(), "is a `threading.Event`; create it inside the function."),
            "handler": (
                logging.StreamHandler(),
                "is a `logging.StreamHandler`; call logging.getLogger(name) inside the function.",
            ),
            "ref": (weakref.ref(FakeTensor), "is a `weakref.ReferenceType`; hold the object itself."),
            "future": (asyncio.Future(loop=loop), None),
            "frame": (sys._getframe(), "is a `frame`; send text instead."),
        }
        found = {name: refusal(f"def train(): {name}", **{name: thing}) for name, (thing, _) in things.items()}
    loop.close()
    assert found.pop("future").endswith("create it inside the function.")
    del things["future"]
    assert found == {name: f"cannot send train: `train → {name}` {text}" for name, (_, text) in things.items()}


def iter_items():
    yield 1


def test_logger_travels_by_its_name(tmp_path):
    """A module-level logger is no obstacle."""
    train = cells("def train(): log.info('x')", log=logging.getLogger("mine"))["train"]
    Payload.of_function(train, (), {}).dump(tmp_path / "payload")


def test_cuda_tensor_is_refused_by_name(refusal):
    """A tensor on a GPU would start CUDA in the rank on the wrong device: it is sent through the CPU."""
    names = {"weights": FakeTensor(), "cfg": {"w": FakeTensor()}, "model": FakeModule()}
    expected = {
        "def train(): weights": "`train → weights` is a CUDA tensor on cuda:0; send weights.cpu()",
        "def train(): cfg": "`train → cfg['w']` is a CUDA tensor on cuda:0; send cfg['w'].cpu()",
        "def train(): model": "`train → model` holds a CUDA tensor on cuda:0; send model.cpu()",
        "class Box: pass\nbox = Box(); box.x = weights\ndef train(): box": "`train → box → .x` is a CUDA tensor on cuda:0; "
        "send box.x.cpu()",
        "def train(x=weights): pass": "`train(default of 'x')` is a CUDA tensor on cuda:0; send x.cpu()",
    }
    found = {code: refusal(code, **names) for code in expected}
    assert found == {code: f"cannot send train: {text} and move it in the rank." for code, text in expected.items()}


def test_unknown_type_carries_the_picklers_text(refusal):
    """Without advice for the type, the error says why pickle refused."""
    code = """
        class Client:
            def __reduce__(self):
                raise RuntimeError("no!")
        client = Client()
        def train(): client
        """
    assert refusal(code) == (
        "cannot send train: `train → client` is a `Client`, which cannot be pickled (RuntimeError: no!); "
        "create it inside the function."
    )


def test_culprit_that_exists_only_while_pickled_is_found_by_its_owner(refusal):
    """What a `__reduce__` makes up hangs nowhere; the object that has it does."""
    code = """
        class Client:
            def __reduce__(self):
                return Client, (threading.Lock(),)
        box = {'good': [object()], 'client': Client(), 'later': [object()]}
        def train(): box
        """
    assert refusal(code, threading=threading) == (
        "cannot send train: `train → box['client']` is a `Client`, which cannot be pickled "
        "(TypeError: cannot pickle '_thread.lock' object); create it inside the function."
    )


def test_deep_nesting_is_named(refusal):
    """A linked list exhausts the pickler's stack, and the path to its end says nothing."""
    code = "chain = None\nfor _ in range(20_000): chain = [chain]\ndef train(): chain"
    assert refusal(code) == (
        "cannot send train: `train → chain` is nested too deeply to be pickled; build it inside the function."
    )


def test_long_path_loses_its_middle(refusal):
    """The start and the end of a path are what a reader needs."""
    code = "class Box: pass\nbox = Box()\nend = box\nfor _ in range(20): end.next = Box(); end = end.next\nend.lock = lock\ndef train(): box"
    path = "train → box → .next → .next → … → .next → .next → .lock"
    assert refusal(code, lock=threading.Lock()) == f"cannot send train: `{path}` {LOCK}"


def test_search_is_bounded_and_keeps_the_picklers_text():
    """Out of time, the error is still the pickler's own."""
    ticks = iter(range(0, 1_000_000, 3))
    root = [[[threading.Lock()]] for _ in range(10)]
    error = explain(root, "things", TypeError("cannot pickle it"), clock=lambda: next(ticks))
    assert (type(error), str(error)) == (CaptureError, "cannot send things: TypeError: cannot pickle it")


def test_any_object_can_be_explained():
    """The root may be other than a call."""
    error = explain({"a": threading.Lock()}, "cfg", TypeError("no"))
    assert str(error) == f"cannot send cfg: `cfg['a']` {LOCK}"


def test_sizes_of_a_call():
    """Each captured object counts once, under its first name, biggest first; functions are looked through."""
    code = """
        import json
        def helper(): return text, shared
        class Model: pass
        def train(data, again, scale=b'12345'):
            return helper(), json, Model, lock
        """
    shared = "s" * 500
    namespace = cells(code, text="t" * 1000, shared=shared, lock=threading.Lock())
    found = sizes(namespace["train"], (b"d" * 2000, shared), {})
    names = [(name, kind) for name, kind, _ in found]
    assert names[:3] == [("data", "bytes"), ("helper → text", "str"), ("again", "str")]
    assert sorted(names[3:]) == [("Model", "type"), ("default of 'scale'", "bytes")]
    assert all(0 <= size - length < 30 for (_, _, size), length in zip(found, (2000, 1000, 500), strict=False))


def test_sizes_of_given_names():
    """The names given to a cell, biggest first."""
    assert [(name, kind) for name, kind, _ in sizes_of_names({"a": b"", "b": b"x" * 100})] == [
        ("b", "bytes"),
        ("a", "bytes"),
    ]
