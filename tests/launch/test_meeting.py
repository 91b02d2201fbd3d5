"""Ranks that meet, and the reasons why they do not."""

import contextlib
import socket
import threading

import pytest

from fastrt.errors import FastrtError
from fastrt.launch import meeting as meetings
from fastrt.launch.meeting import Meeting, RefusedError, attend, ports_of
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.versions import own_versions


@pytest.fixture
def identity():
    return Identity.from_token(new_token())


@contextlib.contextmanager
def open_meeting(identity, size=3, port=0):
    said = []
    made = Meeting(identity, size, port, said.append)
    try:
        yield made, said
    finally:
        made.close()


def come(identity, port, rank=1, name="n1", timeout_s=30.0, said=None, patience_s=60.0, host="127.0.0.1"):
    def addresses():
        return [f"{host}:{port}"]

    say = (said if said is not None else []).append
    return attend(identity, addresses, rank, name, patience_s, timeout_s, say)


def test_rank_gets_the_heads_address_by_which_it_came_and_stays_until_the_end(identity):
    with open_meeting(identity) as (meeting, _):
        meeting.open({"port": 4321, "more": 1})
        attendance = come(identity, meeting.port)
        assert attendance.where == {"port": 4321, "more": 1, "head": "127.0.0.1:4321"}
        assert attendance.host == "127.0.0.1"
        assert [(one.rank, one.name, one.refused) for one in meeting.arrivals().values()] == [(1, "n1", "")]
        ending = threading.Thread(target=attendance.wait)
        ending.start()
        assert ending.is_alive()
    # `close` has waited for the rank to go
    ending.join(60)
    assert not ending.is_alive()
    attendance.close()


def test_rank_that_comes_before_the_node_is_up_waits_for_it(identity):
    with open_meeting(identity) as (meeting, _):
        threading.Timer(0.2, meeting.open, [{"port": 1}]).start()
        attendance = come(identity, meeting.port)
        assert attendance.where["head"] == "127.0.0.1:1"
        attendance.close()


def test_ranks_are_told_why_the_job_cannot_start(identity):
    with open_meeting(identity) as (meeting, _):
        refusing = threading.Timer(0.1, meeting.refuse, ["no room"])
        refusing.start()
        for rank in (1, 2):  # one waits, the other comes late
            with pytest.raises(RefusedError, match="no room"):
                come(identity, meeting.port, rank)
        refusing.join(60)
        assert not refusing.is_alive()


def test_rank_with_another_token_is_not_believed_and_learns_the_reason(identity):
    with open_meeting(identity) as (meeting, _):
        meeting.open({"port": 1})
        with pytest.raises(FastrtError, match=r"n1 cannot reach rank 0 of the job in 0.5 s: .*another cluster's token"):
            come(Identity.from_token(new_token()), meeting.port, timeout_s=0.5)
        assert meeting.arrivals() == {}


def test_rank_with_other_versions_is_refused_with_a_table(identity, monkeypatch):
    theirs = {**own_versions(), "python": "3.9", "numpy": "0.1"}
    with open_meeting(identity) as (meeting, said):
        meeting.open({"port": 1})
        monkeypatch.setattr(meetings, "own_versions", lambda: theirs)
        with pytest.raises(RefusedError, match=r"! Python +3\.\d+ +3\.9\n") as caught:
            come(identity, meeting.port)
        assert f"fastrt       {theirs['fastrt']}" in str(caught.value)
        assert said[0].startswith("n1 is refused: its versions differ")
        assert "versions differ" in meeting.arrivals()[1].refused


def test_another_numpy_is_warned_about_once(identity, monkeypatch):
    with open_meeting(identity) as (meeting, said):
        meeting.open({"port": 1})
        monkeypatch.setattr(meetings, "own_versions", lambda: {**own_versions(), "numpy": "0.1"})
        for rank in (1, 2):
            come(identity, meeting.port, rank).close()
    assert len(said) == 1
    assert "n1 has NumPy 0.1" in said[0]


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_rank_that_is_none_of_the_job_is_refused(identity, rank):
    with open_meeting(identity) as (meeting, _):
        meeting.open({"port": 1})
        with pytest.raises(RefusedError, match="none of the 3 of this job"):
            come(identity, meeting.port, rank)


def test_reason_is_printed_while_rank_0_is_missing(identity, free_port):
    said = []
    with pytest.raises(FastrtError, match=rf"in 0.3 s: 127.0.0.1:{free_port}: Connection refused"):
        come(identity, free_port, timeout_s=0.3, patience_s=0.1, said=said)
    assert f"n1 waits for rank 0 of the job since 0 s: 127.0.0.1:{free_port}: Connection refused" in said[0]


def test_late_rank_0_is_found(identity, free_port):
    found = []
    coming = threading.Thread(target=lambda: found.append(come(identity, free_port)))
    coming.start()
    with open_meeting(identity, port=free_port) as (meeting, _):
        meeting.open({"port": 1})
        coming.join(60)
        assert found
        found[0].close()


def test_program_at_a_port_of_the_job_only_moves_the_meeting_to_the_next_one(identity):
    ports = ports_of(identity)
    assert len(set(ports)) > 1
    assert all(10_000 <= port < 30_000 for port in ports)
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", ports[0]))
        squatter.listen()
        with open_meeting(identity) as (meeting, _):
            assert meeting.port == next(port for port in ports if port != ports[0])
            meeting.open({"port": 1})
            said = []
            attend(identity, lambda: [f"127.0.0.1:{port}" for port in ports], 1, "n1", 60.0, 30.0, said.append).close()


def test_strangers_neither_get_a_word_nor_keep_ranks_out(identity):
    with open_meeting(identity) as (meeting, _), contextlib.ExitStack() as stack:
        meeting.open({"port": 1})
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", meeting.port))) for _ in range(100)]
        come(identity, meeting.port).close()
        silent[0].settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(100) == b""  # the oldest was ended for the newer ones
        with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
            stranger.sendall(b'{"rank": 1, "name": "n1", "versions": {}}\n')
            with contextlib.suppress(ConnectionResetError):
                answer = stranger.recv(1000)
                assert not answer or answer[0] == 0x15, answer  # a TLS alert, and nothing else
