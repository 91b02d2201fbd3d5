"""The seeds that find mutants: the first ones of the mutant's aim, or one of a table beside this module.

A seed finds a mutant if its run fails with it, and holds without it. Any change in the order of events can make a known
seed stale: then the first seeds of its family are tried. `--mutants --known` says which mutants are not found so, and
`--mutants --renew` (`make simulate MUTANTS=renew`) searches further.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# What each run imports beside the modules of which one may be a mutant: forked processes have it already.
import grpc.aio  # noqa: F401
import numpy as np  # noqa: F401

import fastrt  # noqa: F401
from fastrt.cluster import remote_actors  # noqa: F401
from fastrt.net.grpc import streams  # noqa: F401
from fastrt.node import cpu_room, placing  # noqa: F401
from fastrt.store import client  # noqa: F401
from fastrt.transfer import pull  # noqa: F401

from . import network, reserving  # noqa: F401
from .mutants import MUTANTS, Mutant, install

TABLE = Path(__file__).with_name("known_seeds.json")
FOUND_LEAST = 0.95  # of the mutants
CHUNK = 4  # seeds that one process runs
FIRST = 40  # seeds of the family that a mutant's aim names, or its known seed


class Seed(NamedTuple):
    """A mixed run of a family; an empty one: the seed chooses."""

    family: str
    number: int


PlanOf = Callable[[Seed], Any]


def read() -> dict[str, Seed]:
    """Return the table: a seed by the name of the mutant that it finds."""
    return {name: Seed(*one) for name, one in json.loads(TABLE.read_text()).items()}


def write(seeds: dict[str, Seed]) -> None:
    """Write the table, in the order of the mutants."""
    rows = (f"  {json.dumps(one.name)}: {json.dumps(seeds[one.name])}" for one in MUTANTS if one.name in seeds)
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _first_failure(plan_of: PlanOf, mutant: str, seeds: list[Seed]) -> tuple[Seed, str] | None:
    """Return the first of these seeds that fails, and why; runs in a process of its own."""
    if mutant:
        install(mutant)
    from .cluster import run

    for one in seeds:
        violations = run(plan_of(one)).violations
        if violations:
            return one, violations[0].splitlines()[0][:150]
    return None


def _families() -> list[str]:
    from .families import FAMILIES, MIXTURE

    return [*FAMILIES, MIXTURE]


class Hunt:
    """Runs mutants in processes of their own.

    Args:
        plan_of: returns the plan of a seed.
        jobs: how many processes.
        prepare: called in each process first.
    """

    def __init__(self, plan_of: PlanOf, jobs: int, prepare: Callable[[], None]) -> None:
        self._plan_of = plan_of
        self._sound: dict[Seed, bool] = {}  # whether a seed holds without a mutant
        self._threads = ThreadPoolExecutor(jobs)
        self._pool = multiprocessing.get_context("fork").Pool(jobs, prepare, maxtasksperchild=1)

    def close(self) -> None:
        """End the processes."""
        self._pool.terminate()
        self._threads.shutdown()

    def _among(self, mutant: str, seeds: list[Seed]) -> tuple[Seed, str] | None:
        """Return the first of these seeds that finds a mutant, and how."""
        while seeds:
            found = self._pool.apply(_first_failure, (self._plan_of, mutant, seeds))
            if found is None or self._holds(found[0]):
                return found
            seeds = seeds[seeds.index(found[0]) + 1 :]
        return None

    def _holds(self, seed: Seed) -> bool:
        """Return whether the run of a seed holds without a mutant."""
        if seed not in self._sound:
            self._sound[seed] = self._pool.apply(_first_failure, (self._plan_of, "", [seed])) is None
        return self._sound[seed]

    def _search(self, mutant: str, chunks: Iterator[list[Seed]], until: float) -> tuple[Seed, str] | None:
        in_time = itertools.takewhile(lambda _: time.monotonic() < until, chunks)  # they may be without end
        return next((found for seeds in in_time if (found := self._among(mutant, seeds))), None)

    def all(
        self, mutants: list[Mutant], chunks_of: Callable[[str], Iterator[list[Seed]]], seconds: float
    ) -> dict[str, Seed]:
        """Search a seed for each mutant, print what is found, and return it.

        Args:
            mutants: these.
            chunks_of: returns the seeds to try for a mutant, in chunks.
            seconds: how long to search for one.
        """

        def search(mutant: Mutant) -> tuple[float, tuple[Seed, str] | None]:
            began = time.monotonic()
            found = self._search(mutant.name, chunks_of(mutant.name), began + seconds)
            return time.monotonic() - began, found

        seeds = {}
        for mutant, (lasted, found) in zip(mutants, self._threads.map(search, mutants), strict=True):
            if found is not None:
                seeds[mutant.name] = found[0]
            how = "MISSED" if found is None else f"found by seed {found[0].number} {found[0].family}".rstrip()
            sys.stdout.write(f"{how} in {lasted:3.0f} s: {mutant.name}: {'' if found is None else found[1]}\n")
            sys.stdout.flush()
        return seeds

    def renew(self, mutants: list[Mutant], known: dict[str, Seed], seconds: float) -> dict[str, Seed]:
        """Search a seed for each of these mutants, half of the time in the family of the last one, then in all."""
        families = self._pool.apply(_families)

        def chunks(name: str) -> Iterator[list[Seed]]:
            half = time.monotonic() + seconds / 2
            for begin in itertools.count(0, CHUNK):
                last = [known[name].family] if name in known and time.monotonic() < half else families
                for family in last:
                    yield [Seed(family, number) for number in range(begin, begin + CHUNK)]

        return self.all(mutants, chunks, seconds)


def judge(hunt: Hunt, args: Any) -> int:
    """Carry out `--mutants` with its options; return the exit status."""
    known = read()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.name]
    aims = {one.name: one.aim or known[one.name].family for one in chosen if one.aim or one.name in known}
    named = [mutant for mutant in chosen if mutant.name in aims]

    def chunks(name: str) -> Iterator[list[Seed]]:
        if name in known:
            yield [known[name]]
        if name in aims:
            yield from _chunks(aims[name], args.seed, FIRST)
        if not args.known and not args.renew:
            yield from _chunks(args.family, args.seed, args.seeds)

    found = hunt.all(named if args.known or args.renew else chosen, chunks, float("inf"))
    if args.known:
        missed = [mutant.name for mutant in named if mutant.name not in found]
        sys.stdout.write(f"mutants with an aim or a seed: {len(named)} of {len(chosen)}; missed: {missed}\n")
        return len(found) < FOUND_LEAST * len(chosen)
    if args.renew:
        found |= hunt.renew([mutant for mutant in chosen if mutant.name not in found], known, args.seconds)
        names = {mutant.name for mutant in chosen}
        aimed = {mutant.name for mutant in chosen if mutant.aim}
        write({name: one for name, one in (known | found).items() if name not in names or name in found.keys() - aimed})
    stale = [name for name, one in known.items() if name in found and found[name] != one]
    sys.stdout.write(f"mutants found: {len(found)} of {len(chosen)}; stale seeds: {stale}\n")
    return len(found) < FOUND_LEAST * len(chosen)


def _chunks(family: str, first: int, count: int) -> Iterator[list[Seed]]:
    for begin in range(first, first + count, CHUNK):
        yield [Seed(family, one) for one in range(begin, min(begin + CHUNK, first + count))]
