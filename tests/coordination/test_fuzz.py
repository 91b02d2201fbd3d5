"""Bad input to every method: the right status, clear words, and a service that is still right afterwards."""

import random
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.descriptors import message_set

SEED = 20240
IN_FLIGHT = 200
EDGES = [0, 1, -1, 2, 7, 2**31 - 1, -(2**31)]
TEXTS = ["", "/", "a", "a/b", "//x//", "é\u0000", "k" * 300]
SETS = ["coordination_xla", "coordination_tensorflow", "runtime_v3", "runtime_v1"]


def filled(rng: random.Random, message: Any, depth: int = 0) -> Any:
    """A message with any fields set to any values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        for _ in range(rng.choice([0, 1, 3]) if repeated else 1):
            target = getattr(message, field.name)
            if field.message_type is not None:
                if depth < 4:
                    filled(rng, target.add() if repeated else target, depth + 1)
                continue
            value = any_value(rng, field)
            if repeated:
                target.append(value)
            else:
                setattr(message, field.name, value)
    return message


def any_value(rng: random.Random, field: Any) -> Any:
    if field.type == field.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == field.TYPE_BYTES:
        return rng.randbytes(rng.choice([0, 1, 40]))
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == field.TYPE_ENUM:
        return rng.choice([0, 1, 2])
    if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64, field.TYPE_UINT32):
        return rng.choice([0, 1, 2**32 - 1])
    return rng.choice(EDGES)


def requests() -> list[tuple[str, Any]]:
    found = []
    for name in SETS:
        described = message_set(name)
        for service in described.service_names():
            found += [(f"/{service}/{m}", request) for m, (request, _) in described.methods(service).items()]
    return found


def one_body(rng: random.Random, request: Any) -> bytes:
    """Whole, truncated, damaged or random bytes."""
    kind = rng.random()
    if kind < 0.15:
        return rng.randbytes(rng.choice([0, 1, 5, 100]))
    body = filled(rng, request()).SerializeToString()
    if kind < 0.4 and body:
        return bytes(body[: rng.randrange(len(body))])
    if kind < 0.6 and body:
        damaged = bytearray(body)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    return bytes(body)


@pytest.mark.parametrize("messages", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_bad_messages_leave_the_service_right(serve: Any, raw: Any, refused: Any, messages: int) -> None:
    service = serve(3)
    calls = raw(service.address)
    rng = random.Random(SEED)
    methods = requests()
    outcomes: dict[str, int] = {}
    open_calls: list[Any] = []
    for number in range(messages):
        path, request = methods[number % len(methods)]
        open_calls.append(calls.bytes(path, one_body(rng, request), timeout=20))
        if len(open_calls) >= IN_FLIGHT:
            settle(open_calls, outcomes)
    settle(open_calls, outcomes)
    assert outcomes.get("OK", 0) > messages // 50
    assert outcomes.get("INVALID_ARGUMENT", 0) > messages // 20
    # These would mean that the service itself failed, or did not say what was wrong.
    assert not {"UNKNOWN", "UNAVAILABLE", "DATA_LOSS"} & outcomes.keys() - reported(), outcomes
    service._core.state.check_invariants()
    calls.tensorflow("InsertKeyValue", kv={"key": "after", "value": b"1"}, allow_overwrite=True).result()
    assert calls.tensorflow("TryGetKeyValue", key="after").result().kv.value == b"1"


def reported() -> set[str]:
    """Codes that a member may have reported as its own error, and that polls then answer."""
    return {"UNKNOWN"}


def settle(open_calls: list[Any], outcomes: dict[str, int]) -> None:
    """Wait for those that are answered, and hang up on those that block."""
    for call in open_calls:
        try:
            error = call.exception(timeout=0.05)
        except grpc.FutureTimeoutError:
            call.cancel()
            name = "blocked"
        else:
            name = "OK" if error is None else error.code().name
            assert error is None or error.details(), f"{name} without words"
        outcomes[name] = outcomes.get(name, 0) + 1
    open_calls.clear()


@pytest.mark.parametrize("path", ["/xla.coordination.CoordinationService/Nope", "/no.Service/Method", "/", "/x"])
def test_unknown_method_is_unimplemented(serve: Any, raw: Any, refused: Any, path: str) -> None:
    code, words = refused(raw(serve().address).bytes(path, b""))
    assert code == "UNIMPLEMENTED"
    assert path in words


def test_undecodable_bytes_name_the_method_and_message(serve: Any, raw: Any, refused: Any, paths: list[str]) -> None:
    calls = raw(serve().address)
    for path in paths:
        code, words = refused(calls.bytes(path, b"\xff\xff\xff"))
        assert code == "INVALID_ARGUMENT", path
        assert path in words
        assert "3 bytes" in words


def test_values_up_to_64_mib_are_taken_and_larger_ones_refused(serve: Any, raw: Any, refused: Any) -> None:
    calls = raw(serve().address)
    value = bytes(64 << 20)
    calls.tensorflow("InsertKeyValue", kv={"key": "big", "value": value}, timeout=50).result()
    assert calls.tensorflow("TryGetKeyValue", key="big", timeout=50).result().kv.value == value
    too_big = calls.tensorflow("InsertKeyValue", kv={"key": "huge", "value": bytes(65 << 20)}, timeout=50)
    assert refused(too_big)[0] == "RESOURCE_EXHAUSTED"
    assert calls.snapshot().key_count == 1


def test_error_as_long_as_a_book_still_reaches_the_others(serve: Any, raw: Any, refused: Any) -> None:
    calls = raw(serve(1).address)
    task = {"job_name": "jax_worker", "task_id": 0}
    calls.tensorflow("RegisterTask", incarnation=1, source_task=task).result()
    poll = calls.tensorflow("PollForError", source_task=task)
    calls.tensorflow("ReportErrorToService", error_code=13, error_message="x\n" * 500_000, error_origin=task).result()
    code, words = refused(poll)
    assert code == "INTERNAL"
    assert "characters more" in words


@pytest.mark.parametrize("number", [-1, 2, 2**31 - 1, -(2**31)])
def test_task_ids_out_of_range_are_invalid_arguments(serve: Any, raw: Any, refused: Any, number: int) -> None:
    calls = raw(serve().address)
    task = {"job_name": "jax_worker", "task_id": number}
    for method, fields in {
        "RegisterTask": {"source_task": task},
        "Heartbeat": {"source_task": task},
        "ShutdownTask": {"source_task": task},
        "ResetTask": {"source_task": task},
        "PollForError": {"source_task": task},
        "ReportErrorToService": {"error_origin": task, "error_code": 1},
        "Barrier": {"source_task": task, "barrier_id": "b"},
        "WaitForAllTasks": {"source_task": task},
        "GetTaskState": {"source_task": [task]},
    }.items():
        assert refused(calls.tensorflow(method, **fields))[0] in ("INVALID_ARGUMENT", "INTERNAL"), method
    assert calls.snapshot().members[0].state == "DISCONNECTED"


def test_key_that_is_no_text_is_told_of_in_words(serve: Any, raw: Any, refused: Any, wait_until: Any) -> None:
    service = serve(1)
    calls = raw(service.address)
    connected = calls.runtime("Connect", protocol_version=3, timeout_milliseconds=40_000).result()
    session = connected.session_id
    beside = calls.runtime("KeyValueGet", session_id=session, key=b"\xfe", timeout_milliseconds=40_000)
    missing = calls.runtime("KeyValueGet", session_id=session, key=b"\xff", timeout_milliseconds=1)
    assert refused(missing) == ("NOT_FOUND", "\\xff")
    calls.runtime("KeyValueSet", session_id=session, key=b"dir/\xfd", value=b"1").result()
    assert [pair.key for pair in calls.snapshot(with_keys=True).keys] == ["dir/\\xfd"]
    assert [pair.key for pair in calls.tensorflow("GetKeyValueDir", directory_key="dir").result().kv] == ["dir/\\xfd"]
    service.stop()
    code, words = refused(beside)
    assert code == "CANCELLED"
    assert words.endswith("\\xfe")


@pytest.mark.parametrize("key", ["a/" * 50_000 + "a", "k" * 100_000])
def test_key_of_endless_length_is_refused_in_words(serve: Any, raw: Any, refused: Any, key: str) -> None:
    calls = raw(serve(1).address)
    session = calls.runtime("Connect", protocol_version=3, timeout_milliseconds=40_000).result().session_id
    for call in (
        calls.tensorflow("InsertKeyValue", kv={"key": key, "value": b"1"}),
        calls.tensorflow("IncrementKeyValue", key=key, increment=1),
        calls.runtime("KeyValueSet", session_id=session, key=key.encode(), value=b"1"),
    ):
        code, words = refused(call)
        assert code == "INVALID_ARGUMENT"
        assert f"{len(key)} characters" in words
    assert calls.snapshot().key_count == 0
