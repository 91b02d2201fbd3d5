"""The timeline in Perfetto's own format: the fields that are written, and how Perfetto reads them."""

from collections import Counter

import numpy as np
import pytest

import fastrt
from fastrt._core.memory import trace
from fastrt.net.grpc.descriptors import message_set
from fastrt.observe import chrome, perfetto
from fastrt.observe.drawing import Drawing, Process, Sample, Slice
from fastrt.observe.timeline import format_of, record, write
from fastrt.store import client as store_client
from support import traces
from support.trace_processor import TraceProcessor


@fastrt.remote
def outer(depth):
    return fastrt.get(outer.remote(depth - 1)) + 1 if depth else 0


@fastrt.remote
class Adder:
    def add(self, one, two):
        return one + two


def made(*slices, samples=()):
    """A drawing of one worker."""
    process = Process(4711, "worker", "worker-1", True)
    process.lanes = [[], []]
    return Drawing("one", [process], list(slices), {}, list(samples))


def span(start, end, name="f", lane=0, **about):
    return Slice(0, lane, start, end, name, about.pop("category", "task"), {"task_id": "00"}, **about)


def test_fields_are_those_of_perfetto():
    real = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    pool = message_set("perfetto").pool
    file = pool.FindFileByName("trace.proto")

    def compare(mine, package):
        theirs = package.DESCRIPTOR.file.pool.FindMessageTypeByName(mine.full_name)
        for field in mine.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), field
        for kind in [*mine.enum_types]:
            for value in kind.values:
                assert theirs.enum_types_by_name[kind.name].values_by_name[value.name].number == value.number
        for nested in mine.nested_types:
            compare(nested, package)

    for mine in file.message_types_by_name.values():
        compare(mine, real.Trace)
    for value in file.enum_types_by_name["BuiltinClock"].values:
        assert real.BuiltinClock.Value(value.name) == value.number


def read(data):
    """The packets of a file: tracks by number, and per track the events in the order of the file."""
    tracks, names, events = {}, {}, {}
    for packet in message_set("perfetto").message("perfetto.protos.Trace").FromString(data).packet:
        for one in packet.interned_data.event_names:
            names[one.iid] = one.name
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        elif packet.HasField("track_event"):
            event = packet.track_event
            row = (event.type, packet.timestamp, names.get(event.name_iid, ""), event)
            events.setdefault(event.track_uuid, []).append(row)
    return tracks, events


def test_neighbours_and_nested_slices_keep_their_order():
    inner, after = span(10, 20, "inner"), span(20, 20, "nothing")
    drawing = made(span(10, 20, "outer"), inner, after, span(20, 30, "next"), span(12, 25, "other", lane=1))
    tracks, events = read(perfetto.written(drawing))
    lanes = {tracks[uuid].name: [(kind, at, name) for kind, at, name, _ in rows] for uuid, rows in events.items()}
    assert lanes["worker"] == [
        *((1, 10, "outer"), (1, 10, "inner"), (2, 20, ""), (2, 20, ""), (1, 20, "nothing"), (2, 20, "")),
        *((1, 20, "next"), (2, 30, "")),
    ]
    assert lanes["at the same time 2"] == [(1, 12, "other"), (2, 25, "")]


def test_running_tasks_are_counted_at_each_change():
    drawing = made(span(1, 5), span(2, 5, lane=1), span(5, 7), span(3, 4, category="wait"))
    assert list(drawing.running()) == [(1, 1), (2, 2), (5, 1), (7, 0)]
    assert list(made().running()) == []
    samples = [Sample(1, 3, 100), Sample(2, 3, 200), Sample(4, 0, 200)]
    tracks, events = read(perfetto.written(made(samples=samples)))
    counters = {tracks[uuid].name: [(at, event.counter_value) for _, at, _, event in rows]
                for uuid, rows in events.items()}  # fmt: skip
    assert counters == {"queued tasks": [(1, 3), (4, 0)], "bytes in the store": [(1, 100), (2, 200)]}


