"""The dashboard's door: another user, another site, slow connections, large requests."""

import json
import os
import socket

import pytest

from support.attacks.attacker import OTHER_UID, Attacker
from support.dashboard import Dashboard


@pytest.fixture(scope="module")
def dash(rt, runtime_dir):
    with Dashboard(runtime_dir) as running:
        yield running


ASK = """
report["answers"] = []
for path in given["paths"]:
    sock = connect(address)
    shout(sock, ("GET %s HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n" % (path, address)).encode())
    report["answers"].append(listen(sock, 5.0).decode("latin-1"))
    sock.close()
report["files"] = []
for name in given["files"]:
    try:
        report["files"].append(open(name).read())
    except OSError as exc:
        pass
"""


def test_other_user_gets_401_and_cannot_read_the_code(rt, dash, runtime_dir):
    paths = [
        "/",
        "/?code=guess",
        "/view?view=overview",
        "/stream?view=logs",
        "/static/app.js",
        "/file/timeline.pftrace",
        "/metrics",
    ]
    files = [str(path) for path in runtime_dir.glob("dashboard-*")]
    assert files
    uid = OTHER_UID if os.geteuid() == 0 else None
    attacker = Attacker(ASK, uid, address=f"127.0.0.1:{dash.port}", paths=paths, files=files if uid else [])
    found = attacker.finish()
    assert [answer.split(" ")[1] for answer in found["answers"]] == ["401"] * len(paths)
    assert all("fastrt-key" not in answer and "set-cookie" not in answer for answer in found["answers"])
    assert found["files"] == []


def test_rebound_name_and_foreign_origin_are_refused_before_anything_else(rt, dash):
    bearer = {"authorization": f"Bearer {dash.token}"}
    assert dash.request("/view", host="evil.test", **bearer)[0] == 403
    assert dash.request("/view", origin="http://evil.test", **bearer)[0] == 403
    assert dash.request("/view", sec_fetch_site="cross-site", **bearer)[0] == 403
    assert dash.request("/view", **bearer)[0] == 200


def test_get_changes_nothing_and_forms_are_refused(rt, dash):
    bearer = {"authorization": f"Bearer {dash.token}"}
    for path in ("/do/record", "/do/stack", "/act/cancel", "/act/kill"):
        assert dash.request(path, **bearer)[0] == 405
        form = {"content_type": "application/x-www-form-urlencoded", **bearer}
        assert dash.request(path, "POST", b"task=1", **form)[0] == 415
    status, said = dash.post("/act/kill", actor=0, id="0" * 16)
    assert (status, "--allow-actions" in said["said"]) == (403, True)


def test_large_and_malformed_requests_are_refused(rt, dash):
    headers = {"authorization": f"Bearer {dash.token}", "content_type": "application/json"}
    assert dash.request("/do/record", "POST", b"[" * 2000, **headers)[0] == 400
    assert dash.request("/do/record", "POST", b" " * 5000 + b"{}", **headers)[0] == 400
    assert dash.request("/view?view=rows&after=-1&name=" + "%00" * 100, **headers)[0] == 200


def test_slow_connections_make_room_for_a_user(rt, dash):
    slow = []
    try:
        for _ in range(200):
            sock = socket.create_connection(("127.0.0.1", dash.port))
            sock.sendall(b"GET / HTTP/1.1\r\nHost: ")
            slow.append(sock)
        assert json.loads(dash.request("/view", authorization=f"Bearer {dash.token}")[2])
        slow[0].settimeout(10)
        assert slow[0].recv(1) == b""  # the oldest made room
    except ConnectionResetError:
        pass
    finally:
        for sock in slow:
            sock.close()
