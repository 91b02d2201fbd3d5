"""`fastrt.remote`: one decorator for functions, which run as tasks, and classes, whose instances are actors."""

from __future__ import annotations

import inspect
from typing import Any

from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.options import CLASSES, OPTIONS
from fastrt.tasks.remote import remote as remote_function


def remote(target: Any = None, /, **options: Any) -> Any:
    """Make a function run as tasks, or a class's instances actors: `@remote` or `@remote(num_returns=2)`.

    Args:
        target: the function or class, when used without options.
        num_returns: of a function: how many results a call has; it returns a tuple or list of that many.
        max_retries: of a function: how often a task runs again after its worker died; default 3.
        retry_exceptions: of a function: whether it also runs again after an exception of its own; default False.
        max_calls: of a function: how many calls of it a worker process runs before it ends; default 0: any number.
        name: of a function: for error messages and listings; default: its qualified name.
        max_restarts: of a class: how often an actor whose process died is built again by the constructor in another
            one; default 0; -1: any number.
        max_task_retries: of a class: how often a call that was running when the process died runs again; default 0;
            -1: any number.
        max_concurrency: of a class: how many calls run at once, in threads, or as coroutines on one event loop when
            there are `async def` methods; default 1, with coroutines 1000.
        concurrency_groups: of a class: limits like {"io": 2} for the methods that name such a group.
        priority: of a function: of the ready tasks the one with the highest runs first; from -100 to 100, default 0.
        num_cpus, num_gpus, resources, scheduling, scheduling_strategy: of a function: the resources of a call while it
            runs, and where it runs; default: one CPU on this node, or on another when there is none. Of a class: the
            resources of an actor as long as it lives; default: none.
        memory: of a class: accepted and checked.
        runtime_env: variables, working folder and modules of a call, or an actor, over those that it inherits:
            {"env_vars": {...}, "working_dir": path, "py_modules": [paths], "import_paths": [paths]}.
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
        return ActorClass(target) if inspect.isclass(target) else remote_function(target)
    if not any(name in OPTIONS[CLASSES] for name in options):
        make_function = remote_function(**options)  # refuses unknown options
    else:
        make_function = None

    def decorate(target: Any) -> Any:
        if inspect.isclass(target):
            return ActorClass(target, **options)
        return remote_function(**options)(target) if make_function is None else make_function(target)

    return decorate
