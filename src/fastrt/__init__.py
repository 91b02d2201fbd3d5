"""fastrt: a distributed runtime for Python whose hot paths are compiled."""

import os
from typing import TYPE_CHECKING, Any

from fastrt import exceptions
from fastrt.errors import (
    ActorDiedError,
    ActorNotFoundError,
    ArenaCorrupt,
    AttachError,
    ConfigError,
    FastrtError,
    ForkedRuntimeError,
    FunctionNotFoundError,
    GetTimeoutError,
    InfeasibleTaskError,
    LockStuck,
    NameTakenError,
    NodeDiedError,
    NotFoundError,
    NotInitializedError,
    ObjectLostError,
    ObjectStoreFullError,
    PerformanceWarning,
    SerializationError,
    StaleReferenceError,
    TaskCancelledError,
    TaskError,
    TaskTimeoutError,
    UnsupportedError,
    WorkerCrashedError,
)
from fastrt.runtime.driver import init, is_initialized, shutdown
from fastrt.runtime.nodes import available_resources, cluster_resources, nodes
from fastrt.runtime.session import Runtime
from fastrt.store.as_completed import as_completed
from fastrt.store.client import get, put, wait
from fastrt.store.drafts import empty
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import ActorHandle, get_actor, kill, list_named_actors
from fastrt.tasks.cancel import cancel
from fastrt.tasks.context import RuntimeContext, runtime_context
from fastrt.tasks.decorator import remote
from fastrt.tasks.exit_actor import exit_actor
from fastrt.tasks.method import method
from fastrt.tasks.placement_group import (
    PlacementGroup,
    PlacementGroupSchedulingStrategy,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from fastrt.tasks.remote import RemoteFunction
from fastrt.tasks.resources import NodeAffinity

if TYPE_CHECKING:
    from fastrt import util
    from fastrt.observe.progress import progress
    from fastrt.observe.timeline import timeline
    from fastrt.runtime.state_api import list_actors, list_objects, list_tasks, list_workers
    from fastrt.util.executor import Executor

# gRPC's fork support restarts its threads in the child on the parent's unfinished work: in a process with calls under
# way it killed one child in ten (grpcio 1.85), no matter what the child did. gRPC reads the variable at its first
# import, so it is set here; a value that the user has set stays.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

get_runtime_context = runtime_context  # as Ray spells it

__version__ = "0.1.0"

__all__ = [
    "ActorClass",
    "ActorDiedError",
    "ActorHandle",
    "ActorNotFoundError",
    "ArenaCorrupt",
    "AttachError",
    "ConfigError",
    "Executor",
    "FastrtError",
    "ForkedRuntimeError",
    "FunctionNotFoundError",
    "GetTimeoutError",
    "InfeasibleTaskError",
    "NodeAffinity",
    "LockStuck",
    "NameTakenError",
    "NodeDiedError",
    "NotFoundError",
    "NotInitializedError",
    "ObjectLostError",
    "ObjectRef",
    "ObjectRefGenerator",
    "ObjectStoreFullError",
    "PerformanceWarning",
    "PlacementGroup",
    "PlacementGroupSchedulingStrategy",
    "RemoteFunction",
    "Runtime",
    "RuntimeContext",
    "SerializationError",
    "StaleReferenceError",
    "TaskCancelledError",
    "TaskError",
    "TaskTimeoutError",
    "UnsupportedError",
    "WorkerCrashedError",
    "as_completed",
    "available_resources",
    "cancel",
    "cluster_resources",
    "empty",
    "get",
    "exceptions",
    "exit_actor",
    "get_actor",
    "get_runtime_context",
    "get_current_placement_group",
    "get_placement_group",
    "init",
    "is_initialized",
    "kill",
    "list_actors",
    "list_named_actors",
    "list_objects",
    "list_tasks",
    "list_workers",
    "method",
    "nodes",
    "placement_group",
    "placement_group_table",
    "progress",
    "put",
    "remote",
    "remove_placement_group",
    "runtime_context",
    "shutdown",
    "timeline",
    "util",
    "wait",
]

# Names that are imported at their first use, so that programs without them do not pay for the import.
_LAZY = {
    "Executor": ("fastrt.util.executor", "Executor"),
    "dask": ("fastrt.dask", ""),
    "joblib": ("fastrt.joblib", ""),
    "list_actors": ("fastrt.runtime.state_api", "list_actors"),
    "list_objects": ("fastrt.runtime.state_api", "list_objects"),
    "list_tasks": ("fastrt.runtime.state_api", "list_tasks"),
    "list_workers": ("fastrt.runtime.state_api", "list_workers"),
    "progress": ("fastrt.observe.progress", "progress"),
    "timeline": ("fastrt.observe.timeline", "timeline"),
    "util": ("fastrt.util", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
