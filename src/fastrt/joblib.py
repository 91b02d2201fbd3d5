"""joblib on fastrt: after `fastrt.joblib.register()`, `joblib.parallel_config(backend="fastrt")` runs calls as tasks.

joblib groups calls into batches and tunes their size; each batch is a task. A large array among the arguments of many
calls is put into the store once, and every worker reads it there without a copy.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastrt.errors import FastrtError
from fastrt.runtime.nodes import cluster_resources
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import is_large_array
from fastrt.util.executor import Executor
from fastrt.util.futures import TaskFuture

try:
    from joblib._parallel_backends import (
        AutoBatchingMixin,
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
    )
    from joblib.parallel import register_parallel_backend
except ImportError as exc:
    raise ImportError(f"fastrt.joblib needs joblib from 1.3 on: pip install fastrt[joblib] ({exc})") from exc

SHARED_BYTES_MIN = 1 << 20  # joblib's limit for arrays that it maps from files
# Growth of the batch size while calls are short. At joblib's factor of 2, half of the time went to too small batches.
_GROWTH = 8


def register() -> None:
    """Register the joblib backend "fastrt".

    Source:
        `joblib.register_parallel_backend`.
    """
    register_parallel_backend("fastrt", FastrtBackend)


class _Shared:
    """Placeholder in a batch for an array in the store: the position of the array among the task's arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class FastrtBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """Runs joblib's batches as tasks. joblib creates it.

    `n_jobs` is the number of batches that run at once; -1: as many as the cluster has CPUs. Workers get arrays
    read-only, like those that joblib maps. If the program changes an array between two calls of one `Parallel`, the
    second call still gets the old content.

    Args:
        ray_remote_args: settings of the batches' tasks, as for `fastrt.remote`: `joblib.parallel_config("fastrt",
            ray_remote_args={"num_cpus": 2})`. Ray's backend uses the same name.
        **settings: settings of joblib.
    """

    supports_retrieve_callback = True
    supports_timeout = True
    # Sending a batch costs 0.3 ms; joblib assumes processes behind pipes. A tenth of its batch duration is enough.
    MIN_IDEAL_BATCH_DURATION = 0.02

    _effective_batch_size: int  # set by joblib, like the next one
    _smoothed_batch_duration: float

    def __init__(self, ray_remote_args: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._remote_args = ray_remote_args
        self.parallel: Any = None
        self._executor: Executor | None = None
        self._last: tuple[int, Executor] | None = None  # for the next call with as many jobs
        self._store: Store | None = None
        self._arrays: dict[int, tuple[weakref.ref[Any], ObjectRef]] = {}  # in the store, by identity

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many batches run at once.

        Raises:
            ValueError: n_jobs is 0.
        """
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning; -1 means all CPUs")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(int(cluster_resources().get("CPU", 1)) + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Prepare for the calls of one `Parallel`; return how many batches run at once.

        Raises:
            FallbackToBackend: only one batch runs at once, so joblib runs all of them in this process.
        """
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        if self._last is None or self._last[0] != n_jobs:
            self._last = (n_jobs, Executor(n_jobs, remote_args=self._remote_args))
        self._executor = self._last[1]
        return n_jobs

    def compute_batch_size(self) -> int:
        """The number of calls in the next batch."""
        size, duration = self._effective_batch_size, self._smoothed_batch_duration
        if 0 < duration < self.MIN_IDEAL_BATCH_DURATION:
            most = int(2 * size * self.MIN_IDEAL_BATCH_DURATION / duration)
            self._effective_batch_size = max(min(_GROWTH * size, most), 1)
            self._smoothed_batch_duration = self._DEFAULT_SMOOTHED_BATCH_DURATION
            return int(self._effective_batch_size)
        return int(super().compute_batch_size())

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], object] | None = None) -> TaskFuture:
        """Run a batch in a worker.

        Args:
            func: the batch.
            callback: called with the batch's future when it is done.
        Raises:
            FastrtError: the backend was terminated.
        """
        executor = self._executor
        if executor is None:
            raise FastrtError("this joblib backend was terminated: it belongs to a Parallel that has ended")
        refs: list[ObjectRef] = []
        items = getattr(func, "items", ())
        if _has_arrays(items):
            items = [self._share_in(item, refs) for item in items]
        if refs:
            func = copy.copy(func)
            func.items = items  # type: ignore[attr-defined]
            future = executor.submit(_run_shared, func, *refs)
        else:
            future = executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    apply_async = submit  # the name that joblib used before 1.4

    def retrieve_result_callback(self, out: TaskFuture) -> Any:
        """Return the results of a batch, or raise the exception that one of its calls raised."""
        return out.result()

    def terminate(self) -> None:
        """Reset the backend after its `Parallel` has ended."""
        self._executor = None
        self._arrays.clear()
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the other calls after one has failed, and end the workers that run them."""
        if self._executor is not None:
            self._executor.kill()
            self._executor = self._last = None
        self._arrays.clear()
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def _share_in(self, item: tuple[Any, Any, Any], refs: list[ObjectRef]) -> tuple[Any, Any, Any]:
        function, args, kwargs = item
        return (
            function,
            tuple(self._share(arg, refs) for arg in args),
            {name: self._share(arg, refs) for name, arg in kwargs.items()},
        )

    def _share(self, value: Any, refs: list[ObjectRef]) -> Any:
        """Replace a large array by its position in `refs`; return other values as they are."""
        if not is_large_array(value, SHARED_BYTES_MIN):
            return value
        ref = self._put_once(value)
        if ref not in refs:
            refs.append(ref)
        return _Shared(refs.index(ref))

    def _put_once(self, array: Any) -> ObjectRef:
        store = store_client.require()
        if store is not self._store:
            self._arrays.clear()
            self._store = store
            store.users.add(self)
        found = self._arrays.get(id(array))
        if found is None or found[0]() is not array:
            found = self._arrays[id(array)] = (weakref.ref(array), store.put(array))
        return found[1]

    def forget(self) -> None:
        """Drop all references to the session that has ended, so that its segment can be unmapped."""
        self._arrays.clear()
        self._store = None


def _has_arrays(items: Iterable[tuple[Any, Any, Any]]) -> bool:
    """Whether any argument is an array. Most batches have many calls and no array, so this check must be cheap."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    kind = numpy.ndarray
    for _, args, kwargs in items:
        for arg in args:
            if type(arg) is kind:
                return True
        if kwargs and any(type(arg) is kind for arg in kwargs.values()):
            return True
    return False


def _run_shared(batch: Any, *arrays: Any) -> Any:
    """Run a batch in the worker, with the arrays in the places of their placeholders."""

    def whole(values: Iterable[Any]) -> list[Any]:
        return [arrays[value.number] if type(value) is _Shared else value for value in values]

    batch.items = [
        (function, tuple(whole(args)), dict(zip(kwargs, whole(kwargs.values()), strict=True)))
        for function, args, kwargs in batch.items
    ]
    return batch()
