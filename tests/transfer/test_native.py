"""The native stream between two stores: values that arrive, and peers and networks that do their worst."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt._core.transfer import stream
from fastrt.errors import NotFoundError, ObjectLostError, ObjectStoreFullError
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.proof import REPLY_BYTES, prove_as_server
from fastrt.transfer import link, wire
from fastrt.transfer import source as source_module
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import TransferError
from fastrt.transfer.wire import Frame
from support.sites import IDENTITY, PATIENCE_S, Pair, Site

VALUES: list[Any] = [
    None, True, -7, 2.5, "", "text", b"", b"x" * 100_000, (1, "two", [3.0]), {"k": [None]}, 1 << 100, set("ab"),
]  # fmt: skip
BIG = 10 << 20  # more than two frames


def pattern(nbytes: int) -> np.ndarray:
    return np.arange(nbytes // 8, dtype=np.uint64) * 0x9E3779B97F4A7C15


@pytest.mark.parametrize("checksum", [False, True])
def test_values_of_every_kind_arrive_as_they_were(either: Pair, checksum: bool) -> None:
    puller = either.puller(checksum=checksum)
    values = [*VALUES, pattern(BIG), np.zeros((3, 0)), np.arange(6).reshape(2, 3), [pattern(5000), pattern(6000)]]
    for k, value in enumerate(values):
        either.here.put(k, value)
    futures = [puller.pull(k, either.source.address) for k in range(len(values))]
    for k, future in enumerate(futures):
        future.result(PATIENCE_S)
        np.testing.assert_equal(either.there.get(k), values[k])
    assert either.there.table.listed() == list(range(len(values)))
    assert either.there.table.coming() == 0


def test_error_arrives_as_an_error(pair: Pair) -> None:
    from fastrt.store.serialize import serialize

    pair.here.table.add(1, pair.here.store.put_serialized(serialize(ZeroDivisionError("there")), error=True))
    ref = pair.puller().pull(1, pair.source.address).result(PATIENCE_S)
    with pytest.raises(ZeroDivisionError, match="there"):
        pair.there.store.get(ref)


def test_contained_references_are_found_by_their_names(either: Pair) -> None:
    inner = either.here.store.put("inner")
    either.here.table.add(1, inner)
    either.here.put(2, {"ref": inner})
    del inner
    puller = either.puller()
    with pytest.raises(TransferError, match="contains a reference to 0x1, which this store does not know"):
        puller.pull(2, either.source.address).result(PATIENCE_S)
    puller.pull(1, either.source.address).result(PATIENCE_S)
    puller.pull(2, either.source.address).result(PATIENCE_S)
    assert either.there.store.get(either.there.get(2)["ref"]) == "inner"


def test_reference_without_a_name_is_refused_by_the_source(pair: Pair) -> None:
    pair.here.put(2, [pair.here.store.put("inner")])
    with pytest.raises(TransferError, match="which has no name in the cluster"):
        pair.puller().pull(2, pair.source.address).result(PATIENCE_S)


def test_many_who_ask_for_one_object_get_one_transfer(pair: Pair) -> None:
    pair.here.put(5, pattern(BIG))
    proxy = pair.proxy()
    puller, other = pair.puller(), pair.puller()
    expected = pair.there.table.expect(5)
    futures = [one.pull(5, proxy.address) for _ in range(50) for one in (puller, other)]
    refs = {future.result(PATIENCE_S) for future in futures}
    assert refs == {expected.result(PATIENCE_S)}
    assert BIG < proxy.passed < BIG + 10_000
    assert puller.pull(5, "127.0.0.1:1").result(0) in refs  # it is here: nobody is asked


def test_many_small_objects_arrive_over_one_connection(either: Pair) -> None:
    for k in range(2000):
        either.here.put(k, np.full(100, k))
    proxy = either.proxy()
    puller = either.puller()
    for future in puller.pull_many(range(2000), proxy.address):
        future.result(PATIENCE_S)
    assert all(either.there.get(k)[99] == k for k in range(2000))
    assert proxy.connections == 1


def test_small_object_does_not_wait_for_a_large_one(either: Pair) -> None:
    either.here.put(1, pattern(40 << 20))
    either.here.put(2, "small")
    proxy = either.proxy(rate=200 << 20)
    puller = either.puller()
    large = puller.pull(1, proxy.address)
    small = puller.pull(2, proxy.address)
    small.result(PATIENCE_S)
    assert not large.done()
    large.result(PATIENCE_S)


def test_absent_object_is_not_found_and_others_arrive(pair: Pair) -> None:
    pair.here.put(1, "here")
    puller = pair.puller()
    absent = [puller.pull(k, pair.source.address) for k in range(100, 300)]
    assert puller.pull(1, pair.source.address).result(PATIENCE_S)
    for future in absent:
        with pytest.raises(NotFoundError, match="is not in this store"):
            future.result(PATIENCE_S)
    assert pair.there.table.coming() == 0


def test_object_without_room_fails_alone(make_site: Callable[..., Site], closing: Callable[[Any], Any]) -> None:
    pair = Pair(make_site(), make_site(16 << 20), closing)
    pair.here.put(1, pattern(BIG))
    pair.here.put(2, pattern(40 << 20))
    pair.here.put(3, "small")
    puller = pair.puller()
    futures = [puller.pull(k, pair.source.address) for k in (1, 2, 3)]
    with pytest.raises(ObjectStoreFullError, match="larger than the whole store"):
        futures[1].result(PATIENCE_S)
    assert futures[0].result(PATIENCE_S)
    assert futures[2].result(PATIENCE_S)
    np.testing.assert_array_equal(pair.there.get(1), pattern(BIG))


def test_object_deallocated_on_its_way_is_lost_and_leaves_nothing(
    either: Pair, wait_until: Callable[..., None]
) -> None:
    either.here.put(1, pattern(BIG))
    proxy = either.proxy(plans=[("stall", 5 << 20)])
    puller = either.puller(timeout_s=0.5)
    future = puller.pull(1, proxy.address)
    wait_until(lambda: proxy.passed >= 5 << 20, "half of it")
    either.there.table.drop(1)
    with pytest.raises(ObjectLostError, match="deallocated while it was being received"):
        future.result(PATIENCE_S)
    assert puller.pull(1, proxy.address).result(PATIENCE_S)


# ---- broken networks ----

CUTS = [0, 1, 50, 103, 104, 105, 150, 164, 165, 200, 900, 100_000, 4 << 20, (4 << 20) + 150, (8 << 20) + 300]


@pytest.mark.parametrize("how", ["cut", pytest.param("reset", marks=pytest.mark.long)])
@pytest.mark.parametrize("at", CUTS)
def test_connection_broken_anywhere_goes_on_over_a_new_one(either: Pair, how: str, at: int) -> None:
    either.here.put(1, pattern(BIG))
    either.here.put(2, "small")
    proxy = either.proxy(plans=[(how, at), (how, at)])
    puller = either.puller()
    futures = [puller.pull(k, proxy.address) for k in (1, 2)]
    for future in futures:
        future.result(PATIENCE_S)
    np.testing.assert_array_equal(either.there.get(1), pattern(BIG))
    assert either.there.get(2) == "small"
    assert proxy.connections <= 3
    # What had come whole was not sent again.
    assert proxy.passed < BIG + 2 * (wire.FRAME_BYTES + 20_000)


def test_connection_that_always_breaks_late_still_makes_progress(pair: Pair) -> None:
    pair.here.put(1, pattern(40 << 20))
    proxy = pair.proxy(then=("cut", (4 << 20) + 10_000))
    pair.puller().pull(1, proxy.address).result(PATIENCE_S)
    assert proxy.connections >= 10
    np.testing.assert_array_equal(pair.there.get(1), pattern(40 << 20))


def test_slow_network_delivers_all_the_same_however_long_it_takes(pair: Pair) -> None:
    """What counts is that something comes, not when all of it is there."""
    nbytes, rate, timeout_s = 2 * BIG, 20 << 20, 0.6
    pair.here.put(1, pattern(nbytes))
    begun = time.monotonic()
    pair.puller(timeout_s=timeout_s).pull(1, pair.proxy(rate=rate).address).result(PATIENCE_S)
    assert time.monotonic() - begun > timeout_s, "the network was not slow enough to show anything"
    np.testing.assert_array_equal(pair.there.get(1), pattern(nbytes))


def test_connection_that_never_brings_a_frame_ends_in_a_typed_error(either: Pair) -> None:
    either.here.put(1, pattern(BIG))
    proxy = either.proxy(then=("cut", 100_000))
    with pytest.raises(TransferError, match="after 4 attempts that brought no data"):
        either.puller().pull(1, proxy.address).result(PATIENCE_S)
    assert proxy.connections == 4
    assert either.there.used() == (0, 0)


def test_nobody_listening_is_a_typed_error(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(TransferError, match="Connection refused"):
        pair.puller().pull(1, address).result(PATIENCE_S)
    with pytest.raises(TransferError, match="is not HOST:PORT"):
        pair.puller().pull(1, "localhost:none").result(PATIENCE_S)


@pytest.mark.parametrize(
    ("at", "said"), [(30, "30 of 104 bytes of the server's greeting came"), (2 << 20, r"moved no byte for 0\.2 s")]
)
def test_source_that_falls_silent_is_given_up_in_time(pair: Pair, at: int, said: str) -> None:
    pair.here.put(1, pattern(BIG))
    proxy = pair.proxy(then=("stall", at))
    began = time.monotonic()
    with pytest.raises(TransferError, match=said):
        pair.puller(timeout_s=0.2).pull(1, proxy.address).result(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert pair.there.used() == (0, 0)


@pytest.mark.parametrize("at", [90, 116, 104 + 56, 5 << 20])
def test_damaged_byte_is_noticed_and_the_frame_sent_again(pair: Pair, at: int) -> None:
    pair.here.put(1, pattern(BIG))
    proxy = pair.proxy(plans=[("flip", at)])
    puller = pair.puller(checksum=True)
    future = puller.pull(1, proxy.address)
    if at == 90:  # in the source's proof: it is not believed
        with pytest.raises(TransferError, match="the server does not hold the secret"):
            future.result(PATIENCE_S)
        return
    future.result(PATIENCE_S)
    np.testing.assert_array_equal(pair.there.get(1), pattern(BIG))


def test_puller_closed_midway_fails_what_is_expected(either: Pair, wait_until: Callable[..., None]) -> None:
    either.here.put(1, pattern(BIG))
    proxy = either.proxy(then=("stall", 5 << 20))
    puller = either.puller()
    future = puller.pull(1, proxy.address)
    wait_until(lambda: proxy.passed >= 5 << 20, "half of it")
    puller.close()
    with pytest.raises(TransferError, match="this store is closing"):
        future.result(0)
    with pytest.raises(TransferError, match="this store is closing"):
        puller.pull(2, proxy.address).result(0)
    assert either.there.used() == (0, 0)


def test_source_restarted_under_an_idle_connection_is_found_again(either: Pair, closing: Callable[[Any], Any]) -> None:
    either.here.put(1, "one")
    either.here.put(2, "two")
    puller = either.puller()
    puller.pull(1, either.source.address).result(PATIENCE_S)
    port = either.source.port
    either.source.close()
    closing(either.here.source(port=port))
    assert puller.pull(2, either.source.address).result(PATIENCE_S)


def test_source_lets_go_of_an_object_when_it_has_been_sent(either: Pair) -> None:
    either.here.put(1, pattern(BIG))
    either.puller().pull(1, either.source.address).result(PATIENCE_S)
    either.here.table.drop(1)
    either.here.wait_until_empty()  # although the connection is still open


# ---- strangers ----


def test_taker_of_another_cluster_gets_nothing(either: Pair, closing: Callable[[Any], Any]) -> None:
    either.here.put(1, "secret")
    proxy = either.proxy()
    stranger = Identity.from_token(new_token())
    puller = closing(Puller(either.there.table, stranger, tls_on_loopback=either.here.tls))
    with pytest.raises(TransferError, match=r"does not hold the secret|another authority has signed its certificate"):
        puller.pull(1, proxy.address).result(PATIENCE_S)
    assert proxy.connections == 1
    assert b"secret" not in proxy.sent[0]


def test_source_of_another_cluster_is_not_believed(either: Pair, closing: Callable[[Any], Any]) -> None:
    stranger = Identity.from_token(new_token())
    impostor = closing(Source(either.here.table, stranger, tls_on_loopback=either.here.tls))
    either.here.put(1, "forged")
    with pytest.raises(TransferError, match=r"does not hold the secret|another authority has signed its certificate"):
        either.puller().pull(1, impostor.address).result(PATIENCE_S)


def everything(sock: socket.socket) -> bytes:
    """What the other end sends until it hangs up, politely or not."""
    received = b""
    try:
        while data := sock.recv(1 << 20):
            received += data
    except ConnectionResetError:
        pass
    return received


def test_replayed_connection_gets_nothing(pair: Pair) -> None:
    pair.here.put(1, "secret")
    proxy = pair.proxy()
    pair.puller().pull(1, proxy.address).result(PATIENCE_S)
    recorded = bytes(proxy.sent[0])
    with socket.create_connection(("127.0.0.1", pair.source.port), PATIENCE_S) as sock:
        sock.sendall(recorded)
        received = everything(sock)
    assert len(received) <= REPLY_BYTES  # with another nonce, so that the recorded proof is none


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 200, bytes(400), b"\xff" * 400])
def test_noise_instead_of_a_login_is_hung_up_on(pair: Pair, noise: bytes) -> None:
    pair.here.put(1, "value")
    with socket.create_connection(("127.0.0.1", pair.source.port), PATIENCE_S) as sock:
        sock.sendall(noise)
        received = everything(sock)
    assert len(received) <= REPLY_BYTES
    assert pair.puller().pull(1, pair.source.address).result(PATIENCE_S)


def test_greeting_that_drips_is_hung_up_on_in_time(pair: Pair, closing: Callable[[Any], Any]) -> None:
    """Each byte more is no reason to wait on: 72 of them would take 14 seconds."""
    source = closing(pair.here.source(timeout_s=0.3))
    dripping = threading.Event()
    with socket.create_connection(("127.0.0.1", source.port), PATIENCE_S) as sock:

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in b"fastrtP1" + bytes(64):
                    sock.sendall(bytes([byte]))
                    if dripping.wait(0.2):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        everything(sock)
        took = time.monotonic() - begun
        dripping.set()
        thread.join()
    assert 0.25 < took < 13


def test_source_that_drips_its_greeting_is_given_up_in_time(pair: Pair) -> None:
    pair.here.put(1, "value")
    begun = time.monotonic()
    with pytest.raises(TransferError, match=r"of 104 bytes of the server's greeting came"):
        pair.puller(timeout_s=0.3).pull(1, pair.proxy(rate=5).address).result(PATIENCE_S)
    assert time.monotonic() - begun < PATIENCE_S / 2


def test_strangers_who_say_nothing_neither_keep_others_out_nor_pile_up(
    pair: Pair, wait_until: Callable[..., None]
) -> None:
    pair.here.put(1, "value")
    most = source_module._GREETINGS_MAX
    silent: list[socket.socket] = []
    try:
        for k in range(source_module._CONNECTIONS_MAX + 20):
            silent.append(socket.create_connection(("127.0.0.1", pair.source.port), PATIENCE_S))
            silent[-1].sendall(b"fastrtP1 and half a greeting" if k % 2 else b"f")
        assert pair.puller().pull(1, pair.source.address).result(PATIENCE_S)
        wait_until(lambda: streams_of_the_source() <= most + 1, "the oldest strangers to be sent away")
        assert silent[0].recv(100) == b""
    finally:
        for sock in silent:
            sock.close()
    wait_until(lambda: streams_of_the_source() <= 1, "all strangers to be forgotten")


def streams_of_the_source() -> int:
    """How many connections have a thread."""
    return sum(thread.name == "fastrt-source-stream" for thread in threading.enumerate())


def test_taker_is_served_for_longer_than_a_greeting_may_take(pair: Pair, closing: Callable[[Any], Any]) -> None:
    """Strangers who come later take the place of other strangers, not of one who has proved the secret."""
    source = closing(pair.here.source(timeout_s=0.3))
    pair.here.put(1, "value")
    sock = dialled(source)
    with sock, contextlib.ExitStack() as stack:
        for _ in range(source_module._GREETINGS_MAX + 5):
            stack.enter_context(socket.create_connection(("127.0.0.1", source.port), PATIENCE_S)).sendall(b"f")
        with socket.create_connection(("127.0.0.1", source.port), PATIENCE_S) as last:
            last.sendall(b"f")  # the kernel keeps those that say nothing
            everything(last)  # its time is up, and with it that of all before
        sock.settimeout(PATIENCE_S)
        sock.sendall(request(1, 0))
        assert wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL))).objref == 1


def request(objref: int, offset: int, ticket: int = 0, end: int = 0) -> bytes:
    return wire.pack_request(wire.Request(ticket, objref, offset, end))


def dialled(source: Source) -> socket.socket:
    """A connection in the clear over which this taker has said that it wants no checksums."""
    made = link.dial(source.address, IDENTITY, False)
    assert not made.sealed
    sock = socket.socket(fileno=made._sock.detach())
    sock.settimeout(PATIENCE_S)
    sock.sendall(wire.pack_opening(False))
    return sock


def hung_up(sock: socket.socket) -> bool:
    """Wait for the other end to hang up; fails by the socket's timeout if it does not."""
    everything(sock)
    return True


