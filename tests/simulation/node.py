"""A node of the simulated cluster: a real arena, the daemon's real parts, and the real uplink.

The daemon is not a process here but a set of callbacks: what it does is the real `Admission`, `KeptObjectTable` and
`Janitor`. The uplink is the real `Uplink`; only its sockets, its clock and its waiting thread are the simulator's.
Workers and drivers run the programs of `program` through the real core.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment, sweep
from fastrt._core.objects import functions, handles, remote
from fastrt._core.repair import inspect
from fastrt._core.repair.fsck import fsck, usage
from fastrt._core.tasks import admission as core_admission
from fastrt._core.tasks import submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.uplink import Uplink
from fastrt.config import RESOURCE_PARTS
from fastrt.errors import FastrtError, TaskCancelledError
from fastrt.node.janitor import Janitor
from fastrt.node.kept import KeptObjectTable
from fastrt.store import messages
from fastrt.store.client import Store
from fastrt.store.serialize import serialize
from fastrt.tasks.cancel import cancel_in
from fastrt.tasks.options import RETRIES_FOREVER
from fastrt.tasks.resources import Demand, export, parts_of

from .links import BACKLOG_S, Lasting, SimAdmission, SimWaiter
from .program import VALUE, Program, TaskSpec
from .world import Process, World, pause

CODE = b"the code of every task " * 4
STORE_BYTES = 48 << 20
WORKERS_MAX = 20  # of a node
ATTEMPTS = 1000  # to get the name of an arena
BURY_S = (0.0005, 0.03)  # after a death
RESTART_S = (0.05, 0.4)  # of an uplink


class Member:
    """A process with a slot in the arena."""

    def __init__(self, node: Node, kind: int, name: str) -> None:
        self.node = node
        self.process = Process(node.world, node.host, name)
        self.slot, gen = clients.admit(node.segment, os.getpid(), kind, name)
        self.client = Client(node.segment, self.slot, gen)
        self.store = Store(self.client, 0.0, tell=self._tell)
        self.store.users.clear()
        self.process.after_step = node.after_step

    def _tell(self, message: Any) -> bool:
        self.node.to_daemon(message)
        return True

    async def load(self, ref: Any) -> Any:
        """The value of a ready reference, whose bytes may be on another node.

        Raises:
            Exception: the error that it holds.
        """
        wait_s = 0.02
        while remote.is_missing(self.client, ref):
            self._tell(messages.Restore(ref.index, ref.objref))
            await pause(wait_s)
            wait_s = min(1.0, 2 * wait_s)
        return self.store.load(ref, True)


class Worker(Member):
    """A worker: claims tasks and runs them by the program."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, clients.KIND_WORKER, "worker")
        self.idle: asyncio.Future[None] | None = None
        self.task = self.number = -1
        self.interrupted: asyncio.Event | None = None
        self.process.start(self.main)

    async def main(self) -> None:
        while True:
            task = core.next_task(self.client, 0.0, 0.0)
            if task < 0:
                self.idle = asyncio.get_running_loop().create_future()
                await self.idle
                continue
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
        if not remote.is_missing(self.client, ref):
            return self.store.load(ref, True)
        self.node.block(self)
        try:
            return await super().load(ref)
        finally:
            self.node.blocked.discard(self)

    def wake(self) -> None:
        idle, self.idle = self.idle, None
        if idle is not None and not idle.done():
            idle.set_result(None)

    async def run(self, task: int) -> None:
        cluster = self.node.cluster
        _, (number, *refs), _ = core.arguments(self.client, task)
        spec = cluster.program.tasks[number]
        self.number = number
        cluster.check_hops(number, core.info(self.client, task)["hops"])
        cluster.starts[number] = cluster.starts.get(number, 0) + 1
        cluster.world.say(f"{self.node.host} runs task {number}")
        scope: dict[str, Any] = {}
        try:
            for key, ref in zip(spec.args, refs, strict=True):
                scope[key] = ref
                try:
                    value = await self.load(ref)
                except FastrtError as exc:
                    if not core.cancelled(self.client, task):
                        cluster.check_error(key, exc.with_traceback(None), f"task {number} on {self.node.host}")
                    raise
                cluster.check(key, value, f"task {number} on {self.node.host}")
                for inner, inside in zip(cluster.program.contents[key], inside_of(value), strict=True):
                    scope.setdefault(inner, inside)
            if spec.duration_s:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.interrupted.wait(), spec.duration_s)
            if core.cancelled(self.client, task):
                raise TaskCancelledError("it was cancelled while it ran")
            if spec.fails:
                raise FastrtError(f"task {number} fails")
        except Exception as exc:
            error = exc.with_traceback(None)
            if isinstance(exc, AssertionError):
                raise
            cluster.world.say(f"{self.node.host} task {number} has failed: {type(exc).__name__}: {exc}")
            self.store.put_error(task, error)
            core.finish(self.client, task)
            return
        for key in spec.puts:
            scope[key] = self.node.put(self, key, scope)
        for kid in spec.kids:
            self.node.submit(self, cluster.program.tasks[kid], scope)
        for k, key in enumerate(spec.results):
            if len(spec.results) == 1 and not cluster.program.contents[key] and not cluster.program.sizes[key]:
                assert core.finish_scalar(self.client, task, key)
                return
            self.store.put_result(task, k, serialize(self.node.value(key, scope)))
        core.finish(self.client, task)


