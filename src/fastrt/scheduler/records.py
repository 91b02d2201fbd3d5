"""The scheduler's records of workers, functions and calls, and groups of workers that are interchangeable.

Workers of one store that can run the same functions form one group. The placement ranks groups, not workers: its size
is the number of machines in the cluster, and its loads are those of machines. All idle workers of a group are equally
good for a call; the one that became idle last is taken, because its caches are warm.

Invariants: a group has members; its free slots are its idle workers. A worker that has registered another function
stays in its group until the next call is placed, so a worker that registers a thousand functions is moved once.

Compiled with the types in records.pxd when the package is built; ADR 5 says why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fastrt.scheduler.policy import Node, Placement, Shape
from fastrt.transitions import EVENT_BITS, KEPT, Transitions

ABSENT = -1
_SLOT = "slot"
SLOT_ONLY: Shape = ((_SLOT, 1.0),)

WORKER = Transitions(
    "worker",
    {
        "IDLE": {"call": "BUSY", "ready": "IDLE", "lose": "LOST"},
        "BUSY": {"ready": "IDLE", "refuse": "REFUSING", "lose": "LOST"},
        "REFUSING": {"ready": "IDLE", "lose": "LOST"},  # it rejected a call, and gets no other before it is ready
        "LOST": {},
    },
)
CALL = Transitions(
    "call",
    {
        # For an argument, or for the next look at a call whose arguments are all resolved.
        "WAITING": {"queue": "QUEUED", "send": "SENT", "argument_lost": "WAITING", "fail": "FAILED"},
        "QUEUED": {"send": "SENT", "argument_lost": "WAITING"},  # in the backlog
        "SENT": {"take": "TAKEN", "refuse": "WAITING", "lose": "WAITING", "end": "ENDED"},
        "TAKEN": {"take": "TAKEN", "refuse": "WAITING", "lose": "WAITING", "end": "ENDED"},  # the worker confirmed it
        "ENDED": {},
        "FAILED": {},
    },
)
# The tables as compiled code reads them.
_BITS, _KEPT = EVENT_BITS, KEPT
_WORKER_STEPS, _WORKER_TARGETS = WORKER.steps, WORKER.targets
_CALL_STEPS, _CALL_TARGETS = CALL.steps, CALL.targets
_REFUSING, _LOST = WORKER.states.index("REFUSING"), WORKER.states.index("LOST")


class Group:
    """A group of interchangeable workers.

    Attributes:
        key: their store, and the number of the set of their functions.
        node: the group's node in the placement.
        count: how many workers the group has.
        top: the worker that became idle last, `ABSENT` when none is idle; the others follow by `Worker.below`.
    """

    __slots__ = ("count", "key", "node", "top")

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.node: Node | None = None
        self.count = 0
        self.top = ABSENT


class Worker:
    """A registered worker.

    Attributes:
        number, address, store: its number, its address and its store.
        functions: the functions that it can run; `functions_number` is the number of that set.
        group: its group; None once it is lost.
        below: the next worker in the group's stack of idle workers.
        task: the call that it runs.
        state: the number of its state in `WORKER`.
        moves: its last moves there.
    """

    __slots__ = (
        "address", "below", "functions", "functions_number", "group", "moves", "number", "state", "store", "task",
    )  # fmt: skip

    def __init__(self, number: int, address: str, store: int) -> None:
        self.number = number
        self.address = address
        self.store = store
        self.functions: dict[str, None] = {}
        self.functions_number = 0
        self.group: Group | None = None
        self.below = ABSENT
        self.task: Task | None = None
        self.state = 0
        self.moves = 0

    def move(self, event: int) -> None:
        """Move it to its next state.

        Args:
            event: the number of an event of `WORKER`.
        Raises:
            IllegalMoveError: the state does not accept the event.
        """
        number = _WORKER_STEPS[self.state << _BITS | event]
        if not number:
            raise WORKER.illegal(WORKER.states[self.state], WORKER.events[event], self.moves, self.number)
        self.state = _WORKER_TARGETS[number]
        self.moves = (self.moves & _KEPT) << 8 | number

    def in_use(self) -> Shape | None:
        """The resources of its group that it uses now, None when it is idle."""
        if self.task is not None:
            return self.task.function.shape
        return SLOT_ONLY if self.state == _REFUSING else None


class Function:
    """A function, and the workers that can run it."""

    __slots__ = ("name", "result_count", "shape", "workers")

    def __init__(self, name: str, result_count: int) -> None:
        self.name = name
        self.result_count = result_count
        self.shape: Shape = ((name, 0.0), (_SLOT, 1.0))
        self.workers: dict[int, None] = {}


class Task:
    """A call.

    Attributes:
        number: its number.
        function, body, strategy: as submitted.
        args: references that are arguments, repeated as often as they are passed.
        nested: references inside of arguments.
        first, count: the first reference of its results, and how many there are; they are consecutive.
        retries_left: how many more workers it may lose.
        waits_for: arguments that were not resolved at the last check.
        worker: the worker that has it.
        sent: whether a worker got its message, which counts its references; a worker that rejects it gives it back.
        state: the number of its state in `CALL`.
        moves: its last moves there.
    """

    __slots__ = (
        "args", "body", "count", "first", "function", "moves", "nested", "number", "retries_left", "sent", "state",
        "strategy", "waits_for", "worker",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        function: Function,
        body: bytes,
        args: tuple[int, ...],
        nested: tuple[int, ...],
        first: int,
        count: int,
        strategy: str,
        retries_left: int,
    ) -> None:
        self.number = number
        self.function = function
        self.body = body
        self.args = args
        self.nested = nested
        self.first = first
        self.count = count
        self.strategy = strategy
        self.retries_left = retries_left
        self.waits_for: Collection[int] = ()
        self.worker: Worker | None = None
        self.sent = False
        self.state = 0
        self.moves = 0

    def move(self, event: int) -> None:
        """Move it to its next state.

        Args:
            event: the number of an event of `CALL`.
        Raises:
            IllegalMoveError: the state does not accept the event.
        """
        number = _CALL_STEPS[self.state << _BITS | event]
        if not number:
            raise CALL.illegal(CALL.states[self.state], CALL.events[event], self.moves, self.number)
        self.state = _CALL_TARGETS[number]
        self.moves = (self.moves & _KEPT) << 8 | number

    def results(self) -> Sequence[int]:
        """The references of its results."""
        return (self.first,) if self.count == 1 else range(self.first, self.first + self.count)


class Groups:
    """Workers by group, and the idle workers of each group.

    Args:
        placement: gets one node for each group.
        workers: all workers ever registered, by number.
    """

    def __init__(self, placement: Placement, workers: list[Worker]) -> None:
        self._placement = placement
        self._workers = workers
        self._groups: dict[tuple[int, int], Group] = {}
        self._sets: dict[
            tuple[int, str], int
        ] = {}  # number of a set of functions, by the smaller set's number and the function added
        self._names: list[frozenset[str]] = [frozenset()]
        self._changed: dict[int, Worker] = {}  # workers to move to another group

    def add(self, worker: Worker) -> None:
        """Add a new worker to its group."""
        self._join(worker)

    def remove(self, worker: Worker) -> None:
        """Remove a lost worker."""
        self._changed.pop(worker.number, None)
        self._leave(worker)

    def gain(self, worker: Worker, function: str) -> None:
        """Note that a worker can run one more function; `settle` moves it to its new group."""
        worker.functions[function] = None
        step = (worker.functions_number, function)
        number = self._sets.get(step)
        if number is None:
            number = self._sets[step] = len(self._names)
            self._names.append(self._names[worker.functions_number] | {function})
        worker.functions_number = number
        self._changed[worker.number] = worker

    def settle(self) -> None:
        """Move the workers that can run more functions than their group."""
        while self._changed:
            _, worker = self._changed.popitem()
            self._leave(worker)
            self._join(worker)

    def occupy(self, worker: Worker, shape: Shape) -> None:
        """Take an idle worker out of its group's stack."""
        group = worker.group
        assert group is not None
        assert group.node is not None
        self._take(group, worker)
        self._placement.occupy(group.node, shape)

    def vacate(self, worker: Worker, shape: Shape) -> None:
        """Put a worker onto its group's stack of idle workers."""
        group = worker.group
        assert group is not None
        assert group.node is not None
        worker.below, group.top = group.top, worker.number
        self._placement.vacate(group.node, shape)

    def _take(self, group: Group, worker: Worker) -> None:
        """Unlink an idle worker from its group's stack, where it most often is the top."""
        if group.top == worker.number:
            group.top = worker.below
            return
        above = self._workers[group.top]
        while above.below != worker.number:
            above = self._workers[above.below]
        above.below = worker.below

    def _join(self, worker: Worker) -> None:
        key = (worker.store, worker.functions_number)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
            names = self._names[worker.functions_number]
            group.node = self._placement.add(group, dict(SLOT_ONLY), site=worker.store, kinds=names)
        else:
            self._placement.gain(group, dict(SLOT_ONLY))
        worker.group = group
        group.count += 1
        used = worker.in_use()
        worker.below, group.top = group.top, worker.number
        if used is not None:
            self.occupy(worker, used)

    def _leave(self, worker: Worker) -> None:
        group = worker.group
        assert group is not None
        used = worker.in_use()
        if used is not None:
            self.vacate(worker, used)
        self._take(group, worker)
        worker.group = None
        group.count -= 1
        if group.count:
            self._placement.gain(group, {_SLOT: -1.0})
        else:
            self._placement.remove(group)
            del self._groups[group.key]

    def _idle(self, group: Group) -> list[int]:
        """The numbers of the idle workers, from the top."""
        found: list[int] = []
        number = group.top
        while number != ABSENT:
            assert number not in found, f"the stack of {group.key} is a ring"
            found.append(number)
            number = self._workers[number].below
        return found

    def check_invariants(self, workers: Sequence[Worker]) -> None:
        """Raise AssertionError when groups and workers contradict each other."""
        counts: dict[tuple[int, int], int] = {}
        idle = {key: self._idle(group) for key, group in self._groups.items()}
        for worker in workers:
            group = worker.group
            is_placed = worker.state != _LOST
            assert (group is not None) == is_placed, f"worker {worker.number} is both lost and in a group, or neither"
            if group is not None:
                counts[group.key] = counts.get(group.key, 0) + 1
                waits = worker.number in idle[group.key]
                assert waits == (worker.in_use() is None), (
                    f"worker {worker.number} is idle and not in the stack, or the reverse"
                )
                due = (worker.store, worker.functions_number)
                assert group.key == due or worker.number in self._changed, (
                    f"worker {worker.number} is in the wrong group"
                )
                assert self._names[worker.functions_number] == worker.functions.keys()
        assert counts == {key: group.count for key, group in self._groups.items()}, "the counts of groups are wrong"
        for group in self._groups.values():
            assert group.node is not None
            assert group.node.free(_SLOT) == len(idle[group.key]), f"free slots of {group.key} are not its idle workers"
