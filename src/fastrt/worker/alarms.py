"""Calls that a worker makes later, all on one thread: at the end of a timeout, or of the delay before a retry."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Alarm:
    """One call at its time, unless it is stopped before."""

    __slots__ = ("due", "function", "stopped")

    def __init__(self, due: float, function: Callable[[], float | None]) -> None:
        self.due, self.function, self.stopped = due, function, False

    def stop(self) -> None:
        """Cancel the call."""
        self.stopped = True


class Clock:
    """Makes calls when they are due, in a thread that runs while calls are pending."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._heap: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._running = False

    def start(self, delay_s: float, function: Callable[[], float | None]) -> Alarm:
        """Call a function after `delay_s` seconds, and again after as many as it returns, until it returns None."""
        alarm = Alarm(time.monotonic() + delay_s, function)
        with self._lock:
            self._push(alarm)
            self._lock.notify()
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, name="fastrt-clock", daemon=True).start()
        return alarm

    def wait(self) -> None:
        """Wait until no calls are pending."""
        with self._lock:
            self._lock.wait_for(lambda: not self._running)

    def flush(self) -> None:
        """Make all pending calls now, on this thread."""
        with self._lock:
            alarms = [alarm for _, _, alarm in self._heap]
            self._heap.clear()
        for alarm in alarms:
            if not alarm.stopped:
                alarm.function()

    def _push(self, alarm: Alarm) -> None:
        heapq.heappush(self._heap, (alarm.due, next(self._numbers), alarm))

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._heap and self._heap[0][2].stopped:
                    heapq.heappop(self._heap)
                if not self._heap:
                    self._running = False
                    self._lock.notify_all()
                    return
                left = self._heap[0][0] - time.monotonic()
                if left > 0:
                    self._lock.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                alarm = heapq.heappop(self._heap)[2]
            again = alarm.function()
            if again is not None and not alarm.stopped:
                alarm.due = time.monotonic() + again
                with self._lock:
                    self._push(alarm)
