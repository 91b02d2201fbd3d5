"""The processes of a simulated node that run programs: workers, the processes of actors, and drivers.

They run the programs of `program` through the real core: workers claim tasks, the processes of actors take calls from
their mailboxes, and generators fill streams that readers of any node empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles, remote
from fastrt._core.tasks import actors, generators
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.generators import Producer
from fastrt._core.tasks.inbox import Inbox
from fastrt.errors import FastrtError, ObjectStoreFullError, TaskCancelledError
from fastrt.store import messages
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.cancel import cancel_in

from .links import SimWaiter
from .program import TaskSpec
from .world import Process, pause

if TYPE_CHECKING:
    from .node import Node

LOOK_S = 0.02  # between two looks of a reader or a producer; doubled up to LOOK_MAX_S
LOOK_MAX_S = 0.5


class Member:
    """A process with a slot in the arena.

    Attributes:
        caller: names this process, or the run of the task that it runs, in the order of calls.
        calls: how many calls the caller has made.
    """

    def __init__(self, node: Node, kind: int, name: str) -> None:
        self.node = node
        self.process = Process(node.world, node.host, name)
        self.slot, gen = clients.admit(node.segment, os.getpid(), kind, name)
        self.client = Client(node.segment, self.slot, gen)
        self.store = Store(self.client, 0.0, tell=self._tell)
        self.store.users.clear()
        self.process.after_step = node.after_step
        self.caller = self.calls = 0
        self.is_waiting = False
        if node.disk is not None:
            self.store.socket_path = str(node.disk.key_folder / "node.sock")

    @property
    def sleeps(self) -> bool:
        """Whether it waits for something, and runs no code."""
        return self.is_waiting or self.process.is_blocked

    def _tell(self, message: Any) -> bool:
        self.node.to_daemon(message)
        return True

    async def load(self, ref: Any) -> Any:
        """The value of a ready reference, whose bytes may be on another node.

        If nodes spill, the real store waits for them, and for room (`blocking`).

        Raises:
            Exception: the error that it holds.
        """
        wait_s = 0.02
        while self.node.disk is None and remote.is_missing(self.client, ref):
            self._tell(messages.Restore(ref.index, ref.objref))
            await pause(wait_s)
            if self.node.cluster.family.shape.interrupted:
                self.check_cancelled()
            wait_s = min(1.0, 2 * wait_s)
        return self.store.load(ref, True)

    async def ready(self, ref: Any) -> None:
        """Wait until a reference has a value."""
        wait_s = LOOK_S
        while not handles.is_ready(self.client, ref):
            self.check_cancelled()
            await pause(wait_s)
            wait_s = min(LOOK_MAX_S, 2 * wait_s)

    def check_cancelled(self) -> None:
        """End the wait of a task that was cancelled.

        Raises:
            TaskCancelledError: it was.
        """

    def know(self, scope: dict[str, Any], key: str, ref: Any) -> None:
        """Take a reference that was found in a value; other references may have led to the same object before."""
        if key not in scope or self.node.cluster.program.takes_newest:
            scope[key] = ref

    async def submit(self, spec: TaskSpec, scope: dict[str, Any]) -> bool:
        """Submit a task, or make a call once the handle of its actor is here; return False if that is lost."""
        if spec.actor:
            if spec.actor not in scope:
                return False
            await self.ready(scope[spec.actor])
            try:
                await self.load(scope[spec.actor])
            except FastrtError as exc:
                self.node.cluster.check_error(spec.actor, exc.with_traceback(None), f"a caller on {self.node.host}")
                return False
        self.node.submit(self, spec, scope)
        return True

    async def read(self, key: str, scope: dict[str, Any], most: int) -> bool:
        """Read up to `most` items of a generator, and check them; return whether it has ended."""
        cluster, generator = self.node.cluster, scope[key]
        pair, wait_s = generator.waited_for(), LOOK_S
        while most:
            item = generators.take(self.client, *pair, 0, 0.0)
            if item is False:
                self.check_cancelled()
                await pause(wait_s)
                wait_s = min(LOOK_MAX_S, 2 * wait_s)
                continue
            if item is None or item is pair[1]:
                await self.check_end(key, generator, item)
                return True
            most, wait_s = most - 1, LOOK_S
            try:
                value = await self.load(item)
            except FastrtError as exc:
                cluster.items.count(generator)
                cluster.check_error(key, exc.with_traceback(None), f"a reader on {self.node.host}")
                continue
            cluster.check(value[0], value, f"a reader on {self.node.host}")
            cluster.items.read(value[3], value[0], generator, f"a reader on {self.node.host}")
            for inner, inside in zip(cluster.program.contents[value[0]], inside_of(value), strict=True):
                self.know(scope, inner, inside)
        return False

    async def check_end(self, key: str, generator: Any, end: Any) -> None:
        """Check how a generator has ended; `end` is its result if that is an error."""
        cluster, reader = self.node.cluster, f"a reader on {self.node.host}"
        if end is None:
            cluster.items.ended(key, cluster.program.tasks[int(key[1:-1])], generator, reader)
            return
        try:
            await self.load(end)
        except FastrtError as exc:
            cluster.check_error(key, exc.with_traceback(None), reader)


class Worker(Member):
    """A worker: claims tasks and runs them by the program."""

    def __init__(self, node: Node, kind: int = clients.KIND_WORKER, name: str = "worker") -> None:
        super().__init__(node, kind, name)
        self.idle: asyncio.Future[None] | None = None
        self.task = self.number = -1
        self.waits = False  # for a reader or an item
        self.interrupted: asyncio.Event | None = None
        self.store.on_block = self.on_block if node.disk is not None else None
        self.process.start(self.main)

    @property
    def sleeps(self) -> bool:
        return super().sleeps or self.idle is not None or self.waits

    def on_block(self, begins: bool) -> None:
        """Have another worker take this one's place while it waits for the bytes of a value."""
        if begins:
            self.node.block(self)
        else:
            self.node.blocked.discard(self)

    async def main(self) -> None:
        while True:
            task = core.next_task(self.client, 0.0, 0.0)
            if task < 0:
                await self.rest()
                continue
            await self.work(task)

    async def rest(self) -> None:
        """Wait until the node wakes this process."""
        self.idle = asyncio.get_running_loop().create_future()
        await self.idle

    async def work(self, task: int) -> None:
        """Run a task or call that this process has claimed."""
        self.task = task
        self.interrupted = asyncio.Event()
        try:
            await self.run(task)
        except FastrtError as exc:
            self.store.put_error(task, exc)
            core.finish(self.client, task)
        self.task = -1

    async def load(self, ref: Any) -> Any:
        """The value of a reference; another worker takes this one's place while its bytes are elsewhere."""
        if self.node.disk is not None or not remote.is_missing(self.client, ref):
            return self.store.load(ref, True)
        self.node.block(self)
        try:
            return await super().load(ref)
        finally:
            self.node.blocked.discard(self)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Have another worker take this one's place, and other tasks its CPU, for a while."""
        self.node.block(self)
        self.waits = True
        core.set_blocked(self.client, self.task, True)
        try:
            yield
        finally:
            core.set_blocked(self.client, self.task, False)
            self.waits = False
            self.node.blocked.discard(self)

    def check_cancelled(self) -> None:
        if self.task >= 0 and core.cancelled(self.client, self.task):
            raise TaskCancelledError("it was cancelled while it waited")

    def wake(self) -> None:
        idle, self.idle = self.idle, None
        if idle is not None and not idle.done():
            idle.set_result(None)

    def begin(self, task: int) -> tuple[TaskSpec, list[Any]]:
        """Note that a task begins here; return its program and its references."""
        cluster = self.node.cluster
        _, (number, *refs), _ = core.arguments(self.client, task)
        cluster.check_hops(number, core.info(self.client, task)["hops"])
        return cluster.program.tasks[number], refs

    async def run(self, task: int) -> None:
        cluster = self.node.cluster
        spec, refs = self.begin(task)
        self.number, self.caller, self.calls = spec.number, cluster.new_caller(), 0
        cluster.starts[spec.number] = cluster.starts.get(spec.number, 0) + 1
        if spec.group:
            cluster.reserving.check_node(self.node)
        cluster.world.say(f"{self.node.host} runs task {spec.number}")
        scope: dict[str, Any] = {}
        try:
            await self.read_arguments(task, spec, refs[bool(spec.items) :], scope)
            if spec.duration_s:
                await self.pause_for(spec.duration_s)
            if core.cancelled(self.client, task):
                raise TaskCancelledError("it was cancelled while it ran")
            if spec.fails and not spec.items:
                raise FastrtError(f"task {spec.number} fails")
        except Exception as exc:
            self.fail(task, spec, exc)
            return
        for key in spec.puts:
            scope[key] = self.node.put(self, key, scope)
        for kid in spec.kids:
            if cluster.program.tasks[kid].actor:
                with self.blocked():
                    await self.submit(cluster.program.tasks[kid], scope)
            else:
                self.node.submit(self, cluster.program.tasks[kid], scope)
        for key, most in spec.reads:
            if key in scope:
                with self.blocked():
                    await self.read(key, scope, most)
        if spec.items:
            await self.yield_items(task, spec, refs[0], scope)
            return
        for k, key in enumerate(spec.results):
            if k and spec.gap_s:
                await self.pause_for(spec.gap_s)
            if len(spec.results) == 1 and not cluster.program.contents[key] and not cluster.program.sizes[key]:
                assert self.store.with_room(0, lambda key=key: core.finish_scalar(self.client, task, key))
                return
            self.store.put_result(task, k, serialize(self.node.value(key, scope)))
        core.finish(self.client, task)

    async def read_arguments(self, task: int, spec: TaskSpec, refs: list[Any], scope: dict[str, Any]) -> None:
        """Read the arguments of a task, and check them.

        Raises:
            FastrtError: one of them holds an error.
        """
        cluster = self.node.cluster
        for key, ref in zip(spec.args, refs, strict=True):
            scope[key] = ref
            try:
                value = await self.load(ref)
            except FastrtError as exc:
                if not core.cancelled(self.client, task):
                    cluster.check_error(key, exc.with_traceback(None), f"task {spec.number} on {self.node.host}")
                raise
            cluster.check(key, value, f"task {spec.number} on {self.node.host}")
            for inner, inside in zip(cluster.program.contents[key], inside_of(value), strict=True):
                self.know(scope, inner, inside)

    async def pause_for(self, seconds: float) -> None:
        """Work for a while, or until the task is cancelled."""
        assert self.interrupted is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.interrupted.wait(), seconds)

    def fail(self, task: int, spec: TaskSpec, exc: Exception) -> None:
        """End a task with an error."""
        error = exc.with_traceback(None)
        if isinstance(exc, AssertionError):
            raise exc
        self.node.world.say(f"{self.node.host} task {spec.number} has failed: {type(exc).__name__}: {exc}")
        self.store.put_error(task, error)
        core.finish(self.client, task)

    async def yield_items(self, task: int, spec: TaskSpec, generator: int, scope: dict[str, Any]) -> None:
        """Fill the stream of a generator, as `worker.generators` does; an earlier attempt may have added items."""
        producer = Producer(self.client, task)
        for k, key in enumerate(spec.items):
            if producer.wanted == generators.NOTHING or core.cancelled(self.client, task):
                break
            if spec.fails and k == len(spec.items) // 2:
                self.fail(task, spec, FastrtError(f"task {spec.number} fails"))
                return
            if producer.skips():
                continue
            await self.pause_for(spec.pause_s)
            if producer.wanted == generators.ITEMS:
                producer.add_ref(self.store.put((*self.node.value(key, scope), generator)))
            if producer.full:
                with self.blocked():
                    while producer.full and producer.wanted == generators.ITEMS and not self.interrupted.is_set():
                        await pause(LOOK_S)
        if core.cancelled(self.client, task):
            raise TaskCancelledError("it was cancelled while it ran")
        assert core.finish_scalar(self.client, task, None)


