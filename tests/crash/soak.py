"""The soak: `make soak`, or `python tests/crash/soak.py SECONDS [--nodes 3]`.

Two programs use one node, or one of three, at once: tasks, actors, generators, values beyond the store's size, cancels;
meanwhile this process kills and stops workers and uplinks. Every outcome is checked: a task ends with its value, and
only one that was cancelled with TaskCancelledError. After the first part (a quarter of the time, at most five minutes)
and at the end both programs let go of everything, and the processes' memory, descriptors and threads, `/dev/shm` and
the arenas are measured. Objects, tasks and actors must be gone; in runs of four minutes or more nothing else may have
grown by more than 2 % and an allowance for each node. (Before, not every page of the store has been used and not every
worker has loaded everything.) Prints the measures, and what went wrong.
"""

import argparse
import contextlib
import gc
import json
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fastrt
from fastrt._core.repair import fsck
from fastrt.node.daemon import sweep_sessions
from fastrt.store import client as store_client
from support.cluster import RunningNode

STORE = "96MiB"  # of each node; what a program holds at its most is larger
LARGE_WORDS, LARGE_KEPT = 500_000, 16  # two programs hold 128 MB
PATIENCE_S = 120.0
QUIET_S = 20.0  # in which workers that were needed for a moment leave
SLEEP_S = 0.5  # of a task that is cancelled at some time before or after
PAUSE_S = (0.2, 1.0)  # between two kills
# How much may be there beside 2 %: Python's allocator and a worker that has loaded less at the first look.
ALLOWED = {"memory MiB": 24.0, "descriptors": 12, "threads": 4, "shm MiB": 4.0}
FIRST_PART_S = 60.0  # from which on growth is checked
_pause = threading.Event()


# ---- what the tasks do ----


@fastrt.remote(max_retries=-1)
def total(k: int, *values: Any) -> int:
    return k + sum(int(np.sum(value)) for value in values)


@fastrt.remote(max_retries=-1)
def large(k: int) -> Any:
    return np.full(LARGE_WORDS, k)


@fastrt.remote(max_retries=-1)
def nested(k: int) -> int:
    return sum(fastrt.get([total.remote(k), total.remote(1)]))


@fastrt.remote(max_retries=-1)
def nap() -> int:
    threading.Event().wait(SLEEP_S)
    return 0


@fastrt.remote(max_retries=-1, num_returns="streaming")
def count(n: int) -> Any:
    for k in range(n):
        yield k if k % 3 else np.full(5000, k)


@fastrt.remote(max_restarts=-1, max_task_retries=-1)
class Adder:
    def add(self, k: int) -> int:
        return k + 1


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ---- a program ----


