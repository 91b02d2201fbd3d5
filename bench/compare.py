"""fastrt beside other libraries on the same work, in one run: `python bench/compare.py`.

Each library runs in a driver process of its own, with two workers. Rounds are interleaved (fastrt, peer, fastrt,
peer, ...), so that both meet the same machine, and a ratio is the median of the ratios of neighbouring rounds. A
library with background processes (Ray, Dask) runs only during its own rounds with fastrt: it would disturb the others'.
memcpy, the limit of a put, runs in fastrt's driver, into as many blocks of the same mapping.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # also as fastrt.bench.compare: peers and workloads are imported by their own names

from peers import PEERS, load  # noqa: E402
from processes import MARK, anonymous_bytes, idle_share, marked, wait_until_gone  # noqa: E402
from workloads import ROWS, STORE_BYTES, WORKERS, Row  # noqa: E402

GROUPS = (("pool", "loky"), ("ray",), ("dask",))
SAMPLES_MAX = 2000
REPLY_S = 300.0
STARTS = {"fastrt": 9, "pool": 9, "loky": 5, "ray": 3, "dask": 3}
REST_S, SETTLE_S = 10.0, 3.0
Result = dict[str, Any]


# ---- the other side: a process that serves one library ----


def serve(name: str, replies: int) -> None:
    """Start a library and carry out the orders on stdin, until they end."""
    out = os.fdopen(replies, "w")
    peer = load(name, WORKERS, STORE_BYTES)
    peer.first()
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "prepare":
            answer["able"] = hasattr(peer, order["method"])
            if answer["able"]:
                peer.prepare(order["method"], order["argument"])
        elif order["do"] == "round":
            answer["times"] = thin(peer.round(order["method"], order["argument"], order["seconds"]))
        else:
            peer.finish()
        out.write(json.dumps(answer) + "\n")
        out.flush()
    peer.close()


def thin(times: list[int]) -> list[int]:
    """At most SAMPLES_MAX of the times, with the same quantiles."""
    ranked = sorted(times)
    if len(ranked) <= SAMPLES_MAX:
        return ranked
    return [ranked[(2 * k + 1) * len(ranked) // (2 * SAMPLES_MAX)] for k in range(SAMPLES_MAX)]


def start_once(name: str) -> None:
    """Print, in a fresh process, the seconds from before the library's import to its first result."""
    start = time.perf_counter()
    peer = load(name, WORKERS, STORE_BYTES)
    peer.first()
    took = time.perf_counter() - start
    peer.close()
    print(json.dumps(took))


def environment() -> dict[str, str]:
    """An environment for child processes: a fresh mark, and workers that can import the work functions."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, MARK: secrets.token_hex(8), "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}


class Driver:
    """A library's driver process, seen from here."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._env = environment()
        replies, theirs = os.pipe()
        with log.open("wb") as noise:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve", name, str(theirs)],
                pass_fds=[theirs],
                stdin=subprocess.PIPE,
                stdout=noise,
                stderr=noise,
                env=self._env,
                text=True,
            )
        os.close(theirs)
        self._replies = os.fdopen(replies)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended early; the end of its output:\n{self.log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, **order: Any) -> dict[str, Any]:
        """Give one order and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def pids(self) -> list[int]:
        """All processes of this library, its driver among them."""
        return marked(self._env[MARK])

    def close(self) -> None:
        """End it and wait until none of its processes is left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        wait_until_gone(self._env[MARK], 10)


# ---- this side: rounds, ratios, figures ----


def run_group(fastrt: Driver, peers: list[Driver], rows: list[Row], rounds: int, scale: float, found: Result) -> None:
    """Measure rows with fastrt and some peers in turn; add to `found`."""
    for row in rows:
        runners: list[tuple[str, Driver, str]] = [("fastrt", fastrt, row.method)]
        if peers and peers[0].name in GROUPS[0] and row.nbytes:
            runners.append(("memcpy", fastrt, "memcpy"))
        runners += [(peer.name, peer, row.method) for peer in peers]
        runners = [
            (name, driver, method)
            for name, driver, method in runners
            if driver.order(do="prepare", method=method, argument=row.argument)["able"]
        ]
        if len(runners) > 1 or peers[0].name in GROUPS[0]:
            say(f"{row.title}: {', '.join(name for name, _, _ in runners)}")
            times: dict[str, list[list[int]]] = {name: [] for name, _, _ in runners}
            for _ in range(rounds):
                for name, driver, method in runners:
                    seconds = row.round_s * scale
                    answer = driver.order(do="round", method=method, argument=row.argument, seconds=seconds)
                    times[name].append(answer["times"])
            add_row(found, row, times)
        for _, driver, _ in runners:
            driver.order(do="finish")


