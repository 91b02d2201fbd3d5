"""A full store: what does not fit now waits for room, and ends in an error only where nothing can free any."""

import os
import threading

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from fastrt.store import room
from fastrt.store.client import Store

MIB = 1 << 20
STORE = 64 * MIB
PATIENCE_S = 0.4


@pytest.fixture(scope="module")
def rt(runtime_dir):
    """A session with a store of 64 MiB, which waits for a short time where all wait."""
    settings = {
        "spill_fallback": False,
        "store_patience_s": PATIENCE_S,
        "runtime_dir": runtime_dir,
        "spill_dir": runtime_dir.parent / "spill",
    }
    with fastrt.init(3, STORE, **settings) as runtime:
        yield runtime


@pytest.fixture
def full(rt):
    """The session; its store is sound afterwards."""
    yield
    assert fsck.fsck(client()) == []


@pytest.fixture
def gate(tmp_path):
    """A path: of a file that a test makes when a task may go on."""
    return tmp_path / "gate"


def client():
    return store_client.require().client


def array(nbytes, value=1):
    return np.full(nbytes, value, np.uint8)


@fastrt.remote
def make(nbytes, value=1):
    return array(nbytes, value)


@fastrt.remote
def last(value):
    return int(value[-1])


def test_results_that_fit_one_at_a_time_all_arrive(full):
    refs = [make.remote(36 * MIB, i) for i in range(8)]
    for i, ref in enumerate(refs):
        assert fastrt.get(ref)[-1] == i


def test_result_waits_while_the_driver_holds_a_view_and_works(full, gate):
    @fastrt.remote
    def write(path, nbytes):
        open(path, "w").close()
        return array(nbytes, 7)

    view = fastrt.get(make.remote(36 * MIB))
    ref = write.remote(str(gate), 35 * MIB)
    refused = threading.Event()  # this thread does not sleep in the arena: it might drop the view at any moment
    refused.wait(4 * PATIENCE_S)
    assert gate.exists()
    assert fastrt.wait([ref], timeout=0)[0] == []
    del view
    assert fastrt.get(ref)[-1] == 7


def test_put_waits_until_a_worker_drops_its_argument(full, gate):
    @fastrt.remote
    def hold(value, path):
        with open(path) as pipe:  # until the other end is opened
            pipe.read()
        return len(value)

    os.mkfifo(gate)
    opened = threading.Event()

    def open_soon():
        with open(gate, "w"):
            opened.set()

    ref = fastrt.put(array(35 * MIB))
    held = hold.remote(ref, str(gate))
    waiting = threading.Timer(0.3, open_soon)
    waiting.start()
    other = fastrt.put(array(35 * MIB, 2))
    assert opened.is_set()
    assert fastrt.get(other)[-1] == 2
    assert fastrt.get(held) == 35 * MIB
    waiting.join()


def test_spilled_value_comes_back_once_there_is_room(full):
    refs = [fastrt.put(array(35 * MIB, i)) for i in range(3)]
    view = fastrt.get(refs[0])
    assert spill.is_spilled(client(), refs[1])
    total = last.remote(refs[1])
    threading.Event().wait(0.3)
    assert fastrt.wait([total], timeout=0)[0] == []
    del view
    assert fastrt.get(last.remote(refs[1])) == 1


def test_driver_that_holds_everything_gets_an_error_at_once(full, monkeypatch):
    # Another thread that runs in this process, as one of a library, might free memory within two seconds.
    monkeypatch.setattr(store_client.require(), "patience_s", 60.0)
    view = fastrt.get(fastrt.put(array(36 * MIB)))
    with pytest.raises(fastrt.ObjectStoreFullError, match=r"this process itself uses the rest") as info:
        fastrt.put(view)
    assert f"pid {os.getpid()} (36" in str(info.value)
    refs = [fastrt.put(array(5 * MIB))]
    del view, refs


def test_list_that_does_not_fit_together_says_so(full):
    refs = [make.remote(24 * MIB, i) for i in range(3)]
    with pytest.raises(fastrt.ObjectStoreFullError, match=r"24\.0 MiB wanted.*pid "):
        fastrt.get(refs)
    for i, ref in enumerate(refs):
        assert fastrt.get(ref)[-1] == i


def test_result_that_the_waiting_driver_has_no_room_for_ends_in_an_error(full):
    view = fastrt.get(make.remote(36 * MIB))
    with pytest.raises(
        fastrt.ObjectStoreFullError, match=rf"all processes of this node waited.*pid {os.getpid()} \(36"
    ):
        fastrt.get(make.remote(35 * MIB))
    assert view[0] == 1


