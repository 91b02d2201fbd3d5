"""The plan by which a large value goes to several nodes: who sends it to whom, with failures at any moment."""

import contextlib
import random

import pytest

from fastrt.cluster.large_values import Native
from fastrt.cluster.node_tables import NodeTables
from fastrt.cluster.peer_stream import Exchange
from fastrt.cluster.spread import Fetch, Spread
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.streams import Access
from support.sides import Side, in_loop

Report, Frame, Release, Copy = (
    message_set("node").message(f"fastrt.node.{name}") for name in ("Report", "Frame", "Release", "Copy")
)


def drive(nodes, seed, faults):
    """Carry out the orders in random order; how often the owner sent, and the longest chain of senders."""
    rng = random.Random(seed)
    spread = Spread(1)
    orders, done, gone, sent, depth = [], set(), set(), 0, {None: 0}
    for node in range(nodes):
        orders += spread.ask(node)
    while orders:
        order = orders.pop(rng.randrange(len(orders)))
        if order.receiver in gone:
            continue
        peers = {sender.peer for sender in order.senders}
        assert len(peers) == len(order.senders)
        assert peers == {None} or peers <= done | gone
        assert {sender.number for sender in order.senders} == {1 if peer is None else 100 + peer for peer in peers}
        if peers & gone or rng.random() < faults / 4:
            orders += spread.ask(order.receiver)
        elif rng.random() < faults:
            gone.add(order.receiver)
            orders += spread.remove(order.receiver)
        else:
            sent += peers == {None}
            depth[order.receiver] = max(depth[peer] for peer in peers) + 1
            done.add(order.receiver)
            orders += spread.received(order.receiver, 100 + order.receiver)
            if rng.random() < faults:
                gone.add(order.receiver)
                orders += spread.remove(order.receiver)
    assert done | gone == set(range(nodes))
    return sent, max(depth.values())


@pytest.mark.parametrize("nodes", [1, 2, 4, 16, 100])
def test_owner_sends_a_value_once_and_the_others_pass_it_on(nodes):
    for seed in range(20):
        assert drive(nodes, seed, 0.0)[0] == 1


def test_every_node_gets_the_value_or_is_gone_whatever_fails():
    for seed in range(300):
        drive(12, seed, 0.3)


def test_copies_are_sent_by_as_many_nodes_as_have_one():
    spread = Spread(1)
    asked = [order for node in range(8) for order in spread.ask(node)]
    assert asked == [(0, ((None, 1),))]
    rounds = 0
    while asked:
        rounds += 1
        asked = [next_ for order in asked for next_ in spread.received(order.receiver, 100)]
    assert rounds <= 5
    for node in range(8):
        assert spread.remove(node) == []
    assert spread.is_idle


def test_a_node_that_cannot_pass_a_value_on_makes_way_for_the_next_one():
    spread = Spread(1)
    assert [order for node in range(3) for order in spread.ask(node)] == [(0, ((None, 1),))]
    assert spread.received(0, 0) == [(1, ((None, 1),))]
    assert spread.received(1, 0) == [(2, ((None, 1),))]
    assert spread.received(2, 0) == []
    assert spread.is_idle


def test_free_copies_are_shared_out_among_the_nodes_that_wait():
    spread = Spread(1)
    for node in range(6):
        spread.ask(node)
        spread.received(node, 100 + node)
    copies = [(node, 100 + node) for node in range(6)]
    assert spread.ask("late") == [("late", tuple(copies[:4]))]
    assert spread.ask("later") == [("later", tuple(copies[4:]))]
    assert spread.ask("last") == []
    assert spread.received("later", 0) == [("last", tuple(copies[4:]))]
    # The senders that "late" was given have failed, whichever of them it was.
    assert spread.ask("late") == []
    assert spread.received("last", 0) == [("late", tuple(copies[4:]))]


def test_a_sender_without_its_copy_gets_the_value_from_another_one_of_the_same_receiver():
    """Both waited without end: the sender for the other one, and the receiver, which keeps that one busy, for both."""
    spread = Spread(1)
    for node in range(3):
        spread.ask(node)
        spread.received(node, 100 + node)
    assert spread.ask("late") == [("late", ((0, 100), (1, 101), (2, 102)))]
    assert spread.ask(2) == [(2, ((0, 100), (1, 101)))]
    assert spread.ask(1) == [(1, ((0, 100),))]
    assert spread.ask(0) == [(0, ((None, 1),))]


@contextlib.contextmanager
def source():
    """A node that keeps two values for a peer, to which it has named them; their sender, an object of another node."""
    side = Side()
    native = Native(side.store, Access(Identity.from_token(new_token())), "127.0.0.1")
    exchange = Exchange(side.store, side.waiter, NodeTables(side.store, side.waiter, native, 1 << 20))
    side.exchange.close("the test needs another one")
    side.exchange = exchange
    hello = Report(node="2" * 32, address="127.0.0.1:2", name="two", native="127.0.0.1:9")
    exchange.on_frame(Frame(hello=hello, claims=True))
    refs = [side.store.put(bytes(1 << 20)) for _ in range(2)]
    try:
        for ref in refs:
            exchange.references.name(ref)
        yield side, exchange, refs
    finally:
        native.close()
        side.close()


async def turns(side, count):
    """The numbers of the next turns of the peer."""
    frame = await side.frames(lambda frame: len(getattr(frame, "from")) >= count)
    return [one.number for one in getattr(frame, "from")]


@in_loop
async def test_turn_to_fetch_a_value_of_two_objects_lasts_when_one_of_them_is_released():
    """A third node offers the value under one number. The peer's reader of the other object waited without end."""
    with source() as (side, exchange, (first, second)):
        values, spreads = exchange.traffic.values, exchange.traffic._tables.spreads
        assert {values.keep(ref, 77) for ref in (first, second)} == {77}
        other = Fetch(exchange, 78)
        spreads.ask(first.objref, other)  # so the peer waits
        exchange.on_frame(Frame(where=[77]))
        exchange.on_frame(Frame(release=[Release(objref=first.objref, named=1)]))
        spreads.remove(other)
        assert await turns(side, 1) == [77]
        exchange.on_frame(Frame(copy=[Copy(number=77, offered=5)]))
        assert [one.is_idle for one in spreads._spreads.values()] == [False]
        exchange.on_frame(Frame(release=[Release(objref=second.objref, named=1)]))
        assert not spreads._spreads
        assert not spreads._values


@in_loop
async def test_two_fetches_of_one_object_under_two_numbers_both_get_a_turn():
    """Another node offers the object, and then this node, while the peer still fetches it under the first number."""
    with source() as (side, exchange, (ref, _)):
        values, spreads = exchange.traffic.values, exchange.traffic._tables.spreads
        numbers = [values.keep(ref, 77), values.keep(ref)]
        other = Fetch(exchange, 78)
        spreads.ask(ref.objref, other)  # so the peer waits
        exchange.on_frame(Frame(where=numbers))
        spreads.received(other, 0)
        assert await turns(side, 1) == numbers[:1]
        exchange.on_frame(Frame(copy=[Copy(number=77)]))
        assert await turns(side, 1) == numbers[1:]
        exchange.on_frame(Frame(copy=[Copy(number=numbers[1])]))
        assert not spreads._spreads
