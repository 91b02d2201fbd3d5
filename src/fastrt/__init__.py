"""fastrt: a distributed runtime for Python whose hot paths are compiled."""

import os
from typing import TYPE_CHECKING

from fastrt.lazy import attach

if TYPE_CHECKING:
    from fastrt import dask as dask
    from fastrt import exceptions, util
    from fastrt import joblib as joblib
    from fastrt.errors import (
        ActorDiedError,
        ActorError,
        ActorNotFoundError,
        ActorUnavailableError,
        ActorUnschedulableError,
        ArenaCorrupt,
        ArgumentError,
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
        OutOfMemoryError,
        PendingCallsError,
        PerformanceWarning,
        PlacementGroupNotFoundError,
        RuntimeEnvError,
        SerializationError,
        StaleReferenceError,
        TaskCancelledError,
        TaskError,
        TaskTimeoutError,
        UnsupportedError,
        WorkerCrashedError,
    )
    from fastrt.observe.progress import progress
    from fastrt.observe.report import report
    from fastrt.observe.timeline import timeline
    from fastrt.runtime.driver import init, is_initialized, shutdown
    from fastrt.runtime.nodes import available_resources, cluster_resources, nodes, waiting_demand
    from fastrt.runtime.session import Runtime
    from fastrt.runtime.state_api import list_actors, list_objects, list_tasks, list_workers
    from fastrt.store.as_completed import as_completed
    from fastrt.store.client import get, put, wait
    from fastrt.store.drafts import empty
    from fastrt.store.generator import ObjectRefGenerator
    from fastrt.store.ref import ObjectRef
    from fastrt.tasks.actor_class import ActorClass
    from fastrt.tasks.actor_handle import ActorHandle, get_actor, kill, list_named_actors
    from fastrt.tasks.cancel import cancel
    from fastrt.tasks.context import RuntimeContext, get_gpu_ids, get_runtime_context, runtime_context
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
    from fastrt.util.executor import Executor

# gRPC's fork support restarts its threads in the child on the parent's unfinished work: in a process with calls under
# way it killed one child in ten (grpcio 1.85), no matter what the child did. gRPC reads the variable at its first
# import, so it is set here; a value that the user has set stays.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"

__all__ = [
    "ActorClass",
    "ActorDiedError",
    "ActorError",
    "ActorHandle",
    "ActorNotFoundError",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "ArenaCorrupt",
    "ArgumentError",
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
    "OutOfMemoryError",
    "PendingCallsError",
    "PerformanceWarning",
    "PlacementGroup",
    "PlacementGroupNotFoundError",
    "PlacementGroupSchedulingStrategy",
    "RemoteFunction",
    "Runtime",
    "RuntimeContext",
    "RuntimeEnvError",
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
    "get_gpu_ids",
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
    "report",
    "runtime_context",
    "shutdown",
    "timeline",
    "util",
    "wait",
    "waiting_demand",
]

# Every name is imported at its first use: most commands and processes need few of them.
_HOMES = {
    "fastrt.errors": (
        "ActorDiedError ActorError ActorNotFoundError ActorUnavailableError ActorUnschedulableError ArenaCorrupt "
        "ArgumentError AttachError ConfigError "
        "FastrtError ForkedRuntimeError FunctionNotFoundError GetTimeoutError InfeasibleTaskError LockStuck "
        "NameTakenError NodeDiedError NotFoundError NotInitializedError ObjectLostError ObjectStoreFullError "
        "OutOfMemoryError PendingCallsError PerformanceWarning PlacementGroupNotFoundError RuntimeEnvError "
        "SerializationError StaleReferenceError TaskCancelledError TaskError TaskTimeoutError UnsupportedError "
        "WorkerCrashedError"
    ),
    "fastrt.observe.progress": "progress",
    "fastrt.observe.report": "report",
    "fastrt.observe.timeline": "timeline",
    "fastrt.runtime.driver": "init is_initialized shutdown",
    "fastrt.runtime.nodes": "available_resources cluster_resources nodes waiting_demand",
    "fastrt.runtime.session": "Runtime",
    "fastrt.runtime.state_api": "list_actors list_objects list_tasks list_workers",
    "fastrt.store.as_completed": "as_completed",
    "fastrt.store.client": "get put wait",
    "fastrt.store.drafts": "empty",
    "fastrt.store.generator": "ObjectRefGenerator",
    "fastrt.store.ref": "ObjectRef",
    "fastrt.tasks.actor_class": "ActorClass",
    "fastrt.tasks.actor_handle": "ActorHandle get_actor kill list_named_actors",
    "fastrt.tasks.cancel": "cancel",
    "fastrt.tasks.context": "RuntimeContext get_gpu_ids get_runtime_context runtime_context",
    "fastrt.tasks.decorator": "remote",
    "fastrt.tasks.exit_actor": "exit_actor",
    "fastrt.tasks.method": "method",
    "fastrt.tasks.placement_group": (
        "PlacementGroup PlacementGroupSchedulingStrategy get_current_placement_group get_placement_group "
        "placement_group placement_group_table remove_placement_group"
    ),
    "fastrt.tasks.remote": "RemoteFunction",
    "fastrt.tasks.resources": "NodeAffinity",
    "fastrt.util.executor": "Executor",
    "fastrt.dask": "",
    "fastrt.exceptions": "",
    "fastrt.joblib": "",
    "fastrt.util": "",
}

if not TYPE_CHECKING:
    # The driver's module starts a session where a program uses one without `init`, and ends it at the program's end.
    __getattr__, __dir__ = attach(__name__, _HOMES, first="fastrt.runtime.driver")
