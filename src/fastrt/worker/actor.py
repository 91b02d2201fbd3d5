"""An actor's process: it builds the instance, then runs the calls.

Calls run one at a time and in order, in the compiled frame that also runs tasks; or several at once, see
`worker.concurrent`.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fastrt._core.memory import trace
from fastrt._core.memory.clients import JOB_BITS
from fastrt._core.objects import handles
from fastrt._core.tasks import actors, submission, tally
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.inbox import Inbox
from fastrt._core.tasks.runner import Runner
from fastrt.errors import format_user_traceback
from fastrt.folders import private_folder, replace_private
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks import namespaces
from fastrt.tasks.actor_handle import ActorPlan
from fastrt.tasks.actor_records import CONSTRUCTOR_RAISED, death_of
from fastrt.tasks.exit_actor import ActorLeaves
from fastrt.tasks.functions import inner_name
from fastrt.tasks.marks import Source
from fastrt.tasks.method import MethodPlan, bound_method, built
from fastrt.worker import environments
from fastrt.worker.concurrent import Coroutines, Threads
from fastrt.worker.ending import Ending, ProcessEnds, exit_code, flush_files, is_exit, run_exit_functions
from fastrt.worker.main import Worker, end_child
from fastrt.worker.native_threads import NativeThreads
from fastrt.worker.title import set_title

_IDLE_S = 1.0
_SHUTDOWN_METHODS = ("__fastrt_shutdown__", "__ray_shutdown__")  # of a class: called when its actor ends
NAMES_FOLDER = "names"  # in the session's: a file for each actor's process


class ActorWorker(Worker):
    """Runs one actor until no handle to it is left, or the daemon orders it to stop.

    Args:
        store: this process's attachment.
        actor: the actor's index.
        stop_ordered: asks the daemon's connection whether there is an order to leave; called when idle.
        ending: ends this process.
        native_threads: sets the thread counts of native libraries.
        outputs: streams to flush after a call if they say that they have something `pending`.
    """

    def __init__(
        self,
        store: Store,
        actor: int,
        stop_ordered: Callable[[], bool],
        ending: Ending,
        native_threads: NativeThreads,
        outputs: Sequence[Any] = (),
    ) -> None:
        super().__init__(store, lambda word: None, stop_ordered, lambda: True, ending, native_threads, outputs)
        store.on_block = store.help_with = None  # an actor does not count among the workers that can run tasks
        self.retries.in_place = self.folders.adds_only = True
        self.actor = store.actor_here = actor
        store.on_exit = self.exit
        self.exiting = False
        self._building = False  # the constructor runs
        self._coroutines: Coroutines | None = None
        self._instance: Any = None
        self.plan: ActorPlan
        self._name = self._actor_name = ""  # of its class or its repr, and its own, once its plan is loaded
        self._methods: list[Any] = []

    def stop_ordered(self) -> bool:
        """Whether to take no more calls."""
        return self.exiting or self._stop_ordered()

    def run(self) -> None:
        """Build the instance and take calls."""
        self.take_signals()
        if not self.devices.enter_actor(self.actor):
            return  # another process was quicker, or it was ended before it began
        why = self._begin()
        if why:
            actors.end_for_good(self._client, self.actor, actors.FAILED, why)
        elif not self.exiting:
            actors.alive(self._client, self.actor)
            self._serve()

    def clean_up(self) -> None:
        """Run the actor's cleanup code; the process is about to end."""
        loops = self._coroutines
        steps = [self._shut_down, run_exit_functions, flush_files, self._drop_instance, flush_files]
        self.ending.clean_up(steps if loops is None else [loops.end, *steps, loops.close])

    def _shut_down(self) -> None:
        """Call the class's method for the end of its actor, if it has one."""
        for name in _SHUTDOWN_METHODS:
            method = getattr(type(self._instance), name, None)
            if method is not None:
                made = method(self._instance)
                if inspect.iscoroutine(made) and self._coroutines is not None:
                    self._coroutines.finish(made)
                return

    def _drop_instance(self) -> None:
        """Drop the instance, so that `__del__` runs, its own and that of its attributes.

        Files are flushed before this: the collector may close the lowest layer of a file in a cycle first.
        """
        self._instance = None
        self._methods.clear()
        gc.collect()

    def exit(self, reason: str) -> None:
        """End this actor for good; any thread may call this.

        Args:
            reason: for the errors of its calls.
        """
        actors.end_for_good(self._client, self.actor, actors.EXITED, reason)
        self._stop_serving()

    def exit_by(self, exc: SystemExit) -> None:
        """End this actor after a SystemExit in its code; an exit code other than 0 counts as a crash."""
        if isinstance(exc, ActorLeaves):
            return  # `exit` was called where it was raised
        self.ending.code = exit_code(exc)
        if self.ending.code:
            self._stop_serving()
        else:
            self.exit("it called sys.exit")

    def _stop_serving(self) -> None:
        self.exiting = self._runner.leaving = True
        self._client.wake(self._client.index)
        if self._coroutines is not None:
            self._coroutines.stop()

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        self.ending.order()
        if self._building:
            self.exiting = True
            raise ProcessEnds
        self._stop_serving()
        super()._on_terminate(signum, frame)

    def _begin(self) -> str:
        """Build the instance; returns why that failed, "" if it did not."""
        try:
            self._load_plan()
            self.native_threads.for_actor(self.plan.demand, self.plan.environment)
            if self.plan.environment is not None:
                environments.apply(self._store, self.plan.environment)
                if self.plan.environment.worker_process_setup_hook is not None:
                    self.plan.environment.worker_process_setup_hook.run()
        except Exception as exc:
            return f"its process could not be prepared: {exc}"
        try:
            self._building = True
            if self.ending.ordered:
                raise ProcessEnds  # the signal came before
            self._build()
        except BaseException as exc:  # any exception of the constructor ends the actor, and its calls raise the reason
            if not is_exit(exc):
                if self.debugger.wants_errors:
                    self.debugger.look_at_error(exc)
                return f"{CONSTRUCTOR_RAISED}\n{format_user_traceback(exc)}"
            if not isinstance(exc, ProcessEnds):
                self.exit_by(exc)
        finally:
            self._building = False
        return ""

    def _load_plan(self) -> None:
        about = actors.info(self._client, self.actor)
        ref = handles.acquire(self._client, *about["object"])
        core.begin_path(self._client, about["object"][0])  # path of the tasks that it submits outside of calls
        self.plan = self._store.load(ref)
        if (
            self.plan.job >> JOB_BITS
        ):  # of another node. With a job of this node, what it submits would end with the driver
            self._client.adopt_job(self.plan.job)
        _, self._store.actor_id = self.plan.id_at("", about["object"][0])
        self._store.actor_job = self.plan.job
        self._name = self.plan.name
        set_title(f"fastrt::{self._name}")
        self._actor_name = namespaces.split(about["name"])[1] or str(self.actor)

    def _build(self) -> None:
        assert self.plan.cls is not None
        assert self.plan.init is not None
        _, cls = self._store.load(self.plan.cls)
        args, kwargs = self._store.get(self.plan.init)  # waits if it comes from another node
        values = [self._store.get(arg) if isinstance(arg, ObjectRef) else arg for arg in args]
        named = {name: self._store.get(arg) if isinstance(arg, ObjectRef) else arg for name, arg in kwargs.items()}
        if any(method.is_async for method in self.plan.methods):
            self._coroutines = Coroutines(self)
            instance = self._coroutines.build(lambda: built(cls, values, named))
        else:
            instance = cls(*values, **named)
        self._instance = instance
        self._take_repr()
        self._methods += [bound_method(instance, method.name) for method in self.plan.methods]
        self._client.name_methods([method.name for method in self.plan.methods])
        if trace.enabled(self._client):
            self._write_names()

    def _take_repr(self) -> None:
        """Use what the class's `__repr__` returns, if it has one, for the actor's output and in lists, as Ray does."""
        if getattr(type(self._instance), "__repr__", None) is object.__repr__:
            return
        with contextlib.suppress(Exception):  # of the class's code
            self._name = repr(self._instance)
            self._client.rename(self._name)

    def _write_names(self) -> None:
        """Write the names of the actor's methods, for a timeline that is drawn after its end."""
        names = {"class": self.plan.name, "methods": [method.name for method in self.plan.methods]}
        folder = Path(self._store.socket_path).parent / NAMES_FOLDER
        with contextlib.suppress(OSError):  # the session is ending
            replace_private(private_folder(folder, "the folder of names"), str(os.getpid()), json.dumps(names).encode())

    def _serve(self) -> None:
        if self._coroutines is not None:
            self._coroutines.serve()
        elif self.plan.concurrency > 1 or self.plan.groups:
            Threads(self).serve()
        else:
            self._serve_in_order()

    def _serve_in_order(self) -> None:
        inbox = Inbox(self._client, self.actor, True)
        self._runner = Runner(
            self._client, {}, self.prepare, self.seal, self.fail, end_child, self._outputs, self._methods
        )
        with self.waiting():
            while not self.stop_ordered():
                self._runner.serve(inbox, _IDLE_S, self._store.spin_s)
                if actors.is_over(self._client, self.actor):
                    return

    def prepare(self, task: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Find the function for a call, with its options applied, and load its arguments."""
        method, args, kwargs = self.prepare_method(task)
        return self.wrap(task, submission.flags_of(self._client, task), method), args, kwargs

    def prepare_method(self, task: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Find a call's method and load its arguments."""
        return self._methods[self._method(task).number], *self._arguments(task)

    def is_async(self, task: int) -> bool:
        """Whether a call's method is a coroutine function."""
        return self._method(task).is_async

    def is_generator(self, task: int) -> bool:
        """Whether a call's method is a generator whose items become results, one by one or in one list."""
        return self.generators.is_stream(task) or self.policies.of(task).dynamic

    def seal(self, task: int, value: Any) -> None:
        """Seal what a method returned, and end the call."""
        self._flush()  # before the result: its reader may end the session
        self._seal(task, value)

    def fail(self, task: int, exc: BaseException) -> None:
        """Seal an exception as the call's results, and end the call; the daemon ends a call whose process ends."""
        self._flush()
        if not is_exit(exc):
            self._fail(task, exc)
            return
        if not isinstance(exc, ProcessEnds):
            self.exit_by(exc)
        if self.ending.ordered or self.ending.code:
            return
        info = actors.info(self._client, self.actor)
        left = death_of(info, self.plan.name, info["reason"])
        left.on_purpose = True
        self._store.put_error(task, left)
        core.finish(self._client, task, tally.CRASHED)

    def _flush(self) -> None:
        for output in self._outputs:
            if output.pending:
                with contextlib.suppress(OSError, ValueError):
                    output.flush()

    def source_here(self) -> Source:
        """Return this actor and the call that runs on this thread, for its output."""
        task = self._store.task_here()
        if task is None:
            return Source(self.plan.job, self._name, 0, 0, self._actor_name)
        info = core.info(self._client, task)
        return Source(info["job"], self._name, info["id"], info["path"], self._actor_name)

    def name_of(self, task: int) -> str:
        """Return a call's name for messages."""
        return self.policies.of_failed(task).name or f"{self.plan.name}.{self._method(task).name}"

    def function_name_of(self, task: int) -> str:
        """Return the name of a call's method with the module of the class."""
        return f"{type(self._instance).__module__}.{inner_name(self.plan.name)}.{self._method(task).name}"

    def _method(self, task: int) -> MethodPlan:
        return self.plan.method_of(core.function_of(self._client, task)[1])[0]
