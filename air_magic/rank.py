"""A rank's life on one page: set up, load the payload, run it, save how it ended, leave."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import payload, processes, values, workers
from .failure import describe
from .groups import Groups
from .result import Ending, RankFailure
from .rundir import RunDir, write_whole

LEAVE_RETURNED, LEAVE_FAILED = 60, 2
"""Seconds that threads and exit hooks may take once the outcome is written; then the alarm ends the process."""


def main(run_dir: str, rank: int, parent: int, filters: Sequence[Any] = ()) -> None:
    """Runs the payload of ``run_dir`` as ``rank``, below the supervisor ``parent``; does not return.

    Args:
        run_dir: the run's folder.
        rank: which rank.
        parent: the supervisor's pid.
        filters: warning filters of modules that are imported already.
    """
    processes.die_with_parent(parent)
    folder = RunDir(Path(run_dir))
    groups = Groups()
    record: dict[str, Any] = {"value": None, "error": None, "notes": [], "failure": None}
    code = 0
    try:
        try:
            _set_up(folder)
            warnings.filters[:0] = filters  # type: ignore[index] # a list, whatever its stub says
            groups.watch()
            loaded = payload.load(folder.payload)
        except Exception as error:
            _save_failure(record, describe(error, rank, Ending.UNLOADED))
            code = 1
        else:
            try:
                value = loaded.call()
            except SystemExit as request:
                code = _exit_code(request)
                if code:
                    _save_failure(record, describe(request, rank, Ending.RAISED))
                else:
                    record["ending"] = Ending.RETURNED.value
            except BaseException as error:
                code = 1
                _save_failure(record, describe(error, rank, Ending.RAISED))
                if values.dump_exception(error, folder.error(rank), loaded.classes):
                    record["error"] = str(folder.error(rank))
            else:
                record["ending"] = Ending.RETURNED.value
                record["value"], record["notes"] = _save_value(
                    value, folder.values(rank), loaded.classes, f"rank {rank}"
                )
    except KeyboardInterrupt as error:  # asked to stop while loading or saving
        code = 1
        _save_failure(record, describe(error, rank, Ending.RAISED))
    record["process_group"] = bool(groups.inits)
    write_whole(folder.record(rank), json.dumps(record).encode())
    _leave(code)


def _set_up(folder: RunDir) -> None:
    """Makes this interpreter what the notebook's kernel was when it called."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a kernel under nohup ignores it, and so its children
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the supervisor blocks it while a rank starts
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    setup = pickle.loads(folder.setup.read_bytes())
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    warnings.resetwarnings()  # the notebook's filters have this interpreter's own among them, in their place
    for entry in setup["filters"]:
        try:
            warnings.filters.append(pickle.loads(entry))  # type: ignore[attr-defined]
        except Exception as error:
            logging.getLogger(__name__).debug("a warnings filter names a class that is not here: %s", error)
    # Without this, logging shows warnings only, and not where they come from; user code may set up its own.
    logging.lastResort = logging.StreamHandler()
    logging.lastResort.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
    logging.root.setLevel(logging.INFO)
    workers.teach_multiprocessing()


def _save_failure(record: dict[str, Any], failure: RankFailure) -> None:
    record["ending"] = failure.ending.value
    record["failure"] = failure.to_json()


def _save_value(
    value: Any, places: tuple[Path, Path], classes: list[type], origin: str
) -> tuple[str | None, list[str]]:
    """Writes the value where it fits; its path and the warnings."""
    if value is None:
        return None, []
    for place in places:
        try:
            return str(place), values.dump(value, place, classes, origin)
        except OSError as error:
            refusal = f"its value could not be written: {error}"
    return None, [refusal]


def _exit_code(request: SystemExit) -> int:
    """What Python itself would make of it: None is success, text is printed and means 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    with contextlib.suppress(OSError, ValueError):  # user code may have closed it
        print(request.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def _leave(code: int) -> None:
    """Ends the process as the interpreter would, except that nothing native is torn down.

    With gloo, torch 2.13 and 2.14 abort in one of six interpreter exits after FSDP, and hang in others.
    The alarm's default action ends the process even when the interpreter hangs with its lock held.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVE_FAILED if code else LEAVE_RETURNED)
    try:
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are not daemons, as at any exit
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    finally:
        os._exit(code)
