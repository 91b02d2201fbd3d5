"""The events of the scheduler's state machine, and the effects that it returns.

Events are facts that a shell reports; effects are orders that the shell carries out. `call` is an opaque number by
which the shell identifies the caller that waits for an answer. References, workers and stores are numbers that the
state machine assigns.

Compiled with the types in events.pxd when the package is built, so that an event is a C structure; ADR 5 says why.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fastrt.errors import FastrtError


class Code(enum.IntEnum):
    """Status codes, with gRPC's numbers."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15


class Failure(NamedTuple):
    """The reason why a call was rejected."""

    code: Code
    message: str


class Refused(FastrtError):
    """Raised for a call that is rejected; nothing was changed. The failure is its answer."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(code, message)


class Message:
    """Base of events and effects: compared and printed by their fields.

    Generated methods for each class would be compiled for each class: half of this module's machine code, and of the
    time that the compiler takes for it.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and parts(self) == parts(other)

    __hash__ = None  # type: ignore[assignment]  # the fields can change

    def __repr__(self) -> str:
        values = zip(fields(self), parts(self), strict=True)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{field.name}={value!r}' for field, value in values)})"


# Calls of the protocol. Each is answered at once, with the value in its docstring or a `Failure`.


@dataclass(eq=False, repr=False)
class Call(Message):
    """Base of all calls: the number by which the shell identifies the waiting caller."""

    call: int


@dataclass(eq=False, repr=False)
class RegisterObjStore(Call):
    """A store serves at an address: answered with its number. An earlier store at that address is lost."""

    address: str


@dataclass(eq=False, repr=False)
class RegisterWorker(Call):
    """A worker of a store serves at an address: answered with its number. It may get calls from now on."""

    address: str
    store_address: str


@dataclass(eq=False, repr=False)
class RegisterFunction(Call):
    """A worker can run a function: answered with None."""

    worker: int
    name: str
    result_count: int


@dataclass(eq=False, repr=False)
class RemoteCall(Call):
    """A call of a function: answered with the references of its results, each counted twice.

    Attributes:
        body: the message for the worker without the results; opaque here.
        args: references that are arguments, repeated as often as they are passed: the call waits for them.
        nested: references inside of arguments that are values: held alive, but not waited for.
        strategy: empty, `spread` or `pack`.
        max_retries: how often it runs again after a loss; None: the default of the settings.
    """

    name: str
    body: bytes
    args: Sequence[int] = ()
    nested: Sequence[int] = ()
    strategy: str = ""
    max_retries: int | None = None


@dataclass(eq=False, repr=False)
class IncrementRefs(Call):
    """Count each reference once more: answered with None."""

    refs: Iterable[int]


@dataclass(eq=False, repr=False)
class DecrementRefs(Call):
    """Count each reference once less: answered with None."""

    refs: Iterable[int]


@dataclass(eq=False, repr=False)
class PushObj(Call):
    """A worker will put an object into its store: answered with its reference, counted once."""

    worker: int


@dataclass(eq=False, repr=False)
class RequestObj(Call):
    """A worker requests an object in its store: answered with None at once."""

    worker: int
    ref: int


@dataclass(eq=False, repr=False)
class AliasObjRefs(Call):
    """Make a reference an alias of another one's object: answered with None."""

    alias: int
    target: int


@dataclass(eq=False, repr=False)
class ObjReady(Call):
    """A store has a complete object, produced there or delivered: answered with None. `nbytes` 0: size unknown."""

    ref: int
    store: int
    nbytes: int = 0


@dataclass(eq=False, repr=False)
class AddContained(Call):
    """An object contains references, which were counted for it: answered with None."""

    ref: int
    contained: Sequence[int]


@dataclass(eq=False, repr=False)
class WorkerReady(Call):
    """A worker has ended its call and can take another: answered with None."""

    worker: int


@dataclass(eq=False, repr=False)
class SchedulerInfo(Call):
    """Answered with an `Info`."""


# Facts without a waiting caller.


