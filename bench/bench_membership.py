"""The head of a cluster: processor time and bytes by the number of nodes, each of which reports ten times a second.

`python bench/bench_membership.py [NODES...]` drives the head's state machine alone, with all serialisation but without
gRPC, through 20 s of simulated time. One node in a hundred has work to place; then the same with all of them.

`python bench/bench_membership.py --streams NODES RATE [SECONDS]` measures a real head over gRPC with TLS: this process
plays the nodes, each with a connection of its own and RATE reports a second. RATE 0 measures an idle cluster.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc.aio
import psutil
import pytest

from fastrt.cluster.membership import JOIN
from fastrt.cluster.views import Views
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.forks import use_grpc
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.streams import Access
from fastrt.runtime.processes import prepare_service, start_service

NODES = (10, 100, 1000)
REPORTS_A_S = 10
SECONDS = 20
WARM_S = 10
FORMS = 7  # of the load of a node, in turn
_Report = message_set("node").message("fastrt.node.Report")
_PART = 10_000


def report(node: int, form: int, looking: bool) -> Any:
    """A report as a node of four workers sends it, with a load that differs from the one before."""
    return _Report(
        node=f"{node:032x}",
        address=f"10.0.{node >> 8}.{node & 255}:41234",
        native=f"10.0.{node >> 8}.{node & 255}:41235",
        name=f"node-{node}.cluster.local",
        workers=4,
        idle=form % 5,
        queued=form,
        total={"CPU": 4 * _PART, "memory": 64 * _PART},
        free={"CPU": form % 5 * _PART, "memory": (64 - form) * _PART},
        looking=looking,
    )


class Cost(NamedTuple):
    """Of the head: processor time, bytes and messages for each second; and how old a node's view is at most."""

    cpu: float
    bytes_in: float
    bytes_out: float
    views: float
    oldest_s: float


