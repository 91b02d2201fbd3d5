"""The tasks, actors, objects and workers of one node, as rows for people and programs.

Any process that has joined the session reads the rows from the shared tables; it asks no other process, and none waits.
Only unfinished tasks are listed: the record of an ended task is reused within a microsecond. What ended is counted and,
if it failed, kept (`observe.reading`); past events are in the timeline. `observe.reading.page` gives a part of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastrt._core.memory import clients
from fastrt._core.objects import handles, spill
from fastrt._core.repair import fsck, inspect, pages
from fastrt._core.tasks import actors as core_actors
from fastrt.errors import FastrtError
from fastrt.store.client import Store
from fastrt.store.serialize import NDARRAY
from fastrt.tasks import call_sites
from fastrt.tasks import namespaces as namespaces_of_actors

Row = dict[str, Any]
KINDS = {
    clients.KIND_DAEMON: "daemon", clients.KIND_DRIVER: "driver", clients.KIND_WORKER: "worker",
    clients.KIND_ACTOR: "actor", clients.KIND_TOOL: "tool",
}  # fmt: skip
ACTOR_STATES = {
    core_actors.WANTED: "starting", core_actors.STARTING: "starting", core_actors.LIVE: "alive",
    core_actors.DOWN: "restarting", core_actors.DEAD: "dead", core_actors.AWAY: "away",
}  # fmt: skip
UNNAMED = ("?", "a promise")  # what `Names` says of a function that is not in the table, and of a task without one
_TYPES = {0: "None", 1: "bool", 2: "bool", 3: "int", 4: "float", 5: "str", 6: "bytes", NDARRAY: "array"}


class Names:
    """The names of a session's functions, classes and methods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.by_objref: dict[int, str] = {}
        self.by_index: dict[int, str] = {}
        self._methods: dict[int, tuple[str, ...]] = {}  # of actors, by index
        self._given: dict[int, str] = {}  # by the number of a policy's object
        self.refresh()

    def refresh(self) -> None:
        """Read the names of functions and classes that were shipped since the last call."""
        for objref, index, name in inspect.functions(self._store.client):
            self.by_objref[objref] = self.by_index[index] = name

    def of_task(self, row: Row) -> str:
        """The name of a task, given as a row of `inspect.tasks`."""
        objref, number = row["function"]
        return self.of_function(objref, number, row["actor"])

    def of_function(self, objref: int, number: int, actor: int | None) -> str:
        """The name of a function, or of a method.

        Args:
            objref: of the function's object, or of the class.
            number: of the method.
            actor: an actor with this method; None: it is a function.
        """
        if actor is None:
            return self.by_objref.get(objref, UNNAMED[0] if objref else UNNAMED[1])
        return f"{self.by_objref.get(objref, '?')}.{self.method(actor, number)}"

    def actor(self, actor: int) -> str:
        """The class of an actor."""
        try:
            return self.by_objref.get(core_actors.info(self._store.client, actor)["function"], "?")
        except (FastrtError, IndexError):
            return "?"

    def is_of_class(self, actor: int, objref: int) -> bool:
        """Whether an actor exists and is of a class; its record may be another actor's by now."""
        try:
            return bool(core_actors.info(self._store.client, actor)["function"] == objref)
        except (FastrtError, IndexError):
            return False

    def method(self, actor: int, number: int) -> str:
        """The name of a method; its number if the actor's plan cannot be read any more."""
        if actor not in self._methods:
            self._methods[actor] = self._methods_of(actor)
        names = self._methods[actor]
        return names[number % len(names)] if names else f"method {number}"

    def _methods_of(self, actor: int) -> tuple[str, ...]:
        plan = self.plan(core_actors.info(self._store.client, actor)["object"])
        return () if plan is None else tuple(str(which.name) for which in plan.methods)

    def plan(self, about: tuple[int, int]) -> Any:
        """The plan of an actor, given the number and the index of its object; None if it cannot be read any more."""
        try:
            return self._store.load(handles.acquire(self._store.client, *about))
        except Exception:  # it is gone, or needs a module that this process cannot import
            return None

    def given(self, policy: tuple[int, int] | None) -> str:
        """The name that the caller has given a task; "" if there is none.

        Args:
            policy: the number and the index of the object of its policy; None: it has none.
        """
        if policy is None:
            return ""
        if policy[0] not in self._given:
            try:
                self._given[policy[0]] = self._store.load(handles.acquire(self._store.client, *policy)).name
            except Exception:  # as of a plan
                self._given[policy[0]] = ""
        return self._given[policy[0]]


