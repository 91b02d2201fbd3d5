"""A process that leaves the node of a cluster by `shutdown` and comes back by another `init(address=...)`."""

import gc
import os
import signal
import threading

import numpy as np
import psutil
import pytest

import fastrt
from fastrt._core.memory.clients import table
from fastrt._core.repair import fsck
from fastrt.cli.look import joined
from fastrt.errors import FastrtError, NotInitializedError, StaleReferenceError
from fastrt.store import client as store_client
from fastrt.store import join as store_join
from fastrt.tasks import namespaces
from support.cluster import RunningNode


@pytest.fixture(scope="module")
def runtime(runtime_dir):
    """A node that the tests of this module share."""
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "2")
    yield node
    out, err = node.stop()
    assert node.process.returncode == 0, out + err
    assert "Traceback" not in err, err


@pytest.fixture
def join(runtime, runtime_dir):
    def join():
        return fastrt.init(address=runtime.head, runtime_dir=runtime_dir)

    yield join
    fastrt.shutdown()


@fastrt.remote
def double(x):
    return 2 * x


def slots_of_this_process():
    rows = table(store_client.require().client.segment)
    return [row for row in rows if row["pid"] == os.getpid()]


def usage():
    gc.collect()
    return fsck.usage(store_client.require().client)


def test_a_driver_that_shut_down_comes_back_at_once_and_again_and_again(join):
    for k in range(20):
        with join():
            assert fastrt.get(double.remote(k), timeout=60) == 2 * k
            assert len(slots_of_this_process()) == 1
    join()
    assert fsck.fsck(store_client.require().client, True) == []


def test_shutdown_ends_what_the_driver_had_begun(join, tmp_path, wait_until):
    @fastrt.remote
    class Counter:
        def pid(self):
            return os.getpid()

    @fastrt.remote
    def run_on(path):
        path.write_text(str(os.getpid()))
        threading.Event().wait(100)

    path = tmp_path / "pid"
    join()
    counter = Counter.options(name="counter", num_cpus=0).remote()
    held = [fastrt.put(np.ones(1 << 20, np.uint8)), fastrt.put("small"), run_on.remote(path)]
    held.append(double.remote(held[2]))
    pids = [fastrt.get(counter.pid.remote(), timeout=60)]
    wait_until(lambda: path.exists() and path.read_text(), "the task to run")
    pids.append(int(path.read_text()))
    fastrt.shutdown()
    join()
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), "the processes of tasks and actors to end")
    wait_until(lambda: usage()["tasks"] == usage()["actors"] == 0, "the tasks and actors to go")
    wait_until(lambda: usage()["objects"] == usage()["functions"], "the objects to go")
    with pytest.raises(ValueError, match="counter"):
        fastrt.get_actor("counter")
    with pytest.raises(StaleReferenceError):
        fastrt.get(held[0])
    assert fastrt.get(double.remote(4), timeout=60) == 8


def test_a_view_stays_as_it_was_after_shutdown_and_the_next_init(join, wait_until):
    join()
    view = fastrt.get(fastrt.put(np.arange(1 << 20)))
    fastrt.shutdown()
    views = []
    for k in range(3):
        with join():
            others = [fastrt.put(np.full(1 << 20, k)) for _ in range(4)]
            assert (view == np.arange(1 << 20)).all()
            views.append(fastrt.get(others[0]))
            del others
            assert usage()["bytes_used"] >= view.nbytes * (k + 2)
    del view
    with join():
        wait_until(lambda: usage()["bytes_used"] < 25 << 20, "the first view's memory to be free")
        for k in range(3):
            assert (views[k] == k).all()
        views.clear()
        wait_until(lambda: usage()["objects"] == usage()["functions"], "the last view's memory to be free")


def test_a_view_that_ends_while_no_session_runs_frees_its_memory(join, runtime, wait_until):
    join()
    view = fastrt.get(fastrt.put(np.ones(1 << 20)))
    fastrt.shutdown()
    assert view.sum() == 1 << 20
    del view
    with join():
        assert usage()["objects"] == usage()["functions"]


