"""What can happen to the scheduler's state machine, and what it orders in return.

Events are facts that a shell reports; effects are what the shell must do. `call` is an opaque number by which the
shell knows the caller that waits for an answer. References, workers and stores are numbers made by the state machine.

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
    """Why a call was refused."""

    code: Code
    message: str


class Refused(FastrtError):
    """A call that cannot be; nothing was changed. Its answer is the failure."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(code, message)


# Calls of the protocol. Each is answered at once, with what its docstring says or a `Failure`.


@dataclass
class Call:
    """What all of them have: by which number the shell knows who waits for the answer."""

    call: int


@dataclass
class RegisterObjStore(Call):
    """A store serves at an address: answered with its number. One that was known there before is lost."""

    address: str


@dataclass
class RegisterWorker(Call):
    """A worker beside a store serves at an address: answered with its number. It may be given calls from now on."""

    address: str
    store_address: str


@dataclass
class RegisterFunction(Call):
    """A worker can run a function: answered with None."""

    worker: int
    name: str
    result_count: int


@dataclass
class RemoteCall(Call):
    """A call of a function: answered with the references of its results, each counted twice.

    Attributes:
        body: the call as it goes to a worker, but for its results; opaque here.
        args: references that are arguments, each as often as it is one: the call waits for them.
        nested: references within arguments that are values: kept alive, but not waited for.
        strategy: empty, `spread` or `pack`.
        max_retries: how often it is run again after a loss; None: as the settings say.
    """

    name: str
    body: bytes
    args: Sequence[int] = ()
    nested: Sequence[int] = ()
    strategy: str = ""
    max_retries: int | None = None


@dataclass
class IncrementRefs(Call):
    """Count each reference once more: answered with None."""

    refs: Iterable[int]


@dataclass
class DecrementRefs(Call):
    """Count each reference once less: answered with None."""

    refs: Iterable[int]


@dataclass
class PushObj(Call):
    """A worker will put an object into its store: answered with its reference, counted once."""

    worker: int


@dataclass
class RequestObj(Call):
    """A worker wants an object in its store: answered with None at once."""

    worker: int
    ref: int


@dataclass
class AliasObjRefs(Call):
    """Two references are to mean one object: answered with None."""

    alias: int
    target: int


@dataclass
class ObjReady(Call):
    """A store has an object, whole, made there or delivered: answered with None. `nbytes` 0: its size is not known."""

    ref: int
    store: int
    nbytes: int = 0


@dataclass
class AddContained(Call):
    """An object contains references, which were counted for it: answered with None."""

    ref: int
    contained: Sequence[int]


@dataclass
class WorkerReady(Call):
    """A worker has ended its call and can take another: answered with None."""

    worker: int


@dataclass
class SchedulerInfo(Call):
    """Answered with an `Info`."""


# Facts that nobody waits on.


@dataclass
class WorkerLost:
    """A worker is gone for good. Its call runs elsewhere."""

    worker: int


@dataclass
class ObjStoreLost:
    """A store is gone for good, and its objects and workers with it."""

    store: int


@dataclass
class InvokeTaken:
    """A worker has taken its call."""

    worker: int
    task: int


@dataclass
class InvokeRefused:
    """A worker answered a call with an error, and so did not take it. It gets no other before it says WorkerReady."""

    worker: int
    task: int
    reason: str


@dataclass
class DeliveryFailed:
    """A delivery was given up. One that went through says ObjReady instead."""

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


# Effects. Those for one store are carried out in the order given, deliveries beside them. Not named tuples: one of
# those takes five times as long to make, and of nine a call's life makes that was a fifth of its time.


@dataclass
class Answer:
    """What the caller is told: a value or a `Failure`."""

    call: int
    value: Any


@dataclass
class InvokeCall:
    """Give a worker a call. `task` comes back in `InvokeRefused`."""

    worker: int
    task: int
    body: bytes
    results: Sequence[int]


@dataclass
class DeliverObj:
    """Have the source store send an object to the target store."""

    ref: int
    source: int
    target: int


@dataclass
class NotifyAlias:
    """Tell a store that has the canonical reference's object that another reference means it too."""

    store: int
    alias: int
    canonical: int


@dataclass
class DeallocateObject:
    """Have a store drop an object. Nothing comes after it for this reference."""

    store: int
    canonical: int


@dataclass
class RequestFailed:
    """Tell a worker that what it requested will not come. The seed's protocol has no words for it."""

    worker: int
    ref: int
    reason: str


@dataclass
class ForgetWorker:
    """Nothing goes to this worker any more."""

    worker: int


@dataclass
class ForgetStore:
    """Nothing goes to this store any more."""

    store: int


Effect = Answer | InvokeCall | DeliverObj | NotifyAlias | DeallocateObject | RequestFailed | ForgetWorker | ForgetStore


def parts(message: Event | Effect) -> list[Any]:
    """The fields of an event or an effect, in order."""
    return [getattr(message, field.name) for field in fields(message)]


class FunctionView(NamedTuple):
    """A function: who can run it, and how many results it has."""

    workers: list[int]
    result_count: int


class Info(NamedTuple):
    """What `SchedulerInfo` shows.

    Attributes:
        tasks: calls that are not with a worker, in order: their bodies and results.
        functions: by name.
        idle_workers: those that wait for a call.
        targets: by reference: what it is an alias of, itself when ready, 2^64-1 when neither.
        counts: by reference: its count, 2^64-1 when deallocated.
    """

    tasks: list[tuple[bytes, Sequence[int]]]
    functions: dict[str, FunctionView]
    idle_workers: list[int]
    targets: Any
    counts: Any
