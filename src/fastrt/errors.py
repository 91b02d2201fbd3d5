"""Every exception that fastrt raises on purpose, in one hierarchy, and the table from core codes to classes.

`except FastrtError` catches every error that fastrt itself reports. If Python has a built-in class for the same kind
of error (a timeout, a wrong value, no memory), the class inherits from that too, so ordinary `except` clauses work.
Each docstring says what happened and what to do about it. Of fastrt, this module imports `error_chains` only.
"""

from __future__ import annotations

import os
import traceback
from functools import lru_cache
from typing import Any

from fastrt.error_chains import Link, assign, blank, links_of, restore

_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Part of the file name that compiled frames report; the rest depends on the folder that the wheel was built in.
_COMPILED_DIR = os.path.join("fastrt", "_core") + os.sep
_ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
_named = (__name__, "TaskError")  # the module and the name of the classes of tasks' errors


class FastrtError(Exception):
    """The root of everything fastrt reports. Catch it to handle any failure of the runtime itself."""


class PerformanceWarning(UserWarning):
    """The program is slow for a known reason; the text says what to change. It is raised once for each cause.

    `fastrt.init(advice=False)` or FASTRT_ADVICE=0 switches it off.
    """


class ConfigError(FastrtError, ValueError):
    """A setting is malformed or out of range. The message names the setting, its value and the allowed values."""


class RuntimeEnvError(ConfigError):
    """A node cannot make the `runtime_env` of a task: a path is missing, a package cannot be installed, a hook fails.

    The message says what failed, and on which node. The next task with the environment tries again.
    """


class ArgumentError(FastrtError, TypeError, ValueError):
    """An option is unknown, or an argument is of another kind. Ray raises a ValueError where Python has a TypeError."""


class NotInitializedError(FastrtError, RuntimeError):
    """The call needs a runtime, which is not started or is already shut down. Call `fastrt.init()` first."""


class ForkedRuntimeError(FastrtError, RuntimeError):
    """The call cannot work in a child made by `os.fork` from an initialised driver.

    Start the child by the `spawn` or `forkserver` method of multiprocessing, or make the call in the parent.
    """


class AttachError(FastrtError):
    """A process cannot join an arena: other layout version, other user, other PID namespace, or no client slot left.

    Use the same fastrt version, user and container as the process that started the runtime. If no slot is left,
    raise `clients_max` or end attached processes.
    """


class SerializationError(FastrtError, TypeError):
    """An argument, a result or a function cannot be pickled, or cannot be unpickled where it is needed.

    The message names the offending value. Pass plain data, and open files, locks or connections inside the task.
    """


class NotFoundError(FastrtError, LookupError):
    """The record, function or name that the call asks for does not exist. Check the arguments of the call."""


class FunctionNotFoundError(NotFoundError):
    """A worker received a task whose function it cannot load.

    The function's module is missing or differs in the worker's environment. Install it there, or define the
    function in the driver's script: then its code is sent by value.
    """


class GetTimeoutError(FastrtError, TimeoutError):
    """`get` or another wait reached its timeout. The task still runs: wait again, or cancel it."""


class TaskCancelledError(FastrtError):
    """The task was cancelled before it had a result, by `fastrt.cancel` or because its driver ended.

    If its code had begun on this node, and its process has not been ended, the error is a `TaskError` as well.
    """


class TaskTimeoutError(FastrtError, TimeoutError):
    """An attempt of the task ran for longer than its `timeout`. Raise the timeout, or give the task less work."""


class WorkerCrashedError(FastrtError):
    """The worker process ended (killed, out of memory, crashed in native code) in every attempt of the task.

    Look at the worker's last output and the kernel log. Raise `max_retries` if the cause is temporary.
    """


class OutOfMemoryError(WorkerCrashedError):
    """The kernel, or fastrt before it, ended the worker process because memory ran out, in every attempt of the task.

    Give each task less data, run fewer at once (`memory=`, `num_cpus=2`), or raise the limit of the container. If
    fastrt ended the process (`memory_threshold`), a table says how much memory each worker and actor had.
    """


class ActorError(FastrtError):
    """The root of errors of actors: their calls cannot be run. Look at the class and the message for the reason."""


class PendingCallsError(FastrtError):
    """This process has as many unended calls of an actor as `max_pending_calls` allows; the call was not submitted.

    Wait for results of earlier calls and call again, or raise the option.
    """


