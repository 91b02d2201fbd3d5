"""Objects between two nodes beside plain TCP, iperf3, Arrow Flight and Ray, in turns; judges the required ratios.

Run: python bench/compare_transfer.py [--rounds 9] [--size 1GiB] [--flight-python PYTHON] [--ray-python PYTHON] [--tls]

"1 KiB" are small objects, delivered one after the other, beside as many exchanges of 1 KiB and an answer by plain TCP.
Both run with the two processes on one processor, and with each on a processor of its own. Left alone, the kernel moves
some pairs to one processor and leaves others apart, and then an exchange by plain TCP takes 26 or 55 us here, and a
delivery 60 or 100: a ratio of one placement to the other measures the kernel.
"empty gRPC" is a stream of as many bytes in as large messages, which a server of the same kind throws away: the
upper bound that gRPC itself sets. iperf3 is left out where it is not installed, Arrow Flight and Ray where PYTHON
(default: this one) has no pyarrow or no Ray; Ray has two nodes on this machine, and is timed from the moment when the
value is whole on the other one (`peers/ray_nodes.py`). Each round runs everything once, so all meet the same machine;
ratios are medians over rounds of the ratio within a round.

Why "grpc" stays below iperf3 (0.5 to 0.75 of it, the empty stream 0.6 to 0.9): it is bound by two processors, 1.1 s of
which go into a GB: 0.6 on the receiver, 0.5 on the sender. A quarter of the receiver's (perf, cpu-clock) are copies,
three equal ones: grpcio makes bytes of each slice and joins these, then we copy them into the arena. 18 % of the
sender's are two copies: ours into bytes with a chunk's head, and grpcio's of those. None of our copies can be left
out, as grpcio takes and gives bytes only (its main branch has a build switch, IsPythonZeroCopyEnabled, that saves two
of the five). Tried, medians of four turns beside the options in use, where turns differ by 10 % and more:

    bdp_probe on; lookahead 4 and 64 MiB; frames of 64, 256, 512 KiB and 1 MiB; write buffer of 1 MiB;
    tcp_min_read_chunk_size 256 KiB and 1 MiB; tcp_receive_buffer_size 8 MiB; optimization_target throughput;
    GRPC_EXPERIMENTS tcp_rcv_lowat, tcp_frame_size_tuning, both; chunks of 512 KiB, 2 and 4 MiB   no difference seen
    chunks of 256 KiB                                                                             a fifth slower
    a Unix socket, empty stream                                                                   0.78 of TCP
    two connections, empty stream, half each                                                      1.12 of one

Two connections cost as much processor time a GB, and a StreamObj is one stream: its chunks come in order.

`--tls` compares the native stream in the clear and sealed instead, in turns, between two network namespaces with a veth
pair between them (as root). It prints processor seconds per GiB at both ends, beside the figures of `openssl speed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from fastrt.config import parse_bytes
from fastrt.net.grpc.channel import BULK_OPTIONS, open_channel
from fastrt.net.grpc.identity import new_token
from fastrt.objstore.push import CHUNK_BYTES
from fastrt.observe.profile import TwoNodes

MANY, EACH = 10_000, 64 << 10
SMALL, SMALLS = 1 << 10, 300  # bytes of a small object, and how many are delivered one after the other
WIDTH = 110
PLACES = ("one processor", "two processors")  # of the two ends of a small object
# (transfer, reference, the least ratio of their rates)
REQUIRED = (
    ("native", "plain TCP", 0.95),
    ("native", "iperf3", 1.2),
    ("native", "Ray", 3.0),
    ("grpc", "iperf3", 0.8),
    ("empty gRPC", "iperf3", 0.8),
    ("grpc", "Arrow Flight", 1.4),
    ("10,000 x 64 KiB", "native", 0.5),
    *((f"1 KiB, {place}", f"1 KiB, {place}, plain TCP", 0.334) for place in PLACES),
    ("sealed", "clear", 0.5),
    ("sealed, 10,000 x 64 KiB", "clear, 10,000 x 64 KiB", 0.5),
)
NAMESPACES = ("fastrt-bench-a", "fastrt-bench-b")
HOSTS = ("10.213.77.1", "10.213.77.2")
# Throws away every message of a stream.
EMPTY_SERVER = """
import sys
from fastrt._core.transfer import stream as memory
from fastrt.net.grpc.channel import BULK_OPTIONS
from fastrt.net.grpc.server import open_server
class Nothing:
    def on_call(self, call, method, body): pass
    def on_cancel(self, call): pass
    def on_idle(self): return None
    def on_stop(self): pass
