"""put, get and wait of a running session: what they return, how they wait, what they refuse, and whose memory it is."""

import gc
import os
import signal
import threading
import tracemalloc

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import handles, spill
from fastrt._core.repair import fsck
from fastrt.errors import GetTimeoutError, ObjectStoreFullError, StaleReferenceError, TaskCancelledError, TaskError
from fastrt.store import client as store_client

MIB = 1 << 20


@fastrt.remote
def echo(x=None):
    return x


@fastrt.remote
def when(path, value=None):
    """Return `value` once a file exists."""
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.002)
    return value


@fastrt.remote
def fail(text="no"):
    raise ValueError(text)


@pytest.fixture
def gate(tmp_path):
    """A path: tasks `when(gate)` end once it is touched, which happens at the latest at the end of the test."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def bytes_used():
    return fsck.usage(store_client.require().client)["bytes_used"]


# ---- get ----


def test_get_list_keeps_order_and_duplicates(rt):
    refs = [fastrt.put(i) for i in range(100)]
    assert fastrt.get(refs) == list(range(100))
    assert fastrt.get((refs[3], refs[1], refs[3])) == [3, 1, 3]
    assert fastrt.get([]) == []


def test_get_mixed_kinds_in_one_list(rt):
    array = np.arange(100_000)
    values = fastrt.get([fastrt.put(1), fastrt.put(array), echo.remote("x"), fastrt.put([None])])
    assert values[0] == 1
    assert values[1].sum() == array.sum()
    assert values[2:] == ["x", [None]]


def test_get_with_timeout_of_what_comes_later_raises_and_says_how_many(rt, gate):
    refs = [fastrt.put(1), when.remote(str(gate))]
    for timeout in (0, 0.05):
        with pytest.raises(GetTimeoutError, match=f"1 of 2 objects were not ready after {timeout} s") as info:
            fastrt.get(refs, timeout=timeout)
        assert isinstance(info.value, TimeoutError)
    with pytest.raises(GetTimeoutError):
        fastrt.get(refs[1], timeout=0.01)
    gate.touch()
    assert fastrt.get(refs, timeout=60) == [1, None]


def test_get_with_timeout_zero_of_what_is_there_returns_it(rt):
    assert fastrt.get(fastrt.put(3), timeout=0) == 3
    ref = echo.remote(4)
    fastrt.wait([ref])
    assert fastrt.get([ref, ref], timeout=0) == [4, 4]


@pytest.mark.parametrize("timeout", [1e300, float("inf"), 10**30, 1 << 70])
def test_get_with_absurdly_long_timeout_waits(rt, timeout):
    assert fastrt.get(echo.remote(1), timeout=timeout) == 1
    assert fastrt.wait([echo.remote(1)], timeout=timeout)[1] == []


def test_get_list_with_an_error_behind_what_is_not_ready_raises_it_early(rt, gate):
    for refs in ([when.remote(str(gate)), fail.remote()], [fail.remote(), when.remote(str(gate))]):
        with pytest.raises(ValueError, match="no"):
            fastrt.get(refs, timeout=60)
    gate.touch()


def test_get_error_twice_raises_it_twice(rt):
    ref = fail.remote("again")
    for _ in range(2):
        with pytest.raises(TaskError, match="again"):
            fastrt.get(ref)
    assert fastrt.wait([ref]) == ([ref], [])


def test_get_in_many_threads_gives_each_its_value(rt, gate):
    refs = [when.remote(str(gate), i) for i in range(4)]
    got = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: fastrt.get(refs[i % 4])})) for i in range(16)]
    for thread in threads:
        thread.start()
    gate.touch()
    for thread in threads:
        thread.join(60)
    assert got == {i: i % 4 for i in range(16)}


# ---- wait ----


def test_wait_returns_the_ready_ones_in_order_of_the_list(rt, gate):
    slow, quick, done = when.remote(str(gate)), echo.remote(1), fastrt.put(2)
    assert fastrt.wait([slow, quick, done], num_returns=2, timeout=60) == ([quick, done], [slow])
    assert fastrt.wait([slow, done, quick], num_returns=1) == ([done], [slow, quick])
    assert fastrt.wait((slow, slow), timeout=0) == ([], [slow, slow])
    assert fastrt.wait([slow], timeout=0.02) == ([], [slow])
    gate.touch()
    assert fastrt.wait([slow, quick, done], num_returns=3) == ([slow, quick, done], [])


def test_wait_counts_a_duplicate_twice_and_an_error_as_ready(rt):
    ref, error = fastrt.put(1), fail.remote()
    assert fastrt.wait([ref, ref], num_returns=2) == ([ref, ref], [])
    assert fastrt.wait([error], timeout=60) == ([error], [])


def test_wait_for_nothing_returns_nothing(rt):
    assert fastrt.wait([]) == fastrt.wait((), num_returns=3, timeout=0) == ([], [])


def test_wait_one_by_one_ends_with_all(rt):
    rest, seen = [echo.remote(i) for i in range(300)], []
    while rest:
        (one,), rest = fastrt.wait(rest, timeout=60)
        seen.append(fastrt.get(one))
    assert sorted(seen) == list(range(300))


def test_wait_for_some_of_many_wakes_at_the_last_needed(rt, gate):
    blocked = [when.remote(str(gate)) for _ in range(1)]
    refs = blocked + [echo.remote(i) for i in range(50)]
    ready, others = fastrt.wait(refs, num_returns=50, timeout=60)
    assert (len(ready), others) == (50, blocked)
    gate.touch()


def test_signal_handler_that_raises_ends_every_wait(rt, gate):
    class Stop(Exception):
        pass

    def stop(signum, frame):
        raise Stop

    ref = when.remote(str(gate))
    old = signal.signal(signal.SIGUSR1, stop)
    try:
        for call in (lambda: fastrt.get(ref), lambda: fastrt.get([ref, ref]), lambda: fastrt.wait([ref])):
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(Stop):
                call()
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, old)
    gate.touch()


def test_signal_handler_that_returns_does_not_end_a_wait(rt, gate):
    seen = []
    old = signal.signal(signal.SIGALRM, lambda signum, frame: (seen.append(1), len(seen) == 20 and gate.touch()))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        assert fastrt.get(when.remote(str(gate), "x"), timeout=60) == "x"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(seen) >= 20


# ---- the zero-copy rule ----


def test_view_outlives_its_reference_and_memory_comes_back_when_the_view_dies(rt):
    before = bytes_used()
    ref = fastrt.put(np.arange(MIB, dtype=np.int64))
    view = fastrt.get(ref)
    part = view[1000:2000]
    del ref, view
    gc.collect()
    assert bytes_used() >= before + 8 * MIB
    others = [fastrt.put(np.full(MIB, 7)) for _ in range(8)]
    assert part.tolist() == list(range(1000, 2000))
    del others, part
    gc.collect()
    assert bytes_used() == before


def test_view_of_a_result_outlives_everything_else(rt):
    view = fastrt.get(echo.remote(np.arange(100_000)))
    assert view.sum() == sum(range(100_000))
    assert view.base is not None


def test_arrays_from_get_are_read_only_and_cannot_be_made_writable(rt):
    got = fastrt.get(fastrt.put(np.arange(10_000)))
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        got.flags.writeable = True
    with pytest.raises((ValueError, TypeError)):
        memoryview(got).cast("B")[0] = 1
    small = fastrt.get(fastrt.put(np.arange(3)))
    with pytest.raises(ValueError, match="read-only"):
        small[0] = 1


def test_putting_an_array_and_changing_it_afterwards_does_not_change_the_object(rt):
    array = np.zeros(10_000)
    ref, task = fastrt.put(array), echo.remote(array)
    array[:] = 1
    assert fastrt.get(ref).sum() == 0
    assert fastrt.get(task).sum() == 0


def test_cost_of_get_does_not_depend_on_size(rt):
    peaks = []
    for count in (64 << 10, 100 * MIB):
        ref = fastrt.put(np.ones(count, np.uint8))
        fastrt.get(ref)
        tracemalloc.start()
        got = fastrt.get(ref)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert handles.describe(ref.owner, ref)["pins"] == [ref.owner.index]
        del got
    assert peaks[1] <= peaks[0] + 1024 < 16 << 10


# ---- a full store ----


@pytest.fixture
def no_files(rt):
    """The session without fallback memory."""
    client = store_client.require().client
    spill.configure(client, spill.directory(client), False)
    yield
    spill.configure(client, spill.directory(client), True)


def test_object_larger_than_the_store_is_refused_at_once_with_figures(rt, no_files):
    for value in (np.empty(300 * MIB, np.uint8), bytes(300 * MIB), [np.empty(300 * MIB, np.uint8)]):
        with pytest.raises(
            ObjectStoreFullError, match=r"300\.0 MiB wanted, .* free of 256\.0 MiB .*larger than"
        ) as info:
            fastrt.put(value)
        assert isinstance(info.value, MemoryError)
    with pytest.raises(ObjectStoreFullError, match=r"300\.0 MiB wanted"):
        echo.remote(np.empty(300 * MIB, np.uint8))
    with pytest.raises(ObjectStoreFullError, match=r"300\.0 MiB wanted"):
        echo.remote("x" * 300 * MIB)


def test_full_store_says_who_holds_what_and_memory_comes_back(rt, no_files):
    before = bytes_used()
    array = np.ones(20 * MIB, np.uint8)
    held = [fastrt.get(fastrt.put(array)) for _ in range(12)]  # views: what nobody uses would be spilled
    with pytest.raises(ObjectStoreFullError) as info:
        fastrt.put(array)
    text = str(info.value)
    for part in ("20.0 MiB wanted", "free of 256.0 MiB", f"pid {os.getpid()} (240.", "raise object_store_memory"):
        assert part in text
    with pytest.raises(ObjectStoreFullError, match=r"20\.0 MiB wanted"):
        echo.remote(array)
    assert fastrt.get(echo.remote(5)) == 5
    del held, info
    gc.collect()
    assert bytes_used() <= before
    assert fastrt.get(fastrt.put(array)).nbytes == 20 * MIB


def test_full_store_holds_results_and_errors_of_tasks_apart(rt, no_files):
    @fastrt.remote(max_retries=0)
    def big():
        return np.ones(60 * MIB, np.uint8)

    @fastrt.remote(max_retries=0)
    def crash():
        os._exit(3)

    with pytest.raises(fastrt.WorkerCrashedError):
        fastrt.get(crash.remote())
    assert fastrt.get(big.remote()).nbytes == 60 * MIB
    held = fill()
    with pytest.raises(ObjectStoreFullError):
        fastrt.get(big.remote(), timeout=60)
    for function in (fail, crash):
        with pytest.raises(ObjectStoreFullError, match="no room for an error"):
            fastrt.get(function.remote(), timeout=60)
    ref = echo.remote(7)
    assert fastrt.get(ref, timeout=60) == 7
    del held
    gc.collect()
    assert fastrt.get(big.remote()).nbytes == 60 * MIB
    with pytest.raises(ValueError, match="no"):
        fastrt.get(fail.remote())


def fill():
    """Take every byte of the store by values that contain references: those are never spilled."""
    ref = fastrt.put(0)
    held = [fastrt.put(0) for _ in range(100)]
    fastrt.get([echo.remote(i) for i in range(100)])
    with pytest.raises(ValueError, match="no"):
        fastrt.get(fail.remote())
    for size in (16 * MIB, MIB, 16 << 10, 8 << 10, 4 << 10, 2 << 10, 1 << 10, 512, 256):
        try:
            while True:
                held.append(fastrt.put([ref, b"x" * (size - 100)]))
        except ObjectStoreFullError:
            continue
    return held


def test_cancelled_and_failed_dependencies_reach_whoever_waits(rt, gate):
    slow = [when.remote(str(gate)) for _ in range(4)]
    dependent = echo.remote(slow[3])
    fastrt.cancel(slow[3])
    gate.touch()
    with pytest.raises(TaskCancelledError):
        fastrt.get(dependent, timeout=60)
    with pytest.raises(ValueError, match="inner"):
        fastrt.get(echo.remote(fail.remote("inner")), timeout=60)


# ---- wrong types ----

WRONG = {
    "get int": (lambda: fastrt.get(5), TypeError, "not int"),
    "get None": (lambda: fastrt.get(None), TypeError, "not NoneType"),
    "get str": (lambda: fastrt.get("abc"), TypeError, "not str"),
    "get dict": (lambda: fastrt.get({}), TypeError, "not dict"),
    "get generator": (lambda: fastrt.get(x for x in []), TypeError, "not generator"),
    "get list with int": (lambda: fastrt.get([fastrt.put(1), 5]), TypeError, "has a int"),
    "get nested list": (lambda: fastrt.get([[fastrt.put(1)]]), TypeError, "has a list"),
    "get timeout negative": (lambda: fastrt.get(fastrt.put(1), timeout=-1), ValueError, "timeout is -1"),
    "get timeout nan": (lambda: fastrt.get(fastrt.put(1), timeout=float("nan")), ValueError, "timeout is nan"),
    "get timeout text": (lambda: fastrt.get(fastrt.put(1), timeout="1"), ValueError, "timeout is '1'"),
    "get timeout bool": (lambda: fastrt.get(fastrt.put(1), timeout=True), ValueError, "timeout is True"),
    "get timeout positional": (lambda: fastrt.get(fastrt.put(1), 1), TypeError, "positional"),
    "wait ref": (lambda: fastrt.wait(fastrt.put(1)), TypeError, "not ObjectRef"),
    "wait None": (lambda: fastrt.wait(None), TypeError, "not NoneType"),
    "wait set": (lambda: fastrt.wait({fastrt.put(1)}), TypeError, "not set"),
    "wait list of int": (lambda: fastrt.wait([5]), TypeError, "has a int"),
    "wait int behind": (lambda: fastrt.wait([fastrt.put(1), 5]), TypeError, "has a int"),
    "wait None behind": (lambda: fastrt.wait([fastrt.put(1), None]), TypeError, "has a NoneType"),
    "wait timeout empty": (lambda: fastrt.wait([], timeout=-0.1), ValueError, "timeout is -0.1"),
    "wait none": (lambda: fastrt.wait([fastrt.put(1)], num_returns=0), ValueError, "num_returns is 0"),
    "wait more": (lambda: fastrt.wait([fastrt.put(1)], num_returns=2), ValueError, "num_returns is 2"),
    "wait negative": (lambda: fastrt.wait([fastrt.put(1)], num_returns=-1), ValueError, "num_returns is -1"),
    "wait huge": (lambda: fastrt.wait([fastrt.put(1)], num_returns=1 << 80), ValueError, "num_returns is 1208"),
    "wait float": (lambda: fastrt.wait([fastrt.put(1)], num_returns=1.0), ValueError, "num_returns is 1.0"),
    "wait bool": (lambda: fastrt.wait([fastrt.put(1)], num_returns=True), ValueError, "num_returns is True"),
    "wait timeout": (lambda: fastrt.wait([fastrt.put(1)], timeout=-0.1), ValueError, "timeout is -0.1"),
    "put ref": (lambda: fastrt.put(fastrt.put(1)), TypeError, "ObjectRef already"),
    "put nothing": (lambda: fastrt.put(), TypeError, "missing"),
    "cancel int": (lambda: fastrt.cancel(5), TypeError, "not int"),
    "cancel list": (lambda: fastrt.cancel([fastrt.put(1)]), TypeError, "not list"),
    "get empty reference": (lambda: fastrt.get(fastrt.ObjectRef()), StaleReferenceError, "ObjectRef"),
    "wait empty reference": (lambda: fastrt.wait([fastrt.ObjectRef()]), StaleReferenceError, "ObjectRef"),
    "put empty reference": (lambda: fastrt.put([fastrt.ObjectRef()]), StaleReferenceError, "ObjectRef"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument_is_refused_with_its_type(rt, name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind) as info:
        call()
    assert text in str(info.value)


def test_references_inside_values_keep_their_objects_alive_to_any_depth(rt):
    ref = fastrt.put("core")
    for depth in range(200):
        ref = fastrt.put({"depth": depth, "inner": [ref]})
    gc.collect()
    for depth in reversed(range(200)):
        value = fastrt.get(ref)
        assert value["depth"] == depth
        (ref,) = value["inner"]
    assert fastrt.get(ref) == "core"


def test_very_long_chain_of_contained_references_is_freed_without_recursion(rt):
    ref = fastrt.put(0)
    for _ in range(20_000):
        ref = fastrt.put([ref])
    del ref


def test_value_that_uses_the_store_while_it_is_pickled_is_stored(rt):
    class Sneaky:
        def __reduce__(self):
            return list, (fastrt.get(fastrt.put([1, 2])),)

    assert fastrt.get(fastrt.put([Sneaky(), fastrt.put(3)]))[0] == [1, 2]
