"""Stores with arenas of their own in one process, servers over them, and a TCP proxy that breaks what passes."""

import contextlib
import gc
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt._core.repair.fsck import fsck, usage
from fastrt.net.grpc import proof
from fastrt.net.grpc.channel import bearer
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.objstore.service import ObjStoreServer
from fastrt.store.client import Store
from fastrt.transfer.pull import Puller
from fastrt.transfer.source import Source
from fastrt.transfer.table import Table

TOKEN = new_token()
IDENTITY = Identity.from_token(TOKEN)
PATIENCE_S = 20.0
PAGE = 1 << 14
SLAB_PAGES_KEPT = 6  # each size class of the arena keeps one empty page
SERVICE = message_set("ray").methods("ObjStore")


class Site:
    """A store with an arena of its own, without a daemon."""

    def __init__(self, store_bytes: int = 64 << 20) -> None:
        self.segment = Segment.create(store_bytes, objects_max=1 << 15, tasks_max=1 << 10)
        index, gen = admit(self.segment, os.getpid(), KIND_DRIVER, "test")
        client = Client(self.segment, index, gen)
        client.adopt_job(client.job)
        self.store = Store(client, 0.0)
        self.table = Table(self.store)
        self.token: str | None = TOKEN
        self.tls = False

    def source(self, **options: Any) -> Source:
        return Source(self.table, IDENTITY, **{"tls_on_loopback": self.tls, **options})

    def puller(self, **options: Any) -> Puller:
        defaults = {"timeout_s": PATIENCE_S, "tls_on_loopback": self.tls}
        return Puller(self.table, IDENTITY, **{**defaults, **options})

    def serve(self, **options: Any) -> ObjStoreServer:
        native = None if options.get("token", TOKEN) is None or "tls" in options else IDENTITY
        defaults = {"token": TOKEN, "insecure": True, "native_identity": native}
        server = ObjStoreServer(self.store, **{**defaults, **options})
        self.table, self.token = server.table, options.get("token", TOKEN)
        server.start()
        return server

    def put(self, objref: int, value: Any) -> None:
        self.table.add(objref, self.store.put(value))

    def get(self, objref: int) -> Any:
        ref = self.table.find(objref)
        assert ref is not None
        return self.store.get(ref)

    def used(self) -> tuple[int, int]:
        """How many objects there are, and bytes beyond the pages that the arena keeps."""
        found = usage(self.store.client)
        return found["objects"], max(0, found["bytes_used"] - SLAB_PAGES_KEPT * PAGE)

    def wait_until_empty(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.used() != (0, 0):
            gc.collect()
            assert time.monotonic() < until, f"left in the arena: {usage(self.store.client)}"

    def close(self) -> None:
        try:
            self.table.clear()
            self.wait_until_empty()
            assert fsck(self.store.client, quiet=True) == []
        finally:
            self.segment.unlink()


class Pair:
    """Two stores: one that has objects, one that wants them, and the native stream between."""

    def __init__(self, here: Site, there: Site, closing: Callable[[Any], Any], tls: bool = False) -> None:
        self.here, self.there = here, there
        here.tls = there.tls = tls
        self.source: Source = closing(here.source(timeout_s=PATIENCE_S))
        self._closing = closing

    def puller(self, **options: Any) -> Puller:
        puller: Puller = self._closing(self.there.puller(**options))
        return puller

    def proxy(self, **options: Any) -> "Proxy":
        if not self.here.tls:
            self._closing(Unbound())
        proxy: Proxy = self._closing(Proxy(self.source.address, **options))
        return proxy


class Unbound:
    """Has proofs in the clear leave out what each side sees of the connection: a proxy is refused as a relay else."""

    def __init__(self) -> None:
        self._before = proof.binding_of
        proof.binding_of = lambda sock, server: "relayed"

    def close(self) -> None:
        proof.binding_of = self._before


class Proxy:
    """Passes TCP on, and breaks it.

    Args:
        target: host:port.
        plans: what happens to the first connections, one each: ("cut", n) closes both ends after n bytes from the
            target, ("reset", n) resets them, ("stall", n) passes nothing more, ("flip", n) inverts the n-th byte,
            ("swap", n) exchanges the halves of the piece with the n-th byte, ("pass", 0) does nothing. Later
            connections fare as `then`.
        then: a plan for all further connections.
        rate: bytes a second from the target; None for as fast as it goes.
        port: where it listens; 0: anywhere.
        upward: whether it is what the connecting side sends that is counted, broken and slowed down.
    """

    def __init__(
        self, target: str, plans: Any = (), then: tuple[str, int] = ("pass", 0), rate: int | None = None,
        upward: bool = False, port: int = 0,
    ) -> None:  # fmt: skip
        host, _, number = target.rpartition(":")
        self._target = (host, int(number))
        self._plans = list(plans)
        self._then = then
        self._rate = rate
        self._upward = upward
        self.passed = 0  # bytes that were counted, on all connections
        self.sent: list[bytearray] = []  # what each connection's taker has sent
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def close(self) -> None:
        self._end.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                taker, _ = self._listener.accept()
            except OSError:
                continue
            self.connections += 1
            plan = self._plans.pop(0) if self._plans else self._then
            thread = threading.Thread(target=self._pass, args=(taker, plan))
            self._threads.append(thread)
            thread.start()

    def _pass(self, taker: socket.socket, plan: tuple[str, int]) -> None:
        what, at = plan
        sent = bytearray()
        self.sent.append(sent)
        count = 0
        try:
            target = socket.create_connection(self._target)
        except OSError:
            taker.close()
            return
        plain, counted = (target, taker) if self._upward else (taker, target)
        with taker, target, selectors.DefaultSelector() as selector:
            selector.register(taker, selectors.EVENT_READ)
            selector.register(target, selectors.EVENT_READ)
            while not self._end.is_set():
                if what == "cut" and count >= at:
                    return
                if what == "reset" and count >= at:
                    for sock in (taker, target):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                for key, _ in selector.select(0.02):
                    try:
                        if key.fileobj is plain:
                            data = plain.recv(65536)
                            sent += data
                            counted.sendall(data)
                        elif what == "stall" and count >= at:
                            self._end.wait(0.01)
                            continue
                        else:
                            most = 65536 if self._rate is None else max(1, self._rate // 100)
                            if what in ("cut", "reset", "stall"):
                                most = min(most, at - count)
                            data = counted.recv(most)
                            if what == "swap" and count <= at < count + len(data):
                                half = len(data) // 2
                                data = data[half:] + data[:half]
                            if what == "flip" and count <= at < count + len(data):
                                data = data[: at - count] + bytes([data[at - count] ^ 255]) + data[at - count + 1 :]
                            count += len(data)
                            self.passed += len(data)
                            plain.sendall(data)
                            if self._rate is not None:
                                self._end.wait(len(data) / self._rate)
                    except OSError:
                        return
                    if not data:
                        return


class Caller:
    """A client of an ObjStore, made from the descriptors alone, as one in another language would be."""

    def __init__(self, address: str, token: str | None = TOKEN, credentials: Any = None) -> None:
        self.channel = (
            grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
        )
        self.metadata = bearer(token) if token is not None else ()

    def __call__(self, method: str, **fields: Any) -> Any:
        request, reply = SERVICE[method]
        call = self.channel.unary_unary(f"/ObjStore/{method}", request.SerializeToString, reply.FromString)
        return call(request(**fields), timeout=PATIENCE_S, metadata=self.metadata)

    def stream(self, chunks: Any) -> Any:
        """StreamObj: chunks as (objref, totalsize, data)."""
        request, reply = SERVICE["StreamObj"]
        call = self.channel.stream_unary("/ObjStore/StreamObj", request.SerializeToString, reply.FromString)
        messages = (request(objref=a, totalsize=b, data=c) for a, b, c in chunks)
        return call(messages, timeout=PATIENCE_S, metadata=self.metadata)

    def close(self) -> None:
        self.channel.close()
