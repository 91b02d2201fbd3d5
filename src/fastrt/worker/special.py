"""How tasks and calls are run that are more than the common one: generators, and those with a policy.

What is special wraps the function: to the frame that calls it (`_core.run`) it is a function like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrt._core import generators
from fastrt._core import special as core_special
from fastrt._core import tasks as core
from fastrt._core.generators import Producer
from fastrt.errors import ObjectStoreFullError, TaskError
from fastrt.store.serialize import serialize

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.ref import ObjectRef
    from fastrt.tasks.functions import FunctionCache
    from fastrt.worker.main import Worker

_PATIENCE_S = 0.01  # a generator that has to wait for longer gives its place to another worker
_LOOK_S = 0.05


def begin(worker: Worker, task: int) -> FunctionCache:
    """Enter the environment of a task that this process has claimed, if it has one; return the functions there."""
    if core_special.flags_of(worker.client, task) & core_special.POLICY:
        environment = worker.policy_of(task).environment
        if environment is not None:
            return worker.rooms.enter(task, environment)
    return worker.functions


def wrap(worker: Worker, task: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call instead of the function of a task that this process has claimed."""
    flags = core_special.flags_of(worker.client, task)
    if flags & core_special.POLICY and worker.policy_of(task).dynamic:
        return _dynamic(worker, task, function)
    if flags & generators.STREAM:
        return _streaming(worker, task, function)
    return function


def is_stream(worker: Worker, task: int) -> bool:
    """Whether what the task yields comes item by item."""
    return bool(core_special.flags_of(worker.client, task) & generators.STREAM)


def _streaming(worker: Worker, task: int, function: Callable[..., Any]) -> Callable[..., None]:
    store = worker.store

    def produce(*args: Any, **kwargs: Any) -> None:
        producer = Producer(store.client, task)
        if producer.wanted == generators.NOTHING:
            return  # as any generator that nobody reads: it does not even begin
        producer.run(
            iter(function(*args, **kwargs)),
            lambda item: producer.add_ref(_put(store, item)),
            lambda: _wait_for_room(store, producer),
        )

    return produce


def _put(store: Store, item: Any) -> ObjectRef:
    return store.put_serialized(serialize(item))


def _wait_for_room(store: Store, producer: Producer) -> None:
    if not producer.wait(_PATIENCE_S, store.spin_s):
        with store.blocked():
            producer.wait(None, 0.0)


def _dynamic(worker: Worker, task: int, function: Callable[..., Any]) -> Callable[..., list[ObjectRef]]:
    store = worker.store

    def collect(*args: Any, **kwargs: Any) -> list[ObjectRef]:
        refs: list[ObjectRef] = []
        try:
            for item in function(*args, **kwargs):
                refs.append(_put(store, item))
        except Exception as exc:
            if worker.may_retry(task, exc):
                raise
            refs.append(_put_error(worker, task, exc))
        return refs

    return collect


def _put_error(worker: Worker, task: int, exc: Exception) -> ObjectRef:
    """The error at its place among the items."""
    return worker.store.put_serialized(serialize(TaskError.wrap(exc, task_name=worker.name_of(task))), error=True)


# ---- on an event loop ----


async def run_async(worker: Worker, task: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a generator method, of the asynchronous kind or not, without holding up the event loop while it waits.

    Returns:
        The call's result.
    """
    made = function(*args, **kwargs)
    items = _each(made)
    if not is_stream(worker, task):
        return await _collect(worker, task, items)
    store, producer = worker.store, Producer(worker.client, task)
    try:
        while producer.wanted != generators.NOTHING:
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return None
            if not producer.skips() and producer.wanted == generators.ITEMS:
                _add(store, producer, item)
                while producer.full and producer.wanted == generators.ITEMS:
                    import asyncio  # here: workers that need no event loop start sooner without it

                    await asyncio.get_running_loop().run_in_executor(None, producer.wait, _LOOK_S, 0.0)
        return None
    finally:
        await items.aclose()


def _add(store: Store, producer: Producer, item: Any) -> None:
    try:
        if producer.add(item):
            return
    except ObjectStoreFullError:
        pass  # the store knows whom to ask for room
    producer.add_ref(_put(store, item))


async def _collect(worker: Worker, task: int, items: Any) -> list[ObjectRef]:
    refs: list[ObjectRef] = []
    try:
        async for item in items:
            refs.append(_put(worker.store, item))
    except Exception as exc:
        if worker.may_retry(task, exc):
            raise
        refs.append(_put_error(worker, task, exc))
    return refs


async def _each(made: Any) -> Any:
    """The items of a generator of either kind; it is closed when nobody takes any more."""
    if not hasattr(made, "__aiter__"):
        for item in made:
            yield item
        return
    try:
        async for item in made:
            yield item
    finally:
        if hasattr(made, "aclose"):
            await made.aclose()


def attempts_left(worker: Worker, task: int) -> bool:
    """Whether a task that has failed may run again."""
    info = core.info(worker.client, task)
    return bool(info["attempts"] <= info["retries"]) and not info["cancelled"]
