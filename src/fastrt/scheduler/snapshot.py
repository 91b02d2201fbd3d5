"""A whole state as bytes, and back: what a restarted scheduler begins with.

Only the tables that decide are saved; ranking, backlog and who-waits-for-what are made anew from them. A process that
saves its state goes on with the state loaded from it, so that what follows is decided alike by whoever loads the same
bytes later; see `log`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from fastrt._core.refcount_audit import dump as dump_refs
from fastrt._core.refcount_audit import load as load_refs
from fastrt.scheduler.objects import Delivery, Objects
from fastrt.scheduler.policy import Demand
from fastrt.scheduler.state import SLOT_ONLY, SchedulerState, Settings, Task, Worker, function_resource

_TABLES = "tables"
_REFS = "refs/"


def dump(state: SchedulerState) -> dict[str, bytes]:
    """All of a state, as bytes by name."""
    tables = {
        "stores": state.stores,
        "workers": [[w.address, w.store, list(w.functions), w.task, w.refusing, w.alive] for w in state.workers],
        "functions": [[name, f.result_count] for name, f in state.functions.items()],
        "tasks": [[number, *_dump_task(task)] for number, task in state.tasks.items()],
        "next_task": state.next_task,
        "objects": _dump_objects(state.objects),
    }
    saved = {_REFS + name: data for name, data in dump_refs(state.objects.refs).items()}
    saved[_TABLES] = json.dumps(tables, separators=(",", ":")).encode()
    return saved


def load(settings: Settings, saved: Mapping[str, bytes]) -> SchedulerState:
    """The state that was saved.

    Raises:
        ValueError: the data does not fit together.
    """
    state = SchedulerState(settings)
    tables = json.loads(saved[_TABLES])
    refs = {name.removeprefix(_REFS): data for name, data in saved.items() if name.startswith(_REFS)}
    state.objects.refs = load_refs(refs)
    for number, address in enumerate(tables["stores"]):
        state.stores.append(address)
        if address is not None:
            state.store_numbers[address] = number
            state.objects.add_store(number)
    for name, result_count in tables["functions"]:
        state.make_function(name, result_count)
    for number, fields in enumerate(tables["workers"]):
        _load_worker(state, number, *fields)
    _load_objects(state.objects, tables["objects"])
    for number, *fields in tables["tasks"]:
        _load_task(state, number, _task(*fields))
    state.next_task = tables["next_task"]
    return state


def _dump_task(task: Task) -> list[Any]:
    return [
        task.name,
        base64.b64encode(task.body).decode(),
        list(task.args),
        list(task.nested),
        list(task.results),
        task.strategy,
        task.retries_left,
        sorted(task.waits_for),
        task.worker,
        task.sent,
        task.taken,
    ]


def _task(name: str, body: str, args: list[int], nested: list[int], results: list[int], *rest: Any) -> Task:
    strategy, retries_left, waits_for, worker, sent, taken = rest
    data = base64.b64decode(body)
    return Task(name, data, args, nested, results, strategy, retries_left, set(waits_for), worker, sent, taken)


def _dump_objects(objects: Objects) -> dict[str, Any]:
    return {
        "stores": [[ref, list(stores)] for ref, stores in objects.stores.items()],
        "nbytes": list(objects.nbytes.items()),
        "lost": list(objects.lost.items()),
        "makers": [[ref, *maker] for ref, maker in objects.makers.items()],
        "deliveries": [
            [ref, target, d.source, d.tries, list(d.aliases), d.workers]
            for (ref, target), d in objects.deliveries.items()
        ],
        "requests": [[ref, waiting] for ref, waiting in objects.requests.items() if waiting],
        "told": [[ref, sorted(stores)] for ref, stores in objects.told.items()],
    }


def _load_worker(
    state: SchedulerState,
    number: int,
    address: str,
    store: int,
    functions: list[str],
    task: int | None,
    refusing: bool,
    alive: bool,
) -> None:
    state.workers.append(Worker(address, store, dict.fromkeys(functions), task, refusing, alive))
    if not alive:
        return
    state.worker_numbers[address] = number
    state.placement.add(number, dict(SLOT_ONLY), site=store)
    for name in functions:
        state.functions[name].workers[number] = None
    state.placement.gain(number, {function_resource(name): 1 for name in functions})
    if refusing:
        state.placement.take(number, SLOT_ONLY)


def _load_objects(objects: Objects, saved: dict[str, Any]) -> None:
    for ref, stores in saved["stores"]:
        objects.stores[ref] = dict.fromkeys(stores)
        for store in stores:
            objects.at_store[store][ref] = None
    objects.nbytes.update(dict(saved["nbytes"]))
    objects.lost.update(dict(saved["lost"]))
    objects.makers.update({ref: (worker, store) for ref, worker, store in saved["makers"]})
    for ref, target, source, tries, aliases, workers in saved["deliveries"]:
        asked = [(worker, name) for worker, name in workers]
        objects.deliveries[ref, target] = Delivery(source, tries, dict.fromkeys(aliases), asked)
        objects.sending[source] = objects.sending.get(source, 0) + 1
    objects.requests.update({ref: [(w, s) for w, s in waiting] for ref, waiting in saved["requests"]})
    objects.told.update({ref: set(stores) for ref, stores in saved["told"]})


def _load_task(state: SchedulerState, number: int, task: Task) -> None:
    state.tasks[number] = task
    shape = state.functions[task.name].shape
    if task.worker is not None:
        state.placement.take(task.worker, shape)
        return
    for ref in sorted(task.waits_for):
        state.objects.wait_for(ref, number)
    if not task.waits_for:
        state.backlog.add(number, Demand(shape, state.objects.places(task.args), task.strategy))