class ActorDiedError(ActorError):
    """The actor is dead, or its process ended while it ran the call; the message says which actor, how and why.

    Create another actor, or give it `max_restarts`, and `max_task_retries` if its calls may run more than once.

    Attributes:
        attempts: number of attempts of the call that had begun.
        on_purpose: whether the program itself ended the actor.
        actor_id: the actor's id in 32 hex digits, as Ray's errors have it; None: unknown.
        actor_init_failed: whether its constructor raised.
    """

    attempts: int = 0
    on_purpose: bool = False
    actor_id: str | None = None
    actor_init_failed: bool = False

    @property
    def error_msg(self) -> str:
        """Return the message: Ray's name for it."""
        return str(self)


class ActorUnavailableError(ActorDiedError):
    """The actor's process ended while it ran the call, and the actor is started again: later calls run there.

    Call it again, or give it `max_task_retries`. Ray's class of this name is no ActorDiedError.
    """


class ActorUnschedulableError(ActorDiedError):
    """An actor requests resources that no node has, and no node can join that has them; its calls raise this.

    Ray's class of this name is no ActorDiedError.
    """


class ActorNotFoundError(NotFoundError, ValueError):
    """This session has no live actor with that name. Look at `fastrt.list_named_actors()`."""


class PlacementGroupNotFoundError(NotFoundError, ValueError):
    """This session has no placement group with that name. Look at `fastrt.placement_group_table()`."""


class NameTakenError(FastrtError, ValueError):
    """Another actor of this session has that name. Choose another one, or pass `get_if_exists=True`."""


class NodeDiedError(FastrtError):
    """A node left the cluster or stopped answering while the call needed it. Run the call again on other nodes."""


# MemoryError comes first: its `__new__` serves no class whose layout is taken from another base, and libraries that
# pickle exceptions with their tracebacks, such as tblib, call it.
class ObjectStoreFullError(MemoryError, FastrtError):
    """There is no room for an object, neither in the store nor on the disk (or `spill_fallback` is off).

    Drop references and views that are no longer needed, or start with a larger `object_store_memory`.

    Attributes:
        explained: whether the message names the processes that use the memory.
        may_pass: whether the same call may succeed later, because the store is full only at the moment. False if the
            object is larger than the whole store, or a table is full.
    """

    explained: bool = False
    may_pass: bool = False


class StaleReferenceError(FastrtError, ValueError):
    """The reference or handle names an object that is gone: it was released, or its session has ended.

    Keep the ObjectRef alive as long as its object is needed, and never use one in a later session.
    """


class ObjectLostError(FastrtError):
    """Every copy of the object was lost with the processes or nodes that held it, and it cannot be recomputed.

    `put` its data again, or run its task again.
    """


class UnsupportedError(FastrtError, NotImplementedError):
    """The engine of this process (`fastrt.init(engine=..., local_mode=...)`) does not support this operation.

    Leave the operation out, or use fastrt's own engine: `fastrt.init()` without these arguments.
    """


class InfeasibleTaskError(FastrtError):
    """A task requests resources that no node has, and no node can join that has them.

    The message lists the resources there are. Start the runtime with more (`init(resources=...)`), or request less.
    """


class ReferenceCountError(FastrtError, ValueError):
    """The scheduler rejected an impossible change of reference counts, aliases or contents, and applied none of it.

    The message names the reference; look for a count that was dropped twice, or taken too late.

    Args:
        message: the fault, in words.
        kind: unknown, freed, negative, aliased, ready, circular, contained or uncounted.
        objref: the number of the reference.
    """

    def __init__(self, message: str, kind: str, objref: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.objref = objref

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind, self.objref)


class ArenaCorrupt(FastrtError):
    """The shared segment holds a state that no correct process writes; the runtime has stopped using it.

    Restart the runtime. The usual cause is native code that writes beyond its buffers; if you use none, report it.
    """


class LockStuck(FastrtError):
    """A process has held a lock of the arena for seconds without dying: it is stopped, traced or starved.

    Continue or kill that process, and repeat the call: it has changed nothing.
    """


class CollectiveMismatch(FastrtError, ValueError):
    """The ranks of a group made different calls: their operation, type, size or root differs.

    The message lists the call of each rank. No rank has changed anything, and the group can still be used.
    """


class CollectiveTimeout(FastrtError, TimeoutError):
    """Some ranks did not call an operation, or did not join a new group, in time; the message names these ranks.

    The operation fails on all its ranks. The next one is not affected: operations are numbered.
    """


