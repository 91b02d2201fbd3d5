"""`start`, `connect` and `restore`: from numbers, an address or a checkpoint to a cluster of parameter servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

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

Mode = Literal["sync", "async", "ssp"]
Durability = Literal["none", "process", "power"]
_TOKEN_VARIABLE = "FASTRT_TOKEN_FILE"


class Cluster:
    """A cluster of parameter servers as one worker, or the process that started them, uses it.

    The first use of a table makes this process a worker, of which there are `num_workers`; it waits until all have
    come. An instance can be sent to other processes, each of which is one worker, however often it is sent. With
    `with` it is closed at the end, and so are the servers by the process that started them.

    Args:
        address: of the cluster's head.
        token: the cluster's secret, which both ends of every connection prove.
        head: in the process that started the servers.
        timeout: how long an operation may take, in seconds, unless it says otherwise.
        insecure: connections beyond loopback go in the clear.

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
        """Leave the cluster; where it was started, end it. Arrays that were pulled stay as they are."""
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
        dtype: Any = np.float32,
        *,
        init: Any = 0.0,
        optimizer: Optimizer | None = None,
        shard: Literal["auto"] | int = "auto",
        nan: NanPolicy = "raise",
    ) -> Table:
        """A dense table: made if there is none of this name, else the one that there is.

        Args:
            name: its name in the cluster.
            shape: its shape.
            dtype: float32.
            init: first values: a number, `Normal`, `Uniform`, or an array of the shape.
            optimizer: what updates it; by default SGD with a learning rate of 0.01.
            shard: into how many parts it is divided, which servers then share; by default one for each 256 KiB, at
                most 64.
            nan: what to do with a gradient that has NaN or infinity: "pass" it on, "drop" it whole (the worker still
                counts as having pushed), or "raise" in the worker's push.
        Returns:
            The table.
        Raises:
            TableMismatchError: there is one of this name that is another one.
            TypeError: another dtype.
            ValueError: an argument makes no sense.
        """
        if np.dtype(dtype) != np.float32:
            raise TypeError(f"table {name!r}: parameter tables are float32, not {np.dtype(dtype)}")
        if shard != "auto" and (not isinstance(shard, int) or isinstance(shard, bool) or shard < 1):
            raise ValueError(f"table {name!r}: shard is {shard!r}; it must be 'auto' or a number from 1 on")
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
        init: Any = None,
        optimizer: Optimizer | None = None,
        capacity: int | None = None,
        evict: Literal["lru"] = "lru",
        nan: NanPolicy = "raise",
    ) -> Embedding:
        """An embedding: made if there is none of this name, else the one that there is.

        Args:
            name: its name in the cluster.
            dim: float32 values of a row.
            rows: keys are from 0 to rows - 1, others an IndexError; None: any 64 bits.
            init: first values of a row: `Normal(0.01)` by default, `Uniform`, or a number.
            optimizer: what updates it; by default `LazyAdam`.
            capacity: how many rows there can be; then those that were used least recently are evicted, with their
                values. It is shared out among the servers by their parts.
            evict: "lru".
            nan: what to do with gradients that have NaN or infinity: "pass" them on, "drop" those rows, or "raise".
        Returns:
            The embedding.
        Raises:
            TableMismatchError: there is one of this name that is another one.
            ValueError: an argument makes no sense.
        """
        if evict != "lru":
            raise ValueError(f"embedding {name!r}: evict is {evict!r}; there is 'lru'")
        first = Normal(0.01) if init is None else init if isinstance(init, Initial) else Constant(init)
        given = {"kind": "embedding", "shape": (dim,), "rows": rows, "capacity": capacity, "nan": nan, "init": first}
        spec = self._define(name, given, LazyAdam() if optimizer is None else optimizer, None)
        made = self._tables.setdefault(name, Embedding(self._session, spec, self._background))
        assert isinstance(made, Embedding)
        return made

    def _define(self, name: str, given: dict[str, Any], optimizer: Optimizer, values: Any) -> Spec:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"table {name!r}: {optimizer!r} is no optimizer of fastrt.ps")
        spec = Spec(name=name, optimizer=optimizer, **given).to_json()
        spec |= {"mode": None, "staleness": None, "workers": None}  # the cluster's
        self._session.ask({"op": "define", "spec": spec}, [] if values is None else [values])
        return self._session.refresh(0, 0.0).tables[name][0]

    # ---- the cluster ----

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has come here as often.

        Raises:
            TableTimeoutError: one has not in time; the message says which.
        """
        self._background.run(False, self._session.barrier, self._timeout if timeout is None else timeout)

    def checkpoint(self, path: str | os.PathLike[str] | None = None, *, incremental: bool = False) -> Path:
        """Write all tables, as they are between the same two pushes at all servers. Pushes wait meanwhile.

        Args:
            path: a folder for all checkpoints; by default `checkpoint_dir`. Each is a numbered folder in it, which is
                there when it is whole.
            incremental: of embeddings only what has changed since the last one; it is a full one when that is not
                known.
        Returns:
            The checkpoint's own folder, for `restore`.
        Raises:
            CheckpointError: it cannot be written.
            ConfigError: there is no path, or this is not the process that started the servers.
        """
        head = self._need_head()
        folder = head.options.checkpoint_dir if path is None else Path(path)
        if folder is None:
            raise ConfigError("name a folder for the checkpoint, or start with a checkpoint_dir")
        return head.checkpoint(folder.absolute(), incremental)

    def scale(self, servers: int, timeout: float = 60.0) -> None:
        """Have more or fewer servers. About 1/n of all rows move; workers go on, and wait while theirs do.

        Args:
            servers: how many.
            timeout: for the membership to take them in, in seconds.
        Raises:
            ConfigError: the number is out of range, or this is not the process that started the servers.
            TableTimeoutError: the membership does not take them in.
            FastrtError: not all workers are there, so the cluster is not ready to be scaled.
        """
        self._need_head().scale(servers, timeout)

    def nodes(self) -> tuple[MemberView, ...]:
        """The members of the cluster, servers and workers, as its scheduler knows them."""
        if self._head is not None:
            return self._head.scheduler.overview().members
        return self._session.join().fetch()

    def state(self) -> str:
        """What the cluster is doing: STARTING until all workers are there, then READY; SCALE_OUT; NODE_TIMEOUT..."""
        phase = self._session.join().phase if self._head is None else self._head.scheduler.overview().phase
        return phase.name

    def on_event(self, callback: Callable[[MemberEvent | int], None]) -> None:
        """Have a function called with each `MemberEvent` of the cluster and each number of `broadcast_event`.

        It is called in a thread of its own. This process becomes a worker.
        """
        self._session.callbacks.append(callback)
        self._session.join()

    def broadcast_event(self, number: int) -> None:
        """Send a number to all workers that have `on_event`, this one too."""
        self._session.join().publish(number)

    @property
    def rank(self) -> int:
        """This worker's number; the first use makes this process a worker."""
        return self._session.rank

    def _need_head(self) -> Head:
        if self._head is None:
            raise ConfigError("this is done in the process that started the servers")
        return self._head


