"""The scheduler over real sockets: by hand, by its own members, over gRPC."""

import json
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt.errors import ConfigError
from fastrt.membership import (
    ClusterOptions,
    ClusterScheduler,
    ClusterTimeoutError,
    MemberEvent,
    MemberUnreachableError,
    Phase,
    RegistrationRefusedError,
    Role,
    Settings,
    wire,
)
from fastrt.membership import events as ev
from fastrt.membership.framing import HEADER, Frame, Kind
from fastrt.membership.wire import EXCHANGE, NO_RANK, Command
from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of

SERVER, WORKER = Role.SERVER, Role.WORKER
TOKEN = new_token()


def register(raw: Any, member_id: str, port: int, role: Role = WORKER, number: int = 1) -> None:
    message = wire.RegisterMessage(ip="127.0.0.1", port=port, node_id=member_id, role=int(role))
    raw.request(Command.REGISTER, message.SerializeToString(), number, role=role, rank=None)


def ids(views: Any) -> list[tuple[Role, int, str, bool]]:
    return [(view.role, view.rank, view.member_id, view.alive) for view in views]


def cluster(serve: Any, join: Any, workers: int = 2, servers: int = 2, **options: Any) -> tuple[Any, list[Any]]:
    """A scheduler and its members, ready: workers w0.., then servers s0..."""
    service = serve(workers, servers, **options)
    names = [(WORKER, f"w{i}") for i in range(workers)] + [(SERVER, f"s{i}") for i in range(servers)]
    members = [join(service.address, role, member_id=name) for role, name in names]
    for member in members:
        member.wait_ready(60)
    return service, members


# Frames by hand


def test_captured_conversation_is_answered_byte_for_byte(serve: Any, raw: Any) -> None:
    """What release 2.7 was seen to answer to a worker that registers and beats, alone in a cluster of two."""
    captured = json.loads(Path(__file__).with_name("mindspore_frames.json").read_text())[:4]
    connection = raw(serve(1, 1).address)
    for frame in captured:
        wire_bytes = bytes.fromhex(frame["header"] + frame["meta"] + frame["data"])
        if frame["dir"] == "->sched":
            connection.socket.sendall(wire_bytes)
        else:
            came = connection.read()
            assert came is not None
            assert came[1].pack() == wire_bytes


def test_members_by_hand_get_metadata_events_and_the_end(serve: Any, raw: Any, listener: Any) -> None:
    address = serve(1, 1).address
    parts = []
    for role in (WORKER, SERVER):
        own, connection = listener(), raw(address)
        register(connection, role.name, own.port, role)
        parts.append((own, connection, role))
    inbound = []
    for own, connection, _ in parts:
        meta, frame = connection.read()
        assert (meta.cmd, meta.rank_id, frame.kind) == (Command.REGISTER, NO_RANK, Kind.PROTOBUF)
        inbound.append(own.accept())
        meta, frame = own.acknowledge(inbound[-1])
        told = wire.SendMetadata.FromString(frame.data)
        assert (meta.cmd, told.rank_id, told.worker_num, told.server_num) == (Command.SEND_METADATA, 0, 1, 1)
        assert [one.node_id for one in told.servers_meta] == ["SERVER", "WORKER"]
    event = wire.EventMessage(event=77, node_id="WORKER").SerializeToString()
    parts[0][1].request(Command.SEND_EVENT, event, 2)
    meta, frame = parts[0][1].read()
    assert (meta.cmd, meta.request_id, frame.data) == (Command.SEND_EVENT, 2, event)
    for (own, connection, role), back in zip(parts, inbound, strict=True):
        meta, frame = own.acknowledge(back)
        assert wire.EventResp.FromString(frame.data).event == 77
        connection.request(Command.FINISH, role.name.encode(), 3, kind=Kind.RAW)
        assert connection.read()[1].data == role.name.encode()
    for (own, _, _), back in zip(parts, inbound, strict=True):
        assert own.acknowledge(back)[0].cmd == Command.FINISH