class PeerDied(FastrtError):
    """A rank's process has ended, or has destroyed its side of the group, so the group can no longer be used.

    Call `rebuild` on all other ranks.

    Args:
        message: the known cause.
        rank: the rank that is gone.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank)


class TaskError(FastrtError):
    """The task's function raised. The error is also an instance of the raised exception's type if Python allows it.

    So `except ValueError` around `get` catches a task's ValueError, with its `args` and attributes.
    `str()` is the traceback of the worker without the frames of fastrt itself (with them if FASTRT_FULL_TRACEBACK is
    set). Notes, `__cause__` and `__context__` are those of the exception, and an ExceptionGroup stays one.

    Args:
        task_name: the task's name; by default the name of its function.
        pid: the worker's process id.
        traceback_text: the traceback, formatted in the worker.
        cause: the exception that the function raised, or None if it could not be sent.
        function_name, traceback_str: Ray's names of `task_name` and `traceback_text`.
    """

    task_name: str
    pid: int
    traceback_text: str
    cause: BaseException | None

    def __init__(
        self,
        task_name: str = "",
        pid: int | None = None,
        traceback_text: str = "",
        cause: BaseException | None = None,
        *,
        function_name: str = "",
        traceback_str: str = "",
    ) -> None:
        self.task_name = task_name or function_name
        self.pid = os.getpid() if pid is None else pid
        super().__init__(f"task {self.task_name!r} failed in process {self.pid}")
        self.traceback_text = traceback_text or traceback_str
        self.cause = cause

    @staticmethod
    def wrap(
        exc: BaseException, *, task_name: str, pid: int | None = None, traceback_text: str | None = None
    ) -> TaskError:
        """Make the TaskError for `exc`, which a worker seals as the task's result.

        A TaskError that passes through an outer task keeps its first cause, and gains the outer frames.

        Args:
            exc: the exception that the task's function raised.
            task_name: the task's name.
            pid: the worker's process id; default: this process.
            traceback_text: default: the traceback of `exc`, formatted here.
        Returns:
            An instance of TaskError and of the cause's type, or of TaskError alone if the cause is a `StopIteration`
            or `GeneratorExit` (it must not end the caller's loop or generator), or if its class allows no second base.
            If the cause is no `Exception`, such as `SystemExit`, it is a `WorkerCrashedError`, too: programs that were
            written for Ray catch that.
        """
        text = format_user_traceback(exc) if traceback_text is None else traceback_text
        cause = exc.cause if isinstance(exc, TaskError) else exc
        return _make(cause, task_name, os.getpid() if pid is None else pid, text)

    @property
    def function_name(self) -> str:
        """The name of the task, as Ray's programs ask for it."""
        return self.task_name

    @property
    def traceback_str(self) -> str:
        """The traceback of the worker, as Ray's programs ask for it."""
        return self.traceback_text

    def as_instanceof_cause(self) -> TaskError:
        """Return this error as an instance of its cause's type, which a task's error is already, for Ray's programs."""
        if self.cause is None or isinstance(self, type(self.cause)):
            return self
        return _make(self.cause, self.task_name, self.pid, self.traceback_text)

    make_dual_exception_instance = as_instanceof_cause

    def __str__(self) -> str:
        return f"task {self.task_name!r} failed in process {self.pid}\n{self.traceback_text.rstrip()}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Each exception of the chain is pickled separately: if one cannot be pickled, or the receiver cannot restore
        # it, only that one is lost and not the whole error.
        return _unpickle, (links_of(self.cause), self.task_name, self.pid, self.traceback_text)


def format_user_traceback(exc: BaseException) -> str:
    """Format the traceback of `exc` and its chain without the frames that lie inside fastrt.

    Args:
        exc: a raised exception.
    Returns:
        The text as Python prints it; with all frames if all of them are fastrt's, or if the variable
        FASTRT_FULL_TRACEBACK is set. Of another task's error that only fastrt's frames raised, it says that this was
        an argument.
    """
    shown = traceback.TracebackException.from_exception(exc)
    if full_traceback():
        return "".join(shown.format())
    chain: list[traceback.TracebackException | None] = [shown]
    seen: set[int] = set()
    while chain:
        part = chain.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        frames = [f for f in part.stack if not f.filename.startswith(_PACKAGE_DIR) and _COMPILED_DIR not in f.filename]
        if frames:
            part.stack = traceback.StackSummary.from_list(frames)
        elif part is shown and isinstance(exc, TaskError):
            return "".join(["One of its arguments could not be computed:\n", *shown.format_exception_only()])
        chain += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]  # of a group
    return "".join(shown.format())


