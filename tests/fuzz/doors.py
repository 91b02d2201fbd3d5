"""Fuzzing of every parser that reads bytes before the other end has proved anything: one target each, in a table.

    python tests/fuzz/doors.py 60                 seconds for all targets together; what `make check` runs
    python tests/fuzz/doors.py 600 --each         so long for each
    python tests/fuzz/doors.py 5 --only token     one target

Each target runs in a process of its own, under atheris (extra `fuzz`); without it nothing is fuzzed, and this says so.
A target may raise the errors of its door. Anything else ends the process: the input is printed in hex, add it to
`KEPT` of its target together with the fix.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
BYTES_MAX = 4096
EXECUTED = re.compile(r"^#(\d+)\s", re.M)
Target = Callable[[bytes], None]


def said(data: bytes) -> socket.socket:
    """The end of a connection whose other end said this and hung up."""
    here, there = socket.socketpair()
    with there:
        there.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            there.sendall(data)
    return here


def ps_http() -> Target:
    """The HTTP port of parameter servers, with a token that no input knows."""
    import io

    from fastrt.cluster.http import _Handler

    class Handler(_Handler):
        token = "0" * 32

        def setup(self) -> None:
            self.rfile, self.wfile = io.BytesIO(self.request), io.BytesIO()

        def finish(self) -> None:
            assert b" 200 " not in self.wfile.getvalue()[:16], "a request without a token was served"

    def run(data: bytes) -> None:
        Handler(data, ("127.0.0.1", 1), None)  # type: ignore[arg-type]

    return run


def ps_frames() -> Target:
    """Frames of MindSpore's members, their meta and a registration."""
    from google.protobuf.message import DecodeError

    from fastrt.cluster.framing import FramingError, Parser
    from fastrt.cluster.wire import Meta

    def run(data: bytes) -> None:
        parser = Parser(1 << 20)
        with contextlib.suppress(FramingError, DecodeError):
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                for frame in parser.feed(half):
                    Meta.FromString(frame.meta)

    return run


def ps_greeting() -> Target:
    """The first message to a parameter server."""
    from fastrt.ps.wire import BrokenWireError, Wire

    def run(data: bytes) -> None:
        wire = Wire(said(data))
        with contextlib.suppress(BrokenWireError, TimeoutError):
            wire.greeting(0.01)
        wire.close()

    return run


def transfer_frame() -> Target:
    """Requests, frames and bundles of the native stream."""
    from fastrt.transfer import wire

    def run(data: bytes) -> None:
        frame = None
        with contextlib.suppress(wire.WireError, wire.BrokenError):
            frame = wire.read_frame(bytearray(data[: wire.HEAD.size].ljust(wire.HEAD.size, b"\0")))
        with contextlib.suppress(wire.WireError, wire.BrokenError):
            wire.read_request(data[: wire.REQUEST.size].ljust(wire.REQUEST.size, b"\0"), 0)
        if frame is not None and frame.status == wire.BUNDLE:
            with contextlib.suppress(wire.WireError, wire.BrokenError):
                wire.read_entries(frame, bytearray(data[: frame.nrefs * wire.ENTRY.size]))

    return run


def proof_server() -> Target:
    """The two messages by which a client proves a key in the clear."""
    from fastrt.rpc.proof import FINAL_BYTES, HELLO_BYTES, ProofError, Server

    def run(data: bytes) -> None:
        server = Server(bytes(32), "fuzz", "here")
        try:
            server.reply(data[:HELLO_BYTES])
            server.check(data[HELLO_BYTES:][:FINAL_BYTES])
        except ProofError:
            return
        raise AssertionError("a client that does not hold the key was believed")

    return run


def proof_client() -> Target:
    """The message by which a server proves a key in the clear."""
    from fastrt.rpc.proof import Client, ProofError

    def run(data: bytes) -> None:
        try:
            Client(bytes(32), "fuzz", "here").answer(data)
        except ProofError:
            return
        raise AssertionError("a server that does not hold the key was believed")

    return run


def token() -> Target:
    """A cluster's token, as a user has copied it."""
    from fastrt.errors import ConfigError
    from fastrt.rpc.identity import Identity

    def run(data: bytes) -> None:
        with contextlib.suppress(ConfigError):
            Identity.from_token(data.decode("latin-1"))

    return run


def bearer() -> Target:
    """The metadata of a call or a request."""
    from fastrt.rpc.auth import refused_token

    def run(data: bytes) -> None:
        text = data.decode("latin-1")
        for value in (data, text):
            assert refused_token([("authorization", value)], "0" * 64) is not None

    return run


