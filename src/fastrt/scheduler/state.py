"""The scheduler's decisions: a pure state machine.

`handle(event)` takes one fact and returns the effects that follow from it. It has no socket, clock, thread or log, so
one test can play a thousand nodes in any order. A call of the protocol is answered at once; a rejected call changes
nothing.

An accepted call waits until its arguments are resolved, then for an idle worker that can run it, and is then sent to
that worker. If the worker is lost the call runs on another one, a limited number of times. Its arguments, and the
references inside of them, are held until it has ended. Its message counts each reference in it once, results included;
the worker drops these counts when it unpacks the message, so a message that is sent again is counted again.

Workers, calls and objects move by the tables `WORKER` and `CALL` (records.py) and `OBJECT` (objects.py).

Invariants: those of the objects and of the ranking; a worker has one call at most; every waiting call is in the
backlog, or waits for an argument that is not resolved; a result without a producer is not pending.

Compiled with the types in state.pxd when the package is built; ADR 5 says why.

Source: the 15 methods of early Ray's scheduler. Where Ray's ended the process, this one rejects the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastrt.errors import ReferenceCountError
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Answer, Code, Effect, Event, Failure, FunctionView, Info, Refused
from fastrt.scheduler.objects import ABSENT, Entry, Objects
from fastrt.scheduler.policy import Backlog, Demand, Placement
from fastrt.scheduler.records import CALL, SLOT_ONLY, WORKER, Function, Group, Groups, Task, Worker

# SchedulerInfo shows so many references by their position, the newest: 2.6 MB at most, below the 4 MiB that clients of
# gRPC take. Older ones that are alive are listed beside.
INFO_REFS_MAX = 1 << 17
_CODES = {"unknown": Code.NOT_FOUND, "circular": Code.INVALID_ARGUMENT}
# Numbers of states and events of the two tables.
_IDLE, _BUSY, _REFUSING, _LOST = map(WORKER.states.index, ("IDLE", "BUSY", "REFUSING", "LOST"))
_WORKER_CALL, _READY, _WORKER_REFUSE, _WORKER_LOSE = map(WORKER.events.index, ("call", "ready", "refuse", "lose"))
_QUEUED, _SENT, _TAKEN = map(CALL.states.index, ("QUEUED", "SENT", "TAKEN"))
_QUEUE, _SEND, _TAKE, _END = map(CALL.events.index, ("queue", "send", "take", "end"))
_REFUSE, _LOSE, _FAIL, _ARGUMENT_LOST = map(CALL.events.index, ("refuse", "lose", "fail", "argument_lost"))


@dataclass(frozen=True)
class Settings:
    """The settings of a state machine.

    Attributes:
        max_retries: how often a call runs again after its worker was lost.
        tasks_max: the most calls that wait or run at a time.
        objects_max: the most references alive at a time.
    """

    max_retries: int = 3
    tasks_max: int = 4_000_000
    objects_max: int = 64_000_000


class SchedulerState:
    """The state machine. Not thread-safe: one shell owns it.

    Args:
        settings: limits; the defaults of `Settings` when None.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._max_retries = self.settings.max_retries
        self._tasks_max, self._objects_max = self.settings.tasks_max, self.settings.objects_max
        self._effects: list[Effect] = []
        # Tasks to check again after the event itself, never from inside of it: nothing recurses.
        self._resolved: deque[int] = deque()
        self._failing: deque[tuple[int, str]] = deque()
        self.objects = Objects(self._effects, self._resolved, self._failing)
        self.placement = Placement()
        self.workers: list[Worker] = []
        self.groups = Groups(self.placement, self.workers)
        self.backlog = Backlog()
        self.stores: list[str | None] = []  # addresses; None when lost
        self._lost_stores: set[int] = set()
        self.store_numbers: dict[str, int] = {}
        self.worker_numbers: dict[str, int] = {}
        self.functions: dict[str, Function] = {}
        self.tasks: dict[int, Task] = {}
        self.next_task = 0
        self._handlers: dict[type, Callable[[Any], Any]] = {
            ev.RegisterObjStore: self._on_register_store,
            ev.RegisterWorker: self._on_register_worker,
            ev.RegisterFunction: self._on_register_function,
            ev.PushObj: self._on_push,
            ev.RequestObj: self._on_request,
            ev.AliasObjRefs: lambda e: self.objects.alias(e.alias, e.target),
            ev.AddContained: lambda e: self.objects.refs.contain(e.ref, e.contained),
            ev.SchedulerInfo: lambda e: self._info(),
            ev.WorkerLost: self._on_worker_lost,
            ev.ObjStoreLost: self._on_store_lost,
            ev.InvokeRefused: self._on_invoke_refused,
            ev.DeliveryFailed: lambda e: self.objects.delivery_failed(e.ref, e.source, e.target, e.reason),
        }

    def handle(self, event: Event) -> list[Effect]:
        """Take an event and return its effects, in order; the answer to its caller is the first."""
        value: Any
        try:
            value = self._take(event)
        except Refused as refused:
            value = refused.failure
        except ReferenceCountError as error:
            value = Failure(_CODES.get(error.kind, Code.FAILED_PRECONDITION), str(error))
        while self._resolved or self._failing:
            while self._failing:
                self._fail(*self._failing.popleft())
            if self._resolved:
                self._arg_resolved(self._resolved.popleft())
        effects: list[Effect] = []
        if isinstance(event, ev.Call):
            asked = event
            effects.append(Answer(asked.call, value))
        if self._effects:
            effects += self._effects
            self._effects.clear()
        return effects

    def _take(self, event: Event) -> Any:
        """Handle an event and return its answer. The most frequent events are tested first, without the table."""
        if isinstance(event, ev.DecrementRefs):
            return self._on_decrement(event)
        if isinstance(event, ev.ObjReady):
            return self._on_ready(event)
        if isinstance(event, ev.IncrementRefs):
            return self._on_increment(event)
        if isinstance(event, ev.RemoteCall):
            return self._on_remote_call(event)
        if isinstance(event, ev.InvokeTaken):
            return self._on_invoke_taken(event)
        if isinstance(event, ev.WorkerReady):
            return self._on_worker_ready(event)
        return self._handlers[type(event)](event)

    def peers(self) -> tuple[dict[int, str], dict[int, str]]:
        """Stores and workers that are not lost, with their addresses."""
        stores = {number: address for number, address in enumerate(self.stores) if address is not None}
        return stores, {number: worker.address for number, worker in enumerate(self.workers) if worker.state != _LOST}

    def unfinished(self) -> list[Effect]:
        """Effects that were not confirmed, for a new shell to carry out again."""
        found: list[Effect] = []
        for ref, coming in sorted(self.objects.incoming.items()):
            for target, delivery in coming.items():
                found.append(ev.DeliverObj(ref, delivery.source, target))
        for number, task in self.tasks.items():
            if task.state == _SENT:
                assert task.worker is not None
                found.append(ev.InvokeCall(task.worker.number, number, task.body, task.results()))
        return found

    def task_count(self) -> int:
        """How many calls wait or run."""
        return len(self.tasks)

    # Stores, workers and functions

    def _on_register_store(self, event: ev.RegisterObjStore) -> int:
        known = self.store_numbers.get(event.address)
        if known is not None:
            self._on_store_lost(ev.ObjStoreLost(known))
        return self.add_store(event.address)

    def _on_register_worker(self, event: ev.RegisterWorker) -> int:
        store = self.store_numbers.get(event.store_address)
        if store is None:
            raise Refused(
                Code.NOT_FOUND,
                f"No object store is registered at objstore_address {event.store_address!r}. Register the worker's "
                "store first, under the same address.",
            )
        known = self.worker_numbers.get(event.address)
        if known is not None:
            self._on_worker_lost(ev.WorkerLost(known))
        return self.add_worker(event.address, store).number

    def add_store(self, address: str | None) -> int:
        """Add a store; its address is None if it is lost already."""
        store = len(self.stores)
        self.stores.append(address)
        if address is None:
            self._lost_stores.add(store)
        else:
            self.store_numbers[address] = store
        return store

    def add_worker(self, address: str, store: int) -> Worker:
        """Add a worker that has registered no function yet."""
        worker = Worker(len(self.workers), address, store)
        self.workers.append(worker)
        self.worker_numbers[address] = worker.number
        self.groups.add(worker)
        return worker

    def _on_register_function(self, event: ev.RegisterFunction) -> None:
        worker = self._worker(event.worker)
        function = self.functions.get(event.name)
        if function is None:
            function = self.make_function(event.name, event.result_count)
        function.result_count = event.result_count
        function.workers[event.worker] = None
        if event.name not in worker.functions:
            self.groups.gain(worker, event.name)
            if self.backlog:
                self._feed(worker)

    def make_function(self, name: str, result_count: int) -> Function:
        """Add a function that no worker can run yet."""
        function = self.functions[name] = Function(name, result_count)
        return function

    def _on_worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self._worker(event.worker)
        if worker.state == _REFUSING:
            self.groups.vacate(worker, SLOT_ONLY)
        worker.move(_READY)
        task = worker.task
        if task is not None:
            task.move(_END)
            self._end(task)
            for ref in range(task.first, task.first + task.count):
                self.objects.make(ref, ABSENT, worker.store)
        if self.backlog:
            self._feed(worker)

    def _on_worker_lost(self, event: ev.WorkerLost) -> None:
        number = event.worker
        worker = self.workers[number] if number < len(self.workers) else None
        if worker is None or worker.state == _LOST:
            return
        self.groups.remove(worker)
        worker.move(_WORKER_LOSE)
        if self.worker_numbers.get(worker.address) == number:
            del self.worker_numbers[worker.address]
        for name in worker.functions:
            del self.functions[name].workers[number]
        task, worker.task = worker.task, None
        if task is not None:
            task.move(_LOSE)
            self._run_again(task, f"Worker {number} at {worker.address}, which ran it, is gone.")
        self.objects.forget_worker(number)
        self._effects.append(ev.ForgetWorker(number))

    def _on_store_lost(self, event: ev.ObjStoreLost) -> None:
        store = event.store
        address = self.stores[store] if store < len(self.stores) else None
        if address is None:
            return
        self.stores[store] = None
        self._lost_stores.add(store)
        del self.store_numbers[address]
        for number, worker in enumerate(self.workers):
            if worker.state != _LOST and worker.store == store:
                self._on_worker_lost(ev.WorkerLost(number))
        self.objects.remove_store(store)
        self._effects.append(ev.ForgetStore(store))

    # Calls

    def _on_remote_call(self, event: ev.RemoteCall) -> Sequence[int]:
        function = self.functions.get(event.name)
        if function is None:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"No worker has registered a function named {event.name!r}. Register it first, or correct the name.",
            )
        objects, refs = self.objects, self.objects.refs
        self._check_room(function.result_count, 1)
        args, nested = tuple(event.args), tuple(event.nested)
        waits_for: dict[int, None] | None = None
        entries: list[Entry] = []  # of the resolved arguments
        for ref in args:
            entry = objects.resolve(ref)
            if entry is not None:
                entries.append(entry)
                continue
            why = objects.why_lost(ref)
            if why is not None:
                raise Refused(Code.DATA_LOSS, f"Argument {ref} of {event.name!r} is lost. {why}")
            if waits_for is None:
                waits_for = {}
            waits_for[ref] = None
        for ref in nested:
            refs.end(ref)  # raises for a reference that is not alive
        for ref in args:
            refs.hold(ref)
        for ref in nested:
            refs.hold(ref)
        count = function.result_count
        first = objects.add(count, 2) if count else 0
        retries = self._max_retries if event.max_retries is None else event.max_retries
        number = self.next_task
        self.next_task = number + 1
        task = Task(number, function, event.body, args, nested, first, count, event.strategy, retries)
        self.tasks[number] = task
        if waits_for is not None:
            task.waits_for = sorted(waits_for)
            for ref in task.waits_for:
                objects.wait_for(ref, number)
        else:
            self._place(task, entries)
        return task.results()

    def _place(self, task: Task, entries: list[Entry]) -> None:
        """Send a call whose arguments are resolved to an idle worker, or put it into the backlog."""
        shape = task.function.shape
        places = self.objects.places(entries) if entries else ()
        self.groups.settle()
        node = None
        if not self.backlog.blocks(shape):
            node = self.placement.choose(shape, places, task.strategy, None)
        if node is None:
            task.move(_QUEUE)
            self.backlog.add(task.number, Demand(shape, places, task.strategy))
        else:
            group: Group = node.id  # type: ignore[assignment]
            worker = self.workers[group.top]
            self.groups.occupy(worker, shape)
            self._invoke(task, worker, entries)

    def entries_of(self, task: Task) -> list[Entry]:
        """The entries of a task's resolved arguments."""
        entries: list[Entry] = []
        for ref in task.args:
            entry = self.objects.resolve(ref)
            if entry is not None:
                entries.append(entry)
        return entries

    def _feed(self, worker: Worker) -> None:
        """Send a waiting call to a worker that may be idle or can run more functions now."""
        self.groups.settle()
        while worker.state == _IDLE and self.backlog:
            assert worker.group is not None
            assert worker.group.node is not None
            found = self.backlog.take(worker.group.node)
            if found is None:
                return
            task = self.tasks[int(found[0])]  # type: ignore[call-overload]
            self.groups.occupy(worker, task.function.shape)
            self._invoke(task, worker, self.entries_of(task))

    def _invoke(self, task: Task, worker: Worker, entries: list[Entry]) -> None:
        """Send a call to a worker whose slot was taken for it."""
        objects = self.objects
        if len(entries) != len(task.args):  # an argument was lost while the call waited
            task.move(_ARGUMENT_LOST)
            self.groups.vacate(worker, task.function.shape)
            self._failing.append((task.number, self._why_lost(task)))
            return
        if task.sent:
            refs = objects.refs
            refs.increment([ref for ref in (*task.args, *task.nested, *task.results()) if refs.is_alive(ref)])
        task.move(_SEND)
        worker.move(_WORKER_CALL)
        task.sent, task.worker, worker.task = True, worker, task
        for ref in range(task.first, task.first + task.count):
            objects.make(ref, worker.number, worker.store)
        for i in range(len(entries)):
            objects.bring(task.args[i], entries[i], worker.store, worker.number)
        self._effects.append(ev.InvokeCall(worker.number, task.number, task.body, task.results()))

    def _why_lost(self, task: Task) -> str:
        lost = next(ref for ref in task.args if not self.objects.is_resolved(ref))
        return self.objects.why_lost(lost) or f"Argument {lost} is lost."

    def _on_invoke_taken(self, event: ev.InvokeTaken) -> None:
        task = self.tasks.get(event.task)
        if task is not None and task.worker is not None and task.worker.number == event.worker:
            task.move(_TAKE)

    def _on_invoke_refused(self, event: ev.InvokeRefused) -> None:
        worker = self.workers[event.worker] if event.worker < len(self.workers) else None
        task = worker.task if worker is not None else None
        if worker is None or task is None or task.number != event.task:
            return
        self.groups.vacate(worker, task.function.shape)
        worker.move(_WORKER_REFUSE)
        worker.task = None
        self.groups.occupy(worker, SLOT_ONLY)
        task.move(_REFUSE)
        task.sent = False
        self._run_again(task, f"Worker {event.worker} refused it: {event.reason}")

    def _run_again(self, task: Task, reason: str) -> None:
        """Let a call that lost its worker run again, or fail it when it has no retries left."""
        number = task.number
        task.worker = None
        for ref in task.results():
            self.objects.unmake(ref)
        if not task.retries_left:
            self._failing.append((number, f"It was given up. {reason}"))
            return
        task.retries_left -= 1
        task.waits_for = sorted({ref for ref in task.args if not self.objects.is_resolved(ref)})
        for ref in task.waits_for:
            why = self.objects.why_lost(ref)
            if why is not None:
                self._failing.append((number, f"Its argument {ref} is lost. {why}"))
                return
            self.objects.wait_for(ref, number)
        if not task.waits_for:
            self._resolved.append(number)

    def _arg_resolved(self, number: int) -> None:
        task = self.tasks.get(number)
        if task is None or task.worker is not None or number in self.backlog:
            return
        task.waits_for = [ref for ref in task.waits_for if not self.objects.is_resolved(ref)]
        if not task.waits_for:
            self._place(task, self.entries_of(task))

    def _fail(self, number: int, reason: str) -> None:
        """Fail a call that will never run; its results have no producer any more."""
        task = self.tasks.get(number)
        if task is None or task.worker is not None:
            return
        unsent = not task.sent
        task.move(_FAIL)
        self._end(task)
        words = f"The call of {task.function.name!r} that was to make it will not run. {reason}"
        for ref in task.results():
            self.objects.abandon(ref, words)
        if unsent:  # drop the counts of a message that no worker unpacks
            for ref in (*task.args, *task.nested, *task.results()):
                try:
                    self.objects.drop(self.objects.refs.decrement((ref,)))
                except ReferenceCountError:
                    continue  # the caller did not count the references it sent

    def _end(self, task: Task) -> None:
        """Remove a call that has ended or failed, and release its arguments."""
        objects = self.objects
        del self.tasks[task.number]
        worker = task.worker
        if worker is not None:
            task.worker = worker.task = None
            self.groups.vacate(worker, task.function.shape)
        held = task.args + task.nested if task.nested else task.args
        for ref in held:
            freed = objects.refs.release(ref)
            if freed:
                objects.drop(freed)

    # Objects

    def _on_increment(self, event: ev.IncrementRefs) -> None:
        self.objects.refs.increment(event.refs)

    def _on_decrement(self, event: ev.DecrementRefs) -> None:
        freed = self.objects.refs.decrement(event.refs)
        if freed:
            self.objects.drop(freed)

    def _on_push(self, event: ev.PushObj) -> int:
        worker = self._worker(event.worker)
        self._check_room(1, 0)
        return self.objects.add_push(event.worker, worker.store)

    def _on_request(self, event: ev.RequestObj) -> None:
        worker = self._worker(event.worker)
        why = self.objects.why_lost(event.ref) if self.objects.refs.is_alive(event.ref) else None
        if why is not None:
            raise Refused(Code.DATA_LOSS, f"Object {event.ref} is lost. {why}")
        self.objects.refs.end(event.ref)  # raises for a reference that is not alive
        self.objects.request(event.ref, event.worker, worker.store)

    def _on_ready(self, event: ev.ObjReady) -> None:
        if event.store >= len(self.stores) or (self._lost_stores and event.store in self._lost_stores):
            raise Refused(
                Code.NOT_FOUND,
                f"Object store {event.store} is not registered (objstoreid). Register it, and use the number it gets.",
            )
        self.objects.ready(event.ref, event.store, event.nbytes)

    def _info(self) -> Info:
        waiting = [(t.body, t.results()) for t in self.tasks.values() if t.worker is None]
        functions = {name: FunctionView(sorted(f.workers), f.result_count) for name, f in self.functions.items()}
        idle = [n for n, w in enumerate(self.workers) if w.state == _IDLE]
        refs = self.objects.refs
        first = max(0, len(refs) - INFO_REFS_MAX)
        older = refs.alive_before(first) if first else []
        return Info(waiting, functions, idle, refs.targets(first), refs.counts(first), first, older)

    def _worker(self, number: int) -> Worker:
        worker = self.workers[number] if number < len(self.workers) else None
        if worker is None or worker.state == _LOST:
            state = (
                "was lost, or replaced by another worker at its address" if worker is not None else "is not registered"
            )
            raise Refused(Code.NOT_FOUND, f"Worker {number} {state} (workerid). Register it, and use the new number.")
        return worker

    def _check_room(self, objects: int, tasks: int) -> None:
        if self.objects.refs.alive_count() + objects > self._objects_max:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"{self._objects_max} references are alive, as many as are allowed (objects_max). Drop some.",
            )
        if len(self.tasks) + tasks > self._tasks_max:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"{self._tasks_max} calls wait or run, as many as are allowed (tasks_max). Wait for some.",
            )

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        self.objects.check_invariants()
        self.placement.check_invariants()
        self.groups.check_invariants(self.workers)
        for number, worker in enumerate(self.workers):
            assert (worker.task is not None) == (worker.state == _BUSY), f"worker {number} has the wrong state"
            if worker.state != _LOST:
                assert self.stores[worker.store] is not None, f"worker {number} is at a lost store"
            if worker.task is not None:
                assert worker.task.worker is worker, f"worker {number} and its call disagree"
        for number, task in self.tasks.items():
            assert task.number == number, f"call {number} is listed under the wrong number"
            assert (task.worker is not None) == (task.state in (_SENT, _TAKEN)), f"call {number} has the wrong state"
            assert (number in self.backlog) == (task.state == _QUEUED), f"call {number} has the wrong state"
            if task.worker is not None:
                assert task.worker.task is task, f"call {number} and its worker disagree"
                continue
            waiting = [ref for ref in task.args if not self.objects.is_resolved(ref)]
            assert number in self.backlog or waiting, f"call {number} waits for nothing"
            hopeless = [ref for ref in task.waits_for if self.objects.why_lost(ref) is not None]
            assert number in self.backlog or not hopeless, f"call {number} waits for {hopeless}, which are lost"
            for ref in (*task.args, *task.nested):
                assert self.objects.refs.is_alive(ref), f"argument {ref} of call {number} is deallocated"
        for waits in self.backlog:
            assert waits in self.tasks, f"call {waits} is in the backlog after its end"
