"""Trace rings: what is recorded comes out, in order, and nothing that was overwritten."""

import pytest

from fastrt._core import trace

RECORDS = 4096  # FRT_TRACE_RECORDS


@pytest.fixture
def client(make_node):
    return make_node(trace=True).client


def test_record_without_tracing_keeps_nothing(node):
    trace.record(node.client, trace.PUT, 1)
    assert not trace.enabled(node.client)
    assert trace.drain(node.client, 0) == ([], 0)


def test_records_come_out_in_order(client):
    for k in range(10):
        trace.record(client, trace.TASK_START + k % 2, 1000 + k, k)
    rows, following = trace.drain(client, client.index)
    assert [row[1:] for row in rows] == [(trace.TASK_START + k % 2, 1000 + k, k) for k in range(10)]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert following == 10
    assert trace.drain(client, client.index, following) == ([], 10)
    trace.record(client, trace.GET, 7)
    assert [row[1:] for row in trace.drain(client, client.index, following)[0]] == [(trace.GET, 7, 0)]


@pytest.mark.parametrize("count", [RECORDS - 1, RECORDS, RECORDS + 1, 3 * RECORDS + 5])
def test_full_ring_gives_the_latest_records(client, count):
    for k in range(count):
        trace.record(client, trace.PUT, k)
    rows, following = trace.drain(client, client.index)
    # One less than the ring holds: its oldest record may be being overwritten.
    kept = min(count, RECORDS - 1)
    assert [row[2] for row in rows] == list(range(count - kept, count))
    assert following == count


@pytest.mark.parametrize("since", [5, 6, 1 << 63])
def test_drain_from_beyond_the_end_is_empty(client, since):
    for k in range(5):
        trace.record(client, trace.PUT, k)
    assert trace.drain(client, client.index, since) == ([], 5)


@pytest.mark.parametrize("of", [64, 0xFFFFFFFF])
def test_drain_of_nobody_is_empty(client, of):
    assert trace.drain(client, of) == ([], 0)


def test_reader_in_another_process_sees_whole_records(make_node):
    node = make_node(trace=True)
    peer = node.peer()
    peer.start("for k in range(200_000): trace.record(client, k % 7, k, k)")
    since, rows = 0, []
    while not peer.answered() or since < 200_000:
        more, since = trace.drain(node.client, peer.index, since)
        rows += more
    peer.finish()
    assert all(kind == number % 7 and value == number for _, kind, number, value in rows)
    numbers = [row[2] for row in rows]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 199_999


@pytest.mark.parametrize(
    ("kind", "number", "value"), [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (1 << 32, 0, 0), (0, 1 << 64, 0), (0, 0, 1 << 32)]
)
def test_record_out_of_range_is_refused(client, kind, number, value):
    with pytest.raises(OverflowError):
        trace.record(client, kind, number, value)