def foreign_text() -> Target:
    """JSON of other processes and of files."""
    from fastrt.foreign_text import ForeignTextError, read_json

    def run(data: bytes) -> None:
        with contextlib.suppress(ForeignTextError):
            read_json(data, "the input", bytes_max=2048, depth_max=16)

    return run


def daemon_join() -> Target:
    """What a process says to the daemon that it wants to join."""
    from fastrt.store.attach import Link

    def run(data: bytes) -> None:
        link = Link(said(data))
        with contextlib.suppress(EOFError):
            while link.receive(0.01) is not None:
                pass
        link.close()

    return run


def report() -> Target:
    """A node's report to the head, and what a reader makes of it."""
    from google.protobuf.message import DecodeError

    from fastrt.rpc.descriptors import message_set

    message = message_set("node").message("fastrt.node.Report")

    def run(data: bytes) -> None:
        with contextlib.suppress(DecodeError):
            message.FromString(data)

    return run


# Each with inputs to begin from; among them what was once a fault.
TARGETS: dict[str, tuple[Callable[[], Target], list[bytes]]] = {
    "ps_http": (ps_http, [b"GET /state HTTP/1.1\r\n\r\n", b"POST /scalein HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]"]),
    "ps_frames": (ps_frames, [bytes.fromhex("01000000020000000400000000000000") + b"\x08\1\0\0"]),
    "ps_greeting": (
        ps_greeting,
        [b"frps" + bytes([2]) + bytes(11) + b"{}", b"frps" + bytes([9]) + bytes(11) + b"[" * 9],
    ),
    "transfer_frame": (transfer_frame, [bytes(64)]),
    "proof_server": (proof_server, [b"fastrtP1" + bytes(96)]),
    "proof_client": (proof_client, [b"fastrtP1" + bytes(96)]),
    "token": (token, [b"fastrt1-" + b"0" * 32 + b"-" + b"0" * 64]),
    "bearer": (bearer, [b"Bearer 0", b"Bearer \xb2"]),
    "foreign_text": (foreign_text, [b'{"a": [1, 2.5, null, "\\ud800"]}', b"[" * 99, b"1e999", b"-" + b"9" * 50]),
    "daemon_join": (daemon_join, [b'{"op": "join", "kind": "driver"}\n', b"[" * 2000 + b"\n"]),
    "report": (report, [b"\x0a\x01a\x12\x01b"]),
}


def run_here(name: str, options: list[str]) -> None:
    """In a process of its own: fuzz one target, with the modules of fastrt instrumented."""
    import atheris

    with atheris.instrument_imports(include=["fastrt"]):
        target = TARGETS[name][0]()
    atheris.Setup([sys.argv[0], *options], target)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> int:
    """Fuzz one target; the exit code. Prints how many inputs were tried, and one that ends it."""
    with tempfile.TemporaryDirectory(prefix="frt-fuzz-") as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for number, data in enumerate(TARGETS[name][1]):
            (corpus / str(number)).write_bytes(data)
        limits = [f"-max_len={BYTES_MAX}", f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048"]
        words = [
            sys.executable,
            __file__,
            "0",
            "--run",
            name,
            str(corpus),
            *limits,
            f"-artifact_prefix={folder}/found-",
        ]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", env={**os.environ})
        tried = EXECUTED.findall(done.stderr)
        sys.stdout.write(f"fuzz {name}: {tried[-1] if tried else 0} inputs in {seconds} s\n")
        for found in Path(folder).glob("found-*"):
            sys.stdout.write(f"an input that ends it: {found.read_bytes().hex()}\n")
        if done.returncode:
            sys.stdout.write(done.stderr[-4000:] + done.stdout[-4000:])
    return done.returncode


def main() -> int:
    """Fuzz what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=int)
    parser.add_argument("--each", action="store_true", help="the seconds are for each target, not for all together")
    parser.add_argument("--only", choices=TARGETS, help="one target")
    parser.add_argument("--run", choices=TARGETS, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if importlib.util.find_spec("atheris") is None:
        sys.stdout.write("fuzz: nothing was fuzzed: atheris is not installed (extra `fuzz`; wheels for 3.11 to 3.13)\n")
        return 0
    if options.run:
        run_here(options.run, rest)
    names = [options.only] if options.only else list(TARGETS)
    seconds = options.seconds if options.each or options.only else max(1, options.seconds // len(names))
    return max(fuzz(name, seconds) for name in names)


if __name__ == "__main__":
    sys.exit(main())
