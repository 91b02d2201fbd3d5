"""`fastrt bench`: the pytest-benchmark suites of the installed package, as one table."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from fastrt.cli.tables import table_console
from fastrt.foreign_text import STATE_BYTES_MAX, read_object

_NEEDED = ("pytest", "pytest_benchmark")
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@click.command(short_help="Run the benchmark suites and print a table.")
@click.argument("suites", nargs=-1)
@click.option("--list", "only_list", is_flag=True, help="List the suites and stop.")
@click.option("--quick", is_flag=True, help="Measure each row for only a fifth of the time.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write pytest-benchmark's JSON to it.")
def bench(suites: tuple[str, ...], only_list: bool, quick: bool, json_path: str | None) -> None:
    """Run the benchmark suites and print a table. SUITES are names that --list shows; default: all.

    Times are per operation: the median and the 99th percentile of all rounds of a row.
    \f
    Raises:
        click.ClickException: a suite is unknown or fails, or a package that it needs is not installed.
    """
    folder = _folder()
    known = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if only_list:
        for name, path in known.items():
            click.echo(f"{name:10} {path.read_text().splitlines()[0].strip(chr(34))}")
        return
    unknown = [name for name in suites if name not in known]
    if unknown:
        raise click.ClickException(f"there is no suite {unknown[0]!r}; there are: {', '.join(known)}")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"{missing[0]} is needed; install it with: pip install 'fastrt[bench]'")
    with tempfile.TemporaryDirectory(prefix="fastrt-bench-") as scratch:
        target = Path(json_path) if json_path else Path(scratch, "bench.json")
        _run(folder, [known[name] for name in suites] or list(known.values()), target, quick)
        _show(read_object(target.read_bytes(), str(target), bytes_max=STATE_BYTES_MAX, own=True)["benchmarks"])


def _folder() -> Path:
    spec = importlib.util.find_spec("fastrt.bench")
    if spec is None or spec.origin is None:
        raise click.ClickException(
            "fastrt.bench is not installed: this is a source tree. Run `make bench`, or `pip install .` first"
        )
    return Path(spec.origin).parent


def _run(folder: Path, files: list[Path], target: Path, quick: bool) -> None:
    """Run pytest in a separate process; the spinner shows the row that was measured last."""
    from rich.console import Console

    command = [
        sys.executable, "-m", "pytest", "-v", "--no-header", "--tb=short", "--color=no", "-p", "no:cacheprovider",
        "--import-mode=importlib", "-c", "/dev/null", f"--rootdir={folder}", "-o", "python_files=bench_*.py",
        "--benchmark-only", f"--benchmark-json={target}", *(["--benchmark-max-time=0.1"] if quick else []),
        *map(str, files),
    ]  # fmt: skip
    console = Console(stderr=True)
    lines: list[str] = []
    with (
        console.status("starting") as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for line in process.stdout or ():
            lines.append(line)
            if "::" in line:
                status.update(line.split("::", 1)[1].split(" ")[0].strip(), spinner="dots")
    if process.returncode != 0:
        raise click.ClickException("the suites failed:\n" + "".join(lines[-60:]))


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    console = table_console()
    for group in dict.fromkeys(row["group"] for row in rows):
        listed = [row for row in rows if row["group"] == group]
        table = Table(box=box.SIMPLE, title=f"[bold]{group}", title_justify="left")
        table.add_column("operation", overflow="fold")  # so that a narrow terminal cuts no figure
        sized = any(row["extra_info"].get("bytes") for row in listed)
        for name in ("p50", "p99", "per second", *(["GB/s"] if sized else []), "rounds"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in listed:
            table.add_row(*_cells(row, sized))
        console.print(table)


def _cells(row: dict[str, Any], sized: bool) -> list[str]:
    from rich.markup import escape

    stats, per, nbytes = row["stats"], row["extra_info"].get("per", 1), row["extra_info"].get("bytes", 0)
    rate = [f"{nbytes / stats['p50'] / 1e9:.3g}" if nbytes else ""] if sized else []
    return [
        escape(row["name"].removeprefix("test_").replace("_", " ")),
        seconds(stats["p50"] / per),
        seconds(stats["p99"] / per),
        f"{per / stats['p50']:,.0f}",
        *rate,
        f"{stats['rounds']:,}",
    ]


def seconds(value: float) -> str:
    """Write a time with a unit that fits: 0.0000123 is "12.3 us"."""
    scale, unit = next(((scale, unit) for scale, unit in _SCALES if value >= scale), _SCALES[-1])
    return f"{value / scale:.3g} {unit}" if value / scale < 100 else f"{value / scale:.0f} {unit}"
