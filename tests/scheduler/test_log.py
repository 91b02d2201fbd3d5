"""A scheduler that is killed and started again: what it told anybody is still so."""

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastrt
from fastrt.durable import Journal, StateDirectoryError
from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions, Settings
from fastrt.scheduler import events as ev
from fastrt.scheduler.log import EventLog
from fastrt.scheduler.snapshot import dump
from fastrt.scheduler.wire import CLASSES, parse_request

SETTINGS = Settings(max_retries=1)
CALL = message_set("ray").message("Call")
SERVE = """
import sys
from fastrt.scheduler import Scheduler, SchedulerOptions
with Scheduler(SchedulerOptions(address=sys.argv[1], state_dir=sys.argv[2], lost_after_s=20.0)) as scheduler:
    print(scheduler.address, flush=True)
    sys.stdin.read()
"""


def request(log: EventLog, method: str, **fields: Any) -> Any:
    """One request as the service handles it; the answer's value."""
    path, body = f"/Scheduler/{method}", CLASSES[method][0](**fields).SerializeToString()
    event = parse_request(path, body, 1)
    effects = log.state.handle(event)
    value = effects[0].value
    if not isinstance(value, ev.Failure):
        log.keep(event, (path, body), effects)
        for effect in effects:
            if isinstance(effect, ev.NotifyAlias | ev.DeallocateObject):
                log.order(effect)
    return value


def fact(log: EventLog, event: ev.Event) -> None:
    log.keep(event, None, log.state.handle(event))


def any_request(log: EventLog, rng: random.Random) -> None:
    """Something that peers may say, of numbers that are mostly known."""
    stores, workers = log.state.peers()
    refs = range(len(log.state.objects.refs) + 1)
    store = rng.choice([*stores, 0])
    worker = rng.choice([*workers, 0])
    ref, other = rng.choice(refs), rng.choice(refs)
    task = log.state.workers[worker].task if workers else None
    arg = [{"ref": rng.choice(refs)} for _ in range(rng.randrange(3))]
    said: list[Callable[[], Any]] = [
        lambda: request(log, "RegisterObjStore", objstore_address=f"s{rng.randrange(4)}"),
        lambda: request(
            log, "RegisterWorker", worker_address=f"w{rng.randrange(6)}", objstore_address=f"s{rng.randrange(4)}"
        ),
        lambda: request(log, "RegisterFunction", workerid=worker, fnname=rng.choice("fg"), num_return_vals=2),
        *[lambda: request(log, "RemoteCall", call={"name": rng.choice("fg"), "arg": arg})] * 4,
        *[lambda: request(log, "PushObj", workerid=worker)] * 2,
        *[lambda: request(log, "ObjReady", objref=ref, objstoreid=store)] * 4,
        lambda: request(log, "IncrementRefCount", objref=[ref, other]),
        lambda: request(log, "DecrementRefCount", objref=[ref]),
        lambda: request(log, "RequestObj", workerid=worker, objref=ref),
        lambda: request(log, "AliasObjRefs", alias_objref=ref, target_objref=other),
        lambda: request(log, "AddContainedObjRefs", objref=ref, contained_objref=[other]),
        *[lambda: request(log, "WorkerReady", workerid=worker)] * 4,
        lambda: fact(log, ev.InvokeTaken(worker, task.number if task else 0)) if workers else None,
        lambda: fact(log, ev.DeliveryFailed(ref, store, rng.choice([*stores, 0]), "broken")),
    ]
    rng.choice(said)()
    if rng.random() < 0.02:
        fact(log, rng.choice([ev.WorkerLost(worker), ev.ObjStoreLost(store)]))


@pytest.mark.parametrize("seed", range(6))
def test_log_played_again_leads_to_the_same_state(tmp_path, seed):
    """With snapshots in between, and closed and opened many times: every table is as it was."""
    rng = random.Random(seed)
    log = EventLog(Journal(tmp_path), SETTINGS, snapshot_bytes_min=3000)
    snapshots = 0
    try:
        for step in range(1500):
            any_request(log, rng)
            if rng.random() < 0.2 and log.orders:
                log.answered(rng.choice(list(log.orders)))
            if rng.random() < 0.1:
                snapshots += log.write()
            if rng.random() < 0.03:
                log.write()
                before, orders = dump(log.state), dict(log.orders)
                log.close()
                log = EventLog(Journal(tmp_path), SETTINGS, snapshot_bytes_min=3000)
                assert dump(log.state) == before, step
                assert log.orders == orders
                log.state.check_invariants()
        assert snapshots >= 3
        assert len(log.state.objects.refs) > 50
    finally:
        log.close()


def test_what_was_not_written_has_not_happened(tmp_path):
    log = EventLog(Journal(tmp_path), SETTINGS)
    request(log, "RegisterObjStore", objstore_address="s")
    log.write()
    request(log, "RegisterObjStore", objstore_address="t")
    log.close()
    log = EventLog(Journal(tmp_path), SETTINGS)
    assert log.state.stores == ["s"]
    log.close()


