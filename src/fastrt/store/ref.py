"""ObjectRef: a reference to a value that is, or will be, in the object store."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic

from fastrt._core.objects import handles, naming
from fastrt.errors import FastrtError

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import TypeVar

    from fastrt.ids import JobID, TaskID

    T = TypeVar("T", default=Any, covariant=True)  # of the value; a plain `ObjectRef` is one of `Any`
else:
    from typing import TypeVar

    T = TypeVar("T", covariant=True)

# Operations of an ObjectRef that need the modules above; store.client sets these when it is imported.
_hooks: dict[str, Callable[..., Any]] = {}
_BYTES = 8  # of a reference's number


class ObjectRef(handles.Ref, Generic[T]):
    """A reference to an object. The object lives at least as long as the reference.

    References hash and compare by the object they name. They can be passed to tasks, awaited, and turned into futures.
    A task gets the value of a reference that is an argument itself; inside a container it gets the reference.

    Args:
        binary: what `binary` of another reference returned; b"": the reference names nothing, as `nil`. Bytes keep
            no object alive: pass references themselves.

    Raises:
        StaleReferenceError: this node knows no such object (any more).
        TypeError, ValueError: `binary` is not `size` bytes.
    """

    __slots__ = ()

    def __init__(self, binary: bytes = b"") -> None:
        if binary != b"":  # the core makes references without this call
            naming.name_object(_hooks["store"]().client, self, _number(binary))

    def hex(self) -> str:
        """Return the 64-bit object reference as 16 hex digits: node in the first four, counter in the rest."""
        return f"{self.objref:016x}"

    def binary(self) -> bytes:
        """Return the bytes whose hex digits `hex` returns."""
        return self.objref.to_bytes(_BYTES, "big")

    def size(self) -> int:
        """Return the number of bytes of `binary`."""
        return _BYTES

    @classmethod
    def from_hex(cls, hex_id: str | bytes) -> ObjectRef:
        """Return the reference with these hex digits, as `ObjectRef(binary)` does."""
        return cls(bytes.fromhex(hex_id.decode() if isinstance(hex_id, bytes) else hex_id))

    @classmethod
    def from_binary(cls, id_bytes: bytes) -> ObjectRef:
        """Return the reference with these bytes, as `ObjectRef(binary)` does."""
        return cls(id_bytes)

    @classmethod
    def nil(cls) -> ObjectRef:
        """Return the reference that names nothing."""
        return cls()

    def is_nil(self) -> bool:
        """Whether the reference names nothing, as that which `nil` returns."""
        return not self.objref

    def task_id(self) -> TaskID:
        """Return the id of the task that makes the object; of an object that was put, and of a further result, its own.

        Source:
            The semantics of `ray.ObjectRef.task_id`.
        """
        from fastrt.ids import TaskID  # here: few programs need it

        return TaskID.widened(self.hex())

    def job_id(self) -> JobID:
        """Return the id of the job for which this process works; nil where another engine runs."""
        from fastrt.ids import JobID

        owner: Any = self.owner
        return JobID.nil() if owner is None else JobID.of_job(owner.working_job or owner.job)

    def __repr__(self) -> str:
        return f"ObjectRef({self.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The store's own pickler never calls this: it records references as contained. Any other pickle contains only
        # the object's name, so the receiver must be of the same session and the object still alive.
        return _hooks["restore"], (self.owner.segment.session, self.objref, self.index)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the value without blocking the event loop; raise what `fastrt.get` would raise."""
        import asyncio

        return asyncio.wrap_future(self.future()).__await__()

    def as_future(self) -> asyncio.Future[T]:
        """Return a future of the running event loop that gets the value, as `await` does."""
        import asyncio

        return asyncio.wrap_future(self.future())

    def future(self) -> concurrent.futures.Future[T]:
        """Return a `concurrent.futures.Future` that gets the value, or the error that `fastrt.get` would raise.

        One background thread waits for all pending futures of the process, and sleeps until one of them is ready.
        A future cannot cancel its task.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        try:
            _hooks["when_ready"](self, lambda ref, ended: _settle(ref, future, ended))
        except FastrtError as exc:  # its session has ended
            future.set_exception(exc)
        return future

    def _on_completed(self, callback: Callable[[Any], object]) -> None:
        """Call a function with the value, or with its error, once there is one: libraries for Ray use this name."""
        self.future().add_done_callback(lambda done: _call(callback, done))


def _number(binary: bytes) -> int:
    if not isinstance(binary, (bytes, bytearray)):
        raise TypeError(f"put and tasks' calls return references, and bytes make one; {binary!r} does not")
    if len(binary) != _BYTES:
        raise ValueError(f"a reference has {_BYTES} bytes, not {len(binary)}: {bytes(binary)!r}")
    return int.from_bytes(binary, "big")


def _call(callback: Callable[[Any], object], done: concurrent.futures.Future[Any]) -> None:
    error = done.exception()
    try:
        callback(done.result() if error is None else error)
    except Exception:  # as text: a record with the traceback would keep the callback
        import logging
        import traceback

        logging.getLogger("fastrt").error("a callback of a reference raised\n%s", traceback.format_exc())


def _settle(ref: ObjectRef, future: concurrent.futures.Future[Any], ended: BaseException | None) -> None:
    try:
        if ended is not None:
            raise ended
        value = _hooks["get"](ref)
    except BaseException as exc:  # every exception of the task is the future's result
        future.set_exception(exc.with_traceback(None))  # the frames of this thread do not help users
    else:
        future.set_result(value)


def install_hooks(**hooks: Callable[..., Any]) -> None:
    """Set the functions of the modules above that references need: restore, get, when_ready."""
    _hooks.update(hooks)


handles.set_ref_class(ObjectRef)


class Waitable:
    """Base of objects other than references that `wait` accepts: generators."""

    __slots__ = ()

    def waited_for(self) -> tuple[ObjectRef, ObjectRef]:
        """Return the references to its stream and to its end, one of which becomes ready.

        Raises:
            NotImplementedError: it belongs to another engine, which implements the wait itself.
        """
        raise NotImplementedError


def kind_of(one: object) -> str:
    """Name the type of an object that is not a reference, for messages; for a generator, with how to get references."""
    name = type(one).__name__
    if not (hasattr(one, "completed") and hasattr(one, "__next__")):
        return name
    return f"{name}; next(generator) gives the reference to its next item, generator.completed() one to its end"
