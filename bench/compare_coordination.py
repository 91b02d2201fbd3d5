"""jaxlib's client against jaxlib's own service and against fastrt's, alternating in one run.

    python bench/compare_coordination.py JAX_PYTHON [ROUNDS]

JAX_PYTHON is an interpreter with jaxlib 0.10.2; `make check` leaves one in `.cache/jax/0.10.2/bin/python`. Each
round times every service once, in turn, so that other load on the machine meets all alike; ratios are taken within a
round, and their median counts. Printed beside them: the rates of a service that does nothing, which is the floor of
the gRPC layer below.
"""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import grpc.aio

from fastrt.coordination import Coordinator, CoordinatorOptions, Front
from fastrt.coordination.engine import PATHS
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.contract import Server
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.server import open_server

CLIENTS = Path(__file__).with_name("jax_clients.py")
# One round: command, calls, and the bar that a ratio of rates must reach (None: no bar).
WORK = [("set", 200, 0.8), ("get", 200, 0.8), ("sets", 25, 0.4), ("barrier", 5, 1 / 1.5)]
MANY = 32
TASKS = 2000


class Jaxlib:
    """jaxlib's own service."""

    def __init__(self, python: str, tasks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        words = [python, str(CLIENTS), "serve", self.address.rpartition(":")[2], str(tasks)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self) -> None:
        self.process.communicate()


class InProcess:
    """A server of this installation in a process of its own: it must not share the measuring process's lock."""

    def __init__(self, kind: str, tasks: int) -> None:
        words = [sys.executable, __file__, "--serve", kind, str(tasks)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.communicate()


class Timed:
    """jaxlib's clients of one service."""

    def __init__(self, python: str, service: "Jaxlib | InProcess", clients: int) -> None:
        self.service = service
        words = [python, str(CLIENTS), "time", service.address.rpartition(":")[2], str(clients)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "connected\n"

    def measure(self, what: str, count: int) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {count}\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.service.stop()


class Nothing:
    """Answer every call at once with an almost empty message."""

    server: Server

    def on_call(self, call: int, method: str, body: bytes) -> None:
        if not method.endswith("PollForError"):
            self.server.finish(call, body=b"\x09" + bytes([1] * 8) if method.endswith("RegisterTask") else b"")

    def on_cancel(self, call: int) -> None:
        pass

    def on_idle(self) -> float | None:
        return None

    def on_stop(self) -> None:
        pass


def serve(kind: str, tasks: int) -> None:
    """Serve until standard input closes; prints the address."""
    options = CoordinatorOptions(num_tasks=tasks, heartbeat_timeout_s=1000)
    with tempfile.TemporaryDirectory() as directory:
        if kind == "ephemeral":
            with Coordinator(options) as service:
                wait(service.address)
        elif kind == "durable":
            options.state_dir = directory
            with Front(options) as front:
                wait(front.address)
        elif kind == "nothing":
            handler = Nothing()
            handler.server = open_server(handler, PATHS)
            port = handler.server.bind("127.0.0.1:0")
            handler.server.start()
            wait(f"127.0.0.1:{port}")
            handler.server.stop()
        else:
            asyncio.run(serve_aio())


async def serve_aio() -> None:
    """The same empty service on grpc.aio, for comparison."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):  # type: ignore[no-untyped-def]
            async def answer(request: bytes, context: object) -> bytes:
                if details.method.endswith("PollForError"):
                    await asyncio.Event().wait()
                return b"\x09" + bytes([1] * 8) if details.method.endswith("RegisterTask") else b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread(wait, f"127.0.0.1:{port}")
    await server.stop(0)


def wait(address: str) -> None:
    print(address, flush=True)
    sys.stdin.read()


def compare(
    python: str, kinds: list[str], clients: int, work: list[tuple[str, int, float | None]], rounds: int
) -> None:
    """Print rates and ratios of some services under some work."""
    timed = {
        kind: Timed(python, Jaxlib(python, clients) if kind == "jaxlib" else InProcess(kind, clients), clients)
        for kind in kinds
    }
    for what, count, bar in work:
        found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):
            for kind in kinds if turn % 2 else reversed(kinds):
                times = timed[kind].measure(what, count)
                if turn:  # the first round warms up
                    found[kind].append(times)
        base = [statistics.fmean(times) for times in found["jaxlib"]]
        for kind in kinds:
            means = [statistics.fmean(times) for times in found[kind]]
            ratio = statistics.median(b / m for b, m in zip(base, means, strict=True))
            every = sorted(t for times in found[kind] for t in times)
            p50, p99 = every[len(every) // 2], every[min(len(every) - 1, len(every) * 99 // 100)]
            wanted = f"(bar {bar:.2f})" if bar is not None and kind == "ephemeral" else ""
            print(
                f"{what:8} {clients:3} clients  {kind:10} {1 / statistics.median(means):9.0f}/s  "
                f"p50 {p50 * 1e6:8.0f} us  p99 {p99 * 1e6:8.0f} us  ratio {ratio:5.2f} {wanted}",
                flush=True,
            )
    for one in timed.values():
        one.stop()


def many_tasks() -> None:
    """2,000 simulated tasks register, meet and shut down, over one connection."""
    service = InProcess("ephemeral", TASKS)
    request = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")
    began = time.perf_counter()
    with open_channel(service.address) as channel:
        tasks = [{"job_name": "jax_worker", "task_id": n} for n in range(TASKS)]
        for method, fields in [
            ("RegisterTask", {"incarnation": 1}),
            ("Barrier", {"barrier_id": "b", "barrier_timeout_in_ms": 60_000}),
            ("ShutdownTask", {}),
        ]:
            kind, answer = request[method]
            stub = channel.unary_unary(
                f"/tensorflow.CoordinationService/{method}", kind.SerializeToString, answer.FromString
            )
            for call in [stub.future(kind(source_task=task, **fields), timeout=60) for task in tasks]:
                call.result()
    print(f"{TASKS} tasks register, meet at a barrier and shut down in {time.perf_counter() - began:.2f} s (bar 20 s)")
    service.stop()


def main() -> None:
    """Compare the services, by the arguments of the command line."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        return
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    python, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 25
    one = [item for item in WORK if item[0] in ("set", "get")]
    many = [item for item in WORK if item[0] not in ("set", "get")]
    kinds = ["jaxlib", "ephemeral", "durable", "nothing", "grpc.aio"]
    compare(python, kinds[:3], 1, one, rounds)
    compare(python, kinds[:3], MANY, many, rounds)
    compare(python, [kinds[0], *kinds[3:]], 1, one[:1], rounds)
    compare(python, [kinds[0], *kinds[3:]], MANY, many[:1], rounds)
    many_tasks()


if __name__ == "__main__":
    main()
