"""HTTP management of a cluster: MindSpore's endpoints, bodies and errors.

| request | body | answer |
|---|---|---|
| POST /scaleout | {"worker_num": n, "server_num": n} | {"message": ...}, at once |
| POST /scalein | {"node_ids": [...]} | {"message": ...}, at once |
| GET /nodes | | {"message": ..., "node_ids": [{"node_id", "rank_id", "role"}]} |
| GET /state | | {"message": ..., "cluster_state": "CLUSTER_READY"} |
| POST /newInstance, /queryInstance | forwarded to all servers unchanged | {"message": ..., "result": {rank: text}} |
| POST /enableFLS, /disableFLS | likewise | likewise |

A request that cannot be carried out gets status 400 with {"error_message": ...}. With a token the server speaks HTTPS,
and the client shows a certificate of the cluster too (`request` does): it has proved the secret before a byte of its
request is parsed. A connection carries one request, which has a deadline as a whole.

Source: MindSpore's `http_message_handler.cc` and `scheduler_node.cc` of release 1.5.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import ForeignTextError, read_int, read_json, read_object
from fastrt.membership import events as ev
from fastrt.membership.events import Event, Instruction, Overview, Phase
from fastrt.membership.peers import MemberUnreachableError
from fastrt.net.address import split_address, with_port
from fastrt.net.grpc.trust import Trust
from fastrt.net.grpc.visitors import BACKLOG, GREETING_S, Reserve, Visitors, hold_silent, is_exhausted

_log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 1 << 20
_HEAD_BYTES_MAX = 32 << 10
_ANSWER_BYTES_MAX = 64 << 20
_SOCKET_S = 30.0
_THREADS_MAX = 256
_OK, _BAD, _NOT_FOUND, _WRONG_METHOD, _TOO_LARGE, _FAILED = 200, 400, 404, 405, 413, 503
_COUNT_MAX = (1 << 31) - 1
# Upstream's spelling. Upstream has no names for the last three phases, and answers with an empty one.
_STATES = {Phase.STARTING: "ClUSTER_STARTING", Phase.NODE_TIMEOUT: "NODE_TIMEOUT"}
_INSTRUCTIONS = {
    "/newInstance": (Instruction.NEW_INSTANCE, "Start new instance successful."),
    "/queryInstance": (Instruction.QUERY_INSTANCE, "Query instance successful."),
    "/enableFLS": (Instruction.ENABLE_FLS, "Enable FL-Server successful."),
    "/disableFLS": (Instruction.DISABLE_FLS, "Disable FL-Server successful."),
}
_POSTS = {"/scaleout", "/scalein", *_INSTRUCTIONS}
_GETS = {"/nodes", "/state"}

Ask = Callable[[Callable[[int], Event]], Any]


class BadRequest(FastrtError):
    """The body of a request is not valid for its endpoint."""


class ManagementServer:
    """Serves the endpoints on its own threads until `stop`.

    Args:
        address: `host:port`; port 0 takes any free one.
        trust: the cluster's, which clients prove over TLS; None accepts any request, in the clear.
        ask: puts an event to the state machine and returns its answer.

    Attributes:
        address: `host:port` with the actual port.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, trust: Trust | None, ask: Ask) -> None:
        self._server = _Server(split_address(address, 0), trust, ask)
        self.address = with_port(address, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="fastrt-cluster-http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(HTTPServer):
    """Serves each connection on a thread. `Visitors` bounds those whose request is incomplete."""

    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], trust: Trust | None, ask: Ask) -> None:
        self.trust, self.ask = trust, ask
        self.visitors = Visitors()
        self._reserve = Reserve()
        self._threads: set[threading.Thread] = set()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, BaseHTTPRequestHandler)  # `_receive` makes the handlers
        except BaseException:
            self._reserve.close()
            raise
        hold_silent(self.socket)
        self.socket.setblocking(False)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError as error:
            if is_exhausted(error):
                self.visitors.make_room()
                self._reserve.turn_away(self.socket)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._threads) >= _THREADS_MAX:
            self.shutdown_request(request)
            return
        place = self.visitors.enter(request)
        thread = threading.Thread(target=self._receive, args=(request, client_address, place), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _receive(self, sock: socket.socket, client_address: Any, place: int) -> None:
        try:
            until = time.monotonic() + GREETING_S
            with contextlib.ExitStack() as stack:
                stack.enter_context(sock)
                if self.trust is not None:
                    sock.settimeout(GREETING_S)
                    sock.getpeername()  # on a connection that is gone already `wrap_socket` leaks an open socket
                    sock = self.trust.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                stack.enter_context(sock)
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                _Handler(sock, client_address, self, until, lambda: self.visitors.leave(place))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            _log.debug("a connection from %s ended: %s", client_address[0], error)
        finally:
            self.visitors.leave(place)
            self._threads.discard(threading.current_thread())

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s could not be served", client_address[0], exc_info=True)

    def server_close(self) -> None:
        super().server_close()
        self.visitors.end_all()
        for thread in list(self._threads):
            thread.join(_SOCKET_S)
        self._reserve.close()


class _Incoming(io.RawIOBase):
    """The bytes of one request, up to a limit and a deadline.

    Attributes:
        left: how many more bytes may be read.
        ended: whether the reader asked for more than came or may be read.
    """

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.left = _HEAD_BYTES_MAX
        self.ended = False
        self._sock = sock
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: self.left]
        if not view:
            self.ended = True
            return 0
        self._sock.settimeout(max(1e-3, self._until - time.monotonic()))
        got = self._sock.recv_into(view)
        self.ended = not got
        self.left -= got
        return got


