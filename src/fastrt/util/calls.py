"""Turn calls of arbitrary callables into tasks: some callables are shipped once, others are sent with each call.

A function that workers can import by its name, or that depends only on globals, is shipped once, like a function of
`fastrt.remote`. Any other callable (a bound method, a closure, an object) may change between two calls, so it is
pickled with each; one that is mapped over many arguments is put into the store, and each worker loads it once.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import BrokenExecutor
from typing import Any

from fastrt._core.objects import pending
from fastrt._core.tasks import tally
from fastrt._core.tasks import tasks as core
from fastrt.error_chains import assign
from fastrt.errors import TaskCancelledError, TaskError, format_user_traceback
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks.remote import RemoteFunction

_SHIPPED_MAX = 256
_LOADED_MAX = 32


class InitializerFailedError(BrokenExecutor):
    """The initializer raised in a worker, so no call can be run. Its traceback is in the message."""


class Kept:
    """A callable that many calls share. It is sent once, in its state at the first call."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._refs: tuple[Store, list[ObjectRef]] | None = None

    def refs(self) -> list[ObjectRef]:
        """The reference to the callable in this process's session, in a list."""
        store = store_client.require()
        if self._refs is None or self._refs[0] is not store:
            self._refs = (store, [store.put(self.fn)])
            store.users.add(self)
        return self._refs[1]

    def forget(self) -> None:
        """Drop the reference to a session that has ended, so that its segment can be unmapped."""
        self._refs = None


