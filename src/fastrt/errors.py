"""Every exception that fastrt raises on purpose, in one hierarchy, and the table from core codes to classes.

`except FastrtError` catches whatever fastrt itself reports. Where an error is also one of Python's own kinds
(a timeout, a wrong value, no memory), its class inherits from that too, so ordinary `except` clauses work.
Each docstring says what happened and what to do about it. This module imports nothing of fastrt.
"""

from __future__ import annotations

import os
import pickle
import traceback
from functools import lru_cache
from typing import Any

_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
# What compiled frames report as their file, whatever folder the wheel was built in.
_COMPILED_DIR = os.path.join("fastrt", "_core") + os.sep
_CHAIN_MOST = 50  # exceptions that travel with one that was raised while others were handled
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement, not a built-in


class FastrtError(Exception):
    """The root of everything fastrt reports. Catch it to handle any failure of the runtime itself."""


class PerformanceWarning(UserWarning):
    """The program is slow for a reason that fastrt knows; the text says what to change. Once for each cause.

    `fastrt.init(advice=False)` or FASTRT_ADVICE=0 switches it off.
    """


class ConfigError(FastrtError, ValueError):
    """A setting is malformed or out of range. The message names the setting, its value and what is allowed."""


class NotInitializedError(FastrtError, RuntimeError):
    """The call needs a running runtime, and it is not started or already shut down. Call `fastrt.init()` first."""


class ForkedRuntimeError(FastrtError, RuntimeError):
    """The call cannot work in a child made by `os.fork` from an initialised driver.

    Start the child by the `spawn` or `forkserver` method of multiprocessing, or make the call in the parent.
    """


class AttachError(FastrtError):
    """A process cannot join an arena: other layout version, other user, other PID namespace, or no client slot left.

    Use the same fastrt version, user and container as the process that started the runtime; when the slots are
    used up, raise `clients_max` or end processes that are attached.
    """


class SerializationError(FastrtError, TypeError):
    """An argument, a result or a function cannot be pickled, or not be restored where it is needed.

    The message names the offending value. Pass plain data and open files, locks or connections inside the task.
    """


class NotFoundError(FastrtError, LookupError):
    """What the call names does not exist: there is no such record, function or name. Check what was passed."""


class FunctionNotFoundError(NotFoundError):
    """A worker was given a task whose function it cannot load.

    The function's module is missing or differs in the worker's environment. Install it there, or define the
    function in the driver's script, from where it is shipped by value.
    """


class GetTimeoutError(FastrtError, TimeoutError):
    """`get` or another wait reached its timeout. The task goes on: wait again, or cancel it."""


class TaskCancelledError(FastrtError):
    """The task was cancelled before it had a result, by `fastrt.cancel` or because its driver ended."""


class TaskTimeoutError(FastrtError, TimeoutError):
    """An attempt of the task ran for longer than its `timeout`. Raise that, or give the task less to do."""


class WorkerCrashedError(FastrtError):
    """The worker process ended (killed, out of memory, crashed in native code) as often as the task may be retried.

    Look at the worker's last output and the kernel log; raise `max_retries` when the cause passes by itself.
    """


class OutOfMemoryError(WorkerCrashedError):
    """The kernel killed the worker process because memory ran out, as often as the task may be retried.

    Give each task less data, run fewer at once (`num_cpus=2`), or raise the limit of the container.
    """


class ActorDiedError(FastrtError):
    """The actor is dead, or its process ended while it ran the call; the message says which actor, how and why.

    Make another actor, or give it `max_restarts`, and `max_task_retries` if its calls may run more than once.

    Attributes:
        attempts: how often the call had begun.
        on_purpose: whether the program has ended the actor itself.
    """

    attempts: int = 0
    on_purpose: bool = False


class ActorNotFoundError(NotFoundError, ValueError):
    """No actor of that name lives in this session. Look at `fastrt.list_named_actors()`."""


class NameTakenError(FastrtError, ValueError):
    """Another actor of this session has that name. Choose another one, or pass `get_if_exists=True`."""


class NodeDiedError(FastrtError):
    """A node left the cluster or stopped answering while the call needed it. Run it again on those that are left."""


class ObjectStoreFullError(FastrtError, MemoryError):
    """There is no room for an object, or an object is larger than the whole store.

    Drop references and views that are no longer needed, or start with a larger `object_store_memory`.

    Attributes:
        explained: whether the message says who holds what.
        may_pass: whether the same call may succeed later: there is no room for the moment. False where the object is
            larger than the whole store, or a table is full.
    """

    explained: bool = False
    may_pass: bool = False


class StaleReferenceError(FastrtError):
    """The reference or handle is used after what it stood for is gone: released, or of a session that has ended.

    Keep the ObjectRef alive while anybody needs its object, and never carry one from one session to the next.
    """


class ObjectLostError(FastrtError):
    """Every copy of the object is gone with the processes or nodes that held it, and it cannot be made again.

    `put` its data again, or run the task that made it again.
    """


