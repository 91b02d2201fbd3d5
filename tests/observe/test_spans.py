"""A recording as OpenTelemetry spans, taken by a real receiver."""

import json
import time
from concurrent import futures

import pytest

import fastrt
from fastrt._core.memory import trace
from fastrt.observe.drawing import Drawing, Process, Slice
from fastrt.observe.timeline import record
from fastrt.store import client as store_client

grpc = pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs fastrt[otlp]")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc  # noqa: E402

from fastrt.observe import spans  # noqa: E402


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent."""

    def __init__(self):
        self.spans, self.resources = [], []

    def Export(self, request, context):
        for resource in request.resource_spans:
            self.resources.append({one.key: one.value for one in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver():
    servicer = Receiver()
    with futures.ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
        servicer.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield servicer
        server.stop(None).wait()


@fastrt.remote
def leaf(number):
    return number


@fastrt.remote
def tree(depth):
    return sum(fastrt.get([tree.remote(depth - 1) for _ in range(2)])) + 1 if depth else fastrt.get(leaf.remote(1))


def attributes(span):
    return {one.key: one.value for one in span.attributes}


def test_receiver_gets_tasks_below_the_tasks_that_submitted_them(rt, receiver):
    client = store_client.require().client
    trace.switch(client, True)
    second = 10**9  # for two clocks that differ
    before = time.time_ns() - second
    assert fastrt.get(tree.remote(2)) == 7
    after = time.time_ns() + second
    recording = record(store_client.require(), 0.02)
    recording._since.clear()  # all of the rings
    recording.read()
    trace.switch(client, False)
    drawing = recording.drawing()
    made = spans.spans(drawing, "session")
    spans.export(made, receiver.url)
    assert len(receiver.spans) == len(made)
    mine = [one for one in receiver.spans if before <= one.start_time_unix_nano and one.name in ("tree", "leaf")]
    (root,) = (one for one in mine if not one.parent_span_id)
    assert root.name == "tree"
    assert {one.trace_id for one in mine} == {root.trace_id}
    ids = {one.span_id: one for one in mine}
    assert len(ids) == len(mine) == 7 + 4
    children = [one.name for one in mine if one.parent_span_id == root.span_id]
    assert children == ["tree", "tree"]
    assert all(ids[one.parent_span_id].name == "tree" for one in mine if one.name == "leaf")
    for one in mine:
        assert before <= one.start_time_unix_nano <= min(after, one.end_time_unix_nano)
        assert len(attributes(one)["fastrt.task_id"].string_value) == 16
        assert attributes(one)["fastrt.queued_ns"].int_value >= 0
    waits = [one for one in receiver.spans if one.name == "wait" and one.trace_id == root.trace_id]
    assert all(one.parent_span_id in ids for one in waits)
    about = receiver.resources[0]
    assert about["service.name"].string_value == "fastrt"
    assert about["process.pid"].int_value > 0
    again = [one.context.span_id for one in spans.spans(drawing, "session")]
    assert [one.context.span_id for one in made] == again


def drawn():
    """A task with a wait, the wait of a driver, and a moment."""
    process = Process(4711, "worker", "worker-1", True)
    task = Slice(0, 0, 10, 50, "work", "task", {"task_id": "0" * 16}, task=7)
    alone = Slice(0, 0, 60, 70, "wait", "wait", {})
    return Drawing("one", [process], [task, Slice(0, 0, 20, 30, "wait", "wait", {}), alone,
                                      Slice(0, 0, 25, 25, "get", "object", {}, is_point=True)])  # fmt: skip


def test_file_has_hexadecimal_ids_a_request_a_line(tmp_path):
    spans.export(spans.spans(drawn(), "session"), str(tmp_path / "spans.jsonl"))
    (line,) = (tmp_path / "spans.jsonl").read_text().splitlines()
    (resource,) = json.loads(line)["resourceSpans"]
    work, wait = resource["scopeSpans"][0]["spans"]
    assert (work["name"], wait["name"]) == ("work", "wait")
    assert wait["parentSpanId"] == work["spanId"]
    assert (len(work["traceId"]), len(bytes.fromhex(work["spanId"]))) == (32, 8)
    assert int(wait["startTimeUnixNano"]) - int(work["startTimeUnixNano"]) == 10


@pytest.mark.long  # the exporter tries for ten seconds
def test_receiver_that_is_not_there_is_an_error(free_port):
    with pytest.raises(fastrt.FastrtError, match="did not take the spans"):
        spans.export(spans.spans(drawn(), "session"), f"http://127.0.0.1:{free_port}")
