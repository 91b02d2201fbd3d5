"""The decisions of `placing`, without processes: facts in, orders out."""

import pytest

from fastrt.config import RESOURCE_PARTS as ONE
from fastrt.node.keys import ActorKey, TaskKey
from fastrt.node.placing import BLOCKED, ELSEWHERE, GONE, HERE, WAITING, Placing
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import Demand, demand_of, within
from support.placings import Here, demand, view


def test_what_fits_runs_here_in_the_order_of_submission():
    here = Here()
    here.submit(demand(), 3)
    assert here.decide() == [(1, "admit", ""), (2, "admit", "")]
    here.moved(1, GONE)
    assert here.decide() == [(3, "admit", "")]


def test_task_that_is_forgotten_and_waits_again_is_placed_once():
    here = Here()
    here.submit(demand())
    here.placing.forget(TaskKey(1, 1))
    here.placing.wait(TaskKey(1, 1), demand(), here.now)
    assert here.decide() == [(1, "admit", "")]
    assert here.placing.used["CPU"] == ONE


def test_what_does_not_fit_is_passed_over_but_not_for_ever():
    here = Here(cpu=2)
    here.submit(demand(1))
    here.submit(demand(2))
    assert here.decide() == [(1, "admit", "")]
    for _ in range(1000):
        assert here.decide() == []  # time alone does not count
    last, passes = 1, 0
    while True:  # small ones that come one after the other would keep the large one from its turn
        here.submit(demand(0.5))
        passes += 1
        orders = here.decide()
        if not orders:
            break
        assert passes < 1000
        here.moved(last, GONE)
        last = orders[0][0]
    assert passes > 250
    here.moved(last, GONE)
    here.moved(1, GONE)
    assert here.decide()[0] == (2, "admit", "")


def test_higher_priorities_are_placed_first_whatever_they_demand():
    placing = Here().placing
    wanted = (demand(1, gpu=1), 0), (demand(0.5, gpu=1), 2), (demand(1, gpu=1), 2), (demand(1, gpu=1), -1)
    for number, (what, priority) in enumerate(wanted):
        placing.wait(TaskKey(number, number), what, float(number), priority=priority)
    order = []
    while orders := placing.decide(10.0):
        order += [one.key.record for one in orders]
        for one in orders:
            placing.moved(one.key, GONE, 10.0)
    assert order == [1, 2, 0, 3]
    assert not any(placing.used.values())


def test_sleeper_lends_its_cpus_and_nothing_else():
    here = Here()
    here.submit(demand(2, gpu=1))
    assert here.decide()
    here.submit(demand(2))
    here.submit(demand(0, gpu=1))
    assert here.decide() == []
    here.moved(1, BLOCKED)
    assert here.decide() == [(2, "admit", "")]
    here.moved(1, HERE)
    assert here.placing.used == {"CPU": 4 * ONE, "gpu": ONE}


def test_sleeper_in_a_placement_group_lends_its_share_of_the_bundles_cpus():
    here = Here(cpu=4)
    here.submit(Demand((("CPU", 2 * ONE), ("gpu", ONE)), bundle="g/0/1/PACK"))
    here.placing.put(TaskKey(1, 1), "me", 0.0)  # a bundle is placed together with the others of its group
    here.placing.open(TaskKey(1, 1))
    inside = Demand(within((("CPU", 2 * ONE), ("gpu", ONE)), "g", 0))
    for wanted in (inside, inside, Demand(within((("CPU", ONE),), "g", -1))):
        here.submit(wanted)
    assert here.decide() == [(2, "admit", "")]
    here.moved(2, BLOCKED)
    assert here.decide() == [(4, "admit", "")], "the gpu is not lent"
    here.moved(2, GONE)
    here.moved(4, GONE)
    assert here.decide() == [(3, "admit", "")]
    here.moved(3, GONE)
    assert not any(parts for name, parts in here.placing.used.items() if "@" in name)


def test_workers_follow_what_the_tasks_take():
    here = Here()
    here.submit(demand(0.5), 4)
    here.decide()
    assert here.placing.relief == 2 * ONE
    for number in range(1, 5):
        here.moved(number, GONE)
    here.submit(demand(2))
    here.decide()
    assert here.placing.relief == -ONE


def test_task_is_lent_where_its_resources_are_and_counts_there():
    here = Here(view("a"), view("b", fpga=1))
    here.submit(demand(fpga=1), 2)
    assert here.decide() == [(1, "forward", "b")]
    here.moved(1, ELSEWHERE)
    assert here.decide() == []
    here.now = 1.0
    here.moved(1, GONE)
    assert here.decide() == [(2, "forward", "b")]


