"""The ObjStore service as any gRPC client sees it: early Ray's rules, and streams that break them."""

import contextlib
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fastrt.net.address import InsecureBindError
from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.channel import bearer, open_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.objstore.push import Pusher
from fastrt.objstore.service import GET, MEASURE, READ, ObjStoreServer
from fastrt.scheduler.client import SchedulerClient
from fastrt.store.serialize import serialize
from fastrt.transfer import obj
from support.sites import PATIENCE_S, SERVICE, TOKEN, Caller, Site

BIG = 5 << 20
FETCH = "/fastrt.transfer.Transfer/Fetch"
Make = Callable[..., Any]


@contextlib.contextmanager
def refused(code: str, match: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert (caught.value.code().name, match in caught.value.details()) == (code, True), caught.value


def cut(data: bytes, objref: int = 1, size: int = 100) -> list[tuple[int, int, bytes]]:
    return [(objref, len(data), data[at : at + size]) for at in range(0, len(data), size)]


def enveloped(text: str) -> list[bytes]:
    """A text as one store of fastrt sends it to another."""
    return [obj.envelope(5, False, len(text)), text.encode(), obj.TAIL]


DATA = obj.to_bytes(["a value", list(range(200))])
PICKLE = obj.to_bytes({1, 2, 3})


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("value", ["text", [1, 2.5, None], {3, 4}, np.arange(3000.0), b"\0" * 5000])
def test_streamed_object_is_there_as_a_value(site: Site, call: Caller, value: Any, size: int) -> None:
    call.stream(cut(obj.to_bytes(value), 7, size if size > 1 else max(1, len(obj.to_bytes(value)) // 50)))
    np.testing.assert_equal(site.get(7), value)
    assert call("ObjStoreInfo").objref == [7]


@pytest.mark.parametrize("at", [0, 1, -1])
def test_empty_chunks_are_taken(site: Site, call: Caller, at: int) -> None:
    value = np.arange(2000.0)
    for objref, data in ((7, obj.to_bytes([value, {5}])), (8, DATA), (9, b"".join(enveloped("x" * 5000)))):
        chunks = cut(data, objref, 1000)
        empty = (objref, len(data), b"")
        call.stream([*chunks[:at], empty, empty, *chunks[at:]] if at >= 0 else [*chunks, empty])
    np.testing.assert_equal(site.get(7), [value, {5}])
    assert site.get(8) == ["a value", list(range(200))]
    assert site.get(9) == "x" * 5000
    assert site.table.read(9).kind == 5  # its bytes went straight into the arena


@pytest.mark.parametrize("size", [20, 80, 1000])
def test_envelope_cut_anywhere_is_there_as_a_value(site: Site, call: Caller, size: int) -> None:
    value = np.arange(2000.0)
    call.stream(cut(obj.to_bytes([value, {5}]), 7, size))
    np.testing.assert_equal(site.get(7), [value, {5}])


BREACHES = {
    "no chunk": ([], "INVALID_ARGUMENT", "without a chunk"),
    "too short": (cut(DATA)[:-1], "INVALID_ARGUMENT", "ended after"),
    "one byte short": ([(1, len(DATA), DATA[:-1])], "INVALID_ARGUMENT", "ended after"),
    "too long": ([*cut(DATA), (1, len(DATA), b"x")], "OUT_OF_RANGE", "more than that were sent"),
    "too long at once": ([(1, 10, DATA)], "OUT_OF_RANGE", "more than that were sent"),
    "nothing but empty chunks": ([(1, 10, b""), (1, 10, b"")], "INVALID_ARGUMENT", "ended after 0 of 10 bytes"),
    "an empty chunk of another object": ([cut(DATA)[0], (2, len(DATA), b"")], "INVALID_ARGUMENT", "is in the stream"),
    "another object behind an empty chunk": ([(2, len(DATA), b""), *cut(DATA)], "INVALID_ARGUMENT", "is in the stream"),
    "another object": ([cut(DATA)[0], (2, len(DATA), b"x")], "INVALID_ARGUMENT", "is in the stream of object 0x1"),
    "another total": ([cut(DATA)[0], (1, 5000, b"x")], "INVALID_ARGUMENT", "is in the stream of object 0x1"),
    "no bytes in all": ([(1, 0, b"")], "INVALID_ARGUMENT", "an Obj has at least two"),
    "a total of zero": ([(1, 0, b"abc")], "INVALID_ARGUMENT", "an Obj has at least two"),
    "a total beyond the store": ([(1, 1 << 40, b"x")], "RESOURCE_EXHAUSTED", "larger than the whole store"),
    "a total beyond everything": ([(1, (1 << 64) - 1, b"x")], "RESOURCE_EXHAUSTED", "larger than the whole store"),
    "no message": (cut(b"\xff" * 300), "INVALID_ARGUMENT", "are not an Obj"),
    "no field": (cut(b"\x0a\x00\x12\x00"), "INVALID_ARGUMENT", "2 fields set"),
    "a broken pickle": (cut(obj.Obj(pyobj_data={"data": b"\x80\x05K"}).SerializeToString()), "INVALID_ARGUMENT", ""),
    "an unknown reference": (cut(b"\x5a\x02\x08\x63"), "FAILED_PRECONDITION", "0x63, which this store does not know"),
    "a wrong end of a pickle": (
        [(1, 3 + len(obj.envelope(16, False, 50)) + 50, obj.envelope(16, False, 50) + b"x" * 53)],
        "INVALID_ARGUMENT",
        "no proper end",
    ),
}


@pytest.mark.parametrize(("chunks", "code", "match"), BREACHES.values(), ids=BREACHES.keys())
def test_stream_that_breaks_the_rules_is_refused_and_leaves_nothing(
    site: Site, call: Caller, chunks: Any, code: str, match: str
) -> None:
    with refused(code, match):
        call.stream(chunks)
    assert call("ObjStoreInfo").objref == []
    site.wait_until_empty()
    call.stream(cut(DATA))  # the name is as free as before
    assert site.get(1) == ["a value", list(range(200))]


def test_chunks_that_are_no_messages_are_refused(site: Site, server: ObjStoreServer, call: Caller) -> None:
    stub = call.channel.stream_unary("/ObjStore/StreamObj", None, None)
    for bodies in (
        [b"\xff\xff"],
        [SERVICE["StreamObj"][0](objref=1, totalsize=9, data=b"x").SerializeToString(), b"\x0c"],
    ):
        with refused("INVALID_ARGUMENT", "this is not an ObjChunk"):
            stub(iter(bodies), timeout=PATIENCE_S, metadata=call.metadata)
    assert server.table.coming() == 0


@pytest.mark.parametrize("body", [b"\xff\xff", b"\x0a\x05x", b"\x08"])
def test_requests_that_are_no_messages_are_refused(call: Caller, body: bytes) -> None:
    for path in [f"/ObjStore/{name}" for name in SERVICE if name != "StreamObj"] + [FETCH, GET]:
        with refused("INVALID_ARGUMENT", ""):
            call.channel.unary_unary(path)(body, timeout=PATIENCE_S, metadata=call.metadata)
    with refused("INVALID_ARGUMENT", ""):
        list(call.channel.unary_stream(MEASURE)(body, timeout=PATIENCE_S, metadata=call.metadata))
    with refused("INVALID_ARGUMENT", ""):
        list(call.channel.unary_stream(READ)(body, timeout=PATIENCE_S, metadata=call.metadata))


@pytest.mark.parametrize("address", ["", "garbage", "a:b", "127.0.0.1:99999", "x" * 5000])
def test_delivery_to_no_address_is_refused(site: Site, call: Caller, address: str) -> None:
    site.put(1, "value")
    with refused("INVALID_ARGUMENT", "objstore_address"):
        call("DeliverObj", objstore_address=address, objref=1)


@pytest.mark.parametrize("order", ["reversed", "doubled", "shuffled"])
def test_chunks_out_of_order_never_become_another_value(site: Site, call: Caller, order: str) -> None:
    """Chunks have no offsets: what is reordered adds up, and is told only by not being an Obj any more."""
    chunks = cut(DATA, size=60)
    moved = {"reversed": chunks[::-1], "doubled": chunks[:1] * 2 + chunks[2:], "shuffled": chunks[2:] + chunks[:2]}
    with refused("INVALID_ARGUMENT", ""):
        call.stream(moved[order])
    site.wait_until_empty()


def test_object_that_is_here_is_not_taken_twice(site: Site, call: Caller) -> None:
    call.stream(cut(DATA))
    with refused("ALREADY_EXISTS", "in this store already"):
        call.stream(cut(DATA))
    assert site.get(1) == ["a value", list(range(200))]


def test_second_stream_of_an_object_on_its_way_is_refused_and_the_first_goes_on(
    server: ObjStoreServer, call: Caller, wait_until: Callable[..., None]
) -> None:
    chunks = cut(DATA)
    go: futures.Future[None] = futures.Future()

    def slowly() -> Iterator[Any]:
        yield chunks[0]
        go.result(PATIENCE_S)
        yield from chunks[1:]

    waiting = server.table.expect(1)
    with futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(call.stream, slowly())
        wait_until(lambda: server.table.coming() == 1, "the first chunk")
        with refused("ALREADY_EXISTS", "being received"):
            call.stream(chunks)
        assert not waiting.done()
        go.set_result(None)
        first.result(PATIENCE_S)
    assert waiting.result(PATIENCE_S) == server.table.find(1)


def test_sender_that_hangs_up_midway_leaves_nothing(site: Site, call: Caller, wait_until: Callable[..., None]) -> None:
    request, _ = SERVICE["StreamObj"]
    stub = call.channel.stream_unary("/ObjStore/StreamObj", request.SerializeToString, None)
    go: futures.Future[None] = futures.Future()

    def chunks() -> Iterator[Any]:
        yield request(objref=1, totalsize=1 << 20, data=b"x" * 1000)
        go.result(PATIENCE_S)

    running = stub.future(chunks(), metadata=call.metadata)
    wait_until(lambda: site.table.coming() == 1, "the first chunk")
    running.cancel()
    wait_until(lambda: site.table.coming() == 0, "nothing on its way")
    go.set_result(None)
    site.wait_until_empty()


# ---- deliveries ----


def test_delivery_between_fastrt_stores_takes_the_native_stream(
    site: Site, server: ObjStoreServer, call: Caller, make_site: Make, closing: Make
) -> None:
    there = make_site()
    other = closing(there.serve())
    site.put(5, np.arange(BIG))
    site.put(6, {"ref": site.store.put(1)})  # cannot leave: what it contains has no name
    for _ in range(2):
        call("DeliverObj", objstore_address=other.address, objref=5)
    np.testing.assert_array_equal(there.get(5), np.arange(BIG))
    assert list(other.puller._links) == [server.native_address]
    with refused("FAILED_PRECONDITION", "no name in the cluster"):
        call("DeliverObj", objstore_address=other.address, objref=6)
    with refused("NOT_FOUND", "0x63 is not in this store"):
        call("DeliverObj", objstore_address=other.address, objref=99)
    with refused("UNAVAILABLE", "the other store reports"):
        call("DeliverObj", objstore_address="127.0.0.1:1", objref=5)


@pytest.mark.parametrize("value", [None, "text", b"b" * BIG, np.arange(BIG // 8), {1: [np.arange(5000)]}, {9}])
def test_delivery_without_a_native_stream_keeps_the_bytes(
    make_site: Make, closing: Make, caller: Make, value: Any
) -> None:
    here, there = make_site(), make_site()
    server, other = closing(here.serve(native=False)), closing(there.serve())
    here.put(5, value)
    call = caller(server.address)
    for _ in range(2):
        call("DeliverObj", objstore_address=other.address, objref=5)
    np.testing.assert_equal(there.get(5), value)
    kinds = [store.table.read(5).kind for store in (here, there)]
    assert kinds[0] == kinds[1]


def test_error_is_delivered_as_an_error(make_site: Make, closing: Make, caller: Make) -> None:
    here, there = make_site(), make_site()
    server, other = closing(here.serve(native=False)), closing(there.serve())
    here.table.add(1, here.store.put_serialized(serialize(ZeroDivisionError("there")), error=True))
    call = caller(server.address)
    call("DeliverObj", objstore_address=other.address, objref=1)
    with pytest.raises(ZeroDivisionError, match="there"):
        there.get(1)


# ---- aliases, deallocation, information ----


def test_alias_names_the_same_object_and_goes_with_it(site: Site, server: ObjStoreServer, call: Caller) -> None:
    site.put(1, "value")
    site.put(2, "other")
    waiting = server.table.expect(11)
    call("NotifyAlias", alias_objref=11, canonical_objref=1)
    call("NotifyAlias", alias_objref=11, canonical_objref=1)
    call("NotifyAlias", alias_objref=12, canonical_objref=11)
    assert waiting.result(0) == server.table.find(1)
    assert site.get(12) == "value"
    assert call("ObjStoreInfo").objref == [1, 2, 11, 12]
    with refused("NOT_FOUND", "0x9 is not in this store"):
        call("NotifyAlias", alias_objref=13, canonical_objref=9)
    with refused("INVALID_ARGUMENT", "alias of itself"):
        call("NotifyAlias", alias_objref=1, canonical_objref=1)
    for taken in (2, 11):
        with refused("ALREADY_EXISTS", "another object here already"):
            call("NotifyAlias", alias_objref=taken, canonical_objref=2 if taken == 11 else 1)
    call("DeallocateObject", canonical_objref=1)
    assert call("ObjStoreInfo").objref == [2]
    with refused("NOT_FOUND", "cannot be deallocated"):
        call("DeallocateObject", canonical_objref=1)
    del waiting


def test_information_has_the_values_asked_for(site: Site, call: Caller) -> None:
    site.put(1, "value")
    site.put(2, [np.arange(3)])
    site.put(3, b"x" * (5 << 20))
    answer = call("ObjStoreInfo", objref=[2, 1])
    assert answer.objref == [1, 2, 3]
    values = [obj.from_obj(one, False) for one in answer.obj]
    np.testing.assert_array_equal(values[0][0], np.arange(3))
    assert values[1] == "value"
    with refused("NOT_FOUND", "0x9 is not in this store"):
        call("ObjStoreInfo", objref=[1, 9])
    with refused("RESOURCE_EXHAUSTED", "have more than"):
        call("ObjStoreInfo", objref=[3])


# ---- the scheduler's acknowledgement ----


class Scheduler:
    """Takes ObjReady; refuses the objects it is told to."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, int, Any]] = []
        self.refuse: set[int] = set()
        self.unknown: set[int] = set()
        request, reply = message_set("ray").methods("Scheduler")["ObjReady"]

        def obj_ready(message: Any, context: Any) -> Any:
            if message.objref in self.refuse:
                self.refuse.remove(message.objref)
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            if message.objref in self.unknown:
                context.abort(grpc.StatusCode.NOT_FOUND, "never heard of it")
            self.ready.append(
                (message.objref, message.objstoreid, dict(context.invocation_metadata())["authorization"])
            )
            return reply()

        handler = grpc.unary_unary_rpc_method_handler(obj_ready, request.FromString, reply.SerializeToString)
        self._pool = futures.ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("Scheduler", {"ObjReady": handler})]
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(PATIENCE_S)
        self._pool.shutdown()


def test_every_arrival_is_reported_to_the_scheduler_before_it_is_acknowledged(
    make_site: Make, closing: Make, caller: Make
) -> None:
    scheduler = closing(Scheduler())
    client = closing(SchedulerClient(scheduler.address, TOKEN))
    here, there = make_site(), make_site()
    server, other = closing(here.serve()), closing(there.serve(on_ready=lambda objref: client.ready(objref, 4)))
    call, direct = caller(server.address), caller(other.address)
    direct.stream(cut(DATA, 1))
    here.put(2, "native")
    call("DeliverObj", objstore_address=other.address, objref=2)
    assert scheduler.ready == [(k, 4, f"Bearer {TOKEN}") for k in (1, 2)]
    scheduler.refuse = {3, 5}
    here.put(3, "again")
    with refused("UNAVAILABLE", "not now"):
        call("DeliverObj", objstore_address=other.address, objref=3)
    call("DeliverObj", objstore_address=other.address, objref=3)  # it is there already, and is reported again
    with refused("UNAVAILABLE", "not now"):
        direct.stream(cut(DATA, 5))
    assert [objref for objref, _, _ in scheduler.ready] == [1, 2, 3]


@pytest.mark.parametrize("native", [True, False])
def test_arrival_that_the_scheduler_refuses_leaves_nothing_and_one_it_missed_is_reported_again(
    make_site: Make, closing: Make, caller: Make, native: bool
) -> None:
    scheduler = closing(Scheduler())
    client = closing(SchedulerClient(scheduler.address, TOKEN))
    here, there = make_site(), make_site()
    server, other = (
        closing(here.serve(native=native)),
        closing(there.serve(native=native, on_ready=lambda objref: client.ready(objref, 4))),
    )
    call, direct = caller(server.address), caller(other.address)
    scheduler.refuse, scheduler.unknown = {1}, {2, 3}
    for objref in (1, 2):
        here.put(objref, "a value")
    with refused("NOT_FOUND", "never heard of it"):
        call("DeliverObj", objstore_address=other.address, objref=2)
    with refused("NOT_FOUND", "never heard of it"):
        direct.stream(cut(DATA, 3))
    assert direct("ObjStoreInfo").objref == []
    there.wait_until_empty()
    with refused("UNAVAILABLE", "not now"):
        call("DeliverObj", objstore_address=other.address, objref=1)
    assert (there.get(1), scheduler.ready) == ("a value", [])
    call("DeliverObj", objstore_address=other.address, objref=1)
    assert [objref for objref, _, _ in scheduler.ready] == [1]


# ---- security ----

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("DeliverObj", {"objref": 1, "objstore_address": "127.0.0.1:1"}),
    ("NotifyAlias", {"alias_objref": 2, "canonical_objref": 1}),
    ("DeallocateObject", {"canonical_objref": 1}),
    ("ObjStoreInfo", {"objref": [1]}),
]


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], ""], ids=["none", "wrong", "cut", "empty"])
def test_without_the_token_nothing_is_served(site: Site, server: ObjStoreServer, caller: Make, token: Any) -> None:
    site.put(1, "secret")
    stranger = caller(server.address, token)
    for method, fields in CALLS:
        with refused("UNAUTHENTICATED", "session token"):
            stranger(method, **fields)
    with refused("UNAUTHENTICATED", "session token"):
        stranger.stream(cut(DATA, 2))
    assert server.table.listed() == [1]


class Canary:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["FASTRT_CANARY"],)


def test_pickle_without_a_token_is_not_opened(
    site: Site, closing: Make, caller: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTRT_CANARY", str(tmp_path / "sang"))
    server = closing(site.serve(token=None))
    call = caller(server.address, None)
    assert server.native_address is None
    call.stream(cut(DATA, 1))
    for body in (obj.Obj(pyobj_data={"data": pickle.dumps(Canary())}).SerializeToString(), PICKLE):
        with refused("PERMISSION_DENIED", "has not shown the session's token"):
            call.stream(cut(body, 2))
    raw = pickle.dumps(Canary())
    with refused("PERMISSION_DENIED", "has not shown the session's token"):
        call.stream(cut(obj.envelope(16, False, len(raw)) + raw + obj.TAIL, 3, 1000))
    assert not (tmp_path / "sang").exists()
    assert server.table.listed() == [1]


def test_server_beyond_loopback_needs_to_be_meant(site: Site) -> None:
    with pytest.raises(InsecureBindError, match="in the clear"):
        ObjStoreServer(site.store, token=TOKEN, address="0.0.0.0:0")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    try:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate),
                *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, is not installed")
    return TlsFiles(certificate, key, certificate)


def test_stores_with_certificates_deliver_over_grpc_only(
    make_site: Make, closing: Make, caller: Make, certificates: TlsFiles
) -> None:
    here, there = make_site(), make_site()
    server, other = closing(here.serve(tls=certificates)), closing(there.serve(tls=certificates))
    assert server.native_address is None
    here.put(1, np.arange(BIG // 8))
    call = caller(server.address, TOKEN, certificates.channel_credentials())
    call("DeliverObj", objstore_address=other.address, objref=1)
    np.testing.assert_array_equal(there.get(1), np.arange(BIG // 8))
    plain = caller(server.address)
    with pytest.raises(grpc.RpcError):
        plain("ObjStoreInfo")


def test_delivery_that_the_stop_interrupts_fails_in_time(make_site: Make, closing: Make, caller: Make) -> None:
    here, there = make_site(), make_site()
    server, other = here.serve(native=False), closing(there.serve())
    here.put(1, np.arange(BIG))
    with futures.ThreadPoolExecutor(1) as pool:
        call = caller(server.address)
        running = pool.submit(call, "DeliverObj", objstore_address=other.address, objref=1)
        server.stop()
        with contextlib.suppress(grpc.RpcError):
            running.result(PATIENCE_S)
    assert other.table.coming() == 0 or other.table.expect(1).result(PATIENCE_S)


def test_pusher_tells_of_objects_that_went_away(site: Site, closing: Make) -> None:
    pusher = closing(Pusher(site.table, TOKEN))
    site.put(1, {"a": 1})
    sealed = site.table.read(1)
    site.table.drop(1)
    with pytest.raises(LookupError, match="no longer in this store"):
        pusher.parts(1, sealed, False)


# Measurements


def measure(channel: grpc.Channel, nbytes: int) -> Any:
    request, reply = message_set("transfer").methods("fastrt.transfer.Transfer")["Measure"]
    call = channel.unary_stream(MEASURE, request.SerializeToString, reply.FromString)
    return call(request(nbytes=nbytes), timeout=PATIENCE_S, metadata=bearer(TOKEN))


def test_measured_object_is_reported_to_no_scheduler_and_dropped_with_its_sender(
    site: Site, closing: Make, caller: Make, wait_until: Make
) -> None:
    reported: list[int] = []
    server = closing(site.serve(on_ready=reported.append))
    call = caller(server.address)
    with open_channel(server.address) as channel:
        measurement = measure(channel, 1000)
        name = next(measurement).objref
        assert name >= 1 << 63
        call.stream(cut(DATA, name))
        assert call("ObjStoreInfo").objref == [name]
        assert reported == []
        measurement.cancel()
        wait_until(lambda: call("ObjStoreInfo").objref == [], "the object to go")
        call.stream(cut(DATA, name))
        assert reported == [name], "the name is an object's like any other again"


def test_measurement_beyond_the_store_is_refused_at_once(server: ObjStoreServer) -> None:
    with open_channel(server.address) as channel, refused("RESOURCE_EXHAUSTED", "into this store of 6"):
        next(measure(channel, 1 << 40))
