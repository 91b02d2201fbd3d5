"""Placement groups whose records are written, and which a busy daemon has not read yet; all in one process."""

import contextlib
import os

import pytest

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.tasks import actors
from fastrt._core.tasks.submission import TaskOptions, submit
from fastrt.errors import InfeasibleTaskError, NotFoundError
from fastrt.ids import PlacementGroupID
from fastrt.node import admission, group_records, group_waits, placing
from fastrt.node.cpu_room import Workers
from fastrt.store.client import Store
from fastrt.tasks import functions
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.placement_group import PlacementGroup, _await_group, _record
from fastrt.tasks.resources import Demand, export, parts_of, within

SLOT = parts_of({"slot": 1})


class Node:
    """A driver and the part of a daemon that places tasks."""

    def __init__(self, folder, cluster):
        self.segment = Segment.create(16 << 20, clients_max=8, objects_max=1 << 12, tasks_max=1 << 10, trace=False)
        self.segment.unlink()
        self.driver, store = self.joined(clients.KIND_DRIVER), self.joined(clients.KIND_DAEMON)
        store.socket_path = str(folder / "node.sock")
        self.said = []
        self.daemon = admission.Admission(
            store, dict(SLOT), {}, cluster, bool, bool, Workers(0, 0, list), lambda: None, self.said.append
        )

    def joined(self, kind):
        slot, gen = clients.admit(self.segment, os.getpid(), kind, "test")
        return Store(Client(self.segment, slot, gen), 0.0)

    def group(self):
        """A group as `fastrt.placement_group` writes it, and what keeps it."""
        session = self.segment.session
        group = PlacementGroup(PlacementGroupID.made_on(session), [{"slot": 1}], "PACK", "", session)
        return group, _record(self.driver, group, [SLOT], False)

    def reads_all(self):
        """Have the daemon read the records of bundles, as it does between other work."""
        for actor, _ in actors.demanding(self.driver.client):
            self.daemon.may_start(actor, actors.info(self.driver.client, actor))
        self.daemon.refresh()

    def has_ended(self, ref):
        self.daemon.refresh()
        return bool(self.driver.wait([ref], 1, 0.0)[0])


@pytest.fixture(params=[True, False], ids=["cluster", "alone"])
def node(request, tmp_path, monkeypatch, drop_arguments):
    monkeypatch.setattr(group_waits, "_KNOWN_S", 0.0)
    monkeypatch.setattr(group_records, "_FRESH_S", 0.0)
    monkeypatch.setattr(placing, "_GRACE_S", 0.0)
    tmp_path.chmod(0o700)
    made = Node(tmp_path, request.param)
    with contextlib.closing(made.daemon):
        yield made
    vars(made).clear()  # unmaps the segment


def test_ready_waits_for_a_group_whose_records_are_not_read_yet(node):
    """`ready()` raised NotFoundError: after two seconds the daemon took the group for removed."""
    group, refs = node.group()
    ready = _await_group(node.driver, group)
    assert not node.has_ended(ready)
    assert not node.has_ended(ready)
    node.reads_all()
    assert node.has_ended(ready)
    assert node.driver.get(ready) == group
    del refs


def test_ready_of_a_group_that_nobody_has_read_and_that_is_removed_is_an_error(node):
    group, refs = node.group()
    ready = _await_group(node.driver, group)
    assert not node.has_ended(ready)
    node.daemon.remove_group(group.id)
    assert node.has_ended(ready)
    with pytest.raises(NotFoundError, match="is not there any more"):
        node.driver.get(ready)
    del refs


def inside(node, group):
    """Submit a task that gets its resources from a group."""
    function, _ = functions.export(node.driver, "inside", os.getpid)
    demand = export(node.driver, Demand(within(SLOT, group.id, 0)))
    return submit(node.driver.client, TaskOptions(function, 1, 0, demand=demand), ())


def test_task_of_a_group_whose_records_are_not_read_yet_waits_without_a_word(node):
    """Each printed a warning that no node had the group, or was refused where no node can join."""
    group, refs = node.group()
    task = inside(node, group)
    assert not node.has_ended(task)
    assert not node.has_ended(task)
    node.reads_all()
    assert admission.core.queued(node.driver.client) == 1, "it may run"
    assert node.said == []
    del refs


def test_task_of_a_group_that_nobody_has_read_and_whose_records_end_is_an_error(node):
    group, refs = node.group()
    task = inside(node, group)
    assert not node.has_ended(task)
    for actor, _ in actors.demanding(node.driver.client):
        kill_in(node.driver, actor, "its creator found no room for another bundle")
    assert node.has_ended(task)
    with pytest.raises(InfeasibleTaskError, match="was removed"):
        node.driver.get(task)
    assert node.said == []
    del refs
