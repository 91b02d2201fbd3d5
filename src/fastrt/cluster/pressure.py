"""Decides whether tasks wait so long here that other nodes should run some, or whether tasks of other nodes fit."""

from __future__ import annotations

# A queue is watched for this long before it is judged: a burst of small tasks is gone by then.
_LOOK_S = 0.02
# Tasks that are worked off here within this time stay: to forward them costs as much.
_PATIENCE_S = 0.05
_WINDOW_S = 0.5


class Pressure:
    """Watches the queue of one node. Pure: the time comes with each look.

    Attributes:
        room: how many more tasks could begin here soon; tasks that all nodes have enough of are not sent round.
    """

    def __init__(self) -> None:
        self.room = 0
        self._since: float | None = None
        self._done = 0
        self._rate = 0.0  # tasks ended in a second
        self._rated_at: float | None = None
        self._rated_done = 0

    def excess(self, now: float, queued: int, idle: int, done: int) -> int:
        """How many of the queued tasks would wait too long.

        Args:
            now: seconds of a monotonic clock.
            queued: tasks ready to run.
            idle: workers without a task.
            done: tasks that workers have ended so far; it may fall when one of them ends.
        """
        self._rate_at(now, done)
        self.room = max(0, idle + int(self._rate * _PATIENCE_S) - queued)
        if idle or not queued:
            self._since = None
            return 0
        if self._since is None or done < self._done or now - self._since > _WINDOW_S:
            fresh = self._since is None
            self._since, self._done = (now if fresh else now - _LOOK_S), done
            return 0
        looked_s = now - self._since
        if looked_s < _LOOK_S:
            return 0
        return max(0, queued - int((done - self._done) / looked_s * _PATIENCE_S))

    def _rate_at(self, now: float, done: int) -> None:
        looked_s = _WINDOW_S if self._rated_at is None else now - self._rated_at
        if looked_s >= _LOOK_S or done < self._rated_done:
            self._rate = 0.0 if self._rated_at is None else max(0, done - self._rated_done) / looked_s
            self._rated_at, self._rated_done = now, done
