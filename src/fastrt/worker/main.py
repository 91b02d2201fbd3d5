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
from fastrt._core.tasks import admission, cancel, generators, tally
from fastrt._core.tasks import submission as core_submission
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.runner import Runner
from fastrt.errors import ArgumentError, ObjectStoreFullError, SerializationError, TaskCancelledError, TaskError
from fastrt.store import failures, namespaces, unread
from fastrt.store.client import Store
from fastrt.store.messages import Blocked, Unblocked
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize
from fastrt.tasks import arguments
from fastrt.tasks.functions import FunctionCache, inner_name
from fastrt.tasks.marks import Source
from fastrt.worker.alarms import Clock
from fastrt.worker.debugger import Debugger
from fastrt.worker.devices import GivenBackError, ProcessDevices
from fastrt.worker.ending import Ending, ProcessEnds, exit_code, flush_files, run_exit_functions
from fastrt.worker.environments import Environments
from fastrt.worker.generators import GeneratorRunner
from fastrt.worker.held import HeldTasks
from fastrt.worker.job_folders import JobFolders
from fastrt.worker.native_threads import NativeThreads
from fastrt.worker.policies import Policies
from fastrt.worker.retries import Retries
from fastrt.worker.timeouts import Timeouts

_SCALARS = 1  # the kind of arguments that the core reads without pickle
_IDLE_S = 1.0  # a worker without a task drops the functions that were swept so often
_ARGUMENT_TRIES = 20  # each ends after the store's patience, when no process of the node makes progress
_HELP_DEPTH_MAX = 32  # about eight frames each of the thousand that Python allows