@dataclass(eq=False, repr=False)
class WorkerLost(Message):
    """A worker is lost and does not come back. Its call runs on another one."""

    worker: int


@dataclass(eq=False, repr=False)
class ObjStoreLost(Message):
    """A store is lost and does not come back; nor do its objects and workers."""

    store: int


@dataclass(eq=False, repr=False)
class InvokeTaken(Message):
    """A worker has confirmed its call."""

    worker: int
    task: int


@dataclass(eq=False, repr=False)
class InvokeRefused(Message):
    """A worker rejected a call by an error. It gets no other call before it sends WorkerReady."""

    worker: int
    task: int
    reason: str


@dataclass(eq=False, repr=False)
class DeliveryFailed(Message):
    """A delivery failed. A successful one sends ObjReady instead."""

    ref: int
    source: int
    target: int
    reason: str


Event = (
    RegisterObjStore
    | RegisterWorker
    | RegisterFunction
    | RemoteCall
    | IncrementRefs
    | DecrementRefs
    | PushObj
    | RequestObj
    | AliasObjRefs
    | ObjReady
    | AddContained
    | WorkerReady
    | SchedulerInfo
    | WorkerLost
    | ObjStoreLost
    | InvokeTaken
    | InvokeRefused
    | DeliveryFailed
)


# Effects. Those for one store are carried out in the order given; deliveries run concurrently with them. They are not
# named tuples: one takes five times as long to create, and the nine of a call's life took a fifth of its time.


@dataclass(eq=False, repr=False)
class Answer(Message):
    """The answer to a caller: a value or a `Failure`."""

    call: int
    value: Any


@dataclass(eq=False, repr=False)
class InvokeCall(Message):
    """Send a call to a worker. `task` comes back in `InvokeRefused`."""

    worker: int
    task: int
    body: bytes
    results: Sequence[int]


@dataclass(eq=False, repr=False)
class DeliverObj(Message):
    """Order the source store to send an object to the target store."""

    ref: int
    source: int
    target: int


@dataclass(eq=False, repr=False)
class NotifyAlias(Message):
    """Notify a store that has the canonical reference's object of an alias of it."""

    store: int
    alias: int
    canonical: int


@dataclass(eq=False, repr=False)
class DeallocateObject(Message):
    """Order a store to drop an object. No effect for this reference follows."""

    store: int
    canonical: int


@dataclass(eq=False, repr=False)
class RequestFailed(Message):
    """Notify a worker that a requested object will not come. The seed's protocol has no message for this."""

    worker: int
    ref: int
    reason: str


@dataclass(eq=False, repr=False)
class ForgetWorker(Message):
    """Send nothing to this worker any more."""

    worker: int


@dataclass(eq=False, repr=False)
class ForgetStore(Message):
    """Send nothing to this store any more."""

    store: int


Effect = Answer | InvokeCall | DeliverObj | NotifyAlias | DeallocateObject | RequestFailed | ForgetWorker | ForgetStore


def parts(message: Message) -> list[Any]:
    """The fields of an event or an effect, in order."""
    return [getattr(message, field.name) for field in fields(message)]  # type: ignore[arg-type]


class FunctionView(NamedTuple):
    """A function: the workers that can run it, and its number of results."""

    workers: list[int]
    result_count: int


class Info(NamedTuple):
    """The answer to `SchedulerInfo`.

    Attributes:
        tasks: bodies and results of the calls that no worker has, in order.
        functions: by name.
        idle_workers: the workers without a call.
        targets: by reference, from `first` on: the target of an alias, the reference itself when ready, 2^64-1 when
            neither.
        counts: by reference, from `first` on: its count, 2^64-1 when deallocated.
        first: the first of these references.
        older: the live references before it, each with its count and its target.
    """

    tasks: list[tuple[bytes, Sequence[int]]]
    functions: dict[str, FunctionView]
    idle_workers: list[int]
    targets: Any
    counts: Any
    first: int = 0
    older: Sequence[tuple[int, int, int]] = ()