def test_format_is_chosen_by_name_or_word(tmp_path):
    assert [format_of(name) for name in ("a.json", "a.pftrace", "a")] == ["chrome", "perfetto", "perfetto"]
    assert format_of("a.json", "perfetto") == "perfetto"
    with pytest.raises(ValueError, match="'perfetto' or 'chrome'"):
        format_of("a", "svg")
    write(made(span(1, 2)), tmp_path / "out", "chrome")
    assert (tmp_path / "out").read_text().startswith('{"displayTimeUnit"')


def run_some():
    adder = Adder.remote()
    assert fastrt.get(outer.remote(2)) == 2
    assert fastrt.get(adder.add.remote(1, 2)) == 3
    assert fastrt.get(fastrt.put(np.zeros(100_000))).sum() == 0
    del adder


@pytest.fixture
def recorded(rt):
    """A drawing of some tasks."""
    client = store_client.require().client
    trace.switch(client, True)
    run_some()
    recording = record(store_client.require(), 0.05)
    recording._since.clear()  # all of the rings
    recording.read()
    trace.switch(client, False)
    return recording.drawing()


def test_session_is_written_with_the_times_of_chromes_format(recorded):
    tracks, events = read(perfetto.written(recorded))
    titles = {uuid: track.process.process_name for uuid, track in tracks.items() if track.HasField("process")}
    assert any(title.startswith("driver") for title in titles.values())
    begun = Counter(name for rows in events.values() for kind, _, name, _ in rows if kind == 1)
    assert begun["outer"] >= 3
    assert begun["Adder.add"] >= 1
    assert begun["put"] >= 1
    both = [event for event in chrome.events(recorded) if event["ph"] == "X"]
    assert begun.total() == len(both)
    zero = min(one.start for one in recorded.slices)
    starts = Counter(at - zero for rows in events.values() for kind, at, _, _ in rows if kind == 1)
    assert starts == Counter(traces.nanoseconds(event["ts"]) for event in both)
    for uuid, rows in events.items():
        if tracks[uuid].HasField("counter"):
            continue
        depth, last = 0, 0
        for kind, at, _, _ in rows:
            depth += {1: 1, 2: -1}.get(kind, 0)
            assert at >= last
            assert depth >= 0
            last = at
        assert depth == 0
    out = {flow for rows in events.values() for *_, event in rows for flow in event.flow_ids}
    ended = {flow for rows in events.values() for *_, event in rows for flow in event.terminating_flow_ids}
    assert out == ended == recorded.arrows.keys()
    assert len(out) >= 4


@pytest.mark.long  # Node compiles 11 MB of WebAssembly
def test_perfetto_reads_every_slice_arrow_and_counter(recorded):
    with TraceProcessor(perfetto.written(recorded)) as processor:
        faults = processor.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        assert faults == []
        rows = processor.query("select ts, dur, name, depth from slice")
        expected = Counter((one.start, one.end - one.start, one.name) for one in recorded.slices)
        assert Counter((row["ts"], row["dur"], row["name"]) for row in rows) == expected
        (flows,) = processor.query("select count(*) as n from flow")
        assert flows["n"] == len(recorded.arrows)
        (linked,) = processor.query(
            "select count(*) as n from flow join slice s on slice_out = s.id join slice r on slice_in = r.id "
            "where s.name = 'submit' and r.name != 'submit'"
        )
        assert linked["n"] == len(recorded.arrows)
        counted = processor.query(
            "select t.name, max(c.value) as most from counter c join counter_track t on c.track_id = t.id group by 1"
        )
        assert {row["name"]: row["most"] for row in counted}["running tasks"] >= 3
        assert {row["name"] for row in counted} == {"running tasks", "queued tasks", "bytes in the store"}
        names = [row["name"] for row in processor.query("select name from process where name is not null")]
        assert any(name.startswith("worker") for name in names)
        (noted,) = processor.query(
            "select count(*) as n from args where key = 'debug.task_id' and length(string_value) = 16"
        )
        assert noted["n"] > 0
