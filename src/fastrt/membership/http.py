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

import json
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import ForeignTextError, read_json, read_object
from fastrt.membership import events as ev
from fastrt.membership.events import Event, Instruction, Overview, Phase
from fastrt.membership.peers import MemberUnreachableError
from fastrt.net.address import split_address
from fastrt.net.grpc.trust import Trust
from fastrt.net.http_server import BODY_BYTES_MAX, Answer, Request, SmallHttpServer

_ANSWER_BYTES_MAX = 64 << 20
_OK, _BAD, _NOT_FOUND, _WRONG_METHOD, _FAILED = 200, 400, 404, 405, 503
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
        tls = None if trust is None else trust.server
        self._server = SmallHttpServer(address, tls, lambda request: answer(request, ask), refuse)
        self.address = self._server.address

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()


def answer(request: Request, ask: Ask) -> Answer:
    """Answer a request.

    Args:
        request: as it came.
        ask: as for `ManagementServer`.
    """
    path = request.path
    if path not in (_GETS if request.method == "GET" else _POSTS):
        known = path in _GETS | _POSTS
        words = f"{path} does not support this method." if known else f"There is no endpoint {path}."
        return refuse(_WRONG_METHOD if known else _NOT_FOUND, words)
    try:
        return Answer(_OK, json.dumps(_do(path, request.body, ask)).encode())
    except (ev.Refused, BadRequest) as error:
        return refuse(_BAD, str(error))
    except FastrtError as error:
        return refuse(_FAILED, str(error))


def refuse(status: int, words: str) -> Answer:
    """The answer to a request that is not carried out."""
    return Answer(status, json.dumps({"error_message": words}).encode())


def _do(path: str, body: bytes, ask: Ask) -> dict[str, Any]:
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
            {"node_id": view.member_id, "rank_id": str(view.rank), "role": view.role.name} for view in overview.members
        ]
        return {"message": "Get nodes info successful.", "node_ids": nodes}
    if path == "/state":
        overview = ask(ev.View)
        name = _STATES.get(overview.phase, f"CLUSTER_{overview.phase.name}")
        return {"message": "Get cluster state successful.", "cluster_state": name}
    instruction, words = _INSTRUCTIONS[path]
    result = ask(lambda call: ev.Instruct(call, instruction, body))
    return {"message": words, "result": {str(rank): text for rank, text in result.items()}}


def _object(body: bytes) -> dict[str, Any]:
    try:
        return read_object(body, "The body", bytes_max=BODY_BYTES_MAX)
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
