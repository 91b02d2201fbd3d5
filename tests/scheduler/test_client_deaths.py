"""What is left of a client of the seed's protocol that dies: docs/scheduler.md, "Dead clients"."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fastrt.scheduler import SchedulerError

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


def test_references_of_a_client_that_dies_stay_counted_until_somebody_drops_them(grpc_world: Any, foreign: Any) -> None:
    world = grpc_world()
    store = world.store()
    worker = world.worker(store, "f")
    shared = worker.push(b"shared")
    process, (away, number, only_here, elsewhere, unfinished, result) = foreign(
        world.scheduler.address, store.number, shared
    )
    store.objects[elsewhere] = b"elsewhere"
    world.expect(lambda: len(worker.log), 1)
    before = world.counts()
    assert [before[ref] for ref in (shared, only_here, elsewhere, unfinished, result)] == [3, 1, 1, 1, 2]
    process.kill()

    def lost() -> bool:
        try:
            world.call("ObjReady", objref=shared, objstoreid=away)
        except SchedulerError:
            return number not in world.call("SchedulerInfo").avail_worker
        return False

    world.expect(lost, True)
    # The protocol does not say who counts: what it had counted stays.
    assert world.counts() == before
    # What only its store had, and what it was to make, is lost; whoever asks is told.
    for ref in (only_here, unfinished):
        with pytest.raises(SchedulerError, match="is gone") as told:
            world.call("RequestObj", workerid=worker.number, objref=ref)
        assert told.value.code == "DATA_LOSS"
    # What another store has, and the result of its call, can still be had by whoever knows the number.
    world.call("RequestObj", workerid=worker.number, objref=elsewhere)
    worker.finish()
    world.call("RequestObj", workerid=worker.number, objref=result)
    assert world.counts()[result] == 1  # the dead caller's
    # Somebody who knows what it held drops it in its place, and all is deallocated.
    world.call("DecrementRefCount", objref=[shared, shared, only_here, elsewhere, unfinished, result])
    dropped = [world.counts()[ref] for ref in (shared, only_here, elsewhere, unfinished, result)]
    assert dropped == [1, -1, -1, -1, -1]
    world.expect(lambda: sorted(store.objects), [shared])
    world.check()