class Worker:
    """Runs tasks until the daemon orders it to stop.

    Args:
        store: this process's attachment.
        notify: sends `Blocked` and `Unblocked` to the daemon.
        stop_ordered: asks the daemon's connection whether there is an order to leave; called when idle.
        may_wait: whether the daemon can still start other workers while this one waits inside a task.
        ending: ends this process.
        native_threads: sets the thread counts of native libraries.
        outputs: streams to flush after a task if they say that they have something `pending`.

    Attributes:
        policies, retries, timeouts, generators, devices: run the tasks that have options beyond the fast path.
        folders: of the programs whose tasks run here.
        debugger: of this process.
    """

    def __init__(
        self,
        store: Store,
        notify: Callable[[Blocked | Unblocked], object],
        stop_ordered: Callable[[], bool],
        may_wait: Callable[[], bool],
        ending: Ending,
        native_threads: NativeThreads,
        outputs: Sequence[Any] = (),
    ) -> None:
        self.ending = ending
        self._store = self.store = store
        self._client = store.client
        self._notify = notify
        self._stop_ordered = stop_ordered
        self._may_wait = may_wait
        self.native_threads = native_threads
        self._outputs = outputs
        self._functions = FunctionCache(store)
        self.folders = JobFolders(self._functions, self._use)
        self._environments = Environments(store, self.folders)
        self.devices = ProcessDevices(store)
        seal, fail = self._environments.sealing(self._seal), self._environments.failing(self._fail)
        self._runner = Runner(
            *(store.client, self._functions.kept.functions, self._prepare, seal, fail, end_child, outputs),
            enter_job=self.folders.enter_job,
        )
        self._clock = Clock()
        self.policies = Policies(store)
        self.retries = Retries(store, self.policies, self._clock, self._keep_retried)
        self._held = HeldTasks(store, self._clock)
        self.timeouts = Timeouts(store, self._clock, self.retries, self.name_of, self._runs, self.fail)
        self.generators = GeneratorRunner(store, self.retries, self.name_of)
        self.debugger = Debugger(store, self.source_here, self._runs_below, self._interruptible, self._report)
        self._idle = False  # see `waiting`
        self._calls: dict[int, int] = {}  # by objref, of functions with `max_calls`
        self._thread = threading.get_ident()  # the one that runs tasks
        self._sleepers: set[int] = set()  # threads that sleep in a get or wait
        self._sleepers_lock = threading.Lock()
        store.on_block = self._on_block
        store.help_with = self._help_with
        store.check_wait, store.may_sleep = self._check_wait, self._may_wait
        store.task_here, store.task_name, store.function_name = self.task_here, self.name_of, self.function_name_of
        for output in outputs:
            output.source = self.source_here

    def run(self) -> None:
        """Run tasks until the daemon orders this process to stop."""
        self.take_signals()
        cancel.listen(self._client)
        while True:
            with self.waiting():
                self._runner.run(_IDLE_S, self._store.spin_s)
            if self._runner.leaving and not self.ending.ordered:
                self._notify(Blocked())  # the daemon may start another worker
                self._clock.wait()
                return
            if self.ending.ordered or self._stop_ordered():
                self._held.flush()
                self.retries.flush()
                return
            self.folders.drop_swept()  # there was no task for a while
            self._environments.drop_swept()
            namespaces.drop_unused()

    def take_signals(self) -> None:
        """Let SIGINT interrupt user code, and SIGTERM end this process."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, self._on_terminate)
        # Python drops a signal that a child receives before its fork is complete, so the signal is blocked until then.
        mask = signal.pthread_sigmask
        os.register_at_fork(
            before=lambda: mask(signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=lambda: mask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=self._forget_termination,
        )

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let SIGTERM end the block at once: the main thread waits for tasks or calls there, or runs them."""
        self._idle = True
        try:
            yield
        except ProcessEnds:
            pass
        finally:
            self._idle = False

    def clean_up(self) -> None:
        """Run the cleanup code of tasks that ran here; the process is about to end."""
        self.ending.clean_up([run_exit_functions, flush_files])

    def task_here(self) -> int | None:
        """Return the task that runs on this thread, for `fastrt.runtime_context()`."""
        return self._runner.stack[-1] if self._runner.stack and threading.get_ident() == self._thread else None

    def _prepare(self, task: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Load a task's function and arguments, in the task's environment if it has one."""
        functions = self._functions
        flags = core_submission.flags_of(self._client, task)
        if flags:
            if flags & admission.DEMAND and self._store.devices:
                self._enter_devices(task)
            if flags & core_submission.POLICY:
                environment = self.policies.of(task).environment
                if environment is not None:
                    if not flags & admission.DEMAND and self._held.hold(task, environment):
                        raise GivenBackError  # one with resources would keep them: this worker waits instead
                    functions = self._environments.enter(task, environment)
        _, function = functions.get(task)
        return self._environments.around(self.wrap(task, flags, function)), *self._arguments(task)

    def _use(self, loaded: dict[int, Any]) -> None:
        """Run with the functions of another job."""
        self._runner.use(loaded)

    def _enter_devices(self, task: int) -> None:
        """Restrict this process to the devices of a task, before code of the task is loaded; it leaves afterwards."""
        try:
            self._runner.leaving |= self.devices.enter_task(task)
        except GivenBackError:
            self._runner.leaving = True
            raise

    def wrap(self, task: int, flags: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call instead of a task's, so that its options hold.

        Args:
            task: claimed by this process.
            flags: the task's.
            function: the task's function, or the method of a call.
        """
        if not flags:
            return function
        policy = self.policies.of(task)
        if flags & admission.DEMAND or policy.environment is not None:
            id = core.info(self._client, task)["id"]
            function = self.native_threads.around(task, id, policy.environment, function)
        if policy.dynamic:
            function = self.generators.collecting(task, function)
        elif flags & generators.STREAM:
            function = self.generators.streaming(task, function)
        if policy.timeout_s:
            function = self.timeouts.around(task, policy.timeout_s, function)
        if policy.max_calls:
            function = self._count_calls(task, policy.max_calls, function)
        return self.retries.around(task, function) if self.retries.in_place else function

    def _count_calls(self, task: int, most: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function after whose call number `most` this process leaves, once the task that it runs ended."""
        objref, _ = core.function_of(self._client, task)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                self._calls[objref] = self._calls.get(objref, 0) + 1
                if self._calls[objref] >= most:
                    self._runner.leaving = True  # tasks that this process has begun run to their end

        return call

    def _arguments(self, task: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load a task's arguments; try again if there is no room.

        Several workers can each hold some of their arguments and wait for room for the others. A worker that fails
        drops those that it has loaded, so that another one can continue.
        """
        for _ in range(_ARGUMENT_TRIES):
            try:
                return self._load_arguments(task)
            except ObjectStoreFullError as exc:
                if not exc.may_pass:
                    raise
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
                core_unread.mark(self._client, refs)  # one error is raised for those of all arguments
                raise
        return args, kwargs

    def _runs(self, task: int) -> bool:
        """Whether a task's code is the innermost that runs on the main thread."""
        stack = self._runner.stack
        return bool(stack) and stack[-1] == task

    def _runs_below(self, task: int) -> bool:
        """Whether a task's code runs on this thread, perhaps below that of another task."""
        return task in self._runner.stack or self._store.task_here() == task

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let signals interrupt the main thread during a `with` statement."""
        before, self._runner.interruptible = self._runner.interruptible, True
        try:
            yield
        finally:
            self._runner.interruptible = before

    def _report(self, line: str) -> None:
        """Print a line at the driver that has submitted the task on this thread."""
        for output in self._outputs[-1:]:
            with contextlib.suppress(OSError, ValueError):  # a task can have closed any descriptor
                output.write(f"{line}\n".encode("utf-8", "replace"))
                output.flush()

    def source_here(self) -> Source:
        """Return the task that runs here, for its output."""
        stack = self._runner.stack
        if not stack:
            return Source(self._client.working_job)
        info = core.info(self._client, stack[-1])
        return Source(info["job"], self.name_of(stack[-1]), info["id"], info["path"])

    def name_of(self, task: int) -> str:
        """Return a task's name for messages."""
        return self._functions.name(task)

    def function_name_of(self, task: int) -> str:
        """Return the name of a task's function with its module."""
        function = self._functions.get(task)[1]
        return f"{function.__module__}.{inner_name(getattr(function, '__qualname__', self.name_of(task)))}"

    def fail(self, task: int, exc: BaseException) -> None:
        """Seal an exception as the results, and end the task."""
        self._fail(task, exc)

    def _seal(self, task: int, value: Any) -> None:
        """Seal the function's result, and end the task."""
        if self._store.with_room(0, lambda: core.finish_scalar(self._client, task, value), make_file=_is_no_scalar):
            return
        info = core.info(self._client, task)
        count = info["returns"]
        if count and inspect.isgenerator(value):
            items = self._drain(task, value, count)
            value = items if count > 1 else items[0]
        if info["actor"] is not None and core.cancelled(self._client, task):
            raise TaskCancelledError("the call was cancelled and has run to its end")  # `_fail` says it in its words
        if count == 1:
            self._store.put_result(task, 0, serialize(value))
        elif count:
            wanted = f"the task has num_returns={count}, its function returned"
            if not isinstance(value, (tuple, list)):
                raise ArgumentError(f"{wanted} a {type(value).__name__}")
            if len(value) != count:
                raise ValueError(f"{wanted} {len(value)}")
            self._put_items(task, value)
        core.finish(self._client, task)

    def _put_items(self, task: int, items: Sequence[Any]) -> None:
        for k, item in enumerate(items):
            self._store.put_result(task, k, serialize(item))

    def _drain(self, task: int, generator: Any, count: int) -> list[Any]:
        """Collect the items of a generator whose task has a fixed number of results.

        If it raises or yields too few, and does not run again, its items are the first results, and the error is all
        others. If it yields more, it is closed there, and the driver prints a line.
        """
        items: list[Any] = []
        self._runner.interruptible = True  # user code again
        if self.ending.ordered:
            raise ProcessEnds
        try:
            for item in generator:
                if len(items) == count:
                    generator.close()
                    self._report(
                        f"fastrt: {self.name_of(task)!r} has num_returns={count}, and yields more; that is lost"
                    )
                    break
                items.append(item)
            if len(items) != count:
                raise ValueError(f"the task has num_returns={count}, its generator has yielded {len(items)} items")
        except Exception as exc:
            self._runner.interruptible = False
            again = not self.retries.in_place and self.retries.wanted(task, exc)
            if not again and not core.cancelled(self._client, task):
                self._put_items(task, items)
            raise
        finally:
            self._runner.interruptible = False
        return items

    def _fail(self, task: int, exc: BaseException) -> None:
        """Seal the error as every result that is not sealed yet, or run the task again."""
        if issubclass(type(exc), ProcessEnds):
            return  # the task ends as after a kill of its worker
        if type(exc) is GivenBackError:
            return
        outcome = tally.FAILED
        if core.cancelled(self._client, task):
            exc = TaskCancelledError("the task was cancelled while it ran")
            outcome = tally.CANCELLED
        elif self.retries.requeue(task, exc):
            return
        elif self.debugger.wants_errors:
            self.debugger.look_at_error(exc)
            if core.cancelled(self._client, task):
                exc = TaskCancelledError("the task was cancelled while it waited in a debugger")
                outcome = tally.CANCELLED
        try:
            if type(exc) not in (SerializationError, ObjectStoreFullError):
                exc = TaskError.wrap(exc, task_name=self.name_of(task))
            if outcome == tally.FAILED:
                failures.keep(self._store, task, self.name_of(task), exc)  # before its reader can look for it
            self._store.put_error(task, exc)
        except BaseException as why:  # user code again: the exception's methods can raise anything
            text = f"{type(exc).__name__}, which cannot be reported: {type(why).__name__}"
            self._store.put_error(task, TaskError(self.name_of(task), os.getpid(), text))
        core.finish(self._client, task, outcome)
        unread.report()

    def _keep_retried(self, task: int, exc: BaseException) -> None:
        failures.keep(self._store, task, self.name_of(task), exc, retried=True)

    # ---- waiting inside a task ----

    def _on_block(self, blocked: bool) -> None:
        """Notify the daemon when a sleep inside a task begins or ends: it keeps the number of runnable workers.

        Sleeps of threads that the task has started count too: it can be waiting for them.
        """
        thread = threading.get_ident()
        with self._sleepers_lock:
            before = bool(self._sleepers)
            if blocked and self._runner.stack:
                self._sleepers.add(thread)
            elif not blocked:
                self._sleepers.discard(thread)  # also if its task has ended meanwhile
            if before != bool(self._sleepers):
                self._notify(Blocked() if blocked else Unblocked())
        if thread == self._thread and self._runner.stack:
            core.set_blocked(self._client, self._runner.stack[-1], blocked)

    def _check_wait(self) -> None:
        """Leave a wait for room if the task that waits was cancelled."""
        task = self._store.task_here()
        if task is not None and core.cancelled(self._client, task):
            raise TaskCancelledError(f"the task was cancelled while it waited for room in process {os.getpid()}")

    def _help_with(self, ref: ObjectRef) -> bool:
        """Run the task that makes `ref` on this thread, instead of sleeping, if no further worker can be started.

        Only then, because the task runs on top of the one that waits: a crash ends both. The depth is limited, because
        each task takes some of the stack; the daemon starts one more worker if all sleep while tasks are queued.
        """
        depth = len(self._runner.stack)
        if not 0 < depth < _HELP_DEPTH_MAX or threading.get_ident() != self._thread or self._may_wait():
            return False
        task = core.claim_for(self._client, ref)
        if task < 0:
            return False
        interruptible, outer = self._runner.interruptible, self._runner.stack[-1]
        with self._environments.outside():
            self._runner.execute(task)
        self._runner.interruptible = interruptible
        core.resume(self._client, outer)
        if interruptible and self.ending.ordered:
            raise ProcessEnds  # the signal came while the other one ran
        if interruptible and core.cancelled(self._client, outer):
            raise KeyboardInterrupt  # the signal came while the other one ran
        return True

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT: raise in the task that runs here if it was cancelled or its timeout is over; else do nothing."""
        if self.debugger.take_interrupt(frame):
            return
        if not self._runner.interruptible or not self._runner.stack:
            return
        task = self._runner.stack[-1]
        if core.cancelled(self._client, task):
            raise KeyboardInterrupt
        self.timeouts.raise_if_over(task)

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM: interrupt user code that runs here, run cleanup code, and end."""
        self.ending.order(bool(self._runner.stack and self._runner.interruptible))
        self._runner.leaving, self._runner.ends = True, ProcessEnds
        if self._runner.interruptible if self._runner.stack else self._idle:
            raise ProcessEnds

    def _forget_termination(self) -> None:
        """Restore SIGTERM in a child that user code has forked: the signal ends it at once, as any other process."""
        if signal.getsignal(signal.SIGTERM) == self._on_terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_child(exc: BaseException | None) -> None:
    """End a process that a task has forked and that returned into this loop, which belongs to its parent."""
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


def _is_no_scalar() -> bool:
    """Answer for a large text that finds no room: it is stored like other values then, which may be in files."""
    return False
