"""Random programs: what drivers and tasks do, and what every object must be.

A program is fixed by its seed before anything runs. Each object has a key: `p3` was put by a driver, `t7.0` is a result
of task 7, and `t7/1` was put by task 7. The value of an object is (key, padding, references); the keys of its
references are known too. So every reader can check what it reads, also a task that runs for the second time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SIZES = (0, 0, 300, 5_000, 20_000, 50_000, 50_000)  # of the padding; large ones stay with their node
LARGE = (0, 300, 20_000, 50_000, 50_000, 50_000)
ENDLESS_S = 1e6  # of a task that ends only by its cancellation
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


@dataclass
class TaskSpec:
    """A task.

    Attributes:
        args: keys of its arguments.
        kids: numbers of the tasks that it submits.
        puts: keys of the objects that it puts.
        results: keys of its results.
        retries: how many further runs are allowed; -1: any number.
        cpus: what it demands; 0: nothing.
        where: which node should run it; -1: any.
        function: which function it runs.
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
        self.tasks: dict[int, TaskSpec] = {}
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
        self._settle()

    # ---- making ----

    def _object(self, key: str, holds: list[str], outcome: str) -> str:
        self.contents[key], self.sizes[key] = holds, self._rng.choice(self._shape.sizes)
        self.outcome[key] = outcome
        return key

    def _some(self, scope: list[str], most: int) -> list[str]:
        return self._rng.sample(scope, min(len(scope), self._rng.randint(0, most)))

    def _driver(self, index: int) -> list[tuple]:
        return [("scope", [])]

    def _more(self, ops: list[tuple]) -> list[tuple]:
        """A few more operations of one driver."""
        rng, scope = self._rng, ops[0][1]
        made: list[tuple] = []
        if self._shape.forget and rng.random() < self._shape.forget:
            made += [("forget",), ("sleep", rng.random() * self._shape.burst_s[-1])]
            scope.clear()
        for _ in range(rng.randint(1, 6)):
            what = rng.random()
            if what < 0.2:
                key = self._object(f"p{len(self.contents)}", self._some(scope, 2), VALUE)
                made.append(("put", key))
                self.by_driver.append((self.contents[key], [key]))
                scope.append(key)
            elif what < 0.75:
                task = self._task(scope, 0)
                made.append(("submit", task.number))
                self.by_driver.append((task.args, task.results))
                scope += task.results
                if rng.random() < self._shape.cancel:
                    # Half of them end only so.
                    task.duration_s = rng.choice((task.duration_s, ENDLESS_S))
                    made += [("sleep", rng.random() * 0.1), ("cancel", task.number)]
                    for key in task.results:
                        self.outcome[key] = EITHER
            elif what < 0.85 and scope:
                key = rng.choice(scope)
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

    def _task(self, scope: list[str], depth: int) -> TaskSpec:
        rng = self._rng
        self._left -= 1
        shape = self._shape
        few = scope[:: max(1, len(scope) // 3)]  # that many tasks want at the same time, on different nodes
        few = scope[: shape.hot] if shape.hot else few
        task = TaskSpec(len(self.tasks) + 1, self._some(few if rng.random() < 0.4 else scope, 3))
        self.tasks[task.number] = task
        task.duration_s = rng.random() * rng.choice(shape.durations)
        if shape.pinned:
            task.where = rng.randrange(64) if rng.random() < shape.pinned else -1
        if shape.functions > 1:
            task.function = rng.randrange(shape.functions)
        task.retries = self._retries if self._retries is not None else rng.choice((0, 1, 3, -1))
        task.cpus = rng.choice((0, 0, 0, 0.5, 1)) if depth == 0 else 0
        task.fails = rng.random() < 0.02
        inner = list(task.args)
        for key in task.args:
            inner += [one for one in self.contents[key] if one not in inner]
        for _ in range(rng.choice((0, 0, 1, 2))):
            task.puts.append(self._object(f"t{task.number}/{len(task.puts)}", self._some(inner, 1), VALUE))
        inner += task.puts
        for _ in range(rng.choice(shape.kids) if depth < 2 and self._left > 0 else 0):
            kid = self._task(inner, depth + 1)
            task.kids.append(kid.number)
            inner += kid.results
        for k in range(rng.choice(shape.results)):
            key = self._object(f"t{task.number}.{k}", self._some(inner, 3), ERROR if task.fails else VALUE)
            self.maker[key] = task.number
            task.results.append(key)
        return task

    def _settle(self) -> None:
        """Find the objects that depend on failed or cancelled tasks."""
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
                made = [*task.results, *task.puts, *(k for n in task.kids for k in self.tasks[n].results)]
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

    def padding(self, key: str) -> bytes:
        """The padding of an object's value."""
        return (key.encode() + b" ") * (self.sizes[key] // (len(key) + 1))
