"""Virtual time and processes in one interpreter. Everything random comes from one seed.

A process is an event loop that shares the world's clock. `World.run` steps one process at a time; where several can
run, the seed chooses. A killed process is not stepped any more: none of its code runs, as after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from .blocking import Killed, Turns

STEP_S = 20e-6  # of CPU that one step of a process takes, times its slowness
TIMERS_MAX = 200  # of a loop, before those that were cancelled are dropped


class _Selector:
    """Waits for nothing: the world steps a loop only when it has work."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class Loop(asyncio.BaseEventLoop):
    """The event loop of one process."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._selector = _Selector()
        self._clock_resolution = 1e-9
        self._process = process
        self.handlers: dict[int, Callable[[], None]] = {}

    def time(self) -> float:
        return self._process.world.now

    def _process_events(self, events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def add_signal_handler(self, number: int, callback: Any, *args: Any) -> None:
        self.handlers[number] = lambda: callback(*args)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._process.failed(context.get("exception") or AssertionError(context.get("message")))

    def drop_cancelled(self) -> None:
        """Forget the timers at the head of the heap that were cancelled; all of them, if they are many."""
        timers = self._scheduled
        if len(timers) > TIMERS_MAX and self._timer_cancelled_count > len(timers) // 2:
            self._scheduled = timers = [one for one in timers if not one._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)

    def step(self) -> None:
        """Run what is ready, and the timers that are due: as `_run_once`, which would also look at sockets."""
        ready, timers, due = self._ready, self._scheduled, self._process.world.now + self._clock_resolution
        while timers and timers[0]._when < due:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            ready.append(handle)
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)


class Process:
    """One process: its loop, its host, and how slow it is."""

    def __init__(self, world: World, host: str, name: str) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.alive = True
        self.ready_at = world.now
        self.slowness = 1.0
        self.is_blocked = False  # inside a call; its loop does not run
        self.waiter: Any = None
        self.loop = Loop(self)
        self.after_step: Callable[[], None] = _nothing
        self.on_failure: Callable[[BaseException], None] | None = None
        self.context = contextvars.Context()  # not the caller's: what runs here must not leak into other processes

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        def begin() -> None:
            self.main = self.loop.create_task(main())
            self.main.add_done_callback(self._ended)

        self.loop.call_soon(begin)
        self.world.processes.append(self)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.failed(task.exception())

    def failed(self, exc: BaseException) -> None:
        if not self.alive or isinstance(exc, Killed):
            return
        if self.on_failure is not None:
            self.on_failure(exc)
        else:
            self.world.violation(f"{self.name} of {self.host} raised {type(exc).__name__}: {exc}", exc)

    def kill(self) -> None:
        """End it at once: it runs no more code, and its connections are reset."""
        if self.alive:
            self.alive = False
            self.world.processes.remove(self)
            self.world.graveyard.append(self)
            self.world.network.process_died(self)

    def step(self) -> None:
        world = self.world
        before, world.current = world.current, self
        try:
            self.loop.step()
        finally:
            world.current = before
        self.ready_at = world.now + STEP_S * self.slowness * (0.5 + world.rng.random())
        self.after_step()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function as this process, soon."""
        if self.alive:
            self.loop.call_soon(function, *args)


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """The clock, the processes and everything that is to happen."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bytes = random.Random(seed ^ 0xB17E5)  # in the place of the kernel's
        self.now = 1000.0
        self.processes: list[Process] = []
        self.graveyard: list[Process] = []
        self.current: Process | None = None
        self.steps = 0
        self.digest = 0  # of the order in which everything happened
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.network: Any = None
        self.turns = Turns(self)
        self._until, self._done = math.inf, _never
        self.late = (0.0, 0.0)  # how often a thread runs late, and by how many seconds at most
        self.violations: list[str] = []
        self.log: deque[str] = deque(maxlen=4000)

    def monotonic(self) -> float:
        return self.now

    def say(self, text: str) -> None:
        self.log.append(f"{self.now - 1000.0:10.6f} {text}")

    def violation(self, why: str, exc: BaseException | None = None) -> None:
        import traceback

        if exc is not None:
            why += "\n" + "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))[-3000:]
        self.say(f"VIOLATION {why}")
        self.violations.append(why)

    def at(self, when: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, then))

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self.at(self.now + seconds, then)

    def run(self, until: float, done: Callable[[], bool] | None = None) -> None:
        """Step until a time, until `done`, or until an invariant does not hold."""
        self._until, self._done = until, done or _never
        self.serve(True)

    def serve(self, is_first: bool) -> None:
        """Step as `run` does; threads other than the first do so while processes are blocked."""
        events, turns = self._events, self.turns
        while True:
            if turns.go_on(is_first):
                continue
            if turns.has_ended and not is_first:
                return
            if self.violations or self._done():
                stops = turns.stops(is_first)
                if stops:
                    return
                if stops is None:
                    continue
            if events and events[0][0] <= self.now:
                with contextlib.suppress(Killed):  # in a thread that was blocked
                    heapq.heappop(events)[2]()
                continue
            first, able = self._next(min(events[0][0] if events else math.inf, turns.next_at))
            if first > self._until:
                stops = turns.stops(is_first)
                if stops:
                    self.now = max(self.now, self._until)
                    return
                if stops is None:
                    continue
            self.now = first
            if not able:  # an event is the next
                continue
            process = able[0] if len(able) == 1 else self.rng.choice(able)
            self.steps += 1
            self.digest = hash((self.digest, process.name, process.host, round(self.now * 1e7)))
            process.step()

    def _next(self, event_at: float) -> tuple[float, list[Process]]:
        """Return when something happens next, and which processes can run then; an event comes before them."""
        now, first, able = self.now, event_at, []
        for one in self.processes:
            if one.is_blocked:
                continue
            loop = one.loop
            due = one.ready_at
            if not loop._ready:
                if loop._scheduled and loop._scheduled[0]._cancelled:
                    loop.drop_cancelled()
                if not loop._scheduled:
                    continue
                when = loop._scheduled[0]._when
                due = when if when > due else due
            due = due if due > now else now
            if due < first:
                first, able = due, [one]
            elif due == first and able:
                able.append(one)
        return first, able


def _nothing() -> None:
    pass


def _never() -> bool:
    return False


class Files:
    """The files of all nodes, by their paths: in the place of those of private folders."""

    def __init__(self) -> None:
        self._data: dict[Path, bytes] = {}

    def changes(self, module: Any) -> list[tuple[Any, str, Any]]:
        """The replacements of the functions that a module reads and writes them with, for `patched`."""
        return [(module, "read_private", self.read), (module, "replace_private", self.replace)]

    def replace(self, folder: Path, name: str, data: bytes) -> None:
        self._data[folder / name] = data

    def read(self, folder: Path, name: str) -> bytes:
        if folder / name not in self._data:
            raise FileNotFoundError(name)
        return self._data[folder / name]


async def pause(seconds: float) -> None:
    """Let virtual time pass."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(seconds, lambda: over.done() or over.set_result(None))
    await over


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes for a while."""
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            setattr(target, name, value)
