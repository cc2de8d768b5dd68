"""What a node has, what the user may see of it, and whether a request fits."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from air_magic.accelerators import (
    AcceleratorType,
    Allotment,
    Device,
    allot,
    find_devices,
    nvml_devices,
    parse_type,
    type_name,
    usable_cores,
)
from air_magic.errors import RequestError
from air_magic.options import Options

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


def gpu(index, name="NVIDIA A10", token=None):
    """A GPU as NVML lists it."""
    return Device(index, f"GPU-{index}aa{index}", name, 24 * GIB, str(index) if token is None else token)


FOUR = tuple(gpu(index) for index in range(4))


def seen(environ, devices=FOUR):
    """The tokens of the GPUs that the user may see."""
    return [device.visible_as for device in find_devices(environ, lambda: devices)]


def refusal(options, devices, visible=None):
    """The one line that a request which does not fit is told."""
    with pytest.raises(RequestError) as caught:
        allot(options, devices, 8.0, visible)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_accelerator_types_are_their_own_names():
    """A member can stand wherever its text can."""
    assert {member.name: member.value for member in AcceleratorType} == {
        name: name for name in ("GPU_1xA10", "GPU_1xH100", "GPU_8xH100", "GPU_8xB300", "CPU", "SIMULATED")
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [("GPU_8xH100", (8, "H100")), ("gpu_16xrtx4090", (16, "RTX4090")), ("CPU", None), ("GPU_0xA10", None)],
)
def test_a_type_has_a_number_and_a_model(text, parts):
    """In any case of letters."""
    assert parse_type(text) == parts


class FakeNVMLError(Exception):
    """What the driver's library raises."""


