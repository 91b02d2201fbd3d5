"""`start`, `connect` and `restore`: open a cluster of parameter servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastrt.errors import ConfigError
from fastrt.membership.events import MemberView
from fastrt.membership.options import MemberEvent
from fastrt.net.grpc.auth import read_token
from fastrt.ps.client import Session
from fastrt.ps.embedding import Embedding
from fastrt.ps.handles import Background
from fastrt.ps.head import Head, HeadOptions
from fastrt.ps.initializers import Constant, Initial, Normal
from fastrt.ps.optimizers import SGD, LazyAdam, Optimizer
from fastrt.ps.placement import divide
from fastrt.ps.remote_server import make_distant
from fastrt.ps.spec import NanPolicy, Spec
from fastrt.ps.table import Table
from fastrt.tasks.placement_group import PlacementGroup
from fastrt.tasks.resources import NodeAffinity

Mode = Literal["sync", "async", "ssp"]
Durability = Literal["none", "process", "power"]
_TOKEN_VARIABLE = "FASTRT_TOKEN_FILE"


class Cluster:
    """A cluster of parameter servers, for one worker or for the process that started the servers.

    The first use of a table makes this process one of the `num_workers` workers, and waits until all of them have
    joined. An instance can be sent to other processes; each process is one worker, even if it receives several copies.
    A `with` block closes it at its end; in the process that started the servers, this ends them too.

    Args:
        address: the head's address.
        token: the cluster's secret, which both ends of every connection prove.
        head: the head, in the process that started the servers.
        timeout: default time limit of an operation in seconds.
        insecure: connections beyond loopback are not encrypted.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(
        self, address: str, token: str, head: Head | None = None, timeout: float = 60.0, insecure: bool = False
    ) -> None:
        self.address = address
        self.token = token
        self.closed = False
        self._head = head
        self._timeout = timeout
        self._insecure = insecure
        self._session = Session(address, token, timeout, insecure)
        self._background = Background()
        self._tables: dict[str, Table | Embedding] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.address, self.token, self._timeout, self._insecure)

    def close(self) -> None:
        """Leave the cluster; in the process that started it, end it. Arrays that were pulled stay valid."""
        self.closed = True
        self._background.close()
        self._session.close()
        if self._head is not None:
            self._head.close()

    # ---- tables ----

    def table(
        self,
        name: str,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike = np.float32,
        *,
        init: float | Initial | np.ndarray[Any, Any] = 0.0,
        optimizer: Optimizer | None = None,
        shard: Literal["auto"] | int = "auto",
        nan: NanPolicy = "raise",
    ) -> Table:
        """Get a dense table of this name; it is created if it does not exist.

        Args:
            name: the table's name in the cluster.
            shape: its shape.
            dtype: float32.
            init: first values: a number, `Normal`, `Uniform`, or an array of the shape.
            optimizer: updates the table; default: SGD with a learning rate of 0.01.
            shard: number of parts to distribute to servers; default: one for each 256 KiB, at most 64.
            nan: policy for a gradient with NaN or infinity: "pass" applies it, "drop" ignores it (but counts the push),
                and "raise" raises an error in the worker's push.
        Returns:
            The table.
        Raises:
            TableMismatchError: a table of this name exists with another definition.
            TypeError: another dtype.
            ValueError: an argument is invalid.
        """
        if np.dtype(dtype) != np.float32:
            raise TypeError(f"table {name!r}: parameter tables are float32, not {np.dtype(dtype)}")
        if shard != "auto" and (not isinstance(shard, int) or isinstance(shard, bool) or shard < 1):
            raise ValueError(f"table {name!r}: shard is {shard!r}; it must be 'auto' or a whole number from 1")
        dims = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        first, values = _first_values(name, init, dims)
        cuts = divide(int(np.prod(dims, dtype=object)), None if shard == "auto" else shard)
        given = {"kind": "dense", "shape": dims, "cuts": tuple(cuts), "nan": nan, "init": first}
        spec = self._define(name, given, SGD() if optimizer is None else optimizer, values)
        made = self._tables.setdefault(name, Table(self._session, spec, self._background))
        assert isinstance(made, Table)
        return made

    def embedding(
        self,
        name: str,
        dim: int,
        *,
        rows: int | None = None,
        init: float | Initial | None = None,
        optimizer: Optimizer | None = None,
        capacity: int | None = None,
        evict: Literal["lru"] = "lru",
        nan: NanPolicy = "raise",
    ) -> Embedding:
        """Get an embedding of this name; it is created if it does not exist.

        Args:
            name: the embedding's name in the cluster.
            dim: number of float32 values in a row.
            rows: keys are from 0 to rows - 1, others raise IndexError; None: any 64 bits.
            init: first values of a row: `Normal(0.01)` by default, `Uniform`, or a number.
            optimizer: updates the rows; default: `LazyAdam`.
            capacity: most rows; beyond it the least recently used ones are evicted, with their values. Each server gets
                a share in proportion to its parts.
            evict: "lru".
            nan: policy for gradients with NaN or infinity: "pass" applies them, "drop" ignores those rows, "raise".
        Returns:
            The embedding.
        Raises:
            TableMismatchError: a table of this name exists with another definition.
            ValueError: an argument is invalid.
        """
        if evict != "lru":
            raise ValueError(f"embedding {name!r}: evict is {evict!r}; it must be 'lru'")
        first = Normal(0.01) if init is None else init if isinstance(init, Initial) else Constant(init)
        given = {"kind": "embedding", "shape": (dim,), "rows": rows, "capacity": capacity, "nan": nan, "init": first}
        spec = self._define(name, given, LazyAdam() if optimizer is None else optimizer, None)
        made = self._tables.setdefault(name, Embedding(self._session, spec, self._background))
        assert isinstance(made, Embedding)
        return made

    def _define(self, name: str, given: dict[str, Any], optimizer: Optimizer, values: Any) -> Spec:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"table {name!r}: {optimizer!r} is not an optimizer of fastrt.ps")
        spec = Spec(name=name, optimizer=optimizer, **given).to_json()
        spec |= {"mode": None, "staleness": None, "workers": None}  # the head fills in the cluster's
        self._session.ask({"op": "define", "spec": spec}, [] if values is None else [values])
        return self._session.refresh(0, 0.0).tables[name][0]

    # ---- the cluster ----

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has called this as often.

        Raises:
            TableTimeoutError: a worker did not come in time; the message names it.
        """
        self._background.run(False, self._session.barrier, self._timeout if timeout is None else timeout)

    def checkpoint(self, path: str | os.PathLike[str] | None = None, *, incremental: bool = False) -> Path:
        """Write all tables, in their state between the same two pushes on all servers. Pushes wait meanwhile.

        Args:
            path: a folder for all checkpoints; default: `checkpoint_dir`. Each checkpoint is a numbered folder in it,
                which appears when it is complete.
            incremental: write only the embedding rows that changed since the last checkpoint; a full checkpoint is
                written if these are not known.
        Returns:
            The folder of this checkpoint, for `restore`.
        Raises:
            CheckpointError: it cannot be written.
            ConfigError: there is no path, or this is not the process that started the servers.
        """
        head = self._need_head()
        folder = head.options.checkpoint_dir if path is None else Path(path)
        if folder is None:
            raise ConfigError("pass a folder for the checkpoint, or start the cluster with a checkpoint_dir")
        return head.checkpoint(folder.absolute(), incremental)

    def scale(self, servers: int, timeout: float = 60.0) -> None:
        """Change the number of servers. About 1/n of all rows move; workers wait only while their own parts move.

        Args:
            servers: number of servers.
            timeout: for the change of the membership, in seconds.
        Raises:
            ConfigError: the number is out of range, or this is not the process that started the servers.
            TableTimeoutError: the membership did not change in time.
            FastrtError: not all workers have joined, so the cluster is not ready to be scaled.
        """
        self._need_head().scale(servers, timeout)

    def nodes(self) -> tuple[MemberView, ...]:
        """The members of the cluster, servers and workers, from its scheduler."""
        if self._head is not None:
            return self._head.scheduler.overview().members
        return self._session.join().fetch()

    def state(self) -> str:
        """The cluster's state by name: STARTING until all workers have joined, READY, SCALE_OUT, NODE_TIMEOUT..."""
        phase = self._session.join().phase if self._head is None else self._head.scheduler.overview().phase
        return phase.name

    def on_event(self, callback: Callable[[MemberEvent | int], None]) -> None:
        """Register a function for each `MemberEvent` of the cluster and each number of `broadcast_event`.

        It is called on a separate thread. This process becomes a worker.
        """
        self._session.callbacks.append(callback)
        self._session.join()

    def broadcast_event(self, number: int) -> None:
        """Send a number to all workers that use `on_event`, this one included."""
        self._session.join().publish(number)

    @property
    def rank(self) -> int:
        """This worker's number; the first use makes this process a worker."""
        return self._session.rank

    def _need_head(self) -> Head:
        if self._head is None:
            raise ConfigError("only the process that started the servers can do this")
        return self._head


