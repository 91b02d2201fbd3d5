"""One rank of a library's group, which runs the driver's orders: fastrt, mpi4py or torch's Gloo.

It needs NumPy and its library only, so that it runs in any environment. See `compare_collective.py`.
"""

import argparse
import json
import os
import socket
import sys
import time

sys.path.pop(0)  # this folder has modules named like the libraries

import numpy as np

ROTATED_BYTES = 192 << 20  # buffers of so many bytes in turns fit in no cache
ROTATED_MOST = 4096  # so many small ones: they fit in the last cache at best


class Fastrt:
    """Private arrays, and arrays of the group's memory."""

    def __init__(self, name, rank, size, port):
        from fastrt.collective import init_group

        self.g = init_group(name=name, rank=rank, world_size=size)
        self.barrier = self.g.barrier

    def empty(self, count, place):
        return self.g.empty(count, np.float32) if place == "heap" else np.empty(count, np.float32)

    def in_place(self, array):
        self.g.all_reduce(array)

    def out(self, array, result):
        self.g.all_reduce(array, out=result)

    def shared(self, array):
        self.g.all_reduce_shared(array)


class Mpi:
    """mpi4py over the MPI that it was installed with."""

    def __init__(self, name, rank, size, port):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        assert self.comm.size == size, "mpiexec and mpi4py are not of the same MPI"
        self.barrier = self.comm.Barrier

    def empty(self, count, place):
        return np.empty(count, np.float32)

    def in_place(self, array):
        self.comm.Allreduce(self.mpi.IN_PLACE, array)

    def out(self, array, result):
        self.comm.Allreduce(array, result)


class Gloo:
    """torch.distributed with Gloo; it works in place only."""

    def __init__(self, name, rank, size, port):
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        self.barrier = dist.barrier

    def empty(self, count, place):
        return np.empty(count, np.float32)

    def in_place(self, array):
        self.dist.all_reduce(self.torch.from_numpy(array))


SIDES = {"fastrt": Fastrt, "mpi": Mpi, "gloo": Gloo}


def prepare(side, order):
    """Buffers for an order, and a function of the repetition's number that runs it once."""
    count = max(order["bytes"] // 4, 1)
    sets = min(max(2, ROTATED_BYTES // (4 * count)), ROTATED_MOST) if order["rotate"] else 1
    how = order["how"]
    if how == "barrier":
        return lambda i: side.barrier()
    arrays = [side.empty(count, order["place"]) for _ in range(sets)]
    outs = [side.empty(count, order["place"]) for _ in range(sets)] if how in ("out", "copy") else arrays
    for array in [*arrays, *outs]:
        array[:] = 0  # memory is allocated, and sums stay 0
    if how == "copy":
        return lambda i: np.copyto(outs[i % sets], arrays[i % sets])
    if how == "out":
        return lambda i: side.out(arrays[i % sets], outs[i % sets])
    if how == "shared":
        return lambda i: side.shared(arrays[i % sets])
    return lambda i: side.in_place(arrays[i % sets])


def measure(side, order, prepared):
    """Seconds of each repetition, each of `order["loop"]` calls."""
    key = json.dumps({k: order[k] for k in ("bytes", "rotate", "how", "place")})
    if key not in prepared:
        prepared.clear()
        prepared[key] = prepare(side, order)
    run = prepared[key]
    side.barrier()
    for i in range(order["loop"]):
        run(i)
    times = []
    for k in range(order["repeat"]):
        side.barrier()
        start = time.perf_counter()
        for i in range(order["loop"]):
            run(k + i)
        times.append((time.perf_counter() - start) / order["loop"])
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--driver", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, default=0)
    a = parser.parse_args()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0))) if a.rank is None else a.rank
    side = SIDES[a.side](a.name, rank, a.size, a.port)
    prepared = {}
    with socket.create_connection(("127.0.0.1", a.driver)) as connection, connection.makefile("rw") as stream:
        stream.write(json.dumps([a.side, rank]) + "\n")
        stream.flush()
        for line in stream:
            stream.write(json.dumps(measure(side, json.loads(line), prepared)) + "\n")
            stream.flush()
    os._exit(0)  # the shutdown of some libraries waits for ranks that are gone


if __name__ == "__main__":
    main()
