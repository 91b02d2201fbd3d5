"""One simulated cluster: its nodes and head, the faults that a seed chooses, and the invariants.

The invariants, checked at each read and at the end:
- a driver's operations all end once the faults have ended (no lost wake, no lost message);
- a read gives the right value or a stated error; without lost machines and long cuts, the right value;
- a task begins at most once more than its retries allow, and once more for each run that a node which passed it on
  had it make: the task's owner does not learn of those;
- no node refuses what another one sends, and no process raises an unexpected error;
- a task that was cancelled while it ran ends, wherever it runs; no task is forwarded more often than allowed;
- an uplink's death ends the tasks that had come through it from other nodes;
- when nothing is used any more, no node holds a task, a reservation or an object, and the arenas are sound;
- no last copy of a value is dropped, a value that may go to a file finds room, and no file is left (`spilling`);
- no value is given up while no machine is lost and the head reaches all nodes, and none is made again that is unused;
- whenever nothing is on its way between two nodes, they agree (`invariants`);
- calls of one caller begin in their order in each process of an actor, and not more often than their retries allow;
- each item of a generator goes to one reader, a reader gets them in order, and the only reader gets all of them;
- actors without handles end, and so do generators without readers; names of actors are found, and free (`naming`);
- the messages between the nodes stay in proportion to the tasks.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastrt._core.tasks import tasks as core
from fastrt.cluster import daemon_link, head, large_values, lineage, outbox, remote_values, uplink, value_traffic
from fastrt.errors import ActorDiedError, FastrtError, ObjectLostError, ObjectStoreFullError, WorkerCrashedError
from fastrt.net import supervise
from fastrt.net.grpc import streams
from fastrt.node import janitor, kept
from fastrt.store import unread
from fastrt.tasks import actor_records, cancel
from fastrt.tasks.actor_handle import ActorPlan

from . import invariants, spilling, strikes
from .aims import AIMS
from .families import family_of
from .faults import BEGIN_S, Faults
from .heads import Agreeing
from .items import ItemsRead
from .links import Native, Puller, SimWaiter
from .naming import Naming
from .network import Network
from .node import PARTS_ARE_LOST, Node
from .program import VALUE, Program
from .reserving import Reserving
from .world import Files, Process, World, patched

END_S = 400.0  # after the last fault: everything must have ended by then
CHECK_S = 0.1  # between two looks at what holds between the nodes
MESSAGES_A_TASK = 60
HOPS_MAX = 4
ITEMS_ARE_LOST = "further items of a generator are lost"


@dataclass
class Plan:
    """The size and the faults of one simulated run. A smaller plan with the same seed makes a part of that run.

    Attributes:
        nodes, tasks, drivers, faults: how many.
        machines: whether machines are lost, drivers are killed, and cuts are long.
        retries: whether tasks run again as often as it takes; if not, the seed chooses how often.
        skip: numbers of the faults that are left out, for shrinking.
        family: the kind of run.
    """

    seed: int
    nodes: int = 3
    tasks: int = 60
    drivers: int = 2
    faults: int = 6
    machines: bool = False
    retries: bool = True
    skip: frozenset[int] = frozenset()
    family: str = ""

    def command(self) -> str:
        skip = f" --skip {','.join(map(str, sorted(self.skip)))}" if self.skip else ""
        skip += f" --family {self.family}" if self.family else ""
        return (
            f"--seed {self.seed} --nodes {self.nodes} --tasks {self.tasks} --drivers {self.drivers} --faults "
            f"{self.faults}{' --machines' if self.machines else ''}{' --retries' if self.retries else ''}{skip}"
        )


class Cluster:
    """A cluster that runs one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.world.network = Network(self.world)
        rng = random.Random(plan.seed ^ 0x5EED)
        self.may_lose = plan.machines
        self.access = SimpleNamespace(identity=SimpleNamespace(why_refused=lambda *args: None), insecure=True, tls=None)
        family = AIMS.get(plan.family) or family_of(plan.family, plan.seed, plan.machines)
        self.family = family
        retries = -1 if plan.retries else family.retries
        if family.scene is None:
            self.program = Program(rng, plan.drivers, plan.tasks, retries, family.shape)
        else:
            self.program = family.scene(rng)
        self.head_address = "10.0.0.1:7000"
        self.starts: dict[int, int] = {}
        self.extra_runs: dict[int, int] = {}
        self.passed_on: dict[tuple[str, bytes], int] = {}  # tasks by the node that passed them on, and their arguments
        self.submitted: set[int] = set()
        self.nodes: list[Node] = []
        self.lost: list[Node] = []
        self._port = 20_000
        self.head: Process | None = None
        self.reads = 0
        self.calls: dict[tuple[int, int], int] = {}  # how often each has begun
        self.reserving = Reserving(self)
        self.naming = Naming(self)
        self.calm_at = 0.0  # all faults have ended then
        self.items = ItemsRead(self.program, self.world.violation)
        self._callers = 0
        self.faults: list[str] = []
        self.drivers: list[Any] = []
        self.exchanges: dict[Any, None] = {}
        knobs = random.Random(plan.seed ^ 0x5E77)
        self.tidy_s = knobs.choice(family.tidy_s)
        self.idle_s = knobs.choice(family.idle_s)
        self.world.late = family.late
        self.world.network.bytes_a_second = knobs.choice(family.bytes_a_second)
        self.store_bytes = knobs.choice(family.store_bytes)
        self.falls_back = family.falls_back

    def next_port(self) -> int:
        self._port += 1
        return self._port

    # ---- invariants ----

    def check(self, key: str, value: Any, reader: str) -> None:
        """Check a value that was read."""
        self.reads += 1
        program = self.program
        if isinstance(value, ActorPlan) and program.is_of(value.name, key):
            return
        if value == key and not program.sizes[key] and not program.contents[key]:
            return
        right = isinstance(value, tuple) and value[0] == key and value[1] == program.padding(key)
        if not right or len(value[2]) != len(program.contents[key]):
            self.world.violation(f"{reader} read {str(value)[:100]!r} as {key}")

    def check_error(self, key: str, exc: Exception, reader: str) -> None:
        """Check an error that was read."""
        self.reads += 1
        self.world.say(f"{reader} read {type(exc).__name__}: {exc} as {key}")
        if key.endswith("*"):
            key = f"t{key[1:-1]}.0"
        if self.program.outcome[key] != VALUE:
            return
        if self.may_lose and isinstance(exc, ObjectLostError):
            return
        if self.may_fail and isinstance(exc, WorkerCrashedError):
            return
        if self.may_miss and isinstance(exc, FastrtError) and PARTS_ARE_LOST in str(exc):
            return
        if self.actors_may_die and isinstance(exc, ActorDiedError):
            return
        if self.may_stay_full and isinstance(exc, ObjectStoreFullError):
            return
        if self.faults and isinstance(exc, ObjectLostError) and ITEMS_ARE_LOST in str(exc):
            return
        self.world.violation(f"{reader} read {type(exc).__name__}: {exc} as {key}, which has a value")

    def new_caller(self) -> int:
        """Return the number of another caller of actors: a driver, or a run of a task."""
        self._callers += 1
        return self._callers

    def count_call(self, number: int, caller: int, call: int) -> None:
        """Count that a call begins; it may begin again as often as its retries allow."""
        count = self.calls[caller, call] = self.calls.get((caller, call), 0) + 1
        retries = self.program.tasks[number].retries
        if 0 <= retries < count - 1:
            self.world.violation(f"call {call} of caller {caller} began {count} times with {retries} retries")

    @property
    def actors_may_die(self) -> bool:
        """Whether calls may fail because their actor's process has ended."""
        return bool(self.program.actors and (self.faults or self.program.killed))

    @property
    def may_miss(self) -> bool:
        """Whether a program may lack what it puts into values."""
        return (
            self.may_fail
            or self.actors_may_die
            or self.may_stay_full
            or bool(self.faults and self.family.shape.streams)
        )

    @property
    def may_stay_full(self) -> bool:
        """Whether a value may find no room: a disk is full, or values that find no room must not go to files."""
        return self.family.spills and (not self.falls_back or "disk" in "\n".join(self.faults))

    def count_extra_run(self, number: int) -> None:
        """Note that a node which does not own a task runs it again: the owner does not count that run."""
        self.extra_runs[number] = self.extra_runs.get(number, 0) + 1

    def count_runs_again(self, exchange: Any) -> None:
        """Count the tasks of other nodes that run again because a stream ends."""
        for _, sent in () if exchange.closed else exchange.ledger.open():
            if core.info(exchange.client, sent.task)["hops"]:
                self.count_extra_run(core.arguments(exchange.client, sent.task)[1][0])

    @property
    def may_fail(self) -> bool:
        """Whether a task may be given up after as many attempts as it may have."""
        return self.may_lose or bool(self.faults and not self.plan.retries and self.family.retries is None)

    @property
    def keeps_all(self) -> bool:
        """Whether no value may be given up: no machine is lost, and none can seem to be.

        A node seems to be lost if the head does not list it.
        """
        faults = "\n".join(self.faults)
        if self.may_lose or "head" in faults:
            return False
        killed = re.findall(r"kill the uplink of (\w+)", faults)
        # What the uplink held is with the daemon until the next uplink has it.
        return not set(killed) & set(re.findall(r"kill the daemon of (\w+)", faults))

    def check_hops(self, number: int, hops: int) -> None:
        """Check how often a task was forwarded before it runs."""
        if hops > HOPS_MAX:
            self.world.violation(f"task {number} was forwarded {hops} times")

    def _check_streams(self) -> None:
        """Check what holds between two nodes, again and again."""
        alive = {node.uplink.process for node in self.nodes if node.alive and node.uplink.process.alive}
        open_ = [one for one in self.exchanges if one.waiter.loop._process in alive]
        invariants.check(open_, self.world.violation)
        if self.program.groups:
            self.reserving.check()
        self.world.after(CHECK_S, self._check_streams)

    def check_end(self) -> None:
        """Check what is left when nothing is used."""
        world = self.world
        for number in self.submitted:
            spec = self.program.tasks[number]
            most = 1 + spec.retries + self.extra_runs.get(number, 0)
            if spec.retries >= 0 and self.starts.get(number, 0) > most:
                world.violation(f"task {number} began {self.starts[number]} times with {spec.retries} retries")
        for node in self.nodes:
            for line in node.leftovers():
                world.violation(line)
            one = node.uplink.uplink if node.uplink.process.alive else None
            for exchange in list(one._exchanges) if one is not None else ():
                if not exchange.ledger.is_empty:
                    world.violation(f"{node.host}: its ledger with {exchange.name} is not empty")
        made = sum(self.starts.values()) + len(self.faults) * 40
        limit = MESSAGES_A_TASK * made + 40 * (world.now - BEGIN_S) * len(self.nodes)
        if world.network.messages > limit:
            world.violation(f"{world.network.messages} messages for {made} runs of tasks: more than {limit:.0f}")

    def check_objects(self) -> None:
        """Check that no object is left: drivers and functions are gone."""
        for node in self.nodes:
            for line in node.kept_values():
                self.world.violation(line)

    # ---- the run ----

    def run(self) -> None:
        plan, world = self.plan, self.world
        self.start_head()
        for k in range(plan.nodes):
            is_client = k == 0 and plan.seed % 3 == 0 and plan.nodes > 1  # a driver's node without workers
            cpus = 2 if self.family.scene else 0 if is_client else 1 + (plan.seed + k) % 2
            self.nodes.append(Node(self, k + 1, cpus))
            world.network.hosts[f"10.0.{k + 1}.1"] = f"n{k + 1}"
        world.network.hosts["10.0.0.1"] = "head"
        for a in ("head", *(node.host for node in self.nodes)):
            for b in ("head", *(node.host for node in self.nodes)):
                world.network.spread_s[a, b] = world.rng.choice(self.family.delay_s)
        drivers = self.drivers
        for k, ops in enumerate(self.program.drivers):
            node = self.nodes[k % len(self.nodes)]
            world.after(world.rng.random(), partial(self._start_driver, node, ops, k))
        last = Faults(self).plan_all()
        strikes.Strikes(self, self.family.strikes).next()
        if self.family.standbys:
            world.after(0.0, Agreeing(self).look)
        self.calm_at = BEGIN_S + last
        self._check_streams()
        world.run(BEGIN_S + last + 1.0)

        def done() -> bool:
            return all(one.is_done or not one.process.alive for one in drivers)

        world.run(world.now + END_S, done)
        if not world.violations and not done():
            for driver in drivers:
                if not driver.is_done and driver.process.alive:
                    world.violation(f"the driver on {driver.node.host} never ended: {driver.doing}")
        if world.violations:
            for node in self.nodes:
                node.say_tasks()
            return
        for driver in drivers:
            if driver.process.alive:
                driver.refs.clear()
        for node in self.nodes:
            if node.alive and self.program.actors:
                node.end_detached()
        invariants.settle(world, self.nodes)
        if not world.violations:
            self.check_end()
        for node in self.nodes if world.violations else ():
            node.say_tasks()
        for driver in drivers:  # they exit
            if driver.process.alive:
                driver.node.kill(driver)
        world.run(world.now + 12.0)
        if not world.violations:
            self.check_objects()

    def _start_driver(self, node: Node, ops: list[tuple], index: int) -> None:
        if node.alive:
            self.drivers.append(node.add_driver(ops, index))

    def start_head(self) -> None:
        """Start the head; another one ran before, if any."""
        self.head = Process(self.world, "head", "head")
        self.head.start(partial(head._serve, self.head_address, "", "", self.access))

    # ---- the end ----

    def close(self) -> None:
        world = self.world
        for process in [*world.processes, *world.graveyard]:
            process.alive = False
        world.turns.close()
        for node in self.nodes:
            if node.alive:
                node.lose()
        world.processes.clear()
        world.graveyard.clear()
        self.nodes.clear()
        self.lost.clear()
        self.drivers.clear()
        self.exchanges.clear()
        self.head = None
        world.network.forget()


