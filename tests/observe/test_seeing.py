"""What a running session shows: rows of its tables, who holds its memory by which line, and its timeline."""

import asyncio
import json
import os
import pickle
from collections import Counter

import numpy as np
import pytest

import fastrt
from fastrt.observe import listing, memory, reading
from fastrt.store import client as store_client
from support import traces


@fastrt.remote
def leaf(number):
    return number


@fastrt.remote
def outer(count):
    return sum(fastrt.get([leaf.remote(k) for k in range(count)]))


@fastrt.remote
def held_up(path):
    with open(path) as pipe:  # of a fifo: until the test writes to it
        pipe.read(1)


@fastrt.remote
class Napper:
    def __init__(self):
        self.there = 0
        self.all_there = asyncio.Event()

    async def nap(self, start):
        """Until all five are there."""
        self.there += 1
        if self.there == 5:
            self.all_there.set()
        await self.all_there.wait()
        return start


@fastrt.remote
class Adder:
    def add(self, one, two):
        return one + two


@pytest.fixture(scope="module")
def rt():
    with fastrt.init(num_workers=2, object_store_memory=64 << 20, trace=True, record_call_sites=True) as runtime:
        yield runtime


@pytest.fixture
def fifo(tmp_path):
    """A pipe that holds up who reads it, and what lets it go on."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    opened = []

    def release():
        if not opened:
            opened.append(os.open(path, os.O_RDWR))  # kept, or what is written would go with it
            os.write(opened[0], b"x")

    yield path, release
    release()
    os.close(opened[0])


@pytest.mark.parametrize("what", ["tasks", "actors", "objects", "workers"])
def test_list_refuses_a_filter_that_is_no_column_also_where_there_are_no_rows(rt, what):
    find = getattr(fastrt, f"list_{what}")
    for wrong in ({"filters": [("state", "=", "RUNNING")]}, {"colour": "red"}):
        with pytest.raises(ValueError, match=f"there is no column '{next(iter(wrong))}'"):
            find(**wrong)
    kept = Adder.remote()
    for row in find():
        assert tuple(row) == listing.COLUMNS[what]
    del kept


def test_lists_show_what_runs_what_waits_and_who(rt, fifo, wait_until):
    path, release = fifo
    running = held_up.options(name="the slow one").remote(str(path))
    waiting = leaf.remote(running)
    actor = Adder.options(name="bob").remote()
    assert fastrt.get(actor.add.remote(1, 2)) == 3
    call = actor.add.remote(running, 1)
    wait_until(lambda: fastrt.list_tasks(name="the slow one", state="running"), "the task to run")
    rows = {row["name"]: row for row in fastrt.list_tasks()}
    slow = rows["the slow one"]
    assert slow["results"] == [running.hex()]
    assert slow["attempt"] == 1
    assert rows["leaf"]["state"] == "waiting"
    assert rows["leaf"]["waits_for"] == running.hex()
    assert rows["Adder.add"]["waits_for"] == running.hex()
    (worker,) = fastrt.list_workers(running="the slow one")
    assert (worker["pid"], worker["kind"], worker["state"]) == (slow["pid"], "worker", "running")
    assert worker["rss"] > 1 << 20
    wait_until(lambda: fastrt.list_actors(name="bob", calls=1), "the end of the first call")
    (about,) = fastrt.list_actors(name="bob")
    assert (about["class"], about["state"], about["reason"]) == ("Adder", "alive", "")
    assert Counter(row["kind"] for row in fastrt.list_workers())["driver"] == 1
    (result,) = fastrt.list_objects(object_id=waiting.hex())
    assert (result["state"], result["what"], result["refs"]) == ("pending", "result", [os.getpid()])
    some, every = fastrt.list_objects(limit=2), fastrt.list_objects()
    assert (len(some), some.total, some.note) == (2, len(every), f"showing 2 of {len(every)}")
    assert (every.total, every.note) == (len(every), "")
    assert pickle.loads(pickle.dumps(some)).total == some.total
    assert fastrt.list_objects(limit=2, object_id=waiting.hex()).note == ""
    with pytest.raises(ValueError, match="there is no column 'colour'"):
        fastrt.list_tasks(colour="red")
    release()
    fastrt.wait([waiting, call], num_returns=2)
    del running, waiting, call, result


def test_filters_take_wildcards_numbers_and_members_of_lists():
    rows = [{"name": "one", "pid": 3, "refs": [7, 8]}, {"name": "two", "pid": None, "refs": []}]

    def select(rows, filters):
        return [row for row in rows if all(reading.fits(row[name], wanted) for name, wanted in filters.items())]

    assert select(rows, {"name": "o*"}) == rows[:1]
    assert select(rows, {"pid": "3"}) == select(rows, {"pid": 3}) == rows[:1]
    assert select(rows, {"refs": 8}) == rows[:1]
    assert select(rows, {"pid": ""}) == rows[1:]


def test_memory_names_the_line_its_holder_and_what_a_view_keeps(rt, wait_until):
    store = store_client.require()
    before = memory.summary(store)
    many = [fastrt.put(k) for k in range(1200)]
    array = fastrt.put(np.ones(50_000))
    view = fastrt.get(array)
    inside = fastrt.put([array])
    found = memory.summary(store)
    found.compare(before)
    groups = {group.site.rsplit("/", 1)[-1]: group for group in found.groups if "test_seeing" in group.site}
    loop = next(group for group in groups.values() if group.count == 1200)
    assert loop.grown == 1200
    assert "more than at the first look" in loop.suspect
    assert f"process {os.getpid()} alone" in next(
        group.suspect for group in memory.summary(store).groups if group.site == loop.site
    )
    first = test_memory_names_the_line_its_holder_and_what_a_view_keeps.__code__.co_firstlineno
    large = next(group for group in groups.values() if group.bytes >= 400_000)
    assert large.site.startswith(f"{__file__}:{first + 4} in ")
    assert (large.count, large.pinned, large.suspect) == (1, 1, "")
    (row,) = [row for row in listing.objects(store) if row["object_id"] == array.hex()]
    assert (row["type"], row["counted"], row["pins"]) == ("array", 1, [os.getpid()])
    (mine,) = [row for row in found.processes if row["pid"] == os.getpid()]
    assert mine["pinned"] >= 400_000
    assert found.totals["pinned_objects"] >= 1
    assert found.totals["inline_objects"] >= 1200
    assert json.loads(json.dumps(found.to_json()))["totals"] == found.totals
    seen = []

    def nothing_has_changed():  # the daemon drops unused functions of earlier tests once a second
        seen[:] = listing.objects(store), memory.summary(store)
        return [row["object_id"] for row in seen[0]] == [row["object_id"] for row in listing.objects(store)]

    wait_until(nothing_has_changed, "two lists with the same objects")
    objects, again = seen
    assert sum(group.count for group in again.groups) == len(objects)
    assert sum(group.bytes for group in again.groups) == sum(row["bytes"] for row in objects)
    assert sum(group.stored for group in again.groups) == sum(row["stored"] for row in objects)
    sent = memory.Summary.from_rows(json.loads(json.dumps(again.to_rows())))
    assert (sent.totals, sent.groups[0].site, sent.more) == (again.totals, again.groups[0].site, 0)
    del many, view, inside


def test_line_of_a_task_inside_a_task_is_written_down_by_its_worker(rt, fifo, wait_until):
    path, release = fifo

    @fastrt.remote
    def parent(name):
        return [held_up.remote(name)]

    (child,) = fastrt.get(parent.remote(str(path)))
    (row,) = fastrt.list_objects(object_id=child.hex())
    assert row["site"].startswith(__file__)
    assert row["site"].endswith(" in parent")
    fastrt.cancel(child)
    release()
    wait_until(lambda: fastrt.wait([child], timeout=0)[0], "the end of the child")


@fastrt.remote(num_cpus=0.1)
def items(*numbers):
    yield from numbers


def test_line_is_written_down_whatever_options_a_call_has(rt):
    adder = Adder.options(num_cpus=0.1, max_restarts=1).remote()
    made = [
        adder.add.remote(1, 2),
        adder.add.options(timeout=30).remote(1, 2),
        adder.add.options(num_returns=2, retry_exceptions=True).remote((1,), (2,))[1],
        adder.__ray_ready__.remote(),
        leaf.options(num_cpus=0.1, priority=3, timeout=30).remote(1),
        items.remote(1, 2).completed(),
        items.options(num_returns=2).remote(1, 2)[0],
    ]
    assert len(fastrt.wait(made, num_returns=len(made), timeout=30)[0]) == len(made)
    first = test_line_is_written_down_whatever_options_a_call_has.__code__.co_firstlineno + 3
    sites = [row["site"] for ref in made for row in fastrt.list_objects(object_id=ref.hex())]
    assert [site.split(" in ")[0] for site in sites] == [f"{__file__}:{first + k}" for k in range(len(made))]
    del made, adder


def test_line_is_written_down_in_a_forked_child_too(rt):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ref = leaf.remote(1)
            os.write(write, fastrt.list_objects(object_id=ref.hex())[0]["site"].encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        assert file.read().endswith("in test_line_is_written_down_in_a_forked_child_too")
    os.waitpid(pid, 0)


def test_timeline_shows_tasks_calls_waits_and_values_in_chromes_format(rt, tmp_path, fifo, wait_until):
    path, release = fifo
    running = held_up.options(name="still on").remote(str(path))
    napper, adder = Napper.remote(), Adder.remote()
    naps = [napper.nap.remote(k) for k in range(5)]
    assert fastrt.get(outer.remote(3)) == 3
    assert fastrt.get(adder.add.remote(1, 2)) == 3
    assert fastrt.get(naps) == list(range(5))
    del adder, napper  # their names are in the timeline, all the same
    assert fastrt.get(fastrt.put(np.zeros(100_000))).sum() == 0
    wait_until(lambda: fastrt.list_tasks(name="still on", state="running"), "the task to run")
    events = fastrt.timeline(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"] == events
    traces.check(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    counts = Counter(event["name"] for event in slices)
    assert counts["outer"] == 1
    assert counts["leaf"] >= 3
    assert counts["Napper.nap"] == 5
    assert counts["put"] >= 1
    assert any(event["name"] == "get" and event["args"]["KiB"] >= 781 for event in events)
    (parent,) = (event for event in slices if event["name"] == "outer")
    assert names[parent["pid"]].startswith("worker")
    submits = {event["args"]["task_id"]: event["pid"] for event in slices if event["name"] == "submit"}
    assert names[submits[parent["args"]["task_id"]]].startswith("driver")
    waits = [event for event in slices if event["name"] == "wait"]
    assert any(event["pid"] == os.getpid() for event in waits)
    lanes = {event["tid"] for event in slices if event["name"] == "Napper.nap"}
    assert len(lanes) > 1  # they overlapped
    (open_one,) = (event for event in slices if event["name"] == "still on")
    assert open_one["args"]["unfinished"] == "still running"
    assert {event["id"] for event in events if event["ph"] == "s"} >= {
        event["args"]["task_id"].lstrip("0") for event in slices if event["name"] == "outer"
    }
    fastrt.cancel(running)
    release()
    wait_until(lambda: fastrt.wait([running], timeout=0)[0], "the end of the task")