class Driver(Member):
    """A driver: submits, reads, passes on and drops by the program."""

    def __init__(self, node: Node, ops: list[tuple], index: int) -> None:
        super().__init__(node, clients.KIND_DRIVER, f"driver{index}")
        self.client.adopt_job(self.client.job)
        self.ops = ops
        self.refs: dict[str, Any] = {}
        self.is_done = False
        self.doing: Any = None
        self.waiter = SimWaiter(self.store, self.process.loop)
        self.function = node.function(self, 0)
        self.process.start(self.main)

    async def ready(self, ref: Any) -> None:
        if not handles.is_ready(self.client, ref):
            future = asyncio.get_running_loop().create_future()
            self.waiter.add(ref, lambda ref: future.done() or future.set_result(None))
            await future

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
            self.refs.setdefault(inner, inside)
            if deep and inner not in seen:
                seen.add(inner)
                await self.get(inner, inside, deep - 1, seen)

    async def main(self) -> None:
        cluster = self.node.cluster
        for what, *rest in self.ops[1:]:
            self.doing = what, rest
            if what == "put":
                self.refs[rest[0]] = self.node.put(self, rest[0], self.refs)
            elif what == "submit":
                spec = cluster.program.tasks[rest[0]]
                if all(key in self.refs for key in spec.args):
                    self.node.submit(self, spec, self.refs)
                    cluster.submitted.add(spec.number)
            elif what == "get" and rest[0] in self.refs:
                await self.get(rest[0], self.refs[rest[0]], 0, set())
            elif what == "drop":
                self.refs.pop(rest[0], None)
            elif what == "forget":
                self.refs.clear()
            elif what == "cancel":
                ref = self.refs.get(cluster.program.tasks[rest[0]].results[0])
                if ref is not None:
                    cancel_in(self.store, ref)
            elif what == "sleep":
                await pause(rest[0])
            else:
                await pause(0)
        seen: set[str] = set()
        for key in list(self.refs):
            if key not in seen:
                seen.add(key)
                await self.get(key, self.refs[key], 3, seen)
        self.doing = "nothing"
        self.refs.clear()
        self.is_done = True


def inside_of(value: Any) -> list[Any]:
    """The references in a value."""
    return value[2] if isinstance(value, tuple) else []


