"""A drawing as OpenTelemetry spans, exported by the exporter of OpenTelemetry's SDK.

A task or call is a span; its parent is the task that submitted it. Waits and large values inside of a task are its
children. All that one task of the driver has caused is one trace. The ids of tasks are derived from the session and
their ids, so that a task has the same span in each recording that holds its submission.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from fastrt.errors import FastrtError
from fastrt.observe.drawing import Drawing, Process, Slice

_TASKS = ("task", "actor")
_TOGETHER = 512  # spans in one request
_HEX = ("traceId", "spanId", "parentSpanId")


def spans(drawing: Drawing, session: str) -> list[ReadableSpan]:
    """The spans of a drawing.

    Args:
        drawing: of a recording.
        session: the session's name.
    """
    to_epoch = time.time_ns() - time.monotonic_ns()
    around = dict(_around(drawing.slices))
    submitted_in = {task: around.get(id(submit)) for task, (submit, _) in drawing.arrows.items()}
    submitted_at = {task: submit.start for task, (submit, _) in drawing.arrows.items()}
    runs = {task: ran for task, (_, ran) in drawing.arrows.items()}
    contexts: dict[int, SpanContext] = {}

    def parent_of(one: Slice) -> Slice | None:
        if one.category not in _TASKS:
            return around.get(id(one))
        return submitted_in.get(one.task) if runs.get(one.task) in (None, one) else None

    def context(one: Slice) -> SpanContext:
        chain = [one]  # a loop, because tasks may be nested deeper than Python's stack is
        while id(chain[-1]) not in contexts and (above := parent_of(chain[-1])) is not None:
            chain.append(above)
        for link in reversed(chain):
            if id(link) not in contexts:
                above = parent_of(link)
                word = f"{session} {link.task}"
                if runs.get(link.task) is not link:  # a second attempt, a wait, or a task whose submission is not there
                    pid = drawing.processes[link.process].pid
                    word = f"{session} {pid} {link.lane} {link.start} {link.name} {link.task}"
                trace = _number(word, 16) if above is None else contexts[id(above)].trace_id
                contexts[id(link)] = SpanContext(trace, _number(word, 8), False, TraceFlags(TraceFlags.SAMPLED))
        return contexts[id(one)]

    resources = [_resource(process, drawing.node, session) for process in drawing.processes]
    scope = InstrumentationScope("fastrt", version("fastrt"))
    found = []
    for one in drawing.slices:
        above = parent_of(one)
        if one.is_point or one.category == "submit" or (above is None and one.category not in _TASKS):
            continue
        about: dict[str, Any] = {f"fastrt.{name}": value for name, value in one.args.items()}
        if one.category in _TASKS and one.task in submitted_at:
            about["fastrt.queued_ns"] = max(0, one.start - submitted_at[one.task])
        found.append(
            ReadableSpan(
                one.name, context(one), context(above) if above is not None else None, resources[one.process], about,
                instrumentation_scope=scope, start_time=one.start + to_epoch, end_time=one.end + to_epoch,
            )
        )  # fmt: skip
    return found


def export(found: list[ReadableSpan], target: str) -> None:
    """Export spans.

    Args:
        found: the spans.
        target: the URL of a receiver that speaks OTLP over gRPC (`http://` in the clear, `https://` under TLS, port
            4317 as a rule), or a file, which gets OTLP's JSON, a request a line.
    Raises:
        FastrtError: the receiver did not take them.
        OSError: the file cannot be written.
    """
    if "://" not in target:
        _write(found, Path(target))
        return
    exporter = OTLPSpanExporter(endpoint=target, insecure=target.startswith("http://"))
    try:
        for begin in range(0, len(found), _TOGETHER):
            if exporter.export(found[begin : begin + _TOGETHER]) is not SpanExportResult.SUCCESS:
                raise FastrtError(
                    f"{target} did not take the spans. It must speak OTLP over gRPC, as receivers do at port 4317; "
                    "http:// is in the clear, https:// under TLS"
                )
    finally:
        exporter.shutdown()


def _write(found: list[ReadableSpan], path: Path) -> None:
    """Write the OTLP file format. Its ids are hexadecimal, unlike those of Protobuf's own JSON."""
    with path.open("w") as file:
        for begin in range(0, len(found), _TOGETHER):
            request = MessageToDict(encode_spans(found[begin : begin + _TOGETHER]))
            for resource in request.get("resourceSpans", []):
                for scope in resource.get("scopeSpans", []):
                    for span in scope["spans"]:
                        span |= {name: _hex(span[name]) for name in _HEX if name in span}
            file.write(json.dumps(request) + "\n")


def _hex(text: str) -> str:
    return base64.b64decode(text).hex()


def _around(slices: list[Slice]) -> Iterator[tuple[int, Slice]]:
    """The task around each slice of the same lane: (id of the slice, task)."""
    open_tasks: dict[tuple[int, int], list[Slice]] = {}
    for one in slices:
        tasks = open_tasks.setdefault((one.process, one.lane), [])
        while tasks and tasks[-1].end <= one.start:
            tasks.pop()
        if tasks:
            yield id(one), tasks[-1]
        if one.category in _TASKS:
            tasks.append(one)


def _number(word: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=size).digest(), "big") or 1


def _resource(process: Process, node: str, session: str) -> Resource:
    return Resource(
        {
            "service.name": "fastrt", "service.version": version("fastrt"), "host.name": node,
            "service.instance.id": f"{session}-{process.pid}", "process.pid": process.pid,
            "fastrt.process": process.title,
        }
    )  # fmt: skip