class UnsupportedError(FastrtError, NotImplementedError):
    """The engine that this process uses (`fastrt.init(engine=..., local_mode=...)`) has nothing that does this.

    Leave it out, or use fastrt's own engine: `fastrt.init()` without either.
    """


class InfeasibleTaskError(FastrtError):
    """A task demands resources that nothing here has, and nothing can join that would have them.

    Its message says what there is. Start the runtime with more (`init(resources=...)`), or ask for less.
    """


class ReferenceCountError(FastrtError, ValueError):
    """A change of reference counts, aliases or contents at the scheduler that cannot be; nothing of it was done.

    Its message names the reference; look for a count that was dropped twice, or taken too late.

    Args:
        message: what is wrong.
        kind: unknown, freed, negative, aliased, ready, circular, contained or uncounted.
        objref: the reference that it is about.
    """

    def __init__(self, message: str, kind: str, objref: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.objref = objref

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind, self.objref)


class ArenaCorrupt(FastrtError):
    """The shared segment holds a state that no correct process writes; the runtime has stopped using it.

    Restart the runtime. Native code that writes beyond its buffers is the usual cause; if there is none, report it.
    """


class LockStuck(FastrtError):
    """A process has held a lock of the arena for seconds without dying: it is stopped, traced or starved.

    Continue or kill that process, and call again: nothing was changed.
    """


class CollectiveMismatch(FastrtError, ValueError):
    """The ranks of a group called different things: operation, type, size or root differ.

    The message says what each rank did. Nothing was changed on any rank, and the group can go on.
    """


class CollectiveTimeout(FastrtError, TimeoutError):
    """Not all ranks came to an operation, or to the making of a group, in time; the message names the missing.

    The operation fails on all its ranks. The next one is not affected: operations are numbered.
    """


class PeerDied(FastrtError):
    """A rank's process has ended, or has destroyed its side of the group, so the group cannot go on as it is.

    Call `rebuild` on all ranks that are left.

    Args:
        message: what is known.
        rank: the rank that is gone.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank)


class TaskError(FastrtError):
    """The task's function raised. This is also an instance of the exception's own type where Python allows it.

    So `except ValueError` around `get` catches a task's ValueError; its `args` and attributes are there too.
    `str()` is the traceback of the worker without the frames of fastrt itself (with them where FASTRT_FULL_TRACEBACK is
    set). Notes, `__cause__` and `__context__` are those of the exception, and an ExceptionGroup is one here, too.

    Args:
        task_name: the task's name, by default its function's.
        pid: the worker's process id.
        traceback_text: the traceback as the worker saw it.
        cause: the exception that the function raised, or None where it could not be sent.
    """

    task_name: str
    pid: int
    traceback_text: str
    cause: BaseException | None

    def __init__(self, task_name: str, pid: int, traceback_text: str, cause: BaseException | None = None) -> None:
        super().__init__(f"task {task_name!r} failed in process {pid}")
        self.task_name = task_name
        self.pid = pid
        self.traceback_text = traceback_text
        self.cause = cause

    @staticmethod
    def wrap(
        exc: BaseException, *, task_name: str, pid: int | None = None, traceback_text: str | None = None
    ) -> TaskError:
        """Make the TaskError for `exc`; what a worker seals as the task's result.

        A TaskError that passes through an outer task keeps its first cause, and gains the outer frames.

        Args:
            exc: what the task's function raised.
            task_name: the task's name.
            pid: the worker's process id; default: this process.
            traceback_text: default: the traceback of `exc`, formatted here.
        Returns:
            An instance of TaskError and of the cause's type, also of `SystemExit` and `KeyboardInterrupt`; of
            TaskError alone where the cause is a `StopIteration` or `GeneratorExit` (it must not end the caller's
            loop or generator), or where its class allows no second base.
        """
        text = format_user_traceback(exc) if traceback_text is None else traceback_text
        cause = exc.cause if isinstance(exc, TaskError) else exc
        return _make(cause, task_name, os.getpid() if pid is None else pid, text)

    def __str__(self) -> str:
        return f"task {self.task_name!r} failed in process {self.pid}\n{self.traceback_text.rstrip()}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Each exception of the chain travels as bytes of its own: one that cannot be pickled, or that the receiver
        # cannot restore, must cost itself only, never the error.
        return _unpickle, (_links_of(self.cause), self.task_name, self.pid, self.traceback_text)


def format_user_traceback(exc: BaseException) -> str:
    """Format the traceback of `exc` and its chain without the frames that lie inside fastrt.

    Args:
        exc: a raised exception.
    Returns:
        The text as Python prints it; with all frames where nothing but fastrt's own were there, or where the variable
        FASTRT_FULL_TRACEBACK asks for them.
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
        chain += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]  # of a group
    return "".join(shown.format())


def full_traceback() -> bool:
    """Whether FASTRT_FULL_TRACEBACK asks to see the frames of fastrt itself, too."""
    return os.environ.get("FASTRT_FULL_TRACEBACK", "").strip().lower() not in ("", "0", "false", "no", "off")


