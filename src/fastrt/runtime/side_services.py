"""Services beside head and uplink, each in a separate process: a coordinator for JAX, a scheduler for other languages,
and a node's metrics.

`node_service` starts `main(SETTINGS)`. Their sockets stay open while the head is replaced, and the other way round.
"""

from __future__ import annotations

import logging
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.foreign_text import SETTINGS_BYTES_MAX, read_object
from fastrt.net import supervise
from fastrt.net.address import is_loopback
from fastrt.net.grpc import streams
from fastrt.net.grpc.auth import METRICS_KEY


def main(argument: str) -> None:
    """Serve until standard input ends, or SIGTERM arrives.

    Args:
        argument: JSON: kind ("coordinator", "scheduler" or "metrics"), listen (address), state_dir (path or null),
            accept_loss, identity, tls, insecure; for a scheduler local_socket (its path), for a coordinator job
            (settings of `CoordinatorOptions`), for metrics socket (of the node's daemon).
    """
    settings = read_object(argument, "the settings of a service", own=True, bytes_max=SETTINGS_BYTES_MAX)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: sys.exit(0))
    if settings["kind"] == "scheduler":  # its peers register again; a coordinator's state may end with its process
        supervise.fail_with_threads(settings["kind"])
    try:
        with _service(settings) as service:
            supervise.announce(service.address)
            supervise.wait_for_starter()
    except (FastrtError, OSError) as exc:
        sys.stderr.write(f"fastrt: the {settings['kind']} cannot start: {exc}\n")
        sys.exit(1)


def _service(settings: dict[str, Any]) -> Any:
    access = streams.access_of(settings)
    if settings["kind"] == "metrics":
        return _metrics(settings, access)
    if settings["kind"] == "scheduler":
        from fastrt.scheduler import Scheduler, SchedulerOptions

        return Scheduler(
            SchedulerOptions(
                address=settings["listen"],
                token=access.bearer,
                identity=None if access.tls else access.identity.for_programs(),
                tls=access.tls,
                credentials=access.tls.channel_credentials() if access.tls else None,
                state_dir=settings["state_dir"],
                accept_loss=settings["accept_loss"],
                local_socket=settings["local_socket"],
            )
        )
    from fastrt.coordination import Coordinator, CoordinatorOptions, Front

    options = CoordinatorOptions(
        address=settings["listen"],
        state_dir=settings["state_dir"],
        accept_loss=settings["accept_loss"],
        tls=access.tls,
        **settings["job"],
    )
    if options.state_dir is None:
        return Coordinator(options)
    return Front(options, on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM))


@contextmanager
def _metrics(settings: dict[str, Any], access: streams.Access) -> Iterator[Any]:
    """Serve the node's metrics: on loopback in the clear with a bearer token, elsewhere under TLS.

    Without PEM files of the user, clients beyond loopback show a certificate of the cluster's for programs.
    """
    from fastrt.observe.joining import joined
    from fastrt.observe.metrics import MetricsServer

    if access.tls is not None:
        tls = access.tls.server_context()
    elif is_loopback(settings["listen"]):
        tls = None
    else:
        tls = access.identity.for_programs().server_context()
    proved = tls is not None and tls.verify_mode == ssl.CERT_REQUIRED
    bearer = None if proved else access.identity.key(METRICS_KEY).hex()
    listen = settings["listen"]
    with joined(Path(settings["socket"]), "metrics") as store, MetricsServer(store, listen, bearer, tls) as server:
        yield server