def test_one_too_many_and_a_second_of_an_id_are_refused_in_words(serve: Any, raw: Any) -> None:
    address = serve(1, 1).address
    first = raw(address)
    register(first, "w0", 7000)
    first.read()
    for name, words in (("w1", "1 workers"), ("w0", "127.0.0.1:7000")):
        other = raw(address)
        register(other, name, 7001)
        answer = wire.RegisterResp.FromString(other.read()[1].data)
        assert answer.rank_id == NO_RANK
        assert words in answer.reason
        assert other.read() is None


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HEADER.pack(1, 0, 0),
        HEADER.pack(1, 4, (1 << 32) - 2),
        HEADER.pack(9, 4, 8) + bytes(8),
        Frame(1, b"\x08\x63\x10\x01", b"").pack(),  # an unknown command
        Frame(1, b"\x10\x01", b"").pack(),  # TERMINATE
        Frame(1, b"\x08\x03\x10\x01", b"data").pack(),  # a scheduler takes no data
        Frame(1, b"\x08\x01\x10\x01", b"\xff\xff\xff").pack(),  # no RegisterMessage
        Frame(1, b"\xff\xff", b"").pack(),  # no meta
        Frame(1, b"\x08\x02\x10\x01", b"\x0a\x03who").pack(),  # heartbeat of a stranger
        Frame(1, b"\x08\x05\x10\x01", b"\xff\xfe").pack(),  # an id that is no text
    ],
    ids=lambda junk: junk[:24].hex(),
)
def test_bad_input_closes_that_connection_alone(serve: Any, raw: Any, junk: bytes) -> None:
    service = serve(1, 1)
    good, bad = raw(service.address), raw(service.address)
    register(good, "w0", 7000)
    good.read()
    bad.socket.sendall(junk)
    assert bad.read() is None
    beat = wire.HeartbeatMessage(node_id="w0").SerializeToString()
    good.request(Command.HEARTBEAT, beat, 2)
    assert wire.HeartbeatResp.FromString(good.read()[1].data).servers_meta[0].is_alive


@pytest.mark.parametrize("seed", range(2))
def test_scheduler_lives_through_damaged_streams_fuzz(serve: Any, raw: Any, seed: int) -> None:
    dice = random.Random(seed)
    address = serve(1, 1).address
    captured = json.loads(Path(__file__).with_name("mindspore_frames.json").read_text())
    whole = b"".join(bytes.fromhex(f["header"] + f["meta"] + f["data"]) for f in captured if f["dir"] == "->sched")
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 6)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        connection = raw(address)
        connection.socket.sendall(data[: dice.randrange(1, len(data) + 1)])
        connection.reset()
    probe = raw(address)
    fetch = wire.FetchServers(node_id="x").SerializeToString()
    probe.request(Command.FETCH_METADATA, fetch)
    assert probe.read()[0].cmd == Command.FETCH_METADATA


# Members


def test_members_find_each_other_and_send_data(serve: Any, join: Any) -> None:
    service = serve(1, 2)

    def answer(command: int, role: Role, rank: int, data: bytes) -> bytes:
        return b"%d %d %d " % (command, role, rank) + data[::-1]

    servers = [join(service.address, SERVER, on_data=answer) for _ in range(2)]
    worker = join(service.address)
    worker.wait_ready(60)
    assert worker.send(servers[1].wait_ready(60) or 0, b"abc", command=51) == b"51 1 0 cba"
    assert worker.broadcast(b"") == {0: b"0 1 0 ", 1: b"0 1 0 "}
    assert [view.role for view in worker.fetch()] == [SERVER, SERVER, WORKER]
    big = random.Random(1).randbytes(3 << 20)
    assert worker.send(0, big)[6:] == big[::-1]
    with pytest.raises(MemberUnreachableError, match="no server 7"):
        worker.send(7, b"")


def test_server_that_fails_or_takes_no_data_is_an_error_for_that_call(serve: Any, join: Any) -> None:
    def fail(command: int, role: Role, rank: int, data: bytes) -> bytes:
        if data == b"bad":
            raise ValueError("bad data")
        return data

    service = serve(1, 1)
    join(service.address, SERVER, on_data=fail)
    worker = join(service.address)
    worker.wait_ready(60)
    with pytest.raises(MemberUnreachableError, match="ended before the response"):
        worker.send(0, b"bad")
    assert worker.send(0, b"good") == b"good"


