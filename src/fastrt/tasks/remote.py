"""Functions that run as tasks; `fastrt.remote` makes them."""

# mypy: disable-error-code="overload-overlap"
# The first overload that fits counts.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from fastrt._core.memory.clients import ForkedHandle
from fastrt._core.objects import functions as functions_core
from fastrt._core.tasks import generators
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.submission import TaskOptions, submit
from fastrt.errors import ArgumentError, ObjectStoreFullError
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import job_folders, namespaces, warnings
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.tasks import arguments, functions, resources, runtime_env
from fastrt.tasks import options as tasks_options
from fastrt.tasks.options import FUNCTIONS
from fastrt.tasks.runtime_env import Environment
from fastrt.tasks.signatures import signature_of
from fastrt.tasks.typed import Out, P, R, submits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal, TypeVar, overload

    from typing_extensions import Unpack

    from fastrt.store.ref import ObjectRef
    from fastrt.tasks.dag import FunctionNode
    from fastrt.tasks.typed import FunctionOptions

    _V = TypeVar("_V")

_DEFAULTS = {name: tasks_options.OPTIONS[FUNCTIONS][name].default for name in (
    "num_returns", "max_retries", "retry_exceptions"
)}  # fmt: skip
_SENT_AGAIN_MAX = 1000  # each copy stays in the store, and takes 40 times as long as a call
# A session, how its tasks are submitted there, and the watch that says that the function's object is out of date.
Bound = tuple[Store, TaskOptions, functions_core.Watched | None]