class _Inline:
    """In place of a thread: runs at once. What reads the daemon's messages does not run: `Lasting` delivers them."""

    def __init__(self, target: Callable[[], Any], name: str, daemon: bool) -> None:
        self._target, self._name = target, name

    def start(self) -> None:
        if self._name != "fastrt-orders":
            self._target()


_THREADS = SimpleNamespace(Thread=_Inline)


def _watched(cluster: Cluster) -> list[tuple[Any, str, Any]]:
    """The functions that the invariants watch, and their replacements, for `patched`."""
    write, rebuild = uplink.Uplink._write, lineage.Lineage.rebuild
    remember, run_again = lineage.Lineage.remember, lineage.Lineage._run_again

    async def write_noted(self: Any, exchange: Any, to: Any) -> None:
        exchange.writes_to, exchange.writes_to_side = to.__self__, to.__self__.side
        await write(self, exchange, to)

    def rebuild_noted(self: Any, made: Any, origin: Any, lost: str) -> None:
        if cluster.keeps_all:
            cluster.world.violation(f"a value is given up although no machine was lost: {lost}")
        rebuild(self, made, origin, lost)

    def key_of(self: Any, record: Any) -> tuple[str, bytes]:
        return self._client.segment.session, bytes(self._records[weakref.ref(record)].form.data)

    def remember_noted(self: Any, task: int) -> Any:
        record = remember(self, task)
        if core.info(self._client, task)["hops"]:
            cluster.passed_on[key_of(self, record)] = core.arguments(self._client, task)[1][0]
        return record

    def run_again_noted(self: Any, record: Any, lost: str) -> Any:
        number = None if record.results or record.run is None else cluster.passed_on.get(key_of(self, record))
        results = run_again(self, record, lost)
        if number is not None:
            cluster.count_extra_run(number)
        return results

    return [
        (uplink.Uplink, "_write", write_noted),
        (lineage.Lineage, "rebuild", rebuild_noted),
        (lineage.Lineage, "remember", remember_noted),
        (lineage.Lineage, "_run_again", run_again_noted),
        (uplink.Exchange, "close", invariants.close_noted(cluster.world.violation)),
        (remote_values.RemoteValues, "give_up", invariants.give_up_noted(cluster.world.violation)),
        (value_traffic.ValueTraffic, "send", invariants.send_noted(cluster.world.violation)),
    ]


