"""The simulator's short form: a few seeds with faults, the same seeds again, and a fault that must be found.

The long tests take about 20 minutes of one CPU: some 500 seeds. `make simulate` runs 1,000 (with `TASKS=500`: as many
tasks of each on 5 nodes), and with `SECONDS=3600`, each night, as many as an hour has time for.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from .aims import AIMS
from .families import FAMILIES
from .mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1750, check=False)


def test_seeds_hold_and_repeat():
    ran = simulate("--seed", "3", "--seeds", "2", "--replay", "--mixed", "--no-shrink")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_actors_and_generators_hold_and_repeat():
    ran = simulate("--seed", "132", "--seeds", "3", "--replay", "--mixed", "--no-shrink")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("", "225"),  # no faults; a value was made again: the source of a result was forgotten before the peer had it
        ("breaks", "28"),  # a task whose result waits for another object did not end
        ("cross", "1"),  # the answer to a claim of a value and of a stand-in for it was counted twice
        ("renamed, and lost", "104"),  # a lost value got the error of an unused stand-in that had shared its source
    ],
)
def test_fault_that_was_mended_does_not_come_back(family, seed):
    ran = simulate("--no-shrink", "--mixed", "--family", family, "--seed", seed)
    assert ran.returncode == 0, ran.stdout + ran.stderr


OTHER_FAMILIES = [
    ("reserved", 3), ("regrouped", 18), ("standby", 68), ("named", 1), ("daemons", 4), ("crowds", 1),
    ("full", 3), ("tight", 4),
]  # fmt: skip


@pytest.mark.parametrize(("family", "seed"), OTHER_FAMILIES)
def test_other_families_hold(family, seed):
    ran = simulate("--seed", str(seed), "--seeds", "1", "--mixed", "--family", family, "--no-shrink")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.parametrize(("family", "seed"), OTHER_FAMILIES)
def test_other_families_repeat(family, seed):
    ran = simulate("--seed", str(seed), "--seeds", "1", "--replay", "--mixed", "--family", family)
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
        assert mutant.path.read_text().count(mutant.old) == 1, mutant.name
        assert not mutant.aim or mutant.aim in AIMS, mutant.name
    assert not set(AIMS) & set(FAMILIES)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("aim", AIMS)
def test_aimed_runs_hold(aim):
    ran = simulate("--seed", "100", "--seeds", "10", "--family", aim, "--no-shrink", "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nodes_that_leave_in_order_lose_nothing():
    ran = simulate("--family", "leaves", "--nodes", "5", "--seed", "10", "--seeds", "15", "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family",
    ["reserved", "groups", "regrouped", "standby", "named", "daemons", "crowds", "stops", "mixture", "full", "tight"],
)
def test_many_seeds_of_a_family_hold(family):
    ran = simulate("--seed", "100", "--seeds", "15", "--mixed", "--family", family, "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "count"), [(2000, 50), (2050, 50), (2120, 1), (2208, 32)])
def test_many_seeds_hold(first, count):
    ran = simulate("--seed", str(first), "--seeds", str(count), "--mixed", "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_seeds_of_large_programs_hold():
    """Programs of 500 tasks hold on five nodes with faults; `make simulate TASKS=500` runs 1,000 seeds of these."""
    size = ("--nodes", "5", "--tasks", "500", "--drivers", "4", "--faults", "8", "--retries")
    ran = simulate("--seed", "1", "--seeds", "10", *size, "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_aims_and_known_seeds_find_mutants():
    """Fails when too many seeds have become stale: `make simulate MUTANTS=renew` searches others."""
    ran = simulate("--mutants", "--known", "--jobs", "2")
    assert ran.returncode == 0, "run `make simulate MUTANTS=renew`\n" + ran.stdout + ran.stderr
