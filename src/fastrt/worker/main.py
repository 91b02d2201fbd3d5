"""The worker's loop: claim a task, run it, seal its results."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from fastrt._core.objects import unread as core_unread
from fastrt._core.tasks import cancel
from fastrt._core.tasks import submission as core_submission
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.runner import Runner
from fastrt.errors import FastrtError, ObjectStoreFullError, SerializationError, TaskCancelledError, TaskError
from fastrt.store import unread
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks import arguments
from fastrt.tasks.functions import FunctionCache
from fastrt.tasks.options import Policy
from fastrt.worker import special
from fastrt.worker.alarms import Clock
from fastrt.worker.ending import Ending, ProcessEnds, exit_code, flush_files, run_exit_functions
from fastrt.worker.environments import Rooms
from fastrt.worker.native_threads import NativeThreads

_SCALARS = 1  # the kind of arguments that the core reads by itself
_IDLE_S = 5.0
_PLAIN = Policy()
_ARGUMENT_TRIES = 20  # each ends after the store's patience, when no process of the node gets on
_HELP_DEPTH_MAX = 32  # about eight frames each of the thousand that Python allows


class Worker:
    """Runs tasks until it is told to stop.

    Args:
        store: this process's attachment.
        say: sends a message to the daemon: "blocked", "unblocked".
        told_to_stop: asks the daemon's connection whether there is an order to leave; called when idle.
        may_wait: whether the daemon can still start other workers while this one waits inside a task.
        ending: ends this process.
        native_threads: sets the thread counts of native libraries.
        outputs: streams to flush after a task if they say that they have something `pending`.
    """

    def __init__(
        self,
        store: Store,
        say: Callable[[str], object],
        told_to_stop: Callable[[], bool],
        may_wait: Callable[[], bool],
        ending: Ending,
        native_threads: NativeThreads,
        outputs: Sequence[Any] = (),
    ) -> None:
        self.ending = ending
        self._store = self.store = store
        self._client = self.client = store.client
        self._say = say
        self._told_to_stop = told_to_stop
        self._may_wait = may_wait
        self.native_threads = native_threads
        self._outputs = outputs
        self.functions = FunctionCache(store)
        self.rooms = Rooms(store)
        seal, fail = self.rooms.sealing(self._seal), self.rooms.failing(self._fail)
        self._runner = Runner(store.client, self.functions.loaded, self._prepare, seal, fail, end_child, outputs)
        self._policies: dict[int, Policy] = {}  # by objref
        self.retries_here = False  # an actor runs its calls again itself
        self.threaded = False  # an actor may run several calls at once, in threads
        self.answered: set[int] = set()  # threads whose call has had its answer, for the time, and still runs
        self.clock = Clock()
        self.timers: dict[int, special.Timer] = {}  # by task
        self.leaving = False
        self._idle = False  # see `waiting`
        self.calls: dict[int, int] = {}  # by objref, of functions after some calls of which this process leaves
        self._thread = threading.get_ident()  # the one that runs tasks
        self._sleepers: set[int] = set()  # threads that sleep in a get or wait
        self._sleepers_lock = threading.Lock()
        store.on_block = self._on_block
        store.help_with = self._help_with
        store.check_wait = self._check_wait
        store.task_here, store.task_name = self.task_here, self.name_of
        for output in outputs:
            output.source = self.source_here

    def run(self) -> None:
        """Loop until the daemon says to stop."""
        self.take_signals()
        cancel.listen(self._client)
        while True:
            with self.waiting():
                self._runner.run(_IDLE_S, self._store.spin_s)
            if self.ending.ordered:
                self.leaving = True
                self.clock.flush()
                return
            if self._runner.leaving:
                self._say("blocked")  # another may begin
                self.clock.wait()
                return
            if self._told_to_stop():
                self.leaving = True
                self.clock.flush()
                return
            self.functions.drop_swept()  # there was no task for a while
            self.rooms.drop_swept()

    def take_signals(self) -> None:
        """Let SIGINT interrupt user code, and SIGTERM end this process."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, self._on_terminate)
        # Python forgets a signal that comes to a child before its fork is complete: it waits until then.
        mask = signal.pthread_sigmask
        os.register_at_fork(
            before=lambda: mask(signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=lambda: mask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=self._forget_termination,
        )

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the main thread waits for tasks or calls, or runs them: SIGTERM ends that at once."""
        self._idle = True
        try:
            yield
        except ProcessEnds:
            pass
        finally:
            self._idle = False

    def clean_up(self) -> None:
        """Run the cleanup code of tasks that ran here: this process is about to end."""
        self.ending.clean_up([run_exit_functions, flush_files])

    def leave(self) -> None:
        """Take no more tasks; those that this process has begun go on to their end."""
        self._runner.leaving = True

    def task_here(self) -> int | None:
        """The task that runs on this thread, for `fastrt.runtime_context()`."""
        return self._runner.stack[-1] if self._runner.stack and threading.get_ident() == self._thread else None

    def _prepare(self, task: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Load a task's function and arguments."""
        _, function = special.begin(self, task).get(task)
        return self.rooms.around(special.wrap(self, task, function)), *self._arguments(task)

    def _arguments(self, task: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load a task's arguments. Several workers may each hold some of theirs and wait for room for the others."""
        for _ in range(_ARGUMENT_TRIES):
            try:
                return self._load_arguments(task)
            except ObjectStoreFullError as exc:
                if not exc.may_pass:
                    raise
            # What was loaded is free for other workers now.
        return self._load_arguments(task)

    def _load_arguments(self, task: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kind, args, refs = core.arguments(self._client, task)
        kwargs: dict[str, Any] = {}
        if kind != _SCALARS:
            args, kwargs = arguments.unpack(self._store, kind, args, refs, core.info(self._client, task)["deps"])
        elif refs:
            try:
                args = tuple([self._store.load(arg) if isinstance(arg, ObjectRef) else arg for arg in args])
            except BaseException:
                core_unread.mark(self._client, refs)  # one error stands for those of all arguments
                raise
        return args, kwargs

    def policy_of(self, task: int) -> Policy:
        """How a task that has a policy is run."""
        ref = core_submission.policy_of(self._client, task)
        if ref is None:
            return _PLAIN
        found = self._policies.get(ref.objref)
        if found is None:
            found = self._policies[ref.objref] = self._store.load(ref)
        return found

    def may_retry(self, task: int, exc: BaseException) -> bool:
        """Whether a task runs again after an exception of its own."""
        kind = type(exc)  # isinstance would ask the exception, which may say anything
        if not issubclass(kind, Exception) or not core.info(self._client, task)["flags"] & core.RETRY_ERRORS:
            return False
        named = self.policy_of(task).retry_on
        wanted = not issubclass(kind, FastrtError) if named in ((), (Exception,)) else issubclass(kind, named)
        return wanted and special.attempts_left(self, task)

    def runs(self, task: int) -> bool:
        """Whether that is the task whose code runs here now, on top of all that wait for it."""
        stack = self._runner.stack
        return bool(stack) and stack[-1] == task

    def source_here(self) -> tuple[int, str]:
        """The job and the name of the task that runs here, for its output."""
        stack = self._runner.stack
        return self._client.job, self.name_of(stack[-1]) if stack else ""

    def name_of(self, task: int) -> str:
        """What the task is called in messages."""
        return self.functions.name(task)

    def fail(self, task: int, exc: BaseException) -> None:
        """Seal an exception as the results, and end the task."""
        self._fail(task, exc)

    def _seal(self, task: int, value: Any) -> None:
        """Seal what the function returned, and end the task."""
        if self._store.with_room(0, lambda: core.finish_scalar(self._client, task, value)):
            return
        count = core.info(self._client, task)["returns"]
        if count and inspect.isgenerator(value):
            value = self._drain(task, value, count)
        if count == 1:
            self._store.put_result(task, 0, serialize(value))
        elif count:
            if not isinstance(value, (tuple, list)) or len(value) != count:
                what = f"{len(value)}" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"
                raise ValueError(f"the task has num_returns={count}, its function returned {what}")
            for k, item in enumerate(value):
                self._store.put_result(task, k, serialize(item))
        core.finish(self._client, task)

    def _drain(self, task: int, generator: Any, count: int) -> Any:
        """Collect what a generator yields, where a number of results was announced.

        Where it raises and does not run again, its items are results: the error takes the places of the others.
        """
        items: list[Any] = []
        self._runner.interruptible = True  # user code again
        try:
            items += generator
        except Exception as exc:
            self._runner.interruptible = False
            again = self.may_retry(task, exc) and not self.retries_here
            if not again and not core.cancelled(self._client, task):
                for k, item in enumerate(items[:count]):
                    self._store.put_result(task, k, serialize(item))
            raise
        finally:
            self._runner.interruptible = False
        if count > 1:
            return items
        if len(items) != 1:
            raise ValueError(f"the task has num_returns=1, its generator has yielded {len(items)} items")
        return items[0]

    def _fail(self, task: int, exc: BaseException) -> None:
        """Seal the error as every result that is not sealed yet, or run the task again."""
        if issubclass(type(exc), ProcessEnds):
            return  # the task ends as it does when its worker is killed
        if core.cancelled(self._client, task):
            exc = TaskCancelledError(f"the task was cancelled while it ran in process {os.getpid()}")
        elif self.may_retry(task, exc) and not self.retries_here and special.retry_later(self, task):
            return
        try:
            if type(exc) not in (TaskCancelledError, SerializationError, ObjectStoreFullError):
                exc = TaskError.wrap(exc, task_name=self.name_of(task))
            self._store.put_error(task, exc)
        except BaseException as why:  # user code again: the exception's own methods, and they may raise anything
            text = f"{type(exc).__name__}, which cannot be reported: {type(why).__name__}"
            self._store.put_error(task, TaskError(self.name_of(task), os.getpid(), text))
        core.finish(self._client, task)
        unread.report()

    # ---- waiting inside a task ----

    def _on_block(self, blocked: bool) -> None:
        """A sleep inside a task begins or ends: the daemon keeps as many workers able to run as there should be.

        Threads that the task has started sleep for it too: it may be waiting for them.
        """
        thread = threading.get_ident()
        with self._sleepers_lock:
            before = bool(self._sleepers)
            if blocked and self._runner.stack:
                self._sleepers.add(thread)
            elif not blocked:
                self._sleepers.discard(thread)  # also when the task that it slept for has ended meanwhile
            if before != bool(self._sleepers):
                self._say("blocked" if blocked else "unblocked")
        if thread == self._thread and self._runner.stack:
            core.set_blocked(self._client, self._runner.stack[-1], blocked)

    def _check_wait(self) -> None:
        """Leave a wait for room if the task that waits was cancelled."""
        task = self._store.task_here()
        if task is not None and core.cancelled(self._client, task):
            raise TaskCancelledError(f"the task was cancelled while it waited for room in process {os.getpid()}")

    def _help_with(self, ref: ObjectRef) -> bool:
        """Instead of sleeping while no further worker can be started: run what `ref` waits for, here and now.

        Only then, because the task runs on top of the one that waits: if it crashes, both go. Not for ever: each
        takes some of the stack, and the daemon starts one more worker when all sleep while tasks are queued.
        """
        depth = len(self._runner.stack)
        if not 0 < depth < _HELP_DEPTH_MAX or threading.get_ident() != self._thread or self._may_wait():
            return False
        task = core.claim_for(self._client, ref)
        if task < 0:
            return False
        interruptible, outer = self._runner.interruptible, self._runner.stack[-1]
        with self.rooms.outside():
            self._runner.execute(task)
        self._runner.interruptible = interruptible
        core.resume(self._client, outer)
        if interruptible and self.ending.ordered:
            raise ProcessEnds  # the signal came while the other one ran
        if interruptible and core.cancelled(self._client, outer):
            raise KeyboardInterrupt  # the signal came while the other one ran
        return True

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT: somebody cancels the task that runs here; one that came too late is ignored."""
        if not self._runner.interruptible or not self._runner.stack:
            return
        task = self._runner.stack[-1]
        if core.cancelled(self._client, task):
            raise KeyboardInterrupt
        timer = self.timers.get(task)
        if timer is not None and timer.is_over():
            raise timer.error()

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM: end. What user code runs here is interrupted, and then cleanup code runs."""
        self.ending.order()
        self._runner.leaving = True
        if self._runner.interruptible if self._runner.stack else self._idle:
            raise ProcessEnds

    def _forget_termination(self) -> None:
        """In a child that user code has forked: SIGTERM ends it at once, as any other process."""
        if signal.getsignal(signal.SIGTERM) == self._on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_child(exc: BaseException | None) -> None:
    """Leave a process that a task has forked and that came back into this loop, which is its parent's."""
    code = 0
    if isinstance(exc, SystemExit):
        code = exit_code(exc)
    elif exc is not None:
        traceback.print_exception(exc)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
