"""A node's connections in the simulator: a waiter without a thread, the daemon's sockets, and the native stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrt.cluster.large_values import Offers
from fastrt.node.admission import Admission
from fastrt.store import messages
from fastrt.store.client import Store
from fastrt.store.waiter import LoopWaiter

from .world import Process, World

if TYPE_CHECKING:
    from .node import Node

BACKLOG_S = 300e-6


class SimWaiter(LoopWaiter):
    """A waiter without a thread: the node polls it after each step of a process there."""

    def __init__(self, store: Store, loop: Any) -> None:
        super().__init__(store, loop)
        self._process = loop._process
        self._process.waiter = self
        self._serving = False
        self._due = 0.0

    def _start(self) -> None:
        self._running = True

    def stir(self) -> None:
        self._due = 0.0

    def poll(self) -> None:
        if self._serving or self._ended or not self._process.alive:
            return
        found = self._watch.wait(0.0) if len(self._watch) else []
        now = self._process.world.now
        if found or (self._sources and (now >= self._due or self._watch.word() != self._seen)):
            self._serving = True
            world = self._process.world
            share, most_s = world.late
            late_s = world.rng.random() * most_s if world.rng.random() < share else 0.0
            self.loop.call_later(late_s, self._serve, found[::-1])

    def _rest(self) -> None:
        super()._rest()
        self._serving = False
        world = self._process.world
        self._due = world.now + self._patience_s
        if self._sources and self._patience_s < 60.0:
            world.at(max(self._due, world.now + 1e-6), self.poll)


class SimAdmission(Admission):
    """The daemon's admission; the node calls `refresh` when a record has changed."""

    def _listen(self) -> None:
        pass

    def take_over(self, is_counting: bool) -> None:
        self._folder = Path("/no folder")
        super().take_over(is_counting)


class Link:
    """The daemon's end of a connection, or the uplink's: messages arrive in order, after a moment."""

    def __init__(self, world: World, receive: Callable[[Any], None], repeats: tuple[type, ...] = ()) -> None:
        self._world = world
        self._receive = receive
        self._repeats = repeats
        self._last_at = 0.0
        self.is_open = True

    def post(self, message: Any) -> bool:
        times = 2 if isinstance(message, self._repeats) and self._world.rng.random() < 0.05 else 1
        for _ in range(times):
            self._last_at = max(self._last_at + 1e-6, self._world.now + BACKLOG_S * self._world.rng.random())
            self._world.at(self._last_at, lambda: self._receive(message) if self.is_open else None)
        return self.is_open

    send = post

    def fileno(self) -> int:
        return 1


class Lasting:
    """The uplink's connection to its daemon."""

    def __init__(self, node: Node, process: Process) -> None:
        self.to_uplink = Link(node.world, lambda message: process.call(self.deliver, message),
                              (messages.Forward, messages.Fetch, messages.Resources))  # fmt: skip
        self._node = node
        self.to_daemon = Link(node.world, self._arrive)
        self.deliver: Callable[[Any], None] = lambda message: None

    def send(self, message: Any) -> bool:
        return self.to_daemon.post((self._node.daemons.number, message))

    def _arrive(self, sent: tuple[int, Any]) -> None:
        number, message = sent
        self._node.daemons.reach(number, lambda: self._node.on_message(self.to_uplink, message))

    def close(self) -> None:
        self.to_uplink.is_open = False


class Native:
    """A node's native stream: only the table of what it offers."""

    def __init__(self, store: Store, access: Any, process: Process, address: str) -> None:
        self.offers = Offers(store)
        self.access = access
        self.process = process
        self.address = address
        process.world.network.natives[address] = self

    def close(self) -> None:
        self.process.world.network.natives.pop(self.address, None)


class Puller:
    """Brings values over the world's network."""

    def __init__(self, table: Any, identity: Any, *args: Any) -> None:
        self._table = table
        self._process = asyncio.get_running_loop()._process  # type: ignore[attr-defined]

    def fetch(self, receipts: list[Any], address: str) -> None:
        for receipt in receipts:
            self._process.world.network.fetch(self._process, receipt, address)

    def cancel(self, receipt: Any) -> None:
        pass

    def close(self) -> None:
        pass
