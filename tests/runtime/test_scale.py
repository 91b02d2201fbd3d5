"""A million tasks queued and a million small objects alive; random work under random deaths, with checked results."""

import gc
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import fastrt
from fastrt._core.memory import clients
from fastrt._core.repair import fsck
from fastrt.errors import TaskCancelledError, WorkerCrashedError
from fastrt.store import client as store_client

MILLION = 1_000_000
SOAK_S = 4.0


@fastrt.remote
def until(path):
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.005)


@fastrt.remote
def successor(x):
    return x + 1


@pytest.mark.long
def test_a_million_objects_alive_and_a_million_tasks_queued(runtime_dir, tmp_path):
    with fastrt.init(2, "2GiB", runtime_dir=runtime_dir, spill_dir=runtime_dir.parent / "spill"):
        client = store_client.require().client
        objects = [fastrt.put(i) for i in range(MILLION)]
        assert fsck.usage(client)["objects"] == MILLION
        assert fastrt.get(objects[::1000]) == list(range(0, MILLION, 1000))
        gates = [until.remote(str(tmp_path / "gate")) for _ in range(2)]
        tasks = [successor.remote(i) for i in range(MILLION)]
        assert fsck.usage(client)["tasks"] >= MILLION
        assert fsck.usage(client)["objects"] >= 2 * MILLION
        (tmp_path / "gate").touch()
        assert fastrt.get(tasks[-1]) == MILLION
        assert sum(fastrt.get(tasks)) == sum(range(1, MILLION + 1))
        assert sum(fastrt.get(objects)) == sum(range(MILLION))
        fastrt.get(gates)
        del objects, tasks, gates
        gc.collect()
        usage = fsck.usage(client)
        assert usage["objects"] - usage["functions"] <= 0
        assert fsck.fsck(client, True) == []


# ---- soak ----


@fastrt.remote(max_retries=50)
def add(*values):
    return sum(int(np.sum(value)) for value in values)


@fastrt.remote(max_retries=50)
def grow(size, seed):
    return np.full(size, seed % 7)


@fastrt.remote(max_retries=50)
def spread(depth, x):
    if depth == 0:
        return x
    left, right = spread.remote(depth - 1, x), spread.remote(depth - 1, x)
    return fastrt.get(left) + sum(fastrt.get([right]))


@fastrt.remote(max_retries=50)
def look_inside(box):
    return sum(int(np.sum(fastrt.get(ref))) for ref in box["refs"])


@fastrt.remote(retry_exceptions=True, max_retries=50)
def flaky(seed, x):
    if random.Random(f"{seed} {time.monotonic_ns()}").random() < 0.3:
        raise OSError("try again")
    return x


class Graph:
    """Random tasks over earlier ones, each with the sum that it must give."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.made = [(fastrt.put(k), k) for k in range(5)]

    def pick(self, most):
        return [self.rng.choice(self.made) for _ in range(self.rng.randint(1, most))]

    def step(self):
        rng, which = self.rng, self.rng.randrange(6)
        parts = self.pick(4)
        refs, total = [ref for ref, _ in parts], sum(value for _, value in parts) % (1 << 40)
        if which == 0:
            self.made.append((add.remote(*refs), sum(value for _, value in parts)))
        elif which == 1:
            size, seed = rng.choice([1, 100, 5_000, 200_000]), rng.randrange(100)
            self.made.append((grow.remote(size, seed), size * (seed % 7)))
        elif which == 2:
            depth, x = rng.randint(0, 4), rng.randrange(10)
            self.made.append((spread.remote(depth, x), x << depth))
        elif which == 3:
            self.made.append((look_inside.remote({"refs": refs}), sum(value for _, value in parts)))
        elif which == 4:
            self.made.append((flaky.remote(rng.randrange(10**6), total), total))
        else:
            self.made.append((fastrt.put(np.full(1000, total % 11)), 1000 * (total % 11)))

    def check(self):
        """Look at some results, and forget most: the rest of the graph keeps alive what it needs."""
        self.rng.shuffle(self.made)
        for ref, value in self.made[:20]:
            assert int(np.sum(fastrt.get(ref, timeout=60))) == value
        self.made = [(ref, value) for ref, value in self.made[20:50] if value < 1 << 50] or [(fastrt.put(1), 1)]


def kill_some_worker(rng):
    segment = store_client.require().client.segment
    pids = [row["pid"] for row in clients.table(segment) if row["kind"] == clients.KIND_WORKER]
    if pids:
        try:
            os.kill(rng.choice(pids), rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))
        except ProcessLookupError:
            return


@pytest.mark.parametrize("seed", [1])
def test_random_graphs_under_random_deaths_give_the_right_sums(rt, seed):
    graph, rng = Graph(seed), random.Random(seed)
    until_s, kill_at = time.monotonic() + SOAK_S, 0.0
    while time.monotonic() < until_s:
        for _ in range(30):
            graph.step()
        if time.monotonic() > kill_at:
            kill_at = time.monotonic() + 0.15
            kill_some_worker(rng)
        if rng.random() < 0.2:
            doomed = until.options(max_retries=0).remote("/nowhere")
            fastrt.cancel(doomed, force=rng.random() < 0.5)
            with pytest.raises((TaskCancelledError, WorkerCrashedError)):
                fastrt.get(doomed, timeout=60)
        graph.check()
    graph.made.clear()
