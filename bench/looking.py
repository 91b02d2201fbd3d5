"""The cost of looking at a session: `python bench/looking.py closed`, `... open`, `... lists`, `... page`.

closed: instructions of a submission, by callgrind: beside no dashboard, beside one, and after one that is gone.
lists: the times of listings and counts of 2 million queued tasks and 4 million objects, and the memory of the reader.
page: the same session in a real browser: memory of the dashboard's process, the browser's heap, its longest tasks.
open: the rate of tasks, 1,000 at a time, and their processor time with a page open at 1 Hz and without, in pairs.
"""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil

import fastrt
from fastrt.observe import listing, reading

MIB = 1 << 20
VIEWS = ("overview", "tasks", "rows", "actors", "workers", "memory", "timeline", "nodes")


@fastrt.remote
def held(path: str) -> int:
    """Run until a file is there."""
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.05)
    return 0


@fastrt.remote
def double(x: int) -> int:
    """Return twice the argument."""
    return 2 * x


@contextmanager
def full_session(folder: Path, tasks: int, values: int) -> Iterator[list[Any]]:
    """A session whose one worker is held, with so many queued tasks and so many small values."""
    gate = folder / "gate"
    tables = {"tasks_max": max(1 << 21, 2 * tasks), "objects_max": max(1 << 22, 2 * (tasks + values))}
    with fastrt.init(1, 512 * tables["objects_max"], runtime_dir=folder / "rt", spill_dir=folder / "spill", **tables):
        first = held.remote(str(gate))
        refs = [double.remote(k) for k in range(tasks)]
        some = [fastrt.put(k) for k in range(values)]
        yield [first, refs, some]
        fastrt.cancel(first, force=True)


def private_mib(pid: int) -> float:
    """The memory of a process without what it shares, in MiB."""
    return psutil.Process(pid).memory_full_info().uss / MIB


def timed(function: Callable[[], object], rounds: int) -> str:
    """The median and the longest time of some calls, in words."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - begun))
    return f"{statistics.median(times):7.1f} ms, longest {max(times):7.1f} ms"


def joined_rows(rounds: int) -> None:
    """Time the listings; run in a process of its own, as `fastrt list` is."""
    from fastrt.observe.joining import Joined

    (path,) = Path(os.environ["FASTRT_RUNTIME_DIR"]).glob("*/node.sock")
    joined = Joined(path, "bench", 10.0)
    store = joined.store
    rows: dict[str, Callable[[], object]] = {
        "tasks, the first 100": lambda: reading.page(store, "tasks", {}, limit=100),
        "tasks, running": lambda: reading.page(store, "tasks", {"state": "running"}, limit=100),
        "tasks, by name": lambda: reading.page(store, "tasks", {"name": "double"}, limit=100),
        "tasks, counted by function": lambda: reading.counts(store, objects=False),
        "objects, the first 100": lambda: reading.page(store, "objects", {}, limit=100),
        "objects, sealed": lambda: reading.page(store, "objects", {"state": "sealed"}, limit=100),
        "objects, counted by kind": lambda: reading.counts(store, tasks=False),
        "workers": lambda: listing.workers(store),
    }
    before = private_mib(os.getpid())
    for name, call in rows.items():
        print(f"  {name:28}{timed(call, rounds)}")
    most = psutil.Process().memory_info().rss / MIB
    print(f"  memory of the reader: {most:.0f} MiB resident, {private_mib(os.getpid()) - before:+.1f} MiB of its own")
    joined.close()


@click.group()
def main() -> None:
    """Measure what it costs to look at a session."""


@main.command()
@click.option("--tasks", default=2_000_000)
@click.option("--values", default=2_000_000)
@click.option("--rounds", default=7)
def lists(tasks: int, values: int, rounds: int) -> None:
    """Time listings of a large session."""
    with tempfile.TemporaryDirectory(prefix="frt-") as name, full_session(Path(name), tasks, values):
        print(f"{tasks:,} queued tasks, {tasks + values:,} objects")
        env = {**os.environ, "FASTRT_RUNTIME_DIR": str(Path(name) / "rt")}
        subprocess.run([sys.executable, __file__, "rows", "--rounds", str(rounds)], env=env, check=True)


@main.command(hidden=True)
@click.option("--rounds", default=7)
def rows(rounds: int) -> None:
    """Time the listings of the session of the runtime folder."""
    joined_rows(rounds)


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `fastrt dashboard` for a runtime folder; give the process and the printed address."""
    code = "from fastrt.cli.main import main; main()"
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-c", code, "dashboard", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().partition(": ")[2].strip()
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


