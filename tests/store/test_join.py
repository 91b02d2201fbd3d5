"""The connection between a process and its node daemon."""

import os
import socket
import stat

import pytest

import fastrt
from fastrt.errors import AttachError
from fastrt.store.join import Link, answers, join, listen


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Link(ours), Link(theirs)
    ours.close()
    theirs.close()


def test_message_arrives_whole_and_in_order(pair):
    one, other = pair
    one.send(op="a", text="x\ny" * 1000)
    one.send(op="b", n=2**60)
    assert other.receive(5) == {"op": "a", "text": "x\ny" * 1000}
    assert other.waiting()
    assert other.receive(5) == {"op": "b", "n": 2**60}
    assert not other.waiting()
    assert other.receive(0) is None


def test_end_of_the_other_side_is_noticed(pair):
    one, other = pair
    one.close()
    with pytest.raises(EOFError):
        other.receive(5)
    assert not other.post(op="x" * 100_000) or not other.post(op="x")
    assert not other.send(op="x")


@pytest.mark.parametrize("raw", [b"garbage\n", b"[1]\n", b"\xff\xfe\n", b'"text"\n', b"{" * 100_000 + b"\n"])
def test_what_is_no_message_ends_the_connection(pair, raw):
    one, other = pair
    one._sock.sendall(raw)
    with pytest.raises(EOFError):
        other.receive(5)


def test_message_without_end_is_not_read_for_ever(pair):
    one, other = pair
    one._sock.setblocking(False)

    def feed_for_ever():
        while True:
            one._sock.send(b"x" * 65536)
            assert other.receive(0) is None

    with pytest.raises(EOFError):
        feed_for_ever()


def test_post_never_waits_and_flush_sends_the_rest(pair):
    one, other = pair
    for k in range(40):
        assert one.post(k=k, text="x" * 50_000)
    assert one.backlog > 0
    for k in range(40):
        message = other.receive(5)
        one.flush()
        assert message["k"] == k
    assert one.backlog == 0


def test_flush_gives_up_after_its_time(pair):
    one, _ = pair
    while not one.backlog:
        one.post(text="x" * 100_000)
    assert one.flush(0.05)
    assert one.backlog


def test_listen_is_for_this_user_only(tmp_path):
    path = str(tmp_path / "s")
    assert not answers(path)
    with listen(path):
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
        assert answers(path)
    assert not answers(path)


def test_join_where_nobody_listens_says_what_to_do(tmp_path):
    with pytest.raises(AttachError, match=r"no node daemon answers .*fastrt\.init"):
        join(str(tmp_path / "none"), "driver", "test")


def test_join_as_what_does_not_exist_or_twice_is_refused(rt):
    for kind in ("king", ""):
        with pytest.raises(AttachError, match="cannot join"):
            join(rt.socket_path, kind, "test")
    with pytest.raises(AttachError, match="twice"):
        join(rt.socket_path, "driver", "test")


def test_daemon_survives_whatever_is_sent_to_it(rt):
    for raw in (
        b"\xff\n",
        b"[]\n",
        b'{"op": 5}\n',
        b'{"op": "join", "kind": null}\n',
        b"x" * 3_000_000,
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(rt.socket_path)
            try:
                sock.sendall(raw)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    continue
            except OSError:
                continue  # it hung up, as it should
    assert fastrt.get(fastrt.remote(lambda: 3).remote(), timeout=20) == 3
