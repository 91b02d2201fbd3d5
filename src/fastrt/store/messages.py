"""Messages between a node's daemon and the processes of its session: one record for each, and one bounded parser.

A message is one JSON object: `{"op": "find_actor", "name": "x"}` is `FindActor("x")`. The operation is the name of the
class. On the daemon's Unix socket a message is a line; on the zygote's SEQPACKET socket it is a packet. `read_message`
checks every field against its annotation, so that a handler gets values of these types only.

Messages are frozen records to type checkers and at run time. They are no dataclasses: to create 45 of those takes
30 ms, to create these 3 ms, and every process imports this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from fastrt.foreign_text import ForeignTextError, Text, read_object

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**about: bool) -> Callable[[type], type]:
        """Mark a class for type checkers; `typing` has this from Python 3.11 on."""
        return lambda kind: kind


BYTES_MAX = 1 << 20  # of one message that is sent; longer values are split or left out
OBJECTS_MAX = 5000  # rows about objects in one message
ANSWER_BYTES_MAX = 16 << 20  # of one that lists what a node has: 100,000 placement groups

U32 = Annotated[int, range(1 << 32)]
U64 = Annotated[int, range(1 << 64)]
I64 = Annotated[int, range(-(1 << 63), 1 << 63)]
Parts: TypeAlias = dict[str, I64]  # of resources, by name; free amounts may be below 0


class MessageError(EOFError):
    """A message is malformed, or its receiver does not accept it: the connection ends. The text says why."""


MESSAGES: dict[str, type[Message]] = {}  # by operation


@dataclass_transform(frozen_default=True)
class Message:
    """Base of all messages: a subclass lists its fields as annotations."""

    operation: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.operation = re.sub(r"(?<=.)([A-Z])", r"_\1", cls.__name__).lower()
        cls.fields = tuple(cls.__annotations__)
        type.__setattr__(cls, "__match_args__", cls.fields)  # type checkers derive it themselves
        MESSAGES[cls.operation] = cls

    if not TYPE_CHECKING:  # where the annotations make the signature

        def __init__(self, *values: Any) -> None:
            self.__dict__.update(zip(self.fields, values, strict=True))

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"message {self.operation!r} cannot be changed")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # its fields can be lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


# ---- any process and the daemon ----


class Join(Message):
    """Ask for a client slot of the session. Answered by `Joined`.

    Attributes:
        kind: "driver", "worker", "actor", "tool" or "child" (of a worker, forked by a task).
        name, logs: for listings; which output of workers to send, see `join.join`.
        versions: of the process, those that must agree; see `fastrt.versions`.
    """

    kind: str
    name: str
    logs: str
    versions: dict[str, str]


class JoinAgain(Message):
    """Ask for the client slot that this process had before it left. Answered by `Joined`."""

    kind: str
    name: str
    logs: str


class Joined(Message):
    """The name of the session's segment, and a client slot with its generation."""

    segment: str
    slot: U32
    gen: U64


class Reconnect(Message):
    """Connect a process that has a client slot to the daemon that replaced a dead one. Answered by `Reconnected`."""

    logs: str


class Reconnected(Message):
    """The daemon knows the process."""


class Leave(Message):
    """End this driver's tasks and keep its slot for values that it still reads. Answered by `Left`."""


class Left(Message):
    """The tasks of the driver have ended."""


class Refused(Message):
    """The answer to any request that the daemon does not carry out."""

    error: str


class Bye(Message):
    """This driver ends."""


class End(Message):
    """End the session for all its drivers."""


class Spill(Message):
    """Free so many bytes by moving values to disk."""

    nbytes: U64


class Restore(Message):
    """Read a spilled value back, given the index of its entry and the number of its object."""

    entry: U32
    objref: U64


class Fetch(Message):
    """Fetch the bytes of a remote value; the fields are those of `Restore`. From the daemon to the uplink."""

    entry: U32
    objref: U64


class ActorsChanged(Message):
    """An actor or a bundle was created or ended: look at their records now."""


class Unread(Message):
    """An error that was freed before anything read it, for drivers to print; from and to the daemon.

    Attributes:
        objref: the number of its object.
        kind: how `data` is encoded: the object's kind.
        data: the error, in base64.
    """

    objref: U64
    kind: U32
    data: str


class NodeRow(NamedTuple):
    """One node: its id, its name for people, parts of its resources by name, and its labels."""

    node: str
    name: str
    total: Parts
    free: Parts
    labels: dict[str, str]