def add_row(found: Result, row: Row, times: dict[str, list[list[int]]]) -> None:
    """Turn rounds of times into figures: median, p50, p99 and, for peers, the ratio of neighbouring rounds."""
    entry = found.setdefault(row.key, {"title": row.title, "figures": {}})
    ours = [statistics.median(one) for one in times["fastrt"]]
    for name, rounds in times.items():
        pooled = sorted(time for one in rounds for time in one)
        median = statistics.median(statistics.median(one) for one in rounds)
        figure = {
            "p50_us": pooled[len(pooled) // 2] / row.ops / 1e3,
            "p99_us": pooled[min(len(pooled) - 1, len(pooled) * 99 // 100)] / row.ops / 1e3,
            "units": len(pooled),
            "ops_in_unit": row.ops,
            "per_second": row.ops * 1e9 / median,
        }
        if row.nbytes:
            figure["GB_per_s"] = row.nbytes / median
        if name != "fastrt":
            theirs = [statistics.median(one) for one in rounds]
            figure["ratio"] = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        if name not in entry["figures"]:  # fastrt's own figures come from its first, quietest group
            entry["figures"][name] = figure


def measure_starts(names: list[str], scale: float) -> Result:
    """Seconds from before a library's import to its first result, in fresh processes, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for k in range(max(STARTS.values())):
        for name in names:
            if k < max(1, STARTS[name] * scale):
                say(f"start-up of {name}")
                times[name].append(json.loads(run_fresh("--start", name).splitlines()[-1]))
    return {name: {"p50_s": statistics.median(taken), "most_s": max(taken)} for name, taken in times.items()}


def measure_rest(names: list[str], scratch: Path) -> Result:
    """Memory and processor time of all processes of a library that has run one task and then rests."""
    found = {}
    for name in names:
        say(f"{name} at rest")
        driver = Driver(name, scratch / f"{name}-rest.log")
        time.sleep(SETTLE_S)
        pids = driver.pids()
        share = idle_share(pids, REST_S)
        found[name] = {"processes": len(pids), "anonymous_MB": anonymous_bytes(pids) / 1e6, "cpu_percent": 100 * share}
        driver.close()
    return found


def measure_alone(names: list[str] | None) -> Result:
    """Run the measures of alone.py, each in a fresh process."""
    import alone

    found = {}
    for name in alone.MEASURES:
        if names is None or name in names:
            say(name.replace("_", " "))
            found[name] = json.loads(run_fresh("--alone", name).splitlines()[-1])
    return found


def run_fresh(*arguments: str) -> str:
    """Run this file in a fresh process; returns its output."""
    env = environment()
    result = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=REPLY_S, env=env
    )
    wait_until_gone(env[MARK], 10)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{result.stderr[-2000:]}")
    return result.stdout


def say(text: str) -> None:
    """Show the progress on stderr."""
    sys.stderr.write(f"\r\033[K{text}" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


def machine() -> Result:
    """The machine and the versions for which the figures hold."""
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    versions = {}
    for name, (_, _, distribution, _) in PEERS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(distribution) if distribution else sys.version.split()[0]
    return {
        "cpu": cpus[0] if cpus else "?",
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "versions": versions,
        "load_before": os.getloadavg()[0],
        "workers": WORKERS,
    }


def compare(options: argparse.Namespace) -> Result:
    """Measure everything that the options select."""
    installed = [name for name, (_, _, needed, _) in PEERS.items() if importlib.util.find_spec(needed or "sys")]
    names = [name for name in installed if name in (options.peers or installed) or name == "fastrt"]
    rows = [row for row in ROWS if not options.rows or row.key in options.rows or row.method in options.rows]
    found: Result = {"machine": machine(), "rows": {}}
    scratch = Path(options.logs)
    scratch.mkdir(parents=True, exist_ok=True)
    scale = 0.2 if options.quick else 1.0
    if "rest" in options.parts:
        found["rest"] = measure_rest(names, scratch)
    if "start" in options.parts:
        found["start"] = measure_starts(names, scale)
    if "alone" in options.parts:
        found["alone"] = measure_alone(options.rows or None)
    if "rows" in options.parts:
        fastrt = Driver("fastrt", scratch / "fastrt.log")
        for group in GROUPS:
            peers = [Driver(name, scratch / f"{name}.log") for name in group if name in names]
            if peers:
                run_group(fastrt, peers, rows, options.rounds, scale, found["rows"])
            for peer in peers:
                peer.close()
        fastrt.close()
    say("")
    return found


def main() -> None:
    """Read the command line; measure, or serve as one of the child processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="only these; default: all that are installed")
    parser.add_argument("--rows", nargs="*", help="only these rows, methods or measures of alone.py")
    parser.add_argument("--parts", nargs="*", default=["rest", "start", "alone", "rows"], help="of the measurements")
    parser.add_argument("--rounds", type=int, default=5, help="of each row and peer; default: 5")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time a round: for a first look")
    parser.add_argument("--json", help="write all figures there")
    parser.add_argument("--logs", default="/tmp/fastrt-compare", help="folder for what the libraries print")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a required figure is missed")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
    elif options.start:
        start_once(options.start)
    elif options.alone:
        import alone

        print(json.dumps(alone.MEASURES[options.alone]()))
    else:
        import report

        found = compare(options)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=2))
        missed = report.show(found, options.markdown)
        sys.exit(1 if missed and options.strict else 0)


if __name__ == "__main__":
    main()
