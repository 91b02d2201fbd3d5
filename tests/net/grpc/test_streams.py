"""Streams between fastrt's processes: how their server ends."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from fastrt.cluster.membership import JOIN
from fastrt.errors import FastrtError
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.streams import Access

NODE = message_set("node")
Report = NODE.message("fastrt.node.Report")


def test_stopped_server_leaves_no_call_that_the_end_of_the_loop_would_cancel(capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        access = Access(Identity.from_token(new_token()))
        ends, may_end = asyncio.Event(), asyncio.Event()

        async def handle(requests: Any, context: Any) -> None:
            try:
                async for _ in requests:
                    ends.set()
            finally:
                while not may_end.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await may_end.wait()

        server, address = await streams.serve("127.0.0.1:0", access, NODE, {JOIN: handle}, asyncio.Event())
        channel, call = streams.open_stream(address, access, NODE, JOIN)
        stream = call()
        await stream.write(Report())
        await ends.wait()
        stream.cancel()
        await channel.close()
        await server.stop(1.0)  # waits for the call, but not for its handler
        assert len(asyncio.all_tasks()) > 1
        may_end.set()
        await streams.stop_server(server, 1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "Address already in use"),
        ("192.0.2.77", "this machine does not have that address"),  # of documentation
        ("nowhere.invalid", "give a host that this machine has"),
    ],
)
def test_server_that_cannot_listen_says_why(host: str, why: str) -> None:
    """gRPC says only that it failed, and which variable shows more."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        access = Access(Identity.from_token(new_token()))
        with pytest.raises(FastrtError, match=f"^cannot serve on {address}: .*{why}"):
            asyncio.run(streams.serve(address, access, NODE, {}, asyncio.Event()))
