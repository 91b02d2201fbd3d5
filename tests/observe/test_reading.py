"""Counts and pages of the tables: filters first, the limit first, a cursor to go on."""

import os

import pytest

import fastrt
from fastrt._core.repair import inspect
from fastrt.observe import listing, reading
from fastrt.store import client as store_client


@fastrt.remote
def leaf(number):
    return number


@fastrt.remote
def held_up(path):
    with open(path) as pipe:  # of a fifo: until the test writes to it
        pipe.read(1)


@fastrt.remote
class Adder:
    def add(self, one, two):
        return one + two


@pytest.fixture(scope="module")
def rt():
    with fastrt.init(num_workers=2, object_store_memory=64 << 20) as runtime:
        yield runtime


@pytest.fixture
def held(rt, tmp_path, wait_until):
    """A task that runs until the test is over."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    kept = [held_up.remote(str(path))]
    wait_until(lambda: read("tasks", {"state": "running"}).total == 1, "the task to run")
    yield kept
    with open(path, "w") as pipe:
        pipe.write("x")
    fastrt.get(kept.pop())


def read(kind, filters=None, **options):
    return reading.page(store_client.require(), kind, filters, **options)


def test_counts_tell_functions_and_states_apart(held, wait_until):
    actor = Adder.remote()
    fastrt.get(actor.add.remote(1, 2))
    wait_until(lambda: read("tasks").total == 1, "the end of the first call")
    waiting = [leaf.remote(*held) for _ in range(30)]
    call = actor.add.remote(*held, 1)
    found = reading.counts(store_client.require())
    assert {one.name: one.states for one in found.tasks} == {
        "leaf": {"waiting": 30}, "held_up": {"running": 1}, "Adder.add": {"ready": 1},
    }  # fmt: skip
    assert found.task_states == {"waiting": 30, "running": 1, "ready": 1}
    assert found.actors == {"alive": 1}
    objects = listing.objects(store_client.require())
    assert sum(one.count for one in found.objects) == len(objects)
    assert sum(one.bytes for one in found.objects) == sum(row["bytes"] for row in objects if row["state"] != "pending")
    assert sum(one.count for one in found.objects if (one.state, one.what) == ("pending", "result")) == 32
    del waiting, call


def test_pages_continue_where_the_last_one_ended(held):
    waiting = [leaf.remote(*held) for _ in range(30)]
    rows, after = [], None
    while True:
        page = read("tasks", {"name": "leaf"}, after=after, limit=7)
        assert page.total == 30
        rows += page.rows
        if (after := page.next) is None:
            break
    assert [row["results"] for row in rows] == [[ref.hex()] for ref in waiting]
    everything = read("tasks", limit=0)
    assert (len(everything.rows), everything.next, everything.total) == (31, None, 31)
    one = read("objects", {"state": "pending"}, limit=1)
    assert (len(one.rows), one.total) == (1, 31)
    del waiting, one


def test_threads_share_a_long_table_and_count_what_stays_exactly(held, tmp_path, wait_until):
    """A table this long has several pieces; records beside those that stay begin and end during the passes."""
    store, many = store_client.require(), 70_000
    second = held_up.remote(str(tmp_path / "fifo"))
    wait_until(lambda: read("tasks", {"state": "running"}).total == 2, "no worker to be free")
    queued = [leaf.remote(k) for k in range(many)]
    for k in range(20):
        fastrt.cancel(leaf.options(name="other").remote(k))
        passing = [fastrt.put([k]) for _ in range(100)]
        found = reading.counts(store)
        assert next(one for one in found.tasks if one.name == "leaf").states == {"ready": many}
        assert sum(one.count for one in found.objects if (one.state, one.what) == ("pending", "result")) >= many + 2
        page = read("tasks", {"state": "ready", "name": "leaf"}, limit=100)
        assert page.total == many
        assert [row["results"] for row in page.rows] == [[ref.hex()] for ref in queued[:100]]
        del passing
    page = read("objects", {"state": "pending"}, limit=100)
    assert page.total == many + 2
    assert [row["object_id"] for row in page.rows] == [ref.hex() for ref in [*held, second, *queued[:98]]]


@pytest.mark.parametrize("column", listing.COLUMNS["tasks"])
def test_a_filter_of_tasks_selects_the_same_rows_in_the_core_as_over_all_rows(held, column, wait_until):
    check_filter(wait_until, "tasks", column, [leaf.options(max_retries=k % 3).remote(*held) for k in range(9)])


@pytest.mark.parametrize("column", listing.COLUMNS["objects"])
def test_a_filter_of_objects_selects_the_same_rows_in_the_core_as_over_all_rows(held, column, wait_until):
    check_filter(wait_until, "objects", column, [fastrt.put(value) for value in (1, "a", None, b"x" * 500, [1], 2.5)])


def check_filter(wait_until, kind, column, kept):
    rows = listing.LISTS[kind](store_client.require())
    values = {str(row[column]) for row in rows if not isinstance(row[column], list)}
    values |= {str(one) for row in rows if isinstance(row[column], list) for one in row[column]}
    for wanted in [*sorted(values), "*a*", "?", ""]:

        def same(wanted=wanted):  # a worker may take or drop a reference between the two readings
            every = listing.LISTS[kind](store_client.require())
            expected = [row for row in every if reading.fits(row[column], wanted)]
            pages = [read(kind, {column: wanted}, limit=limit).rows for limit in (0, 2)]
            return pages == [expected, expected[:2]]

        wait_until(same, f"the rows of {wanted!r}")
    del kept


def test_unknown_tables_columns_and_limits_are_refused(rt):
    with pytest.raises(ValueError, match="there is no table 'jobs'"):
        read("jobs")
    with pytest.raises(ValueError, match="there is no column 'colour'"):
        read("tasks", {"colour": "red"})
    with pytest.raises(ValueError, match="limit=-1"):
        read("tasks", limit=-1)


def test_one_task_shows_its_arguments_and_what_it_waits_for(held):
    value = fastrt.put(b"x" * 10_000)
    first = leaf.remote(*held)
    last = leaf.remote([first, value])  # nested: not waited for
    chained = leaf.remote(first)
    (row,) = read("tasks", {"results": chained.hex()}).rows
    found = reading.task(store_client.require(), row["task_id"])
    assert found is not None
    assert [one.object_id for one in found.arguments] == [first.hex()]
    assert [one["name"] for one in found.chain] == ["leaf", "held_up"]
    assert found.chain[0]["results"] == [first.hex()]
    running = reading.task(store_client.require(), found.chain[1]["task_id"])
    assert running.worker["pid"] == running.row["pid"]
    assert running.worker["running"] == "held_up"
    assert reading.task(store_client.require(), "0") is None
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        reading.task(store_client.require(), "no id")
    assert inspect.task(store_client.require().client, 1 << 31) is None
    del last, value
