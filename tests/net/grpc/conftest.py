"""A server with a handler made for the test."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.aio_server import AioServer
from fastrt.net.grpc.contract import Server
from fastrt.net.grpc.queue_server import QueueServer


class Recorder:
    """Answers `/t.S/Echo` with its request, `/t.S/Fail` with a status, and never `/t.S/Wait`."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self.waiting: list[int] = []
        self.cancelled: list[int] = []
        self.stopped = False
        self.address = ""

    def on_call(self, call: int, method: str, body: bytes) -> None:
        assert self.server is not None
        if method == "/t.S/Echo":
            self.server.finish(call, body=body)
        elif method == "/t.S/Fail":
            self.server.finish(call, 9, "not now", trailing=(("why-bin", b"\x00\xff"),))
        elif method == "/t.S/Raise":
            raise ZeroDivisionError
        else:
            self.waiting.append(call)

    def on_cancel(self, call: int) -> None:
        self.cancelled.append(call)

    def on_idle(self) -> float | None:
        return None

    def on_stop(self) -> None:
        self.stopped = True


METHODS = ["/t.S/Echo", "/t.S/Fail", "/t.S/Raise", "/t.S/Wait"]


def started(kind: Any, credentials: Any = None, **options: Any) -> tuple[Recorder, int]:
    recorder = Recorder()
    recorder.server = kind(recorder, METHODS, **options)
    port = recorder.server.bind("127.0.0.1:0", credentials)
    recorder.server.start()
    return recorder, port


@pytest.fixture(params=[QueueServer, AioServer])
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Recorder, grpc.Channel]]]:
    """A recorder and a channel to its server, of either kind; both end with the test."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> tuple[Recorder, grpc.Channel]:
            recorder, port = started(request.param, **options)
            assert recorder.server is not None
            stack.callback(recorder.server.stop)
            recorder.address = f"127.0.0.1:{port}"
            return recorder, stack.enter_context(grpc.insecure_channel(recorder.address))

        yield start


# grpc opens now what it keeps open for good.
for _kind in (QueueServer, AioServer):
    _recorder, _port = started(_kind)
    with grpc.insecure_channel(f"127.0.0.1:{_port}") as _channel:
        _channel.unary_unary("/t.S/Echo")(b"", timeout=60)
    assert _recorder.server is not None
    _recorder.server.stop()