def take(stream):
    def receive(body):
        if body is None:
            stream.send(b"")
            stream.finish()
    stream.receiver, stream.on_closed = receive, lambda: None
memory.keep_freed_memory(128 << 20)
server = open_server(Nothing(), [], {"/empty/Stream": take}, 8 << 20, None, BULK_OPTIONS)
port = server.bind("127.0.0.1:0")
server.start()
print(port, flush=True)
sys.stdin.read()
"""
# Serves one table of the size in its argument; the second program fetches it each time it reads a line.
FLIGHT_SERVER = """
import sys, pyarrow as pa, pyarrow.flight as f, numpy as np
data = np.zeros(int(sys.argv[1]) // 8)
table = pa.table({"x": data})
class Server(f.FlightServerBase):
    def do_get(self, context, ticket):
        return f.RecordBatchStream(table)
server = Server("grpc://127.0.0.1:0")
print(server.port, flush=True)
server.serve()
"""
FLIGHT_CLIENT = """
import sys, time, pyarrow.flight as f
client = f.FlightClient(f"grpc://127.0.0.1:{sys.argv[1]}")
for line in sys.stdin:
    start = time.perf_counter()
    for chunk in client.do_get(f.Ticket(b"")):
        pass
    print(time.perf_counter() - start, flush=True)
"""


class EmptyStream:
    """A gRPC stream of ready-made messages to a server that throws them away, with our options at both ends."""

    def __init__(self, nbytes: int, stack: ExitStack) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen([sys.executable, "-c", EMPTY_SERVER], **pipes)
        stack.callback(end, server)
        channel = stack.enter_context(open_channel(f"127.0.0.1:{server.stdout.readline().strip()}", None, BULK_OPTIONS))
        self._call = channel.stream_unary("/empty/Stream", None, None)
        self._message = bytes(CHUNK_BYTES)
        self._count = nbytes // CHUNK_BYTES

    def __call__(self) -> float:
        start = time.perf_counter()
        self._call(iter([self._message] * self._count))
        return time.perf_counter() - start


class Iperf:
    """iperf3 with one stream, as many bytes each time."""

    def __init__(self, nbytes: int, stack: ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._nbytes = nbytes
        server = subprocess.Popen(["iperf3", "-s", "-B", "127.0.0.1", "-p", str(self._port)], stdout=subprocess.DEVNULL)
        stack.callback(end, server)

    def __call__(self) -> float:
        command = ["iperf3", "-c", "127.0.0.1", "-p", str(self._port), "-n", str(self._nbytes), "-J"]
        for _ in range(50):  # the server needs a moment between two tests
            done = subprocess.run(command, capture_output=True, text=True)
            found = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
            if found:
                return float(found["seconds"]) * self._nbytes / float(found["bytes"])
            time.sleep(0.1)
        raise click.ClickException(f"iperf3 does not answer: {done.stdout}{done.stderr}")


class Flight:
    """Arrow Flight's DoGet of one table, in two processes of a Python that has pyarrow."""

    def __init__(self, python: str, nbytes: int, stack: ExitStack) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen([python, "-c", FLIGHT_SERVER, str(nbytes)], **pipes)
        stack.callback(end, server)
        port = server.stdout.readline().strip()
        self._client = subprocess.Popen([python, "-c", FLIGHT_CLIENT, port], **pipes)
        stack.callback(end, self._client)

    def __call__(self) -> float:
        self._client.stdin.write("\n")
        self._client.stdin.flush()
        return float(self._client.stdout.readline())


class Ray:
    """A value that Ray moves from one of its nodes to the other, in processes of a Python that has Ray."""

    def __init__(self, python: str, nbytes: int, stack: ExitStack) -> None:
        # Its text, not its file: in that folder `import ray` would find another one.
        text = (Path(__file__).parent / "peers" / "ray_nodes.py").read_text()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([python, "-c", text, str(nbytes)], **pipes)
        stack.callback(self._end)
        self._line(lambda line: line == "ready\n" or None)

    def __call__(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line(_number))

    def _line(self, read: Callable[[str], Any]) -> Any:
        """The first line of output that does not come from Ray itself."""
        for line in self._process.stdout or ():
            found = read(line)
            if found is not None:
                return found
        raise click.ClickException("Ray's nodes ended; see above")

    def _end(self) -> None:
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            end(self._process)


class Namespaces:
    """The two ends of a native stream, each in a process and a network namespace of its own."""

    def __init__(self, nbytes: int, stack: ExitStack) -> None:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name])
        ends = [["netns", NAMESPACES[0], "name", "veth0", "type", "veth"], ["netns", NAMESPACES[1], "name", "veth0"]]
        subprocess.run(["ip", "link", "add", *ends[0], "peer", *ends[1]], check=True)
        for name, host in zip(NAMESPACES, HOSTS, strict=True):
            for words in (["addr", "add", f"{host}/24", "dev", "veth0"], ["link", "set", "veth0", "up"]):
                subprocess.run(["ip", "-n", name, *words], check=True)
        token = new_token()
        # Its text, not its file: in that folder `import fastrt` would find another one.
        script = (Path(__file__).parent / "peers" / "native_end.py").read_text()
        self._source = self._start(stack, 0, "-c", script, "source", HOSTS[0], str(nbytes), token)
        self._taker = self._start(stack, 1, "-c", script, "taker", str(nbytes), token)
        self._addresses = json.loads(self._source.stdout.readline())
        self.processor: dict[str, list[tuple[float, float]]] = {}

    def _start(self, stack: ExitStack, k: int, *words: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(["ip", "netns", "exec", NAMESPACES[k], sys.executable, *words], **pipes)
        stack.callback(process.communicate)
        return process

    def pull(self, name: str, how: str, what: str) -> float:
        """Seconds of one transfer; processor seconds of source and taker are kept."""
        before = float(self._ask(self._source, "cpu"))
        seconds, used = json.loads(self._ask(self._taker, f"{self._addresses[how]} {how} {what}"))
        self.processor.setdefault(name, []).append((float(self._ask(self._source, "cpu")) - before, used))
        return float(seconds)

    def _ask(self, process: subprocess.Popen[str], line: str) -> str:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()


def compare_sealed(rounds: int, nbytes: int, json_path: str | None) -> None:
    """Measure the native stream in the clear and sealed, in turns."""
    small = "10,000 x 64 KiB"
    kinds = {"clear": ("clear", "one"), "sealed": ("sealed", "one")}
    kinds |= {f"clear, {small}": ("clear", "many"), f"sealed, {small}": ("sealed", "many")}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        ends = Namespaces(nbytes, stack)
        for _ in range(rounds + 1):
            for name, (how, what) in kinds.items():
                times[name].append(ends.pull(name, how, what))
    moved = {name: nbytes if what == "one" else MANY * EACH for name, (_, what) in kinds.items()}
    show(times, moved)
    for name, used in ends.processor.items():
        source, taker = (statistics.median(pair[k] for pair in used[1:]) * 2**30 / moved[name] for k in (0, 1))
        print(f"{name}: {source:.2f} processor seconds per GiB at the source, {taker:.2f} at the taker")
    for words in (["-evp", "aes-256-gcm"], ["-evp", "chacha20-poly1305"]) if shutil.which("openssl") else ():
        done = subprocess.run(
            ["openssl", "speed", "-seconds", "1", "-bytes", "16384", *words], capture_output=True, text=True
        )
        print(f"openssl speed: {done.stdout.splitlines()[-1]}")
    if json_path:
        with open(json_path, "w") as file:
            json.dump({"seconds": times, "processor": ends.processor}, file)


def _number(line: str) -> float | None:
    try:
        return float(line)
    except ValueError:
        return None


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that this program started."""
    process.kill()
    process.wait()


@contextmanager
def placed(nodes: TwoNodes, place: str) -> Iterator[None]:
    """Keep the two processes on one processor or on two for a while; threads that they start inherit it."""
    assert nodes.far is not None
    every = os.sched_getaffinity(0)
    processors = sorted(every)[: 1 + PLACES.index(place)]
    ends = ((os.getpid(), processors[0]), (nodes.far.pid, processors[-1]))
    try:
        for pid, processor in ends:
            pin(pid, {processor})
        yield
    finally:
        for pid, _ in ends:
            pin(pid, every)


def pin(pid: int, processors: set[int]) -> None:
    """Let all threads of a process run on these processors only."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), processors)


def add_small(runs: dict[str, Callable[[], float]], nodes: TwoNodes) -> None:
    """Add the rows of small objects, in each placement that this machine allows."""
    for place in PLACES[: len(os.sched_getaffinity(0))]:

        def at(place: str, each: Callable[[int, int], float]) -> float:
            with placed(nodes, place):
                return each(SMALLS, SMALL)

        runs[f"1 KiB, {place}, plain TCP"] = partial(at, place, nodes.send_each)
        runs[f"1 KiB, {place}"] = partial(at, place, nodes.deliver_each)


def has(python: str, module: str) -> bool:
    """Whether a Python can import a module."""
    try:
        return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0
    except OSError:
        return False


def timed(run: Callable[[], Any]) -> float:
    """Seconds of a call, as it reports them or else measured here."""
    start = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - start
    return float(found["seconds"]) if isinstance(found, dict) and "seconds" in found else seconds


@click.command()
@click.option("--rounds", default=9, show_default=True, help="How often everything is run, after once to warm up.")
@click.option("--size", default="1GiB", show_default=True, help="Of the large object.")
@click.option("--flight-python", default=sys.executable, help="A Python that has pyarrow.")
@click.option("--ray-python", default=sys.executable, help="A Python that has Ray.")
@click.option("--tls", is_flag=True, help="Compare the native stream clear and sealed between two namespaces instead.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Keep all times there.")
def main(rounds: int, size: str, flight_python: str, ray_python: str, tls: bool, json_path: str | None) -> None:
    """Measure, print the rates, and judge the required ratios."""
    nbytes = parse_bytes(size)
    if tls:
        compare_sealed(rounds, nbytes, json_path)
        return
    with ExitStack() as stack:
        nodes = stack.enter_context(TwoNodes(nbytes, new_token(), many=(MANY, EACH)))
        nodes.prepare(nbytes)
        paths = nodes.paths()
        runs: dict[str, Callable[[], float]] = {
            name: lambda run=paths[name]: timed(run) for name in ("plain TCP", "native", "grpc")
        }

        def many() -> float:
            seconds = timed(nodes.pull_many)
            nodes.drop_many()
            return seconds

        runs["10,000 x 64 KiB"] = many
        add_small(runs, nodes)
        runs["empty gRPC"] = EmptyStream(nbytes, stack)
        if shutil.which("iperf3"):
            runs["iperf3"] = Iperf(nbytes, stack)
        if has(flight_python, "pyarrow.flight"):
            runs["Arrow Flight"] = Flight(flight_python, nbytes, stack)
        if has(ray_python, "ray"):
            runs["Ray"] = Ray(ray_python, nbytes, stack)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds + 1):
            for name, run in runs.items():
                times[name].append(run())
    small = {name: SMALL for name in times if name.startswith("1 KiB")}
    moved = dict.fromkeys(times, nbytes) | {"10,000 x 64 KiB": MANY * EACH} | small
    show(times, moved)
    if json_path:
        with open(json_path, "w") as file:
            json.dump(times, file)


