"""An actor that runs several calls at once: in threads, or as coroutines on event loops.

Each concurrency group has a separate limit, and separate threads or a separate event loop; the methods without a group
form the default group. A call is claimed when its turn has come, so a call that still waits can be cancelled, and
survives the process.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastrt._core.memory import trace
from fastrt._core.tasks import actors
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.inbox import Inbox
from fastrt.errors import ActorDiedError, FastrtError
from fastrt.tasks.exit_actor import LEFT, ActorLeaves
from fastrt.worker.ending import is_exit
from fastrt.worker.timeouts import Answered

if TYPE_CHECKING:
    import asyncio

    from fastrt.worker.actor import ActorWorker

_IDLE_S = 1.0
_THREADS_LAST_S, _STEP_S = 0.2, 0.001  # wait at the end of an actor for calls in threads
_LAST_S = 1.0  # wait at the end of an actor for each of its event loops


def limits_of(worker: ActorWorker) -> dict[str, int]:
    """Return how many calls of each group run at once, by the group's name."""
    return {"": worker.plan.concurrency, **worker.plan.groups}


def _group_of(worker: ActorWorker, cell: int) -> str:
    client, task = worker.store.client, (cell & 0xFFFFFFFF) - 1
    # The record may belong to another call by now: then the claim fails, in any group.
    number = core.function_of(client, task)[1]
    most = len(worker.plan.methods) * (len(worker.plan.groups) + 2)
    return worker.plan.method_of(number)[1] if number < most else ""


class Threads:
    """Runs calls in threads; the main thread only distributes them.

    Args:
        worker: the actor's process.
    """

    def __init__(self, worker: ActorWorker) -> None:
        self._worker = worker
        self._inbox = Inbox(worker.store.client, worker.actor, False)
        self._pools = {
            name: ThreadPoolExecutor(most, f"fastrt-{name or 'calls'}") for name, most in limits_of(worker).items()
        }
        self._running: dict[int, int] = {}  # task index by thread
        worker.timeouts.in_threads = True
        worker.store.task_here = self._task_here

    def serve(self) -> None:
        """Run calls until the actor has ended, or is ordered to stop."""
        worker = self._worker
        with worker.waiting():
            while not worker.stop_ordered():
                for cell in self._inbox.take(_IDLE_S, worker.store.spin_s):
                    self._pools[_group_of(worker, cell)].submit(self._run, cell)
                if actors.is_over(worker.store.client, worker.actor):
                    break
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + _THREADS_LAST_S
        while self._running and time.monotonic() < until:  # most important is the one that has ended the actor
            time.sleep(_STEP_S)

    def _run(self, cell: int) -> None:
        task = core.NO_TASK if self._worker.exiting else self._inbox.claim(cell)
        if task == core.NO_TASK:
            return
        client = self._worker.store.client
        traced = trace.begin_task(client, task)
        self._running[threading.get_ident()] = task
        try:
            function, args, kwargs = self._worker.prepare(task)
            self._worker.seal(task, function(*args, **kwargs))
        except Answered:
            pass
        except BaseException as exc:  # any exception of user code is the result
            self._worker.fail(task, exc)
        finally:
            self._worker.timeouts.end_call_here()
            del self._running[threading.get_ident()]
            trace.end(client, traced)

    def _task_here(self) -> int | None:
        return None if self._worker.timeouts.is_answered_here() else self._running.get(threading.get_ident())


