"""The functions of `ray.util.state`: fastrt's lists in Ray's shape."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeVar

from fastrt._core.memory import clients
from fastrt.errors import UnsupportedError
from fastrt.ids import ActorID, JobID, NodeID, TaskID, WorkerID
from fastrt.observe.ended import outcomes
from fastrt.ray import variables
from fastrt.ray.cluster import nodes
from fastrt.ray.refusals import refuse
from fastrt.ray.util.addresses import get_node_ip_address
from fastrt.ray.util.placement_group import placement_group_table
from fastrt.ray.util.state.common import (
    ActorState,
    JobState,
    NodeState,
    ObjectState,
    PlacementGroupState,
    StateSchema,
    TaskState,
    WorkerState,
)
from fastrt.runtime.state_api import actor_ids, rows_of
from fastrt.store import client as store_client
from fastrt.store import join
from fastrt.store.process_messages import EndedProcess, EndedProcessList, ListEndedProcesses
from fastrt.store.ref import ObjectRef
from fastrt.tasks import namespaces
from fastrt.tasks.functions import inner_name

_LIMIT, _TIMEOUT_S = 100, 30
_TASKS = {
    "waiting": "PENDING_ARGS_AVAIL", "ready": "PENDING_NODE_ASSIGNMENT", "claimed": "SUBMITTED_TO_WORKER",
    "running": "RUNNING", "blocked": "RUNNING_IN_RAY_GET", "ending": "RUNNING",
}  # fmt: skip
_ACTORS = {
    "starting": "PENDING_CREATION", "alive": "ALIVE", "away": "ALIVE", "restarting": "RESTARTING", "dead": "DEAD",
}  # fmt: skip
_ERRORS = {
    "WorkerCrashedError": "WORKER_DIED", "ActorDiedError": "ACTOR_DIED", "ActorUnavailableError": "ACTOR_UNAVAILABLE",
    "OutOfMemoryError": "OUT_OF_MEMORY", "NodeDiedError": "NODE_DIED", "TaskCancelledError": "TASK_CANCELLED",
    "RuntimeEnvError": "RUNTIME_ENV_SETUP_FAILED", "InfeasibleTaskError": "TASK_UNSCHEDULABLE_ERROR",
}  # fmt: skip
_OPERATORS: dict[str, Callable[[str, str], bool]] = {"=": str.__eq__, "!=": str.__ne__}
_BITS = {"1": "true", "0": "false"}
_MB = 1 << 20

Filters = Sequence[tuple[str, str, Any]] | None
_State = TypeVar("_State", bound=StateSchema)


def list_actors(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[ActorState]:  # fmt: skip
    """Return the actors that live, dead ones that have a handle, then those that the last processes here have run.

    Args:
        address: taken for Ray's sake: the session of this process is asked.
        filters: such as [("state", "=", "ALIVE")]; the operators are = and !=.
        limit: the greatest number of rows.
        timeout: seconds that the other nodes have to answer.
        detail, raise_on_missing_output, _explain: taken for Ray's sake: each row has all that is known.
    Raises:
        ValueError: a filter names no field, or another operator.
    Source:
        The semantics of `ray.util.state.list_actors`.
    """
    found = [_actor(row) for row in _rows("actors", timeout)]
    known = {one.actor_id for one in found}
    found += (one for one in _ended_actors() if one.actor_id not in known)
    dead = [one for one in found if one.state == "DEAD"][: variables.dead_actors_kept()]
    return _select(ActorState, [*(one for one in found if one.state != "DEAD"), *dead], filters, limit)


def list_tasks(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[TaskState]:  # fmt: skip
    """Return the tasks and calls that have not ended, then the kept failures that no retry followed, newest first.

    Args:
        address, filters, limit, timeout, detail, raise_on_missing_output, _explain: as for `list_actors`.
    Raises:
        UnsupportedError: the filter wants finished tasks, of which no record is kept.
        ValueError: as `list_actors`.
    """
    states = {str(value).upper() for name, operator, value in _lowered(filters) if (name, operator) == ("state", "=")}
    if "FINISHED" in states:
        why = "no record of a task that has succeeded is kept; summarize_tasks() counts them, get_task(ref) finds one"
        raise UnsupportedError(refuse('list_tasks with the filter ("state", "=", "FINISHED")', why))
    pending = [] if states == {"FAILED"} else _rows("tasks", timeout)
    failed: list[dict[str, Any]] = []
    if not states or "FAILED" in states:
        failed = rows_of("tasks", limit=0, all_nodes=True, timeout=timeout, state="failed", retried=False)
    ids = actor_ids(timeout) if any(row["actor"] is not None for row in pending) else {}
    job, processes = _only_job(), _processes_of([*pending, *failed])
    found = [_task(row, ids.get((row.get("node"), row["actor"])), job or _job_here(row), processes) for row in pending]
    return _select(TaskState, [*found, *(_failed(row, job, processes) for row in failed)], filters, limit)


def list_objects(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[ObjectState]:  # fmt: skip
    """Return the objects of all nodes' stores, without those of functions; arguments as for `list_actors`."""
    here = clients.table(store_client.require().client.segment)
    drivers = {row["pid"] for row in here if row["kind"] == clients.KIND_DRIVER}
    rows = (row for row in _rows("objects", timeout) if not row["what"].startswith("function "))
    return _select(ObjectState, (_object(row, drivers) for row in rows), filters, limit)


