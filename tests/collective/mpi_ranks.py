"""One rank of test_peers.py's comparison with MPI: every operation by both, over the same inputs. Argument: a name."""

import sys

import numpy as np
from mpi4py import MPI

from fastrt.collective import init_group

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "band": MPI.BAND, "bor": MPI.BOR}
DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
SIZES = [0, 1, SIZE - 1, SIZE, SIZE + 1, 4095, 4096, 4097, (1 << 17) + 1]


def check(ours, theirs, *case):
    exact = ours.dtype.kind != "f"
    # MPI may add in any order, so the last bits of floats are not the same.
    same = np.array_equal(ours, theirs) if exact else np.allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    assert same, (*case, ours[:5], theirs[:5])


def reductions(g, place):
    for dtype in DTYPES:
        for op, mpi_op in OPS.items():
            if dtype.startswith("float") and op in ("band", "bor"):
                continue
            for n in SIZES:
                mine = np.random.default_rng(n + 1000 * RANK).integers(1, 5, n).astype(dtype)
                theirs = np.empty_like(mine)
                WORLD.Allreduce(mine, theirs, mpi_op)
                ours = g.empty(n, dtype) if place == "shared" else np.empty(n, dtype)
                ours[:] = mine
                check(g.all_reduce(ours, op), theirs, "all_reduce", dtype, op, n, place)
                check(g.all_reduce(mine, op, out=np.empty_like(mine)), theirs, "all_reduce out", dtype, op, n)
                root = n % SIZE
                WORLD.Reduce(mine, theirs, mpi_op, root)
                reduced = g.reduce(mine.copy(), root, op)
                if root == RANK:
                    check(reduced, theirs, "reduce", dtype, op, n)


def moves(g):
    for dtype in DTYPES:
        for n in SIZES:
            root = n % SIZE
            whole = np.random.default_rng(n + 1000 * RANK).integers(1, 5, (SIZE, n)).astype(dtype)
            part, every = np.empty(n, dtype), np.empty((SIZE, n), dtype)
            WORLD.Reduce_scatter_block(whole, part, MPI.SUM)
            check(g.reduce_scatter(whole)[0], part, "reduce_scatter", dtype, n)
            WORLD.Alltoall(whole, every)
            check(g.all_to_all(whole), every, "all_to_all", dtype, n)
            WORLD.Allgather(whole[0], every)
            check(g.all_gather(whole[0]), every, "all_gather", dtype, n)
            WORLD.Gather(whole[1 % SIZE], every, root)
            gathered = g.gather(whole[1 % SIZE], root)
            if root == RANK:
                check(gathered, every, "gather", dtype, n)
            WORLD.Scatter(whole, part, root)
            check(g.scatter(whole, root, np.empty(n, dtype)), part, "scatter", dtype, n)
            theirs, ours = whole.copy(), whole.copy()
            WORLD.Bcast(theirs, root)
            check(g.broadcast(ours, root), theirs, "broadcast", dtype, n)


with init_group(name=sys.argv[1], rank=RANK, world_size=SIZE) as group, np.errstate(over="ignore"):
    reductions(group, "private")
    reductions(group, "shared")
    moves(group)
sys.stdout.write("all are equal\n")
