"""The kill campaign: `make chaos`, or `python tests/crash/chaos.py --short`, or `--seconds 10` for a sample of that.

Kills a process at every point of the core, before and after each atomic change and each lock, and checks after each
death that nothing is lost, torn, leaked or stuck. Prints a table; ends with an error if any count in it is not 0.
"""

import argparse
import json
import os
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import variant

HERE = Path(__file__).parent
SILENCE_S = 60.0  # of a lane: longer than any wait inside of it is allowed to be
FORMS: dict[str, dict[str, Any]] = {
    "short": {"per_side": 1, "per_recovery": 1, "pairs": 40, "live": 60},
    "long": {"per_side": 50, "per_recovery": 20, "pairs": 3000, "live": 5000},
}
SESSION_S = {"short": 4.0, "long": 120.0}
# Points that the walks do not come by, by file, function and kind, and why.
NOT_WALKED = {
    ("actors.pyx", "_commit_record", "store"): "needs more actors than the first step of their table has",
    ("actors.pyx", "_commit_record", "give"): "as above",
    ("actors.pyx", "_create", "give"): "its refusal needs as many actors as clients_max allows",
    ("clients.pyx", "abandon", "store"): "a flag in the process's own memory, which dies with it",
    ("recovery.pyx", "leave", "store"): "as above",
    ("clients.pyx", "readmit", "store"): "one store by the daemon, to the slot of a process that lives",
    ("recovery.pyx", "_task_of_dead", "swap"): "needs a caller that dies just after its actor: reached by chance only",
    ("recovery.pyx", "_close_planes", "mend"): "as below",
    ("recovery.pyx", "_close_planes", "store"): "needs a plane whose last client is recovered by one outside of it",
    ("failures.pyx", "_begin", "store"): "needs a machine without memory for a page of the ring",
    (
        "tally.pyx",
        "tally_settle",
        "store",
    ): "needs a death between a task's count and its seal, then one of the repairer",
    ("remote.pyx", "detach", "swap"): "needs the daemon to drop the copy at that moment; models/remote.py has it",
    ("arena.pyx", "arena_grow", "mend"): "mends a lock only if two processes grow at the moment of the death",
}
RECOVERY_MS = 50.0  # of a killed worker: from the kill until its task runs again
OBJECTS = {"short": (10**5,), "long": (10**4, 10**5, 10**6, 10**7)}
BYTES_PER_OBJECT = 200


class Lane:
    """A running lane.py: its last words, and what it has reported."""

    def __init__(self, target: Path, spec: dict[str, Any], folder: Path) -> None:
        environ = make_table(target, folder / f"points{spec['lane']}")
        command = [sys.executable, str(HERE / "lane.py"), json.dumps(spec)]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, start_new_session=True)
        self.doing = "starting"
        self.heard = time.monotonic()
        self.failures: list[dict[str, Any]] = []
        self.report: dict[str, Any] | None = None
        self._data = b""

    def read(self) -> bool:
        """Take in what it says; False at its end."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._data = (self._data + data).split(b"\n")
        self.heard = time.monotonic()
        for line in lines:
            message = json.loads(line)
            if "failure" in message:
                self.failures.append(message)
                say(f"FAILED {message['variant']}: {message['failure']}\n   {message['what']}")
            self.doing = message.get("doing", self.doing)
            if "totals" in message:
                self.report = message
        return bool(data)

    def close(self, early: bool = False) -> None:
        """End it; what it has not said is a failure, unless it was ended `early`."""
        if time.monotonic() - self.heard > SILENCE_S:
            self.failures.append({"failure": "hang", "variant": "", "what": self.doing})
            say(f"HUNG: {self.doing}")
        try:
            os.killpg(self.process.pid, 9)  # with whatever it has forked
        except ProcessLookupError:
            pass
        code = self.process.wait()
        hung = any(failure["failure"] == "hang" for failure in self.failures)
        if (self.report is None or code > 0) and not early and not hung:
            self.failures.append({"failure": f"the survivor ended with {code}", "variant": "", "what": self.doing})
            say(f"CRASHED with {code}: {self.doing}")
        assert self.process.stdout is not None
        self.process.stdout.close()


def make_table(target: Path, path: Path) -> dict[str, str]:
    """A table of points for processes that are started with the environment returned."""
    make = f"from fastrt.testing import Failpoints; Failpoints({str(path)!r})"
    subprocess.run([sys.executable, "-c", make], env=variant.environment(target), check=True)
    return {**variant.environment(target), "FASTRT_FAILPOINTS_FILE": str(path)}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_lanes(target: Path, spec: dict[str, Any], lanes: int) -> list[Lane]:
    """Run the plan in so many processes; with "first" in it until the first complaint."""
    with tempfile.TemporaryDirectory(prefix="frt-chaos-") as folder:
        spec = {**spec, "folder": folder, "lanes": lanes}
        running = [Lane(target, {**spec, "lane": k}, Path(folder)) for k in range(lanes)]
        done: list[Lane] = []
        while running:
            ready = select.select([lane.process.stdout for lane in running], [], [], 1.0)[0]
            for lane in list(running):
                over = time.monotonic() - lane.heard > SILENCE_S or lane.report is not None
                # Its children keep the pipe open when it crashes.
                over |= lane.process.stdout not in ready and lane.process.poll() is not None
                if over or (lane.process.stdout in ready and not lane.read()):
                    lane.close()
                    running.remove(lane)
                    done.append(lane)
            if "first" in spec and any(lane.failures for lane in [*running, *done]):
                for lane in running:
                    lane.close(early=True)  # one complaint is enough
                done, running = [*done, *running], []
    # What lanes that were killed have left: the segments of the dead.
    sweep = "from fastrt._core.memory.segment import sweep; sweep()"
    subprocess.run([sys.executable, "-c", sweep], env=variant.environment(target), check=True)
    return done


def summary(lanes: list[Lane]) -> tuple[dict[str, Any], list[str]]:
    """The campaign's counts, and the points at which nobody died."""
    reports = [lane.report for lane in lanes if lane.report is not None]
    failures = [failure for lane in lanes for failure in lane.failures]
    points: dict[str, list[int]] = {}
    for report in reports:
        for name, deaths in report["points"].items():
            points[name] = [a + b for a, b in zip(points.get(name, [0, 0]), deaths, strict=True)]
    never = [f"{side} {name}" for name, deaths in points.items()
             for side, n in zip(("before", "after"), deaths, strict=True) if n == 0]  # fmt: skip

    def count(*words: str) -> int:
        return sum(any(word in failure["failure"] for word in words) for failure in failures)

    found = {
        "points": len(points),
        "sides never reached": len(never),
        "points with 100 deaths or more": sum(sum(deaths) >= 100 for deaths in points.values()),
        "runs": sum(report["totals"]["runs"] for report in reports),
        "kills": sum(report["totals"]["kills"] for report in reports),
        "values compared by live sharers": sum(report["totals"]["compared"] for report in reports),
        "lost results": count("lost", "gave", "failed:"),
        "torn values": count("torn", "not whole"),
        "leaks": count("left behind", "leaked"),
        "hangs": count("hung", "hang", "LockStuck"),
        "other failures": 0,
        "longest stall, ms": round(max([report["stall_s"] for report in reports], default=0) * 1e3, 1),
    }
    counted = sum(found[name] for name in ("lost results", "torn values", "leaks", "hangs"))
    found["other failures"] = max(0, len(failures) - counted)
    return found, never