class RemoteFunction(Generic[P, R, Out]):
    """A function that runs in a worker process when called as `f.remote(...)`. Made by `fastrt.remote`."""

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # `RemoteFunction[[int], str]`: the third has a default

    _captured_max: ClassVar[int] = 0  # bytes of the function with all that it captures; 0: any number
    _inherits: tuple[Environment, RemoteFunction[..., Any, Any]] | None = (
        None  # an environment, and this function as it runs there
    )

    def __init__(self, function: Callable[P, R], **options: Any) -> None:
        if isinstance(function, RemoteFunction):
            raise TypeError(f"{function!r} is remote already; its settings are changed by .options(...)")
        if not callable(function):
            raise TypeError(f"remote takes a function, not {type(function).__name__}")
        if inspect.isclass(function):
            raise TypeError(f"{_name_of(function)} is a class: fastrt.remote makes an actor class of it")
        if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
            raise ArgumentError(
                f"{_name_of(function)} is a coroutine function; use a plain function, or an actor's method"
            )
        options = tasks_options.from_ray(FUNCTIONS, options)
        self._settings = settings = tasks_options.read(FUNCTIONS, options, function)
        self._demand = resources.demand_of({k: v for k, v in settings.given.items() if k in resources.OPTIONS})
        self._function = function
        self._name: str = settings.given.get("name") or _name_of(function)
        self._arity = _positional_arity(function)
        self._returns = settings.returns
        self._streaming = settings.streaming
        self._bound: Bound | None = None
        self._times_sent_again = 0
        functools.update_wrapper(self, function, updated=())  # its attributes might be called like ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._name
        raise TypeError(f"Remote functions cannot be called directly: call {name}.remote(...), or {name}.function(...)")

    def __reduce__(self) -> tuple[Any, ...]:
        # By parts, so that a function that calls itself remotely can be pickled inside its own globals.
        return _empty, (), {"function": self._function, **self._settings.given}, None, None, _fill

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - {"forget", "given_options"})

    def __repr__(self) -> str:
        return f"RemoteFunction({self._name})"

    @property
    def function(self) -> Callable[P, R]:
        """The plain function, to call it here."""
        return self._function

    if TYPE_CHECKING:

        @overload
        def options(self, **options: Unpack[FunctionOptions]) -> RemoteFunction[P, R, Out]: ...
        @overload
        def options(self, *, num_returns: Literal[1], **options: Unpack[FunctionOptions]) -> RemoteFunction[P, R]: ...
        @overload
        def options(
            self, *, num_returns: Literal[0], **options: Unpack[FunctionOptions]
        ) -> RemoteFunction[P, R, None]: ...
        @overload
        def options(
            self: RemoteFunction[P, Iterable[_V], Any],
            *,
            num_returns: Literal["streaming"],
            **options: Unpack[FunctionOptions],
        ) -> RemoteFunction[P, R, ObjectRefGenerator[_V]]: ...
        @overload
        def options(
            self, *, num_returns: Literal["dynamic"], **options: Unpack[FunctionOptions]
        ) -> RemoteFunction[P, R, ObjectRef[Any]]: ...
        @overload
        def options(
            self, *, num_returns: int, **options: Unpack[FunctionOptions]
        ) -> RemoteFunction[P, R, list[ObjectRef[Any]]]: ...

    def options(self, **options: Any) -> Any:
        """Return the same function with other settings.

        Args:
            **options: as for `fastrt.remote`.
        Raises:
            TypeError: an unknown option.
            ValueError: an option is out of range.
        """
        tasks_options.refuse_two_places(self._settings.given, options)
        options = tasks_options.from_ray(FUNCTIONS, options)
        tasks_options.check_names(FUNCTIONS, options)
        return type(self)(self._function, **{**self._settings.given, **options})

    def bind(self, *args: Any, **kwargs: Any) -> FunctionNode:
        """Describe a call for a graph: `.execute(...)` of the graph's last node makes it.

        Args:
            *args, **kwargs: as for `remote`; nodes of the graph among them are replaced by their results.
        """
        from fastrt.tasks.dag import FunctionNode  # here: few programs have graphs

        return FunctionNode(self, args, kwargs)

    @submits
    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a task that calls the function.

        Args:
            *args, **kwargs: its arguments. ObjectRefs among them are replaced by their values before it runs;
                references inside containers are passed on as they are.
        Returns:
            An ObjectRef to the result; a list of them when num_returns is not 1; None when it is 0. An
            ObjectRefGenerator when it is "streaming".
        Raises:
            TypeError: the arguments do not fit the function's signature.
            SerializationError: an argument cannot be pickled.
            ObjectStoreFullError: there is no room for the arguments or for another task.
        """
        bound = self._bound
        if bound is None or bound[0] is not store_client.current():
            other = engines.current()
            if other is not None:
                return self._submit_to(other, args, kwargs)
            heir = self._heir()
            if heir is not self:
                return heir.remote(*args, **kwargs)
            bound = self._bind()
        store, options, watched = bound
        if watched is not None and watched.changed() is not None:
            options = self._send_again(watched)
        if kwargs or not self._arity[0] <= len(args) <= self._arity[1]:
            signature_of(self._function).bind(*args, **kwargs)
        try:
            if not kwargs and not self._streaming:
                refs = submit(store.client, options, args)
                if refs is not None:
                    return refs if self._returns else None
            return self._submit(store, options, args, kwargs)
        except ForkedHandle:
            self._bound = None
            return self.remote(*args, **kwargs)
        except ObjectStoreFullError:
            return store.with_room(0, lambda: self._submit(store, options, args, kwargs))

    def _submit(self, store: Store, options: TaskOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit a task whose arguments are not all scalars, or whose items come one by one."""
        stream = generators.create(store.client, self._settings.limit) if self._streaming else None
        refs = submit(store.client, options, arguments.pack(store, args, kwargs), stream)
        if stream is not None:
            return ObjectRefGenerator(stream, refs)
        return refs if self._returns else None

    def _submit_to(self, engine: engines.Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit to an engine other than fastrt's own."""
        if kwargs or not self._arity[0] <= len(args) <= self._arity[1]:
            signature_of(self._function).bind(*args, **kwargs)
        default = {**_DEFAULTS, "name": _name_of(self._function)}
        settings = {**default, **self._settings.given}
        changed = {name: value for name, value in settings.items() if name not in default or value != default[name]}
        return engine.submit(self, settings, changed, args, kwargs)

    def _bind(self) -> Bound:
        """Ship the function to this process's current session."""
        store = store_client.require()
        bound = self._bound
        if bound is None or bound[0] is not store:
            settings = self._settings
            function_ref, watched = functions.export(store, self._name, self._function, self._captured_max)
            options = TaskOptions(
                function_ref,
                settings.returns,
                tasks_options.retries_of(settings.given.get("max_retries", _DEFAULTS["max_retries"])),
                core.RETRY_ERRORS if settings.retry_errors else 0,
                demand=None if self._demand is None else resources.export(store, self._demand),
                policy=tasks_options.export(store, settings.policy),
                priority=settings.priority,
                note=store.note,
            )
            bound = self._bound = (store, options, watched)
            store.users.add(self)
            runtime_env.bind(self)
            job_folders.bind(self)
        return bound

    def _send_again(self, watched: functions_core.Watched) -> TaskOptions:
        """Ship the function once more, because a global that it names was assigned."""
        name, self._bound = watched.changed(), None
        store, options, watching = self._bind()
        self._times_sent_again += 1
        if watching is not None and self._times_sent_again >= _SENT_AGAIN_MAX:
            self._bound = (store, options, None)
            warnings.give(
                f"sent again {self._name}",
                f"remote function {self._name!r} was sent {_SENT_AGAIN_MAX} times because the global {name!r} that it "
                "names was assigned between calls; later assignments are not sent; pass the value as an argument",
            )
        return options

    @property
    def given_options(self) -> dict[str, Any]:
        """The options that were given, by name."""
        return dict(self._settings.given)

    def _heir(self) -> RemoteFunction[..., Any, Any]:
        """Return the function as it is submitted here: it inherits the environment of this process."""
        here = runtime_env.current()
        if here is None:
            return self
        if self._inherits is None or self._inherits[0] is not here:
            given = self._settings.given
            own: Environment | None = given.get(runtime_env.OPTION)
            changes: dict[str, Any] = {}
            wanted, group = runtime_env.inherited(own), runtime_env.captured()
            if group is not None and not resources.place_given(given):
                changes = {"scheduling_strategy": group, runtime_env.OPTION: wanted}
            elif wanted != own:
                changes = {runtime_env.OPTION: wanted}
            self._inherits = (here, self.options(**changes) if changes else self)
        return self._inherits[1]

    def _remote(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Call it with options: a private name of Ray that programs use."""
        return (self.options(**options) if options else self).remote(*(args or ()), **(kwargs or {}))

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        self._bound = None


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _positional_arity(function: Callable[..., Any]) -> tuple[int, float]:
    """How many positional arguments a call without keywords may have; checked before anything is sent."""
    try:
        parameters = signature_of(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature
        return 0, float("inf")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return 1, 0  # never right without keywords: the full check says which is missing
    return required, float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)


def _empty() -> RemoteFunction:
    return RemoteFunction.__new__(RemoteFunction)


def _fill(remote_function: RemoteFunction, state: dict[str, Any]) -> None:
    remote_function.__init__(**state)  # type: ignore[misc]  # deferred on purpose, see __reduce__


namespaces.by_identity(RemoteFunction)
