"""Collective operations of two processes on this machine; `compare_collective.py` sets other libraries beside them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt.collective import CollectiveMismatch, Group, init_group

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
# The other process repeats the ordered operation until this one calls another operation.
OTHER = """
import sys
import numpy as np
from fastrt.collective import CollectiveMismatch, init_group
with init_group(name=sys.argv[1], rank=1, world_size=2, timeout=120) as group:
    while order := group.broadcast_object():
        how, place, count = order
        array = group.empty(count) if place == "g.empty" else np.empty(count, np.float32)
        array[:] = 0
        step = {"all_reduce": lambda: group.all_reduce(array), "barrier": group.barrier}[how]
        try:
            while True:
                step()
        except CollectiveMismatch:
            del array
"""


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A group of this process and another one."""
    name = f"bench-{os.getpid()}"
    source = str(Path(fastrt.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    with (
        subprocess.Popen([sys.executable, "-c", OTHER, name], env=env) as process,
        init_group(name=name, rank=0, world_size=2, timeout=120) as mine,
    ):
        yield mine
        mine.broadcast_object(None)
        process.wait(20)


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("place", ["private", "g.empty"])
def test_all_reduce(measure, benchmark, group: Group, place: str, nbytes: int) -> None:
    """float32, in place."""
    benchmark.group = f"all_reduce of two processes, arrays {'of g.empty' if place == 'g.empty' else 'private'}"
    group.broadcast_object(("all_reduce", place, nbytes // 4))
    array = group.empty(nbytes // 4) if place == "g.empty" else np.empty(nbytes // 4, np.float32)
    array[:] = 0
    measure(group.all_reduce, array, nbytes=nbytes)
    with pytest.raises(CollectiveMismatch):
        group.all_gather(np.zeros(1))


@pytest.mark.benchmark(group="barrier of two processes")
def test_barrier(measure, group: Group) -> None:
    group.broadcast_object(("barrier", "", 0))
    measure(group.barrier)
    with pytest.raises(CollectiveMismatch):
        group.all_gather(np.zeros(1))
