"""`fastrt.cancel`: end a task before it has a result."""

from __future__ import annotations

import os
import signal

from fastrt._core.memory.clients import KIND_WORKER, table
from fastrt._core.tasks import calls, tally
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
    An actor's call that has not begun never runs. A running call gets a KeyboardInterrupt where the actor runs one call
    at a time, and `asyncio.CancelledError` where it is a coroutine. A call that runs in a thread goes on to its end.
    What a cancelled call returns is dropped; a task that catches the interrupt and returns has its value.

    The task may have been submitted by any node, and run on any node.

    Args:
        ref: a result of the task, or the ObjectRefGenerator of its call. A reference made by `put` has no task and is
            left alone.
        force: kill the worker process instead of interrupting it. A call of an actor that another node has made is
            cancelled without force.
        recursive: cancel also the tasks that a running task has submitted, their tasks, and so on. The tasks that an
            actor with several concurrent calls submits have no parent and are not cancelled with a call.
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
    """Cancel a task in the session of `store`, as `cancel` does.

    Raises:
        ValueError: `force` with a call of an actor.
    """
    if force and calls.is_call(store.client, ref):
        raise ValueError(
            f"force=True is not supported for {ref!r}, the result of an actor's call: "
            "force would end the actor; use fastrt.kill for that"
        )
    maker = core.maker_of(store.client, ref)
    what, task, pid = core.cancel(store.client, ref, force, not recursive)
    words = f"the task that makes {ref!r} was cancelled before it started"
    _carry_out(store, what, task, pid, force, words)
    if what == "running" and recursive and maker is not None:
        _cancel_children(store, *maker, force)


def cancel_record(store: Store, record: int, number: int, words: str = "was cancelled before it started") -> bool:
    """Cancel the task with that id, if it is still in that record of the task table; not what it has submitted.

    Args:
        store: this process's attachment to its session.
        record, number: the task's record, and its id.
        words: why it has not started, for its error.
    Returns:
        Whether it runs; it was interrupted.
    """
    what, task, pid = core.cancel_task(store.client, record, number, False)
    _carry_out(store, what, task, pid, False, f"task {number:016x} {words}")
    return what == "running"


def _cancel_children(store: Store, job: int, path: int, force: bool) -> None:
    """Cancel the tasks that a cancelled task has submitted, and the tasks of those, and so on.

    This comes after the mark of the parent, so that most tasks which it submits meanwhile are found, too.
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
    """Finish a cancellation after the core has marked the task; `words` are its error if it never runs."""
    if what == "ending":
        store.put_error(task, TaskCancelledError(words))
        core.finish(store.client, task, tally.CANCELLED)
    elif what == "running":
        interrupt(store, pid, force)


def interrupt(store: Store, pid: int, force: bool) -> None:
    """Interrupt a process that runs a task which was marked as cancelled.

    Args:
        store: this process's attachment to its session.
        pid: the process.
        force: it must end, if it is a worker and still runs that task. A process that has forwarded the task to
            another node reads in the task's record whether to force it there.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it has died meanwhile; recovery sees that the task is cancelled
    try:
        # The pid was the process's after the descriptor was opened, so the descriptor is the process's, too.
        kinds = [row["kind"] for row in table(store.client.segment) if row["pid"] == pid]
        if kinds:
            kill = force and KIND_WORKER in kinds
            signal.pidfd_send_signal(pidfd, cancel_core.SIGNAL if kill else signal.SIGINT)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
