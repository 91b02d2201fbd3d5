"""The endpoints for managing a cluster over HTTP."""

import contextlib
import json
import socket
from typing import Any

import pytest

from fastrt.membership import MemberUnreachableError, Phase, Role
from fastrt.membership.http import request
from fastrt.net import http_server
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of

SERVER, WORKER = Role.SERVER, Role.WORKER
TOKEN = new_token()


def settled(members: list[Any], counts: tuple[int, int]) -> None:
    for member in members:
        member.wait_for(
            lambda member=member: member.phase is Phase.READY and member.counts == counts, 20, f"{counts} ready"
        )


def http(service: Any, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    return request(service.http_address, trust_of(TOKEN), method, path, data)


def test_http_shows_the_cluster_scales_it_and_instructs_its_servers(serve: Any, join: Any) -> None:
    def answer(command: int, role: Role, rank: int, data: bytes) -> bytes:
        return b"%d %d " % (command, role) + data

    service = serve(1, 2, http_address="127.0.0.1:0", token=TOKEN)
    assert http(service, "GET", "/state") == (
        200,
        {"message": "Get cluster state successful.", "cluster_state": "ClUSTER_STARTING"},
    )
    status, content = http(service, "POST", "/scaleout", {"worker_num": 0, "server_num": 1})
    assert status == 400
    assert content["error_message"].startswith("The cluster is not ready.")
    servers = [join(service.address, SERVER, member_id=f"s{i}", on_data=answer) for i in range(2)]
    worker = join(service.address, WORKER, member_id="w0")
    worker.wait_ready(60)
    assert http(service, "GET", "/state")[1]["cluster_state"] == "CLUSTER_READY"
    assert http(service, "GET", "/nodes") == (
        200,
        {
            "message": "Get nodes info successful.",
            "node_ids": [
                {"node_id": "s0", "rank_id": "0", "role": "SERVER"},
                {"node_id": "s1", "rank_id": "1", "role": "SERVER"},
                {"node_id": "w0", "rank_id": "0", "role": "WORKER"},
            ],
        },
    )
    for path, number in (("newInstance", 19), ("queryInstance", 20), ("enableFLS", 21), ("disableFLS", 22)):
        status, content = http(service, "POST", "/" + path, {"a": 1})
        expected = f'{number} 2 {{"a": 1}}'
        assert (status, content["result"]) == (200, {"0": expected, "1": expected})
    assert http(service, "POST", "/scaleout", {"worker_num": 0, "server_num": 1}) == (
        200,
        {"message": "Cluster begin to scale out."},
    )
    servers.append(join(service.address, SERVER, member_id="s2"))
    settled([*servers, worker], (1, 3))
    assert http(service, "POST", "/scalein", {"node_ids": ["s1", "s2"]})[0] == 200
    settled([servers[0], worker], (1, 1))


def test_instruction_that_a_server_cannot_carry_out_is_answered_and_nobody_is_lost(serve: Any, join: Any) -> None:
    def fail(command: int, role: Role, rank: int, data: bytes) -> bytes:
        raise ValueError("no such instance")

    service = serve(1, 2, http_address="127.0.0.1:0", token=TOKEN)
    servers = [join(service.address, SERVER, member_id=f"s{k}", on_data=[None, fail][k]) for k in range(2)]
    join(service.address, WORKER).wait_ready(60)
    for _ in range(2):
        status, content = http(service, "POST", "/newInstance", {"a": 1})
        texts = {rank: json.loads(text)["error_message"] for rank, text in content["result"].items()}
        expected = {0: "this member takes no data", 1: "the handler failed: no such instance"}
        assert (status, texts) == (200, {str(one.rank): expected[k] for k, one in enumerate(servers)})
    assert http(service, "GET", "/state")[1]["cluster_state"] == "CLUSTER_READY"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/scaleout", b"{", 400, "no JSON"),
        ("POST", "/scaleout", b"[" * 100_000, 400, "deeper than 32 levels"),
        ("POST", "/scaleout", [1], 400, "no JSON object"),
        ("POST", "/scaleout", {"worker_num": 0}, 400, "The json is not contain the key:server_num"),
        ("POST", "/scaleout", {"worker_num": 0, "server_num": "2"}, 400, "whole number"),
        ("POST", "/scaleout", {"worker_num": 0, "server_num": -2}, 400, "cannot scale out"),
        ("POST", "/scalein", {}, 400, "The json is not contain the key:node_ids"),
        ("POST", "/scalein", {"node_ids": "s1"}, 400, "list of strings"),
        ("POST", "/scalein", {"node_ids": ["who"]}, 400, "The node id:who is illegal."),
        ("POST", "/scalein", b"x" * ((1 << 20) + 1), 413, "at most"),
        ("GET", "/scaleout", None, 405, "does not support this method"),
        ("POST", "/nodes", {}, 405, "does not support this method"),
        ("GET", "/etc/passwd", None, 404, "no endpoint /etc/passwd"),
    ],
)
def test_http_refuses_in_words(
    serve: Any, join: Any, method: str, path: str, body: Any, status: int, words: str
) -> None:
    service = serve(0, 1, http_address="127.0.0.1:0", token=TOKEN)
    join(service.address, SERVER).wait_ready(60)
    try:
        found, content = http(service, method, path, body)
    except MemberUnreachableError:  # a body too large need not be read to its end
        assert status == 413
        return
    assert found == status
    assert words in content["error_message"]
    assert http(service, "GET", "/state")[0] == 200