def test_log_of_another_version_is_refused(tmp_path):
    log = EventLog(Journal(tmp_path), SETTINGS)
    request(log, "RegisterObjStore", objstore_address="s")
    log.write()
    log.close()
    journal = Journal(tmp_path)
    ((key, value),) = [(key, value) for kind, key, value in journal.records() if kind == "event"]
    journal.write({("event", key): bytes(4) + value[4:]})
    with pytest.raises(StateDirectoryError, match="has other effects"):
        EventLog(journal, SETTINGS)
    journal.write({("about", "scheduler"): b'{"format": 9, "next_event": 0, "next_order": 0}'})
    with pytest.raises(StateDirectoryError, match="format 9"):
        EventLog(journal, SETTINGS)
    journal.close()


def test_directory_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fastrt.durable.lock._DYING_S", 0.05)
    with Scheduler(SchedulerOptions(state_dir=tmp_path)), pytest.raises(StateDirectoryError, match="in use"):
        Scheduler(SchedulerOptions(state_dir=tmp_path))


class Service:
    """A scheduler in a process of its own."""

    def __init__(self, folder: Path, address: str = "127.0.0.1:0") -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, address, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address

    def kill(self) -> None:
        pidfd = os.pidfd_open(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)
        self.process.communicate()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=30)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    """Those made by the test, ended afterwards."""
    made: list[Service] = []
    yield made
    for service in made:
        service.stop()


def test_killed_scheduler_goes_on_where_it_was(grpc_world, services, tmp_path):
    """References, counts, aliases, functions, workers and calls; a call under way is not run twice."""
    services.append(Service(tmp_path))
    address = services[0].address
    world = grpc_world()
    world.scheduler.stop()
    world.client.close()
    world.scheduler, world.client = _Elsewhere(), SchedulerClient(address)
    stores = [world.store(), world.store()]
    worker, reader = world.worker(stores[0], "f"), world.worker(stores[1])
    kept, alias = worker.push(), world.call("PushObj", workerid=0).objref
    world.call("AliasObjRefs", alias_objref=alias, target_objref=kept)
    world.call("IncrementRefCount", objref=[kept, kept, alias])
    running = world.remote("f", kept)
    world.expect(lambda: worker.log, [("f", [kept], running)])
    queued = [world.remote("f")[0] for _ in range(3)]
    pending = world.call("PushObj", workerid=0).objref
    world.call("RequestObj", workerid=reader.number, objref=pending)
    before = world.call("SchedulerInfo")

    services[0].kill()
    services.append(Service(tmp_path, address))
    world.expect(lambda: readable(world), True)
    assert world.call("SchedulerInfo") == before

    worker.finish()  # the call that it has had all the time
    world.expect(lambda: [call[2] for call in worker.log], [running, queued[:1]])
    stores[0].put(pending)
    world.expect(lambda: pending in stores[1].objects, True)  # requested of the one that was killed
    world.call("DecrementRefCount", objref=[kept] * 3 + [alias])
    assert world.counts()[:2] == [0, 1]
    world.call("DecrementRefCount", objref=[alias])
    world.expect(lambda: ("deallocate", kept) in stores[0].log, True)


def test_nothing_acknowledged_is_lost_under_kills(services, tmp_path):
    """A client counts on its own what it was told; the scheduler is killed at any moment, again and again."""
    services.append(Service(tmp_path))
    address = services[0].address
    told = 0
    with SchedulerClient(address, timeout_s=20) as client:
        client.register_store("127.0.0.1:9")
        ref = client.push(client.register_worker("127.0.0.1:8", "127.0.0.1:9"))
        for round in range(4):
            calls = [
                client._methods["IncrementCount"].future(
                    CLASSES["IncrementCount"][0](objref=ref), timeout=60, wait_for_ready=True
                )
                for _ in range(200)
            ]
            calls[20 * round + 10].result()
            services[-1].kill()
            told += sum(call.exception() is None for call in calls)
            unknown = sum(call.exception() is not None for call in calls)
            services.append(Service(tmp_path, address))
            (count,) = counts_of(client)
            assert 1 + told <= count <= 1 + told + unknown
            told = count - 1
    assert told > 40


def counts_of(client: SchedulerClient) -> list[int]:
    """Asked until the new process is found."""
    request = CLASSES["SchedulerInfo"][0]()
    return list(client._methods["SchedulerInfo"](request, timeout=60, wait_for_ready=True).reference_count)


def readable(world: Any) -> bool:
    try:
        world.call("SchedulerInfo")
    except fastrt.errors.FastrtError:
        return False
    return True


class _Elsewhere:
    """In place of a scheduler in this process."""

    def stop(self) -> None:
        pass