class _Handler(BaseHTTPRequestHandler):
    """Handles one connection with one request."""

    server: _Server

    def __init__(
        self, sock: socket.socket, client_address: Any, server: _Server, until: float, came: Callable[[], None]
    ) -> None:
        self._until, self._came = until, came
        super().__init__(sock, client_address, server)

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection, self._until)
        self.rfile = io.BufferedReader(self._incoming)

    def do_GET(self) -> None:
        self._serve(_GETS)

    def do_POST(self) -> None:
        self._serve(_POSTS)

    def _serve(self, paths: set[str]) -> None:
        path = self.path.partition("?")[0]
        self.close_connection = True
        try:
            body = self._body()
        except ForeignTextError as error:
            status = _TOO_LARGE if isinstance(error, _TooLarge) else _BAD
            self._answer(status, {"error_message": str(error)})
            return
        self._came()
        self.connection.settimeout(_SOCKET_S)
        if path not in paths:
            known = path in _GETS | _POSTS
            words = f"{path} does not support this method." if known else f"There is no endpoint {path}."
            self._answer(_WRONG_METHOD if known else _NOT_FOUND, {"error_message": words})
        else:
            try:
                self._answer(_OK, self._do(path, body))
            except (ev.Refused, BadRequest) as error:
                self._answer(_BAD, {"error_message": str(error)})
            except FastrtError as error:
                self._answer(_FAILED, {"error_message": str(error)})

    def _body(self) -> bytes:
        """Read the request's body.

        Raises:
            ForeignTextError: its length is missing or ambiguous, it is too large, or the request is incomplete.
        """
        if self._incoming.ended:
            raise ForeignTextError(f"the request's head is incomplete, or has more than {_HEAD_BYTES_MAX} bytes")
        if self.request_version == "HTTP/0.9":  # it has no headers
            raise ForeignTextError("the request names no version of HTTP; HTTP/1.1 is spoken here")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            raise ForeignTextError("a body needs exactly one Content-Length, and no Transfer-Encoding")
        length = read_int(lengths[0], "Content-Length")
        if length > _BODY_BYTES_MAX:
            raise _TooLarge(f"the body has {length} bytes; the limit is {_BODY_BYTES_MAX}")
        self._incoming.left += length
        body = self.rfile.read(length)
        if len(body) < length:
            raise ForeignTextError(f"only {len(body)} of {length} bytes of the body came")
        return body

    def _do(self, path: str, body: bytes) -> dict[str, Any]:
        ask = self.server.ask
        if path == "/scaleout":
            asked = _object(body)
            workers, servers = _count(asked, "worker_num"), _count(asked, "server_num")
            ask(lambda call: ev.ScaleOut(call, workers, servers))
            return {"message": "Cluster begin to scale out."}
        if path == "/scalein":
            ids = _ids(_object(body))
            ask(lambda call: ev.ScaleIn(call, ids))
            return {"message": "Cluster begin to scale in."}
        overview: Overview
        if path == "/nodes":
            overview = ask(ev.View)
            nodes = [
                {"node_id": view.member_id, "rank_id": str(view.rank), "role": view.role.name}
                for view in overview.members
            ]
            return {"message": "Get nodes info successful.", "node_ids": nodes}
        if path == "/state":
            overview = ask(ev.View)
            name = _STATES.get(overview.phase, f"CLUSTER_{overview.phase.name}")
            return {"message": "Get cluster state successful.", "cluster_state": name}
        instruction, words = _INSTRUCTIONS[path]
        result = ask(lambda call: ev.Instruct(call, instruction, body))
        return {"message": words, "result": {str(rank): text for rank, text in result.items()}}

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


