"""Every wait, between two processes: woken by the news, by the clock, by a signal, by the end of the session."""

import math
import os
import signal
import statistics
import threading
import time

import psutil
import pytest

from fastrt._core.memory import clients
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.objects.pending import Watch
from fastrt._core.tasks import submission, tasks
from fastrt.errors import ArenaCorrupt, NotInitializedError

# The longest sleep of a wait. It has just begun where a test wakes the sleeper: after half of it, the sleeper was not
# woken.
NAP_S = 0.05


class Interrupted(Exception):
    pass


def interrupt() -> None:
    raise Interrupted


@pytest.fixture
def pending(node, client, function):
    """Submit tasks; seal(k) ends the k-th."""

    class Pending:
        def __init__(self, count: int) -> None:
            self.refs = [submission.submit(client, submission.TaskOptions(function), (k,)) for k in range(count)]
            self.tasks = [tasks.next_task(client, 0.0, 0.0) for _ in range(count)]
            self.names = [(ref.objref, ref.index) for ref in self.refs]

        def seal(self, *which: int) -> None:
            for k in which:
                assert tasks.finish_scalar(client, self.tasks[k], k)

    return Pending


def acquire(peer, pending) -> None:
    peer.run(f"refs = [handles.acquire(client, *name) for name in {pending.names}]")


# ---- news ----


@pytest.mark.parametrize("spin_s", [0.0, 0.002])
@pytest.mark.parametrize("call", ["wait_all(client, refs, None, {})", "wait_some(client, refs, 1, None, {})"])
def test_sleeper_is_woken_by_the_seal(node, pending, wait_until, spin_s, call):
    peer = node.peer()
    times = []
    for _ in range(15):
        one = pending(1)
        acquire(peer, one)
        peer.start(f"x = handles.{call.format(spin_s)}")
        wait_until(peer.is_asleep, "the peer to sleep")
        start = time.perf_counter()
        one.seal(0)
        peer.finish()
        times.append(time.perf_counter() - start)
        assert peer.run("handles.read_scalars(client, refs, None)") == [0]
        peer.run("del refs, x")
    assert statistics.median(times) < NAP_S / 2


def test_all_sleepers_on_one_object_are_woken(node, pending, wait_until):
    peers = [node.peer() for _ in range(3)]
    one = pending(1)
    for peer in peers:
        acquire(peer, one)
        peer.start("handles.wait_all(client, refs, None, 0.0)")
    for peer in peers:
        wait_until(peer.is_asleep, "every peer to sleep")
    one.seal(0)
    assert [peer.finish() for peer in peers] == [True] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_wait_for_all_ends_with_the_last(node, pending, wait_until, order):
    peer = node.peer()
    three = pending(3)
    acquire(peer, three)
    peer.start("handles.wait_all(client, refs, None, 0.0)")
    for k in order:
        wait_until(peer.is_asleep, "the peer to sleep")
        three.seal(k)
    assert peer.finish() is True


@pytest.mark.parametrize(("want", "sealed"), [(1, [3]), (2, [4, 0]), (5, [0, 1, 2, 3, 4])])
def test_wait_for_some_ends_with_enough(node, pending, wait_until, want, sealed):
    peer = node.peer()
    five = pending(5)
    acquire(peer, five)
    peer.start(f"ready, others = handles.wait_some(client, refs, {want}, None, 0.0)")
    for k in sealed:
        wait_until(peer.is_asleep, "the peer to sleep")
        five.seal(k)
    peer.finish()
    assert peer.run("[refs.index(ref) for ref in ready]") == sorted(sealed)
    assert peer.run("[refs.index(ref) for ref in others]") == [k for k in range(5) if k not in sealed]
    peer.run("del ready, others")
    five.seal(*[k for k in range(5) if k not in sealed])


