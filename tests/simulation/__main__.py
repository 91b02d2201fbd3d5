"""Run the simulator: `python -m tests.simulation --seeds 1000`; see `--help` and `make simulate`.

A seed that fails is made smaller, and printed as the command that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

RETRIED = ("uplinks", "wide", "relay", "parted", "small", "chain")  # families
# Machines are lost in these, if there are faults.
LOSING = ("losses", "both", "parts", "cross", "groups", "regrouped", "standby", "heirs", "named")


def _plan(args: argparse.Namespace, seed: int) -> Any:
    from .aims import AIMS
    from .cluster import Plan
    from .families import MIXTURE

    skip = frozenset(map(int, filter(None, args.skip.split(","))))
    if args.family in AIMS:
        machines = "lost" in args.family
        aim = AIMS[args.family]
        return Plan(seed, aim.nodes, 40, 1 if aim.scene else 4, 0, machines, True, skip, args.family)
    if not args.mixed:
        return Plan(
            seed, args.nodes, args.tasks, args.drivers, args.faults, args.machines, args.retries, skip, args.family
        )
    family = args.family or ("", "calm", "breaks", "herd", "uplinks", "wide", "losses", "breaks")[seed // 4 % 8]
    if seed // 32 % 5 == 4 and not args.family:
        family = ("actors", "streams", "both", "still")[seed % 4]
    if seed // 32 % 5 == 3 and not args.family:
        family = ("parts", "parted", "late", "relay", "cross")[seed % 5]
    if seed // 32 % 5 == 2 and seed >= 320 and not args.family:  # earlier seeds are known to find mutants
        family = ("groups", "reserved", "standby", "named", "daemons", "crowds", MIXTURE)[seed % 7]
    if family == MIXTURE:
        nodes, tasks, faults = 2 + seed % 3, (40, 80, 160)[seed // 3 % 3], (2, 6, 12)[seed // 9 % 3]
        return Plan(seed, nodes, tasks, 2 + seed % 3, faults, seed % 2 == 1, seed % 4 > 1, skip, family)
    if family:
        nodes, tasks = (2 if family in ("calm", "breaks", "back", "late") else 3) + seed % 3, (40, 80)[seed // 3 % 2]
        nodes, tasks = (4, 160) if family in ("relay", "chain") else (nodes, tasks + 80 * (family in ("cross", "mesh")))
        faults = {"calm": 0, "breaks": 14, "uplinks": 10, "wide": 8, "losses": 12, "herd": 2, "back": 3, "leaves": 6,
                  "actors": 6, "streams": 8, "both": 8, "still": 0,
                  "parts": 12, "parted": 3, "late": 3, "relay": 6, "cross": 12,
                  "small": 8, "chain": 3, "mesh": 12, "groups": 6, "regrouped": 8, "reserved": 1, "heirs": 8,
                  "standby": 5, "daemons": 8, "crowds": 6, "stops": 4, "named": 6 * (seed % 4 > 1),
                  "full": 6 * (seed % 3 > 0), "tight": 5 * (seed % 3 > 0)}[family]  # fmt: skip
        retries = family in RETRIED or (family == "breaks" and seed % 2 == 0) or (family == "mesh" and seed % 4 != 3)
        machines = family in LOSING and bool(faults)
        drivers = 2 + seed % 2 + 2 * (family in ("herd", "back", "late", "relay"))
        return Plan(seed, nodes, tasks, drivers, faults, machines, retries, skip, family)
    nodes, machines = (3, 4, 2, 5)[seed % 4], seed % 4 == 3
    tasks, faults = (60, 60, 120, 90)[seed // 4 % 4], (0, 6, 3, 8)[seed // 2 % 4]
    return Plan(
        seed, nodes, tasks, 2 + seed % 2 + 2 * (family == "herd"), faults, machines, seed % 16 not in (3, 7, 15), skip
    )


def _run(plan: Any) -> Any:
    from .cluster import run

    return run(plan)


def _shrink(plan: Any, seconds: float = 60.0) -> Any:
    """Leave out what a failing plan does not need."""
    until = time.perf_counter() + seconds
    for number in range(plan.faults):
        smaller = replace(plan, skip=plan.skip | {number})
        if number not in plan.skip and time.perf_counter() < until and _run(smaller).violations:
            plan = smaller
    for tasks in (5, 10, 15, 20, 30, 40, 60, 100, 200):
        if tasks < plan.tasks and time.perf_counter() < until and _run(replace(plan, tasks=tasks)).violations:
            return replace(plan, tasks=tasks)
    return plan


def _seeds(args: argparse.Namespace) -> Iterator[int]:
    until = time.monotonic() + args.seconds
    for seed in range(args.seed, args.seed + args.seeds) if not args.seconds else itertools.count(args.seed):
        if args.seconds and time.monotonic() > until:
            return
        yield seed


def _quiet() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # code of killed processes, which is dropped where it stands
    sys.unraisablehook = lambda args: None


def _campaign(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    failed, tasks, messages, reads, count = 0, 0, 0, 0, 0
    plans = (_plan(args, seed) for seed in _seeds(args))
    _quiet()  # a failed plan is made smaller in this process
    context = multiprocessing.get_context("fork")
    with context.Pool(args.jobs, _quiet) if args.jobs > 1 else _Alone() as pool:
        for result in pool.imap_unordered(_run, plans):
            count += 1
            tasks += result.tasks
            messages += result.messages
            reads += result.reads
            if args.verbose:
                sys.stdout.write("\n".join([*result.log, *result.faults, ""]))
            if result.violations:
                failed += 1
                plan = result.plan if args.no_shrink else _shrink(result.plan)
                sys.stdout.write(
                    f"FAILED: python -m tests.simulation {plan.command()}\n{result.violations[0][:3000]}\n"
                )
                sys.stdout.flush()
                if args.first:
                    return 1
    seconds = time.perf_counter() - began
    sys.stdout.write(
        f"simulated {count} seeds in {seconds:.0f} s ({args.jobs} processes): {tasks:,} runs of tasks, "
        f"{reads:,} reads, {messages:,} messages ({messages / max(1, tasks):.1f} a task); {failed} seeds failed\n"
    )
    return failed > 0


class _Alone:
    """A pool of this process alone."""

    def __enter__(self) -> _Alone:
        _quiet()
        return self

    def __exit__(self, *args: object) -> None:
        pass

    imap_unordered = staticmethod(map)


def _replay(args: argparse.Namespace) -> int:
    """Run each seed twice: everything must happen in the same order."""
    _quiet()
    for seed in _seeds(args):
        first, second = (_run(_plan(args, seed)) for _ in range(2))
        if first.digest != second.digest or first.violations:
            sys.stdout.write(f"seed {seed} does not repeat: {first.digest:x}, {second.digest:x} {first.violations}\n")
            return 1
    sys.stdout.write(f"{args.seeds} seeds repeat exactly\n")
    return 0


def _mutants(args: argparse.Namespace) -> int:
    """Run mutants: each with the seed that is known to find it, and with others."""
    from . import known

    mixed = argparse.Namespace(**vars(args) | {"mixed": True, "skip": ""})
    hunt = known.Hunt(partial(_plan_of, mixed), args.jobs, _quiet)
    try:
        return known.judge(hunt, args)
    finally:
        hunt.close()


def _plan_of(args: argparse.Namespace, seed: Any) -> Any:
    args.family = seed.family
    return _plan(args, seed.number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--seconds", type=float, default=0, help="run for so long instead of a number of seeds")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=60, help="of each seed, about")
    parser.add_argument("--drivers", type=int, default=2)
    parser.add_argument("--faults", type=int, default=6)
    parser.add_argument("--machines", action="store_true", help="machines are lost, drivers are killed, cuts are long")
    parser.add_argument("--retries", action="store_true", help="tasks run again as often as it takes")
    parser.add_argument("--mixed", action="store_true", help="the seed chooses all of these")
    parser.add_argument("--family", default="", help="a kind of run of simulation.cluster.FAMILIES")
    parser.add_argument("--skip", default="", help="numbers of faults to leave out")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--replay", action="store_true", help="run each seed twice and compare")
    parser.add_argument("--mutant", default="", help="with a fault put in")
    parser.add_argument("--only", default="", help="the mutants with these words in their names")
    parser.add_argument("--mutants", action="store_true", help="all of them, each until it is found")
    parser.add_argument("--known", action="store_true", help="only known seeds, and the first ones of aims")
    parser.add_argument("--renew", action="store_true", help="as --known; then search others for --seconds, write them")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the story")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of texts have the same order in each run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if args.mutants:
        return _mutants(args)
    if args.mutant:
        from .mutants import install

        install(args.mutant)
    return _replay(args) if args.replay else _campaign(args)


code = main()
sys.stdout.flush()
os._exit(code)  # an exit in order would run the ends of what killed processes had begun
