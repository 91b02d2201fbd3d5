"""The coordination service in this process: a server thread, a core, and its journal.

Tests, the head of a cluster and `fastrt coordinator --ephemeral` run this one. `front` makes a service of the same
parts whose sockets survive the process that holds the state.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from fastrt.coordination.engine import METHODS, PATHS, Core, Reply
from fastrt.coordination.snapshot import SNAPSHOT_PATH
from fastrt.coordination.state import Settings
from fastrt.coordination.status import Code
from fastrt.durable import Journal, StateDirectoryError
from fastrt.errors import ConfigError
from fastrt.net.address import check_bind, split_address, with_port
from fastrt.net.grpc.auth import TlsFiles
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.door import Limits
from fastrt.net.grpc.server import open_server
from fastrt.net.grpc.standard import CHECK_PATH, StandardServices

_log = logging.getLogger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
# A value of 64 MiB, and room for its key and the message around it.
_MESSAGE_BYTES_MAX = (64 << 20) + (64 << 10)
_SETS = ("coordination_xla", "coordination_tensorflow", "runtime_v3", "coordination")
_TASKS_MAX = 1_000_000
# Programs request thousands of keys at once over one connection; JAX's members wait in a handful of calls.
_STREAMS = 4096
_CALLS_PER_TASK = 16


@dataclass
class CoordinatorOptions:
    """The options of a coordinator.

    Attributes:
        address: `host:port`; port 0 takes any free one.
        num_tasks: the number of tasks in the job.
        job: its name; JAX's clients always use `jax_worker`.
        heartbeat_timeout_s: a task silent for longer is dead.
        register_timeout_s: how long the first task to register waits for the last.
        shutdown_timeout_s: how long the first task to shut down waits for the last; 0: no waiting.
        recoverable: tasks may die and restart without the others failing.
        clear_after_shutdown: when no task is connected any more, the next one finds no keys, barriers or errors.
        state_dir: directory where keys, members and barriers are kept over restarts; None keeps nothing.
        power: keep them over a loss of power too (an fsync per batch).
        accept_loss: continue with the readable part when files of `state_dir` are damaged. The losses are logged, and
            the damaged files are kept under other names in `state_dir`. Without it, damage is an error.
        tls: PEM files, None for plain text.
        allow_anonymous: serve beyond loopback to clients that show no certificate.
        keys_bytes_max: the most bytes of all keys and values; a key without room is RESOURCE_EXHAUSTED.
        keys_max: the most keys.
    """

    address: str = "127.0.0.1:0"
    num_tasks: int = 1
    job: str = "jax_worker"
    heartbeat_timeout_s: float = 100.0
    register_timeout_s: float = 3600.0
    shutdown_timeout_s: float = 300.0
    recoverable: bool = False
    clear_after_shutdown: bool = False
    state_dir: str | os.PathLike[str] | None = None
    power: bool = False
    accept_loss: bool = False
    tls: TlsFiles | None = None
    allow_anonymous: bool = False
    keys_bytes_max: int = 2 << 30
    keys_max: int = 10_000_000

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: a number is out of range, or the job has no name.
            InsecureBindError: the address is reachable without protection; see `check_bind`.
        """
        if not 1 <= self.num_tasks <= _TASKS_MAX:
            raise ConfigError(f"num_tasks is {self.num_tasks}; it must be from 1 to {_TASKS_MAX}.")
        if not self.job:
            raise ConfigError("job is empty; JAX's clients use jax_worker.")
        # Written so that nan is rejected too.
        if not (self.heartbeat_timeout_s > 0 and self.register_timeout_s > 0 and self.shutdown_timeout_s >= 0):
            raise ConfigError(
                "heartbeat_timeout_s and register_timeout_s must be more than 0, and shutdown_timeout_s at least 0; "
                f"they are {self.heartbeat_timeout_s}, {self.register_timeout_s} and {self.shutdown_timeout_s}."
            )
        if min(self.keys_bytes_max, self.keys_max) < 1:
            raise ConfigError("keys_bytes_max and keys_max must be at least 1.")
        if self.power and self.state_dir is None:
            raise ConfigError("Durability over a loss of power needs a directory to keep state in: give state_dir.")
        if not self.address.startswith("unix:"):
            split_address(self.address, 0)  # gRPC would take a wrong port for another one
        check_bind(
            self.address,
            authenticated=self.allow_anonymous or (self.tls is not None and self.tls.client_ca is not None),
            encrypted=True,  # clients of this protocol carry no token that the network could show
            remedy="ask clients for certificates (--tls-cert, --tls-key, --tls-ca), or say --allow-anonymous if the "
            "network itself keeps strangers out",
        )
        if self.tls is not None:
            _check_pem(self.tls)

    def settings(self) -> Settings:
        """The settings of the state machine."""
        return Settings(
            roles={self.job: self.num_tasks},
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            register_timeout_s=self.register_timeout_s,
            shutdown_timeout_s=self.shutdown_timeout_s,
            recoverable=self.recoverable,
            clear_after_shutdown=self.clear_after_shutdown,
            keys_bytes_max=self.keys_bytes_max,
            keys_max=self.keys_max,
        )

    def limits(self) -> Limits:
        """The bounds of the server: each member of the job may wait in a handful of calls at once."""
        queued = max(Limits.queued, 2 * self.num_tasks)  # after a barrier all members call at the same moment
        return Limits(streams=_STREAMS, pending=_STREAMS + _CALLS_PER_TASK * self.num_tasks, queued=queued)

    def journal(self) -> Journal | None:
        """Open the store of the records; None when nothing is kept.

        Raises:
            StateDirectoryError: the directory cannot be used.
        """
        if self.state_dir is None:
            return None
        return Journal(Path(self.state_dir), self.power, accept_loss=self.accept_loss)


