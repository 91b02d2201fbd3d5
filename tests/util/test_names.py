"""Ray's names: what a program for Ray imports is here by the same path, and is what it should be."""

import importlib
import subprocess
import sys

import pytest

import fastrt
from fastrt.tasks import placement_group, resources
from fastrt.util import multiprocessing, pool

NAMES = {
    "fastrt.actor": ["ActorClass", "ActorHandle", "exit_actor"],
    "fastrt.exceptions": ["GetTimeoutError", "OutOfMemoryError", "RayActorError", "RayError", "RayTaskError"],
    "fastrt.util": [
        "ActorPool",
        "get_placement_group",
        "list_named_actors",
        "placement_group",
        "remove_placement_group",
    ],
    "fastrt.util.actor_pool": ["ActorPool"],
    "fastrt.util.multiprocessing": ["Pool", "TimeoutError"],
    "fastrt.util.placement_group": ["PlacementGroup", "placement_group", "placement_group_table"],
    "fastrt.util.queue": ["Empty", "Full", "Queue"],
    "fastrt.util.state": ["list_actors", "list_objects", "list_tasks", "list_workers"],
    "fastrt.util.scheduling_strategies": ["NodeAffinitySchedulingStrategy", "PlacementGroupSchedulingStrategy"],
}


@pytest.mark.parametrize("module", NAMES)
def test_names_of_ray_are_there(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    assert [name for name in getattr(found, "__all__", ()) if not hasattr(found, name)] == []


def test_they_are_fastrts_own():
    strategies = importlib.import_module("fastrt.util.scheduling_strategies")
    assert strategies.NodeAffinitySchedulingStrategy("here", soft=True) == resources.NodeAffinity("here", True)
    assert strategies.PlacementGroupSchedulingStrategy is placement_group.PlacementGroupSchedulingStrategy
    assert multiprocessing.Pool is pool.Pool


def test_function_with_its_modules_name_stays_a_function():
    """Also after the module was imported by its own path."""
    program = (
        "import fastrt.util.placement_group, fastrt as ray; from fastrt.util.placement_group import PlacementGroup;"
        "assert callable(ray.util.placement_group), ray.util.placement_group"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert fastrt.util.placement_group is fastrt.placement_group


def test_all_names_of_rays_errors_are_there_and_every_one_can_be_caught():
    exceptions = importlib.import_module("fastrt.exceptions")
    for name in (*exceptions.__all__, "OutOfMemoryError", "ActorUnavailableError", "ObjectReconstructionFailedError"):
        assert issubclass(getattr(exceptions, name), fastrt.FastrtError)
    assert issubclass(exceptions.OutOfMemoryError, exceptions.WorkerCrashedError)
