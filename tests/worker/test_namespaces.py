"""Globals of code that is sent by value: the functions and classes of a module share them in each worker."""

import os
import threading

import pytest

import fastrt

pytestmark = pytest.mark.usefixtures("rt")

offset = 0
table = {"key": 0}
setting = "as sent"
sent_later = []
assigned_here = 1
texts = {"text": "here"}


class Config:
    value = 0

    def read(self):
        return self.value, offset


class Child(Config):
    pass


class Plain:
    limit = 1

    def read(self):
        return assigned_here


@fastrt.remote
class Holder:
    def assign(self, value):
        global setting
        setting = value

    def apply(self, function):
        return function()


def assign_all(value):
    global offset
    offset = value
    table["key"] = value
    Config.value = value


def add(x):
    return x + offset


def add_nested(x):
    def inner():
        return lambda y: y + offset

    return inner()(x)


def read_all(_=None):
    return offset, table["key"], Config.value, Config().read(), Child().value


def read_setting():
    return setting


@fastrt.remote(num_cpus=0.5)
def add_here(x):
    threading.Event().wait(0.01)  # long enough that several of them need several workers
    return os.getpid(), add(x)


def test_executor_initializer_sets_globals_that_the_mapped_functions_see(rt, wait_until):
    with fastrt.Executor(initializer=assign_all, initargs=(10,)) as executor:
        assert list(executor.map(add, range(3))) == [10, 11, 12]
        assert executor.submit(add_nested, 1).result() == 11
        assert executor.submit(lambda: add(5)).result() == 15
        assert executor.submit(read_all).result() == (10, 10, 10, (10, 10), 10)
        prepared = executor.submit(os.getpid).result()
        found = {}
        wait_until(
            lambda: prepared in found or found.update(fastrt.get([add_here.remote(1) for _ in range(4)])),
            "a task in a worker that the executor has prepared",
        )
        assert found[prepared] == 11
    assert (offset, table, Config.value) == (0, {"key": 0}, 0), "this process is none of the workers"


def test_pool_initializer_sets_globals_that_the_mapped_functions_see(rt):
    with fastrt.util.Pool(initializer=assign_all, initargs=(20,)) as pool:
        assert pool.map(add, range(3)) == [20, 21, 22]
        assert set(pool.imap_unordered(read_all, range(4))) == {(20, 20, 20, (20, 20), 20)}


def test_actor_and_the_functions_it_is_given_share_globals(rt):
    one, other = Holder.remote(), Holder.remote()
    fastrt.get(one.assign.remote("assigned"))
    assert fastrt.get([one.apply.remote(read_setting), other.apply.remote(read_setting)]) == ["assigned", "as sent"]
    assert fastrt.get(one.apply.remote(lambda: read_setting())) == "assigned"


def test_assignment_of_the_sender_reaches_functions_that_are_sent_after_it(rt):
    global sent_later
    assert fastrt.get(fastrt.remote(lambda: len(sent_later)).remote()) == 0
    sent_later.append(1)
    assert fastrt.get([fastrt.remote(lambda: len(sent_later)).remote() for _ in range(8)]) == [1] * 8
    sent_later = [1, 2, 3]
    assert fastrt.get([fastrt.remote(lambda: len(sent_later)).remote() for _ in range(8)]) == [3] * 8


def test_class_that_comes_back_to_its_own_process_keeps_its_attributes(rt):
    global assigned_here

    def change():
        Plain.limit = 2
        return Plain()

    assigned_here = 1
    method = Plain.read
    one = fastrt.get(fastrt.remote(change).remote())
    assigned_here = 5
    assert type(one) is Plain
    assert (Plain.read, one.limit, one.read()) == (method, 1, 5)


def test_function_that_comes_back_brings_the_globals_of_its_worker(rt):
    def change():
        texts["text"] = "there"
        return lambda: texts["text"]

    assert fastrt.get(fastrt.remote(change).remote())() == "there"
    assert texts["text"] == "here"