def for_users(exc: FastrtError) -> FastrtError:
    """An error that is about to leave fastrt, without the frames in which it was raised.

    They help nobody; those of a task are in its error's text. FASTRT_FULL_TRACEBACK keeps them.
    """
    return exc if full_traceback() else exc.with_traceback(None)


def _make(cause: BaseException | None, task_name: str, pid: int, traceback_text: str) -> TaskError:
    """Build the instance of both types, or of TaskError alone where that is impossible or unwise."""
    # A StopIteration would end the caller's loop over `map(get, refs)` as if there were no more values.
    if cause is not None and not isinstance(cause, (StopIteration, StopAsyncIteration, GeneratorExit)):
        try:
            return _make_dual(cause, task_name, pid, traceback_text)
        except Exception:  # user classes may refuse subclassing or construction in any way they like
            pass
    return TaskError(task_name, pid, traceback_text, cause)


def _make_dual(cause: BaseException, task_name: str, pid: int, traceback_text: str) -> TaskError:
    kind: Any = type(cause)
    error: TaskError = _blank(_dual_class(kind), cause.args)
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


def assign(exc: BaseException, **fields: Any) -> None:
    """Set attributes of an exception, also of a class that refuses it, as a frozen dataclass does."""
    for name, value in fields.items():
        object.__setattr__(exc, name, value)


def _blank(kind: type, args: tuple[Any, ...]) -> Any:
    """An instance without its class's __init__ having run: that may have effects, or want other arguments.

    Python demands the __new__ of the class that laid out the instance: the first built-in along __base__.
    """
    maker: type = kind
    while maker.__flags__ & _HEAP_TYPE and maker.__base__ is not None:
        maker = maker.__base__
    return maker.__new__(kind, *args)


@lru_cache(maxsize=256)
def _dual_class(kind: type[BaseException]) -> type[TaskError]:
    """One class per type of cause; equal types give the same class, so dual errors of one kind compare by type."""
    if issubclass(TaskError, kind):
        return TaskError
    space = {"__module__": __name__, "__qualname__": f"TaskError({kind.__qualname__})", "__doc__": kind.__doc__}
    return type(f"TaskError({kind.__name__})", (TaskError, kind), space)


# Of an exception on its way: its bytes, the places of its cause and context among the links, and what
# __suppress_context__ says; bytes of None for one that cannot travel.
_Link = tuple[bytes | None, int | None, int | None, bool]


def _links_of(cause: BaseException | None) -> list[_Link]:
    """An exception and those that it stands for or came after, the first one first."""
    if cause is None:
        return []
    chain, places = [cause], {id(cause): 0}
    for exc in chain:  # grows meanwhile
        for other in (exc.__cause__, exc.__context__):
            if other is not None and id(other) not in places and len(chain) < _CHAIN_MOST:
                places[id(other)] = len(chain)
                chain.append(other)
    return [
        (_to_bytes(exc), places.get(id(exc.__cause__)), places.get(id(exc.__context__)), exc.__suppress_context__)
        for exc in chain
    ]


def _to_bytes(exc: BaseException) -> bytes | None:
    """Pickle an exception; by its parts where it does not come back from being pickled as a whole."""
    import cloudpickle  # here: only a failed task pays for the import, and this module stays light

    try:
        data = bytes(cloudpickle.dumps(exc))
        if isinstance(pickle.loads(data), BaseException):
            return data
    except BaseException:  # whatever a user's __reduce__ and __init__ raise: the worker that reports it must live on
        pass
    try:
        args = tuple(_portable(arg) for arg in exc.args)
        fields = {name: _portable(value) for name, value in vars(exc).items()}
        return bytes(cloudpickle.dumps(_Parts(type(exc), args, fields)))
    except BaseException:
        return None


class _Parts:
    """An exception taken apart: it is put together again without its class's own methods."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        self.kind, self.args, self.fields = kind, args, fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_together, (self.kind, self.args, self.fields)


def _put_together(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    exc: BaseException = _blank(kind, args)
    exc.__dict__.update(fields)
    return exc


def _portable(value: Any) -> Any:
    """A value that can be pickled, or what it looked like."""
    import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(value))
    except Exception:
        return repr(value)
    return value


def _unpickle(links: list[_Link], task_name: str, pid: int, traceback_text: str) -> TaskError:
    chain: list[BaseException | None] = []
    for data, _, _, _ in links:
        try:
            exc = None if data is None else pickle.loads(data)
        except Exception:  # the class is missing here
            exc = None
        chain.append(exc if isinstance(exc, BaseException) else None)
    for exc, (_, cause, context, suppress) in zip(chain, links, strict=True):
        if exc is not None:
            assign(exc, __cause__=None if cause is None else chain[cause])
            assign(exc, __context__=None if context is None else chain[context])
            assign(exc, __suppress_context__=suppress)
    return _make(chain[0] if chain else None, task_name, pid, traceback_text)


# Codes of the compiled core (FRT_* in _core/include/layout.h). Two are never seen outside of it and have no class:
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
