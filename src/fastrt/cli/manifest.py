"""`fastrt manifest`: print what `kubectl apply` needs to run a program as a job on Kubernetes."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import click

_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    short_help="Print a Job for Kubernetes that runs a program.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--nodes", type=click.IntRange(1), required=True, help="Pods, each of which is a node.")
@click.option("--image", required=True, help="Image with fastrt and the program.")
@click.option("--name", help="Of the Job; default: that of the program with random characters.")
@click.option("--namespace", default="", help="Of Kubernetes; default: kubectl's.")
@click.option("--cpu", default="", help="CPUs of each pod, such as 4.")
@click.option("--memory", default="", help="Memory of each pod, such as 8Gi.")
@click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs of each pod.")
@click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True, help="Kubernetes' name of the GPUs.")
@click.option("--shm", default="", help="Size of /dev/shm, a part of the memory; default: half of --memory.")
@click.option("--grace", type=click.FloatRange(0), default=30.0, show_default=True, help="As for fastrt run.")
@click.option("--pull-secret", default="", help="Name of a Secret with which the image is pulled.")
@click.option("--token-file", type=_file, envvar="FASTRT_TOKEN_FILE", help="A token; default: a new one.")
@click.option("--json", "as_json", is_flag=True, help="Print a List in JSON instead of YAML.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[RUN OPTIONS] PROGRAM [ARGS]...")
@click.pass_context
def manifest(context: click.Context, /, **given: Any) -> None:
    """Print a Secret, a headless Service and an indexed Job, for `kubectl apply -f -`.

    The Job runs `fastrt run PROGRAM ARGS` in each of its pods. Options of `fastrt run`, such as --num-workers, stand
    before the program, after a `--`. The Secret holds the token of the job: who can read it can join the job.

    \f
    Raises:
        click.UsageError: an option cannot be used in a manifest.
    """
    from fastrt.errors import ConfigError
    from fastrt.launch.manifest import ManifestOptions, name_of, objects, to_yaml
    from fastrt.net.grpc.auth import read_token
    from fastrt.net.grpc.identity import new_token

    words = list(given.pop("words"))
    as_json, token_file = given.pop("as_json"), given.pop("token_file")
    token = new_token() if token_file is None else read_token(token_file)
    name = given.pop("name") or name_of(_program(words), secrets.token_hex(3))
    try:
        found = objects(ManifestOptions(name, words=words, token=token, grace_s=given.pop("grace"), **given))
    except ConfigError as exc:
        raise click.UsageError(str(exc), context) from exc
    if as_json:
        click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": found}, indent=2))
    else:
        click.echo(to_yaml(found), nl=False)


def _program(words: list[str]) -> str:
    """The program among the arguments of `fastrt run`, for the job's name.

    Raises:
        click.UsageError: there is none.
    """
    from fastrt.cli.run import run

    parsed, rest, _ = run.make_parser(click.Context(run, ignore_unknown_options=True)).parse_args(list(words))
    program = parsed.get("module") or next(iter(parsed.get("words") or rest), None)
    if not program:
        raise click.UsageError("Give a program: fastrt manifest --nodes 4 --image IMAGE app.py")
    return str(program)
