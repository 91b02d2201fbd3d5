"""Dask collections on fastrt: `dask.config.set(scheduler=fastrt.dask.get)`.

Every task of the graph becomes a fastrt task whose arguments are the results that it needs. All of them are submitted
at once: intermediate results stay in the store, and the caller gets only the requested ones. An intermediate result is
freed as soon as the last task that needs it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fastrt.store import client as store_client
from fastrt.store.as_completed import as_completed
from fastrt.store.ref import ObjectRef
from fastrt.tasks.remote import RemoteFunction
from fastrt.util.calls import as_raised, withdraw

try:
    from dask._task_spec import Alias, DataNode, convert_legacy_graph
    from dask.callbacks import local_callbacks, unpack_callbacks
    from dask.order import order
except ImportError as exc:
    raise ImportError(f"fastrt.dask needs dask from 2024.12 on: pip install fastrt[dask] ({exc})") from exc

Key = Any  # of a graph: text, a number, or a tuple of these
_INLINE_BYTES_MAX = 1024  # data of the graph up to this size is sent with each task that needs it


def get(dsk: Any, keys: Any, callbacks: Any = None, **settings: Any) -> Any:
    """Compute some keys of a graph: the scheduler function for Dask.

    Args:
        dsk: a graph: a dict of tuples or of Dask's `Task`, or an object with `__dask_graph__`.
        keys: a key, or a list of keys, or lists of lists of them.
        callbacks: Dask callbacks, besides the active ones. With any callback, this process reads every task's value.
        **settings: settings of other schedulers (num_workers, pool); ignored, because the session's workers run the
            tasks.
    Returns:
        The value of the key, or tuples of values in the shape of `keys`. Arrays are read-only views of the store.
    Raises:
        KeyError: a key is not in the graph.
        ValueError: the graph has a cycle.
        Exception: the exception that a task raised, with the remote traceback as its cause.
    Source:
        `dask.threaded.get`.
    """
    if not isinstance(dsk, Mapping):
        dsk = dsk.__dask_graph__()
    graph = convert_legacy_graph(dsk)
    wanted = list(dict.fromkeys(_flat(keys)))
    with local_callbacks(callbacks) as active:
        if not active:
            return _shape(keys, _collect(_Submitted(graph, wanted), wanted))
        return _shape(keys, _compute_watched(graph, wanted, active))


class _Submitted:
    """A graph, all of whose tasks this class submits.

    Args:
        graph: Dask's nodes by key.
        wanted: the keys whose results are kept.
        keep: keep the results of all tasks, not only of `wanted`.
    """

    def __init__(self, graph: Mapping[Key, Any], wanted: list[Key], keep: bool = False) -> None:
        self.values: dict[Key, Any] = {}  # of nodes that are data
        self.refs: dict[Key, ObjectRef] = {}
        needed = _needed(graph, wanted)
        self.tasks: list[Key] = []
        # For each key, the number of tasks still to be submitted that need it. At zero this process drops its
        # reference, and only the submitted tasks keep the result alive.
        users = Counter(dep for key in needed for dep in graph[key].dependencies)
        users.update(list(needed) if keep else wanted)
        ranks = order({key: graph[key] for key in needed})
        try:
            for key in sorted(needed, key=ranks.__getitem__):
                self._submit(key, graph[key])
                for dep in graph[key].dependencies:
                    users[dep] -= 1
                    if not users[dep]:
                        self.refs.pop(dep, None)
                        self.values.pop(dep, None)
        except BaseException:
            self.withdraw()
            raise

    def _submit(self, key: Key, node: Any) -> None:
        if isinstance(node, DataNode):
            self._keep_data(key, node())
        elif isinstance(node, Alias):
            (target,) = node.dependencies
            if target in self.refs:
                self.refs[key] = self.refs[target]
            else:
                self.values[key] = self.values[target]
        else:
            deps = list(node.dependencies)
            inputs = [self.refs[dep] if dep in self.refs else self.values[dep] for dep in deps]
            self.refs[key] = _run.remote(node, deps, *inputs)
            self.tasks.append(key)

    def _keep_data(self, key: Key, value: Any) -> None:
        nbytes = getattr(value, "nbytes", 0 if isinstance(value, (int, float, str, bytes, type(None))) else None)
        if isinstance(value, (str, bytes)):
            nbytes = len(value)
        if nbytes is not None and nbytes <= _INLINE_BYTES_MAX:
            self.values[key] = value
        else:
            self.refs[key] = store_client.put(value)

    def withdraw(self) -> None:
        """Cancel the tasks that have not begun: their results are no longer needed."""
        store = store_client.require()
        for ref in self.refs.values():
            withdraw(store, ref)


def _collect(submitted: _Submitted, wanted: list[Key]) -> dict[Key, Any]:
    """Wait for the values of the wanted keys."""
    keys = [key for key in wanted if key in submitted.refs]
    try:
        values = store_client.get([submitted.refs[key] for key in keys])
        return {**submitted.values, **dict(zip(keys, values, strict=True))}
    except BaseException as exc:
        submitted.withdraw()
        raised = as_raised(exc)
    try:
        raise raised from raised.__cause__  # here its context is not `exc`, which names it: a cycle
    finally:
        del raised  # it refers to this frame: together they would be a cycle, too


def _compute_watched(graph: Mapping[Key, Any], wanted: list[Key], active: Any) -> dict[Key, Any]:
    """Compute, and report each task to Dask's callbacks, such as its progress bar and profilers."""
    unpack: Any = unpack_callbacks
    started, start_state, pretask, posttask, finish = unpack(active)
    for call in started:
        call(graph)
    state: dict[str, Any] = {"cache": {}, "waiting": {}, "ready": [], "running": set(), "finished": set()}
    failed = True
    try:
        state["ready"] = [key for key in _needed(graph, wanted) if not isinstance(graph[key], (DataNode, Alias))]
        for call in start_state:
            call(graph, state)
        submitted = _Submitted(graph, wanted, keep=True)
        state["ready"], state["running"] = [], set(submitted.tasks)
        for key in submitted.tasks:
            for call in pretask:
                call(key, graph, state)
        by_ref = {submitted.refs[key]: key for key in submitted.tasks}
        for ref in as_completed(list(by_ref)):
            key = by_ref[ref]
            state["running"].discard(key)
            state["finished"].add(key)
            value = _collect(submitted, [key])[key]
            for call in posttask:
                call(key, value, graph, state, None)
        failed = False
        return _collect(submitted, wanted)
    finally:
        for call in finish:
            call(graph, state, failed)


def _needed(graph: Mapping[Key, Any], wanted: list[Key]) -> dict[Key, None]:
    """Return the wanted keys and all keys that they depend on."""
    found: dict[Key, None] = {}
    todo = list(reversed(wanted))
    while todo:
        key = todo.pop()
        if key in found:
            continue
        if key not in graph:
            raise KeyError(f"{key!r} is not a key of the graph")
        found[key] = None
        todo += graph[key].dependencies
    return found


def _flat(keys: Any) -> Iterator[Key]:
    if isinstance(keys, list):
        for key in keys:
            yield from _flat(key)
    else:
        yield keys


def _shape(keys: Any, values: Mapping[Key, Any]) -> Any:
    return tuple(_shape(key, values) for key in keys) if isinstance(keys, list) else values[keys]


def _run_node(node: Any, deps: list[Key], *values: Any) -> Any:
    """Run one task of the graph in the worker."""
    return node(dict(zip(deps, values, strict=True)))


_run = RemoteFunction(_run_node)
