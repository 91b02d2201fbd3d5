"""The policies of tasks that a worker runs: retries, delays, timeouts, environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastrt._core.tasks import submission
from fastrt.tasks.options import Policy

if TYPE_CHECKING:
    from fastrt.store.client import Store

_PLAIN = Policy()


class Policies:
    """Loads the policies of tasks, each one once.

    Args:
        store: this process's attachment.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loaded: dict[int, Policy] = {}  # by objref

    def of(self, task: int) -> Policy:
        """Return a task's policy; the default policy if the task was submitted without one."""
        ref = submission.policy_of(self._store.client, task)
        if ref is None:
            return _PLAIN
        found = self._loaded.get(ref.objref)
        if found is None:
            found = self._loaded[ref.objref] = self._store.load(ref)
        return found
