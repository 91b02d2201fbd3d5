"""`fastrt.init(local_mode=True)`: the whole program in one process and one thread, in order, for a debugger.

A task runs inside its `.remote(...)`, an actor's method inside its call, so `breakpoint()` works in either and the
stack shows the caller. Arguments and results are serialized and rebuilt, as between processes, so that values that
cannot be pickled, and functions that change their arguments, are found here too. Functions and classes run directly,
not as copies: breakpoints, coverage and patches work, and all code sees their assignments to global variables.
"""

from __future__ import annotations

import asyncio
import bdb
import concurrent.futures
import contextvars
import inspect
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn

from fastrt._core.tasks.tasks import PATH_STEP
from fastrt.engines.generator import DYNAMIC, STREAMING, LocalGenerator
from fastrt.engines.handle import EngineHandle
from fastrt.engines.local_actor import LocalActor, may_retry, outside_of_loops
from fastrt.error_chains import assign
from fastrt.errors import (
    GetTimeoutError,
    ObjectStoreFullError,
    SerializationError,
    TaskError,
    UnsupportedError,
    format_user_traceback,
)
from fastrt.store import engine as engines
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import contained_ref, deserialize, serialize
from fastrt.tasks import namespaces
from fastrt.tasks.actor_class import taken_error
from fastrt.tasks.actor_handle import not_found
from fastrt.tasks.exit_actor import LEFT, ActorLeaves
from fastrt.tasks.method import MethodPlan, methods_of
from fastrt.tasks.runtime_env import OPTION as ENVIRONMENT

_PAUSE_S = 0.0005
_PASSES = 100  # of event loops without a sleep between two
_AS_THEY_ARE = (SerializationError, ObjectStoreFullError)
_END_THE_PROGRAM = (KeyboardInterrupt, bdb.BdbQuit)  # raised by the user; they do not become a result
_writing = threading.local()


class Stored:
    """A serialized value: its bytes, and the references and handles that it contains.

    Args:
        value: the value to store.
        error: whether `get` raises it.
        cause: the original exception of an error, with the frames in which it was raised.
    """

    def __init__(self, value: object, error: bool = False, cause: BaseException | None = None) -> None:
        outer = getattr(_writing, "inner", None)
        self.inner: list[Any] = []
        _writing.inner = self.inner
        try:
            parts = serialize(value)
            self._kind, self._data = parts.kind, parts.to_bytes()
        finally:
            _writing.inner = outer
        self.error = error
        self._cause = cause

    def load(self) -> Any:
        """Rebuild the value.

        Raises:
            Exception: the value, if it is an error.
        """
        value = deserialize(self._kind, self._data, self.inner)
        if not self.error:
            return value
        if self._cause is not None:
            assign(value, __cause__=self._cause)
        try:
            raise value
        finally:
            del value  # with its traceback it would be a cycle that only the garbage collector frees


class LocalRef(ObjectRef):
    """A reference of a session in one process. It holds the value itself.

    Args:
        engine: the session.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._number = next(engine.numbers)
        self.stored: Stored | None = None  # None until the coroutine that makes it has ended
        self.abort: Callable[[], object] | None = None  # ends that coroutine

    def hex(self) -> str:
        """Return the reference's number as 16 hex digits."""
        return f"{self._number:016x}"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return contained_ref, (keep_inner(self),)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the value without blocking the event loop; raise what `fastrt.get` would raise."""
        while self.stored is None:
            self._engine.pass_on()
            yield from asyncio.sleep(_PAUSE_S).__await__()
        return self.stored.load()

    def future(self) -> concurrent.futures.Future[Any]:
        """Wait for the value, and return a finished `concurrent.futures.Future` that holds it."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._engine.get(self, None))
        except BaseException as exc:  # every exception of the task is the future's result
            future.set_exception(exc)
        return future


