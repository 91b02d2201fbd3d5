"""`fastrt token`: show or create a cluster's token, or issue certificates for programs in other languages."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command(short_help="Show a cluster's token, or issue certificates.")
@click.option("--address", default="auto", show_default=True, help="HOST:PORT of the head; a node must run here.")
@click.option("--token-file", envvar="FASTRT_TOKEN_FILE", help="Read the token from this file instead.")
@click.option("--new", is_flag=True, help="Create the token of a new cluster.")
@click.option("--pem", type=click.Path(path_type=Path), help="Write ca.pem, cert.pem and key.pem to this new folder.")
@click.option("--days", type=click.IntRange(1, 36500), default=365, show_default=True, help="Validity of cert.pem.")
@click.option("--bearer", is_flag=True, help="Show the bearer token of services that run with --tls-cert.")
@click.option("--metrics", is_flag=True, help="Show the bearer token for scrapes of the nodes' metrics.")
def token(
    address: str, token_file: str | None, new: bool, pem: Path | None, days: int, bearer: bool, metrics: bool
) -> None:  # fmt: skip
    """Show the token of the cluster to which this user's node on this machine belongs.

    The token is the cluster's secret: a program that has it may join as a node. Programs in other languages use
    certificates (--pem) instead, with which they can call the scheduler, workers and object stores.

    \f
    Raises:
        click.ClickException: no node runs here, or its token cannot be read.
    """
    from fastrt.errors import FastrtError
    from fastrt.net.grpc.auth import METRICS_KEY
    from fastrt.net.grpc.identity import Identity, new_token

    if new + bearer + metrics + (pem is not None) > 1:
        raise click.UsageError("Give one of --new, --pem, --bearer and --metrics.")
    try:
        if new:
            click.echo(new_token())
            return
        text = _token(address, token_file)
        identity = Identity.from_token(text)
        if pem is not None:
            programs = identity.for_programs()
            programs.write_pem(pem, days)
            click.echo(f"{pem}: ca.pem, cert.pem, key.pem, valid for {days} days")
            click.echo(f"servers' name: {programs.name}")
        else:
            purpose = "bearer" if bearer else METRICS_KEY if metrics else ""
            click.echo(identity.key(purpose).hex() if purpose else text)
    except FastrtError as exc:
        raise click.ClickException(str(exc)) from exc


def _token(address: str, token_file: str | None) -> str:
    from fastrt.config import default_runtime_dir
    from fastrt.net.grpc.auth import read_token
    from fastrt.runtime.nodefile import find_node

    if token_file is not None:
        return read_token(token_file)
    if "FASTRT_TOKEN" in os.environ:
        return os.environ["FASTRT_TOKEN"].strip()
    folder = os.environ.get("FASTRT_RUNTIME_DIR")
    return read_token(find_node(Path(folder) if folder else default_runtime_dir(), address).token_file)
