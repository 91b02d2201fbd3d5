"""fastrt's errors under their names in Ray: `except fastrt.exceptions.RayTaskError` works unchanged.

If fastrt has one error for several of Ray's, all these names are aliases of it. Names for which fastrt has no occasion
are classes of their own, in Ray's order of inheritance, so programs can name them.
"""

from typing import TYPE_CHECKING

from fastrt.errors import (
    ActorDiedError,
    ActorError,
    ActorNotFoundError,
    ActorUnavailableError,
    ActorUnschedulableError,
    FastrtError,
    GetTimeoutError,
    InfeasibleTaskError,
    NameTakenError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfMemoryError,
    PendingCallsError,
    RuntimeEnvError,
    SerializationError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from fastrt.lazy import attach

if TYPE_CHECKING:
    from fastrt.ray_exceptions import (
        AsyncioActorExit,
        AuthenticationError,
        CrossLanguageError,
        LocalRayletDiedError,
        ObjectFetchTimedOutError,
        ObjectFreedError,
        ObjectReconstructionFailedError,
        ObjectRefStreamEndOfStreamError,
        OwnerDiedError,
        PlasmaObjectNotAvailable,
        RayCgraphCapacityExceeded,
        RayChannelError,
        RayChannelTimeoutError,
        RayDirectTransportError,
        RaySystemError,
        ReferenceCountingAssertionError,
        RpcError,
        StreamingGeneratorReplayInconsistentError,
        UnserializableException,
        UserCodeException,
    )

RayError = FastrtError
RayTaskError = TaskError
RayActorError = ActorError
ActorAlreadyExistsError = NameTakenError
ActorHandleNotFoundError = ActorNotFoundError
TaskUnschedulableError = TaskPlacementGroupRemoved = InfeasibleTaskError
ActorPlacementGroupRemoved = ActorDiedError
OutOfDiskError = ObjectStoreFullError
PendingCallsLimitExceeded = PendingCallsError
RuntimeEnvSetupError = RuntimeEnvError
OufOfBandObjectRefSerializationException = SerializationError

__all__ = [
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorHandleNotFoundError",
    "ActorPlacementGroupRemoved",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "AsyncioActorExit",
    "AuthenticationError",
    "CrossLanguageError",
    "GetTimeoutError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectFetchTimedOutError",
    "ObjectFreedError",
    "ObjectLostError",
    "ObjectReconstructionFailedError",
    "ObjectRefStreamEndOfStreamError",
    "ObjectStoreFullError",
    "OufOfBandObjectRefSerializationException",
    "OutOfDiskError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "PendingCallsLimitExceeded",
    "PlasmaObjectNotAvailable",
    "RayActorError",
    "RayCgraphCapacityExceeded",
    "RayChannelError",
    "RayChannelTimeoutError",
    "RayDirectTransportError",
    "RayError",
    "RaySystemError",
    "RayTaskError",
    "ReferenceCountingAssertionError",
    "RpcError",
    "RuntimeEnvSetupError",
    "StreamingGeneratorReplayInconsistentError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "UnserializableException",
    "UserCodeException",
    "WorkerCrashedError",
]

if not TYPE_CHECKING:  # few programs need the other names
    __getattr__, __dir__ = attach(__name__, {"fastrt.ray_exceptions": " ".join(set(__all__) - vars().keys())})
