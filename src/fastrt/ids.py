"""Names of tasks, actors, nodes and other things, with the methods that Ray's ids have.

An id is a text of hex digits. So it compares with the texts that listings and `runtime_context()` give, and goes
through pickle and JSON as text.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

_NIL_BYTES = 8


class BaseID(str):
    """An id: hex digits. Made by `from_hex`, `from_binary`, `from_random` and `nil`, or of its bytes or digits.

    Args:
        id: bytes, or an even number of hex digits.
    Raises:
        TypeError, ValueError: it is neither.
    """

    __slots__ = ()

    def __new__(cls, id: Any) -> Self:
        if not isinstance(id, (bytes, str)):
            raise TypeError(f"{cls.__name__} is made of bytes or hex digits, not of {type(id).__name__}")
        digits = id.hex() if isinstance(id, bytes) else bytes.fromhex(id).hex()
        if not digits:
            raise ValueError(f"{cls.__name__} is made of at least one byte")
        return str.__new__(cls, digits)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self!s})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)

    @classmethod
    def from_hex(cls, hex_id: str | bytes) -> Self:
        """Return the id with these hex digits."""
        return cls(hex_id.decode() if isinstance(hex_id, bytes) else hex_id)

    @classmethod
    def from_binary(cls, id_bytes: bytes) -> Self:
        """Return the id with these bytes."""
        return cls(bytes(id_bytes))

    @classmethod
    def from_random(cls) -> Self:
        """Return an id of random bytes."""
        return cls(os.urandom(_NIL_BYTES))

    @classmethod
    def nil(cls) -> Self:
        """Return the id that names nothing."""
        return cls(b"\xff" * _NIL_BYTES)

    def is_nil(self) -> bool:
        """Whether the id names nothing."""
        return not self.strip("f")

    def hex(self) -> str:
        """Return the id's hex digits."""
        return str(self)

    def binary(self) -> bytes:
        """Return the id's bytes."""
        return bytes.fromhex(self)

    def size(self) -> int:
        """Return the number of the id's bytes."""
        return len(self) // 2


class UniqueID(BaseID):
    """The base of ids of processes, nodes, functions and classes."""

    __slots__ = ()


class NodeID(UniqueID):
    """The id of a node, as `nodes()` has it."""

    __slots__ = ()


class WorkerID(UniqueID):
    """The id of a process of a session."""

    __slots__ = ()


class FunctionID(UniqueID):
    """The id of a function."""

    __slots__ = ()


class ActorClassID(UniqueID):
    """The id of a class of actors."""

    __slots__ = ()


class JobID(BaseID):
    """The id of a driver's job."""

    __slots__ = ()

    @classmethod
    def from_int(cls, value: int) -> JobID:
        """Return the id with this number."""
        return cls(value.to_bytes(_NIL_BYTES, "big"))

    def int(self) -> Any:
        """Return the id as a number."""
        return int.from_bytes(self.binary(), "big")


class TaskID(BaseID):
    """The id of a task or a call: that of its first result."""

    __slots__ = ()


class ActorID(BaseID):
    """The id of an actor."""

    __slots__ = ()


class PlacementGroupID(BaseID):
    """The id of a placement group."""

    __slots__ = ()
