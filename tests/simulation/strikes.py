"""Faults that come with a message: where and when an aimed run has them (`aims`)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastrt.cluster import pressure

from .network import Trap
from .node import Node

if TYPE_CHECKING:
    from .cluster import Cluster

ROOM = 4  # for tasks of other nodes, on a node that forwards all
BACK_S = 1.0  # until another node comes in the place of one that is lost


@dataclass(frozen=True)
class Strike:
    """A fault that comes with a message.

    Attributes:
        kind: of the message; see `Trap.kind`.
        sender, receiver: the numbers of the nodes, from 1; 0: any.
        left: how many of these messages are to come; one of these.
        delay_s: from the message to the fault, at most.
        then: the faults; each is a method of `Strikes` and its arguments.
    """

    kind: str
    sender: int
    receiver: int
    left: tuple[int, ...]
    delay_s: float
    then: tuple[tuple[Any, ...], ...]


class Strikes:
    """The strikes of one run: each waits for its message once the one before it has come.

    Args:
        cluster: the simulated cluster.
        strikes: these.
    """

    def __init__(self, cluster: Cluster, strikes: tuple[Strike, ...]) -> None:
        self._cluster, self._network = cluster, cluster.world.network
        self._rng = random.Random(cluster.plan.seed ^ 0xA1)
        self._left = list(strikes)
        self._receiver = ""  # of the last strike's message
        for one in strikes:  # the names say what may happen, as those of other faults
            cluster.faults.append(f"{one.kind!r} of n{one.sender}: {one.then}")
            cluster.faults += [f"kill the uplink of n{k}" for what, k, *_ in one.then if what == "kill_uplink"]

    def next(self) -> None:
        """Have the next strike wait for its message."""
        if self._left:
            one = self._left.pop(0)
            receiver = f"n{one.receiver}" if one.receiver else ""
            delay_s = one.delay_s * self._rng.random()
            trap = Trap(one.kind, self._rng.choice(one.left), delay_s, lambda host: None, receiver)
            trap.then = lambda host: self._strike(one, trap, host)
            for sender in [one.sender] if one.sender else [node.number for node in self._cluster.nodes]:
                self._network.traps.setdefault(f"n{sender}", []).append(trap)

    def _strike(self, one: Strike, trap: Trap, receiver: str) -> None:
        if trap.is_over or all(driver.is_done for driver in self._cluster.drivers):
            return
        trap.is_over = True
        for traps in self._network.traps.values():
            if trap in traps:
                traps.remove(trap)
        self._receiver, stream = receiver, trap.stream
        self._cluster.world.say(f"STRIKE {one}")
        self.next()
        for name, *args in one.then:
            getattr(self, name)(stream, *args)

    def _seconds(self, between: tuple[float, float]) -> float:
        return self._rng.uniform(*between)

    def break_between(self, stream: Any, first: int, second: int, between: tuple[float, float]) -> None:
        """Break the streams between two nodes; the second notices later."""
        self._network.reset(f"n{first}", f"n{second}", self._seconds(between))

    def break_later(self, stream: Any, first: int, second: int, after_s: float, between: tuple[float, float]) -> None:
        """Break the streams between two nodes a moment later; the second notices later still."""
        self._cluster.world.after(after_s, lambda: self.break_between(stream, first, second, between))

    def break_others(self, stream: Any, between: tuple[float, float]) -> None:
        """Break the streams between the message's receiver and all nodes but its sender; those notice later."""
        ends = {one.host for one in stream.processes}
        for node in self._cluster.nodes:
            if node.host not in ends:
                self._network.reset(self._receiver, node.host, self._seconds(between))

    def stall(self, stream: Any, sender: int, between: tuple[float, float]) -> None:
        """Have what a node sends over the message's stream from now on come late."""
        side = next(k for k, one in enumerate(stream.processes) if one.host == f"n{sender}")
        stream.last_at[side] = max(stream.last_at[side], self._cluster.world.now + self._seconds(between))

    def kill_uplink(self, stream: Any, node: int) -> None:
        """Kill the uplink of a node."""
        found = self._cluster.nodes[node - 1]
        if found.alive and found.uplink.process.alive:
            found.kill(found.uplink)

    def kill_daemon(self, stream: Any, node: int) -> None:
        """Kill the daemon of a node."""
        self._cluster.nodes[node - 1].daemons.kill()

    def lose_node(self, stream: Any, node: int) -> None:
        """Lose a node; another one comes in its place."""
        cluster = self._cluster
        found = cluster.nodes[node - 1]
        if found.alive:
            found.lose()
            cluster.lost.append(found)
            cluster.world.after(BACK_S, lambda: cluster.nodes.__setitem__(node - 1, Node(cluster, node, 1 + node % 2)))


def changes(cluster: Cluster) -> list[tuple[Any, str, Any]]:
    """The replacements of an aimed run, for `patched`: in some, each node forwards all tasks that no worker has begun.

    Args:
        cluster: the simulated cluster.
    """

    def forward_all(self: pressure.Pressure, now: float, queued: int, idle: int, done: int) -> int:
        self.room = ROOM
        return queued

    return [(pressure.Pressure, "excess", forward_all)] if cluster.family.restless else []
