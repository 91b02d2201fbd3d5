"""Fuzz targets: greetings, proofs, tokens and records of the links between processes, and a node's words."""

import contextlib
import socket
from functools import cache
from typing import Any

PACKAGES = [
    "fastrt.foreign_text",
    "fastrt.ps.wire",
    "fastrt.net.grpc",
    "fastrt.cluster.membership",
    "fastrt.store.join",
    "fastrt.store.messages",
    "fastrt.transfer.wire",
]
KEY, OTHER_KEY = bytes(32), bytes([1]) * 32
TOKEN = "0" * 64
SAID_BYTES_MAX = 1 << 16  # a socket pair takes it at once


def said(data: bytes) -> socket.socket:
    """The end of a connection whose other end said this and hung up."""
    here, there = socket.socketpair()
    with there:
        there.sendall(data[:SAID_BYTES_MAX])
    return here


def ps_greeting(data: bytes) -> None:
    """The first message to a parameter server."""
    from fastrt.ps.wire import BrokenWireError, Wire

    wire = Wire(said(data))
    with contextlib.suppress(BrokenWireError, TimeoutError):
        meta, _ = wire.greeting(0.01)
        assert isinstance(meta, dict)
    wire.close()


def native_frames(data: bytes) -> None:
    """The opening, a request, a frame and a bundle's list of the native stream, with checksums that are right."""
    from fastrt._core.transfer.stream import crc32c
    from fastrt.transfer import wire

    def message(size: int) -> bytearray:
        head = bytearray(data[: size - 4].ljust(size - 4, b"\0"))
        return head + crc32c(head).to_bytes(4, "little")

    with contextlib.suppress(wire.WireError):
        wire.read_opening(message(wire.OPENING.size))
    with contextlib.suppress(wire.WireError):
        wire.read_request(message(wire.REQUEST.size), 0)
    with contextlib.suppress(wire.WireError):
        frame = wire.read_frame(message(wire.HEAD.size))
        if frame.status == wire.BUNDLE:
            table = bytearray(data[wire.HEAD.size :][: frame.nrefs * wire.ENTRY.size])
            if len(table) == frame.nrefs * wire.ENTRY.size:
                entries = wire.read_entries(frame._replace(crc=crc32c(table)), table)
                assert sum(entry.total for entry in entries) <= frame.length
        elif frame.status == wire.OK:
            assert frame.offset + frame.length <= frame.total


def native_address(data: bytes) -> None:
    """A store's address, as another node gives it."""
    from fastrt.net.address import AddressError, split_address

    with contextlib.suppress(AddressError):
        host, port = split_address(data.decode("utf-8", "replace"))
        assert isinstance(host, str)
        assert 0 < port < 65536


def records(data: bytes) -> None:
    """Sealed records of a stranger, who has no key: none opens."""
    from fastrt.net.grpc.sealed import RecordError, Sealed

    link = Sealed(said(data), OTHER_KEY, KEY, 4096, 4096)
    room = memoryview(bytearray(4096))
    try:
        while link.receive_ready(room):
            raise AssertionError("a record was opened without its key")
    except (RecordError, EOFError):
        pass
    finally:
        link.close()


def sealed(data: bytes) -> None:
    """Bytes in pieces of any size through sealed records: the same bytes come out, in pieces of any other size."""
    from fastrt.net.grpc.sealed import Sealed

    here, there = socket.socketpair()
    for sock in (here, there):
        sock.setblocking(False)
    ours, theirs = Sealed(here, KEY, OTHER_KEY, 4096, 4096), Sealed(there, OTHER_KEY, KEY, 4096, 4096)
    sizes, body = data[:8], data[8:][:30_000]
    parts, at = [], 0
    for size in sizes:
        parts.append(body[at : at + 64 * size])
        at += 64 * size
    try:
        ours.send([*parts, body[at:]], 1.0)
        got = bytearray()
        for size in [*sizes, *[255] * 8]:
            room = memoryview(bytearray(16 * size + 1))[: len(body) - len(got)]
            got += room[: theirs.receive([room], len(room), 1.0)]
        assert got == body
    finally:
        ours.close()
        theirs.close()


def proof_server(data: bytes) -> None:
    """The two messages by which a client proves a key in the clear."""
    from fastrt.net.grpc.proof import FINAL_BYTES, HELLO_BYTES, ProofError, Server

    server = Server(KEY, "fuzz", "here")
    try:
        server.reply(data[:HELLO_BYTES])
        server.check(data[HELLO_BYTES:][:FINAL_BYTES])
    except ProofError:
        return
    raise AssertionError("a client that does not hold the key was believed")


