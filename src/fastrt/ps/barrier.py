"""Barrier at which workers wait for each other, round after round.

A worker that replaces a lost one starts with the open round; its own round numbers are offset accordingly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fastrt.ps.endpoint import Caller
from fastrt.ps.errors import ServerLostError, TableTimeoutError
from fastrt.ps.wire import BrokenWireError

_LOOK_S = 0.1  # interval of checks for a closed connection, which does not notify the condition


class Barrier:
    """All barrier rounds of one cluster.

    Args:
        workers: number of workers in each round.
        changed: notified when a round or the cluster ends.
        failed: returns why the cluster has ended; None while it has not.
    """

    def __init__(self, workers: int, changed: threading.Condition, failed: Callable[[], str | None]) -> None:
        self._workers = workers
        self._changed = changed
        self._failed = failed
        self._ended = 0  # rounds that have ended
        self._there: dict[int, object] = {}  # by rank: the workers that wait in the open round
        self._offsets: dict[int, int] = {}  # by client: rounds that had ended before its first one

    def wait(self, caller: Caller, rank: int, number: int, timeout_s: float) -> None:
        """Wait for the other workers. A worker whose call fails does not count as present.

        Args:
            caller: the worker's connection.
            rank: its rank.
            number: the worker's count of its rounds, from 1.
            timeout_s: how long to wait for the others.
        Raises:
            ValueError: there is no such rank.
            TableTimeoutError: a worker did not come in time.
            ServerLostError: the cluster has ended.
            BrokenWireError: the caller's connection has ended.
        """
        if not 0 <= rank < self._workers:
            raise ValueError(f"there is no rank {rank}: the cluster has {self._workers} workers")
        until = time.monotonic() + timeout_s
        with self._changed:
            mine = number + self._offsets.setdefault(caller.hello["client"], self._ended)
            if mine <= self._ended:
                return  # the round has ended, but its answer was lost
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
