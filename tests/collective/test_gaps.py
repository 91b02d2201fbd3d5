"""Deaths between two steps, where nobody waits for the one that died: all the same, all others are told at once."""

import os
import signal
import time

import numpy as np
import pytest

from fastrt.collective import PeerDied, init_group, new_token
from fastrt.coordination import Coordinator, CoordinatorOptions

TOKEN = new_token()
NOTICED_S = 25.0  # well below the group's timeout of 30 s: the death was noticed, not waited for


@pytest.fixture(scope="module")
def coordinator():
    with Coordinator(CoordinatorOptions(num_tasks=1)) as service:
        yield service.address


def join(rank, world_size, name, address, nodes):
    """On one node by name alone if there is no address."""
    where = {} if address is None else {"address": address, "node": f"{name}-{nodes[rank]}", "token": TOKEN}
    return init_group(name=name, rank=rank, world_size=world_size, **where)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def told(call):
    """The rank that an operation names as dead, and whether it was in time."""
    began = time.monotonic()
    with pytest.raises(PeerDied) as caught:
        call()
    return caught.value.rank, time.monotonic() - began < NOTICED_S


def run_busy(rank, world_size, name, address, nodes, gate):
    g = join(rank, world_size, name, address, nodes)
    g.barrier()
    if rank == 2:
        die()
    while rank == 1 and not os.path.exists(gate):  # it computes, and comes late
        os.sched_yield()
    found = told(g.barrier)
    open(gate, "w").close()
    return found


def test_death_is_noticed_by_those_that_wait_for_another_one(ranks, name, tmp_path):
    outcomes = ranks.outcomes(3, run_busy, name, None, "AAA", str(tmp_path / "gate"))
    assert outcomes == [("returned", (2, True))] * 2 + [("died", signal.SIGKILL)]


def run_first_message(rank, world_size, name, address, nodes):
    g = join(rank, world_size, name, address, nodes)
    g.barrier()
    if rank == 1:
        die()
    return told(lambda: g.recv(np.empty(1), 1))


def test_rank_that_died_before_its_first_message_is_not_waited_for(ranks, name, coordinator):
    outcomes = ranks.outcomes(2, run_first_message, name, coordinator, "AB")
    assert outcomes == [("returned", (1, True)), ("died", signal.SIGKILL)]


def told_together(folder, call):
    """Return what `told` reports once both survivors know: one that ended earlier would count as dead, too."""
    found = told(call)
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < 2:
        os.sched_yield()
    return found


def run_split(rank, world_size, name, address, nodes, victim, folder):
    g = join(rank, world_size, name, address, nodes)
    if rank == victim:
        g.gather_plain([0, 0], None)  # what `split` begins with
        die()
    return told_together(folder, lambda: g.split(0))


@pytest.mark.parametrize(("nodes", "victim"), [("", 0), ("", 2), ("AAB", 0), ("AAB", 1), ("ABB", 2)])
def test_rank_that_dies_within_split_is_named_to_the_others(ranks, name, coordinator, nodes, victim, tmp_path):
    address = coordinator if nodes else None
    outcomes = ranks.outcomes(3, run_split, name, address, nodes, victim, str(tmp_path))
    assert outcomes.pop(victim) == ("died", signal.SIGKILL)
    assert outcomes == [("returned", (victim, True))] * 2


def run_rebuild(rank, world_size, name, address, nodes, victim, folder):
    g = join(rank, world_size, name, address, nodes)
    g.barrier()
    if rank == victim:
        die()
    return told_together(folder, lambda: g.rebuild(range(world_size)))


@pytest.mark.parametrize(("nodes", "victim"), [("", 0), ("", 1)])
def test_rank_that_dies_within_rebuild_is_named_to_the_others(ranks, name, nodes, victim, tmp_path):
    outcomes = ranks.outcomes(3, run_rebuild, name, None, nodes, victim, str(tmp_path))
    assert outcomes.pop(victim) == ("died", signal.SIGKILL)
    assert outcomes == [("returned", (victim, True))] * 2
