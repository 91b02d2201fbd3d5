"""A network between simulated processes: gRPC streams and native fetches, with delays and cuts.

A stream keeps its order; streams are delayed each by itself. The network can be cut in one direction or in both. Short
cuts delay messages, and long ones end the streams, as keepalives do, at each end at its own time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio

from fastrt._core.objects import remote
from fastrt.errors import FastrtError
from fastrt.net.grpc import streams
from fastrt.store.messages import Restore
from fastrt.transfer.table import TransferError

from .world import Process, World, pause

KEEPALIVE_S = (5.0, 10.0)  # a cut network is noticed between these times
CONNECT_S = 2.0  # for a connection over a network that is cut
SILENCE_S = 5.0  # until a fetch over a cut network fails
RESTORE_S = 0.05  # before a sender looks again for bytes that it has asked for
WINDOW = 16  # messages on the way before a writer waits


def _nothing() -> None:
    pass


class _Aborted(Exception):
    pass


class _End:
    """One end of a stream: what has arrived, and whether the stream has ended."""

    def __init__(self, process: Process, parse: Callable[[bytes], Any]) -> None:
        self.process = process
        self.parse = parse
        self.arrived: deque[Any] = deque()
        self.waiting: asyncio.Future[None] | None = None
        self.error: Exception | None = None
        self.is_over = False
        self.on_break: Callable[[], None] = _nothing

    def wake(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def read(self) -> AsyncIterator[Any]:
        while True:
            while self.arrived:
                data = self.arrived.popleft()
                if isinstance(data, Exception):
                    raise data
                if data is None:
                    return
                yield self.parse(data)
            if self.error is not None:
                raise self.error
            self.waiting = self.process.loop.create_future()
            await self.waiting


class _Stream:
    """A stream between two processes: two directions, each in order."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network = network
        self.processes = (client, server)
        self.ends: list[Any] = [None, None]
        self.is_broken = False
        self.last_at = [0.0, 0.0]
        self.on_way = [0, 0]
        self.held: list[deque[Any]] = [deque(), deque()]
        self.writers: list[deque[asyncio.Future[None]]] = [deque(), deque()]

    async def write(self, side: int, data: Any) -> None:
        if self.is_broken or self.ends[side].error is not None:
            raise asyncio.InvalidStateError("the stream has ended")
        self.network.messages += 1
        self.network.nbytes += len(data) if isinstance(data, bytes) else 0
        self.send(side, data)
        if self.on_way[side] > WINDOW:
            future = self.processes[side].loop.create_future()
            self.writers[side].append(future)
            await future

    def look(self, side: int, message: Any) -> None:
        """Carry out the faults that come with a message of this kind."""
        host = self.processes[side].host
        traps = self.network.traps.get(host)
        if not traps:
            return
        receiver = self.processes[1 - side].host
        for trap in [one for one in traps if one.is_for(receiver, message)]:
            trap.left -= 1
            if trap.left <= 0:
                traps.remove(trap)
                trap.stream = self
                self.network.world.after(trap.delay_s, partial(trap.then, receiver))

    def send(self, side: int, data: Any) -> None:
        network = self.network
        a, b = self.processes[side], self.processes[1 - side]
        at = max(self.last_at[side] + 1e-6, network.world.now + network.delay(a.host, b.host))
        self.last_at[side] = at
        self.on_way[side] += 1
        network.world.at(at, lambda: self.deliver(side, data))

    def deliver(self, side: int, data: Any) -> None:
        a, b = self.processes[side], self.processes[1 - side]
        if self.held[side] or self.network.is_cut(a.host, b.host):
            self.held[side].append(data)
            return
        self.on_way[side] -= 1
        while self.writers[side] and self.on_way[side] <= WINDOW:
            future = self.writers[side].popleft()
            if a.alive and not future.done():
                future.set_result(None)
        end = self.ends[1 - side]
        if b.alive and end is not None and end.error is None:
            end.arrived.append(data)
            end.wake()

    def heal(self) -> None:
        for side in (0, 1):
            a, b = self.processes[side], self.processes[1 - side]
            if self.held[side] and not self.network.is_cut(a.host, b.host):
                held, self.held[side] = self.held[side], deque()
                for data in held:
                    self.deliver(side, data)

    def end(self, side: int, why: str) -> None:
        """One end notices that the stream is broken; what has arrived before can still be read."""
        self.is_broken = True
        end, process = self.ends[side], self.processes[side]
        if end is None or end.error is not None or not process.alive:
            return
        end.error = _rpc_error(grpc.StatusCode.UNAVAILABLE, why)
        while self.writers[side]:
            future = self.writers[side].popleft()
            if not future.done():
                future.set_exception(end.error if side == 0 else asyncio.InvalidStateError(why))
        end.wake()
        end.on_break()
        self.network.streams.pop(self, None) if all(
            e is None or e.error is not None or not p.alive for e, p in zip(self.ends, self.processes, strict=True)
        ) else None


