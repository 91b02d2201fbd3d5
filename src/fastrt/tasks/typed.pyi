"""Types of remote functions, remote classes and actors' methods, for type checkers.

At run time this module has type variables and a decorator that returns its argument: calls cost what they did.

`Submit` says how `.remote` may be called: with the exact parameters, or with a reference in place of an argument. One
overload for each position of the last reference keeps the checks of all other arguments. The overloads take their
parameters from a protocol's method, because mypy solves `Concatenate` for callables and not for classes, and pyrefly
does not solve it for a property's callable.
"""

# mypy: disable-error-code="overload-overlap"
# The first overload that fits counts: a function that returns an iterator fits the last one, too.

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, Protocol, overload

from typing_extensions import ParamSpec, TypedDict, TypeVar

from fastrt.store.generator import ObjectRefGenerator
from fastrt.store.ref import ObjectRef
from fastrt.tasks.actor_class import ActorClass
from fastrt.tasks.actor_handle import ActorHandle, ActorMethod
from fastrt.tasks.method import Actor
from fastrt.tasks.placement_group import PlacementGroupSchedulingStrategy
from fastrt.tasks.remote import RemoteFunction
from fastrt.tasks.resources import NodeAffinity

# Contravariant: `RemoteFunction[[int], str]` takes a function whose parameter has a name, as mypy and pyright allow it
# anyway. The specification leaves the word's meaning open; pyrefly and ty follow it.
P = ParamSpec("P", default=..., contravariant=True)  # type: ignore[misc]
R = TypeVar("R", default=Any, covariant=True)
Out = TypeVar("Out", default="ObjectRef[R]", covariant=True)  # of `.remote(...)`
Handle = TypeVar("Handle", default="ActorHandle", covariant=True)
Instance = TypeVar("Instance", default=Any, covariant=True)

def submits(method: Callable[..., Any]) -> Remote: ...

_V = TypeVar("_V")
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_O = TypeVar("_O")
_Result = TypeVar("_Result", covariant=True)
_C = TypeVar("_C")
_A = TypeVar("_A", bound=Actor)
_I0 = TypeVar("_I0", contravariant=True)
_I1 = TypeVar("_I1", contravariant=True)
_I2 = TypeVar("_I2", contravariant=True)
_I3 = TypeVar("_I3", contravariant=True)
_I4 = TypeVar("_I4", contravariant=True)
_I5 = TypeVar("_I5", contravariant=True)
_I6 = TypeVar("_I6", contravariant=True)
_I7 = TypeVar("_I7", contravariant=True)
_A0 = TypeVar("_A0")
_A1 = TypeVar("_A1")
_A2 = TypeVar("_A2")
_A3 = TypeVar("_A3")
_A4 = TypeVar("_A4")
_A5 = TypeVar("_A5")
_A6 = TypeVar("_A6")
_A7 = TypeVar("_A7")

class _Takes1(Protocol[_I0, _Q]):
    def signature(self, a0: _I0, /, *args: _Q.args, **kwargs: _Q.kwargs) -> Any: ...

class _Takes2(Protocol[_I0, _I1, _Q]):
    def signature(self, a0: _I0, a1: _I1, /, *args: _Q.args, **kwargs: _Q.kwargs) -> Any: ...

class _Takes3(Protocol[_I0, _I1, _I2, _Q]):
    def signature(self, a0: _I0, a1: _I1, a2: _I2, /, *args: _Q.args, **kwargs: _Q.kwargs) -> Any: ...

class _Takes4(Protocol[_I0, _I1, _I2, _I3, _Q]):
    def signature(self, a0: _I0, a1: _I1, a2: _I2, a3: _I3, /, *args: _Q.args, **kwargs: _Q.kwargs) -> Any: ...

class _Takes5(Protocol[_I0, _I1, _I2, _I3, _I4, _Q]):
    def signature(self, a0: _I0, a1: _I1, a2: _I2, a3: _I3, a4: _I4, /, *args: _Q.args, **kwargs: _Q.kwargs) -> Any: ...

class _Takes6(Protocol[_I0, _I1, _I2, _I3, _I4, _I5, _Q]):
    def signature(
        self, a0: _I0, a1: _I1, a2: _I2, a3: _I3, a4: _I4, a5: _I5, /, *args: _Q.args, **kwargs: _Q.kwargs
    ) -> Any: ...

class _Takes7(Protocol[_I0, _I1, _I2, _I3, _I4, _I5, _I6, _Q]):
    def signature(
        self, a0: _I0, a1: _I1, a2: _I2, a3: _I3, a4: _I4, a5: _I5, a6: _I6, /, *args: _Q.args, **kwargs: _Q.kwargs
    ) -> Any: ...

