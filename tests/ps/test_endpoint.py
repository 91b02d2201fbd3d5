"""What comes over a socket: anything at all, and the service goes on; without the token, nothing."""

import contextlib
import json
import os
import socket
import struct
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastrt.errors import ConfigError
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of
from fastrt.net.grpc.visitors import VISITORS_MAX
from fastrt.ps import SGD, endpoint
from fastrt.ps.client import Session
from fastrt.ps.errors import ServerLostError
from fastrt.ps.spec import Spec
from fastrt.ps.wire import VERSION, BrokenWireError, Wire, dial

F = np.float32


def hello(place: Any, **more: Any) -> dict[str, Any]:
    return {"version": VERSION, "client": 5, **more}


def connected(place: Any, unix: bool = False) -> Wire:
    one = place.places[0]
    wire = dial(one.unix if unix else None, one.address, one.trust, 5.0)
    wire.call(hello(place), timeout_s=60)
    return wire


def test_caller_without_the_token_or_of_another_version_is_sent_away(site) -> None:
    place = site(1)
    with pytest.raises(ServerLostError, match="does not hold the secret of this cluster"):
        Session(place.head.address, new_token())
    with pytest.raises(ConfigError, match="not a cluster's token"):
        Session(place.head.address, "0" * 32)
    one = place.places[0]
    with pytest.raises(BrokenWireError, match="does not hold the secret of this cluster"):
        dial(one.unix, one.address, trust_of(new_token()), 5.0)
    for greeting in (hello(place, version=0), {}, {"op": "stats"}):
        for unix in (None, one.unix):
            with contextlib.closing(dial(unix, one.address, one.trust, 5.0)) as wire:
                assert "error" in wire.call(greeting, timeout_s=60)[0]
                with pytest.raises((BrokenWireError, OSError)):
                    wire.call({"op": "stats"}, timeout_s=60)


def test_worker_of_a_cluster_that_has_ended_leaves_no_connection(site) -> None:
    head = site(1).head
    head._lost("server 0 is lost")
    with pytest.raises(ServerLostError, match="server 0 is lost") as refused:
        Session(head.address, head.token)
    names = {frame.name: frame.frame.f_locals for frame in refused.traceback}
    with pytest.raises(BrokenWireError):
        names["__init__"]["self"]._head.call({"op": "stats"}, timeout_s=60)


def test_connection_that_is_accepted_while_the_endpoint_closes_is_ended(site, monkeypatch) -> None:
    """Its thread ends too, and does not wait for a greeting."""
    place = site(1)
    one = place.places[0].endpoint
    visitors = one._visitors[socket.AF_INET]
    accepted, ended = threading.Event(), threading.Event()
    enter, end_all = visitors.enter, visitors.end_all

    def enter_late(sock: socket.socket) -> int:
        accepted.set()
        assert ended.wait(20)
        return int(enter(sock))

    def end_and_tell() -> None:
        end_all()
        ended.set()

    monkeypatch.setattr(visitors, "enter", enter_late)
    monkeypatch.setattr(visitors, "end_all", end_and_tell)
    with knocked(place) as stranger:
        stranger.sendall(b"fast")  # half a proof
        assert accepted.wait(20)
        one.close()
        assert not one._threads


def knocked(place: Any) -> socket.socket:
    host, _, port = place.places[0].address.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def test_strangers_who_say_nothing_or_little_do_not_keep_others_out(site) -> None:
    place = site(1)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(knocked(place)) for _ in range(VISITORS_MAX + 10)]
        for stranger in strangers:
            stranger.sendall(b"fast")  # half a proof; the kernel keeps those that say nothing
        for _ in range(VISITORS_MAX):
            stack.enter_context(knocked(place))
        assert strangers[0].recv(1) == b"", "the oldest makes room"
        with contextlib.closing(connected(place)) as wire:
            for _ in range(VISITORS_MAX):
                stack.enter_context(knocked(place)).sendall(b"fast")
            assert wire.call({"op": "stats"}, timeout_s=60)  # who has shown the token stays


def test_greeting_that_drips_or_is_large_is_hung_up_on(site, monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_GREETING_S", 0.4)
    place = site(1)
    with knocked(place) as stranger:
        pause, sent = threading.Event(), 0
        with contextlib.suppress(ConnectionError):
            for byte in b"fastrtP1" + bytes(64):
                stranger.sendall(bytes([byte]))
                sent += 1
                pause.wait(0.1)
        assert 3 <= sent < 40
    with knocked(place) as stranger:
        stranger.sendall(b"frps" + struct.pack("<IQ", 1 << 20, 0))  # a message before the proof
        assert stranger.recv(64, socket.MSG_WAITALL) == b"fastrtP1"  # the name of the protocol, and the end


FINITE = st.floats(allow_nan=False, allow_infinity=False)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 100), 1 << 100) | FINITE | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
OPS = ["create", "push", "wait", "pull", "rows", "open", "lane", "bye", "stats", "fetch", "export", "thaw", "nothing"]


