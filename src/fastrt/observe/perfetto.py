"""A drawing in Perfetto's own trace format: track events in nanoseconds, arrows and counters.

All packets are of one sequence, whose first packet gives the clock. Names are sent once and then named by numbers.
The slices of a track follow each other in the order in which they begin and end, so that Perfetto's stable sort keeps
the begin and end of neighbours at the same nanosecond apart.

Source:
    https://perfetto.dev/docs/reference/synthetic-track-event; the fields are those of protos/perfetto/trace.proto.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from fastrt.net.grpc.descriptors import message_set
from fastrt.observe.drawing import Drawing, Slice

_SET = message_set("perfetto")
_TRACE = _SET.message("perfetto.protos.Trace")
_PACKET = _SET.message("perfetto.protos.TracePacket")
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_CLEARED, _NEEDS_STATE = 1, 2
_REALTIME, _MONOTONIC, _BOOTTIME = 1, 3, 6
_COUNT, _BYTES = 2, 3
_EXPLICIT, _NO_MERGE = 3, 2
_SEQUENCE = 1
_LANES = 1 << 16  # more than a process has
_NODE = 1  # the track of the node, with its counters
_RUNNING, _QUEUED, _STORE = 2, 3, 4
_PIECE = 1000  # packets that are serialized together


def written(drawing: Drawing) -> bytes:
    """A drawing as the bytes of a trace file."""
    parts, packets = [], []
    for packet in _packets(drawing):
        packets.append(packet)
        if len(packets) == _PIECE:
            parts.append(_TRACE(packet=packets).SerializeToString())
            packets.clear()
    parts.append(_TRACE(packet=packets).SerializeToString())
    return b"".join(parts)  # traces one after another are one trace


def _packets(drawing: Drawing) -> Iterator[Any]:
    yield _clocks()
    yield from _tracks(drawing)
    names = _Names()
    flows = {id(one): task for task, arrow in drawing.arrows.items() for one in arrow}
    for (process, lane), slices in groupby(
        sorted(drawing.slices, key=lambda one: (one.process, one.lane)), key=lambda one: (one.process, one.lane)
    ):
        yield from _track(_uuid(process, lane), slices, names, flows)
    for at, number in drawing.running():
        yield _counted(_RUNNING, at, number)
    queued, used = -1, -1
    for one in drawing.samples:
        if one.queued != queued:
            yield _counted(_QUEUED, one.at, one.queued)
        if one.store_bytes != used:
            yield _counted(_STORE, one.at, one.store_bytes)
        queued, used = one.queued, one.store_bytes


def _clocks() -> Any:
    """The first packet. The times of all others are of the monotonic clock."""
    packet = _packet()
    packet.sequence_flags = _CLEARED
    packet.trace_packet_defaults.timestamp_clock_id = _MONOTONIC
    for clock, ns in (
        (_REALTIME, time.time_ns()), (_MONOTONIC, time.monotonic_ns()),
        (_BOOTTIME, time.clock_gettime_ns(time.CLOCK_BOOTTIME)),
    ):  # fmt: skip
        packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=ns)
    packet.clock_snapshot.primary_trace_clock = _MONOTONIC
    return packet


def _tracks(drawing: Drawing) -> Iterator[Any]:
    yield _described(_NODE, name=f"node {drawing.node}".strip())
    yield _described(_RUNNING, name="running tasks", parent_uuid=_NODE, counter={"unit": _COUNT})
    if drawing.samples:
        yield _described(_QUEUED, name="queued tasks", parent_uuid=_NODE, counter={"unit": _COUNT})
        yield _described(_STORE, name="bytes in the store", parent_uuid=_NODE, counter={"unit": _BYTES})
    for number, process in enumerate(drawing.processes):
        about = {"pid": process.pid, "process_name": process.title, "legacy_sort_index": process.rank}
        labels = [drawing.node] if drawing.node else []
        track = _uuid(number, 0) - 1
        yield _described(track, process={**about, "process_labels": labels}, child_ordering=_EXPLICIT)
        for lane, title in enumerate(process.lane_titles()):
            yield _described(
                _uuid(number, lane), name=title, parent_uuid=track, sibling_order_rank=lane,
                sibling_merge_behavior=_NO_MERGE,
            )  # fmt: skip


def _uuid(process: int, lane: int) -> int:
    """The number of a lane's track; the track of its process is one below that of the first lane."""
    return (process + 1) * _LANES + 1 + lane


class _Names:
    """Numbers for names, and the packet field that gives them to Perfetto with their first use."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, packet: Any, table: str, name: str) -> int:
        """The number of a name in one of the tables of InternedData."""
        known = self._numbers.get((table, name))
        if known is None:
            known = self._numbers[table, name] = len(self._numbers) + 1
            getattr(packet.interned_data, table).add(iid=known, name=name)
        return known


def _track(uuid: int, slices: Iterator[Slice], names: _Names, flows: dict[int, int]) -> Iterator[Any]:
    """The events of one lane: begins and ends in their order of nesting."""
    open_ends: list[int] = []
    for one in slices:
        while open_ends and open_ends[-1] <= one.start:
            yield _event(_END, uuid, open_ends.pop())
        packet = _event(_INSTANT if one.is_point else _BEGIN, uuid, one.start)
        event = packet.track_event
        event.name_iid = names.number(packet, "event_names", one.name)
        event.category_iids.append(names.number(packet, "event_categories", one.category))
        for name, value in one.args.items():
            note = event.debug_annotations.add(name_iid=names.number(packet, "debug_annotation_names", name))
            if isinstance(value, int):
                note.uint_value = value
            else:
                note.string_value = value
        if id(one) in flows:
            (event.flow_ids if one.category == "submit" else event.terminating_flow_ids).append(flows[id(one)])
        yield packet
        if not one.is_point:
            open_ends.append(one.end)
    while open_ends:
        yield _event(_END, uuid, open_ends.pop())


def _event(kind: int, uuid: int, at: int) -> Any:
    packet = _packet()
    packet.timestamp = at
    packet.track_event.type = kind
    packet.track_event.track_uuid = uuid
    return packet


def _counted(uuid: int, at: int, value: int) -> Any:
    packet = _event(_COUNTER, uuid, at)
    packet.track_event.counter_value = value
    return packet


def _described(uuid: int, **about: Any) -> Any:
    packet = _packet()
    packet.track_descriptor.CopyFrom(_PACKET(track_descriptor={"uuid": uuid, **about}).track_descriptor)
    return packet


def _packet() -> Any:
    return _PACKET(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NEEDS_STATE)
