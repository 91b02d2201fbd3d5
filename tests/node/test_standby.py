"""A standby head: which head a node connects to, and a cluster whose head is lost and comes back."""

import asyncio
import select
import socket
from typing import NamedTuple

import grpc
import pytest

import fastrt
from fastrt.cluster.head import Membership
from fastrt.cluster.head_link import HeadLink, Heads
from fastrt.cluster.membership import JOIN
from fastrt.cluster.reasons import Reasons
from fastrt.net.address import join_address
from fastrt.net.grpc import streams
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.grpc.streams import Access
from fastrt.node.daemon import sweep_sessions
from fastrt.runtime.nodes import nodes_at
from fastrt.store.messages import KnownHeads
from fastrt.versions import own_versions
from support.cluster import RunningNode

_SET = message_set("node")

PATIENCE_S = 40.0


def known(node="", own="", **others):
    """The heads as a node knows them: standbys by the ids of their nodes, which are also their addresses."""
    heads = Heads("first", node, own)
    heads.nodes |= {address: one for one, address in others.items()}
    return heads


def asked(heads, now, answers=()):
    """The heads that a node asks in one round, none of which takes it; `answers`: those that are not in charge."""
    found = []
    while not found or heads.address() != "first":
        found.append(heads.address())
        heads.failed(now, heads.address() in answers)
    return found


def test_first_head_is_tried_alone_until_it_was_lost_for_some_time():
    heads = known(n1="a", n2="b")
    for now in (10.0, 11.0, 12.9):
        assert asked(heads, now) == ["first"]
    assert asked(heads, 13.5) == ["first", "a", "b"]
    assert asked(heads, 14.0) == ["first", "a", "b"]


def test_first_head_that_answers_is_tried_first_again():
    heads = known(n1="a")
    heads.failed(0.0, False)
    heads.failed(5.0, False)
    assert heads.address() == "a"
    heads.joined()
    assert heads.address() == "first"
    heads.failed(6.0, False)  # it was not back: the standby is next at once
    assert heads.address() == "a"
    heads.failed(7.0, False)
    heads.joined()
    heads.failed(8.0, False)
    assert heads.address() == "first"


def test_node_asks_its_own_standby_last_and_not_while_an_earlier_one_answers():
    heads = known("n2", "b", n1="a", n3="c")
    heads.failed(0.0, False)
    assert asked(heads, 5.0) == ["first", "a", "c", "b"]
    assert asked(heads, 6.0, {"c"}) == ["first", "a", "c", "b"]
    assert asked(heads, 7.0, {"a"}) == ["first", "a", "c"]
    assert asked(heads, 8.0) == ["first", "a", "c", "b"]


def test_standby_that_is_not_in_charge_does_not_hide_one_that_is():
    heads = known(n1="a", n2="b")
    heads.failed(0.0, False)
    assert asked(heads, 5.0, {"a"}) == ["first", "a", "b"]


def test_next_uplink_of_a_node_knows_the_standbys_and_that_the_first_head_is_lost():
    before = known("n2", "b", n1="a")
    before.failed(0.0, False)
    before.failed(3.0, False)
    assert before.address() == "a"
    before.joined()
    after = Heads("first", "n2", "b")
    after.take(before.known)
    assert after.known == before.known
    assert asked(after, 100.0) == ["first", "a", "b"]
    after.joined()
    assert not after.known.is_lost


class Row(NamedTuple):
    """A member of a head, with the fields of its report that `Heads` reads."""

    node: str
    standby: str


def test_standby_is_forgotten_when_the_first_head_has_not_listed_its_node_for_a_minute():
    heads = known("n2", "b")
    heads.see(0.0, [Row("n1", "a"), Row("n2", "b"), Row("n3", "")], True)
    assert heads.standbys == ["a", "b"]
    heads.see(10.0, [], True)  # the head was restarted
    heads.see(500.0, [], False)  # a standby is in charge
    heads.see(69.0, [Row("n2", "b")], True)
    assert heads.standbys == ["a", "b"]
    heads.see(71.0, [Row("n2", "b")], True)
    assert heads.standbys == ["b"]


def test_pauses_grow_up_to_a_limit_and_are_short_again_after_an_answer():
    heads = known(n1="a")
    pauses = []
    for now in (0.0, 1.0, 2.0, *range(3, 12)):
        asked(heads, now)
        pauses.append(heads.pause_s)
    assert pauses[:4] == [0.5, 0.5, 0.5, 0.8]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 4.0
    heads.failed(20.0, False)
    assert heads.pause_s == 0  # the other heads of a round are asked at once
    heads.joined()
    assert heads.pause_s == 0.5


