"""Where the placed tasks are: reads their records, and reports the moves to `placing`."""

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
        self._watch: admission.Watch[TaskKey] = admission.Watch(client)

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
        """Report the placed tasks that have moved, and those that workers run: they may sleep now."""
        followed, self._placing.followed = self._placing.followed, {}
        for key, is_placed in followed.items():
            if isinstance(key, TaskKey):
                (self._watch.add if is_placed else self._watch.remove)(key)
        for task, state, client in self._watch.moved():
            self._placing.moved(task, self.place_of(state, client), now)
