"""Whole programs under fastrt and under Ray: those of examples/, each from one file, by its switch.

Run: python bench/compare_programs.py [--rounds 3] [--ray-python PYTHON] [--markdown] [PROGRAM ...]

Each round runs a program once under each, in a process of its own; both must print the same result, which each also
checks by itself. Two times are taken: of the program's work, and of the whole process with the start and end of the
runtime. The ratio is the median of the ratios within a round. PYTHON (default: this one) has Ray.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAMS = (
    "parameter_search", "word_shuffle", "file_crawler", "parameter_server_actor", "tree_reduction", "actor_pipeline",
    "matrix_blocks",
)  # fmt: skip
WIDTH = 110
TIMEOUT_S = 120
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
Rows = dict[str, list[tuple[float, float, float, float]]]  # by program: work and all of fastrt, work and all of Ray


def run(python: str, program: str, *options: str) -> tuple[str, float, float]:
    """Run a program; returns its result, the seconds of its work, and those of the process.

    Args:
        python: which Python.
        program: of examples/.
        options: of the program.
    """
    begun = time.perf_counter()
    command = [python, str(EXAMPLES / f"{program}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **QUIET})
    whole = time.perf_counter() - begun
    if done.returncode:
        raise click.ClickException(f"{program} {' '.join(options)} failed:\n{done.stdout}{done.stderr}")
    return read(done.stdout, whole)


def read(text: str, whole: float) -> tuple[str, float, float]:
    """Parse a program's output: its result, the seconds of its work, and `whole`."""
    found = re.search(r"^(\[.*)\nseconds: ([\d.]+)$", text, re.M)
    if found is None:
        raise click.ClickException(f"a program did not say its result and time:\n{text}")
    return found[1], float(found[2]), whole


@click.command()
@click.argument("programs", nargs=-1, type=click.Choice(PROGRAMS))
@click.option("--rounds", default=3, show_default=True, help="How often each is run under each.")
@click.option("--ray-python", default=sys.executable, help="A Python that has Ray.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def main(programs: tuple[str, ...], rounds: int, ray_python: str, markdown: bool) -> None:
    """Run the programs under both, compare their results, and print the table."""
    if subprocess.run([ray_python, "-c", "import ray"], capture_output=True).returncode:
        raise click.ClickException(f"{ray_python} has no Ray: name one that has by --ray-python")
    rows: Rows = {program: [] for program in programs or PROGRAMS}
    for _ in range(rounds):
        for program, found in rows.items():
            ours = run(sys.executable, program, "--engine", "fastrt")
            theirs = run(ray_python, program, "--engine", "ray-itself")
            if ours[0] != theirs[0]:
                raise click.ClickException(f"{program}: fastrt says {ours[0]}, Ray says {theirs[0]}")
            found.append((*ours[1:], *theirs[1:]))
    show(rows, markdown)


def show(rows: Rows, markdown: bool) -> None:
    """Print the table."""
    titles = ("program", "fastrt, s", "Ray, s", "times faster", "with start, s", "Ray with start, s", "times faster")
    lines = [[program.replace("_", " "), *cells(found)] for program, found in rows.items()]
    if markdown:
        click.echo("\n".join(f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *lines]))
        return
    table = Table(title="whole programs, equal results, medians", box=box.SIMPLE)
    for title in titles:
        table.add_column(title, justify="left" if title == "program" else "right")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def cells(found: list[tuple[float, float, float, float]]) -> list[str]:
    """Medians, and the medians of the ratios within a round."""
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    ratios = [statistics.median(row[k + 2] / row[k] for row in found) for k in (0, 1)]
    work, whole, of_ray, of_ray_whole = (f"{value:.2f}" for value in medians)
    return [work, of_ray, f"{ratios[0]:.1f}", whole, of_ray_whole, f"{ratios[1]:.1f}"]


if __name__ == "__main__":
    main()
