"""Tasks that a killed process has left: they end once nothing refers to their results.

Recovery marks their records, so a daemon that takes over finds them, too. One that has not started is dropped. One that
runs is interrupted as by `fastrt.cancel`, and what it has submitted is an orphan from then on.
"""

from __future__ import annotations

from fastrt._core.tasks.orphan_tasks import orphan_children, orphans, unused
from fastrt.store.client import Store
from fastrt.tasks.cancel import cancel_record


class OrphanTasks:
    """The tasks of one node whose processes were killed.

    Args:
        store: the daemon's attachment.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left: list[tuple[int, int]] = []  # (record, id) of each

    def find(self) -> None:
        """Look for those that the processes of the last recoveries have left, and end the unused ones."""
        self._left = orphans(self._store.client)
        self.end_unused()

    def end_unused(self) -> None:
        """End those to whose results nothing refers. Their end may release the results of others.

        Raises:
            LockStuck: a stopped process holds a lock; call again.
        """
        free = self._left
        while free:
            free, self._left = unused(self._store.client, self._left)
            for record, number in free:
                if cancel_record(
                    self._store, record, number, "was dropped: its process was killed, and nothing refers to its result"
                ):
                    self._left += orphan_children(self._store.client, record, number)
