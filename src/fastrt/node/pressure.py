"""Whether tasks wait so long here that other nodes should run some of them."""

from __future__ import annotations

# A queue is looked at for this long before anything is said of it: a burst of small tasks is gone by then.
_LOOK_S = 0.02
# What is worked off here within this time stays: to send it elsewhere costs as much.
_PATIENCE_S = 0.05
_WINDOW_S = 0.5


class Pressure:
    """Watches the queue of one node. Pure: the time comes with each look."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._done = 0

    def excess(self, now: float, queued: int, idle: int, done: int) -> int:
        """How many of the queued tasks would wait too long.

        Args:
            now: seconds of a monotonic clock.
            queued: tasks ready to run.
            idle: workers without a task.
            done: tasks that workers have ended so far; it may fall when one of them ends.
        """
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