@pytest.mark.parametrize("token", [None, new_token()], ids=["none", "another"])
def test_http_without_the_token_is_no_http(serve: Any, token: str | None) -> None:
    service = serve(1, 1, http_address="127.0.0.1:0", token=TOKEN)
    with pytest.raises(MemberUnreachableError):
        request(service.http_address, None if token is None else trust_of(token), "GET", "/state")
    assert http(service, "GET", "/state")[0] == 200


def sent(service: Any, data: bytes) -> bytes:
    """What is answered to these bytes, in the clear."""
    host, _, port = service.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as sock:
        with contextlib.suppress(ConnectionError):  # it may refuse before it has read all
            sock.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(1 << 16):
                answer += piece
        return answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: \xb2", b"400"),
        (b"Content-Length: -1", b"400"),
        (b"Content-Length: +1", b"400"),
        (b"Content-Length: 1_0", b"400"),
        (b"Content-Length: 0x1", b"400"),
        (b"Content-Length:", b"400"),
        (b"Content-Length: 1, 1", b"400"),
        (b"Content-Length: 0\r\nContent-Length: 5", b"400"),
        (b"Content-Length: 0\r\ncontent-length: 0", b"400"),
        (b"Content-Length: " + b"9" * 5000, b"400"),
        (b"Content-Length: 1048577", b"413"),
        (b"Transfer-Encoding: chunked", b"400"),
        (b"Transfer-Encoding: identity\r\nContent-Length: 0", b"400"),
        (b"X: y\r\n" * 200, b"431"),
        (b"X: " + b"y" * 70_000, b"400"),
    ],
    ids=lambda value: value[:40].hex(),
)
def test_header_that_makes_no_sense_is_refused_in_words(serve: Any, capfd: Any, head: bytes, status: bytes) -> None:
    service = serve(1, 1, http_address="127.0.0.1:0")
    for method in (b"GET /state", b"POST /scaleout"):
        answer = sent(service, method + b" HTTP/1.1\r\n" + head + b"\r\n\r\n")
        assert answer.split(b" ")[1:2] == ([status] if status else []), answer
    assert request(service.http_address, None, "GET", "/state")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_connection_carries_one_request(serve: Any) -> None:
    service = serve(1, 1, http_address="127.0.0.1:0")
    one = b"GET /state HTTP/1.1\r\nConnection: keep-alive\r\n\r\n"
    assert sent(service, one + one).count(b"cluster_state") == 1


def test_request_that_drips_has_one_deadline_and_many_of_them_keep_nobody_out(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(http_server, "GREETING_S", 0.5)
    service = serve(1, 1, http_address="127.0.0.1:0", token=TOKEN)
    host, _, port = service.http_address.rpartition(":")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((host, int(port)), 20)) for _ in range(80)]
        for stranger in strangers:
            stranger.sendall(b"\x16")  # the kernel keeps those that say nothing
        assert http(service, "GET", "/state")[0] == 200
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""


def test_request_without_a_version_is_refused_in_words(serve: Any) -> None:
    service = serve(1, 1, http_address="127.0.0.1:0")
    answer = sent(service, b"GET /state\r\n\r\n")
    assert b"the request names no version of HTTP" in answer
    assert not answer.startswith(b"HTTP/")  # as HTTP/0.9 has it
