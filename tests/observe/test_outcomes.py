"""Ended tasks are counted by function and outcome, and failures are kept."""

import collections
import os
import signal

import pytest

import fastrt
import fastrt.ray.util.state as state
from fastrt._core.tasks import failures as core_failures
from fastrt.errors import UnsupportedError
from fastrt.observe import ended, listing, reading
from fastrt.store import client as store_client


@fastrt.remote
def leaf(number):
    return number


@fastrt.remote(max_retries=0)
def fails(text):
    raise ValueError(text)


@fastrt.remote(max_retries=2, retry_exceptions=True)
def fails_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        raise KeyError("the first time")
    return "done"


@fastrt.remote(max_retries=1)
def dies_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@fastrt.remote(max_retries=0)
def dies():
    os.kill(os.getpid(), signal.SIGKILL)


@fastrt.remote
class Adder:
    def add(self, one, two):
        return one + two

    def fail(self):
        raise RuntimeError("of the actor")


@pytest.fixture(scope="module")
def rt():
    with fastrt.init(num_workers=2, object_store_memory=64 << 20) as runtime:
        yield runtime


def outcomes():
    found = {one.name: one for one in ended.outcomes(store_client.require())}
    return collections.defaultdict(lambda: ended.Outcome("none"), found)


def failures(**options):
    return ended.failures(store_client.require(), **options)


def test_scalar_results_are_counted_before_they_can_be_read(rt):
    before = outcomes()["leaf"].succeeded
    for count in (1, 10, 1000):
        fastrt.get([leaf.remote(k) for k in range(count)])
        before += count
        assert outcomes()["leaf"].succeeded == before


def test_calls_are_counted_by_method_also_when_the_actor_is_gone(rt, wait_until):
    actor = Adder.remote()
    assert fastrt.get([actor.add.remote(k, 1) for k in range(20)]) == list(range(1, 21))
    with pytest.raises(RuntimeError, match="of the actor"):
        fastrt.get(actor.fail.remote())
    wait_until(lambda: "Adder.fail" in outcomes(), "the count of the failed call")
    fastrt.kill(actor)
    del actor
    assert outcomes()["Adder.add"].succeeded == 20
    assert outcomes()["Adder.fail"].failed == 1


def test_a_failure_is_kept_with_its_traceback(rt, wait_until):
    last = max((one.number for one in failures(limit=0)), default=0)
    ref = fails.remote("broken")
    with pytest.raises(ValueError, match="broken"):
        fastrt.get(ref)
    (found,) = failures(after=last)
    assert found.result == ref.hex()
    assert (found.name, found.type, found.message, found.attempt) == ("fails", "ValueError", "broken", 1)
    assert "raise ValueError(text)" in found.traceback
    assert not found.retried
    assert not found.mended
    assert (found.signal, found.node) == (0, "")
    wait_until(lambda: outcomes()["fails"].failed == 1, "the count")


@pytest.mark.parametrize(
    ("function", "kind", "number"), [(fails_once, "KeyError", 0), (dies_once, "WorkerCrashedError", signal.SIGKILL)]
)
def test_a_retry_mends_a_failure(rt, tmp_path, function, kind, number):
    last = max((one.number for one in failures(limit=0)), default=0)
    assert fastrt.get(function.remote(str(tmp_path / "there"))) == "done"
    (found,) = failures(after=last)
    assert (found.type, found.attempt, found.signal) == (kind, 1, number)
    assert found.retried
    assert found.mended
    counted = outcomes()[found.name]
    assert (counted.succeeded, counted.retried, counted.failed, counted.crashed) == (1, 1, 0, 0)


def test_a_crash_is_kept_and_counted(rt, wait_until):
    with pytest.raises(fastrt.WorkerCrashedError):
        fastrt.get(dies.remote())
    found = failures()[-1]
    assert (found.name, found.type, found.signal) == ("dies", "WorkerCrashedError", signal.SIGKILL)
    assert not found.retried
    assert f"process {found.pid} was killed by signal 9" in found.message
    wait_until(lambda: outcomes()["dies"].crashed == 1, "the count")


def test_lists_show_failed_tasks_newest_first(rt, wait_until):
    for text in ("one", "two"):
        with pytest.raises(ValueError, match=text):
            fastrt.get(fails.remote(text))
    rows = fastrt.list_tasks(state="failed", name="fails", limit=2)
    assert [row["message"] for row in rows] == ["two", "one"]
    assert tuple(rows[0]) == listing.COLUMNS["failures"]
    first = reading.page(store_client.require(), "tasks", {"state": "failed"}, limit=1)
    second = reading.page(store_client.require(), "tasks", {"state": "failed"}, after=first.next, limit=1)
    assert [row["message"] for row in first.rows + second.rows] == ["two", "one"]
    assert first.total >= 2
    with pytest.raises(ValueError, match="there is no column 'waits_for'"):
        fastrt.list_tasks(state="failed", waits_for="x")
    ended = state.list_tasks(filters=[("state", "=", "FAILED"), ("name", "=", "fails")])
    assert state.list_tasks(filters=[("STATE", "=", "failed"), ("Name", "=", "fails")]) == ended
    with pytest.raises(UnsupportedError, match="FINISHED"):
        state.list_tasks(filters=[("State", "=", "FINISHED")])
    assert {one.error_type for one in ended} == {"TASK_EXECUTION_EXCEPTION"}
    assert (ended[0].error_message, ended[0].state) == ("ValueError: two", "FAILED")
    first, _ = refs = fails.options(num_returns=2).remote("three")
    with pytest.raises(ValueError, match="three"):
        fastrt.get(refs)
    assert fails.options(num_returns=0).remote("four") is None
    wait_until(lambda: failures()[-1].message == "four", "the failure of the task without results")
    assert [one.result for one in failures(limit=2)] == [first.hex(), ""]
    found = state.get_task(first)
    assert (found.task_id, found.error_message) == (first.task_id(), "ValueError: three")
    assert state.get_task(failures()[-1].task_id).error_message == "ValueError: four"


def test_the_ring_keeps_the_last_failures_and_cuts_long_texts(rt):
    most = core_failures.MOST
    for k in range(most + 10):
        with pytest.raises(ValueError):
            fastrt.get(fails.remote(f"{k} " + "\u00e4" * 3000 if k % 100 == 0 else str(k)))
    found = failures(limit=0)
    assert len(found) == most
    assert [one.number for one in found] == list(range(found[0].number, found[0].number + most))
    assert found[-1].message == str(most + 9)
    cut = next(one for one in found if one.message.startswith("1000 "))
    assert cut.message.endswith("...")
    assert len(cut.message.encode()) <= 1024
    assert cut.traceback.startswith("[...]")
    page = failures(after=found[-6].number, limit=3)
    assert [one.number for one in page] == [one.number for one in found[-5:-2]]
