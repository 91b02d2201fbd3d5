"""`fastrt.cancel`: end a task before it has a result."""

from __future__ import annotations

import os
import signal

from fastrt._core import calls
from fastrt._core import tasks as core
from fastrt._core.clients import KIND_WORKER, table
from fastrt.errors import TaskCancelledError
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef


def cancel(ref: ObjectRef | ObjectRefGenerator, *, force: bool = False) -> None:
    """Cancel the task that makes `ref`; nothing happens when the value is there already.

    A task that has not started never runs. One that runs gets a KeyboardInterrupt; with `force` its worker is
    killed. `get` on its results raises `TaskCancelledError`; it is not retried.
    A call of an actor is cancelled alike: before it has begun; with a KeyboardInterrupt where the actor runs one call
    at a time; with `asyncio.CancelledError` where it is a coroutine. One that runs in a thread goes on to its end.

    Args:
        ref: a result of the task, or what a generator's call gave. A reference made by `put` has no task and is left
            alone.
        force: kill the worker process instead of interrupting it.
    Raises:
        TypeError: `ref` is not an ObjectRef.
        ValueError: `force` with a call of an actor: it would end all of the actor.
        StaleReferenceError: `ref` belongs to a session that has ended.
    Source:
        The semantics of `ray.cancel`.
    """
    if isinstance(ref, ObjectRefGenerator):
        ref = ref.completed()
    if not isinstance(ref, ObjectRef):
        raise TypeError(f"cancel takes an ObjectRef, not {type(ref).__name__}")
    other = engines.current()
    if other is not None:
        other.cancel(ref, force=force)
        return
    store_client.refuse_stale(ref)
    cancel_in(store_client.require(), ref, force)


def cancel_in(store: Store, ref: ObjectRef, force: bool = False) -> None:
    """`cancel`, in the session of `store`.

    Raises:
        ValueError: `force` with a call of an actor.
    """
    if force and calls.is_call(store.client, ref):
        raise ValueError(
            f"{ref!r} is the result of an actor's call: force would end the actor; use fastrt.kill for that"
        )
    what, task, pid = core.cancel(store.client, ref)
    if what == "ending":
        store.put_error(task, TaskCancelledError(f"the task that makes {ref!r} was cancelled before it started"))
        core.finish(store.client, task)
    elif what == "running":
        try:
            os.kill(pid, signal.SIGKILL if force and is_worker(store, pid) else signal.SIGINT)
        except ProcessLookupError:
            pass  # it died by itself; recovery sees that the task is cancelled


def is_worker(store: Store, pid: int) -> bool:
    """Whether a process that runs a task may be killed for it: not one that has lent tasks to other nodes."""
    return any(row["pid"] == pid and row["kind"] == KIND_WORKER for row in table(store.client.segment))
