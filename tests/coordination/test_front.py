"""The front and its keeper: the process that holds the state is killed, and callers see a slow answer."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt.coordination import Coordinator, CoordinatorOptions, Front, connect
from fastrt.coordination.engine import Core
from fastrt.coordination.link import END_BYTES, SETTINGS, Frame
from fastrt.coordination.replica import VALUE_BYTES_MAX, Replica
from fastrt.coordination.state import Settings
from fastrt.durable import DamagedStateError, Journal, StateDirectoryError
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.supervise import spawn

pytestmark = pytest.mark.timeout(240)  # keepers are started anew many times, on however busy a machine


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Callable[..., Front]]:
    started: list[Front] = []

    def start(**options: Any) -> Front:
        made = Front(CoordinatorOptions(**{"num_tasks": 1, "state_dir": tmp_path, **options}))
        made.start()
        started.append(made)
        return made

    yield start
    for made in started:
        made.stop()


def kill_keeper(front: Front, wait_until: Callable[..., None]) -> None:
    pid = front.keeper_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: front.keeper_pid != pid, "another keeper", 50)


def test_killed_keeper_keeps_incarnation_keys_members_and_passed_barriers(
    front: Any, raw: Any, wait_until: Any
) -> None:
    service = front()
    calls = raw(service.address)
    with connect(service.address) as agent:
        agent.set("k", "v")
        agent.barrier("b")
        before = calls.snapshot(with_barriers=True, with_keys=True)
        kill_keeper(service, wait_until)
        after = calls.snapshot(with_barriers=True, with_keys=True)
        assert after.incarnation == before.incarnation
        assert list(after.keys) == list(before.keys)
        assert after.members[0].state == "CONNECTED"
        assert {b.id for b in after.barriers} == {b.id for b in before.barriers}
        agent.barrier("b")
        assert agent.error is None


def test_blocked_calls_survive_the_keeper(front: Any, raw: Any, refused: Any, wait_until: Any) -> None:
    service = front(num_tasks=2)
    calls = raw(service.address)
    tasks = [{"job_name": "jax_worker", "task_id": n} for n in (0, 1)]
    for call in [calls.tensorflow("RegisterTask", incarnation=5, source_task=task) for task in tasks]:
        call.result()
    get = calls.tensorflow("GetKeyValue", key="late")
    poll = calls.tensorflow("PollForError", source_task=tasks[0])
    barrier = calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=60000, source_task=tasks[0])
    wait_until(lambda: calls.snapshot().waiting_calls == 3, "three calls to wait", 50)
    kill_keeper(service, wait_until)
    wait_until(lambda: calls.snapshot().waiting_calls == 3, "them to wait again", 50)
    calls.tensorflow("InsertKeyValue", kv={"key": "late", "value": b"1"}).result()
    assert get.result().kv.value == b"1"
    calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=1000, source_task=tasks[1]).result()
    barrier.result()
    calls.tensorflow("ReportErrorToService", error_code=13, error_message="x", error_origin=tasks[1]).result()
    assert refused(poll) == ("INTERNAL", "x")


def test_barriers_deadline_is_not_put_off_by_the_keepers_death(front: Any, raw: Any, wait_until: Any) -> None:
    service = front(num_tasks=2)
    calls = raw(service.address)
    tasks = [{"job_name": "jax_worker", "task_id": n} for n in (0, 1)]
    for call in [calls.tensorflow("RegisterTask", incarnation=5, source_task=task) for task in tasks]:
        call.result()

    def left_s() -> dict[str, float]:
        return {b.id: b.remaining_s for b in calls.snapshot(with_barriers=True).barriers if b.open}

    waiting = [
        calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=40_000, source_task=tasks[0]),
        calls.tensorflow("ShutdownTask", source_task=tasks[0]),
    ]
    wait_until(lambda: len(left_s()) == 2 and left_s()["b"] < 39.5, "half a second", 50)
    before = left_s()
    kill_keeper(service, wait_until)
    wait_until(lambda: len(left_s()) == 2, "them to wait again", 30)
    assert all(left < before[barrier_id] for barrier_id, left in left_s().items())
    calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=1000, source_task=tasks[1]).result()
    calls.tensorflow("ShutdownTask", source_task=tasks[1]).result()
    for call in waiting:
        call.result()


def test_every_acknowledged_increment_counts_once_whatever_is_killed(front: Any, wait_until: Any) -> None:
    service = front()
    done = threading.Event()
    with connect(service.address) as agent:

        def count() -> int:
            made = 0
            while not done.is_set():
                agent.increment("n")
                made += 1
            return made

        with ThreadPoolExecutor(4) as pool:
            counts = [pool.submit(count) for _ in range(4)]
            for _ in range(6):
                reached = agent.increment("n", 0)
                wait_until(lambda reached=reached: agent.increment("n", 0) > reached + 20, "some increments", 50)
                kill_keeper(service, wait_until)
            done.set()
            total = sum(one.result(50) for one in counts)
        assert agent.increment("n", 0) == total


@pytest.mark.long
def test_value_of_64_mib_is_kept_over_the_keepers_death(front: Any, raw: Any, wait_until: Any) -> None:
    service = front()
    calls = raw(service.address)
    value = bytes(range(256)) * (1 << 18)
    calls.tensorflow("InsertKeyValue", kv={"key": "big", "value": value}).result()
    calls.tensorflow("InsertKeyValue", kv={"key": "small", "value": b"1"}).result()
    kill_keeper(service, wait_until)
    assert calls.tensorflow("TryGetKeyValue", key="big").result().kv.value == value
    assert calls.tensorflow("GetKeyValue", key="small").result().kv.value == b"1"


def test_front_started_again_on_its_directory_goes_on(front: Any, raw: Any) -> None:
    first = front()
    with connect(first.address) as agent:
        agent.set("k", "v")
    incarnation = raw(first.address).snapshot().incarnation
    first.stop()
    second = front()
    again = raw(second.address).snapshot(with_keys=True)
    assert again.incarnation == incarnation
    assert [pair.value for pair in again.keys] == [b"v"]


SERVE = """
import sys
from fastrt.coordination import CoordinatorOptions, Front
front = Front(CoordinatorOptions(num_tasks=1, state_dir=sys.argv[1]))
front.start()
sys.stdout.write(front.address + chr(10))
sys.stdout.flush()
sys.stdin.read()
"""


def test_front_killed_among_writes_has_lost_none_that_was_acknowledged(raw: Any, tmp_path: Path) -> None:
    """Nor does any come back that was overwritten or deleted: the log is taken in once, and in order."""
    acknowledged: dict[str, bytes] = {}
    for turn in range(3):
        command = [sys.executable, "-c", SERVE, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as front:
            assert front.stdout is not None
            calls = raw(front.stdout.readline().strip())
            found = {pair.key: pair.value for pair in calls.tensorflow("GetKeyValueDir", directory_key="d").result().kv}
            assert found == acknowledged
            for number in range(60):
                key, value = f"d/{number % (7 if number < 50 else 5)}", b"%d-%d" % (turn, number)
                calls.tensorflow("InsertKeyValue", kv={"key": key, "value": value}, allow_overwrite=True).result()
                acknowledged[key] = value
                if number == 50:
                    calls.tensorflow("DeleteKeyValue", key="d/6").result()
                    del acknowledged["d/6"]
            front.kill()  # with writes that the keeper has not been told of yet


def test_directory_of_a_front_that_was_just_killed_can_be_used_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        with connect(front.stdout.readline().strip()) as agent:
            agent.set("k", b"v")
        front.kill()
        front.wait()
        options = CoordinatorOptions(num_tasks=1, state_dir=tmp_path)
        with Coordinator(options) as service, connect(service.address) as agent:
            assert agent.get("k") == b"v"


def test_keeper_ends_with_its_front_also_while_it_waits_for_the_directory(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (calls, theirs), (later, their_later) = socket.socketpair(), socket.socketpair()
    descriptors = [theirs.fileno(), their_later.fileno()]
    with spawn(
        "fastrt.coordination.keeper", "main()", *map(str, descriptors), name="keeper", pass_fds=descriptors
    ) as keeper:
        theirs.close()
        their_later.close()
        given = {**Front(CoordinatorOptions(num_tasks=1, state_dir=tmp_path))._keeper_settings, "owns_log": True}
        body = json.dumps({**given, "accept_loss": False}).encode()
        calls.sendall(Frame(SETTINGS, body=body).pack() + END_BYTES)
        calls.close()
        later.close()
        assert keeper.wait(60) == 0, "1: it has waited for as long as it does for a directory"
    journal.close()


@pytest.mark.long
def test_directory_in_use_or_of_another_job_is_refused(front: Any) -> None:
    first = front()
    with pytest.raises(StateDirectoryError, match="in use by another process"):
        front()
    first.stop()
    with pytest.raises(StateDirectoryError, match="was made for tasks"):
        front(num_tasks=3)


def test_stop_tells_those_who_wait_and_keeps_their_barrier_open(
    front: Any, raw: Any, refused: Any, wait_until: Any
) -> None:
    service = front(num_tasks=2)
    calls = raw(service.address)
    tasks = [{"job_name": "jax_worker", "task_id": n} for n in (0, 1)]
    for call in [calls.tensorflow("RegisterTask", incarnation=5, source_task=task) for task in tasks]:
        call.result()
    barrier = calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=60000, source_task=tasks[0])
    wait_until(lambda: calls.snapshot().waiting_calls == 1, "the call to wait")
    service.stop()
    assert refused(barrier)[0] == "ABORTED"
    calls = raw(front(num_tasks=2).address)
    rounds = [
        calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=90_000, source_task=task) for task in tasks
    ]
    assert [call.result().counter for call in rounds] == [0, 0]


def test_keeper_that_fails_or_is_killed_during_its_start_gives_the_reason(tmp_path: Path, wait_until: Any) -> None:
    options = CoordinatorOptions(num_tasks=1, state_dir=tmp_path)
    journal = Journal(tmp_path)  # a keeper waits for a moment until the directory is free
    with ThreadPoolExecutor(2) as pool:
        killed, refused = Front(options), Front(options)
        starting = pool.submit(killed.start), pool.submit(refused.start)
        wait_until(lambda: killed.keeper_pid is not None, "a keeper", 30)
        assert killed.keeper_pid is not None
        os.kill(killed.keeper_pid, signal.SIGKILL)
        with pytest.raises(StateDirectoryError, match="did not start: signal 9, Killed"):
            starting[0].result(50)
        with pytest.raises(StateDirectoryError, match="in use by another process"):
            starting[1].result(50)
    journal.close()


def test_damaged_state_is_refused_by_the_front_and_accepted_on_demand(tmp_path: Path) -> None:
    with Front(CoordinatorOptions(num_tasks=1, state_dir=tmp_path)) as service, connect(service.address) as agent:
        agent.set("k", b"v")
    log = tmp_path / "state-1.log"
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)
    with pytest.raises(DamagedStateError, match=r"state-1\.log ends .* lost.*--accept-loss"):
        Front(CoordinatorOptions(num_tasks=1, state_dir=tmp_path)).start()
    with Front(CoordinatorOptions(num_tasks=1, state_dir=tmp_path, accept_loss=True)) as service:
        assert service.keeper_pid is not None
    assert (tmp_path / "damaged-1" / "state-1.log").read_bytes() == data


@pytest.mark.long
def test_keeper_that_cannot_live_ends_the_service_aloud(front: Any, tmp_path: Path, wait_until: Any) -> None:
    service = front()
    given_up = threading.Event()
    service._on_failure = given_up.set
    (tmp_path / "state-1.log").write_bytes(b"no log any more" * 500)
    pid = service.keeper_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert given_up.wait(50)
    assert "state-1.log ends (or is damaged to its end) at byte 0" in service.failure


def test_answers_larger_than_any_buffer_hold_up_nobody(front: Any, raw: Any, refused: Any, wait_until: Any) -> None:
    """Both ways in which the keeper sends much at once: what one call decides for many, and what time decides."""
    service = front(num_tasks=2)
    calls = raw(service.address)
    task, other = ({"job_name": "jax_worker", "task_id": n} for n in (0, 1))
    for call in [calls.tensorflow("RegisterTask", incarnation=5, source_task=one) for one in (task, other)]:
        call.result()
    value = bytes(1 << 20)
    gets = [calls.tensorflow("GetKeyValue", key="late") for _ in range(20)]
    wait_until(lambda: calls.snapshot().waiting_calls == 20, "the calls to wait", 50)
    calls.tensorflow("InsertKeyValue", kv={"key": "late", "value": value}).result()
    assert all(get.result().kv.value == value for get in gets)
    with ThreadPoolExecutor(1) as pool:
        name = "b" * 400
        timing_out = [
            calls.tensorflow("Barrier", barrier_id=f"{name}{n}", barrier_timeout_in_ms=100, source_task=task)
            for n in range(3000)
        ]
        done = threading.Event()

        def busy() -> int:
            made = 0
            while not done.is_set():
                calls.tensorflow("IncrementKeyValue", key="n", increment=1).result()
                made += 1
            return made

        counting = pool.submit(busy)
        codes = {refused(call)[0] for call in timing_out}
        done.set()
        assert counting.result(50) > 0
    assert codes == {"DEADLINE_EXCEEDED"}


def test_reads_never_show_what_was_overwritten_or_deleted(front: Any, raw: Any, wait_until: Any) -> None:
    """Through every way of changing a key, in both dialects, before and after the keeper's death."""
    service = front()
    calls = raw(service.address)
    told = {"service_incarnation": calls.snapshot().incarnation}

    def both() -> set[bytes]:
        mine = calls.tensorflow("TryGetKeyValue", key="/dir//k")
        other = calls.xla("GetKeyValue", incarnations=told, key="dir/k")
        return {mine.result().kv.value, other.result().kv.value}

    for turn in range(3):
        for number in range(5):
            value = b"%d-%d" % (turn, number)
            calls.tensorflow("InsertKeyValue", kv={"key": "dir/k", "value": value}, allow_overwrite=True).result()
            assert both() == {value}
        calls.tensorflow("InsertKeyValue", kv={"key": "dir/k", "value": b"41"}, allow_overwrite=True).result()
        calls.xla("IncrementKeyValue", incarnations=told, key="dir//k", increment=1).result()
        assert both() == {b"42"}
        calls.tensorflow("DeleteKeyValue", key="dir", is_directory=True).result()
        assert calls.tensorflow("TryGetKeyValue", key="dir/k").code() is grpc.StatusCode.NOT_FOUND
        large = bytes([turn]) * (VALUE_BYTES_MAX + 1)
        calls.tensorflow("InsertKeyValue", kv={"key": "dir/k", "value": b"short"}).result()
        calls.tensorflow("InsertKeyValue", kv={"key": "dir/k", "value": large}, allow_overwrite=True).result()
        assert both() == {large}
        calls.tensorflow("InsertKeyValue", kv={"key": "dir/k", "value": b"last"}, allow_overwrite=True).result()
        kill_keeper(service, wait_until)
        assert both() == {b"last"}


