"""2,000 hostile connections at each door that is not gRPC, with authenticated calls of a client beside them.

    python bench/campaign_ports.py [CONNECTIONS] [DOOR...]

Each door is a process of its own. For each kind of attack the client makes 400 calls during it, and 400 before the
first, each over a new connection: the harder case, because a connection that has proved the secret holds no place of
strangers. A hostile connection that the door ends is opened again, with at most RECONNECTS a second in all: more TLS
handshakes than that only take the processors of a machine of two cores from the door. One line is printed for each
attack: calls that failed, p50 and p99 quiet and under attack, the growth of memory at its peak and after the attack,
and the time until descriptors and threads are given back.

Two doors are Unix sockets. The daemon's lies in a folder of mode 0700, so only processes of the same user can connect,
which may do everything the daemon does: it is not attacked here. A parameter server's abstract socket can be reached by
other users, so the attackers there run as another user, which takes root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hostile
import psutil

from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.trust import Trust
from fastrt.net.grpc.visitors import BACKLOG, hold_silent

CALLS = 400  # of 100 the p99 would be the slowest but one
PAUSE_S = 0.02
CALL_S = 10.0
BACK_S = 15.0
RECONNECTS = 250  # a second
OTHER_UID = 64321
FAILED_MAX, SLOWER_MAX, GROWTH_MIB_MAX = 0, 5.0, 64.0
PURPOSE = "campaign"


# ---- doors: each is started in a process of its own, and returns its address and a function that ends it ----


def _native(token: str, tls: bool) -> tuple[str, Callable[[], None]]:
    from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
    from fastrt._core.memory.segment import Segment
    from fastrt.store.client import Store
    from fastrt.transfer.source import Source
    from fastrt.transfer.table import Table

    segment = Segment.create(16 << 20, objects_max=1 << 10, tasks_max=1 << 10)
    client = Client(segment, *admit(segment, os.getpid(), KIND_DRIVER, "campaign"))
    client.adopt_job(client.job)
    table = Table(Store(client, 0.0))
    table.add(1, table.store.put(b"value"))
    source = Source(table, Identity.from_token(token), tls_on_loopback=tls)

    def end() -> None:
        source.close()
        table.clear()
        segment.unlink()

    return source.address, end


def _ps_scheduler(token: str, http: bool) -> tuple[str, Callable[[], None]]:
    from fastrt.membership import ClusterOptions, ClusterScheduler, Settings

    scheduler = ClusterScheduler(ClusterOptions(settings=Settings(1, 0), token=token, http_address="127.0.0.1:0"))
    scheduler.start()
    return scheduler.http_address if http else scheduler.address, scheduler.stop


def _ps_server(token: str, unix: bool) -> tuple[str, Callable[[], None]]:
    from fastrt.ps.endpoint import Endpoint

    class Quiet:
        """A service that sends its greeting and nothing else."""

        def greet(self, caller: Any) -> dict[str, Any]:
            return {"ok": True}

        def room(self, caller: Any, meta: Any) -> int:
            return 0

        def gone(self, caller: Any) -> None:
            pass

    made = Endpoint(Quiet(), Trust(token), "127.0.0.1:0")  # type: ignore[arg-type]
    return f"@{made.unix}" if unix else made.address, made.close


def _rank(token: str, tls: bool) -> tuple[str, Callable[[], None]]:
    from fastrt.collective.access import Access
    from fastrt.collective.greetings import Greetings

    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    hold_silent(listener)
    access = Access(Identity.from_token(token))
    if tls:
        access.uses_tls = lambda host: True  # type: ignore[method-assign]
    greetings = Greetings(listener, access, PURPOSE)

    def serve() -> None:
        with contextlib.suppress(EOFError):
            while True:
                for sock, _ in greetings.wait(None):
                    sock.close()

    thread = threading.Thread(target=serve)
    thread.start()

    def end() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        greetings.close()
        listener.close()

    return "{}:{}".format(*listener.getsockname()), end


DOORS: dict[str, Callable[[str], tuple[str, Callable[[], None]]]] = {
    "native-clear": lambda token: _native(token, False),
    "native-tls": lambda token: _native(token, True),
    "ps-frames": lambda token: _ps_scheduler(token, False),
    "ps-http": lambda token: _ps_scheduler(token, True),
    "ps-server": lambda token: _ps_server(token, False),
    "ps-unix": lambda token: _ps_server(token, True),
    "rank-clear": lambda token: _rank(token, False),
    "rank-tls": lambda token: _rank(token, True),
}


def serve(door: str) -> None:
    """Serve one door until standard input ends."""
    token = sys.stdin.readline().strip()
    address, end = DOORS[door](token)
    print(address, flush=True)
    sys.stdin.read()
    end()


# ---- legitimate clients ----


class Client:
    """Authenticated calls, each over a connection of its own."""

    def __init__(self, door: str, address: str, token: str) -> None:
        self._address, self._trust = address, Trust(token)
        self._tls = door.endswith("-tls")
        kind = door.removesuffix("-tls").removesuffix("-clear")
        self._call: Callable[[], None] = getattr(self, "_" + kind.replace("-", "_"))

    def measure(self, calls: int) -> tuple[list[str], float, float]:
        """Failures, p50 and p99 (ms)."""
        times, failures = [], []
        for _ in range(calls):
            began = time.perf_counter()
            try:
                self._call()
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
            times.append(1e3 * (time.perf_counter() - began))
            time.sleep(PAUSE_S)
        times.sort()
        return failures, times[calls // 2], times[max(0, calls * 99 // 100 - 1)]

    def _native(self) -> None:
        from fastrt.transfer import link, wire

        made = link.dial(self._address, self._trust.identity, False, CALL_S, tls_on_loopback=self._tls)
        try:
            made.send([wire.pack_opening(False), wire.pack_request(wire.Request(1, 1, 0))], CALL_S)
            made.receive([bytearray(wire.HEAD.size)], wire.HEAD.size, CALL_S)
        finally:
            made.close()

    def _ps_frames(self) -> None:
        from fastrt.membership.peers import look

        look(self._address, self._trust.token, CALL_S)

    def _ps_http(self) -> None:
        from fastrt.membership.http import request

        status, _ = request(self._address, self._trust, "GET", "/state", timeout_s=CALL_S)
        assert status == 200

    def _ps_server(self) -> None:
        self._greet(None)

    def _ps_unix(self) -> None:
        self._greet(self._address[1:])

    def _greet(self, unix: str | None) -> None:
        from fastrt.ps.wire import VERSION, dial

        made = dial(unix, "127.0.0.1:1" if unix else self._address, self._trust, CALL_S)
        with contextlib.closing(made):
            made.send({"version": VERSION})
            made.receive_head()

    def _rank(self) -> None:
        from fastrt.collective.access import Access
        from fastrt.collective.greetings import dial

        access = Access(self._trust.identity)
        access.uses_tls = lambda host: self._tls  # type: ignore[method-assign]
        host, _, port = self._address.rpartition(":")
        dial((host, int(port)), access, PURPOSE, {}, CALL_S).close()


# ---- attackers ----


class Stranger(hostile.Peer):
    """A hostile connection that may go through a TLS handshake, without a certificate."""

    tls: ssl.SSLObject | None = None


def _garbage(peer: hostile.Peer) -> None:
    """Random bytes, without an end."""

    def fill() -> None:
        peer.outgoing += random.randbytes(512)

    peer.fill = fill


def _slow(peer: hostile.Peer) -> None:
    """A greeting that comes a byte at a time."""
    greeting = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + secrets.token_bytes(500)
    given = iter(greeting)

    def fill() -> None:
        for byte in given:
            peer.outgoing.append(byte)
            return

    peer.fill = fill


_CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_CONTEXT.check_hostname, _CONTEXT.verify_mode = False, ssl.CERT_NONE


def _hello(peer: hostile.Peer) -> None:
    """The first message of a TLS handshake, then nothing."""
    _handshake(peer)
    peer.tls = None  # type: ignore[attr-defined]


def _handshake(peer: hostile.Peer) -> None:
    """A whole TLS handshake, without a certificate."""
    peer.incoming, peer.out = ssl.MemoryBIO(), ssl.MemoryBIO()  # type: ignore[attr-defined]
    peer.tls = _CONTEXT.wrap_bio(peer.incoming, peer.out)  # type: ignore[attr-defined]
    _go_on(peer)


def _go_on(peer: Any) -> None:
    with contextlib.suppress(ssl.SSLError):
        peer.tls.do_handshake()
    peer.outgoing += peer.out.read()


hostile.KINDS.update({"garbage": _garbage, "slow": _slow, "half-tls": _hello, "full-tls": _handshake})
KINDS = ("silent", "garbage", "slow", "half-tls", "full-tls")


class Attack(hostile.Attack):
    """Attackers that also use Unix sockets and TLS, and open a bounded number of connections a second."""

    peer_kind = Stranger

    def __init__(self, kind: str, address: str, count: int, reconnects: float) -> None:
        unix = address.startswith("@")
        # The slow attack sends a byte a second over each connection.
        super().__init__(kind, "x:1" if unix else address, count, rate=count if kind == "slow" else 1e6)
        if unix:
            self._target = "\0" + address[1:]
        self._reconnects = reconnects
        self._begun: float | None = None
        self._extra = 0.0

    def _open(self, now: float) -> None:
        missing = self.count - len(self.peers)
        if self.opened >= self.count:  # ended connections are opened again, at most so many a second
            self._begun = self._begun or now
            allowed = (now - self._begun) * self._reconnects - self._extra
            missing = min(missing, int(allowed))
            self._extra += max(0, missing)
        for _ in range(min(64, missing)):
            if not self._connect():
                return

    def _read(self, peer: Any) -> bool:
        data = peer.sock.recv(1 << 16)
        if data and peer.tls is not None:
            peer.incoming.write(data)
            _go_on(peer)
            self._selector.modify(peer.sock, 3, peer)
        return bool(data)


def attack(kind: str, address: str, count: int, reconnects: float) -> None:
    """Attack until standard input ends; as another user where the door is a Unix socket."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if address.startswith("@") and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(OTHER_UID, OTHER_UID, OTHER_UID)
        os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
    made = Attack(kind, address, count, reconnects)

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    made.run(float("inf"), lambda: print("up", flush=True))


