"""A thread that works in the background: what the kernel is told of it."""

import os
import threading

from fastrt._core.memory import background


def test_only_the_calling_thread_stands_back():
    found = []

    def run() -> None:
        background.stand_back(10)
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (found, os.getpriority(os.PRIO_PROCESS, 0)) == ([10], before)
