"""`fastrt ps`: serve the scheduler of a parameter-server cluster, and inspect a live one."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastrt.errors import FastrtError

if TYPE_CHECKING:
    from fastrt.membership.service import ClusterOptions
    from fastrt.net.grpc.trust import Trust

_DEFAULT_ADDRESS = "127.0.0.1:6667"
_ASK_S = 10.0
# Time for members to see in the response to a heartbeat that all have finished: two of upstream's heartbeats.
_LINGER_S = 6.0
_DURABILITY_HELP = "Failures that saved state survives: of processes (default), or of the machine's power (uses fsync)."
_path = click.Path(dir_okay=False, path_type=Path)
_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_token_file = click.option(
    "--token-file",
    type=_path,
    envvar="FASTRT_TOKEN_FILE",
    help="File with the cluster's secret, which every process must have; the scheduler creates it if it is missing.",
)


@click.group()
def ps() -> None:
    """Parameter servers: the scheduler that their processes register with."""


@ps.command()
@click.option("--address", default=_DEFAULT_ADDRESS, show_default=True, help="HOST:PORT for members' frames.")
@click.option("--num-workers", type=click.IntRange(min=0), required=True, help="Number of workers in the cluster.")
@click.option("--num-servers", type=click.IntRange(min=0), required=True, help="Number of servers.")
@click.option("--grpc-address", help="HOST:PORT to serve the same messages over gRPC.")
@click.option("--http-address", help="HOST:PORT to manage the cluster over HTTP.")
@_token_file
@click.option("--heartbeat-timeout", default=30.0, show_default=True, help="Seconds until a silent member is lost.")
@click.option("--available-timeout", default=300.0, show_default=True, help="Seconds to wait for missing members.")
@click.option("--scale-timeout", default=300.0, show_default=True, help="Seconds until a scaling is undone.")
@click.option("--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Directory for the members.")
@click.option("--accept-loss", is_flag=True, help="Recover the readable part of a damaged state directory.")
@click.option("--durability", type=click.Choice(["process", "power"]), default="process", help=_DURABILITY_HELP)
@click.option("--tls-cert", type=_file, help="PEM file: the certificate chain for gRPC.")
@click.option("--tls-key", type=_file, help="PEM file: its private key.")
@click.option("--tls-ca", type=_file, help="PEM file: the CA of clients' certificates, which become required.")
@click.option(
    "--allow-anonymous",
    is_flag=True,
    help="Serve members of other implementations, unencrypted: every process that reaches the address can join.",
)
def scheduler(**given: Any) -> None:
    """Serve a cluster's scheduler until all its members have finished, SIGTERM, or Ctrl-C.

    Members are processes with fastrt's `fastrt.ps.cluster.ClusterMember` and the token. With --allow-anonymous they are
    processes that use MindSpore's ps/core protocol, which has no authentication.

    \f
    Raises:
        click.ClickException: the options are inconsistent, or an address or the state directory cannot be used.
    """
    try:
        _serve(_options(given))
    except (FastrtError, OSError) as error:
        raise click.ClickException(str(error)) from error


@ps.command()
@click.option("--address", default=_DEFAULT_ADDRESS, show_default=True, help="HOST:PORT of the scheduler's frames.")
@click.option("--http-address", help="HOST:PORT of its HTTP server, to show the cluster's state too.")
@_token_file
def status(address: str, http_address: str | None, token_file: Path | None) -> None:
    """Show the members of a live cluster, and whether they are alive.

    \f
    Raises:
        click.ClickException: no scheduler answers.
    """
    from rich.markup import escape
    from rich.table import Table

    from fastrt.cli.tables import table_console
    from fastrt.membership.peers import look
    from fastrt.net.grpc.auth import read_token

    try:
        members = look(address, None if token_file is None else read_token(token_file), _ASK_S)
        state = _state(http_address, token_file) if http_address is not None else ""
    except (FastrtError, OSError) as error:
        raise click.ClickException(f"{error} Is the scheduler running?") from error
    table = Table(title=f"{len(members)} members{state}")
    for heading in ("role", "rank", "node id", "address", "state"):
        table.add_column(heading, overflow="fold")
    for one in members:
        style, there = ("green", "alive") if one.alive else ("red", "lost or finished")
        role, place = one.role.name.lower(), f"{one.host}:{one.port}"
        table.add_row(role, str(one.rank), escape(one.member_id), place, f"[{style}]{there}[/]")
    table_console().print(table)


@ps.command()
@click.argument("method", type=click.Choice(["GET", "POST"]))
@click.argument("path")
@click.argument("body", default="")
@click.option("--http-address", required=True, help="HOST:PORT of the scheduler's HTTP server.")
@_token_file
def request(method: str, path: str, body: str, http_address: str, token_file: Path | None) -> None:
    """Send a request to a scheduler's HTTP server, such as POST /scaleout '{"worker_num": 0, "server_num": 1}'.

    \f
    Raises:
        click.ClickException: the scheduler does not answer, or rejects the request.
    """
    from fastrt.membership import http

    try:
        status, answer = http.request(http_address, _trust(token_file), method, path, body.encode() or None)
    except (FastrtError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(answer))
    if status != 200:
        raise click.ClickException(f"the scheduler answered with status {status}")


def _options(given: dict[str, Any]) -> ClusterOptions:
    from fastrt.membership.service import ClusterOptions
    from fastrt.membership.state import Settings
    from fastrt.net.grpc.auth import TlsFiles

    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if given["token_file"] is None and not given["allow_anonymous"]:
        raise click.UsageError(
            "give --token-file, which is created if it is missing, or --allow-anonymous for members of other "
            "implementations."
        )
    tls = TlsFiles(given["tls_cert"], given["tls_key"], given["tls_ca"]) if given["tls_cert"] else None
    settings = Settings(
        workers=given["num_workers"],
        servers=given["num_servers"],
        heartbeat_timeout_s=given["heartbeat_timeout"],
        available_timeout_s=given["available_timeout"],
        scale_timeout_s=given["scale_timeout"],
    )
    return ClusterOptions(
        address=given["address"],
        settings=settings,
        grpc_address=given["grpc_address"],
        http_address=given["http_address"],
        token=None if given["token_file"] is None else _token(given["token_file"]),
        tls=tls,
        allow_anonymous=given["allow_anonymous"],
        state_dir=given["state_dir"],
        accept_loss=given["accept_loss"],
        power=given["durability"] == "power",
    )


def _token(path: Path) -> str:
    """Read the token from a file; create the file with a new token if there is none."""
    from fastrt.net.grpc.auth import read_token
    from fastrt.net.grpc.identity import new_token

    try:
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return read_token(path)
    with os.fdopen(made, "w") as file:
        file.write(new_token() + "\n")
    return read_token(path)


def _serve(options: ClusterOptions) -> None:
    """Serve until SIGTERM or SIGINT, or until the cluster has finished and its members have had time to see it.

    Raises:
        FastrtError: the options are inconsistent, or the state directory cannot be used.
        OSError: an address cannot be bound.
    """
    from fastrt.membership.service import ClusterScheduler

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # Blocked before any thread starts, so that all inherit it and only sigwait below takes the signals.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with ClusterScheduler(options) as service:
        places = [f"on {service.address}"]
        places += [f"gRPC on {service.grpc_address}"] if service.grpc_address else []
        places += [f"HTTP on {service.http_address}"] if service.http_address else []
        wanted = options.settings
        click.echo(f"cluster of {wanted.workers} workers and {wanted.servers} servers {', '.join(places)}")
        if options.allow_anonymous:
            click.echo(f"members are not authenticated: every process that reaches {service.address} can join")
        stopping = threading.Event()

        def end_when_finished() -> None:
            service.finished.wait()
            if not stopping.wait(_LINGER_S):
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end_when_finished, daemon=True).start()
        signal.sigwait(signals)
        stopping.set()
        click.echo("the cluster has finished" if service.finished.is_set() else "stopping")


def _state(address: str, token_file: Path | None) -> str:
    from fastrt.membership import http

    _, answer = http.request(address, _trust(token_file), "GET", "/state", timeout_s=_ASK_S)
    return f", {answer['cluster_state']}"


def _trust(token_file: Path | None) -> Trust | None:
    from fastrt.net.grpc.auth import read_token
    from fastrt.net.grpc.trust import trust_of

    return None if token_file is None else trust_of(read_token(token_file))
