"""Groups within a node: what goes wrong, objects, messages, sub-groups, the background, and nothing left behind."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from fastrt.collective import CollectiveMismatch, CollectiveTimeout, PeerDied, init_group
from fastrt.errors import StaleReferenceError

# A death is noticed within 0.06 s here; the bound tells that from waiting for the group's timeout of 30 s.
NOTICED_S = 25.0

# ---- making a group ----


def run_nothing(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        g.barrier()
        return g.rank, g.world_size, g.name


def test_a_name_can_be_used_again_and_again(ranks, name):
    for count in (1, 3, 2):
        assert ranks(count, run_nothing, name) == [(rank, count, name) for rank in range(count)]


def start_together(rank, world_size, name):
    """So that what follows can have short times, also on a busy machine."""
    run_nothing(rank, world_size, f"{name}-start")


def run_too_few(rank, world_size, name, missing):
    start_together(rank, world_size, name)
    if rank == missing:
        return "absent"
    with pytest.raises(CollectiveTimeout) as caught:
        init_group(name=name, rank=rank, world_size=world_size, timeout=2.0)
    return str(caught.value)


def test_missing_rank_is_named_to_all(ranks, name):
    told = ranks(3, run_too_few, name, 2)
    assert "rank 2 of 3 did not come" in told[0]
    assert told[1] == told[0]
    told = ranks(3, run_too_few, name, 0)
    assert "rank 0 did not come" in told[1]


def run_twice(rank, world_size, name):
    # Processes 0 and 1 are ranks 0 and 1 of three; process 2 says that it is rank 1, too.
    start_together(rank, world_size, name)
    try:
        init_group(name=name, rank=min(rank, 1), world_size=3, timeout=2.0)
    except (CollectiveMismatch, CollectiveTimeout) as error:
        return str(error)


def test_rank_that_comes_twice_is_refused(ranks, name):
    told = ranks(3, run_twice, name)
    assert sum("rank 1 comes twice" in text for text in told) == 1
    assert sum("rank 2 of 3 did not come" in text for text in told) == 2


def run_other_size(rank, world_size, name):
    start_together(rank, world_size, name)
    try:
        init_group(name=name, rank=rank, world_size=2 + rank, timeout=2.0)
    except (CollectiveMismatch, CollectiveTimeout) as error:
        return str(error)


def test_other_world_size_is_refused(ranks, name):
    assert "rank 1 expects 3 ranks" in ranks(2, run_other_size, name)[1]


# ---- what ranks do wrong ----


def run_mismatches(rank, world_size, name):
    told = []
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        odd = rank == 1
        for call in (
            lambda: g.all_reduce(np.ones(3 + odd)),
            lambda: g.all_reduce(np.ones(3, "f4" if odd else "f8")),
            lambda: g.all_reduce(np.ones(3), "max" if odd else "sum"),
            lambda: g.barrier() if odd else g.all_reduce(np.ones(100_000)),
            lambda: g.broadcast(np.ones(3), src=int(odd)),
            lambda: g.all_gather(np.ones(3, "S5" if odd else "S4")),
        ):
            with pytest.raises(CollectiveMismatch) as caught:
                call()
            told.append(str(caught.value))
            assert g.all_reduce(np.ones(2)).tolist() == [world_size] * 2  # and the group goes on
    return told


def test_different_calls_are_a_mismatch_that_says_who_did_what(ranks, name):
    results = ranks(3, run_mismatches, name)
    assert results[1] == results[0] == results[2]
    sizes, types, ops, kinds, roots, items = results[0]
    assert "rank 0, rank 2: all_reduce of 3 float64, sum; rank 1: all_reduce of 4 float64, sum" in sizes
    assert "rank 1: all_reduce of 3 float32" in types
    assert "rank 1: all_reduce of 3 float64, max" in ops
    assert "rank 0, rank 2: all_reduce of 100000 float64, sum; rank 1: barrier" in kinds
    assert "rank 1: broadcast of 3 float64, root 1" in roots
    assert "items of 5 bytes" in items


def run_late(rank, world_size, name, gate):
    """Rank 1 comes late to an operation, again and again: it fails on all, the next one is right."""
    told = []
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        for n in (5, 400_000, 5):
            if rank == 1:
                while not os.path.exists(f"{gate}-{n}-{len(told)}"):
                    os.sched_yield()
                    g._memory.dead_rank()
            shared = g.empty(n)
            shared[:] = 1e30  # what a late rank must never see
            with pytest.raises(CollectiveTimeout) as caught:
                g.all_reduce(shared, timeout=0.2)
            if rank == 0:
                open(f"{gate}-{n}-{len(told)}", "w").close()
            told.append(str(caught.value))
            for _ in range(3):
                assert (g.all_reduce(np.full(n, rank + 1.0)) == 6).all()
    return told


def test_timed_out_operation_fails_on_all_ranks_and_harms_no_other(ranks, name, tmp_path):
    results = ranks(3, run_late, name, str(tmp_path / "gate"))
    told = results[0][0] + results[2][0]  # on a busy machine rank 2 may be late, too
    assert "rank 1" in told
    assert "did not come in time" in told
    assert all("given up by another rank" in text for text in results[1])


def run_bad_arguments(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        frozen = np.ones(4)
        frozen.flags.writeable = False
        whole = np.ones(8)
        for error, match, call in (
            (ValueError, "contiguous", lambda: g.all_reduce(np.ones((4, 4))[:, 1])),
            (ValueError, "read-only", lambda: g.all_reduce(frozen)),
            (ValueError, "there are sum", lambda: g.all_reduce(np.ones(4), "median")),
            (TypeError, "no band of float64", lambda: g.all_reduce(np.ones(4), "band")),
            (TypeError, "cannot be reduced", lambda: g.all_reduce(np.ones(4, "c8"))),
            (TypeError, "objects", lambda: g.all_gather(np.array([None]))),
            (TypeError, "not int", lambda: g.all_reduce(7)),
            (TypeError, "input is float64, the output float32", lambda: g.all_reduce(np.ones(4), out=np.ones(4, "f4"))),
            (ValueError, "output has 3", lambda: g.all_reduce(np.ones(4), out=np.ones(3))),
            (ValueError, "overlaps", lambda: g.all_reduce(whole[:6], out=whole[1:7])),
            (ValueError, "divided equally", lambda: g.reduce_scatter(np.ones(2 * world_size + 1))),
            (ValueError, "rank 7", lambda: g.broadcast(np.ones(1), src=7)),
            (ValueError, "from rank 0 to rank 9" if rank == 0 else "from rank 1", lambda: g.send(np.ones(1), 9)),
        ):
            with pytest.raises(error, match=match):
                call()
        g.barrier()
    with pytest.raises(StaleReferenceError, match="destroyed"):
        g.barrier()
    with pytest.raises(ValueError, match="rank 2 in a group of 2"):
        init_group(name=name, rank=2, world_size=2)


def test_bad_arguments_are_refused_before_anybody_waits(ranks, name):
    ranks(2, run_bad_arguments, name)


# ---- deaths ----


def run_until_peer_died(rank, world_size, name, victim, shared):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        n = 1 << 20
        array = g.empty(n) if shared else np.empty(n, np.float32)
        array[:] = 1
        g.all_reduce(array)
        if rank == victim:
            # Whoever counts down, not the operations, decides when: anywhere inside of one.
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        took = []

        def reduce_for_ever():
            while True:
                took[:] = [time.monotonic()]
                g.all_reduce(array)

        with pytest.raises(PeerDied) as caught:
            reduce_for_ever()
        took = time.monotonic() - took[0]
        with pytest.raises(PeerDied):
            g.barrier()
        with g.rebuild() as smaller:
            assert smaller.all_reduce(np.ones(3)).tolist() == [world_size - 1] * 3
            return caught.value.rank, took < NOTICED_S, smaller.world_size


@pytest.mark.parametrize(("count", "victim", "shared"), [(2, 0, True), (3, 2, False), (5, 1, True)])
def test_rank_killed_inside_an_operation_is_named_and_the_others_go_on(ranks, name, count, victim, shared):
    outcomes = ranks.outcomes(count, run_until_peer_died, name, victim, shared)
    assert outcomes.pop(victim) == ("died", signal.SIGKILL)
    assert outcomes == [("returned", (victim, True, count - 1))] * (count - 1)


def run_leave(rank, world_size, name):
    g = init_group(name=name, rank=rank, world_size=world_size)
    if rank == 0:
        g.destroy()
        return None
    with pytest.raises(PeerDied, match="rank 0 has destroyed its side") as caught:
        g.barrier()
    return caught.value.rank


def test_rank_that_leaves_is_no_mystery_to_those_that_wait(ranks, name):
    assert ranks(2, run_leave, name) == [None, 0]


def run_kill_all(rank, world_size, name):
    g = init_group(name=name, rank=rank, world_size=world_size)
    g.empty(1 << 20)[:] = 1
    g.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_ranks_are_killed(ranks, name):
    before = set(os.listdir("/dev/shm"))
    assert ranks.outcomes(3, run_kill_all, name) == [("died", signal.SIGKILL)] * 3
    assert not [found for found in set(os.listdir("/dev/shm")) - before if "group" in found]
    assert ranks(2, run_nothing, name)  # nor is the name


def run_fork(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        child = os.fork()
        if child == 0:
            try:
                g.barrier()
            except StaleReferenceError:
                os._exit(7)
            os._exit(1)
        g.barrier()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_is_no_rank(ranks, name):
    assert ranks(2, run_fork, name) == [7, 7]


# ---- memory ----


def run_memory(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        used = g._memory
        first = [g.empty((100, 100), "f8") for _ in range(5)]
        view = first[2][50:]
        view[:] = 3
        assert used.used_bytes >= 5 * 80_000
        del first
        assert 80_000 <= used.used_bytes < 2 * 90_000  # the view keeps its own
        assert (view == 3).all()
        assert g.empty((0, 3)).shape == (0, 3)
        results = [g.all_reduce_shared(np.full(1000, float(i))) for i in range(10)]
        g.barrier()
        kept = results[4]
        del results, view
        g.barrier()
        assert kept[0] == 4 * world_size
        assert used.used_bytes == (8192 + 4096 if rank == 0 else 0)
        del kept
        g.barrier()
        assert used.used_bytes == 0
        array = g.empty(10)
    array[:] = 5  # valid after the group's end
    return array.sum()


def test_memory_comes_back_when_the_last_view_is_gone(ranks, name):
    assert ranks(3, run_memory, name) == [50.0] * 3


class Foreign:
    """An array of another library: it offers DLPack, and no buffer."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def run_foreign(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert g.all_reduce(Foreign(array)) is not None
        gathered = g.all_gather(Foreign(np.full(2, rank)))
        plain = (ctypes.c_double * 3)(1, 2, 3)
        g.all_reduce(plain)
        data = bytearray([rank + 1] * 4)
        g.all_reduce(data, "bor")
        with pytest.raises(ValueError, match="contiguous"):
            g.all_reduce(Foreign(np.ones((4, 4))[:, 1]))
        return array.tolist(), gathered.tolist(), list(plain), data


