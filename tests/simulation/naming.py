"""Named actors in the simulator: drivers of any node create and find them, and the invariants of names.

The invariants: the actor that is found has the name; without faults, a name that an actor has from the begin of a
search to its end is found, and cannot be given to another one; a name that no actor has is free. Two nodes that use one
name at the same moment both succeed: docs/actors.md says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from fastrt._core.objects import handles
from fastrt._core.tasks import actors
from fastrt.errors import FastrtError, StaleReferenceError
from fastrt.store import messages
from fastrt.tasks.actor_handle import _FIND_TRIES

if TYPE_CHECKING:
    from .cluster import Cluster
    from .members import Driver, Member
    from .world import Process


class _Asking:
    """The connection of a process to the daemon, for one question."""

    def __init__(self, process: Process, number: int) -> None:
        self._process, self._number = process, number
        self.answer: asyncio.Future[messages.ActorFound] = asyncio.get_running_loop().create_future()

    def fileno(self) -> int:
        return self._number

    def send(self, message: messages.ActorFound) -> None:
        self._process.call(lambda: self.answer.done() or self.answer.set_result(message))


class Naming:
    """The named actors of one cluster.

    Args:
        cluster: the simulated cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._asked = 0
        self._made: dict[str, int] = {}  # how many actors were given each name

    def _homes(self, name: str) -> set[str]:
        """The nodes with an actor of a name, and those whose daemon is dead: nothing reads their records here."""
        nodes = [node for node in self._cluster.nodes if node.alive]
        return {node.host for node in nodes if not node.daemons.is_alive or name in actors.names(node.client)}

    async def _find(self, member: Member, name: str) -> Any:
        """Return the handle of the actor with a name; None: there is none. As `fastrt.get_actor`."""
        found = actors.find(member.client, name)
        for _ in range(_FIND_TRIES if found is None else 0):
            self._asked += 1
            asking = _Asking(member.process, self._asked)
            member.node.ask_daemon(asking, messages.FindActor(name))
            answer = await asking.answer
            if not answer.objref:
                return None
            with contextlib.suppress(StaleReferenceError):  # the uplink died, or has dropped it already
                return handles.acquire(member.client, answer.objref, answer.entry)
        return found

    async def find(self, driver: Driver, key: str) -> None:
        """Find an actor by its name; its handle is then among the driver's references."""
        program, where = self._cluster.program, f"the driver on {driver.node.host}"
        name = program.actors[key].name
        before = self._homes(name)
        found = await self._find(driver, name)
        if found is None:
            if not self._cluster.faults and before & self._homes(name):
                self._world.violation(f"{where} did not find {name}, an actor of {before}")
            return
        driver.refs[key] = found
        await driver.ready(found)
        try:
            plan = await driver.load(found)
        except FastrtError as exc:
            self._cluster.check_error(key, exc.with_traceback(None), where)
            return
        self._world.say(f"{where} found {plan.name} as {key}, an actor of the name {name}")
        self._cluster.check(key, plan, where)

    async def create(self, driver: Driver, key: str) -> None:
        """Create an actor with a name, unless another one has it."""
        spec, where = self._cluster.program.actors[key], f"the driver on {driver.node.host}"
        before, made = self._homes(spec.name), self._made.get(spec.name, 0)
        is_taken = await self._find(driver, spec.name) is not None
        is_taken = is_taken or not driver.node.create_actor(driver, spec, driver.refs)
        after = self._homes(spec.name)
        if is_taken and not before | after and self._made.get(spec.name, 0) == made:
            self._world.violation(f"{where} cannot use the name {spec.name}, which no actor has")
        if not is_taken and not self._cluster.faults and before & (after - {driver.node.host}):
            self._world.violation(f"{where} gave the name {spec.name} to {key}; an actor of {before} has it")
        if not is_taken:
            self._made[spec.name] = self._made.get(spec.name, 0) + 1
