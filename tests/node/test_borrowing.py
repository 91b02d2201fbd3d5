"""The pure state of what two nodes hold for each other: counts, moves that are not possible, and clocks passed in."""

import time
from types import SimpleNamespace

import pytest

from fastrt.cluster.borrowing import Effect, Exports, Imported
from fastrt.cluster.claims import CLAIM_S, GONE_S, Absence, Absent
from fastrt.cluster.daemon_link import Holders
from fastrt.cluster.ledger import AcceptedTask, Ledger
from fastrt.cluster.remote_values import Kept
from fastrt.store.messages import HeldObject
from fastrt.transitions import IllegalMoveError


def test_export_is_dropped_when_the_peer_has_released_every_name():
    exports = Exports()
    assert [exports.name(7, "ref"), exports.name(7, "ref"), exports.name(7, "ref")] == [True, False, False]
    assert exports.release(7, 2) is Effect.SEND_AGAIN
    assert exports.find(7) == "ref"
    assert exports.release(7, 1) is Effect.DROP
    assert exports.release(7, 1) is Effect.NOTHING
    assert 7 not in exports


def test_import_arrives_once_and_says_how_often_it_was_named():
    one = Imported()
    one.named = 3
    one.arrive(7)
    with pytest.raises(IllegalMoveError, match=r"imported object 0x7: 'arrive' is not possible in the state ARRIVED"):
        one.arrive(7)
    assert one.give_up(7) == 3
    with pytest.raises(IllegalMoveError, match="WAITING -arrive-> ARRIVED -give_up-> RELEASED"):
        one.give_up(7)


def test_import_whose_stream_ends_is_claimed_and_counts_its_names_from_one():
    one = Imported()
    one.named = 3
    one.detach(7)
    one.claim(7)
    assert (one.is_waiting, one.named) == (True, 1)
    one.detach(7)
    one.lose(7)
    with pytest.raises(IllegalMoveError, match=r"DETACHED -claim-> WAITING -detach-> DETACHED -lose-> LOST"):
        one.claim(7)


def test_ledger_counts_what_is_open_and_tells_whether_a_task_was_sealed():
    ledger = Ledger()
    first, second, third = (ledger.forward(task, None) for task in (10, 11, 12))
    ledger.seal(first)
    assert [number for number, _ in ledger.open()] == [second, third]
    assert (ledger.end(first)[1], ledger.end(second)[1], ledger.end(second)) == (True, False, None)
    assert ledger.take_open(third).task == 12
    assert ledger.forwarded == 0
    ledger.accept(1, AcceptedTask([], 2, None, False))
    assert [ledger.result_sent(1) for _ in range(3)] == [False, True, False]
    assert ledger.is_empty


def test_sealed_task_cannot_be_sealed_again():
    ledger = Ledger()
    number = ledger.forward(10, None)
    ledger.seal(number)
    with pytest.raises(IllegalMoveError, match="forwarded task 1: 'seal' is not possible in the state SEALED"):
        ledger.seal(number)


def test_absent_node_is_lost_after_its_time_or_soon_after_it_has_left():
    waits, leaves, returns = (Absence("node", "cut", 0.0) for _ in range(3))
    assert not waits.look(CLAIM_S, None)
    assert waits.look(CLAIM_S + 0.1, None)
    assert [leaves.look(at, False) for at in (1.0, 1.0 + GONE_S, 1.1 + GONE_S)] == [False, False, True]
    assert [returns.look(at, here) for at, here in ((1.0, False), (2.0, True), (20.0, True))] == [False] * 3
    assert (returns.state, returns.until) == (Absent.BACK, 2.0 + CLAIM_S)
    returns.claimed()
    with pytest.raises(IllegalMoveError, match="AWAY -leave-> LEFT -return-> BACK -claim-> CLAIMED"):
        returns.lose()


def test_absent_node_whose_uplink_is_killed_again_has_the_whole_time_once_more():
    """Its next uplink claimed values that had been dropped: the second return did not count."""
    absent = Absence("node", "its uplink was killed", 0.0)
    looks = [(0.5, False), (1.5, True), (2.5, False), (4.4, True), (5.3, True), (4.4 + CLAIM_S, True)]
    assert [absent.look(*one) for one in looks] == [False] * 6
    assert absent.look(4.5 + CLAIM_S, True)