def full_traceback() -> bool:
    """Whether the variable FASTRT_FULL_TRACEBACK is set: tracebacks then include the frames of fastrt itself."""
    return os.environ.get("FASTRT_FULL_TRACEBACK", "").strip().lower() not in ("", "0", "false", "no", "off")


def for_users(exc: FastrtError) -> FastrtError:
    """Strip the internal frames from an error that a public function is about to raise.

    They do not help users; the frames of a task are in its error's text. FASTRT_FULL_TRACEBACK keeps them.
    """
    return exc if full_traceback() else exc.with_traceback(None)


def _make(cause: BaseException | None, task_name: str, pid: int, traceback_text: str) -> TaskError:
    """Build an instance of TaskError and of the cause's type, or of TaskError alone (see `TaskError.wrap`)."""
    # A StopIteration would end the caller's loop over `map(get, refs)` as if there were no more values.
    if cause is not None and not isinstance(cause, _ENDS_LOOPS):
        try:
            return _make_dual(cause, task_name, pid, traceback_text)
        except Exception:  # user classes may refuse subclassing or construction in any way they like
            pass
    alone = _dual_class(WorkerCrashedError) if cause is not None and _ends_rays_worker(type(cause)) else TaskError
    return alone(task_name, pid, traceback_text, cause)


def _ends_rays_worker(kind: type[BaseException]) -> bool:
    """Whether a worker of Ray ends when a task raises this."""
    return not issubclass(kind, (Exception, GeneratorExit)) and kind.__name__ != "CancelledError"  # asyncio's


def _make_dual(cause: BaseException, task_name: str, pid: int, traceback_text: str) -> TaskError:
    kind: Any = type(cause)
    error: TaskError = blank(_dual_class(kind), cause.args)
    for base in type(cause).__mro__:
        for name, member in vars(base).items():
            # errno, filename, name, value, slots: fields that C keeps outside of __dict__.
            if hasattr(type(member), "__set__") and not name.startswith("__") and not isinstance(member, property):
                try:
                    assign(error, **{name: getattr(cause, name)})
                except (AttributeError, TypeError):
                    continue  # unset in the cause, or read-only
    error.__dict__.update(cause.__dict__)
    assign(error, __cause__=cause.__cause__, __context__=cause.__context__)
    assign(error, __suppress_context__=cause.__suppress_context__)  # setting a cause sets it, too
    assign(error, task_name=task_name, pid=pid, traceback_text=traceback_text, cause=cause)
    return error


@lru_cache(maxsize=256)
def _dual_class(kind: type[BaseException]) -> type[TaskError]:
    """The class for one type of cause. The same type always gives the same class, so errors compare by type."""
    if issubclass(TaskError, kind):
        return TaskError
    module, name = _named
    space = {"__module__": module, "__qualname__": f"{name}({kind.__qualname__})", "__doc__": kind.__doc__}
    bases = (TaskError, WorkerCrashedError, kind) if _ends_rays_worker(kind) else (TaskError, kind)
    return type(f"{name}({kind.__name__})", bases, space)


def name_as_ray() -> None:
    """Give the errors of tasks the names that they have on Ray, such as `RayTaskError(ValueError)`, in this process."""
    global _named
    _named = ("ray.exceptions", "RayTaskError")
    _dual_class.cache_clear()


def _unpickle(links: list[Link], task_name: str, pid: int, traceback_text: str) -> TaskError:
    cause = restore(links)
    error = _make(cause, task_name, pid, traceback_text)
    if cause is not None and not isinstance(error, type(cause)) and not isinstance(cause, _ENDS_LOOPS):
        import logging  # here: `import fastrt` is light

        kind, variable = _named[1], "ray_task_error" if _named[0] != __name__ else "task_error"
        logging.getLogger("fastrt").warning(
            "%s, which task %r raised, cannot be a base of another class. This exception is raised as %s only. "
            "You can use `%s.cause` to access the user exception.", type(cause), task_name, kind, variable,
        )  # fmt: skip
    return error


# Codes of the compiled core (FRT_* in _core/include/layout.h). Two never leave it and have no class:
# -9 (a signal arrived: the wait goes on unless its handler raised) and -12 (grow the arena, then try again).
ERROR_CODES: dict[int, type[FastrtError]] = {
    -1: ObjectStoreFullError,
    -2: StaleReferenceError,
    -3: GetTimeoutError,
    -4: ArenaCorrupt,
    -5: LockStuck,
    -6: ObjectStoreFullError,
    -7: ObjectStoreFullError,
    -8: NotInitializedError,
    -10: AttachError,
    -11: NotFoundError,
}
