"""Thread counts of native libraries in a worker: a task gets as many threads as it has CPUs.

BLAS, OpenMP and torch start one thread for each core in every process: N workers on N cores would compute on N x N
threads. The zygote sets OMP_NUM_THREADS before any library is loaded; OpenBLAS, MKL, BLIS, Arrow and torch read it,
too. For a task with more CPUs, libraries that are loaded already are set through threadpoolctl.

The user's OMP_NUM_THREADS has precedence, in the node's environment or in a task's `runtime_env`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import admission
from fastrt.tasks.resources import Demand, cpus_of

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.ref import ObjectRef
    from fastrt.tasks.runtime_env import Environment

VARIABLE = "OMP_NUM_THREADS"
_OF_BLAS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_DEMANDS_MAX = 1000


def begin(fixed: int) -> bool:
    """Set the count for libraries that this process and its children load from now on.

    Args:
        fixed: the setting `library_threads`.
    Returns:
        Whether the count follows a task's CPUs: neither the user nor the setting fixes it.
    """
    if VARIABLE in os.environ:
        return False
    os.environ[VARIABLE] = str(fixed or 1)
    return not fixed


class NativeThreads:
    """Sets the thread counts of one worker process.

    Args:
        store: the process's attachment.
        follows_cpus: what `begin` returned.
    """

    def __init__(self, store: Store, follows_cpus: bool) -> None:
        self._store = store
        self._follows_cpus = follows_cpus
        self._now = _count(os.environ.get(VARIABLE)) or 0
        self._blas = not any(name in os.environ for name in _OF_BLAS)
        self._known: dict[int, int] = {}  # CPUs by objref of the demand
        self._controller: Any = None
        self._modules = 0  # how many were imported when the controller looked for libraries

    def around(self, task: int, id: int, environment: Environment | None, function: Callable[..., Any]) -> Any:
        """Return what to call instead of a task's function, so that it runs with the task's thread count.

        Args:
            task, id: of the task, which this process has claimed.
            environment: of the task.
            function: the function.
        """
        count = self._asked(environment)
        if count is None and self._follows_cpus:
            count = self._cpus(admission.demand_of(self._store.client, task, id))
        if count is None or count == self._now:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._now
            self._set(count)
            try:
                return function(*args, **kwargs)
            finally:
                self._set(before)

        return call

    def for_actor(self, demand: ObjectRef | None, environment: Environment | None) -> None:
        """Set the counts of an actor's process, before its class is loaded."""
        count = self._asked(environment)
        if count is None and self._follows_cpus:
            count = self._cpus(demand)
        if count is not None and count != self._now:
            self._set(count)

    def _asked(self, environment: Environment | None) -> int | None:
        """Return the count that a `runtime_env` sets; None if it sets none."""
        return None if environment is None else _count(dict(environment.env_vars or ()).get(VARIABLE))

    def _cpus(self, demand: ObjectRef | None) -> int:
        if demand is None:
            return 1
        count = self._known.get(demand.objref)
        if count is None:
            if len(self._known) >= _DEMANDS_MAX:  # each placement group has separate demands
                self._known.clear()
            count = max(1, int(cpus_of(Demand.from_bytes(self._store.get(demand)))))
            self._known[demand.objref] = count
        return count

    def _set(self, count: int) -> None:
        """Set the count for libraries that are loaded now or later."""
        self._now = count
        if not count:  # the user's variable is not a number
            return
        os.environ[VARIABLE] = str(count)
        if self._controller is None or self._modules != len(sys.modules):
            import threadpoolctl  # here: most workers never need it

            self._modules = len(sys.modules)
            self._controller = threadpoolctl.ThreadpoolController()
        limits = {"openmp": count, **({"blas": count} if self._blas else {})}
        self._controller.limit(limits=limits)
        set_torch = getattr(sys.modules.get("torch"), "set_num_threads", None)
        if set_torch is not None:
            set_torch(count)


def _count(text: str | None) -> int | None:
    """Parse a thread count; of a list by nesting level the first is taken. None if it is not a number."""
    first = (text or "").split(",")[0].strip()
    return int(first) or None if first.isdigit() else None