class ListNodes(Message):
    """Ask for the nodes of the cluster. Answered by `NodeList`."""


class NodeList(Message):
    """The daemon's node, the others, and the last ones that have left."""

    here: NodeRow
    others: list[NodeRow]
    lost: list[NodeRow]


class GroupStats(NamedTuple):
    """How a placement group was placed: the row of `groups.History`."""

    state: str
    attempts: int
    total_s: float
    placing_s: float
    retry_s: float


class GroupRow(NamedTuple):
    """One placement group; its bundles, and the nodes of those that have one, are by the bundle's index."""

    group: str
    strategy: str
    state: str
    bundles: dict[str, Parts]
    nodes: dict[str, str]
    stats: GroupStats


class DemandRow(NamedTuple):
    """Tasks or actors that wait for the same resources.

    Attributes:
        kind: "task" or "actor".
        amounts: parts of resources by name; selectors of labels are names, too.
        strategy, node, soft: as in `Demand`.
        waiting: how many wait.
        is_feasible: whether a node of the cluster could run one if it were idle.
    """

    kind: str
    amounts: Parts
    strategy: str
    node: str
    soft: bool
    waiting: U32
    is_feasible: bool


class ListDemand(Message):
    """Ask for the demand that waits on this node. Answered by `DemandList`."""


class DemandList(Message):
    """The demand that waits on this node.

    Attributes:
        rows: the demands of most tasks and actors.
        others: tasks and actors with further demands, beside those of `rows`.
        queued: tasks that wait for nothing but a worker.
        groups: placement groups that are not fully reserved.
        requested: the bundles of the last `RequestResources`.
    """

    rows: list[DemandRow]
    others: U64
    queued: U64
    groups: list[GroupRow]
    requested: list[Parts]


class RequestResources(Message):
    """Set the resources that the cluster should have in all. Answered by `ResourcesRequested`."""

    bundles: list[Parts]


class ResourcesRequested(Message):
    """The session has the request, until it ends or gets another."""


class FindActor(Message):
    """Ask for an actor on other nodes; with an empty name, for all their names. Answered by `ActorFound`."""

    name: str


class ActorFound(Message):
    """The names that other nodes know, and the object that represents the actor here.

    Attributes:
        names: of actors.
        objref: the object's number; 0: no node has the actor.
        entry: the index of its entry.
    """

    names: list[str]
    objref: U64
    entry: U32


class ListGroups(Message):
    """Ask for the placement groups that were made on this node. Answered by `GroupList`."""


class GroupList(Message):
    """The placement groups that were made on this node."""

    groups: list[GroupRow]


class RemoveGroup(Message):
    """Give back the resources of a placement group. Answered by `GroupRemoved`."""

    group: str


class GroupRemoved(Message):
    """The bundles of the group are about to end."""


class Log(Message):
    """Output of workers, for a driver to print.

    Attributes:
        text: whole lines.
        is_error: whether it goes to stderr.
        is_update: whether it is the state of a progress bar, which the next line may overwrite.
    """

    text: str
    is_error: bool
    is_update: bool


# ---- workers and the daemon ----


class Blocked(Message):
    """This worker sleeps inside a task: another one may start."""


class Unblocked(Message):
    """This worker runs its task again."""


class MayWait(Message):
    """Ask whether the daemon can start another worker while this one sleeps. Answered by `WaitAnswer`."""


class WaitAnswer(Message):
    """Whether a worker may sleep inside its task; if not, it runs other tasks meanwhile."""

    may_wait: bool


class Stop(Message):
    """End when you are idle."""


class CollectGarbage(Message):
    """Collect your garbage when you have nothing to do, because the store is full; see `store.garbage`."""


# ---- any process and the uplink ----


class AskNode(Message):
    """Ask another node for a page of its rows. Answered by `NodePage`.

    The other fields are those of `Question` in node.proto.

    Attributes:
        node: its NodeID.
    """

    node: str
    kind: str
    filters: str
    after: str
    limit: U32
    timeout_ms: U32


class StopsChanged(Message):
    """A task begins or ends to wait in a debugger: the uplink reads the folder of debuggers again."""


class NodePage(Message):
    """A page of another node's rows; the fields are those of `Page` in node.proto."""

    rows: str
    after: str
    is_end: bool
    total: I64
    error: str


# ---- the uplink and the daemon ----


