"""Restricts a worker, or an actor's process, to the devices (GPUs) that its task or actor was given.

Libraries of devices read their variables once, so a process serves one set of devices: a worker leaves after a task
with devices, and another one starts. If code that ran in a worker before has looked for devices already, the worker
gives the task back and leaves. The process's slot in the arena names its devices until it has ended: only then another
process can get them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastrt import devices as known
from fastrt._core.objects import handles
from fastrt._core.tasks import actors, admission
from fastrt._core.tasks import tasks as core
from fastrt.tasks.resources import Demand, device_amounts, device_parts

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.ref import ObjectRef


class GivenBackError(Exception):
    """The task is not run now: it was queued again, or is kept until it can be."""


class ProcessDevices:
    """The devices of one worker or of an actor's process.

    Args:
        store: the process's attachment; `store.devices` are those of the node.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bits = 0

    def enter_task(self, task: int) -> bool:
        """Restrict this process to the devices of a task, before any code of the task is loaded.

        Args:
            task: claimed by this process.
        Returns:
            Whether the task has devices: the process must leave after it.
        Raises:
            GivenBackError: another process has to run it; this one must leave.
        """
        client = self._store.client
        id = core.info(client, task)["id"]
        bits = admission.devices_of(client, task, id)
        if not bits:
            return False
        if self._bits or known.are_open(known.of_bits(self._store.devices, bits)):
            if core.give_back(client, task):
                raise GivenBackError
            return True  # it was cancelled, and ends before its code runs
        self._enter(bits, admission.demand_of(client, task, id), id)
        return True

    def enter_actor(self, actor: int) -> bool:
        """Become the process of an actor, and restrict it to the actor's devices; False if it must not begin."""
        client = self._store.client
        about = actors.info(client, actor)
        demand = about["demand"]
        if demand is None or not self._store.devices:
            return actors.enter(client, actor)
        ref = handles.acquire(client, *demand)
        needs = bool(device_amounts(Demand.from_bytes(self._store.get(ref)).amounts))
        if not actors.enter(client, actor, needs):
            return False
        about = actors.info(client, actor)
        if needs:
            self._enter(about["devices"], ref, about["gen"] << 32 | actor)
        return True

    def _enter(self, bits: int, demand: ObjectRef, holder: int) -> None:
        self._bits = bits
        parts = device_parts(Demand.from_bytes(self._store.get(demand)).amounts)
        admission.hold_devices(self._store.client, bits, parts, holder)
        os.environ.update(known.restrict(known.of_bits(self._store.devices, bits)))
