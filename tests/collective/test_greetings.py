"""Strangers at a rank's port: one that is silent, slow, loud or without the secret keeps no rank waiting."""

import contextlib
import errno
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fastrt.collective import greetings as greetings_module
from fastrt.collective.access import Access
from fastrt.collective.greetings import Greetings, NotAdmitted, dial
from fastrt.net.grpc import proof
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.visitors import BACKLOG

PURPOSE = "fastrt collective test"
Connect = Callable[[], socket.socket]


class Encrypted(Access):
    """TLS on loopback too, as between machines."""

    def uses_tls(self, host: str) -> bool:
        return True


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.from_token(new_token())


@pytest.fixture(params=[Access, Encrypted], ids=["clear", "TLS"])
def access(request: pytest.FixtureRequest, identity: Identity) -> Access:
    made: Access = request.param(identity)
    return made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as made:
        yield made


@pytest.fixture
def greetings(listener: socket.socket, access: Access) -> Iterator[Greetings]:
    made = Greetings(listener, access, PURPOSE)
    yield made
    made.close()


@pytest.fixture
def connect(listener: socket.socket) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(listener.getsockname(), 5))


@pytest.fixture
def call(listener: socket.socket) -> Iterator[Callable[..., Future[Any]]]:
    """Dial in a thread: both ends take part in the proof."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda access, purpose=PURPOSE, **greeting: pool.submit(
            dial, listener.getsockname(), access, purpose, greeting, 10.0
        )


def admitted(greetings: Greetings, calling: Future[Any]) -> dict[str, Any]:
    """The greeting of the next rank that is let in; its connection carries bytes."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for link, greeting in greetings.wait(0.05):
            with contextlib.closing(link), contextlib.closing(calling.result(60)) as theirs:
                theirs.send([b"and more"], 5.0)
                came = bytearray(8)
                assert link.receive([came], 8, 5.0) == 8
                assert came == b"and more"
            return greeting
    raise AssertionError("no rank was let in")


def refused(greetings: Greetings, calling: Future[Any]) -> str:
    while not calling.done():
        assert greetings.wait(0.02) == []
    with pytest.raises(NotAdmitted):
        calling.result()
    until = time.monotonic() + 10
    while not greetings.refused and time.monotonic() < until:  # the caller can end before this side has read why
        assert greetings.wait(0.02) == []
    return greetings.refused


def test_rank_with_the_secret_is_let_in(greetings, call, access):
    assert admitted(greetings, call(access, rank=3)) == {"rank": 3, "purpose": PURPOSE}
    assert greetings._callers == {}


def test_rank_with_another_secret_is_refused(greetings, call, access):
    stranger = type(access)(Identity.from_token(new_token()))
    assert "127.0.0.1: " in refused(greetings, call(stranger, rank=3))


def test_rank_of_another_group_is_refused(greetings, call, access):
    refused(greetings, call(access, "another purpose", rank=3))


@pytest.mark.parametrize("greeting", [{"deep": eval("[" * 40 + "]" * 40)}, {"long": "x" * 70_000}])  # noqa: S307
def test_greeting_beyond_the_bounds_is_refused(greetings, call, access, greeting):
    refused(greetings, call(access, **greeting))


def test_many_silent_strangers_do_not_delay_a_rank(greetings, connect, call, access):
    strangers = [connect() for _ in range(greetings_module._PLACES + 20)]
    for stranger in strangers[::2]:
        stranger.sendall(b"half")
    begun = time.monotonic()
    admitted(greetings, call(access))
    assert time.monotonic() - begun < 20.0  # one after the other they would take minutes
    assert len(greetings._callers) <= greetings_module._PLACES
    assert strangers[0].recv(1) == b""  # the oldest made room


def test_stranger_that_drips_is_hung_up_on_in_time(greetings, connect, monkeypatch):
    monkeypatch.setattr(greetings_module, "GREETING_S", 0.5)
    mine, pause, begun = connect(), threading.Event(), time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in b"fastrtP1" * 100:
            mine.sendall(bytes([byte]))
            assert greetings.wait(0.01) == []
            pause.wait(0.05)
    assert time.monotonic() - begun < 20  # of 40
    assert greetings._callers == {}


NOISE = {
    "4,000 brackets": b"[" * 4000 + b"\n",
    "digits": b"1" * 1_000_000,
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": b"\0" * 100_000,
    "a TLS record": b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000,
    "the begin of a proof": b"fastrtP1" + b"\xff" * 100_000,
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_is_hung_up_on_and_a_rank_is_let_in_beside_it(greetings, connect, call, access, noise):
    mine = connect()
    mine.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        mine.send(noise)
    admitted(greetings, call(access))


def test_strangers_who_hang_up_are_forgotten(greetings, connect):
    mine = connect()
    mine.sendall(b"f")
    assert greetings.wait(0.05) == []
    mine.close()
    until = time.monotonic() + 5
    while greetings._callers and time.monotonic() < until:
        assert greetings.wait(0.02) == []
    assert greetings._callers == {}


def test_recorded_greeting_is_refused_when_it_is_sent_again(listener, identity):
    access = Access(identity)
    greetings = Greetings(listener, access, PURPOSE)
    told: list[bytes] = []

    class Recorder(socket.socket):
        def sendall(self, data: Any, flags: int = 0) -> None:
            told.append(bytes(data))
            super().sendall(data)

    with ThreadPoolExecutor(1) as pool, Recorder() as rank:
        rank.connect(listener.getsockname())
        calling = pool.submit(proof.prove_as_client, rank, access.key, PURPOSE)
        while not calling.done():
            assert greetings.wait(0.02) == []
        calling.result()
        with socket.create_connection(listener.getsockname(), 5) as again:
            again.sendall(b"".join(told) + b"\x02\0\0\0{}")
            while len(greetings._callers) < 2:
                greetings.wait(0.02)
            while len(greetings._callers) == 2:
                assert greetings.wait(0.02) == []
    assert "client" in greetings.refused
    greetings.close()


def test_process_without_descriptors_goes_on_and_lets_ranks_in_later(greetings, connect, call, access):
    waiting = [connect() for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with contextlib.suppress(OSError):
            taken.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(256))
        for _ in range(10):
            assert greetings.wait(0.01) == []
        with pytest.raises(OSError) as caught:
            os.dup(0)
        assert caught.value.errno == errno.EMFILE  # the reserve is a reserve again
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [one.recv(1) for one in waiting] == [b""] * 3  # they were hung up on, and kept nothing busy
    admitted(greetings, call(access))


def test_thread_that_waits_for_callers_ends_with_the_listener(greetings, listener):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(greetings.wait, None)
        poll = select.poll()
        assert poll.poll(50) == []
        assert not waiting.done()
        listener.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EOFError):
            waiting.result(60)


def test_rank_that_greets_while_the_listener_ends_is_hung_up_on(listener, identity):
    access = Access(identity)
    with contextlib.ExitStack() as stack:
        greetings = stack.enter_context(contextlib.closing(Greetings(listener, access, PURPOSE)))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        rank = stack.enter_context(socket.create_connection(listener.getsockname(), 5))
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the greeting is there at once
        calling = pool.submit(proof.prove_as_client, rank, access.key, PURPOSE)
        while not calling.done():
            assert greetings.wait(0.02) == []
        calling.result()
        rank.sendall(greetings_module._text({"purpose": PURPOSE}))
        listener.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EOFError):
            greetings.wait(5.0)
        assert rank.recv(1) == b"\x01"  # it was let in
        assert rank.recv(1) == b""
