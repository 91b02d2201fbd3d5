"""The connection between a process and its node daemon."""

import contextlib
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastrt.errors import AttachError
from fastrt.store.join import Link, answers, inquire, join, listen
from fastrt.store.messages import Bye, GroupList, GroupRow, GroupStats, Join, Joined, ListGroups, Log, Refused, Spill


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Link(ours), Link(theirs)
    ours.close()
    theirs.close()


def test_message_arrives_whole_and_in_order(pair):
    one, other = pair
    one.send(Log("x\ny" * 1000, True, False))
    one.send(Spill(2**60))
    assert other.receive(5) == Log("x\ny" * 1000, True, False)
    assert other.waiting()
    assert other.receive(5) == Spill(2**60)
    assert not other.waiting()
    assert other.receive(0) is None


def test_answer_of_a_node_with_thousands_of_groups_is_read(tmp_path):
    stats = GroupStats("FINISHED", 1, 0.5, 0.25, 0.0)
    rows = [GroupRow(f"group {k}", "PACK", "CREATED", {"0": {"CPU": 1}}, {"0": "a" * 32}, stats) for k in range(20_000)]
    with listen(str(tmp_path / "node.sock")) as listening, ThreadPoolExecutor(1) as pool:

        def serve():
            sock, _ = listening.accept()
            link = Link(sock)
            asked = link.receive(5)
            assert link.send(GroupList(rows))
            link.close()
            return asked

        asked = pool.submit(serve)
        assert inquire(str(tmp_path / "node.sock"), ListGroups(), GroupList).groups == rows
        assert asked.result() == ListGroups()


def test_end_of_the_other_side_is_noticed(pair):
    one, other = pair
    one.close()
    with pytest.raises(EOFError):
        other.receive(5)
    assert not other.post(Refused("x" * 100_000)) or not other.post(Bye())
    assert not other.send(Bye())


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
        assert one.post(Log(f"{k} " + "x" * 50_000, False, False))
    assert one.backlog > 0
    for k in range(40):
        message = other.receive(5)
        one.flush()
        assert message.text.startswith(f"{k} ")
    assert one.backlog == 0


def test_flush_gives_up_after_its_time(pair):
    one, _ = pair
    while not one.backlog:
        one.post(Refused("x" * 100_000))
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


def test_process_that_cannot_map_the_segment_hangs_up(tmp_path):
    """A process of another PID namespace cannot map the segment. Its connection closes, so its slot is free again."""
    path = str(tmp_path / "socket")
    with listen(path) as listener, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, path, "driver", "test")
        daemon = Link(listener.accept()[0])
        with contextlib.closing(daemon):
            assert isinstance(daemon.receive(5), Join)
            daemon.send(Joined("/fastrt-" + "0" * 32, 1, 1))
            with pytest.raises(AttachError, match="its session has ended"):
                joining.result(60)
            with pytest.raises(EOFError):
                assert daemon.receive(5) is not None