class ActorHost(Worker):
    """The process of an actor: takes calls in their order until no handle is left."""

    def __init__(self, node: Node, actor: int, pid: int) -> None:
        self.actor, self.pid = actor, pid
        super().__init__(node, clients.KIND_ACTOR, f"actor{actor}")
        self.inbox: Inbox | None = None
        self.last: dict[int, int] | None = {}  # by caller: its last call that began here; None: they have no order
        self.at_once: dict[ActorHost, None] = {}  # one for each call of an actor with several at once

    async def main(self) -> None:
        if actors.enter(self.client, self.actor):
            await self.serve()
        self.node.exit(self)

    async def serve(self) -> None:
        about = actors.info(self.client, self.actor)
        try:
            ref = handles.acquire(self.client, *about["object"])
            plan = self.store.load(ref)
            del ref
            if plan.job >> clients.JOB_BITS:  # of another node
                self.client.adopt_job(plan.job)
            await self.ready(plan.init)
            self.node.cluster.check(plan.name, await self.load(plan.init), f"{plan.name} on {self.node.host}")
        except FastrtError as exc:
            actors.end_for_good(self.client, self.actor, actors.FAILED, f"its constructor raised {exc}")
            return
        most = plan.concurrency
        del plan
        actors.alive(self.client, self.actor)
        self.inbox = Inbox(self.client, self.actor, most == 1)
        cells: deque[int] = deque()
        while True:
            cells.extend(self.inbox.look())
            while cells and len(self.at_once) < most:
                task = self.inbox.claim(cells.popleft())
                if task >= 0 and most == 1:
                    await self.work(task)
                elif task >= 0:
                    self.work_beside(task)
            if actors.is_over(self.client, self.actor) and not self.at_once:
                return
            if not self.inbox.arm():
                await self.rest()

    def work_beside(self, task: int) -> None:
        """Begin a call beside others, as a coroutine or a thread of an actor does."""
        call = copy.copy(self)
        call.last, call.at_once = None, {}
        self.at_once[call] = None

        def ended(done: asyncio.Task[None]) -> None:
            del self.at_once[call]
            self.wake()
            if not done.cancelled() and done.exception() is not None:
                self.process.failed(done.exception())

        asyncio.get_running_loop().create_task(call.work(task)).add_done_callback(ended)

    def begin(self, task: int) -> tuple[TaskSpec, list[Any]]:
        """Note that a call begins here; calls of one caller come in their order."""
        cluster = self.node.cluster
        _, (number, caller, call, *refs), _ = core.arguments(self.client, task)
        last = {} if self.last is None else self.last
        if last.get(caller, 0) >= call:
            cluster.world.violation(
                f"call {call} of caller {caller} begins after its call {last[caller]} in one process of an actor"
            )
        last[caller] = call
        cluster.count_call(number, caller, call)
        return cluster.program.tasks[number], refs


