"""Handles of actors. A handle is a reference to the actor's object and can be passed to any process.

The object holds the actor's plan, and the actor lives as long as the object. Handles inside values, arguments and other
actors keep it alive as references inside of them do. A call goes straight from the caller into the actor's mailbox.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic

from fastrt._core.memory.clients import ForkedHandle
from fastrt._core.objects import handles, unread
from fastrt._core.tasks import actors, generators, tally
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.submission import CallOfDead, CallOptions, submit
from fastrt.errors import (
    ActorDiedError,
    ActorNotFoundError,
    ArgumentError,
    AttachError,
    FastrtError,
    ObjectStoreFullError,
    StaleReferenceError,
)
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import join, messages
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef
from fastrt.tasks import arguments, namespaces
from fastrt.tasks import options as tasks_options
from fastrt.tasks.actor_records import class_name, death_of, kill_in
from fastrt.tasks.exit_actor import OWN, OwnMethod
from fastrt.tasks.method import CALL, Actor, MethodPlan
from fastrt.tasks.options import METHODS
from fastrt.tasks.pending_calls import pending_calls
from fastrt.tasks.runtime_env import Environment
from fastrt.tasks.typed import Instance, Out, P, R, submits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal, TypeVar, overload

    from typing_extensions import Unpack

    from fastrt.ids import ActorID
    from fastrt.tasks.dag import FunctionNode
    from fastrt.tasks.typed import MethodOptions

    _V = TypeVar("_V")

_FIND_TRIES = 3
GROUP_NAME = "\x1fgroup "  # before the names of placement groups, whose records lie among the actors'
JOB_NAME = "\x1fjob "  # before a job's number: asks for its driver's node and its number there in place of an actor


@dataclass(frozen=True)
class ActorPlan:
    """How an actor is built and called: the value of its object.

    Attributes:
        name: of the class.
        session: where the actor lives.
        methods: plans of its methods, by number.
        cls: reference to the class's object; None on nodes where the actor does not run.
        init: reference to (args, kwargs) of the constructor; None on nodes where the actor does not run.
        retries: runs of a call allowed beyond the first; 255: any number.
        concurrency: calls of the default group that may run at once.
        groups: the same for the other concurrency groups.
        environment: of its process; None: the common one.
        group: of a bundle's record: the placement group that the bundle is reserved for.
        demand: reference to the resources that the actor demands.
        pending_max: calls of one process that may wait or run at once; -1: any number.
        job: the number there of the job that has created it; 0: unknown.
        namespace: that its name is in, or would be if it had one.
        waits: arguments of the constructor that did not exist when it was called. The actor takes the resources that
            it demands once they do; what makes them may need the same ones.
        origin: on other nodes than the one that created the actor: the NodeID of that one, and the actor's id there.
    """

    name: str
    session: str
    methods: tuple[MethodPlan, ...]
    cls: ObjectRef | None
    init: ObjectRef | None
    retries: int
    concurrency: int
    groups: dict[str, int] = field(default_factory=dict)
    environment: Environment | None = None
    group: Any = None
    demand: ObjectRef | None = None
    pending_max: int = -1
    job: int = 0
    namespace: str = ""
    waits: tuple[ObjectRef, ...] = ()
    origin: tuple[str, str] | None = None

    def id_at(self, node: str, objref: int) -> tuple[str, str]:
        """Return what names the actor in the whole cluster: the NodeID of its creator, and its id there.

        Args:
            node: the NodeID of the node that has this plan.
            objref: the actor's object there.
        """
        return self.origin or (node, f"{objref:016x}")

    def method_of(self, number: int) -> tuple[MethodPlan, str]:
        """Return the method that a call's number names, and the concurrency group that the call runs in.

        Numbers from len(methods) on name the same methods in a group that the caller chose.
        """
        chosen, number = divmod(number, len(self.methods))
        which = self.methods[number]
        return which, which.group if not chosen else ("", *self.groups)[chosen - 1]

    def in_group(self, which: MethodPlan, group: str) -> MethodPlan:
        """Return the plan of a method whose calls run in that concurrency group.

        Raises:
            ValueError: there is no such group.
        """
        if group and group not in self.groups:
            raise ValueError(f"there is no concurrency group {group!r}; class {self.name} names {sorted(self.groups)}")
        chosen = 1 + ("", *self.groups).index(group)
        count = len(self.methods)
        return replace(which, number=which.number % count + chosen * count, group=group)


class ActorMethod(Generic[P, R, Out]):
    """A method of an actor as its handle gives it: call `.remote(...)`.

    Args:
        ref: the actor's object.
        actor: the actor's plan.
        plan: of the method.
        retries: runs of a call allowed beyond the first; 255: any number.
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # `ActorMethod[[int], str]`: the third has a default

    __slots__ = ("__weakref__", "_actor", "_bound", "_plan", "_ref", "_retries", "_returns", "_streaming")

    def __init__(self, ref: ObjectRef, actor: ActorPlan, plan: MethodPlan, retries: int) -> None:
        self._ref = ref
        self._actor = actor
        self._plan = plan
        self._retries = retries
        self._returns = plan.settings.returns
        self._streaming = plan.settings.streaming
        self._bound: tuple[Store, CallOptions] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        name = self._plan.name
        raise TypeError(
            f"Actor methods cannot be called directly: {self._actor.name}.{name} is one, call .{name}.remote(...)"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - {"forget"})

    def __repr__(self) -> str:
        return f"ActorMethod({self._actor.name}.{self._plan.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ref, self._actor, self._plan, self._retries)

    if TYPE_CHECKING:

        @overload
        def options(
            self, *, max_task_retries: int | None = None, **options: Unpack[MethodOptions]
        ) -> ActorMethod[P, R, Out]: ...
        @overload
        def options(
            self, *, num_returns: Literal[0], max_task_retries: int | None = None, **options: Unpack[MethodOptions]
        ) -> ActorMethod[P, R, None]: ...
        @overload
        def options(
            self: ActorMethod[P, Iterable[_V], Any],
            *,
            num_returns: Literal["streaming"],
            max_task_retries: int | None = None,
            **options: Unpack[MethodOptions],
        ) -> ActorMethod[P, R, ObjectRefGenerator[_V]]: ...
        @overload
        def options(
            self, *, num_returns: int | str, max_task_retries: int | None = None, **options: Unpack[MethodOptions]
        ) -> ActorMethod[P, R, Any]: ...

    def options(
        self, *, max_task_retries: int | None = None, concurrency_group: str | None = None, **options: Any
    ) -> Any:
        """Return the same method with other settings.

        Args:
            max_task_retries: how often a call runs again after the actor's process died; -1: any number.
            concurrency_group: the group that its calls run in, one of the actor's; "": the default group.
            **options: as for `fastrt.method`.
        Raises:
            TypeError, ValueError: a setting is wrong.
        """
        tasks_options.check(METHODS, {**options, "concurrency_group": concurrency_group})
        given = {name: value for name, value in options.items() if value is not None}
        plan = replace(self._plan, settings=tasks_options.read(METHODS, {**self._plan.settings.given, **given}))
        if concurrency_group is not None:
            plan = self._actor.in_group(plan, concurrency_group)
        retries = self._retries if max_task_retries is None else tasks_options.task_retries_of(max_task_retries)
        return type(self)(self._ref, self._actor, plan, retries)

    def bind(self, *args: Any, **kwargs: Any) -> FunctionNode:
        """Describe a call for a graph: `.execute(...)` of the graph's last node makes it.

        Args:
            *args, **kwargs: as for `remote`; nodes of the graph among them are replaced by their results.
        """
        from fastrt.tasks.dag import FunctionNode  # here: few programs have graphs

        return FunctionNode(self, args, kwargs)

    @submits
    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method in the actor's process, after all earlier calls by this process.

        Args:
            *args, **kwargs: its arguments. ObjectRefs among them are replaced by their values before it runs;
                references inside containers are passed on as they are.
        Returns:
            An ObjectRef to the result; a list of them when num_returns is not 1; None when it is 0. An
            ObjectRefGenerator when it is "streaming". The results of a call of a dead actor are `ActorDiedError`.
        Raises:
            TypeError: the arguments do not fit the method's signature.
            SerializationError: an argument cannot be pickled.
            ObjectStoreFullError: there is no room for the arguments or for another call.
            StaleReferenceError: the handle belongs to a session that has ended.
        """
        bound = self._bound
        if bound is None or bound[0] is not store_client.current():
            bound = self._bind()
        store, options = bound
        plan = self._plan
        if kwargs or not plan.least <= len(args) or 0 <= plan.most < len(args):
            plan.check(args, kwargs)
        try:
            if not kwargs and not self._streaming:
                refs = submit(store.client, options, args)
                if refs is not None:
                    return refs if self._returns else None
            return self._submit(store, options, args, kwargs)
        except ForkedHandle:
            self._bound = None
            return self.remote(*args, **kwargs)
        except CallOfDead as dead:
            return self._give_up(store, *dead.args)
        except ObjectStoreFullError:
            return store.with_room(0, lambda: self._submit(store, options, args, kwargs))

    def _submit(self, store: Store, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit a call whose arguments are not all scalars, or whose items come one by one."""
        stream = generators.create(store.client, self._plan.settings.limit) if self._streaming else None
        try:
            refs = submit(store.client, options, arguments.pack(store, args, kwargs), stream)
        except CallOfDead as dead:
            refs = self._give_up(store, *dead.args)
        if stream is not None:
            return ObjectRefGenerator(stream, refs)
        return refs if self._returns else None

    def _give_up(self, store: Store, task: int, refs: Any) -> Any:
        """End a call of a dead actor."""
        store.put_error(task, dead_actor(store, self._ref, self._actor.name))
        core.finish(store.client, task, tally.CRASHED)
        return refs if self._returns else None

    def _bind(self) -> tuple[Store, CallOptions]:
        store_client.refuse_stale(self._ref)
        store = store_client.require()
        check_session(store, self._ref)
        settings = self._plan.settings
        options = CallOptions(
            self._ref,
            self._plan.number,
            self._returns,
            self._retries,
            core.RETRY_ERRORS if settings.retry_errors else 0,
            policy=tasks_options.export(store, settings.policy),
            note=store.note,
        )
        self._bound = store, options
        store.users.add(self)
        return self._bound

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        self._bound = None


