"""Where workers wait for each other, round after round. A worker that takes a lost one's place begins with the round
that is open, whatever number it gives its own first one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fastrt.ps.endpoint import Caller
from fastrt.ps.errors import ServerLostError, TableTimeoutError
from fastrt.ps.wire import BrokenWireError

_LOOK_S = 0.1  # how often one that waits is looked at: its connection's end wakes nobody


class Barrier:
    """All rounds of one cluster.

    Args:
        workers: how many must come.
        changed: notified when a round ends, and when the cluster does.
        failed: why the cluster has ended, if it has.
    """

    def __init__(self, workers: int, changed: threading.Condition, failed: Callable[[], str | None]) -> None:
        self._workers = workers
        self._changed = changed
        self._failed = failed
        self._ended = 0  # rounds
        self._there: dict[int, object] = {}  # by rank: who waits in the open round
        self._offsets: dict[int, int] = {}  # by client: how many rounds had ended when it first came

    def wait(self, caller: Caller, rank: int, number: int, timeout_s: float) -> None:
        """Wait for the other workers. Who does not get to the end of it has not been here.

        Args:
            caller: one worker's connection.
            rank: its rank.
            number: of this round as it counts, from 1.
            timeout_s: for the others to come.
        Raises:
            ValueError: there is no such rank.
            TableTimeoutError: somebody has not come in time.
            ServerLostError: the cluster has ended.
            BrokenWireError: the caller is gone.
        """
        if not 0 <= rank < self._workers:
            raise ValueError(f"there are {self._workers} workers, and this is rank {rank}")
        until = time.monotonic() + timeout_s
        with self._changed:
            mine = number + self._offsets.setdefault(caller.hello["client"], self._ended)
            if mine <= self._ended:
                return  # it was over before, and the answer was lost
            token = self._there[rank] = object()
            try:
                if len(self._there) == self._workers:
                    self._ended += 1
                    self._there.clear()
                    self._changed.notify_all()
                while self._ended < mine:
                    self._look(caller, until, timeout_s)
                    self._changed.wait(min(_LOOK_S, max(0.0, until - time.monotonic())))
            finally:
                if self._there.get(rank) is token:
                    del self._there[rank]

    def _look(self, caller: Caller, until: float, timeout_s: float) -> None:
        why = self._failed()
        if why is not None:
            raise ServerLostError(why)
        if not caller.wire.is_idle():
            raise BrokenWireError("a worker left the barrier")
        if time.monotonic() >= until:
            missing = sorted(set(range(self._workers)) - set(self._there))
            raise TableTimeoutError(f"worker {missing} did not come to the barrier within {timeout_s:g} s")