def _rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Context:
    side = 1

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream

    async def write(self, message: Any) -> None:
        if not isinstance(message, bytes):
            self.stream.look(1, message)
            message = message.SerializeToString()
        await self.stream.write(1, message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _Aborted(code, details)


class _Call:
    """The client's side of a stream, as gRPC's: an iterator of messages, with `write` and `done_writing`."""

    side = 0

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._opened: Any = None

    async def _open(self) -> Any:
        if self._opened is None:
            self._opened = self._channel.process.loop.create_task(self._channel.open())
        return await asyncio.shield(self._opened)

    @property
    def stream(self) -> Any:
        """The stream, once it is open."""
        return self._channel.stream

    async def write(self, message: Any) -> None:
        stream = await self._open()
        data = message.SerializeToString()
        if stream.ends[0].error is not None:
            raise stream.ends[0].error
        stream.look(0, message)
        await stream.write(0, data)

    async def done_writing(self) -> None:
        stream = await self._open()
        if not stream.is_broken:
            stream.send(0, None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        stream = await self._open()
        async for message in stream.ends[0].read():
            yield message


class Channel:
    """A channel to an address."""

    def __init__(self, network: Network, process: Process, address: str, parse_of: tuple[Any, Any], path: str) -> None:
        self.network, self.process, self.address, self.path = network, process, address, path
        self._request, self._response = parse_of
        self.stream: _Stream | None = None
        self._closed = False

    async def channel_ready(self) -> None:
        while not self.network.reaches(self.process, self.address):
            await pause(0.2)

    async def open(self) -> _Stream:
        network = self.network
        await pause(2 * network.delay(self.process.host, self.address))
        if not network.reaches(self.process, self.address):
            if network.is_far(self.process, self.address):
                await pause(CONNECT_S)
            if self._closed:
                raise asyncio.CancelledError  # nothing waits for it
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE, f"nothing answers at {self.address}")
        server, handlers = network.servers[self.address]
        stream = self.stream = _Stream(network, self.process, server)
        stream.ends[0] = _End(self.process, self._response.FromString)
        stream.ends[1] = _End(server, self._request.FromString)
        network.streams[stream] = None
        server.call(network.accept, server, stream, handlers[self.path])
        return stream

    async def close(self) -> None:
        if self.stream is not None and not self.stream.is_broken:
            self.network.break_stream(self.stream, "the client has cancelled the call")
        self._closed = True


@dataclass
class Trap:
    """A fault that comes with a message.

    Attributes:
        kind: of the message: a field of a frame; or with a dot, and a field of it that is set.
        left: how many of them are to come.
        delay_s: from the message, as it is sent, to the fault.
        then: called with the receiver's host.
        receiver: the host that it must be for; empty: any.
        stream: the stream of the last one.
        is_over: whether the fault has come.
    """

    kind: str
    left: int
    delay_s: float
    then: Callable[[str], None]
    receiver: str = ""
    stream: Any = None
    is_over: bool = False

    def is_for(self, receiver: str, frame: Any) -> bool:
        """Return whether a frame has such a message."""
        kind, _, part = self.kind.partition(".")
        if self.receiver not in ("", receiver) or kind not in {field.name for field, _ in frame.ListFields()}:
            return False
        return not part or any(getattr(one, part) for one in getattr(frame, kind))


class Network:
    """Addresses, streams, cuts and delays."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[str, tuple[Process, dict[str, Any]]] = {}
        self.hosts: dict[str, str] = {}  # by address
        self.streams: dict[_Stream, None] = {}
        self.cuts: dict[tuple[str, str], int] = {}
        self.spread_s: dict[tuple[str, str], float] = {}
        self.natives: dict[str, Any] = {}
        self.traps: dict[str, list[Trap]] = {}  # by the sender's host
        self.messages = self.nbytes = self.fetched = 0
        self.bytes_a_second = 1e8

    def host_of(self, address: str) -> str:
        return self.hosts.get(address.rpartition(":")[0], address)

    def delay(self, a: str, b: str) -> float:
        rng = self.world.rng
        b = self.host_of(b) if ":" in b else b
        if a == b:
            return 20e-6 + 50e-6 * rng.random()
        base = self.spread_s.get((a, b), 0.001)
        return 100e-6 + base * rng.random() * (20 if rng.random() < 0.03 else 1)

    def is_cut(self, a: str, b: str) -> bool:
        return a != b and self.cuts.get((a, b), 0) > 0

    def is_far(self, process: Process, address: str) -> bool:
        host = self.host_of(address)
        return self.is_cut(process.host, host) or self.is_cut(host, process.host)

    def reaches(self, process: Process, address: str) -> bool:
        found = self.servers.get(address)
        return found is not None and found[0].alive and not self.is_far(process, address)

    def cut(self, a: str, b: str, seconds: float, both: bool) -> None:
        """Cut the way from one host to another; a long cut ends the streams between them."""
        ways = [(a, b), (b, a)] if both else [(a, b)]
        for way in ways:
            self.cuts[way] = self.cuts.get(way, 0) + 1

        def heal() -> None:
            for way in ways:
                self.cuts[way] -= 1
            for stream in list(self.streams):
                stream.heal()

        def notice(stream: _Stream, side: int) -> None:
            first, second = (one.host for one in stream.processes)
            if self.is_cut(first, second) or self.is_cut(second, first) or stream.is_broken:
                stream.end(side, "keepalive watchdog timeout")

        for stream in list(self.streams):
            if {a, b} == {one.host for one in stream.processes}:
                lasts = [self.world.rng.uniform(*KEEPALIVE_S) for _ in range(2)]
                for side in (0, 1) if min(lasts) < seconds else ():  # the second one finds the connection closed
                    self.world.after(lasts[side], lambda stream=stream, side=side: notice(stream, side))
        self.world.after(seconds, heal)

    def break_stream(self, stream: _Stream, why: str) -> None:
        """End a stream from one side: the other one notices a moment later, after what was sent before."""
        for side in (0, 1):
            a, b = stream.processes[1 - side], stream.processes[side]
            at = max(stream.last_at[1 - side] + 2e-6, self.world.now + self.delay(a.host, b.host))
            self.world.at(at, lambda side=side: stream.end(side, why))
        stream.is_broken = True

    def reset(self, a: str, b: str, seconds: float) -> None:
        """Break the streams between two hosts: the first notices at once, the second after a while."""
        for stream in list(self.streams):
            hosts = [one.host for one in stream.processes]
            if {a, b} == set(hosts):
                side = hosts.index(a)
                stream.end(side, "the connection was reset")
                self.world.after(
                    seconds, lambda stream=stream, side=side: stream.end(1 - side, "keepalive watchdog timeout")
                )

    def process_died(self, process: Process) -> None:
        for stream in list(self.streams):
            if process in stream.processes:
                self.break_stream(stream, "Socket closed")

    def forget(self) -> None:
        """Let go of all processes, after the end of a run."""
        self.servers.clear()
        self.streams.clear()
        self.natives.clear()

    def accept(self, server: Process, stream: _Stream, handler: Any) -> None:
        """Serve a stream in the server's process."""
        end = stream.ends[1]

        async def serve() -> None:
            status: Any = None
            try:
                await handler(end.read(), _Context(stream))
            except _Aborted as exc:
                status = _rpc_error(*exc.args)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as exc:
                status = _rpc_error(grpc.StatusCode.UNKNOWN, str(exc))
            if not stream.is_broken:
                stream.send(1, status)
                stream.is_broken = True
                self.world.at(stream.last_at[1] + 1e-6, lambda: stream.end(0, "the stream has ended"))
                end.error = _rpc_error(grpc.StatusCode.CANCELLED, "served")

        task = server.loop.create_task(serve())
        task.add_done_callback(
            lambda task: None if task.cancelled() or task.exception() is None else server.failed(task.exception())
        )
        end.on_break = lambda: server.call(task.cancel)

    # ---- in place of fastrt.net.grpc.streams ----

    async def serve(self, address: str, access: Any, set_: Any, handlers: Any, stopping: Any, most: int = -1) -> Any:
        process = self.world.current
        assert process is not None
        self.hosts[address.rpartition(":")[0]] = process.host
        self.servers[address] = process, {path: streams._until(stopping, one) for path, one in handlers.items()}

        class Server:
            async def stop(self, seconds: float) -> None:
                await pause(0.01)

        return Server(), address

    def open_stream(self, address: str, access: Any, set_: Any, path: str) -> Any:
        process = self.world.current
        assert process is not None
        _, service, method = path.split("/")
        channel = Channel(self, process, address, set_.methods(service)[method], path)
        return channel, lambda: _Call(channel)

    # ---- in place of the native stream ----

    def fetch(self, process: Process, receipt: Any, address: str) -> None:
        """Bring a value: its bytes come in one piece, after a delay for its size."""
        fetching = _Fetch(self, process, receipt, address)
        self.world.after(self.delay(process.host, address), fetching.ask)


class _Copy(NamedTuple):
    """The bytes of a value on their way."""

    pin: bytes
    kind: int
    is_error: bool


class _Fetch:
    """One value on its way over the native stream."""

    def __init__(self, network: Network, process: Process, receipt: Any, address: str) -> None:
        self.network, self.world = network, network.world
        self.process, self.receipt, self.address = process, receipt, address

    def ask(self) -> None:
        """The sender reads the value."""
        network, world, process = self.network, self.world, self.process
        native = network.natives.get(self.address)
        if native is None or not native.process.alive:
            error = TransferError("connection refused")
            world.after(network.delay("", process.host), lambda: self.end(error))
            return
        host = native.process.host
        if network.is_cut(process.host, host) or network.is_cut(host, process.host):
            world.after(SILENCE_S, lambda: self.end(TransferError("silence")))
            return
        store, ref = native.offers.store, native.offers.find(self.receipt.objref)
        if ref is not None and remote.is_missing(store.client, ref):  # the real sender's thread waits for the bytes
            store.tell(Restore(ref.index, ref.objref))
            world.after(RESTORE_S, self.ask)
            return
        try:  # of a spilled value, too, in the sender's thread
            sealed = native.offers.read(self.receipt.objref)
        except FastrtError as exc:
            refused = exc.with_traceback(None)
            if not native.process.alive:  # it was killed while this thread waited for a spilled value
                refused = TransferError("the connection was reset")
            world.after(network.delay(host, process.host), lambda: self.end(refused))
            return
        copy = _Copy(bytes(sealed.pin), sealed.kind, sealed.is_error)
        part = (self.receipt.until or len(copy.pin)) - self.receipt.received
        network.fetched += part
        lasts = network.delay(host, process.host) + part / network.bytes_a_second
        world.after(lasts, lambda: self.arrive(native.process, copy))

    def arrive(self, sender: Process, copy: _Copy) -> None:
        """The bytes are there, unless the sender or the network is gone."""
        if not sender.alive:
            self.end(TransferError("the connection was reset"))
        elif self.network.is_cut(sender.host, self.process.host):
            self.world.after(SILENCE_S, lambda: self.end(TransferError("silence")))
        else:
            self.end(None, copy)

    def end(self, error: Exception | None, copy: _Copy | None = None) -> None:
        """Hand the bytes or the error to the receiver's process."""

        def landed() -> None:
            if self.receipt.ended:
                return
            if copy is None:
                self.receipt.fail(error)
                return
            try:
                view = self.receipt.allocate(len(copy.pin), copy.kind, copy.is_error)
                part = slice(self.receipt.received, self.receipt.until or None)
                view[part] = copy.pin[part]
                del view
                self.receipt.seal()
            except FastrtError as exc:
                self.receipt.fail(exc)

        self.process.call(landed)
