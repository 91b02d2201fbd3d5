"""Plans of an actor's methods: how each may be called, and its settings.

They are read from the class when the actor is made, and travel with the actor. A wrong call is refused where it is
made, also by a process that does not have the class.
"""

# mypy: disable-error-code="overload-overlap"
# The first overload that fits counts.

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastrt.errors import ConfigError
from fastrt.store.serialize import deserialize, serialize
from fastrt.tasks import options as tasks_options
from fastrt.tasks.options import METHODS, Settings
from fastrt.tasks.signatures import signature_of

if TYPE_CHECKING:
    from typing import Literal, overload

    from typing_extensions import Unpack

    from fastrt.store.ref import ObjectRef
    from fastrt.tasks.typed import MethodDecorator, MethodOptions, MethodReturns

_SETTINGS = "__fastrt_method__"
_PACKED = "_packed"  # an attribute of a plan: its settings as bytes
CALL = "__fastrt_call__"  # every actor has this method: it calls a function with the instance as first argument
_CALL_SIGNATURE = inspect.signature(lambda function, /, *args, **kwargs: None)
_F = TypeVar("_F", bound=Callable[..., Any])


class Actor:
    """A base for classes of actors whose handles type checkers know, with every method under `fastrt.method()`.

    It does nothing at run time. For a type checker `fastrt.remote(Class).remote(...)` is of the type `Class` then.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def __fastrt_call__(self) -> Any:  # every handle has it
            ...


@dataclass(frozen=True)
class MethodPlan:
    """One method of an actor's class.

    Attributes:
        name: of the method.
        number: names it in calls.
        group: its concurrency group; "": the default one.
        least, most: positional arguments that a call without keywords may have; most -1: any number.
        signature: without `self`, its annotations and defaults that are not plain; None where there is none.
        is_async: whether it is a coroutine function, or an asynchronous generator's.
        settings: of its calls.
    """

    name: str
    number: int
    group: str
    least: int
    most: int
    signature: inspect.Signature | None
    is_async: bool
    settings: Settings = field(default_factory=Settings)

    def __getstate__(self) -> dict[str, Any]:
        # The settings may name classes of exceptions, which only callers need to have: other processes keep the bytes.
        state = dict(self.__dict__)
        settings: Settings | None = None if _PACKED in state else self.settings
        if settings is not None and settings.policy is not None and settings.policy.retry_on:
            parts = serialize(settings)
            if not parts.refs:
                state[_PACKED] = parts.kind, parts.to_bytes()
        if _PACKED in state:
            state.pop("settings", None)
        return state

    def __getattr__(self, name: str) -> Any:
        # Settings that came as bytes, when they are first asked for.
        if name != "settings" or _PACKED not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        kind, data = self.__dict__[_PACKED]
        settings = deserialize(kind, data, [])
        object.__setattr__(self, "settings", settings)
        return settings

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare arguments with the signature.

        Raises:
            TypeError: they do not fit.
        """
        if self.signature is None or (not kwargs and self.least <= len(args) and not 0 <= self.most < len(args)):
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}() {exc}; its signature is {self.name}{self.signature}") from None


if TYPE_CHECKING:

    @overload
    def method(*, num_returns: Literal[1] | None = None, **options: Unpack[MethodOptions]) -> MethodDecorator: ...
    @overload
    def method(*, num_returns: Literal["streaming"], **options: Unpack[MethodOptions]) -> MethodDecorator: ...
    @overload
    def method(*, num_returns: Literal[0], **options: Unpack[MethodOptions]) -> MethodReturns[None]: ...
    @overload
    def method(*, num_returns: Literal["dynamic"], **options: Unpack[MethodOptions]) -> MethodReturns[ObjectRef]: ...
    @overload
    def method(*, num_returns: int, **options: Unpack[MethodOptions]) -> MethodReturns[list[ObjectRef]]: ...


def method(*, num_returns: int | str | None = None, concurrency_group: str | None = None, **options: Any) -> Any:
    """Give a method of a remote class settings of its own: `@fastrt.method(num_returns=2)`.

    Args:
        num_returns: how many results a call has; the method returns a tuple or list of that many. Default: 1, of
            generators "streaming"; "dynamic" as for `fastrt.remote`.
        concurrency_group: the group that its calls run in, one of those that `fastrt.remote` was given.
        **options: generator_backpressure, retry_exceptions (up to `max_task_retries` times), retry_delay,
            retry_backoff, retry_delay_max and timeout, as for `fastrt.remote`. A call that does not end although its
            timeout was raised in it ends with the actor's process; a call in a thread goes on, and its caller gets the
            error.
    Returns:
        A decorator.
    Raises:
        TypeError, ValueError: a setting is wrong.
    Source:
        The semantics of `ray.method`.
    """
    options = {"num_returns": num_returns, "concurrency_group": concurrency_group, **options}
    tasks_options.check(METHODS, options)

    def mark(function: _F) -> _F:
        tasks_options.read(METHODS, options, function)
        setattr(function, _SETTINGS, options)
        return function

    return mark