def simulate(nodes: int, looking: int) -> Cost:
    """Play reports of all nodes into the state machine, evenly spread over time."""
    views = Views("c" * 32)
    wires = [[report(k, form, k < looking).SerializeToString() for form in range(FORMS)] for k in range(nodes)]
    rate = nodes * REPORTS_A_S
    cpu_s = bytes_in = bytes_out = written = 0
    served = dict.fromkeys(range(nodes), 0.0)
    oldest_s = 0.0
    begun = 0.0
    for count in range(rate * (SECONDS + WARM_S)):
        if count == rate * WARM_S:
            begun = time.process_time()
            bytes_in = bytes_out = written = 0
        now, wire = count / rate, wires[count % nodes][count // nodes % FORMS]
        views.report(count % nodes, _Report.FromString(wire))
        bytes_in += len(wire)
        due_at = views.next_at()
        while due_at is not None and due_at <= now:
            for stream, data in views.due(now):
                bytes_out += len(data)
                written += 1
                if begun and stream >= looking:
                    oldest_s = max(oldest_s, now - served[stream])
                served[stream] = now
                views.written(stream)
            due_at = views.next_at()
    cpu_s = time.process_time() - begun
    return Cost(cpu_s / SECONDS, bytes_in / SECONDS, bytes_out / SECONDS, written / SECONDS, oldest_s)


@pytest.mark.parametrize("nodes", NODES)
def test_report(measure: Any, nodes: int) -> None:
    """One report and the views that follow from it."""
    views, count = Views("c" * 32), 0
    wires = [[report(k, form, k == 0).SerializeToString() for form in range(FORMS)] for k in range(nodes)]

    def thousand() -> None:
        nonlocal count
        for _ in range(1000):
            views.report(count % nodes, _Report.FromString(wires[count % nodes][count // nodes % FORMS]))
            for stream, _ in views.due(count / (nodes * REPORTS_A_S)):
                views.written(stream)
            count += 1

    measure(thousand, per=1000)


@contextmanager
def running_head() -> Iterator[tuple[psutil.Process, str, Access]]:
    """A head's process; its address, and what nodes need to join it."""
    identity = Identity.from_token(new_token())
    settings = {
        "identity": identity.for_child(),
        "tls": None,
        "insecure": False,
        "listen": "127.0.0.1:0",
        "own": "",
    }
    process = prepare_service("fastrt.cluster.head", "head")
    address = start_service(process, settings, 30.0)
    try:
        yield psutil.Process(process.pid), address, Access(identity)
    finally:
        process.terminate()
        process.wait()


class Nodes:
    """Streams of many nodes to one head."""

    def __init__(self, address: str, access: Access, count: int) -> None:
        self._address = address
        self._options = [*access.identity.channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        self._credentials = access.identity.channel_credentials()
        self.count = count
        self.calls: dict[int, Any] = {}
        self.received = self.bytes_received = self.sent = 0
        self._channels: list[Any] = []

    async def join(self) -> None:
        """Open the streams, some at a time, and wait until each has its first view."""
        opened = asyncio.Semaphore(64)

        async def one(k: int) -> None:
            async with opened:
                channel = grpc.aio.secure_channel(self._address, self._credentials, options=self._options)
                call = channel.stream_stream(JOIN)()
                self._channels.append(channel)
                await call.write(report(k, 0, k % 100 == 0).SerializeToString())
                self._took(await call.read())
                self.calls[k] = call

        await asyncio.gather(*map(one, range(self.count)))
        self._reading = [asyncio.create_task(self._read(call)) for call in self.calls.values()]

    async def _read(self, call: Any) -> None:
        while True:
            data = await call.read()
            if data is grpc.aio.EOF:
                return
            self._took(data)

    def _took(self, data: bytes) -> None:
        self.received += 1
        self.bytes_received += len(data)

    async def report(self, rate: float, seconds: float) -> None:
        """Report from all nodes in turn, `rate` times a second each."""
        wires = [
            [report(k, form, k % 100 == 0).SerializeToString() for form in range(FORMS)] for k in range(self.count)
        ]
        begun = time.monotonic()
        sent = 0
        while (now := time.monotonic() - begun) < seconds:
            upto = int(now * rate * self.count)
            turns = range(sent, min(upto, sent + 200))
            await asyncio.gather(*(self._write(k, wires) for k in turns)) if turns else await asyncio.sleep(0.01)
            sent += len(turns)
            self.sent += len(turns)

    async def _write(self, k: int, wires: list[list[bytes]]) -> None:
        node = k % self.count
        await self.calls[node].write(wires[node][k // self.count % FORMS])


async def measure_streams(nodes: int, rate: float, seconds: float) -> None:
    """Print what a real head costs."""
    use_grpc()
    with running_head() as (head, address, access):
        all_nodes = Nodes(address, access, nodes)
        begun = time.monotonic()
        await all_nodes.join()
        joined_s = time.monotonic() - begun
        await asyncio.sleep(1.0)
        if rate:
            await all_nodes.report(rate, 3.0)
        before = sum(head.cpu_times()[:2]), all_nodes.sent, all_nodes.bytes_received, all_nodes.received
        begun = time.monotonic()
        await (all_nodes.report(rate, seconds) if rate else asyncio.sleep(seconds))
        took = time.monotonic() - begun
        after = sum(head.cpu_times()[:2]), all_nodes.sent, all_nodes.bytes_received, all_nodes.received
        cpu, sent, nbytes, views = ((b - a) / took for a, b in zip(before, after, strict=True))
        print(
            f"{nodes} nodes joined in {joined_s:.1f} s; {sent:,.0f} reports/s, {cpu:.3f} cores of the head"
            + (f" ({1e6 * cpu / sent:.0f} us a report)" if sent else "")
            + f", {nbytes / 1e3:,.1f} kB/s in {views:,.1f} views/s, "
            f"{head.memory_info().rss >> 20} MiB, {head.num_fds()} descriptors",
            flush=True,
        )


def main() -> None:
    """Print the costs."""
    if sys.argv[1:2] == ["--streams"]:
        nodes, rate = int(sys.argv[2]), float(sys.argv[3])
        asyncio.run(measure_streams(nodes, rate, float(sys.argv[4]) if len(sys.argv) > 4 else 10.0))
        return
    print(f"the head's state machine, {REPORTS_A_S} reports/s of each node, {SECONDS} s of simulated time")
    print("nodes   looking  cores   kB/s in  kB/s out  a node  views/s  oldest view of a node that is not looking")
    for nodes in [int(word) for word in sys.argv[1:]] or NODES:
        for looking in (max(1, nodes // 100), nodes):
            cost = simulate(nodes, looking)
            print(
                f"{nodes:5} {looking:9} {cost.cpu:6.3f} {cost.bytes_in / 1e3:9,.0f} {cost.bytes_out / 1e3:9,.0f} "
                f"{cost.bytes_out / nodes / 1e3:7.1f} {cost.views:8.0f}  {cost.oldest_s:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
