"""Rows of nodes and objects on their way from the uplink to the daemon."""

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace

import pytest

from fastrt.cluster.daemon_link import Orders, _batches
from fastrt.store.join import Link
from fastrt.store.messages import (
    BYTES_MAX,
    OBJECTS_MAX,
    ClusterNodes,
    HeldObject,
    Holds,
    KeepObjects,
    KeptObject,
    KnownHeads,
    NodeRow,
    ReleaseObjects,
    StandbyHead,
    write_message,
)

# The thread that reads ends with the daemon, and with it the process of an uplink.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


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


@contextlib.contextmanager
def connected():
    """An uplink's orders, and the daemon's end of the connection."""
    ours, theirs = map(Link, socket.socketpair())
    try:
        yield Orders("one", None, ours, lambda: None, {}), theirs
    finally:
        theirs.close()
        for thread in threading.enumerate():
            if thread.name == "fastrt-orders":
                thread.join()
        ours.close()


async def turn() -> None:
    """Let the loop do what it was given so far."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


def test_news_of_many_objects_goes_in_few_messages_and_in_order():
    async def run():
        with connected() as (orders, daemon):
            assert isinstance(daemon.receive(20.0), ClusterNodes)
            for k in range(OBJECTS_MAX + 2):
                orders.keep("a", SimpleNamespace(objref=k, index=k))
            for k in range(3):
                orders.release("a", k)
            orders.keep("a", SimpleNamespace(objref=1, index=9))
            orders.hold("stream", "a", 1, 100)
            orders.hold("stream", "b", 1, 100)
            orders.lost("stream", "b")
            assert daemon.receive(0.0) is None
            await turn()
            found = [daemon.receive(20.0) for _ in range(6)]
            assert [type(one) for one in found] == [KeepObjects, KeepObjects, ReleaseObjects, KeepObjects, Holds, Holds]
            assert [len(one.objects) for one in found] == [OBJECTS_MAX, 2, 3, 1, 1, 2]
            assert found[1].objects == [KeptObject(OBJECTS_MAX + k, OBJECTS_MAX + k) for k in range(2)]
            assert (found[3].node, found[3].objects) == ("a", [KeptObject(1, 9)])
            assert (found[5].node, found[5].objects) == ("b", [HeldObject(1, 100), HeldObject(1, 0)])
            orders.keep_now("a", SimpleNamespace(objref=7_000_000, index=1))  # before the loop's next turn
            assert daemon.receive(20.0).objects == [KeptObject(7_000_000, 1)]
            await turn()
            assert daemon.receive(0.0) is None

    asyncio.run(run())


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
