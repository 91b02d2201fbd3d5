"""`fastrt coordinator`: serve a coordination service, and look inside a live one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import grpc
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from fastrt.coordination.front import Front
from fastrt.coordination.service import Coordinator, CoordinatorOptions
from fastrt.coordination.snapshot import SNAPSHOT_PATH
from fastrt.errors import FastrtError
from fastrt.rpc.auth import TlsFiles
from fastrt.rpc.channel import open_channel
from fastrt.rpc.descriptors import message_set

_DEFAULT_ADDRESS = "127.0.0.1:6464"
_STATE_STYLES = {"CONNECTED": "green", "ERROR": "red", "DISCONNECTED": "yellow"}
_ASK_S = 10.0
_VALUE_CHARS = 60
_DURABILITY_HELP = "What kept state survives: the death of processes (default), or of the machine's power (an fsync)."
_address = click.option("--address", default=_DEFAULT_ADDRESS, show_default=True, help="HOST:PORT of the coordinator.")
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@_address
@click.option("--num-tasks", type=click.IntRange(min=1), help="How many tasks the job has. Needed to serve.")
@click.option("--job", default="jax_worker", show_default=True, help="The job's name; JAX always says jax_worker.")
@click.option("--heartbeat-timeout", default=100.0, show_default=True, help="A task silent for longer (s) is dead.")
@click.option("--register-timeout", default=3600.0, show_default=True, help="The first task waits so long (s) for all.")
@click.option(
    "--shutdown-timeout", default=300.0, show_default=True, help="The first to end waits so long (s); 0: not."
)
@click.option(
    "--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Where state is kept over restarts."
)
@click.option("--ephemeral", is_flag=True, help="Keep nothing; the default without --state-dir.")
@click.option("--durability", type=click.Choice(["process", "power"]), default="process", help=_DURABILITY_HELP)
@click.option("--recoverable", is_flag=True, help="Tasks may die and come back without the others failing.")
@click.option("--clear-after-shutdown", is_flag=True, help="When all tasks have shut down, the next run finds no keys.")
@click.option("--tls-cert", type=_file, help="PEM file: this server's certificate chain.")
@click.option("--tls-key", type=_file, help="PEM file: its private key.")
@click.option("--tls-ca", type=_file, help="PEM file: signs the clients' certificates, which are then demanded.")
@click.option("--allow-anonymous", is_flag=True, help="Serve beyond this machine to clients without certificates.")
@click.pass_context
def coordinator(context: click.Context, /, **given: Any) -> None:
    """Serve a coordination service for JAX and TensorFlow jobs, until SIGTERM or Ctrl-C.

    JAX's own processes connect by `jax.distributed.initialize`; see docs/coordination.md for the one setting that
    keeps process 0 from starting a service of its own.

    \f
    Raises:
        click.ClickException: the options make no sense, the address or the state directory cannot be used.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        options = _options(given)
        _serve(options)
    except (FastrtError, OSError) as error:
        raise click.ClickException(str(error)) from error


@coordinator.command()
@_address
def status(address: str) -> None:
    """Show the tasks of a live coordinator: who is connected, who failed, and why."""
    Console().print(_status_table(_ask(address)))


@coordinator.command()
@_address
@click.argument("directory", default="")
@click.option("--limit", default=1000, show_default=True, help="Show at most this many keys.")
def kv(address: str, directory: str, limit: int) -> None:
    """List the keys below DIRECTORY (default: all) with the start of their values."""
    answer = _ask(address, directory=directory, with_keys=True, limit=limit)
    table = Table(title=f"{answer.key_count} keys, {answer.key_bytes} bytes in all")
    for heading in ("key", "bytes", "value"):
        table.add_column(heading, overflow="fold")
    for pair in answer.keys:
        table.add_row(escape(pair.key), str(len(pair.value)), escape(_shown(pair.value)))
    Console().print(table)


@coordinator.command()
@_address
@click.option("--limit", default=1000, show_default=True, help="Show at most this many barriers.")
def barriers(address: str, limit: int) -> None:
    """List the barriers: first the open ones with who is missing, then what the past ones came to."""
    answer = _ask(address, with_barriers=True, limit=limit)
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
    Console().print(table)


@coordinator.command()
@_address
@click.option("--interval", default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", default=0, help="End after this many looks; 0 goes on until Ctrl-C.")
def watch(address: str, interval: float, count: int) -> None:
    """Show the tasks, again and again."""
    pause = threading.Event()
    with Live(_status_table(_ask(address)), auto_refresh=False) as live:
        looks = 1
        while count == 0 or looks < count:
            try:
                pause.wait(interval)
            except KeyboardInterrupt:
                return
            live.update(_status_table(_ask(address)), refresh=True)
            looks += 1


def grpc_name(code: int) -> str:
    """The name of a gRPC status code."""
    return next((name.name for name in grpc.StatusCode if name.value[0] == code), str(code))


def _options(given: dict[str, Any]) -> CoordinatorOptions:
    if given["num_tasks"] is None:
        raise click.UsageError("--num-tasks is needed to serve: how many tasks has the job?")
    if given["ephemeral"] and given["state_dir"] is not None:
        raise click.UsageError("--ephemeral keeps nothing, and --state-dir says where: choose one.")
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if given["tls_ca"] is not None and given["tls_cert"] is None:
        raise click.UsageError("--tls-ca needs --tls-cert and --tls-key.")
    tls = TlsFiles(given["tls_cert"], given["tls_key"], given["tls_ca"]) if given["tls_cert"] else None
    return CoordinatorOptions(
        address=given["address"],
        num_tasks=given["num_tasks"],
        job=given["job"],
        heartbeat_timeout_s=given["heartbeat_timeout"],
        register_timeout_s=given["register_timeout"],
        shutdown_timeout_s=given["shutdown_timeout"],
        recoverable=given["recoverable"],
        clear_after_shutdown=given["clear_after_shutdown"],
        state_dir=given["state_dir"],
        power=given["durability"] == "power",
        tls=tls,
        allow_anonymous=given["allow_anonymous"],
    )


def _serve(options: CoordinatorOptions) -> None:
    """Serve until a signal says stop, then tell everybody who waits, and end.

    Raises:
        FastrtError: the options make no sense, the state directory cannot be used, or the keeper cannot be kept alive.
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
        kept = "nothing is kept" if options.state_dir is None else f"state in {options.state_dir}"
        click.echo(f"coordinator for {options.num_tasks} tasks of {options.job} on {service.address}; {kept}")
        signal.sigwait(signals)
        click.echo("stopping")
    if failed.is_set():
        raise FastrtError("The process that keeps the state could not be kept alive; the log above says why.")


def _ask(address: str, **fields: Any) -> Any:
    """A snapshot of a live coordinator."""
    request, response = message_set("coordination").methods("fastrt.coordination.Inspector")["Snapshot"]
    channel = open_channel(address)
    try:
        call: Callable[..., Any] = channel.unary_unary(SNAPSHOT_PATH, request.SerializeToString, response.FromString)
        return call(request(**fields), timeout=_ASK_S)
    except grpc.RpcError as error:
        raise click.ClickException(f"No coordinator answers on {address}: {error.details()}. Is it running?") from error
    finally:
        channel.close()


def _status_table(answer: Any) -> Table:
    kept = "durable" if answer.durable else "ephemeral"
    title = f"incarnation {answer.incarnation}, up {answer.uptime_s:.0f} s, {kept}"
    caption = f"{answer.key_count} keys, {answer.barrier_count} barriers, {answer.waiting_calls} calls waiting"
    if answer.error:
        caption += f"\nall tasks were told: {escape(answer.error)}"
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
