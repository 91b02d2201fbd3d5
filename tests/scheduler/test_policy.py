"""Ranking: bytes first, then load; strategies; and a plain search over all nodes beside the heaps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt.scheduler.policy import PACK, SPREAD, Backlog, Demand, Placement, shape_of

CPU = shape_of({"num_cpus": 1})


def cluster(count: int, cpus: float = 4) -> Placement:
    nodes = Placement()
    for node in range(count):
        nodes.add(node, {"num_cpus": cpus})
    return nodes


def test_node_with_most_bytes_is_taken_however_loaded():
    nodes = cluster(3)
    for _ in range(3):
        nodes.take(1, CPU)
    assert nodes.place(Demand(CPU, ((0, 10), (1, 11), (2, 3)))) == 1


def test_full_node_gives_way_to_the_next_by_bytes_then_to_the_least_loaded():
    nodes = cluster(3, 1)
    demand = Demand(CPU, ((0, 10), (1, 11)))
    assert [nodes.place(demand) for _ in range(4)] == [1, 0, 2, None]
    nodes.release(0, CPU)
    assert nodes.place(demand) == 0


def test_equal_bytes_go_where_the_load_is_less():
    nodes = cluster(3)
    nodes.take(0, CPU)
    assert nodes.place(Demand(CPU, ((0, 5), (2, 5)))) == 2


def test_least_loaded_is_taken_without_bytes():
    nodes = cluster(3)
    for node, load in ((0, 2), (1, 1)):
        nodes.report(nodes[node], {"num_cpus": 8}, load)
    assert [nodes.place(Demand(CPU)) for _ in range(6)] == [2, 1, 2, 0, 1, 2]
    nodes.report(nodes[0], {"num_cpus": 5}, 0)
    assert nodes.place(Demand(CPU)) == 0


def test_spread_ignores_bytes_and_pack_fills_one_after_the_other():
    nodes = cluster(3, 2)
    far = ((0, 1 << 30),)
    assert [nodes.place(Demand(CPU, far, SPREAD)) for _ in range(3)] == [0, 1, 2]
    nodes = cluster(3, 2)
    assert [nodes.place(Demand(CPU, ((2, 9),), PACK)) for _ in range(5)] == [0, 0, 1, 1, 2]
    nodes.release(0, CPU)
    assert nodes.place(Demand(CPU, (), PACK)) == 0


def test_node_by_name_or_none():
    nodes = cluster(2, 1)
    demand = Demand(CPU, (), "", 1)
    assert [nodes.place(demand), nodes.place(demand), nodes.place(Demand(CPU, (), "", 7))] == [1, None, None]


def test_all_resources_must_be_there():
    nodes = cluster(2)
    nodes.add("gpu", {"num_cpus": 1, "gpu": 0.5})
    demand = Demand(shape_of({"num_cpus": 1, "gpu": 0.5}))
    assert [nodes.place(demand), nodes.place(demand)] == ["gpu", None]
    nodes.gain("gpu", {"gpu": 0.5, "num_cpus": 1})
    assert nodes.place(demand) == "gpu"


def test_fractions_add_up_again():
    nodes = cluster(1, 1)
    tenth, whole = Demand(shape_of({"num_cpus": 0.1})), Demand(CPU)
    for _ in range(50):
        assert [nodes.place(tenth) for _ in range(11)] == [0] * 10 + [None]
        for _ in range(10):
            nodes.release(0, tenth.shape)
        assert nodes.place(whole) == 0
        nodes.release(0, CPU)


def test_several_nodes_at_one_site():
    """Workers of one store: any of them has the bytes at hand."""
    nodes = Placement()
    for worker in range(6):
        nodes.add(worker, {"num_cpus": 1}, site=worker // 2)
    demand = Demand(CPU, ((2, 100),))
    assert [nodes.place(demand) for _ in range(3)] == [4, 5, 0]
    nodes.remove(0)
    nodes.remove(1)
    nodes.release(5, CPU)
    assert [nodes.place(demand) for _ in range(3)] == [5, 2, 3]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "place", "place", "place", "release", "queue", "gain"]), st.integers(0, 10**6)
    ),
    max_size=80,
)
SHAPES = [shape_of(each) for each in ({"num_cpus": 1}, {"num_cpus": 2}, {"gpu": 1}, {"num_cpus": 1, "gpu": 1}, {})]


def best_by_looking(nodes: Placement, demand: Demand) -> set[int]:
    """The nodes that are right, found by a search through all of them."""
    fit = [n for n in nodes._nodes.values() if n.fits(demand.shape)]
    if demand.strategy == PACK:
        return {min(fit, key=lambda n: n.rank).id} if fit else set()
    if not demand.strategy:
        for size in sorted({size for _, size in demand.locality}, reverse=True):
            sites = {site for site, each in demand.locality if each == size}
            local = {n.id for n in fit if n.site in sites}
            if local:
                return local
    least = min((n.load for n in fit), default=0)
    return {n.id for n in fit if n.load == least}


@given(OPERATIONS, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_heaps_agree_with_a_plain_search(operations, seed):
    rng = random.Random(seed)
    nodes, running, made = Placement(), [], 0
    for what, value in operations:
        alive = list(nodes._nodes)
        if what == "add":
            nodes.add(made, {"num_cpus": value % 4, "gpu": value % 3}, site=value % 3)
            made += 1
        elif what == "remove" and alive:
            gone = alive[value % len(alive)]
            nodes.remove(gone)
            running = [each for each in running if each[0] != gone]
        elif what == "place":
            locality = tuple((site, rng.randrange(3)) for site in rng.sample(range(4), rng.randrange(4)))
            demand = Demand(SHAPES[value % len(SHAPES)], locality, rng.choice(["", "", SPREAD, PACK]))
            right = best_by_looking(nodes, demand)
            node = nodes.place(demand)
            assert node in right if right else node is None
            if node is not None:
                running.append((node, demand.shape))
        elif what == "release" and running:
            nodes.release(*running.pop(value % len(running)))
        elif what == "queue" and alive:
            node = nodes[alive[value % len(alive)]]
            free = {"num_cpus": value % 4, "gpu": value % 3}
            nodes.report(node, free, value % 5)
            running = [each for each in running if each[0] != node.id]
        elif what == "gain" and alive:
            nodes.gain(alive[value % len(alive)], {rng.choice(["num_cpus", "gpu"]): 1})
        nodes.check_invariants()


def test_heap_stays_in_proportion_to_its_nodes():
    nodes = cluster(10, 8)
    rng = random.Random(1)
    running = []
    for _ in range(20_000):
        node = nodes.place(Demand(CPU)) if rng.random() < 0.5 else None
        if node is not None:
            running.append(node)
        elif running:
            nodes.release(running.pop(rng.randrange(len(running))), CPU)
    assert max(len(heap.entries) for heap in nodes._all_heaps) <= 64 + 4 * 10
    nodes.check_invariants()


def test_forgotten_heap_is_made_anew(monkeypatch):
    monkeypatch.setattr("fastrt.scheduler.policy._HEAPS_MAX", 2)
    nodes = cluster(3)
    for round in range(4):
        for amount in (1, 2, 3):
            node = nodes.place(Demand(shape_of({"num_cpus": amount})))
            assert node is not None, (round, amount)
            nodes.release(node, shape_of({"num_cpus": amount}))
            nodes.check_invariants()
    assert len(nodes._all_heaps) == 2


def node_at(site: int, cpus: float = 1):
    nodes = Placement()
    nodes.add("n", {"num_cpus": cpus}, site=site)
    return nodes["n"]


def test_backlog_is_first_in_first_out_but_for_bytes_at_hand():
    backlog = Backlog()
    for task in range(4):
        backlog.add(task, Demand(CPU, ((task % 2, 5),)))
    assert [backlog.take(node_at(1))[0] for _ in range(4)] == [1, 3, 0, 2]
    assert backlog.take(node_at(1)) is None


def test_backlog_lets_nobody_starve():
    backlog = Backlog()
    backlog.add("far", Demand(CPU, ((0, 5),)))
    taken = []
    for task in range(200):
        backlog.add(task, Demand(CPU, ((1, 5),)))
        taken.append(backlog.take(node_at(1))[0])
    assert taken.index("far") == 64


def test_backlog_gives_only_what_fits():
    backlog = Backlog()
    backlog.add("wide", Demand(shape_of({"num_cpus": 2})))
    backlog.add("named", Demand(CPU, (), "", "other"))
    backlog.add("small", Demand(CPU))
    assert backlog.blocks(CPU)
    assert backlog.take(node_at(0))[0] == "small"
    assert not backlog.blocks(CPU)
    assert backlog.take(node_at(0)) is None
    assert backlog.take(node_at(0, 2))[0] == "wide"


@pytest.mark.parametrize("count", [10, 5000])
def test_backlog_forgets_those_removed(count):
    backlog = Backlog()
    for task in range(count):
        backlog.add(task, Demand(CPU, ((task % 3, 1),)))
    for task in range(1, count):
        backlog.remove(task)
    assert list(backlog) == [0]
    assert backlog.take(node_at(2))[0] == 0
    assert not backlog._lines
