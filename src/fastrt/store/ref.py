"""ObjectRef: a reference to a value that is, or will be, in the object store."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator
from typing import Any

from fastrt._core.objects import handles
from fastrt.errors import FastrtError

# What an ObjectRef cannot do by itself; store.client sets these when it is imported.
_hooks: dict[str, Callable[..., Any]] = {}


class ObjectRef(handles.Ref):
    """A reference to an object. The object lives at least as long as the reference.

    References hash and compare by the object they name. They can be passed to tasks (as an argument: the task
    gets the value; inside a container: it gets the reference), awaited, and turned into futures.
    """

    __slots__ = ()

    def hex(self) -> str:
        """Return the 64-bit object reference as 16 hex digits: node in the first four, counter in the rest."""
        return f"{self.objref:016x}"

    def __repr__(self) -> str:
        return f"ObjectRef({self.hex()})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The store's own pickler never comes here: it records references as contained. Through any other
        # pickle only the name travels, so the receiver must be of the same session and the object still alive.
        return _hooks["restore"], (self.owner.segment.session, self.objref, self.index)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the value without blocking the event loop; raise what `fastrt.get` would raise."""
        import asyncio

        return asyncio.wrap_future(self.future()).__await__()

    def future(self) -> concurrent.futures.Future[Any]:
        """Return a `concurrent.futures.Future` that gets the value, or the error that `fastrt.get` would raise.

        One background thread waits for all pending futures of the process, and sleeps until one of them is ready.
        A future cannot cancel its task.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        try:
            _hooks["when_ready"](self, lambda ref, ended: _settle(ref, future, ended))
        except FastrtError as exc:  # its session has ended
            future.set_exception(exc)
        return future


def _settle(ref: ObjectRef, future: concurrent.futures.Future[Any], ended: BaseException | None) -> None:
    try:
        if ended is not None:
            raise ended
        value = _hooks["get"](ref)
    except BaseException as exc:  # whatever the task raised belongs to the future
        future.set_exception(exc.with_traceback(None))  # the frames of this thread help nobody
    else:
        future.set_result(value)


def install_hooks(**hooks: Callable[..., Any]) -> None:
    """Give references the functions of the modules above that they need: restore, get, when_ready."""
    _hooks.update(hooks)


handles.set_ref_class(ObjectRef)


class Waitable:
    """What `wait` takes beside references, because it is ready at some time: a generator."""

    __slots__ = ()

    def waited_for(self) -> tuple[ObjectRef, ObjectRef]:
        """Return the references to its stream and to its end, one of which becomes ready.

        Raises:
            NotImplementedError: it is another engine's, which waits for it by itself.
        """
        raise NotImplementedError


def kind_of(one: object) -> str:
    """What something is that is no reference, for messages: of a generator also where its references come from."""
    name = type(one).__name__
    if not (hasattr(one, "completed") and hasattr(one, "__next__")):
        return name
    return f"{name}; next(generator) gives the reference to its next item, generator.completed() one to its end"