def test_here_first_then_on_the_least_used():
    here = Here(view("a", 2), view("b", 4))
    here.submit(demand(), 6)
    assert [(what, node) for _, what, node in here.decide()] == [
        ("admit", ""), ("admit", ""), ("forward", "b"), ("forward", "a"), ("forward", "b"), ("forward", "b")
    ]  # fmt: skip


def test_most_of_the_arguments_bytes_decide_among_those_with_room():
    here = Here(view("a", 2, fpga=4), view("b", 8, fpga=4), view("c", 2))
    for node, objref, nbytes in (("a", 1, 70_000), ("b", 2, 90_000), ("a", 3, 30_000), ("c", 9, 1 << 30)):
        here.placing.holds(f"id-{node}", objref, nbytes)
    for named in ([1, 3, 9], [1, 2, 9], [1, 2, 3], [4], []):  # a, b, a, and two that do not care
        here.count += 1
        here.placing.wait(TaskKey(here.count, here.count), demand(0, fpga=1), 0.0, named)
    assert here.decide() == [(k, "forward", node) for k, node in enumerate("ababb", 1)]
    here.placing.holds("id-a", 1, 0)
    here.placing.wait(TaskKey(6, 6), demand(fpga=1), 0.0, [1])
    here.placing.wait(TaskKey(7, 7), demand(), 0.0, [9])
    assert here.decide() == [(6, "forward", "b"), (7, "admit", "")], "the bytes are here as well"
    here.placing.wait(TaskKey(8, 8), demand(0, "spread"), 0.0, [3])
    here.placing.wait(TaskKey(9, 9), demand(2, "pack"), 0.0, [9])
    here.placing.wait(TaskKey(10, 10), demand(2, "pack"), 0.0, [3])
    assert here.decide()[0] == (8, "forward", "a"), "of those that are used least"
    for objref, node in ((2, "b"), (3, "a"), (9, "c")):
        here.placing.holds(f"id-{node}", objref, 0)
    assert here.placing.held == {}


def test_pack_fills_one_after_the_other():
    here = Here(view("a", 2), view("b", 4))
    here.submit(demand(strategy="pack"), 6)
    assert [node for _, _, node in here.decide()] == ["", "", "a", "a", "b", "b"]


def test_spread_takes_the_least_used():
    here = Here(view("a", 2), view("b", 2))
    here.submit(demand(strategy="spread"), 6)
    nodes = [node for _, _, node in here.decide()]
    assert sorted(nodes[:3]) == sorted(nodes[3:]) == ["", "a", "b"]


def test_affinity_is_by_name_or_id_hard_or_soft():
    here = Here(view("a"))
    for wanted in ("a", "id-a", "home", "me"):
        here.submit(demand(node=wanted))
    assert sorted(here.decide()) == [(1, "forward", "a"), (2, "forward", "a"), (3, "admit", ""), (4, "admit", "")]
    here.submit(demand(0.1, node="gone"))
    assert here.decide() == []
    here.now = 2.0
    assert here.decide() == [(5, "warn", "")]
    assert here.decide() == []
    here.submit(demand(0, node="gone", soft=True))
    assert here.decide() == [(6, "admit", "")]
    here.placing.see([view("a"), view("gone")])
    assert here.decide() == [(5, "forward", "gone")]


def test_what_nobody_has_is_refused_or_told_once():
    alone, many = Here(can_grow=False), Here(view("a"))
    for here in (alone, many):
        here.submit(demand(gpu=2), 2)
    assert alone.decide() == [(1, "refuse", ""), (2, "refuse", "")]
    assert many.decide() == []
    many.now = 2.0
    assert many.decide() == [(1, "warn", "")]
    assert many.decide() == []
    assert many.placing.shortage(demand(gpu=2)) == ("CPU 1, gpu 2, which no node has (home: CPU 2, gpu 1; a: CPU 2)")
    many.placing.see([view("a"), view("b", gpu=2)])
    assert many.decide() == [(1, "forward", "b")]


def test_nothing_is_placed_on_a_node_without_workers():
    here = Here(view("a", 0), view("b", 2), cpu=0)
    here.submit(demand(0), 2)
    assert [node for _, _, node in here.decide()] == ["b", "b"]


def test_order_that_is_not_carried_out_is_given_again():
    here = Here(view("a"), cpu=0)
    here.submit(demand(2))
    assert here.decide() == [(1, "forward", "a")]
    here.moved(1, WAITING)
    assert here.decide() == []
    here.now = 10.0
    here.moved(1, WAITING)
    assert here.decide() == [(1, "forward", "a")]


def test_order_for_a_node_that_is_lost_goes_to_another_at_once():
    here = Here(view("a"), cpu=0)
    here.submit(demand())
    assert here.decide() == [(1, "forward", "a")]
    here.placing.see([view("b")])
    assert here.decide() == [(1, "forward", "b")]


