"""Tasks that a killed process has left: they end once nothing refers to their results.

Recovery marks their records, so a daemon that takes over finds them, too. One that has not started is dropped. One that
runs is interrupted as by `fastrt.cancel`, and what it has submitted is an orphan from then on.
"""

from __future__ import annotations

import contextlib

from fastrt._core.tasks.orphan_tasks import orphan_children, orphans
from fastrt.errors import LockStuck
from fastrt.store.client import Store
from fastrt.tasks.cancel import cancel_record

_DROPPED = "was dropped: its process was killed, and nothing refers to its result"


class OrphanTasks:
    """The tasks of one node whose processes were killed.

    Args:
        store: the daemon's attachment.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._may_be_left = False

    def find(self) -> None:
        """Look for those that the processes of the last recoveries have left, and end the unused ones."""
        self._may_be_left = True
        self.end_unused()

    def end_unused(self) -> None:
        """End those to whose results nothing refers. Their end may release the results of others.

        A stopped process that holds a lock puts it off until the next call.
        """
        found = None
        with contextlib.suppress(LockStuck):
            while self._may_be_left and found != []:
                found, has_others = orphans(self._store.client)
                self._may_be_left = has_others or bool(found)
                for record, number in found:  # each is cancelled then, and so no orphan any more
                    if cancel_record(self._store, record, number, _DROPPED):
                        orphan_children(self._store.client, record, number)
