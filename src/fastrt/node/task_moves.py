"""Where the placed tasks are: reads their records, and reports the moves to `placing`.

A node can have 100,000 tasks on other nodes. Of a task that has not moved, one word is compared (`admission.Watch`).
"""

from __future__ import annotations

from collections.abc import Callable

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import admission
from fastrt.node.keys import TaskKey, pair_of
from fastrt.node.placing import BLOCKED, ELSEWHERE, GONE, HERE, WAITING, Placing


class TaskMoves:
    """The tasks that a node has placed.

    Args:
        client: an attachment to the session.
        placing: the node's.
        runs_here, is_blocked: as for `Admission`.
    """

    def __init__(
        self, client: Client, placing: Placing, runs_here: Callable[[int], bool], is_blocked: Callable[[int], bool]
    ) -> None:
        self._client, self._placing = client, placing
        self._runs_here, self._is_blocked = runs_here, is_blocked
        self._watch = admission.Watch(client)
        self._claimed: dict[TaskKey, int] = {}  # tasks that a worker has claimed: its client
        self.add = self._watch.add

    def states(self, tasks: list[TaskKey]) -> list[tuple[int, int]]:
        """Return the state of each task, and the client that has claimed it."""
        return admission.states(self._client, [pair_of(task) for task in tasks])

    def place_of(self, state: int, client: int) -> int:
        """Return where a task is by its state and the client that has claimed it."""
        if state == admission.GONE:
            return GONE
        if state == admission.WAITING:
            return WAITING
        if state != admission.QUEUED and not self._runs_here(client):
            return ELSEWHERE
        return BLOCKED if state != admission.QUEUED and self._is_blocked(client) else HERE

    def report(self, now: float) -> None:
        """Report the tasks that have moved since the last call."""
        for task, state, client in self._watch.look():
            if state in (admission.RUNNING, admission.BLOCKED) and self._runs_here(client):
                self._claimed[task] = client
            else:
                self._claimed.pop(task, None)
                self._placing.moved(task, self.place_of(state, client), now)
        for task, client in self._claimed.items():  # a get does not change the word of its task
            self._placing.moved(task, self.place_of(admission.RUNNING, client), now)

    def look_for_lost_orders(self) -> None:
        """Have the next `report` name the tasks that the uplink has not forwarded: a lost order changes nothing."""
        for entry in self._placing.ordered():
            if isinstance(entry.key, TaskKey):
                self._watch.add(entry.key)