class Group:
    """One concurrency group: an event loop, the calls that run on it, and those that wait for their turn.

    Args:
        worker: the actor's process.
        inbox: claims calls.
        most: how many calls run at once.
    """

    def __init__(self, worker: ActorWorker, inbox: Inbox, most: int) -> None:
        import asyncio  # here: workers that need no event loop start sooner without it

        self._worker = worker
        self._client = worker.store.client
        self._inbox = inbox
        self._most = most
        self._waiting: deque[int] = deque()
        self._running: dict[int, asyncio.Task[None]] = {}  # by task index
        self._ending = False
        self.loop = asyncio.new_event_loop()

    def serve(self) -> None:
        """Run calls on this thread until the loop is stopped; then cancel what still runs."""
        import asyncio

        asyncio.set_event_loop(self.loop)
        stopped = False
        while not stopped:
            try:
                self.loop.run_forever()
                stopped = True
            except (
                KeyboardInterrupt,
                SystemExit,
            ) as exc:  # raised in an asyncio task of user code, which ends the loop
                if is_exit(exc):
                    self._worker.exit_by(exc)
        self._ending = True
        self._worker.ending.limit()
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            self.loop.run_until_complete(self._cancel_all())

    async def _cancel_all(self) -> None:
        import asyncio

        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop; any thread may call this."""
        with contextlib.suppress(RuntimeError):  # it has been closed
            self.loop.call_soon_threadsafe(function, *args)

    def take(self, cells: list[int]) -> None:
        """On the loop: take new calls."""
        self._waiting.extend(cells)
        self._fill()

    def stop(self) -> None:
        """On the loop: end `serve`."""
        if not self._ending:
            self.loop.stop()

    def cancel(self) -> None:
        """On the loop: cancel the calls that `fastrt.cancel` has marked.

        asyncio would drop a coroutine that is cancelled before its first step, and with it the end of the call; so
        those are looked at again, after the steps that the loop has before it.
        """
        early = False
        for task, coroutine in list(self._running.items()):
            if core.cancelled(self._client, task):
                made: Any = coroutine.get_coro()
                if inspect.getcoroutinestate(made) == inspect.CORO_CREATED:
                    early = True
                else:
                    coroutine.cancel()
        if early:
            self.loop.call_soon(self.cancel)

    def task_here(self) -> int | None:
        """On the loop: return the call whose coroutine runs."""
        import asyncio

        here = asyncio.current_task(self.loop)
        return next((task for task, coroutine in self._running.items() if coroutine is here), None)

    def _fill(self) -> None:
        """Begin calls up to the group's limit."""
        while self._waiting and len(self._running) < self._most and not self._worker.exiting:
            task = self._inbox.claim(self._waiting.popleft())
            if task != core.NO_TASK:
                self._running[task] = self.loop.create_task(self._run(task))

    async def _call(self, task: int) -> Any:
        """Call the method of a call that has been claimed."""
        worker = self._worker
        function, args, kwargs = worker.prepare_method(task)
        if worker.is_generator(task):
            return await worker.generators.run_on_loop(task, function, args, kwargs)
        value = function(*args, **kwargs)
        return await value if worker.is_async(task) else value

    async def _call_in_time(self, task: int, timeout_s: float) -> Any:
        """Call the method of a call with a timeout."""
        import asyncio

        here, over, began = self._running[task], False, time.monotonic()
        alarm: asyncio.TimerHandle

        def interrupt() -> None:
            nonlocal over, alarm
            left_s = self._worker.timeouts.left_s(task, began, timeout_s)
            if left_s:
                alarm = self.loop.call_later(left_s, interrupt)
                return
            over = True
            here.cancel()

        alarm = self.loop.call_later(timeout_s, interrupt)
        try:
            return await self._call(task)
        except asyncio.CancelledError:
            if not over or core.cancelled(self._client, task):
                raise
            if sys.version_info >= (3, 11):
                here.uncancel()
            raise self._worker.timeouts.error(task, timeout_s) from None
        finally:
            alarm.cancel()

    async def _run(self, task: int) -> None:
        worker = self._worker
        traced = trace.begin_task(self._client, task)
        try:
            if worker.exiting:  # since this call got its turn
                raise ActorLeaves(ActorDiedError(LEFT))
            while True:
                try:
                    timeout_s = worker.policies.of(task).timeout_s
                    value = await (self._call_in_time(task, timeout_s) if timeout_s else self._call(task))
                    break
                except Exception as exc:
                    if not await worker.retries.wait_on_loop(task, exc):
                        raise
            worker.seal(task, value)
        except BaseException as exc:  # any exception of user code is the result
            if not self._ending:  # else the process ends, and the call is lost with it
                worker.fail(task, exc)
        finally:
            trace.end(self._client, traced)
            del self._running[task]
            self._fill()


