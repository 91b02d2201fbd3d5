"""The free memory of a store under random loads: `python bench/fragmentation.py --seeds 16`.

Prints means over the seeds. The largest free piece is given as a share of all free memory: in a store that is kept 70 %
full by values of 300 bytes to 4 MiB; after those that can be spilled have gone; and after large values between small
ones have gone. Then the bytes that are spilled so that a value of 12 MiB finds room in the first of these stores, where
it is free but in pieces: by the rule of the daemon, and by the age of the values alone.
"""

import math
import os
import random
from collections.abc import Callable

import click

from fastrt._core.memory import arena, clients
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles, spill
from fastrt.errors import ObjectStoreFullError
from fastrt.node import victims

MIB = 1 << 20
PAGE = 1 << 14
STORE = 64 * MIB
KIND = 16
SMALLEST, LARGEST = 300, 4 * MIB
WANTED = 12 * MIB
Choice = Callable[[clients.Client, int], list[victims.Candidate]]


class Load:
    """A store whose values come and go at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.segment = Segment.create(STORE, objects_max=1 << 15, tasks_max=1 << 10)
        index, gen = clients.admit(self.segment, os.getpid(), clients.KIND_DRIVER, "load")
        self.client = clients.Client(self.segment, index, gen)
        while arena.grow(self.client):
            pass
        self.held: list[tuple[int, handles.Ref]] = []

    def put(self, nbytes: int) -> None:
        self.held.append((nbytes, handles.create(self.client, nbytes, KIND).seal()))

    def size(self) -> int:
        return int(math.exp(self.random.uniform(math.log(SMALLEST), math.log(LARGEST))))

    def drop_large(self) -> None:
        self.held = [row for row in self.held if row[0] < PAGE]

    def run(self, steps: int, share: float) -> None:
        """Put values of random sizes; drop others at random while more than `share` of the store is in use."""
        for _ in range(steps):
            while self.held and arena.room(self.client)[0] > share * STORE:
                self.held.pop(self.random.randrange(len(self.held)))
            try:
                self.put(self.size())
            except ObjectStoreFullError:
                for _ in range(min(4, len(self.held))):
                    self.held.pop(self.random.randrange(len(self.held)))

    def largest(self) -> float:
        """The largest free piece as a share of all free memory."""
        runs = [nbytes for _, nbytes in spill.free_runs(self.client)]
        return max(runs) / sum(runs)

    def close(self) -> None:
        self.held.clear()
        self.segment.unlink()


def steady(seed: int) -> tuple[float, float]:
    """The largest free piece of a store in use, and after its large values have gone."""
    load = Load(seed)
    load.run(6000, 0.7)
    before = load.largest()
    load.drop_large()
    after = load.largest()
    load.close()
    return before, after


def between(seed: int) -> float:
    """The largest free piece after large values have gone that were put between small ones."""
    load = Load(seed)
    for _ in range(30):
        load.put(MIB)
        for _ in range(70):
            load.put(SMALLEST)
    load.drop_large()
    share = load.largest()
    load.close()
    return share


def oldest(client: clients.Client, wanted: int) -> list[victims.Candidate]:
    """Choose the least recently used values whose bytes add up to those wanted."""
    chosen: list[victims.Candidate] = []
    for row in spill.candidates(client):
        if chosen and sum(one.nbytes for one in chosen) >= wanted:
            break
        chosen.append(victims.Candidate(*row))
    return chosen


def cheapest(client: clients.Client, wanted: int) -> list[victims.Candidate]:
    """Choose as the daemon does."""
    return victims.choose(spill.candidates(client), spill.free_runs(client), wanted, STORE) or []


def spilling(seed: int, choice: Choice) -> tuple[float, int]:
    """MiB spilled for each of 30 values of 12 MiB, and how many found no room, in a store that is 70 % full."""
    load = Load(seed)
    load.run(3000, 0.7)
    spilled = refused = 0
    for _ in range(30):
        load.run(50, 0.7)
        spill.tick(load.client)
        for _, ref in load.random.sample(load.held, 8):
            if not spill.is_spilled(load.client, ref):
                handles.read(load.client, ref)
        freed = 1
        while freed:
            try:
                handles.create(load.client, WANTED, KIND)
                break
            except ObjectStoreFullError:
                freed = 0
                for row in choice(load.client, WANTED):
                    data = spill.begin(load.client, row.entry, row.objref)
                    if data is not None:
                        freed += spill.commit(load.client, data)
                spilled += freed
        refused += not freed
    load.close()
    return spilled / MIB / 30, refused


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@click.command()
@click.option("--seeds", default=16, show_default=True)
def main(seeds: int) -> None:
    rows = [steady(seed) for seed in range(seeds)]
    click.echo(f"largest free piece, of the free memory: {mean([row[0] for row in rows]):.2f} of a store in use")
    click.echo(f"  {mean([row[1] for row in rows]):.2f} after large values have gone")
    click.echo(
        f"  {mean([between(seed) for seed in range(seeds)]):.2f} after large values between small ones have gone"
    )
    for name, choice in (("the daemon's rule", cheapest), ("oldest first", oldest)):
        found = [spilling(seed, choice) for seed in range(seeds)]
        click.echo(
            f"spilled for a value of 12 MiB, {name}: {mean([one[0] for one in found]):.1f} MiB; "
            f"without room: {mean([one[1] for one in found]):.1f} of 30"
        )


if __name__ == "__main__":
    main()