def test_wait_for_some_keeps_order_and_duplicates(client, pending):
    four = pending(4)
    refs = [four.refs[k] for k in (3, 0, 0, 2, 1)]
    four.seal(0, 1)
    wait = handles.wait_some
    assert wait(client, refs, 1, None, 0.0) == ([refs[1]], [refs[0], *refs[2:]])
    assert wait(client, refs, 2, None, 0.0) == (refs[1:3], [refs[0], *refs[3:]])
    assert wait(client, refs, 3, None, 0.0) == ([refs[1], refs[2], refs[4]], [refs[0], refs[3]])
    assert wait(client, refs, 4, 0.0, 0.0) == ([refs[1], refs[2], refs[4]], [refs[0], refs[3]])
    assert wait(client, refs, 4, 0, 0.0) == ([refs[1], refs[2], refs[4]], [refs[0], refs[3]])
    assert wait(client, [], 0, 0, 0.0) == ([], [])
    four.seal(2, 3)
    assert wait(client, refs, 5, None, 0.0) == (refs, [])
    assert handles.wait_all(client, refs, None, 0.0)
    assert handles.wait_all(client, [], None, 0.0)


def test_wait_for_all_ends_early_with_an_error(node, client, pending, wait_until):
    peer = node.peer()
    two = pending(2)
    acquire(peer, two)
    peer.start("handles.wait_all(client, refs, None, 0.0)")
    wait_until(peer.is_asleep, "the peer to sleep")
    handles.result(client, two.tasks[0], 0, 5, node.KIND, 0, True).seal()
    tasks.finish(client, two.tasks[0])
    assert peer.finish() is True
    assert peer.run("[handles.is_ready(client, ref) for ref in refs]") == [True, False]
    two.seal(1)


def test_threads_of_one_process_wait_for_different_objects(client, pending, in_thread):
    """They share one wake word."""
    done = []
    many = pending(8)

    def wait(k: int) -> None:
        assert handles.wait_all(client, [many.refs[k]], 10.0, 0.0)
        done.append(k)

    threads = [in_thread(lambda k=k: wait(k)) for k in range(8)]
    for k in (5, 0, 7, 2, 1, 6, 3, 4):
        many.seal(k)
        threads[k].join(60)
        assert done[-1] == k
    assert len(done) == 8


# ---- workers ----


def test_idle_worker_is_woken_by_a_task(node, client, function, wait_until):
    peer = node.peer()
    times = []
    for k in range(15):
        peer.start("t = tasks.next_task(client, 10.0, 0.0)\ntasks.arguments(client, t)[1]")
        wait_until(peer.is_asleep, "the worker to sleep")
        start = time.perf_counter()
        ref = submission.submit(client, submission.TaskOptions(function), (k,))
        assert peer.finish() == [k]
        times.append(time.perf_counter() - start)
        peer.run("tasks.finish_scalar(client, t, None)")
        assert handles.is_ready(client, ref)
    assert statistics.median(times) < NAP_S / 2


@pytest.mark.parametrize("spin_s", [0.0, 0.0005])
def test_burst_wakes_as_many_workers_as_it_needs(node, client, function, wait_until, spin_s):
    """One call each: the submitter wakes one, who wakes the next."""
    peers = [node.peer() for _ in range(4)]
    for peer in peers:
        peer.start(f"t = tasks.next_task(client, 10.0, {spin_s})\ntasks.arguments(client, t)[1][0]")
    for peer in peers:
        wait_until(peer.is_asleep, "every worker to sleep")
    refs = [submission.submit(client, submission.TaskOptions(function), (k,)) for k in range(4)]
    assert sorted(peer.finish() for peer in peers) == [0, 1, 2, 3]
    for peer in peers:
        peer.run("tasks.finish_scalar(client, t, None)")
    assert handles.wait_all(client, refs, 0.0, 0.0)


