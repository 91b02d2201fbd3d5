"""The decisions of `groups`, without processes: what is looked at again, and what is ready."""

import random

import pytest

from fastrt.config import RESOURCE_PARTS as ONE
from fastrt.node.bundles import assign
from fastrt.node.groups import Groups
from fastrt.node.keys import BundleKey, TaskKey
from fastrt.node.placing import ELSEWHERE, GONE, Placing
from fastrt.node.strays import LEFT_S, Strays
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import Demand, given_by


class Node:
    """A node of four CPUs and the groups that were made on it."""

    def __init__(self, *views, can_grow=False):
        self.placing = Placing("me", {"CPU": 4 * ONE}, can_grow)
        self.placing.has_uplink = bool(views)
        self.placing.see(views)
        self.groups = Groups(self.placing)
        self.made = {}
        self.count = 0

    def make(self, *cpus, strategy="PACK"):
        name = f"g{len(self.made)}-{self.count}"
        self.made[name] = []
        for index, cpu in enumerate(cpus):
            self.count += 1
            key = BundleKey(self.count, self.count)
            demand = Demand((("CPU", cpu * ONE),), bundle=f"{name}/{index}/{len(cpus)}/{strategy}")
            self.placing.wait(key, demand, 0.0)
            self.groups.add(key, demand, 0.0)
            self.made[name].append((key, demand))
        return name

    def remove(self, name):
        for key, _ in self.made.pop(name):
            self.placing.moved(key, GONE, 0.0)

    def decide(self):
        orders = self.groups.decide(0.0)
        for key in list(self.placing.unopened):
            self.placing.open(key)
        return [(order.key.gen, order.what) for order in orders + self.groups.decide(0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_group_is_placed_as_soon_as_it_fits_whatever_happened_before(seed):
    rng = random.Random(seed)
    node = Node()
    for _ in range(60):
        if node.made and rng.random() < 0.45:
            node.remove(rng.choice(list(node.made)))
        else:
            strategy = rng.choice(["PACK", "SPREAD", "STRICT_PACK"])
            node.make(*(rng.randint(1, 3) for _ in range(rng.randint(1, 2))), strategy=strategy)
        node.decide()
        assert 0 <= node.placing.used.get("CPU", 0) <= 4 * ONE
        for name, bundles in list(node.made.items()):
            ready = node.groups.is_ready(name)
            assert (name in node.placing.pending_groups) == (ready is False)
            if ready is None:
                assert "for which the nodes do not suffice" in node.groups.why_gone(name)
                del node.made[name]
            elif not ready:
                wanted = [demand.amounts for _, demand in bundles]
                assert assign(wanted, node.placing.rooms(), bundles[0][1].bundle.split("/")[3]) is None


def test_group_is_ready_when_its_bundles_are_open_here_and_elsewhere():
    other = NodeRow("id-other", "other", {"CPU": ONE}, {"CPU": ONE}, {})
    node = Node(other, can_grow=True)
    name = node.make(4, 1)
    assert node.groups.rows()[0].stats == ("QUEUED", 0, 0.0, 0.0, 0.0)
    orders = node.groups.decide(1.0)
    assert node.groups.rows()[0].stats == ("SCHEDULING_STARTED", 1, 0.0, 0.0, 0.0)
    assert [(order.key.gen, order.what, order.node) for order in orders] == [
        (1, "admit", ""),
        (2, "forward", "id-other"),
    ]
    here, there = node.made[name]
    node.placing.moved(there[0], ELSEWHERE, 0.0)
    node.groups.decide(0.0)
    node.placing.open(here[0])
    node.groups.decide(0.0)
    assert node.groups.is_ready(name) is False, "the other node has not said that it has it"
    given = dict(given_by(there[1]))
    node.placing.see([NodeRow("id-other", "other", {"CPU": ONE, **given}, {"CPU": 0, **given}, {})])
    node.groups.decide(3.5)
    assert node.groups.is_ready(name) is True
    assert node.groups.rows()[0].stats == ("FINISHED", 1, 3.5, 2.5, 0.0)
    node.placing.see([])
    node.groups.decide(0.0)
    assert node.groups.is_ready(name) is False
    assert node.groups.rows()[0].state == "RESCHEDULING"


def test_group_gives_all_its_bundles_up_when_one_comes_back():
    """Two groups that needed the same two nodes kept one bundle each, and asked for the other again and again."""
    node = Node(NodeRow("id-other", "other", {"CPU": ONE}, {"CPU": ONE}, {}), can_grow=True)
    name = node.make(4, 1)
    assert node.decide() == [(1, "admit"), (2, "forward")]
    here, there = node.made[name]
    node.placing.wait(*there, 0.0)  # the other node had no room, whatever its last report says
    assert node.decide() == [(1, "release")]
    node.placing.leave(here[0])
    assert node.decide() == [], "it pauses: the other group must get its turn"
    pause_s = node.groups.rows()[0].stats[4]
    assert node.groups.decide(pause_s * 0.99) == []
    assert [order.what for order in node.groups.decide(pause_s)] == ["admit", "forward"]


def test_stats_say_why_a_group_has_no_place_and_count_its_attempts():
    node = Node(can_grow=True)
    first, second, large = node.make(3), node.make(3), node.make(5)
    node.groups.decide(1.0)
    stats = {row.group: row.stats for row in node.groups.rows()}
    assert stats[second][:2] == ("NO_RESOURCES", 1)
    assert stats[large][:2] == ("INFEASIBLE", 1)
    node.remove(first)
    node.groups.decide(2.0)
    node.placing.open(node.made[second][0][0])
    node.groups.decide(2.25)
    stats = {row.group: row.stats for row in node.groups.rows()}
    assert stats[second] == ("FINISHED", 2, 2.25, 0.25, 0.0)


def test_groups_that_wait_are_looked_at_only_when_something_is_free_that_was_not():
    node = Node()
    first = node.make(4)
    node.decide()
    for _ in range(50):
        node.make(2)
    node.decide()
    looks = []
    place = node.groups._place
    node.groups._place = lambda *about: looks.append(about[0]) or place(*about)
    late = node.make(2)
    assert node.decide() == []
    assert set(looks) == {late}
    node.remove(first)
    assert node.decide() == [(2, "admit"), (3, "admit")], "the oldest first"


def test_group_that_is_removed_before_its_bundles_are_known_is_gone():
    node = Node(can_grow=True)
    node.groups.remove("g")
    assert node.groups.why_gone("g") == ""
    assert node.placing.gone_groups == {"g": ""}


def test_task_in_a_group_of_another_node_that_no_node_has_goes_to_that_node_or_ends_with_it():
    """The task waited until it was cancelled, also when the group was removed."""
    maker, group = "a" * 32, "a" * 16 + "0" * 20
    placing = Placing("b" * 32, {"CPU": 4 * ONE}, True)
    placing.has_uplink = True
    placing.see([NodeRow(maker, "a", {"CPU": ONE}, {"CPU": ONE}, {})])
    strays, demand = Strays(placing), Demand(((f"CPU@{group}", ONE),))
    now, key = 0.0, TaskKey(1, 1)

    def look():
        return [strays.decide(order, now) for order in placing.decide(now) if order.what == "ask"]

    placing.wait(key, demand, now)
    assert placing.decide(now) == [], "the group may be about to be ready"
    now = 1.5
    assert [(order.what, order.node) for order in look()] == [("forward", maker)]
    assert look() == []
    placing.moved(key, ELSEWHERE, now)
    placing.wait(key, demand, now)  # it came back
    placing.see([], [maker])
    now += 1.5
    assert look() == [None], "its uplink may have been killed"
    placing.has_uplink = False
    now += LEFT_S + 1
    assert look() == [None], "no node is known"
    placing.has_uplink = True
    assert look() == [None]
    now += LEFT_S + 1
    assert [order.what for order in look()] == ["refuse"]
    assert placing.decide(now) == []
    assert not placing.waiting()


def test_node_that_was_back_meanwhile_has_the_whole_time_once_more():
    maker, group = "a" * 32, "a" * 16 + "0" * 20
    row = NodeRow(maker, "a", {"CPU": ONE}, {"CPU": ONE}, {})
    placing = Placing("b" * 32, {"CPU": 4 * ONE}, True)
    placing.has_uplink = True
    strays, demand = Strays(placing), Demand(((f"CPU@{group}", ONE),))

    def look(number, now):
        placing.wait(TaskKey(number, number), demand, now - 1.5)
        return [strays.decide(order, now) for order in placing.decide(now) if order.what == "ask"]

    assert look(1, 1.5) == [None], "its node is not there: the head was restarted"
    placing.moved(TaskKey(1, 1), GONE, 2.0)  # cancelled
    placing.see([row], [])
    strays.see()
    placing.see([], [maker])
    strays.see()
    assert look(2, 1000.0) == [None], "the head was restarted once more, much later"
    strays.see()
    assert [order.what for order in look(3, 1000.0 + LEFT_S + 1)] == ["refuse", "refuse"]