class Program:
    """A driver's mix; `failures` says what ended otherwise than it should."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.open: list[tuple[str, int, Any]] = []
        self.actor: Any = None

    def step(self) -> None:
        what = self.random.choices(("total", "value", "nested", "actor", "stream", "left", "cancel", "large"),
                                   (8, 4, 3, 6, 2, 1, 2, 6))[0]  # fmt: skip
        k = self.random.randrange(1000)
        ref: Any
        if what == "total":
            ref, k = total.remote(k, np.ones(self.random.choice((10, 3000)))), k
        elif what == "value":
            ref = fastrt.put(k)
        elif what == "nested":
            ref = nested.remote(k)
        elif what == "actor":
            self.actor = self.actor or Adder.remote()
            ref = self.actor.add.remote(k)
        elif what in ("stream", "left"):
            ref = count.remote(k % 20)
        elif what == "cancel":
            ref = nap.remote()
        else:
            ref = large.remote(k) if k % 2 else fastrt.put(np.full(LARGE_WORDS, k))
        self.open.append((what, k, ref))
        held = sum(one[0] == "large" for one in self.open)
        while len(self.open) > 40 or held > LARGE_KEPT:
            ended = self.open.pop(0)
            held -= ended[0] == "large"
            self.end(*ended)

    def end(self, what: str, k: int, ref: Any) -> None:
        """Check one outcome."""
        try:
            found = self.outcome(what, k, ref)
        except Exception as exc:
            found = f"{type(exc).__name__}: {str(exc)[:300]}"
        self.done[what] += 1
        if found is not True:
            self.failures.append(f"{what} {k}: {found}")

    def outcome(self, what: str, k: int, ref: Any) -> Any:
        if what == "cancel":
            fastrt.cancel(ref, force=k % 2 == 0)
            try:
                return fastrt.get(ref, timeout=PATIENCE_S) == 0
            except fastrt.TaskCancelledError:
                return True
        if what in ("stream", "left"):
            for i, item in enumerate(ref):
                if what == "left" and i == 2:
                    return True
                value = fastrt.get(item, timeout=PATIENCE_S)
                if (value if i % 3 else value[0]) != i:
                    return f"item {i} is {value}"
            return True
        value = fastrt.get(ref, timeout=PATIENCE_S)
        if what == "total":
            return value - k in (10, 3000) or value
        wanted = {"value": k, "nested": k + 1, "actor": k + 1}.get(what)
        return bool((value == k).all()) if what == "large" else value == wanted or value

    def rest(self) -> dict[str, Any]:
        """End everything; what is left in the arena then."""
        while self.open:
            self.end(*self.open.pop(0))
        self.actor = None
        gc.collect()
        usage: dict[str, Any] = fsck.usage(store_client.require().client)
        return usage


def run_program(address: str, runtime_dir: str, seed: int) -> None:
    """Work until a line on stdin says otherwise: "rest" or "end"; answer each with a line of JSON."""
    with fastrt.init(address=address, runtime_dir=runtime_dir, log_to_driver=False):
        program = Program(seed)
        while True:
            if select.select([sys.stdin], [], [], 0)[0]:
                order = sys.stdin.readline().strip()
                program.rest()
                say(json.dumps({"done": program.done, "failures": program.failures}))
                if order != "rest":
                    return
                sys.stdin.readline()  # until the other program rests, too, and was looked at
                usage = program.rest()
                say(json.dumps({name: usage[name] - usage["functions"] if name == "objects" else usage[name]
                                  for name in ("objects", "tasks", "actors")}))  # fmt: skip
                sys.stdin.readline()
            program.step()


# ---- the harness ----


class Child:
    """A program as a process."""

    def __init__(self, address: str, runtime_dir: Path, seed: int) -> None:
        command = [sys.executable, __file__, "0", "--program", address, str(runtime_dir), str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, word: str) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for a line."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], 4 * PATIENCE_S)[0]:
            raise SystemExit(f"program {self.process.pid} hangs; it is left running to be looked at")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a program ended with code {self.process.wait()}; its error output says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Soak:
    """The nodes, the programs and the kills."""

    def __init__(self, folder: Path, nodes: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.runtime_dir = folder / "rt"
        more = ("--num-workers", "2", "--object-store-memory", STORE)
        quiet = ("env", "FASTRT_LOG_TO_DRIVER=0")  # the harness does not read the nodes' output

        def start(*options: str) -> RunningNode:
            return RunningNode(self.runtime_dir, *options, *more, within=quiet)

        self.nodes = [start("--head", "--port", "0", "--name", "n0")]
        self.nodes += [start("--address", self.nodes[0].head, "--name", f"n{k}") for k in range(1, nodes)]
        self.programs = [Child(self.nodes[0].head, self.runtime_dir, seed + k) for k in range(2)]
        self.kills: Counter[str] = Counter()
        self.outcomes: list[dict[str, Any]] = [{}, {}]

    def processes(self) -> list[psutil.Process]:
        """All that belong to the nodes, and the programs."""
        top = [psutil.Process(one.process.pid) for one in (*self.nodes, *self.programs)]
        return [process for one in top for process in (one, *one.children(recursive=True))]

    def trouble(self, seconds: float) -> None:
        """Kill and stop for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            _pause.wait(self.random.uniform(*PAUSE_S))
            with contextlib.suppress(psutil.Error, IndexError):
                named = [(process, process.name()) for process in self.processes()]
                workers = [process for process, name in named if name in ("fastrt-worker", "fastrt-actor")]
                uplinks = [process for process, name in named if name == "fastrt-uplink"] if len(self.nodes) > 1 else []
                of = "uplink" if uplinks and self.random.random() < 0.1 else "worker"
                victim = self.random.choice(uplinks if of == "uplink" else workers)
                what = self.random.choice(("kill", "stop"))
                self.kills[f"{what} {of}"] += 1
                if what == "kill":
                    victim.kill()
                else:
                    victim.suspend()
                    _pause.wait(self.random.uniform(0.05, 0.5))
                    victim.resume()

    def look(self) -> dict[str, float]:
        """Have the programs rest, and measure."""
        for word in ("rest", "now"):
            for program in self.programs:
                program.tell(word)
            answers = [program.answer() for program in self.programs]
            if word == "rest":
                self.outcomes = answers
                self.settle()
        found = {name: float(max(answer[name] for answer in answers)) for name in ("objects", "tasks", "actors")}
        measures = [measure(process) for process in self.processes()]
        for k, name in enumerate(("memory MiB", "descriptors", "threads")):
            found[name] = round(sum(one[k] for one in measures), 1)
        segments = [Path(f"/dev/shm/fastrt-{Path(one.note.socket_path).parent.name}") for one in self.nodes]
        found["shm MiB"] = round(sum(path.stat().st_blocks * 512 for path in segments) / (1 << 20), 1)
        return found

    def settle(self) -> None:
        """Wait until workers that were needed for a moment are gone."""
        wanted, until = 2 * len(self.nodes), time.monotonic() + QUIET_S
        while time.monotonic() < until:
            with contextlib.suppress(psutil.Error):
                there = [process.name() for process in self.processes()]
                if there.count("fastrt-worker") == wanted and "fastrt-actor" not in there:
                    return
            _pause.wait(0.1)

    def go_on(self) -> None:
        """Let the programs work again."""
        for program in self.programs:
            program.tell("go on")

    def close(self) -> None:
        """End everything."""
        for one in self.programs:
            one.process.kill()
            one.process.communicate()
        for node in reversed(self.nodes):
            node.stop()
        sweep_sessions(self.runtime_dir, self.runtime_dir.parent / "spill")


