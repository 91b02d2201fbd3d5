"""What the scheduler's state knows of a worker, a function and a call, and of workers that are alike.

Workers beside one store that can run the same functions are one group, and the placement knows groups, not workers:
it is as large as the cluster has machines, whatever runs on each, and its loads are those of machines. Which of a
group's idle workers gets a call makes no difference; the one that was idle last is warm.

Invariants: a group has members; its free slots are its idle workers. A worker that has registered another function
stays in its group until a call is to be placed, so that one that registers a thousand is moved once.

Compiled with the types in records.pxd when the package is built; ADR 5 says why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fastrt.scheduler.policy import Node, Placement, Shape
from fastrt.transitions import EVENT_BITS, KEPT, Transitions

NOBODY = -1
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
    """Workers that are alike.

    Attributes:
        key: their store, and the number of the set of their functions.
        node: what the placement knows them by.
        count: how many there are.
        top: the worker that was idle last, `NOBODY` when none waits for a call. Below it are those before it.
    """

    __slots__ = ("count", "key", "node", "top")

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.node: Node | None = None
        self.count = 0
        self.top = NOBODY


class Worker:
    """A worker.

    Attributes:
        number, address, store: as it is known.
        functions: that it can run; `functions_number` is their set's.
        group: whom it is like; None once it is lost.
        below: in its group's stack of idle workers.
        task: its call.
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
        self.below = NOBODY
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
        """What of its group it takes now, None when it is idle."""
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
        number: its own.
        function, body, strategy: as it was submitted.
        args: references that are arguments, each as often as it is one.
        nested: references within arguments.
        first, count: references of its results, one after the other.
        retries_left: how often it may be lost.
        waits_for: arguments that were not resolved when it was looked at last.
        worker: that it is with.
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
        """References of its results."""
        return (self.first,) if self.count == 1 else range(self.first, self.first + self.count)


class Groups:
    """Workers by whom they are like, and what of each group is free.

    Args:
        placement: is told of them.
        workers: all there ever were, by number.
    """

    def __init__(self, placement: Placement, workers: list[Worker]) -> None:
        self._placement = placement
        self._workers = workers
        self._groups: dict[tuple[int, int], Group] = {}
        self._sets: dict[tuple[int, str], int] = {}  # of functions: by the set's number and one more
        self._names: list[frozenset[str]] = [frozenset()]
        self._changed: dict[int, Worker] = {}  # not in the group where they belong

    def add(self, worker: Worker) -> None:
        """A worker has come."""
        self._join(worker)

    def remove(self, worker: Worker) -> None:
        """A worker has gone."""
        self._changed.pop(worker.number, None)
        self._leave(worker)

    def gain(self, worker: Worker, function: str) -> None:
        """A worker can run one more function. It is moved when it is `settle`d."""
        worker.functions[function] = None
        step = (worker.functions_number, function)
        number = self._sets.get(step)
        if number is None:
            number = self._sets[step] = len(self._names)
            self._names.append(self._names[worker.functions_number] | {function})
        worker.functions_number = number
        self._changed[worker.number] = worker

    def settle(self) -> None:
        """Move those that can run more than their group."""
        while self._changed:
            _, worker = self._changed.popitem()
            self._leave(worker)
            self._join(worker)

    def occupy(self, worker: Worker, shape: Shape) -> None:
        """An idle worker is so no more."""
        group = worker.group
        assert group is not None
        assert group.node is not None
        self._take(group, worker)
        self._placement.occupy(group.node, shape)

    def vacate(self, worker: Worker, shape: Shape) -> None:
        """A worker is idle."""
        group = worker.group
        assert group is not None
        assert group.node is not None
        worker.below, group.top = group.top, worker.number
        self._placement.vacate(group.node, shape)

    def _take(self, group: Group, worker: Worker) -> None:
        """An idle worker leaves its group's stack, most often from the top."""
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
        """The numbers of those that wait for a call, from the top."""
        found: list[int] = []
        number = group.top
        while number != NOBODY:
            assert number not in found, f"the stack of {group.key} goes round"
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
            assert (group is not None) == is_placed, f"worker {worker.number} is lost and placed, or neither"
            if group is not None:
                counts[group.key] = counts.get(group.key, 0) + 1
                waits = worker.number in idle[group.key]
                assert waits == (worker.in_use() is None), f"worker {worker.number} is wrong"
                due = (worker.store, worker.functions_number)
                assert group.key == due or worker.number in self._changed, f"worker {worker.number} is misplaced"
                assert self._names[worker.functions_number] == worker.functions.keys()
        assert counts == {key: group.count for key, group in self._groups.items()}, "groups are miscounted"
        for group in self._groups.values():
            assert group.node is not None
            assert group.node.free(_SLOT) == len(idle[group.key]), f"{group.key} has other room"
