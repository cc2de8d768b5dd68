"""Options: what a run was asked for, checked before anything starts."""

from __future__ import annotations

import math
import numbers
import operator
import re
import reprlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .accelerators import AcceleratorType, parse_type
from .environment import OWNED
from .errors import RequestError

DEFAULT_TIMEOUT = 10800.0

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Options:
    """What a run was asked for; `checked` is the way to one."""

    num_accelerators: int | None = None
    """The number of ranks; None for every accelerator of this node."""
    accelerator_type: str | None = None
    """``GPU_<n>x<MODEL>`` or ``CPU``; None to take what the node has."""
    timeout: float | None = DEFAULT_TIMEOUT
    """In seconds; None for no limit."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Extra variables of every rank."""
    name: str | None = None
    """What the run is called in views."""
    warm: bool = True
    """Whether ranks may be forked from a forkserver."""

    @classmethod
    def checked(
        cls,
        *,
        num_accelerators: int | None = None,
        accelerator_type: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        tracking: bool = False,
        warm: bool = True,
        engine: str = "local",
        num_nodes: int = 1,
    ) -> Options:
        """The options, or a RequestError that names the first bad one and what it accepts."""
        _refuse_what_is_missing(tracking, engine, num_nodes)
        return cls(
            num_accelerators=_count(num_accelerators),
            accelerator_type=_type(accelerator_type),
            timeout=_timeout(timeout),
            env=_env({} if env is None else env),
            name=_name(name),
            warm=_switch("warm", warm),
        )


def parse_count(text: str) -> int | None:
    """The number of ``--num-accelerators``; ``all`` gives None."""
    if text.strip().lower() in ("all", "none"):
        return None
    if not re.fullmatch(r"\s*0*[1-9][0-9]{0,5}\s*", text):
        raise RequestError(f"--num-accelerators {_shown(text)}: give a whole number from 1, or all")
    return int(text)


def parse_timeout(text: str) -> float | None:
    """The seconds of ``--timeout``: 90, 90s, 15m, 3h; ``none`` and ``off`` give None."""
    if text.strip().lower() in ("none", "off"):
        return None
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([smh]?)\s*", text.lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise RequestError(f"--timeout {_shown(text)}: give a time above 0 such as 90, 90s, 15m or 3h, or none")
    return seconds


def parse_env(items: Sequence[str]) -> dict[str, str]:
    """The variables of every ``--env NAME=VALUE``; the last one counts where a name comes twice."""
    variables: dict[str, str] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign:
            raise RequestError(f"--env {_shown(item)}: give NAME=VALUE")
        _check_variable("--env", name, value)
        variables[name] = value
    return variables


def _refuse_what_is_missing(tracking: Any, engine: Any, num_nodes: Any) -> None:
    """What the interface names and this version has not: refused, never accepted and ignored."""
    if tracking is not False:
        raise RequestError(
            f"tracking={_shown(tracking)}: MLflow tracking is not part of this version; leave tracking out"
        )
    if engine == "ray":
        raise RequestError("engine='ray': the Ray engine is not part of this version; leave engine out")
    if engine != "local":
        raise RequestError(f"engine={_shown(engine)}: there is no such engine; give 'local' or leave engine out")
    if isinstance(num_nodes, bool) or num_nodes != 1:
        raise RequestError(f"num_nodes={_shown(num_nodes)}: this version runs on one node; leave num_nodes out")


def _switch(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{option}={_shown(value)}: give True or False")
    return value


def _count(value: Any) -> int | None:
    if value is None:
        return None
    try:  # integers of NumPy and others are integers; 2.0 and "2" are not
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise RequestError(
            f"num_accelerators={_shown(value)}: give a whole number from 1, or None for every accelerator of this node"
        )
    return count


def _type(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        text = value.upper()  # a member of AcceleratorType becomes plain text by this, too
        if text == AcceleratorType.SIMULATED:
            raise RequestError(
                "accelerator_type=SIMULATED: simulated accelerators are not part of this version; "
                "give CPU, or leave accelerator_type out"
            )
        if text == AcceleratorType.CPU:
            return text
        parts = parse_type(text)
        if parts is not None:
            return f"GPU_{parts[0]}x{parts[1]}"
    raise RequestError(
        f"accelerator_type={_shown(value)}: give GPU_<n>x<model> such as GPU_8xH100, or CPU, or None to detect it"
    )


def _timeout(value: Any) -> float | None:
    if value is None:
        return None
    seconds = 0.0
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    if not 0 < seconds < math.inf:
        raise RequestError(f"timeout={_shown(value)}: give seconds as a number above 0, or None for no limit")
    return seconds


def _env(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise RequestError(f"env={_shown(value)}: give a dict of text to text, such as {{'NCCL_DEBUG': 'INFO'}}")
    for name, text in value.items():
        _check_variable("env", name, text)
    return dict(value)


def _check_variable(option: str, name: Any, value: Any) -> None:
    """Raise for a variable that a process cannot have, or that is the launcher's; values stay out of the text."""
    if not isinstance(name, str) or not name or "=" in name or not _encodable(name):
        raise RequestError(f"{option}: {_shown(name)} cannot name a variable; give text without '=' and NUL")
    if name in OWNED:
        advice = "leave it out"
        if name == "CUDA_VISIBLE_DEVICES":
            advice = "set it in os.environ before the run to limit which GPUs the run may use"
        raise RequestError(f"{option}: {name} is set by the launcher; {advice}")
    if value is None:
        raise RequestError(f"{option}: {name} is None; leave it out, or give '' for an empty variable")
    if not isinstance(value, str):
        raise RequestError(
            f"{option}: {name} is of type {type(value).__name__}, and variables are text; "
            f"put the value in quotes, as in {{{name!r}: '1'}}"
        )
    if not _encodable(value):
        raise RequestError(f"{option}: the value of {name} cannot be put into a variable; give text without NUL")


def _encodable(text: str) -> bool:
    """Whether the system takes ``text`` as a variable's name or value."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def _name(value: Any) -> str | None:
    if value is None:
        return None
    controls = {"Cc", "Cs", "Zl", "Zp"}  # control characters, surrogates, line and paragraph separators
    if (
        not isinstance(value, str)
        or not 0 < len(value.strip()) <= len(value) <= 200
        or any(unicodedata.category(character) in controls for character in value)
    ):
        raise RequestError(f"name={_shown(value)}: give one line of at most 200 characters")
    return str(value)


def _shown(value: Any) -> str:
    """``value`` in one short line."""
    return " ".join(reprlib.repr(value).split())
