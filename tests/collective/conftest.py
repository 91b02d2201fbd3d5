"""Groups of forked ranks, each test in groups of its own."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import psutil
import pytest

import fastrt
import support.grpc_opened  # noqa: F401
from support import rank_pool

PATIENCE_S = 55.0
_names = itertools.count()


class Ranks:
    """Runs a function on many ranks at once: `ranks(3, function, *args)` calls `function(rank, 3, *args)` on each."""

    def __init__(self):
        source = str(Path(fastrt.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, rank_pool.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": source},
        )

    def outcomes(self, count, function, *args, patience_s=PATIENCE_S):
        """What became of each rank: ("returned", value), ("raised", error) or ("died", status)."""
        rank_pool.write(self.process.stdin, cloudpickle.dumps((count, function, args, patience_s)))
        return rank_pool.read(self.process.stdout)

    def __call__(self, count, function, *args, patience_s=PATIENCE_S):
        """What each rank returned; raises what the first rank raised."""
        outcomes = self.outcomes(count, function, *args, patience_s=patience_s)
        for what, value in outcomes:
            if what == "raised":
                raise value
            assert what == "returned", f"a rank died with status {value}"
        return [value for _, value in outcomes]

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks()
    assert pool.outcomes(0, None) == []  # it is there, and will wait for the next request
    while psutil.Process(pool.process.pid).status() != psutil.STATUS_SLEEPING:
        os.sched_yield()  # `leaves_nothing` would take a process in another state for another process
    yield pool
    pool.close()


@pytest.fixture
def name():
    """A group's name that nobody else uses at this moment."""
    return f"test-{os.getpid()}-{next(_names)}"