def test_threads_that_wait_put_or_get_at_shutdown_end_with_an_error_and_disturb_nothing_later(
    join, wait_until, monkeypatch
):
    ends = []

    def work(call):
        try:
            while True:
                call()
        except FastrtError as exc:
            ends.append(exc)

    for _ in range(3):
        join()
        never = fastrt.remote(lambda: threading.Event().wait(100)).remote()
        block = np.ones(4 << 20, np.uint8)
        calls = [
            lambda never=never: fastrt.get(never),
            lambda never=never: fastrt.wait([never]),
            lambda block=block: fastrt.get(fastrt.put(block)).sum(),
            lambda: fastrt.get(fastrt.put([1, 2, 3])),
        ]
        store = store_client.require()
        threads = [threading.Thread(target=work, args=[call]) for call in calls]
        for thread in threads:
            thread.start()
        while usage()["tasks"] == 0:
            os.sched_yield()
        # Calls that come later would start a session of their own.
        monkeypatch.setattr(store_client, "_start", refuse)
        fastrt.shutdown()
        for thread in threads:
            thread.join(60)
        assert store.client.closed
    assert len(ends) == 12
    del calls, never, block, store, work, threads
    with join():
        assert fastrt.get([double.remote(k) for k in range(100)], timeout=60) == list(range(0, 200, 2))
        wait_until(lambda: usage()["objects"] == usage()["functions"], "what the threads had to go")
        assert fsck.fsck(store_client.require().client, True) == []


def refuse():
    raise NotInitializedError("the test is over")


def test_a_tool_joins_a_session_twice_and_a_driver_after_it(join, runtime):
    from pathlib import Path

    for _ in range(3):
        with joined(Path(runtime.note.socket_path), "test") as store:
            kinds = {row["pid"]: row["kind"] for row in table(store.client.segment)}
    with join():
        (mine,) = slots_of_this_process()
        assert mine["kind"] != kinds[os.getpid()]
        assert fastrt.get(double.remote(4), timeout=60) == 8


def test_a_driver_comes_back_when_the_daemon_was_killed_meanwhile(join, runtime, wait_until):
    join()
    fastrt.put(1)
    fastrt.shutdown()
    daemon = runtime.child("fastrt.node.__main__")
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    wait_until(lambda: store_join.answers(runtime.note.socket_path), "another daemon")
    with join():
        assert fastrt.get(double.remote(4), timeout=60) == 8


def test_a_forked_child_shuts_down_and_comes_back_too(join):
    join()
    ref = fastrt.put(5)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            total = fastrt.get(ref)
            for _ in range(2):
                fastrt.shutdown()
                join()
                total += fastrt.get(double.remote(1), timeout=60)
            fastrt.shutdown()
            os.write(writer, str(total).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        assert pipe.read() == "9"
    os.waitpid(pid, 0)
    assert fastrt.get(ref) == 5


def test_functions_of_programs_that_ended_leave_the_store(join, wait_until):
    join()
    before = usage()
    for k in range(8):
        join_again(join)
        closure = np.full(1 << 18, k)  # 2 MiB
        assert fastrt.get(fastrt.remote(lambda closure=closure: int(closure[0])).remote(), timeout=60) == k
        del closure
    join_again(join)
    wait_until(lambda: usage()["bytes_used"] < before["bytes_used"] + (1 << 20), "the functions to go")


def join_again(join):
    fastrt.shutdown()
    join()


def test_the_namespace_of_a_program_does_not_outlive_it(runtime, runtime_dir):
    for given in ("a", "b", None):
        with fastrt.init(address=runtime.head, runtime_dir=runtime_dir, namespace=given):
            assert fastrt.get_runtime_context().namespace == (given or "")
            assert fastrt.get(fastrt.remote(namespaces.here).remote(), timeout=60) == (given or "")


@fastrt.remote
class Lasting:
    def where(self):
        return fastrt.get_runtime_context().namespace

    def from_a_task(self):
        return fastrt.get(fastrt.remote(namespaces.here).remote(), timeout=60)


def test_node_forgets_the_namespace_of_a_program_that_has_ended(runtime, runtime_dir, program, wait_until):
    """But its detached actors are in it. A node that runs for months would fill its tables otherwise."""
    ours = {"address": runtime.head, "runtime_dir": str(runtime_dir)}
    for how in ("fastrt.shutdown()", "os.kill(os.getpid(), 9)"):
        other = program(f"""
            import os, fastrt
            fastrt.init(**{ours!r}, namespace="short")
            print(fastrt.get_runtime_context().namespace, flush=True)
            {how}
        """)
        other.process.wait(60)
    with fastrt.init(**ours, namespace="left"):
        lasting = Lasting.options(name="lasting", lifetime="detached").remote()
        assert fastrt.get(lasting.where.remote(), timeout=60) == "left"
    with fastrt.init(**ours, namespace="here"):

        def noted():
            return {row["what"] for row in fastrt.list_objects() if "namespace" in row["what"]}

        wait_until(lambda: noted() == {"function namespace here"}, "the namespaces to be forgotten")
        lasting = fastrt.get_actor("lasting", namespace="left")
        assert fastrt.get([lasting.where.remote(), lasting.from_a_task.remote()], timeout=60) == ["left", "left"]
        fastrt.kill(lasting)
        assert fastrt.get(fastrt.remote(namespaces.here).remote(), timeout=60) == "here"