def test_functions_of_dicts_that_are_no_modules_share_nothing(rt):
    made = [{"__name__": __name__, "number": k} for k in range(3)]
    for namespace in made:
        exec("def read(): return number", namespace)  # noqa: S102
    assert fastrt.get([fastrt.remote(namespace["read"]).remote() for namespace in made]) == [0, 1, 2]


def test_jobs_and_environments_of_a_worker_do_not_share_globals(program):
    code = """
        from fastrt.store import namespaces

        assert namespaces.globals_of(("job 1", "m"), base := {}) is base
        namespaces.share()
        one = namespaces.globals_of(("job 1", "m"), {})
        assert namespaces.globals_of(("job 1", "m"), {}) is one
        assert namespaces.globals_of(("job 2", "m"), {}) is not one
        assert namespaces.globals_of(("job 1", "n"), {}) is not one
        outside = namespaces.enter("environment")
        assert namespaces.globals_of(("job 1", "m"), {}) is not one
        assert namespaces.enter(outside) == "environment"
        assert namespaces.globals_of(("job 1", "m"), {}) is one
        for k in range(200):
            namespaces.globals_of(("job 1", "m"), {})
            namespaces.globals_of((f"job {k}", "m"), {})
        assert namespaces.globals_of(("job 1", "m"), {}) is one, "what is in use is kept"
    """
    program(code).finish()


def test_worker_sends_functions_on_without_changing_other_workers(rt):
    @fastrt.remote
    def nested():
        return read_setting(), os.getpid()

    @fastrt.remote
    def outer():
        global setting
        setting = "of one worker"
        return [*fastrt.get([nested.remote() for _ in range(4)]), (setting, os.getpid())]

    found = fastrt.get(outer.remote())
    mine = found[-1][1]
    assert {text for text, pid in found if pid != mine} <= {"as sent", "of one worker"}
    assert all(text == "of one worker" for text, pid in found if pid == mine)


def test_lock_among_globals_is_named_with_the_path_to_it(rt):
    path = r"at uses_lock\.<global calls_lock>\.<global lock>.*_thread.lock"
    with pytest.raises(fastrt.SerializationError, match=path):
        fastrt.remote(uses_lock).remote()
    with pytest.raises(fastrt.SerializationError, match=r"at Locked\.method\.<global lock>"):
        fastrt.remote(Locked).remote()
    with pytest.raises(fastrt.SerializationError, match=r"at value\.<global lock>"):
        fastrt.put(calls_lock)


lock = threading.Lock()


def calls_lock():
    return lock


def uses_lock():
    return calls_lock()


class Locked:
    def method(self):
        return lock


# ---- what a remote function names is assigned after its first call ----


def helper():
    return "first"


def calls_helper():
    return helper()


def named_by_remote():
    return calls_helper()


named_remote = fastrt.remote(named_by_remote)
step = 0


class Reader:
    def read(self):
        return calls_helper()


@pytest.fixture
def restore_helper():
    global helper
    before = helper
    yield
    helper = before


def test_helper_that_is_defined_again_is_seen_by_a_remote_function_called_before(rt, restore_helper):
    global helper
    caller, reader = fastrt.remote(calls_helper), fastrt.remote(Reader)
    outer = fastrt.remote(lambda: fastrt.get(named_remote.remote()))
    demanding = fastrt.remote(calls_helper).options(num_cpus=0.5)

    def read():
        return fastrt.get([*(one.remote() for one in (caller, outer, demanding)), reader.remote().read.remote()])

    assert read() == ["first"] * 4

    def helper():
        return "second"

    assert read() == ["second"] * 4
    assert read() == ["second"] * 4


def test_value_that_is_assigned_again_is_seen_by_calls_from_then_on(rt):
    global step
    function = fastrt.remote(lambda: step)
    refs = []
    for step in range(5):  # noqa: B007
        refs.append(function.remote())
    assert fastrt.get(refs) == [0, 1, 2, 3, 4]
