"""The policies of tasks that a worker runs: retries, delays, timeouts, environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastrt._core.tasks import submission
from fastrt.errors import FastrtError, SerializationError
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
        """Return a task's policy; the default policy if the task was submitted without one.

        Raises:
            FastrtError: it cannot be loaded here, as a class in it is of a module that this process lacks.
        """
        ref = submission.policy_of(self._store.client, task)
        if ref is None:
            return _PLAIN
        found = self._loaded.get(ref.objref)
        if found is None:
            try:
                found = self._loaded[ref.objref] = self._store.load(ref)
            except FastrtError:
                raise
            except (Exception, SystemExit) as exc:  # code of a class's module runs here and may raise anything
                raise SerializationError(f"this worker cannot load the options of the task: {exc}") from exc
        return found

    def of_failed(self, task: int) -> Policy:
        """Return the policy of a task that failed; the default policy if it failed because its own cannot be loaded."""
        try:
            return self.of(task)
        except FastrtError:
            return _PLAIN
