"""Calls between two processes of one user on this machine, over a Unix socket."""

import contextlib
import os
import queue
import resource
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.net import local_calls
from fastrt.net.local_calls import BODY_BYTES_MAX, LocalCall, LocalCaller, LocalServer

WAIT_S = 20.0
METHODS = ["/echo", "/open", "/never"]


class Served:
    """A server that echoes, opens streams, and never answers a third method."""

    def __init__(self, path: str) -> None:
        self.streams: queue.SimpleQueue[LocalCall] = queue.SimpleQueue()
        self.closed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.server = LocalServer(path, [self.echo, self.open, lambda call, body: None])

    def echo(self, call: LocalCall, body: bytes) -> None:
        call.finish(3 if body == b"bad" else 0, "it is bad", body)

    def open(self, call: LocalCall, body: bytes) -> None:
        call.on_closed = lambda: self.closed.put(body)
        call.send(b"opened " + body)
        self.streams.put(call)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s.sock")


@pytest.fixture
def served(path: str) -> Iterator[Served]:
    made = Served(path)
    yield made
    made.server.close()


@pytest.fixture
def caller(path: str) -> Iterator[LocalCaller]:
    with contextlib.closing(LocalCaller(path, METHODS)) as made:
        yield made


def ask(caller: LocalCaller, path: str, body: bytes, timeout_s: float = WAIT_S) -> tuple[int, str, bytes]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    caller.call(path, body, timeout_s, lambda *answer: answers.put(answer))
    return answers.get(timeout=WAIT_S)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more descriptors, 0 or 1."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_calls_are_answered_by_bodies_or_errors(served: Served, caller: LocalCaller) -> None:
    assert ask(caller, "/echo", b"x") == (0, "", b"x")
    assert ask(caller, "/echo", b"") == (0, "", b"")
    assert ask(caller, "/echo", b"bad") == (3, "it is bad", b"")
    assert ask(caller, "/echo", b"y" * (8 << 20)) == (0, "", b"y" * (8 << 20))


def test_socket_is_this_users_alone(served: Served, path: str) -> None:
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600


def test_stream_lasts_until_an_error_or_the_end_of_either_process(served: Served, path: str) -> None:
    with contextlib.closing(LocalCaller(path, METHODS)) as caller:
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for body in (b"a", b"b"):
            caller.stream("/open", body, messages.put, lambda *end: messages.put(end))
            assert messages.get(timeout=WAIT_S) == b"opened " + body
        first, second = served.streams.get(timeout=WAIT_S), served.streams.get(timeout=WAIT_S)
        for k in range(3):
            second.send(b"%d" % k)
        assert [messages.get(timeout=WAIT_S) for _ in range(3)] == [b"0", b"1", b"2"]
        first.finish(5, "no more")
        assert messages.get(timeout=WAIT_S) == (5, "no more")
        assert first.connection is second.connection
    assert messages.get(timeout=WAIT_S) == (1, "this connection is closed")
    assert {served.closed.get(timeout=WAIT_S) for _ in range(2)} == {b"a", b"b"}
    assert second.connection.has_ended
    second.send(b"has no effect")


def test_call_without_an_answer_ends_at_its_deadline(
    served: Served, caller: LocalCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_calls, "_TICK_S", 0.05)
    began = time.monotonic()
    assert ask(caller, "/never", b"", 0.3) == (4, "Deadline Exceeded", b"")
    assert time.monotonic() - began > 0.3
    assert ask(caller, "/echo", b"x") == (0, "", b"x")


def test_server_that_ends_fails_what_is_open_and_the_next_one_is_found(path: str, caller: LocalCaller) -> None:
    assert ask(caller, "/echo", b"x")[0] == 14
    assert not caller.is_ready()
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(3):
        served = Served(path)
        assert ask(caller, "/echo", b"x") == (0, "", b"x")
        caller.call("/never", b"", WAIT_S, lambda *end: ends.put(end))
        caller.stream("/open", b"s", lambda body: None, lambda *end: ends.put(end))
        served.streams.get(timeout=WAIT_S)
        served.server.close()
        assert sorted(ends.get(timeout=WAIT_S)[:2] for _ in range(2)) == [(14, "the connection ended")] * 2
    code, why, _ = ask(caller, "/echo", b"x")
    assert code == 14
    assert path in why or why == "the connection ended"
    assert not caller.is_ready()


def test_closed_caller_makes_no_calls(served: Served, path: str) -> None:
    caller = LocalCaller(path, METHODS)
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
    caller.call("/never", b"", WAIT_S, lambda *end: ends.put(end))
    caller.close()
    assert ends.get(timeout=WAIT_S)[0] == 1
    assert ask(caller, "/echo", b"x")[:2] == (14, "this connection is closed")


def test_both_ends_may_send_much_before_either_reads(path: str) -> None:
    """The thread that reads never blocks in a write: the other end may not read until this one has read."""
    count, size = 60, 1 << 20
    go = threading.Event()

    def many(call: LocalCall, body: bytes) -> None:
        go.wait(WAIT_S)
        call.finish(0, "", body)

    server = LocalServer(path, [many])
    with contextlib.closing(LocalCaller(path, METHODS)) as caller:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def answered(code: int, message: str, body: bytes) -> None:
            answers.put((code, len(body)))
            if body[:1] == b"f":
                caller.call("/echo", b"s" + bytes(size), WAIT_S, answered)  # on the thread that reads

        for _ in range(count):
            caller.call("/echo", b"f" + bytes(size), WAIT_S, answered)
        go.set()
        assert [answers.get(timeout=WAIT_S) for _ in range(2 * count)] == [(0, size + 1)] * (2 * count)
    server.close()


def test_peer_that_does_not_read_is_given_up_once_too_much_waits_for_it(served: Served, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        peer.sendall(struct.pack("<IIQ", 0, 1, 1))  # it opens a stream
        stream = served.streams.get(timeout=WAIT_S)
        for _ in range(9):
            stream.send(bytes(8 << 20))
        assert stream.connection.has_ended
        assert served.closed.get(timeout=WAIT_S) == b""


@pytest.mark.parametrize(
    "frame",
    [struct.pack("<IIQ", BODY_BYTES_MAX + 1, 0, 1), struct.pack("<IIQ", 10, 0, 1) + b"short"],
    ids=["too long", "cut off"],
)
def test_connection_that_breaks_the_rules_ends_alone(
    served: Served, caller: LocalCaller, path: str, frame: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(path)
        stranger.sendall(frame)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert ask(caller, "/echo", b"x") == (0, "", b"x")


def test_unknown_method_is_refused(served: Served, path: str) -> None:
    with contextlib.closing(LocalCaller(path, [*METHODS, "/more"])) as caller:
        assert ask(caller, "/more", b"") == (12, "there is no method 3 here", b"")


@pytest.mark.parametrize("left", [0, 1])
def test_call_without_descriptors_fails_and_the_next_one_is_answered(served: Served, path: str, left: int) -> None:
    with contextlib.closing(LocalCaller(path, METHODS)) as caller:
        with descriptors_left(left):
            assert ask(caller, "/echo", b"x") == (14, f"{path}: Too many open files", b"")
        assert ask(caller, "/echo", b"x") == (0, "", b"x")


def test_server_without_descriptors_serves_later_connections(served: Served, path: str, caller: LocalCaller) -> None:
    refused = socket.socket(socket.AF_UNIX)
    with refused, descriptors_left(0):  # the server is in accept(2), which has one already, and needs another
        refused.connect(path)
        select.select([refused], [], [], 1.0)
    assert ask(caller, "/echo", b"x") == (0, "", b"x")
