"""`fastrt metrics`: a session's figures for Prometheus, printed once or served beside a running program."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from importlib import resources
from pathlib import Path

import click

from fastrt.cli.look import joined, sockets

_LOOK_S = 0.5  # between two looks whether the session has ended
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Print or serve a session's figures for Prometheus.")
@click.option("--session", help="The session whose name begins with this; see fastrt status.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Serve them on 127.0.0.1 until the session ends; 0: any port."
)
@click.option("--token-file", type=_file, help="A file with the token that scrapes must carry; default: a new token.")
@click.option("--grafana", is_flag=True, help="Print the dashboard to import into Grafana, and end.")
def metrics(session: str | None, port: int | None, token_file: Path | None, grafana: bool) -> None:
    """Print a session's figures in Prometheus' text format.

    With --port they are served at http://127.0.0.1:PORT/metrics until the session ends. A node of a cluster serves them
    itself: fastrt start --metrics-port.
    \f
    Raises:
        click.ClickException: no session runs here, or more than one does; or the port or the token cannot be used.
    """
    if grafana:
        click.echo((resources.files("fastrt.observe") / "grafana.json").read_text(), nl=False)
        return
    from fastrt.errors import FastrtError

    found = sockets(session)
    if len(found) > 1:
        names = ", ".join(path.parent.name[:8] for path in found)
        raise click.ClickException(f"several sessions run here ({names}): choose one by --session")
    from fastrt.observe.metrics import exposition

    try:
        if port is not None:
            _serve(found[0], port, token_file)
            return
        with joined(found[0], "fastrt metrics") as store:
            click.echo(exposition(store).decode(), nl=False)
    except (FastrtError, OSError) as exc:
        raise click.ClickException(str(exc)) from exc


def _serve(socket_path: Path, port: int, token_file: Path | None) -> None:
    from fastrt.net.grpc.auth import read_token
    from fastrt.observe.metrics import MetricsServer

    bearer = secrets.token_urlsafe(32) if token_file is None else read_token(token_file)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.set())
    with joined(socket_path, "fastrt metrics") as store, MetricsServer(store, f"127.0.0.1:{port}", bearer) as server:
        click.echo(f"http://{server.address}/metrics of session {socket_path.parent.name[:8]}")
        click.echo(f"token: {bearer}" if token_file is None else f"token: in {token_file}")
        sys.stdout.flush()
        while not stop.wait(_LOOK_S) and server.session_lives():
            continue