def proof_client(data: bytes) -> None:
    """The message by which a server proves a key in the clear."""
    from fastrt.net.grpc.proof import Client, ProofError

    try:
        Client(KEY, "fuzz", "here").answer(data)
    except ProofError:
        return
    raise AssertionError("a server that does not hold the key was believed")


def token(data: bytes) -> None:
    """A cluster's token, as a user has copied it."""
    from fastrt.errors import ConfigError
    from fastrt.net.grpc.identity import Identity

    for encoding in ("latin-1", "utf-8"):
        with contextlib.suppress(ConfigError):
            Identity.from_token(data.decode(encoding, "replace"))


def bearer(data: bytes) -> None:
    """The metadata of a call."""
    from fastrt.net.grpc.auth import refused_token

    for value in (data, data.decode("latin-1"), data.decode("utf-8", "replace")):
        if value not in (b"Bearer " + TOKEN.encode(), "Bearer " + TOKEN):
            assert refused_token([("authorization", value)], TOKEN) is not None


def daemon_messages(data: bytes) -> None:
    """Messages between a daemon and a process of its session: each that is read can be written and read again."""
    from fastrt.store.join import Link
    from fastrt.store.messages import MESSAGES, read_message, write_message

    link = Link(said(data))
    with contextlib.suppress(EOFError):
        while (message := link.receive(0)) is not None:
            assert type(message) in MESSAGES.values()
            again = read_message(write_message(message))
            assert type(again) is type(message)
            assert repr(again) == repr(message)
    link.close()


@cache
def _report() -> Any:
    from fastrt.net.grpc.descriptors import message_set

    return message_set("node").message("fastrt.node.Report")


def report(data: bytes) -> None:
    """A node's report: what the head and each reader take is bounded, and can be told to the daemon."""
    import json

    from google.protobuf.message import DecodeError

    from fastrt.cluster.membership import refused_report

    with contextlib.suppress(DecodeError):
        found = _report().FromString(data)
        why = refused_report(found)
        if why is None:
            assert len(found.node) == 32
            json.dumps([found.node, found.name, dict(found.total), dict(found.free)])
        else:
            why.encode()


TARGETS = {
    "ps_greeting": ps_greeting,
    "native_frames": native_frames,
    "native_address": native_address,
    "records": records,
    "sealed": sealed,
    "proof_server": proof_server,
    "proof_client": proof_client,
    "token": token,
    "bearer": bearer,
    "daemon_messages": daemon_messages,
    "report": report,
}
_NODE = b"\x0a\x20" + b"0" * 32 + b"\x12\x0b127.0.0.1:1"
SEEDS = {
    "ps_greeting": [b"frps" + bytes([2]) + bytes(11) + b"{}", b"frps" + bytes([9]) + bytes(11) + b"[" * 9],
    "native_frames": [
        b"frtO" + bytes([3]) + bytes(7),
        b"frtR" + bytes(20),
        b"frtD" + bytes(60),
        b"frtD" + bytes([0, 0, 1]) + bytes(300),
    ],
    "native_address": [b"10.0.0.1:7000", b"[::1]:1", "host:²".encode(), b"host:" + b"9" * 5000],
    "records": [bytes([16, 0, 0, 0]) + bytes(32), b"\xff" * 64],
    "sealed": [bytes(range(1, 9)) + bytes(3000), b"\xff" * 20_000],
    "proof_server": [b"fastrtP1" + bytes(96)],
    "proof_client": [b"fastrtP1" + bytes(96)],
    "token": [b"fastrt1-" + b"0" * 32 + b"-" + b"0" * 64],
    "bearer": [b"Bearer 0", b"Bearer \xb2", b"Bearer " + TOKEN.encode()],
    "daemon_messages": [
        b'{"op": "join", "kind": "driver", "name": "a", "logs": "all", "versions": {"python": "3.11"}}\n',
        b'{"op": "forward", "tasks": [[1, 2, "a"]], "actors": [[3, 4, "b"]]}\n{"op": "fork", "actor": null}\n',
        b'{"op": "cluster_nodes", "nodes": [["a", "b", {"CPU": 1}, {"CPU": -1}, {"c": "d"}]], "is_new_daemon": true}\n',
        b'{"op": "group_list", "groups": [["g", "PACK", "PENDING", {"0": {"CPU": 1}}, {"0": "a"}, '
        b'["QUEUED", 0, 0.0, 0.0, 0.0]]]}\n',
        b'{"op": "configure", "sys_path": ["a"], "preload": [], "socket": "s", "spin_s": 1e999, "advice": true, '
        b'"patience_s": 1, "call_sites": false, "library_threads": 0, "cleanup_timeout_s": 5.0}\n',
        b"[" * 2000 + b"\n",
    ],
    "report": [_NODE, _NODE + b"\x1a\x01a", b"\x0a\x01a\x12\x01b"],
}