def place_of(point: str, source: str) -> tuple[str, str, str]:
    """The file, the function and the kind of a point such as "arena.pyx:219 mend"."""
    where, _, kind = point.partition(" ")
    file, _, line = where.partition(":")
    found = ""
    lines = next(Path(source).rglob(file)).read_text().splitlines() if file.endswith(".pyx") else []
    for text in lines[: int(line)]:
        match = re.match(r" *(?:def|cdef|cpdef)\b[^=]*?(\w+)\(", text)
        found = match[1] if match else found
    return file, found, kind


def with_table(target: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script on the failpoint build with a table of points; its output is kept, its errors are shown."""
    with tempfile.TemporaryDirectory(prefix="frt-points-") as folder:
        environ = make_table(target, Path(folder, "points"))
        command = [sys.executable, str(HERE / script), *args]
        return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)


def session(target: Path, form: str, seed: int) -> list[str]:
    """Random kills and stops in a whole session; what was wrong."""
    done = with_table(target, "session.py", str(SESSION_S[form]), str(seed))
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return [f"the session campaign ended with {done.returncode}"]
    found = json.loads(lines[-1])
    problems: list[str] = found.pop("problems")
    for name, value in found.items():
        say(f"{'session: ' + name:>40}  {value}")
    # The longest of a few says more about what else the machine does than about us.
    late = found["recovery_p99_ms" if form == "long" else "recovery_p50_ms"]
    if late > RECOVERY_MS:
        problems.append(f"a killed worker's task ran again only after {late:.0f} ms")
    return problems


def janitor(form: str) -> list[str]:
    """What a recovery costs when much is alive, on the build that users have: it is a matter of time."""
    room = os.statvfs("/dev/shm")
    counts = [str(n) for n in OBJECTS[form] if n * BYTES_PER_OBJECT < room.f_bavail * room.f_frsize]
    command = [sys.executable, str(HERE / "janitor_cost.py"), *counts]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    say(done.stdout.rstrip())
    return [] if done.returncode == 0 else ["recovery costs too much when much is alive, or failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form that the long tests run: each point once")
    parser.add_argument("--seconds", type=float, default=0, help="as many of the short form's deaths as this allows")
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1)
    for name in FORMS["long"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None)
    options = parser.parse_args()
    options.short |= options.seconds > 0
    form = FORMS["short" if options.short else "long"]
    spec = {name: getattr(options, name) if getattr(options, name) is not None else n for name, n in form.items()}
    for name in ("pairs", "live"):
        spec[name] = -(-spec[name] // options.lanes)
    spec["seed"] = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    spec["source"] = str(variant.ROOT / "src" / "fastrt" / "_core")
    say(f"seed {spec['seed']}")
    begun = time.monotonic()
    target = variant.build()
    say(f"build: {time.monotonic() - begun:.1f} s")
    begun = time.monotonic()
    if options.seconds:
        spec["until"] = begun + options.seconds
    lanes = run_lanes(target, spec, options.lanes)
    found, never = summary(lanes)
    for name, value in found.items():
        say(f"{name:>40}  {value}")
    say(f"{'seconds':>40}  {time.monotonic() - begun:.0f}")
    missed = [name for name in never if place_of(name.partition(" ")[2], spec["source"]) not in NOT_WALKED]
    problems = [] if options.seconds else [f"never reached: {name}" for name in missed]
    problems += session(target, "short" if options.short else "long", spec["seed"])
    problems += [] if options.seconds else janitor("short" if options.short else "long")
    if not options.short:
        problems += [f"{count} mutants were not detected" for count in [mutants.campaign([])] if count]
    for problem in problems:
        say(problem)
    return 1 if problems or any(lane.failures for lane in lanes) else 0


if __name__ == "__main__":
    import mutants  # which itself runs lanes

    sys.exit(main())
