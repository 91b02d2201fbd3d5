"""Fuzz targets: a parameter-server cluster's anonymous doors, frames with the state machine behind them, and HTTP."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ["fastrt.membership", "fastrt.foreign_text", "http.server", "http.client"]
FRAMES = Path(__file__).parents[1] / "membership" / "mindspore_frames.json"


def frames(data: bytes) -> None:
    """One connection's bytes, in two pieces: requests, or the connection's end with a reason."""
    from fastrt.membership import events as ev
    from fastrt.membership.framing import FramingError, Parser
    from fastrt.membership.links import is_same_machine
    from fastrt.membership.state import ClusterState, Settings
    from fastrt.membership.wire import Encoder, Meta, parse, parse_request

    state, encoder, parser = ClusterState(Settings(1, 1), 0.0), Encoder(), Parser(1 << 20)
    cut = data[0] if data else 0
    try:
        for piece in (data[1 : 1 + cut], data[1 + cut :]):
            for call, frame in enumerate(parser.feed(piece)):
                event = parse_request(parse(Meta, frame.meta), frame.data, call, cut % 3).event
                if isinstance(event, ev.Register):
                    is_same_machine("127.0.0.1", event.host)
                for effect in state.handle(event, float(call)):
                    if isinstance(effect, ev.Send):
                        command, data_of = encoder.order(effect.order)
                        assert command >= 0
                        data_of(0)
                    elif isinstance(effect, ev.Answer) and isinstance(effect.value, ev.Overview):
                        encoder.heartbeat(effect.value)
                state.check_invariants()
    except FramingError:
        pass


class _Server:
    """A scheduler that refuses all requests."""

    tls = None

    @staticmethod
    def ask(make: Callable[[int], Any]) -> Any:
        from fastrt.membership.events import Refused

        make(1)
        raise Refused("no")

    def answer(self, request: Any) -> Any:
        from fastrt.membership.http import answer

        return answer(request, self.ask)

    @staticmethod
    def refuse(status: int, words: str) -> Any:
        from fastrt.membership.http import refuse

        return refuse(status, words)


def http(data: bytes) -> None:
    """One connection's bytes: an answer, or the connection's end."""
    from fastrt.net.http_server import Handler

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        try:
            Handler(ours, ("127.0.0.1", 0), _Server(), time.monotonic() + 5, lambda: None)  # type: ignore[arg-type]
        except OSError:
            pass


TARGETS = {"ps_frames": frames, "ps_http": http}
SEEDS = {
    "ps_frames": [
        b"\0" + b"".join(bytes.fromhex(one["header"] + one["meta"] + one["data"]) for one in captured)
        for captured in [[one for one in json.loads(FRAMES.read_text()) if one["dir"] == "->sched"]]
    ],
    "ps_http": [
        b"GET /state HTTP/1.1\r\nHost: x\r\n\r\n",
        b'POST /scaleout HTTP/1.1\r\nContent-Length: 35\r\n\r\n{"worker_num": 0, "server_num": 1  }',
        b'POST /scalein HTTP/1.0\r\nContent-Length: 18\r\n\r\n{"node_ids":["a"]}',
        b"GET /state HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n",
        b"GET /state HTTP/1.1\r\nX: y",
    ],
}
