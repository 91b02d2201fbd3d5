"""A node of the simulated cluster: a real arena, the daemon's real parts, and the real uplink.

The daemon is not a process here but a set of callbacks: what it does is the real `Admission`, `KeptObjectTable`,
`Janitor` and, in some families, `Spilling`. The uplink is the real `Uplink`; only its sockets, its clock and its
waiting thread are the simulator's. Workers, the processes of actors and drivers run the programs of `program`
(`members`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment, sweep
from fastrt._core.objects import functions, remote, spill
from fastrt._core.repair import inspect
from fastrt._core.repair.fsck import fsck, usage
from fastrt._core.tasks import actors, generators, submission, tally
from fastrt._core.tasks import admission as core_admission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.uplink import Uplink
from fastrt.config import RESOURCE_PARTS
from fastrt.errors import FastrtError
from fastrt.node.actors import Actors
from fastrt.node.cpu_room import Workers
from fastrt.node.janitor import Janitor
from fastrt.node.kept import KeptObjectTable
from fastrt.store import messages
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_handle import ActorPlan, dead_actor
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.method import MethodPlan
from fastrt.tasks.options import RETRIES_FOREVER
from fastrt.tasks.resources import Demand, export, parts_of

from .daemon import Lives
from .heads import standby_address, start_standby
from .links import BACKLOG_S, Lasting, SimAdmission
from .members import ActorHost, Driver, Member, Worker
from .program import ROOM, SLOTS, VALUE, ActorSpec, Program, TaskSpec
from .reserving import SLOT
from .spilling import Disk, SimSpiller
from .world import World

CODE = b"the code of every task " * 4
WORKERS_MAX = 20  # of a node
ATTEMPTS = 1000  # to get the name of an arena
BURY_S = (0.0005, 0.03)  # after a death
RESTART_S = (0.05, 0.4)  # of an uplink
FORK_S = (0.001, 0.1)  # of an actor's process
ROOM_OF_ACTORS = "room"  # a resource that actors take
PARTS_ARE_LOST = "its parts are lost"
METHODS = (MethodPlan("call", 0, "", 0, -1, None, False),)


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
            "peer_idle_s": node.cluster.idle_s, "standby": standby_address(node), "labels": {},
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


def _segment(world: World, store_bytes: int) -> Segment:
    """An arena. Its name comes from the seed, so it is given up at once: a run beside this one may want it."""
    state = world.bytes.getstate()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            made = Segment.create(store_bytes, clients_max=64, objects_max=1 << 13, tasks_max=1 << 12, trace=False)
        except OSError:  # it is there
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
        self.segment = _segment(self.world, cluster.store_bytes)
        self.disk = Disk(self) if cluster.family.spills else None
        self.members: dict[int, Member] = {}
        room = {ROOM_OF_ACTORS: ROOM * RESOURCE_PARTS} if cpus and cluster.program.actors else {}
        room |= {SLOT: SLOTS * RESOURCE_PARTS} if cpus and cluster.program.groups else {}
        self.total = {"CPU": cpus * RESOURCE_PARTS, **room}
        self._pids = 1 << 20
        self._in_step = False
        self.start_daemon()
        self.daemons = Lives(self)
        self.blocked: set[Worker] = set()
        self.workers = [self._add(Worker(self)) for _ in range(cpus)]
        self.uplink: Any = self._add(UplinkMember(self))
        self.drivers: list[Driver] = []
        self.standby = start_standby(self)
        self.world.after(1.0, self._tend)
        self.world.after(1.0, self._sweep)
        if cluster.family.full_s:
            self.world.after(1.0, self._stay_full)

    def _add(self, member: Any) -> Any:
        self.members[member.slot] = member
        member.process.slowness = self.slowness
        return member

    @property
    def hosts(self) -> list[ActorHost]:
        """The processes of actors."""
        return [member for member in self.members.values() if isinstance(member, ActorHost)]

    def block(self, worker: Worker) -> None:
        """Start another worker in the place of one that waits; an actor's process has no place."""
        if isinstance(worker, ActorHost):
            return
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

    def _is_blocked(self, slot: int) -> bool:
        return getattr(self.members.get(slot), "waits", False)

    def _slot_of(self, link: Any) -> int | None:
        uplink = self.uplink
        return uplink.slot if uplink.process.alive and uplink.lasting.to_uplink is link else None

    # ---- the daemon ----

    def start_daemon(self) -> None:
        """Make the parts of the daemon, or of the next one."""
        slot, gen = clients.admit(self.segment, os.getpid(), clients.KIND_DAEMON, "daemon")
        self.client = Client(self.segment, slot, gen)
        self.store = Store(self.client, 0.0)
        self.janitor = Janitor(self.store)
        folder = Path(self.segment.session)
        self.kept = KeptObjectTable(self.client, self.janitor.stand_ins, self._slot_of, folder)
        self.admission = SimAdmission(
            self.store,
            self.total,
            {},
            True,
            self._runs_here,
            self._is_blocked,
            Workers(self.cpus, 2 * self.cpus, list),
            self._want_actors,
            self.world.say,
        )
        self.actors = Actors(
            self.store,
            self._fork,
            self.admission.may_start,
            self.admission.on_process,
            self._on_actor_ended,
            self.admission.placing.waiting_actors,
            self.world.say,
        )
        self._actors_wanted = self._refresh_wanted = False
        self._seen = 0
        self.spiller = SimSpiller(self) if self.disk is not None else None

    def to_daemon(self, message: Any) -> None:
        """Send a message of a process that waits for no answer."""
        lasts = isinstance(message, messages.RemoveGroup)  # which waits for one, and would be sent again
        self._send(None, message, lasts)

    def ask_daemon(self, link: Any, question: Any) -> None:
        """Send a question of a process, which gets the answer at its connection."""
        self.daemons.ask(link, question)
        self._send(link, question)

    def _send(self, link: Any, message: Any, lasts: bool = False) -> None:
        number, late_s = self.daemons.number, BACKLOG_S * self.world.rng.random()

        def arrive() -> None:
            to = self.daemons.number if lasts else number
            self.daemons.reach(to, lambda: self.on_message(link, message))

        self.world.after(late_s, arrive)

    def on_message(self, link: Any, message: Any) -> None:
        if isinstance(message, messages.ClusterNodes):
            self.kept.connect(link)
            self.admission.on_cluster(link, message)
        elif isinstance(message, messages.Restore):
            if not remote.is_remote(self.client, message.entry, message.objref):
                if self.spiller is not None:
                    self.spiller.restore(message.entry, message.objref)
            elif self.admission.uplink is not None:
                self.admission.uplink.post(messages.Fetch(message.entry, message.objref))
        elif isinstance(message, messages.Spill):
            self.spiller.make_room(message.nbytes)
            self.spiller.look_ahead()
        elif isinstance(message, messages.ActorsChanged):
            self.tend_actors()
        elif isinstance(message, messages.FindActor):
            self.admission.on_find(link, message)
        elif isinstance(message, messages.SearchEnded):
            self.admission.on_search_ended(link, message)
        elif isinstance(message, messages.Holds):
            self.admission.on_holds(link, message)
        elif isinstance(message, messages.KeepObjects):
            self.kept.keep(link, message)
        elif isinstance(message, messages.ReleaseObjects):
            self.kept.release(link, message)
        elif isinstance(message, messages.KnownHeads):
            self.kept.note_heads(link, message)
        elif isinstance(message, messages.RemoveGroup):
            self.admission.remove_group(message.group)
            self.tend_actors()
            self.admission.refresh()
        self.after_step()

    def _tend(self) -> None:
        if self.alive:
            if self.daemons.is_alive:
                self.admission.refresh()
                self.kept.tend(self.admission.uplink)
                self.tend_actors()
                if self.spiller is not None:
                    spill.tick(self.client)
                    self.spiller.look_ahead()
                self.after_step()
            self.world.after(1.0, self._tend)

    def _sweep(self) -> None:
        if self.alive:
            if self.daemons.is_alive:
                functions.sweep(self.client)
                self.janitor.orphans.end_unused()
            self.world.after(self.world.rng.random(), self._sweep)

    def _stay_full(self) -> None:
        """Drop copies again and again."""
        if self.alive:
            self.drop_copies()
            self.world.after(2 * self.world.rng.random() * self.cluster.family.full_s, self._stay_full)

    def drop_copies(self) -> None:
        """Drop copies of values that other nodes keep, as a full store does."""
        for index, objref, _, _ in remote.sources(self.client) if self.daemons.is_alive else ():
            if self.world.rng.random() < 0.5:
                remote.drop_copy(self.client, index, objref)

    def _want_actors(self) -> None:
        self._actors_wanted = True

    def _on_actor_ended(self, actor: int) -> None:
        self.admission.on_actor_ended(actor)
        self._refresh_wanted = True

    def tend_actors(self) -> None:
        """Start, restart and end actors, as the daemon does."""
        if not self.daemons.is_alive or self.daemons.is_counting:
            return
        self._actors_wanted = True
        while self._actors_wanted or self._refresh_wanted:
            if self._refresh_wanted:
                self._refresh_wanted = False
                self.admission.refresh()
            self._actors_wanted = False
            self.actors.tend()

    def _fork(self, actor: int) -> None:
        """Start a process for an actor."""
        self._pids += 1
        pid, daemon = self._pids, self.daemons.number
        self.daemons.forking += 1

        def forked() -> None:
            self.daemons.forking -= 1
            if self.alive and daemon == self.daemons.number:
                self.actors.started(actor, pid, False)
                self._add(ActorHost(self, actor, pid))
                self.actors.joined(pid)
            elif self.alive:  # the next daemon learns of it from the zygote
                self._add(ActorHost(self, actor, pid))

        self.world.after(self.world.rng.uniform(*FORK_S), forked)

    def end_process(self, client: int | None) -> None:
        """Kill the process of an actor on someone's order."""
        member = self.members.get(-1 if client is None else client)
        if self.alive and isinstance(member, ActorHost):
            self.kill(member)

    def after_step(self) -> None:
        """Do the work of a wake of the arena: waiters look, workers claim, the daemon reads changed records."""
        if self._in_step or not self.alive:
            return
        self._in_step = True
        for member in list(self.members.values()):
            if member.process.waiter is not None:
                member.process.waiter.poll()
        idle = [worker for worker in self.workers if worker.idle is not None and worker.process.alive]
        for worker in idle[: core.queued(idle[0].client)] if idle else ():
            worker.process.call(worker.wake)
        for member in self.hosts:
            if member.idle is not None and member.process.alive and member.inbox.arm():
                member.process.call(member.wake)
        if not self.daemons.is_alive:
            self._in_step = False
            return
        seen = core_admission.wait_news(self.client, 0xFFFFFFFF, 0.0)  # no sleep: the word differs
        if seen != self._seen:
            self._seen = seen
            self.admission.refresh()
        with contextlib.suppress(BlockingIOError):  # else an actor that waited has its arguments now
            self.admission.on_news(self.admission.news)
        if self._actors_wanted or self._refresh_wanted:
            self.tend_actors()
        self._in_step = False

    # ---- deaths ----

    def kill(self, member: Any) -> None:
        """Kill a process; the daemon notices a moment later, and starts another one in its place."""
        if not member.process.alive:
            return
        if type(member) is Worker and member.task >= 0 and core.info(member.client, member.task)["hops"]:
            self.cluster.count_extra_run(member.number)
        self.world.say(f"{self.host}: {member.process.name} is killed")
        self.exit(member)

    def exit(self, member: Any) -> None:
        """Have a process end now; the daemon notices a moment later."""
        member.process.kill()
        member.client.abandon()
        self.world.after(self.world.rng.uniform(*BURY_S), lambda: self._bury(member))

    def _bury(self, member: Any) -> None:
        if not self.alive:
            return
        if not self.daemons.is_alive:  # the next daemon does it
            self.world.after(self.world.rng.uniform(*BURY_S), lambda: self._bury(member))
            return
        if isinstance(member, UplinkMember):
            member.lasting.close()
            self.admission.on_hang_up(member.lasting.to_uplink)
            self.world.after(self.world.rng.uniform(*RESTART_S), self._new_uplink)
        pid = member.pid if isinstance(member, ActorHost) else os.getpid()
        self.actors.fell(member.slot, pid, "was killed")
        self.janitor.bury(member.slot, os.getpid(), "was killed")
        self.actors.ended(pid, "was killed")
        self.janitor.end_round()
        if isinstance(member, UplinkMember):
            self._check_no_guests()
        del self.members[member.slot]
        if type(member) is Worker:
            self.workers.remove(member)
            self.blocked.discard(member)
            self.workers.append(self._add(Worker(self)))
        self.blocked.discard(member)
        self.tend_actors()
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
            runs = [member, *getattr(member, "at_once", ())] if isinstance(member, Worker) else ()
            for run in runs:
                if run.task >= 0 and core.cancelled(run.client, run.task) and run.interrupted is not None:
                    member.process.call(run.interrupted.set)
            if isinstance(member, UplinkMember):
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
        if self.standby is not None:
            self.standby.kill()
        if self.daemons.is_alive:
            self.stop_daemon()
        self.segment.unlink()
        if self.disk is not None:
            self.disk.remove()

    def stop_daemon(self) -> None:
        """Have the daemon do nothing more."""
        if self.spiller is not None:
            self.spiller.kill()
        self.client.abandon()
        os.close(self.admission.news)

    # ---- for members ----

    def value(self, key: str, scope: dict[str, Any]) -> Any:
        program: Program = self.cluster.program
        missing = [one for one in program.contents[key] if one not in scope]
        if missing and (program.outcome[key] != VALUE or self.cluster.may_miss):
            raise FastrtError(PARTS_ARE_LOST)
        return key, program.padding(key), [scope[one] for one in program.contents[key]]

    def put(self, member: Member, key: str, scope: dict[str, Any]) -> Any:
        program: Program = self.cluster.program
        missing = [one for one in program.contents[key] if one not in scope]
        assert not missing or self.cluster.program.outcome[key] != VALUE or self.cluster.may_miss, (key, missing)
        if missing:
            return member.store.put_serialized(serialize(FastrtError(PARTS_ARE_LOST)), True)
        return member.store.put(self.value(key, scope))

    def submit(self, member: Member, spec: TaskSpec, scope: dict[str, Any]) -> None:
        function = self.function(member, spec.function)
        demand = None
        nodes = self.cluster.nodes
        where = nodes[spec.where % len(nodes)].segment.session if spec.where >= 0 else ""
        if spec.group:
            demand = self.cluster.reserving.demand(member, spec, parts_of({SLOT: spec.slots}))
        elif (spec.cpus or where) and not spec.actor:
            demand = export(member.store, Demand(parts_of({"CPU": spec.cpus or 0.5}), node=where, soft=True))
        retries = RETRIES_FOREVER if spec.retries < 0 else spec.retries
        stream = generators.create(member.client, spec.limit) if spec.items else None
        args = [self.cluster.items.new(spec)] if spec.items else []
        args += [scope[key] for key in spec.args]
        if spec.actor:
            member.calls += 1
            call = submission.CallOptions(scope[spec.actor], 0, len(spec.results), retries)
            try:
                args = (spec.number, member.caller, member.calls, *args)
                made = member.store.with_room(0, lambda: submission.submit(member.client, call, args, stream))
            except submission.CallOfDead as dead:
                task, made = dead.args
                member.store.put_error(task, dead_actor(member.store, scope[spec.actor]))
                core.finish(member.client, task, tally.CRASHED)
        else:
            options = submission.TaskOptions(function, len(spec.results), retries, demand=demand)
            args = (spec.number, *args)
            made = member.store.with_room(0, lambda: submission.submit(member.client, options, args, stream))
        if stream is not None:
            scope[spec.names[0]] = ObjectRefGenerator(stream, made)
        else:
            scope.update(zip(spec.results, [made] if len(spec.results) == 1 else made, strict=True))

    def create_actor(self, member: Member, spec: ActorSpec, scope: dict[str, Any]) -> bool:
        """Create an actor, whose handle is then in `scope`; False: another one here has its name."""
        nodes = self.cluster.nodes
        where = nodes[spec.where % len(nodes)].segment.session if spec.where >= 0 else ""
        if spec.group:
            demand = self.cluster.reserving.demand(member, spec, ())
        else:
            demand = export(member.store, Demand(parts_of({ROOM_OF_ACTORS: spec.room}), node=where, soft=True))
        cls = self.function(member, 0)
        init = member.store.put(self.value(spec.key, scope))
        session, job = self.segment.session, member.client.job
        plan = ActorPlan(spec.key, session, METHODS, cls, init, 0, spec.concurrency, demand=demand, job=job)
        ref = member.store.put_serialized(serialize(plan))
        name = spec.name or (f"{spec.key} of {member.caller}" if spec.detached else "")
        if actors.create(member.client, ref, cls.objref, name, spec.restarts, spec.detached, demand) is None:
            return False
        member.store.tell(messages.ActorsChanged())
        scope[spec.key] = ref
        return True

    def end_detached(self) -> None:
        """Kill the detached actors of this node, which outlive their drivers."""
        for name in actors.names(self.client):
            kill_in(self.store, actors.index_of(self.client, actors.find(self.client, name)), "the program has ended")
        self.tend_actors()

    def function(self, member: Member, number: int) -> Any:
        """The function with a number; the first one lasts with its driver, the others until no task names them."""
        code = CODE + bytes([number]) * 8
        digest = hashlib.blake2b(code, digest_size=16).digest()
        found = functions.find_function(member.client, digest)
        return found or functions.add_function(member.client, digest, member.store.put(code), "f", number == 0)

    # ---- at the end ----

    def say_tasks(self) -> None:
        """Write the tasks that have not ended into the story of a run that fails."""
        for row in inspect.tasks(self.client) if self.alive else ():
            self.world.say(f"{self.host}: {row}")

    @property
    def is_bare(self) -> bool:
        """Return whether it runs, and keeps no file, and no record but of drivers' functions."""
        if not (self.alive and self.daemons.is_alive and self.uplink.process.alive):
            return False
        found = usage(self.client)
        return not (found["tasks"] or found["actors"] or self.kept_values())

    def kept_values(self) -> list[str]:
        """List the objects and files of values that are left; functions last with their drivers."""
        found = usage(self.client)
        functions = found["functions"] + len(self.admission._known)
        said = []
        if found["objects"] > functions:
            said.append(f"{self.host}: {found['objects']} objects are left, {functions} are expected")
        if self.disk is not None and self.disk.names():
            said.append(f"{self.host}: files of values are left: {self.disk.names()}")
        return said

    def leftovers(self) -> list[str]:
        """List the records that stay in the arena although nothing uses them."""
        found = usage(self.client)
        said = [f"{self.host}: {found[what]} {what} are left" for what in ("tasks", "actors") if found[what]]
        said += [f"{self.host}: the process of actor {host.actor} is left" for host in self.hosts]
        rows = [name for name in ("placing",) if self.admission.placing.placed() or self.admission.placing.waiting()]
        said += [f"{self.host}: {name} still counts tasks" for name in rows]
        placing = self.admission.placing
        if any(placing.used.values()) or placing.total != self.total or placing.unopened:
            said.append(f"{self.host}: of {placing.total} {placing.used} are in use; it has {self.total}")
        said += [f"{self.host}: {line}" for line in fsck(self.client, True)]
        return said
