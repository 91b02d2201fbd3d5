"""`fastrt.init(engine="ray")`: the same program on a Ray cluster, through Ray's public functions.

References wrap those of Ray, and inside tasks and actors fastrt's functions use this engine too, so a program that runs
on one engine runs on the other. Options that Ray has are passed on under its names; other options are rejected at the
call. The machines of the cluster need fastrt, like every module that tasks use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import socket
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import ray
import ray.exceptions
import ray.util.scheduling_strategies
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fastrt.engines import ray_errors
from fastrt.engines.generator import DYNAMIC, RayGenerator
from fastrt.engines.handle import EngineHandle
from fastrt.errors import ActorNotFoundError, ConfigError, FastrtError, NameTakenError, UnsupportedError
from fastrt.net.address import is_address, split_address
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store.ref import ObjectRef
from fastrt.tasks.label_strategy import NodeLabelSchedulingStrategy
from fastrt.tasks.method import CALL, MethodPlan, methods_of
from fastrt.tasks.runtime_env import Environment

_TASK_OPTIONS = (
    "num_returns", "max_retries", "retry_exceptions", "name", "num_cpus", "num_gpus", "memory", "resources",
    "label_selector", "fallback_strategy", "runtime_env", "scheduling", "scheduling_strategy", "max_calls",
    "_generator_backpressure_num_objects",
)  # fmt: skip
_ACTOR_OPTIONS = (
    "name", "namespace", "get_if_exists", "lifetime", "max_restarts", "max_task_retries", "max_concurrency",
    "concurrency_groups", "num_cpus", "num_gpus", "memory", "resources", "runtime_env", "scheduling",
    "scheduling_strategy", "label_selector", "fallback_strategy", "max_pending_calls",
)  # fmt: skip
_CALL_OPTIONS = (
    "num_returns", "max_task_retries", "retry_exceptions", "_generator_backpressure_num_objects", "name",
    "enable_task_events",
)  # fmt: skip
_AS_RAY_SAYS = {"generator_backpressure": "_generator_backpressure_num_objects"}
_KNOCK_S = 10.0
_KILL_S = 10.0
_PLACES = {"spread": "SPREAD", "pack": "DEFAULT", "default": "DEFAULT"}


class RayRef(ObjectRef):
    """A fastrt reference that wraps one of Ray.

    Args:
        engine: of this process.
        inner: Ray's reference.
    """

    def __init__(self, engine: RayEngine, inner: Any) -> None:
        self.engine = engine
        self.inner = inner

    def hex(self) -> str:
        """Return Ray's name of the object."""
        return str(self.inner.hex())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayRef) and bool(self.inner == other.inner)

    def __hash__(self) -> int:
        return hash(self.inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ref_again, (self.inner,)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the value without blocking the event loop; raise what `fastrt.get` would raise."""
        try:
            return (yield from self.inner.__await__())
        except ray.exceptions.RayError as exc:
            raise ray_errors.translated(exc) from None

    def future(self) -> concurrent.futures.Future[Any]:
        """Return a `concurrent.futures.Future` that gets the value, or the error that `fastrt.get` would raise."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def settle(done: concurrent.futures.Future[Any]) -> None:
            exc = done.exception()
            if exc is None:
                future.set_result(done.result())
            else:
                future.set_exception(ray_errors.translated(exc) if isinstance(exc, ray.exceptions.RayError) else exc)

        self.inner.future().add_done_callback(settle)
        return future


class RayHandle(EngineHandle):
    """A handle of an actor that Ray runs. For an actor found by its name, the actor is asked for its methods."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle_again, (self._actor, self._class_name, self._methods)


class RayEngine:
    """This process's connection to a Ray cluster.

    Args:
        owner: whether this process called `ray.init`, and so must call `ray.shutdown`.
    """

    name = "ray"

    def __init__(self, owner: bool) -> None:
        self._owner = owner
        self.session: str = ray.get_runtime_context().get_job_id()
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._collecting: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of "dynamic" generators
        self._classes: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()

    @property
    def num_cpus(self) -> int:
        """CPUs of the cluster."""
        return int(ray.cluster_resources().get("CPU", 0))

    def close(self) -> None:
        """Leave the cluster."""
        if self._owner:
            ray.shutdown()

    # ---- values ----

    def put(self, value: object) -> ObjectRef:
        """`ray.put`."""
        return RayRef(self, ray.put(value))

    def get(self, refs: ObjectRef | Sequence[ObjectRef], timeout: float | None) -> Any:
        """`ray.get`.

        Raises:
            TypeError: something is not a reference.
        """
        try:
            if isinstance(refs, ObjectRef):
                return ray.get(self._inner(refs), timeout=timeout)
            if not isinstance(refs, (list, tuple)):
                raise TypeError(f"get takes an ObjectRef or a list of them, not {type(refs).__name__}")
            return ray.get([self._inner(ref) for ref in refs], timeout=timeout)
        except ray.exceptions.RayError as exc:
            raise ray_errors.translated(exc) from None

    def wait(self, refs: list[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        """`ray.wait`; a reference that is listed twice counts twice, although Ray rejects it."""
        inner = [ref.inner if isinstance(ref, RayGenerator) else self._inner(ref) for ref in refs]
        unique = list(dict.fromkeys(inner))
        until = None if timeout is None else time.monotonic() + timeout
        most = min(num_returns, len(unique))
        for wanted in range(most if len(unique) == len(inner) else 1, most + 1):
            left = None if until is None else max(0.0, until - time.monotonic())
            done = set(ray.wait(unique, num_returns=wanted, timeout=left)[0])
            if sum(ref in done for ref in inner) >= num_returns:
                break
        ready: list[Any] = []
        others: list[Any] = []
        for ref, of_ray in zip(refs, inner, strict=True):
            (ready if of_ray in done and len(ready) < num_returns else others).append(ref)
        return ready, others

    def _inner(self, ref: object) -> Any:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"this takes ObjectRefs, not {type(ref).__name__}")
        if not isinstance(ref, RayRef) or ref.engine is not self:
            raise engines.stale(ref)
        return ref.inner

    # ---- tasks ----

    def submit(
        self, function: Any, settings: Mapping[str, Any], changed: Mapping[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """`.remote` of a remote function."""
        options = _options("remote functions", _TASK_OPTIONS, changed)
        collecting = options.get("num_returns") == DYNAMIC
        if collecting:
            del options["num_returns"]
        functions = (self._collecting if collecting else self._functions).setdefault(function.function, {})
        most = options.pop("max_calls", 0)  # Ray accepts it only in `ray.remote`
        remote = functions.get(most)
        if remote is None:
            entering = _collecting(function.function) if collecting else _entering(function.function)
            remote = functions[most] = ray.remote(max_calls=most)(entering)
        remote = remote.options(**options) if options else remote
        return self._wrapped(remote.remote(*self._unwrapped(args), **self._unwrapped_named(kwargs)))

    def cancel(self, ref: ObjectRef, **options: Any) -> None:
        """`ray.cancel`."""
        ray.cancel(self._inner(ref), **options)

    def _unwrapped(self, args: Sequence[Any]) -> list[Any]:
        return [self._inner(arg) if isinstance(arg, ObjectRef) else arg for arg in args]

    def _unwrapped_named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._inner(arg) if isinstance(arg, ObjectRef) else arg for name, arg in kwargs.items()}

    def _wrapped(self, refs: Any) -> Any:
        if isinstance(refs, list):
            return [RayRef(self, inner) for inner in refs]
        if isinstance(refs, ray.ObjectRefGenerator):
            return RayGenerator(refs, functools.partial(RayRef, self), ray.wait)
        return None if refs is None else RayRef(self, refs)

    # ---- actors ----

    def create(self, actor_class: Any, changed: Mapping[str, Any], args: Any, kwargs: Any) -> RayHandle:
        """`.remote` of a remote class.

        Raises:
            NameTakenError: another actor has the name.
        """
        cls = actor_class.cls
        methods = methods_of(cls, dict(changed.get("concurrency_groups") or {}))
        remote = self._classes.get(cls)
        if remote is None:
            remote = self._classes[cls] = _entering_class(cls, methods)
        options = _options("remote classes", _ACTOR_OPTIONS, changed)
        inner = ray.remote(**options)(remote) if options else ray.remote(remote)
        try:
            actor = inner.remote(*self._unwrapped(args), **self._unwrapped_named(kwargs))
        except ValueError as exc:
            if changed.get("name") and "name" in str(exc):
                raise NameTakenError(f"an actor with the name {changed['name']!r} lives there already") from exc
            raise
        return RayHandle(self, actor, cls.__name__, methods)

    def call(self, handle: RayHandle, which: MethodPlan, settings: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """`.remote` of an actor's method.

        Raises:
            PendingCallsError: too many calls of the actor have not ended.
        """
        options = _options("methods", _CALL_OPTIONS, {**which.settings.given, **settings})
        if options.get("num_returns") == DYNAMIC:
            _refuse("num_returns='dynamic' of a method")
        if which.group:
            options["concurrency_group"] = which.group
        method = getattr(handle._actor, "__ray_call__" if which.name == CALL else which.name).options(**options)
        try:
            made = method.remote(*self._unwrapped(args), **self._unwrapped_named(kwargs))
        except ray.exceptions.PendingCallsLimitExceeded as exc:
            raise ray_errors.translated(exc) from None
        return self._wrapped(made)

    def get_actor(self, name: str, namespace: str | None) -> RayHandle:
        """`ray.get_actor`.

        Raises:
            ActorNotFoundError: there is none.
        """
        try:
            actor = ray.get_actor(name, namespace)
        except ValueError:
            there = ", ".join(self.list_named_actors(False)) or "none"
            raise ActorNotFoundError(
                f"Failed to look up actor with name {name!r} in this cluster; there are: {there}"
            ) from None
        if not hasattr(actor, "_fastrt_methods"):
            raise UnsupportedError(f"actor {name!r} was made by a program that uses Ray directly; call it through Ray")
        try:
            class_name, methods = ray.get(actor._fastrt_methods.remote())
        except ray.exceptions.RayError as exc:
            raise ray_errors.translated(exc) from None
        return RayHandle(self, actor, class_name, methods)

    def list_named_actors(self, all_namespaces: bool) -> list[Any]:
        """`ray.util.list_named_actors`."""
        found = ray.util.list_named_actors(all_namespaces)
        return sorted(found, key=lambda row: (row["namespace"], row["name"])) if all_namespaces else sorted(found)

    def kill(self, actor: Any, no_restart: bool) -> None:
        """`ray.kill`.

        Raises:
            StaleReferenceError: the handle belongs to a session that has ended.
        """
        if not isinstance(actor, RayHandle) or actor._engine is not self:
            raise engines.stale(actor)
        ray.kill(actor._actor, no_restart=no_restart)
        if no_restart:
            _wait_for_the_end(actor._actor)

    def exit_actor(self) -> NoReturn:
        """`ray.actor.exit_actor`.

        Raises:
            AssertionError: `ray.actor.exit_actor` has returned.
        """
        ray.actor.exit_actor()
        raise AssertionError("Ray's exit_actor has returned")

    # ---- nodes and context ----

    def nodes(self) -> list[dict[str, Any]]:
        """The live nodes of `ray.nodes`. Ray reports free resources for the whole cluster: the first node has them."""
        here = ray.get_runtime_context().get_node_id()
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
        free = ray.available_resources()
        return [
            {
                "NodeID": node["NodeID"],
                "NodeName": node["NodeManagerHostname"],
                "Alive": True,
                "Labels": dict(node.get("Labels") or {}),
                "IsHere": node["NodeID"] == here,
                "Resources": dict(node["Resources"]),
                "Available": dict(free) if k == 0 else {},
            }
            for k, node in enumerate(alive)
        ]

    def facts(self) -> dict[str, Any]:
        """The fields of `fastrt.runtime_context()`."""
        context = ray.get_runtime_context()
        return {
            "job_id": context.get_job_id(),
            "node_id": context.get_node_id(),
            "worker_id": context.get_worker_id(),
            "task_id": context.get_task_id(),
            "task_name": context.get_task_name(),
            "actor_id": context.get_actor_id(),
            "actor_name": context.get_actor_name() or None,
            "restarts": int(context.was_current_actor_reconstructed) if context.get_actor_id() else 0,
            "namespace": context.namespace,
        }


def connect(address: str | None, settings: Mapping[str, Any]) -> RayEngine:
    """Join a cluster, or start one on this machine.

    Args:
        address: the address for `ray.init`.
        settings: other arguments of `ray.init`.
    Raises:
        ConfigError: Ray does not accept a setting, or there is no cluster.
    """
    if ray.is_initialized():  # by the program itself, which must also shut it down
        return RayEngine(owner=False)
    try:
        _knock(address)
        ray.init(address=address, **{"include_dashboard": False, **settings} if address is None else settings)
    except (OSError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"Ray cannot be used: {exc}") from exc
    return RayEngine(owner=True)


def _knock(address: str | None) -> None:
    """Check that a server listens at the address: Ray itself would wait for minutes.

    Raises:
        OSError: there is none.
    """
    if address is not None and is_address(address):  # not "auto" or ray://...
        socket.create_connection(split_address(address), timeout=_KNOCK_S).close()


def _wait_for_the_end(actor: Any) -> None:
    """Wait until calls of a killed actor fail: `ray.kill` returns before that."""
    until = time.monotonic() + _KILL_S
    with contextlib.suppress(ray.exceptions.RayError):  # the actor's end, or the timeout
        while (left := until - time.monotonic()) > 0:
            ray.get(actor.__ray_ready__.remote(), timeout=left)


def enter() -> RayEngine:
    """Return the engine of this process, which Ray has started to run tasks or an actor.

    Raises:
        FastrtError: the process uses another engine.
    """
    engine = engines.current()
    if isinstance(engine, RayEngine):
        return engine
    if engine is not None or store_client.current() is not None:
        raise FastrtError("a process that uses another engine received a reference or task of engine 'ray'")
    engine = RayEngine(owner=False)
    engines.set_engine(engine)
    return engine


def _ref_again(inner: Any) -> RayRef:
    return RayRef(enter(), inner)


def _handle_again(actor: Any, class_name: str, methods: tuple[MethodPlan, ...]) -> RayHandle:
    return RayHandle(enter(), actor, class_name, methods)


def _entering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function for Ray's workers, so that it uses this engine."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        enter()
        return function(*args, **kwargs)

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        enter()
        yield from _plainly(function(*args, **kwargs))

    return generate if inspect.isgeneratorfunction(function) else call


def _plainly(made: Generator[Any, Any, Any]) -> Iterator[Any]:
    """Yield the items of a generator, and ignore the values that Ray sends, which not every iterator accepts."""
    with contextlib.closing(made):
        for item in made:  # noqa: UP028  (`yield from` would pass on sent values)
            yield item


def _collecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a generator function, so that it returns a list of references to all its items."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[ObjectRef]:
        engine = enter()
        return [engine.put(item) for item in function(*args, **kwargs)]

    return call


def _entering_class(cls: Any, methods: tuple[MethodPlan, ...]) -> type:
    """Wrap a class for Ray's actors, so that it uses this engine and can list its methods."""
    described = cls.__name__, methods

    class Entering(cls):  # type: ignore[misc]  # the base class is known only at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            enter()
            super().__init__(*args, **kwargs)

        def _fastrt_methods(self) -> tuple[str, tuple[MethodPlan, ...]]:
            return described

    for which in methods:
        method = inspect.getattr_static(cls, which.name, None)
        if inspect.isgeneratorfunction(method):
            setattr(Entering, which.name, _entering(method))
    Entering.__name__, Entering.__qualname__ = cls.__name__, cls.__qualname__
    return Entering


def _options(what: str, known: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options to Ray's names.

    Raises:
        UnsupportedError: Ray has no such option.
    """
    options = {_AS_RAY_SAYS.get(name, name): value for name, value in given.items() if value is not None}
    for name in options:
        if name not in known:
            _refuse(f"option {name!r} of {what}")
    if isinstance(options.get("runtime_env"), Environment):
        options["runtime_env"] = options["runtime_env"].for_ray()
    if isinstance(options.get("retry_exceptions"), tuple):
        options["retry_exceptions"] = list(options["retry_exceptions"])  # Ray accepts only lists
    place = options.pop("scheduling", options.pop("scheduling_strategy", None))
    if isinstance(place, str):
        options["scheduling_strategy"] = _PLACES.get(place.lower()) or NodeAffinitySchedulingStrategy(place, soft=False)
    elif isinstance(place, NodeLabelSchedulingStrategy):
        options["scheduling_strategy"] = _as_ray_says(place)
    elif place is not None and type(place).__module__.startswith("fastrt"):
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node_id, soft=place.soft)
    elif place is not None:
        options["scheduling_strategy"] = place
    return options


def _as_ray_says(place: NodeLabelSchedulingStrategy) -> Any:
    """Return Ray's object for a strategy of labels."""
    strategies = ray.util.scheduling_strategies
    hard, soft = (
        {label: getattr(strategies, type(one).__name__)(*one.values) for label, one in given.items()}
        for given in (place.hard, place.soft)
    )
    return strategies.NodeLabelSchedulingStrategy(hard, soft=soft)


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(f"{what} has no counterpart in Ray; leave it out, or use fastrt's own engine")
