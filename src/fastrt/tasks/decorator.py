"""`fastrt.remote`: one decorator for functions, which run as tasks, and classes, whose instances are actors."""

# mypy: disable-error-code="overload-overlap"
# The first overload that fits counts.

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.options import CLASSES, FUNCTIONS, OF_RAY, OPTIONS, check_names, from_ray
from fastrt.tasks.remote import RemoteFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal, ParamSpec, TypeVar, overload

    from typing_extensions import Unpack

    from fastrt.store.generator import ObjectRefGenerator
    from fastrt.store.ref import ObjectRef
    from fastrt.tasks import typed
    from fastrt.tasks.actor_handle import ActorHandle
    from fastrt.tasks.method import Actor

    _P = ParamSpec("_P")
    _V = TypeVar("_V")
    _C = TypeVar("_C")
    _A = TypeVar("_A", bound=Actor)


if TYPE_CHECKING:
    # The first is for functions that return `Any`, which fit all others; see `typed.OnlyAny`.
    @overload
    def remote(target: Callable[_P, typed.OnlyAny], /) -> RemoteFunction[_P, Any, Any]: ...
    @overload
    def remote(target: Callable[_P, _A], /) -> ActorClass[_P, _A]: ...
    @overload
    def remote(target: type[_C], /) -> ActorClass[..., ActorHandle[_C]]: ...
    @overload
    def remote(target: Callable[_P, Iterator[_V]], /) -> RemoteFunction[_P, Iterator[_V], ObjectRefGenerator[_V]]: ...
    @overload
    def remote(target: Callable[_P, _V], /) -> RemoteFunction[_P, _V]: ...
    @overload
    def remote(**options: Unpack[typed.CommonOptions]) -> typed.Decorator: ...
    @overload
    def remote(**options: Unpack[typed.FunctionOptions]) -> typed.FunctionDecorator: ...
    @overload
    def remote(**options: Unpack[typed.ClassOptions]) -> typed.ClassDecorator: ...
    @overload
    def remote(*, num_returns: Literal[1], **options: Unpack[typed.FunctionOptions]) -> typed.FunctionDecorator: ...
    @overload
    def remote(*, num_returns: Literal[0], **options: Unpack[typed.FunctionOptions]) -> typed.OtherReturns[None]: ...
    @overload
    def remote(*, num_returns: Literal["streaming"], **options: Unpack[typed.FunctionOptions]) -> typed.Streaming: ...
    @overload
    def remote(
        *, num_returns: Literal["dynamic"], **options: Unpack[typed.FunctionOptions]
    ) -> typed.OtherReturns[ObjectRef]: ...
    @overload
    def remote(
        *, num_returns: int, **options: Unpack[typed.FunctionOptions]
    ) -> typed.OtherReturns[list[ObjectRef]]: ...


def remote(target: Any = None, /, **options: Any) -> Any:
    """Make a function run as tasks, or a class's instances actors: `@remote` or `@remote(num_returns=2)`.

    Args:
        target: the function or class, when used without options.
        num_returns: of a function: how many results a call has; it returns a tuple or list of that many, or yields
            them. "streaming", the default of generator functions: a call gives an `ObjectRefGenerator`, through which
            items come while the task runs. "dynamic": its result is a list of references to all that it yields.
        generator_backpressure: of a function: how many unread items make a generator wait; default: it never does.
            Ray's name for it, `_generator_backpressure_num_objects`, is taken, too.
        max_retries: of a function: how often a task runs again after its worker died; default 3; -1: any number.
        retry_exceptions: of a function: whether it also runs again after an exception of its own, other than fastrt's
            errors, or after which ones: a list of classes; default False.
        retry_delay: of a function: seconds before it runs again after an exception; default 0. Each further one is
            `retry_backoff` (default 2) times as long, up to `retry_delay_max` (default 60).
        timeout: of a function: seconds that an attempt may run, from when it begins; then `TaskTimeoutError` is raised
            in it, and its worker is killed if it does not end.
        priority: of a function: from -100 to 100, default 0: of the ready tasks the one with the highest runs first,
            and of equal ones the one that was submitted first. A running task is not interrupted for another.
        max_calls: of a function: how many calls of it a worker process runs before it ends, which frees all that they
            have left in it, such as memory; another process takes its place. Default 0: any number.
        name: of a function: for error messages and listings; default: its qualified name.
        max_restarts: of a class: how often an actor whose process died is built again by the constructor in another
            one; default 0; -1: any number.
        max_task_retries: of a class: how often a call that was running when the process died runs again; default 0;
            -1: any number.
        max_concurrency: of a class: how many calls run at once, in threads, or as coroutines on one event loop when
            there are `async def` methods; default 1, with coroutines 1000.
        concurrency_groups: of a class: limits like {"io": 2} for the methods that name such a group.
        max_pending_calls: of a class: how many calls by one process may wait or run at once; a further one raises
            `PendingCallsError`. Default -1: any number.
        num_cpus, num_gpus, resources: of a function: the resources of a call while it runs, in amounts that may be
            fractions, and by name ({"license": 0.5}); default: one CPU. The call waits until they are free. Of a class:
            the resources of an actor as long as it lives; default: none.
        scheduling: "spread" over the nodes, "pack" onto as few as possible, or the name or id of the only node to
            use; default: this node if it has room, else another.
        scheduling_strategy: the same as Ray spells it: "SPREAD", "DEFAULT", or a `NodeAffinity`.
        label_selector: labels that the node must have, as {"zone": "north"}.
        fallback_strategy: further selectors, tried in order: [{"label_selector": {"zone": "south"}}].
        memory: bytes that a call, or an actor, takes of the node's memory.
        runtime_env: variables, working folder, modules and packages of a call, or an actor, over those that it
            inherits: {"env_vars": {...}, "working_dir": path, "py_modules": [paths], "import_paths": [paths],
            "pip": [packages]}; `docs/environments.md` says more.
    Returns:
        A `RemoteFunction` or an `ActorClass`, or a decorator that makes one.
    Raises:
        TypeError: neither a function nor a class, or an unknown option.
        ValueError: an option is out of range.
    Source:
        The semantics of `ray.remote`.
    """
    if target is not None:
        if options:
            raise TypeError("use @remote or @remote(option=...), not both at once")
        return _made_remote(target)
    if not any(name in OPTIONS[CLASSES] or name in OF_RAY[CLASSES] for name in options):
        check_names(FUNCTIONS, from_ray(FUNCTIONS, options))
    return lambda target: _made_remote(target, **options)


def _made_remote(target: Any, **options: Any) -> RemoteFunction | ActorClass:
    return ActorClass(target, **options) if inspect.isclass(target) else RemoteFunction(target, **options)
