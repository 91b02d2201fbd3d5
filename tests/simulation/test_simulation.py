"""The simulator's short form: a few seeds with faults, the same seeds again, and a fault that must be found."""

import subprocess
import sys
from pathlib import Path

import pytest

from .mutants import CLUSTER, MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)


def test_seeds_hold_and_repeat():
    ran = simulate("--seed", "3", "--seeds", "2", "--replay", "--mixed", "--no-shrink")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_actors_and_generators_hold_and_repeat():
    ran = simulate("--seed", "132", "--seeds", "3", "--replay", "--mixed", "--no-shrink")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_result_that_a_peer_waits_for_keeps_its_source():
    """A run without faults, in which a value was made again: its source was forgotten before the peer had it."""
    ran = simulate("--no-shrink", "--mixed", "--seed", "225")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_task_ends_with_its_result_that_waits_for_another_object():
    ran = simulate("--no-shrink", "--mixed", "--family", "breaks", "--seed", "28")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_fault_is_found_and_its_seed_is_printed():
    ran = simulate("--mutant", "release: always of one name", "--seeds", "10", "--mixed", "--first", "--no-shrink")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "FAILED: python -m tests.simulation --seed" in ran.stdout


def test_growth_is_printed_for_each_size():
    command = [sys.executable, "-m", "tests.simulation.scale", "--tasks", "200", "1", "12"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[:2] for line in ran.stdout.splitlines()[-2:]] == [["1", "200"], ["12", "200"]]


def test_every_mutant_still_applies():
    for mutant in MUTANTS:
        assert (CLUSTER / f"{mutant.module}.py").read_text().count(mutant.old) == 1, mutant.name


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nodes_that_leave_in_order_lose_nothing():
    ran = simulate("--family", "leaves", "--nodes", "5", "--seed", "10", "--seeds", "40", "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "count"), [(2000, 50), (2050, 50), (2120, 1), (2208, 32)])
def test_many_seeds_hold(first, count):
    ran = simulate("--seed", str(first), "--seeds", str(count), "--mixed", "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
