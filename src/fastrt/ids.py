"""Names of tasks, actors, nodes and other things, with the methods that Ray's ids have.

An id is a text of hex digits. So it compares with the texts of listings, and goes through pickle and JSON as text.
Each kind has the length that it has in Ray. fastrt's own ids are shorter: `widened` fills them up with zeros, so an id
begins with the digits that `fastrt list`, `runtime_context()` and messages show.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, ClassVar

from fastrt.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

_PARTS = ("job_id", "actor_id")  # ids that ids of Ray contain
OWN_DIGITS, OWN_NODE_DIGITS = 16, 32  # of fastrt's own ids of tasks and actors, and of nodes
_NODE_DIGITS_OF_GROUPS = 16
_BEFORE_FIRST_JOB = 0x10001  # of a session: the daemon's; a driver's has the generation and the number of its slot

_NODE_ID = re.compile(r"[0-9a-f]{32}(?:[0-9a-f]{24})?")


def is_node_id(text: str) -> bool:
    """Whether a text can be the id of a node, in fastrt's length or in Ray's."""
    return _NODE_ID.fullmatch(text) is not None


class AbsentPartError(UnsupportedError, AttributeError):
    """An id of Ray contains another one, and that of fastrt does not."""


class BaseID(str):
    """An id: hex digits. Made by `from_hex`, `from_binary`, `from_random` and `nil`, or of its bytes or digits.

    Args:
        id: bytes or hex digits.
    Raises:
        TypeError: it is neither.
        ValueError: the number of bytes is not that of this kind of id.
    """

    __slots__ = ()
    _BYTES: ClassVar[int] = 28

    def __new__(cls, id: Any) -> Self:
        if not isinstance(id, (bytes, str)):
            raise TypeError(f"{cls.__name__} is made of bytes or hex digits, not of {type(id).__name__}")
        digits = id.hex() if isinstance(id, bytes) else bytes.fromhex(id).hex()
        if len(digits) != 2 * cls._BYTES:
            raise ValueError(f"{cls.__name__} has {cls._BYTES} bytes; {len(digits) // 2} are given")
        return str.__new__(cls, digits)

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:
            raise AbsentPartError(
                f"fastrt has no {name}() of a {type(self).__name__}: its ids do not contain each other. "
                f"ray.get_runtime_context() and the rows of ray.util.state have a {name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
    def widened(cls, own_id: str) -> Self:
        """Return the id that begins with the digits of fastrt's own id, which is as long or shorter."""
        return cls(own_id.ljust(2 * cls._BYTES, "0"))

    @classmethod
    def from_random(cls) -> Self:
        """Return an id of random bytes."""
        return cls(os.urandom(cls._BYTES))

    @classmethod
    def nil(cls) -> Self:
        """Return the id that names nothing."""
        return cls(b"\xff" * cls._BYTES)

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

    _BYTES = 4

    @classmethod
    def from_int(cls, value: int) -> JobID:
        """Return the id with this number; of one of more than 32 bits, the lower 32 count."""
        return cls((value & 0xFFFFFFFF).to_bytes(cls._BYTES, "little"))

    @classmethod
    def of_job(cls, job: int) -> JobID:
        """Return the id of fastrt's job with this number; that of the first driver of a session is 1, as on Ray."""
        return cls.from_int(job - _BEFORE_FIRST_JOB)

    def int(self) -> Any:
        """Return the id as a number."""
        return int.from_bytes(self.binary(), "little")


class TaskID(BaseID):
    """The id of a task or a call: that of its first result."""

    __slots__ = ()
    _BYTES = 24


class ActorID(BaseID):
    """The id of an actor."""

    __slots__ = ()
    _BYTES = 16


class PlacementGroupID(BaseID):
    """The id of a placement group; it begins with digits of the node where the group was made."""

    __slots__ = ()
    _BYTES = 18

    @classmethod
    def made_on(cls, node: str) -> Self:
        """Return a new id, of a group that is made on a node; see `is_made_on`."""
        return cls(node[:_NODE_DIGITS_OF_GROUPS] + cls.from_random()[_NODE_DIGITS_OF_GROUPS:])


def is_made_on(group: str, node: str) -> bool:
    """Whether a placement group was made on a node, by their ids."""
    return group[:_NODE_DIGITS_OF_GROUPS] == node[:_NODE_DIGITS_OF_GROUPS]
