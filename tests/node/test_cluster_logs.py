"""Nothing is lost in a cluster whose processes and nodes are killed: checked from logs that nothing of it keeps.

The driver writes a line before each call and one after it was acknowledged, and one for each outcome; a task writes a
line each time it runs. All of them go by O_APPEND to files outside the session. At the end the checker reads the
files alone.

Source: RELIABILITY.md's definition, points 1, 3, 4 and 9, as docs/cluster.md promises it.
"""

import os
import random
import threading
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

import fastrt

RETRIES = 40
LARGE = 30_000  # words: more than travels inside a message
PATIENCE_S = 120.0


def note(path: str, *words: object) -> None:
    """One line, by one write, which the kernel keeps whole."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    finally:
        os.close(fd)


def payload(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 60, LARGE)


@fastrt.remote
def work(path, k, given):
    """Checks what it was given, and makes something large of its number."""
    note(path, "ran", k)
    assert zlib.crc32(given) == zlib.crc32(payload(k % 3)), "an argument has other bytes"
    threading.Event().wait(0.01)
    return payload(k)


class Logged:
    """A driver that keeps a log."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.runs = str(folder / "driver.log"), str(folder / "runs.log")
        self.given = [fastrt.put(payload(k)) for k in range(3)]
        self.refs: dict[int, fastrt.ObjectRef] = {}

    def submit(self, k: int) -> None:
        retries = 0 if k % 5 == 0 else RETRIES
        note(self.calls, "submit", k, retries)
        self.refs[k] = work.options(max_retries=retries).remote(self.runs, k, self.given[k % 3])
        note(self.calls, "submitted", k)

    def collect(self) -> None:
        for k, ref in self.refs.items():
            try:
                value = fastrt.get(ref, timeout=PATIENCE_S)
            except (fastrt.WorkerCrashedError, fastrt.ObjectLostError) as error:
                note(self.calls, "error", k, type(error).__name__)
            else:
                note(self.calls, "value", k, zlib.crc32(value))


def check(calls: str, runs: str) -> Counter:
    """Compare the logs with what was promised; how many outcomes of each kind there were."""
    retries, acknowledged, outcomes = {}, set(), {}
    for what, k, *rest in (line.split() for line in Path(calls).read_text().splitlines()):
        if what == "submit":
            retries[k] = int(rest[0])
        elif what == "submitted":
            acknowledged.add(k)
        else:
            assert k not in outcomes, f"{k} has two outcomes"
            outcomes[k] = (what, rest[0])
    ran = Counter(line.split()[1] for line in Path(runs).read_text().splitlines())
    assert acknowledged == outcomes.keys() == retries.keys(), "a call has no outcome"
    for k, (what, told) in outcomes.items():
        assert ran[k] <= 1 + retries[k], f"{k} ran {ran[k]} times"
        if what == "value":
            assert ran[k] >= 1, f"{k} has a value and never ran"
            assert int(told) == zlib.crc32(payload(int(k))), f"{k} has other bytes"
        else:
            assert retries[k] == 0, f"{k} may run {retries[k]} times more, and was given up: {told}"
    return Counter(what for what, _ in outcomes.values())


def kill_a_worker(nodes, rng) -> None:
    """Kill any process that runs tasks, of any node."""
    workers = []
    for node in nodes:
        for below in psutil.Process(node.process.pid).children():
            workers += [process for process in below.children(recursive=True) if not process.children()]
    rng.choice(workers).kill()


SHORT, LONG = ("worker and head", "uplink"), ("worker and head", "node", "uplink") * 5
PLANS = [(1, SHORT), *(pytest.param(seed, LONG, marks=pytest.mark.long) for seed in (2, 3))]


@pytest.mark.parametrize(("seed", "turns"), PLANS, ids=["short", "long2", "long3"])
def test_nothing_is_lost_under_kills_of_workers_uplinks_nodes_and_the_head(start, runtime_dir, tmp_path, seed, turns):
    rng = random.Random(seed)
    each = 30 if turns == SHORT else 60
    head = start("--head", "--port", "0", "--num-workers", "1", "--name", "n0")
    others = [start("--address", head.head, "--num-workers", "1", "--name", f"n{k}") for k in range(1, len(set(turns)))]
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        driver = Logged(tmp_path)
        for turn, what in enumerate(turns):
            for k in range(turn * each, (turn + 1) * each):
                driver.submit(k)
            fastrt.wait(list(driver.refs.values()), num_returns=turn * each + each // 4, timeout=PATIENCE_S)
            if what == "node":
                others.pop(rng.randrange(len(others))).kill()
                others.append(start("--address", head.head, "--num-workers", "1", "--name", f"n{turn + 3}"))
            elif what == "uplink":
                rng.choice([head, *others]).kill_child("fastrt.runtime.uplink")
            else:
                kill_a_worker([head, *others], rng)
                head.kill_child("fastrt.cluster.head")
        driver.collect()
        assert check(driver.calls, driver.runs)["value"] >= len(turns) * each * 4 // 5


@pytest.mark.parametrize(
    ("driver", "runs", "words"),
    [
        (["submit 1 0", "submitted 1"], [], "no outcome"),
        (["submit 1 0", "submitted 1", "value 1 5"], ["ran 1"], "other bytes"),
        (["submit 1 0", "submitted 1", f"value 1 {zlib.crc32(payload(1))}"], [], "never ran"),
        (["submit 1 0", "submitted 1", f"value 1 {zlib.crc32(payload(1))}"], ["ran 1"] * 2, "ran 2 times"),
        (["submit 1 3", "submitted 1", "error 1 ObjectLostError"], ["ran 1"], "was given up"),
        (["submit 1 0", "submitted 1", "error 1 X", "error 1 X"], ["ran 1"], "two outcomes"),
    ],
)
def test_checker_finds_what_it_looks_for(tmp_path, driver, runs, words):
    for name, lines in (("driver", driver), ("runs", runs)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    with pytest.raises(AssertionError, match=words):
        check(str(tmp_path / "driver"), str(tmp_path / "runs"))