def test_tasks_that_hold_their_arguments_and_want_more_do_not_wait_for_each_other_for_ever(full):
    @fastrt.remote
    def grow(value, k):
        return int(fastrt.get(fastrt.put(array(20 * MIB, k)))[-1]) + len(value)

    arguments = [fastrt.put(array(16 * MIB)) for _ in range(3)]
    done, failed = [], []
    for ref in [grow.remote(argument, k) for k, argument in enumerate(arguments)]:
        try:
            done.append(fastrt.get(ref, timeout=60))
        except fastrt.ObjectStoreFullError as exc:
            failed.append(str(exc))
    assert done, "one that gave up made room for the others"
    assert all("20.0 MiB wanted" in text for text in failed)


def test_one_of_several_that_wait_for_each_other_fails_at_a_time(full, monkeypatch):
    """Also if both limits are over when they look, as after a pause of the machine."""
    store = store_client.require()
    monkeypatch.setattr(store, "patience_s", 0.0)
    monkeypatch.setattr(room, "_STAGGER_S", 0.0)
    waits = [room.RoomWait(store, 1, serves=True) for _ in range(2)]
    assert [wait.look() for wait in waits] == ["", ""]
    reasons = [wait.look() for wait in waits]
    assert "all processes of this node waited" in reasons[0]
    assert reasons[1] == ""
    failed = spill.outlook(store.client)[3]
    assert spill.fail_first(store.client, failed)
    assert not spill.fail_first(store.client, failed)


def test_cancelled_task_does_not_wait_on(full):
    view = fastrt.get(make.remote(36 * MIB))
    ref = make.remote(35 * MIB)
    threading.Event().wait(0.2)  # until it waits; sooner is right, too
    fastrt.cancel(ref)
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(ref, timeout=60)
    assert view[0] == 1


def test_value_larger_than_the_store_is_an_error_at_once(full):
    with pytest.raises(fastrt.ObjectStoreFullError, match=r"100\.0 MiB wanted.*larger than the whole store"):
        fastrt.get(make.remote(100 * MIB), timeout=60)


def test_message_is_written_from_what_was_free_before_the_last_attempt(full, monkeypatch):
    """Room that comes between the two must not make a message that says that there is enough."""
    store = store_client.require()
    view = [fastrt.get(fastrt.put(array(36 * MIB)))]
    stories = []

    def story(*args):
        stories.append(real(*args))
        return stories[-1]

    def drop_the_view_and_explain(*args):
        view.clear()
        return explain(*args)

    real, explain = room.story, room.explain
    monkeypatch.setattr(room, "story", story)
    monkeypatch.setattr(room, "explain", drop_the_view_and_explain)
    with pytest.raises(fastrt.ObjectStoreFullError, match=r"35\.0 MiB wanted, 2\d\.\d MiB free of 64\.0 MiB"):
        store.put(array(35 * MIB))
    assert stories


def test_long_wait_is_reported_with_its_cause(full, monkeypatch, capsys):
    monkeypatch.setattr(room, "_WARN_S", 0.05)
    monkeypatch.setattr(room, "_has_threads", lambda: True)
    monkeypatch.setattr(room, "_THREADS_S", 0.3)
    view = fastrt.get(fastrt.put(array(36 * MIB)))
    with pytest.raises(fastrt.ObjectStoreFullError):
        fastrt.put(array(35 * MIB))
    err = capsys.readouterr().err
    assert "a value has waited for room for" in err
    assert f"35.0 MiB wanted, 28.0 MiB free of 64.0 MiB; held by pid {os.getpid()}" in err
    assert view[0] == 1


def test_store_without_a_daemon_does_not_wait(full):
    store = Store(client(), 0.0)
    view = store.get(store.put(array(36 * MIB)))
    with pytest.raises(fastrt.ObjectStoreFullError, match=r"35\.0 MiB wanted"):
        store.put(array(35 * MIB))
    assert view[0] == 1


def test_tasks_whose_arguments_do_not_fit_together_take_turns(full):
    @fastrt.remote
    def add(one, other):
        return int(one[-1]) + int(other[-1])

    arguments = [fastrt.put(array(15 * MIB, i)) for i in range(6)]
    sums = [add.remote(arguments[2 * i], arguments[2 * i + 1]) for i in range(3)]
    assert fastrt.get(sums, timeout=60) == [1, 5, 9]
