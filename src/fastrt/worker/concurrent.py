"""An actor that runs several calls at once: in threads, or as coroutines on one event loop.

Each concurrency group has a limit of its own; the methods that name none are the default group. A call is claimed when
its turn has come, so one that waits for its turn can still be cancelled, and is not lost with the process.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastrt._core import actors, trace
from fastrt._core import tasks as core
from fastrt._core.inbox import Inbox
from fastrt.errors import ActorDiedError, FastrtError
from fastrt.tasks.leaving import LEFT, ActorLeaves
from fastrt.worker import special

if TYPE_CHECKING:
    import asyncio

    from fastrt.worker.actor import ActorWorker

_IDLE_S = 1.0


def limits_of(worker: ActorWorker) -> dict[str, int]:
    """How many calls of each group may run at once."""
    return {"": worker.plan.concurrency, **worker.plan.groups}


def _group_of(worker: ActorWorker, cell: int) -> str:
    number = core.function_of(worker.store.client, (cell & 0xFFFFFFFF) - 1)[1]
    # The record may be another call's by now: then the claim fails, whatever group it waits in.
    return worker.plan.methods[number].group if number < len(worker.plan.methods) else ""


class Threads:
    """Runs calls in threads; the main thread only hands them out.

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
        worker.threaded = True
        worker.store.task_here = self._task_here

    def serve(self) -> None:
        """Run calls until the actor is over, or told to stop."""
        worker = self._worker
        while not worker.told_to_stop():
            for cell in self._inbox.take(_IDLE_S, worker.store.spin_s):
                self._pools[_group_of(worker, cell)].submit(self._run, cell)
            if actors.is_over(worker.store.client, worker.actor):
                break
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

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
        except special.Answered:
            pass
        except BaseException as exc:  # whatever user code raises belongs to whoever gets the result
            self._worker.fail(task, exc)
        finally:
            self._worker.answered.discard(threading.get_ident())
            trace.end(client, traced)

    def _task_here(self) -> int | None:
        thread = threading.get_ident()
        return None if thread in self._worker.answered else self._running.get(thread)


class Group:
    """Calls of one concurrency group: how many run, and which wait for their turn."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.running = 0
        self.waiting: deque[int] = deque()


class Coroutines:
    """Runs calls on one event loop, in the main thread; another thread waits for them to come.

    Methods that are no coroutine functions run on the loop too, and hold it up meanwhile.

    Args:
        worker: the actor's process.
    """

    def __init__(self, worker: ActorWorker) -> None:
        import asyncio  # here: workers that need no event loop start sooner without it

        self._worker = worker
        self._client = worker.store.client
        self._inbox = Inbox(self._client, worker.actor, False)
        self._groups = {name: Group(most) for name, most in limits_of(worker).items()}
        self._running: dict[int, asyncio.Task[None]] = {}  # by task index
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        worker.store.task_here = self._task_here

    def serve(self) -> None:
        """Run calls until the actor is over, or told to stop."""
        import signal

        self._loop.add_signal_handler(signal.SIGINT, self._on_cancel)
        threading.Thread(target=self._wait_for_calls, name="fastrt-calls", daemon=True).start()
        self._loop.run_forever()

    def _wait_for_calls(self) -> None:
        """In the other thread: pass on what comes, and the order to leave."""
        worker = self._worker
        try:
            while not worker.told_to_stop():
                cells = self._inbox.take(_IDLE_S, worker.store.spin_s)
                if cells:
                    self._loop.call_soon_threadsafe(self._hand_out, cells)
                elif actors.is_over(self._client, worker.actor):
                    break
        except FastrtError:
            pass  # the session has ended
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _hand_out(self, cells: list[int]) -> None:
        for cell in cells:
            group = self._groups[_group_of(self._worker, cell)]
            group.waiting.append(cell)
            self._fill(group)

    def _fill(self, group: Group) -> None:
        """Begin as many calls as may run."""
        while group.waiting and group.running < group.most and not self._worker.exiting:
            task = self._inbox.claim(group.waiting.popleft())
            if task != core.NO_TASK:
                group.running += 1
                self._running[task] = self._loop.create_task(self._run(group, task))

    async def _call(self, task: int) -> Any:
        """Call the method of a call that has been claimed."""
        worker = self._worker
        function, args, kwargs = worker.prepare_method(task)
        if worker.is_generator(task):
            return await special.run_async(worker, task, function, args, kwargs)
        value = function(*args, **kwargs)
        return await value if worker.is_async(task) else value

    async def _call_in_time(self, task: int, timeout_s: float) -> Any:
        """The same with an end."""
        import asyncio

        here, over = self._running[task], False

        def tell() -> None:
            nonlocal over
            over = True
            here.cancel()

        alarm = self._loop.call_later(timeout_s, tell)
        try:
            return await self._call(task)
        except asyncio.CancelledError:
            if not over or core.cancelled(self._client, task):
                raise
            if sys.version_info >= (3, 11):
                here.uncancel()
            raise special.late(self._worker.name_of(task), timeout_s) from None
        finally:
            alarm.cancel()

    async def _run(self, group: Group, task: int) -> None:
        worker = self._worker
        traced = trace.begin_task(self._client, task)
        try:
            if worker.exiting:  # since this one got its turn
                raise ActorLeaves(ActorDiedError(LEFT))
            while True:
                try:
                    timeout_s = worker.policy_of(task).timeout_s
                    value = await (self._call_in_time(task, timeout_s) if timeout_s else self._call(task))
                    break
                except Exception as exc:
                    if not await special.retry_async(worker, task, exc):
                        raise
            worker.seal(task, value)
        except BaseException as exc:  # whatever user code raises belongs to whoever gets the result
            worker.fail(task, exc)
        finally:
            trace.end(self._client, traced)
            del self._running[task]
            group.running -= 1
            self._fill(group)

    def _task_here(self) -> int | None:
        import asyncio

        here = asyncio.current_task(self._loop) if threading.current_thread() is threading.main_thread() else None
        return next((task for task, coroutine in self._running.items() if coroutine is here), None)

    def _on_cancel(self) -> None:
        """SIGINT: somebody cancels a call that runs here."""
        for task, coroutine in list(self._running.items()):
            if core.cancelled(self._client, task):
                coroutine.cancel()
