"""A node as a service, for `fastrt start`: its session, its uplink and, on one node, the head.

This process is the parent of all of them. It restarts children that are killed, and ends all when it gets the order to,
or is killed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastrt._core.memory.segment import start_time
from fastrt.config import Config
from fastrt.errors import FastrtError
from fastrt.folders import replace_private
from fastrt.net import supervise
from fastrt.net.address import is_same, join_address, reachable
from fastrt.net.grpc.auth import TlsFiles, read_token
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.net.supervise import RestartLimit
from fastrt.runtime.nodefile import NodeFile, nodes_here
from fastrt.runtime.processes import SERVICE_CALL, prepare_service, quiet, start_service
from fastrt.runtime.session import Embedded, start
from fastrt.runtime.siblings import Sibling, Stage

_RESTART_S = 0.2  # before a process that was killed is restarted
_DEATHS_MAX, _DEATHS_WITHIN_S = 20, 60.0
_END_S = 5.0
_TOKEN = "token"  # in the session's folder
# gRPC takes TLS 1.2 too and has no option against it. The identity's certificates have EC keys, so TLS 1.2 finds no
# suite where the only one is for RSA keys. The suites of 1.3 are fixed. It suits processes without other certificates.
_TLS_1_3 = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES128-GCM-SHA256"}
_LINKED = ("head", "standby", "uplink")
_MODULES = {
    "head": "fastrt.cluster.head",
    "standby": "fastrt.cluster.head",
    "uplink": "fastrt.runtime.uplink",
    "store": "fastrt.runtime.ray_bridge",
}


@dataclass(frozen=True)
class NodeOptions:
    """The settings of a node of a cluster.

    Attributes:
        config: the session's settings.
        head: address of the cluster's head; None: this node is the head.
        listen: `host:port` where the head or the standby head of this node serves; port 0 takes any free one.
        host: where this node serves other nodes.
        standby: whether it runs a standby head, which takes over when the head is lost.
        name: for people; default: the machine's name.
        token: the cluster's token itself; it goes into a file of the session.
        token_file: a file with it. Without both: a new token on the head, else the token of this user's head on this
            machine.
        tls: PEM files for the scheduler, the coordinator and the object store, where programs use certificates of
            their own; links between nodes never use them.
        insecure: send large values between nodes without encryption; everything else is always encrypted.
        scheduler: `host:port` of a scheduler for programs in any language: on the head, where to serve it; on other
            nodes, the head's; None: none. The node registers its object store and its exported functions there.
        export: modules whose remote functions can be called through the scheduler.
        coordinator: `host:port` of a coordinator for JAX, on the head; None: none.
        job: the coordinator's settings of the job, fields of `CoordinatorOptions`.
        metrics: `host:port` where the node's metrics are served for Prometheus; None: nowhere.
        state_dir: where scheduler and coordinator keep their state over restarts; None: they keep none.
        accept_loss: whether both may continue with the readable part of a damaged `state_dir`.
        grace_s: seconds that `Node.leave` takes at most.
    """

    config: Config
    head: str | None = None
    listen: str = "127.0.0.1:6465"
    host: str = "127.0.0.1"
    standby: bool = False
    name: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    scheduler: str | None = None
    export: tuple[str, ...] = ()
    coordinator: str | None = None
    metrics: str | None = None
    job: dict[str, Any] = field(default_factory=dict)
    state_dir: Path | None = None
    accept_loss: bool = False
    grace_s: float = 30.0


class Ahead:
    """The processes of a node that import their modules while its session starts.

    Args:
        processes: by name.
    """

    def __init__(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def take(self, name: str) -> subprocess.Popen[bytes] | None:
        """Return the process with a name, once; None: there is none."""
        return self._processes.pop(name, None)

    def close(self) -> None:
        """End the processes that were not used."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        while self._processes:
            supervise.reap(self._processes.popitem()[1], _END_S)


def start_session(config: Config, is_head: bool) -> tuple[Embedded, Ahead]:
    """Start the session of a node, while the node's other processes import their modules.

    Args:
        config: its settings.
        is_head: whether the node is the head's.
    Raises:
        FastrtError: it cannot start; the message says why.
    """
    names = ("head", "uplink") if is_head else ("uplink",)
    services = tuple(Sibling(name, _MODULES[name], SERVICE_CALL, pipes=True) for name in names)
    runtime = start(config, True, is_head, [Stage((_MODULES["head"],), services, {**quiet(), **_TLS_1_3})])
    return runtime, Ahead(dict(zip(names, runtime.take_beside(), strict=True)))