def test_taker_that_sends_noise_is_hung_up_on(pair: Pair) -> None:
    pair.here.put(1, "value")
    with dialled(pair.source) as sock:
        sock.sendall(b"n" * wire.REQUEST.size)
        assert hung_up(sock)
    with dialled(pair.source) as sock:
        damaged = bytearray(request(1, 0))
        damaged[9] ^= 1
        sock.sendall(damaged)
        assert hung_up(sock)
    with dialled(pair.source) as sock:
        sock.sendall(request(1, 0)[:10])
    assert pair.puller().pull(1, pair.source.address).result(PATIENCE_S)


def test_taker_that_asks_for_too_much_is_hung_up_on(pair: Pair) -> None:
    pair.here.put(1, pattern(BIG))
    with dialled(pair.source) as sock:
        for _ in range(3):
            sock.sendall(request(1, 0) * wire.REQUESTS_MAX)
        assert hung_up(sock)
    pair.here.table.drop(1)
    pair.here.wait_until_empty()


def test_taker_that_asks_beyond_the_end_is_told(pair: Pair) -> None:
    pair.here.put(1, b"12345")
    with dialled(pair.source) as sock:
        for offset, end in ((5, 0), (6, 0), ((1 << 64) - 1, 0), (0, 6), (3, 3), (3, 2), (1, (1 << 64) - 1)):
            sock.sendall(request(1, offset, end=end))
            head = bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL))
            frame = wire.read_frame(head)
            assert frame.status == wire.REFUSED
            assert b"bytes, not those from" in sock.recv(frame.length, socket.MSG_WAITALL)
        for offset, end, data in ((3, 0, b"45"), (1, 3, b"23")):
            sock.sendall(request(1, offset, end=end))
            frame = wire.read_frame(bytearray(sock.recv(wire.HEAD.size, socket.MSG_WAITALL)))
            assert (frame.total, frame.offset, sock.recv(frame.length, socket.MSG_WAITALL)) == (5, offset, data)


