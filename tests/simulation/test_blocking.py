"""Processes that block inside a call: the world goes on without them, and ends while they are blocked."""

import threading

import pytest

from .blocking import Killed
from .world import Process, World, pause


class Blocks:
    """A process that blocks in a call until `is_free`."""

    def __init__(self, world: World, name: str, seconds: float) -> None:
        self.process, self.is_free, self.found = Process(world, "n1", name), False, None
        self.seconds = seconds
        self.process.start(self.main)

    async def main(self) -> None:
        world = self.process.world
        try:
            self.found = world.turns.block(lambda: self.is_free, self.seconds), round(world.now, 1)
        except Killed:
            self.found = "killed"
            raise


@pytest.fixture
def world():
    made = World(1)
    threads = threading.active_count()
    yield made
    made.turns.close()
    for process in made.processes:
        process.loop.close()
    assert threading.active_count() == threads


@pytest.mark.timeout(60)
def test_a_blocked_process_continues_when_its_wait_is_over(world):
    first, second = Blocks(world, "first", 100.0), Blocks(world, "second", 5.0)

    async def other() -> None:
        await pause(2.0)
        first.is_free = True

    Process(world, "n1", "other").start(other)
    world.run(1010.0)
    assert first.found == (True, 1002.0)  # although the other one still waits
    assert second.found == (False, 1005.0)


@pytest.mark.timeout(60)
def test_a_run_ends_while_processes_are_blocked(world):
    Blocks(world, "first", 5.0)
    late = []
    world.after(1.0, lambda: late.extend(Blocks(world, f"p{k}", 1e6) for k in range(3)))
    world.run(1010.0)
    assert world.now == 1010.0
    assert [one.found for one in late] == [None] * 3
    world.turns.close()
    assert [one.found for one in late] == ["killed"] * 3