def methods_of(cls: type, groups: dict[str, int]) -> tuple[MethodPlan, ...]:
    """Return the plans of a class's methods.

    Args:
        cls: the class.
        groups: the actor's concurrency groups.
    Returns:
        The plans, by the methods' numbers. Of the methods with two underscores only `__call__` is among them.
    Raises:
        ConfigError: a method names a group that does not exist.
    """
    plans: list[MethodPlan] = []
    for name in sorted(dir(cls)):
        kind = inspect.getattr_static(cls, name, None)
        own = name.startswith("__") and name.endswith("__") and name != "__call__"
        function = kind.__func__ if isinstance(kind, (staticmethod, classmethod)) else kind
        if own or not callable(function) or inspect.isclass(function):
            continue
        given = dict(getattr(function, _SETTINGS, {}))
        group = given.pop("concurrency_group", None) or ""
        if group and group not in groups:
            raise ConfigError(
                f"{cls.__qualname__}.{name} is of concurrency group {group!r}; there are {sorted(groups)}: "
                "name it in concurrency_groups={...}"
            )
        signature = _signature_of(function, 0 if isinstance(kind, staticmethod) else 1)
        least, most = _arity(signature)
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        settings = tasks_options.read(METHODS, given, function)
        plans.append(MethodPlan(name, len(plans), group, least, most, signature, is_async, settings))
    plans.append(MethodPlan(CALL, len(plans), "", 1, -1, _CALL_SIGNATURE, False))
    return tuple(plans)


def bound_method(instance: Any, name: str) -> Callable[..., Any]:
    """Return the function that a call of a method runs in the actor's process.

    Args:
        instance: the actor's instance. An attribute of its own with the method's name does not hide the method.
        name: of the method.
    """
    if name == CALL:
        return lambda function, *args, **kwargs: function(instance, *args, **kwargs)
    cls = type(instance)
    kind = inspect.getattr_static(cls, name, None)
    bind = getattr(type(kind), "__get__", None)
    found: Callable[..., Any]
    if kind is None:  # `__new__` made an instance of another class, which finds it in a way of its own
        found = getattr(instance, name)
    else:
        found = kind if bind is None else bind(kind, instance, cls)
    return found


def constructor_of(cls: type) -> MethodPlan:
    """Return the plan of a class's constructor."""
    takes_nothing = all(inspect.getattr_static(cls, n) is getattr(object, n) for n in ("__init__", "__new__"))
    signature = inspect.Signature() if takes_nothing else _signature_of(cls, 0)
    return MethodPlan(cls.__name__, 0, "", *_arity(signature), signature, False)


def _signature_of(function: Any, skip: int) -> inspect.Signature | None:
    try:
        parameters = list(signature_of(function).parameters.values())
    except (ValueError, TypeError):  # some builtins have no signature
        return None
    if skip and (not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL):
        skip = 0  # def method(*args): `self` is among them
    # Annotations and defaults may be anything, also what cannot be pickled: the plain ones are kept, for messages.
    return inspect.Signature([p.replace(annotation=p.empty, default=_default(p.default)) for p in parameters[skip:]])


def _default(value: object) -> object:
    return value if value is inspect.Parameter.empty or type(value) in (int, float, bool, str, type(None)) else ...


def _arity(signature: inspect.Signature | None) -> tuple[int, int]:
    if signature is None:
        return 0, -1
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return 1, 0  # never right without keywords: the full check says which is missing
    most = -1 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    return sum(p.default is p.empty for p in positional), most


def built(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an instance of an actor's class; a coroutine of it if `__init__` is a coroutine function."""
    if not inspect.iscoroutinefunction(cls.__init__):
        return cls(*args, **kwargs)

    async def build() -> Any:
        instance = cls.__new__(cls) if cls.__new__ is object.__new__ else cls.__new__(cls, *args, **kwargs)
        await cls.__init__(instance, *args, **kwargs)
        return instance

    return build()