class FakeNVML:
    """A driver's library with one ordinary GPU and one that shares the host's memory."""

    NVMLError = FakeNVMLError

    def __init__(self, broken=""):
        self.broken = broken
        self.calls = []

    def _called(self, name):
        self.calls.append(name)
        if name == self.broken:
            raise FakeNVMLError(name)

    def nvmlInit(self):
        self._called("init")

    def nvmlShutdown(self):
        self._called("shutdown")

    def nvmlDeviceGetCount(self):
        self._called("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle):
        return ("NVIDIA A10", "NVIDIA GB10")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == 1:
            raise FakeNVMLError("not supported")
        return SimpleNamespace(total=24 * GIB)


def test_the_driver_lists_its_gpus():
    """Each with the index that stands for it, and the library is left as it was found."""
    nvml = FakeNVML()
    assert nvml_devices(nvml) == (
        Device(0, "GPU-0", "NVIDIA A10", 24 * GIB, "0"),
        Device(1, "GPU-1", "NVIDIA GB10", 0, "1"),
    )
    assert nvml.calls == ["init", "count", "shutdown"]


@pytest.mark.parametrize(("broken", "calls"), [("init", ["init"]), ("count", ["init", "count", "shutdown"])])
def test_no_driver_means_no_gpu(broken, calls):
    """A library that cannot answer is not shut down unless it was started."""
    nvml = FakeNVML(broken)
    assert nvml_devices(nvml) == ()
    assert nvml.calls == calls


def test_the_real_library_answers_here():
    """Whatever this node has, asking is safe."""
    assert all(device.uuid.startswith("GPU-") for device in nvml_devices())


@pytest.mark.parametrize(
    ("visible", "tokens"),
    [
        ("0,1,2,3", ["0", "1", "2", "3"]),
        ("2,0", ["2", "0"]),
        (" 2 , 0 ", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["0"]),
        ("1,9,2", ["1"]),
        ("1,x,2", ["1"]),
        ("1,1", []),
        ("GPU-2aa2", ["GPU-2aa2"]),
        ("GPU-2,GPU-0aa", ["GPU-2", "GPU-0aa"]),
        ("GPU-2,0", ["GPU-2"]),
        ("0,GPU-2", ["0"]),
        ("GPU-2,GPU-2aa2", []),
        ("GPU-9,GPU-2", []),
        ("GPU-", []),
        ("MIG-1d2c,MIG-77ab", ["MIG-1d2c", "MIG-77ab"]),
        ("MIG-GPU-1/2/0", ["MIG-GPU-1/2/0"]),
        ("MIG-1d2c,0", ["MIG-1d2c"]),
    ],
)
def test_the_users_variable_is_the_outer_limit(visible, tokens):
    """In the user's order and words, up to the first invalid entry, as CUDA reads it."""
    assert seen({"CUDA_VISIBLE_DEVICES": visible}) == tokens


def test_every_gpu_is_seen_without_the_variable():
    """By its index, which every library reads."""
    assert find_devices({}, lambda: FOUR) == FOUR


def test_a_mixed_node_goes_by_uuid():
    """CUDA and NVML count such a node differently, unless CUDA is told to count alike."""
    mixed = (gpu(0), gpu(1, H100))
    assert seen({}, mixed) == ["GPU-0aa0", "GPU-1aa1"]
    assert seen({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, mixed) == ["0", "1"]


def test_nothing_is_seen_without_a_driver():
    """The variable cannot make a GPU."""
    assert seen({"CUDA_VISIBLE_DEVICES": "0"}, ()) == []
    assert seen({"CUDA_VISIBLE_DEVICES": "MIG-1d2c"}, ()) == []
    assert seen({}, ()) == []


def test_a_named_device_keeps_its_facts():
    """Only the token is the user's."""
    assert find_devices({"CUDA_VISIBLE_DEVICES": "GPU-3"}, lambda: FOUR) == (gpu(3, token="GPU-3"),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (H100, "GPU_1xH100"),
        ("NVIDIA A10", "GPU_1xA10"),
        ("NVIDIA A10G", "GPU_1xA10G"),
        ("NVIDIA A100-SXM4-80GB", "GPU_1xA100"),
        ("Tesla T4", "GPU_1xT4"),
        ("NVIDIA GeForce RTX 4090", "GPU_1xRTX4090"),
        ("NVIDIA TITAN V", "GPU_1xTITANV"),
        ("MIG", "GPU_1xMIG"),
        ("", "GPU_1xUNKNOWN"),
    ],
)
def test_a_node_has_a_type(name, expected):
    """The name that a driver gives is long; the type has the model."""
    assert type_name((gpu(0, name),)) == expected


def test_a_mixed_node_has_a_type_too():
    """Each model with its number."""
    assert type_name((gpu(0), gpu(1, H100), gpu(2))) == "GPU_2xA10+GPU_1xH100"


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (Options(), 4),
        (Options(num_accelerators=2), 2),
        (Options(num_accelerators=4), 4),
        (Options(accelerator_type="GPU_4xA10"), 4),
        (Options(accelerator_type="GPU_2xA10"), 2),
        (Options(accelerator_type="GPU_4xA10", num_accelerators=3), 3),
    ],
)
def test_a_request_that_fits_gets_its_gpus(options, count):
    """None means all, or as many as the type names."""
    assert allot(options, FOUR, 8.0) == Allotment("gpu", count, FOUR[:count], f"GPU_{count}xA10", "")


def test_a_type_picks_its_model_on_a_mixed_node():
    """The others are left alone."""
    mixed = (gpu(0), gpu(1, H100))
    assert allot(Options(accelerator_type="GPU_1xH100"), mixed, 8.0) == Allotment(
        "gpu", 1, (mixed[1],), "GPU_1xH100", ""
    )


@pytest.mark.parametrize("model", ["RTX4090", "4090"])
def test_a_model_may_be_any_word_of_the_name(model):
    """Users call it by its number."""
    device = gpu(0, "NVIDIA GeForce RTX 4090")
    assert allot(Options(accelerator_type=f"GPU_1x{model}"), (device,), 8.0).devices == (device,)


