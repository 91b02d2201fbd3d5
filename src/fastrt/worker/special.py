"""How tasks and calls are run that are more than the common one: generators, and those with a policy.

What is special wraps the function: to the frame that calls it (`_core.tasks.runner`) it is a function like any other.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import admission, cancel, generators
from fastrt._core.tasks import submission as core_submission
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.generators import Producer
from fastrt.errors import FastrtError, ObjectStoreFullError, TaskCancelledError, TaskError, TaskTimeoutError
from fastrt.store.serialize import serialize

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.ref import ObjectRef
    from fastrt.tasks.functions import FunctionCache
    from fastrt.tasks.options import Policy
    from fastrt.worker.main import Worker

_PATIENCE_S = 0.01  # a generator that has to wait for longer gives its place to another worker
_LOOK_S = 0.05
_GRACE_S = 5.0  # for a task to end after its timeout
_REMIND_S = 0.1  # it may have been deaf: in another task on top of it, or in native code


def begin(worker: Worker, task: int) -> FunctionCache:
    """Enter the environment of a task that this process has claimed, if it has one; return the functions there."""
    if core_submission.flags_of(worker.client, task) & core_submission.POLICY:
        environment = worker.policy_of(task).environment
        if environment is not None:
            return worker.rooms.enter(task, environment)
    return worker.functions


def wrap(worker: Worker, task: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call instead of the function of a task that this process has claimed."""
    flags = core_submission.flags_of(worker.client, task)
    if not flags:
        return function
    policy = worker.policy_of(task)
    if flags & admission.DEMAND or policy.environment is not None:
        id = core.info(worker.client, task)["id"]
        function = worker.native_threads.around(task, id, policy.environment, function)
    if policy.dynamic:
        function = _dynamic(worker, task, function)
    elif flags & generators.STREAM:
        function = _streaming(worker, task, function)
    if policy.timeout_s:
        timed = _answered if worker.threaded else _timed
        function = timed(worker, task, policy.timeout_s, function)
    if policy.max_calls:
        function = _counted(worker, task, policy.max_calls, function)
    if worker.retries_here:
        function = _retrying(worker, task, policy, function)
    return function


def is_stream(worker: Worker, task: int) -> bool:
    """Whether what the task yields comes item by item."""
    return bool(core_submission.flags_of(worker.client, task) & generators.STREAM)


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


def _timed(worker: Worker, task: int, timeout_s: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an end: an exception is raised in it, and if that does not help, the process is killed."""

    def call(*args: Any, **kwargs: Any) -> Any:
        timer = worker.timers[task] = Timer(worker, task, timeout_s)
        try:
            return function(*args, **kwargs)
        finally:  # not reached if the timeout is now; then the timer finds out by itself
            timer.stop()

    return call


def _counted(worker: Worker, task: int, most: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after so many calls of which the worker leaves, once the task that it runs has ended."""
    objref, _ = core.function_of(worker.client, task)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            worker.calls[objref] = worker.calls.get(objref, 0) + 1
            if worker.calls[objref] >= most:
                worker.leave()

    return call


class Answered(BaseException):
    """In a thread whose call has been answered already: nothing more is to be said of it."""


def _answered(worker: Worker, task: int, timeout_s: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in one of several threads, which nothing can interrupt: its caller is told, and it goes on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        thread, lock, ended = threading.get_ident(), threading.Lock(), False

        def tell() -> None:
            with lock, contextlib.suppress(FastrtError):  # the session has ended
                if not ended:
                    worker.answered.add(thread)  # before the record can be another call's
                    worker.fail(task, late(worker.name_of(task), timeout_s))

        alarm = worker.clock.start(timeout_s, tell)
        try:
            return function(*args, **kwargs)
        finally:
            alarm.stop()
            with lock:
                ended = True
            if thread in worker.answered:
                raise Answered

    return call


def late(name: str, timeout_s: float) -> TaskTimeoutError:
    """What to raise in a task or call that takes too long."""
    return TaskTimeoutError(f"task {name!r} did not end within its timeout of {timeout_s:g} s")


class Timer:
    """Ends one attempt of a task that takes too long.

    Args:
        worker: this process.
        task: which it runs.
        timeout_s: how long it may.
    """

    def __init__(self, worker: Worker, task: int, timeout_s: float) -> None:
        self._worker, self._task, self._timeout_s = worker, task, timeout_s
        self._name = worker.name_of(task)
        self._thread = threading.get_ident()
        self._attempt = self._attempt_now()
        self._told = 0  # how often it was told, and not some task on top of it
        self._over = self._stopped = False
        self._alarm = worker.clock.start(timeout_s, self._tell)

    def stop(self) -> None:
        """The attempt has ended."""
        self._stopped = True
        self._alarm.stop()

    def is_over(self) -> bool:
        """Whether the attempt still runs, and has no more time."""
        return self._over and not self._stopped and self._attempt_now() == self._attempt

    def error(self) -> TaskTimeoutError:
        """What to raise in it."""
        return late(self._name, self._timeout_s)

    def _attempt_now(self) -> tuple[int, int]:
        info = core.info(self._worker.client, self._task)
        return info["id"], info["attempts"]

    def _tell(self) -> float | None:
        """In the clock's thread: interrupt it, again and again, and in the end with the process."""
        self._over = True
        with contextlib.suppress(FastrtError):  # the session has ended
            if not self.is_over():
                return None
            if self._worker.runs(self._task):
                self._told += 1
            if self._told * _REMIND_S > _GRACE_S:
                again = self._worker.may_retry(self._task, self.error())
                cancel.end_for(self._worker.client, self._task, self._attempt[0], again)
            signal.pthread_kill(self._thread, signal.SIGINT)
            return _REMIND_S
        return None


def _retrying(worker: Worker, task: int, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function until it does not fail: of an actor, whose calls do not go elsewhere."""

    def call(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return function(*args, **kwargs)
            except Exception as exc:
                if not worker.may_retry(task, exc) or not core_submission.again(worker.client, task):
                    raise
            threading.Event().wait(policy.delay(core.info(worker.client, task)["attempts"] - 1))
            if core.cancelled(worker.client, task):
                raise TaskCancelledError("the call was cancelled while it waited to run again")

    return call


async def retry_async(worker: Worker, task: int, exc: BaseException) -> bool:
    """Whether a call on an event loop that has failed is to run again, after its delay."""
    if not worker.may_retry(task, exc) or not core_submission.again(worker.client, task):
        return False
    import asyncio  # here: workers that need no event loop start sooner without it

    await asyncio.sleep(worker.policy_of(task).delay(core.info(worker.client, task)["attempts"] - 1))
    return True


def retry_later(worker: Worker, task: int) -> bool:
    """Queue a task that has failed for another attempt, now or when its delay is over; False if it has none left."""
    attempts = core.info(worker.client, task)["attempts"]
    delay = worker.policy_of(task).delay(attempts)
    if not delay:
        return core.retry(worker.client, task)
    if not attempts_left(worker, task):
        return False
    until = time.monotonic() + delay
    core_submission.park(worker.client, task)

    def look() -> float | None:
        with contextlib.suppress(FastrtError):  # the session has ended, or is broken
            left = until - time.monotonic()
            if left > 0 and not core.cancelled(worker.client, task) and not worker.leaving:
                return min(left, _LOOK_S)
            if not core.retry(worker.client, task):
                worker.store.put_error(task, TaskCancelledError("the task was cancelled while it waited to run again"))
                core.finish(worker.client, task)
        return None

    worker.clock.start(min(delay, _LOOK_S), look)
    return True


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
                    import asyncio

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
