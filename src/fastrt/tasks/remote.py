"""`@fastrt.remote`: functions that run as tasks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from fastrt._core.memory.clients import ForkedHandle
from fastrt._core.objects import functions as functions_core
from fastrt._core.tasks import admission, generators
from fastrt._core.tasks import submission as submission_core
from fastrt._core.tasks import tasks as core
from fastrt.errors import ObjectStoreFullError
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store import namespaces, warnings
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef
from fastrt.tasks import arguments, functions, runtime_env
from fastrt.tasks import options as tasks_options
from fastrt.tasks.options import Special
from fastrt.tasks.resources import OPTIONS as DEMAND_OPTIONS
from fastrt.tasks.resources import Demand, demand_of, export, group_strategy, place_given
from fastrt.tasks.runtime_env import Environment

_RETURNS_MAX = 10_000
_RETRIES_MAX = 250  # attempts are counted in one byte of the task's record
_SENT_AGAIN_MAX = 1000  # each stays in the store, and takes 40 times as long as a call
# A session, the function's object in it, and what says that this object is out of date.
Bound = tuple[Store, ObjectRef, functions_core.Watched | None]


class RemoteFunction:
    """A function that runs in a worker process when called as `f.remote(...)`. Made by `fastrt.remote`."""

    _inherits: tuple[Environment, RemoteFunction] | None = None  # an environment, and this as it runs there

    def __init__(
        self,
        function: Callable[..., Any],
        num_returns: int = 1,
        max_retries: int = 3,
        retry_exceptions: bool = False,
        name: str | None = None,
    ) -> None:
        if isinstance(function, RemoteFunction):
            raise TypeError(f"{function!r} is remote already; its settings are changed by .options(...)")
        if not callable(function):
            raise TypeError(f"remote takes a function, not {type(function).__name__}")
        if inspect.isclass(function):
            raise TypeError(f"{_name_of(function)} is a class: fastrt.remote makes an actor class of it")
        if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{_name_of(function)} is a coroutine function; use a plain function, or an actor's method")
        self._function = function
        self._num_returns = _checked_int("num_returns", num_returns, 0, _RETURNS_MAX)
        retries = _checked_int("max_retries", max_retries, -1, _RETRIES_MAX)
        self._max_retries = tasks_options.RETRIES_FOREVER if retries == -1 else retries
        self._flags = core.RETRY_ERRORS if retry_exceptions else 0
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is {name!r}; it must be text")
        self._name = name or _name_of(function)
        self._arity = _positional_arity(function)
        self._bound: Bound | None = None
        self._times_sent_again = 0
        functools.update_wrapper(self, function, updated=())  # its attributes might be called like ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self._name} is a remote function: call {self._name}.remote(...), or .function(...) here")

    def __reduce__(self) -> tuple[Any, ...]:
        # By parts, so that a function that calls itself remotely can be pickled inside its own globals.
        return _empty, (RemoteFunction,), self._settings(), None, None, _fill

    def __repr__(self) -> str:
        return f"RemoteFunction({self._name})"

    @property
    def function(self) -> Callable[..., Any]:
        """The plain function, to call it here."""
        return self._function

    def options(self, **options: Any) -> RemoteFunction:
        """Return the same function with other settings.

        Args:
            **options: as for `fastrt.remote`.
        Raises:
            TypeError: an unknown option.
            ValueError: an option is out of range.
        """
        settings = self._settings()
        _check_options(options)
        return make(**{**settings, **options})

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
        store, function_ref, watched = bound
        if watched is not None and watched.changed() is not None:
            function_ref = self._send_again(watched)
        if kwargs or not self._arity[0] <= len(args) <= self._arity[1]:
            inspect.signature(self._function).bind(*args, **kwargs)
        try:
            if not kwargs:
                refs = core.submit_scalars(
                    store.client, function_ref, args, self._num_returns, self._max_retries, self._flags
                )
                if refs is not None:
                    return refs if self._num_returns else None
            return self._submit(store, function_ref, args, kwargs)
        except ForkedHandle:
            self._bound = None
            return self.remote(*args, **kwargs)
        except ObjectStoreFullError:
            return store.with_room(0, lambda: self._submit(store, function_ref, args, kwargs))

    def _submit(self, store: Store, function_ref: ObjectRef, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refs = self._hand_in(core, store, function_ref, args, kwargs)
        return refs if self._num_returns else None

    def _hand_in(
        self, way: Any, store: Store, function_ref: ObjectRef, args: tuple[Any, ...], kwargs: dict[str, Any], *more: Any
    ) -> Any:
        """Submit by the core's module for this kind of task (`way`), which takes `more` than others do."""
        refs = None
        args = arguments.put_large_arrays(store, args)
        settings = (self._num_returns, self._max_retries, self._flags, *more)
        if not kwargs:
            refs = way.submit_scalars(store.client, function_ref, args, *settings)
        if refs is None:
            kind, data, named, ndeps = arguments.pack(store, args, kwargs)
            refs = way.submit(store.client, function_ref, kind, data, named, ndeps, *settings)
        return refs

    def _submit_to(self, engine: engines.Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit to an engine other than fastrt's own."""
        if kwargs or not self._arity[0] <= len(args) <= self._arity[1]:
            inspect.signature(self._function).bind(*args, **kwargs)
        settings = self._settings()
        default = RemoteFunction(self._function)._settings()
        changed = {name: value for name, value in settings.items() if name not in default or value != default[name]}
        return engine.submit(self, settings, changed, args, kwargs)

    def _bind(self) -> Bound:
        """Ship the function to this process's current session."""
        store = store_client.require()
        bound = self._bound
        if bound is None or bound[0] is not store:
            bound = self._bound = (store, *functions.export(store, self._name, self._function))
            store.users.add(self)
            runtime_env.bind(self)
        return bound

    def _send_again(self, watched: functions_core.Watched) -> ObjectRef:
        """Ship the function once more, because a global that it names was assigned."""
        name, self._bound = watched.changed(), None
        store, function_ref, watching = self._bind()
        self._times_sent_again += 1
        if watching is not None and self._times_sent_again >= _SENT_AGAIN_MAX:
            self._bound = (store, function_ref, None)
            warnings.give(
                f"sent again {self._name}",
                f"remote function {self._name!r} was sent {_SENT_AGAIN_MAX} times because the global {name!r} that it "
                "names was assigned between calls; later assignments are not sent; pass the value as an argument",
            )
        return function_ref

    def _heir(self) -> RemoteFunction:
        """This function as it is submitted here: it inherits the environment that this process is in."""
        here = runtime_env.current()
        if here is None:
            return self
        if self._inherits is None or self._inherits[0] is not here:
            own, settings = self._environment(), self._settings()
            wanted, group = runtime_env.inherited(own), runtime_env.captured()
            if group is not None and not place_given(settings):
                settings["scheduling_strategy"] = group
            elif wanted == own:
                settings = {}
            heir = make(**{**settings, runtime_env.OPTION: wanted}) if settings else self
            self._inherits = (here, heir)
        return self._inherits[1]

    def _environment(self) -> Environment | None:
        return None

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        self._bound = None

    def _settings(self) -> dict[str, Any]:
        return {
            "function": self._function,
            "num_returns": self._num_returns,
            "max_retries": -1 if self._max_retries == tasks_options.RETRIES_FOREVER else self._max_retries,
            "retry_exceptions": bool(self._flags & core.RETRY_ERRORS),
            "name": self._name,
        }


class DemandingFunction(RemoteFunction):
    """A remote function whose tasks demand more than a worker: see `fastrt.tasks.resources`."""

    def __init__(self, demand: Demand | None, given: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._demand = demand
        self._given = given
        self._demand_ref: ObjectRef | None = None  # in the session that the function is bound to

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (DemandingFunction,), {**self._settings(), "demand": self._demand}, None, None, _fill

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a task that calls the function, once what it demands is free; see `RemoteFunction.remote`."""
        bound = self._bound
        if bound is None or bound[0] is not store_client.current():
            other = engines.current()
            if other is not None:
                return self._submit_to(other, args, kwargs)
            heir = self._heir()
            if heir is not self:
                return heir.remote(*args, **kwargs)
            bound = self._bind()
        store, function_ref, watched = bound
        if watched is not None and watched.changed() is not None:
            function_ref = self._send_again(watched)
        if kwargs or not self._arity[0] <= len(args) <= self._arity[1]:
            inspect.signature(self._function).bind(*args, **kwargs)
        try:
            return self._submit(store, function_ref, args, kwargs)
        except ForkedHandle:
            self._bound = None
            return self.remote(*args, **kwargs)
        except ObjectStoreFullError:
            return store.with_room(0, lambda: self._submit(store, function_ref, args, kwargs))

    def _submit(self, store: Store, function_ref: ObjectRef, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refs = self._hand_in(admission, store, function_ref, args, kwargs, self._demand_ref)
        return refs if self._num_returns else None

    def _bind(self) -> Bound:
        bound = super()._bind()
        self._demand_ref = None if self._demand is None else export(bound[0], self._demand)
        return bound

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        super().forget()
        self._demand_ref = None

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._given}


class SpecialFunction(DemandingFunction):
    """A remote function whose tasks are special: see `fastrt.tasks.options`; they may demand something, too."""

    def __init__(self, special: Special, demand: Demand | None, given: dict[str, Any], **settings: Any) -> None:
        super().__init__(demand, {**given, **dict(special.given)}, **settings)
        self._special = special
        self._policy_ref: ObjectRef | None = None

    def _environment(self) -> Environment | None:
        return None if self._special.policy is None else self._special.policy.environment

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (SpecialFunction,), self._settings(), None, None, _fill

    def _submit(self, store: Store, function_ref: ObjectRef, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = generators.create(store.client, self._special.limit) if self._special.streaming else None
        more = (self._demand_ref, self._policy_ref, stream, self._special.priority)
        refs = self._hand_in(submission_core, store, function_ref, args, kwargs, *more)
        if stream is not None:
            return ObjectRefGenerator(stream, refs)
        return refs if self._num_returns else None

    def _bind(self) -> Bound:
        bound = super()._bind()
        self._policy_ref = tasks_options.export(bound[0], self._special.policy)
        return bound

    def forget(self) -> None:
        """Let go of the session that has ended, or its segment would stay mapped."""
        super().forget()
        self._policy_ref = None


def make(**settings: Any) -> RemoteFunction:
    """A remote function with these settings, of the kind that they call for."""
    kind, settings = _kind_of(settings)
    return kind(**settings)


def _kind_of(settings: dict[str, Any]) -> tuple[type[RemoteFunction], dict[str, Any]]:
    """The class that functions with these settings are of, and what it is made from."""
    settings = dict(settings)
    given = {name: settings.pop(name) for name in DEMAND_OPTIONS if name in settings}
    demand = demand_of(given)
    around = runtime_env.environment_of(settings.get(runtime_env.OPTION))
    settings[runtime_env.OPTION] = runtime_env.grouped(around, group_strategy(given))
    unlike = tasks_options.take(settings, settings.get("function"))
    if unlike is not None:
        return SpecialFunction, {"special": unlike, "demand": demand, "given": given, **settings}
    if demand is not None:
        return DemandingFunction, {"demand": demand, "given": given, **settings}
    return RemoteFunction, settings


@overload
def remote(function: Callable[..., Any], /) -> RemoteFunction: ...
@overload
def remote(**options: Any) -> Callable[[Callable[..., Any]], RemoteFunction]: ...
def remote(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Turn a function into one that runs as tasks: `@remote` or `@remote(num_returns=2)`.

    Args:
        function: the function, when used without options.
        num_returns: how many results a call has; the function returns a tuple or list of that many, or yields them.
            "streaming", the default of generator functions: a call gives an `ObjectRefGenerator`, through which items
            come while the task runs. "dynamic": its result is a list of references to all that it yields.
        generator_backpressure: how many unread items make a generator wait; default: it never does. Ray's name for
            it, `_generator_backpressure_num_objects`, is taken, too.
        max_retries: how often the task runs again after its worker died; default 3; -1: any number.
        retry_exceptions: whether it also runs again after an exception of its own, other than fastrt's errors, or
            after which ones: a list of classes; default False.
        retry_delay: seconds before it runs again after an exception; default 0. Each further one is `retry_backoff`
            (default 2) times as long, up to `retry_delay_max` (default 60).
        timeout: seconds that an attempt may run, from when it begins; then `TaskTimeoutError` is raised in it, and
            its worker is killed if it does not end.
        priority: from -100 to 100, default 0: of tasks that are ready, the one with the highest is run first, and of
            equal ones the one that was submitted first. A task that runs is not interrupted for another.
        max_calls: how many calls of this function a worker process runs before it ends, and gives back what they have
            left in it, such as memory; another takes its place. Default 0: any number.
        name: for error messages and listings; default: the function's qualified name.
        num_cpus, num_gpus, resources: what a call takes while it runs, in amounts that may be fractions, and
            resources by name ({"license": 0.5}); default: one CPU. It waits until that is free.
        scheduling: "spread" over the nodes, "pack" onto as few as will do, or the name or id of the only node that
            will do; default: here if there is room, else elsewhere.
        scheduling_strategy: the same as Ray spells it: "SPREAD", "DEFAULT", or a `NodeAffinity`.
        runtime_env: variables, folder and modules that a call finds around it, over those that it inherits:
            {"env_vars": {...}, "working_dir": path, "py_modules": [paths], "import_paths": [paths]}.
    Returns:
        A `RemoteFunction`, or a decorator that makes one.
    Raises:
        TypeError: not a function, or an unknown option.
        ValueError: an option is out of range.
    Source:
        The semantics of `ray.remote`.
    """
    _check_options(options)
    if function is None:
        return lambda function: make(function=function, **options)
    if options:
        raise TypeError("use @remote or @remote(option=...), not both at once")
    return make(function=function)


_COMMON = ("num_returns", "max_retries", "retry_exceptions", "name")
_OPTIONS = (*_COMMON, *DEMAND_OPTIONS, *tasks_options.OPTIONS, runtime_env.OPTION)


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"{name!r} is not an option of remote functions; there are: {', '.join(_OPTIONS)}")


def _checked_int(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be from {low} to {high}")
    return value


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _positional_arity(function: Callable[..., Any]) -> tuple[int, float]:
    """How many positional arguments a call without keywords may have; checked before anything is sent."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins have no signature
        return 0, float("inf")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return 1, 0  # never right without keywords: the full check says which is missing
    return required, float("inf") if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)


def _empty(kind: type[RemoteFunction]) -> RemoteFunction:
    return kind.__new__(kind)


def _fill(remote_function: RemoteFunction, settings: dict[str, Any]) -> None:
    if isinstance(remote_function, SpecialFunction):
        _, settings = _kind_of(settings)
    elif isinstance(remote_function, DemandingFunction):
        settings["given"] = {name: settings.pop(name) for name in DEMAND_OPTIONS if name in settings}
    remote_function.__init__(**settings)  # type: ignore[misc]  # deferred on purpose, see __reduce__


namespaces.by_identity(RemoteFunction)
