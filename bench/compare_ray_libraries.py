"""Libraries of others that were written for Ray, on fastrt by `python -m fastrt.ray` and on Ray itself.

Run: python bench/compare_ray_libraries.py [--rounds 3] [PROGRAM ...]

The programs of bench/ray_libraries run unmodified under both, in turn, each in a process of its own. Both must print
the same results. The times are those of the programs' work, without the start of the runtime; the ratio is the median
of the ratios of the rounds. The libraries and Ray are in .cache/ray_libraries, which the first run makes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import click
from compare_programs import QUIET, read

import fastrt

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "ray_libraries"
LIBRARIES = ["modin", "pyarrow", "sf-hamilton", "evotorch", "daft", "ray"]
PROGRAMS = ("modin_frames", "hamilton_graph", "evotorch_search", "daft_query")
PROGRAMS_DIR = ROOT / "bench" / "ray_libraries"
TIMEOUT_S = 120
RAY_TRIES = 2  # a program once hung on Ray, beside other tests, which ends in 20 to 50 s as a rule


def make_environment() -> Path:
    """Return the Python of the environment with the libraries, which is made unless it is there."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import libraries_env

    python, whole = FOLDER / "bin" / "python", FOLDER / "whole"
    if not whole.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*command, libraries_env.torch_wanted(python), *LIBRARIES], check=True)
        libraries_env.add_tools(python)
        whole.touch()
    return python


def run(python: Path, program: str, on_fastrt: bool) -> tuple[str, float]:
    """Run a program; return its results and the seconds of its work."""
    command = [str(python), *(["-m", "fastrt.ray"] if on_fastrt else []), f"{program}.py"]
    home = Path(fastrt.__file__).parents[1]  # an installed one is found there by itself
    more = {
        **QUIET,
        "PYTHONPATH": str(home) if on_fastrt and home == ROOT / "src" else "",
        "PYTHONWARNINGS": "ignore",
        "RAY_AUTH_MODE": "disabled",
        "DAFT_PROGRESS_BAR": "0",  # it writes between the lines of the results
    }
    env = {**os.environ, **more, "RAY_ADDRESS": "" if on_fastrt else "local"}
    for tries_left in reversed(range(1 if on_fastrt else RAY_TRIES)):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=PROGRAMS_DIR, env=env)
            break
        except subprocess.TimeoutExpired:
            if not tries_left:
                raise
            click.echo(f"{program} had not ended on Ray after {TIMEOUT_S} s, and runs once more", err=True)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    result, seconds, _ = read(done.stdout, 0.0)
    return result, seconds


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.argument("programs", nargs=-1, type=click.Choice(PROGRAMS))
def main(rounds: int, programs: tuple[str, ...]) -> None:
    python = make_environment()
    click.echo("| program | fastrt, s | Ray, s | Ray / fastrt |\n|---|---|---|---|")
    for program in programs or PROGRAMS:
        times = []
        for _ in range(rounds):
            (ours, our_s), (theirs, their_s) = (run(python, program, on_fastrt) for on_fastrt in (True, False))
            if ours != theirs:
                raise click.ClickException(f"{program} prints on fastrt\n{ours}\nand on Ray\n{theirs}")
            times.append((our_s, their_s))
        our_s, their_s = (statistics.median(row[k] for row in times) for k in (0, 1))
        ratio = statistics.median(theirs / ours for ours, theirs in times)
        click.echo(f"| {program} | {our_s:.2f} | {their_s:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
