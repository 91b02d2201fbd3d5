"""fastrt's errors under the names that Ray gives them: `except fastrt.exceptions.RayTaskError` works unchanged."""

from fastrt.errors import (
    ActorDiedError,
    FastrtError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)

RayError = FastrtError
RayTaskError = TaskError
RayActorError = ActorDiedError
RaySystemError = FastrtError

__all__ = [
    "ActorDiedError",
    "GetTimeoutError",
    "NodeDiedError",
    "ObjectLostError",
    "ObjectStoreFullError",
    "RayActorError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "TaskCancelledError",
    "WorkerCrashedError",
]
