"""Attacks on groups of ranks: by another user of this machine, and by a stranger who reaches the coordinator.

The victims are real ranks, and the attacker runs the same fastrt as another user, without the group's token.
"""

import builtins
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastrt.collective import CollectiveTimeout, init_group
from fastrt.coordination import Coordinator, CoordinatorOptions
from fastrt.coordination.client import open_keys
from fastrt.errors import ConfigError

OTHER_UID = 64322  # of a user that owns nothing
KEY = "fastrt/groups/name=victims"
PRELUDE = """
import builtins, encodings.idna, json, os, pickle, socket, sys
import fastrt.collective.spanning, fastrt.collective.tcp_rendezvous
from fastrt.collective import init_group
from fastrt.coordination.client import open_keys
given = json.loads(sys.argv[1])
try:
    from fastrt.collective import new_token
    from fastrt.net.grpc.identity import Identity
    own = {"token": new_token()}
    Identity.from_token(own["token"])  # imports while it is root
except ImportError:  # a version without tokens
    own = {}
os.environ.pop("FASTRT_TOKEN_FILE", None)
open_keys(given["address"]).close()
os.setgroups([]); os.setgid(given["uid"]); os.setuid(given["uid"])
class Evil:
    def __reduce__(self):
        return exec, ("import builtins; builtins.owned = True",)
print("ready", flush=True)
sys.stdin.readline()
"""


def warm_up() -> None:
    """Let grpc open what it keeps open for good, before the first test is watched for what it leaves."""
    with Coordinator(CoordinatorOptions(num_tasks=1)) as service, open_keys(service.address) as keys:
        keys.set("a", "b")


warm_up()


@pytest.fixture(autouse=True)
def root() -> None:
    if os.getuid() != 0:
        pytest.skip("attacks as another Unix user need root, which can become any user")


@pytest.fixture(autouse=True)
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret of the victims. A version of fastrt without tokens ignores it."""
    with contextlib.suppress(ImportError):
        from fastrt.collective import new_token

        path = tmp_path / "token"
        path.touch(0o600)
        path.write_text(new_token())
        monkeypatch.setenv("FASTRT_TOKEN_FILE", str(path))


@pytest.fixture
def coordinator() -> Iterator[str]:
    with Coordinator(CoordinatorOptions(num_tasks=1)) as service:
        yield service.address


@pytest.fixture
def fastrt_attack(coordinator: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Run code as another user, after PRELUDE and up to the test's end."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **given: object) -> subprocess.Popen[str]:
        told = json.dumps({"uid": OTHER_UID, "address": coordinator, **given})
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        return process

    yield start
    for one in started:
        one.kill()
        one.communicate()


def join(address: str, rank: int, timeout: float = 20.0, name: str = "victims") -> Any:
    return init_group(name=name, rank=rank, world_size=2, address=address, node=f"victim {rank}", timeout=timeout)


def published(address: str) -> dict[str, Any]:
    """What rank 0 has told the coordinator, as anyone can read it."""
    with open_keys(address) as keys:
        found: dict[str, Any] = json.loads(keys.get(KEY, 10.0))
    return found


def sums(groups: list[Future[Any]], pool: ThreadPoolExecutor) -> list[float]:
    """What the ranks of a whole group add up; the group ends."""
    made = [one.result(30) for one in groups]
    results = [pool.submit(one.all_reduce, np.ones(3)) for one in made]
    found = [float(one.result(30)[0]) for one in results]
    for one in made:
        one.destroy()
    return found


JOINS = """
for options in ({}, own):
    try:
        group = init_group(name="victims", rank=1, world_size=2, address=given["address"], node="evil", timeout=0.7,
                           **options)
        group.broadcast_object(Evil(), src=1)
        print("joined", flush=True)
        break
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


def test_other_user_who_joins_by_name_is_refused_and_nothing_of_his_is_unpickled(coordinator, fastrt_attack):
    builtins.owned = False  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(join, coordinator, 0, 3.0)
        published(coordinator)
        said = fastrt_attack(JOINS).communicate(timeout=30)[0]
        with pytest.raises(CollectiveTimeout, match=r"refused|did not come"):
            victim.result(30).broadcast_object(src=1)
    assert not builtins.owned  # type: ignore[attr-defined]
    assert "joined" not in said


