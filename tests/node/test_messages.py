"""The daemon rejects a malformed message with the reason, and continues to serve."""

import json
import socket
from contextlib import contextmanager

import pytest

import fastrt
from fastrt.store.join import Link
from fastrt.store.messages import MESSAGES, ListNodes, NodeList, Refused


@contextmanager
def connected(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(path)
    yield sock, Link(sock)
    sock.close()


def test_malformed_message_of_each_type_is_refused_and_the_daemon_goes_on(rt):
    # Of those in other modules, each process knows the ones that it has loaded.
    for name in [name for name, kind in MESSAGES.items() if kind.__module__ == Refused.__module__]:
        with connected(rt.socket_path) as (sock, link):
            sock.sendall(json.dumps({"op": name, "strange": 1}).encode() + b"\n")
            answer = link.receive(5)
            assert isinstance(answer, Refused), name
            assert answer.error.startswith(f"message {name!r} has an unknown field 'strange'")
            with pytest.raises(EOFError):
                link.receive(5)
    assert fastrt.get(fastrt.remote(lambda: 3).remote(), timeout=60) == 3


def test_message_that_is_not_for_the_daemon_is_refused(rt):
    with connected(rt.socket_path) as (_, link):
        link.send(NodeList(("a", "b", {}, {}, {}), [], []))
        assert link.receive(5) == Refused("the daemon does not take message 'node_list'")
    with connected(rt.socket_path) as (_, link):
        link.send(ListNodes())
        assert isinstance(link.receive(5), NodeList)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\n", b"[]\n", b'{"op": 5}\n', b'{"op": "join", "kind": null}\n',
        b'{"op": "join", "kind": "king", "name": "", "logs": "", "versions": {}}\n', b"x" * 3_000_000,
    ],
)  # fmt: skip
def test_daemon_survives_bytes_that_are_no_message(rt, raw):
    with connected(rt.socket_path) as (sock, _):
        try:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                continue
        except OSError:
            pass  # it hung up, as it should
    with connected(rt.socket_path) as (_, link):
        link.send(ListNodes())
        assert isinstance(link.receive(5), NodeList)


def test_restore_of_an_entry_that_does_not_exist_is_ignored(rt):
    with connected(rt.socket_path) as (sock, link):
        sock.sendall(b'{"op": "restore", "entry": 4294967295, "objref": 18446744073709551615}\n')
        sock.sendall(b'{"op": "search_ended", "ticket": 4294967295, "names": ["x"], "objref": 1, "entry": 1}\n')
        sock.sendall(b'{"op": "holds", "node": "x", "objects": [[1, 0]]}\n')
        link.send(ListNodes())
        assert isinstance(link.receive(5), NodeList)