class _Takes8(Protocol[_I0, _I1, _I2, _I3, _I4, _I5, _I6, _I7, _Q]):
    def signature(
        self,
        a0: _I0,
        a1: _I1,
        a2: _I2,
        a3: _I3,
        a4: _I4,
        a5: _I5,
        a6: _I6,
        a7: _I7,
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> Any: ...

# For `f.remote(*refs)`. To mypy every function of positional parameters fits them, so it does not count references.
class _TakesAny(Protocol[_I0]):
    def signature(self, /, *args: _I0) -> Any: ...

class _TakesOneAndAny(Protocol[_I0, _I1]):
    def signature(self, a0: _I0, /, *args: _I1) -> Any: ...

class Submit(Generic[_P, _Result]):
    """The type of a bound `.remote`."""

    def signature(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Any: ...
    @overload
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result: ...
    @overload
    def __call__(
        self: _Takes1[_A0, _Q],
        a0: ObjectRef[_A0],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes2[_A0, _A1, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: ObjectRef[_A1],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes3[_A0, _A1, _A2, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: _A1 | ObjectRef[_A1],
        a2: ObjectRef[_A2],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes4[_A0, _A1, _A2, _A3, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: _A1 | ObjectRef[_A1],
        a2: _A2 | ObjectRef[_A2],
        a3: ObjectRef[_A3],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes5[_A0, _A1, _A2, _A3, _A4, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: _A1 | ObjectRef[_A1],
        a2: _A2 | ObjectRef[_A2],
        a3: _A3 | ObjectRef[_A3],
        a4: ObjectRef[_A4],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes6[_A0, _A1, _A2, _A3, _A4, _A5, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: _A1 | ObjectRef[_A1],
        a2: _A2 | ObjectRef[_A2],
        a3: _A3 | ObjectRef[_A3],
        a4: _A4 | ObjectRef[_A4],
        a5: ObjectRef[_A5],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes7[_A0, _A1, _A2, _A3, _A4, _A5, _A6, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: _A1 | ObjectRef[_A1],
        a2: _A2 | ObjectRef[_A2],
        a3: _A3 | ObjectRef[_A3],
        a4: _A4 | ObjectRef[_A4],
        a5: _A5 | ObjectRef[_A5],
        a6: ObjectRef[_A6],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(
        self: _Takes8[_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7, _Q],
        a0: _A0 | ObjectRef[_A0],
        a1: _A1 | ObjectRef[_A1],
        a2: _A2 | ObjectRef[_A2],
        a3: _A3 | ObjectRef[_A3],
        a4: _A4 | ObjectRef[_A4],
        a5: _A5 | ObjectRef[_A5],
        a6: _A6 | ObjectRef[_A6],
        a7: ObjectRef[_A7],
        /,
        *args: _Q.args,
        **kwargs: _Q.kwargs,
    ) -> _Result: ...
    @overload
    def __call__(self: _TakesAny[_A0], a0: ObjectRef[_A0], /, *args: ObjectRef[_A0]) -> _Result: ...
    @overload
    def __call__(
        self: _TakesOneAndAny[_A0, _A1],
        a0: _A0 | ObjectRef[_A0],
        a1: ObjectRef[_A1],
        /,
        *args: ObjectRef[_A1],
    ) -> _Result: ...

class Remote:
    """The type of `.remote`: with the parameters of the object that it is read from."""

    @overload
    def __get__(self, instance: None, owner: object) -> Any: ...
    @overload
    def __get__(self, instance: RemoteFunction[_Q, Any, _O], owner: object) -> Submit[_Q, _O]: ...
    @overload
    def __get__(self, instance: ActorMethod[_Q, Any, _O], owner: object) -> Submit[_Q, _O]: ...
    @overload
    def __get__(self, instance: ActorClass[_Q, _O], owner: object) -> Submit[_Q, _O]: ...

class OnlyAny:
    """A type that no function returns: a function that fits it returns `Any`."""

class _Common(TypedDict, total=False):
    num_cpus: float | None
    num_gpus: float | None
    label_selector: Mapping[str, str] | None
    fallback_strategy: Sequence[Mapping[str, Mapping[str, str]]] | None
    resources: dict[str, float] | None
    scheduling: str | None
    scheduling_strategy: str | NodeAffinity | PlacementGroupSchedulingStrategy | None
    runtime_env: dict[str, Any] | None
    name: str | None
    memory: float | None
    accelerator_type: str | None
    placement_group: Any
    placement_group_bundle_index: int
    placement_group_capture_child_tasks: bool | None
    enable_task_events: bool

# `closed`: ty takes any further option otherwise.
class CommonOptions(_Common, total=False, closed=True):
    """Options that functions and classes have."""

class MethodOptions(TypedDict, total=False, closed=True):
    """Options of actors' methods; `num_returns` is in the overloads."""

    retry_exceptions: bool | Sequence[type[Exception]] | None
    generator_backpressure: int | None
    _generator_backpressure_num_objects: int | None
    retry_delay: float | None
    retry_backoff: float | None
    retry_delay_max: float | None
    timeout: float | None
    concurrency_group: str | None
    name: str | None
    enable_task_events: bool | None

class FunctionOptions(_Common, total=False, closed=True):
    """Options of remote functions; `num_returns` is in the overloads."""

    retry_exceptions: bool | Sequence[type[Exception]] | None
    generator_backpressure: int | None
    _generator_backpressure_num_objects: int | None
    retry_delay: float | None
    retry_backoff: float | None
    retry_delay_max: float | None
    timeout: float | None
    max_retries: int
    priority: int | None
    max_calls: int | None

class ClassOptions(_Common, total=False, closed=True):
    """Options of remote classes."""

    namespace: str | None
    get_if_exists: bool | None
    lifetime: Literal["detached", "non_detached"] | None
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: dict[str, int] | None
    max_pending_calls: int
    allow_out_of_order_execution: bool | None

class FunctionDecorator(Protocol):
    """`fastrt.remote(...)` with options of functions."""

    @overload
    def __call__(self, target: Callable[_Q, OnlyAny], /) -> RemoteFunction[_Q, Any, Any]: ...
    @overload
    def __call__(
        self, target: Callable[_Q, Iterator[_V]], /
    ) -> RemoteFunction[_Q, Iterator[_V], ObjectRefGenerator[_V]]: ...
    @overload
    def __call__(self, target: Callable[_Q, _V], /) -> RemoteFunction[_Q, _V]: ...

class ClassDecorator(Protocol):
    """`fastrt.remote(...)` with options of classes."""

    @overload
    def __call__(self, target: Callable[_Q, _A], /) -> ActorClass[_Q, _A]: ...
    @overload
    def __call__(self, target: type[_C], /) -> ActorClass[..., ActorHandle[_C]]: ...

class Decorator(Protocol):
    """`fastrt.remote` itself, or with options that functions and classes have."""

    @overload
    def __call__(self, target: Callable[_Q, OnlyAny], /) -> RemoteFunction[_Q, Any, Any]: ...
    @overload
    def __call__(self, target: Callable[_Q, _A], /) -> ActorClass[_Q, _A]: ...
    @overload
    def __call__(self, target: type[_C], /) -> ActorClass[..., ActorHandle[_C]]: ...
    @overload
    def __call__(
        self, target: Callable[_Q, Iterator[_V]], /
    ) -> RemoteFunction[_Q, Iterator[_V], ObjectRefGenerator[_V]]: ...
    @overload
    def __call__(self, target: Callable[_Q, _V], /) -> RemoteFunction[_Q, _V]: ...

class OtherReturns(Protocol[_Result]):
    """`fastrt.remote(num_returns=...)` where the type of the result does not depend on the function's."""

    def __call__(self, target: Callable[_Q, _V], /) -> RemoteFunction[_Q, _V, _Result]: ...

class Streaming(Protocol):
    """`fastrt.remote(num_returns="streaming")`."""

    def __call__(
        self, target: Callable[_Q, Iterable[_V]], /
    ) -> RemoteFunction[_Q, Iterable[_V], ObjectRefGenerator[_V]]: ...

class TypedMethod(Generic[P, R, Out]):
    """A method under `fastrt.method`: inside the class to be called, on a handle with `.remote`."""

    def __get__(self, instance: object, owner: object) -> ActorMethod[P, R, Out]: ...

class MethodDecorator(Protocol):
    """`fastrt.method(...)`."""

    @overload
    def __call__(self, function: Callable[Concatenate[Any, _Q], OnlyAny], /) -> TypedMethod[_Q, Any, Any]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, _Q], Coroutine[Any, Any, _V]], /
    ) -> TypedMethod[_Q, Coroutine[Any, Any, _V], ObjectRef[_V]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, _Q], AsyncIterator[_V]], /
    ) -> TypedMethod[_Q, AsyncIterator[_V], ObjectRefGenerator[_V]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, _Q], Iterator[_V]], /
    ) -> TypedMethod[_Q, Iterator[_V], ObjectRefGenerator[_V]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, _Q], _V], /) -> TypedMethod[_Q, _V]: ...

class MethodReturns(Protocol[_Result]):
    """`fastrt.method(num_returns=...)` where the type of the result does not depend on the method's."""

    def __call__(self, function: Callable[Concatenate[Any, _Q], _V], /) -> TypedMethod[_Q, _V, _Result]: ...