def _first_values(name: str, init: Any, shape: tuple[int, ...]) -> tuple[Initial | None, Any]:
    if isinstance(init, Initial):
        return init, None
    if isinstance(init, np.ndarray) and init.shape == shape and init.ndim:
        if init.dtype.kind not in "fiu":
            raise TypeError(f"table {name!r}: first values must be numbers, not {init.dtype}")
        return None, np.ascontiguousarray(init, np.float32)
    if isinstance(init, (int, float, np.number)) and not isinstance(init, bool):
        return Constant(float(init)), None
    raise ValueError(f"table {name!r}: init must be a number, Normal, Uniform, or an array of shape {shape}")


def start(
    num_servers: int,
    mode: Mode = "sync",
    *,
    staleness: int = 0,
    num_workers: int = 1,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    durability: Durability = "process",
    accept_loss: bool = False,
    http_port: int | None = None,
    host: str = "127.0.0.1",
    insecure: bool = False,
    timeout: float = 60.0,
    scheduling: str | NodeAffinity | Sequence[str | NodeAffinity] | None = None,
    placement_group: PlacementGroup | None = None,
) -> Cluster:
    """Start a cluster of parameter servers: processes on this machine or other nodes, which end with this one.

    Args:
        num_servers: number of servers.
        mode: "sync": a step uses the mean over all workers' pushes, and a pull waits for it. "async": each push is
            applied when it arrives. "ssp": like "async", but a pull waits while a worker is more than `staleness`
            pushes behind.
        staleness: for "ssp".
        num_workers: number of processes that push; this process counts if it uses tables.
        checkpoint_dir: folder for the servers' logs and for `checkpoint`; without it the logs are in memory that this
            process keeps. A later cluster with the same numbers finds the tables that an earlier one left there.
        durability: the failures that an acknowledged push survives. "process" (the default): the death of servers, by
            a log; with a `checkpoint_dir` also everything else except a loss of power. "power": a loss of power too,
            by an fdatasync for each push; needs a `checkpoint_dir`. "none": no log and no failure: if a server is
            killed, the cluster is given up.
        accept_loss: continue with the intact part of damaged files in `checkpoint_dir`. The log names the losses, and
            the damaged files are kept aside. Without it, damaged files raise an error.
        http_port: also serve the membership's HTTP endpoints there (0: any free one).
        host: IP address to listen on; for workers on other machines one that they can reach.
        insecure: connections for tables beyond loopback are not encrypted after both ends have proved the secret. This
            is faster than TLS. Only for a network on which no stranger can read or change data.
        timeout: default time limit of an operation in seconds.
        scheduling: nodes of this process's fastrt cluster for the servers, each kept by an actor: "spread", a node's
            name or id, a `NodeAffinity`, or a list of these, which servers 0, 1 and so on take in turns. None: all
            servers on this machine, without actors. With it the folders (`checkpoint_dir` and those of `checkpoint`)
            must be shared by all nodes.
        placement_group: instead of `scheduling`, a group whose bundles the servers take in turns.
    Returns:
        The cluster.
    Raises:
        ConfigError: an option is invalid.
        DamagedStateError: the head's file in `checkpoint_dir` is damaged, and `accept_loss` is not given.
        NotInitializedError: servers are to be placed on nodes, but this process has not joined a fastrt session.
        FastrtError: a server does not start.
    """
    folder = None if checkpoint_dir is None else Path(checkpoint_dir).absolute()
    options = HeadOptions(
        num_servers, num_workers, mode, staleness, folder, durability, accept_loss, host, http_port, insecure
    )
    if scheduling is None and placement_group is None:
        return _started(Head(options), timeout)
    options.check()
    return _started(Head(options, make_distant(scheduling, placement_group)), timeout)


