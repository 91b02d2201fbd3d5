"""The counts of `placing` under random changes: they are always the sums of what they count."""

import random

import pytest

from fastrt.config import RESOURCE_PARTS as ONE
from fastrt.node.placing import BLOCKED, ELSEWHERE, GONE, HERE, ORDERED, WAITING
from fastrt.store.messages import NodeRow
from support.placings import Here, demand, view


@pytest.mark.parametrize("seed", range(20))
def test_count_is_the_sum_whatever_happens(seed):
    rng = random.Random(seed)
    here = Here(view("a", 2, gpu=1), view("b", 3))
    wanted = {}
    for _ in range(400):
        here.now += rng.random()
        if rng.random() < 0.4:
            here.submit(demand(rng.choice([0, 0.5, 1, 2]), rng.choice(["", "spread", "pack"]), gpu=rng.choice([0, 1])))
        placed = here.placing.placed()
        for key in rng.sample(placed, min(3, len(placed))):
            here.placing.moved(key, rng.choice([GONE, HERE, BLOCKED, WAITING]), here.now)
        for order in here.placing.decide(here.now):
            wanted[order.key] = order.demand
            if order.what == "forward" and rng.random() < 0.8:
                here.placing.moved(order.key, ELSEWHERE, here.now)
        entries = here.placing._placed
        for name in ("CPU", "gpu"):
            used = sum(
                dict(entry.demand.amounts).get(name, 0)
                for entry in entries
                if entry.place == HERE or (entry.place == BLOCKED and name != "CPU")
            )
            assert used == here.placing.used[name]
        assert here.placing.tasks_here == sum(entry.place in (HERE, BLOCKED) for entry in entries)
        assert set(here.placing.ordered()) == {entry for entry in entries if entry.place == ORDERED}


@pytest.mark.parametrize("seed", range(20))
def test_policy_knows_every_change_and_leaves_no_room_unused(seed):
    """Nodes come, change and leave under random tasks; then the policy is asked what a look at every node says."""
    rng = random.Random(seed)
    views = {name: view(name, rng.randrange(5), gpu=rng.randrange(3)) for name in "abcdefgh"}
    here = Here(*views.values(), cpu=rng.randrange(3), gpu=0)
    placing = here.placing
    for _ in range(150):
        here.now += rng.random() / 4
        name = rng.choice("abcdefgh")
        if rng.random() < 0.2 and views.pop(name, None):
            placing.see([], [f"id-{name}"])
        elif rng.random() < 0.4:
            total = views[name].total if name in views else {"CPU": rng.randrange(5) * ONE, "gpu": ONE}
            free = {key: rng.randrange(parts // ONE + 1) * ONE for key, parts in total.items()}
            views[name] = NodeRow(f"id-{name}", name, total, free, {})
            placing.see([views[name]], [])
        here.submit(demand(rng.choice([0, 0.5, 1]), rng.choice(["", "spread", "pack"]), gpu=rng.choice([0, 1])))
        placed = placing.placed()
        for key in rng.sample(placed, min(2, len(placed))):
            placing.moved(key, GONE, here.now)
        for order in placing.decide(here.now):
            if order.what == "forward":
                placing.moved(order.key, ELSEWHERE, here.now)
        placing._others.check_invariants()
        for key in placing.waiting():
            wanted = placing._entries[key].demand
            for node in placing.views:  # "spread" waits until there is room, the others only until there will be
                when = here.now + (1.5 if wanted.strategy == "spread" else 0.0)
                assert not placing._others.room(node, wanted.amounts, when), (key, wanted)