def _check_pem(tls: TlsFiles) -> None:
    """Reject certificate files for which gRPC would only report that it cannot listen.

    Raises:
        ConfigError: they are not PEM files, or not a certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password="")
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:
        named = f"{tls.certificate} and {tls.key}" + (f" with {tls.client_ca}" if tls.client_ca is not None else "")
        raise ConfigError(
            f"TLS cannot be served with {named}: {error}. They must be PEM files: a certificate chain, the private key "
            "of its first certificate without a password, and the certificates that sign those of clients."
        ) from error


class Listener(ABC):
    """The gRPC server with health and reflection, common to all services. Subclasses handle the calls."""

    def __init__(self, options: CoordinatorOptions) -> None:
        options.check()
        self.options = options
        services = sorted({path.split("/")[1] for path in METHODS} | {SNAPSHOT_PATH.split("/")[1]})
        self._standard = StandardServices(services, [message_set(name) for name in _SETS])
        paths = [*PATHS, CHECK_PATH]
        streams, limits = self._standard.streams, options.limits()
        self._server = open_server(self, paths, streams, _MESSAGE_BYTES_MAX, limits=limits)
        self.address = ""

    def listen(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address cannot be bound.
        """
        tls = self.options.tls
        port = self._server.bind(self.options.address, tls.server_credentials() if tls is not None else None)
        asked = self.options.address
        self.address = with_port(asked, port)
        self._server.start()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Answer a health check, or pass the call to `take`."""
        if method == CHECK_PATH:
            code, message, answer = self._standard.check(body)
            self._server.finish(call, code, message, answer)
        else:
            self.take(call, method, body)

    @abstractmethod
    def on_cancel(self, call: int) -> None:
        """Drop a cancelled call."""

    @abstractmethod
    def on_idle(self) -> float | None:
        """Finish the batch of calls; returns the next deadline."""

    @abstractmethod
    def on_stop(self) -> None:
        """Answer all waiting calls."""

    @abstractmethod
    def take(self, call: int, method: str, body: bytes) -> None:
        """Handle a call of a coordination method."""

    def answer(self, reply: Reply) -> None:
        """Send a reply to its caller, if it is still connected."""
        trailing = ((DETAILS_KEY, reply.details),) if reply.details else ()
        self._server.finish(reply.call, reply.code, reply.message, reply.body, trailing)


class Coordinator(Listener):
    """A coordination service inside this process.

    Args:
        options: the service's options.

    Raises:
        ConfigError: an option is invalid.
        InsecureBindError: the address is reachable by other machines without protection.
        StateDirectoryError: the state directory cannot be used.

    Source: `DistributedRuntimeService` of XLA, which it replaces.
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        super().__init__(options)
        self._core = Core(options.settings(), options.journal())
        self._broken: StateDirectoryError | None = None
        self._waiting: set[int] = set()

    def __enter__(self) -> Coordinator:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen and serve until `stop`.

        Raises:
            OSError: the address cannot be bound.
        """
        self.listen()
        _log.info("coordination service for %d tasks on %s", self.options.num_tasks, self.address)

    def stop(self) -> None:
        """Answer all waiting calls that the service shuts down, and end."""
        self._standard.set_serving(False)
        self._server.stop()

    def take(self, call: int, method: str, body: bytes) -> None:
        """Submit a call to the core; without a journal, answer at once."""
        if self._broken is not None:
            self._server.finish(call, int(Code.UNAVAILABLE), str(self._broken))
            return
        self._core.submit(call, method, body)
        if self._core.is_durable:
            self._waiting.add(call)  # one commit serves all pending calls, see `on_idle`
            return
        for reply in self._core.settle():
            self.answer(reply)

    def on_cancel(self, call: int) -> None:
        """Drop a cancelled call."""
        self._waiting.discard(call)
        if self._broken is None:
            self._core.forget(call)

    def on_idle(self) -> float | None:
        """Settle the batch and answer it; returns the next deadline."""
        if self._broken is not None:
            return None
        deadline = self._core.next_deadline()
        if not self._waiting and (deadline is None or deadline > time.monotonic()):
            return deadline
        try:
            replies = self._core.settle()
        except StateDirectoryError as error:
            # The state in memory is now ahead of the disk, so no answer may show it.
            _log.critical("the coordination service cannot go on: %s", error)
            self._broken = error
            for call in self._waiting:
                self._server.finish(call, int(Code.UNAVAILABLE), str(error))
            return None
        for reply in replies:
            self._waiting.discard(reply.call)
            self.answer(reply)
        return self._core.next_deadline()

    def on_stop(self) -> None:
        """Answer all waiting calls that the service shuts down."""
        if self._broken is None:
            for reply in self._core.stop():
                self.answer(reply)