def _changes(cluster: Cluster) -> list[tuple[Any, str, Any]]:
    """The simulator's replacements of the clock, randomness, sockets and threads, for `patched`."""
    world, network = cluster.world, cluster.world.network
    rng = world.bytes
    ids, files = iter(range(1 << 60)), Files()

    class Exchange(uplink.Exchange):  # sets of streams have the same order in each run
        def __init__(self, *args: Any) -> None:
            self._hash = next(ids)
            self.writes_to: Any = None
            self.writes_to_side, self.waits_for_room = 0, False
            super().__init__(*args)
            cluster.exchanges[self] = None

        def __hash__(self) -> int:
            return self._hash

        def __eq__(self, other: object) -> bool:
            return self is other

        def close(self, *args: Any, **kwargs: Any) -> None:
            cluster.count_runs_again(self)
            cluster.exchanges.pop(self, None)
            super().close(*args, **kwargs)

    def native(store: Any, access: Any, listen: str) -> Native:
        process = world.current
        assert process is not None
        host, _, _ = listen.rpartition(":")
        return Native(store, access, process, f"{host}:{cluster.next_port()}")

    def interrupt(store: Any, pid: int, force: bool) -> None:
        for node in cluster.nodes:
            if node.alive and node.segment is store.client.segment:
                world.after(0.0001, node.interrupt)

    def end_process(store: Any, index: int, info: dict[str, Any], number: int) -> None:
        for node in cluster.nodes:
            if node.alive and node.segment is store.client.segment:
                world.after(0.0001, partial(node.end_process, info["client"]))

    return [
        (time, "monotonic", world.monotonic),
        (os, "urandom", rng.randbytes),
        (streams, "serve", network.serve),
        (streams, "open_stream", network.open_stream),
        (supervise, "announce", lambda address: None),
        (streams, "end_with_starter", lambda stop: None),
        (uplink, "open_native", native),
        (uplink, "LoopWaiter", SimWaiter),
        (uplink, "Exchange", Exchange),
        *_watched(cluster),
        (large_values, "Puller", Puller),
        (large_values, "threading", _THREADS),
        (large_values, "_PART_BYTES_MIN", 16 << 10),
        (large_values, "FRAME_BYTES", 4 << 10),
        (large_values, "secrets", SimpleNamespace(randbits=rng.getrandbits)),
        (daemon_link, "threading", _THREADS),
        (cancel, "interrupt", interrupt),
        (janitor, "interrupt", interrupt),
        (actor_records, "_end_process", end_process),
        (value_traffic, "BYTES_MIN", 32 << 10),
        (value_traffic, "SPREAD_BYTES_MIN", 40 << 10),
        (uplink, "_TIDY_S", cluster.tidy_s),
        (uplink, "_QUIET_TIDY_S", 4 * cluster.tidy_s),
        (outbox, "PIECE_BYTES", 8 << 10),
        (outbox, "FRAME_BYTES", 32 << 10),
        (unread, "forward", lambda tell: None),
        *files.changes(kept),
    ]