class Calls:
    """Starts calls of any callables as tasks.

    Args:
        retries: how often a task runs again after its worker died.
        initializer: called once in each worker before the first of these calls, if not None.
        initargs: its arguments.
        options: further settings of the tasks, as for `fastrt.remote`.
    """

    def __init__(
        self,
        retries: int,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._retries = retries
        self._options = dict(options or {})
        self._made: dict[Callable[..., Any], RemoteFunction] = {}  # with these options
        self._setup = None if initializer is None else (os.urandom(16), initializer, initargs)
        self._setup_ref: tuple[Store, ObjectRef] | None = None

    def start(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectRef:
        """Submit one call.

        Args:
            fn: anything that can be called and pickled, or a `Kept`.
            args, kwargs: its arguments; ObjectRefs among them are replaced by their values.
        Returns:
            A reference to its result.
        Raises:
            TypeError: the arguments do not fit.
            FastrtError: the call cannot be pickled, or the store is full, or there is no session.
        """
        ref: ObjectRef
        kept = fn if type(fn) is Kept else None
        if kept is not None:
            fn = kept.fn
        if self._setup is not None:
            ref = self._shipped(_call_after).remote(self._setup[0], self._kept_setup(), fn, *args, **kwargs)
        elif is_shippable(fn):
            ref = self._shipped(fn).remote(*args, **kwargs)
        elif kept is not None:
            ref = self._shipped(call_kept).remote(kept.refs(), *args, **kwargs)
        else:
            ref = self._shipped(_call).remote(fn, *args, **kwargs)
        return ref

    def start_each(self, fn: Callable[..., Any], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Submit a call for each tuple of arguments; an exception that prevents a submission takes its place.

        Args:
            fn: as for `start`.
            rows: positional arguments of each call.
        Returns:
            A list of references and exceptions.
        """
        first: tuple[Any, ...] = ()
        if self._setup is not None:
            remote = self._shipped(_call_after).remote
            first = (self._setup[0], self._kept_setup(), fn)
        elif is_shippable(fn):
            remote = self._shipped(fn).remote
        else:
            remote = self._shipped(call_kept).remote
            first = (Kept(fn).refs(),)
        started: list[Any] = []
        for row in rows:
            try:
                started.append(remote(*first, *row))
            except Exception as exc:  # it belongs to that call's result
                started.append(exc)
        return started

    def _shipped(self, fn: Callable[..., Any]) -> RemoteFunction:
        if not self._options:
            return _shipped(fn, self._retries)
        made = self._made.get(fn)
        if made is None:
            if len(self._made) >= _SHIPPED_MAX:
                self._made.clear()
            made = self._made[fn] = RemoteFunction(fn, **{"max_retries": self._retries, **self._options})
        return made

    def _kept_setup(self) -> list[ObjectRef]:
        store = store_client.require()
        if self._setup_ref is None or self._setup_ref[0] is not store:
            assert self._setup is not None
            self._setup_ref = (store, store.put(self._setup[1:]))
            store.users.add(self)
        return [self._setup_ref[1]]

    def forget(self) -> None:
        """Drop the reference to a session that has ended, so that its segment can be unmapped."""
        self._setup_ref = None


def is_shippable(fn: Any) -> bool:
    """Whether a callable can be sent once for all calls, because it has no state that could change between them."""
    kind = type(fn)
    if kind is types.BuiltinFunctionType:
        return fn.__self__ is None or isinstance(fn.__self__, types.ModuleType)
    if kind is not types.FunctionType or inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        return False
    if fn.__closure__ is None and fn.__defaults__ is None and fn.__kwdefaults__ is None:
        return True
    return fn.__module__ != "__main__" and _by_name(fn) is fn


def _by_name(fn: Any) -> Any:
    found: Any = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


@functools.lru_cache(_SHIPPED_MAX)
def _shipped(fn: Callable[..., Any], retries: int) -> RemoteFunction:
    return RemoteFunction(fn, max_retries=retries)


def withdraw(store: Store, ref: ObjectRef, then: Callable[[], object] = lambda: None) -> bool:
    """Cancel the call that makes `ref`, if no worker has begun it.

    Args:
        store: this process's attachment.
        ref: the result of the call, which becomes a TaskCancelledError.
        then: called after the call is withdrawn, and before its result is set.
    Returns:
        Whether the call is cancelled.
    """
    task = pending.withdraw(store.client, ref)
    if task < 0:
        return False
    then()
    store.put_error(task, TaskCancelledError(f"the call that makes {ref!r} was cancelled before it started"))
    core.finish(store.client, task, tally.CANCELLED)
    return True


def as_raised(exc: BaseException) -> BaseException:
    """The exception of a call in its original type, with the remote traceback as its cause."""
    if not isinstance(exc, TaskError) or exc.cause is None:
        return exc
    cause = exc.cause
    assign(cause, __cause__=TaskError(exc.task_name, exc.pid, exc.traceback_text))
    return cause


# ---- in the worker ----

_ready: dict[bytes, str | None] = {}  # initializers that were called here, with the traceback of those that raised
_loaded: OrderedDict[int, Callable[..., Any]] = OrderedDict()


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def call_kept(kept: list[ObjectRef], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function of a `Kept`, given its `refs`, which each process loads once."""
    objref = kept[0].objref
    fn = _loaded.get(objref)
    if fn is None:
        fn = _loaded[objref] = store_client.get(kept[0])
        while len(_loaded) > _LOADED_MAX:
            _loaded.popitem(last=False)
    return fn(*args, **kwargs)


def _call_after(key: bytes, kept: list[ObjectRef], fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if key not in _ready:
        initializer, initargs = store_client.get(kept[0])
        try:
            initializer(*initargs)
        except BaseException as exc:  # user code; a SystemExit must be reported too
            _ready[key] = format_user_traceback(exc)
        else:
            _ready[key] = None
    failed = _ready[key]
    if failed is not None:
        raise InitializerFailedError(f"the initializer raised in process {os.getpid()}; no call can be run\n{failed}")
    return fn(*args, **kwargs)


def run_chunk(fn: Callable[..., Any], rows: list[tuple[Any, ...]]) -> list[Any]:
    """Call `fn` with each tuple of arguments; return the results in order."""
    return [fn(*row) for row in rows]


def run_each(fn: Callable[..., Any], items: list[Any]) -> list[Any]:
    """Call `fn` with each item; return the results in order."""
    return list(map(fn, items))
