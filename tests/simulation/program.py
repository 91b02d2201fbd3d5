"""Random programs: what drivers and tasks do, and what every object must be.

A program is fixed by its seed before anything runs. Each object has a key: `p3` was put by a driver, `t7.0` is a result
of task 7, and `t7/1` was put by task 7; a call of an actor is a task that names it. `a2` is a handle of an actor, `t8*`
the generator of task 8, and `t8:3` its fourth item. The value of an object is (key, padding, references); the keys of
its references are known too. So every reader can check what it reads, also a task that runs for the second time.

No program waits for the end of a generator before it reads the items, and no call of an actor reads one: else a reader
would wait for a task that waits for readers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SIZES = (0, 0, 300, 5_000, 20_000, 50_000, 50_000)  # of the padding; large ones stay with their node
LARGE = (0, 300, 20_000, 50_000, 50_000, 50_000)
HOT_BYTES_MIN = 50_000
BARE_BYTES_MAX = 300
ROOM = 64  # of each node with workers, for actors
SLOTS = 1  # of each node with workers; only placement groups take them
ENDLESS_S = 1e6  # of a task that ends only by its cancellation
NAMES = ("board", "clock")  # of actors
VALUE, ERROR, EITHER = "value", "error", "either"  # what an object must become


@dataclass(frozen=True)
class Shape:
    """The kind of program.

    Attributes:
        sizes: of the padding of values.
        hot: how many objects most tasks take as arguments; 0: the seed changes them as the program goes.
        pinned: how many of the tasks name the node that should run them.
        kids: how many tasks a task submits; one of these.
        durations: of tasks, in seconds; at most one of these.
        drop: how often a driver drops a reference, of its operations.
        burst_s: the longest pauses between operations; one of these.
        results: how many results a task has; one of these.
        functions: how many different functions the tasks run.
        forget: how often a driver drops all its references, of its groups of operations.
        cancel: how many of a driver's tasks are cancelled.
        interrupted: whether a cancelled task does not wait for the bytes of its arguments.
        actors: how many of a driver's operations are about actors.
        kill: how many of these kill one.
        concurrent: how many actors run several calls at once.
        named: how many of the actors that drivers get are created with a name, or found by it.
        streams: how many tasks and calls are generators.
        gaps: how long a task works between two of its results, at most; one of these. Empty: not at all.
        holds: how many values hold only some of twice `hot` large objects; 0: all of them hold any.
        depth: how deep tasks submit tasks.
        groups: how many of a driver's operations are about placement groups.
        cpus: what a task of a driver demands; one of these.
        bare: whether only values without references are large: others are not spilled.
    """

    sizes: tuple[int, ...] = SIZES
    hot: int = 0
    pinned: float = 0.0
    kids: tuple[int, ...] = (0, 0, 0, 1, 2)
    durations: tuple[float, ...] = (0.0005, 0.01, 0.1, 0.5)
    drop: float = 0.1
    burst_s: tuple[float, ...] = (0.01, 0.2, 1.5)
    results: tuple[int, ...] = (1, 1, 1, 2)
    functions: int = 1
    forget: float = 0.0
    cancel: float = 0.08
    interrupted: bool = False
    actors: float = 0.0
    kill: float = 0.0
    concurrent: float = 0.0
    named: float = 0.0
    streams: float = 0.0
    gaps: tuple[float, ...] = ()
    holds: float = 0.0
    depth: int = 2
    groups: float = 0.0
    cpus: tuple[float, ...] = (0, 0, 0, 0.5, 1)
    bare: bool = False


@dataclass
class ActorSpec:
    """An actor.

    Attributes:
        key: of its handles.
        restarts: how often it gets another process; -1: any number.
        detached: it lives until it is killed.
        where: which node should run it; -1: any.
        group: the placement group that it is in; empty: none.
        bundle: of its group; -1: any.
        name: of the actor; empty: it has none. Several keys can have one name: those of actors, of which only one
            should exist at a time, and those under which drivers find it.
        concurrency: how many calls it runs at once; their order is free if they are several.
        room: what it takes of its node's room for actors (`ROOM`) outside of a group.
    """

    key: str
    restarts: int = 0
    detached: bool = False
    where: int = -1
    group: str = ""
    bundle: int = -1
    name: str = ""
    concurrency: int = 1
    room: int = 1


@dataclass
class GroupSpec:
    """A placement group.

    Attributes:
        bundles: the slots of each bundle.
        fits: whether the nodes can hold it.
    """

    key: str
    bundles: list[float]
    strategy: str
    fits: bool = True


@dataclass
class TaskSpec:
    """A task, or a call of an actor.

    Attributes:
        args: keys of its arguments.
        kids: numbers of the tasks that it submits.
        puts: keys of the objects that it puts.
        results: keys of its results.
        retries: how many further runs are allowed; -1: any number.
        cpus: what it demands; 0: nothing.
        where: which node should run it; -1: any.
        function: which function it runs.
        actor: the key of the actor that it calls; empty: it is a task.
        items: keys of what it yields; empty: it is no generator.
        limit: unread items with which it pauses; 0: it never does.
        pause_s: before each item.
        reads: generators that it reads, and how many items of each at most.
        gap_s: between two results.
        group: the placement group that it is in; empty: none.
        bundle: of its group; -1: any.
        slots: what it takes of its group.
    """

    number: int
    args: list[str]
    kids: list[int] = field(default_factory=list)
    puts: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    retries: int = -1
    cpus: float = 0.0
    where: int = -1
    function: int = 0
    fails: bool = False
    actor: str = ""
    items: list[str] = field(default_factory=list)
    limit: int = 0
    pause_s: float = 0.0
    reads: list[tuple[str, int]] = field(default_factory=list)
    gap_s: float = 0.0
    group: str = ""
    bundle: int = -1
    slots: float = 0.0

    @property
    def names(self) -> list[str]:
        """The names that its caller gets: of its results, or of its generator."""
        return [f"t{self.number}*"] if self.items else self.results


class Program:
    """The programs of all drivers.

    Args:
        rng: chooses everything.
        drivers: how many drivers there are.
        tasks: how many tasks they submit, with the tasks that tasks submit.
        retries: of each task; None: the seed chooses.
        shape: the kind of program.
    """

    def __init__(
        self, rng: random.Random, drivers: int, tasks: int, retries: int | None = -1, shape: Shape | None = None
    ) -> None:
        self._rng = rng
        self._shape = shape = shape or Shape()
        self._retries = retries
        self._left = tasks
        self.takes_newest = shape.holds > 0  # of the names of an object that a process knows, the last one is used
        self._hot: set[str] = set()  # large objects that many values hold
        self.tasks: dict[int, TaskSpec] = {}
        self.actors: dict[str, ActorSpec] = {}
        self.killed: set[str] = set()  # actors that drivers kill
        self.groups: dict[str, GroupSpec] = {}
        self.removed: set[str] = set()  # placement groups that drivers remove
        self._open: dict[int, str] = {}  # by driver: its placement group
        self.contents: dict[str, list[str]] = {}
        self.sizes: dict[str, int] = {}
        self.outcome: dict[str, str] = {}
        self.maker: dict[str, int] = {}
        self.via: dict[str, str] = {}  # objects that a driver has only from a value that it has read
        self.by_driver: list[tuple[list[str], list[str]]] = []  # (what a driver uses, what it makes of it)
        self.drivers = [self._driver(k) for k in range(drivers)]
        while self._left > 0:
            for ops in self.drivers:
                ops += self._more(ops)
        for driver, key in self._open.items():
            self.drivers[driver] += self._remove_group(key) if rng.random() < 0.5 else []
        self._settle()

    # ---- making ----

    def _object(self, key: str, holds: list[str], outcome: str) -> str:
        self.contents[key], self.sizes[key] = holds, self._rng.choice(self._shape.sizes)
        if holds and self._shape.bare:
            self.sizes[key] = min(self.sizes[key], BARE_BYTES_MAX)
        self.outcome[key] = outcome
        is_hot = self._shape.holds and key[0] == "t" and not holds and self.sizes[key] >= HOT_BYTES_MIN
        if is_hot and len(self._hot) < 2 * self._shape.hot:
            self._hot.add(key)
        return key

    def _some(self, scope: list[str], most: int) -> list[str]:
        return self._rng.sample(scope, min(len(scope), self._rng.randint(0, most)))

    def _held(self, scope: list[str], most: int) -> list[str]:
        """Choose the keys that a value names: with a hot key in scope, often only hot ones."""
        shape = self._shape
        hot = [key for key in scope if key in self._hot] if shape.holds and self._rng.random() < shape.holds else []
        return self._some(hot or scope, most)

    def _driver(self, index: int) -> list[tuple]:
        return [("scope", [], index)]

    def _more(self, ops: list[tuple]) -> list[tuple]:
        """A few more operations of one driver."""
        rng, scope = self._rng, ops[0][1]
        made: list[tuple] = []
        if self._shape.forget and rng.random() < self._shape.forget:
            made += [("forget",), ("sleep", rng.random() * self._shape.burst_s[-1])]
            scope.clear()
        for _ in range(rng.randint(1, 6)):
            if self._shape.actors and rng.random() < self._shape.actors:
                made += self._about_actors(scope)
                continue
            if self._shape.groups and rng.random() < self._shape.groups:
                made += self._about_groups(scope, ops[0][2])
                continue
            what = rng.random()
            if what < 0.2:
                key = self._object(f"p{len(self.contents)}", self._held(scope, 2), VALUE)
                made.append(("put", key))
                self.by_driver.append((self.contents[key], [key]))
                scope.append(key)
            elif what < 0.75:
                task = self._task(scope, 0)
                made.append(("submit", task.number))
                self.by_driver.append((task.args, [*task.results, *task.items]))
                if task.items and rng.random() < 0.5:  # no one else reads it, so it may wait for its reader
                    task.limit = rng.choice((0, 1, 3))
                    task.where = -1 if task.limit else task.where  # it takes no CPU that another one needs
                    made.append(("read", task.names[0], rng.choice((0, 1, 2, 100))))
                    if rng.random() < 0.3:
                        made.append(("drop", task.names[0]))
                else:
                    scope += task.names
                if rng.random() < self._shape.cancel:
                    # Half of them end only so.
                    task.duration_s = rng.choice((task.duration_s, task.duration_s if task.items else ENDLESS_S))
                    made += [("sleep", rng.random() * 0.1), ("cancel", task.number)]
                    for key in [*task.results, *task.items]:
                        self.outcome[key] = EITHER
            elif what < 0.85 and scope:
                key = rng.choice(scope)
                if key.endswith("*"):
                    made += self._read(key, scope)
                    continue
                made.append(("get", key))
                for inner in self.contents[key]:
                    if inner not in scope and self.outcome[key] == VALUE:
                        scope.append(inner)
                        self.via.setdefault(inner, key)
            elif what < 0.85 + self._shape.drop and len(scope) > 3:
                key = rng.choice(scope)
                scope.remove(key)
                made.append(("drop", key))
            else:
                made.append(("sleep", rng.random() * rng.choice(self._shape.burst_s)))
        return made

    def _read(self, key: str, scope: list[str]) -> list[tuple]:
        """Read some items of a generator; some drivers abandon it then."""
        rng = self._rng
        made: list[tuple] = [("read", key, rng.choice((1, 2, 5, 100)))]
        if rng.random() < 0.3:
            scope.remove(key)
            made.append(("drop", key))
        return made

    def _about_actors(self, scope: list[str]) -> list[tuple]:
        """Create an actor, call one several times, or kill one."""
        rng = self._rng
        there = [key for key in scope if key in self.actors]
        if not there or (len(there) < 3 and rng.random() < max(0.3, self._shape.named)):
            key = f"a{len(self.actors)}"
            self._object(key, [], VALUE)
            where = rng.randrange(64) if rng.random() < 0.7 else -1
            actor = ActorSpec(key, rng.choice((0, 1, 3, -1)), rng.random() < 0.15, where)
            self.actors[key] = actor
            if self._shape.concurrent and rng.random() < self._shape.concurrent:
                actor.concurrency = rng.choice((2, 4))
            scope.append(key)
            self.by_driver.append(([], [key]))
            if self._shape.named and rng.random() < self._shape.named:
                actor.name = rng.choice(NAMES)
                self.outcome[key] = EITHER  # the name may be taken, or unknown
                self.killed.add(key)
                return [("create" if rng.random() < 0.5 else "find", key)]
            return [("create", key)]
        actor = rng.choice(there)
        if rng.random() < self._shape.kill:
            self.killed.add(actor)
            return [("kill", actor, rng.random() < 0.4, rng.random() < 0.7)]
        made: list[tuple] = []
        for _ in range(rng.choice((1, 2, 3, 6))):
            call = self._task(scope, 1, actor)
            made.append(("submit", call.number))
            self.by_driver.append(([actor, *call.args], [*call.results, *call.items]))
            scope += call.names
            if rng.random() < 0.05:
                made += [("sleep", rng.random() * 0.05), ("cancel", call.number)]
                self.outcome.update(dict.fromkeys([*call.results, *call.items], EITHER))
        return made

    def _about_groups(self, scope: list[str], driver: int) -> list[tuple]:
        """Reserve a placement group, use it, wait for it, or remove it. A driver has one at a time: it waits for none
        while it keeps another one from its slots.
        """
        rng = self._rng
        key = self._open.get(driver)
        if key is None:
            key = f"g{len(self.groups)}"
            group = self.groups[key] = self._group(key)
            if group.fits:
                self._open[driver] = key
                return [("reserve", key)]
            used = self._use_group(scope, group)
            return [("reserve", key), *used, ("sleep", rng.random()), *self._remove_group(key)]
        group, what = self.groups[key], rng.random()
        if what < 0.15:
            return [("reserved", key)]
        if what < 0.35:
            del self._open[driver]
            return self._remove_group(key)
        return self._use_group(scope, group)

    def _remove_group(self, key: str) -> list[tuple]:
        self.removed.add(key)
        self.killed.update(one.key for one in self.actors.values() if one.group == key)
        return [("remove", key)]

    def _use_group(self, scope: list[str], group: GroupSpec) -> list[tuple]:
        """Create an actor in a placement group, or submit tasks in it."""
        rng = self._rng
        bundle = rng.randrange(-1, len(group.bundles))
        if self._shape.actors and rng.random() < 0.15:
            actor = self._object(f"a{len(self.actors)}", [], VALUE)
            self.actors[actor] = ActorSpec(actor, rng.choice((0, 1, -1)), group=group.key, bundle=bundle)
            scope.append(actor)
            self.by_driver.append(([], [actor]))
            return [("create", actor)]
        made: list[tuple] = []
        for _ in range(rng.choice((1, 2, 4))):
            task = self._task(scope, 1)
            task.group, task.bundle, task.where = group.key, bundle, -1
            task.slots = rng.choice((0.0, 0.5, 1.0)) * (min(group.bundles) if bundle < 0 else group.bundles[bundle])
            made.append(("submit", task.number))
            self.by_driver.append((task.args, [*task.results, *task.items]))
            scope += task.names
            if rng.random() < self._shape.cancel:
                made += [("sleep", rng.random() * 0.1), ("cancel", task.number)]
                self.outcome.update(dict.fromkeys([*task.results, *task.items], EITHER))
        return made

    def _group(self, key: str) -> GroupSpec:
        """A placement group that two nodes with SLOTS can hold, or that no three can."""
        rng = self._rng
        strategy = rng.choice(("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"))
        if rng.random() < 0.1:
            return GroupSpec(key, [rng.choice((0.5, 1.0))] * 5 * SLOTS, "STRICT_PACK", False)
        bundles = [rng.choice((0.5, 1.0)) for _ in range(rng.randint(1, 2))]
        if strategy == "STRICT_PACK":
            bundles = rng.choice(([0.5], [1.0], [0.5, 0.5]))
        return GroupSpec(key, bundles, strategy)

    def _make_generator(self, task: TaskSpec, inner: list[str]) -> None:
        """Have a task yield items. No other node's reader waits with a limit: its items ahead count as unread."""
        rng = self._rng
        for k in range(rng.choice((1, 3, 8, 20))):
            task.items.append(self._object(f"t{task.number}:{k}", self._some(inner, 1), VALUE))
        task.pause_s = rng.choice((0.0, 0.001, 0.02, 0.1)) * rng.random()
        task.cpus = 0.0
        task.results.append(self._object(f"t{task.number}.0", [], VALUE))

    def _task(self, scope: list[str], depth: int, actor: str = "") -> TaskSpec:
        rng = self._rng
        self._left -= 1
        shape = self._shape
        scope = [key for key in scope if not key.endswith("*")]
        few = scope[:: max(1, len(scope) // 3)]  # that many tasks want at the same time, on different nodes
        few = scope[: shape.hot] if shape.hot else few
        if shape.holds:  # most tasks pass the hot objects on unread
            few = [key for key in scope if key in self._hot]
            scope = [key for key in scope if key not in self._hot]
        share = 0.2 if shape.holds else 0.4
        task = TaskSpec(len(self.tasks) + 1, self._some(few if rng.random() < share else scope, 3))
        self.tasks[task.number] = task
        task.duration_s = rng.random() * rng.choice(shape.durations)
        if shape.pinned:
            task.where = rng.randrange(64) if rng.random() < shape.pinned else -1
        if shape.functions > 1:
            task.function = rng.randrange(shape.functions)
        task.retries = self._retries if self._retries is not None else rng.choice((0, 1, 3, -1))
        task.cpus = rng.choice(shape.cpus) if depth == 0 else 0
        task.fails = rng.random() < 0.02
        task.gap_s = rng.random() * rng.choice(shape.gaps) if shape.gaps else 0.0
        if actor:
            task.actor, task.cpus, task.retries = actor, 0, rng.choice((0, 0, 1, -1))
        inner = list(task.args)
        for key in task.args:
            inner += [one for one in self.contents[key] if one not in inner]
        for key in inner:
            if key.endswith("*") and not actor and rng.random() < 0.7:
                task.reads.append((key, rng.choice((1, 3, 100))))
                task.cpus, task.where = 0.0, -1
        for _ in range(rng.choice((0, 0, 1, 2))):
            task.puts.append(self._object(f"t{task.number}/{len(task.puts)}", self._held(inner, 1), VALUE))
        inner += task.puts
        for _ in range(rng.choice(shape.kids) if depth < shape.depth and self._left > 0 else 0):
            known = [key for key in inner if key in self.actors]
            kid = self._task(inner, depth + 1, rng.choice(known) if known and rng.random() < 0.7 else "")
            task.kids.append(kid.number)
            inner += kid.names
        if shape.streams and rng.random() < shape.streams:
            self._make_generator(task, inner)
            return task
        for k in range(rng.choice(shape.results)):
            key = self._object(f"t{task.number}.{k}", self._held(inner, 3), ERROR if task.fails else VALUE)
            self.maker[key] = task.number
            task.results.append(key)
        return task

    def _settle(self) -> None:
        """Find the objects that depend on failed or cancelled tasks."""
        for task in self.tasks.values():
            if task.actor in self.killed or task.group in self.removed:
                self.outcome.update(dict.fromkeys([*task.results, *task.items], EITHER))
        changed = True
        skipped: set[str] = set()  # what a driver may not make, because it cannot read what it needs
        while changed:
            changed = False
            for used, made in self.by_driver:
                missing = any(key in self.via and self.outcome[self.via[key]] != VALUE for key in used)
                if (missing or skipped.intersection(used)) and not skipped.issuperset(made):
                    changed = True
                    skipped.update(made)
                    self.outcome.update(dict.fromkeys(made, EITHER))
            for task in self.tasks.values():
                inputs = {self.outcome[key] for key in task.args}
                # A task that cannot read its arguments submits and puts nothing: who holds what it made cannot be made.
                worst = ERROR if task.fails or ERROR in inputs else EITHER if EITHER in inputs else VALUE
                worst = EITHER if ERROR in inputs and EITHER in inputs else worst
                kids = [self.tasks[n] for n in task.kids]
                made = [*task.results, *task.puts, *task.items, *(k for kid in kids for k in kid.results + kid.items)]
                is_cancelled = any(self.outcome[key] == EITHER for key in task.results)
                for key in made:
                    now = EITHER if is_cancelled and worst == VALUE else worst
                    now = (
                        EITHER
                        if EITHER in (now, self.outcome[key])
                        else ERROR
                        if ERROR in (now, self.outcome[key])
                        else now
                    )
                    if now != self.outcome[key]:
                        self.outcome[key], changed = now, True

    def is_of(self, made: str, key: str) -> bool:
        """Return whether a key may be that of the actor which was created as `made`."""
        name = self.actors[key].name if key in self.actors else ""
        return made == key or bool(name and self.actors[made].name == name)

    def padding(self, key: str) -> bytes:
        """The padding of an object's value."""
        return (key.encode() + b" ") * (self.sizes[key] // (len(key) + 1))