def test_arrays_of_other_libraries_are_used_in_place(ranks, name):
    expected = [[0, 2, 4], [6, 8, 10]], [[0, 0], [1, 1]], [2, 4, 6], bytearray([3] * 4)
    assert ranks(2, run_foreign, name) == [expected] * 2


# ---- the rest ----


def run_objects(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        mine = {"rank": rank, "long": "x" * 100_000 * rank}
        assert [one["rank"] for one in g.all_gather_object(mine)] == list(range(world_size))
        return g.broadcast_object([rank, "is it"] if rank == 1 else None, src=1)


def test_objects_travel(ranks, name):
    assert ranks(3, run_objects, name) == [[1, "is it"]] * 3


def run_messages(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        for n in (0, 1, 1000, 300_000):  # the last is more than the ring holds: both sides work at once
            handle = g.isend(np.full(n, rank, np.int64), right)
            assert (g.irecv(np.empty(n, np.int64), left).wait() == left).all()
            handle.wait()
        g.send(np.array([1]), right, tag=1)
        g.send(np.array([2]), right, tag=2)
        assert g.recv(np.array([0]), left, tag=2) == [2]
        with pytest.raises(CollectiveMismatch, match="sent 8 bytes with tag 1; the array has 16"):
            g.recv(np.zeros(2, np.int64), left, tag=1)
        assert g.recv(np.array([0]), left, tag=1) == [1]
        with pytest.raises(CollectiveTimeout, match="no message"):
            g.recv(np.zeros(1), left, timeout=0.05)
        g.barrier()
        if rank == 0:
            with pytest.raises(CollectiveTimeout, match="no room"):
                g.send(np.zeros(1 << 20), 1, timeout=0.05)
        g.barrier()
        if rank == 1:
            with pytest.raises(CollectiveTimeout, match="given up half-way"):
                g.recv(np.zeros(1 << 20), 0)


def test_messages_arrive_in_order_of_their_tag(ranks, name):
    ranks(3, run_messages, name)


def run_background(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        handles = [g.all_reduce(np.full(1000, float(i)), async_op=True) for i in range(20)]
        total = g.all_reduce(np.ones(1))  # behind those under way, in the same order on all ranks
        assert [h.wait()[0] for h in handles] == [i * world_size for i in range(20)]
        assert all(h.done() for h in handles)

        async def both():
            return await asyncio.gather(g.barrier(async_op=True), g.all_gather(np.array([rank]), async_op=True))

        gathered = asyncio.run(both())[1]
        if rank == 0:
            late = g.barrier(async_op=True)
            with pytest.raises(CollectiveTimeout, match="it continues"):
                late.wait(0.05)
            g.send(np.ones(1), 1)
            late.wait()
        else:
            g.recv(np.ones(1), 0)
            g.barrier()
        with pytest.raises(ValueError, match="divided equally"):
            g.reduce_scatter(np.ones(3), async_op=True)
        return total[0], gathered[:, 0].tolist()


def test_operations_in_the_background_keep_their_order(ranks, name):
    assert ranks(2, run_background, name) == [(2.0, [0, 1])] * 2


def run_groups(rank, world_size, name):
    """Sub-groups and the whole at once, each in a thread of its own."""
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        halves = g.split(rank % 2, key=-rank)
        some = g.split(0 if rank < 3 else None)
        assert (some is None) == (rank >= 3)
        seen = {}

        def work(group, key):
            seen[key] = [float(group.all_reduce(np.full(n, rank + 1.0))[0]) for n in [1, 5000] * 20]

        threads = [
            threading.Thread(target=work, args=(group, key))
            for key, group in (("whole", g), ("half", halves), ("some", some))
            if group is not None
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        g.barrier()
        return halves.rank, {key: set(values) for key, values in seen.items()}


def test_groups_of_the_same_processes_do_not_disturb_each_other(ranks, name):
    results = ranks(4, run_groups, name)
    assert [first for first, _ in results] == [1, 1, 0, 0]  # by key: the highest rank first
    assert [found["half"] for _, found in results] == [{4.0}, {6.0}, {4.0}, {6.0}]
    assert all(found["whole"] == {10.0} for _, found in results)
    assert [found.get("some") for _, found in results] == [{6.0}] * 3 + [None]


def run_many(rank, world_size, name, count):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        array = np.zeros(16)
        for i in range(count):
            array[:] = i
            g.all_reduce(array)
            assert array[0] == array[15] == i * world_size
            if i % 7 == 0:
                g.barrier()
        return g.operations


def test_more_ranks_than_processors_make_progress(ranks, name):
    count = 2 * len(os.sched_getaffinity(0)) + 1
    assert ranks(count, run_many, name, 300) == [343] * count


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [2, 5])
def test_a_hundred_thousand_small_operations_are_all_right(ranks, name, count):
    assert ranks(count, run_many, name, 100_000, patience_s=280.0) == [100_000 + 14_286] * count


@pytest.mark.long
def test_ranks_beside_programs_that_compute_do_not_wait_for_a_time_slice_in_each_operation(ranks, name):
    """Each of 444 operations a second waited for the time slices of both programs on its processor."""
    code = "import os\nwhile os.getppid() == int(os.environ['PARENT']): pass"
    busy = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PARENT": str(os.getpid())})
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        assert ranks(2, run_many, name, 30_000) == [30_000 + 4_286] * 2
    finally:
        for one in busy:
            one.kill()
            one.wait()
