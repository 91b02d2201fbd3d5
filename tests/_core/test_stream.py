"""Scatter and gather over real TCP connections, and the checksum against a slow one of the test's own."""

import os
import platform
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt._core.transfer import stream

PATIENCE_S = 20.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def slow_crc(data: bytes, value: int) -> int:
    value ^= 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize("software", [False, True])
@pytest.mark.parametrize(
    ("data", "value"),  # RFC 3720, B.4
    [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (b"123456789", 0xE3069283)],
)
def test_crc32c_known_values(data: bytes, value: int, software: bool) -> None:
    assert stream.crc32c(data, 0, software) == value


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, (1 << 32) - 1))
def test_crc32c_of_any_bytes_after_any_others(data: bytes, value: int) -> None:
    assert stream.crc32c(data, value) == stream.crc32c(data, value, True) == slow_crc(data, value)


@pytest.mark.parametrize("nbytes", [12_287, 12_288, 12_289, 24_576, 100_001])
def test_crc32c_in_blocks_is_that_of_the_whole(nbytes: int) -> None:
    data = bytes(k * k % 251 for k in range(nbytes))
    assert stream.crc32c(data, 7) == stream.crc32c(data, 7, True)
    for cut in (0, 1, 4095, 12_288 % nbytes, nbytes):
        assert stream.crc32c(data[cut:], stream.crc32c(data[:cut], 7)) == stream.crc32c(data, 7)
    assert stream.crc32c(memoryview(data)[1:], 7) != stream.crc32c(data, 7)


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=12), st.lists(st.integers(0, 70_000), max_size=12))
def test_parts_of_any_sizes_arrive_in_order(out: list[int], into: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    total = sum(out)
    into = [*into, max(0, total - sum(into))]
    data = bytes(k % 253 for k in range(total))
    parts, at = [], 0
    for n in out:
        parts.append(memoryview(data)[at : at + n])
        at += n
    room = [bytearray(n) for n in into]
    with ours, theirs:
        sender = threading.Thread(target=stream.send_parts, args=(ours.fileno(), parts, PATIENCE_S))
        sender.start()
        got = stream.receive_parts(theirs.fileno(), room, total, PATIENCE_S)
        sender.join()
    assert got == total
    assert b"".join(room)[:total] == data


def test_receive_takes_what_is_there_but_waits_only_for_the_least(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(b"headbody")
    head, body, more = bytearray(4), bytearray(6), bytearray(9)
    theirs.recv(8, socket.MSG_PEEK | socket.MSG_WAITALL)
    assert stream.receive_parts(theirs.fileno(), [head, body, more], 4, PATIENCE_S) == 8
    assert (head, body[:4]) == (b"head", b"body")
    assert stream.receive_parts(theirs.fileno(), [head], 0, PATIENCE_S) == 0
    with pytest.raises(ValueError, match="5 bytes wanted, the parts take 4"):
        stream.receive_parts(theirs.fileno(), [head], 5, PATIENCE_S)


def test_other_end_closes_midway_is_an_eof_that_says_where(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(b"abc")
    ours.close()
    with pytest.raises(EOFError, match="after 3 of 10 bytes"):
        stream.receive_parts(theirs.fileno(), [bytearray(10)], 10, PATIENCE_S)


def test_reset_connection_is_an_os_error_on_either_side(pair: Pair) -> None:
    ours, theirs = pair
    reset(ours)
    with pytest.raises(ConnectionResetError):
        stream.receive_parts(theirs.fileno(), [bytearray(10)], 10, PATIENCE_S)
    with pytest.raises(BrokenPipeError):
        stream.send_parts(theirs.fileno(), [b"x" * 10], PATIENCE_S)


def test_reader_that_stops_reading_times_out_the_sender(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match=r"moved no byte for 0.1 s, \d+ of 67108864 bytes sent"):
        stream.send_parts(pair[0].fileno(), [bytes(1 << 26)], 0.1)


def test_sender_that_stops_sending_times_out_the_reader(pair: Pair) -> None:
    pair[0].sendall(b"abc")
    with pytest.raises(TimeoutError, match=r"moved no byte for 0\.1 s, 3 of 4 bytes received"):
        stream.receive_parts(pair[1].fileno(), [bytearray(4)], 4, 0.1)


def test_shutdown_by_another_thread_ends_a_wait(pair: Pair, wait_until: Callable[..., None]) -> None:
    ended: list[BaseException] = []

    def receive() -> None:
        try:
            stream.receive_parts(pair[1].fileno(), [bytearray(4)], 4, PATIENCE_S)
        except EOFError as exc:
            ended.append(exc)

    thread = threading.Thread(target=receive)
    thread.start()
    pair[1].shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)
    assert len(ended) == 1


def test_interrupt_ends_a_wait(pair: Pair, alarm: Callable[..., None]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alarm(0.05, interrupt, lambda: stream.receive_parts(pair[1].fileno(), [bytearray(4)], 4, PATIENCE_S))
    with pytest.raises(KeyboardInterrupt):
        alarm(0.05, interrupt, lambda: stream.send_parts(pair[1].fileno(), [bytes(1 << 26)], PATIENCE_S))


def test_signal_that_raises_nothing_does_not_end_a_wait(pair: Pair, alarm: Callable[..., None]) -> None:
    alarm(0.05, lambda: pair[0].sendall(b"late"))
    room = bytearray(4)
    assert stream.receive_parts(pair[1].fileno(), [room], 4, PATIENCE_S) == 4
    assert room == b"late"
    assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL


@pytest.mark.parametrize("part", [b"read-only", memoryview(bytearray(8))[::2], 7])
def test_receive_refuses_what_cannot_be_written(pair: Pair, part: Any) -> None:
    held = bytearray(4)
    with pytest.raises((BufferError, TypeError, ValueError)):
        stream.receive_parts(pair[1].fileno(), [held, part], 4, PATIENCE_S)
    held += b"resizable again: nothing holds it"


def test_too_many_parts_are_refused(pair: Pair) -> None:
    most = [b"x"] * stream.PARTS_MAX
    assert stream.send_parts(pair[0].fileno(), most, PATIENCE_S) == stream.PARTS_MAX
    with pytest.raises(ValueError, match="65 parts in one call; at most 64"):
        stream.send_parts(pair[0].fileno(), [*most, b"x"], PATIENCE_S)


def test_closed_descriptor_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        stream.send_parts(-1, [b"x"], PATIENCE_S)


@pytest.mark.skipif("FASTRT_SANITIZE" in os.environ, reason="a sanitizer has an allocator of its own")
def test_freed_memory_is_kept_where_the_allocator_is_known() -> None:
    assert stream.keep_freed_memory(1 << 27) == (platform.libc_ver()[0] == "glibc")