@pytest.mark.parametrize(
    ("options", "visible", "text"),
    [
        (
            Options(num_accelerators=5),
            None,
            "num_accelerators=5: 4 GPUs are visible on this node (GPU_4xA10, by the driver's list); "
            "give at most 4, or None for all",
        ),
        (
            Options(num_accelerators=5),
            "0,1,2,3",
            "num_accelerators=5: 4 GPUs are visible on this node (GPU_4xA10, CUDA_VISIBLE_DEVICES='0,1,2,3'); "
            "give at most 4, or None for all",
        ),
        (
            Options(accelerator_type="GPU_8xA10"),
            None,
            "accelerator_type=GPU_8xA10: this node is GPU_4xA10 (by the driver's list); "
            "give GPU_4xA10, or leave it out",
        ),
        (
            Options(accelerator_type="GPU_1xA10G"),
            None,
            "accelerator_type=GPU_1xA10G: this node is GPU_4xA10 (by the driver's list); "
            "give GPU_4xA10, or leave it out",
        ),
        (
            Options(accelerator_type="GPU_2xA10", num_accelerators=3),
            None,
            "num_accelerators=3: accelerator_type=GPU_2xA10 names only 2; give at most 2",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_told_what_is_there(options, visible, text):
    """Never fewer in silence: what is visible, why, and what would fit."""
    assert refusal(options, FOUR, visible) == text


def test_a_gpu_type_does_not_fit_a_node_without_gpu():
    """The string that would fit is CPU."""
    assert refusal(Options(accelerator_type="GPU_1xA10"), ()) == (
        "accelerator_type=GPU_1xA10: this node shows no GPU (by the driver's list); give CPU, or leave it out"
    )


def test_mig_slices_cannot_be_joined():
    """One is enough for a run of one rank; two cannot talk to each other."""
    slices = find_devices({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, lambda: FOUR)
    assert allot(Options(num_accelerators=1), slices, 8.0) == Allotment("gpu", 1, slices[:1], "GPU_1xMIG", "")
    assert refusal(Options(), slices) == (
        "num_accelerators=2: NCCL cannot connect MIG slices, so a run can use one; "
        "give 1, or whole GPUs in CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.parametrize(
    ("options", "cores", "visible", "count", "note"),
    [
        (
            Options(),
            8.0,
            None,
            2,
            "no GPU on this node: 2 CPU ranks (gloo); pass num_accelerators to choose another number",
        ),
        (
            Options(),
            8.0,
            "",
            2,
            "no GPU is visible (CUDA_VISIBLE_DEVICES=''): 2 CPU ranks (gloo); "
            "pass num_accelerators to choose another number",
        ),
        (Options(num_accelerators=1), 8.0, None, 1, "no GPU on this node: 1 CPU rank (gloo)"),
        (
            Options(num_accelerators=4),
            1.5,
            None,
            4,
            "no GPU on this node: 4 CPU ranks (gloo) on 1.5 cores",
        ),
        (Options(accelerator_type="CPU"), 8.0, None, 2, ""),
        (
            Options(accelerator_type="CPU", num_accelerators=64),
            1.0,
            None,
            64,
            "64 CPU ranks (gloo) on 1 core",
        ),
    ],
)
def test_a_node_without_gpu_gives_cpu_ranks(options, cores, visible, count, note):
    """Two by default, and one line says so."""
    assert allot(options, (), cores, visible) == Allotment("cpu", count, (), "CPU", note)


def test_cpu_ranks_can_be_asked_for_on_a_gpu_node():
    """Their GPUs stay hidden."""
    assert allot(Options(accelerator_type="CPU", num_accelerators=3), FOUR, 8.0) == Allotment("cpu", 3, (), "CPU", "")


@pytest.mark.parametrize("accelerator_type", [None, "CPU"])
def test_cpu_ranks_have_a_limit(accelerator_type):
    """A number with a digit too many would take the node down."""
    options = Options(num_accelerators=65, accelerator_type=accelerator_type)
    assert refusal(options, ()) == "num_accelerators=65: a node takes at most 64 CPU ranks"


def written(root, files):
    """A folder with these files."""
    for name, text in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8.0),
        ({"proc/self/cgroup": "0::/\n"}, 8.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8.0),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/user/job/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/../unseen\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (
            {
                "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/docker/1d2c\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            8.0,
        ),
        ({"proc/self/cgroup": "4:cpuset:/job\n", "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "1\n"}, 8.0),
    ],
)
def test_a_quota_limits_the_cores(tmp_path, files, cores):
    """Of this cgroup and of every one above it, in both of their versions."""
    assert usable_cores(written(tmp_path, files), affinity=8) == cores


def test_the_cores_of_this_process_are_known():
    """At least a part of one."""
    assert usable_cores() > 0