def keep_inner(what: Any) -> int:
    """Add a reference or handle to the contents of the value that is being pickled; return its position there.

    Raises:
        SerializationError: it is pickled outside of this session's values.
        StaleReferenceError: it belongs to a session that has ended.
    """
    inner: list[Any] | None = getattr(_writing, "inner", None)
    if inner is None:
        raise SerializationError(f"{what!r} lives in this process, and only inside of its session (local_mode=True)")
    if what._engine is not engines.current():
        raise engines.stale(what)
    inner.append(what)
    return len(inner) - 1


class LocalHandle(EngineHandle):
    """A handle of an actor in this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return contained_ref, (keep_inner(self),)


class Running:
    """A running task or call, for `fastrt.runtime_context()`."""

    def __init__(self, name: str, path: int, actor: LocalActor | None = None) -> None:
        self.name = name
        self.path = path
        self.actor = actor
        self.submitted = itertools.count(path * PATH_STEP + 1)  # as the core counts


class LocalEngine:
    """A session in one process.

    Args:
        num_workers: number of CPUs that it reports; tasks run one at a time anyway.
        resources: other resources that it reports.
    """

    name = "local"

    def __init__(self, num_workers: int, resources: Mapping[str, float]) -> None:
        self.numbers = itertools.count(1)
        self._resources = {"CPU": float(num_workers), **resources}
        self._root = Running("", 0)
        self.running: contextvars.ContextVar[Running] = contextvars.ContextVar("running", default=self._root)
        self._names: dict[str, Callable[[], LocalActor | None]] = {}  # returns the actor, or None if no handle is left
        self._actors: weakref.WeakSet[LocalActor] = weakref.WeakSet()
        self.busy: set[LocalActor] = set()  # keeps actors alive until their coroutines end, even without a handle
        self._lock = threading.RLock()

    def close(self) -> None:
        """End the session: its coroutines are cancelled."""
        for actor in list(self._actors):
            actor.close()
        self.busy.clear()
        self._names.clear()

    # ---- values ----

    def put(self, value: object) -> ObjectRef:
        """Serialize a value and keep it."""
        ref = LocalRef(self)
        ref.stored = Stored(value)
        return ref

    def get(self, refs: ObjectRef | Sequence[ObjectRef], timeout: float | None) -> Any:
        """Rebuild one value or several.

        Raises:
            GetTimeoutError: a coroutine has not ended in time.
            TypeError: something is not a reference.
        """
        if isinstance(refs, ObjectRef):
            return self.get([refs], timeout)[0]
        if not isinstance(refs, (list, tuple)):
            raise TypeError(f"get takes an ObjectRef or a list of them, not {type(refs).__name__}")
        listed = [self._mine(ref) for ref in refs]
        if not self._drive(lambda: all(ref.stored is not None for ref in listed), timeout):
            late = [ref for ref in listed if ref.stored is None]
            raise GetTimeoutError(
                f"{len(late)} of {len(listed)} objects were not ready after {timeout} s, the first is {late[0]}; "
                "wait again, or cancel the task"
            )
        return [ref.stored.load() for ref in listed if ref.stored is not None]

    def wait(self, refs: list[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        """Split references into ready ones and others; a generator is always ready, because it runs on request."""
        listed = [ref if isinstance(ref, LocalGenerator) else self._mine(ref) for ref in refs]
        self._drive(lambda: sum(_is_ready(ref) for ref in listed) >= num_returns, timeout)
        ready: list[Any] = []
        others: list[Any] = []
        for ref in listed:
            (ready if _is_ready(ref) and len(ready) < num_returns else others).append(ref)
        return ready, others

    def _mine(self, ref: object) -> LocalRef:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"this takes ObjectRefs, not {type(ref).__name__}")
        if not isinstance(ref, LocalRef) or ref._engine is not self:
            raise engines.stale(ref)
        return ref

    # ---- tasks ----

    def submit(
        self, function: Any, settings: Mapping[str, Any], changed: Mapping[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a task at once, with the retries that its options allow.

        Raises:
            UnsupportedError: it has a runtime_env.
        """
        refuse_environment(changed)
        count = settings["num_returns"]
        if count in (STREAMING, DYNAMIC):
            running = self._new_running(settings["name"])
            return self._generate(running, function.function, count, self._begin(0, args, kwargs)[1])
        refs, given = self._begin(count, args, kwargs)
        wanted = settings["retry_exceptions"]
        tries = _tries(settings["max_retries"])
        running = self._new_running(settings["name"])
        self.run(running, function.function, given, refs, tries if wanted else 1, wanted)
        return _as_returned(count, refs)

    def _generate(self, running: Running, function: Callable[..., Any], kind: str, given: Stored) -> Any:
        """Run a generator: return a stream that makes items on request, or a reference to a list of all items."""
        end = LocalRef(self)
        steps = self._steps(running, function, given, end)
        stream = LocalGenerator(lambda: next(steps, None), lambda: end)
        if kind == STREAMING:
            return stream
        refs: list[ObjectRef] = list(stream)
        whole = LocalRef(self)
        whole.stored = end.stored if end.stored is not None and end.stored.error else Stored(refs)
        return whole

    def _steps(
        self, running: Running, function: Callable[..., Any], given: Stored, end: LocalRef
    ) -> Generator[ObjectRef, None, None]:
        """Yield references to a generator's items. Between two items the context is that of the caller."""
        items: Any = None
        while end.stored is None:
            token = self.running.set(running)
            ref = LocalRef(self)
            try:
                if items is None:
                    args, kwargs = self.arguments(given)
                    items = function(*args, **kwargs)
                    items = _one_by_one(items) if inspect.isasyncgen(items) else iter(items)
                ref.stored = Stored(next(items))
            except StopIteration:
                end.stored = Stored(None)
                return
            except _END_THE_PROGRAM:
                raise
            except BaseException as exc:  # every exception of user code becomes the item, whose `get` raises it
                self.fail([ref, end], exc, running.name)
            finally:
                self.running.reset(token)
            yield ref

    def _begin(self, count: int, args: Any, kwargs: Any) -> tuple[list[LocalRef], Stored]:
        """Make the references of a call's results, and serialize its arguments."""
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, ObjectRef):
                self._mine(arg)
        return [LocalRef(self) for _ in range(count)], Stored((args, kwargs))

    def _new_running(self, name: str, actor: LocalActor | None = None) -> Running:
        return Running(name, next(self.running.get().submitted) & (1 << 64) - 1, actor)

    def of_constructor(self, actor: LocalActor) -> Running:
        """The context of a constructor: it is not a task, but tasks that it submits are children of the actor."""
        running = Running("", 0, actor)
        running.submitted = itertools.count(actor.number * PATH_STEP + 1)
        return running

    def run(
        self,
        running: Running,
        function: Callable[..., Any],
        given: Stored,
        refs: list[LocalRef],
        tries: int = 1,
        wanted: Any = False,
    ) -> None:
        """Call a function and store its result or exception."""
        token = self.running.set(running)
        try:
            for attempt in range(tries):
                try:
                    args, kwargs = self.arguments(given)
                    self.seal(refs, function(*args, **kwargs))
                    return
                except _END_THE_PROGRAM:
                    raise
                except BaseException as exc:  # every exception of user code becomes the result, whose `get` raises it
                    if attempt + 1 < tries and may_retry(exc, wanted):
                        continue
                    self.fail(refs, exc, running.name)
                    return
        finally:
            self.running.reset(token)

    def arguments(self, given: Stored) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call, with values in the places of references."""
        args, kwargs = given.load()
        values = [self.get(arg, None) if isinstance(arg, ObjectRef) else arg for arg in args]
        return values, {name: self.get(a, None) if isinstance(a, ObjectRef) else a for name, a in kwargs.items()}

    def seal(self, refs: list[LocalRef], value: Any) -> None:
        """Store the results of a call.

        Raises:
            ValueError: their number differs from num_returns.
        """
        if inspect.isgenerator(value) and refs:
            items: list[Any] = []
            try:
                items += itertools.islice(value, len(refs))
                if len(items) == len(refs) and next(value, items) is not items:
                    name, count = value.__qualname__, len(refs)
                    sys.stderr.write(f"fastrt: {name!r} has num_returns={count}, and yields more; that is lost\n")
                value.close()
                if len(items) != len(refs):
                    raise ValueError(
                        f"the task has num_returns={len(refs)}, its generator has yielded {len(items)} items"
                    )
            except Exception:
                for ref, item in zip(refs, items, strict=False):  # the error takes the places of the others
                    ref.stored = Stored(item)
                raise
            value = items if len(refs) > 1 else items[0]
        if len(refs) == 1:
            refs[0].stored = Stored(value)
        elif refs:
            if not isinstance(value, (tuple, list)) or len(value) != len(refs):
                what = f"{len(value)}" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"
                raise ValueError(f"the task has num_returns={len(refs)}, its function returned {what}")
            for ref, item in zip(refs, value, strict=True):
                ref.stored = Stored(item)

    def fail(self, refs: list[LocalRef], exc: BaseException, name: str) -> None:
        """Store an error as every missing result; as a TaskError of the task `name`, unless that is empty."""
        cause: BaseException | None = None
        if isinstance(exc, ActorLeaves):
            exc, name = exc.error, ""
        if name and type(exc) not in _AS_THEY_ARE:
            cause = exc
            if exc.__traceback__ is not None:
                exc = exc.with_traceback(exc.__traceback__.tb_next)  # begins in user code
            exc = TaskError.wrap(exc, task_name=name, traceback_text=format_user_traceback(exc))
        stored = Stored(exc, True, cause)
        for ref in refs:
            if ref.stored is None:
                ref.stored = stored

    def cancel(self, ref: ObjectRef, **options: Any) -> None:
        """Cancel a coroutine that has not ended; all other calls have ended already."""
        mine = self._mine(ref)
        if mine.stored is None and mine.abort is not None:
            mine.abort()

    # ---- event loops of actors with coroutines ----

    def pass_on(self) -> None:
        """Run every coroutine that can continue, up to its next wait."""
        with self._lock:
            for actor in list(self.busy):
                actor.step()

    def _drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Run coroutines until `done()`, or the timeout has passed."""
        until = None if timeout is None else time.monotonic() + timeout
        passes = 0
        while not done():
            self.pass_on()
            passes += 1
            if not done():
                if until is not None and time.monotonic() >= until:
                    return False
                if passes > _PASSES:
                    time.sleep(_PAUSE_S)
        return True

    # ---- actors ----

    def create(self, actor_class: Any, changed: Mapping[str, Any], args: Any, kwargs: Any) -> LocalHandle:
        """Build an actor's instance in this process.

        Raises:
            NameTakenError: another actor has the name.
            UnsupportedError: it has a runtime_env.
        """
        refuse_environment(changed)
        name = namespaces.stored(changed["name"], changed.get("namespace")) if changed.get("name") else ""
        there = self._names.get(name, lambda: None)() if name else None
        if there is not None and there.dead is None:
            if changed.get("get_if_exists"):
                return self._handle(there)
            raise taken_error(name)
        methods = methods_of(actor_class.cls, dict(changed.get("concurrency_groups") or {}))
        actor = LocalActor(self, actor_class.cls, methods, changed, Stored((args, kwargs)), next(self.numbers))
        actor.build()
        if name:
            self._names[name] = (lambda: actor) if changed.get("lifetime") == "detached" else weakref.ref(actor)
        self._actors.add(actor)
        return self._handle(actor)

    def _handle(self, actor: LocalActor) -> LocalHandle:
        return LocalHandle(self, actor, actor.cls.__name__, actor.methods)

    def call(self, handle: LocalHandle, which: MethodPlan, settings: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Call an actor's method."""
        actor: LocalActor = handle._actor
        if settings["num_returns"] in (STREAMING, DYNAMIC):
            given = self._begin(0, args, kwargs)[1]
            running = self._new_running(f"{actor.cls.__name__}.{which.name}", actor)
            return self._generate(running, actor.method(which), settings["num_returns"], given)
        refs, given = self._begin(settings["num_returns"], args, kwargs)
        running = self._new_running(f"{actor.cls.__name__}.{which.name}", actor)
        actor.call(running, which, given, refs, *_again(actor, which, settings))
        return _as_returned(settings["num_returns"], refs)

    def get_actor(self, name: str, namespace: str | None) -> LocalHandle:
        """Return a handle of a named actor.

        Raises:
            ActorNotFoundError: there is none.
        """
        actor = self._names.get(namespaces.stored(name, namespace), lambda: None)()
        if actor is None or actor.dead is not None:
            raise not_found(name, namespace, self.list_named_actors(True))
        return self._handle(actor)

    def list_named_actors(self, all_namespaces: bool) -> list[Any]:
        """The names of all live named actors."""
        there = ((name, find()) for name, find in self._names.items())
        return namespaces.listed([n for n, actor in there if actor is not None and actor.dead is None], all_namespaces)

    def kill(self, actor: Any, no_restart: bool) -> None:
        """End an actor, or build its instance again if restarts are left.

        Raises:
            StaleReferenceError: the handle belongs to a session that has ended.
        """
        if not isinstance(actor, LocalHandle) or actor._engine is not self:
            raise engines.stale(actor)
        actor._actor.kill(no_restart)

    def exit_actor(self) -> NoReturn:
        """End the actor whose method is running.

        Raises:
            TypeError: no method is running.
            ActorLeaves: always.
        """
        actor = self.running.get().actor
        if actor is None:
            raise TypeError("exit_actor ends the actor that calls it, and this is no actor; use fastrt.kill(handle)")
        actor.end(LEFT)
        raise ActorLeaves(actor.death())

    # ---- nodes and context ----

    def nodes(self) -> list[dict[str, Any]]:
        """This process, as the only node."""
        about = {"NodeID": "local", "NodeName": "local", "Alive": True, "IsHere": True, "Labels": {}}
        return [{**about, "Resources": dict(self._resources), "Available": dict(self._resources)}]

    def facts(self) -> dict[str, Any]:
        """The fields of `fastrt.runtime_context()`."""
        running = self.running.get()
        actor = running.actor
        return {
            "job_id": f"local-{os.getpid()}",
            "node_id": "local",
            "worker_id": f"local-{os.getpid()}",
            "task_id": f"{running.path:016x}" if running.path else None,
            "task_name": running.name or None,
            "actor_id": None if actor is None else f"{actor.number:016x}",
            "actor_name": None if actor is None else actor.name,
            "restarts": 0 if actor is None else actor.restarts,
            "namespace": namespaces.here(),
        }


def _one_by_one(items: Any) -> Generator[Any, None, None]:
    """Yield the items of an asynchronous generator, which runs on a separate event loop."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                with outside_of_loops():
                    item = loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        loop.close()


def refuse_environment(given: Mapping[str, Any]) -> None:
    """Reject the option runtime_env.

    Raises:
        UnsupportedError: it is set.
    """
    if given.get(ENVIRONMENT) is not None:
        raise UnsupportedError(
            "runtime_env has no counterpart in local mode, where all tasks share this process's environment: leave it "
            "out, and set variables, folder and sys.path before"
        )


def _as_returned(count: int, refs: list[LocalRef]) -> Any:
    return refs[0] if count == 1 else refs if count else None


def _is_ready(one: LocalRef | LocalGenerator) -> bool:
    return isinstance(one, LocalGenerator) or one.stored is not None


def _tries(retries: int) -> int:
    return sys.maxsize if retries == -1 else 1 + retries


def _again(actor: LocalActor, which: MethodPlan, settings: Mapping[str, Any]) -> tuple[int, Any]:
    """The greatest number of attempts of a call, and the exceptions after which it is retried."""
    wanted = settings.get("retry_exceptions", which.settings.given.get("retry_exceptions", False))
    return _tries(settings.get("max_task_retries", actor.task_retries)) if wanted else 1, wanted
