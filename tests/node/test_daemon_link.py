"""Rows of nodes on their way from the uplink to the daemon."""

import asyncio
import socket
import threading

import pytest

from fastrt.cluster.daemon_link import Orders, _batches
from fastrt.store.join import Link
from fastrt.store.messages import BYTES_MAX, ClusterNodes, KnownHeads, NodeRow, StandbyHead, write_message


def test_rows_of_many_nodes_are_divided_into_messages_that_can_be_read():
    labels = {f"label {k} " + "é" * 100: "ü" * 100 for k in range(60)}
    rows = [NodeRow(f"{k:032}", "a node", {"CPU": 10_000}, {"CPU": 1}, labels) for k in range(40)]
    batches = list(_batches(rows))
    assert [row for batch in batches for row in batch] == rows
    assert len(batches) > 1
    for batch in batches:
        assert len(write_message(ClusterNodes("one", batch, [], True, False))) <= BYTES_MAX
    assert list(_batches([])) == [[]]


OLD, NEW = (KnownHeads("first", [StandbyHead("n1", address)], False) for address in ("old", "new"))


@pytest.mark.parametrize(("before", "after"), [(None, OLD), (NEW, NEW)])
def test_heads_that_a_daemon_has_from_an_earlier_uplink_do_not_replace_newer_ones(before, after):
    """A daemon that dies before it has read the newest list leaves an older one to the next daemon, which sends it."""

    async def run():
        ours, theirs = map(Link, socket.socketpair())
        news = asyncio.Event()
        orders = Orders("one", None, ours, news.set, {})
        if before is not None:
            orders.keep_heads(before)
        theirs.send(OLD)
        await asyncio.wait_for(news.wait(), 20.0)
        theirs.close()
        for thread in threading.enumerate():
            if thread.name == "fastrt-orders":
                thread.join()
        ours.close()
        return orders.heads

    assert asyncio.run(run()) == after
