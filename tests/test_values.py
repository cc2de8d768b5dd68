"""Values, exceptions and what cannot be pickled, written and loaded again."""

import collections
import dataclasses
import datetime
import enum
import os
import pickle
import queue
import resource
import socket
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch._dynamo  # the first optimizer would import it, and it sets a variable

from air_magic.reductions import torch_reducers
from air_magic.values import Unpicklable, dump, dump_exception, load

BIG = 1 << 17  # elements; more than what stays in the pickle


@dataclasses.dataclass(frozen=True)
class Point:
    x: object
    y: object = None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: object


Pair = collections.namedtuple("Pair", "left right")


class TaggedTensor(torch.Tensor):
    pass


class NeedsTwo(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code


class Wraps(ValueError):
    def __init__(self, text):
        super().__init__(f"wrapped {text}")


class FileTrouble(OSError):
    def __init__(self, name):
        super().__init__(2, "no such thing", name)


class Unrebuildable(Exception):
    def __reduce__(self):
        return Unrebuildable, (1, 2, 3), {}, None, None, None, "too long"


class LoadsBadly:
    def __setstate__(self, state):
        raise ValueError("not in this house")


class ReducesBadly:
    def __repr__(self):
        raise KeyError("no text either")

    def __reduce__(self):
        raise OSError(28, "not the disk")


def there_and_back(value, path, known=()):
    """The value as the kernel gets it, where nothing is to be warned of."""
    assert dump(value, path, known) == []
    loaded, warnings = load(path, known)
    assert warnings == []
    return loaded


def run_python(code, *arguments):
    """What another process prints."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]).stdout


@pytest.fixture
def path(tmp_path):
    return tmp_path / "value-1"


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text \ud800",
        b"",
        [1, (2.0, {"a": {1, 2}}), frozenset({3})],
        Point(1, Slotted([2])),
        Pair(1, "b"),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
        Path("a/b"),
        Colour.RED,
        torch.device("cuda", 1),
        torch.bfloat16,
        torch.Size([1, 2]),
        np.float32(1.5),
        np.datetime64("2024-01-01"),
        types.SimpleNamespace(a=1),
        collections,
    ],
    ids=repr,
)
def test_a_plain_value_comes_back_equal(value, path):
    """What pickle can do is done, and nothing is warned of."""
    assert there_and_back(value, path) == value


def test_a_lambda_comes_back_callable(path):
    """Functions that only the rank has travel by value."""
    offset = 3
    assert there_and_back({"f": lambda x: x + offset}, path)["f"](1) == 4


TENSORS = {
    "float": torch.arange(6.0).reshape(2, 3),
    "big": torch.arange(float(BIG)),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.arange(BIG, dtype=torch.bfloat16),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "uint16": torch.tensor([7], dtype=torch.uint16),
    "scalar": torch.tensor(3),
    "zero size": torch.empty(0, 3),
    "not contiguous": torch.arange(float(2 * BIG)).reshape(2, BIG).t()[::2],
    "expanded": torch.ones(1).expand(5),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "requires grad": torch.ones(3, requires_grad=True),
    "of a graph": (torch.ones(3, requires_grad=True) * 2).sum(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "buffer": torch.nn.Buffer(torch.ones(3)),
    "subclass": torch.ones(3).as_subclass(TaggedTensor),
    "coo": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(),
    "meta": torch.empty(2, 3, device="meta"),
    "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.quint8),
    "per channel": torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name, path):
    """Type, dtype, shape, strides, layout, gradient flag and data are the same."""
    tensor = TENSORS[name]
    loaded = there_and_back(tensor, path)

    def form(t):
        strides = t.stride() if t.layout is torch.strided else None
        return type(t), t.dtype, t.shape, strides, t.layout, t.device, t.requires_grad, t.is_conj(), t.is_neg()

    def data(t):
        t = t.detach()
        if t.layout is torch.sparse_csr:
            return [t.crow_indices(), t.col_indices(), t.values()]
        if t.layout is torch.sparse_coo:
            return [t._indices(), t._values()]
        return [t.dequantize()] if t.is_quantized else [t.to(torch.complex64) if t.is_complex() else t.float()]

    assert form(loaded) == form(tensor)
    if name != "meta":
        assert all(map(torch.equal, data(loaded), data(tensor)))


@pytest.mark.parametrize("size", [4, BIG])
def test_tensors_that_share_memory_still_share_it(size, path):
    """A view and its base, and two names of one tensor, stay what they were to each other."""
    base = torch.zeros(size)
    loaded = there_and_back({"base": base, "view": base[1:3], "again": base}, path)
    loaded["base"][1] = 7
    assert loaded["view"][0] == 7
    assert loaded["again"] is loaded["base"]


def test_an_attribute_of_a_tensor_travels(path):
    """A tensor's Python state is kept."""
    tensor = torch.ones(2)
    tensor.label = "mine"
    assert there_and_back(tensor, path).label == "mine"


def test_storages_travel_by_themselves(path):
    """A storage without a tensor is pickled like one with."""
    tensor = torch.arange(4, dtype=torch.int32)
    untyped, empty = there_and_back((tensor.untyped_storage(), torch.UntypedStorage(0)), path)
    assert (untyped.tolist(), empty.nbytes()) == (tensor.untyped_storage().tolist(), 0)


def test_a_module_and_its_optimizer_train_on(path):
    """The optimizer still holds the module's own parameters, and its state goes on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300, affine=False))
    optimizer = torch.optim.Adam(model.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.eye(300)).pow(3).sum().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    step(model, optimizer)
    loaded_model, loaded_optimizer = there_and_back((model, optimizer), path)
    assert all(map(torch.equal, loaded_model.state_dict().values(), model.state_dict().values()))
    assert all(map(torch.allclose, step(loaded_model, loaded_optimizer), step(model, optimizer)))


def test_a_generator_of_random_numbers_goes_on(path):
    """The state of a CPU generator travels."""
    generator = torch.Generator().manual_seed(3)
    loaded = there_and_back(generator, path)
    assert torch.equal(torch.rand(2, generator=loaded), torch.rand(2, generator=generator))


def test_a_storage_of_an_accelerator_is_copied_to_the_cpu():
    """The kernel gets CPU tensors, and never opens the device."""
    host = torch.arange(4.0).untyped_storage()
    on_device = types.SimpleNamespace(device=torch.device("cuda", 0), cpu=lambda: host)
    rebuild, (buffer,) = torch_reducers(unwrap=lambda model: model)[torch.UntypedStorage](on_device)
    rebuilt = rebuild(buffer.raw())
    assert (rebuilt.device.type, rebuilt.tolist()) == ("cpu", host.tolist())


GROUP = """
import sys, torch
from pathlib import Path
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from air_magic.values import dump
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
print(*dump({"model": wrapped, "plain": model}, Path(sys.argv[1])), sep="\\n")
print(*dump([1, shard], Path(sys.argv[2])), sep="\\n")
"""


def test_what_needs_a_process_group_is_returned_without_it(tmp_path):
    """A DDP model arrives as its module; a DTensor, whose other parts are elsewhere, as a stand-in with advice."""
    model, shard = tmp_path / "model", tmp_path / "shard"
    assert run_python(GROUP, model, shard).splitlines() == [
        "value['model'] is a DistributedDataParallel and was returned as its module",
        "value[1] is a torch.distributed.tensor.DTensor and cannot be pickled (a DTensor is spread over the ranks: "
        "return its full_tensor() or to_local()); a stand-in with its text was returned",
    ]
    models, _ = load(model)
    assert (type(models["model"]), models["model"] is models["plain"]) == (torch.nn.Linear, True)
    assert [type(part) for part in load(shard)[0]] == [int, Unpicklable]


ARRAYS = {
    "small": np.arange(4),
    "big": np.arange(float(BIG)),
    "fortran": np.asfortranarray(np.arange(float(BIG)).reshape(2, -1)),
    "not contiguous": np.arange(float(BIG))[::2],
    "objects": np.array([1, "a", None], dtype=object),
    "structured": np.array([(1, 2.0)] * BIG, dtype=[("a", "i4"), ("b", "f8")]),
    "datetimes": np.arange("2024-01", "2024-03", dtype="datetime64[D]"),
    "strings": np.array(["a", "bcd"]),
    "zero size": np.empty((0, 3)),
    "scalar": np.array(3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_as_it_was(name, path):
    """dtype, shape, order and data are the same, and it can be written to."""
    loaded = there_and_back(ARRAYS[name], path)
    np.testing.assert_array_equal(loaded, ARRAYS[name], strict=True)
    assert loaded.flags.writeable
    assert loaded.flags.f_contiguous == ARRAYS[name].flags.f_contiguous or name == "not contiguous"


def test_a_memory_mapped_array_comes_back_with_its_data(path, tmp_path):
    """The rank's file need not exist in the kernel."""
    np.save(tmp_path / "a.npy", np.arange(6.0))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert dump(mapped, path) == []
    (tmp_path / "a.npy").unlink()
    np.testing.assert_array_equal(load(path)[0], np.arange(6.0))


def test_data_frames_come_back_equal(path):
    """Numbers, strings, categories, dates and an index."""
    frame = pd.DataFrame(
        {
            "n": np.arange(float(BIG)),
            "s": [f"row {i % 7}" for i in range(BIG)],
            "c": pd.Categorical(["a", "b"] * (BIG // 2)),
            "d": pd.Timestamp("2024-01-01"),
        }
    )
    loaded = there_and_back(frame, path)
    pd.testing.assert_frame_equal(loaded, frame)
    loaded.loc[0, ["n", "s"]] = [7.0, "new"]
    assert loaded.loc[0, ["n", "s"]].tolist() == [7.0, "new"]


def test_big_data_is_mapped_aligned_and_private(path):
    """Loaded data can be written to without changing the file, and outlasts the file's name."""
    value = {"t": torch.zeros(BIG), "a": np.zeros(BIG + 3, dtype=np.uint8), "b": np.ones(BIG)}
    dump(value, path)
    first, _ = load(path)
    first["t"][0] = first["a"][0] = 9
    second, _ = load(path)
    path.unlink()
    assert (second["t"][0], second["a"][0], first["t"][0]) == (0, 0, 9)
    assert [second["t"].data_ptr() % 64, second["a"].ctypes.data % 64, second["b"].ctypes.data % 64] == [0, 0, 0]
    assert (second["b"] == 1).all()


def test_only_the_value_is_left_in_the_folder_and_only_its_owner_reads_it(path):
    """The temporary name is gone, also when a file is replaced."""
    dump(1, path)
    dump(2, path)
    assert (os.listdir(path.parent), path.stat().st_mode & 0o777, load(path)[0]) == ([path.name], 0o600, 2)


def test_a_full_disk_is_an_os_error_and_leaves_nothing(path):
    """The caller can try another folder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BIG, hard))  # a write beyond it fails as one on a full disk does
    try:
        with pytest.raises(OSError, match="File too large"):
            dump(np.zeros(BIG), path)
        with pytest.raises(OSError, match="File too large"):
            dump(["x" * 100 * i for i in range(BIG // 100)], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(path.parent) == []


def generator():
    yield 1


def with_lock():
    return types.SimpleNamespace(lock=threading.Lock(), loss=0.5)


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


LEAVES = {
    "generator": (generator, "a generator"),
    "lock": (threading.Lock, "a _thread.lock"),
    "thread": (lambda: threading.Thread(target=print), "a threading.Thread"),
    "queue": (queue.Queue, "a queue.Queue"),
    "socket": (socket.socket, "a socket.socket"),
    "file": (lambda: open(os.devnull, "rb"), "a _io.BufferedReader"),
    "iterator": (lambda: (x for x in []), "a generator"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_cannot_be_pickled_becomes_a_stand_in_and_the_rest_is_kept(name, path):
    """One warning says where it was and what it was."""
    make, kind = LEAVES[name]
    leaf = make()
    warnings = dump({"loss": 0.5, "bad": leaf}, path, (), "rank 1")
    loaded, more = load(path)
    if hasattr(leaf, "close"):
        leaf.close()
    type_name = kind.split(" ")[1]
    assert (loaded["loss"], type(loaded["bad"]), loaded["bad"].type_name) == (0.5, Unpicklable, type_name)
    assert (len(warnings), more) == (1, [])
    assert warnings[0].startswith(f"value['bad'] is {kind} and cannot be pickled")
    assert warnings[0].endswith("; a stand-in with its text was returned")


def test_the_stand_in_reads_as_what_it_stands_for(path):
    """Its repr says what, whose and why."""
    leaf = generator()
    assert dump(leaf, path, (), "rank 1") == [
        "value is a generator and cannot be pickled; a stand-in with its text was returned"
    ]
    loaded, _ = load(path)
    assert loaded == Unpicklable("generator", repr(leaf), "cannot pickle 'generator' object", "rank 1")
    assert repr(loaded) == f"<{repr(leaf)[1:-1]} could not leave rank 1: cannot pickle 'generator' object>"


def test_stand_ins_are_found_at_any_place(path):
    """In a list, a tuple, a named tuple, a set, a frozen or slotted dataclass, an object, a module's attributes."""
    module = torch.nn.Linear(1, 1)
    module.lock = threading.Lock()
    value = {
        "list": [0, generator()],
        "tuple": (1, {"a": generator()}),
        "pair": Pair(1, generator()),
        "set": {1, generator()},
        "point": Point(Point(generator(), 2)),
        "slotted": Slotted(generator()),
        "space": with_lock(),
        "counts": collections.defaultdict(int, a=generator()),
        "module": module,
    }
    warnings = dump(value, path)
    loaded, _ = load(path)
    assert [line.split(" is a")[0] for line in warnings] == [
        "value['list'][1]",
        "value['tuple'][1]['a']",
        "value['pair'].right",
        "value['set'][...]",
        "value['point'].x.x",
        "value['slotted'].x",
        "value['space'].lock",
        "value['counts']['a']",
        "value['module'].lock",
    ]
    assert (loaded["list"][0], loaded["tuple"][0], loaded["pair"].left, loaded["point"].x.y) == (0, 1, 1, 2)
    assert (loaded["space"].loss, loaded["counts"]["new"], 1 in loaded["set"]) == (0.5, 0, True)
    assert torch.equal(loaded["module"].weight, module.weight)


def test_identity_and_cycles_survive_a_stand_in(path):
    """One object is one stand-in, and a value that holds itself still does."""
    leaf = generator()
    value = {"first": leaf, "again": [leaf]}
    value["self"] = value
    value["again"].append(value)
    assert len(dump(value, path)) == 1
    loaded, _ = load(path)
    assert loaded["first"] is loaded["again"][0]
    assert loaded["self"] is loaded
    assert loaded["again"][1] is loaded


def test_user_code_that_raises_loses_only_its_own_object(path):
    """An OSError of a reducer is not one of the disk, and a repr that raises is replaced."""
    warnings = dump([1, ReducesBadly()], path)
    loaded, _ = load(path)
    assert warnings == [
        f"value[1] is a {__name__}.ReducesBadly and cannot be pickled (OSError: [Errno 28] not the disk); "
        "a stand-in with its text was returned"
    ]
    assert loaded[0] == 1
    assert loaded[1].text.startswith("<ReducesBadly instance at 0x")


def test_too_deep_a_structure_is_cut(path):
    """A RecursionError costs the deep part only."""
    warnings = dump({"deep": deep(), "loss": 0.5}, path)
    loaded, _ = load(path)
    assert loaded["loss"] == 0.5
    assert (len(warnings), warnings[0].startswith("value['deep'][0]")) == (1, True)


def test_a_stand_in_that_its_owner_cannot_take_replaces_the_owner(path):
    """Whether the value loads with its stand-ins is tried in the rank."""
    value = {"owner": collections.defaultdict(generator().__next__), "strict": LoadsBadly(), "n": 1, "g": generator()}
    value["strict"].state = generator()
    warnings = dump(value, path)
    loaded, more = load(path)
    assert more == []
    assert {key: type(part) for key, part in loaded.items()} == {
        "owner": Unpicklable,
        "strict": Unpicklable,
        "n": int,
        "g": Unpicklable,
    }
    assert len(warnings) == 3


def test_many_stand_ins_are_counted_after_the_first(path):
    """A thousand generators do not fill the screen."""
    warnings = dump([generator() for _ in range(1000)], path)
    assert (len(warnings), warnings[-1]) == (21, "980 more parts of value were replaced")


def test_an_interrupt_while_pickling_passes_through(path):
    """Ctrl-C is not a reason for a stand-in."""

    class Interrupts:
        def __reduce__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dump(Interrupts(), path)
    assert os.listdir(path.parent) == []


def test_a_value_that_cannot_be_rebuilt_here_is_a_stand_in_with_a_warning(path):
    """Loading never raises for what a value's own class does, so the other ranks' values are kept."""
    assert dump([LoadsBadly()], path) == []  # without a state it is never asked for
    value = LoadsBadly()
    value.state = 1
    dump(value, path, (), "rank 2")
    name = f"{__name__}.LoadsBadly"
    why = "it could not be rebuilt in the notebook: ValueError: not in this house"
    assert load(path) == (
        Unpicklable(name, f"<{name} object>", why, "rank 2"),
        [f"the {name} of rank 2 was replaced by a stand-in: {why}"],
    )


def test_another_file_is_refused(path):
    """Only what dump wrote is loaded."""
    path.write_bytes(pickle.dumps(1))
    with pytest.raises(ValueError, match="holds no value of this version"):
        load(path)


NOTEBOOK = """
import dataclasses, enum, torch
SCALE = 2

class Base:
    pass

class SimpleMLP(torch.nn.Module, Base):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def scale(self):
        return SCALE

@dataclasses.dataclass
class Metrics:
    loss: float

class Phase(enum.Enum):
    TRAIN = 1

class Trouble(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{code} {detail}")
        self.code = code

class Forgotten:
    def scale(self):
        return SCALE

def train():
    class Local(SimpleMLP):
        def more(self):
            return self.scale() + 1
    return {
        "model": SimpleMLP(), "metrics": [Metrics(0.5)], "phase": Phase.TRAIN, "class": Metrics,
        "local": Local(), "forgotten": Forgotten(), "reader": lambda: SimpleMLP, "gen": (x for x in []),
    }

def fail():
    raise Trouble(3, "x") from KeyError("cause")
"""

RANK = """
import pickle, sys
from pathlib import Path
from air_magic.values import dump, dump_exception
train, fail, known = pickle.loads(Path(sys.argv[1]).read_bytes())
print(dump(train(), Path(sys.argv[2]), known, "rank 1"))
try:
    fail()
except Exception as error:
    print(dump_exception(error, Path(sys.argv[3]), known))
"""


def test_the_notebooks_classes_come_back_as_themselves_and_unchanged(tmp_path):
    """Objects of a notebook's class are instances of that class, whose methods keep the notebook's globals."""
    notebook = {"__name__": "__main__"}
    exec(NOTEBOOK, notebook)
    known = [notebook[name] for name in ("SimpleMLP", "Metrics", "Phase", "Trouble")]
    payload, value, error = (tmp_path / name for name in ("payload", "value", "error"))
    payload.write_bytes(cloudpickle.dumps((notebook["train"], notebook["fail"], known)))
    before = {cls: dict(vars(cls)) for cls in [*known, notebook["Forgotten"], notebook["Base"]]}

    said = run_python(RANK, payload, value, error)
    loaded, warnings = load(value, known)
    raised, more = load(error, known)

    assert said == textwrap.dedent("""\
        ["value['gen'] is a generator and cannot be pickled; a stand-in with its text was returned"]
        True
        """)
    assert (warnings, more) == ([], [])
    assert [type(loaded["model"]), type(loaded["metrics"][0]), type(loaded["phase"])] == known[:3]
    assert loaded["metrics"] == [notebook["Metrics"](0.5)]
    assert loaded["phase"] is notebook["Phase"].TRAIN
    assert loaded["class"] is notebook["Metrics"]
    assert loaded["reader"]() is notebook["SimpleMLP"]
    assert isinstance(loaded["local"], notebook["SimpleMLP"])
    assert loaded["local"].more() == 3
    assert type(loaded["forgotten"]) is notebook["Forgotten"]  # not in known, and still not overwritten
    assert {cls: dict(vars(cls)) for cls in before} == before
    notebook["SCALE"] = 5
    assert (loaded["model"].scale(), loaded["forgotten"].scale()) == (5, 5)
    assert (type(raised), str(raised), raised.code) == (notebook["Trouble"], "3 x", 3)
    assert repr(raised.__cause__) == "KeyError('cause')"


def test_a_known_class_is_asked_for_in_vain_without_the_list(path):
    """The kernel says so instead of building a second class."""
    dump(Point(1), path, [Point])
    loaded, warnings = load(path)
    assert (type(loaded), len(warnings)) == (Unpicklable, 1)


def with_cause(exc, cause):
    exc.__cause__ = cause
    return exc


EXCEPTIONS = {
    "plain": ValueError("a", 1),
    "more arguments": NeedsTwo(3, "bad"),
    "text built from text": Wraps("x"),
    "of the system": FileNotFoundError(2, "No such file", "a.txt"),
    "own of the system": FileTrouble("b.txt"),
    "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "exit": SystemExit(3),
    "import": ImportError("no", name="x"),
    "process": subprocess.CalledProcessError(1, ["a"]),
    "torch": torch.OutOfMemoryError("CUDA out of memory"),
    "cause": with_cause(NeedsTwo(1, "a"), Wraps("y")),
    "cause that is lost": with_cause(ValueError("a"), Unrebuildable("b")),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_comes_back_with_its_type_text_and_attributes(name, path):
    """Whatever arguments its constructor takes."""
    exc = EXCEPTIONS[name]
    assert dump_exception(exc, path)
    loaded, warnings = load(path)
    lost = name == "cause that is lost"
    assert (type(loaded), str(loaded), loaded.args, vars(loaded)) == (type(exc), str(exc), exc.args, vars(exc))
    assert repr(loaded.__cause__) == repr(None if lost else exc.__cause__)
    assert warnings == []
    if isinstance(exc, OSError):
        assert (loaded.errno, loaded.filename) == (exc.errno, exc.filename)


def test_notes_and_unpicklable_attributes_do_not_cost_an_exception_its_type(path):
    """An attribute that cannot travel is a stand-in; `except` still finds the type."""
    exc = NeedsTwo(1, "a")
    exc.lock = threading.Lock()
    exc.__notes__ = ["of rank 1"]
    assert dump_exception(exc, path, (), "rank 1")
    loaded, _ = load(path)
    assert (type(loaded), loaded.code, loaded.__notes__, type(loaded.lock)) == (
        NeedsTwo,
        1,
        ["of rank 1"],
        Unpicklable,
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_comes_back_with_its_members(path):
    """Each member is rebuilt as it would be alone."""
    group = ExceptionGroup("several", [NeedsTwo(1, "a"), ValueError("b")])  # noqa: F821  # Python 3.11
    assert dump_exception(group, path)
    assert repr(load(path)[0]) == repr(group)


def test_the_type_in_a_rank_that_has_its_own_copy_of_a_known_class(path):
    """The trial in the rank resolves known classes to the rank's own."""
    assert dump_exception(NeedsTwo(1, "a"), path, [NeedsTwo])
    assert type(load(path, [NeedsTwo])[0]) is NeedsTwo


@pytest.mark.parametrize("exc", [Unrebuildable("x"), ValueError(threading.Lock())], ids=["reduction", "argument"])
def test_an_exception_that_cannot_be_rebuilt_leaves_no_file(exc, path):
    """The caller then sends its text."""
    assert not dump_exception(exc, path)
    assert os.listdir(path.parent) == []


def anonymous_memory():
    """Bytes of private anonymous memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


@pytest.mark.slow
def test_a_big_tensor_is_copied_neither_when_written_nor_when_loaded(path):
    """256 MB cost the writer and the loader next to no memory of their own, also when read to the end."""
    tensor = torch.ones(64 << 20)
    before = anonymous_memory()
    dump({"t": tensor, "g": generator()}, path)
    written = anonymous_memory()
    loaded, _ = load(path)
    assert loaded["t"].sum() == tensor.sum()
    assert [written - before < 32 << 20, anonymous_memory() - written < 32 << 20] == [True, True]
