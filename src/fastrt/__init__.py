"""fastrt: a distributed runtime for Python whose hot paths are compiled."""

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
    SerializationError,
    StaleReferenceError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from fastrt.runtime.driver import init, is_initialized, shutdown
from fastrt.runtime.nodes import available_resources, cluster_resources, nodes
from fastrt.runtime.session import Runtime
from fastrt.store.client import get, put, wait
from fastrt.store.completed import as_completed
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor import ActorClass
from fastrt.tasks.cancel import cancel
from fastrt.tasks.decorator import remote
from fastrt.tasks.demand import NodeAffinity
from fastrt.tasks.handle import ActorHandle, get_actor, kill, list_named_actors
from fastrt.tasks.method import method
from fastrt.tasks.remote import RemoteFunction

__version__ = "0.1.0"

__all__ = [
    "ActorClass",
    "ActorDiedError",
    "ActorHandle",
    "ActorNotFoundError",
    "ArenaCorrupt",
    "AttachError",
    "ConfigError",
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
    "ObjectStoreFullError",
    "RemoteFunction",
    "Runtime",
    "SerializationError",
    "StaleReferenceError",
    "TaskCancelledError",
    "TaskError",
    "WorkerCrashedError",
    "as_completed",
    "available_resources",
    "cancel",
    "cluster_resources",
    "get",
    "get_actor",
    "init",
    "is_initialized",
    "kill",
    "list_named_actors",
    "method",
    "nodes",
    "put",
    "remote",
    "shutdown",
    "wait",
]
