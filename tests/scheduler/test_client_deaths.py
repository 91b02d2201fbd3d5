"""What is left of a client of the seed's protocol that dies: docs/scheduler.md, "Dead clients"."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerError, SchedulerOptions

# Serves nothing but its two ports, on which the scheduler notices its death; holds references, and says which.
CLIENT = """
import concurrent.futures, json, sys, threading, grpc
from fastrt.scheduler import SchedulerClient
server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
own = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
client = SchedulerClient(sys.argv[1])
store = client.register_store(own)
worker = client.register_worker(own, own)
only_here, elsewhere, unfinished = [client.push(worker) for _ in range(3)]
client.ready(only_here, store)
client.ready(elsewhere, int(sys.argv[2]))
client.increment([int(sys.argv[3]), int(sys.argv[3])])
(result,) = client.remote_call({"name": "f"})
print(json.dumps([store, worker, only_here, elsewhere, unfinished, result]), flush=True)
threading.Event().wait()
"""

ONLY_CALLS = """
import sys
from fastrt.scheduler import SchedulerClient
client = SchedulerClient(sys.argv[1])
client.increment([int(sys.argv[2])])
print(*client.remote_call({"name": "f"}))
"""


@pytest.fixture
def foreign() -> Iterator[Any]:
    """Start a client: its process, and what it says."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", CLIENT, *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return started[-1], json.loads(started[-1].stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kept", [False, True])
def test_references_of_a_registered_client_that_dies_are_given_back(
    grpc_world: Any, foreign: Any, tmp_path: Path, kept: bool
) -> None:
    world = grpc_world(state_dir=tmp_path if kept else None)
    store = world.store()
    worker = world.worker(store, "f")
    shared = worker.push(b"shared")
    process, (away, number, only_here, elsewhere, unfinished, result) = foreign(
        world.scheduler.address, store.number, shared
    )
    store.objects[elsewhere] = b"elsewhere"
    world.expect(lambda: len(worker.log), 1)
    refs = (shared, only_here, elsewhere, unfinished, result)
    assert [world.counts()[ref] for ref in refs] == [3, 1, 1, 1, 2]
    process.kill()

    def left() -> list[int]:
        return [world.counts()[ref] for ref in refs]

    # What the others count stays: the worker's own object, and the result, which the message holds.
    world.expect(left, [1, -1, -1, -1, 1])
    assert number not in world.call("SchedulerInfo").avail_worker
    with pytest.raises(SchedulerError, match="is not registered"):
        world.call("ObjReady", objref=shared, objstoreid=away)
    world.expect(lambda: sorted(store.objects), [shared])
    worker.finish()
    world.expect(left, [1, -1, -1, -1, -1])
    world.expect(lambda: sorted(store.objects), [shared])
    world.check()
    if kept:  # what was given back is in the log like any request
        world.scheduler.stop()
        with Scheduler(SchedulerOptions(state_dir=tmp_path)) as again, SchedulerClient(again.address) as client:
            assert list(client.info().reference_count)[shared] == 1
            again.check_invariants()


def test_references_of_a_client_that_registers_nothing_stay_counted(grpc_world: Any) -> None:
    world = grpc_world()
    worker = world.worker(world.store(), "f")
    shared = worker.push(b"shared")
    words = [sys.executable, "-c", ONLY_CALLS, world.scheduler.address, str(shared)]
    result = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    worker.finish()
    assert [world.counts()[ref] for ref in (shared, result)] == [2, 1]
    # A program that knows what the client held drops it in its place.
    world.call("DecrementRefCount", objref=[shared, result])
    assert [world.counts()[ref] for ref in (shared, result)] == [1, -1]
    world.check()