def show(times: dict[str, list[float]], moved: dict[str, int]) -> None:
    """Print the rates and the judgements; the first round, on fresh memory, is shown apart."""
    console = Console(width=None if Console().is_terminal else WIDTH)
    table = Table("path", "median GB/s", "best", "first", "us each", box=box.SIMPLE)
    for name, found in times.items():
        rates = [moved[name] / seconds / 1e9 for seconds in found]
        each = f"{statistics.median(found[1:]) * 1e6:.0f}" if moved[name] == SMALL else ""
        table.add_row(name, f"{statistics.median(rates[1:]):.2f}", f"{max(rates[1:]):.2f}", f"{rates[0]:.2f}", each)
    console.print(table)
    table = Table("required", "at least", "measured", "", box=box.SIMPLE)
    for name, beside, least in REQUIRED:
        if name.startswith("sealed") and name not in times:
            continue
        if name in times and beside in times:
            pairs = zip(times[name][1:], times[beside][1:], strict=True)
            ratio = statistics.median((moved[name] / a) / (moved[beside] / b) for a, b in pairs)
            verdict = "reached" if ratio >= least else "MISSED"
            table.add_row(f"{name} / {beside}", f"{least:g}", f"{ratio:.2f}", verdict)
        else:
            table.add_row(f"{name} / {beside}", f"{least:g}", "", "not measured")
    console.print(table)


if __name__ == "__main__":
    main()