def test_call_asked_again_after_its_commit_gets_its_first_answer(tmp_path: Path) -> None:
    """The keeper dies after its commit and before its answer, which no kill from outside hits but by chance."""
    path = "/tensorflow.CoordinationService/IncrementKeyValue"
    request, response = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")[
        "IncrementKeyValue"
    ]
    body = request(key="n", increment=1).SerializeToString()

    def answers(front: int, *calls: int) -> list[int]:
        journal = Journal(tmp_path)
        core = Core(Settings(roles={"job": 1}), journal, front)
        for call in calls:
            core.submit(call, path, body)
        told = [int(response.FromString(reply.body).kv.value) for reply in core.settle()]
        journal.close()
        return told

    assert answers(5, 1, 2) == [1, 2]
    assert answers(5, 1, 2, 3) == [1, 2, 3]
    assert answers(6, 1) == [4], "another front's calls have nothing to do with these"


def test_key_that_is_no_text_or_too_long_does_not_end_the_keeper(front: Any, raw: Any, refused: Any) -> None:
    service = front()
    calls = raw(service.address)
    pid = service.keeper_pid
    session = calls.runtime("Connect", protocol_version=3, timeout_milliseconds=40_000).result().session_id
    missing = calls.runtime("KeyValueGet", session_id=session, key=b"\xff", timeout_milliseconds=1)
    assert refused(missing) == ("NOT_FOUND", "\\xff")
    long = calls.tensorflow("InsertKeyValue", kv={"key": "a/" * 50_000, "value": b"1"})
    assert refused(long)[0] == "INVALID_ARGUMENT"
    assert service.keeper_pid == pid


