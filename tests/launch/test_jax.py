"""`fastrt run --jax`: the coordinator on rank 0, reached from every rank by a door on loopback."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from fastrt.launch.jax import Door, forward
from fastrt.launch.meeting import Meeting, RefusedError, enter
from fastrt.net.grpc.identity import Identity, new_token
from support.jax_members import MEMBERS


def test_tasks_of_each_rank_meet_at_the_coordinator(command, program):
    path = program(MEMBERS)
    words = ("--jax", "--size", "2", "--head", "127.0.0.1", "--job", "jax", "--num-workers", "1")
    first = command.start("--rank", "0", *words, path)
    other = command.start("--rank", "1", *words, path)
    out, err = first.communicate(timeout=50)
    assert (first.returncode, out) == (0, "[(0, '2', 2), (1, '2', 2)] 0 127.0.0.1:0\n"), err
    assert other.communicate(timeout=60) == ("", "")
    assert other.returncode == 0


@pytest.mark.long  # two ranks meet in each run
def test_single_process_has_a_coordinator_too(command, program):
    code, out, err = command.run("--jax", "--num-workers", "1", program(MEMBERS))
    assert (code, out) == (0, "[(0, '1', 1)] 0 127.0.0.1:0\n"), err


@pytest.fixture
def echo():
    """A server on loopback that sends back what it gets; a function that connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = []

        def serve(sock):
            with sock:
                while data := sock.recv(1 << 16):
                    sock.sendall(data)

        def connect():
            ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
            threads.append(threading.Thread(target=serve, args=[theirs]))
            threads[-1].start()
            return ours

        yield connect
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def door(echo):
    made = Door(2, 1, echo)
    yield made
    made.close()


def said_back(sock, data):
    with sock:
        sender = threading.Thread(target=sock.sendall, args=[data])
        sender.start()
        back = b""
        while len(back) < len(data) and (piece := sock.recv(1 << 20)):
            back += piece
        sender.join()
        return back == data


def test_door_forwards_more_than_it_holds_both_ways(door):
    assert said_back(socket.create_connection(("127.0.0.1", door.port)), os.urandom(8 << 20))


def test_connection_whose_coordinator_is_not_there_yet_ends(wait_until):
    def missing():
        raise ConnectionRefusedError("later")

    door = Door(1, 0, missing)
    try:
        with socket.create_connection(("127.0.0.1", door.port)) as sock:
            assert sock.recv(1) == b""
    finally:
        door.close()


CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket() as sock:
    sock.connect(("127.0.0.1", int(sys.argv[1])))
    try:
        sock.sendall(b"x")
        print(sock.recv(1))
    except OSError:
        print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_process_of_another_user_is_refused_at_the_door(door):
    for user, answer in ((0, "b'x'\n"), (65534, "b''\n")):
        words = [sys.executable, "-I", "-S", "-c", CONNECT, str(door.port), str(user)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert ended.stdout == answer, ended.stderr


def test_meeting_leads_to_its_doors_only(echo):
    identity = Identity.from_token(new_token())
    meeting = Meeting(identity, 2, 0, lambda text: None)
    try:
        meeting.open({"port": 1}, {"jax": echo})
        address = f"127.0.0.1:{meeting.port}"
        with pytest.raises(RefusedError, match="rank 0 has no 'else' for this job"):
            enter(identity, address, "else", 1, "n1")
        here, there = socket.socketpair()
        tunnel = enter(identity, address, "jax", 1, "n1")
        thread = threading.Thread(target=forward, args=[there, tunnel])
        thread.start()
        assert said_back(here, os.urandom(4 << 20))
        thread.join(60)
        tunnel.close()
        there.close()
    finally:
        meeting.close()