TEXTS = {
    "brackets": "[" * 4000,
    "objects": '{"a":' * 4000,
    "digits": '{"host": "127.0.0.1", "port": ' + "1" * 100_000 + "}",
    "not a number": '{"host": "127.0.0.1", "port": NaN, "token": "x"}',
    "surrogates": '{"host": "\\ud800", "port": 1, "token": "x"}',
    "a list": "[1, 2]",
    "null": "null",
    "a long text": '"' + "x" * 1_000_000 + '"',
    "other types": '{"host": 7, "port": [], "nonce": {}, "size": null, "tls": 1, "mac": 2, "token": 3}',
    "keys twice": '{"host": "127.0.0.1", "host": "127.0.0.1", "port": 1}',
    "not text": "\\x00\\xff",
}


def test_hostile_text_in_the_coordinator_does_not_end_a_rank_that_waits(coordinator):
    with ThreadPoolExecutor(4) as pool, open_keys(coordinator) as keys:
        follower = pool.submit(join, coordinator, 1, 30.0)
        for what, text in TEXTS.items():
            keys.set(KEY, text, overwrite=True)
            with contextlib.suppress(FutureTimeoutError):  # it reads the text, and waits on
                assert follower.exception(0.15) is None, what
        assert sums([pool.submit(join, coordinator, 0), follower], pool) == [2.0, 2.0]


SQUATS = """
import threading
listener = socket.create_server(("127.0.0.1", 0))
texts = given["texts"]
evil = pickle.dumps(Evil(), 5)
with open_keys(given["address"]) as keys:
    place = {"host": "127.0.0.1", "port": listener.getsockname()[1], "token": "x", "nonce": "0" * 32, "size": 2,
             "tls": False, "mac": "0" * 64}
    keys.set("fastrt/groups/name=victims", json.dumps(place), overwrite=True)
print("published", flush=True)
listener.settimeout(2)
try:
    sock = listener.accept()[0]
    sock.settimeout(4)
    print("said", sock.recv(65536), flush=True)
    places = [[0, "evil", "127.0.0.1", place["port"], 1], [1, "victim 1", "127.0.0.1", 1, 1]]
    sock.sendall(json.dumps({"group_id": "x", "places": places}).encode() + b"\\n")
    print("followed", flush=True)
except OSError:
    print("ignored", flush=True)
"""


def test_address_that_another_user_publishes_is_not_dialled(coordinator, fastrt_attack):
    attacker = fastrt_attack(SQUATS, texts=[])
    assert attacker.stdout is not None
    assert attacker.stdout.readline() == "published\n"
    with ThreadPoolExecutor(1) as pool, pytest.raises(CollectiveTimeout, match="not written by a rank with this token"):
        pool.submit(join, coordinator, 1, 1.0).result(30)
    assert "ignored" in attacker.communicate(timeout=30)[0]


RELAYS = """
import select
here, there = (tuple(one) for one in given["ends"])
listener = socket.create_server(here)
listener.settimeout(0.01)
told = 0
with open_keys(given["address"]) as keys:
    while True:
        keys.set("fastrt/groups/name=victims", given["text"], overwrite=True)  # rank 0 writes its own again and again
        if not told:
            print("listens", flush=True)
            told = 1
        try:
            sock = listener.accept()[0]
            break
        except TimeoutError:
            continue
other = socket.create_connection(there, 5)
print("relays", flush=True)
ends = {sock: other, other: sock}
while True:
    for one in select.select(list(ends), [], [], 5)[0]:
        data = one.recv(65536)
        if not data:
            print("ended", flush=True)
            sys.exit()
        ends[one].sendall(data)
"""


@pytest.mark.long
def test_relay_behind_a_replayed_invitation_is_refused(coordinator, fastrt_attack):
    """An earlier rank 0 has died. Its invitation is authentic, and another user listens at its port now."""
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(join, coordinator, 0, 1.5)
        old = published(coordinator)
        with pytest.raises(CollectiveTimeout):
            first.result(30)
        with open_keys(coordinator) as keys:
            keys.delete(KEY)
        leader = pool.submit(join, coordinator, 0)
        new = published(coordinator)
        ends = [[old["host"], old["port"]], [new["host"], new["port"]]]
        attacker = fastrt_attack(RELAYS, ends=ends, text=json.dumps(old))
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "listens\n"
        follower = pool.submit(join, coordinator, 1)
        said = attacker.stdout.readline()
        assert said == "relays\n", said + attacker.stdout.read()
        assert attacker.stdout.readline() == "ended\n"  # and the true rank 0 has renewed its key
        assert sums([leader, follower], pool) == [2.0, 2.0]