def test_change_of_the_load_wakes_the_client_that_watches_it_once(node, client, function, wait_until):
    peer = node.peer()
    watch = Watch(client)
    options = submission.TaskOptions(function)
    idle = tasks.load(client, True)
    word = watch.word()
    peer.start("t = tasks.next_task(client, 10.0, 0.0)")
    wait_until(peer.is_asleep, "the worker to sleep")
    assert watch.word() == word + 1, "a worker has become idle"
    tasks.load(client, True)
    refs = [submission.submit(client, options, (1,))]
    peer.finish()
    assert watch.word() == word + 2, "it has become busy"
    busy = tasks.load(client, True)
    refs += [submission.submit(client, options, (k,)) for k in range(3)]
    assert watch.word() == word + 3, "no worker is idle: the first push is reported, the others are not"
    assert len({idle, busy, tasks.load(client)}) == 3
    assert watch.wait(10.0, word) == []
    peer.run("tasks.finish_scalar(client, t, None)")
    for _ in refs[1:]:
        tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)


def test_client_that_stands_by_is_woken_by_a_push(node, client, function):
    watch, peer, options = Watch(client), node.peer(), submission.TaskOptions(function)
    assert not tasks.stand_by(client, True)
    word = watch.word()
    ref = submission.submit(client, options, (7,))
    assert watch.word() == word + 1
    assert peer.run("tasks.stand_by(client, True)")
    tasks.stand_by(client, False)
    tasks.finish_scalar(client, tasks.next_task(client, 0.0, 0.0), None)
    assert not tasks.stand_by(client, False)
    del ref


def test_task_released_by_a_seal_wakes_a_worker(node, client, function, pending, wait_until):
    peer = node.peer()
    one = pending(1)
    ref = submission.submit(client, submission.TaskOptions(function), (one.refs[0],))
    peer.start("t = tasks.next_task(client, 10.0, 0.0)\ntasks.finish_scalar(client, t, 7)")
    wait_until(peer.is_asleep, "the worker to sleep")
    one.seal(0)
    assert peer.finish() is True
    assert handles.read_scalar(client, ref, None) == 7


def test_task_submitted_while_a_worker_spins_is_taken(node, client, function):
    peer = node.peer()
    for k in range(20):
        peer.start("t = tasks.next_task(client, 10.0, 5.0)\ntasks.finish_scalar(client, t, 0)")
        ref = submission.submit(client, submission.TaskOptions(function), (k,))
        assert handles.wait_all(client, [ref], 10.0, 0.0)
        peer.finish()


# ---- the clock ----


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, 0.12])
def test_wait_ends_with_its_timeout(client, pending, timeout_s):
    one = pending(1)
    for call in (
        lambda: handles.wait_all(client, one.refs, timeout_s, 0.0) is False,
        lambda: handles.wait_some(client, one.refs, 1, timeout_s, 0.0) == ([], one.refs),
        lambda: tasks.next_task(client, timeout_s, 0.0) == tasks.NO_TASK,
    ):
        start = time.monotonic()
        assert call()
        assert timeout_s <= time.monotonic() - start < timeout_s + 20.0
    one.seal(0)


@pytest.mark.parametrize("timeout_s", [-1.0, -1e300, -math.inf])
def test_wait_of_negative_length_only_looks(client, pending, timeout_s):
    one = pending(1)
    assert handles.wait_all(client, one.refs, timeout_s, 0.0) is False
    assert handles.wait_some(client, one.refs, 1, timeout_s, 0.0) == ([], one.refs)
    assert tasks.next_task(client, timeout_s, 0.0) == tasks.NO_TASK
    one.seal(0)
    assert handles.wait_all(client, one.refs, timeout_s, 0.0) is True


@pytest.mark.parametrize("timeout_s", [1e9, 1e30, 1e308, math.inf])
def test_wait_of_absurd_length_waits(client, pending, function, alarm, timeout_s):
    one = pending(1)
    for call in (
        lambda: handles.wait_all(client, one.refs, timeout_s, 0.0),
        lambda: handles.wait_some(client, one.refs, 1, timeout_s, 0.0),
        lambda: tasks.next_task(client, timeout_s, 0.0),
    ):
        with pytest.raises(Interrupted):
            alarm(0.02, interrupt, call)
    one.seal(0)


