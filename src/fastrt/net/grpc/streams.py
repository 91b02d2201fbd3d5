"""gRPC streams on asyncio between fastrt's processes: a server and channels, with mutual TLS by the cluster's identity.

Each message is a batch, so the cost of a call in `grpc.aio`, which is too high for coordination, is paid once for
hundreds of tasks.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fastrt.errors import FastrtError
from fastrt.net.address import split_address, with_port
from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.descriptors import MessageSet
from fastrt.net.grpc.door import Door, Limits
from fastrt.net.grpc.forks import use_grpc
from fastrt.net.grpc.identity import Identity

# Frames are about 1 MiB; one function or one task's arguments can be larger. All peers have the token.
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second process must fail, not share the port
    # A network that is cut, or a machine that stops, is noticed within this time.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the timeout of one attempt. A TLS handshake with both certificates takes three round trips, and
    # 100 ms on a loaded machine.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# A node has one stream to each other node, and a few for what it exports.
_LIMITS = Limits(streams=256, keepalive_s=5.0, keepalive_timeout_s=5.0)
_TASK_OF_CALL = "_schedule_rpc_coro"  # grpcio's coroutine that a call runs in
Handler = Callable[[AsyncIterator[Any], Any], Coroutine[Any, Any, None]]  # reads the requests, writes to the context


@dataclass(frozen=True)
class Access:
    """Credentials of a cluster's processes, the same on all its nodes.

    Attributes:
        identity: of the cluster, for every link between nodes.
        insecure: large values go between nodes in the clear, after both ends have proved the secret.
        tls: PEM files for the services that programs in other languages use; None: the identity serves them too.
    """

    identity: Identity
    insecure: bool = False
    tls: TlsFiles | None = None

    @property
    def bearer(self) -> str | None:
        """The token that programs in other languages send where `tls` serves them; None: they have certificates."""
        return self.identity.key("bearer").hex() if self.tls is not None else None


def access_of(settings: Mapping[str, Any]) -> Access:
    """Read the cluster's identity and certificates from the settings that one of its processes was started with.

    Args:
        settings: identity (of `Identity.for_child`), tls (certificate, key and client_ca by name, or None), insecure.
    """
    files = settings["tls"]
    tls = None if files is None else TlsFiles(**{name: path and Path(path) for name, path in files.items()})
    return Access(Identity.from_parent(settings["identity"]), settings["insecure"], tls)


async def serve(
    address: str,
    access: Access,
    set_: MessageSet,
    handlers: Mapping[str, Handler],
    stopping: asyncio.Event,
    message_bytes_max: int = -1,
) -> tuple[grpc.aio.Server, str]:
    """Serve streaming methods.

    Args:
        address: `host:port`; port 0 takes any free one.
        access: the cluster; other processes are refused by the TLS handshake.
        set_: descriptions of the services.
        handlers: by full method name, `/package.Service/Method`; they write messages, or serialised ones.
        stopping: once it is set, every stream ends in order. Stop the server, by `stop_server`, only then: gRPC cancels
            the handlers that still run, and prints tracebacks at both ends.
        message_bytes_max: the largest request taken; -1 takes any.
    Returns:
        The server, and the address with the port it got.
    Raises:
        FastrtError: the address is in use, or not one of this machine; the message says which.
    """
    use_grpc()
    door = Door(_LIMITS)
    options = {**dict(_LIMITS.options()), **dict(_OPTIONS), "grpc.max_receive_message_length": message_bytes_max}
    server = grpc.aio.server(options=list(options.items()))
    methods: dict[str, dict[str, Any]] = {}
    for path, handler in handlers.items():
        _, service, method = path.split("/")
        request, _ = set_.methods(service)[method]
        methods.setdefault(service, {})[method] = grpc.stream_stream_rpc_method_handler(
            _until(stopping, _proven(door, handler)), request.FromString, _wire
        )
    for service, table in methods.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, table),))
    try:
        port = server.add_secure_port(address, access.identity.server_credentials())
    except RuntimeError as exc:
        raise FastrtError(f"cannot serve on {address}: {_why_not(address) or exc}") from None
    await server.start()
    door.open(port, tls=True)
    weakref.finalize(server, door.close)
    return server, with_port(address, port)


def _why_not(address: str) -> str:
    """Return the system's reason why no server can listen at an address, which gRPC does not tell; "": it can."""
    try:
        host, port = split_address(address, port_min=0)
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except socket.gaierror as exc:
        return f"{exc.strerror}; give a host that this machine has, or its address"
    except OSError as exc:
        is_foreign = exc.errno == errno.EADDRNOTAVAIL
        return "this machine does not have that address" if is_foreign else os.strerror(exc.errno or 0)
    except ValueError:
        pass
    return ""


async def stop_server(server: grpc.aio.Server, grace_s: float) -> None:
    """Stop a server, and wait until grpcio's tasks for its calls have ended; the loop may end then.

    `stop` of `grpc.aio` waits for the calls, but not for their tasks. A task that the end of the loop cancels after its
    handler has returned logs the cancellation as an error of the handler, and prints a traceback.

    Args:
        server: serves on this loop, which has no other server.
        grace_s: seconds for the calls to end before they are cancelled, and for their handlers to end after that.
    """
    await server.stop(grace_s)
    calls = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == _TASK_OF_CALL]
    if calls:
        await asyncio.wait(calls, timeout=grace_s)


def _wire(message: Any) -> bytes:
    """Serialise a response; one that many streams receive is serialised already."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def _proven(door: Door, handler: Handler) -> Handler:
    """Wrap a handler so that its callers are proven to the door: gRPC passes on only calls of authenticated peers."""

    async def serve_one(requests: AsyncIterator[Any], context: Any) -> None:
        caller = door.caller(context.peer().encode())
        door.accepted(caller)
        caller.calls += 1
        try:
            await handler(requests, context)
        finally:
            caller.calls -= 1

    return serve_one


def _until(stopping: asyncio.Event, handler: Handler) -> Handler:
    """Wrap a handler so that its streams end once `stopping` is set."""

    async def serve_one(requests: AsyncIterator[Any], context: Any) -> None:
        serving = asyncio.ensure_future(handler(requests, context))
        ending = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            serving.cancel()  # no effect if it has ended
            await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()

    return serve_one


def open_stream(
    address: str, access: Access, set_: MessageSet, path: str
) -> tuple[grpc.aio.Channel, Callable[[], grpc.aio.StreamStreamCall]]:
    """Return a channel to `address`, and a function that opens a stream on it.

    The stream fails unless a server of this cluster serves at the address.
    """
    use_grpc()
    options = [*_OPTIONS, *access.identity.channel_options()]
    channel = grpc.aio.secure_channel(address, access.identity.channel_credentials(), options=options)
    _, service, method = path.split("/")
    request, response = set_.methods(service)[method]
    return channel, channel.stream_stream(path, request.SerializeToString, response.FromString)


def end_with_starter(stop: asyncio.Event) -> None:
    """Set `stop` when the process that started this one ends; standard input is a pipe from it."""

    def read() -> None:
        if not os.read(0, 1024):
            asyncio.get_running_loop().remove_reader(0)
            stop.set()

    asyncio.get_running_loop().add_reader(0, read)
