"""Groups over several nodes: ranks of one machine that say they are on different ones, with TCP between them."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastrt.collective import CollectiveMismatch, CollectiveTimeout, PeerDied, init_group, new_token
from fastrt.coordination import Coordinator, CoordinatorOptions

TOKEN = new_token()
NOTICED_S = 25.0  # well below the group's timeout of 30 s: the death was noticed, not waited for


@pytest.fixture(scope="module")
def coordinator():
    with Coordinator(CoordinatorOptions(num_tasks=1)) as service:
        yield service.address


def join(rank, world_size, name, address, nodes, **options):
    """Be on the node that `nodes` says for the rank, as in "AAB"."""
    node = f"{name}-{nodes[rank]}"
    return init_group(name=name, rank=rank, world_size=world_size, address=address, node=node, token=TOKEN, **options)


def run_everything(rank, world_size, name, address, nodes, sizes):
    with join(rank, world_size, name, address, nodes) as g:
        others = [q for q in range(world_size) if nodes[q] != nodes[rank]]
        assert [len(ranks) for ranks in g.nodes] == [nodes.count(n) for n in dict.fromkeys(nodes)]
        for n in sizes:
            root = n % world_size
            every = np.arange(world_size * world_size * n).reshape(world_size, world_size, n).astype(np.float32) % 1000
            mine, part = every[rank].copy(), every[rank, 0].copy()
            total = every.sum(0)
            assert np.array_equal(g.all_reduce(mine, out=np.empty_like(mine)), total)
            assert np.array_equal(g.all_reduce(mine.copy(), "max"), every.max(0))
            assert np.allclose(g.all_reduce(mine.copy(), "avg"), total / world_size)
            assert np.array_equal(g.all_reduce_shared(mine), total)
            assert np.array_equal(g.all_gather(part), every[:, 0])
            assert np.array_equal(g.all_to_all(mine), every[:, rank])
            assert np.array_equal(g.reduce_scatter(mine)[0], total[rank])
            assert np.array_equal(g.scatter(mine, root, np.empty_like(part)), every[root, rank])
            gathered, reduced = g.gather(part, root), g.reduce(part.copy(), root)
            assert (gathered is None, reduced is None) == (rank != root,) * 2
            if rank == root:
                assert np.array_equal(gathered, every[:, 0])
                assert np.array_equal(reduced, every[:, 0].sum(0))
            assert np.array_equal(g.broadcast(part, root), every[root, 0])
            handles = [g.isend(np.full(n, rank), q) for q in others]
            assert all((g.irecv(np.empty(n, np.int64), q).wait() == q).all() for q in others)
            for handle in handles:
                handle.wait()
        assert g.all_gather_object(rank) == list(range(world_size))
        halves = g.split(rank % 2)
        assert halves.all_reduce(np.ones(3))[0] == halves.world_size
        halves.destroy()
        g.barrier(async_op=True).wait()

        async def both():
            return await asyncio.gather(g.barrier(async_op=True), g.all_reduce(np.ones(1), async_op=True))

        return float(asyncio.run(both())[1][0])


@pytest.mark.parametrize("nodes", ["AB", "ABCA"])
def test_operations_across_nodes_equal_one_process(ranks, name, coordinator, nodes):
    results = ranks(len(nodes), run_everything, name, coordinator, nodes, [0, 1, 20_001])
    assert results == [len(nodes)] * len(nodes)


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["A", "AAA", "AABB", "ABCDE"])
def test_operations_across_nodes_equal_one_process_in_other_placements(ranks, name, coordinator, nodes):
    results = ranks(len(nodes), run_everything, name, coordinator, nodes, [0, 1, 2, 4097, 300_001])
    assert results == [len(nodes)] * len(nodes)


def run_same_bits(rank, world_size, name, address, nodes):
    rng = np.random.default_rng(rank)
    array = rng.normal(size=50_001).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 50_001)
    with join(rank, world_size, name, address, nodes) as g:
        return {g.all_reduce(array.astype(np.float32)).tobytes() for _ in range(3)}


def test_sums_across_nodes_have_the_same_bits_on_all_ranks(ranks, name, coordinator):
    results = ranks(5, run_same_bits, name, coordinator, "AABCC")
    assert len(results[0]) == 1
    assert results == [results[0]] * 5


def run_missing(rank, world_size, name, address, nodes):
    join(rank, world_size, f"{name}-start", address, nodes).destroy()  # what takes long is loaded now
    if rank == 2:
        return "absent"
    with pytest.raises(CollectiveTimeout) as caught:
        join(rank, world_size, name, address, nodes, timeout=2.0)
    return str(caught.value)


def test_missing_rank_is_named_on_every_node(ranks, name, coordinator):
    told = ranks(3, run_missing, name, coordinator, "ABB")
    assert "these did not come in time: 2" in told[0]
    assert told[1] == told[0]
    # What is left at the coordinator misleads nobody.
    assert ranks(2, run_same_bits, name, coordinator, "AB")


def test_ranks_find_each_other_at_a_coordinator_that_is_started_again(free_port, tmp_path, wait_until):
    options = CoordinatorOptions(f"127.0.0.1:{free_port}", state_dir=tmp_path)

    def come(rank, name):
        return init_group(name=name, rank=rank, world_size=2, address=options.address, node=f"node{rank}", token=TOKEN)

    names = ["one", "one/below", ""]  # no group's key is below another's
    with ThreadPoolExecutor(6) as pool:
        with Coordinator(options) as first:
            followers = [pool.submit(come, 1, name) for name in names]
            wait_until(lambda: first._core.state.waiting_count() == 3, "all to look for their rank 0")
        with Coordinator(options):
            groups = [future.result() for future in [pool.submit(come, 0, name) for name in names] + followers]
            for done in [pool.submit(group.all_reduce, np.ones(1)) for group in groups]:
                assert done.result()[0] == 2
    for group in groups:
        group.destroy()


def test_coordinator_that_is_not_there_is_named(free_port):
    for rank in (0, 1):
        with pytest.raises(CollectiveTimeout, match=f"no coordinator answered on 127.0.0.1:{free_port}"):
            init_group(rank=rank, world_size=2, address=f"127.0.0.1:{free_port}", timeout=0.2, token=TOKEN)


def run_mismatch(rank, world_size, name, address, nodes):
    with join(rank, world_size, name, address, nodes) as g:
        told = []
        for odd in (2, 1):  # on another node than rank 0, and on the same
            with pytest.raises(CollectiveMismatch) as caught:
                g.all_reduce(np.ones(4 if rank == odd else 3))
            told.append(str(caught.value))
            assert g.all_reduce(np.ones(2))[0] == world_size
        return told


def test_different_calls_are_a_mismatch_on_every_node(ranks, name, coordinator):
    for across, within in ranks(3, run_mismatch, name, coordinator, "AAB"):
        assert "rank 2 and its node: all_reduce of 32 bytes" in across
        assert "rank 0: reduce of 3 float64, sum, root 0; rank 1: reduce of 4 float64" in within


def run_late(rank, world_size, name, address, nodes, gate):
    with join(rank, world_size, name, address, nodes) as g:
        if rank == world_size - 1:
            while not os.path.exists(gate):
                os.sched_yield()
        with pytest.raises(CollectiveTimeout):
            g.all_reduce(np.full(100, 1e30), timeout=0.3)
        if rank == 0:
            open(gate, "w").close()
        return [float(g.all_reduce(np.full(n, rank + 1.0))[0]) for n in (1, 100_000, 100)]


def test_timed_out_operation_across_nodes_harms_no_other(ranks, name, coordinator, tmp_path):
    assert ranks(3, run_late, name, coordinator, "AAB", str(tmp_path / "gate")) == [[6.0] * 3] * 3


def run_until_peer_died(rank, world_size, name, address, nodes, victim):
    with join(rank, world_size, name, address, nodes) as g:
        array = np.ones(1 << 19, np.float32)
        g.all_reduce(array)
        if rank == victim:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = [0.0]

        def reduce_for_ever():
            while True:
                began[:] = [time.monotonic()]
                g.all_reduce(array)

        with pytest.raises(PeerDied) as caught:
            reduce_for_ever()
        took = time.monotonic() - began[0]
        with g.rebuild([q for q in range(world_size) if q != victim]) as smaller:
            return caught.value.rank, took < NOTICED_S, float(smaller.all_reduce(np.ones(3))[0])


@pytest.mark.parametrize(("nodes", "victim"), [("AB", 1), ("AABB", 3), ("ABC", 0)])
def test_rank_killed_on_another_node_is_named_on_all(ranks, name, coordinator, nodes, victim):
    outcomes = ranks.outcomes(len(nodes), run_until_peer_died, name, coordinator, nodes, victim)
    assert outcomes.pop(victim) == ("died", signal.SIGKILL)
    assert outcomes == [("returned", (victim, True, len(nodes) - 1.0))] * (len(nodes) - 1)
