"""User code that only has to type-check: the decorator keeps a function's signature and its value's type."""

from __future__ import annotations

import dataclasses

from typing_extensions import assert_type

from air_magic import Run, distributed


@distributed
def bare(epochs: int, name: str = "x") -> float:
    """A function decorated without a call."""
    return float(epochs) + len(name)


@distributed(num_accelerators=2, timeout=None)
def called(epochs: int) -> dict[str, int]:
    """A function decorated with options."""
    return {"epochs": epochs}


def plain(flag: bool) -> None:
    """A function decorated later."""


later = distributed(num_accelerators=2)(plain)


@dataclasses.dataclass
class Model:
    """A class with a distributed method."""

    width: int


assert_type(bare(1), float)
assert_type(bare.distributed(3, name="y"), list[float])
assert_type(called.submit(3), Run[dict[str, int]])
assert_type(called.submit(epochs=3).result(), list[dict[str, int]])
assert_type(later.distributed(True), list[None])
bare.distributed("three")  # type: ignore[arg-type] # arguments are checked
bare.distributed()  # type: ignore[call-arg] # and counted