class ClusterNodes(Message):
    """The nodes of the cluster; with `is_change` those that have changed, and those that have left.

    `name`: this node's, which it has before it has joined. `is_new_daemon`: it must report its resources again.
    """

    name: str
    nodes: list[NodeRow]
    left: list[str]
    is_change: bool
    is_new_daemon: bool


class HeldObject(NamedTuple):
    """A large object that another node holds a copy of; with 0 bytes: no longer."""

    objref: U64
    nbytes: U64


class Holds(Message):
    """Objects of this node that another node has copies of."""

    node: str
    objects: list[HeldObject]


class KeptObject(NamedTuple):
    """An object that another node holds: its number, and the index of its entry."""

    objref: U64
    entry: U32


class KeepObjects(Message):
    """Hold objects because another node holds them; from the uplink."""

    node: str
    objects: list[KeptObject]


class ReleaseObjects(Message):
    """Another node does not hold objects, given by their numbers, any more; from the uplink."""

    node: str
    objects: list[U64]


class KeptObjects(Message):
    """Objects that another node holds, for an uplink that has taken the place of another one."""

    node: str
    objects: list[KeptObject]


class StandbyHead(NamedTuple):
    """A node with a standby head, and the head's address."""

    node: str
    address: str


class KnownHeads(Message):
    """The heads that an uplink knows, for the next one. `is_lost`: the node does not wait for the first head."""

    first: str
    standbys: list[StandbyHead]
    is_lost: bool


class SearchActor(Message):
    """Search all nodes for the actor of a name. Answered by `SearchEnded` with the same ticket."""

    ticket: U32
    name: str


class SearchEnded(Message):
    """The result of a search; its fields are those of `ActorFound`."""

    ticket: U32
    names: list[str]
    objref: U64
    entry: U32


class ActorEnded(Message):
    """An actor or a bundle of this node has ended; its process may run on another node."""


class ReturnTask(Message):
    """A task of another node cannot run here any more: return it. The index of its record, and its id."""

    record: U32
    id: U64


class ForwardedRecord(NamedTuple):
    """The index of a task's or actor's record, the task's id or actor's generation, and the node that gets it."""

    record: U32
    id: U64
    node: str


class Forward(Message):
    """Forward these tasks and actors to other nodes."""

    tasks: list[ForwardedRecord]
    actors: list[ForwardedRecord]


class TaskRecord(NamedTuple):
    """The index of a task's record, and the task's id."""

    record: U32
    id: U64


class Resources(Message):
    """This node's resources, their free parts except for tasks without demands, and how many tasks are admitted.

    `is_looking`: tasks, actors or bundles wait here for resources, which other nodes may have. `ahead`: the next tasks
    that wait for resources and can run on no other node: their arguments are fetched meanwhile.
    """

    total: Parts
    free: Parts
    admitted: U32
    is_looking: bool
    ahead: list[TaskRecord]


class ReadsOutput(Message):
    """Whether a driver of this node prints the output of other nodes."""

    on: bool


class TaskOutput(Message):
    """Output of a task that another node may have submitted; `source` names the task and its process, `job` its job."""

    source: str
    job: U64
    lines: list[str]
    is_error: bool
    is_update: bool


class RemoteOutput(Message):
    """Output that tasks of other nodes have printed, for the driver of a job (0: all); else as `Log`."""

    job: U64
    text: str
    is_error: bool
    is_update: bool


# ---- the zygote and the daemon ----


class Configure(Message):
    """The session that the zygote's workers join, and their settings; `Config` describes those.

    Attributes:
        devices: (resource, variable, name) of each, see `fastrt.devices`.
    """

    sys_path: list[str]
    preload: list[str]
    socket: str
    spin_s: float
    advice: bool
    patience_s: float
    call_sites: bool
    library_threads: U32
    cleanup_timeout_s: float
    logging: str
    post_mortem: bool
    debugger: str
    devices: list[list[str]]


class Fork(Message):
    """Fork a worker, or the process of an actor. Sent with the ends of its output. Answered by `Forked`."""

    actor: U32 | None


class ListProcesses(Message):
    """Ask for the processes that the zygote has forked: a `Process` for each, and `ProcessesListed`."""


class Ready(Message):
    """The zygote can fork; its pid."""

    pid: U32


class Forked(Message):
    """The process has started."""

    pid: U32
    actor: U32 | None


class ForkFailed(Message):
    """The process could not be forked, with the kernel's reason."""

    error: str
    actor: U32 | None


class Process(Message):
    """A process that an earlier daemon has ordered. Sent with the read ends of its output."""

    pid: U32
    actor: U32 | None