def test_replica_keeps_to_its_size_and_knows_what_it_has() -> None:
    replica = Replica(Settings(roles={"job": 1}, incarnation=7), bytes_max=10_000)
    replica.complete = True
    for number in range(100):
        replica.apply(f"k{number}", bytes(500))
    replica.apply("k99", b"new")
    replica.apply("k98", None)
    assert 10 < len(replica) < 20
    assert replica.bytes_count <= 10_000
    kept = [n for n in range(100) if answered(replica, f"k{n}") is not None]
    assert kept[-1] == 99
    assert 98 not in kept
    assert len(kept) == len(replica)
    assert not replica.complete


def test_replica_leaves_to_the_keeper_what_is_not_a_read_of_a_known_key() -> None:
    replica = Replica(Settings(roles={"job": 1}, incarnation=7))
    replica.apply("k", b"v")
    reply = answered(replica, "/k/")
    assert reply is not None
    assert reply.body == answer_of("/k/", b"v")
    assert replica.read(1, "/tensorflow.CoordinationService/DeleteKeyValue", request_of("k")) is None
    assert replica.read(1, GET, b"\xff\xff\xff") is None
    assert replica.read(1, "/xla.coordination.CoordinationService/GetKeyValue", request_of("k")) is None


GET = "/tensorflow.CoordinationService/GetKeyValue"


def request_of(key: str) -> bytes:
    request, _ = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")["GetKeyValue"]
    return bytes(request(key=key).SerializeToString())


def answer_of(key: str, value: bytes) -> bytes:
    _, response = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")["GetKeyValue"]
    return bytes(response(kv={"key": key, "value": value}).SerializeToString())


def answered(replica: Replica, key: str) -> Any:
    return replica.read(1, GET, request_of(key))
