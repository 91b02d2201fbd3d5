"""How much room a node reports, and how many of its tasks should run elsewhere, for tasks of any length."""

import pytest

from fastrt.cluster.pressure import Pressure

STEP_S = 0.002


def rooms(ended, queued, idle=0):
    """The room at each look, two seconds long; `ended` says how many tasks have ended at a time."""
    pressure, found = Pressure(), []
    for step in range(int(2 / STEP_S)):
        now = 100 + step * STEP_S
        pressure.excess(now, queued, idle, ended(now - 100))
        found.append(pressure.room)
    return found


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_long_tasks_that_end_together_make_no_room(workers):
    assert set(rooms(lambda t: workers * int(t / 0.51), queued=workers)) == {0}
    assert set(rooms(lambda t: workers * int(t), queued=0, idle=workers)) == {workers}


@pytest.mark.parametrize("per_s", [40, 400, 10_000])
def test_room_is_for_the_tasks_of_the_next_moment(per_s):
    found = rooms(lambda t: int(per_s * t), queued=0)
    assert 0.8 * per_s / 20 - 1 <= min(found[300:]) <= max(found) <= 1.2 * per_s / 20 + 1
