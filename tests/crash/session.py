"""Random kills in a whole session: workers, a second driver and the daemon die or stop under load, results are checked.

    python tests/crash/session.py SECONDS SEED     (with the failpoint build on the path)

This process kills; the driver is another, which works and compares; a third one looks (looker.py). Prints one
JSON object; see `main`.
"""

import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import fastrt
from fastrt._core.memory import clients, trace
from fastrt._core.memory.clients import KIND_ACTOR, KIND_DAEMON, KIND_WORKER
from fastrt._core.memory.segment import Segment
from fastrt._core.repair import fsck
from fastrt.errors import AttachError
from fastrt.store import client as store_client
from fastrt.store import join
from fastrt.store.client import Store
from fastrt.testing import SIDES, Failpoints

PATIENCE_S = 30.0
RECOVERIES = 12  # whose time is taken; more in longer runs
SETS = 3  # of these in a short one: what runs beside it only adds to the times, so the best set counts
MIX = {"kill": 10, "point": 10, "stop": 4, "stop daemon": 1, "stop driver": 1, "kill driver": 2, "kill daemon": 1}
DAEMON_S = 20.0  # between two kills of the daemon: one that is killed too often is given up, on purpose
_pause = threading.Event()


def pattern(seed: int, nbytes: int) -> bytes:
    return (seed.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


# ---- what the tasks do ----


@fastrt.remote(max_retries=250)
def make(seed: int, nbytes: int) -> bytes:
    return pattern(seed, nbytes)


@fastrt.remote(max_retries=250)
def total(seed: int, *values: bytes) -> int:
    return seed + sum(int.from_bytes(value[:8], "little") for value in values)


@fastrt.remote(max_retries=250)
def nested(seed: int) -> tuple[int, Any]:
    inner = [make.remote(seed + k, 3000) for k in range(2)]
    return fastrt.get(total.remote(seed, *inner)), inner


@fastrt.remote(max_restarts=-1, max_task_retries=-1)
class Maker:
    def make(self, seed: int, nbytes: int) -> bytes:
        return pattern(seed, nbytes)


@fastrt.remote(max_retries=3)
def begin(path: str) -> int:
    """The first attempt says that it runs, and waits to be killed; the second one says when it began."""
    now = time.monotonic_ns()
    if not os.path.exists(path):
        with open(path + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".new", path)
        threading.Event().wait(PATIENCE_S)
    return now


# ---- the drivers ----


class Load:
    """A driver's endless mix of puts, gets and tasks; everything is compared."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.compared = 0
        self.longest_s = 0.0
        self.values: list[tuple[int, int, Any]] = []
        self.tasks: list[tuple[str, int, int, Any]] = []
        self.maker: Any = None

    def step(self) -> None:
        self.seed += 100
        seed, nbytes = self.seed, self.random.choice((8, 60, 500, 9000, 200_000))
        what = self.random.randrange(6)
        if what == 0:
            self.values.append((seed, nbytes, fastrt.put(pattern(seed, nbytes))))
        elif what == 1:
            self.tasks.append(("make", seed, nbytes, make.remote(seed, nbytes)))
        elif what == 2:
            self.tasks.append(("nested", seed, 0, nested.remote(seed)))
        elif what == 3:
            known = [(s, ref) for s, _, ref in self.values[-2:]]
            ref = total.remote(seed, *[ref for _, ref in known])
            self.tasks.append(("total", seed + sum(s for s, _ in known), 0, ref))
        elif what == 4:
            self.maker = self.maker or Maker.remote()
            self.tasks.append(("make", seed, nbytes, self.maker.make.remote(seed, nbytes)))
        if len(self.values) > 12:
            self.check_value(*self.values.pop(0))
        while len(self.tasks) > 16:
            self.check_task(*self.tasks.pop(0))

    def finish(self) -> None:
        while self.values:
            self.check_value(*self.values.pop(0))
        while self.tasks:
            self.check_task(*self.tasks.pop(0))
        self.maker = None  # not before: an actor without handles is not started again

    def check_value(self, seed: int, nbytes: int, ref: Any) -> None:
        assert bytes(self.get(ref)) == pattern(seed, nbytes), f"torn: value {seed} of {nbytes} bytes"

    def check_task(self, what: str, seed: int, nbytes: int, ref: Any) -> None:
        value = self.get(ref)
        if what == "make":
            assert bytes(value) == pattern(seed, nbytes), f"torn: result {seed} of {nbytes} bytes"
        elif what == "total":
            assert value == seed, f"lost: a sum is {value}, not {seed}"
        else:
            assert value[0] == 3 * seed + 1, f"lost: a nested sum is {value[0]}, not {3 * seed + 1}"
            for k, inner in enumerate(value[1]):
                self.check_value(seed + k, 3000, inner)

    def get(self, ref: Any) -> Any:
        begun = time.monotonic()
        value = fastrt.get(ref, timeout=PATIENCE_S)
        self.longest_s = max(self.longest_s, time.monotonic() - begun)
        self.compared += 1
        return value


def measure_recovery(folder: Path, name: str, count: int) -> list[float]:
    """Kill the worker that runs a task; milliseconds until the task runs again elsewhere."""
    times = []
    for k in range(count):
        path = folder / f"begun{name}{k}"
        ref = begin.remote(str(path))
        until = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert time.monotonic() < until, "hung: a task does not begin"
            _pause.wait(0.001)
        killed = time.monotonic_ns()
        os.kill(int(path.read_text()), signal.SIGKILL)
        times.append((fastrt.get(ref, timeout=PATIENCE_S) - killed) / 1e6)
    return times


def drive(folder: Path, seconds: float, seed: int) -> None:
    """The first driver: measure in peace, then work until the time is over, then look at what is left."""
    with fastrt.init(2, "64MiB", runtime_dir=folder / "rt") as runtime:
        store = store_client.require()
        say(segment=store.client.segment.name, socket=runtime.socket_path)
        counts = [RECOVERIES] * SETS if seconds < 60 else [100]
        sets = [measure_recovery(folder, f"{k}-", count) for k, count in enumerate(counts)]
        times = min(sets, key=statistics.median)
        say(ready=True)
        load = Load(seed)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            load.step()
        load.finish()
        say(calm=True)
        input()  # until the killer has ended the other driver
        problems = remains()
        say(compared=load.compared, longest_s=load.longest_s, recovery_ms=times, problems=problems)


def remains() -> list[str]:
    """What keeps the arena from being as new, once everybody has come to rest."""
    until = time.monotonic() + PATIENCE_S
    while True:
        gc.collect()
        client = store_client.require().client
        usage = fsck.usage(client)
        found = fsck.fsck(client, True)
        if usage["objects"] != usage["functions"] or usage["tasks"] or usage["actors"]:
            found.append(f"leaked: {usage}")
        if trace.enabled(client):
            found.append("left behind: the session records, and no process looks")
        if not found or time.monotonic() > until:
            return found
        _pause.wait(0.02)


def drive_second(socket: str, seed: int) -> None:
    """Another driver of the same session, for as long as it lives."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            client, link = join.join(socket, "driver", "second")
            break
        except AttachError:  # the daemon is dead, and the next one is on its way
            if time.monotonic() > until:
                raise
            _pause.wait(0.01)
    client.adopt_job(client.job)
    store_client.set_store(Store(client, 0.0, None))
    load = Load(seed)
    while link.fileno() >= 0:
        load.step()


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


# ---- the killer ----


class Killer:
    """Stops and kills the processes of a session, one every now and then."""

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.points = Failpoints.attach(os.environ["FASTRT_FAILPOINTS_FILE"])
        self.driver = self.start("drive", str(folder), str(seconds), str(seed))
        self.counts = dict.fromkeys(MIX, 0)
        self.seconds = seconds
        self.daemon_killed = 0.0
        assert self.driver.stdout is not None
        first = json.loads(self.driver.stdout.readline())
        self.socket = first["socket"]
        self.segment = Segment.attach(first["segment"])
        assert "ready" in json.loads(self.driver.stdout.readline())
        self.second = self.start("drive_second", self.socket, str(seed + 1))
        words = [sys.executable, str(Path(__file__).with_name("looker.py")), str(folder / "rt")]
        self.looker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, *args]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def pids(self, kind: int) -> list[int]:
        return [row["pid"] for row in clients.table(self.segment) if row["kind"] == kind and row["state"] == 2]

    def run(self) -> dict[str, Any]:
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and self.driver.poll() is None:
            what = self.random.choices(list(MIX), list(MIX.values()))[0]
            workers, daemons = [*self.pids(KIND_WORKER), *self.pids(KIND_ACTOR)], self.pids(KIND_DAEMON)
            if what == "kill daemon" and time.monotonic() - self.daemon_killed < DAEMON_S:
                continue
            if workers and daemons:
                self.act(what, self.random.choice(workers), daemons[0])
                self.counts[what] += 1
            _pause.wait(self.random.uniform(0.01, 0.15))
        self.points.disarm()
        looked, _ = self.looker.communicate(timeout=8 * PATIENCE_S)  # before the end: its dashboard leaves the session
        seen = json.loads(looked) if looked else {"problems": [f"lost: the looker ended with {self.looker.returncode}"]}
        found = self.end()
        return {**seen, **found, "problems": [*seen["problems"], *found["problems"]]}

    def act(self, what: str, worker: int, daemon: int) -> None:
        if what == "kill":
            send(worker, signal.SIGKILL)
        elif what == "kill daemon":
            send(daemon, signal.SIGKILL)
            self.daemon_killed = time.monotonic()
        elif what == "kill driver":
            self.end_second()
            self.seed += 1 << 20
            self.second = self.start("drive_second", self.socket, str(self.seed))
        elif what == "point":
            self.arm(worker)
        else:
            pid = {"stop": worker, "stop daemon": daemon, "stop driver": self.driver.pid}[what]
            send(pid, signal.SIGSTOP)
            _pause.wait(self.random.uniform(0.05, 0.4))
            send(pid, signal.SIGCONT)

    def arm(self, worker: int) -> None:
        """Let a worker die at a point that real work comes by."""
        walked = [name for name, hits in self.points.points().items() if min(hits) > 20]
        if walked:
            name, side, hit = self.random.choice(walked), self.random.choice(SIDES), self.random.randint(1, 20)
            self.points.arm(name, side, pid=worker, hit=hit)
            until = time.monotonic() + 0.3
            while self.points.armed and time.monotonic() < until:
                _pause.wait(0.005)
            self.points.disarm()

    def end_second(self) -> None:
        self.second.kill()
        self.second.communicate()

    def end(self) -> dict[str, Any]:
        assert self.driver.stdout is not None
        try:
            self.driver.stdout.readline()
            self.end_second()
            out, _ = self.driver.communicate("\n", timeout=4 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            out = ""
        found = json.loads(out.splitlines()[-1]) if out.strip() else {"problems": []}
        if self.driver.returncode != 0:
            found["problems"].append(f"lost: the driver ended with {self.driver.returncode}")
        return {**found, "acts": self.counts}


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def left_behind(folder: Path, segment: str) -> list[str]:
    """Processes, names and files that the session should have taken with it."""
    token = f"FASTRT_CHAOS={os.environ['FASTRT_CHAOS']}"
    until = time.monotonic() + PATIENCE_S / 3
    while True:
        pids = [pid for pid in psutil.pids() if pid != os.getpid() and ours(pid, token)]
        found = [f"left behind: process {pid}" for pid in pids]
        found += [f"left behind: {path}" for path in (folder / "rt").glob("*")]
        if Path("/dev/shm" + segment).exists():
            found.append(f"left behind: {segment}")
        if not found or time.monotonic() > until:
            return found
        _pause.wait(0.02)


def ours(pid: int, token: str) -> bool:
    try:
        return token.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def main(seconds: float, seed: int) -> None:
    """Print what happened: acts by kind, values compared, recovery times, and problems (none, or it is a bug)."""
    os.environ["FASTRT_CHAOS"] = f"{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="frt-") as name:
        killer = Killer(Path(name), seconds, seed)
        found = killer.run()
        found["problems"] += left_behind(Path(name), killer.segment.name)
    times = sorted(found.pop("recovery_ms", [float("inf")]))
    found["recovery_p50_ms"] = statistics.median(times)
    found["recovery_p99_ms"] = times[min(len(times) - 1, int(len(times) * 0.99))]
    say(**found)


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "drive_second":
        drive_second(sys.argv[2], int(sys.argv[3]))
    else:
        main(float(sys.argv[1]), int(sys.argv[2]))
