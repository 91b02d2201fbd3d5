"""The head of a parameter-server cluster, in the process that started it: knows the owner of each part of each table.

It runs the membership's scheduler, starts and restarts the server processes, and answers workers' requests about
tables. Pushes and pulls do not pass through it. Its `epoch` grows whenever parts have moved. Every request carries the
epoch that it was planned with, so no server acts on an outdated distribution.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrt.errors import ConfigError, FastrtError, NotFoundError
from fastrt.membership.service import ClusterOptions, ClusterScheduler
from fastrt.membership.state import Settings
from fastrt.net.address import join_address
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of
from fastrt.ps.barrier import Barrier
from fastrt.ps.checkpoints import Checkpoints
from fastrt.ps.endpoint import Answer, Caller, Endpoint
from fastrt.ps.errors import ServerLostError, TableMismatchError
from fastrt.ps.head_state import HeadFile
from fastrt.ps.placement import assign, rebalance
from fastrt.ps.remote_errors import raise_refusal
from fastrt.ps.remote_server import DistantServer
from fastrt.ps.scaling import SERVERS_MAX, Scaling
from fastrt.ps.server_process import ServerProcess
from fastrt.ps.spec import MODES, Spec
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, dial

_log = logging.getLogger(__name__)
AnyServer = ServerProcess | DistantServer
DURABILITIES = ("none", "process", "power")
_ASK_S = 60.0
_RETRY_S = 0.02
_BARRIER_S_MAX = 3600.0
_TRIES = 20


@dataclass
class HeadOptions:
    """Options of a cluster's head; described at `fastrt.ps.start`."""

    num_servers: int
    num_workers: int = 1
    mode: str = "sync"
    staleness: int = 0
    checkpoint_dir: Path | None = None
    durability: str = "process"
    accept_loss: bool = False
    host: str = "127.0.0.1"
    http_port: int | None = None
    insecure: bool = False
    start_timeout_s: float = 60.0

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: an option is out of range.
        """
        for name, value, least, most in (
            ("num_servers", self.num_servers, 1, SERVERS_MAX),
            ("num_workers", self.num_workers, 1, 10_000),
            ("staleness", self.staleness, 0, 1 << 31),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}; it must be from {least} to {most}")
        if self.mode not in MODES or self.durability not in DURABILITIES:
            raise ConfigError(
                f"mode {self.mode!r} or durability {self.durability!r} is not known: modes are {', '.join(MODES)}, "
                f"durabilities {', '.join(DURABILITIES)}"
            )
        if self.durability == "power" and self.checkpoint_dir is None:
            raise ConfigError("durability 'power' needs a checkpoint_dir on a disk")
        if self.staleness and self.mode != "ssp":
            raise ConfigError(f"staleness needs mode 'ssp', not {self.mode!r}")


class Head:
    """Runs a cluster: owners of parts, servers, membership. `start` it, and `close` it.

    Args:
        options: the cluster's options.
        make_server: starts a server.

    Attributes:
        token: the cluster's secret, which both ends of every connection prove.
        epoch: grows with each move of parts; starts at 1.
        tables: definition of each table, and the server of each of its parts.
        scheduler: the membership's scheduler.
        lock: serialises changes of tables or servers.
    """

    def __init__(self, options: HeadOptions, make_server: Callable[..., AnyServer] = ServerProcess) -> None:
        options.check()
        self.options = options
        self._make_server = make_server
        self.token = new_token()
        self._trust = trust_of(self.token, options.insecure)
        self.epoch = 1
        self.tables: dict[str, tuple[Spec, list[int]]] = {}
        self.servers: dict[int, AnyServer] = {}
        self.failed: str | None = None
        self.checkpoints = Checkpoints(self)
        self.scaling = Scaling(self)
        self.lock = threading.RLock()
        self._changed = threading.Condition()
        self._barrier = Barrier(options.num_workers, self._changed, lambda: self.failed)
        self._frozen = False
        self._endpoint: Endpoint | None = None
        keeps = options.checkpoint_dir is not None and options.durability != "none"
        self._file = None
        if keeps and options.checkpoint_dir is not None:
            self._file = HeadFile(options.checkpoint_dir, options.accept_loss)
        http = None if options.http_port is None else join_address(options.host, options.http_port)
        membership = Settings(workers=options.num_workers, servers=options.num_servers)
        self.scheduler = ClusterScheduler(
            ClusterOptions(
                join_address(options.host, 0),
                settings=membership,
                http_address=http,
                manage=self.scaling.manage,
                token=self.token,
            )
        )
        self._handlers: dict[str, Callable[[Caller, Meta, Any], Answer]] = {
            "directory": lambda caller, meta, data: self._directory(meta),
            "define": lambda caller, meta, data: self._define(meta, data),
            "barrier": lambda caller, meta, data: self._wait_for_all(caller, meta),
            "keeper": lambda caller, meta, data: self._from_keeper(caller, meta),
        }

    @property
    def address(self) -> str:
        """The address for workers' requests."""
        assert self._endpoint is not None
        return self._endpoint.address

    def start(self) -> None:
        """Start the servers, and wait until they serve.

        Raises:
            FastrtError: a server does not start; its error output says why.
            ConfigError: the folder holds the state of a cluster with other options.
            OSError: an address cannot be bound.
        """
        try:
            self.scheduler.start()
            self._endpoint = Endpoint(self, self._trust, join_address(self.options.host, 0))
            if self._file is not None and self._file.epoch:
                self._go_on(self._file)
            else:
                self.add(range(self.options.num_servers))
            self._keep(self.epoch, self.tables)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers and all connections."""
        with self._changed:
            self.failed = self.failed or "the cluster has been closed"
            self._changed.notify_all()
        self.scaling.close()
        for server in self.servers.values():
            server.end()
        for server in self.servers.values():
            server.wait()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self.scheduler.stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _go_on(self, file: HeadFile) -> None:
        """Continue with the servers and tables of an earlier head.

        Raises:
            ConfigError: that head had other options.
        """
        had = {"num_servers": len(file.folders), **file.options}
        if had != self._shape():
            words = ", ".join(f"{name} {value!r}" for name, value in had.items())
            raise ConfigError(
                f"the tables in {self.options.checkpoint_dir} belong to a cluster with {words}: start with the same "
                "options, or restore a checkpoint into another folder"
            )
        self.epoch, self.tables = file.epoch, file.tables
        self.add(sorted(file.folders))
        for index in self.servers:  # a server killed during a move may have another distribution than the file
            self._adopt(index, {name: owners for name, (_, owners) in self.tables.items()}, self.epoch)

    def _shape(self) -> dict[str, Any]:
        options = self.options
        return {
            "num_servers": options.num_servers,
            "num_workers": options.num_workers,
            "mode": options.mode,
            "staleness": options.staleness,
        }

    def _keep(self, epoch: int, tables: dict[str, tuple[Spec, list[int]]]) -> None:
        if self._file is not None:
            self._file.write(epoch, tables, {k: v for k, v in self._shape().items() if k != "num_servers"})

    def have(self, tables: dict[str, tuple[Spec, list[int]]]) -> None:
        """Set the tables, which the servers have already; durable for a later head too."""
        self._keep(self.epoch, tables)
        with self._changed:
            self.tables = tables

    def add(self, indexes: Sequence[int]) -> None:
        """Start servers in parallel."""
        added = []
        for index in indexes:
            settings = {
                "index": index,
                "token": self.token,
                "insecure": self.options.insecure,
                "key": self._trust.key.hex(),
                "scheduler": self.scheduler.address,
                "host": self.options.host,
            }
            settings |= {"durability": self.options.durability, "folder": self._folder(index)}
            expected = self._file is not None and index in self._file.known
            settings |= {"accept_loss": expected and self.options.accept_loss, "expected": expected}
            settings |= {"home": self.address, "start_timeout_s": self.options.start_timeout_s}
            added.append(self._make_server(settings, self._restarted, lambda: self._frozen, self._lost))
            with self._changed:
                self.servers[index] = added[-1]
                self._changed.notify_all()
        for server in added:
            server.wait_until_up(self.options.start_timeout_s)

    def _folder(self, index: int) -> str | None:
        return None if self._file is None else str(self._file.folder_of(index))

    def _restarted(self, server: AnyServer) -> None:
        self.checkpoints.must_be_full = True
        with self._changed:
            self._changed.notify_all()

    def _lost(self, why: str) -> None:
        with self._changed:
            self.failed = why
            self._changed.notify_all()

    # ---- endpoint.Service ----

    def greet(self, caller: Caller) -> Meta:
        """Answer a greeting with the scheduler's address and the mode."""
        return {"scheduler": self.scheduler.address, "mode": self.options.mode}

    def room(self, caller: Caller, meta: Meta) -> int:
        """Data is expected only for the first values of a new table.

        Raises:
            ValueError: the request is unknown or invalid.
        """
        if meta.get("op") not in self._handlers:
            raise ValueError(f"{meta.get('op')!r} is not a request that the head of a cluster knows")
        return 4 * self._spec(meta).elements if meta["op"] == "define" else 0

    def handle(self, caller: Caller, meta: Meta, data: Any, fds: list[int]) -> Answer:
        """Run the handler of a request."""
        return self._handlers[meta["op"]](caller, meta, data)

    def gone(self, caller: Caller) -> None:
        """Report the end of a connection to the servers on other nodes: it may have been a keeper's."""
        for server in list(self.servers.values()):
            if isinstance(server, DistantServer):
                server.gone(caller)

    def _from_keeper(self, caller: Caller, meta: Meta) -> Answer:
        """Handle a keeper's message; a server that it restarted may accept pushes again unless parts are moving."""
        index = int(meta["index"])
        with self._changed:
            self._changed.wait_for(lambda: index in self.servers, _ASK_S)  # `add` may not have noted it yet
            server = self.servers.get(index)
        if not isinstance(server, DistantServer):
            raise NotFoundError(f"there is no server {index} on another node")
        begins_again = server.pid and meta.get("what") == "serves"
        answer = server.hear(caller, meta)
        if begins_again:
            with self.lock:
                if index in self.servers:
                    self.ask(index, {"op": "thaw", "epoch": self.epoch})
        return Answer(answer)

    def _spec(self, meta: Meta) -> Spec:
        options, found = self.options, meta.get("spec")
        if not isinstance(found, dict):
            raise ValueError("the request has no definition of a table")
        ours = {"mode": options.mode, "staleness": options.staleness, "workers": options.num_workers}
        return Spec.from_json({**found, **{name: value for name, value in ours.items() if found.get(name) is None}})

    def _directory(self, meta: Meta) -> Answer:
        """Answer with the directory; waits a limited time for a newer epoch than the caller's."""
        until = time.monotonic() + min(float(meta.get("timeout", 0)), 10.0)
        with self._changed:
            while self.epoch <= int(meta.get("after", 0)) and self.failed is None:
                if not self._changed.wait(max(0.0, until - time.monotonic())):
                    break
            tables = {name: {"spec": spec.to_json(), "owners": owners} for name, (spec, owners) in self.tables.items()}
            servers = {str(i): {"address": s.address, "unix": s.unix} for i, s in self.servers.items()}
            return Answer({"epoch": self.epoch, "servers": servers, "tables": tables, "failed": self.failed})

    def _define(self, meta: Meta, data: Any) -> Answer:
        """Create a table, or check that an existing one has the same definition."""
        spec = self._spec(meta)
        with self.lock:
            if spec.name in self.tables:
                different = self.tables[spec.name][0].difference(spec)
                if different:
                    raise TableMismatchError(f"table {spec.name!r} exists with another definition: {different}")
                return Answer({})
            if spec.kind == "dense" and spec.init is None and memoryview(data).nbytes != 4 * spec.elements:
                size = memoryview(data).nbytes
                raise ValueError(f"{size} bytes of first values came for a table of {4 * spec.elements}")
            owners = assign(spec.parts, sorted(self.servers), len(self.tables))
            for index in sorted(set(owners)):
                parts = [part for part, owner in enumerate(owners) if owner == index]
                values: list[Any] = []
                if spec.kind == "dense" and spec.init is None:
                    view = memoryview(data).cast("B") if spec.elements else memoryview(b"")
                    values = [view[4 * spec.cuts[part] : 4 * spec.cuts[part + 1]] for part in parts]
                self.ask(index, {"op": "create", "spec": spec.to_json(), "parts": parts, "epoch": self.epoch}, values)
            self.have({**self.tables, spec.name: (spec, owners)})
        return Answer({})

    def _wait_for_all(self, caller: Caller, meta: Meta) -> Answer:
        """Let a worker wait at the barrier.

        Raises:
            ValueError: the timeout is negative or not a number, or there is no such rank.
        """
        timeout = min(float(meta["timeout"]), _BARRIER_S_MAX)
        if not timeout >= 0:
            raise ValueError(f"the timeout is {timeout!r} s; it must be 0 or more")
        self._barrier.wait(caller, int(meta["rank"]), int(meta["round"]), timeout)
        return Answer({})

    # ---- calls to servers ----

    def ask(self, index: int, meta: Meta, parts: Sequence[Any] = ()) -> Meta:
        """Send a request to a server, again after its restart; so the server may get it twice.

        Raises:
            FastrtError: the server returned an error.
            ServerLostError: the server does not come back.
        """
        until = time.monotonic() + _ASK_S
        while True:
            server = self.servers[index]
            try:
                wire = self._dial(server)
                try:
                    answer: Meta = wire.call(meta, parts, timeout_s=_ASK_S)[0]
                finally:
                    wire.close()
            except (BrokenWireError, TimeoutError) as error:
                if time.monotonic() > until or self.failed is not None:
                    raise ServerLostError(f"server {index} does not answer: {error}") from None
                server.pause(_RETRY_S)
                continue
            raise_refusal(answer)
            return answer

    def _dial(self, server: AnyServer) -> Wire:
        wire = dial(server.unix, server.address, self._trust, _ASK_S)
        try:
            answer, _, _ = wire.call({"version": VERSION, "client": 0}, timeout_s=_ASK_S)
            raise_refusal(answer)
        except BaseException:
            wire.close()
            raise
        return wire

    def checkpoint(self, folder: Path, incremental: bool) -> Path:
        """Write a checkpoint while no table or server changes; see `Checkpoints.write`."""
        with self.lock:
            return self.checkpoints.write(folder, incremental)

    # ---- scaling ----

    def scale(self, servers: int, timeout_s: float) -> None:
        """Change the number of servers; see `Scaling.scale`."""
        self.scaling.scale(servers, timeout_s)

    def drop(self, indexes: Sequence[int]) -> None:
        """End servers that have no parts left."""
        with self._changed:
            gone = [self.servers.pop(index) for index in indexes]
        for server in gone:
            server.end()
        for server in gone:
            server.wait()
        if self._file is not None:
            for index in indexes:
                self._file.forget(index)
            self._keep(self.epoch, self.tables)

    def move_to(self, target: list[int]) -> None:
        """Move parts so that these servers have all of them; see `migration`."""
        before = {name: list(owners) for name, (_, owners) in self.tables.items()}
        after = {name: rebalance(owners, target) for name, owners in before.items()}
        gaining = {b for name in after for a, b in zip(before[name], after[name], strict=True) if a != b}
        self.checkpoints.must_be_full = True
        self._frozen = True  # a server that restarts meanwhile must not accept pushes
        try:
            try:
                for index in self.servers:
                    self.ask(index, {"op": "freeze"})
                for index in sorted(gaining):
                    self._give(index, before, after)
                tables = {name: (spec, after[name]) for name, (spec, _) in self.tables.items()}
                self._keep(self.epoch + 1, tables)  # the commit point: before it the move is undone, after it finished
            except BaseException:
                for index in self.servers:
                    self._adopt(index, before, self.epoch)
                raise
            for index in sorted(set(self.servers) - gaining):
                self._adopt(index, after, self.epoch + 1)
            with self._changed:
                self.tables = tables
                self.epoch += 1
                self._changed.notify_all()
        finally:
            self._frozen = False
            for index in self.servers:
                self.ask(index, {"op": "thaw", "epoch": self.epoch})

    def _give(self, index: int, before: dict[str, list[int]], after: dict[str, list[int]]) -> None:
        """Have a server fetch its new parts and make them its own; repeated if a server dies meanwhile."""
        for attempt in range(_TRIES):
            try:
                for name in after:
                    for source in sorted(set(before[name])):
                        pairs = enumerate(zip(before[name], after[name], strict=True))
                        parts = [k for k, (a, b) in pairs if a == source and b == index and a != b]
                        if parts:
                            place = self.servers[source]
                            where = {"unix": place.unix, "address": place.address}
                            self.ask(index, {"op": "fetch", "table": name, "parts": parts, **where})
                self._adopt(index, after, self.epoch + 1)
                return
            except FastrtError as error:
                _log.warning("server %d cannot take its parts: %s", index, str(error))
                if attempt == _TRIES - 1:
                    raise
                self.servers[index].pause(_RETRY_S)

    def _adopt(self, index: int, owners: dict[str, list[int]], epoch: int) -> None:
        mine = []
        for name, (spec, _) in self.tables.items():
            parts = [part for part, owner in enumerate(owners[name]) if owner == index]
            if parts:
                mine.append([spec.to_json(), parts])
        self.ask(index, {"op": "adopt", "tables": mine, "epoch": epoch})