def test_any_message_is_answered_and_the_tables_stay_as_they_are(site) -> None:
    place = site(1)
    session = place.worker()
    table = place.table(session, "w", (6,), SGD(lr=1.0), 1.0)
    rows = place.embedding(session, "e", 2, SGD(lr=1.0), rows=100)
    rows.push([3], np.ones((1, 2), F))
    names = ["table", "epoch", "rank", "seq", "lr", "n", "dropped", "timeout", "lane", "parts", "spec", "after"]
    good = {"epoch": 1, "rank": 0, "timeout": 0, "after": 0, "slowest": 0, "lr": None, "seq": 1}

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        op=st.sampled_from(OPS), name=st.sampled_from(["w", "e", ""]), odd=st.dictionaries(st.sampled_from(names), ODD),
        data=st.binary(max_size=64),
    )  # fmt: skip
    def any_message(op: str, name: str, odd: dict[str, Any], data: bytes) -> None:
        meta = {**good, "op": op, "table": name, **odd}
        meta["timeout"] = 0 if not isinstance(meta["timeout"], str) else meta["timeout"]
        if op == "push" and (not data or meta.get("dropped") or meta.get("n") == 1):
            return  # that may be a push
        with contextlib.closing(connected(place)) as wire:
            answer, _, _ = wire.call(meta, [data], timeout_s=60)
            assert op not in ("push", "lane", "fetch", "nothing") or "error" in answer

    any_message()
    assert (table.pull() == 1).all()
    assert (rows.pull([3]) == -1).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(min_size=1, max_size=60), begin=st.sampled_from([b"", b"frps", b"frps\x02\0\0\0\0\0\0\0\0\0\0\0"]))
def test_bytes_that_are_no_message_end_that_connection_alone(raw: bytes, begin: bytes) -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    with theirs:
        theirs.sendall(begin + raw)
        theirs.shutdown(socket.SHUT_WR)

        def read() -> None:
            while True:
                meta, nbytes, _ = wire.receive_head(5)
                assert isinstance(meta, dict)
                wire.receive_data(bytearray(min(nbytes, 100)))

        with contextlib.closing(wire), pytest.raises(BrokenWireError):
            read()


def test_sizes_that_a_peer_names_are_checked_before_memory_is_taken(site) -> None:
    place = site(1)
    table = place.table(place.worker(), "w", (6,), SGD(lr=1.0), 1.0)
    body = json.dumps({"op": "push", "table": "w", "epoch": 1, "rank": 0, "seq": 1, "timeout": 1}).encode()
    for sizes in ((len(body), 1 << 35), (1 << 31, 0), (len(body), (1 << 64) - 1)):
        with contextlib.closing(connected(place)) as wire:
            wire._sock.sendall(struct.pack("<4sIQ", b"frps", *sizes) + body)
            with contextlib.suppress(BrokenWireError):
                assert "the limit for this message" in wire.answer(5)[0]["text"]
            with pytest.raises((BrokenWireError, OSError)):
                wire.call({"op": "stats"}, timeout_s=60)
    with contextlib.closing(connected(place)) as wire:  # a little too much is read, and the connection lives on
        answer = wire.call({"op": "push", "table": "w", "epoch": 1, "n": 0}, [bytes(9000)], timeout_s=60)[0]
        assert "9000 bytes came" in answer["text"]
        assert "tables" in wire.call({"op": "stats"}, timeout_s=60)[0]
    assert (table.pull() == 1).all()


def test_lane_that_could_shrink_or_is_no_memory_is_refused(site) -> None:
    place = site(1)
    fds = [os.memfd_create("x"), os.open("/dev/null", os.O_RDONLY)]
    with contextlib.closing(connected(place, unix=True)) as wire:
        for fd in fds:
            assert "error" in wire.call({"op": "lane"}, fds=[fd], timeout_s=60)[0]
            os.close(fd)
        assert "one descriptor" in wire.call({"op": "lane"}, timeout_s=60)[0]["text"]
        assert "fit a lane of 0" in wire.call({"op": "stats", "lane": 8}, timeout_s=60)[0]["text"]
    with contextlib.closing(connected(place)) as wire:
        assert "a process of this machine" in wire.call({"op": "lane"}, timeout_s=60)[0]["text"]


@settings(max_examples=30)
@given(odd=st.dictionaries(st.sampled_from(sorted(Spec.__dataclass_fields__)), ODD, min_size=1))
def test_definition_of_a_table_is_whole_or_refused(odd: dict[str, Any]) -> None:
    good = Spec("w", "dense", (4,), SGD(), None, (0, 4)).to_json()
    try:
        made = Spec.from_json(json.loads(json.dumps({**good, **odd})))
    except ValueError:
        return
    assert Spec.from_json(json.loads(json.dumps(made.to_json()))) == made