def test_reports_that_have_changed_leave_the_others_as_they_were():
    here = Here(view("a"), view("b"), cpu=0)
    here.placing.see([view("a", free={"CPU": 0})], [])
    here.submit(demand(2), 2)
    assert here.decide() == [(1, "forward", "b")]
    here.placing.see([view("c")], ["id-b"])
    assert here.decide() == [(2, "forward", "c")]
    assert set(here.placing.views) == {"id-a", "id-c"}
    here.placing.see([view("a")], ["id-c"])
    assert here.decide() == [(1, "forward", "a")]


def test_node_looks_for_room_as_long_as_something_waits():
    here = Here(cpu=1)
    assert not here.placing.is_looking
    here.submit(demand(1), 2)
    here.decide()
    assert here.placing.is_looking
    here.moved(1, GONE)
    here.decide()
    assert not here.placing.is_looking


def test_node_that_works_quickly_is_kept_supplied():
    here = Here(view("a", 1), cpu=0)
    here.submit(demand(), 1000)
    (first,) = here.decide()
    for _ in range(200):
        here.moved(first[0], ELSEWHERE)
        here.now += 0.001
        here.moved(first[0], GONE)
        orders = here.decide()
        first = orders[0] if orders else first
    assert len(here.placing.placed()) > 5
    slow = Here(view("a", 1), cpu=0)
    slow.submit(demand(), 100)
    assert len(slow.decide()) == 1
    slow.moved(1, ELSEWHERE)
    slow.now = 100.0
    slow.moved(1, GONE)
    assert len(slow.decide()) == 2  # one, and one ahead


@pytest.mark.parametrize(
    ("node", "amounts", "ends"),
    [
        ("0123456789abcdef" * 2, {}, True),  # the id of a node that is not there can be no other one's
        ("ab" * 28, {}, True),
        ("home", {"disk": 1}, True),  # nor does a node get other resources
        ("id-a", {"disk": 1}, True),
        ("late", {}, False),  # a node with this name may join
    ],
)
def test_task_for_one_node_is_refused_when_that_can_never_run_it(node, amounts, ends):
    here = Here(view("a"))
    here.submit(demand(node=node, **amounts))
    here.submit(demand(node=node, soft=True, **amounts))
    assert not [order for order in here.decide() if order[1] != "admit"]  # it may not be known yet
    here.now = 2.0
    assert [order[:2] for order in here.decide() if order[0] == 1] == [(1, "refuse" if ends else "warn")]


def test_actor_is_not_sent_ahead_of_room():
    """Another actor may have that room as long as it lives."""
    here = Here(view("a", 1), cpu=0)
    here.submit(demand(), 2)
    (first,) = here.decide()
    here.moved(first[0], ELSEWHERE)
    here.moved(first[0], GONE)
    assert len(here.decide()) == 1
    here.placing.wait(ActorKey(1, 1), demand(), here.now)
    assert here.decide() == []
    here.submit(demand())
    here.moved(2, ELSEWHERE)
    here.moved(2, GONE)
    assert here.decide()[0] == (1, "forward", "a")


def test_others_use_is_what_a_node_says_beyond_our_own():
    here = Here(view("a", 2, free={"CPU": ONE}), cpu=0)
    here.submit(demand(), 2)
    assert len(here.decide()) == 1
    here.placing.see([view("a", 2)])
    assert len(here.decide()) == 1


def test_node_that_has_grown_but_has_no_more_free_gets_no_more_tasks():
    here = Here(view("a", 2), cpu=0)
    here.placing.see([view("a", 4, free={"CPU": 2 * ONE})], [])
    here.submit(demand(), 4)
    assert len(here.decide()) == 2


def test_tasks_come_back_from_where_they_were():
    here = Here(view("a"))
    here.submit(demand(), 4)
    assert len(here.decide()) == 4
    for number, place in ((3, ELSEWHERE), (4, ELSEWHERE), (1, ELSEWHERE)):  # the uplink took the last from the queue
        here.moved(number, place)
    assert here.placing.used["CPU"] == ONE
    here.placing.see([])
    for number in (1, 3, 4):
        here.placing.wait(TaskKey(number, number), demand(), here.now)
    assert here.decide() == [(1, "admit", "")]
    assert here.placing.used["CPU"] == 2 * ONE


def test_demand_travels_as_text():
    wanted = demand_of({"num_cpus": 0.5, "num_gpus": 2, "resources": {"a": 1.25}, "scheduling": "spread"})
    assert wanted == Demand((("CPU", 5000), ("GPU", 20000), ("a", 12500)), "spread")
    assert Demand.from_bytes(wanted.to_bytes()) == wanted
    for bad in (b"", b"1", b"[1]", b'[[["CPU", -1]], "", "", false]', b'[[["CPU"]], "", "", false]'):
        with pytest.raises(ValueError, match="is no demand"):
            Demand.from_bytes(bad)