FLOODS = """
host, port = given["end"]
socks = []
for number in range(300):
    sock = socket.socket()
    sock.setblocking(False)
    try:
        sock.connect((host, port))
    except BlockingIOError:
        pass
    socks.append(sock)
for number, sock in enumerate(socks):
    sock.setblocking(True)
    sock.settimeout(0.2)
    try:
        sock.sendall([b"", b"[" * 4000 + b"\\n", b"fastrtP1", b"1" * 60000, b"\\xff" * 72, b"\\n"][number % 6])
    except OSError:
        pass
ready()
wait()
"""


def test_flood_of_brackets_noise_and_silence_at_rank_0_does_not_keep_the_group_from_meeting(coordinator, attack):
    with ThreadPoolExecutor(4) as pool:
        leader = pool.submit(join, coordinator, 0)
        place = published(coordinator)
        attack(FLOODS, end=[place["host"], place["port"]]).ready()
        begun = time.monotonic()
        assert sums([leader, pool.submit(join, coordinator, 1)], pool) == [2.0, 2.0]
        assert time.monotonic() - begun < 10


def test_flood_at_the_port_of_a_rank_does_not_keep_messages_away(coordinator, attack):
    with ThreadPoolExecutor(4) as pool:
        groups = [one.result(30) for one in [pool.submit(join, coordinator, rank) for rank in (0, 1)]]
        place = groups[0]._places[0]
        attack(FLOODS, end=[place.host, place.port]).ready()
        sent = pool.submit(groups[1].send, np.arange(5.0), 0)
        assert groups[0].recv(np.empty(5), 1).tolist() == list(range(5))
        sent.result(60)
        for one in groups:
            one.destroy()


def test_group_over_tcp_without_a_token_is_refused_in_words(coordinator, monkeypatch):
    monkeypatch.delenv("FASTRT_TOKEN_FILE", raising=False)
    with pytest.raises(ConfigError, match=r"token=\.\.\., made once by .*new_token\(\), or FASTRT_TOKEN_FILE"):
        join(coordinator, 0, 0.2)


LOCAL = "\0fastrt-group-" + hashlib.sha256(b"0//local victims").hexdigest()[:40]
KNOCKS = """
ready()
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
while True:
    try:
        sock.connect(given["name"])
        break
    except ConnectionRefusedError:
        pass
try:
    sock.send(json.dumps({"rank": 1, "world_size": 2, "wish": "", "pid": 1, "version": 1}).encode())
    report["answer"] = sock.recv(100).decode()
except OSError as error:
    report["answer"] = ""
"""


def test_other_user_at_the_local_rendezvous_is_refused(attack):
    with ThreadPoolExecutor(2) as pool:
        attacker = attack(KNOCKS, name=LOCAL)
        attacker.ready()
        leader = pool.submit(init_group, name="local victims", rank=0, world_size=2, timeout=20.0)
        assert attacker.finish() == {"answer": ""}
        follower = pool.submit(init_group, name="local victims", rank=1, world_size=2, timeout=20.0)
        assert sums([leader, follower], pool) == [2.0, 2.0]


SQUATS_LOCALLY = """
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(given["name"])
listener.listen(8)
ready()
listener.accept()
report["heard"] = listener.accept()[0].recv(1000).decode()
"""


def test_other_user_who_takes_the_name_of_a_local_group_is_named_and_learns_nothing(attack):
    attacker = attack(SQUATS_LOCALLY, name=LOCAL)
    attacker.ready()
    with pytest.raises(CollectiveTimeout, match=rf"another user \(uid {attacker.uid}\) holds"):
        init_group(name="local victims", rank=0, world_size=2, timeout=0.5)
    assert attacker.finish() == {"heard": ""}