class ProcessesListed(Message):
    """All processes have been named; the zygote's pid."""

    pid: U32


class ProcessEnded(Message):
    """A process of the zygote has ended, with its wait status."""

    pid: U32
    status: U32


M = TypeVar("M", bound=Message)


def write_message(message: Message) -> bytes:
    """Encode a message, without the end of the line."""
    return json.dumps({"op": message.operation, **vars(message)}).encode()


def read_message(data: Text) -> Message:
    """Decode and check a message.

    Args:
        data: one JSON object, without the end of the line.
    Raises:
        MessageError: it is too long, no JSON object or no known message, or a field is unknown, missing, of another
            type or out of range; the text names the message and the field.
    """
    try:
        found = read_object(data, "a message", {"op": str}, bytes_max=ANSWER_BYTES_MAX, own=True)
    except ForeignTextError as error:
        raise MessageError(str(error)) from None
    name = found.pop("op")
    kind: Any = MESSAGES.get(name)
    if kind is None:
        raise MessageError(f"there is no message {name[:40]!r}")
    fields = _fields(kind)
    if found.keys() != fields.keys():
        unknown, missing = sorted(found.keys() - fields.keys()), sorted(fields.keys() - found.keys())
        what = f"has an unknown field {unknown[0][:40]!r}" if unknown else f"has no field {missing[0]!r}"
        raise MessageError(f"message {name!r} {what}; another version of fastrt has other fields")
    values = []
    for field, read in fields.items():
        try:
            values.append(read(found[field]))
        except _MismatchError as error:
            raise MessageError(f"message {name!r}: field {field!r} must be {error}") from None
    message: Message = kind(*values)
    return message


def expect(message: Message | None, kind: type[M]) -> M:
    """Return a message as the kind that its receiver expects.

    Raises:
        MessageError: it is of another kind, or there is none.
    """
    if type(message) is kind:
        return message
    found = "nothing" if message is None else f"message {message.operation!r}"
    raise MessageError(f"{found} came instead of message {kind.operation!r}")


# ---- reading fields ----

_Read: TypeAlias = Callable[[Any], Any]


class _MismatchError(Exception):
    """A value is not of the annotated type; the text names the allowed values and the received one."""

    def __init__(self, wanted: str, value: object) -> None:
        shown = str(value)[:40] if isinstance(value, int) else "null" if value is None else f"a {type(value).__name__}"
        super().__init__(f"{wanted}, and is {shown}")


@cache
def _fields(kind: Any) -> Mapping[str, _Read]:
    """Functions that check and convert the fields of a record, by name, in order; created at its first use."""
    hints = get_type_hints(kind, include_extras=True)
    names = kind._fields if issubclass(kind, tuple) else kind.fields
    return {name: _reader(hints[name]) for name in names}


def _reader(hint: Any) -> _Read:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _whole(hint.__metadata__[0])
    if origin is list:
        return _list(_reader(inner[0]))
    if origin is dict:
        return _dict(_reader(inner[1]))
    if origin in (Union, UnionType):
        return _optional(_reader(inner[0]))
    if hasattr(hint, "_fields"):
        return _row(hint, list(_fields(hint).values()))
    return _plain((float, int) if hint is float else (hint,))


def _plain(kinds: tuple[type, ...]) -> _Read:
    def read(value: Any) -> Any:
        if type(value) not in kinds:  # a bool is no int here
            raise _MismatchError(kinds[0].__name__, value)
        return value

    return read


def _whole(allowed: range) -> _Read:
    def read(value: Any) -> int:
        if type(value) is not int:
            raise _MismatchError("a whole number", value)
        if value not in allowed:
            raise _MismatchError(f"a whole number from {allowed.start} to {allowed.stop - 1}", value)
        return value

    return read


def _list(read_one: _Read) -> _Read:
    def read(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _MismatchError("a list", value)
        return [read_one(one) for one in value]

    return read


def _dict(read_one: _Read) -> _Read:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _MismatchError("an object", value)
        return {key: read_one(one) for key, one in value.items()}

    return read


def _row(kind: Callable[..., Any], readers: list[_Read]) -> _Read:
    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _MismatchError(f"a list of {len(readers)} values", value)
        return kind(*[read_one(one) for read_one, one in zip(readers, value, strict=True)])

    return read


def _optional(read_one: _Read) -> _Read:
    return lambda value: None if value is None else read_one(value)
