"""What recovery costs with many objects alive when the dead client held ten: it must not grow with the others.

python tests/crash/janitor_cost.py 1000000
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.repair import recovery
from fastrt._core.repair.fsck import fsck

HELD = 10
ROUNDS = 15
LIMIT_MS = 3.0  # at 10**6 objects


def attach(segment: Segment, kind: int) -> Client:
    index, gen = clients.admit(segment, os.getpid(), kind, "cost")
    return Client(segment, index, gen)


def recoveries_ms(objects: int) -> Iterator[float]:
    """Times of recovering a client that held ten among so many objects of another."""
    segment = Segment.create(1 << 20, objects_max=objects + 4096, tasks_max=1 << 12)
    try:
        owner = attach(segment, clients.KIND_DAEMON)
        alive = [handles.put_scalar(owner, k) for k in range(objects)]
        for _ in range(ROUNDS):
            dead = attach(segment, clients.KIND_WORKER)
            held = [handles.put_scalar(dead, k) for k in range(HELD // 2)]
            for k in range(HELD // 2):  # spread over the table
                ref = alive[k * len(alive) // HELD]
                held.append(handles.acquire(dead, ref.objref, handles.describe(owner, ref)["index"]))
            dead.abandon()
            del held
            begun = time.perf_counter()
            recovery.recover(owner, dead.index)
            yield (time.perf_counter() - begun) * 1e3
        if objects <= 10**5:
            assert fsck(owner, quiet=True) == []
        owner.abandon()
    finally:
        segment.unlink()


def cost_ms(objects: int) -> float:
    return statistics.median(recoveries_ms(objects))


def main() -> int:
    worst = 0.0
    for text in sys.argv[1:]:
        cost = cost_ms(int(text))
        sys.stdout.write(f"{int(text):>12} objects alive, {HELD} held: {cost:8.3f} ms\n")
        if int(text) <= 10**6:
            worst = max(worst, cost)
    return 1 if worst > LIMIT_MS else 0


if __name__ == "__main__":
    sys.exit(main())
