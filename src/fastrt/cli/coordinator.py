"""`fastrt coordinator`: serve a coordination service, and inspect a live one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fastrt.cli.job import job_options, job_settings
from fastrt.cli.tables import table_console
from fastrt.coordination.front import Front
from fastrt.coordination.service import Coordinator, CoordinatorOptions
from fastrt.coordination.snapshot import credentials, fetch
from fastrt.errors import FastrtError
from fastrt.net.grpc.auth import TlsFiles

_DEFAULT_ADDRESS = "127.0.0.1:6464"
_STATE_STYLES = {"CONNECTED": "green", "ERROR": "red", "DISCONNECTED": "yellow"}
_ASK_S = 10.0
_VALUE_CHARS = 60
_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_count = click.IntRange(min=1, max=1_000_000_000)
_WATCH_S_MAX = 86400.0


@dataclass
class _Target:
    """The live coordinator to inspect."""

    address: str
    credentials: grpc.ChannelCredentials | None


def _looks_inside(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the target to a subcommand; they may also be given before the subcommand's name."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        before = click.get_current_context().parent
        assert before is not None
        found = {name: given.pop(name) or before.params[name] for name in ("address", "tls_ca", "tls_cert", "tls_key")}
        command(_Target(found["address"], _credentials(found["tls_ca"], found["tls_cert"], found["tls_key"])), **given)

    for option in (
        click.option("--tls-key", type=_file, help="PEM file: its private key."),
        click.option("--tls-cert", type=_file, help="PEM file: the certificate to show to the coordinator."),
        click.option("--tls-ca", type=_file, help="PEM file: signs the coordinator's certificate."),
        click.option("--address", help=f"HOST:PORT of the coordinator.  [default: {_DEFAULT_ADDRESS}]"),
    ):
        run = option(run)
    return run


@click.group(invoke_without_command=True)
@click.option("--address", default=_DEFAULT_ADDRESS, show_default=True, help="HOST:PORT of the coordinator.")
@click.option("--num-tasks", type=click.IntRange(min=1), help="Number of tasks of the job. Required to serve.")
@job_options()
@click.option(
    "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Directory for state that survives restarts."
)
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Recover the readable part of a damaged state directory, report the loss, and keep the damaged files aside.",
)
@click.option("--ephemeral", is_flag=True, help="Keep no state on disk; the default without --state-dir.")
@click.option("--tls-cert", type=_file, help="PEM file: this server's certificate chain.")
@click.option("--tls-key", type=_file, help="PEM file: its private key.")
@click.option("--tls-ca", type=_file, help="PEM file: the CA of clients' certificates, which become required.")
@click.pass_context
def coordinator(context: click.Context, /, **given: Any) -> None:
    """Serve a coordination service for JAX and TensorFlow jobs, until SIGTERM or Ctrl-C.

    JAX processes connect by `jax.distributed.initialize`; see docs/coordination.md for the one setting that keeps
    process 0 from starting another service.

    \f
    Raises:
        click.ClickException: the options are inconsistent, or the address or the state directory cannot be used.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        options = _options(given)
        _serve(options)
    except (FastrtError, OSError) as error:
        raise click.ClickException(str(error)) from error


@coordinator.command()
@_looks_inside
def status(target: _Target) -> None:
    """Show the tasks of a live coordinator: which are connected, which failed, and why."""
    table_console().print(_status_table(_ask(target)))


@coordinator.command()
@_looks_inside
@click.argument("directory", default="")
@click.option("--limit", type=_count, default=1000, show_default=True, help="Show at most this many keys.")
def kv(target: _Target, directory: str, limit: int) -> None:
    """List the keys below DIRECTORY (default: all) with the start of their values."""
    answer = _ask(target, directory=directory, with_keys=True, limit=limit)
    caption = f"the first {limit}; --limit shows more" if len(answer.keys) == limit < answer.key_count else None
    shown = f"{len(answer.keys)} keys below {escape(directory)}, of " if directory else ""
    table = Table(title=f"{shown}{answer.key_count} keys, {answer.key_bytes} bytes in all", caption=caption)
    for heading in ("key", "bytes", "value"):
        table.add_column(heading, overflow="fold")
    for pair in answer.keys:
        table.add_row(escape(pair.key), str(len(pair.value)), escape(_shown(pair.value)))
    table_console().print(table)


@coordinator.command()
@_looks_inside
@click.option("--limit", type=_count, default=1000, show_default=True, help="Show at most this many barriers.")
def barriers(target: _Target, limit: int) -> None:
    """List the barriers: first the open ones with the missing tasks, then the past ones with their results."""
    answer = _ask(target, with_barriers=True, limit=limit)
    table = Table(title=f"{answer.barrier_count} barriers")
    for heading in ("barrier", "round", "state", "arrived", "missing or message"):
        table.add_column(heading, overflow="fold")
    for one in answer.barriers:
        if one.open:
            about, state = ", ".join(one.missing), f"open, {one.remaining_s:.0f} s left"
        else:
            about, state = one.message, "passed" if one.code == 0 else grpc_name(one.code)
        arrived = f"{one.arrived_count}/{one.member_count}" if one.open else ""
        table.add_row(escape(one.id), str(one.counter), state, arrived, escape(about))
    table_console().print(table)


