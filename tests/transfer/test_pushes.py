"""Small objects that a store sends unasked over a native stream that has a name."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastrt.store.serialize import serialize
from fastrt.transfer import wire
from fastrt.transfer.table import TransferError
from support.sites import PATIENCE_S, Pair, Site

from .test_native import Liar, dialled, frame, hung_up, pattern

Make = Callable[..., Any]

NAME = 7


class Taken:
    """Answers that each object was taken, and keeps what came."""

    puller: Any = None

    def __init__(self) -> None:
        self.came: list[tuple[int, bool]] = []

    def __call__(self, objref: int, is_new: bool, answer: Callable[[bool], None]) -> None:
        self.came.append((objref, is_new))
        answer(True)


def named(pair: Pair, wait_until: Callable[..., None], address: str = "", **options: Any) -> Taken:
    """Have a connection between the two stores that has a name; object 1 has come over it."""
    taken = Taken()
    pair.here.put(1, "the first")
    taken.puller = pair.puller(on_push=taken, **options)
    taken.puller.pull(1, address or pair.source.address, NAME).result(PATIENCE_S)
    wait_until(lambda: NAME in pair.source._named, "the source knows the name")
    return taken


def push(pair: Pair, objref: int) -> bool:
    return pair.source.push(NAME, objref, pair.here.table.read(objref), PATIENCE_S)


@pytest.mark.parametrize("checksum", [False, True])
def test_small_objects_come_unasked_over_a_connection_with_a_name(
    either: Pair, checksum: bool, wait_until: Callable[..., None]
) -> None:
    taken = named(either, wait_until, checksum=checksum)
    values = [None, True, 5, 2.5, "", "text", b"bytes", [1, {2}], pattern(1000), pattern(wire.SMALL_BYTES // 8 - 100)]
    for k, value in enumerate(values, 2):
        either.here.put(k, value)
        assert push(either, k)
        np.testing.assert_equal(either.there.get(k), value)
    assert push(either, 2)  # it is here
    assert taken.came == [*((k, True) for k in range(2, 2 + len(values))), (2, False)]
    either.here.put(100, "asked for")
    assert not either.source.push(NAME + 1, 100, either.here.table.read(100), PATIENCE_S)
    error = either.here.store.put_serialized(serialize(ValueError("as it should")), error=True)
    either.here.table.add(101, error)
    assert push(either, 101)
    with pytest.raises(ValueError, match="as it should"):
        either.there.get(101)


def test_object_that_comes_unasked_and_finds_no_room_is_not_taken_and_the_next_one_is(
    make_site: Callable[..., Site], closing: Callable[[Any], Any], wait_until: Callable[..., None]
) -> None:
    pair = Pair(make_site(), make_site(2 << 20), closing)
    taken = named(pair, wait_until)
    for k in range(2, 80):
        pair.here.put(k, bytes(100_000))
    assert not all(push(pair, k) for k in range(2, 80))
    for k, _ in taken.came:
        pair.there.table.drop(k)
    assert push(pair, 2)
    assert pair.source._named  # over the same connection


def test_connection_that_breaks_under_an_unasked_object_leaves_nothing_of_it(
    either: Pair, wait_until: Callable[..., None]
) -> None:
    proxy = either.proxy()
    named(either, wait_until, proxy.address)
    either.here.put(2, bytes(100_000))
    proxy._end.set()  # ends its connections at the next byte, so that the object does not arrive whole
    assert not push(either, 2)
    wait_until(lambda: not either.there.table.coming(), "the taker has given the object up")
    assert either.there.table.find(2) is None
    wait_until(lambda: not either.source._named, "the source has forgotten the name")
    assert not push(either, 2)


def answer(ticket: int, objref: int) -> bytes:
    return wire.pack_request(wire.Request(ticket, objref, wire.TAKEN), wire.ANSWER_MAGIC)


@pytest.mark.parametrize(
    "said",
    [
        wire.pack_request(wire.Request(0, NAME, 0), wire.NAME_MAGIC),
        answer(9, 1),
        answer(0, 1) * 2,
        b"n" * wire.REQUEST.size,
        b"",
    ],
    ids=["a second name", "an answer to nothing", "two answers", "noise", "nothing"],
)
def test_taker_that_breaks_the_rules_of_unasked_objects_is_hung_up_on(
    pair: Pair, said: bytes, wait_until: Callable[..., None]
) -> None:
    pair.here.put(1, "value")
    with dialled(pair.source) as sock:
        sock.sendall(wire.pack_request(wire.Request(0, NAME, 0), wire.NAME_MAGIC))
        wait_until(lambda: NAME in pair.source._named, "the source knows the name")
        found: list[bool] = []
        sealed = pair.here.table.read(1)
        patience_s = PATIENCE_S if said else 0.3
        thread = threading.Thread(target=lambda: found.append(pair.source.push(NAME, 1, sealed, patience_s)))
        thread.start()
        head = wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL)))
        assert (head.status, head.objref, head.total) == (wire.PUSH, 1, len(sealed.pin))
        sock.sendall(said)
        assert hung_up(sock)
        thread.join()
        assert found == [said == answer(0, 1) * 2]
        wait_until(lambda: not pair.source._named, "the source has forgotten the name")


@pytest.mark.parametrize(
    "lie",
    [
        frame(objref=2, status=wire.PUSH, total=50, nrefs=1),
        frame(objref=2, status=wire.PUSH, total=51),
        frame(objref=2, status=wire.PUSH, total=50, kind=3),
        frame(objref=2, status=wire.PUSH, total=wire.SMALL_BYTES + 1, length=wire.SMALL_BYTES + 1),
        frame(objref=2, status=wire.PUSH, total=50)[:-10],
    ],
    ids=["references", "a part", "an int of 50 bytes", "a large object", "half an object"],
)
def test_lies_in_unasked_objects_are_refused_and_leave_nothing(
    make_site: Callable[..., Site], closing: Callable[[Any], Any], lie: bytes
) -> None:
    there = make_site()
    taken = Taken()
    future = closing(there.puller(on_push=taken)).pull(1, closing(Liar(lie)).address, NAME)
    assert isinstance(future.exception(PATIENCE_S), TransferError)
    assert taken.came == []
    assert there.table.coming() == 0
    assert there.table.listed() == []


def test_deliveries_after_the_first_need_no_call(make_site: Make, closing: Make, caller: Make) -> None:
    here, there = make_site(), make_site()
    server, other = closing(here.serve()), closing(there.serve())
    call, fetched = caller(server.address), []
    fetch = server._pusher._fetch

    def counted(channel: Any, objref: int, address: str) -> Any:
        fetched.append(objref)
        return fetch(channel, objref, address)

    server._pusher._fetch = counted
    values = {1: "the first", 2: "small", 3: bytes(1 << 20), 4: [1.5, {2}], 5: np.arange(100)}
    for objref, value in values.items():
        here.put(objref, value)
        call("DeliverObj", objstore_address=other.address, objref=objref)
        np.testing.assert_equal(there.get(objref), value)
    here.table.add(6, here.store.put([here.table.find(1)]))
    call("DeliverObj", objstore_address=other.address, objref=6)
    assert fetched == [1, 3, 6]  # the first, a large one, and one with a reference
    other.puller.close()  # ends the connection
    here.put(7, "later")
    call("DeliverObj", objstore_address=other.address, objref=2)
    assert fetched == [1, 3, 6, 2]


def test_several_pushes_at_once_and_requests_between_them_are_all_answered(
    either: Pair, wait_until: Callable[..., None]
) -> None:
    puller = named(either, wait_until).puller
    each, large = 30, 4 << 20
    for k in range(4 * each):
        either.here.put(100 + k, bytes([k]) * 1000)
    for k in range(10):
        either.here.put(1000 + k, bytes([k]) * large)
    answers: list[bool] = []

    def run(first: int) -> None:
        answers.extend(push(either, 100 + first + k) for k in range(each))

    threads = [threading.Thread(target=run, args=(each * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    asked = [puller.pull(1000 + k, either.source.address) for k in range(10)]
    for thread in threads:
        thread.join()
    for future in asked:
        future.result(PATIENCE_S)
    assert answers == [True] * 4 * each
    assert all(either.there.get(100 + k) == bytes([k]) * 1000 for k in range(4 * each))
    assert all(either.there.get(1000 + k) == bytes([k]) * large for k in range(10))


def test_requests_that_a_pushing_thread_reads_are_served(pair: Pair, wait_until: Callable[..., None]) -> None:
    pair.here.put(1, "pushed")
    pair.here.put(2, "asked for")
    with dialled(pair.source) as sock:
        sock.sendall(wire.pack_request(wire.Request(0, NAME, 0), wire.NAME_MAGIC))
        wait_until(lambda: NAME in pair.source._named, "the source knows the name")
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(push(pair, 1)))
        thread.start()
        head = wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL)))
        sock.recv(head.length, socket.MSG_WAITALL)
        request = wire.pack_request(wire.Request(5, 2, 0))
        sock.sendall(answer(head.ticket, 1) + request[:7])  # the pushing thread ends with a part of the request
        thread.join()
        assert found == [True]
        sock.sendall(request[7:])
        head = wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL)))
        sock.recv(head.length, socket.MSG_WAITALL)
        assert (head.status, head.ticket, head.objref) == (wire.OK, 5, 2)
        thread = threading.Thread(target=lambda: found.append(push(pair, 1)))
        thread.start()
        head = wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL)))
        sock.recv(head.length, socket.MSG_WAITALL)
        sock.sendall(request)  # while the pushing thread still waits for its answer
        asked = wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL)))
        assert (asked.status, asked.ticket, asked.objref) == (wire.OK, 5, 2)
        sock.recv(asked.length, socket.MSG_WAITALL)
        sock.sendall(answer(head.ticket, 1))
        thread.join()
        assert found == [True, True]
