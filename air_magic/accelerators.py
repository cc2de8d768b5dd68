"""Which accelerators this node has, and whether a request fits them.

The kernel calls this, so GPUs are listed through NVML: that opens no CUDA context.
"""

from __future__ import annotations

import enum
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RequestError

if TYPE_CHECKING:
    from .options import Options

MAX_CPU_RANKS = 64

_TYPE = re.compile(r"GPU_([1-9][0-9]{0,5})x([A-Z0-9]+)", re.IGNORECASE)
_BRANDS = frozenset({"NVIDIA", "GEFORCE", "TESLA", "QUADRO", "GRID", "GRAPHICS", "DEVICE"})


class AcceleratorType(str, enum.Enum):
    """The accelerators with a name of their own; any ``GPU_<n>x<model>`` text does as well."""

    GPU_1xA10 = "GPU_1xA10"
    GPU_1xH100 = "GPU_1xH100"
    GPU_8xH100 = "GPU_8xH100"
    GPU_8xB300 = "GPU_8xB300"
    CPU = "CPU"
    SIMULATED = "SIMULATED"


@dataclass(frozen=True)
class Device:
    """One GPU that the user may see."""

    index: int
    """NVML's number, which is PCI order; -1 for a MIG slice."""
    uuid: str
    name: str
    memory: int
    """In bytes; 0 where it is not known."""
    visible_as: str
    """What stands for it in ``CUDA_VISIBLE_DEVICES``."""


@dataclass(frozen=True)
class Allotment:
    """What the ranks of a run compute on."""

    kind: str
    """``gpu`` or ``cpu``."""
    count: int
    """The number of ranks."""
    devices: tuple[Device, ...]
    """One for each rank, by local rank; empty for CPU ranks."""
    type_name: str
    """``GPU_2xA10`` and the like, or ``CPU``."""
    note: str
    """One line for the user, or an empty string."""


def parse_type(text: str) -> tuple[int, str] | None:
    """The number and the model (in capitals) of ``GPU_<n>x<model>``, or None for any other text."""
    match = _TYPE.fullmatch(text)
    return (int(match[1]), match[2].upper()) if match else None