LONGEST = """new PerformanceObserver(list => {
    for (const one of list.getEntries()) window.longest = Math.max(window.longest ?? 0, one.duration);
}).observe({type: "longtask", buffered: true});"""


@main.command()
@click.option("--tasks", default=2_000_000)
@click.option("--values", default=2_000_000)
@click.option("--seconds", default=4.0, help="For each page.")
def page(tasks: int, values: int, seconds: float) -> None:
    """Show a large session in Chromium; needs playwright and chromium."""
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory(prefix="frt-") as name,
        full_session(Path(name), tasks, values),
        dashboard(Path(name) / "rt") as (server, url),
        sync_playwright() as driver,
    ):
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = chromium.new_page()
        shown.add_init_script(LONGEST)
        shown.goto(url)
        protocol = shown.context.new_cdp_session(shown)
        print(f"{'page':10}{'longest task':>14}{'heap':>12}{'server, resident':>18}{'of its own':>12}")
        for view in VIEWS:
            shown.evaluate("view => { window.longest = 0; location.hash = view; }", view)
            if view == "timeline":
                shown.get_by_role("button", name="Record").click()
            shown.wait_for_timeout(1000 * seconds)
            heap = protocol.send("Runtime.getHeapUsage")["usedSize"] / MIB
            resident = psutil.Process(server.pid).memory_info().rss / MIB
            longest = shown.evaluate("window.longest")
            print(f"{view:10}{longest:11.0f} ms{heap:8.1f} MiB{resident:14.0f} MiB{private_mib(server.pid):8.0f} MiB")
        chromium.close()


READER = """
import sys, urllib.request
port, token, view = sys.argv[1:]
request = urllib.request.Request(f"http://127.0.0.1:{port}/stream?view={view}", headers={"Authorization": token})
for line in urllib.request.urlopen(request):
    pass
"""


def processor_s(pids: list[int]) -> float:
    """The processor time of some processes until now, in seconds; the kernel counts it in nanoseconds."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # CPUCLOCK_SCHED of the process


def rate(seconds: float, in_flight: int) -> tuple[float, int]:
    """Tasks a second, with so many in flight, and how many were run."""
    refs = [double.remote(k) for k in range(in_flight)]
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        fastrt.get(refs[:100])
        refs = refs[100:] + [double.remote(k) for k in range(100)]
        done += 100
    found = done / (time.perf_counter() - begun)
    fastrt.get(refs)
    return found, done + in_flight


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    pause = threading.Event()
    while not path.exists():
        pause.wait(0.05)


def proof_of(folder: Path, server: subprocess.Popen[str], url: str) -> tuple[str, str]:
    """The port of a dashboard, and the value of the header `Authorization` for it."""
    from fastrt.runtime.dashboards import dashboards

    found = next(one for one in dashboards(folder) if one.pid == server.pid)
    return url.partition("//")[2].partition(":")[2].partition("/")[0], f"Bearer {found.token}"


def median(values: list[float]) -> str:
    """The median of some differences, and an interval that holds it with a probability of 95 %, in words.

    The interval's ends are two of the values, so it holds however they are distributed.
    """
    ordered, far = sorted(100 * one for one in values), 0.98 * len(values) ** 0.5
    low = ordered[max(0, int(len(ordered) / 2 - far))]
    high = ordered[min(len(ordered) - 1, int(len(ordered) / 2 + far))]
    return f"{statistics.median(ordered):+.2f} % (95 %: {low:+.2f} to {high:+.2f} %)"


@main.command("open")
@click.option("--view", default="overview", type=click.Choice(VIEWS))
@click.option("--pairs", default=50)
@click.option("--seconds", default=2.0, help="For each round.")
@click.option("--workers", default=1)
def page_open(view: str, pairs: int, seconds: float, workers: int) -> None:
    """Compare tasks with a page open and without: the dashboard is stopped in every other round."""
    with tempfile.TemporaryDirectory(prefix="frt-") as name:
        folder = Path(name) / "rt"
        with fastrt.init(workers, "256MiB", runtime_dir=folder), dashboard(folder) as (server, url):
            with subprocess.Popen([sys.executable, "-c", READER, *proof_of(folder, server, url), view]) as reader:
                rate(2 * seconds, 1000)
                rates, costs, alls, own = [], [], [], []
                pids = [one["pid"] for one in fastrt.list_workers() if one["kind"] in ("driver", "worker", "daemon")]
                for k in range(pairs):
                    speed, cost = {}, {}
                    for is_open in (True, False) if k % 2 else (False, True):
                        server.send_signal(signal.SIGCONT if is_open else signal.SIGSTOP)
                        looked, spent = processor_s([server.pid]), processor_s(pids)
                        speed[is_open], tasks = rate(seconds, 1000)
                        cost[is_open] = (processor_s(pids) - spent) / tasks
                        if is_open:
                            looked = processor_s([server.pid]) - looked
                            own.append(looked / seconds)
                            everything = cost[True] + looked / tasks
                    rates.append(speed[True] / speed[False] - 1)
                    costs.append(cost[True] / cost[False] - 1)
                    alls.append(everything / cost[False] - 1)
                server.send_signal(signal.SIGCONT)
                reader.terminate()
            print(f"{view}, the page open beside closed, medians of {pairs} pairs of {seconds} s")
            print(f"  tasks a second                                           {median(rates)}")
            print(f"  processor time of a task (driver, workers and daemon)    {median(costs)}")
            print(f"  the same and the dashboard's                             {median(alls)}")
            print(f"  the dashboard's own, of one processor                    {median(own)}")


COUNTED = """
import sys, threading, fastrt
folder, ready, go, tasks = sys.argv[1:]