def test_values_are_kept_for_a_node_that_the_first_view_of_a_head_does_not_list(monkeypatch):
    """Such a node came back and claimed values that had been dropped two seconds after that view."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    kept, dropped = Kept(), []
    kept.on_drop = lambda node, objref: dropped.append((node, objref))
    kept.keep("back", [SimpleNamespace(objref=7)])
    kept.keep("gone", [SimpleNamespace(objref=8)])
    for clock[0], members in ((1.0, ["other"]), (2.0, ["other", "back"]), (10.0, ["other", "back"])):
        kept.tend(members)
    assert dropped == [("gone", 8)]
    assert kept.claim("back", 7).objref == 7


def test_object_is_kept_until_its_node_has_claimed_all():
    """The node used an answer on a stream that had ended here, released the next one, and claimed in vain then."""
    kept, dropped, held = Kept(), [], set()  # held: what the node holds over the stream that it claims on
    kept.find = lambda node, objref: "ref" if objref in held else None
    kept.on_drop = lambda node, objref: dropped.append(objref)
    kept.keep("peer", [SimpleNamespace(objref=7), SimpleNamespace(objref=8)])
    assert kept.claim("peer", 7).objref == 7
    held.add(7)
    held.discard(7)  # the peer's release of the answer
    assert kept.is_held("peer", 7)
    assert kept.claim("peer", 7).objref == 7
    held.add(7)
    kept.drop("peer")
    assert dropped == [8]
    assert kept.claim("peer", 7) == "ref"
    assert kept.claim("peer", 8) is None


def test_stream_that_ends_without_objects_does_not_keep_others_longer(monkeypatch):
    """Each end of an idle stream renewed the time of what the peer had stopped using long before."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    kept, dropped = Kept(), []
    kept.on_drop = lambda node, objref: dropped.append(objref)
    kept.keep("peer", [SimpleNamespace(objref=7)])
    clock[0] = CLAIM_S - 1.0
    kept.keep("peer", [])
    clock[0] = CLAIM_S + 1.0
    kept.tend(None)
    assert dropped == [7]


def test_object_stays_held_while_another_stream_of_the_same_node_holds_it():
    """The daemon dropped it at the first release, and the next uplink did not know what the peer claimed."""
    streams = [{7}, {7, 8}]  # what the node holds over its two streams
    kept, ended = Kept(), []
    kept.find = lambda node, objref: "ref" if any(objref in one for one in streams) else None
    kept.on_drop = lambda node, objref: ended.append(objref)
    streams[1].remove(7)
    assert kept.is_held("peer", 7)
    streams[0].remove(7)
    assert not kept.is_held("peer", 7)
    kept.keep("peer", [SimpleNamespace(objref=objref) for objref in (7, 8, 9)])  # of a stream that has ended
    assert kept.is_held("peer", 7)
    kept.drop("peer")  # all that the node does not claim; it still uses 8 over the other stream
    assert ended == [7, 9]
    assert not kept.is_held("peer", 9)


def test_node_has_a_value_until_none_of_its_streams_has_it():
    """The end of one of two streams made the placement forget the bytes that the node still had."""
    holders = Holders()
    assert [holders.add(stream, "peer", 7, 100) for stream in "aab"] == [True, False, False]
    assert holders.add("b", "peer", 8, 50)
    assert holders.add("c", "other", 7, 100)
    assert not holders.remove("a", "peer", 7)
    assert not holders.remove("a", "peer", 7)
    assert holders.end("a", "peer") == []
    assert list(holders.rows()) == [
        ("peer", HeldObject(7, 100)),
        ("peer", HeldObject(8, 50)),
        ("other", HeldObject(7, 100)),
    ]
    assert holders.end("b", "peer") == [7, 8]
    assert holders.end("b", "unknown") == []
    assert holders.remove("c", "other", 7)
    assert list(holders.rows()) == []