def test_collective_bytes_come_in_order_and_are_acknowledged(serve: Any, join: Any) -> None:
    _, (first, second, server) = cluster(serve, join, 2, 1)
    for i in range(20):
        first.collective_send(1, b"%d" % i)
    second.collective_send(0, b"back")
    assert [second.collective_receive(0) for _ in range(20)] == [b"%d" % i for i in range(20)]
    assert first.collective_receive(1) == b"back"
    server.collective_send(0, b"from a server", role=WORKER)
    assert first.collective_receive(0, role=SERVER) == b"from a server"
    with pytest.raises(ClusterTimeoutError, match="SERVER 0"):
        first.collective_receive(0, role=SERVER, timeout_s=0.05)


def test_death_is_noticed_by_the_closed_socket_and_the_same_id_comes_back(
    serve: Any, join: Any, wait_until: Callable[..., None]
) -> None:
    told: list[MemberEvent] = []
    service = serve(2, 0)
    one = join(service.address, member_id="w0", on_event=told.append, heartbeat_s=60.0)
    two = join(service.address, member_id="w1", heartbeat_s=60.0)
    one.wait_ready(60)
    two.close()  # heartbeats are a minute apart: only the socket can tell
    one.wait_for(lambda: one.phase is Phase.NODE_TIMEOUT, 60, "word of the death")
    wait_until(lambda: MemberEvent.NODE_TIMEOUT in told, "the event")
    back = join(service.address, member_id="w1", heartbeat_s=60.0)
    assert back.wait_ready(60) == 1
    one.wait_for(lambda: one.phase is Phase.READY, 60, "the return")
    assert ids(one.members) == ids(back.members) == [(WORKER, 0, "w0", True), (WORKER, 1, "w1", True)]


def test_silent_member_is_lost_by_the_second_line(serve: Any, join: Any, raw: Any, listener: Any) -> None:
    service = serve(2, 0, settings={"heartbeat_timeout_s": 0.6})
    one = join(service.address, member_id="w0")
    own, silent = listener(), raw(service.address)
    register(silent, "w1", own.port)
    assert one.wait_ready(60) == 0
    one.wait_for(lambda: one.phase is Phase.NODE_TIMEOUT, 60, "the silence to be noticed")
    silent.read()
    assert silent.read() is None


def test_broadcast_waits_for_nobody(
    serve: Any, join: Any, raw: Any, listener: Any, wait_until: Callable[..., None]
) -> None:
    """One member takes connections and reads nothing; another's port is dead."""
    messages: list[int] = []
    service = serve(3, 0)
    stuck, gone = listener(), listener()
    register(raw(service.address), "stuck", stuck.port)
    register(raw(service.address), "gone", gone.port)
    gone.socket.close()
    one = join(service.address, on_message=messages.append)
    one.wait_for(lambda: one.phase in (Phase.READY, Phase.NODE_TIMEOUT), 60, "metadata")
    for number in range(50):
        one.publish(number)
    wait_until(lambda: messages == list(range(50)), "all events")


def test_events_reach_all_and_all_finish(serve: Any, join: Any, wait_until: Callable[..., None]) -> None:
    service = serve(1, 1)
    heard: list[list[int]] = [[], []]
    members = [join(service.address, role, on_message=heard[i].append) for i, role in enumerate((WORKER, SERVER))]
    members[0].wait_ready(60)
    members[1].publish(9)
    wait_until(lambda: heard == [[9], [9]], "the event at both")
    with pytest.raises(ClusterTimeoutError):
        members[0].finish(timeout_s=0.1)
    members[1].finish()
    members[0].wait_ended(60)
    assert service.finished.wait(10)


def test_refused_member_says_why(serve: Any, join: Any) -> None:
    service, _ = cluster(serve, join, 1, 1)
    with pytest.raises(RegistrationRefusedError, match="1 workers, and none of them is lost"):
        join(service.address)
    with pytest.raises(RegistrationRefusedError, match="'w0' is connected already"):
        join(service.address, member_id="w0")


# Scaling


def scale(service: Any, **amounts: Any) -> None:
    if "leaving" in amounts:
        service.ask(lambda call: ev.ScaleIn(call, amounts["leaving"]))
    else:
        service.ask(lambda call: ev.ScaleOut(call, amounts.get("workers", 0), amounts.get("servers", 0)))


