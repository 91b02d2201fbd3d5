"""fastrt's errors under their names in Ray: `except fastrt.exceptions.RayTaskError` works unchanged.

If fastrt has one error for several of Ray's, all these names are aliases of it. Names for which fastrt has no occasion
are classes of their own, in Ray's order of inheritance, so programs can name them.
"""

from fastrt.errors import (
    ActorDiedError,
    ActorError,
    ActorNotFoundError,
    FastrtError,
    GetTimeoutError,
    InfeasibleTaskError,
    NameTakenError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfMemoryError,
    SerializationError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)

RayError = FastrtError
RayTaskError = TaskError
RayActorError = ActorError
ActorAlreadyExistsError = NameTakenError
ActorHandleNotFoundError = ActorNotFoundError
ActorUnschedulableError = TaskUnschedulableError = TaskPlacementGroupRemoved = InfeasibleTaskError
ActorPlacementGroupRemoved = ActorDiedError
OutOfDiskError = ObjectStoreFullError
OufOfBandObjectRefSerializationException = SerializationError


class ActorUnavailableError(RayActorError):
    """An actor does not answer and may come back. Calls of fastrt wait for it and do not raise this."""


class AsyncioActorExit(RayError):
    """Ray raises it inside of an actor that ends itself. `exit_actor` raises another one here."""


class AuthenticationError(RayError):
    """A process shows no valid token to a cluster. fastrt raises `AttachError`."""


class CrossLanguageError(RayError):
    """An error of a worker in another language. fastrt has no such workers."""


class LocalRayletDiedError(RayError):
    """The process that manages a node died. Another one replaces it here."""


class ObjectFetchTimedOutError(ObjectLostError):
    """An object did not come from another node in time."""


class ObjectFreedError(ObjectLostError):
    """An object was freed by hand. fastrt has no such call."""


class ObjectReconstructionFailedError(ObjectLostError):
    """An object was lost and cannot be made again. fastrt raises `ObjectLostError`."""


class ObjectRefStreamEndOfStreamError(RayError):
    """A generator has no further item. fastrt raises StopIteration."""


class OwnerDiedError(ObjectLostError):
    """The process that owned an object died. fastrt raises `ObjectLostError`."""


class PendingCallsLimitExceeded(RayError):
    """An actor has as many waiting calls as its option max_pending_calls allows."""


class PlasmaObjectNotAvailable(RayError):
    """An object is not in the store of this node yet."""


class RaySystemError(RayError):
    """A fault of the runtime itself."""


class RayChannelError(RaySystemError):
    """A fault of a channel between compiled graphs. fastrt has no such graphs."""


class RayChannelTimeoutError(RayChannelError, TimeoutError):
    """A channel between compiled graphs has no value in time."""


class RayCgraphCapacityExceeded(RaySystemError):
    """A compiled graph has too many runs in flight."""


class RayDirectTransportError(RaySystemError):
    """A fault of a transport of tensors between GPUs."""


class ReferenceCountingAssertionError(ObjectLostError, AssertionError):
    """An object was freed although references to it are alive."""


class RpcError(RayError):
    """A call between processes of a cluster failed."""


class RuntimeEnvSetupError(RayError):
    """The environment of a task or an actor cannot be made."""


class StreamingGeneratorReplayInconsistentError(RaySystemError):
    """A generator that ran again has yielded another number of items."""


class UnserializableException(RayError):
    """An exception that cannot be restored here. fastrt raises a `TaskError` without a cause."""


class UserCodeException(RayError):
    """An error of a program's code in a worker of another language."""


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
