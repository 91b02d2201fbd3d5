"""`@fastrt.remote` on a class: actors. An actor is one instance in a process of its own, called through handles.

To make an actor, the caller writes a record into the arena and notifies the daemon. The daemon lets the zygote fork a
process, which builds the instance and takes the calls. The caller does not wait for that: calls can be made at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from fastrt._core.memory.clients import ForkedHandle
from fastrt._core.objects import functions as functions_core
from fastrt._core.tasks import actors
from fastrt.errors import ActorNotFoundError, NameTakenError
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import job_folders, messages, namespaces
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks import functions, runtime_env
from fastrt.tasks import namespaces as tasks_namespaces
from fastrt.tasks import options as tasks_options
from fastrt.tasks.actor_handle import ActorHandle, ActorPlan, find_elsewhere, get_actor
from fastrt.tasks.method import MethodPlan, constructor_of, methods_of
from fastrt.tasks.options import CLASSES
from fastrt.tasks.resources import demand_of_actor, export, group_strategy, place_given
from fastrt.tasks.typed import Handle, P, submits

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastrt.tasks.dag import ClassNode
    from fastrt.tasks.typed import ClassOptions

ASYNC_CONCURRENCY = 1000  # of an actor with coroutine methods, unless said otherwise
_NOT_COMPLETED = {"cls", "forget", "given_options"}
_DEFAULTS = {name: option.default for name, option in tasks_options.OPTIONS[CLASSES].items()}


class ActorClass(Generic[P, Handle]):
    """A class whose instances are actors. Made by `fastrt.remote`."""

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # `ActorClass[[int]]`: the second has a default

    _captured_max: ClassVar[int] = 0  # bytes of the class with all that it captures; 0: any number

    def __init__(self, cls: type, *more: Any, **options: Any) -> None:
        if more or not inspect.isclass(cls):
            raise TypeError(
                f"remote takes a class here, not {cls!r}. Inheriting from actor classes is not currently supported: "
                "inherit from the plain one, RemoteClass.cls"
            )
        self.cls = cls
        given = {**_DEFAULTS, **_checked(options)}
        self._options = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
        self._options[runtime_env.OPTION] = runtime_env.environment_of(self._options[runtime_env.OPTION])
        self._demand = demand_of_actor(self._options)
        if options.get("allow_out_of_order_execution") is False:
            self._check_order()
        self._constructor: MethodPlan | None = None  # read at the first use: a class being unpickled is still empty
        # The session, the class's object in it, and the watch that says that this object is out of date.
        self._bound: tuple[Store, ObjectRef, functions_core.Watched | None] | None = None
        functools.update_wrapper(self, cls, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.cls.__name__
        raise TypeError(
            f"Actors cannot be instantiated directly: make an actor by {name}.remote(...), "
            f"or a plain object by {name}.cls(...)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # By parts, so that a class that names its remote self can be pickled inside its own globals.
        return _empty, (), (self.cls, self._options, self.__doc__), None, None, _fill

    def __getattr__(self, name: str) -> Any:
        # An attribute of the class: a constant, a static or a class method. It is read here, not in an actor.
        cls = None if name.startswith("__") else self.__dict__.get("cls")
        if cls is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(cls, name)

    def __dir__(self) -> list[str]:
        # What a shell completes: the class's own names, as in Ray, and what makes actors.
        own = {name for name in dir(self.cls) if not name.startswith("__")}
        return sorted(own | {*super().__dir__()} - _NOT_COMPLETED)

    def __repr__(self) -> str:
        return f"ActorClass({self.cls.__qualname__})"

    def options(self, **options: Unpack[ClassOptions]) -> ActorClass[P, Handle]:
        """Return the same class with other settings.

        Args:
            **options: as for `fastrt.remote` on a class, and `name`, `get_if_exists`, `lifetime`.
        Raises:
            TypeError, ValueError: an option is unknown or wrong.
        """
        tasks_options.refuse_two_places(self._options, options)
        found: ActorClass[P, Handle] = type(self)(self.cls, **{**self._options, **_checked(options)})
        if options.get("allow_out_of_order_execution") is False:
            found._check_order()
        return found

    def _check_order(self) -> None:
        """Refuse a class whose calls run at once where they shall run in their order."""
        many, groups = self._options["max_concurrency"] or 1, dict(self._options["concurrency_groups"] or {})
        is_async = any(which.is_async for which in methods_of(self.cls, groups))
        if is_async or many > 1:
            why = "has coroutine methods" if is_async else f"has max_concurrency={many}"
            raise ValueError(f"allow_out_of_order_execution=False: {self.cls.__name__} {why}, so its calls run at once")

    @property
    def given_options(self) -> dict[str, Any]:
        """The options that differ from the defaults, by name."""
        return {name: value for name, value in self._options.items() if value != _DEFAULTS[name]}

    def bind(self, *args: Any, **kwargs: Any) -> ClassNode:
        """Describe a call for a graph: `.execute(...)` of the graph's last node makes it.

        Args:
            *args, **kwargs: as for `remote`; nodes of the graph among them are replaced by their results.
        """
        from fastrt.tasks.dag import ClassNode  # here: few programs have graphs

        return ClassNode(self, args, kwargs)

    @submits
    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Make an actor. It starts in the background; calls can be made at once.

        Args:
            *args, **kwargs: for the constructor. ObjectRefs among them are replaced by their values.
        Returns:
            Its first handle.
        Raises:
            TypeError: the arguments do not fit the constructor's signature.
            NameTakenError: another actor has the name.
            SerializationError: the class or an argument cannot be pickled.
            ObjectStoreFullError: there is no room for it.
        """
        if self._constructor is None:
            self._constructor = constructor_of(self.cls)
        self._constructor.check(args, kwargs)
        other = engines.current()
        if other is not None:
            handle: ActorHandle = other.create(self, self.given_options, args, kwargs)
            return handle
        named = self._options["name"], self._options["namespace"]
        if self._options["get_if_exists"]:
            try:
                return get_actor(*named)
            except ActorNotFoundError:
                pass
        try:
            return self._make(args, kwargs)
        except ForkedHandle:
            self._bound = None
            return self._make(args, kwargs)
        except NameTakenError:
            if self._options["get_if_exists"]:  # another process has made it meanwhile
                return get_actor(*named)
            raise

    def _remote(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Create it with options: a private name of Ray that programs use."""
        return (self.options(**options) if options else self).remote(*(args or ()), **(kwargs or {}))

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorHandle:
        options = self._options
        store, cls_ref = self._bind()
        groups = dict(options["concurrency_groups"] or {})
        methods = methods_of(self.cls, groups)
        concurrency = options["max_concurrency"]
        if concurrency is None:
            concurrency = ASYNC_CONCURRENCY if any(which.is_async for which in methods) else 1
        group, demand = runtime_env.captured(), self._demand
        if group is None or place_given(options):
            group = group_strategy(options)
        else:
            demand = demand_of_actor({**options, "scheduling_strategy": group})
        around = runtime_env.grouped(runtime_env.inherited(options[runtime_env.OPTION]), group)
        if around is not None and around.paths():
            from fastrt.tasks import packages  # here: few programs have files for their actors

            around = packages.packed(store, around)
        wanted = None if demand is None else export(store, demand)
        space = options["namespace"]
        plan = ActorPlan(
            self.cls.__name__,
            store.client.segment.session,
            methods,
            cls_ref,
            store.put_serialized(serialize((args, kwargs)), in_file=True),
            tasks_options.retries_of(options["max_task_retries"]),
            concurrency,
            groups,
            tasks_namespaces.inside(tasks_namespaces.here(), around),
            demand=wanted,
            pending_max=options["max_pending_calls"],
            job=tasks_namespaces.job_here(store),
            namespace=tasks_namespaces.here() if space is None else space,
            waits=() if wanted is None else _missing(store, (*args, *kwargs.values())),
        )
        ref = store.put_serialized(serialize(job_folders.carrying(plan, to_actor=True)))
        lifetime = options["lifetime"] or (around and around.actor_lifetime)
        name = tasks_namespaces.stored(options["name"], options["namespace"]) if options["name"] else ""
        taken = bool(name) and find_elsewhere(store, name) is not None
        if not taken:
            restarts = options["max_restarts"], lifetime == "detached"
            taken = actors.create(store.client, ref, cls_ref.objref, name, *restarts, wanted) is None
        if taken:
            raise taken_error(name)
        if store.tell is not None:
            store.tell(messages.ActorsChanged())
        if store.note is not None:
            store.note(ref)
        return ActorHandle(ref, plan)

    def _bind(self) -> tuple[Store, ObjectRef]:
        """Ship the class to this process's current session."""
        store = store_client.require()
        bound = self._bound
        if bound is None or bound[0] is not store or (bound[2] is not None and bound[2].changed() is not None):
            bound = self._bound = (store, *functions.export(store, self.cls.__name__, self.cls, self._captured_max))
            store.users.add(self)
            job_folders.bind(self)
        return bound[:2]

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        self._bound = None


def _missing(store: Store, args: tuple[Any, ...]) -> tuple[ObjectRef, ...]:
    """The references among a constructor's arguments whose values do not exist yet."""
    refs = list({arg for arg in args if isinstance(arg, ObjectRef)})
    return tuple(store.wait(refs, len(refs), 0.0)[1]) if refs else ()


def taken_error(whole: str) -> NameTakenError:
    """The error where another actor has a name."""
    space, name = tasks_namespaces.split(whole)
    where = f"namespace {space!r} of this session" if space else "this session"
    return NameTakenError(f"The name {name!r} is already taken by an actor in {where}. Please use a different name")


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    options = tasks_options.from_ray(CLASSES, options)
    tasks_options.check(CLASSES, options)
    if options.get("get_if_exists") and not options.get("name"):
        raise ValueError("get_if_exists finds an actor by its name: give one, too")
    return options


def _empty() -> ActorClass:
    return ActorClass.__new__(ActorClass)


def _fill(actor_class: ActorClass, state: tuple[type, dict[str, Any], str | None]) -> None:
    actor_class.__init__(state[0], **state[1])  # type: ignore[misc]  # deferred on purpose, see __reduce__
    actor_class.__doc__ = state[2]  # that of a class that holds its remote self is not set yet


namespaces.by_identity(ActorClass)