class Coroutines:
    """Runs calls on event loops: those of the default group in the main thread, each other group's in a thread.

    Another thread waits for calls. Methods that are no coroutine functions run on the loops too, and block their group
    meanwhile.

    Args:
        worker: the actor's process.
    """

    def __init__(self, worker: ActorWorker) -> None:
        self._worker = worker
        self._inbox = Inbox(worker.store.client, worker.actor, False)
        self._groups = {name: Group(worker, self._inbox, most) for name, most in limits_of(worker).items()}
        self._main = self._groups[""]
        self._threads = {
            name: threading.Thread(target=group.serve, name=f"fastrt-{name}", daemon=True)
            for name, group in self._groups.items()
            if group is not self._main
        }
        worker.store.task_here = self._task_here

    def build(self, constructor: Callable[[], Any]) -> Any:
        """Return what a constructor returns that runs on the main thread's loop, as the calls will.

        So `asyncio.get_running_loop()` there is the loop of the calls. A constructor may be a coroutine function.

        Raises:
            BaseException: the constructor's exception.
        Source:
            Ray runs the constructors of asyncio actors on their loop.
        """
        import asyncio

        found: list[tuple[Any, BaseException | None]] = []

        async def run() -> None:
            try:
                made = constructor()
                found.append((await made if inspect.iscoroutine(made) else made, None))
            except BaseException as exc:  # raised below, without the frames of asyncio
                found.append((None, exc))

        asyncio.set_event_loop(self._main.loop)
        self._main.loop.run_until_complete(run())
        instance, error = found[0]
        if error is not None:
            raise error
        return instance

    def serve(self) -> None:
        """Run calls until the actor has ended, or is ordered to stop."""
        signal.signal(signal.SIGINT, self._on_cancel)
        threading.Thread(target=self._wait_for_calls, name="fastrt-calls", daemon=True).start()
        for thread in self._threads.values():
            thread.start()
        self._main.serve()

    def stop(self) -> None:
        """Take no more calls; any thread may call this."""
        for group in self._groups.values():
            group.call_soon(group.stop)

    def end(self) -> None:
        """Wait until the coroutines have ended that were cancelled at the end of the actor."""
        for thread in self._threads.values():
            if thread.ident is not None:  # the constructor did not fail
                thread.join(_LAST_S)

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine on the main thread's loop, which has been stopped."""
        self._main.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Close the loops."""
        for group in self._groups.values():
            if not group.loop.is_running():
                group.loop.close()

    def _wait_for_calls(self) -> None:
        """In the other thread: pass on calls, and the order to leave."""
        worker = self._worker
        try:
            while not worker.stop_ordered():
                cells = self._inbox.take(_IDLE_S, worker.store.spin_s)
                if cells:
                    self._distribute(cells)
                elif actors.is_over(worker.store.client, worker.actor):
                    break
        except FastrtError:
            pass  # the session has ended
        self.stop()

    def _distribute(self, cells: list[int]) -> None:
        if len(self._groups) == 1:
            self._main.call_soon(self._main.take, cells)
            return
        shares: dict[str, list[int]] = {}
        for cell in cells:
            shares.setdefault(_group_of(self._worker, cell), []).append(cell)
        for name, share in shares.items():
            self._groups[name].call_soon(self._groups[name].take, share)

    def _task_here(self) -> int | None:
        import asyncio

        loop = asyncio._get_running_loop()
        return next((group.task_here() for group in self._groups.values() if group.loop is loop), None)

    def _on_cancel(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT: `fastrt.cancel` was called for a call that runs here, or a debugger interrupts it."""
        if self._worker.debugger.take_interrupt(frame):
            return
        for group in self._groups.values():
            group.call_soon(group.cancel)
