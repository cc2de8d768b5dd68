"""From a payload and options to a Run: checks, folder, environment, and the supervisor's orders."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import rundir
from .accelerators import Allotment, allot, find_devices, usable_cores
from .boot import boot
from .engines import Node
from .engines.local import LocalEngine
from .engines.warm import Wanted
from .environment import rank_environment
from .errors import RequestError
from .events import Event
from .options import Options
from .payload import Payload
from .run import Run
from .rundir import RunDir
from .state import RunState
from .views.outlet import outlet
from .views.text import TextView

LOG_CAP = 10 << 30
"""Bytes of one rank's log file."""

ENGINE = LocalEngine()


def launch(payload: Payload, options: Options, *, publish: bool) -> Run[Any]:
    """Starts a run and returns at once.

    Args:
        payload: what every rank shall run.
        options: how, and on how many ranks.
        publish: whether the run serves its view from its own thread; if not, call `Run.watch`.

    Raises:
        RequestError: if this node does not have what is asked for.
        CaptureError: if the payload holds what cannot be sent.
    """
    if "AIR_MAGIC_RUN_ID" in os.environ:
        raise RequestError(
            "a rank cannot launch ranks of its own; call the function itself, without .distributed, inside a run"
        )
    cores = usable_cores()
    allotment = allot(options, find_devices(os.environ), cores)
    run_id = secrets.token_hex(4)
    folder = rundir.create(run_id, rundir.runs_root(os.environ))
    try:
        payload.dump(folder.payload)
        _save_setup(folder)
        folder.shared.mkdir(mode=0o700)
        state = RunState(
            run_id=run_id,
            name=options.name or payload.name,
            world_size=allotment.count,
            accelerator=allotment.type_name,
            log_dir=str(folder.path),
            started_at=time.time(),
            timeout=options.timeout,
            notes=[note for note in (allotment.note, *payload.notes) if note],
        )
        view = TextView(outlet(), state.world_size, log_dir=state.log_dir)
        run: Run[Any] = Run(state, payload.classes, view, label=_cell_label())
        orders = _orders(run_id, folder, options, allotment, cores)
        wanted = _wanted(orders["env"] | options.env) if options.warm and _may_be_warm() else None

        def start(deliver: Callable[[Event], None]) -> Node:
            node = ENGINE.start(orders, deliver, wanted)
            state.notes += ENGINE.notes()
            return node

        _begin(run, start, publish)
    except BaseException:
        folder.remove()
        raise
    return run


def _begin(run: Run[Any], start: Callable[[Callable[[Event], None]], Node], publish: bool) -> None:
    """Begins in a thread of its own: an interrupt in the middle would leave ranks that nobody stops."""
    try:
        with ThreadPoolExecutor(1, "air_magic-start") as thread:
            thread.submit(run.begin, start, publish=publish).result()
    except KeyboardInterrupt:
        run.cancel()
        run.wait(20)  # not for ever: the interrupt may have come before the thread had begun
        raise


def warm_up() -> None:
    """Starts a forkserver in the background, unless ``AIR_MAGIC_WARM=0`` says no."""
    if _may_be_warm():
        ENGINE.warm_up(_wanted(_inherited()))


def _may_be_warm() -> bool:
    return os.environ.get("AIR_MAGIC_WARM", "1") != "0"


def _wanted(env: Mapping[str, str]) -> Wanted:
    return Wanted(_interpreter("engines.forkserver", "main(int(sys.argv[-1]))"), list(sys.path), env, os.getcwd())


def _inherited() -> dict[str, str]:
    """The notebook's variables, but for those that the kernel set for itself: a rank has no page to draw on."""
    inline = {"MPLBACKEND"} if "inline" in os.environ.get("MPLBACKEND", "") else set()
    return {name: value for name, value in os.environ.items() if name not in inline}


def _save_setup(folder: RunDir) -> None:
    """What a rank takes over from this interpreter besides the environment."""
    filters = []
    for entry in warnings.filters:
        try:
            filters.append(pickle.dumps(entry))
        except (pickle.PicklingError, AttributeError, TypeError):
            continue  # a category defined in the notebook: no library raises it
    # In a kernel the arguments are the kernel's own; a script's are its user's.
    argv = [""] if "ipykernel" in sys.modules else list(sys.argv)
    rundir.write_whole(folder.setup, pickle.dumps({"path": list(sys.path), "argv": argv, "filters": filters}))


def _orders(run_id: str, folder: RunDir, options: Options, allotment: Allotment, cores: float) -> dict[str, Any]:
    """What the supervisor is told; see `air_magic.supervisor`."""
    common = _inherited()
    ranks = []
    for rank in range(allotment.count):
        environment = rank_environment(
            common,
            rank=rank,
            local_rank=rank,
            world_size=allotment.count,
            local_world_size=allotment.count,
            master_addr="127.0.0.1",
            master_port=0,  # the supervisor binds the port and fills it in
            run_id=run_id,
            run_dir=str(folder.path),
            cores=cores,
            allotment=allotment,
            extra=options.env,
            executable=sys.executable,
        )
        own = {name: value for name, value in environment.items() if common.get(name) != value}
        ranks.append({"rank": rank, "env": own})
    return {
        "run_id": run_id,
        "node": 0,
        "run_dir": str(folder.path),
        "cwd": os.getcwd(),
        "env": common,
        "ranks": ranks,
        "argv": _interpreter("rank"),
        "store_argv": _interpreter("store"),
        "umask": _umask(),
        "log_cap": LOG_CAP,
    }


def _umask() -> int:
    """The file mode mask, read without setting it, which would show in other threads."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)


def _interpreter(module: str, call: str = "main(sys.argv[-3], int(sys.argv[-2]), int(sys.argv[-1]))") -> list[str]:
    """This interpreter with this one's flags, running one of our modules.

    The folder that ``-c`` puts first on the path goes, so that a user's ``random.py`` cannot break the start;
    the rank takes over the kernel's path, that folder included, before any user code is loaded.
    """
    code = f"import sys; sys.path[:1] = []; {boot(module, call)}"
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # multiprocessing's way
    return [sys.executable, *flags, "-c", code]


def _cell_label() -> Callable[[str], str]:
    """Gives cell files the name that IPython shows, for instance ``Cell In[3]``."""
    if "IPython" not in sys.modules:
        return str
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return str

    def label(filename: str) -> str:
        named = shell.compile.format_code_name(filename)
        return f"{named[0]} {named[1]}" if named else filename

    return label
