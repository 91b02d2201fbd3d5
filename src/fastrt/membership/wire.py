"""Converts the wire's messages to the state machine's events, and its answers and orders to messages.

Lists of all members, sent to each member, are most of the traffic. So the part of a member is serialised once for as
long as it does not change, and a list is these parts joined. Metadata for different receivers differs in its last field
only, which is appended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from fastrt.membership import events as ev
from fastrt.membership.events import MemberView, Overview, Phase, Role
from fastrt.membership.framing import Frame, FramingError, Kind
from fastrt.membership.mailbox import Tag
from fastrt.net.grpc.descriptors import message_set

EXCHANGE = "/fastrt.ps.Cluster/Exchange"
SERVICE = "fastrt.ps.Cluster"
NO_RANK = (1 << 32) - 1
_PACKAGE = "mindspore.ps.core."
# Tags of the repeated field servers_meta, by the message that contains it.
_IN_METADATA, _IN_HEARTBEAT = b"\x0a", b"\x12"
_RANK_TAG = b"\x28"


def message(name: str) -> Any:
    """The class of one of the cluster's protobuf messages."""
    return message_set("cluster").message(_PACKAGE + name)


Meta = message("MessageMeta")
Comm = message("CommMessage")
RegisterMessage = message("RegisterMessage")
RegisterResp = message("RegisterRespMessage")
HeartbeatMessage = message("HeartbeatMessage")
HeartbeatResp = message("HeartbeatRespMessage")
SendMetadata = message("SendMetadataMessage")
FetchResp = message("FetchServersRespMessage")
FetchServers = message("FetchServersMessage")
EventMessage = message("EventMessage")
EventResp = message("EventRespMessage")
FinishMessage = message("FinishMessage")
ScaleOutMessage = message("ScaleOutMessage")
ScaleInMessage = message("ScaleInMessage")
ScaleOutDone = message("ScaleOutDoneMessage")
ScaleInDone = message("ScaleInDoneMessage")
ServersMeta = message("ServersMeta")


class Command:
    """The numbers of NodeCommand."""

    TERMINATE = 0
    REGISTER = 1
    HEARTBEAT = 2
    SEND_DATA = 3
    FETCH_METADATA = 4
    FINISH = 5
    COLLECTIVE_SEND_DATA = 6
    SEND_METADATA = 7
    SCALE_OUT = 8
    SCALE_IN = 9
    SCALE_OUT_DONE = 10
    SCALE_IN_DONE = 11
    SEND_EVENT = 12

    @staticmethod
    def name(number: int) -> str:
        """The command's name, or the number of an unknown command."""
        return next((name for name, value in vars(Command).items() if value == number), str(number))


def parse(kind: Any, data: bytes) -> Any:
    """Parse a message.

    Raises:
        FramingError: the bytes are no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise FramingError(f"{len(data)} bytes came that are no valid {kind.DESCRIPTOR.name}: {error}.") from None


def finisher_of(data: bytes) -> str:
    """Read the node id in the data of FINISH: a `FinishMessage`, or the bare id that upstream's releases send.

    Raises:
        FramingError: it is not text.
    """
    with contextlib.suppress(DecodeError):
        asked = FinishMessage.FromString(data)
        if asked.node_id and asked.SerializeToString() == data:
            return str(asked.node_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FramingError("a node id came that is not UTF-8.") from None


def views(listed: Any) -> tuple[MemberView, ...]:
    """Members from a list of ServersMeta, without those that are neither server nor worker."""
    return tuple(
        MemberView(one.node_id, Role(one.role), one.rank_id, one.ip, one.port, one.is_alive, False)
        for one in listed
        if one.role in (0, 1)
    )


def tag_of(meta: Any) -> Tag | None:
    """The tag of a member's message; None if its meta has none, as that of other implementations."""
    if not meta.HasField("tag"):
        return None
    return Tag(meta.tag.group, meta.tag.operation, meta.tag.step, meta.tag.what)


class Request(NamedTuple):
    """A member's request: the event, and whether the member asks to be notified of changes (REGISTER only)."""

    event: Any
    wants_changes: bool = False


def parse_request(meta: Any, data: bytes, call: int, link: int) -> Request:
    """Convert a member's message to an event for the state machine.

    Raises:
        FramingError: a scheduler does not accept this command, or the data does not fit it.
    """
    command = meta.cmd
    if command == Command.REGISTER:
        asked = parse(RegisterMessage, data)
        role = Role(asked.role) if asked.role in (0, 1, 2) else None
        if role is None:
            raise FramingError(f"{asked.role} is not a role.")
        event = ev.Register(call, link, asked.node_id, role, asked.ip, asked.port)
        return Request(event, asked.told_changes)
    if command == Command.HEARTBEAT:
        return Request(ev.Heartbeat(call, link, parse(HeartbeatMessage, data).node_id))
    if command == Command.FETCH_METADATA:
        return Request(ev.Fetch(call, parse(FetchServers, data).node_id))
    if command == Command.FINISH:
        return Request(ev.Finish(call, link, finisher_of(data)))
    if command == Command.SCALE_OUT_DONE:
        return Request(ev.ScaleDone(call, link, parse(ScaleOutDone, data).node_id, Phase.SCALE_OUT))
    if command == Command.SCALE_IN_DONE:
        return Request(ev.ScaleDone(call, link, parse(ScaleInDone, data).node_id, Phase.SCALE_IN))
    if command == Command.SEND_EVENT:
        asked = parse(EventMessage, data)
        return Request(ev.Publish(call, link, asked.node_id, asked.event))
    raise FramingError(f"a scheduler does not accept the command {Command.name(command)}.")