def settled(members: list[Any], counts: tuple[int, int]) -> None:
    for member in members:
        member.wait_for(
            lambda member=member: member.phase is Phase.READY and member.counts == counts, 20, f"{counts} ready"
        )


def test_scale_out_and_in_under_traffic(serve: Any, join: Any, wait_until: Callable[..., None]) -> None:
    """Workers push numbers all the while; each is taken exactly once, by whoever was server then."""
    service = serve(1, 1)
    lock = threading.Lock()
    taken: list[bytes] = []
    paused = threading.Event()

    def take(command: int, role: Role, rank: int, data: bytes) -> bytes:
        with lock:
            taken.append(data)
        return data

    gate = threading.Lock()  # held while a number is on its way: the barrier before a scaling takes it

    def before(phase: Phase) -> None:
        gate.acquire()

    def after(phase: Phase) -> None:
        gate.release()

    servers = [join(service.address, SERVER, member_id="s0", on_data=take)]
    worker = join(service.address, WORKER, member_id="w0", before_scale=before, after_scale=after)
    worker.wait_ready(60)
    sent: list[bytes] = []
    failures: list[BaseException] = []

    def push() -> None:
        number = 0
        while not paused.is_set():
            with gate:
                data = b"%d" % number
                try:
                    worker.send(number % worker.counts[1], data)
                except BaseException as error:
                    failures.append(error)
                    return
                sent.append(data)
                number += 1

    pusher = threading.Thread(target=push)
    pusher.start()
    try:
        for counts, step in (((2, 3), "out"), ((2, 2), "in"), ((2, 3), "out")):
            if step == "out":
                have = len(servers)
                scale(service, servers=counts[1] - have, workers=counts[0] - worker.counts[0])
                servers += [
                    join(service.address, SERVER, member_id=f"s{len(sent)}-{i}", on_data=take)
                    for i in range(counts[1] - have)
                ]
                if worker.counts[0] < 2:
                    other = join(service.address, WORKER, member_id="w1")
            else:
                leaver = next(server for server in servers if server.rank == 1)
                scale(service, leaving=[leaver.member_id])
                leaver.wait_for(lambda leaver=leaver: leaver.rank is None, 60, "the leave")
                servers.remove(leaver)
                leaver.finish()
            settled([*servers, worker, other], counts)
            more = len(sent) + 30
            wait_until(lambda more=more: len(sent) > more or failures, "the traffic to go on")
            assert sorted(server.rank for server in servers) == list(range(counts[1]))
    finally:
        paused.set()
        pusher.join()
    assert not failures
    assert sorted(taken) == sorted(sent)


def test_scale_out_without_enough_newcomers_is_taken_back(
    serve: Any, join: Any, wait_until: Callable[..., None]
) -> None:
    service = serve(1, 1, settings={"scale_timeout_s": 0.7})
    told: list[MemberEvent] = []
    worker = join(service.address, WORKER, on_event=told.append)
    server = join(service.address, SERVER)
    worker.wait_ready(60)
    scale(service, servers=2)
    extra = join(service.address, SERVER)
    wait_until(lambda: MemberEvent.SCALE_TAKEN_BACK in told, "the round to be taken back")
    settled([worker, server], (1, 1))
    assert extra.rank is None
    assert told[0] is MemberEvent.READY_FOR_SCALE_OUT


# gRPC


class Exchange:
    """A member that speaks gRPC, by hand."""

    def __init__(self, address: str, token: str | None = TOKEN) -> None:
        request, response = message_set("cluster").methods("fastrt.ps.Cluster")["Exchange"]
        identity = None if token is None else trust_of(token).identity
        if identity is None:
            self.channel = open_channel(address)
        else:
            self.channel = open_channel(address, identity.channel_credentials(), identity.channel_options())
        self.outgoing: Any = queue.SimpleQueue()
        call = self.channel.stream_stream(EXCHANGE, request.SerializeToString, response.FromString)
        self.answers = call(iter(self.outgoing.get, None), timeout=30)

    def ask(self, command: int, data: bytes, number: int = 1) -> None:
        self.outgoing.put(wire.Comm(pb_meta=wire.Meta(cmd=command, request_id=number, role=1), data=data))

    def read(self) -> Any:
        return next(self.answers)

    def close(self) -> None:
        self.outgoing.put(None)
        self.channel.close()