def task_row(row: Row, names: Names, pids: dict[int | None, int]) -> Row:
    """Make a row for people from a row of `inspect.tasks`.

    Args:
        row: the task.
        names: the session's.
        pids: of the session's clients, see `pids_of`.
    """
    return {
        "task_id": f"{row['id']:016x}", "name": names.of_task(row), "state": row["state"],
        "pid": pids.get(row["client"]), "actor": row["actor"], "attempt": row["attempts"],
        "max_retries": row["retries"],
        "waits_for": "resources" if row["held"] else row["waits_for"] and f"{row['waits_for']:016x}",
        "results": [f"{objref:016x}" for objref in row["returns"]], "cancelled": row["cancelled"],
        "priority": row["priority"], "given_name": names.given(row["policy"]), "job": row["job"],
    }  # fmt: skip


def pids_of(store: Store) -> dict[int | None, int]:
    """The process ids of the session's clients, by their slots."""
    return {row["client"]: row["pid"] for row in clients.table(store.client.segment)}


def tasks(store: Store) -> list[Row]:
    """All unfinished tasks and calls of actors.

    Args:
        store: any process's attachment.
    Returns:
        Rows with task_id, name, state ("waiting", "ready", "claimed", "running", "blocked", "ending"), pid (of the
        process that runs it, or None), actor (its id, or None), attempt, max_retries, waits_for (the cause of the wait:
        the id of an object, "resources", or None), results (ids), cancelled, priority, given_name
        (by the option `name`; or ""), job (its number; 0: unknown).
    """
    names, pids = Names(store), pids_of(store)
    return [task_row(row, names, pids) for row in sorted(inspect.tasks(store.client), key=lambda row: row["id"])]


def actor_states(store: Store) -> list[str]:
    """The state of each actor, as in the rows of `actors`."""
    infos = (core_actors.info(store.client, index) for index in inspect.actors(store.client))
    return [ACTOR_STATES.get(info["state"], "?") for info in infos if not info["bare"]]


def actors(store: Store) -> list[Row]:
    """Actors, including dead ones that still have a handle.

    Args:
        store: any process's attachment.
    Returns:
        Rows with actor (its id), class, name and namespace (or ""), state ("starting", "alive", "restarting", "dead"),
        pid (or None; of a dead one that of its last process), restarts, max_restarts, detached, calls (not yet ended),
        reason (why it is dead), actor_id (that of `runtime_context()`), owner (the NodeID of the node that created it,
        and decides about its name and its restarts), repr (the first 63 bytes of what `repr` returned after its
        constructor, if its class has a `__repr__`; else ""), job (the number of the one that created it; 0: unknown).
        In a cluster several nodes can have a record of an actor; it is "away" on those that do not run it.
    """
    names, calls = Names(store), pages.count_tasks(store.client)[1]
    shown = {row["client"]: row["name"] for row in clients.table(store.client.segment)}
    here = store.client.segment.session
    found = []
    for index in inspect.actors(store.client):
        info = core_actors.info(store.client, index)
        if info["bare"]:
            continue  # the reservation of a placement group's bundle
        plan, objref = names.plan(info["object"]), info["object"][0]
        owner, actor_id = (here, f"{objref:016x}") if plan is None else plan.id_at(here, objref)
        space, name = namespaces_of_actors.split(info["name"])
        if not name and plan is not None:
            space = plan.namespace
        is_away = info["state"] == core_actors.AWAY
        pid = None if is_away else info["pid"]
        its_repr = "" if pid is None else shown.get(info["client"], "")
        if info["state"] == core_actors.DEAD:
            pid = info["last_pid"] or None
        found.append(
            {
                "actor": index, "class": names.actor(index), "name": name, "namespace": space,
                "state": ACTOR_STATES.get(info["state"], "?"), "pid": pid, "restarts": info["restarts"],
                "max_restarts": info["max_restarts"], "detached": info["detached"], "calls": calls.get(index, 0),
                "reason": info["reason"], "actor_id": actor_id, "owner": owner,
                "repr": "" if its_repr == f"worker-{pid}" else its_repr, "job": 0 if plan is None else plan.job,
            }
        )  # fmt: skip
    return found


def objects(store: Store) -> list[Row]:
    """All objects: values, pending results, and fastrt's internal objects (functions, actors' plans).

    Args:
        store: any process's attachment.
    Returns:
        Rows with object_id, state ("pending", "sealed", "spilled", "remote", ...), bytes, type, what ("value",
        "result", "function ..." or "actor"), refs and pins (pids that hold a reference, and a view or a running
        argument), counted (number of values and unfinished tasks that name it), error (whether get raises it), site
        (the line that created it; "" if call sites are not recorded), stored (bytes of memory that its block takes),
        kept_by (the NodeID of the node that keeps the value if it is not this one: `stored` then counts a copy; else
        "").
    """
    names, pids, lines = Names(store), pids_of(store), call_sites.read(store.socket_path)
    found = sorted(inspect.objects(store.client), key=lambda row: row["objref"])
    return [object_row(row, names, pids, lines) for row in found]


