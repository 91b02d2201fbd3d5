"""Managing a cluster over HTTP: MindSpore's endpoints, with its bodies and its errors.

| request | body | answer |
|---|---|---|
| POST /scaleout | {"worker_num": n, "server_num": n} | {"message": ...}, at once |
| POST /scalein | {"node_ids": [...]} | {"message": ...}, at once |
| GET /nodes | | {"message": ..., "node_ids": [{"node_id", "rank_id", "role"}]} |
| GET /state | | {"message": ..., "cluster_state": "CLUSTER_READY"} |
| POST /newInstance, /queryInstance | goes to all servers as it is | {"message": ..., "result": {rank: text}} |
| POST /enableFLS, /disableFLS | likewise | likewise |

What cannot be is 400 with {"error_message": ...}. Each request must carry the session's token.

Source: MindSpore's `http_message_handler.cc` and `scheduler_node.cc` of release 1.5.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fastrt.cluster import events as ev
from fastrt.cluster.events import Event, Instruction, Overview, Phase
from fastrt.errors import FastrtError
from fastrt.foreign_text import ForeignTextError, read_int, read_object
from fastrt.rpc.auth import refused_token

_log = logging.getLogger(__name__)

_BODY_BYTES_MAX = 1 << 20
_SOCKET_S = 30.0
_OK, _BAD, _UNAUTHORIZED, _NOT_FOUND, _WRONG_METHOD, _TOO_LARGE, _FAILED = 200, 400, 401, 404, 405, 413, 503
_COUNT_MAX = (1 << 31) - 1
# As upstream spells them; it has no names for the last three, and answers with nothing there.
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
    """A request's body is not what the endpoint wants."""


class ManagementServer:
    """Serves the endpoints on a thread of its own, until `stop`.

    Args:
        address: `host:port`; port 0 takes any free one.
        token: what requests must carry; None takes any.
        ask: puts an event to the state machine and returns its answer.

    Attributes:
        address: with the port it got.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, token: str | None, ask: Ask) -> None:
        host, _, port = address.rpartition(":")
        handler = type("Handler", (_Handler,), {"token": token, "ask": staticmethod(ask)})
        self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="fastrt-cluster-http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    timeout = _SOCKET_S
    token: str | None = None
    ask: Ask

    def do_GET(self) -> None:
        self._serve(_GETS)

    def do_POST(self) -> None:
        self._serve(_POSTS)

    def _serve(self, paths: set[str]) -> None:
        path = self.path.partition("?")[0]
        body = self._body()
        if body is None:
            self.close_connection = True
            self._answer(_TOO_LARGE, {"error_message": f"A body has at most {_BODY_BYTES_MAX} bytes, and its length."})
            return
        why = self._refusal()
        if why is not None:
            self._answer(_UNAUTHORIZED, {"error_message": why})
        elif path not in paths:
            known = path in _GETS | _POSTS
            words = f"{path} wants another method." if known else f"There is no {path} here."
            self._answer(_WRONG_METHOD if known else _NOT_FOUND, {"error_message": words})
        else:
            try:
                self._answer(_OK, self._do(path, body))
            except (ev.Refused, BadRequest) as error:
                self._answer(_BAD, {"error_message": str(error)})
            except FastrtError as error:
                self._answer(_FAILED, {"error_message": str(error)})

    def _body(self) -> bytes | None:
        """None when it is too large, or of unknown length."""
        if "Transfer-Encoding" in self.headers:
            return None
        try:
            length = read_int(self.headers.get("Content-Length", "0"), "Content-Length", 0, _BODY_BYTES_MAX)
        except ForeignTextError:
            return None
        return self.rfile.read(length)

    def _refusal(self) -> str | None:
        if self.token is None:
            return None
        return refused_token([(key.lower(), value) for key, value in self.headers.items()], self.token)

    def _do(self, path: str, body: bytes) -> dict[str, Any]:
        ask = type(self).ask
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
        if status == _UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


def _object(body: bytes) -> dict[str, Any]:
    try:
        return read_object(body, "The body", bytes_max=_BODY_BYTES_MAX)
    except ForeignTextError as error:
        raise BadRequest(f"{error}.") from None


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
        raise BadRequest("The key:node_ids must be a list of texts.")
    return ids
