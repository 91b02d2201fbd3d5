"""`fastrt start`: runs a node of a cluster, in the foreground or detached."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fastrt.cli.job import JOB_OPTIONS, job_options, job_settings
from fastrt.cli.look import runtime_folder

if TYPE_CHECKING:
    from fastrt.runtime.node_service import NodeOptions

_DEFAULT_PORT = 6465
_DETACH_S = 30.0
_LOG = "node.log"
_DETACHED = "FASTRT_DETACHED_FD"  # descriptor to which a detached child writes that it is up
_port = click.IntRange(0, 65535)
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


def _option(name: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that an environment variable can set too: FASTRT_TOKEN_FILE sets --token-file."""
    return click.option(name, envvar=f"FASTRT_{name[2:].replace('-', '_').upper()}", **about)


@click.command(short_help="Run a node of a cluster.")
@_option("--head", is_flag=True, help="Run the head of a cluster, whose address the other nodes get.")
@_option("--address", help="HOST:PORT of the head to join.")
@_option("--host", default="127.0.0.1", show_default=True, help="Host or IP at which other nodes reach it.")
@_option("--port", type=_port, default=_DEFAULT_PORT, show_default=True, help="The head's port; 0 chooses a free one.")
@_option("--standby", is_flag=True, help="Run a standby head at --port, which takes over when the head is lost.")
@_option("--name", default="", help="This node's name; default: the machine's.")
@_option("--num-workers", type=int, help="Default: the CPUs; 0 forwards all tasks to other nodes.")
@_option("--num-gpus", type=click.FloatRange(min=0), help="GPUs for tasks; default: those that the machine has.")
@_option("--resources", help='Other resources that tasks may request, as JSON: {"gpu": 1}.')
@_option("--labels", help="Labels that a label_selector can ask for: zone=north,disk=fast.")
@_option("--object-store-memory", help="Size of the object store, such as 512MiB.")
@_option("--memory", help="Memory for tasks and actors that request some; default: the available memory.")
@_option("--token", help="The token itself. Other users may see it: prefer --token-file or FASTRT_TOKEN.")
@_option("--token-file", type=_file, help="A file with the cluster's token; default: the head creates one.")
@_option("--tls-cert", type=_file, help="PEM file for programs in other languages: the services' certificate chain.")
@_option("--tls-key", type=_file, help="PEM file: its private key.")
@_option("--tls-ca", type=_file, help="PEM file: the CA of the certificates of those programs.")
@_option("--insecure", is_flag=True, help="Send large values between nodes unencrypted, after authentication.")
@_option("--scheduler-port", type=_port, help="On the head: the port of a scheduler for programs in any language.")
@_option("--scheduler", help="On other nodes: HOST:PORT of the head's scheduler, for programs in any language.")
@_option("--export", multiple=True, help="A module whose remote functions can be called through the scheduler.")
@_option("--coordinator-port", type=_port, help="On the head: the port of a coordinator for JAX (needs --num-tasks).")
@_option("--num-tasks", type=click.IntRange(min=1), help="Number of tasks of the coordinator's job.")
@job_options("Coordinator: ", variables=True)
@_option("--metrics-port", type=_port, help="Serve the node's metrics for Prometheus at this port; 0: any free one.")
@_option("--metrics-host", default="127.0.0.1", show_default=True, help="Where; elsewhere than on loopback under TLS.")
@_option("--state-dir", type=click.Path(file_okay=False, path_type=Path), help="Directory for the state of both.")
@_option("--accept-loss", is_flag=True, help="Recover the readable part of a damaged state directory.")
@_option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds after SIGTERM until the node leaves at the latest.",
)
@_option("--detach", is_flag=True, help="Return once the node is up; `fastrt stop` ends it.")
@click.pass_context
def start(context: click.Context, /, **given: Any) -> None:
    """Run a node of a cluster, until SIGTERM or Ctrl-C.

    After SIGTERM the node leaves in order: it gets no more work, and ends once no other node needs it, or --grace is
    over. A second SIGTERM and Ctrl-C end it at once. The head's node always ends at once.

    One node is the head: `fastrt start --head`. The others join it: `fastrt start --address HOST:PORT`. Programs on
    the machine of any node use the cluster by `fastrt.init(address="HOST:PORT")`.

    \f
    Raises:
        click.ClickException: the options are inconsistent, or the node cannot start.
    """
    from fastrt.errors import ConfigError, FastrtError

    _check(context, given)
    try:
        options = _options(given)
        if given["token"] and context.get_parameter_source("token") is ParameterSource.COMMANDLINE:
            _hide_token(given["token"])
        if given["detach"]:
            _detach(given["token"])
        else:
            _run(options)
    except ConfigError as exc:
        raise click.UsageError(str(exc), context) from exc
    except FastrtError as exc:
        raise click.ClickException(str(exc)) from exc


