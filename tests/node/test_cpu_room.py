"""CPUs are counted by workers; those that were started beside them take no further tasks."""

import threading
import time

import pytest

import fastrt
from fastrt._core.memory.clients import KIND_WORKER, table
from fastrt.store import client as store_client


@fastrt.remote
def wait(seconds):
    began = time.monotonic()
    threading.Event().wait(seconds)
    return began, time.monotonic()


@fastrt.remote
def nested():
    return fastrt.get(wait.remote(0.05))


@fastrt.remote
def chain(length):
    return 1 + fastrt.get(chain.remote(length - 1)) if length else 0


def greatest(spans):
    """How many of these overlap at most."""
    ends = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(sum(step for _, step in ends[: k + 1]) for k in range(len(ends)))


def taking():
    """The workers that may take tasks."""
    rows = table(store_client.require().client.segment)
    return [row for row in rows if row["kind"] == KIND_WORKER and not row["parked"] and not row["blocked"]]


@pytest.mark.parametrize(
    "task", [pytest.param(nested, id="sleep in a get"), pytest.param(wait.options(num_cpus=0), id="take no CPU")]
)
def test_workers_that_were_started_for_tasks_that_leave_their_cpus_to_others_do_not_take_more(task, wait_until):
    """18 tasks ran at once on two CPUs after 40 that had slept in a get, as long as any were queued."""
    arguments = () if task is nested else (0.05,)
    with fastrt.init(2, "32MiB"):
        late = []
        for _ in range(5):  # on a busy machine all have run before the daemon has looked
            fastrt.get([task.remote(*arguments) for _ in range(40)])
            refs = [wait.remote(0.4) for _ in range(60)]
            wait_until(lambda: len(taking()) <= 2, "the other workers to be parked, or to end")
            since = time.monotonic()
            late = [span for span in fastrt.get(refs) if span[0] > since]
            if late:
                break
        assert late
        assert greatest(late) <= 4  # two more for a moment, when those that are too many end


def test_parked_workers_go_on_when_others_sleep():
    with fastrt.init(1, "32MiB"):
        for _ in range(5):
            assert fastrt.get([chain.remote(10), wait.remote(0.01), chain.remote(5)])[::2] == [10, 5]
