"""The cluster as one member knows it; threads can wait for a change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fastrt.errors import FastrtError
from fastrt.membership.events import MemberView, Phase
from fastrt.membership.options import ClusterTimeoutError


class ClusterView:
    """State of a member and of its cluster. Only the member's event loop changes it, by `change`.

    Attributes:
        rank: the member's number among those of its role; None before all members joined, and after a scale-in.
        phase: of the cluster.
        ready: all members have joined, and no scaling round is under way.
        ended: all members have finished.
        failure: why the member can take no further part; None while it can.
        members: all members, as of the last metadata.
        counts: number of workers and of servers.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.rank: int | None = None
        self.phase = Phase.STARTING
        self.ready = False
        self.ended = False
        self.failure: FastrtError | None = None
        self.members: tuple[MemberView, ...] = ()
        self.counts = (0, 0)

    def change(self, **changes: Any) -> None:
        """Set attributes together, and wake the threads that wait."""
        with self._condition:
            for name, value in changes.items():
                setattr(self, name, value)
            self._condition.notify_all()

    def fail(self, error: FastrtError) -> None:
        """Set the failure, unless there is one already; any thread may call this."""
        with self._condition:
            self.failure = self.failure or error
            self._condition.notify_all()

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until a condition holds; it is checked after each change.

        Raises:
            ClusterTimeoutError: it does not hold in this time.
            FastrtError: the member has failed.
        """
        with self._condition:
            done = self._condition.wait_for(lambda: condition() or self.failure is not None, timeout_s)
            if not done:
                raise ClusterTimeoutError(f"waited {timeout_s:g} s for {what}; the cluster is {self.phase.name}.")
            if not condition():
                assert self.failure is not None
                raise self.failure
