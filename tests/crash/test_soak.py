"""A short form of the soak: every outcome is right under kills and stops, and nothing is left in the arenas."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import soak

FIRST = {"memory MiB": 100.0, "descriptors": 100, "threads": 10, "shm MiB": 50.0}
FIRST |= {"objects": 0.0, "tasks": 0.0, "actors": 0.0}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [1, 3])
def test_outcomes_are_right_and_nothing_is_left_under_kills(nodes):
    problems, figures = soak.run(20.0, nodes, 1)
    assert not problems, figures
    assert sum(figures["kills"].values()) > 0


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"memory MiB": 127.0}, "memory MiB: 100.0"),
        ({"descriptors": 115}, "descriptors: 100"),
        ({"tasks": 1.0}, "1 tasks are left"),
    ],
)
def test_growth_is_found(last, words):
    assert soak.grown(FIRST, {**FIRST, "memory MiB": 126.0}, 1, 60.0) == []
    (found,) = soak.grown(FIRST, {**FIRST, **last}, 1, 60.0)
    assert found.startswith(words)
