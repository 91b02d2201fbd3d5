"""An actor of `local_mode=True`: an instance in this process, with a separate event loop if it has coroutines.

A call of a plain method runs at once. A coroutine begins at its call and continues whenever the program waits: its loop
runs one pass at a time, even inside another running loop, so that coroutines of several actors can wait for each other
as they do in separate processes.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from asyncio import events
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastrt.errors import ActorDiedError, FastrtError, TaskCancelledError, format_user_traceback
from fastrt.tasks.exit_actor import LEFT, ActorLeaves
from fastrt.tasks.method import bound_method, built

if TYPE_CHECKING:
    from fastrt.engines.local import LocalEngine, LocalRef, Running, Stored
    from fastrt.tasks.method import MethodPlan

_ASYNC_CONCURRENCY = 1000
_PASSES_TO_END = 1000  # of a loop whose coroutines were cancelled: some catch the cancellation and continue


class LocalActor:
    """An instance and its life.

    Args:
        engine: the session of the actor.
        cls: its class.
        methods: the methods that can be called.
        options: options of the class that differ from the default.
        given: arguments of the constructor.
        number: of the actor.

    Attributes:
        dead: the reason of its death; None while it lives.
        restarts: how often its instance was built again.
        task_retries: how often a call may be retried if its method does not set it.
        loop: the event loop of its coroutines; None if it has none.
    """

    def __init__(
        self,
        engine: LocalEngine,
        cls: type,
        methods: tuple[MethodPlan, ...],
        options: Mapping[str, Any],
        given: Stored,
        number: int,
    ) -> None:
        self._engine = engine
        self.cls = cls
        self.methods = methods
        self.name: str | None = options.get("name")
        self.number = number
        self.dead: str | None = None
        self.restarts = 0
        self.task_retries: int = options.get("max_task_retries", 0)
        self._restarts_max: int = options.get("max_restarts", 0)
        self._given = given
        self._instance: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None
        if any(which.is_async for which in methods):
            self.loop = asyncio.new_event_loop()
            weakref.finalize(self, self.loop.close)
        self._limits = {"": options.get("max_concurrency", _ASYNC_CONCURRENCY), **options.get("concurrency_groups", {})}
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._coroutines: set[asyncio.Task[None]] = set()

    def build(self) -> None:
        """Create the instance. If its constructor raises, the actor is dead, and all calls report that error."""
        token = self._engine.running.set(self._engine.of_constructor(self))
        try:
            args, kwargs = self._engine.arguments(self._given)
            if self.loop is None:
                self._instance = self.cls(*args, **kwargs)
                return
            made = built(self.cls, args, kwargs)
            if inspect.iscoroutine(made):
                with outside_of_loops():
                    made = self.loop.run_until_complete(made)
            self._instance = made
        except ActorLeaves:
            self.dead = LEFT
        except Exception as exc:
            self.dead = f"its constructor raised\n{format_user_traceback(exc)}"
        finally:
            self._engine.running.reset(token)

    def call(
        self,
        running: Running,
        which: MethodPlan,
        given: Stored,
        refs: list[LocalRef],
        tries: int = 1,
        wanted: Any = False,
    ) -> None:
        """Run a method; if it is a coroutine function, only begin it."""
        if self.dead is not None:
            self._engine.fail(refs, self.death(), "")
        elif not which.is_async or self.loop is None:
            self._engine.run(running, bound_method(self._instance, which.name), given, refs, tries, wanted)
        else:
            token = self._engine.running.set(running)
            try:
                task = self.loop.create_task(self._run(running, which, given, refs, tries, wanted))
            finally:
                self._engine.running.reset(token)
            self._coroutines.add(task)
            task.add_done_callback(self._done)
            self._engine.busy.add(self)
            for ref in refs:
                ref.abort = task.cancel
            self.step()

    def method(self, which: MethodPlan) -> Callable[..., Any]:
        """The instance's method; for a dead actor, a function that raises ActorDiedError."""
        if self.dead is None:
            return bound_method(self._instance, which.name)

        def raise_death(*args: Any, **kwargs: Any) -> None:
            raise self.death()

        return raise_death

    async def _attempts(self, which: MethodPlan, given: Stored, tries: int, wanted: Any) -> Any:
        """Run a coroutine method with its retries; return its result."""
        for left in range(tries - 1, -1, -1):
            args, kwargs = self._engine.arguments(given)
            try:
                return await bound_method(self._instance, which.name)(*args, **kwargs)
            except Exception as exc:
                if not left or not may_retry(exc, wanted):
                    raise
        return None

    async def _run(
        self, running: Running, which: MethodPlan, given: Stored, refs: list[LocalRef], tries: int, wanted: Any
    ) -> None:
        turn = self._turns.setdefault(which.group, asyncio.Semaphore(self._limits[which.group]))
        try:
            async with turn:
                self._engine.seal(refs, await self._attempts(which, given, tries, wanted))
        except asyncio.CancelledError:
            if self.dead is not None:
                self._engine.fail(refs, self.death(), "")
            else:
                self._engine.fail(refs, TaskCancelledError("the call was cancelled while it ran"), running.name)
        except (Exception, ActorLeaves) as exc:
            self._engine.fail(refs, exc, running.name)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._coroutines.discard(task)
        if not self._coroutines:
            self._engine.busy.discard(self)

    def step(self) -> None:
        """Run its coroutines, each up to its next wait."""
        loop = self.loop
        if loop is None or not self._coroutines or loop.is_running() or loop.is_closed():
            return
        with outside_of_loops():
            loop.call_soon(loop.stop)
            loop.run_forever()

    def kill(self, no_restart: bool) -> None:
        """End the actor, or build its instance again if restarts are left."""
        if self.dead is not None:
            return
        if no_restart or 0 <= self._restarts_max <= self.restarts:
            self.end("it was killed by fastrt.kill")
            return
        self.end("its process was killed")
        self.dead = None
        self.restarts += 1
        self.build()

    def end(self, why: str) -> None:
        """Mark the actor dead, and fail its unfinished coroutines."""
        self.dead = why
        for task in list(self._coroutines):
            task.cancel()
        for _ in range(_PASSES_TO_END if self._coroutines else 0):
            self.step()

    def close(self) -> None:
        """End the actor together with its session."""
        self.end("its session has ended")
        if self.loop is not None and not self.loop.is_running():
            self.loop.close()

    def death(self) -> ActorDiedError:
        """The error for calls of the dead actor."""
        return ActorDiedError(f"actor {self.cls.__name__} is dead: {self.dead}")


@contextmanager
def outside_of_loops() -> Iterator[None]:
    """Let another event loop run inside a coroutine of this thread's loop."""
    outer = events._get_running_loop()
    task = None if outer is None else asyncio.current_task(outer)
    if outer is not None and task is not None:  # Python 3.14 runs one task of a thread at a time
        asyncio.tasks._leave_task(outer, task)
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(outer)
        if outer is not None and task is not None:
            asyncio.tasks._enter_task(outer, task)


def may_retry(exc: BaseException, wanted: Any) -> bool:
    """Whether a call that raised `exc` is retried; `wanted` is its retry_exceptions."""
    if not isinstance(exc, Exception) or isinstance(exc, FastrtError):
        return False
    return bool(wanted is True or (isinstance(wanted, (list, tuple)) and isinstance(exc, tuple(wanted))))