class Driver(Member):
    """A driver: submits, reads, passes on and drops by the program."""

    def __init__(self, node: Node, ops: list[tuple], index: int) -> None:
        super().__init__(node, clients.KIND_DRIVER, f"driver{index}")
        self.client.adopt_job(self.client.job)
        self.ops = ops
        self.refs: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}  # placement groups, and the references that keep them
        self.is_done = False
        self.doing: Any = None
        self.waiter = SimWaiter(self.store, self.process.loop)
        self.function = node.function(self, 0)
        self.caller = node.cluster.new_caller()
        self.process.start(self.main)

    async def ready(self, ref: Any) -> None:
        if not handles.is_ready(self.client, ref):
            future = asyncio.get_running_loop().create_future()
            self.waiter.add(ref, lambda ref: future.done() or future.set_result(None))
            self.is_waiting = True
            await future
            self.is_waiting = False

    async def get(self, key: str, ref: Any, deep: int, seen: set[str]) -> None:
        """Read an object and what it contains, and check it."""
        cluster = self.node.cluster
        self.doing = "get", key, ref.objref
        await self.ready(ref)
        try:
            value = await self.load(ref)
        except Exception as exc:
            if isinstance(exc, AssertionError):
                raise
            cluster.check_error(key, exc.with_traceback(None), f"the driver on {self.node.host}")
            return
        cluster.check(key, value, f"the driver on {self.node.host}")
        for inner, inside in zip(cluster.program.contents[key], inside_of(value), strict=True):
            self.know(self.refs, inner, inside)
            if deep and inner not in seen and not isinstance(inside, ObjectRefGenerator):
                seen.add(inner)
                await self.get(inner, inside, deep - 1, seen)

    async def do(self, what: str, *rest: Any) -> None:
        """Do one operation of the program."""
        cluster, refs = self.node.cluster, self.refs
        self.doing = what, rest
        if what == "put":
            refs[rest[0]] = self.node.put(self, rest[0], refs)
        elif what == "submit":
            spec = cluster.program.tasks[rest[0]]
            is_able = all(key in refs for key in spec.args) and (not spec.group or spec.group in self.groups)
            if is_able and await self.submit(spec, refs) and not spec.actor:
                cluster.submitted.add(spec.number)
        elif what in ("reserve", "reserved", "remove"):
            await getattr(cluster.reserving, what)(self, *rest)
        elif what == "create" and cluster.program.actors[rest[0]].name:
            await cluster.naming.create(self, rest[0])
        elif what == "create":
            self.node.create_actor(self, cluster.program.actors[rest[0]], refs)
        elif what == "find":
            await cluster.naming.find(self, rest[0])
        elif what == "kill" and rest[0] in refs:
            await self.kill(*rest)
        elif what == "get" and rest[0] in refs:
            await self.get(rest[0], refs[rest[0]], 0, set())
        elif what == "read" and rest[0] in refs:
            await self.read(rest[0], refs, rest[1])
        elif what == "drop":
            refs.pop(rest[0], None)
        elif what == "forget":
            refs.clear()
        elif what == "cancel":
            ref = refs.get(cluster.program.tasks[rest[0]].names[0])
            if ref is not None:
                cancel_in(self.store, ref.completed() if isinstance(ref, ObjectRefGenerator) else ref)
        else:
            await pause(rest[0] if what == "sleep" else 0)

    async def kill(self, key: str, no_restart: bool, force: bool) -> None:
        """Kill an actor, as `fastrt.kill` does."""
        await self.ready(self.refs[key])
        try:
            await self.load(self.refs[key])
        except FastrtError as exc:
            self.node.cluster.check_error(key, exc.with_traceback(None), f"the driver on {self.node.host}")
            return
        kill_in(self.store, actors.index_of(self.client, self.refs[key]), "it was killed", no_restart, force)

    async def main(self) -> None:
        for what, *rest in self.ops[1:]:
            try:
                await self.do(what, *rest)
            except ObjectStoreFullError as exc:
                if not self.node.cluster.may_stay_full:
                    raise
                self.node.world.say(f"the driver on {self.node.host} found no room: {exc.with_traceback(None)}")
        seen: set[str] = set()
        for key in list(self.refs):
            if key not in seen and not isinstance(self.refs[key], ObjectRefGenerator):
                seen.add(key)
                await self.get(key, self.refs[key], 3, seen)
        for key in [key for key, ref in self.refs.items() if isinstance(ref, ObjectRefGenerator)]:
            self.doing = "read", key
            await self.read(key, self.refs, 1 << 30)
        self.doing = "nothing"
        self.refs.clear()
        self.groups.clear()
        self.is_done = True


def inside_of(value: Any) -> list[Any]:
    """The references in a value."""
    return value[2] if isinstance(value, tuple) else []
