"""Dead references are forgotten: what a client sees of them, and what they cost."""

from pathlib import Path
from typing import Any

import pytest

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerError, SchedulerOptions

MARK = message_set("transfer").message("fastrt.transfer.SchedulerInfoMark")
RESULTS = 10_000
CALLS = 16
SHOWN = 1 << 17
DEAD = (1 << 64) - 1


def mark_of(info: Any) -> Any:
    """The fields that early Ray's message does not have."""
    return MARK.FromString(info.SerializeToString())


def make_and_drop(client: SchedulerClient) -> list[int]:
    """Make many references, and drop all but one in the middle."""
    client.register_store("127.0.0.1:9")
    maker = client.register_worker("127.0.0.1:8", "127.0.0.1:9")
    client.register_function(maker, "many", RESULTS)
    argument = client.push(maker)
    client.increment([argument] * CALLS)
    refs = [ref for _ in range(CALLS) for ref in client.remote_call({"name": "many", "arg": [{"ref": argument}]})]
    client.register_worker("127.0.0.1:8", "127.0.0.1:9")  # the maker is lost, and with it the calls that wait for it
    kept = refs.pop(len(refs) // 8)
    client.decrement([argument, *refs])
    return [argument, kept, refs[-1] + 1]


def check_forgotten(scheduler: Scheduler, client: SchedulerClient, argument: int, kept: int, total: int) -> None:
    info = client.info()
    assert len(info.reference_count) == len(info.target_objref) == SHOWN
    assert set(info.reference_count) == {DEAD}
    said = mark_of(info)
    assert said.first_objref == total - SHOWN
    assert [(one.objref, one.count, one.target) for one in said.older] == [(kept, 1, DEAD)]
    assert len(info.SerializeToString()) < 4 << 20  # what clients of gRPC take
    for ref in (argument, kept + 1, total - 1):
        with pytest.raises(SchedulerError, match="is deallocated"):
            client.increment([ref])
    with pytest.raises(SchedulerError, match="is unknown"):
        client.increment([total])
    objects = scheduler._state.objects
    assert objects.refs.kept <= 2 << 12  # the block of the one that lives, and the last
    assert sum(page is not None for page in objects.pages) <= 2
    scheduler.check_invariants()


def test_dead_references_are_forgotten_and_live_ones_are_shown() -> None:
    with Scheduler(SchedulerOptions()) as scheduler, SchedulerClient(scheduler.address) as client:
        argument, kept, total = make_and_drop(client)
        assert (argument, total) == (0, CALLS * RESULTS + 1)
        check_forgotten(scheduler, client, argument, kept, total)
        client.decrement([kept])
        assert not mark_of(client.info()).older
        assert scheduler._state.objects.refs.kept <= 1 << 12


def test_snapshot_and_log_keep_what_is_forgotten(tmp_path: Path) -> None:
    options = SchedulerOptions(state_dir=tmp_path, lost_after_s=60)
    with Scheduler(options) as scheduler, SchedulerClient(scheduler.address) as client:
        made = make_and_drop(client)
        assert scheduler._log is not None
        scheduler._log._snapshot_bytes_min = 0
        client.increment([made[1]])  # writes a snapshot, which takes the place of the state
        client.decrement([made[1]])
        check_forgotten(scheduler, client, *made)
    with Scheduler(options) as again, SchedulerClient(again.address) as client:
        check_forgotten(again, client, *made)


def test_few_references_are_shown_as_early_ray_shows_them() -> None:
    with Scheduler(SchedulerOptions()) as scheduler, SchedulerClient(scheduler.address) as client:
        client.register_store("127.0.0.1:9")
        worker = client.register_worker("127.0.0.1:8", "127.0.0.1:9")
        first, second = client.push(worker), client.push(worker)
        client.ready(first, 0)
        client.decrement([first])
        info = client.info()
        assert (list(info.reference_count), info.target_objref[second]) == ([DEAD, 1], DEAD)
        assert mark_of(info).first_objref == 0
