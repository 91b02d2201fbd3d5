"""`fastrt.cancel`: end a task before it has a result."""

from __future__ import annotations

import os
import signal

from fastrt._core.memory.clients import KIND_WORKER, table
from fastrt._core.tasks import calls
from fastrt._core.tasks import cancel as cancel_core
from fastrt._core.tasks import tasks as core
from fastrt.errors import TaskCancelledError
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store.client import Store
from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef


def cancel(ref: ObjectRef | ObjectRefGenerator, *, force: bool = False, recursive: bool = True) -> None:
    """Cancel the task that makes `ref`; nothing happens when the value is there already.

    A task that has not started never runs. One that runs gets a KeyboardInterrupt; with `force` its worker is
    killed, unless that runs another task by then. `get` on its results raises `TaskCancelledError`; it is not retried.
    A call of an actor is cancelled alike: before it has begun; with a KeyboardInterrupt where the actor runs one call
    at a time; with `asyncio.CancelledError` where it is a coroutine. One that runs in a thread goes on to its end.

    It does not matter which node has submitted the task, and which runs it.

    Args:
        ref: a result of the task, or what a generator's call gave. A reference made by `put` has no task and is left
            alone.
        force: kill the worker process instead of interrupting it. A call of an actor that another node has made is
            cancelled without force.
        recursive: cancel also what a task that runs has submitted, and so on, as far as it has not ended. Of an actor
            that runs several calls at once nobody knows which of them submitted a task: none is its child.
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
        other.cancel(ref, force=force, recursive=recursive)
        return
    store_client.refuse_stale(ref)
    cancel_in(store_client.require(), ref, force, recursive)


def cancel_in(store: Store, ref: ObjectRef, force: bool = False, recursive: bool = True) -> None:
    """`cancel`, in the session of `store`.

    Raises:
        ValueError: `force` with a call of an actor.
    """
    if force and calls.is_call(store.client, ref):
        raise ValueError(
            f"{ref!r} is the result of an actor's call: force would end the actor; use fastrt.kill for that"
        )
    maker = core.maker_of(store.client, ref)
    what, task, pid = core.cancel(store.client, ref, force, not recursive)
    words = f"the task that makes {ref!r} was cancelled before it started"
    _carry_out(store, what, task, pid, force, words)
    if what == "running" and recursive and maker is not None:
        _cancel_children(store, *maker, force)


def _cancel_children(store: Store, job: int, path: int, force: bool) -> None:
    """Cancel what a task has submitted that was told to end, and what that has, and so on.

    After it was told, so that what it submits meanwhile is found, too, as far as that can be.
    """
    paths = [path]
    while paths:
        for child, known, below, is_call in core.children(store.client, job, paths.pop()):
            force_child = force and not is_call
            what, task, pid = core.cancel_task(store.client, child, known, force_child)
            words = "the task was cancelled with the one that submitted it"
            _carry_out(store, what, task, pid, force_child, words)
            if what == "running":
                paths.append(below)


def _carry_out(store: Store, what: str, task: int, pid: int, force: bool, words: str) -> None:
    """Do what is left to do after the core has cancelled a task; `words` are its error if it never runs."""
    if what == "ending":
        store.put_error(task, TaskCancelledError(words))
        core.finish(store.client, task)
    elif what == "running":
        interrupt(store, pid, force)


def interrupt(store: Store, pid: int, force: bool) -> None:
    """Tell a process that runs a task which was marked as cancelled.

    Args:
        store: this process's attachment to its session.
        pid: the process.
        force: it shall end, if it is a worker and still runs that task. One that has lent the task to another node
            reads in the task's record what it shall ask for there.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it died by itself; recovery sees that the task is cancelled
    try:
        # The number was its own after the descriptor was there, so the descriptor is its own, too.
        kinds = [row["kind"] for row in table(store.client.segment) if row["pid"] == pid]
        if kinds:
            kill = force and KIND_WORKER in kinds
            signal.pidfd_send_signal(pidfd, cancel_core.SIGNAL if kill else signal.SIGINT)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
