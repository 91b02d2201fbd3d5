"""The worker's loop: claim a task, run it, seal its results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from fastrt._core import tasks as core
from fastrt._core import trace
from fastrt.errors import FastrtError, ObjectStoreFullError, SerializationError, TaskCancelledError, TaskError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks import arguments
from fastrt.tasks.functions import FunctionCache

_SCALARS = 1  # the kind of arguments that the core reads by itself
_IDLE_S = 1.0


class Worker:
    """Runs tasks until it is told to stop.

    Args:
        store: this process's attachment.
        say: sends a message to the daemon: "blocked", "unblocked".
        told_to_stop: asks the daemon's connection whether there is an order to leave; called when idle.
        may_wait: whether the daemon can still start other workers while this one waits inside a task.
    """

    def __init__(
        self, store: Store, say: Callable[[str], object], told_to_stop: Callable[[], bool], may_wait: Callable[[], bool]
    ) -> None:
        self._store = store
        self._client = store.client
        self._say = say
        self._told_to_stop = told_to_stop
        self._may_wait = may_wait
        self._functions = FunctionCache(store)
        self._trace = trace.enabled(store.client)
        self._stack: list[int] = []  # tasks under way here, the innermost last
        self._interruptible = False
        store.on_block = self._on_block
        store.help_with = self._help_with

    def run(self) -> None:
        """Loop until the daemon says to stop."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        spin_s = self._store.spin_s
        while True:
            task = core.next_task(self._client, _IDLE_S, spin_s)
            if task >= 0:
                self.execute(task)
            elif self._told_to_stop():
                return

    def execute(self, task: int) -> None:
        """Run one task that this client has claimed, and seal its results."""
        self._stack.append(task)
        if self._trace:
            trace.record(self._client, trace.TASK_START, core.info(self._client, task)["id"])
        try:
            value = self._call(task)
            if not core.finish_scalar(self._client, task, value):
                self._seal(task, value)
        except BaseException as exc:  # whatever user code raises belongs to whoever gets the result
            self._fail(task, exc)
        finally:
            self._stack.pop()
            if self._trace:
                trace.record(self._client, trace.TASK_END, task)

    def _call(self, task: int) -> Any:
        _, function = self._functions.get(task)
        kind, args, refs = core.arguments(self._client, task)
        kwargs: dict[str, Any] = {}
        if kind != _SCALARS:
            args, kwargs = arguments.unpack(self._store, kind, args, refs, core.info(self._client, task)["deps"])
        elif refs:
            args = tuple([self._store.load(arg) if isinstance(arg, ObjectRef) else arg for arg in args])
        del refs
        try:
            self._interruptible = True
            if core.cancelled(self._client, task):
                raise KeyboardInterrupt
            return function(*args, **kwargs)
        finally:
            self._interruptible = False

    def _seal(self, task: int, value: Any) -> None:
        count = core.info(self._client, task)["returns"]
        if count == 1:
            self._store.put_result(task, 0, serialize(value))
        elif count:
            if not isinstance(value, (tuple, list)) or len(value) != count:
                what = f"{len(value)}" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"
                raise ValueError(f"the task has num_returns={count}, its function returned {what}")
            for k, item in enumerate(value):
                self._store.put_result(task, k, serialize(item))
        core.finish(self._client, task)

    def _fail(self, task: int, exc: BaseException) -> None:
        """Seal the error as every result that is not sealed yet, or run the task again."""
        if core.cancelled(self._client, task):
            exc = TaskCancelledError(f"the task was cancelled while it ran in process {os.getpid()}")
        elif (
            isinstance(exc, Exception)
            and not isinstance(exc, FastrtError)
            and core.may_retry_errors(self._client, task)
            and core.retry(self._client, task)
        ):
            return
        if not isinstance(exc, (TaskCancelledError, SerializationError, ObjectStoreFullError)):
            exc = TaskError.wrap(exc, task_name=self._name(task))
        parts = serialize(exc)
        for k in range(core.info(self._client, task)["returns"]):
            self._store.put_result(task, k, parts, error=True)
        core.finish(self._client, task)

    def _name(self, task: int) -> str:
        try:
            return self._functions.get(task)[0]
        except FastrtError:
            return "?"

    # ---- waiting inside a task ----

    def _on_block(self, blocked: bool) -> None:
        """A sleep inside a task begins or ends: the daemon keeps as many workers able to run as there should be."""
        if self._stack:
            core.set_blocked(self._client, self._stack[-1], blocked)
            self._say("blocked" if blocked else "unblocked")

    def _help_with(self, ref: ObjectRef) -> bool:
        """Instead of sleeping while no further worker can be started: run what `ref` waits for, here and now.

        Only then, because the task runs on top of the one that waits: if it crashes, both go.
        """
        if not self._stack or self._may_wait():
            return False
        task = core.claim_for(self._client, ref)
        if task < 0:
            return False
        interruptible, outer = self._interruptible, self._stack[-1]
        self.execute(task)
        self._interruptible = interruptible
        core.resume(self._client, outer)
        return True

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT: somebody cancels the task that runs here; one that came too late is ignored."""
        if self._interruptible and self._stack and core.must_stop(self._client, self._stack[-1]):
            raise KeyboardInterrupt
