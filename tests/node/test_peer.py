"""Which nodes a node connects to when it needs room for its tasks."""

from fastrt.cluster.peer import Peer, to_call
from fastrt.net.grpc.descriptors import message_set

Report = message_set("node").message("fastrt.node.Report")


def peers(count, **fields):
    return [Peer(Report(node=f"{k:032x}", workers=2, free={"CPU": 20_000}, **fields), True) for k in range(count)]


def test_few_nodes_are_all_connected_even_if_they_have_queues():
    few = peers(5, queued=3)
    assert len(to_call("me", few)) == 5


def test_of_many_nodes_some_without_a_queue_are_connected_at_a_time():
    many = peers(100)
    for peer in many[:60]:
        peer.report.queued = 1
    many[99].report.free["CPU"] = 40_000
    found = to_call("me", many)
    assert len(found) == 8
    assert found[0] is many[99]
    assert not any(peer.report.queued for peer in found)
    for peer in found[:5]:
        peer.calling = True
    assert len(to_call("me", many)) == 3


def test_nodes_prefer_different_ones_of_equally_free_nodes():
    many = peers(100)
    chosen = {peer.report.node for k in range(50) for peer in to_call(f"node {k}", many)}
    assert len(chosen) > 80


def test_nodes_without_workers_and_lost_ones_are_not_connected():
    some = peers(3)
    some[0].report.workers = 0
    some[1].report = None
    assert to_call("me", some) == [some[2]]