# ---- one line of the table ----


class Watch:
    """Memory, descriptors and threads of a process, and the peak of its memory."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self.now()
        self.peak_mib = self.before[0]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def now(self) -> tuple[float, int, int]:
        """MiB, descriptors, threads."""
        process = self._process
        return process.memory_info().rss / (1 << 20), process.num_fds(), process.num_threads()

    def wait_back(self) -> float:
        """Seconds until descriptors and threads are as before, at most BACK_S."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < BACK_S:
            _, fds, threads = self.now()
            if fds <= self.before[1] + 2 and threads <= self.before[2] + 2:
                break
            time.sleep(0.05)
        return waited

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.05):
            self.peak_mib = max(self.peak_mib, self.now()[0])


def campaign(
    door: str, kinds: tuple[str, ...], count: int, calls: int = CALLS, reconnects: float = RECONNECTS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure a door under one attack after the other."""
    token, me = new_token(), [sys.executable, __file__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    quiet = {"stderr": subprocess.DEVNULL}  # the doors' log lines about strangers
    with subprocess.Popen([*me, "--serve", door], **pipes, **quiet) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(token + "\n")
        process.stdin.flush()
        address = process.stdout.readline().strip()
        client = Client(door, address, token)
        client.measure(calls // 4)
        _, *undisturbed = client.measure(calls)
        for kind in kinds:
            watch = Watch(process.pid)
            with subprocess.Popen([*me, "--attack", kind, address, str(count), str(reconnects)], **pipes) as attacker:
                assert attacker.stdout is not None
                attacker.stdout.readline()
                failures, *attacked = client.measure(calls)
                attacker.communicate()
            back = watch.wait_back()
            watch.stop()
            peak, after = watch.peak_mib - watch.before[0], watch.now()[0] - watch.before[0]
            found = {"failures": failures, "quiet": undisturbed, "under": attacked, "back_s": back}
            yield kind, {**found, "peak_mib": peak, "after_mib": after}
        process.communicate()


def misses(found: dict[str, Any]) -> list[str]:
    """The bars that a measurement misses."""
    bars = {
        "failed": len(found["failures"]) > FAILED_MAX,
        "p99": found["under"][1] > SLOWER_MAX * found["quiet"][1],
        "memory": found["peak_mib"] > GROWTH_MIB_MAX,
        "given back": found["back_s"] >= BACK_S,
    }
    return [name for name, missed in bars.items() if missed]


def main() -> None:
    """Run the campaign, or a process of it."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    if sys.argv[1:2] == ["--attack"]:
        attack(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=2000)
    parser.add_argument("doors", nargs="*", default=list(DOORS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--reconnects", type=float, default=RECONNECTS)
    asked = parser.parse_args()
    for door in asked.doors or DOORS:
        kinds = tuple(asked.kinds.split(","))
        for kind, found in campaign(door, kinds, asked.count, reconnects=asked.reconnects):
            (quiet50, quiet99), (under50, under99) = found["quiet"], found["under"]
            failures = found["failures"]
            print(
                f"{door:12} {kind:8} failed {len(failures)}/{CALLS}  p50 {quiet50:.1f} -> {under50:.1f} ms  "
                f"p99 {quiet99:.1f} -> {under99:.1f} ms ({under99 / quiet99:.1f} x)  "
                f"MiB +{found['peak_mib']:.0f} at its peak, +{found['after_mib']:.0f} after  "
                f"back in {found['back_s']:.1f} s  {', '.join(misses(found)) or 'ok'}  {failures[:1] or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
