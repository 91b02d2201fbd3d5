"""fastrt's errors under their names in Ray: `except fastrt.exceptions.RayTaskError` works unchanged.

If fastrt has one error for several of Ray's, all these names are aliases of it.
"""

from fastrt.errors import (
    ActorDiedError,
    FastrtError,
    GetTimeoutError,
    InfeasibleTaskError,
    NameTakenError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)

RayError = FastrtError
RayTaskError = UserCodeException = TaskError
RayActorError = ActorUnavailableError = ActorPlacementGroupRemoved = ActorDiedError
RaySystemError = CrossLanguageError = RuntimeEnvSetupError = FastrtError
ActorAlreadyExistsError = NameTakenError
ActorUnschedulableError = TaskUnschedulableError = TaskPlacementGroupRemoved = InfeasibleTaskError
LocalRayletDiedError = NodeDiedError
ObjectFetchTimedOutError = ObjectFreedError = ObjectReconstructionFailedError = ObjectLostError
OwnerDiedError = PlasmaObjectNotAvailable = ReferenceCountingAssertionError = ObjectLostError
OutOfDiskError = PendingCallsLimitExceeded = ObjectStoreFullError

__all__ = [
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorPlacementGroupRemoved",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "CrossLanguageError",
    "GetTimeoutError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectFetchTimedOutError",
    "ObjectFreedError",
    "ObjectLostError",
    "ObjectReconstructionFailedError",
    "ObjectStoreFullError",
    "OutOfDiskError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "PendingCallsLimitExceeded",
    "PlasmaObjectNotAvailable",
    "RayActorError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "ReferenceCountingAssertionError",
    "RuntimeEnvSetupError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "UserCodeException",
    "WorkerCrashedError",
]