def _first_values(name: str, init: Any, shape: tuple[int, ...]) -> tuple[Initial | None, Any]:
    if isinstance(init, Initial):
        return init, None
    if isinstance(init, np.ndarray) and init.shape == shape and init.ndim:
        if init.dtype.kind not in "fiu":
            raise TypeError(f"table {name!r}: first values of {init.dtype}")
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
    scheduling: Any = None,
    placement_group: PlacementGroup | None = None,
) -> Cluster:
    """Start a cluster of parameter servers: processes on this machine or other nodes, which end with this one.

    Args:
        num_servers: how many.
        mode: "sync": a step is the mean over all workers' pushes, and a pull waits for it; "async": each push is
            applied as it comes; "ssp": that too, and a pull waits while a worker is more than `staleness` pushes
            behind.
        staleness: of "ssp".
        num_workers: how many processes push; this one counts if it uses tables.
        checkpoint_dir: where servers keep their logs, and `checkpoint` writes; without it the logs are in memory that
            this process keeps. What a cluster that has ended kept there is there again: start it with the same numbers.
        durability: what a push survives that was acknowledged: "process" (the default): servers killed at any time,
            by a log; with a `checkpoint_dir` its files survive everything but a loss of power. "power": that too, by
            an fdatasync for each push; needs a `checkpoint_dir`. "none": nothing, there is no log: a server that is
            killed is given up, and with it the cluster.
        accept_loss: go on with what can be saved when files in `checkpoint_dir` are damaged. The log says what is
            lost, and the damaged files are kept aside. Without it, damage is refused.
        http_port: also serve the membership's HTTP endpoints there (0: any free one).
        host: IP address to listen on; one of this machine's own for workers on others.
        insecure: connections for tables beyond loopback go in the clear after both ends have proved the secret, which
            is faster than TLS. Only for a network on which no stranger can read or change anything.
        timeout: for operations that say nothing else, in seconds.
        scheduling: on which nodes of this process's fastrt cluster the servers are, each kept by an actor: "spread",
            a node's name or id, a `NodeAffinity`, or a list of such, of which server k takes the k-th, and those
            behind its end begin anew. None: all on this machine, without actors. Folders (of `checkpoint_dir` and
            `checkpoint`) must be the same ones on all nodes then.
        placement_group: a group instead, whose bundles the servers take in turns.
    Returns:
        The cluster.
    Raises:
        ConfigError: an option makes no sense.
        DamagedStateError: the head's file in `checkpoint_dir` is damaged, and `accept_loss` is not given.
        NotInitializedError: servers are to be placed, and this process is in no session of fastrt.
        FastrtError: the servers do not start.
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

    Tables keep their optimizers, states and steps; pushes that had not made a step are not in it.

    Args:
        path: what `checkpoint` returned, or the folder that has all, of which the newest is taken.
        num_servers, mode, num_workers, timeout: see `start`, as are all further options.
    Returns:
        The cluster; its tables are found under their names.
    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: an option makes no sense.
    """
    cluster = start(num_servers, mode, num_workers=num_workers, timeout=timeout, **options)
    try:
        head = cluster._need_head()
        head.checkpoints.load(Path(path).absolute(), head.options)
    except BaseException:
        cluster.close()
        raise
    return cluster


def connect(address: str, token: str | None = None, timeout: float = 60.0, insecure: bool = False) -> Cluster:
    """Use a cluster that another process has started.

    Args:
        address: `Cluster.address` there.
        token: `Cluster.token` there; None reads the file that FASTRT_TOKEN_FILE names.
        timeout: for operations that say nothing else, in seconds.
        insecure: the cluster was started so.
    Returns:
        The cluster.
    Raises:
        ConfigError: there is no token, or it is damaged.
        ServerLostError: no process of this cluster answers.
    """
    if token is None:
        if _TOKEN_VARIABLE not in os.environ:
            raise ConfigError(f"pass the cluster's token, or name the file that has it in {_TOKEN_VARIABLE}")
        token = read_token(os.environ[_TOKEN_VARIABLE])
    return Cluster(address, token, timeout=timeout, insecure=insecure)


_connected: dict[tuple[int, str, str], Cluster] = {}
_connecting = threading.Lock()


def _received(address: str, token: str, timeout: float, insecure: bool) -> Cluster:
    """A cluster that was sent here: the same one each time, since a process is one worker."""
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
