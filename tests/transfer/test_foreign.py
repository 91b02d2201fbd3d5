"""Stores and clients that are not fastrt's: they know early Ray's messages, and fastrt's own calls by their protos."""

import queue
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from fastrt.errors import TaskError
from fastrt.net.grpc.descriptors import message_set
from fastrt.objstore.service import ObjStoreServer
from fastrt.store.serialize import serialize
from fastrt.transfer import obj
from support.sites import PATIENCE_S, SERVICE, Caller, Site

BIG = 5 << 20
Make = Callable[..., Any]


class ForeignStore:
    """Early Ray's store as others might write it: it knows nothing of fastrt's own service."""

    def __init__(self) -> None:
        self.objects: dict[int, bytes] = {}
        request, reply = SERVICE["StreamObj"]

        def stream(chunks: Any, context: Any) -> Any:
            for one in chunks:
                self.objects[one.objref] = self.objects.get(one.objref, b"") + one.data
            return reply()

        handler = grpc.stream_unary_rpc_method_handler(stream, request.FromString, reply.SerializeToString)
        self._pool = futures.ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ObjStore", {"StreamObj": handler})]
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(PATIENCE_S)
        self._pool.shutdown()


def raised() -> TaskError:
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError as exc:
        return TaskError.wrap(exc, task_name="divide")


def test_error_reaches_a_foreign_program_as_type_text_and_traceback(site: Site, call: Caller, closing: Make) -> None:
    foreign = closing(ForeignStore())
    site.table.add(5, site.store.put_serialized(serialize(raised()), error=True))
    call("DeliverObj", objstore_address=foreign.address, objref=5)
    (looked,) = call("ObjStoreInfo", objref=[5]).obj
    for message in (obj.Obj.FromString(foreign.objects[5]), looked):
        assert not message.HasField("pyobj_data")
        said = {e.key.string_data.data: e.value.string_data.data for e in message.dict_data.elem}
        assert said.keys() == {b"type", b"text", b"traceback"}
        assert (said[b"type"], said[b"text"]) == (b"ZeroDivisionError", b"by nothing")
        assert said[b"traceback"].startswith(b"Traceback (most recent call last):")
        mark = message_set("transfer").message("fastrt.transfer.ObjMark").FromString(message.SerializeToString())
        assert mark.is_error


def test_error_of_a_foreign_program_is_raised_here(site: Site, call: Caller) -> None:
    said = {"type": "TypeError", "text": "undefined is no function", "traceback": "at f (x.js:1)"}
    for objref, data in ((7, obj.to_bytes(said)), (8, obj.to_bytes(said) + b"\xa0\x06\x01")):
        call.stream([(objref, len(data), data)])
    assert site.get(7) == said  # a dictionary without the mark is a dictionary
    with pytest.raises(obj.ForeignError, match="TypeError: undefined is no function") as caught:
        site.get(8)
    assert caught.value.traceback_text == "at f (x.js:1)"
    (again,) = call("ObjStoreInfo", objref=[8]).obj
    assert again == obj.Obj.FromString(obj.to_bytes(said) + b"\xa0\x06\x01")


@pytest.mark.parametrize(
    "value",
    [
        "text", -5, [1, {"k": (None, True)}], np.arange(300_000.0), np.arange(4, dtype="i2"),
        b"plain bytes", b"\xff\0", b"", [b"text", "text"], b"b" * BIG, "t" * BIG,
        np.float64(1.5), np.float32(0.1), np.int8(-3), np.uint64((1 << 64) - 1), np.bool_(True), [np.int32(7)],
        np.array(2.5), np.arange(300_000.0, dtype="f4").reshape(3, -1), np.arange(300_000.0)[::3],
        np.arange(300_000.0).astype(">f8"), np.arange(600_000.0).reshape(2, -1).T,
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_delivery_to_a_foreign_store_is_an_obj_that_it_can_read(
    site: Site, call: Caller, closing: Make, value: Any
) -> None:
    foreign = closing(ForeignStore())
    site.put(5, value)
    call("DeliverObj", objstore_address=foreign.address, objref=5)
    message = obj.Obj.FromString(foreign.objects[5])
    found = obj.from_obj(message, False)  # a pickle would be refused
    np.testing.assert_equal(found, value)
    assert type(found) is type(value)
    (looked,) = call("ObjStoreInfo", objref=[5]).obj if len(foreign.objects[5]) < 4 << 20 else (message,)
    assert looked == message


# ---- clients without a server ----

TRANSFER = message_set("transfer").methods("fastrt.transfer.Transfer")


def read(call: Caller, objref: int) -> Any:
    request, reply = TRANSFER["Read"]
    method = call.channel.unary_stream("/fastrt.transfer.Transfer/Read", request.SerializeToString, reply.FromString)
    return method(request(objref=objref), timeout=PATIENCE_S, metadata=call.metadata)


@pytest.mark.parametrize("value", [7, b"b" * BIG, np.arange(BIG / 8), [np.arange(300_000), "x"]], ids=lambda v: type(v))
def test_client_reads_an_object_of_any_size_in_chunks(site: Site, call: Caller, value: Any) -> None:
    site.put(5, value)
    found = list(read(call, 5))
    data = b"".join(one.data for one in found)
    assert {(one.objref, one.totalsize) for one in found} == {(5, len(data))}
    assert max(len(one.data) for one in found) <= 1 << 20
    np.testing.assert_equal(obj.from_bytes(data, False), value)


def test_client_that_reads_slowly_is_sent_no_more_than_it_takes(
    site: Site, server: ObjStoreServer, call: Caller
) -> None:
    site.put(5, np.zeros(BIG // 2))
    slow = read(call, 5)
    first = next(slow)
    (stream,) = server._server._open_streams
    assert len(stream._outgoing) <= 1
    assert len(first.data) + sum(len(one.data) for one in slow) == first.totalsize


def test_client_that_leaves_midway_leaves_no_pin(site: Site, call: Caller) -> None:
    site.put(5, np.zeros(BIG // 2))
    begun = read(call, 5)
    next(begun)
    begun.cancel()
    call("DeallocateObject", canonical_objref=5)
    site.wait_until_empty()


def test_client_that_reads_what_is_not_here_is_told(call: Caller) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(read(call, 5))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_small_objects_to_a_known_foreign_store_arrive_and_its_refusals_are_errors(
    site: Site, server: ObjStoreServer, call: Caller, closing: Make
) -> None:
    """After the first delivery the store is known as another kind, and gets small objects as single messages."""
    foreign = closing(ForeignStore())
    values = ["first", 2, "three", np.arange(100_000.0), {"five": [5]}]
    for objref, value in enumerate(values, 1):
        site.put(objref, value)
        call("DeliverObj", objstore_address=foreign.address, objref=objref)
        np.testing.assert_equal(obj.from_obj(obj.Obj.FromString(foreign.objects[objref]), False), value)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request = SERVICE["DeliverObj"][0](objstore_address=foreign.address, objref=2)
    server.handle("/ObjStore/DeliverObj", request.SerializeToString(), lambda *answer: answers.put(answer))
    assert answers.get(timeout=PATIENCE_S) == (0, "", b"")
    for path, body, code in (("/ObjStore/Nothing", b"", 12), ("/ObjStore/DeliverObj", b"\xff", 3)):
        server.handle(path, body, lambda *answer: answers.put(answer))
        assert answers.get(timeout=PATIENCE_S)[0] == code
    foreign.stop()
    with pytest.raises(grpc.RpcError, match="the other store reports") as caught:
        call("DeliverObj", objstore_address=foreign.address, objref=1)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
