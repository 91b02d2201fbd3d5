"""The daemon's part in the end of actors, on an arena without one: how a process ended is never forgotten."""

import contextlib
import os

import pytest

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import functions
from fastrt._core.repair.fsck import fsck
from fastrt._core.tasks import actors
from fastrt.node.actors import Actors
from fastrt.node.janitor import Janitor
from fastrt.store.client import Store


@contextlib.contextmanager
def arena():
    """A store of its own: what the test holds of it is gone before anybody looks what is left."""
    segment = Segment.create(64 << 20, clients_max=64, objects_max=1 << 12, tasks_max=1 << 12, trace=False)
    index, gen = clients.admit(segment, os.getpid(), clients.KIND_DRIVER, "test")
    client = Client(segment, index, gen)
    try:
        yield Store(client, 0.0)
        assert fsck(client, True) == []
    finally:
        client.close()
        segment.unlink()


def unheard(actor):
    pass


def daemon(store, say=print, ended=unheard):
    """Return the `Actors` of a daemon that has just started."""
    return Actors(store, unheard, lambda actor, info, again: True, unheard, ended, {}, say)


def make(store, max_restarts):
    """An actor that wants a process: its object, and its index."""
    ref = store.put(["plan"])
    cls = functions.add_function(store.client, b"c" * 16, store.put(b"class" * 10), "Counter")
    return ref, actors.create(store.client, ref, cls.objref, "", max_restarts, False)


def test_end_on_another_node_is_known_to_a_daemon_that_looks_before_it_reads_any_message():
    with arena() as store:
        ref, actor = make(store, 1)
        for how, node_lost in (("node two has ended it", False), ("it fell on node three", True)):
            assert actors.carry(store.client, actor, actors.info(store.client, actor)["gen"])
            assert not actors.info(store.client, actor)["node_lost"]
            actors.drop(store.client, actor, how, node_lost)
            info = actors.info(store.client, actor)
            assert (info["how"], info["node_lost"]) == (how, node_lost)
            daemon(store).tend()
        assert actors.info(store.client, actor)["reason"] == (
            "it fell on node three; it had been started again 1 times (max_restarts=1)"
        )
        del ref


@pytest.mark.parametrize(
    ("away", "words"), [(False, "its process 77 exited"), (True, "the process that forwarded its calls, 77 exited")]
)
def test_end_of_a_process_is_known_to_the_daemon_that_takes_the_place_of_the_one_that_saw_it(away, words):
    with arena() as store:
        ref, actor = make(store, 0)
        index, gen = clients.admit(store.client.segment, os.getpid(), clients.KIND_ACTOR, "actor")
        other = Client(store.client.segment, index, gen)
        assert actors.carry(other, actor, actors.info(other, actor)["gen"]) if away else actors.enter(other, actor)
        other.close()
        daemon(store).fell(index, 77, "exited")
        Janitor(store).bury(index, 77, "exited")
        daemon(store).tend()
        assert actors.info(store.client, actor)["reason"] == words
        del ref


def test_actor_that_waits_for_a_place_where_no_actor_has_one_ends_with_the_limit_that_forbids_it(monkeypatch):
    now, said = 100.0, []
    monkeypatch.setattr("fastrt.node.actors.resource.getrlimit", lambda which: (64, 64))
    monkeypatch.setattr("fastrt.node.actors.time.monotonic", lambda: now)
    with arena() as store:
        made = [make(store, 0) for _ in range(3)]
        tending = daemon(store, said.append)
        tending.tend()
        assert [actors.info(store.client, actor)["reason"] for _, actor in made] == ["", "", ""]
        assert "an actor waits until another process ends" in said[0]
        assert tending.patience_s() == 10.0
        now += 11.0
        tending.tend()
        for _, actor in made:
            assert actors.info(store.client, actor)["reason"] == (
                "no process could be started for it: the daemon may open no more files (0 processes, by ulimit -n); "
                "raise the limit"
            )
        assert len(said) == 1
        made.clear()


def test_actor_waits_without_end_for_the_place_of_another_one(monkeypatch):
    now = 100.0
    monkeypatch.setattr("fastrt.node.actors.resource.getrlimit", lambda which: (136, 136))  # for two processes
    monkeypatch.setattr("fastrt.node.actors.time.monotonic", lambda: now)
    with arena() as store:
        first, second = make(store, 0), make(store, 0)
        tending = daemon(store, lambda line: None)
        tending.tend()
        tending.started(first[1], 1, True)
        now += 100.0
        tending.tend()
        assert tending.patience_s() == float("inf")
        now += 100.0
        tending.tend()
        assert actors.info(store.client, second[1])["reason"] == ""
        del first, second


def joining(store, made, others):
    """Be the process of an actor that has just been built, and drop the last handle of it."""
    ref, actor = made.pop()
    index, gen = clients.admit(store.client.segment, os.getpid(), clients.KIND_ACTOR, "actor")
    others.append(Client(store.client.segment, index, gen))
    assert actors.enter(others[0], actor)
    actors.alive(others[0], actor)
    del ref


@pytest.mark.parametrize(("failures", "step"), [(0, "lacks_process"), (3, "info")])
def test_actor_whose_process_joins_while_the_daemon_looks_is_left_to_its_process(monkeypatch, failures, step):
    with arena() as store:
        made, others, ended = [make(store, 0)], [], []
        actor = made[0][1]
        tending = daemon(store, ended=ended.append)
        tending.tend()
        for _ in range(failures):
            tending.refused(actor, "no memory")
        look = getattr(actors, step)

        def look_and_join(client, index):
            found = look(client, index) if step == "info" else None  # the daemon acts by what was there before
            if made:
                joining(store, made, others)
            return look(client, index) if found is None else found

        monkeypatch.setattr(actors, step, look_and_join)
        tending.tend()
        monkeypatch.undo()
        found = actors.info(store.client, actor)
        assert (found["state"], found["reason"], ended) == (actors.LIVE, "", [])
        assert actors.is_over(others[0], actor)
        others[0].close()
        Janitor(store).bury(others[0].index, 77, "exited")
        tending.tend()
        assert ended == [actor]
