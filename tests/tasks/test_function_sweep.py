"""Functions leave the store when nothing can use them any more."""

import gc
import os
import sys

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import functions
from fastrt._core.repair import fsck
from fastrt.store import client as store_client


def usage():
    gc.collect()
    return fsck.usage(store_client.require().client)


def sweep():
    gc.collect()
    return functions.sweep(store_client.require().client)


def make(number, nbytes=0):
    captured = np.zeros(nbytes, np.uint8)  # a worker that has loaded the function pins it
    return fastrt.remote(lambda: number + len(captured))


def test_a_function_that_nothing_can_use_any_more_leaves_the_store(rt, wait_until):
    before = usage()
    one = make(1, 2 << 20)
    for _ in range(6):  # a worker calls it again without another function between
        assert fastrt.get(one.remote()) == 1 + (2 << 20)
    assert usage()["bytes_used"] >= before["bytes_used"] + (2 << 20)
    sweep()
    assert usage()["bytes_used"] >= before["bytes_used"] + (2 << 20)  # the program can still call it
    del one
    # A second for the daemon to sweep it, one more for the worker that has loaded it to drop it.
    wait_until(lambda: usage()["bytes_used"] < before["bytes_used"] + (1 << 20), "its memory to be free")
    assert fastrt.get(make(1, 2 << 20).remote()) == 1 + (2 << 20)  # the same once more


def test_a_function_of_tasks_that_have_not_ended_stays(rt, tmp_path):
    go = tmp_path / "go"

    def hold(path):
        while not path.exists():
            os.sched_yield()

    held = [fastrt.remote(hold).remote(go) for _ in range(2)]
    refs = [make(3, 1 << 16).remote() for _ in range(20)]
    late = [make(4).options(num_cpus=1).remote() for _ in range(2)]
    for _ in range(20):
        sweep()
    assert usage()["tasks"] == 24
    go.touch()
    assert fastrt.get(refs, timeout=60) == [3 + (1 << 16)] * 20
    assert fastrt.get([*held, *late], timeout=60) == [None, None, 4, 4]


def test_the_class_of_an_actor_that_lives_stays(rt):
    @fastrt.remote(max_restarts=1, max_task_retries=1, num_cpus=0)
    class Counter:
        def __init__(self):
            self.data = np.zeros(1 << 16)

        def pid(self):
            return os.getpid()

    handle = Counter.remote()
    del Counter
    pid = fastrt.get(handle.pid.remote(), timeout=60)
    for _ in range(5):
        sweep()
    os.kill(pid, 9)
    assert fastrt.get(handle.pid.remote(), timeout=60) != pid  # built again from its class
    assert [row["class"] for row in fastrt.list_actors()] == ["Counter"]


def test_functions_of_tasks_that_submit_tasks_stay_and_go(rt, wait_until):
    inner = make(5, 1 << 20)
    outer = fastrt.remote(lambda: fastrt.get(inner.remote()))
    assert fastrt.get([outer.remote() for _ in range(3)], timeout=60) == [5 + (1 << 20)] * 3
    for _ in range(5):
        sweep()
    assert fastrt.get([outer.remote() for _ in range(3)], timeout=60) == [5 + (1 << 20)] * 3


def test_slots_of_swept_functions_are_used_again_and_all_others_are_found(rt):
    kept = [make(k) for k in range(200)]
    assert fastrt.get([one.remote() for one in kept], timeout=30) == list(range(200))
    for start in (1000, 2000):
        passing = [make(start + k) for k in range(200)]
        assert fastrt.get([one.remote() for one in passing], timeout=30) == list(range(start, start + 200))
        del passing
        sweep()
        assert usage()["functions"] < 350
    client = store_client.require().client
    for one in kept:
        assert one._bound is not None
        again = make(kept.index(one))
        assert fastrt.get(again.remote()) == fastrt.get(one.remote())
        assert again._bound[1].target == one._bound[1].target  # found, not stored once more
    assert fsck.fsck(client, True) == []


@pytest.mark.long
def test_programs_that_store_and_drop_the_same_function_never_miss_it(rt, program):
    code = """
    import fastrt, os
    from fastrt._core.objects import functions
    from fastrt.store import client, join
    from fastrt.store.client import Store
    joined, link = join.join(os.environ["SOCKET"], "driver", "test")
    store = Store(joined, 0.0001)
    digest = bytes(range(16))
    for k in range(5_000):
        ref = functions.find_function(joined, digest)
        if ref is None:
            ref = functions.add_function(joined, digest, store.put(b"x" * 3000), "f", False)
        assert store.get(ref) == b"x" * 3000
        del ref
        functions.sweep(joined)
    print("done")
    """
    programs = [program(code, SOCKET=rt.socket_path) for _ in range(3)]
    for one in programs:
        assert "done" in one.finish()[0]


referred = None  # set by a test, to a reference
counted = 0


def test_references_that_came_as_globals_go_with_the_code_of_their_module_and_assignments_stay(
    rt, wait_until, monkeypatch
):
    def count():
        global counted
        counted += 1
        return type(referred).__name__, os.getpid(), counted

    def counts():
        return os.getpid(), counted

    before = usage()["bytes_used"]
    monkeypatch.setattr(sys.modules[__name__], "referred", [fastrt.put(bytes(4 << 20))])
    assert usage()["bytes_used"] > before + (3 << 20)
    function = fastrt.remote(count)
    kind, pid, _ = fastrt.get(function.remote(), timeout=60)
    assert kind == "list"
    monkeypatch.undo()
    del function, count
    wait_until(lambda: usage()["bytes_used"] < before + (1 << 20), "the worker to drop the reference")
    reader = fastrt.remote(counts)
    wait_until(lambda: (pid, 1) in fastrt.get([reader.remote() for _ in range(8)]), "the worker with its own value")