@coordinator.command()
@_looks_inside
@click.option("--interval", type=float, default=1.0, show_default=True, help="Seconds between two updates.")
@click.option("--count", type=click.IntRange(min=0), default=0, help="End after so many updates; 0: at Ctrl-C.")
def watch(target: _Target, interval: float, count: int) -> None:
    """Show the tasks of a live coordinator, and update them regularly.

    \f
    Raises:
        click.UsageError: the interval is not more than 0.
    """
    if not interval > 0:
        raise click.UsageError("--interval must be more than 0 seconds.")
    pause = threading.Event()
    with contextlib.suppress(KeyboardInterrupt), Live(_status_table(_ask(target)), auto_refresh=False) as live:
        looks = 1
        while count == 0 or looks < count:
            pause.wait(min(interval, _WATCH_S_MAX))
            live.update(_status_table(_ask(target)), refresh=True)
            looks += 1


def grpc_name(code: int) -> str:
    """The name of a gRPC status code."""
    return next((name.name for name in grpc.StatusCode if name.value[0] == code), str(code))


def _options(given: dict[str, Any]) -> CoordinatorOptions:
    if given["num_tasks"] is None:
        raise click.UsageError("--num-tasks is needed to serve: give the number of tasks of the job.")
    if given["ephemeral"] and given["state_dir"] is not None:
        raise click.UsageError("Give either --ephemeral, which keeps no state on disk, or --state-dir.")
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if given["tls_ca"] is not None and given["tls_cert"] is None:
        raise click.UsageError("--tls-ca needs --tls-cert and --tls-key.")
    if given["durability"] == "power" and given["state_dir"] is None:
        raise click.UsageError("--durability power needs a directory for the state: give --state-dir.")
    tls = TlsFiles(given["tls_cert"], given["tls_key"], given["tls_ca"]) if given["tls_cert"] else None
    return CoordinatorOptions(
        address=given["address"],
        state_dir=given["state_dir"],
        accept_loss=given["accept_loss"],
        tls=tls,
        **job_settings(given),
    )


def _serve(options: CoordinatorOptions) -> None:
    """Serve until SIGTERM or SIGINT, then answer all waiting calls, and end.

    Raises:
        FastrtError: the options are inconsistent, the state directory cannot be used, or the keeper keeps dying.
        OSError: the address cannot be bound.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # Blocked before any thread starts, so that all inherit it and only sigwait below takes the signals.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    failed = threading.Event()

    def give_up() -> None:
        failed.set()
        os.kill(os.getpid(), signal.SIGTERM)

    service = Coordinator(options) if options.state_dir is None else Front(options, on_failure=give_up)
    with service:
        kept = "state in memory only" if options.state_dir is None else f"state in {options.state_dir}"
        click.echo(f"coordinator for {options.num_tasks} tasks of {options.job} on {service.address}; {kept}")
        signal.sigwait(signals)
        click.echo("stopping")
    if failed.is_set():
        why = service.failure if isinstance(service, Front) else "the log above says why"
        raise FastrtError(f"The coordinator ended, because the process that keeps its state kept dying: {why}.")


def _ask(target: _Target, **fields: Any) -> Any:
    """Fetch a snapshot of a live coordinator."""
    try:
        return fetch(target.address, target.credentials, _ASK_S, **fields)
    except FastrtError as error:
        raise click.ClickException(str(error)) from error


def _credentials(authority: Path | None, certificate: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """TLS credentials for the commands that inspect a coordinator; None for plain text."""
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    return credentials(authority, certificate, key)


def _status_table(answer: Any) -> Table:
    kept = "durable" if answer.durable else "ephemeral"
    title = f"incarnation {answer.incarnation}, up {answer.uptime_s:.0f} s, {kept}"
    caption = f"{answer.key_count} keys, {answer.barrier_count} barriers, {answer.waiting_calls} calls waiting"
    if answer.error:
        caption += f"\nerror sent to all tasks: {escape(answer.error)}"
    table = Table(title=title, caption=caption)
    for heading in ("task", "state", "incarnation", "last heard of", "error"):
        table.add_column(heading, overflow="fold")
    for one in answer.members:
        style = _STATE_STYLES.get(one.state, "")
        heard = "never" if one.silent_s < 0 else f"{one.silent_s:.1f} s ago"
        state = one.state.lower() + (", recoverable" if one.recoverable else "")
        incarnation = str(one.incarnation) if one.incarnation else ""
        task = escape(f"{one.role}/{one.rank}")
        table.add_row(task, f"[{style}]{state}[/]", incarnation, heard, escape(one.error_message))
    return table


def _shown(value: bytes) -> str:
    text = value[: _VALUE_CHARS + 1].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else "." for c in text)
    return text[:_VALUE_CHARS] + "..." if len(text) > _VALUE_CHARS else text
