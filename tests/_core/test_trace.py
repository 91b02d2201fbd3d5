"""Trace rings: what is recorded comes out, in order, and nothing that was overwritten."""

import os

import pytest

from fastrt._core.memory import trace
from fastrt._core.memory.clients import KIND_DRIVER
from fastrt._core.repair import fsck

RECORDS = trace.RECORDS


@pytest.fixture
def client(make_node):
    return make_node(trace=True).client


def test_record_without_tracing_keeps_nothing(node):
    trace.record(node.client, trace.PUT, 1)
    assert not trace.enabled(node.client)
    assert trace.drain(node.client, 0) == ([], 0)


def test_records_come_out_in_order(client):
    before = trace.now()
    for k in range(10):
        trace.record(client, trace.TASK + k % 2, 1000 + k, k, 7)
    rows, following = trace.drain(client, client.index)
    assert rows[0][3:] == (trace.PROCESS, os.getpid(), KIND_DRIVER, 0)  # each client says who it is
    rows = rows[1:]
    assert [row[0] for row in rows] == list(range(1, 11))
    assert [row[3:] for row in rows] == [(trace.TASK + k % 2, 1000 + k, k, 7) for k in range(10)]
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert all(row[1] == row[2] for row in rows)
    slack = 100_000  # two clocks are compared
    assert before - slack <= rows[0][1] <= rows[-1][1] <= trace.now() + slack
    assert following == 11
    assert trace.drain(client, client.index, following) == ([], 11)
    trace.record(client, trace.GET, 7)
    assert [row[3:] for row in trace.drain(client, client.index, following)[0]] == [(trace.GET, 7, 0, 0)]


def test_what_takes_time_is_open_until_its_end(client):
    outer = trace.begin(client, trace.WAIT, 1)
    inner = trace.begin(client, trace.PUT, 2, trace.kib(1025))
    trace.end(client, inner)
    rows, _ = trace.drain(client, client.index, outer - 1)
    assert [(row[3], row[2] > 0) for row in rows] == [(trace.WAIT, False), (trace.PUT, True)]
    assert rows[1][5] == 2
    trace.end(client, outer)
    (waited, put), _ = trace.drain(client, client.index, outer - 1)
    assert waited[1] <= put[1] <= put[2] <= waited[2]


def test_end_of_what_was_overwritten_changes_nothing(client):
    first = trace.begin(client, trace.WAIT, 1)
    for k in range(RECORDS):
        trace.record(client, trace.GET, k)
    before = trace.drain(client, client.index)
    trace.end(client, first)
    trace.end(client, 1 << 40)  # a number that was never given
    assert [row[3:] for row in trace.drain(client, client.index)[0]] == [row[3:] for row in before[0]]


def test_recording_is_switched_on_and_off(node):
    assert trace.begin(node.client, trace.WAIT, 1) == 0
    trace.switch(node.client, True)
    assert trace.enabled(node.client)
    trace.record(node.client, trace.GET, 5)
    trace.switch(node.client, False)
    trace.record(node.client, trace.GET, 6)
    rows, _ = trace.drain(node.client, node.client.index)
    assert [row[4] for row in rows] == [5]


def test_session_records_while_any_process_has_a_recording(node):
    one, two = node.peer(), node.peer()
    for peer in (one, two):
        peer.run("trace.switch(client, True)")
    trace.switch(node.client, True)
    trace.switch(node.client, False)
    assert trace.enabled(node.client)
    one.run("trace.switch(client, False)")
    assert trace.enabled(node.client)
    assert fsck.fsck(node.client, True) == []
    node.bury(two)
    assert not trace.enabled(node.client)
    one.run("trace.switch(client, False)")  # it has none
    assert fsck.fsck(node.client, True) == []


def test_recordings_of_one_process_are_counted(node):
    for on, expected in ((True, True), (True, True), (False, True), (False, False), (False, False)):
        trace.switch(node.client, on)
        assert trace.enabled(node.client) == expected


def test_traced_session_records_to_its_end(client):
    trace.switch(client, True)
    trace.switch(client, False)
    assert trace.enabled(client)


@pytest.mark.parametrize("count", [RECORDS - 1, RECORDS, RECORDS + 1, 3 * RECORDS + 5])
def test_full_ring_gives_the_latest_records(client, count):
    for k in range(count):
        trace.record(client, trace.PUT, k)
    rows, following = trace.drain(client, client.index)
    # One less than the ring holds: its oldest record may be being overwritten.
    rows = rows[count < RECORDS - 1 :]  # without the one that says who the client is
    kept = min(count, RECORDS - 1)
    assert [row[4] for row in rows] == list(range(count - kept, count))
    assert following == count + 1


@pytest.mark.parametrize("since", [6, 7, 1 << 63])
def test_drain_from_beyond_the_end_is_empty(client, since):
    for k in range(5):
        trace.record(client, trace.PUT, k)
    assert trace.drain(client, client.index, since) == ([], 6)


@pytest.mark.parametrize("of", [64, 0xFFFFFFFF])
def test_drain_of_nobody_is_empty(client, of):
    assert trace.drain(client, of) == ([], 0)


def test_reader_in_another_process_sees_whole_records(make_node):
    node = make_node(trace=True)
    peer = node.peer()
    peer.start("for k in range(200_000): trace.record(client, k % 7, k, k)")
    since, rows = 0, []
    while not peer.answered() or since < 200_001:
        more, since = trace.drain(node.client, peer.index, since)
        rows += more
    peer.finish()
    rows = [row for row in rows if row[0] > 0]
    assert all(kind == number % 7 and value == number for _, _, _, kind, number, value, _ in rows)
    numbers = [row[4] for row in rows]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 199_999


@pytest.mark.parametrize(
    ("kind", "number", "value"), [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (1 << 32, 0, 0), (0, 1 << 64, 0), (0, 0, 1 << 32)]
)
def test_record_out_of_range_is_refused(client, kind, number, value):
    with pytest.raises(OverflowError):
        trace.record(client, kind, number, value)