def test_grpc_member_takes_part_beside_one_of_frames(serve: Any, join: Any, stack: Any) -> None:
    service = serve(2, 0, grpc_address="127.0.0.1:0", token=TOKEN)
    foreign = Exchange(service.grpc_address)
    stack.callback(foreign.close)
    message = wire.RegisterMessage(ip="127.0.0.1", port=0, node_id="g", role=1)
    foreign.ask(Command.REGISTER, message.SerializeToString())
    assert foreign.read().pb_meta.cmd == Command.REGISTER
    member = join(service.address)
    told = foreign.read()
    assert (told.pb_meta.cmd, told.pb_meta.role) == (Command.SEND_METADATA, Role.SCHEDULER)
    assert wire.SendMetadata.FromString(told.data).worker_num == 2
    foreign.outgoing.put(told)  # the acknowledgement is no request
    member.wait_ready(60)
    member.publish(5)
    assert wire.EventResp.FromString(foreign.read().data).event == 5
    foreign.close()
    member.wait_for(lambda: member.phase is Phase.NODE_TIMEOUT, 60, "word of the death")


def test_grpc_wants_the_token_and_ends_a_stream_that_makes_no_sense(serve: Any, stack: Any) -> None:
    service = serve(1, 1, grpc_address="127.0.0.1:0", token=TOKEN)
    for token, code in ((None, "UNAVAILABLE"), (new_token(), "UNAVAILABLE"), (TOKEN, "INVALID_ARGUMENT")):
        member = Exchange(service.grpc_address, token)
        stack.callback(member.close)
        member.ask(Command.SEND_METADATA, b"")
        with pytest.raises(grpc.RpcError) as caught:
            member.read()
        assert caught.value.code().name == code


# Restarts and options


def test_restarted_scheduler_goes_on_with_its_members(serve: Any, join: Any, tmp_path: Path) -> None:
    """Stopped and started at the same address; tests/cli/test_ps.py kills the process."""
    service = serve(2, 1, state_dir=tmp_path)
    names = [(WORKER, "w0"), (WORKER, "w1"), (SERVER, "s0")]
    members = [join(service.address, role, member_id=name) for role, name in names]
    assert [member.wait_ready(60) for member in members] == [0, 1, 0]
    before = ids(members[0].fetch())
    service.stop()
    again = serve(2, 1, state_dir=tmp_path, address=service.address)
    assert ids(again.overview().members) == before
    assert ids(members[0].fetch()) == before
    for member in members:
        member.publish(1)
    assert again.overview().phase is Phase.READY


def test_restart_within_a_scale_out_takes_it_back_and_the_next_one_goes_through(
    serve: Any, join: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    told: list[MemberEvent] = []
    service = serve(1, 1, state_dir=tmp_path)
    worker = join(service.address, WORKER, member_id="w0", on_event=told.append)
    server = join(service.address, SERVER, member_id="s0")
    worker.wait_ready(60)
    scale(service, servers=1)
    worker.wait_for(lambda: worker.phase is Phase.SCALE_OUT, 60, "the scaling to begin")
    service.stop()
    again = serve(1, 1, state_dir=tmp_path, address=service.address)
    settled([worker, server], (1, 1))
    wait_until(lambda: MemberEvent.SCALE_TAKEN_BACK in told, "word of it")
    scale(again, servers=1)
    settled([worker, server, join(service.address, SERVER)], (1, 2))


def test_state_of_a_finished_cluster_is_not_taken_up(serve: Any, join: Any, tmp_path: Path) -> None:
    service, members = cluster(serve, join, 1, 0, state_dir=tmp_path)
    members[0].finish()
    service.stop()
    assert serve(1, 0, state_dir=tmp_path).overview().phase is Phase.STARTING


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"token": None}, ConfigError),
        ({"token": "abcd1234"}, ConfigError),
        ({"tls": TlsFiles(Path("cert"), Path("key"))}, ConfigError),
        ({"settings": Settings(0, 0)}, ConfigError),
        ({"settings": Settings(-1, 2)}, ConfigError),
        ({"settings": Settings(1, 1, heartbeat_timeout_s=0)}, ConfigError),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ClusterScheduler(ClusterOptions(**{"token": TOKEN, **options}))
