"""Types of a group's operations, for type checkers.

At run time this module has decorators that return the method: operations cost what they did.

Each operation has overloads for the result now (`async_op` absent) and for a `Handle` of it. The last overload is for
an `async_op` that only the running program knows.
"""

# mypy: disable-error-code="overload-overlap"
# The first overload that fits counts: an array of NumPy is a buffer, too.

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, TypeVar

from fastrt.collective.buffers import Bits
from fastrt.collective.handles import Handle

Op: TypeAlias = Literal["sum", "prod", "min", "max", "avg", "band", "bor"]

class _DLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

# Arrays of every library in the CPU's memory.
Array: TypeAlias = Buffer | _DLPack | Bits

_A = TypeVar("_A", bound=Array)
_O = TypeVar("_O", bound=Array)
_D = TypeVar("_D", bound=np.generic)

class Waits(Protocol):
    """The type of `barrier`."""

    @overload
    def __call__(self, *, timeout: float | None = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def __call__(self, *, timeout: float | None = ..., async_op: Literal[True]) -> Handle[None]: ...
    @overload
    def __call__(self, *, timeout: float | None = ..., async_op: bool) -> Any: ...

def waits(method: Callable[..., Any]) -> Waits: ...

class Combines(Protocol):
    """The type of `all_reduce`."""

    @overload
    def __call__(
        self, array: _A, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> _A: ...
    @overload
    def __call__(
        self, array: _A, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[_A]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: _O = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> _O: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: _O = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[_O]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: Array | None = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

def combines(method: Callable[..., Any]) -> Combines: ...

class CombinesOnOne(Protocol):
    """The type of `reduce`: only the rank `dst` gets a result."""

    @overload
    def __call__(
        self,
        array: _A,
        dst: int = ...,
        op: Op = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> _A | None: ...
    @overload
    def __call__(
        self,
        array: _A,
        dst: int = ...,
        op: Op = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[_A | None]: ...
    @overload
    def __call__(
        self,
        array: Array,
        dst: int = ...,
        op: Op = ...,
        out: _O | None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> _O | None: ...
    @overload
    def __call__(
        self,
        array: Array,
        dst: int = ...,
        op: Op = ...,
        out: _O | None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[_O | None]: ...
    @overload
    def __call__(
        self,
        array: Array,
        dst: int = ...,
        op: Op = ...,
        out: Array | None = ...,
        *,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Any: ...

def combines_on_one(method: Callable[..., Any]) -> CombinesOnOne: ...

class CombinesShared(Protocol):
    """The type of `all_reduce_shared`."""

    @overload
    def __call__(
        self, array: npt.NDArray[_D], op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> npt.NDArray[_D]: ...
    @overload
    def __call__(
        self, array: npt.NDArray[_D], op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[_D]]: ...
    @overload
    def __call__(
        self, array: Bits, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Bits: ...
    @overload
    def __call__(
        self, array: Bits, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Bits]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> npt.NDArray[Any]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[Any]]: ...
    @overload
    def __call__(self, array: Array, op: Op = ..., *, timeout: float | None = ..., async_op: bool) -> Any: ...

def combines_shared(method: Callable[..., Any]) -> CombinesShared: ...

class Divides(Protocol):
    """The type of `reduce_scatter`."""

    @overload
    def __call__(
        self,
        array: npt.NDArray[_D],
        op: Op = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[_D]: ...
    @overload
    def __call__(
        self,
        array: npt.NDArray[_D],
        op: Op = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[npt.NDArray[_D]]: ...
    @overload
    def __call__(
        self, array: Bits, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Bits: ...
    @overload
    def __call__(
        self, array: Bits, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Bits]: ...
    @overload
    def __call__(
        self,
        array: Array,
        op: Op = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[Any]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[Any]]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: _O = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> _O: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: _O = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[_O]: ...
    @overload
    def __call__(
        self, array: Array, op: Op = ..., out: Array | None = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

def divides(method: Callable[..., Any]) -> Divides: ...

class Collects(Protocol):
    """The type of `all_gather` and `all_to_all`."""

    @overload
    def __call__(
        self, array: npt.NDArray[_D], out: None = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> npt.NDArray[_D]: ...
    @overload
    def __call__(
        self, array: npt.NDArray[_D], out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[_D]]: ...
    @overload
    def __call__(
        self, array: Bits, out: None = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Bits: ...
    @overload
    def __call__(
        self, array: Bits, out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Bits]: ...
    @overload
    def __call__(
        self, array: Array, out: None = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> npt.NDArray[Any]: ...
    @overload
    def __call__(
        self, array: Array, out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[Any]]: ...
    @overload
    def __call__(
        self, array: Array, out: _O = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> _O: ...
    @overload
    def __call__(
        self, array: Array, out: _O = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[_O]: ...
    @overload
    def __call__(
        self, array: Array, out: Array | None = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

def collects(method: Callable[..., Any]) -> Collects: ...

class CollectsOnOne(Protocol):
    """The type of `gather`: only the rank `dst` gets a result."""

    @overload
    def __call__(
        self,
        array: npt.NDArray[_D],
        dst: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[_D] | None: ...
    @overload
    def __call__(
        self,
        array: npt.NDArray[_D],
        dst: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[npt.NDArray[_D] | None]: ...
    @overload
    def __call__(
        self,
        array: Bits,
        dst: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Bits | None: ...
    @overload
    def __call__(
        self, array: Bits, dst: int = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Bits | None]: ...
    @overload
    def __call__(
        self,
        array: Array,
        dst: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[Any] | None: ...
    @overload
    def __call__(
        self, array: Array, dst: int = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[Any] | None]: ...
    @overload
    def __call__(
        self,
        array: Array,
        dst: int = ...,
        out: _O | None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> _O | None: ...
    @overload
    def __call__(
        self,
        array: Array,
        dst: int = ...,
        out: _O | None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[_O | None]: ...
    @overload
    def __call__(
        self, array: Array, dst: int = ..., out: Array | None = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

def collects_on_one(method: Callable[..., Any]) -> CollectsOnOne: ...

class Copies(Protocol):
    """The type of `broadcast`."""

    @overload
    def __call__(
        self, array: _A, src: int = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> _A: ...
    @overload
    def __call__(
        self, array: _A, src: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[_A]: ...
    @overload
    def __call__(self, array: Array, src: int = ..., *, timeout: float | None = ..., async_op: bool) -> Any: ...

def copies(method: Callable[..., Any]) -> Copies: ...

class Scatters(Protocol):
    """The type of `scatter`: ranks other than `src` have no array and need `out`."""

    @overload
    def __call__(
        self,
        array: npt.NDArray[_D],
        src: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[_D]: ...
    @overload
    def __call__(
        self,
        array: npt.NDArray[_D],
        src: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[npt.NDArray[_D]]: ...
    @overload
    def __call__(
        self,
        array: Bits,
        src: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Bits: ...
    @overload
    def __call__(
        self, array: Bits, src: int = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[Bits]: ...
    @overload
    def __call__(
        self,
        array: Array,
        src: int = ...,
        out: None = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> npt.NDArray[Any]: ...
    @overload
    def __call__(
        self, array: Array, src: int = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[npt.NDArray[Any]]: ...
    @overload
    def __call__(
        self,
        array: Array | None = ...,
        src: int = ...,
        out: _O = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> _O: ...
    @overload
    def __call__(
        self,
        array: Array | None = ...,
        src: int = ...,
        out: _O = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Handle[_O]: ...
    @overload
    def __call__(
        self,
        array: Array | None = ...,
        src: int = ...,
        out: Array | None = ...,
        *,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Any: ...

def scatters(method: Callable[..., Any]) -> Scatters: ...

class Sends(Protocol):
    """The type of `send`."""

    @overload
    def __call__(
        self, array: Array, dst: int, tag: int = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def __call__(
        self, array: Array, dst: int, tag: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[None]: ...
    @overload
    def __call__(
        self, array: Array, dst: int, tag: int = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

def sends(method: Callable[..., Any]) -> Sends: ...

class Receives(Protocol):
    """The type of `recv`."""

    @overload
    def __call__(
        self, array: _A, src: int, tag: int = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> _A: ...
    @overload
    def __call__(
        self, array: _A, src: int, tag: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Handle[_A]: ...
    @overload
    def __call__(
        self, array: Array, src: int, tag: int = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

def receives(method: Callable[..., Any]) -> Receives: ...