class LimitedMethod(ActorMethod):
    """A method of an actor with `max_pending_calls`: a call is refused while that many of this process have not ended.

    The other actors' methods know nothing of it, so that their calls cost the same.
    """

    __slots__ = ()

    def __init__(self, ref: ObjectRef, actor: ActorPlan, plan: MethodPlan, retries: int) -> None:
        super().__init__(ref, actor, plan, retries)
        self._returns = self._returns or 1  # a call without a result is known by one that the caller does not get

    @submits
    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, as `ActorMethod.remote` does.

        Raises:
            PendingCallsError: too many calls have not ended; this one was not submitted.
        """
        store_client.refuse_stale(self._ref)
        store = store_client.require()
        pending = pending_calls(store, self._ref)
        pending.make_room(store.client, self._actor.pending_max, f"{self._actor.name}.{self._plan.name}")
        made: Any = super().remote(*args, **kwargs)
        result = made.completed() if isinstance(made, ObjectRefGenerator) else made
        pending.add(store.client, result[0] if isinstance(result, list) else result)
        return made if self._plan.settings.returns else None


class ActorHandle(Generic[Instance]):
    """A handle of an actor: `handle.method.remote(...)`. Made by `Class.remote(...)` and `fastrt.get_actor`.

    Beside the class's own methods there is `handle.__fastrt_call__.remote(function, *args, **kwargs)`: the actor's
    process calls `function(instance, *args, **kwargs)`, in its turn.

    Handles can be passed to tasks and other actors and stored in values. The actor ends when the last one is gone
    and the calls made until then have ended, unless it is detached.
    """

    def __init__(self, ref: ObjectRef, plan: ActorPlan | None = None) -> None:
        self._actor_ref = ref
        self._actor_plan = plan

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__call__", CALL):
            return own_method(self, name)
        plan = plan_of(self)
        for which in plan.methods:
            if which.name == name:
                own = which.settings.given.get("max_task_retries")
                retries = plan.retries if own is None else tasks_options.task_retries_of(own)
                kind = ActorMethod if plan.pending_max < 0 else LimitedMethod
                method = kind(self._actor_ref, plan, which, retries)
                self.__dict__[name] = method  # from now on an attribute like any other
                return method
        raise AttributeError(
            f"actor class {plan.name} has no method {name!r}; it has "
            + (", ".join(which.name for which in plan.methods if not which.name.startswith("_")) or "none")
        )

    def __dir__(self) -> list[str]:
        # What a shell completes: the class's methods, as in Ray, and those of every actor.
        methods = {which.name for which in plan_of(self).methods} - {CALL}
        return sorted(methods | {"__init__", "__ray_call__", *OWN})

    @property
    def _actor_id(self) -> ActorID:
        """The actor's id, under the name by which Ray's programs read it."""
        from fastrt.ids import ActorID  # here: few programs need it

        return ActorID.widened(plan_of(self).id_at("", self._actor_ref.objref)[1])

    _ray_actor_id = _actor_id

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self._actor_ref,)

    def __repr__(self) -> str:
        with contextlib.suppress(FastrtError):
            return f"Actor({plan_of(self).name}, {self._actor_id})"
        from fastrt.ids import ActorID

        return f"Actor(?, {ActorID.widened(self._actor_ref.hex())})"  # of an ended session, and never used in it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and bool(self._actor_ref == other._actor_ref)

    def __hash__(self) -> int:
        return hash(self._actor_ref)


def own_method(handle: ActorHandle, name: str) -> Any:
    """Return a method that Ray's handles have beside those of the class: `__ray_call__`, `__ray_ready__` and so on.

    Raises:
        AttributeError: no handle has such a method.
    """
    if name == "__ray_call__":
        return getattr(handle, CALL)
    if name not in OWN:
        raise AttributeError(name)
    return OwnMethod(getattr(handle, CALL), OWN[name])


def plan_of(handle: ActorHandle) -> ActorPlan:
    """Return the plan of a handle's actor; a handle that was made by another process reads it now.

    Raises:
        StaleReferenceError: the handle belongs to a session that has ended.
    """
    if handle._actor_plan is None:
        store_client.refuse_stale(handle._actor_ref)
        handle._actor_plan = store_client.require().get(handle._actor_ref)
    assert handle._actor_plan is not None
    return handle._actor_plan


def check_session(store: Store, ref: ObjectRef) -> None:
    """Check that a handle belongs to this process's session.

    Raises:
        StaleReferenceError: its session has ended.
    """
    with contextlib.suppress(ForkedHandle):  # the call itself attaches again
        handles.use(store.client, ref)


def dead_actor(store: Store, ref: ObjectRef, name: str = "") -> ActorDiedError:
    """Return the error that a call of a dead actor gets.

    Args:
        ref: the actor's object.
        name: of its class; default: looked up here.
    """
    actor = actors.index_of(store.client, ref)
    info = actors.info(store.client, actor)
    unread.mark(store.client, [ref])
    error = death_of(info, name or class_name(store, actor), info["reason"])
    with contextlib.suppress(FastrtError):
        error.actor_id = str(ActorHandle(ref, store.load(ref))._actor_id)
    return error


def kill(actor: ActorHandle | Actor, *, no_restart: bool = True, force: bool = True) -> None:
    """End an actor's process; the calls that it has not ended become `ActorDiedError`.

    Args:
        actor: a handle. A dead actor is left alone.
        no_restart: whether it stays dead; False has it started again if it has restarts left.
        force: whether the process is killed at once. False interrupts the call that runs and lets the actor run its
            cleanup code, for `cleanup_timeout_s` seconds.
    Raises:
        TypeError: not a handle.
        StaleReferenceError: the handle belongs to a session that has ended.
    Source:
        The semantics of `ray.kill`.
    """
    if not isinstance(actor, ActorHandle):
        raise ArgumentError(f"kill takes the handle of an actor, not {type(actor).__name__}; tasks are ended by cancel")
    other = engines.current()
    if other is not None:
        other.kill(actor, no_restart)
        return
    plan_of(actor)
    store = store_client.require()
    check_session(store, actor._actor_ref)
    index = actors.index_of(store.client, actor._actor_ref)
    kill_in(store, index, f"it was killed by fastrt.kill, called by {_caller(store)}", no_restart, force)


def _caller(store: Store) -> str:
    """Describe the code that runs here, for messages on any node."""
    task = store.task_here()
    what = "the driver" if store.actor_here is None else "an actor"
    if task is not None:
        what = f"task {store.task_name(task)!r}"
    return f"{what} in process {os.getpid()} on {os.uname().nodename}"


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """Return a handle of a named actor.

    Args:
        name: as given to `.options(name=...)`.
        namespace: the namespace of the name; default: that of this code.
    Raises:
        ActorNotFoundError: the namespace has no live actor of that name.
        TypeError, ValueError: the name or the namespace is not valid.
    Source:
        The semantics of `ray.get_actor`.
    """
    whole = namespaces.stored(name, namespace)
    other = engines.current()
    if other is not None:
        found: ActorHandle = other.get_actor(name, namespace)
        return found
    store = store_client.require()
    ref = actors.find(store.client, whole)
    if ref is None:
        ref = find_elsewhere(store, whole)
    if ref is None:
        raise not_found(name, namespace, list_named_actors(all_namespaces=True))
    return ActorHandle(ref)


def not_found(name: str, namespace: str | None, there: list[dict[str, str]]) -> ActorNotFoundError:
    """Return the error for a name that no actor has; `there` are the names that there are."""
    space = namespaces.here() if namespace is None else namespace
    inside = ", ".join(row["name"] for row in there if row["namespace"] == space) or "none"
    where = f"namespace {space!r} of this session" if space else "this session"
    others = sorted({row["namespace"] for row in there if row["namespace"] != space and row["name"] == name})
    hint = f"; one is in namespace {', '.join(map(repr, others))}" if others else ""
    return ActorNotFoundError(f"Failed to look up actor with name {name!r} in {where}; there are: {inside}{hint}")


def find_elsewhere(store: Store, name: str) -> ObjectRef | None:
    """Return the object that represents the actor of that name on another node here; None: there is none."""
    for _ in range(_FIND_TRIES):
        answer = _ask_cluster(store, name)
        if not answer.objref:
            return None
        with contextlib.suppress(StaleReferenceError):  # the uplink died, or has dropped it already
            ref: ObjectRef = handles.acquire(store.client, answer.objref, answer.entry)
            return ref
    return None


def find_job(store: Store, job: int) -> tuple[str, int] | None:
    """Return the node of a job's driver, and the job's number there; None: this node's uplink does not know it."""
    found = _ask_cluster(store, f"{JOB_NAME}{job:x}").names
    return (found[0], int(found[1], 16)) if found else None


def _ask_cluster(store: Store, name: str) -> messages.ActorFound:
    try:
        if store.socket_path:
            return join.inquire(store.socket_path, messages.FindActor(name), messages.ActorFound, patient=True)
    except AttachError:  # the uplink has just died and does not answer
        pass
    return messages.ActorFound([], 0, 0)


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """Return the names of all live actors of this cluster that have one, sorted.

    Args:
        all_namespaces: whether to list the names of all namespaces; each is then {"name": ..., "namespace": ...}.
    Source:
        The semantics of `ray.util.list_named_actors`.
    """
    other = engines.current()
    if other is not None:
        return other.list_named_actors(all_namespaces)
    store = store_client.require()
    found = {*actors.names(store.client), *_ask_cluster(store, "").names}
    return namespaces.listed([whole for whole in found if not whole.startswith(GROUP_NAME)], all_namespaces)
