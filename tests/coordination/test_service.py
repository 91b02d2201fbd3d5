"""The three dialects over gRPC: what hand-made calls are answered, with status codes and payloads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fastrt.coordination import Coordinator, CoordinatorOptions
from fastrt.coordination import events as ev
from fastrt.errors import ConfigError
from fastrt.net.address import InsecureBindError
from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.descriptors import message_set


def task(number: int, job: str = "jax_worker") -> dict[str, Any]:
    return {"job_name": job, "task_id": number}


def registered(raw: Any, count: int = 2) -> int:
    calls = [raw.tensorflow("RegisterTask", incarnation=10 + n, source_task=task(n)) for n in range(count)]
    answers = [call.result() for call in calls]
    return int(answers[0].leader_incarnation)


def payloads(future: Any) -> dict[str, bytes]:
    future.exception(timeout=50)
    kept = message_set("coordination").message("fastrt.coordination.StatusPayloads")
    found = dict(future.trailing_metadata())
    return {
        url.rpartition(".")[2]: data for url, data in kept.FromString(found["grpc-status-details-bin"]).payloads.items()
    }


def test_both_newer_dialects_see_one_cluster_and_write_members_their_own_way(
    serve: Any, raw: Any, refused: Any, wait_until: Any
) -> None:
    calls = raw(serve().address)
    service = registered(calls)
    told = {"service_incarnation": service}
    calls.xla("InsertKeyValue", incarnations=told, kv={"key": "k", "value": b"v"}).result()
    assert calls.tensorflow("GetKeyValue", key="k").result().kv.value == b"v"
    waits = calls.xla("Barrier", incarnations=told, barrier_id="b", barrier_timeout_in_ms=90_000, source_task_id=0)
    wait_until(lambda: calls.snapshot().waiting_calls == 1, "the first caller")
    late = calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=90_000, source_task=task(1), counter=3)
    assert refused(waits)[0] == refused(late)[0] == "INTERNAL"
    lonely = calls.tensorflow("Barrier", barrier_id="c", barrier_timeout_in_ms=50, source_task=task(0))
    assert "names:\n/job:jax_worker/replica:0/task:1\n" in refused(lonely)[1]
    lonely = calls.xla("Barrier", incarnations=told, barrier_id="d", barrier_timeout_in_ms=50, source_task_id=0)
    assert refused(lonely)[1].endswith("names:\n1\n")
    assert set(payloads(lonely)) == {"BarrierError", "CoordinationServiceError"}


def test_reported_error_carries_its_source_to_all_who_poll(serve: Any, raw: Any, refused: Any, wait_until: Any) -> None:
    calls = raw(serve().address)
    registered(calls)
    poll = calls.tensorflow("PollForError", source_task=task(1))
    other = calls.tensorflow("PollForError", source_task=task(0))
    wait_until(lambda: calls.snapshot().waiting_calls == 2, "both to poll")
    calls.tensorflow("ReportErrorToService", error_code=9, error_message="bad", error_origin=task(0)).result()
    assert refused(poll) == refused(other) == ("FAILED_PRECONDITION", "bad")
    error = message_set("coordination_tensorflow").message("tensorflow.CoordinationServiceError")
    told = error.FromString(payloads(poll)["CoordinationServiceError"])
    assert told.is_reported_error
    assert told.source_task.task_id == 0


def test_task_states_of_known_and_unknown_tasks(serve: Any, raw: Any, refused: Any) -> None:
    calls = raw(serve().address)
    registered(calls)
    (state,) = calls.tensorflow("GetTaskState", source_task=[task(1)]).result().task_state
    assert (state.state, state.incarnation) == (3, 11)
    assert len(calls.tensorflow("GetJobState", job_name="jax_worker").result().task_state) == 2
    assert refused(calls.tensorflow("GetTaskState", source_task=[task(5)]))[0] == "INVALID_ARGUMENT"
    assert refused(calls.tensorflow("GetTaskState", source_task=[task(0, "other")]))[0] == "INVALID_ARGUMENT"


def test_watch_answers_when_the_state_changes(serve: Any, raw: Any) -> None:
    calls = raw(serve().address)
    registered(calls)
    version = calls.tensorflow("WatchJobState", job_name="jax_worker", version_number=-1).result().version_number
    waiting = calls.tensorflow("WatchJobState", job_name="jax_worker", version_number=version)
    calls.tensorflow("ResetTask", source_task=task(1)).result()
    assert waiting.result().version_number > version


def test_devices_of_the_later_generation_are_merged_and_numbered(serve: Any, raw: Any) -> None:
    calls = raw(serve().address)
    registered(calls)
    local = message_set("runtime_v3").message("xla.LocalTopologyProto")
    whole = message_set("runtime_v3").message("xla.GlobalTopologyProto")

    def devices(number: int) -> dict[str, Any]:
        topology = local(node_id=number, boot_id=f"boot{number}", devices=[{"name": f"d{number}{i}"} for i in (0, 1)])
        packed = any_pb2.Any(
            type_url="type.googleapis.com/xla.LocalTopologyProto", value=topology.SerializeToString()
        ).SerializeToString()
        field = message_set("coordination_tensorflow").message("tensorflow.DeviceInfo")()
        field.device.add().ParseFromString(packed)
        return {"source_task": task(number), "device_info": field}

    answers = [calls.tensorflow("WaitForAllTasks", **devices(number)) for number in (1, 0)]
    for answer in answers:
        (item,) = answer.result().device_info.device
        nodes = whole.FromString(item.value).nodes
        assert [d.name for node in nodes for d in node.devices] == ["d00", "d01", "d10", "d11"]
        assert [d.global_device_id for node in nodes for d in node.devices] == [0, 1, 2, 3]
        assert [d.slice_index for node in nodes for d in node.devices] == [0, 0, 1, 1]


def test_devices_of_the_seed_are_merged_and_numbered(serve: Any, raw: Any) -> None:
    calls = raw(serve().address)
    registered(calls)

    def ask(number: int) -> Any:
        info = {"xla": {"devices": {"nodes": [{"node_id": number, "devices": [{"name": f"d{number}"}] * 2}]}}}
        return calls.tensorflow("WaitForAllTasks", source_task=task(number), local_device_info=info)

    for answer in [ask(1), ask(0)]:
        nodes = answer.result().cluster_device_info.xla.devices.nodes
        assert [(d.name, d.global_device_id) for n in nodes for d in n.devices] == [
            ("d0", 0), ("d0", 1), ("d1", 2), ("d1", 3)]  # fmt: skip


def test_devices_of_two_kinds_in_one_job_are_refused_for_all_and_named(serve: Any, raw: Any, refused: Any) -> None:
    calls = raw(serve(3).address)
    registered(calls, 3)
    infos: list[dict[str, Any]] = [{"tf": {"devices": [b"d"]}}, {}, {"xla": {"devices": {"nodes": [{"node_id": 2}]}}}]
    asked = [calls.tensorflow("WaitForAllTasks", source_task=task(n), local_device_info=infos[n]) for n in range(3)]
    for call in asked:
        code, words = refused(call)
        assert code == "INVALID_ARGUMENT"
        assert "/task:0 has TensorFlow's" in words
        assert "/task:2 has XLA's" in words


def test_task_at_a_shutdown_barrier_that_times_out_leaves_by_the_seeds_protocol_and_fails_by_the_newest(
    serve: Any, raw: Any, refused: Any
) -> None:
    for by_seed, state in ((True, 2), (False, 4)):
        calls = raw(serve(shutdown_timeout_s=0.2).address)
        service = registered(calls)
        if by_seed:
            ended = calls.tensorflow("ShutdownTask", source_task=task(0))
        else:
            ended = calls.xla("ShutdownTask", incarnations={"service_incarnation": service}, source_task_id=0)
        assert "Shutdown barrier has failed" in refused(ended)[1]
        states = calls.tensorflow("GetTaskState", source_task=[task(0), task(1)]).result().task_state
        assert [one.state for one in states] == [state, 4]


@pytest.mark.parametrize("version", [1, 3])
def test_both_runtime_versions_enumerate_devices_in_node_order(serve: Any, raw: Any, version: int) -> None:
    address = serve().address
    calls = raw(address)
    methods = message_set(f"runtime_v{version}").methods("xla.DistributedRuntimeService")

    def call(method: str, **fields: Any) -> Any:
        request, response = methods[method]
        path = f"/xla.DistributedRuntimeService/{method}"
        stub = calls.channel.unary_unary(path, request.SerializeToString, response.FromString)
        return stub.future(request(**fields), timeout=50)

    joins = [
        call("Connect", protocol_version=version, timeout_milliseconds=50_000, node_id=n, client_id=n + 1)
        for n in (0, 1)
    ]
    session = joins[0].result().session_id
    assert session == joins[1].result().session_id
    topologies = [{"node_id": n, "devices": [{"name": f"d{n}{i}"} for i in range(3)]} for n in (0, 1)]
    answers = [call("EnumerateDevices", session_id=session, local_topology=topologies[n]) for n in (1, 0)]
    for answer in answers:
        nodes = answer.result().global_topology.nodes
        assert [node.node_id for node in nodes] == [0, 1]
        assert [d.global_device_id for node in nodes for d in node.devices] == list(range(6))


def test_runtime_refuses_wrong_versions_nodes_and_sessions(serve: Any, raw: Any, refused: Any) -> None:
    calls = raw(serve(1).address)
    code, words = refused(calls.runtime("Connect", protocol_version=2))
    assert code == "INVALID_ARGUMENT"
    assert "1 and 3" in words
    assert refused(calls.runtime("Connect", protocol_version=3, node_id=7))[0] == "FAILED_PRECONDITION"
    assert refused(calls.runtime("Connect", protocol_version=3, node_id=-7))[0] == "INVALID_ARGUMENT"
    session = calls.runtime("Connect", protocol_version=3, timeout_milliseconds=1000, client_id=1).result().session_id
    assert refused(calls.runtime("Connect", protocol_version=3, client_id=2))[0] == "ABORTED"
    assert refused(calls.runtime("KeyValueSet", session_id=session + 1))[0] == "FAILED_PRECONDITION"
    calls.runtime("KeyValueSet", session_id=session, key=b"\xff\x00", value=b"1").result()
    calls.runtime("KeyValueSet", session_id=session, key=b"\xff\x00", value=b"2").result()
    got = calls.runtime("KeyValueGet", session_id=session, key=b"\xff\x00", timeout_milliseconds=100).result()
    assert got.value == b"2"
    missing = calls.runtime("KeyValueGet", session_id=session, key=b"no", timeout_milliseconds=50)
    assert refused(missing) == ("NOT_FOUND", "no")


def test_hung_up_callers_are_forgotten(serve: Any, raw: Any, wait_until: Any) -> None:
    service = serve()
    calls = raw(service.address)
    waiting = [calls.tensorflow("GetKeyValue", key=f"k{n}") for n in range(50)]
    wait_until(lambda: calls.snapshot().waiting_calls == 50, "all calls to wait")
    for call in waiting:
        call.cancel()
    wait_until(lambda: calls.snapshot().waiting_calls == 0, "all calls to be forgotten")


def test_stop_tells_those_who_wait(serve: Any, raw: Any, refused: Any, wait_until: Any) -> None:
    service = serve()
    calls = raw(service.address)
    registered(calls)
    poll = calls.tensorflow("PollForError", source_task=task(0))
    barrier = calls.tensorflow("Barrier", barrier_id="b", barrier_timeout_in_ms=60000, source_task=task(0))
    wait_until(lambda: calls.snapshot().waiting_calls == 2, "both calls to wait")
    service.stop()
    assert refused(poll)[0] == "CANCELLED"
    assert refused(barrier)[0] == "ABORTED"


def test_second_service_on_one_port_is_refused(serve: Any) -> None:
    address = serve().address
    with pytest.raises(OSError, match="Is another server running there"):
        serve(address=address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:80", "example:80"])
def test_open_address_is_refused_unless_said_aloud(address: str) -> None:
    with pytest.raises(InsecureBindError, match="--allow-anonymous"):
        Coordinator(CoordinatorOptions(address=address))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tasks": 0},
        {"job": ""},
        {"heartbeat_timeout_s": 0},
        {"register_timeout_s": float("nan")},
        {"shutdown_timeout_s": -1},
        {"power": True},
        {"address": "127.0.0.1"},
        {"address": "127.0.0.1:65536"},
        {"tls": TlsFiles(Path(__file__), Path(__file__))},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Coordinator(CoordinatorOptions(**wrong))


def test_unix_socket_is_served(serve: Any, raw: Any, tmp_path: Path) -> None:
    service = serve(1, address=f"unix:{tmp_path}/socket")
    assert service.address == f"unix:{tmp_path}/socket"
    assert raw(service.address).snapshot().members[0].state == "DISCONNECTED"


def test_health_checks_and_reflection_answer(serve: Any) -> None:
    with grpc.insecure_channel(serve().address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health.Check(health_pb2.HealthCheckRequest(service="xla.DistributedRuntimeService"), timeout=50)
        assert serving.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=50)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=50)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        symbols = ["tensorflow.CoordinationService", "xla.coordination.BarrierRequest", "fastrt.coordination.Inspector"]
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        asked += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
        listed, *files = reflection.ServerReflectionInfo(iter(asked), timeout=50)
        assert {s.name for s in listed.list_services_response.service} >= {symbols[0], symbols[2]}
        assert all(file.file_descriptor_response.file_descriptor_proto for file in files)


def test_thousands_of_blocked_calls_cost_no_thread(serve: Any, raw: Any, wait_until: Any) -> None:
    import threading

    service = serve()
    calls = raw(service.address)
    before = threading.active_count()
    waiting = [calls.tensorflow("GetKeyValue", key="go", timeout=60) for _ in range(3000)]
    wait_until(lambda: calls.snapshot().waiting_calls == 3000, "all calls to wait", 50)
    assert threading.active_count() <= before + 2
    calls.tensorflow("InsertKeyValue", kv={"key": "go", "value": b"!"}).result()
    with ThreadPoolExecutor(1):
        assert {call.result().kv.value for call in waiting} == {b"!"}


def test_fault_of_the_service_in_one_call_is_internal_and_ends_nothing(serve: Any, raw: Any, refused: Any) -> None:
    def broken(event: Any, now: float) -> None:
        raise ZeroDivisionError

    service = serve()
    calls = raw(service.address)
    service._core.state._handlers[ev.TryGetKey] = broken
    code, words = refused(calls.tensorflow("TryGetKeyValue", key="k"))
    assert code == "INTERNAL"
    assert "its log says why" in words
    calls.tensorflow("InsertKeyValue", kv={"key": "k", "value": b"v"}).result()
    assert calls.tensorflow("GetKeyValue", key="k").result().kv.value == b"v"
