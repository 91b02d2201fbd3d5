"""A daemon that takes over the records of a dead one, in one process."""

import os

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.tasks import actors
from fastrt.node.admission import Admission
from fastrt.node.cpu_room import Workers
from fastrt.store.client import Store
from fastrt.tasks.placement_group import PlacementGroup, _record
from fastrt.tasks.resources import parts_of

SLOT = parts_of({"slot": 1})


def joined(segment, kind):
    slot, gen = clients.admit(segment, os.getpid(), kind, "test")
    return Store(Client(segment, slot, gen), 0.0)


def admission_of(segment, folder):
    store = joined(segment, clients.KIND_DAEMON)
    store.socket_path = str(folder / "node.sock")
    nothing = Workers(0, 0, list)
    return Admission(store, dict(SLOT), {}, True, bool, bool, nothing, lambda: None, lambda line: None)


def test_bundle_whose_last_handle_is_gone_does_not_stop_the_next_daemon(tmp_path):
    tmp_path.chmod(0o700)
    segment = Segment.create(16 << 20, clients_max=8, objects_max=1 << 12, tasks_max=1 << 10, trace=False)
    segment.unlink()
    driver = joined(segment, clients.KIND_DRIVER)
    group = PlacementGroup("a" * 36, [{"slot": 1}], "PACK", "", segment.session)
    refs = _record(driver, group, [SLOT], False)
    first = admission_of(segment, tmp_path)
    ((actor, _),) = actors.demanding(driver.client)
    assert first.may_start(actor, actors.info(driver.client, actor))
    refs.clear()  # the first daemon dies before it ends the bundle
    second = admission_of(segment, tmp_path)
    second.take_over(False)
    assert second.groups.rows() == []
    first.close()
    second.close()