def object_row(row: Row, names: Names, pids: dict[int | None, int], lines: dict[int, str]) -> Row:
    """Make a row for people from a row of `inspect.objects`.

    Args:
        row: the object.
        names: the session's.
        pids: of the session's clients.
        lines: source lines by their numbers, see `call_sites.read`.
    """
    if row["index"] in names.by_index:
        what = f"function {names.by_index[row['index']]}"
    elif row["is_actor"]:
        what = "actor"
    else:
        what = "result" if row["made_by_task"] else "value"
    return {
        "object_id": f"{row['objref']:016x}", "state": row["state"], "bytes": row["bytes"],
        "type": "" if row["state"] == "pending" else type_name(row["kind"]), "what": what,
        "refs": _pids(row["refs"], pids), "pins": _pids(row["pins"], pids), "counted": row["counted"],
        "error": row["error"], "site": lines.get(row["site"], ""),
        "stored": row["room"] if row["state"] not in ("spilled", "remote") else 0, "kept_by": row["node"],
    }  # fmt: skip


def workers(store: Store) -> list[Row]:
    """Every process that has joined the session, except this one if it is a tool that only looks.

    Args:
        store: any process's attachment.
    Returns:
        Rows with pid, kind ("daemon", "driver", "worker", "actor", "tool"), name, state ("idle", "running", "waiting";
        "" for other kinds), running (the name of its task), tasks_done, bytes_held, cpu_s and rss (its processor time
        in seconds and its resident memory in bytes; None if it has just ended).
    """
    import psutil

    client, names = store.client, Names(store)
    held = {row["client"]: row["bytes"] for row in fsck.holders(client)}
    found = []
    for row in clients.table(client.segment):
        if row["client"] == client.index and row["kind"] == clients.KIND_TOOL and not store.serves:
            continue
        kind = KINDS.get(row["kind"], "?")
        state = "" if kind not in ("worker", "actor") else "idle" if row["task"] is None else "running"
        if state == "running" and row["blocked"]:
            state = "waiting"
        cpu_s = rss = None
        try:
            process = psutil.Process(row["pid"])
            with process.oneshot():
                times = process.cpu_times()
                cpu_s, rss = times.user + times.system, process.memory_info().rss
        except psutil.Error:
            pass
        found.append(
            {
                "pid": row["pid"], "kind": kind, "name": row["name"], "state": state,
                "running": _name_of_record(store, names, row["task"]), "tasks_done": row["tasks_done"],
                "bytes_held": held.get(row["client"], 0), "cpu_s": cpu_s, "rss": rss,
            }
        )  # fmt: skip
    return found


COLUMNS: dict[str, tuple[str, ...]] = {
    "tasks": (
        "task_id", "name", "state", "pid", "actor", "attempt", "max_retries", "waits_for", "results", "cancelled",
        "priority", "given_name", "job",
    ),
    "actors": (
        "actor", "class", "name", "namespace", "state", "pid", "restarts", "max_restarts", "detached", "calls",
        "reason", "actor_id", "owner", "repr", "job",
    ),
    "objects": (
        "object_id", "state", "bytes", "type", "what", "refs", "pins", "counted", "error", "site", "stored",
        "kept_by",
    ),
    "failures": (
        "task_id", "name", "state", "pid", "actor", "attempt", "max_retries", "type", "message", "traceback", "retried",
        "mended", "signal", "time", "number", "result",
    ),
    "workers": (
        "pid", "kind", "name", "state", "running", "tasks_done", "bytes_held", "cpu_s", "rss",
    ),
}  # fmt: skip
LISTS: dict[str, Callable[[Store], list[Row]]] = {
    "tasks": tasks, "actors": actors, "objects": objects, "workers": workers,
}  # fmt: skip


def _name_of_record(store: Store, names: Names, record: int | None) -> str:
    """The name of the task in a record; "" if there is none."""
    if record is None:
        return ""
    row = inspect.task(store.client, record)
    return "" if row is None else names.of_task(row)


def _pids(indexes: list[int], pids: dict[int | None, int]) -> list[int]:
    return [pids[index] for index in indexes if index in pids]


def type_name(kind: int) -> str:
    """The type of a value by its encoding, in a word."""
    return "lost" if kind == spill.KIND_LOST else _TYPES.get(kind, "pickled")
