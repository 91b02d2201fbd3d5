"""2,000 hostile connections at each door of gRPC, with calls of a client beside them.

    python bench/campaign_doors.py [CONNECTIONS] [DOOR...] [KIND...]

The coordinator is a process of its own for each attack, and open to strangers. So is the door `grpc`, for comparison: a
server of grpcio as it comes, with 8 threads and an empty handler. It runs only when it is named. The other doors are
those of a cluster of two nodes: strangers there do not get past the TLS handshake. For each kind of attack the client
makes 400 calls before it and 400 during it, and five more clients connect during it. One line is printed for each: how
many calls failed, p50 and p99 quiet and under attack, and the door's memory before, at its peak and 15 s after. The
attackers send and receive 10 Mbit/s together: more only takes the processor from the door on a machine of two cores.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil

from fastrt.net.grpc.auth import read_token
from fastrt.net.grpc.identity import Identity

HERE = Path(__file__).resolve().parent
HOSTILE = HERE / "hostile.py"
_FLOODS = ("streams", "reset", "headers", "continuation", "pings", "drip", "unread")
OPEN_KINDS = ("silent", "garbage", "preface", "settings", *_FLOODS)
TLS_KINDS = ("silent", "garbage", "hello", "stranger", "tls12")
METHODS = {
    "coordinator": ("/tensorflow.CoordinationService/TryGetKeyValue", b"\n\x01a"),
    "grpc": ("/tensorflow.CoordinationService/TryGetKeyValue", b"\n\x01a"),
    "head": ("/fastrt.node.Head/Join", b""),
    "uplink": ("/fastrt.node.Node/None", b""),  # UNIMPLEMENTED: an exchange with a node lasts until both end it
    "store": ("/ObjStore/ObjStoreInfo", b""),
    "scheduler": ("/Scheduler/SchedulerInfo", b""),
}
OPEN_DOORS = ("coordinator", "grpc")
PROGRAMS = ("store", "scheduler")
FAILURES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,  # the core's answer to a call that finds its queue full
)
CALLS = 400  # of 100 the p99 would be the slowest but one
NEW = 5
ATTACK_S = 20.0
AFTER_S = 15.0
# Bytes a second of all attackers together.
RATE = 1_250_000
Connect = Callable[[], grpc.Channel]


def serve() -> None:
    """Serve a coordinator until standard input ends."""
    from fastrt.coordination import Coordinator, CoordinatorOptions

    with Coordinator(CoordinatorOptions()) as service:
        print(service.address, flush=True)
        sys.stdin.read()


def serve_bare() -> None:
    """Serve an empty handler by grpcio's own server until standard input ends."""
    path, _ = METHODS["grpc"]
    service, _, method = path[1:].partition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(lambda request, context: b"")}
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.stop(None)


