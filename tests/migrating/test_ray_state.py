"""Rows of `ray.util.state` have what Ray's have."""

import os
import threading

import pytest

from fastrt import ray
from fastrt.ray.util.state import get_actor, list_actors, list_objects, list_tasks, list_workers


@ray.remote
class Holder:
    def __init__(self):
        self.held = None

    def pid(self):
        return os.getpid()

    def hold(self):
        self.held = ray.put(b"held")
        return self.held.hex()

    def wait(self, path):
        while not os.path.exists(path):
            threading.Event().wait(0.01)


@pytest.fixture(scope="module", autouse=True)
def session(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("session")
        patch.setenv("FASTRT_RUNTIME_DIR", str(folder / "runtime"))
        with ray.init(num_cpus=1, object_store_memory=64 << 20, namespace="job", resources={"seat": 1}) as context:
            yield context


def row_of(actor):
    (row,) = list_actors(filters=[("actor_id", "=", actor._actor_id.hex())])
    return row


def test_an_actor_without_a_name_is_in_a_namespace():
    there, other = Holder.remote(), Holder.options(namespace="other").remote()
    named = Holder.options(name="named", namespace="third").remote()
    assert [row_of(actor).ray_namespace for actor in (there, other, named)] == ["job", "other", "third"]


def test_an_actor_that_waits_is_on_no_node_yet(session):
    first = Holder.options(resources={"seat": 1}).remote()
    pid = ray.get(first.pid.remote())
    second = Holder.options(resources={"seat": 1}).remote()
    assert (row_of(second).state, row_of(second).node_id, row_of(second).pid) == ("PENDING_CREATION", None, 0)
    assert (row_of(first).state, row_of(first).node_id, row_of(first).pid) == ("ALIVE", session["node_id"], pid)


def test_a_dead_actor_has_the_pid_of_its_process(wait_until):
    actor = Holder.remote()
    pid = ray.get(actor.pid.remote())
    ray.kill(actor)
    wait_until(lambda: row_of(actor).state == "DEAD", "the end of the actor")
    (row,) = list_actors(filters=[("pid", "=", pid)])
    assert row.actor_id == actor._actor_id.hex()


def test_an_actor_whose_last_handle_is_gone_is_listed_as_dead(wait_until):
    actor = Holder.options(name="gone", namespace="past").remote()
    pid, number = ray.get(actor.pid.remote()), actor._actor_id.hex()
    del actor
    wait_until(lambda: list_actors(filters=[("actor_id", "=", number), ("state", "=", "DEAD")]), "the dead actor's row")
    (row,) = list_actors(filters=[("actor_id", "=", number)])
    assert (row.class_name, row.name, row.ray_namespace, row.pid) == ("Holder", "gone", "past", pid)
    assert "handle" in row.death_cause["actor_died_error_context"]["error_message"]
    assert get_actor(number).state == "DEAD"


def test_a_queued_call_is_at_its_first_attempt(tmp_path, wait_until):
    actor = Holder.remote()
    calls = [actor.wait.remote(str(tmp_path / "go on")) for _ in range(3)]

    def attempts():
        return [row.attempt_number for row in list_tasks(filters=[("func_or_class_name", "=", "Holder.wait")])]

    wait_until(lambda: len(attempts()) == 3, "the rows of three calls")
    assert attempts() == [0, 0, 0]
    (tmp_path / "go on").touch()
    ray.get(calls)


def test_the_kind_of_a_process_that_has_put_an_object_is_in_its_row():
    actor, ours = Holder.remote(), ray.put(b"ours")
    theirs = ray.get(actor.hold.remote())
    rows = {row.object_id: row for row in list_objects(limit=0)}
    assert (rows[theirs].type, rows[theirs].pid) == ("WORKER", ray.get(actor.pid.remote()))
    assert (rows[ours.hex()].type, rows[ours.hex()].pid) == ("DRIVER", os.getpid())


def test_functions_are_no_objects_and_handles_of_actors_are_named_so():
    @ray.remote
    def double(x):
        return 2 * x

    before = {row.object_id for row in list_objects(limit=0)}
    value, result = ray.put(1), double.remote(3)
    assert ray.get(result) == 6
    assert {row.object_id for row in list_objects(limit=0)} - before == {value.hex(), result.hex()}
    actor = Holder.remote()
    ray.get(actor.pid.remote())
    handles = [row for row in list_objects(limit=0) if row.reference_type == "ACTOR_HANDLE"]
    assert [row for row in handles if actor._actor_id.hex().startswith(row.object_id)] != []


@pytest.mark.parametrize("word", ["1", 1, True, "true", "True"])
def test_filter_of_a_flag_takes_words_and_digits(word, wait_until):
    def alive(filters=None):
        return [row.worker_id for row in list_workers(filters=filters, limit=0) if row.is_alive]

    wait_until(lambda: alive([("is_alive", "=", word)]) == alive() != [], "the living")  # a worker may end just then
    other = {"1": "0", 1: 0}.get(word, "false")
    assert [row for row in list_workers(filters=[("is_alive", "=", other)], limit=0) if row.is_alive] == []
