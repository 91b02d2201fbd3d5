"""The endpoints for managing a cluster over HTTP."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from fastrt.cluster import Phase, Role

SERVER, WORKER = Role.SERVER, Role.WORKER
TOKEN = "abcd1234"


def settled(members: list[Any], counts: tuple[int, int]) -> None:
    for member in members:
        member.wait_for(
            lambda member=member: member.phase is Phase.READY and member.counts == counts, 20, f"{counts} ready"
        )


def http(service: Any, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{service.http_address}{path}", data, method=method)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


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
    worker.wait_ready(20)
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
    join(service.address, WORKER).wait_ready(20)
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
        ("POST", "/scalein", {"node_ids": "s1"}, 400, "list of texts"),
        ("POST", "/scalein", {"node_ids": ["who"]}, 400, "The node id:who is illegal."),
        ("POST", "/scalein", b"x" * ((1 << 20) + 1), 413, "at most"),
        ("GET", "/scaleout", None, 405, "another method"),
        ("POST", "/nodes", {}, 405, "another method"),
        ("GET", "/etc/passwd", None, 404, "no /etc/passwd"),
    ],
)
def test_http_refuses_in_words(
    serve: Any, join: Any, method: str, path: str, body: Any, status: int, words: str
) -> None:
    service = serve(0, 1, http_address="127.0.0.1:0", token=TOKEN)
    join(service.address, SERVER).wait_ready(20)
    try:
        found, content = http(service, method, path, body)
    except (urllib.error.URLError, ConnectionError):  # a body too large need not be read to its end
        assert status == 413
        return
    assert found == status
    assert words in content["error_message"]
    assert http(service, "GET", "/state")[0] == 200


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_http_wants_the_token(serve: Any, token: str | None) -> None:
    service = serve(1, 1, http_address="127.0.0.1:0", token=TOKEN)
    assert http(service, "GET", "/state", token=token)[0] == 401
