"""Rows of nodes on their way from the uplink to the daemon."""

from fastrt.cluster.daemon_link import _batches
from fastrt.store.messages import BYTES_MAX, ClusterNodes, NodeRow, write_message


def test_rows_of_many_nodes_are_divided_into_messages_that_can_be_read():
    labels = {f"label {k} " + "é" * 100: "ü" * 100 for k in range(60)}
    rows = [NodeRow(f"{k:032}", "a node", {"CPU": 10_000}, {"CPU": 1}, labels) for k in range(40)]
    batches = list(_batches(rows))
    assert [row for batch in batches for row in batch] == rows
    assert len(batches) > 1
    for batch in batches:
        assert len(write_message(ClusterNodes("one", batch, [], True, False))) <= BYTES_MAX
    assert list(_batches([])) == [[]]
