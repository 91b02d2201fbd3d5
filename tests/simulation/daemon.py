"""The death of a node's daemon in the simulator, and the next one, which takes over the arena and the processes.

What was on its way to the daemon that died is lost, what is sent later reaches the next one. That one recovers the
slot of the old one, reads the records, and learns the processes of actors a moment later, from the zygote. Then the
uplink, whose connection has ended, sends everything that it knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .node import Node

GAP_S = (0.05, 0.8)  # between two daemons
COUNT_S = (0.001, 0.05)  # until the zygote has named its processes
FORK_WAIT_S = 0.005  # between two looks for processes that the zygote was ordered to fork before


class Lives:
    """The daemons of one node, one after the other.

    Args:
        node: the node.

    Attributes:
        number: of the daemon that runs, or ran last.
        is_alive: whether it runs.
        is_counting: whether it waits for the zygote to name the processes.
        forking: processes that the zygote was ordered to fork and that have not begun.
    """

    def __init__(self, node: Node) -> None:
        self._node, self._world = node, node.world
        self._held: list[Callable[[], None]] = []
        self._asking: dict[Any, Any] = {}
        self.number = self.forking = 0
        self.is_alive, self.is_counting = True, False

    def reach(self, number: int, handle: Callable[[], None]) -> None:
        """Deliver a message that was sent when the daemon of that number ran, or was awaited."""
        if number != self.number or not self._node.alive:
            return  # lost with the daemon that it was sent to
        if self.is_alive:
            handle()
        else:
            self._held.append(handle)

    def ask(self, link: Any, question: Any) -> None:
        """Note a question of a process, which asks the next daemon if this one dies before it answers."""
        self._asking[link] = question

    def kill(self) -> None:
        """Kill the daemon; another one starts a moment later."""
        node = self._node
        if not self.is_alive or not node.alive:
            return
        self._world.say(f"{node.host}: the daemon is killed")
        self.is_alive, self.number = False, self.number + 1
        node.stop_daemon()
        self._world.after(self._world.rng.uniform(*GAP_S), self._start)

    def _start(self) -> None:
        node, old = self._node, self._node.client.index
        if not node.alive:
            return
        node.segment.take_over()
        node.start_daemon()
        node.janitor.bury(old, os.getpid(), "ended")
        node.janitor.end_round()
        self.is_alive = self.is_counting = True
        node.admission.take_over(True)
        self._world.say(f"{node.host}: another daemon has started")
        if node.uplink.process.alive:
            node.uplink.process.call(node.uplink.lasting.deliver, None)
        held, self._held = self._held, []
        for handle in held:
            handle()
        asking, self._asking = self._asking, {}
        for link, question in asking.items():
            if not link.answer.done():
                node.on_message(link, question)
        self._world.after(self._world.rng.uniform(*COUNT_S), partial(self._count, self.number))
        node.after_step()

    def _count(self, number: int) -> None:
        """Take the list of processes from the zygote."""
        node = self._node
        if not node.alive or not self.is_alive or number != self.number:
            return
        if self.forking:
            self._world.after(FORK_WAIT_S, partial(self._count, number))
            return
        for host in node.hosts:
            node.actors.started(host.actor, host.pid, True)
        self.is_counting = False
        node.admission.on_all_processes()
        node.tend_actors()
        node.after_step()
