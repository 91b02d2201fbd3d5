"""Snapshots: the whole state of a scheduler as bytes, and back.

Only the tables that determine decisions are saved; the ranking, the backlog and the waiting callers are rebuilt from
them. A process that saves its state continues with the state loaded from the snapshot, so a later process that loads
the same bytes decides in the same way; see `log`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from fastrt._core.refcounts.audit import dump as dump_refs
from fastrt._core.refcounts.audit import load as load_refs
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.scheduler.objects import ABSENT, Delivery, Entry, Objects
from fastrt.scheduler.policy import Demand
from fastrt.scheduler.records import CALL, SLOT_ONLY, WORKER, Task, Worker
from fastrt.scheduler.state import SchedulerState, Settings

_TABLES = "tables"
_REFS = "refs/"


def dump(state: SchedulerState) -> dict[str, bytes]:
    """Save a state, as bytes by name."""
    tables = {
        "stores": state.stores,
        "workers": [_dump_worker(worker) for worker in state.workers],
        "functions": [[name, f.result_count] for name, f in state.functions.items()],
        "tasks": [[number, *_dump_task(task)] for number, task in state.tasks.items()],
        "next_task": state.next_task,
        "objects": _dump_objects(state.objects),
    }
    saved = {_REFS + name: data for name, data in dump_refs(state.objects.refs).items()}
    saved[_TABLES] = json.dumps(tables, separators=(",", ":")).encode()
    return saved


def load(settings: Settings, saved: Mapping[str, bytes]) -> SchedulerState:
    """Load a saved state.

    Raises:
        ValueError: the data is inconsistent.
    """
    state = SchedulerState(settings)
    tables = read_object(saved[_TABLES], "the snapshot of the scheduler", own=True, bytes_max=STATE_BYTES_MAX)
    refs = {name.removeprefix(_REFS): data for name, data in saved.items() if name.startswith(_REFS)}
    state.objects.refs = load_refs(refs)
    for address in tables["stores"]:
        state.add_store(address)
    for name, result_count in tables["functions"]:
        state.make_function(name, result_count)
    for fields in tables["workers"]:
        _load_worker(state, *fields)
    _load_objects(state.objects, tables["objects"])
    for fields in tables["tasks"]:
        _load_task(state, *fields)
    state.next_task = tables["next_task"]
    return state


def _dump_worker(worker: Worker) -> list[Any]:
    task = worker.task.number if worker.task is not None else None
    state = WORKER.states[worker.state]
    return [worker.address, worker.store, list(worker.functions), task, state == "REFUSING", state != "LOST"]


def _dump_task(task: Task) -> list[Any]:
    return [
        task.function.name,
        base64.b64encode(task.body).decode(),
        list(task.args),
        list(task.nested),
        list(task.results()),
        task.strategy,
        task.retries_left,
        sorted(task.waits_for),
        None if task.worker is None else task.worker.number,
        task.sent,
        CALL.states[task.state] == "TAKEN",
    ]


def _dump_objects(objects: Objects) -> dict[str, Any]:
    entries = list(objects.live())
    return {
        "stores": [[entry.ref, objects.stores(entry)] for entry in entries if entry.first != ABSENT],
        "nbytes": [[entry.ref, entry.nbytes] for entry in entries if entry.nbytes],
        "lost": list(objects.lost.items()),
        "makers": [
            [entry.ref, None if entry.maker == ABSENT else entry.maker, entry.site]
            for entry in entries
            if entry.site != ABSENT
        ],
        "pushes": list(objects.pushes),
        "deliveries": [
            [ref, target, d.source, d.tries, list(d.aliases or ()), d.workers]
            for ref, coming in sorted(objects.incoming.items())
            for target, d in coming.items()
        ],
        "requests": [[ref, waiting] for ref, waiting in objects.requests.items() if waiting],
        "told": [[ref, sorted(stores)] for ref, stores in objects.notified.items()],
    }


def _load_worker(
    state: SchedulerState,
    address: str,
    store: int,
    functions: list[str],
    task: int | None,
    refusing: bool,
    alive: bool,
) -> None:
    worker = state.add_worker(address, store)
    if not alive:
        state.groups.remove(worker)
        worker.state = WORKER.states.index("LOST")
        worker.functions = dict.fromkeys(functions)
        if state.worker_numbers[address] == worker.number:
            del state.worker_numbers[address]
        return
    for name in functions:
        state.functions[name].workers[worker.number] = None
        state.groups.gain(worker, name)
    state.groups.settle()
    if refusing:
        state.groups.occupy(worker, SLOT_ONLY)
        worker.state = WORKER.states.index("REFUSING")


def _load_objects(objects: Objects, saved: dict[str, Any]) -> None:
    objects.restore_entries()
    for ref, stores in saved["stores"]:
        for store in stores:
            objects.put(_entry(objects, ref), store)
    for ref, nbytes in saved["nbytes"]:
        _entry(objects, ref).nbytes = nbytes
    objects.lost.update(dict(saved["lost"]))
    for ref, worker, store in saved["makers"]:
        entry = _entry(objects, ref)
        entry.maker, entry.site = ABSENT if worker is None else worker, store
    objects.pushes.update({ref: _entry(objects, ref).maker for ref in saved["pushes"]})
    for ref, target, source, tries, aliases, workers in saved["deliveries"]:
        delivery = Delivery(source)
        delivery.tries, delivery.aliases = tries, dict.fromkeys(aliases) or None
        delivery.workers = [(worker, name) for worker, name in workers]
        objects.incoming.setdefault(ref, {})[target] = delivery
        objects.sending[source] = objects.sending.get(source, 0) + 1
    objects.requests.update({ref: [(w, s) for w, s in waiting] for ref, waiting in saved["requests"]})
    for entry in objects.live():
        objects.restore_state(entry)
    objects.notified.update({ref: set(stores) for ref, stores in saved["told"]})


def _entry(objects: Objects, ref: int) -> Entry:
    entry = objects.entry(ref)
    if entry is None:
        raise ValueError(f"Reference {ref} is not alive, and the snapshot has a record of it.")
    return entry


def _load_task(
    state: SchedulerState,
    number: int,
    name: str,
    body: str,
    args: list[int],
    nested: list[int],
    results: list[int],
    strategy: str,
    retries_left: int,
    *progress: Any,
) -> None:
    function = state.functions[name]
    made = (results[0] if results else 0, len(results))
    work = base64.b64decode(body)
    task = Task(number, function, work, tuple(args), tuple(nested), *made, strategy, retries_left)
    state.tasks[number] = task
    task.waits_for, worker, task.sent, taken = progress
    if worker is not None:
        task.worker = state.workers[worker]
        state.groups.occupy(task.worker, function.shape)
        task.worker.task = task
        task.state = CALL.states.index("TAKEN" if taken else "SENT")
        task.worker.state = WORKER.states.index("BUSY")
        return
    for ref in task.waits_for:
        state.objects.wait_for(ref, number)
    if not task.waits_for:
        places = state.objects.places(state.entries_of(task))
        task.state = CALL.states.index("QUEUED")
        state.backlog.add(number, Demand(function.shape, places, strategy))