def restore(
    path: str | os.PathLike[str],
    num_servers: int,
    mode: Mode = "sync",
    *,
    num_workers: int = 1,
    timeout: float = 60.0,
    **options: Any,
) -> Cluster:
    """Start a cluster with the tables of a checkpoint, on any number of servers.

    Tables keep their optimizers, states and steps. Pushes that have not made a step are not in a checkpoint.

    Args:
        path: the result of `checkpoint`, or the folder of all checkpoints, of which the newest is used.
        num_servers, mode, num_workers, timeout: as for `start`, like all further options.
    Returns:
        The cluster; its tables are found under their names.
    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: an option is invalid.
    """
    cluster = start(num_servers, mode, num_workers=num_workers, timeout=timeout, **options)
    try:
        head = cluster._need_head()
        head.checkpoints.load(Path(path).absolute(), head.options)
    except BaseException:
        cluster.close()
        raise
    return cluster


def connect(
    address: str | None = None, token: str | None = None, timeout: float = 60.0, insecure: bool = False
) -> Cluster:
    """Use a cluster that another process started.

    Args:
        address: `Cluster.address` of that process; None: the servers of `fastrt run --ps`.
        token: `Cluster.token` of that process; None reads the file that FASTRT_TOKEN_FILE names, or without an address
            that of `fastrt run --ps`.
        timeout: default time limit of an operation in seconds.
        insecure: whether the cluster was started with `insecure`.
    Returns:
        The cluster.
    Raises:
        ConfigError: there is no address or no token, or it is damaged.
        ServerLostError: no process of this cluster answers.
    """
    variable = _TOKEN_VARIABLE
    if address is None:
        address, variable = os.environ.get("FASTRT_PS_ADDRESS"), "FASTRT_PS_TOKEN_FILE"
        if address is None:
            raise ConfigError("pass the cluster's address, or run this program with `fastrt run --ps N`")
    if token is None:
        if variable not in os.environ:
            raise ConfigError(f"pass the cluster's token, or set {variable} to the file that contains it")
        token = read_token(os.environ[variable])
    return Cluster(address, token, timeout=timeout, insecure=insecure)


_connected: dict[tuple[int, str, str], Cluster] = {}
_connecting = threading.Lock()


def _received(address: str, token: str, timeout: float, insecure: bool) -> Cluster:
    """Unpickle a cluster: the same object each time, since a process is one worker."""
    with _connecting:
        found = _connected.get((os.getpid(), address, token))
        if found is None or found.closed:
            found = _connected[os.getpid(), address, token] = connect(address, token, timeout, insecure)
        return found


def _started(head: Head, timeout: float) -> Cluster:
    head.start()
    try:
        return Cluster(head.address, head.token, head, timeout, head.options.insecure)
    except BaseException:
        head.close()
        raise
