"""Ray's exceptions for which fastrt has no occasion: programs can name them, in Ray's order of inheritance.

`fastrt.exceptions` imports this module when the first of them is named.
"""

from fastrt.errors import FastrtError, ObjectLostError


class AsyncioActorExit(FastrtError):
    """Ray raises it inside of an actor that ends itself. `exit_actor` raises another one here."""


class AuthenticationError(FastrtError):
    """A process shows no valid token to a cluster. fastrt raises `AttachError`."""


class CrossLanguageError(FastrtError):
    """An error of a worker in another language. fastrt has no such workers."""


class LocalRayletDiedError(FastrtError):
    """The process that manages a node died. Another one replaces it here."""


class ObjectFetchTimedOutError(ObjectLostError):
    """An object did not come from another node in time."""


class ObjectFreedError(ObjectLostError):
    """An object was freed by hand. fastrt has no such call."""


class ObjectReconstructionFailedError(ObjectLostError):
    """An object was lost and cannot be made again. fastrt raises `ObjectLostError`."""


class ObjectRefStreamEndOfStreamError(FastrtError):
    """A generator has no further item. fastrt raises StopIteration."""


class OwnerDiedError(ObjectLostError):
    """The process that owned an object died. fastrt raises `ObjectLostError`."""


class PlasmaObjectNotAvailable(FastrtError):
    """An object is not in the store of this node yet."""


class RaySystemError(FastrtError):
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


class RpcError(FastrtError):
    """A call between processes of a cluster failed."""


class StreamingGeneratorReplayInconsistentError(RaySystemError):
    """A generator that ran again has yielded another number of items."""


class UnserializableException(FastrtError):
    """An exception that cannot be restored here. fastrt raises a `TaskError` without a cause."""


class UserCodeException(FastrtError):
    """An error of a program's code in a worker of another language."""
