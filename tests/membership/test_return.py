"""Members that speak the upstream protocol only: they register once, and afterwards come back by heartbeats."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastrt.membership import Phase, Role, wire
from fastrt.membership import events as ev
from fastrt.membership.framing import Kind
from fastrt.membership.wire import Command


class Upstream:
    """A worker by hand, with the upstream messages alone. It registers once in its life."""

    def __init__(self, stack: contextlib.ExitStack, raw: Any, listener: Any, address: str, member_id: str) -> None:
        self.member_id = member_id
        self._stack, self._raw, self._own = stack, raw, listener()
        self._number = 0
        self.connect(address)
        registration = wire.RegisterMessage(
            ip="127.0.0.1", port=self._own.port, node_id=member_id, role=int(Role.WORKER)
        )
        self.ask(Command.REGISTER, registration.SerializeToString())

    def connect(self, address: str) -> None:
        """Open a new connection to the scheduler, and expect a new one from it."""
        self.connection, self._back = self._raw(address), None

    def cut(self) -> None:
        self.connection.socket.close()

    def ask(self, command: int, data: bytes, kind: int = Kind.PROTOBUF) -> bytes:
        """The scheduler's response; the connection is still there."""
        self._number += 1
        self.connection.request(command, data, self._number, kind=kind)
        came = self.connection.read()
        assert came is not None, "the scheduler has closed the connection"
        assert (came[0].cmd, came[0].request_id) == (command, self._number)
        return bytes(came[1].data)

    def beat(self) -> Any:
        beat = wire.HeartbeatMessage(node_id=self.member_id).SerializeToString()
        return wire.HeartbeatResp.FromString(self.ask(Command.HEARTBEAT, beat))

    def take(self, command: int) -> bytes:
        """The data of the next request of the scheduler, which is this command; acknowledged."""
        if self._back is None:
            self._back = self._own.accept()
        meta, frame = self._own.acknowledge(self._back)
        assert meta.cmd == command
        return bytes(frame.data)


@pytest.fixture
def upstream(stack: contextlib.ExitStack, raw: Any, listener: Any) -> Callable[[str, str], Upstream]:
    return lambda address, member_id: Upstream(stack, raw, listener, address, member_id)


def finish_message(member_id: str) -> bytes:
    return bytes(wire.FinishMessage(node_id=member_id).SerializeToString())


def ready_pair(service: Any, upstream: Any) -> list[Upstream]:
    members = [upstream(service.address, f"w{i}") for i in range(2)]
    for member in members:
        member.take(Command.SEND_METADATA)
    return members


@pytest.mark.parametrize("restarted", [False, True], ids=["broken connection", "restarted scheduler"])
def test_member_that_comes_back_by_heartbeat_alone_takes_part_until_the_end(
    serve: Any, upstream: Any, tmp_path: Path, wait_until: Callable[..., None], restarted: bool
) -> None:
    service = serve(2, 0, state_dir=tmp_path)
    stayer, returner = members = ready_pair(service, upstream)
    if restarted:
        service.stop()
        service = serve(2, 0, state_dir=tmp_path, address=service.address)
    else:
        returner.cut()
        wait_until(lambda: service.overview().phase is Phase.NODE_TIMEOUT, "the loss")
    for member in members if restarted else [returner]:
        member.connect(service.address)
        assert len(member.beat().servers_meta) == 2
        told = wire.SendMetadata.FromString(member.take(Command.SEND_METADATA))
        assert told.rank_id == members.index(member)
    if not restarted:
        stayer.take(Command.SEND_METADATA)
    assert all(view.is_alive for view in stayer.beat().servers_meta)
    assert service.overview().phase is Phase.READY
    event = wire.EventMessage(event=7, node_id=stayer.member_id).SerializeToString()
    stayer.ask(Command.SEND_EVENT, event)
    for member in members:
        assert wire.EventResp.FromString(member.take(Command.SEND_EVENT)).event == 7
        member.beat()
        member.ask(Command.FINISH, member.member_id.encode(), Kind.RAW)
    for member in members:
        member.take(Command.FINISH)


def test_finish_is_taken_as_a_message_and_as_a_bare_id(serve: Any, upstream: Any) -> None:
    service = serve(2, 0)
    message, bare = members = ready_pair(service, upstream)
    data = finish_message(message.member_id)
    assert message.ask(Command.FINISH, data) == data
    assert bare.ask(Command.FINISH, b"w1", Kind.RAW) == b"w1"
    for member in members:
        member.take(Command.FINISH)


def test_finish_of_a_member_that_has_left_over_a_new_connection_is_acknowledged_at_its_port(
    serve: Any, upstream: Any, wait_until: Callable[..., None]
) -> None:
    service = serve(2, 0)
    stayer, leaver = ready_pair(service, upstream)
    service.ask(lambda call: ev.ScaleIn(call, ["w1"]))
    stayer.take(Command.SCALE_IN)
    leaver.take(Command.SCALE_IN)
    registration = wire.RegisterMessage(ip="127.0.0.1", port=stayer._own.port, node_id="w0", role=int(Role.WORKER))
    stayer.ask(Command.REGISTER, registration.SerializeToString())
    assert wire.SendMetadata.FromString(leaver.take(Command.SEND_METADATA)).rank_id == wire.NO_RANK
    leaver.cut()
    leaver.connect(service.address)
    leaver.ask(Command.FINISH, b"w1", Kind.RAW)
    leaver.take(Command.FINISH)
