"""Values that only reference cycles hold are freed when the store is full."""

import gc

import pytest

import fastrt

BYTES = 8 << 20  # seven of them fit into the store


@pytest.fixture(autouse=True)
def session(runtime_dir):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir, spill_dir=runtime_dir.parent / "spill"):
        yield


def leak():
    """Put a value to which only a cycle refers."""
    cycle = [fastrt.put(bytes(BYTES))]
    cycle.append(cycle)


def large():
    return [row["object_id"] for row in fastrt.list_objects(limit=0) if row["bytes"] >= BYTES]


@fastrt.remote
class Holder:
    def __init__(self):
        gc.disable()
        self.held = []

    def leak(self, count):
        for _ in range(count):
            leak()

    def hold(self):
        self.held.append(fastrt.put(bytes(BYTES)))


def test_process_that_finds_no_room_collects_its_own_garbage():
    holder = Holder.remote()
    for _ in range(12):
        fastrt.get(holder.leak.remote(1), timeout=30)
    assert len(large()) <= 8


def test_idle_processes_collect_their_garbage_when_others_find_no_room(wait_until):
    idle, busy = Holder.remote(), Holder.remote()
    gc.disable()
    try:
        fastrt.get(idle.leak.remote(2), timeout=30)
        for _ in range(3):
            leak()
        assert len(large()) == 5
        for _ in range(4):
            fastrt.get(busy.hold.remote(), timeout=30)
        wait_until(lambda: len(large()) == 4, "the end of the garbage")
    finally:
        gc.enable()