class Node:
    """A running node, for a `with` statement or an explicit `close`.

    Attributes:
        head: address of the cluster's head.
        addresses: where its processes serve: "uplink"; "standby" if wanted; on the head "head" and, if wanted,
            "scheduler" and "coordinator"; with a scheduler "store"; "metrics" if wanted.
        session: the name of its session.
        socket_path: where processes of this machine join the session.
        token_file: the file with the cluster's token.

    Args:
        options: its settings.
        runtime: a session that was started for it with these settings, and belongs to it now; None: it starts one.
        ahead: its processes that were started before the session, and belong to it now.
        head_is_up: called with the head's address once the head of this node serves, before its other processes start:
            other nodes may join already.

    Raises:
        FastrtError: it cannot start; the message says why.
    """

    def __init__(
        self,
        options: NodeOptions,
        runtime: Embedded | None = None,
        ahead: Ahead | None = None,
        head_is_up: Callable[[str], None] | None = None,
    ) -> None:
        self._options = options
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts = RestartLimit(_DEATHS_MAX, _DEATHS_WITHIN_S)
        self._stopping = self._is_leaving = False
        self._stop = os.pipe2(os.O_CLOEXEC)
        if runtime is None or ahead is None:
            known_token(options)  # a mistake is reported before any process is started
            runtime, ahead = start_session(options.config, options.head is None)
        self._runtime, self._ahead = runtime, ahead
        self.session = self._runtime.session
        self.socket_path = self._runtime.socket_path
        # Where each process serves: first the configured address, then the one it had before.
        self.addresses = {"uplink": join_address(options.host, 0)}
        self.head = options.head or ""
        if options.head is None:
            wanted = {"head": options.listen, "scheduler": options.scheduler, "coordinator": options.coordinator}
            self.addresses = {name: address for name, address in wanted.items() if address} | self.addresses
        elif options.standby:
            self.addresses = {"standby": options.listen} | self.addresses
        if options.scheduler is not None:
            self.addresses["store"] = join_address(options.host, 0)
        if options.metrics is not None:
            self.addresses["metrics"] = options.metrics
        try:
            self.token_file = self._token()
            self._identity = Identity.from_token(read_token(self.token_file))
            for name in self.addresses:
                self._start(name)
                if name == "head":
                    self.head = reachable(self.addresses["head"])
                    if head_is_up is not None:
                        head_is_up(self.head)
            self._note().write()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self) -> None:
        """Keep the node running until `stop` is called.

        Raises:
            FastrtError: one of its processes dies again and again.
        """
        until: float | None = None
        while not self._stopping:
            if self._is_leaving and until is None:
                until = time.monotonic() + self._options.grace_s
                os.read(self._stop[0], 1)  # of `leave`
                self._children["uplink"].send_signal(signal.SIGUSR1)
            left_s = None if until is None else max(0.0, until - time.monotonic())
            names = {child: name for name, child in self._children.items()}
            for child in supervise.wait_any(names, self._stop[0], left_s):
                if until is not None and names[child] == "uplink" and child.wait() == 0:
                    return  # no other node needs this one
                if not self._stopping:
                    self._replace(names[child])
            if until is not None and not self._stopping and time.monotonic() > until:
                grace = f"node {self._name} leaves after its grace of {self._options.grace_s:g} s"
                sys.stderr.write(f"fastrt: {grace}: tasks that still run here run again elsewhere, if they may\n")
                return

    def stop(self) -> None:
        """Make `run` return; safe in a signal handler."""
        self._stopping = True
        os.write(self._stop[1], b"!")

    def leave(self) -> None:
        """Make `run` return once no other node needs this one, or `grace_s` are over; safe in a signal handler.

        No more work comes to the node. At the second call, on the head's node or without a grace it returns at once.
        """
        if self._is_leaving or self._options.head is None or not self._options.grace_s:
            self.stop()
        else:
            self._is_leaving = True
            os.write(self._stop[1], b"!")

    def close(self) -> None:
        """End all processes of the node and remove the session."""
        self._ahead.close()
        for child in reversed(self._children.values()):
            child.send_signal(signal.SIGTERM)
        for child in self._children.values():
            supervise.reap(child, _END_S)
        self._children.clear()
        self._runtime.end_for_all()
        for fd in self._stop:
            os.close(fd)

    def _replace(self, name: str) -> None:
        """Restart a process that has ended."""
        supervise.reap(self._children[name])
        sys.stderr.write(f"fastrt: the {name} of this node ended; another one is started\n")
        while not self._stopping:
            if not self._restarts.allows_another():
                raise FastrtError(f"the {name} of this node ended again and again; its error output says why")
            select.select([self._stop[0]], [], [], _RESTART_S)
            try:
                self._start(name)
                if name == "uplink" and self._is_leaving:
                    self._children[name].send_signal(signal.SIGUSR1)
                return
            except FastrtError as exc:
                sys.stderr.write(f"fastrt: {exc}\n")

    def _start(self, name: str) -> None:
        """Start one of the processes at its address."""
        options = self._options
        settings: dict[str, Any] = {
            "identity": self._identity.for_child(),
            "tls": options.tls and {key: value and str(value) for key, value in vars(options.tls).items()},
            "insecure": options.insecure,
            "listen": self.addresses[name],
        }
        if name == "uplink":
            settings |= {"socket": self._runtime.socket_path, "head": self.head, "name": self._name}
            settings |= {"labels": dict(options.config.labels)}
            # The first uplink waits for the head. A restarted one does not, or it would block a restart of the head.
            settings |= {"lineage_bytes": options.config.lineage_bytes, "keep_bytes": options.config.keep_bytes}
            settings |= {"peer_idle_s": options.config.peer_idle_s}
            settings |= {"patience_s": options.config.store_patience_s, "standby": self.addresses.get("standby", "")}
            settings |= {"workers": options.config.num_workers, "join_first": name not in self._children}
        elif name == "store":
            scheduler = self.addresses.get("scheduler", options.scheduler)
            settings |= {"socket": self._runtime.socket_path, "scheduler": scheduler, "export": list(options.export)}
            settings |= {"workers": options.config.num_workers}
            settings |= {"local_socket": self._local_socket if "scheduler" in self.addresses else None}
        elif name in ("head", "standby"):
            settings |= {"own": self.session, "first": self.head} if name == "standby" else {"own": "", "first": ""}
        else:
            if name == "metrics":
                settings |= {"socket": self._runtime.socket_path}
            elif name == "scheduler":
                settings |= {"local_socket": self._local_socket}
            kept = None if options.state_dir is None else str(options.state_dir / name)
            settings |= {"kind": name, "job": options.job, "state_dir": kept}
            settings |= {"accept_loss": options.accept_loss and name not in self._children}  # at the first start only
        module = _MODULES.get(name, "fastrt.runtime.side_services")
        env = _TLS_1_3 if name in _LINKED else {}
        ahead = self._ahead.take(name)
        child = prepare_service(module, name, **env) if ahead is None else ahead
        self.addresses[name] = start_service(child, settings, options.config.start_timeout_s)
        self._children[name] = child

    @property
    def _name(self) -> str:
        return self._options.name or socket.gethostname()

    @property
    def _local_socket(self) -> str:
        """Where this node's scheduler and its bridge meet: in the session's folder, as the daemon."""
        return str(Path(self._runtime.socket_path).with_name("link.sock"))

    def _token(self) -> Path:
        """The file with the cluster's token; created if this is the head and no token was given."""
        known = known_token(self._options)
        if isinstance(known, Path):
            return known
        folder = Path(self._runtime.socket_path).parent  # removed with the session, or swept by the next one
        return _keep_token(folder, known or new_token())

    def _note(self) -> NodeFile:
        return NodeFile(
            head=self.head,
            name=self._name,
            is_head=self._options.head is None,
            address=self.addresses["uplink"],
            socket_path=self._runtime.socket_path,
            num_workers=self._options.config.num_workers,
            token_file=str(self.token_file),
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            grace_s=0.0 if self._options.head is None else self._options.grace_s,
        )


def known_token(options: NodeOptions) -> Path | str:
    """Return the cluster's token or the file that has it, checked; "": this node is the head and is to create one.

    Raises:
        FastrtError: the token is damaged, its file is not private, or no head of this machine has one.
    """
    if options.token:
        Identity.from_token(options.token)
        return options.token.strip()
    if options.token_file is not None:
        Identity.from_token(read_token(options.token_file))
        return options.token_file
    if options.head is None:
        return ""
    heads = [node for node in nodes_here(options.config.runtime_dir) if node.is_head]
    found = [Path(node.token_file) for node in heads if is_same(options.head, node.head)]
    if not found:
        raise FastrtError(
            f"the token of the cluster at {options.head} is not known here. Copy its file from the head's machine "
            "(`fastrt token` there shows it), and give it by --token-file, FASTRT_TOKEN_FILE or FASTRT_TOKEN"
        )
    return found[0]


def _keep_token(folder: Path, token: str) -> Path:
    """Write a token into the session's folder; returns the path of its file."""
    replace_private(folder, _TOKEN, f"{token}\n".encode())
    return folder / _TOKEN