@pytest.mark.parametrize("timeout_s", ["1", [1], object()])
def test_timeout_that_is_no_number_is_refused(client, pending, timeout_s):
    one = pending(1)
    for call in (handles.wait_all, lambda c, r, t, s: handles.wait_some(c, r, 1, t, s)):
        with pytest.raises(TypeError):
            call(client, one.refs, timeout_s, 0.0)
    one.seal(0)


# ---- signals ----


@pytest.mark.parametrize(
    "call",
    ["handles.wait_all(client, refs, None, 0.0)", "handles.wait_some(client, refs, 1, None, 0.0)"],
)
def test_ctrl_c_ends_a_sleep(node, pending, wait_until, call):
    peer = node.peer()
    one = pending(1)
    acquire(peer, one)
    peer.start(call)
    wait_until(peer.is_asleep, "the peer to sleep")
    start = time.monotonic()
    os.kill(peer.pid, signal.SIGINT)
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        peer.finish()
    assert time.monotonic() - start < 40.0
    one.seal(0)


def test_ctrl_c_ends_the_sleep_of_an_idle_worker(node, wait_until):
    peer = node.peer()
    peer.start("tasks.next_task(client, 100.0, 0.0)")
    wait_until(peer.is_asleep, "the worker to sleep")
    os.kill(peer.pid, signal.SIGINT)
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        peer.finish()


@pytest.mark.parametrize("spin_s", [0.0, 0.1])
def test_signal_before_the_sleep_ends_it_too(client, pending, alarm, spin_s):
    """It comes while the wait spins, so no system call is interrupted by it."""
    one = pending(1)
    for call in (
        lambda: handles.wait_all(client, one.refs, 60.0, spin_s),
        lambda: handles.wait_some(client, one.refs, 1, 60.0, spin_s),
        lambda: tasks.next_task(client, 60.0, spin_s),
    ):
        start = time.monotonic()
        with pytest.raises(Interrupted):
            alarm(0.02, interrupt, call)
        assert time.monotonic() - start < 40.0
    one.seal(0)


def test_signal_whose_handler_returns_does_not_end_a_wait(client, pending, alarm):
    two = pending(2)
    alarm(0.02, lambda: two.seal(0))
    assert handles.wait_all(client, two.refs[:1], 10.0, 0.0)
    alarm(0.02, lambda: two.seal(1))
    assert handles.wait_some(client, two.refs[1:], 1, 10.0, 0.0) == (two.refs[1:], [])


def test_signal_whose_handler_returns_sends_an_idle_worker_back_to_look(client, alarm):
    rung = []

    def ring():  # again, if the first signal came before the sleep began
        rung.append(1)
        alarm(0.02, ring)

    alarm(0.02, ring)
    start = time.monotonic()
    assert tasks.next_task(client, 60.0, 0.0) == tasks.NO_TASK
    assert rung
    assert time.monotonic() - start < 40.0


# ---- the end of things ----


def test_wait_ends_when_the_client_is_closed_by_another_thread(node, pending, in_thread):
    other = node.attach()
    one = pending(1)
    refs = [handles.acquire(other, *one.names[0])]
    ends = []

    def wait(call) -> None:
        try:
            call()
        except NotInitializedError as exc:
            ends.append(str(exc))

    threads = [
        in_thread(lambda: wait(lambda: handles.wait_all(other, refs, None, 0.0))),
        in_thread(lambda: wait(lambda: handles.wait_some(other, refs, 1, None, 0.0))),
    ]
    other.close()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 2
    one.seal(0)