class UplinkMember(Member):
    """The uplink's process."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, clients.KIND_TOOL, "uplink")
        self.lasting = Lasting(node, self.process)
        self.store.tell = self.lasting.send
        self.store.serves = True
        self.uplink: Any = None
        self.on_left: Callable[[], None] | None = None
        self.process.on_failure = self._failed
        self.process.start(self.main)

    async def main(self) -> None:
        node = self.node
        settings = {
            "head": node.cluster.head_address, "listen": node.address(), "name": node.host,
            "workers": node.cpus, "join_first": False, "lineage_bytes": 64 << 20, "keep_bytes": 16 << 10,
            "peer_idle_s": node.cluster.idle_s, "standby": "", "labels": {},
        }  # fmt: skip
        self.uplink = Uplink(self.store, settings, node.cluster.access, self.lasting)
        self.lasting.deliver = self.uplink._orders._on_message
        await self.uplink.run()
        if self.on_left is not None:
            self.node.world.after(0.0, self.on_left)

    def _failed(self, exc: BaseException) -> None:
        world = self.node.world
        if isinstance(exc, FastrtError):
            world.say(f"{self.node.host}: the uplink ends: {exc}")
            self.node.kill(self)
        else:
            world.violation(f"the uplink of {self.node.host} raised {type(exc).__name__}: {exc}", exc)


def _segment(world: World) -> Segment:
    """An arena. Its name comes from the seed, so it is given up at once: a run beside this one may want it."""
    state = world.bytes.getstate()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            made = Segment.create(STORE_BYTES, clients_max=64, objects_max=1 << 13, tasks_max=1 << 12, trace=False)
        except FileExistsError:
            if attempt == ATTEMPTS:
                raise
            world.bytes.setstate(state)
            sweep()  # of runs that were killed; it takes a moment, too
        else:
            made.unlink()
            return made
    raise AssertionError("every attempt returns or raises")


class Node:
    """One node.

    Args:
        cluster: the simulated cluster.
        number: of its host.
        cpus: workers.
    """

    def __init__(self, cluster: Any, number: int, cpus: int) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.host = f"n{number}"
        self.number, self.cpus = number, cpus
        self.alive = True
        self.slowness = 1.0
        self._ports = 0
        self.segment = _segment(self.world)
        slot, gen = clients.admit(self.segment, os.getpid(), clients.KIND_DAEMON, "daemon")
        self.client = Client(self.segment, slot, gen)
        self.store = Store(self.client, 0.0)
        self.janitor = Janitor(self.store)
        self.kept = KeptObjectTable(self.client, self.janitor.stand_ins, self._slot_of)
        self.members: dict[int, Member] = {}
        self.admission = SimAdmission(
            self.store,
            {"CPU": cpus * RESOURCE_PARTS},
            {},
            True,
            self._runs_here,
            lambda slot: False,
            lambda: None,
            self.world.say,
        )
        self._seen = 0
        self._in_step = False
        self.blocked: set[Worker] = set()
        self.workers = [self._add(Worker(self)) for _ in range(cpus)]
        self.uplink: Any = self._add(UplinkMember(self))
        self.drivers: list[Driver] = []
        self.world.after(1.0, self._tend)
        self.world.after(1.0, self._sweep)

    def _add(self, member: Any) -> Any:
        self.members[member.slot] = member
        member.process.slowness = self.slowness
        return member

    def block(self, worker: Worker) -> None:
        """Start another worker in the place of one that waits."""
        self.blocked.add(worker)
        if len(self.workers) - len(self.blocked) < self.cpus and len(self.workers) < WORKERS_MAX:
            self.workers.append(self._add(Worker(self)))

    def add_driver(self, ops: list[tuple], index: int) -> Driver:
        driver = self._add(Driver(self, ops, index))
        self.drivers.append(driver)
        return driver

    def address(self) -> str:
        self._ports += 1
        return f"10.0.{self.number}.1:{self.cluster.next_port()}"

    def _runs_here(self, slot: int) -> bool:
        return slot in self.members and not isinstance(self.members[slot], UplinkMember)

    def _slot_of(self, link: Any) -> int | None:
        uplink = self.uplink
        return uplink.slot if uplink.process.alive and uplink.lasting.to_uplink is link else None

    # ---- the daemon ----

    def to_daemon(self, message: Any) -> None:
        self.world.after(BACKLOG_S * self.world.rng.random(), lambda: self.on_message(None, message))

    def on_message(self, link: Any, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, messages.ClusterNodes):
            self.kept.connect(link)
            self.admission.on_cluster(link, message)
        elif isinstance(message, messages.Restore):
            if remote.is_remote(self.client, message.entry, message.objref) and self.admission.uplink is not None:
                self.admission.uplink.post(messages.Fetch(message.entry, message.objref))
        elif isinstance(message, messages.Holds):
            self.admission.on_holds(link, message)
        elif isinstance(message, messages.KeepObject):
            self.kept.keep(link, message)
        elif isinstance(message, messages.ReleaseObject):
            self.kept.release(link, message)
        self.after_step()

    def _tend(self) -> None:
        if self.alive:
            self.admission.refresh()
            self.kept.tend(self.admission.uplink)
            self.after_step()
            self.world.after(1.0, self._tend)

    def _sweep(self) -> None:
        if self.alive:
            functions.sweep(self.client)
            self.world.after(self.world.rng.random(), self._sweep)

    def drop_copies(self) -> None:
        """Drop copies of values that other nodes keep, as a full store does."""
        for index, objref, _, _ in remote.sources(self.client):
            if self.world.rng.random() < 0.5:
                remote.drop_copy(self.client, index, objref)

    def after_step(self) -> None:
        """Do the work of a wake of the arena: waiters look, workers claim, the daemon reads changed records."""
        if self._in_step or not self.alive:
            return
        self._in_step = True
        for member in list(self.members.values()):
            if member.process.waiter is not None:
                member.process.waiter.poll()
        queued = core.queued(self.client)
        if queued:
            idle = [worker for worker in self.workers if worker.idle is not None and worker.process.alive]
            for worker in idle[:queued]:
                worker.process.call(worker.wake)
        seen = core_admission.wait_news(self.client, 0xFFFFFFFF, 0.0)  # no sleep: the word differs
        if seen != self._seen:
            self._seen = seen
            self.admission.refresh()
        self._in_step = False

    # ---- deaths ----

    def kill(self, member: Any) -> None:
        """Kill a process; the daemon notices a moment later, and starts another one in its place."""
        if not member.process.alive:
            return
        if isinstance(member, Worker) and member.task >= 0 and core.info(member.client, member.task)["hops"]:
            self.cluster.count_extra_run(member.number)
        self.world.say(f"{self.host}: {member.process.name} is killed")
        member.process.kill()
        member.client.abandon()
        self.world.after(self.world.rng.uniform(*BURY_S), lambda: self._bury(member))

    def _bury(self, member: Any) -> None:
        if not self.alive:
            return
        if isinstance(member, UplinkMember):
            member.lasting.close()
            self.admission.on_hang_up(member.lasting.to_uplink)
            self.world.after(self.world.rng.uniform(*RESTART_S), self._new_uplink)
        self.janitor.bury(member.slot, os.getpid(), "was killed")
        self.janitor.wake_all()
        if isinstance(member, UplinkMember):
            self._check_no_guests()
        del self.members[member.slot]
        if isinstance(member, Worker):
            self.workers.remove(member)
            self.blocked.discard(member)
            self.workers.append(self._add(Worker(self)))
        self.after_step()

    def _check_no_guests(self) -> None:
        """Check that the tasks that came from other nodes end with the uplink: their own nodes run them again."""
        for row in inspect.tasks(self.client):
            if core.info(self.client, row["task"])["hops"] and not row["cancelled"] and row["state"] != "ending":
                self.world.violation(f"{self.host}: a task of another node goes on without an uplink: {row}")

    def _new_uplink(self) -> None:
        if self.alive:
            self.uplink = self._add(UplinkMember(self))

    def interrupt(self) -> None:
        """Wake the processes whose task was cancelled."""
        for member in self.members.values():
            if not member.process.alive:
                continue  # it is buried later
            if isinstance(member, Worker) and member.task >= 0 and core.cancelled(member.client, member.task):
                if member.interrupted is not None:
                    member.process.call(member.interrupted.set)
            elif isinstance(member, UplinkMember):
                for handler in list(member.process.loop.handlers.items()):
                    if handler[0] == 2:
                        member.process.call(handler[1])

    def lose(self) -> None:
        """The machine stops: no process of it runs any more, and its memory is gone."""
        self.world.say(f"{self.host} is lost")
        self.alive = False
        for member in list(self.members.values()):
            if member.process.alive:
                member.process.kill()
            member.client.abandon()
        self.client.abandon()
        os.close(self.admission.news)
        self.segment.unlink()

    # ---- for members ----

    def value(self, key: str, scope: dict[str, Any]) -> Any:
        program: Program = self.cluster.program
        return key, program.padding(key), [scope[one] for one in program.contents[key]]

    def put(self, member: Member, key: str, scope: dict[str, Any]) -> Any:
        program: Program = self.cluster.program
        missing = [one for one in program.contents[key] if one not in scope]
        assert not missing or self.cluster.program.outcome[key] != VALUE or self.cluster.may_fail, (key, missing)
        if missing:
            return member.store.put_serialized(serialize(FastrtError("its parts are lost")), True)
        return member.store.put(self.value(key, scope))

    def submit(self, member: Member, spec: TaskSpec, scope: dict[str, Any]) -> None:
        function = self.function(member, spec.function)
        demand = None
        nodes = self.cluster.nodes
        where = nodes[spec.where % len(nodes)].segment.session if spec.where >= 0 else ""
        if spec.cpus or where:
            demand = export(member.store, Demand(parts_of({"CPU": spec.cpus or 0.5}), node=where, soft=True))
        retries = RETRIES_FOREVER if spec.retries < 0 else spec.retries
        options = submission.TaskOptions(function, len(spec.results), retries, demand=demand)
        made = submission.submit(member.client, options, (spec.number, *(scope[key] for key in spec.args)))
        scope.update(zip(spec.results, [made] if len(spec.results) == 1 else made, strict=True))

    def function(self, member: Member, number: int) -> Any:
        """The function with a number; the first one lasts with its driver, the others until no task names them."""
        code = CODE + bytes([number]) * 8
        digest = hashlib.blake2b(code, digest_size=16).digest()
        found = functions.find_function(member.client, digest)
        return found or functions.add_function(member.client, digest, member.store.put(code), "f", number == 0)

    # ---- at the end ----

    def leftovers(self) -> list[str]:
        """List the records that stay in the arena although nothing uses them."""
        found = usage(self.client)
        said = [f"{self.host}: {found['tasks']} tasks are left"] if found["tasks"] else []
        rows = [name for name in ("placing",) if self.admission.placing.placed() or self.admission.placing.waiting()]
        said += [f"{self.host}: {name} still counts tasks" for name in rows]
        said += [f"{self.host}: {line}" for line in fsck(self.client, True)]
        return said
