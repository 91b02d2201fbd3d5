"""Tasks of one node that run on another: a head without workers, and a node with two."""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from fastrt.store import join
from fastrt.store.messages import Bye
from support.cluster import RunningNode, wakes_per_s


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    head = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "0", "--name", "one")
    other = RunningNode(runtime_dir, "--address", head.head, "--num-workers", "2", "--name", "two")
    yield head, other
    for node in (other, head):
        out, err = node.stop()
        assert node.process.returncode == 0, out + err
        assert err == ""


@pytest.fixture(scope="module")
def rt(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@fastrt.remote
def add(a, b):
    return a + b


@fastrt.remote
def session_here():
    return attached_session()


def attached_session():
    from fastrt.store import client

    return client.require().client.segment.session


@pytest.fixture(scope="module")
def look_there(nodes):
    """Says what is in use in the other node's store, and what is wrong there."""
    client, link = join.join(nodes[1].note.socket_path, "tool", "test")
    yield lambda: (fsck.usage(client), fsck.fsck(client, True))
    client.close()
    link.send(Bye())
    link.close()
    client = None  # the last test still holds the function, which must not hold the store


def test_a_task_of_a_node_without_workers_runs_on_the_other(rt, nodes):
    assert rt.session in nodes[0].note.socket_path
    assert fastrt.get(session_here.remote(), timeout=60) in nodes[1].note.socket_path


def test_many_tasks_come_back_right(rt):
    refs = [add.remote(k, 1) for k in range(5000)]
    assert fastrt.get(refs, timeout=30) == list(range(1, 5001))


def test_a_chain_of_dependent_tasks_comes_back_right(rt):
    ref = add.remote(0, 1)
    for _ in range(50):
        ref = add.remote(ref, 1)
    assert fastrt.get(ref, timeout=60) == 51


@pytest.mark.parametrize(
    "value", [None, True, -(2**63), 2**70, 1.5, "", "ü" * 1000, b"\0" * 5000, [1, (2, {"a": None})]]
)
def test_values_of_every_kind_travel_both_ways(rt, value):
    @fastrt.remote
    def same(value):
        return value

    assert fastrt.get(same.remote(value), timeout=60) == value
    assert fastrt.get(same.remote(fastrt.put(value)), timeout=60) == value


@pytest.mark.parametrize("items", [0, 1, 1000, 40_000, 3_000_000])
def test_arrays_of_any_size_travel_both_ways(rt, items):
    @fastrt.remote
    def double(array):
        return array * 2

    array = np.random.default_rng(1).random(items)
    assert np.array_equal(fastrt.get(double.remote(array), timeout=30), array * 2)


def test_an_exception_arrives_with_its_type_and_the_remote_traceback(rt):
    @fastrt.remote
    def fail():
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there") as caught:
        fastrt.get(fail.remote(), timeout=60)
    assert "in fail" in str(caught.value)


def test_several_results_and_none(rt):
    @fastrt.remote(num_returns=3)
    def three(value):
        return value, np.full(100_000, value), [value]

    @fastrt.remote(num_returns=0)
    def nothing():
        return None

    small, large, listed = three.remote(7)
    assert fastrt.get(small, timeout=60) == 7
    assert fastrt.get(large, timeout=60).sum() == 700_000
    assert fastrt.get(listed, timeout=60) == [7]
    assert nothing.remote() is None


def test_references_inside_arguments_are_usable_there_also_before_they_are_ready(rt, tmp_path):
    gate = tmp_path / "gate"

    @fastrt.remote
    def late(path):
        while not os.path.exists(path):
            threading.Event().wait(0.01)
        return 40

    @fastrt.remote
    def total(refs):
        return sum(fastrt.get(refs))

    refs = [fastrt.put(1), add.remote(1, 0), late.remote(str(gate))]
    waiting = total.remote(refs)
    assert fastrt.wait([waiting], timeout=0.2)[0] == []
    gate.touch()
    assert fastrt.get(waiting, timeout=60) == 42


def test_functions_of_the_same_code_that_capture_other_references_are_different_there(rt):
    def reads(ref):
        return fastrt.remote(lambda: fastrt.get(ref))

    refs = [fastrt.put(k) for k in range(3)]
    assert fastrt.get([reads(ref).remote() for ref in refs], timeout=60) == [0, 1, 2]


def test_references_made_there_are_usable_here_and_go_back_as_themselves(rt):
    @fastrt.remote
    def make():
        return {"array": fastrt.put(np.arange(50_000)), "task": add.remote(20, 22)}

    @fastrt.remote
    def use(made):
        return int(fastrt.get(made["array"]).sum()) + fastrt.get(made["task"])

    made = fastrt.get(make.remote(), timeout=60)
    assert fastrt.get(made["task"], timeout=60) == 42
    assert fastrt.get(made["array"], timeout=60)[-1] == 49_999
    assert fastrt.get(use.remote(made), timeout=60) == 49_999 * 25_000 + 42


def test_a_task_that_returns_the_reference_of_another_gives_that_reference(rt):
    @fastrt.remote
    def outer():
        return add.remote(1, 2)

    inner = fastrt.get(outer.remote(), timeout=60)
    assert fastrt.get(inner, timeout=60) == 3


def test_tasks_nested_there_run_there(rt):
    @fastrt.remote
    def nested(depth):
        return 1 if depth == 0 else 1 + fastrt.get(nested.remote(depth - 1))

    assert fastrt.get(nested.remote(6), timeout=30) == 7


def test_a_forwarded_task_that_sleeps_wakes_almost_no_thread_of_both_nodes(rt, nodes, tmp_path, wait_until):
    @fastrt.remote
    def rest(begun, until):
        open(begun, "w").close()
        while not os.path.exists(until):
            threading.Event().wait(3)

    begun, until = tmp_path / "begun", tmp_path / "until"
    ref = rest.remote(str(begun), str(until))
    wait_until(begun.exists, "the task to begin on the other node")
    processes = [process for node in nodes for process in node.processes()]
    wait_until(lambda: wakes_per_s(processes, 1.0) < 20, "fewer than 20 wakes a second; they were 42 with polling")
    until.touch()
    assert fastrt.get(ref, timeout=30) is None


def test_a_lent_task_is_cancelled_there_as_it_would_be_here(rt, nodes, tmp_path, wait_until):
    told, ended = tmp_path / "told", tmp_path / "ended"

    @fastrt.remote
    def child(begun, ended):
        open(begun, "w").close()
        while not os.path.exists(begun + "-go"):
            threading.Event().wait(0.005)
        open(ended, "w").close()

    @fastrt.remote
    def deaf(name, begun, told, ended):
        child.options(name=name).remote(begun, ended)
        while True:
            try:
                threading.Event().wait(30)
            except KeyboardInterrupt:
                open(told, "w").close()

    @fastrt.remote
    def tidy(begun, ended):
        try:
            open(begun, "w").close()  # within, because the interrupt may come at once
            threading.Event().wait(30)
        finally:
            threading.Event().wait(0.05)
            open(ended, "w").close()

    uplink = nodes[0].child("fastrt.runtime.uplink")
    ref = tidy.remote(str(tmp_path / "first"), str(tmp_path / "last"))
    wait_until((tmp_path / "first").exists, "the task's start")
    fastrt.cancel(ref)
    with pytest.raises(fastrt.TaskCancelledError, match=r"while node .* ran it"):
        fastrt.get(ref, timeout=60)
    wait_until((tmp_path / "last").exists, "its end there")

    begun = tmp_path / "begun"
    ref = deaf.remote("spared", str(begun), str(told), str(ended))
    wait_until(begun.exists, "the child's start")
    fastrt.cancel(ref, recursive=False, force=True)
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(ref, timeout=60)
    (tmp_path / "begun-go").touch()
    wait_until(ended.exists, "the child, which was not cancelled, to end by itself")
    assert not told.exists()
    assert nodes[0].child("fastrt.runtime.uplink") == uplink


@fastrt.remote(num_cpus=0, scheduling="two")
def cancel_there(refs, force):
    """Cancel on the node where this runs what another node has submitted."""
    fastrt.cancel(refs[0], force=force)
    return attached_session()


@pytest.mark.parametrize("force", [False, True])
def test_a_task_is_cancelled_from_a_node_that_did_not_submit_it(rt, nodes, tmp_path, wait_until, force):
    told = tmp_path / "told"

    @fastrt.remote(max_retries=0)
    def stuck(begun):
        Path(begun).write_text(str(os.getpid()))
        while True:
            try:
                threading.Event().wait(30)
            except KeyboardInterrupt:
                open(told, "w").close()
                raise

    begun = tmp_path / "begun"
    running = stuck.remote(str(begun))
    wait_until(begun.exists, "the task's start")
    assert fastrt.get(cancel_there.remote([running], force), timeout=60) in nodes[1].note.socket_path
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(running, timeout=60)
    if force:
        wait_until(lambda: not os.path.exists(f"/proc/{begun.read_text()}"), "the worker's end")
    else:
        wait_until(told.exists, "the interrupt there")


def test_waiting_task_and_generator_are_cancelled_from_a_node_that_did_not_submit_them(rt, tmp_path, wait_until):
    @fastrt.remote
    def gate(path):
        while not os.path.exists(path):
            threading.Event().wait(0.005)

    @fastrt.remote(num_returns="streaming")
    def endless(path):
        try:
            while True:
                yield 1
                threading.Event().wait(0.005)
        finally:
            open(path, "w").close()

    closed = gate.remote(str(tmp_path / "gate"))
    waiting = add.remote(closed, 1)
    fastrt.get(cancel_there.remote([waiting], False), timeout=60)
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(waiting, timeout=60)
    (tmp_path / "gate").touch()
    generator = endless.remote(str(tmp_path / "closed"))
    assert fastrt.get(next(generator), timeout=60) == 1
    fastrt.get(cancel_there.remote([generator], False), timeout=60)
    wait_until((tmp_path / "closed").exists, "the generator's end")
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(list(generator), timeout=60)


def test_a_lent_task_keeps_its_policy_and_ends_with_its_children(rt, tmp_path, wait_until):
    class Passing(Exception):
        pass

    @fastrt.remote(retry_exceptions=[Passing], retry_delay=0.01, max_retries=-1)
    def fails_twice(path):
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) < 3:
            raise Passing
        return os.path.getsize(path)

    assert fastrt.get(fails_twice.remote(str(tmp_path / "runs")), timeout=60) == 3

    @fastrt.remote(timeout=0.1)
    def stuck():
        threading.Event().wait(30)

    with pytest.raises(fastrt.TaskTimeoutError):
        fastrt.get(stuck.remote(), timeout=20)

    @fastrt.remote
    def child(begun, ended):
        open(begun, "w").close()
        try:
            threading.Event().wait(30)
        finally:
            open(ended, "w").close()

    @fastrt.remote
    def parent(*paths):
        return fastrt.get(child.remote(*paths))

    begun, ended = tmp_path / "begun", tmp_path / "ended"
    ref = parent.remote(str(begun), str(ended))
    wait_until(begun.exists, "the child's start")
    fastrt.cancel(ref)
    with pytest.raises(fastrt.TaskCancelledError):
        fastrt.get(ref, timeout=60)
    wait_until(ended.exists, "the child's end there")