def test_wait_ends_when_the_segment_is_poisoned(drop_arguments, alarm):
    made = Segment.create(1 << 20)
    try:
        client = clients.Client(made, *clients.admit(made, os.getpid(), clients.KIND_TOOL))
        function = handles.put_scalar(client, b"f")
        ref = submission.submit(client, submission.TaskOptions(function), ())
        tasks.next_task(client, 0.0, 0.0)
        alarm(0.02, lambda: made.poison("while they wait"))
        with pytest.raises(ArenaCorrupt, match="while they wait"):
            handles.wait_all(client, [ref], 10.0, 0.0)
        with pytest.raises(ArenaCorrupt, match="while they wait"):
            handles.wait_some(client, [ref], 1, 10.0, 0.0)
        with pytest.raises(ArenaCorrupt, match="while they wait"):
            tasks.next_task(client, 10.0, 0.0)
    finally:
        made.unlink()


@pytest.mark.parametrize("change", ["clear()", "append(None)", "pop(0)", "__setitem__(0, 5)"])
def test_list_changed_by_another_thread_during_a_wait_does_no_harm(client, pending, alarm, change):
    for k, call in enumerate(
        (
            lambda refs: handles.wait_all(client, refs, 10.0, 0.0),
            lambda refs: handles.wait_some(client, refs, len(refs), 10.0, 0.0),
        )
    ):
        many = pending(3)
        refs = list(many.refs)

        def meddle(refs=refs, many=many) -> None:
            eval(f"refs.{change}")  # noqa: S307
            many.seal(0, 1, 2)

        alarm(0.1, meddle)  # the wait has begun by then
        done = call(refs)
        assert done is True if k == 0 else done == (many.refs, [])


@pytest.mark.parametrize("bad", [None, 5, "ref", handles.Ref()], ids=["none", "number", "text", "made by hand"])
def test_wait_for_what_is_no_reference_is_refused(client, pending, bad):
    one = pending(1)
    for refs in ([bad], [one.refs[0], bad], [bad, one.refs[0]]):
        with pytest.raises((TypeError, Exception), match=r"Ref|reference|session that has ended"):
            handles.wait_all(client, refs, 0.1, 0.0)
        with pytest.raises((TypeError, Exception), match=r"Ref|reference|session that has ended"):
            handles.wait_some(client, refs, len(refs), 0.1, 0.0)
    for refs in (None, (one.refs[0],), one.refs[0], "refs"):
        with pytest.raises(TypeError):
            handles.wait_all(client, refs, 0.1, 0.0)
        with pytest.raises(TypeError):
            handles.wait_some(client, refs, 1, 0.1, 0.0)
    one.seal(0)


@pytest.mark.long
def test_process_that_was_stopped_in_a_yield_spins_again_soon(node, pending, wait_until):
    """A process takes the time of a stop for a late yield. Its waits must not sleep as long as it was stopped."""
    peer, one = node.peer(), pending(1)
    acquire(peer, one)
    try:  # before all other processes: beside busy ones each yield is late, and nothing spins
        os.sched_setscheduler(peer.pid, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        pytest.skip("this user may not run a process at a real-time priority")
    spins = "import time; t = time.thread_time(); handles.wait_all(client, refs, 0.02, 1.0); time.thread_time() - t"
    wait_until(lambda: peer.run(spins) > 0.005, "waits that spin")
    process = psutil.Process(peer.pid)

    def is_stopped_while_it_spins() -> bool:
        """Stop the peer in the middle of a wait; let it go on if it does not spin: one late yield ends that."""
        before = sum(process.cpu_times()[:2])
        peer.start("handles.wait_all(client, refs, 0.5, 1.0)")
        threading.Event().wait(0.1)
        process.suspend()
        if sum(process.cpu_times()[:2]) - before > 0.07:
            return True
        process.resume()
        peer.finish()
        return False

    wait_until(is_stopped_while_it_spins, "a stop while the peer spins")
    until = time.monotonic() + 6.0
    wait_until(lambda: time.monotonic() > until, "the end of the stop")
    process.resume()
    peer.finish()
    wait_until(lambda: peer.run(spins) > 0.005, "waits that spin", 4.0)
    one.seal(0)
    peer.run("del refs")
