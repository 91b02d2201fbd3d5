"""Decides how many queued tasks other nodes should run, and how many tasks of other nodes this node accepts."""

from __future__ import annotations

# A queue is watched for this long before it counts as too long: a burst of small tasks has ended by then.
_LOOK_S = 0.02
# Tasks that this node would start within this time stay here: forwarding them costs as much.
_PATIENCE_S = 0.05
_WINDOW_S = 0.5


class Pressure:
    """Watches the queue of one node. It has no clock: each call passes the time.

    Attributes:
        room: how many more tasks could begin here soon; it is 0 on a busy node, so that busy nodes do not forward
            tasks to each other.
    """

    def __init__(self) -> None:
        self.room = 0
        self._since: float | None = None
        self._done = 0
        self._rate = 0.0  # tasks ended in a second
        self._rated_at: float | None = None
        self._rated_done = self._before = 0

    def excess(self, now: float, queued: int, idle: int, done: int) -> int:
        """Return how many of the queued tasks would wait too long.

        Args:
            now: seconds of a monotonic clock.
            queued: tasks ready to run.
            idle: workers without a task.
            done: how many tasks the present workers have finished; it falls when a worker exits.
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
        """Measure the rate over `_WINDOW_S`: long tasks that were started together also end within a moment."""
        if self._rated_at is None or done < self._rated_done or now - self._rated_at >= 2 * _WINDOW_S:
            self._rated_at, self._rated_done, self._before = now, done, 0
        elif now - self._rated_at >= _WINDOW_S:
            self._before = done - self._rated_done
            self._rated_at, self._rated_done = self._rated_at + _WINDOW_S, done
        age = (now - self._rated_at) / _WINDOW_S
        self._rate = (done - self._rated_done + self._before * (1 - age)) / _WINDOW_S
