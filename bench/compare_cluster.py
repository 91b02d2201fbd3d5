"""A parameter-server cluster of many simulated members: register, scale out by a tenth, finish.

    python bench/compare_cluster.py [MEMBERS ...]

The scheduler is a process of its own, as `fastrt ps scheduler` runs it; the members are simulated by this process, each
with a port and a connection of its own, and speak the framing over TCP. Printed for each size: seconds of each part,
milliseconds a member, and megabytes of metadata, which the protocol sends whole to each member, so that its bytes grow
with the square.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastrt.membership import wire
from fastrt.membership.events import Phase, Role
from fastrt.membership.framing import Frame, Kind
from fastrt.membership.http import request
from fastrt.membership.links import FrameConnection
from fastrt.membership.wire import Command, Meta, request_frame
from fastrt.net.grpc.trust import trust_of

BAR_S = 5.0  # for 1,000 members, of the whole
SIZES = (250, 500, 1000)
_LIMIT = 64 << 20
_PATIENCE_S = 120.0


class Simulated:
    """One member: answers the scheduler's commands, and counts them."""

    def __init__(self, role: Role, name: str) -> None:
        self.role, self.name = role, name
        self.port = 0
        self.number = 0
        self.metadata = 0
        self.metadata_bytes = 0
        self.seen: dict[int, int] = {}
        self.rank: int | None = None
        self.out = FrameConnection(self._response, lambda reason: None, _LIMIT)
        self.server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(self._accept, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        await loop.create_connection(lambda: self.out, host, port)

    def ask(self, command: int, data: bytes, kind: int = Kind.PROTOBUF) -> None:
        self.number += 1
        self.out.send(request_frame(command, self.number, data, self.role, self.rank, kind))

    def register(self) -> None:
        message = wire.RegisterMessage(ip="127.0.0.1", port=self.port, node_id=self.name, role=int(self.role))
        self.ask(Command.REGISTER, message.SerializeToString())

    def close(self) -> None:
        self.out.close("done")
        if self.server is not None:
            self.server.close()

    def _accept(self) -> asyncio.Protocol:
        made = FrameConnection(lambda frame: self._request(made, frame), lambda reason: None, _LIMIT)
        return made

    def _request(self, connection: FrameConnection, frame: Frame) -> None:
        connection.send(Frame(Kind.RAW, frame.meta, frame.data))
        command = Meta.FromString(frame.meta).cmd
        self.seen[command] = self.seen.get(command, 0) + 1
        if command == Command.SEND_METADATA:
            metadata = wire.SendMetadata.FromString(frame.data)
            self.rank = metadata.rank_id
            self.metadata_bytes += len(frame.data)
            if metadata.cluster_state == Phase.SCALE_OUT:
                self.ask(Command.SCALE_OUT_DONE, wire.ScaleOutDone(node_id=self.name).SerializeToString())
        elif command == Command.SCALE_OUT:
            self.register()

    def _response(self, frame: Frame) -> None:
        pass


@contextmanager
def scheduler(workers: int, servers: int) -> Iterator[tuple[str, str, str]]:
    """A scheduler's process: its address, its HTTP, and the token."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        words = ["scheduler", "--allow-anonymous", "--address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
        words += ["--token-file", str(token), "--state-dir", str(Path(folder, "state"))]
        words += ["--num-workers", str(workers), "--num-servers", str(servers)]
        command = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "ps", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("cluster of"))
            address, http = re.findall(r"[\d.]+:\d+", line)
            yield address, http, token.read_text().strip()
        finally:
            process.terminate()
            process.communicate()


def scale_out(http: str, token: str, workers: int, servers: int) -> None:
    body = json.dumps({"worker_num": workers, "server_num": servers}).encode()
    status, answer = request(http, trust_of(token), "POST", "/scaleout", body, _PATIENCE_S)
    assert status == 200, answer


async def seen(members: list[Simulated], command: int, count: int) -> None:
    """Wait until all members have received a command `count` times."""
    until = time.monotonic() + _PATIENCE_S
    waiting = members
    while waiting := [one for one in waiting if one.seen.get(command, 0) < count]:
        assert time.monotonic() < until, f"{len(waiting)} members wait for {Command.name(command)}"
        await asyncio.sleep(0.002)


async def live(count: int, address: str, http: str, token: str) -> dict[str, float]:
    """A cluster's whole life; seconds of each part."""
    host, _, port = address.rpartition(":")
    extra = count // 10
    servers = count // 10

    def make(first: int, last: int, role: Role) -> list[Simulated]:
        return [Simulated(role, f"{role.name.lower()}-{i:05d}") for i in range(first, last)]

    members = make(0, count - servers, Role.WORKER) + make(0, servers, Role.SERVER)
    fresh = make(servers, servers + extra, Role.SERVER)
    took: dict[str, float] = {}
    begun = time.monotonic()
    for one in members:
        await one.open(host, int(port))
        one.register()
    await seen(members, Command.SEND_METADATA, 1)
    took["register"] = time.monotonic() - begun
    await asyncio.to_thread(scale_out, http, token, 0, extra)
    for one in fresh:
        await one.open(host, int(port))
        one.register()
    all_members = members + fresh
    await seen(all_members, Command.SCALE_OUT_DONE, 1)
    took["scale out"] = time.monotonic() - begun - took["register"]
    ranks = {(one.role, one.rank) for one in all_members}
    assert len(ranks) == len(all_members), "two members have one rank"
    for one in all_members:
        one.ask(Command.FINISH, one.name.encode(), Kind.RAW)
    await seen(all_members, Command.FINISH, 1)
    took["whole"] = time.monotonic() - begun
    took["finish"] = took["whole"] - took["register"] - took["scale out"]
    took["MB"] = sum(one.metadata_bytes for one in all_members) / 1e6
    for one in all_members:
        one.close()
    await asyncio.sleep(0.05)
    return took


def measure(count: int) -> dict[str, float]:
    """One cluster's life, with a scheduler of its own."""
    servers = count // 10
    with scheduler(count - servers, servers) as (address, http, token):
        return asyncio.run(live(count, address, http, token))


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    print(f"{os.cpu_count()} CPUs; members register, {'a tenth more servers join'}, all finish")
    print(f"{'members':>8} {'register':>9} {'scale out':>10} {'finish':>8} {'whole':>8} {'ms each':>8} {'metadata':>9}")
    each = []
    for count in sizes:
        took = measure(count)
        each.append(took["whole"] * 1000 / count)
        print(
            f"{count:8d} {took['register']:8.2f}s {took['scale out']:9.2f}s {took['finish']:7.2f}s "
            f"{took['whole']:7.2f}s {each[-1]:8.2f} {took['MB']:7.1f}MB"
        )
        if count == 1000:
            print(f"{'':8} {'within' if took['whole'] < BAR_S else 'MISSES'} the bar of {BAR_S:g} s")
    print(f"cost of a member at {sizes[-1]} over that at {sizes[0]}: {each[-1] / each[0]:.2f}")


if __name__ == "__main__":
    main()