def names(node):
    """The names of the nodes that a node knows."""
    return sorted(row["NodeName"] for row in nodes_at(node.note.socket_path))


@fastrt.remote
def add(a, b):
    return a + b


def test_standby_takes_over_and_gives_the_cluster_back(runtime_dir, monkeypatch, wait_until, free_port):
    monkeypatch.setenv("FASTRT_TOKEN", new_token())
    of_three = runtime_dir.parent / "three"  # of its own: a driver there uses node three
    nodes = []

    def start(name, workers, *more, head=f"127.0.0.1:{free_port}", folder=runtime_dir):
        to = ("--address", head) if head else ("--head", "--port", str(free_port))
        nodes.append(RunningNode(folder, *to, "--name", name, "--num-workers", workers, *more))
        return nodes[-1]

    first = start("one", "1", head="")
    try:
        start("two", "1", "--standby", "--port", str(free_port + 1))
        three = start("three", "0", folder=of_three)
        wait_until(lambda: all(len(names(node)) == 3 for node in nodes), "all nodes", PATIENCE_S)
        first.kill()
        nodes.remove(first)
        wait_until(lambda: all(names(node) == ["three", "two"] for node in nodes), "the standby", PATIENCE_S)
        with fastrt.init(address=first.head, runtime_dir=of_three):
            # Node three has no workers: what it runs was forwarded.
            assert fastrt.get(add.remote(1, 2), timeout=PATIENCE_S) == 3
            for module in ("fastrt.node.__main__", "fastrt.runtime.uplink"):
                three.kill_child(module)  # the next uplink has never met the first head, nor has its daemon
            assert fastrt.get(add.remote(3, 4), timeout=PATIENCE_S) == 7
        start("four", "0", head=f"127.0.0.1:{free_port + 1}")
        start("one", "0", head="")
        wait_until(lambda: all(len(names(node)) == 4 for node in nodes), "the first head", PATIENCE_S)
    finally:
        said = [node.stop()[1] for node in nodes]
        for folder in (runtime_dir, of_three):
            sweep_sessions(folder, runtime_dir.parent / "spill")
    assert all("is lost: this node joins" in err for err in said[:2])
    assert not any("Traceback" in err for err in said)


@pytest.mark.parametrize("words", [["--head", "--standby"]])
def test_head_is_no_standby(runtime_dir, words):
    with pytest.raises(AssertionError, match="--standby is for another node than the head's"):
        RunningNode(runtime_dir, *words)


def test_node_whose_own_standby_hangs_joins_the_first_head_when_it_is_back(free_port):
    """A node asks its own standby while the head is away. If that hangs, the node joins the head once it is back."""
    token, first = new_token(), f"127.0.0.1:{free_port}"

    async def run():
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            own.listen()
            standby = join_address(*own.getsockname())
            report = _SET.message("fastrt.node.Report")(node="b" * 32, address="127.0.0.1:1", name="b", standby=standby)
            report.versions.update(own_versions())
            access = Access(Identity.from_token(token))
            link = HeadLink(first, access, report, Reasons(access.identity), lambda change: None)
            joined = asyncio.Event()
            link.announce = joined.set
            staying = asyncio.create_task(link.stay_joined(KnownHeads(first, [], True)))
            await asyncio.wait_for(asyncio.to_thread(select.select, [own], [], []), PATIENCE_S)
            stop = asyncio.Event()
            server, _ = await streams.serve(first, access, _SET, {JOIN: Membership().join}, stop)
            try:
                await asyncio.wait_for(joined.wait(), 15.0)
            finally:
                staying.cancel()
                stop.set()
                await streams.stop_server(server, 5.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("UNAVAILABLE", "failed to connect"),
        ("INTERNAL", "Internal error from Core"),
        ("INTERNAL", "Received RST_STREAM with error code 2"),
    ],
)
def test_head_whose_stream_breaks_is_lost_and_nothing_is_printed(free_port, capsys, code, details):
    """gRPC gives a stream a status of its own if it breaks at certain moments, as when both nodes are stopped."""
    first, access = f"127.0.0.1:{free_port}", Access(Identity.from_token(new_token()))
    report = _SET.message("fastrt.node.Report")(node="b" * 32, address="127.0.0.1:1", name="b")
    link = HeadLink(first, access, report, Reasons(access.identity), lambda change: None)
    link.announce = None  # the node has joined
    broken = grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    asyncio.run(link._failed(first, broken))
    assert capsys.readouterr().err == ""