def list_workers(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[WorkerState]:  # fmt: skip
    """Return the drivers, workers and actors' processes of this node; arguments as for `list_actors`.

    The last 500 that have ended come after those that live, with `exit_type` and `exit_detail`.
    """
    return _select(WorkerState, _workers(), filters, limit)


def list_nodes(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[NodeState]:  # fmt: skip
    """Return the nodes of the cluster; arguments as for `list_actors`."""
    found = [
        NodeState(
            row["NodeID"], get_node_ip_address() if row["IsHere"] else None, row["IsHere"],
            "ALIVE" if row["Alive"] else "DEAD", row["NodeName"],
            row["Resources"], row["Labels"],
        )
        for row in nodes()
    ]  # fmt: skip
    return _select(NodeState, found, filters, limit)


def list_jobs(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[JobState]:  # fmt: skip
    """Return the job of this program; arguments as for `list_actors`."""
    store = store_client.require()
    drivers = [row for row in clients.table(store.client.segment) if row["kind"] == clients.KIND_DRIVER]
    found = [JobState(JobID.of_job(store.client.job).hex(), driver_info={"pid": row["pid"]}) for row in drivers[:1]]
    return _select(JobState, found, filters, limit)


def list_placement_groups(
    address: str | None = None, filters: Filters = None, limit: int = _LIMIT, timeout: int = _TIMEOUT_S,
    detail: bool = False, raise_on_missing_output: bool = True, _explain: bool = False,
) -> list[PlacementGroupState]:  # fmt: skip
    """Return the placement groups of the cluster; arguments as for `list_actors`."""
    found = [
        PlacementGroupState(
            group, row.get("name", ""), row["state"], strategy=row["strategy"], nodes=row["bundles_to_node_id"],
            bundles=[{"bundle_id": k, "unit_resources": amounts} for k, amounts in row["bundles"].items()],
            stats=row["stats"],
        )
        for group, row in placement_group_table().items()
    ]  # fmt: skip
    return _select(PlacementGroupState, found, filters, limit)


def get_actor(id: str, address: str | None = None, timeout: int = _TIMEOUT_S, _explain: bool = False) -> Any:
    """Return the actor with that id; None where there is none."""
    return _first(list_actors(filters=[("actor_id", "=", id)], timeout=timeout))


def get_task(id: str | ObjectRef, address: str | None = None, timeout: int = _TIMEOUT_S, _explain: bool = False) -> Any:
    """Return the task with that id, or the one that makes a reference's value.

    Of a task that has succeeded only the state is known, and only while its result exists; else None. So it is of one
    that failed and has several results, if another one than the first is asked for, or whose failure is not kept any
    more.
    """
    wanted = TaskID.widened(id.task_id() if isinstance(id, ObjectRef) else id)
    result = id.hex() if isinstance(id, ObjectRef) else wanted.hex()[:16]
    for row in list_tasks(limit=0, timeout=timeout):
        if row.task_id == wanted:
            return row
    for about in rows_of("objects", limit=1, all_nodes=True, timeout=timeout, object_id=result, what="result"):
        if about["state"] != "pending":
            state = "FAILED" if about["error"] else "FINISHED"
            return TaskState(wanted.hex(), 0, "", state, "NORMAL_TASK", "", job_id=_only_job())
    return None


def get_node(id: str, address: str | None = None, timeout: int = _TIMEOUT_S, _explain: bool = False) -> Any:
    """Return the node with that id; None where there is none."""
    return _first(list_nodes(filters=[("node_id", "=", id)]))


def get_worker(id: str, address: str | None = None, timeout: int = _TIMEOUT_S, _explain: bool = False) -> Any:
    """Return the process with that id; None where there is none."""
    return _first(list_workers(filters=[("worker_id", "=", id)]))


def get_objects(id: str, address: str | None = None, timeout: int = _TIMEOUT_S, _explain: bool = False) -> Any:
    """Return the rows of the object with that id."""
    return list_objects(filters=[("object_id", "=", id)], timeout=timeout)


def get_placement_group(id: str, address: str | None = None, timeout: int = _TIMEOUT_S, _explain: bool = False) -> Any:
    """Return the placement group with that id; None where there is none."""
    return _first(list_placement_groups(filters=[("placement_group_id", "=", id)]))


def summarize_tasks(
    address: str | None = None, timeout: int = _TIMEOUT_S, raise_on_missing_output: bool = True, _explain: bool = False
) -> dict[str, Any]:
    """Return the numbers of tasks by their name and state; FINISHED and FAILED are of tasks that ended on this node."""
    rows = [row for row in list_tasks(limit=0, timeout=timeout) if row.state != "FAILED"]
    summary: dict[str, dict[str, Any]] = {
        name: {"func_or_class_name": name, "type": kind, "state_counts": states}
        for (name, kind), states in _counted(rows, "func_or_class_name", "type").items()
    }
    kinds = Counter(row.type for row in rows)
    for one in outcomes(store_client.require()):
        name = inner_name(one.name)
        kind = "ACTOR_TASK" if "." in name else "NORMAL_TASK"
        about = summary.setdefault(name, {"func_or_class_name": name, "type": kind, "state_counts": {}})
        ended = {"FINISHED": one.succeeded, "FAILED": one.failed + one.cancelled + one.crashed}
        about["state_counts"] |= {state: count for state, count in ended.items() if count}
        kinds[kind] += one.ended
    totals = {"total_tasks": kinds["NORMAL_TASK"], "total_actor_tasks": kinds["ACTOR_TASK"], "total_actor_scheduled": 0}
    return {"cluster": {"summary": summary, **totals, "summary_by": "func_name"}}


def summarize_actors(
    address: str | None = None, timeout: int = _TIMEOUT_S, raise_on_missing_output: bool = True, _explain: bool = False
) -> dict[str, Any]:
    """Return the numbers of actors by their class and state."""
    rows = list_actors(limit=0, timeout=timeout)
    summary = {
        name: {"class_name": name, "state_counts": states} for (name,), states in _counted(rows, "class_name").items()
    }
    return {"cluster": {"summary": summary, "total_actors": len(rows), "summary_by": "class"}}


def summarize_objects(
    address: str | None = None, timeout: int = _TIMEOUT_S, raise_on_missing_output: bool = True, _explain: bool = False
) -> dict[str, Any]:
    """Return the numbers and bytes of objects by the line that created them."""
    rows = list_objects(limit=0, timeout=timeout)
    summary: dict[str, Any] = {}
    for row in rows:
        about = summary.setdefault(row.call_site, {"total_objects": 0, "total_size_mb": 0.0, "total_num_nodes": 1})
        about["total_objects"] += 1
        about["total_size_mb"] += row.object_size / _MB
    totals = {"total_objects": len(rows), "total_size_mb": sum(row.object_size for row in rows) / _MB}
    recorded = any(row.call_site != "disabled" for row in rows)
    return {"cluster": {"summary": summary, **totals, "callsite_enabled": recorded, "summary_by": "callsite"}}


def _only_job() -> str | None:
    """The id of the job that all tasks of this node belong to; None where several programs, or nodes, are at work."""
    store = store_client.require()
    drivers = [row for row in clients.table(store.client.segment) if row["kind"] == clients.KIND_DRIVER]
    return JobID.of_job(store.client.working_job).hex() if len(drivers) == len(nodes()) == 1 else None


def _job_here(row: dict[str, Any]) -> str | None:
    """The id of the job of a task of this session alone; nodes of a cluster number the jobs of others differently."""
    return JobID.of_job(row["job"]).hex() if row["job"] and row.get("node") is None else None


def _rows(what: str, timeout: float) -> list[dict[str, Any]]:
    return rows_of(what, limit=0, all_nodes=True, timeout=timeout)


def _node_of(row: dict[str, Any]) -> str:
    here = NodeID.widened(store_client.require().client.segment.session).hex()
    name = row.get("node")
    return here if name is None else next((one["NodeID"] for one in nodes() if one["NodeName"] == name), here)


def _actor(row: dict[str, Any]) -> ActorState:
    reason = {"actor_died_error_context": {"error_message": row["reason"]}} if row["state"] == "dead" else None
    state = _ACTORS.get(row["state"], "DEPENDENCIES_UNREADY")
    return ActorState(
        ActorID.widened(row["actor_id"]).hex(), inner_name(row["class"]), state, name=row["name"],
        node_id=None if row["pid"] is None else _node_of(row), pid=row["pid"] or 0,
        ray_namespace=row["namespace"], death_cause=reason,
        is_detached=row["detached"], num_restarts=row["restarts"], repr_name=row["repr"],
        job_id=JobID.of_job(row["job"]).hex() if row["job"] else None,
    )  # fmt: skip


def _task(
    row: dict[str, Any], actor_id: str | None, job_id: str | None, processes: Mapping[int | None, str]
) -> TaskState:
    state = "PENDING_NODE_ASSIGNMENT" if row["waits_for"] == "resources" else _TASKS[row["state"]]
    kind = "NORMAL_TASK" if row["actor"] is None else "ACTOR_TASK"
    node = _node_of(row) if row["pid"] is not None else None
    name = inner_name(row["name"])
    return TaskState(
        TaskID.widened((row["results"] or [row["task_id"]])[0]).hex(), max(row["attempt"] - 1, 0),
        row["given_name"] or name, state, kind, name,
        job_id=job_id, actor_id=None if actor_id is None else ActorID.widened(actor_id).hex(),
        node_id=node, worker_pid=row["pid"], worker_id=_process_of(row, processes),
    )  # fmt: skip


def _failed(row: dict[str, Any], job_id: str | None, processes: Mapping[int | None, str]) -> TaskState:
    name = inner_name(row["name"])
    kind = _ERRORS.get(row["type"], "TASK_EXECUTION_EXCEPTION")
    return TaskState(
        TaskID.widened(row["result"] or row["task_id"]).hex(), row["attempt"] - 1, name, "FAILED",
        "NORMAL_TASK" if row["actor"] is None else "ACTOR_TASK", name, job_id=job_id, node_id=_node_of(row),
        worker_pid=row["pid"], worker_id=_process_of(row, processes), error_type=kind,
        error_message=f"{row['type']}: {row['message']}",
        end_time_ms=int(row["time"] * 1000),
    )  # fmt: skip


def _process_of(row: dict[str, Any], processes: Mapping[int | None, str]) -> str | None:
    """The id of the process that ran a task here; None of another node's."""
    is_here = row.get("node") is None or _node_of(row) == NodeID.widened(store_client.require().client.segment.session)
    return processes.get(row["pid"]) if is_here else None


def _object(row: dict[str, Any], drivers: Set[int]) -> ObjectState:
    status = "PENDING_NODE_ASSIGNMENT" if row["state"] == "pending" else "FINISHED"
    kind = "ACTOR_HANDLE" if row["what"] == "actor" else "PINNED_IN_MEMORY" if row["pins"] else "LOCAL_REFERENCE"
    pid = next(iter(row["refs"]), None)
    made_by = "WORKER" if row["what"] == "result" or not (pid is None or pid in drivers) else "DRIVER"
    return ObjectState(
        row["object_id"], row["bytes"], status, kind, row["site"] or "disabled", made_by, pid=pid
    )  # fmt: skip


def _workers() -> list[WorkerState]:
    """The processes of this node: those that live, then the last that have ended, the newest first."""
    store = store_client.require()
    session, ip = store.client.segment.session, get_node_ip_address()
    kinds = {clients.KIND_DRIVER: "DRIVER", clients.KIND_WORKER: "WORKER", clients.KIND_ACTOR: "WORKER"}
    node = NodeID.widened(session).hex()
    booted_s, ticks = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")

    def row(slot: int, gen: int, kind: int, pid: int, started: int, end_ms: int = 0) -> WorkerState:
        process = WorkerID.widened(f"{session}{slot:04x}{gen:08x}").hex()
        begin_ms = int((booted_s + started / ticks) * 1000)
        return WorkerState(process, not end_ms, kinds[kind], node, ip, pid, start_time_ms=begin_ms, end_time_ms=end_ms)

    found = [
        row(one["client"], one["gen"], one["kind"], one["pid"], one["start_time"])
        for one in clients.table(store.client.segment)
        if one["kind"] in kinds
    ]
    for one in _ended_processes():
        ended = row(one.slot, one.gen, one.kind, one.pid, one.start_time, one.end_ms)
        found.append(replace(ended, exit_type=one.cause, exit_detail=one.detail))
    return found


def _ended_processes() -> list[EndedProcess]:
    """The last processes of this node that have ended, the newest first."""
    path = store_client.require().socket_path
    return join.inquire(path, ListEndedProcesses(), EndedProcessList, patient=True).processes[::-1]


def _ended_actors() -> list[ActorState]:
    """The actors that those processes ran, and that are dead: their own records end with their last handles."""
    node, job = NodeID.widened(store_client.require().client.segment.session).hex(), _only_job()
    found = []
    for one in _ended_processes():
        if one.actor:
            space, name = namespaces.split(one.actor_name)
            reason = {"actor_died_error_context": {"error_message": one.detail}}
            found.append(ActorState(
                ActorID.widened(one.actor).hex(), inner_name(one.class_name), "DEAD", name=name, node_id=node,
                pid=one.pid, ray_namespace=space, death_cause=reason, num_restarts=one.restarts, job_id=job,
            ))  # fmt: skip
    return found


def _processes_of(rows: Sequence[dict[str, Any]]) -> dict[int | None, str]:
    """The ids of this node's processes by their pids, if a row has one."""
    return {one.pid: one.worker_id for one in reversed(_workers())} if any(row["pid"] for row in rows) else {}


def _counted(rows: Sequence[Any], *names: str) -> dict[tuple[str, ...], dict[str, int]]:
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        states = found.setdefault(tuple(row[name] for name in names), {})
        states[row.state] = states.get(row.state, 0) + 1
    return found


def _first(rows: Sequence[Any]) -> Any:
    return rows[0] if rows else None


def _select(kind: type[_State], rows: Any, filters: Filters, limit: int) -> list[_State]:
    wanted = _lowered(filters)
    for name, operator, _ in wanted:
        if operator not in _OPERATORS:
            raise ValueError(f"the operator {operator!r} is unknown; there are: {', '.join(_OPERATORS)}")
        if name not in kind.columns():
            raise ValueError(f"{kind.__name__} has no field {name!r} to filter by; it has {sorted(kind.columns())}")
    found = [row for row in rows if all(_fits(row[name], operator, value) for name, operator, value in wanted)]
    return found[:limit] if limit else found


def _lowered(filters: Filters) -> list[tuple[str, str, Any]]:
    """The filters, with their keys as fields are written; Ray takes keys in any case."""
    return [(str(name).lower(), operator, value) for name, operator, value in filters or ()]


def _fits(value: Any, operator: str, wanted: Any) -> bool:
    if isinstance(value, bool):
        wanted = _BITS.get(str(wanted), wanted)
    return _OPERATORS[operator](str(value).lower(), str(wanted).lower())  # "dead" finds DEAD, as in Ray