def nvml_devices(nvml: Any = None) -> tuple[Device, ...]:
    """Every GPU that the driver lists; none where there is no driver or NVML cannot answer."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return ()
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return tuple(_nvml_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _nvml_device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # a GPU that shares the host's memory has none to report
        memory = 0
    return Device(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory, str(index))


def find_devices(
    environ: Mapping[str, str], probe: Callable[[], tuple[Device, ...]] = nvml_devices
) -> tuple[Device, ...]:
    """The GPUs that the user may see, in the user's order; ``CUDA_VISIBLE_DEVICES`` is the outer limit."""
    devices = probe()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        # NVML counts in PCI order, CUDA puts the fastest first unless told otherwise: the same
        # index could name two GPUs of a mixed node, a UUID cannot. Where all are alike an index
        # is the better token, since some libraries read nothing else.
        if len({device.name for device in devices}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return tuple(replace(device, visible_as=device.uuid) for device in devices)
        return devices
    tokens = [token.strip() for token in visible.split(",")]
    kind = next((prefix for prefix in ("GPU-", "MIG-") if tokens[0].startswith(prefix)), "")
    found: list[Device] = []
    for token in tokens:
        device = _named(token, kind, devices)
        if device is None:  # as CUDA does: what follows an invalid entry is not seen
            break
        # The user's own token goes on: it means to the ranks what it means to the user, whatever
        # CUDA_DEVICE_ORDER says (on a mixed node the name shown is right in PCI order only).
        found.append(replace(device, visible_as=token))
    # As CUDA does too: a GPU named twice makes all of them invisible.
    return tuple(found) if len({device.uuid for device in found}) == len(found) else ()


def _named(token: str, kind: str, devices: tuple[Device, ...]) -> Device | None:
    """The device that one entry names; all entries are of the first one's kind."""
    if kind == "MIG-":
        return Device(-1, token, "MIG", 0, token) if devices and token.startswith(kind) else None
    if kind == "GPU-":
        matches = [device for device in devices if token.startswith(kind) and device.uuid.startswith(token)]
    else:
        matches = [device for device in devices if re.fullmatch("[0-9]+", token) and device.index == int(token)]
    return matches[0] if len(matches) == 1 else None


def allot(options: Options, devices: tuple[Device, ...], cores: float, visible: str | None = None) -> Allotment:
    """What the request gets of this node; RequestError where the node has less or something else.

    Args:
        options: the request.
        devices: from `find_devices`.
        cores: from `usable_cores`; said in the note where CPU ranks must share them.
        visible: the value of ``CUDA_VISIBLE_DEVICES``, for the error to say why no more is there.
    """
    number, wanted = options.num_accelerators, options.accelerator_type
    why = "by the driver's list" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    if wanted == AcceleratorType.CPU:
        return _cpu_ranks(number, cores, "")
    if wanted is None and not devices:
        reason = "no GPU on this node" if visible is None else f"no GPU is visible ({why})"
        return _cpu_ranks(number, cores, reason)
    fitting, limit = devices, len(devices)
    if wanted is not None:
        parts = parse_type(wanted)
        assert parts is not None, "Options.checked lets no other text pass"
        limit, model = parts
        fitting = tuple(device for device in devices if model in _words(device.name))
        if len(fitting) < limit:
            here = type_name(devices)
            what = f"is {here}" if devices else "shows no GPU"
            raise RequestError(f"accelerator_type={wanted}: this node {what} ({why}); give {here}, or leave it out")
    if number is not None and number > limit:
        if wanted is not None:
            raise RequestError(
                f"num_accelerators={number}: accelerator_type={wanted} names only {limit}; give at most {limit}"
            )
        raise RequestError(
            f"num_accelerators={number}: {limit} GPU{'s are' if limit > 1 else ' is'} visible on this node "
            f"({type_name(devices)}, {why}); give at most {limit}, or None for all"
        )
    chosen = fitting[: number or limit]
    if len(chosen) > 1 and any(device.uuid.startswith("MIG-") for device in chosen):
        raise RequestError(
            f"num_accelerators={len(chosen)}: NCCL cannot connect MIG slices, so a run can use one; "
            "give 1, or whole GPUs in CUDA_VISIBLE_DEVICES"
        )
    return Allotment("gpu", len(chosen), chosen, type_name(chosen), "")


def _cpu_ranks(number: int | None, cores: float, reason: str) -> Allotment:
    """CPU ranks, with a note on why they are no GPU ranks and how many cores they share."""
    count = 2 if number is None else number
    if count > MAX_CPU_RANKS:
        raise RequestError(f"num_accelerators={count}: a node takes at most {MAX_CPU_RANKS} CPU ranks")
    note = f"{count} CPU rank{'s' if count > 1 else ''} (gloo)"
    if count > cores:
        note += f" on {cores:g} core{'s' if cores > 1 else ''}"
    elif not reason:
        note = ""
    if reason:
        note = f"{reason}: {note}" + ("; pass num_accelerators to choose another number" if number is None else "")
    return Allotment("cpu", count, (), "CPU", note)


def type_name(devices: tuple[Device, ...]) -> str:
    """What these devices are called as an accelerator type: ``GPU_4xA10``, or ``CPU`` for none."""
    models = Counter(_words(device.name)[0] for device in devices)
    return "+".join(f"GPU_{count}x{model}" for model, count in models.items()) or "CPU"


def _words(name: str) -> list[str]:
    """The words of an NVML name that can stand for the model, the usual one first: H100, A10G, RTX4090."""
    words = [word for word in re.split("[^A-Z0-9]+", name.upper()) if word and word not in _BRANDS] or ["UNKNOWN"]
    if len(words) > 1 and not re.search("[0-9]", words[0]):  # RTX 4090, TITAN V
        words.insert(0, words[0] + words[1])
    return words


def usable_cores(root: Path = Path("/"), affinity: int | None = None) -> float:
    """How many cores this process may keep busy: its affinity, or less where a cgroup has a quota.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
        affinity: the number of cores it may be scheduled on; asked of the system by default.
    """
    available = len(os.sched_getaffinity(0)) if affinity is None else affinity
    return min([float(available), *_quotas(root)])


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of this process' cgroup and of those above it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = top / path.lstrip("/")  # a container may see only the top, mounted as its own
        for level in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            if controllers:
                limit = f"{_read(level / 'cpu.cfs_quota_us')} {_read(level / 'cpu.cfs_period_us')}".split()
            else:
                limit = _read(level / "cpu.max").split()
            if len(limit) == 2 and limit[0].isdecimal():  # "max" and "-1" are no limit
                yield int(limit[0]) / int(limit[1])


def _read(file: Path) -> str:
    """The file's text; empty where it is missing or may not be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