class _TooLarge(ForeignTextError):
    """A body is larger than the endpoints accept."""


def _object(body: bytes) -> dict[str, Any]:
    try:
        return read_object(body, "The body", bytes_max=_BODY_BYTES_MAX)
    except ForeignTextError as error:
        raise BadRequest(str(error)) from None


def _count(asked: dict[str, Any], key: str) -> int:
    if key not in asked:
        raise BadRequest(f"The json is not contain the key:{key}")
    value = asked[key]
    if not isinstance(value, int) or isinstance(value, bool) or not -_COUNT_MAX <= value <= _COUNT_MAX:
        raise BadRequest(f"The key:{key} is {value!r}; it must be a whole number.")
    return value


def _ids(asked: dict[str, Any]) -> list[str]:
    if "node_ids" not in asked:
        raise BadRequest("The json is not contain the key:node_ids")
    ids = asked["node_ids"]
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise BadRequest("The key:node_ids must be a list of strings.")
    return ids


def request(
    address: str, trust: Trust | None, method: str, path: str, body: bytes | None = None, timeout_s: float = 30.0
) -> tuple[int, Any]:
    """Send a request to a scheduler's HTTP endpoint.

    Args:
        address: `host:port` of the endpoint.
        trust: the cluster's, which both sides prove; None for a scheduler without a token, in the clear.
        method, path, body: see the module.
        timeout_s: for each step of the exchange.
    Returns:
        The status, and the JSON of the answer.
    Raises:
        MemberUnreachableError: no scheduler of this cluster answers there.
    """
    connection = _Connection(*split_address(address), timeout_s, trust)
    try:
        connection.request(method, path, body)
        with connection.getresponse() as answer:
            data = answer.read(_ANSWER_BYTES_MAX + 1)
        return answer.status, read_json(data, "the scheduler's answer", bytes_max=_ANSWER_BYTES_MAX)
    except (OSError, HTTPException, ForeignTextError) as error:
        why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
        raise MemberUnreachableError(f"No scheduler of this cluster answers HTTP at {address}: {why}.") from error
    finally:
        connection.close()


class _Connection(HTTPConnection):
    """A connection with certificates on both sides."""

    def __init__(self, host: str, port: int, timeout_s: float, trust: Trust | None) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._trust = trust

    def connect(self) -> None:
        super().connect()
        if self._trust is not None:
            self.sock = self._trust.client.wrap_socket(self.sock, server_hostname=self._trust.name)