def test_node_that_is_gone_is_remembered_as_long_as_something_without_amounts_is_there():
    placing = Placing("here", {"CPU": 10_000}, True)
    placing.has_uplink = True
    placing.see([NodeRow("there", "two", {"CPU": 10_000}, {"CPU": 10_000}, {})])
    actor, demand = ActorKey(0, 7), Demand((), "", "two", True)
    placing.wait(actor, demand, 0.0)
    assert [order.what for order in placing.decide(0.0)] == ["forward"]
    placing.moved(actor, ELSEWHERE, 0.1)
    placing.see([])
    placing.wait(actor, demand, 0.2)
    assert [order.what for order in placing.decide(0.2)] == ["admit"]


def test_task_for_a_busy_node_waits_while_there_is_no_uplink():
    node = "a" * 32
    here = Here(NodeRow(node, "busy", {"CPU": 2 * ONE}, {}, {}))
    here.submit(demand(node=node))
    here.now = 5.0
    here.placing.has_uplink = False
    assert here.decide() == []
    here.placing.has_uplink = True
    here.placing.see([], None)
    assert here.decide() == [(1, "refuse", "")]  # it has left


def test_demand_counts_what_waits_by_shape_and_leaves_out_what_ended_or_waits_for_a_group():
    here = Here(view("big", cpu=8))
    here.submit(demand(gpu=1), 3)  # one of them is admitted
    here.submit(demand(disk=1), 2)
    here.submit(Demand((("CPU@g/0", ONE),)), 4)
    here.placing.pending_groups.add("g")
    here.placing.wait(ActorKey(50, 1), demand(disk=1), 0.0)
    here.decide()
    here.moved(5, GONE)  # cancelled
    rows = [(row.kind, row.amounts, row.waiting, row.is_feasible) for row in here.placing.demand()]
    assert rows == [
        ("task", {"CPU": ONE, "gpu": ONE}, 2, True),
        ("task", {"CPU": ONE, "disk": ONE}, 1, False),
        ("actor", {"CPU": ONE, "disk": ONE}, 1, False),
    ]


def test_tasks_that_only_this_node_can_run_are_named_in_order_while_they_wait():
    here = Here(view("a", cpu=4))
    here.submit(demand(cpu=2))
    assert here.decide() == [(1, "admit", "")]
    here.submit(demand(cpu=0, gpu=2))  # no node
    here.submit(demand(cpu=1, gpu=1), 3)
    here.submit(demand(cpu=2, node="me"))
    here.submit(demand(cpu=2, node="a"), 3)
    here.submit(demand(cpu=2), 3)
    here.decide()
    assert here.placing.only_here(16) == [(k, k) for k in (3, 4, 5, 6)]
    assert here.placing.only_here(2) == [(3, 3), (4, 4)]
    here.placing.see([view("a", cpu=4, free={}), view("b", cpu=1, free={}, gpu=1)], [])
    assert here.placing.only_here(16) == [(6, 6)]
    here.placing.see([], ["id-b"])
    assert here.placing.only_here(16) == [(k, k) for k in (3, 4, 5, 6)]
    here.moved(1, GONE)
    assert here.decide()[0] == (3, "admit", "")
    assert (3, 3) not in here.placing.only_here(16)


def test_task_that_another_node_sent_to_a_bundle_is_returned_once_the_bundle_has_been_gone_for_a_while():
    here = Here(view("a"))
    here.submit(Demand((("bundle@g", 1),), node="me"))
    assert here.decide() == [], "the bundle may be about to open"
    here.now = 1.5
    assert here.decide() == [(1, "return", "")]
    assert here.decide() == []
    assert here.placing.waiting() == []


def test_task_in_a_group_that_was_removed_here_is_refused():
    here = Here(view("a"))
    here.placing.gone_groups["g"] = ""
    here.submit(Demand((("bundle@g", 1),), node="me"))
    assert here.decide() == [(1, "refuse", "")]


def test_actors_without_demands_are_dealt_out_by_cpus_once_each_cpu_here_has_one():
    here = Here(view("a", 2), view("b", 4), view("none", 0), cpu=2)
    nothing, places = demand(0), []
    for number in range(16):
        key = ActorKey(number, 1)
        what, node = "admit", ""
        if not here.placing.keep(key):
            here.placing.wait(key, nothing, here.now)
            ((_, what, node),) = here.decide()
            here.placing.moved(key, HERE if what == "admit" else ELSEWHERE, here.now)
        places.append(node or "me")
    assert places[:2] == ["me", "me"]
    assert {name: places.count(name) for name in places} == {"me": 4, "a": 4, "b": 8}
    alone = Here(cpu=0)
    alone.placing.total["license"] = ONE
    assert alone.placing.keep(ActorKey(1, 1)), "no node has CPUs"
    alone.placing.see([view("a", 1)])
    assert not alone.placing.keep(ActorKey(2, 1))