@fastrt.remote
def double(x):
    return 2 * x

@fastrt.remote
def held():
    threading.Event().wait()

with fastrt.init(1, "256MiB", runtime_dir=folder):
    first = held.remote()
    some = [double.remote(k) for k in range(100)]
    open(ready, "w").close()
    pause = threading.Event()
    while True:  # until the dashboard is there, or is gone
        try:
            open(go).close()
            break
        except FileNotFoundError:
            pause.wait(0.5)
    refs = [double.remote(k) for k in range(int(tasks))]
    fastrt.cancel(first, force=True)
    import os
    os._exit(0)
"""


def instructions(folder: Path, tasks: int, beside: str) -> int:
    """The instructions of a driver that submits so many tasks while its one worker is held.

    Args:
        beside: "nothing", "a dashboard", or "after a dashboard".
    """
    ready, go = folder / "ready", folder / "go"
    out = folder / "callgrind.out"
    words = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}", sys.executable, "-c", COUNTED]
    env = {**os.environ, "PYTHONHASHSEED": "0", "FASTRT_ADVICE": "0", "FASTRT_POPULATE_BYTES": "0"}
    arguments = [str(folder / "rt"), str(ready), str(go), str(tasks)]
    with subprocess.Popen([*words, *arguments], env=env, stderr=subprocess.DEVNULL) as driver:
        wait_for(ready)
        if beside == "nothing":
            go.touch()
            driver.wait()
        else:
            with dashboard(folder / "rt") as (server, url):
                port, token = proof_of(folder / "rt", server, url)
                with subprocess.Popen([sys.executable, "-c", READER, port, token, "overview"]) as reader:
                    threading.Event().wait(3.0)  # some looks
                    if beside == "a dashboard":
                        go.touch()
                        driver.wait()
                    reader.terminate()
            go.touch()
            driver.wait()
    for path in (ready, go):
        path.unlink()
    return int(out.read_text().partition("summary: ")[2].split()[0])


@main.command()
@click.option("--rounds", default=2)
def closed(rounds: int) -> None:
    """Count the instructions of a submission: 6,000 tasks less 1,000, the smallest of some rounds."""
    for beside in ("nothing", "after a dashboard", "a dashboard"):
        counts = {}
        for tasks in (1000, 6000):
            with tempfile.TemporaryDirectory(prefix="frt-") as name:
                counts[tasks] = min(instructions(Path(name), tasks, beside) for _ in range(rounds))
        print(f"{beside:18}{(counts[6000] - counts[1000]) / 5000:10,.1f} instructions a submission")


if __name__ == "__main__":
    main()