def test_a_worker_that_dies_there_is_replaced_and_its_task_runs_again(rt, tmp_path):
    @fastrt.remote
    def die_once(path):
        if not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), 9)
        return "again"

    assert fastrt.get(die_once.remote(str(tmp_path / "died")), timeout=60) == "again"


def test_a_worker_that_always_dies_there_gives_an_error_here(rt):
    @fastrt.remote(max_retries=1)
    def die():
        os.kill(os.getpid(), 9)

    with pytest.raises(fastrt.WorkerCrashedError, match=r"die.*after attempt 2"):
        fastrt.get(die.remote(), timeout=60)


def test_calls_from_many_threads_come_back_to_each(rt):
    wrong = []

    def use(number):
        for k in range(50):
            if fastrt.get(add.remote(number, k), timeout=30) != number + k:
                wrong.append((number, k))

    threads = [threading.Thread(target=use, args=[1000 * n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_prints_there_is_heard_of_there(rt, nodes):
    @fastrt.remote
    def shout():
        sys.stdout.write("hello from there\n")
        return 1

    assert fastrt.get(shout.remote(), timeout=60) == 1
    assert any("hello from there" in line for line in iter(nodes[1].process.stdout.readline, ""))


LARGE_CODE = """
import os

import fastrt

closure = os.urandom(5 << 20)

@fastrt.remote
def of_program():
    return len(closure)

@fastrt.remote(num_cpus=0)
class Actor:
    data = os.urandom(5 << 20)

    def size(self):
        return len(self.data)

with fastrt.init(address=os.environ["HEAD"], runtime_dir=os.environ["FASTRT_RUNTIME_DIR"]):
    assert fastrt.get([of_program.remote(), Actor.remote().size.remote()], timeout=60) == [5 << 20] * 2
    print("done")
"""


def test_functions_and_classes_of_programs_that_ended_leave_the_other_node(rt, nodes, look_there, program, wait_until):
    def used():
        return [usage["bytes_used"] for usage in (fsck.usage(store_client.require().client), look_there()[0])]

    before = used()
    programs = [program(LARGE_CODE, HEAD=nodes[0].head) for _ in range(3)]
    assert all("done" in one.finish()[0] for one in programs)
    wait_until(
        lambda: all(now < then + (1 << 20) for now, then in zip(used(), before, strict=True)),
        "the functions to leave both stores",
    )


def test_nothing_is_left_on_the_other_node(rt, look_there, wait_until):
    def clean():
        usage, problems = look_there()
        return usage["objects"] == usage["functions"] and not usage["tasks"] and not problems

    wait_until(clean, "a clean arena there")
