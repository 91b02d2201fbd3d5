"""Thread counts of BLAS, OpenMP and torch in workers: as many as the task has CPUs, unless the user says otherwise."""

import os
import sys

import numpy as np
import pytest
import threadpoolctl

import fastrt
from fastrt.util.placement_group import placement_group, remove_placement_group
from fastrt.util.scheduling_strategies import PlacementGroupSchedulingStrategy

pytestmark = pytest.mark.skipif("OMP_NUM_THREADS" in os.environ, reason="OMP_NUM_THREADS is set, and decides")


def counts():
    """What libraries loaded later will use, and what each loaded one uses now."""
    np.ones((2, 2)) @ np.ones((2, 2))
    torch = sys.modules.get("torch")
    found = {lib["num_threads"] for lib in threadpoolctl.threadpool_info()}
    return os.environ.get("OMP_NUM_THREADS"), sorted(found | ({torch.get_num_threads()} if torch else set()))


COUNTS = """
import os, numpy as np, threadpoolctl, fastrt

@fastrt.remote
def counts():
    return os.environ.get("OMP_NUM_THREADS"), threadpoolctl.threadpool_info()[0]["num_threads"]

with fastrt.init(1, "64MiB"):
    print(fastrt.get([counts.remote(), counts.options(num_cpus=0).remote()]))
"""


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"OMP_NUM_THREADS": "2"}, ("2", 2)),
        ({"FASTRT_LIBRARY_THREADS": "2"}, ("2", 2)),
        ({"OPENBLAS_NUM_THREADS": "2"}, ("1", 2)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_count_that_the_user_sets_wins(program, variables, wanted):
    assert program(COUNTS, **variables).finish()[0] == f"{[wanted] * 2}\n"


@pytest.fixture(scope="module")
def read(rt):
    return fastrt.remote(counts)


def test_task_computes_with_as_many_threads_as_it_has_cpus(read):
    assert fastrt.get(read.remote()) == ("1", [1])
    assert fastrt.get(read.options(num_cpus=2).remote()) == ("2", [2])
    assert fastrt.get([read.remote() for _ in range(4)]) == [("1", [1])] * 4
    assert fastrt.get(read.options(num_cpus=0.5).remote()) == ("1", [1])


def test_task_of_a_placement_group_computes_with_the_cpus_that_it_has_of_it(read):
    group = placement_group([{"CPU": 2}])
    try:
        inside = read.options(num_cpus=2, scheduling_strategy=PlacementGroupSchedulingStrategy(group))
        assert fastrt.get(inside.remote(), timeout=60) == ("2", [2])
    finally:
        remove_placement_group(group)


def test_variable_of_the_runtime_env_wins_and_ends_with_the_task(read):
    env = {"env_vars": {"OMP_NUM_THREADS": "3"}}
    assert fastrt.get(read.options(num_cpus=2, runtime_env=env).remote()) == ("3", [3])
    assert fastrt.get([read.remote() for _ in range(4)]) == [("1", [1])] * 4


def test_torch_follows_the_cpus_of_each_task(rt):
    pytest.importorskip("torch")

    def torch_threads():
        import torch

        return torch.get_num_threads()

    read = fastrt.remote(torch_threads)
    for cpus in (1, 2, 1):
        assert fastrt.get(read.options(num_cpus=cpus).remote()) == cpus


def test_actor_computes_with_as_many_threads_as_it_has_cpus(rt):
    class Reader:
        def read(self):
            return counts()

    for options, wanted in (({}, ("1", [1])), ({"num_cpus": 2}, ("2", [2]))):
        actor = fastrt.remote(Reader).options(**options).remote()
        assert fastrt.get(actor.read.remote()) == wanted
        del actor