class Client:
    """Calls of an accepted client."""

    def __init__(self, door: str, connect: Connect) -> None:
        self._path, self._body = METHODS[door]
        self._connect = connect
        self._channel = connect()

    def measure(self) -> tuple[int, float, float]:
        """Failures, p50 and p99 (ms) of CALLS calls."""
        times, failures = [], 0
        for _ in range(CALLS):
            began = time.perf_counter()
            failures += not self._call(self._channel)
            times.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.02)
        times.sort()
        return failures, times[CALLS // 2], times[CALLS * 99 // 100 - 1]

    def come_new(self) -> int:
        """The number of failures among five more clients."""
        failures = 0
        for _ in range(NEW):
            with self._connect() as channel:
                failures += not self._call(channel)
        return failures

    def close(self) -> None:
        self._channel.close()

    def _call(self, channel: grpc.Channel) -> bool:
        answers = channel.stream_stream(self._path)(iter([self._body]), timeout=10)
        with contextlib.suppress(grpc.RpcError):
            list(answers)
        return answers.code() not in FAILURES


class Memory:
    """Resident memory of a process in MiB, and its peak while this is watched."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/statm")
        self.peak = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def now(self) -> float:
        return int(self._status.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak = max(self.peak, self.now())


def campaign(door: str, kind: str, count: int, address: str, pid: int, connect: Connect) -> threading.Thread:
    """Attack a door. One line is printed by the thread, 15 s after the attack."""
    client, memory = Client(door, connect), Memory(pid)
    client.measure()
    _, quiet50, quiet99 = client.measure()
    before = memory.now()
    words = [sys.executable, str(HOSTILE), kind, address, str(count), str(ATTACK_S), "/none/none", "inf", str(RATE)]
    attack = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert attack.stdout is not None
    attack.stdout.readline()
    failures, under50, under99 = client.measure()
    new = client.come_new()
    result = json.loads(attack.communicate()[0].strip().rpartition("\n")[2] or "{}")
    client.close()

    def conclude() -> None:
        time.sleep(AFTER_S)
        print(
            f"{door:12} {kind:13} failed {failures}/{CALLS}, new {new}/{NEW}  "
            f"p50 {quiet50:.2f} -> {under50:.2f} ms  "
            f"p99 {quiet99:.2f} -> {under99:.2f} ms ({under99 / quiet99:.1f} x)  "
            f"MiB {before:.0f}, peak +{memory.peak - before:.0f}, after {memory.now() - before:+.0f}  "
            f"({result.get('opened')} opened, {result.get('closed')} ended)",
            flush=True,
        )
        memory.stop()

    concluding = threading.Thread(target=conclude)
    concluding.start()
    return concluding


def attack_open(door: str, count: int, kinds: tuple[str, ...]) -> None:
    """All kinds, at a new process of an open door each."""
    for kind in kinds:
        words = [sys.executable, __file__, "--serve", door]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        concluding = campaign(door, kind, count, address, process.pid, lambda to=address: _open(to))
        concluding.join()
        process.communicate()


def _open(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """Two nodes, a scheduler and an object store."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.attacks.scene import Scene

    with tempfile.TemporaryDirectory(prefix="frt") as folder:
        scene = Scene(Path(folder))
        try:
            assert scene.node_note
            yield scene
        finally:
            scene.close()


def attack_cluster(doors: list[str], count: int, kinds: tuple[str, ...]) -> None:
    """All kinds, at some doors of a cluster in turn: while one is attacked, the one before gives memory back."""
    with cluster() as scene:
        addresses = {
            "head": scene.head,
            "uplink": scene.node_note.address,
            "store": scene.store,
            "scheduler": scene.scheduler,
        }
        identity = Identity.from_token(read_token(scene.token_file))
        listening = {
            str(one.laddr.port): one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN
        }
        concluding: dict[str, threading.Thread] = {}
        for kind in kinds:
            for door in doors:
                if door in concluding:
                    concluding[door].join()
                address = str(addresses[door])
                own = identity.for_programs() if door in PROGRAMS else identity

                def connect(own: Identity = own, address: str = address) -> grpc.Channel:
                    options = [("grpc.use_local_subchannel_pool", 1), *own.channel_options()]
                    return grpc.secure_channel(address, own.channel_credentials(), options)

                pid = listening[address.rpartition(":")[2]]
                assert pid is not None
                concluding[door] = campaign(door, kind, count, address, pid, connect)
        for each in concluding.values():
            each.join()


def main() -> None:
    """Run the campaign, or serve a door for it."""
    if sys.argv[1:2] == ["--serve"]:
        (serve if sys.argv[2] == "coordinator" else serve_bare)()
        return
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    words = sys.argv[2:]
    doors = [word for word in words if word in METHODS] or [door for door in METHODS if door != "grpc"]
    kinds = tuple(word for word in words if word not in METHODS)
    for door in OPEN_DOORS:
        if door in doors:
            attack_open(door, count, kinds or OPEN_KINDS)
    behind_tls = [door for door in doors if door not in OPEN_DOORS]
    if behind_tls:
        attack_cluster(behind_tls, count, kinds or TLS_KINDS)


if __name__ == "__main__":
    main()
