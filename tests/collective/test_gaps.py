"""Deaths between two steps, where nobody waits for the one that died: all the same, all others are told at once."""

import os
import signal
import time

import pytest

from fastrt.collective import PeerDied, init_group

NOTICED_S = 10.0  # well below the group's timeout of 30 s: the death was noticed, not waited for


def join(rank, world_size, name, address, nodes):
    """On one node by name alone if there is no address."""
    where = {} if address is None else {"address": address, "node": f"{name}-{nodes[rank]}"}
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
