"""Tasks that wait for a placement group: they end when it is reserved, and their value is the group.

Such a task has a demand that names a group, and takes no resources. No worker runs it: the daemon seals its result once
all bundles of the group have their resources, or refuses it once the group can never get them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastrt._core.tasks import admission
from fastrt._core.tasks import tasks as core
from fastrt.errors import FastrtError, InfeasibleTaskError, NotFoundError
from fastrt.node.group_records import GroupRecords
from fastrt.node.groups import Groups
from fastrt.node.keys import TaskKey, pair_of
from fastrt.store.client import Store
from fastrt.store.serialize import serialize
from fastrt.tasks.actor_records import group_of_bundle

_KNOWN_S = 2.0  # after which the records tell whether a group is there that has not become known


class GroupWaits:
    """The tasks of one node that wait for groups.

    Args:
        store: the daemon's attachment.
        groups: knows which groups are reserved.
        records: say whether a group is there that `groups` does not know yet.
        states: returns the state of each of some tasks, and the client that has claimed it.
        refuse: ends a task with an error.
    """

    def __init__(
        self,
        store: Store,
        groups: Groups,
        records: GroupRecords,
        states: Callable[[list[TaskKey]], list[tuple[int, int]]],
        refuse: Callable[[TaskKey, FastrtError], None],
    ) -> None:
        self._store = store
        self._client = store.client
        self._groups = groups
        self._records = records
        self._states = states
        self._refuse = refuse
        self._tasks: dict[TaskKey, tuple[str, float]] = {}  # the group that each waits for, and since when

    def add(self, task: TaskKey, group: str, now: float) -> None:
        """Let a task wait for a group."""
        self._tasks.setdefault(task, (group, now))

    def drop_ended(self) -> None:
        """Forget the tasks that have ended: they were cancelled while they waited."""
        tasks = list(self._tasks)
        for task, (state, _) in zip(tasks, self._states(tasks), strict=True):
            if state == admission.GONE:
                del self._tasks[task]

    def answer(self) -> None:
        """Finish the tasks whose groups have an outcome."""
        now = time.monotonic()
        for task, (name, since) in list(self._tasks.items()):
            ready, why = self._groups.is_ready(name), self._groups.why_gone(name)
            keys = (self._groups.keys_of(name) or []) if ready else []
            group = group_of_bundle(self._store, keys[0].record) if keys else None
            if group is not None:
                del self._tasks[task]
                if admission.claim(self._client, *pair_of(task)):
                    self._store.put_result(task.record, 0, serialize(group))
                    core.finish(self._client, task.record)
            elif ready is None and why is None and now - since > _KNOWN_S and self._records.has(name):
                self._tasks[task] = name, now  # this daemon has much to do, and has not read them yet
            elif ready or (ready is None and (why is not None or now - since > _KNOWN_S)):
                del self._tasks[task]
                never = InfeasibleTaskError(f"placement group {name} has {why}")
                gone = NotFoundError(f"placement group {name} is not there any more, or was made on another node")
                self._refuse(task, never if why else gone)
