"""Fresh memory of a session's store is ready before its first put."""

import os
import threading

import pytest

import fastrt
from fastrt._core.memory import arena
from fastrt.config import memory_levels
from fastrt.store import client as store_client

MIB = 1 << 20


@pytest.mark.parametrize("ahead", [100 * MIB, 1 << 30])
def test_as_much_as_is_set_is_committed_and_mapped(ahead, monkeypatch, wait_until):
    monkeypatch.setenv("FASTRT_POPULATE_BYTES", str(ahead))
    with fastrt.init(num_workers=1, object_store_memory=160 * MIB):
        client = store_client.require().client
        committed = {100 * MIB: 128 * MIB, 1 << 30: 160 * MIB}[ahead]
        wait_until(lambda: arena.room(client)[1] == committed, "memory to be committed")
        wait_until(lambda: resident(client.segment.name) >= min(ahead, 160 * MIB) - MIB, "memory to be mapped")
        assert os.stat(f"/dev/shm{client.segment.name}").st_blocks * 512 < committed + 32 * MIB
        assert arena.room(client)[1] == committed


def test_nothing_is_committed_ahead_where_that_is_switched_off(monkeypatch):
    monkeypatch.setenv("FASTRT_POPULATE_BYTES", "0")
    with fastrt.init(num_workers=1, object_store_memory=160 * MIB):
        client = store_client.require().client
        assert arena.room(client)[1] == 0
        one = fastrt.remote(lambda: 1)
        assert fastrt.get(one.remote()) == 1  # a worker has joined: the daemon has looked meanwhile
        assert arena.room(client)[1] == 4 * MIB


def test_memory_monitor_does_not_find_memory_used_that_no_program_wanted(monkeypatch):
    monkeypatch.setenv("FASTRT_POPULATE_BYTES", str(1 << 30))
    threshold = 1.5 * max(level.used / level.limit for level in memory_levels())  # more than half of it is used
    with fastrt.init(num_workers=1, object_store_memory=256 * MIB, memory_threshold=max(0.01, min(0.99, threshold))):
        client = store_client.require().client
        threading.Event().wait(1.5)  # the daemon begins to populate after 0.2 s, and has a processor for it
        assert arena.room(client)[1] <= 64 * MIB


def resident(name: str) -> int:
    """Bytes of a segment that this process has mapped."""
    with open("/proc/self/smaps") as maps:
        found, here = 0, False
        for line in maps:
            if "-" in line.split(" ")[0]:
                here = name in line
            elif here and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found