@contextlib.contextmanager
def simulated(cluster: Cluster) -> Iterator[io.StringIO]:
    """Put the simulator's clock, randomness, sockets and threads in the place of the real ones."""
    err = io.StringIO()
    gc.disable()
    try:
        with (
            contextlib.redirect_stderr(err),
            patched(*_changes(cluster), *spilling.changes(cluster), *strikes.changes(cluster)),
        ):
            try:
                yield err
            finally:  # while threads are the simulator's: code of killed processes ends in its `finally` blocks here
                cluster.close()
                gc.collect()
    finally:
        gc.enable()


@dataclass
class Result:
    """The outcome of one plan: the invariants that it violated, and the last lines of its log."""

    plan: Plan
    violations: list[str]
    log: list[str]
    faults: list[str]
    digest: int
    tasks: int
    messages: int
    reads: int
    seconds: float


REFUSALS = (" is closed: ",)  # what an uplink prints when it does not accept what another one sends


KEPT_ARENAS_MAX = 8  # the last store of a process is replaced in a later run


def _open_arenas() -> int:
    """How many arenas this process has open."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/shm/fastrt-")
    return count


def run(plan: Plan, limit_s: int = 30) -> Result:
    """Run one plan."""
    began = time.perf_counter()
    while gc.collect() and _open_arenas():
        pass  # what killed processes had begun ends in the first collection, and frees more
    assert (kept := _open_arenas()) <= KEPT_ARENAS_MAX, f"earlier runs keep {kept} arenas: an hour fills the memory"
    gc.freeze()  # what is there now outlives the run: the collections in it need not look at it
    cluster = Cluster(plan)
    is_main = threading.current_thread() is threading.main_thread()

    def too_long(number: int, frame: Any) -> None:
        why = f"the run took more than {limit_s} s of CPU"
        if cluster.world.turns.holder != threading.get_ident():
            cluster.world.violation(why)  # of which the thread that runs takes note
            return
        raise TimeoutError(why)

    if is_main:
        signal.signal(signal.SIGPROF, too_long)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        with simulated(cluster) as err:
            try:
                cluster.run()
            except Exception as exc:
                cluster.world.violation(f"{type(exc).__name__}: {exc}", exc)
            for line in err.getvalue().splitlines():
                if any(words in line for words in REFUSALS):
                    cluster.world.violation(line)
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, signal.SIG_IGN)  # the handler would keep the run
    world = cluster.world
    return Result(
        plan,
        world.violations,
        list(world.log),
        cluster.faults,
        world.digest,
        sum(cluster.starts.values()),
        world.network.messages,
        cluster.reads,
        time.perf_counter() - began,
    )
