"""Four programs that work on data, on fastrt, Ray and Dask: `python bench/compare_data.py [--full] [--only NAME]`.

The same functions run on each library, with two workers and a store (Dask: memory of its workers) of one size, each in
a fresh process, one after the other. Results are compared. Printed: seconds, the most memory of all processes of the
library (shared pages count once), and the bytes it spilled (Dask: that lie on disk at the end). `--full` takes a store
of 1 GiB.

The libraries are in an environment of their own in .cache/data, which the first run makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from external_sort import cut, make, merge, total
from processes import MARK, marked

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "data"
LIBRARIES = ["ray", "dask[distributed]", "pyarrow", "scikit-learn", "pandas"]
MIB = 1 << 20
WORKERS = 2
PATIENCE_S = 1200
SORT_BYTES = "COMPARE_DATA_SORT_BYTES"  # how much data `sort` has, for the process that runs it


# ---- the libraries: `run(function, *args, returns=1)` gives a reference or several, `get` the values ----


class OnFastrt:
    name = "fastrt"

    def __init__(self, store: int, folder: str) -> None:
        self._fastrt = importlib.import_module("fastrt")
        self._fastrt.init(WORKERS, store, spill_dir=folder, advice=False)
        self.get = self._fastrt.get

    def run(self, function: Callable[..., Any], *args: Any, returns: int = 1) -> Any:
        return self._fastrt.remote(num_returns=returns)(function).remote(*args)

    def search(self, search: Any, x: Any, y: Any) -> None:
        joblib = importlib.import_module("joblib")
        importlib.import_module("fastrt.joblib").register()
        with joblib.parallel_backend("fastrt"):
            search.fit(x, y)

    def spilled(self, folder: str) -> int:
        spill = importlib.import_module("fastrt._core.objects.spill")
        client = importlib.import_module("fastrt.store.client").require().client
        totals = spill.totals(client)
        return int(totals["spilled_bytes"] + totals["mapped_bytes"])

    def close(self) -> None:
        self._fastrt.shutdown()


class OnRay:
    name = "Ray"

    def __init__(self, store: int, folder: str) -> None:
        self._ray = importlib.import_module("ray")
        self._ray.init(
            num_cpus=WORKERS, object_store_memory=max(store, 80 * MIB), include_dashboard=False, log_to_driver=False,
            object_spilling_directory=folder,
        )  # fmt: skip
        self.get = self._ray.get

    def run(self, function: Callable[..., Any], *args: Any, returns: int = 1) -> Any:
        return self._ray.remote(function).options(num_returns=returns).remote(*args)

    def search(self, search: Any, x: Any, y: Any) -> None:
        joblib = importlib.import_module("joblib")
        importlib.import_module("ray.util.joblib").register_ray()
        with joblib.parallel_backend("ray"):
            search.fit(x, y)

    def spilled(self, folder: str) -> int:
        api = importlib.import_module("ray._private.internal_api")
        for line in api.memory_summary(stats_only=True).splitlines():
            if line.startswith("Spilled "):
                return int(float(line.split()[1]) * MIB)
        return 0

    def close(self) -> None:
        self._ray.shutdown()


class OnDask:
    name = "Dask"

    def __init__(self, store: int, folder: str) -> None:
        dask = importlib.import_module("dask")
        distributed = importlib.import_module("distributed")
        dask.config.set({"temporary-directory": folder})
        self._cluster = distributed.LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, memory_limit=store // WORKERS + 512 * MIB
        )
        self._client = distributed.Client(self._cluster)
        self._folder = folder
        self._most = 0

    def run(self, function: Callable[..., Any], *args: Any, returns: int = 1) -> Any:
        whole = self._client.submit(function, *args, pure=False)
        if returns == 1:
            return whole
        return [self._client.submit(_item, whole, k, pure=False) for k in range(returns)]

    def get(self, refs: Any) -> Any:
        return self._client.gather(refs)

    def search(self, search: Any, x: Any, y: Any) -> None:
        joblib = importlib.import_module("joblib")
        with joblib.parallel_backend("dask"):
            search.fit(x, y)

    def spilled(self, folder: str) -> int:
        written = self._client.run(_bytes_spilled)
        return int(sum(written.values()))

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


def _item(values: Any, k: int) -> Any:
    return values[k]


def _bytes_spilled(dask_worker: Any = None) -> int:
    """How many bytes a worker of Dask has on disk now."""
    return int(getattr(dask_worker.data, "spilled_total", (0, 0))[1])


LIBRARY = {library.name: library for library in (OnFastrt, OnRay, OnDask)}


# ---- the programs: each returns what must be equal on all libraries ----


def sort(on: Any, store: int, folder: Path) -> list[Any]:
    """Sort four times the store's size, or what `--sort-mib` says."""
    parts = 32
    data = int(os.environ.get(SORT_BYTES) or 4 * store)
    made = [on.run(make, k, data // 8 // parts) for k in range(parts)]
    sums = [on.run(total, ref) for ref in made]
    cuts = [on.run(cut_list, ref, parts, returns=parts) for ref in made]
    del made
    merged = [on.run(merge, *share) for share in zip(*cuts, strict=True)]
    del cuts
    found = on.get([on.run(ends, ref) for ref in merged])
    assert sum(one[0] for one in found) == sum(count for count, _ in on.get(sums)), "values are missing"
    return found


def cut_list(values: np.ndarray, parts: int) -> list[np.ndarray]:
    return [piece.copy() for piece in cut(values, parts)]


def ends(values: np.ndarray) -> list[int]:
    """The number of values, their sum, the first and the last."""
    assert bool(np.all(values[:-1] <= values[1:])), "a part is out of order"
    return [len(values), int(values.sum(dtype=np.uint64)), int(values[0]), int(values[-1])]


def group_by(on: Any, store: int, folder: Path) -> list[Any]:
    """Sum and count rows by key, over 16 Parquet files with as many bytes as the store."""
    files = [str(folder / f"{k}.parquet") for k in range(16)]
    on.get([on.run(write_rows, name, k, store // 16 // len(files)) for k, name in enumerate(files)])
    began = time.perf_counter()
    tables = [on.run(read_rows, name) for name in files]
    partial_sums = [on.run(sums_by_key, table) for table in tables]
    del tables
    found = on.get(on.run(join_sums, *partial_sums))
    return [found.to_pylist(), time.perf_counter() - began]


def write_rows(name: str, seed: int, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(seed)
    columns = {"key": random.integers(0, 1000, rows), "value": random.integers(0, 1 << 20, rows)}
    pq.write_table(pa.table(columns), name)


def read_rows(name: str) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(name)


def sums_by_key(table: Any) -> Any:
    found = table.group_by("key").aggregate([("value", "sum"), ("value", "count")])
    return found.rename_columns(["key", "sum", "count"])


def join_sums(*tables: Any) -> Any:
    import pyarrow as pa

    found = pa.concat_tables(tables).group_by("key").aggregate([("sum", "sum"), ("count", "sum")])
    return found.rename_columns(["key", "sum", "count"]).sort_by("key")


def product(on: Any, store: int, folder: Path) -> list[Any]:
    """Multiply two matrices of whole numbers, 4 x 4 blocks each; with the result they take 3/4 of the store."""
    blocks = 4
    side = int((store / 4 / 8) ** 0.5) // blocks
    a = [[on.run(block, i * blocks + j, side) for j in range(blocks)] for i in range(blocks)]
    b = [[on.run(block, 100 + i * blocks + j, side) for j in range(blocks)] for i in range(blocks)]
    made = [on.run(multiply, *a[i], *(b[k][j] for k in range(blocks))) for i in range(blocks) for j in range(blocks)]
    return on.get([on.run(checksum, ref) for ref in made])


def block(seed: int, side: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 8, (side, side)).astype(np.float64)


def multiply(*factors: np.ndarray) -> np.ndarray:
    half = len(factors) // 2
    return sum(left @ right for left, right in zip(factors[:half], factors[half:], strict=True))


def checksum(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values)).hexdigest()  # sums of whole numbers are exact


def grid_search(on: Any, store: int, folder: Path) -> list[Any]:
    """Choose the parameters of a random forest: 12 candidates, 3 folds."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    random = np.random.default_rng(0)
    x = random.normal(size=(max(2000, store // MIB * 20), 20))
    y = (x[:, :5].sum(axis=1) + random.normal(size=len(x)) > 0).astype(int)
    grid = {"max_depth": [3, 6, 9], "min_samples_leaf": [1, 4], "n_estimators": [10, 20]}
    search = GridSearchCV(RandomForestClassifier(random_state=0), grid, cv=3, n_jobs=WORKERS)
    on.search(search, x[:100], y[:100])  # the workers import scikit-learn
    began = time.perf_counter()
    on.search(search, x, y)
    seconds = time.perf_counter() - began
    return [[search.best_params_, [round(float(score), 9) for score in search.cv_results_["mean_test_score"]]], seconds]


PROGRAMS = {"sort": sort, "group-by": group_by, "product": product, "grid search": grid_search}


# ---- one run, in a process of its own ----


def run_one(program: str, library: str, store: int, folder: str) -> None:
    """Run one program on one library; print its figures as JSON in the last line."""
    spill, data = Path(folder, "spill"), Path(folder, "data")
    spill.mkdir(mode=0o700)
    data.mkdir()
    on = LIBRARY[library](store, str(spill))
    on.get([on.run(total, np.arange(k + 1)) for k in range(WORKERS)])
    with most_memory() as memory:
        began = time.perf_counter()
        found = PROGRAMS[program](on, store, data)
        seconds = time.perf_counter() - began
    if program in ("group-by", "grid search"):  # without the time to write files and to import scikit-learn
        found, seconds = found
    spilled = on.spilled(str(spill))
    on.close()
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    print(json.dumps({"seconds": seconds, "memory": memory[0], "spilled": spilled, "digest": digest}), flush=True)


@contextlib.contextmanager
def most_memory() -> Iterator[list[int]]:
    """Measure the memory of this process and all it started every 0.5 s; the list's item is the most, in bytes."""
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.5):
            most[0] = max(most[0], sum(map(share_of, marked(os.environ[MARK]))))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def share_of(pid: int) -> int:
    """A process's memory; pages that it shares with others are divided among them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return int(text.partition("\nPss:")[2].split()[0]) << 10 if "\nPss:" in text else 0


# ---- all runs ----


def make_environment() -> Path:
    """Make the environment with all libraries, unless it is there; this Python's packages are found after its own."""
    python, whole = FOLDER / "bin" / "python", FOLDER / "whole"
    if not whole.exists():
        if not (FOLDER / "pipped").exists():
            shutil.rmtree(FOLDER, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *LIBRARIES], check=True)
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        importlib.import_module("libraries_env").add_tools(python)
        whole.touch()
    return python


def measure(python: Path, program: str, library: str, store: int) -> dict[str, Any]:
    mark = f"{program}-{library}-{os.getpid()}"
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_DEDUP_LOGS": "0"}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        command = [python, __file__, "--one", program, library, str(store), folder]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        raise click.ClickException(f"{program} on {library} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@click.command()
@click.option("--store-mib", default=128, show_default=True, help="the store; `sort` has 4 x the data")
@click.option("--full", is_flag=True, help="a store of 1 GiB")
@click.option("--sort-mib", type=int, help="the data of `sort`, instead of 4 x the store")
@click.option("--only", type=click.Choice(list(PROGRAMS)), multiple=True, help="the programs to run")
@click.option("--library", type=click.Choice(list(LIBRARY)), multiple=True, help="the libraries to run them on")
@click.option("--rounds", default=1, show_default=True, help="the median of so many runs counts")
def main(
    store_mib: int, full: bool, sort_mib: int | None, only: tuple[str, ...], library: tuple[str, ...], rounds: int
) -> None:
    python, store = make_environment(), 1 << 30 if full else store_mib * MIB
    if sort_mib is not None:
        os.environ[SORT_BYTES] = str(sort_mib * MIB)
    load = os.getloadavg()[0]
    click.echo(f"store {store // MIB} MiB, {WORKERS} workers, {os.cpu_count()} processors, load {load:.1f}")
    click.echo("| program | library | s | most memory, MiB | spilled, MiB |\n|---|---|---|---|---|")
    for program in only or PROGRAMS:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in library or LIBRARY}
        for _ in range(rounds):  # the libraries in turn: the speed of a machine changes with the hour
            for name, done in runs.items():
                done.append(measure(python, program, name, store))
                click.echo(f"{program} on {name}: {done[-1]['seconds']:.1f} s", err=True)
        for name, done in runs.items():
            run = sorted(done, key=lambda run: run["seconds"])[rounds // 2]
            click.echo(
                f"| {program} | {name} | {run['seconds']:.1f} | {run['memory'] // MIB} | {run['spilled'] // MIB} |"
            )
        digests = {run["digest"] for done in runs.values() for run in done}
        if len(digests) != 1:
            raise click.ClickException(f"{program}: the libraries' results differ")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main()