def test_taker_that_stops_reading_is_given_up(
    make_site: Callable[..., Site], closing: Callable[[Any], Any], wait_until: Callable[..., None]
) -> None:
    here = make_site()
    here.put(1, pattern(40 << 20))
    source = closing(here.source(timeout_s=0.2))
    with dialled(source) as sock:
        sock.sendall(request(1, 0))
        here.table.drop(1)
        here.wait_until_empty()


class Liar:
    """A source that knows the token and says what it is told to."""

    def __init__(self, *says: bytes) -> None:
        self._says = says
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._lie)
        self._thread.start()

    def _lie(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(PATIENCE_S)
                try:
                    prove_as_server(sock, IDENTITY.key(link.PURPOSE), link.PURPOSE)
                    sock.recv(wire.OPENING.size + wire.REQUEST.size, socket.MSG_WAITALL)
                    for data in self._says:
                        sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    hung_up(sock)
                except (OSError, EOFError):
                    continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def frame(objref: int = 1, total: int = 100, offset: int = 0, length: int = 50, **other: int) -> bytes:
    fields = {"status": 0, "kind": 16, "flags": 0, "nrefs": 0, "ticket": 0, "crc": 0, **other}
    head = Frame(objref=objref, total=total, offset=offset, length=length, **fields)
    return wire.pack_frame(head) + bytes(min(8 * head.nrefs + length, 1 << 20))


HALF = frame()
LIES = {
    "another object": (frame(objref=2),),
    "an answer to nothing": (frame(ticket=1),),
    "more than the total": (frame(total=10, length=11),),
    "an offset beyond the total": (frame(offset=101, length=1),),
    "a start in the middle": (frame(offset=50),),
    "a gap": (HALF, frame(offset=60, length=40)),
    "the same bytes twice": (HALF, HALF),
    "another total": (HALF, frame(total=101, offset=50)),
    "nothing": (frame(length=0),),
    "a frame too large": (frame(total=1 << 40, length=wire.FRAME_BYTES + 1),),
    "a total beyond every store": (frame(total=1 << 60, length=1),),
    "a total that wraps around": (frame(total=(1 << 64) - 1, length=1),),
    "a kind that is none": (frame(kind=7),),
    "a kind of another version": (frame(kind=200),),
    "an int of 100 bytes": (frame(kind=3),),
    "references in the middle": (HALF, frame(offset=50, nrefs=1)),
    "too many references": (frame(nrefs=wire.REFS_MAX + 1),),
    "an unknown reference": (frame(nrefs=1, total=50),),
    "a reason without end": (frame(status=1, length=5000),),
    "no frame at all": (b"HTTP/1.1 200 OK\r\n\r\n" * 10,),
    "a frame after the end": (frame(total=50), frame(total=50)),
    "half a frame": (HALF[:-10],),
    "an empty answer": (b"",),
    "an object over a connection without a name": (frame(objref=2, total=50, status=4),),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_lying_source_is_refused_and_nothing_is_left(
    make_site: Callable[..., Site], closing: Callable[[Any], Any], lie: tuple[bytes, ...]
) -> None:
    there = make_site()
    liar = closing(Liar(*lie))
    puller = closing(there.puller())
    future = puller.pull(1, liar.address)
    if lie is LIES["a frame after the end"]:  # the object came as it should; what follows is nobody's
        assert future.result(PATIENCE_S)
        return
    error = future.exception(PATIENCE_S)
    assert isinstance(error, (TransferError, ObjectStoreFullError)), error
    assert there.table.coming() == 0
    assert there.table.listed() == []
    there.wait_until_empty()


def test_source_that_leaves_out_promised_checksums_is_refused(
    make_site: Callable[..., Site], closing: Callable[[Any], Any]
) -> None:
    there = make_site()
    liar = closing(Liar(frame(total=50)))
    with pytest.raises(TransferError, match="without the checksums it promised"):
        closing(there.puller(checksum=True)).pull(1, liar.address).result(PATIENCE_S)


# ---- fuzz ----

NUMBERS = st.one_of(st.integers(0, 100), st.sampled_from([(1 << k) - d for k in (22, 31, 32, 63, 64) for d in (1, 2)]))


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=10, max_size=10), st.integers(0, 59), st.integers(0, 255))
def test_frame_is_read_as_written_or_refused(fields: list[int], position: int, flip: int) -> None:
    limits = (1 << 16, 1 << 16, 1 << 32, 1 << 32, 1 << 32, 1 << 64, 1 << 64, 1 << 64, 1 << 64, 1 << 32)
    written = Frame(*(value % limit for value, limit in zip(fields, limits, strict=True)))
    head = bytearray(wire.pack_frame(written))
    try:
        found = wire.read_frame(head)
    except wire.WireError:
        pass
    else:
        assert found == written
        if found.status == wire.OK:
            assert found.offset + found.length <= found.total
            assert found.length <= wire.FRAME_BYTES
    head[position] ^= flip
    if flip:
        with pytest.raises((wire.WireError, wire.BrokenError)):
            wire.read_frame(head)


@settings(deadline=None)
@given(st.binary(min_size=wire.REQUEST.size, max_size=wire.REQUEST.size))
def test_noise_is_no_request(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.read_request(data, 0)


def test_request_is_read_as_written() -> None:
    written = wire.Request((1 << 32) - 1, (1 << 64) - 1, 1 << 63, (1 << 63) + 1)
    assert wire.read_request(wire.pack_request(written), 0) == (wire.REQUEST_MAGIC, written)
    assert source_module.ACTIVE_MAX * 3 < stream.PARTS_MAX
