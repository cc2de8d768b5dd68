"""``@distributed``: a function that can also be called on every accelerator of this node."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from .options import Options

if TYPE_CHECKING:
    from .run import Run

P = ParamSpec("P")
R = TypeVar("R")


class DistributedFunction(Generic[P, R]):
    """A function with ``.distributed`` and ``.submit``; called itself, it runs here as if undecorated."""

    def __init__(
        self, function: Callable[P, R], options: Options, origin: DistributedFunction[..., R] | None = None
    ) -> None:
        if not callable(function) and not isinstance(function, classmethod):
            raise TypeError(f"distributed() decorates a function, not {function!r}; options are given by name")
        functools.update_wrapper(self, function)
        self.__wrapped__: Callable[P, R] = function
        self.options = options
        self._origin = self if origin is None else origin  # whose bound twin this is
        self._last_run: Run[R] | None = None

    @property
    def last_run(self) -> Run[R] | None:
        """The latest run of this function, also one that failed or still goes on; a method's by any object."""
        return self._origin._last_run

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function here, in this process."""
        return self.__wrapped__(*args, **kwargs)

    def distributed(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Runs the function on every rank with these arguments and waits.

        Returns:
            One value per rank, in rank order.

        Raises:
            TypeError: if the arguments do not fit the function's signature; nothing is started.
            RequestError: if this node does not have what is asked for; nothing is started.
            CaptureError: if something cannot be sent to the ranks; nothing is started.
            RankFailed: if a rank failed, or the rank's own exception with this as its cause.
            RunTimedOut: if the timeout struck.
            KeyboardInterrupt: if the notebook was interrupted; no process of the run is left then.
        """
        __tracebackhide__ = True
        run = self._launch(args, kwargs, publish=False)
        run.watch()
        return run.result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Starts the function on every rank and returns at once; its output stays with this cell.

        The run ends with this process: a script that needs its values must wait for ``run.result()``.
        """
        __tracebackhide__ = True
        return self._launch(args, kwargs, publish=True)

    def _launch(self, args: Any, kwargs: Any, *, publish: bool) -> Run[R]:
        __tracebackhide__ = True
        inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        from .launch import launch
        from .payload import Payload

        payload = Payload.of_function(self.__wrapped__, args, kwargs)
        self._origin._last_run = run = launch(payload, self.options, publish=publish)
        return run

    def __get__(self, instance: object, owner: type | None = None) -> DistributedFunction[..., R]:
        """A method's twin that is bound to its object, so that ``model.fit.distributed()`` works."""
        if instance is None and not isinstance(self.__wrapped__, classmethod):
            return self
        return DistributedFunction(self.__wrapped__.__get__(instance, owner), self.options, self._origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return DistributedFunction, (self.__wrapped__, self.options)

    def __repr__(self) -> str:
        return f"<distributed {self.__wrapped__!r}>"


@overload
def distributed(func: Callable[P, R], /) -> DistributedFunction[P, R]: ...
@overload
def distributed(
    *,
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    timeout: float | None = 10800,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    tracking: bool = False,
    warm: bool = True,
    engine: str = "local",
    num_nodes: int = 1,
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...
def distributed(
    func: Any = None,
    /,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    timeout: float | None = 10800,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    tracking: bool = False,
    warm: bool = True,
    engine: str = "local",
    num_nodes: int = 1,
) -> Any:
    """Makes a function that runs on N ranks, one per accelerator, when called as ``func.distributed(...)``.

    Works bare (``@distributed``), called (``@distributed(num_accelerators=2)``) and on a function that
    exists (``distributed(num_accelerators=2)(f)``).

    Args:
        func: the function.
        num_accelerators: how many ranks; None for every visible GPU, or 2 CPU ranks where there is no GPU.
        accelerator_type: what the node must have, for instance ``"GPU_8xH100"``; ``"CPU"`` for CPU ranks.
        timeout: seconds after which the run is stopped; None for never. Three hours by default.
        env: variables for every rank, besides the notebook's own.
        name: what the run is called in views; the function's name by default.
        tracking: MLflow tracking; not part of this version, so only False is taken.
        warm: whether ranks may be forked from an interpreter that has imported torch, in milliseconds; if not, each is
            a fresh one.
        engine: where ranks run; ``"local"`` is this node.
        num_nodes: how many nodes; 1 with the local engine.

    Raises:
        RequestError: if an option's value cannot be meant.
    """
    checked = Options.checked(
        num_accelerators=num_accelerators,
        accelerator_type=accelerator_type,
        timeout=timeout,
        env=env,
        name=name,
        tracking=tracking,
        warm=warm,
        engine=engine,
        num_nodes=num_nodes,
    )
    if checked.warm and "AIR_MAGIC_RUN_ID" not in os.environ:  # a rank imports decorated functions too
        from .launch import warm_up

        warm_up()
    if func is None:
        return lambda function: DistributedFunction(function, checked)
    return DistributedFunction(func, checked)
