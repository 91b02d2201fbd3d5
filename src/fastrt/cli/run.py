"""`fastrt run`: run a program with the nodes of its cluster, here or under the launcher of this command."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from fastrt.launch.detect import Place

_SETTINGS = ("num_workers", "resources", "labels", "object_store_memory")
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    short_help="Run a program on this machine, or on all machines of a job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "module", help="Run a module, as `python -m` does, instead of a file.")
@click.option("--rank", type=click.IntRange(0), envvar="FASTRT_RANK", help="Of this process; default: the launcher's.")
@click.option("--size", type=click.IntRange(1), envvar="FASTRT_SIZE", help="Processes of the job.")
@click.option("--head", envvar="FASTRT_HEAD_HOST", help="HOST or HOST:PORT of rank 0; default: the launcher's.")
@click.option("--job", envvar="FASTRT_JOB", help="A name that all processes of the job have, and no other job.")
@click.option("--host", envvar="FASTRT_HOST", help="Address of this machine for the others, if the wrong one is found.")
@click.option("--hosts", help="Start a node on each of these machines by ssh: a,b:2222,user@c[1-3].")
@click.option("--python", help="Python on these machines; default: the path of this one.")
@click.option("--min-nodes", type=click.IntRange(1), help="Start the program when so many are there; default: all.")
@click.option("--timeout", type=click.FloatRange(0), default=300.0, show_default=True, help="Seconds to wait for them.")
@click.option(
    "--patience",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds until the missing nodes are named.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds that the program has after SIGTERM, and a node until it leaves.",
)
@click.option("--num-workers", type=int, help="Workers of each node; default: its CPUs.")
@click.option("--resources", help='Other resources of each node, as JSON: {"gpu": 1}.')
@click.option("--labels", help="Labels of each node: zone=north,disk=fast.")
@click.option("--object-store-memory", help="Size of each node's object store, such as 512MiB.")
@click.option(
    "--token-file", type=_file, envvar="FASTRT_TOKEN_FILE", help="A token, instead of one from the user's key."
)
@click.option("--jax", is_flag=True, help="Serve JAX's coordinator, and set JAX's variables in each rank.")
@click.option("--ps", type=click.IntRange(0, 1000), default=0, help="Start so many parameter servers.")
@click.option("--ps-mode", type=click.Choice(["sync", "async"]), default="sync", help="How they apply gradients.")
@click.option("--ps-workers", type=click.IntRange(1), default=1, help="Processes that push to them.")
@click.option("--quiet", is_flag=True, help="Do not print which nodes have come.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
@click.pass_context
def run(context: click.Context, /, **given: Any) -> None:
    """Run a Python program, whose `fastrt.init()` uses the nodes that this command starts.

    Alone it runs the program on this machine. Under srun, mpirun, torchrun or in an indexed Job of Kubernetes the same
    command runs once on each machine: rank 0 runs the program, and the others are nodes until the program has ended.
    With --hosts it starts a node on each of these machines by ssh; the program runs here.
    The exit code is the program's.

    \f
    Raises:
        click.ClickException: the options are inconsistent, or the job cannot start.
    """
    from fastrt.errors import ConfigError, FastrtError
    from fastrt.launch.program import end_as

    try:
        place = _place(given)
        code = _run(place, given)
    except ConfigError as exc:
        raise click.UsageError(str(exc), context) from exc
    except FastrtError as exc:
        raise click.ClickException(str(exc)) from exc
    sys.stdout.flush()
    context.exit(end_as(code))


def _place(given: dict[str, Any]) -> Place:
    from fastrt.launch.detect import detect, override

    place = detect(os.environ, socket.gethostname())
    place = override(place, given["rank"], given["size"], given["head"], given["job"])
    if given["hosts"] is not None and place.size != 1:
        raise click.UsageError(f"--hosts starts the nodes itself, and {place.launcher} has started this process as one")
    return place


def _run(place: Place, given: dict[str, Any]) -> int:
    from fastrt.launch.job import JobOptions
    from fastrt.launch.job import run as run_job
    from fastrt.launch.servers import ServerOptions
    from fastrt.launch.ssh import parse_hosts
    from fastrt.net.grpc.auth import read_token

    words = list(given["words"])
    if given["module"] is not None:
        words = ["-m", given["module"], *words]
    if not words:
        raise click.UsageError("Give a program: fastrt run app.py")
    token = os.environ.pop("FASTRT_TOKEN", "").strip()
    if given["token_file"] is not None:
        token = read_token(given["token_file"])
    options = JobOptions(
        words=[sys.executable, *words],
        settings={name: given[name] for name in _SETTINGS if given[name] is not None},
        token=token,
        host=given["host"] or "",
        min_nodes=given["min_nodes"] or 0,
        patience_s=given["patience"],
        timeout_s=given["timeout"],
        grace_s=given["grace"],
        quiet=given["quiet"],
        jax=given["jax"],
        servers=ServerOptions(given["ps"], given["ps_mode"], given["ps_workers"]),
        hosts=parse_hosts(given["hosts"]) if given["hosts"] is not None else (),
        python=given["python"] or sys.executable,
    )
    return run_job(place, options)
