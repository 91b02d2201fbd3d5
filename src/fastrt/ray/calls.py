"""`ray.wait`, `ray.get_actor` and `ray.remote`: fastrt's own, which refuse what Ray refuses, in its words."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastrt.errors import FastrtError
from fastrt.ray import option_words, runtime_env
from fastrt.store import client as store_client
from fastrt.store.ref import ObjectRef
from fastrt.tasks import actor_handle
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.options import CLASSES, FUNCTIONS, OF_RAY, OPTIONS, check_names, from_ray
from fastrt.tasks.placement_group import PlacementGroupSchedulingStrategy
from fastrt.tasks.remote import RemoteFunction

if TYPE_CHECKING:
    from fastrt.store.ref import Waitable
    from fastrt.tasks.actor_handle import ActorHandle
    from fastrt.tasks.decorator import remote as remote

_W = TypeVar("_W", bound="ObjectRef | Waitable")
_WAITS_FOR = "wait() expected a list of ray.ObjectRef or ray.ObjectRefGenerator"
_STRATEGIES = ("DEFAULT", "SPREAD")
_CAPTURED_MAX = int(os.environ.get("FUNCTION_SIZE_ERROR_THRESHOLD") or 10**8)  # bytes; by Ray's variable


class DecoratorError(FastrtError, AssertionError, TypeError):
    """`@ray.remote()` has no option, or its target is no function or class. Leave the parentheses out."""


def check_namespace(value: Any) -> None:
    """Refuse what Ray takes for no namespace.

    Raises:
        TypeError: it is not text.
        ValueError: it is empty.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"namespace must be None or a string; it is {value!r}.")
    if value == "":
        raise ValueError('"" is not a valid namespace. Pass None to not specify a namespace.')


def wait(
    ray_waitables: Sequence[_W], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[_W], list[_W]]:
    """Wait until some of several references are ready, as `fastrt.wait` does.

    Args:
        ray_waitables: the references and generators, each once.
        num_returns, timeout, fetch_local: as for `fastrt.wait`.
    Returns:
        (ready, not_ready), as there.
    Raises:
        ValueError: one is given twice, or `num_returns` is out of range.
        TypeError: something is not an ObjectRef.
    Source:
        The semantics of `ray.wait`.
    """
    if isinstance(timeout, (int, float)) and timeout < 0:
        raise ValueError(f"The 'timeout' argument must be nonnegative. Received {timeout}")
    try:
        if len(set(ray_waitables)) != len(ray_waitables):
            raise ValueError("Wait requires a list of unique ray_waitables.")
        if ray_waitables and num_returns <= 0:
            raise ValueError(f"Invalid number of objects to return {num_returns}.")
        if ray_waitables and num_returns > len(ray_waitables):
            raise ValueError("num_returns cannot be greater than the number of ray_waitables provided to ray.wait.")
        return store_client.wait(ray_waitables, num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)
    except TypeError:
        _check_waitables(ray_waitables)
        raise


def _check_waitables(given: Any) -> None:
    """Refuse a list to wait for that has others than references and generators.

    Raises:
        TypeError: in Ray's words.
    """
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{_WAITS_FOR}, got {type(given)}: {given!r}")
    for one in given:
        if not isinstance(one, ObjectRef) and not hasattr(one, "completed"):
            raise TypeError(f"{_WAITS_FOR}, got list containing {type(one)}")


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """Return a handle of a named actor, as `fastrt.get_actor` does.

    Raises:
        ValueError: there is no such actor, or the name or the namespace is empty.
        TypeError: one of them is no text.
    """
    if not name:
        raise ValueError("Please supply a non-empty value to get_actor")
    check_namespace(namespace)
    return actor_handle.get_actor(name, namespace)


class _Function(RemoteFunction[..., Any, Any]):
    """A function that was made remote by `ray.remote`. In other processes it is a plain `RemoteFunction`."""

    _captured_max = _CAPTURED_MAX

    def __init__(self, function: Any, **options: Any) -> None:
        option_words.check(options)
        super().__init__(function, **runtime_env.without_unknown(options))

    if not TYPE_CHECKING:

        def options(self, **options: Any) -> Any:
            option_words.check_changes(FUNCTIONS, options)
            return super().options(**options)

    def _bind(self) -> Any:
        _check_strategy(self._settings.given.get("scheduling_strategy"))
        return super()._bind()


class _Class(ActorClass[..., Any]):
    """A class that was made remote by `ray.remote`. In other processes it is a plain `ActorClass`."""

    _captured_max = _CAPTURED_MAX

    def __init__(self, cls: type, *more: Any, **options: Any) -> None:
        check_namespace(options.get("namespace"))
        option_words.check(options)
        super().__init__(cls, *more, **runtime_env.without_unknown(options))

    if not TYPE_CHECKING:

        def options(self, **options: Any) -> Any:
            option_words.check_changes(CLASSES, options)
            return super().options(**options)

    def _bind(self) -> Any:
        _check_strategy(self._options["scheduling_strategy"])
        return super()._bind()


def _check_strategy(strategy: Any) -> None:
    if isinstance(strategy, str) and strategy not in _STRATEGIES:
        raise ValueError(
            f"Invalid scheduling_strategy value {strategy}. Valid values are "
            '["DEFAULT" | "SPREAD" | PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy]'
        )
    if isinstance(strategy, PlacementGroupSchedulingStrategy) and strategy.placement_group is None:
        raise ValueError("placement_group needs to be an instance of PlacementGroup")


def _remote(*targets: Any, **options: Any) -> Any:
    """Make a function run as tasks, or a class's instances actors, as `fastrt.remote` does.

    Raises:
        DecoratorError: there is neither a target nor an option, or both.
    """
    if len(targets) == 1 and not options and callable(targets[0]):
        return _made(targets[0])
    if targets or not options:
        raise DecoratorError(
            "The @ray.remote decorator must be applied either with no arguments and no parentheses, for example "
            "'@ray.remote', or it must be applied using some of the arguments in the list "
            f"{list(dict.fromkeys([*OPTIONS[FUNCTIONS], *OPTIONS[CLASSES]]))}, for example "
            "'@ray.remote(num_returns=2, resources={\"CustomResource\": 1})'."
        )
    if not any(name in OPTIONS[CLASSES] or name in OF_RAY[CLASSES] for name in options):
        check_names(FUNCTIONS, from_ray(FUNCTIONS, options))
    return lambda target: _made(target, **options)


def _made(target: Any, **options: Any) -> RemoteFunction[..., Any, Any] | ActorClass[..., Any]:
    return _Class(target, **options) if inspect.isclass(target) else _Function(target, **options)


if not TYPE_CHECKING:
    remote = _remote
