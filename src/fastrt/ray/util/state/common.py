"""The rows of the state API, with Ray's attributes. A field that fastrt does not know is None."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class StateSchema:
    """A row: its fields are attributes and items."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or the default where there is none of that name."""
        return getattr(self, key, default)

    def asdict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)

    @classmethod
    def columns(cls) -> set[str]:
        """Return the names of the fields."""
        return {one.name for one in fields(cls)}


@dataclass
class ActorState(StateSchema):
    """An actor; `state`: DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD."""

    actor_id: str
    class_name: str
    state: str
    job_id: str | None = None
    name: str | None = None
    node_id: str | None = None
    pid: int | None = None
    ray_namespace: str | None = None
    serialized_runtime_env: str | None = None
    required_resources: dict[str, float] | None = None
    death_cause: dict[str, Any] | None = None
    is_detached: bool | None = None
    placement_group_id: str | None = None
    repr_name: str | None = None
    num_restarts: int = 0
    num_restarts_due_to_lineage_reconstruction: int = 0
    num_restarts_due_to_node_preemption: int = 0
    call_site: str | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: dict[str, Any] | None = None


@dataclass
class TaskState(StateSchema):
    """A task or call that has not ended; `state`: PENDING_ARGS_AVAIL, PENDING_NODE_ASSIGNMENT, RUNNING and others."""

    task_id: str
    attempt_number: int
    name: str
    state: str
    type: str
    func_or_class_name: str
    job_id: str | None = None
    actor_id: str | None = None
    parent_task_id: str | None = None
    node_id: str | None = None
    worker_id: str | None = None
    worker_pid: int | None = None
    error_type: str | None = None
    language: str | None = "PYTHON"
    required_resources: dict[str, float] | None = None
    runtime_env_info: dict[str, Any] | None = None
    placement_group_id: str | None = None
    events: list[dict[str, Any]] | None = None
    profiling_data: dict[str, Any] | None = None
    creation_time_ms: int | None = None
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    task_log_info: dict[str, Any] | None = None
    error_message: str | None = None
    is_debugger_paused: bool | None = None
    call_site: str | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: dict[str, Any] | None = None


@dataclass
class ObjectState(StateSchema):
    """An object of a node's store."""

    object_id: str
    object_size: int
    task_status: str
    reference_type: str
    call_site: str
    type: str
    attempt_number: int = 0
    pid: int | None = None
    ip: str | None = None


@dataclass
class NodeState(StateSchema):
    """A node of the cluster."""

    node_id: str
    node_ip: str | None
    is_head_node: bool
    state: str
    node_name: str
    resources_total: dict[str, float]
    labels: dict[str, str]
    state_message: str | None = None
    start_time_ms: int | None = None
    end_time_ms: int | None = None


@dataclass
class WorkerState(StateSchema):
    """A process of the session; `worker_type`: WORKER or DRIVER."""

    worker_id: str
    is_alive: bool
    worker_type: str
    node_id: str | None = None
    ip: str | None = None
    pid: int | None = None
    exit_type: str | None = None
    exit_detail: str | None = None
    worker_launch_time_ms: int | None = None
    worker_launched_time_ms: int | None = None
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    debugger_port: int | None = None
    num_paused_threads: int | None = None


@dataclass
class JobState(StateSchema):
    """A driver of this node's session."""

    job_id: str
    type: str = "DRIVER"
    status: str = "RUNNING"
    submission_id: str | None = None
    entrypoint: str = ""
    driver_info: dict[str, Any] | None = None


@dataclass
class PlacementGroupState(StateSchema):
    """A placement group; `state`: PENDING, CREATED, RESCHEDULING or REMOVED."""

    placement_group_id: str
    name: str | None
    state: str
    creator_job_id: str | None = None
    bundles: list[dict[str, Any]] | None = None
    is_detached: bool | None = None
    stats: dict[str, Any] | None = None
    strategy: str | None = None
    nodes: dict[int, str] = field(default_factory=dict)