def measure(process: psutil.Process) -> tuple[float, int, int]:
    """Its own memory in MiB, its descriptors and its threads."""
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().uss / (1 << 20), process.num_fds(), process.num_threads()
    return 0.0, 0, 0


def grown(first: dict[str, float], last: dict[str, float], nodes: int, first_part: float) -> list[str]:
    """Say what is left, and what has grown by more than 2 % and the allowance."""
    left = [f"{last[name]:.0f} {name} are left" for name in ("objects", "tasks", "actors") if last[name]]
    return left + [
        f"{name}: {first[name]} after the first part, {last[name]} at the end"
        for name, allowed in ALLOWED.items()
        if first_part >= FIRST_PART_S and last[name] > first[name] * 1.02 + allowed * nodes
    ]


def run(seconds: float, nodes: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """Run the soak; what went wrong, and the figures."""
    first_part = min(300.0, seconds / 4)
    with tempfile.TemporaryDirectory(prefix="frt-") as folder:
        soak = Soak(Path(folder), nodes, seed)
        try:
            soak.trouble(first_part)
            first = soak.look()
            soak.go_on()
            soak.trouble(seconds - first_part)
            last = soak.look()
            problems = grown(first, last, nodes, first_part)
            done: Counter[str] = Counter()
            for outcome in soak.outcomes:
                problems += outcome["failures"]
                done.update(outcome["done"])
        finally:
            soak.close()
    return problems, {"first": first, "last": last, "ended": dict(done), "kills": dict(soak.kills), "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, nargs="?", default=3600.0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--program", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program is not None:
        run_program(options.program[0], options.program[1], int(options.program[2]))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    problems, figures = run(options.seconds, options.nodes, options.seed)
    say(json.dumps(figures, indent=1))
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