def _check(context: click.Context, given: dict[str, Any]) -> None:
    """Reject options that cannot be combined."""
    from fastrt.net.address import is_address

    if given["token"] and given["token_file"] is not None:
        raise click.UsageError("Give the token either by --token or by --token-file.")
    if given["head"] == bool(given["address"]):
        raise click.UsageError("Give either --head, or --address HOST:PORT of the head to join.")
    if given["standby"] and given["head"]:
        raise click.UsageError("--standby is for another node than the head's.")
    for name in ("address", "scheduler"):
        if given[name] and not is_address(given[name]):
            raise click.UsageError(f"--{name} {given[name]!r} is no address; it must be HOST:PORT.")
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if given["tls_ca"] is not None and given["tls_cert"] is None:
        raise click.UsageError("--tls-ca needs --tls-cert and --tls-key, the service's certificate.")
    served = [name for name in ("scheduler_port", "coordinator_port") if given[name] is not None]
    if served and not given["head"]:
        raise click.UsageError(f"--{served[0].replace('_', '-')} is for the head.")
    if given["scheduler"] and given["head"]:
        raise click.UsageError("The head serves the scheduler itself: give it --scheduler-port.")
    if given["export"] and not given["scheduler"] and given["scheduler_port"] is None:
        raise click.UsageError("--export needs a scheduler: --scheduler-port on the head, elsewhere --scheduler.")
    if (given["coordinator_port"] is None) != (given["num_tasks"] is None):
        raise click.UsageError("--coordinator-port and --num-tasks go together.")
    if given["coordinator_port"] is None:
        for name in JOB_OPTIONS:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-')} is for the coordinator: give --coordinator-port.")
    elif given["durability"] == "power" and given["state_dir"] is None:
        raise click.UsageError("--durability power needs a directory for the state: give --state-dir.")


def _options(given: dict[str, Any]) -> NodeOptions:
    """Check the options before any process is started."""
    from fastrt.config import Config, read_resources
    from fastrt.net.grpc.auth import TlsFiles
    from fastrt.runtime.node_service import NodeOptions

    tls = TlsFiles(given["tls_cert"], given["tls_key"], given["tls_ca"]) if given["tls_cert"] else None
    listen = f"{given['host']}:{given['port']}"
    settings = {name: given[name] for name in ("num_workers", "resources", "labels", "object_store_memory", "memory")}
    if given["num_gpus"] is not None:
        settings["resources"] = {**read_resources("--resources", given["resources"] or {}), "GPU": given["num_gpus"]}
    config = Config.load(**settings)
    if tls is not None:
        tls.check()
    if given["token"]:
        from fastrt.net.grpc.identity import Identity

        Identity.from_token(given["token"])
        os.environ.pop("FASTRT_TOKEN", None)  # no process that this one starts needs it, and tasks must not see it
    scheduler = given["scheduler"]
    if given["scheduler_port"] is not None:
        scheduler = f"{given['host']}:{given['scheduler_port']}"
    return NodeOptions(
        config=config,
        head=given["address"],
        listen=listen,
        host=given["host"],
        standby=given["standby"],
        name=given["name"],
        token=given["token"] or "",
        token_file=given["token_file"],
        tls=tls,
        insecure=given["insecure"],
        scheduler=scheduler,
        export=given["export"],
        metrics=_metrics(given),
        coordinator=None if given["coordinator_port"] is None else f"{given['host']}:{given['coordinator_port']}",
        job=job_settings(given),
        state_dir=given["state_dir"],
        accept_loss=given["accept_loss"],
        grace_s=given["grace"],
    )


def _metrics(given: dict[str, Any]) -> str | None:
    """Where metrics are to be served; checks that the package for it is there."""
    from fastrt.net.address import join_address

    if given["metrics_port"] is None:
        return None
    import prometheus_client  # noqa: F401

    return join_address(given["metrics_host"], given["metrics_port"])


def _run(options: NodeOptions) -> None:
    gc.disable()
    from fastrt.runtime.node_service import Node

    gc.freeze()  # the garbage collector skips modules, as in the processes that `supervise.spawn` starts
    gc.enable()
    with Node(options) as node:
        signal.signal(signal.SIGTERM, lambda signum, frame: node.leave())
        signal.signal(signal.SIGINT, lambda signum, frame: node.stop())
        click.echo(f"node {node.session[:8]} of the cluster at {node.head}: {options.config.num_workers} workers")
        if options.head is None:
            click.echo(f"join it:      fastrt start --address {node.head} --token-file {node.token_file}")
            click.echo("              (with a copy of that file on another machine; `fastrt token` shows the token)")
        for name in ("scheduler", "coordinator", "store", "metrics"):
            if name in node.addresses:
                click.echo(f"{name + ':':<13} {node.addresses[name]}")
        click.echo(f'use it:       fastrt.init(address="{node.head}")')
        sys.stdout.flush()
        if _DETACHED in os.environ:
            os.write(int(os.environ[_DETACHED]), b"up")
            os.close(int(os.environ.pop(_DETACHED)))
        node.run()


def _hide_token(token: str) -> None:
    """Restart this command with the token in its environment, because every user can read a command line."""
    words: list[str] = []
    given = iter(sys.orig_argv[1:])
    for word in given:
        if word == "--token":
            next(given)
        elif not word.startswith("--token="):
            words.append(word)
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, "FASTRT_TOKEN": token})


def _detach(token: str | None) -> None:
    """Start this command again without a terminal, and wait until that process reports that it is up."""
    from fastrt.config import RUNTIME_FOLDER
    from fastrt.errors import FastrtError
    from fastrt.folders import open_private, private_folder
    from fastrt.net.supervise import reap

    folder = private_folder(runtime_folder(), RUNTIME_FOLDER)
    log = open_private(folder, _LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    up, down = os.pipe()
    words = [word for word in sys.argv if word != "--detach"]
    inherited = {name: value for name, value in os.environ.items() if name != "FASTRT_DETACH"}
    if token:
        inherited["FASTRT_TOKEN"] = token
    with open(log, "r+b", buffering=0) as output:
        before = output.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[down],
            env={**inherited, _DETACHED: str(down)},
        )
        os.close(down)
        with os.fdopen(up, "rb") as pipe:
            is_up = pipe.read(2) == b"up"
        click.echo(_read_from(log, before).decode(errors="replace"), nl=False)
        if not is_up:
            reap(child, _DETACH_S)
            raise FastrtError(f"the node did not start; see {folder / _LOG}")


def _read_from(fd: int, at: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size - at, at)
