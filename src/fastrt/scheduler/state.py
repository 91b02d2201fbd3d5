"""The scheduler's decisions: a pure state machine.

`handle(event)` takes one fact and returns the orders that follow from it. There is no socket, clock, thread or log
inside, so one test can play a thousand nodes in any order. A call of the protocol is answered at once; a refused one
has changed nothing.

A call that was accepted waits until its arguments are resolved, then for a worker that can run it and is idle, and is
then that worker's. If the worker is lost it runs again elsewhere, a limited number of times. Its arguments, and the
references inside them, are held until it has ended; the counts that its message carries (one for each reference in
it, results included) are the worker's to drop when it unpacks it, so a message that is sent again is counted again.

Invariants: those of the objects and of the ranking; a worker has one call at most; every waiting call is in the
backlog, or waits for an argument that is not resolved; a result that nobody is to make is not pending.

Source: early Ray's scheduler, whose 15 methods these are. Where it ended the process, this one refuses the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastrt.errors import ReferenceCountError
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Answer, Code, Effect, Event, Failure, FunctionView, Info, Refused
from fastrt.scheduler.objects import Objects
from fastrt.scheduler.policy import Backlog, Demand, Placement, Shape

_CODES = {"unknown": Code.NOT_FOUND, "circular": Code.INVALID_ARGUMENT}
_SLOT = "slot"
SLOT_ONLY = ((_SLOT, 1.0),)


@dataclass(frozen=True)
class Settings:
    """What the state machine is told once.

    Attributes:
        max_retries: how often a call is run again after its worker was lost.
        tasks_max: calls that wait or run at a time.
        objects_max: references alive at a time.
    """

    max_retries: int = 3
    tasks_max: int = 4_000_000
    objects_max: int = 64_000_000


@dataclass(eq=False, slots=True)
class Worker:
    """A worker: `refusing` one that did not take a call, and is given no other before it is ready."""

    address: str
    store: int
    functions: dict[str, None]
    task: int | None = None
    refusing: bool = False
    alive: bool = True


@dataclass(eq=False, slots=True)
class Function:
    """A function, and the workers that can run it."""

    result_count: int
    shape: Shape
    workers: dict[int, None]


@dataclass(eq=False, slots=True)
class Task:
    """A call: `sent` once a worker was given it, `taken` once that worker has said so."""

    name: str
    body: bytes
    args: Sequence[int]  # each as often as it is one
    nested: Sequence[int]
    results: Sequence[int]
    strategy: str
    retries_left: int
    waits_for: set[int]
    worker: int | None = None
    sent: bool = False
    taken: bool = False


class SchedulerState:
    """The state machine. Not thread-safe: one shell owns it.

    Args:
        settings: see `Settings`.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._effects: list[Effect] = []
        self._emit = self._effects.append
        # Tasks to look at again once the event itself is through: never from inside it, so that nothing recurses.
        self._resolved: deque[int] = deque()
        self._failing: deque[tuple[int, str]] = deque()
        self.objects = Objects(self._emit, self._resolved.append, self._arg_lost)
        self.placement = Placement()
        self.backlog = Backlog()
        self.stores: list[str | None] = []  # addresses; None when lost
        self.store_numbers: dict[str, int] = {}
        self.workers: list[Worker] = []
        self.worker_numbers: dict[str, int] = {}
        self.functions: dict[str, Function] = {}
        self.tasks: dict[int, Task] = {}
        self.next_task = 0
        self._handlers: dict[type, Callable[[Any], Any]] = {
            ev.RegisterObjStore: self._on_register_store,
            ev.RegisterWorker: self._on_register_worker,
            ev.RegisterFunction: self._on_register_function,
            ev.RemoteCall: self._on_remote_call,
            ev.IncrementRefs: lambda e: self.objects.refs.increment(e.refs),
            ev.DecrementRefs: lambda e: self.objects.drop(self.objects.refs.decrement(e.refs)),
            ev.PushObj: self._on_push,
            ev.RequestObj: self._on_request,
            ev.AliasObjRefs: lambda e: self.objects.alias(e.alias, e.target),
            ev.ObjReady: self._on_ready,
            ev.AddContained: lambda e: self.objects.refs.contain(e.ref, e.contained),
            ev.WorkerReady: self._on_worker_ready,
            ev.SchedulerInfo: lambda e: self._info(),
            ev.WorkerLost: self._on_worker_lost,
            ev.ObjStoreLost: self._on_store_lost,
            ev.InvokeTaken: self._on_invoke_taken,
            ev.InvokeRefused: self._on_invoke_refused,
            ev.DeliveryFailed: lambda e: self.objects.delivery_failed(e.ref, e.source, e.target, e.reason),
        }

    def handle(self, event: Event) -> list[Effect]:
        """Take an event and return its effects, in order; the answer to its caller is the first."""
        value: Any
        try:
            value = self._handlers[type(event)](event)
        except Refused as refused:
            value = refused.failure
        except ReferenceCountError as error:
            value = Failure(_CODES.get(error.kind, Code.FAILED_PRECONDITION), str(error))
        while self._resolved or self._failing:
            while self._failing:
                self._fail(*self._failing.popleft())
            if self._resolved:
                self._arg_resolved(self._resolved.popleft())
        effects = self._effects[:]
        self._effects.clear()
        call = getattr(event, "call", None)
        if call is not None:
            effects.insert(0, Answer(call, value))
        return effects

    def peers(self) -> tuple[dict[int, str], dict[int, str]]:
        """Stores and workers that are not lost, with their addresses."""
        stores = {number: address for number, address in enumerate(self.stores) if address is not None}
        return stores, {number: worker.address for number, worker in enumerate(self.workers) if worker.alive}

    def unfinished(self) -> list[Effect]:
        """Orders whose end is not known: for a new shell to carry out once more."""
        found: list[Effect] = [
            ev.DeliverObj(ref, delivery.source, target) for (ref, target), delivery in self.objects.deliveries.items()
        ]
        for number, task in self.tasks.items():
            if task.worker is not None and not task.taken:
                found.append(ev.InvokeCall(task.worker, number, task.body, task.results))
        return found

    def task_count(self) -> int:
        """How many calls wait or run."""
        return len(self.tasks)

    # Stores, workers and functions

    def _on_register_store(self, event: ev.RegisterObjStore) -> int:
        known = self.store_numbers.get(event.address)
        if known is not None:
            self._on_store_lost(ev.ObjStoreLost(known))
        store = len(self.stores)
        self.stores.append(event.address)
        self.store_numbers[event.address] = store
        self.objects.add_store(store)
        return store

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
        number = len(self.workers)
        self.workers.append(Worker(event.address, store, {}))
        self.worker_numbers[event.address] = number
        self.placement.add(number, {_SLOT: 1}, site=store)
        return number

    def _on_register_function(self, event: ev.RegisterFunction) -> None:
        worker = self._worker(event.worker)
        function = self.functions.get(event.name)
        if function is None:
            function = self.make_function(event.name, event.result_count)
        function.result_count = event.result_count
        function.workers[event.worker] = None
        if event.name not in worker.functions:
            worker.functions[event.name] = None
            self.placement.gain(event.worker, {function_resource(event.name): 1})
            self._feed(event.worker)

    def make_function(self, name: str, result_count: int) -> Function:
        """A function that no worker can run yet."""
        shape = tuple(sorted(((_SLOT, 1.0), (function_resource(name), 1.0))))
        function = self.functions[name] = Function(result_count, shape, {})
        return function

    def _on_worker_ready(self, event: ev.WorkerReady) -> None:
        worker = self._worker(event.worker)
        if worker.refusing:
            worker.refusing = False
            self.placement.release(event.worker, SLOT_ONLY)
        if worker.task is not None:
            task = self.tasks[worker.task]
            self._end(worker.task, task)
            for ref in task.results:
                if ref in self.objects.makers:
                    self.objects.makers[ref] = (None, worker.store)
        self._feed(event.worker)

    def _on_worker_lost(self, event: ev.WorkerLost) -> None:
        number = event.worker
        worker = self.workers[number] if number < len(self.workers) else None
        if worker is None or not worker.alive:
            return
        worker.alive = False
        self.placement.remove(number)
        if self.worker_numbers.get(worker.address) == number:
            del self.worker_numbers[worker.address]
        for name in worker.functions:
            del self.functions[name].workers[number]
        task, worker.task = worker.task, None
        if task is not None:
            self._run_again(task, f"Worker {number} at {worker.address}, which ran it, is gone.")
        self.objects.forget_worker(number)
        self._emit(ev.ForgetWorker(number))

    def _on_store_lost(self, event: ev.ObjStoreLost) -> None:
        store = event.store
        address = self.stores[store] if store < len(self.stores) else None
        if address is None:
            return
        self.stores[store] = None
        del self.store_numbers[address]
        for number, worker in enumerate(self.workers):
            if worker.alive and worker.store == store:
                self._on_worker_lost(ev.WorkerLost(number))
        self.objects.remove_store(store)
        self._emit(ev.ForgetStore(store))

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
        waits_for = set()
        for ref in event.args:
            if not objects.is_resolved(ref):
                why = objects.why_lost(ref)
                if why is not None:
                    raise Refused(Code.DATA_LOSS, f"Argument {ref} of {event.name!r} is lost. {why}")
                waits_for.add(ref)
        for ref in event.nested:
            refs.end(ref)  # refuses one that is not alive
        for ref in (*event.args, *event.nested):
            refs.hold(ref)
        results: Sequence[int] = ()
        if function.result_count:
            first = refs.add(function.result_count, 2, True)
            results = range(first, first + function.result_count)
        retries = self.settings.max_retries if event.max_retries is None else event.max_retries
        number = self.next_task
        self.next_task += 1
        self.tasks[number] = task = Task(
            event.name, event.body, event.args, event.nested, results, event.strategy, retries, waits_for
        )
        for ref in sorted(waits_for):
            objects.wait_for(ref, number)
        if not waits_for:
            self._place(number, task)
        return results

    def _place(self, number: int, task: Task) -> None:
        """All arguments are there: to a worker that is idle, else into the backlog."""
        shape = self.functions[task.name].shape
        places = self.objects.places(task.args) if task.args else ()
        demand = Demand(shape, places, task.strategy)
        worker = None if self.backlog.blocks(demand) else self.placement.place(demand)
        if worker is None:
            self.backlog.add(number, demand)
        else:
            self._invoke(number, task, int(worker))  # type: ignore[call-overload]

    def _feed(self, number: int) -> None:
        """A worker may be idle, or able to do more: give it what waits for it."""
        worker = self.workers[number]
        while worker.task is None and not worker.refusing and self.backlog:
            found = self.backlog.take(self.placement[number])
            if found is None:
                return
            task = int(found[0])  # type: ignore[call-overload]
            self.placement.take(number, found[1].shape)
            self._invoke(task, self.tasks[task], number)

    def _invoke(self, number: int, task: Task, worker_number: int) -> None:
        """Give a call to a worker whose slot is taken for it."""
        worker = self.workers[worker_number]
        for ref in task.args:
            if not self.objects.is_resolved(ref):  # lost while it waited for a worker
                self._free_slot(worker_number, task)
                self._failing.append((number, self.objects.why_lost(ref) or f"Argument {ref} is lost."))
                return
        if task.sent:
            refs = self.objects.refs
            refs.increment([ref for ref in (*task.args, *task.nested, *task.results) if refs.is_alive(ref)])
        task.sent, task.taken, task.worker, worker.task = True, False, worker_number, number
        for ref in task.results:
            if self.objects.refs.is_pending(ref):
                self.objects.makers[ref] = (worker_number, worker.store)
        for ref in task.args:
            self.objects.bring(ref, worker.store, worker_number)
        self._emit(ev.InvokeCall(worker_number, number, task.body, task.results))

    def _free_slot(self, number: int, task: Task) -> None:
        self.placement.release(number, self.functions[task.name].shape)

    def _on_invoke_taken(self, event: ev.InvokeTaken) -> None:
        task = self.tasks.get(event.task)
        if task is not None and task.worker == event.worker:
            task.taken = True

    def _on_invoke_refused(self, event: ev.InvokeRefused) -> None:
        worker = self.workers[event.worker] if event.worker < len(self.workers) else None
        if worker is None or worker.task != event.task:
            return
        task = self.tasks[event.task]
        worker.task, worker.refusing = None, True
        self._free_slot(event.worker, task)
        self.placement.take(event.worker, SLOT_ONLY)
        task.sent = False
        self._run_again(event.task, f"Worker {event.worker} refused it: {event.reason}")

    def _run_again(self, number: int, reason: str) -> None:
        """A call lost its worker."""
        task = self.tasks[number]
        task.worker = None
        for ref in task.results:
            self.objects.makers.pop(ref, None)
        if not task.retries_left:
            self._failing.append((number, f"It was given up. {reason}"))
            return
        task.retries_left -= 1
        task.waits_for = {ref for ref in task.args if not self.objects.is_resolved(ref)}
        for ref in sorted(task.waits_for):
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
        task.waits_for = {ref for ref in task.waits_for if not self.objects.is_resolved(ref)}
        if not task.waits_for:
            self._place(number, task)

    def _arg_lost(self, number: int) -> None:
        self._failing.append((number, "An argument of its is lost."))

    def _fail(self, number: int, reason: str) -> None:
        """A call will never run: nobody makes its results."""
        task = self.tasks.get(number)
        if task is None or task.worker is not None:
            return
        if number in self.backlog:
            self.backlog.remove(number)
        unsent = not task.sent
        self._end(number, task)
        words = f"The call of {task.name!r} that was to make it will not run. {reason}"
        for ref in task.results:
            self.objects.abandon(ref, words)
        if unsent:  # the counts of a message that nobody unpacks
            for ref in (*task.args, *task.nested, *task.results):
                try:
                    self.objects.drop(self.objects.refs.decrement((ref,)))
                except ReferenceCountError:
                    continue  # a caller who did not count what he sent

    def _end(self, number: int, task: Task) -> None:
        """A call is through, or given up."""
        del self.tasks[number]
        if task.worker is not None:
            worker = self.workers[task.worker]
            worker.task = None
            self._free_slot(task.worker, task)
        for ref in (*task.args, *task.nested):
            self.objects.drop(self.objects.refs.release(ref))

    # Objects

    def _on_push(self, event: ev.PushObj) -> int:
        worker = self._worker(event.worker)
        self._check_room(1, 0)
        ref = self.objects.refs.add(1, 1, True)
        self.objects.makers[ref] = (event.worker, worker.store)
        return ref

    def _on_request(self, event: ev.RequestObj) -> None:
        worker = self._worker(event.worker)
        why = self.objects.why_lost(event.ref) if self.objects.refs.is_alive(event.ref) else None
        if why is not None:
            raise Refused(Code.DATA_LOSS, f"Object {event.ref} is lost. {why}")
        self.objects.refs.end(event.ref)  # refuses one that is not alive
        self.objects.request(event.ref, event.worker, worker.store)

    def _on_ready(self, event: ev.ObjReady) -> None:
        if event.store >= len(self.stores) or self.stores[event.store] is None:
            raise Refused(
                Code.NOT_FOUND,
                f"Object store {event.store} is not registered (objstoreid). Register it, and use the number it gets.",
            )
        self.objects.ready(event.ref, event.store, event.nbytes)

    def _info(self) -> Info:
        waiting = [(t.body, t.results) for t in self.tasks.values() if t.worker is None]
        functions = {name: FunctionView(sorted(f.workers), f.result_count) for name, f in self.functions.items()}
        idle = [n for n, w in enumerate(self.workers) if w.alive and w.task is None and not w.refusing]
        return Info(waiting, functions, idle, self.objects.refs.targets(), self.objects.refs.counts())

    def _worker(self, number: int) -> Worker:
        worker = self.workers[number] if number < len(self.workers) else None
        if worker is None or not worker.alive:
            state = "was lost, or replaced by another one at its address" if worker is not None else "is not registered"
            raise Refused(Code.NOT_FOUND, f"Worker {number} {state} (workerid). Register it, and use the new number.")
        return worker

    def _check_room(self, objects: int, tasks: int) -> None:
        if self.objects.refs.alive + objects > self.settings.objects_max:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"{self.settings.objects_max} references are alive, as many as are allowed (objects_max). Drop some.",
            )
        if len(self.tasks) + tasks > self.settings.tasks_max:
            raise Refused(
                Code.RESOURCE_EXHAUSTED,
                f"{self.settings.tasks_max} calls wait or run, as many as are allowed (tasks_max). Wait for some.",
            )

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        self.objects.check_invariants()
        self.placement.check_invariants()
        for number, worker in enumerate(self.workers):
            if worker.alive:
                assert self.stores[worker.store] is not None, f"worker {number} is at a lost store"
                busy = worker.task is not None or worker.refusing
                assert self.placement[number].free[_SLOT] == (not busy), f"worker {number}'s slot is wrong"
            if worker.task is not None:
                assert self.tasks[worker.task].worker == number, f"worker {number} and its call disagree"
        for number, task in self.tasks.items():
            if task.worker is not None:
                assert self.workers[task.worker].task == number, f"call {number} and its worker disagree"
                continue
            waiting = [ref for ref in task.args if not self.objects.is_resolved(ref)]
            assert number in self.backlog or waiting, f"call {number} waits for nothing"
            hopeless = [ref for ref in task.waits_for if self.objects.why_lost(ref) is not None]
            assert number in self.backlog or not hopeless, f"call {number} waits for {hopeless}, which are lost"
            for ref in (*task.args, *task.nested):
                assert self.objects.refs.is_alive(ref), f"call {number} has lost its argument {ref}"
        for waits in self.backlog:
            assert waits in self.tasks, f"call {waits} is in the backlog after its end"


def function_resource(function: str) -> str:
    """What a worker has that can run a function, and a call of it asks for."""
    return f"function {function}"
