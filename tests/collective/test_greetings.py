"""Strangers at a rank's port: whoever says nothing, too little or too much keeps nobody waiting."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fastrt.collective import greetings as greetings_module
from fastrt.collective.greetings import GREETING_S, Greetings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as made:
        yield made


@pytest.fixture
def greetings(listener: socket.socket) -> Iterator[Greetings]:
    made = Greetings(listener)
    yield made
    made.close()


@pytest.fixture
def connect(listener: socket.socket) -> Iterator[object]:
    with contextlib.ExitStack() as stack:

        def one() -> socket.socket:
            return stack.enter_context(socket.create_connection(listener.getsockname(), 5))

        yield one


def first(greetings: Greetings, patience_s: float = 5.0) -> tuple[socket.socket, bytes]:
    """The next that has said who it is."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for sock, line in greetings.wait(0.05):
            return sock, line
    raise AssertionError("nobody came")


def test_line_is_read_and_what_follows_is_left(greetings, connect):
    connect().sendall(b"hello\nand more")
    sock, line = first(greetings)
    with sock:
        assert line == b"hello"
        assert sock.recv(8, socket.MSG_WAITALL) == b"and more"


def test_line_in_pieces_is_put_together(greetings, connect):
    mine = connect()
    for piece in (b"he", b"ll"):
        mine.sendall(piece)
        assert greetings.wait(0.02) == []
    mine.sendall(b"o\n")
    sock, line = first(greetings)
    sock.close()
    assert line == b"hello"


def test_many_silent_strangers_do_not_delay_one_who_speaks(greetings, connect):
    strangers = [connect() for _ in range(greetings_module._PLACES + 20)]
    for stranger in strangers[::2]:
        stranger.sendall(b"half a line")
    connect().sendall(b"me\n")
    begun = time.monotonic()
    sock, line = first(greetings)
    sock.close()
    assert line == b"me"
    assert time.monotonic() - begun < GREETING_S  # one after the other they would take a minute
    assert len(greetings._begun) <= greetings_module._PLACES
    assert strangers[0].recv(1) == b""  # the oldest made room


def test_stranger_that_drips_is_hung_up_on_in_time(greetings, connect):
    mine, pause, begun = connect(), threading.Event(), time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - begun < 10:
            mine.sendall(b"x")
            assert greetings.wait(0.01) == []
            pause.wait(0.05)
    assert GREETING_S <= time.monotonic() - begun < 5


def test_line_without_end_is_hung_up_on(greetings, connect):
    mine = connect()
    with contextlib.suppress(ConnectionError):
        mine.sendall(b"x" * 20_000)
    for _ in range(20):
        assert greetings.wait(0.01) == []
    with contextlib.suppress(ConnectionError):
        assert mine.recv(1) == b""
    assert greetings._begun == {}


def test_strangers_who_hang_up_are_forgotten(greetings, connect):
    mine = connect()
    mine.sendall(b"half")
    assert greetings.wait(0.05) == []
    mine.close()
    for _ in range(5):
        assert greetings.wait(0.02) == []
    assert greetings._begun == {}