class Encoder:
    """Serialises the scheduler's messages. Keeps each member's part; not thread-safe."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[MemberView, bytes]] = {}
        self._lists: dict[bytes, tuple[Overview, bytes]] = {}

    def registered(self, member_id: str) -> bytes:
        """The response to a registration that was accepted."""
        return bytes(RegisterResp(node_id=member_id).SerializeToString())

    def refused(self, member_id: str, reason: str) -> bytes:
        """The response to a registration that was refused."""
        return bytes(RegisterResp(node_id=member_id, rank_id=NO_RANK, reason=reason).SerializeToString())

    def heartbeat(self, overview: Overview) -> bytes:
        """The response to a heartbeat."""
        head = HeartbeatResp(cluster_state=int(overview.phase)).SerializeToString()
        tail = HeartbeatResp(is_worker_or_server0=overview.is_impaired).SerializeToString()
        return bytes(head + self._list(_IN_HEARTBEAT, overview) + tail)

    def changed(self, overview: Overview) -> bytes:
        """A notification of changes: a heartbeat's response that lists only lost members."""
        lost = tuple(view for view in overview.members if not view.alive and not view.finished)
        return self.heartbeat(overview._replace(members=lost))

    def fetched(self, overview: Overview) -> bytes:
        """The response to a request for all members."""
        return self._list(_IN_METADATA, overview)

    def order(self, order: ev.Order) -> tuple[int, Callable[[int], bytes]]:
        """An order's command, and a function that makes its data for the receiver at an index."""
        match order:
            case ev.Metadata(overview, ranks):
                common = self._metadata(overview)
                return Command.SEND_METADATA, lambda i: common + _rank_field(ranks[i])
            case ev.PrepareScale():
                return _prepare(order)
            case ev.ScaleEnded(phase):
                done = Command.SCALE_OUT_DONE if phase is Phase.SCALE_OUT else Command.SCALE_IN_DONE
                return done, lambda i: b""
            case ev.Published(number):
                body = bytes(EventResp(event=number).SerializeToString())
                return Command.SEND_EVENT, lambda i: body
            case ev.Ended():
                return Command.FINISH, lambda i: b""

    def _metadata(self, overview: Overview) -> bytes:
        rest = SendMetadata(
            worker_num=overview.workers, server_num=overview.servers, cluster_state=int(overview.phase)
        ).SerializeToString()
        return bytes(self._list(_IN_METADATA, overview) + rest)

    def _list(self, tag: bytes, overview: Overview) -> bytes:
        """The list of all members, as the field with this tag."""
        kept = self._lists.get(tag)
        if kept is not None and kept[0].members is overview.members:
            return kept[1]
        pieces = []
        for view in overview.members:
            part = self._parts.get(view.member_id)
            if part is None or part[0] is not view:
                part = self._parts[view.member_id] = (view, _part(view))
            pieces.append(part[1])
        made = tag + tag.join(pieces) if pieces else b""
        if len(self._parts) > 2 * len(overview.members) + 100:
            self._parts.clear()  # drops the parts of members that are gone
        self._lists[tag] = (overview, made)
        return made


def _prepare(order: ev.PrepareScale) -> tuple[int, Callable[[int], bytes]]:
    if order.phase is Phase.SCALE_OUT:
        out = ScaleOutMessage(worker_num=order.workers, server_num=order.servers)
        return Command.SCALE_OUT, lambda i: bytes(out.SerializeToString())
    into = ScaleInMessage(worker_num=order.workers, server_num=order.servers, is_node_scale_in=order.leaving)
    return Command.SCALE_IN, lambda i: bytes(into.SerializeToString())


def _part(view: MemberView) -> bytes:
    """A member's ServersMeta, preceded by its length."""
    body = ServersMeta(
        rank_id=view.rank,
        ip=view.host,
        port=view.port,
        is_alive=view.alive,
        role=int(view.role),
        node_id=view.member_id,
    ).SerializeToString()
    return _varint(len(body)) + bytes(body)


def _rank_field(rank: int | None) -> bytes:
    if rank == 0:
        return b""
    return _RANK_TAG + _varint(NO_RANK if rank is None else rank)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


def request_frame(
    command: int,
    request_id: int,
    data: bytes,
    role: Role,
    rank: int | None = 0,
    kind: int = Kind.PROTOBUF,
    user: int = 0,
    tag: Tag | None = None,
) -> Frame:
    """Make a request's frame; `rank` None: the requester has no rank."""
    meta = Meta(
        cmd=command, request_id=request_id, role=int(role), rank_id=NO_RANK if rank is None else rank, user_cmd=user
    )
    if tag is not None:
        meta.tag.SetInParent()
        meta.tag.group, meta.tag.operation, meta.tag.step, meta.tag.what = tag
    return Frame(kind, meta.SerializeToString(), data)
