"""One parameter server: its parts of all tables, their log, and the handlers of requests.

One thread at a time makes changes (`turn`); lookups by processes of this machine do not involve the server. Every
change is written to the journal before it is made, and acknowledged afterwards. A restart makes it again with the same
code, so the effect of a record must depend on nothing but earlier records. A push carries its client and number. One
that is repeated after a broken connection, a restart or a move of its part is applied only where it has not been
applied yet.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastrt.durable import StateDirectoryError
from fastrt.errors import FastrtError, NotFoundError
from fastrt.net.grpc.trust import Trust
from fastrt.ps.arrays import pack, unpack
from fastrt.ps.checkpoint_cut import Cut
from fastrt.ps.dense import DenseShard
from fastrt.ps.endpoint import Answer, Caller
from fastrt.ps.errors import TableTimeoutError
from fastrt.ps.journal import Journal, Written
from fastrt.ps.migration import Moving
from fastrt.ps.push_clock import Array
from fastrt.ps.rows import EmbeddingShard
from fastrt.ps.spec import Spec
from fastrt.ps.wire import DATA_BYTES_MAX, Meta

_log = logging.getLogger(__name__)
Shard = DenseShard | EmbeddingShard
_SEALS = fcntl.F_SEAL_SHRINK
_WAIT_S_MAX = 3600.0
_LOOK_S = 0.002
_RANKS_MAX = 1 << 20


class MovedError(FastrtError):
    """Parts of tables have moved or are moving to other servers; fetch the directory and repeat the request."""


class Server:
    """Handles the requests at a server's endpoint (`endpoint.Service`).

    Args:
        index: its index among the servers; not used for another server while it exists.
        incarnation: identifies this process among those that served this index.
        journal: gives the earlier state.
        trust: the cluster's.
        frozen: whether to accept no pushes yet, because parts are moving.
    """

    def __init__(self, index: int, incarnation: str, journal: Journal, trust: Trust, frozen: bool = False) -> None:
        self.index = index
        self.incarnation = incarnation
        self.epoch = 0
        self.frozen = frozen
        self.shards: dict[str, Shard] = {}
        self.journal = journal
        self.trust = trust
        self.turn = threading.Condition(threading.RLock())
        self.cut = Cut(self)
        self._leaving: list[tuple[Shard, int, int | None]] = []  # readers whose connection has ended
        self._moving = Moving(self)
        self._handlers = {
            "create": self._create, "push": self._push, "wait": self._wait, "pull": self._pull, "rows": self._rows,
            "open": self._open, "lane": self._lane, "bye": self._bye, "stats": self._stats,
            **self.cut.handlers, **self._moving.handlers,
        }  # fmt: skip
        for meta, data in journal.recover():
            self._replay(meta, data)

    # ---- endpoint.Service ----

    def greet(self, caller: Caller) -> Meta:
        """Count the client's connection, and answer with this server's incarnation.

        Raises:
            ValueError: the greeting does not name the client.
        """
        if not isinstance(caller.hello.get("client"), int):
            raise ValueError("the greeting does not name its client")
        with self.turn:
            self.cut.came(caller.hello["client"], 1)
        return {"incarnation": self.incarnation, "index": self.index}

    def room(self, caller: Caller, meta: Meta) -> int:
        """Largest data size of a request, from the sizes of tables.

        Raises:
            ValueError: the request is unknown or invalid.
        """
        op = meta.get("op")
        if op not in self._handlers:
            raise ValueError(f"{op!r} is not a request that a parameter server knows")
        if op == "create":
            return 4 * Spec.from_json(meta.get("spec")).elements
        if op == "limits":
            return 0
        if op not in ("push", "rows"):
            return 0
        shard = self.shard(meta)
        if isinstance(shard, DenseShard):
            return 4 * shard.size
        count = meta.get("n")
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"the number of keys is {count!r}; it must be a whole number from 0")
        return min(count * (8 + 4 * shard.spec.dim), DATA_BYTES_MAX)

    def handle(self, caller: Caller, meta: Meta, data: Any, fds: list[int]) -> Answer:
        """Run the handler of a request, with the data from shared memory if the request names it."""
        try:
            lane = meta.get("lane")
            if lane is not None:
                data = self._from_lane(caller, lane)
            return self._handlers[meta["op"]](caller, meta, fds if meta["op"] == "lane" else data)
        finally:
            if meta["op"] != "lane":
                for fd in fds:
                    os.close(fd)

    def gone(self, caller: Caller) -> None:
        """Release the readers of a connection that has ended."""
        with self.turn:
            self.cut.came(caller.hello["client"], -1)
            self._leaving += [
                (shard, reader, caller.wire.peer) for shard, reader in caller.kept.get("readers", {}).values()
            ]
            self._dismiss()
            self.turn.notify_all()

    def _dismiss(self) -> None:
        """Release readers that hold no version any more. A process may still use arrays after it disconnected."""
        staying: list[tuple[Shard, int, int | None]] = []
        for shard, reader, pid in self._leaving:
            if reader >= 0 and isinstance(shard, DenseShard):
                if shard.memory.pinned(reader) and _is_alive(pid):
                    staying.append((shard, reader, pid))
                else:
                    shard.dismiss(reader)
        self._leaving = staying

    # ---- requests ----

    def shard(self, meta: Meta) -> Shard:
        """The shard that a request is about.

        Raises:
            MovedError: the client has another epoch of the directory.
            NotFoundError: this server has no table of this name.
        """
        if self.frozen or meta.get("epoch") != self.epoch:
            raise MovedError(f"server {self.index} is at epoch {self.epoch}")
        found = self.shards.get(str(meta.get("table")))
        if found is None:
            raise NotFoundError(f"there is no table {meta.get('table')!r} at server {self.index}")
        return found

    def _create(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        with self.turn:
            spec = Spec.from_json(meta.get("spec"))
            if spec.name not in self.shards:
                record = {"op": "create", "spec": meta["spec"], "parts": _parts(meta, spec), "epoch": meta.get("epoch")}
                self._check_create(spec, record["parts"], data)
                self._keep(record, [data])
            return Answer({})

    def _check_create(self, spec: Spec, parts: list[int], data: Any) -> None:
        values = memoryview(data).nbytes // 4
        if spec.kind == "dense" and spec.init is None:
            wanted = sum(spec.cuts[part + 1] - spec.cuts[part] for part in parts)
            if values != wanted:
                raise ValueError(f"{values} first values came for parts of {wanted}")

    def _push(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        client, rank, number = caller.hello["client"], _whole(meta, "rank", _RANKS_MAX), _whole(meta, "seq", 1 << 62)
        rate = meta.get("lr")
        if rate is not None and not (isinstance(rate, float) and 0 <= rate < float("inf")):
            raise ValueError(f"the learning rate is {rate!r}; it must be a finite number from 0")
        with self.turn:
            shard, fresh = self._admit(client, rank, number, meta)
            if not fresh.any():
                return self._state(shard, rank)
            if rank >= shard.spec.workers:
                raise ValueError(f"there is no rank {rank}: table {shard.spec.name!r} has {shard.spec.workers} workers")
            body: Any = None if meta.get("dropped") else shard.body(meta, data)
            victims = shard.prepare(rank, fresh, body)
            if victims is not None:
                self._keep({"op": "evict", "table": shard.spec.name}, [victims])
            record = {"op": "push", "table": shard.spec.name, "client": client, "rank": rank, "seq": number, "lr": rate}
            record |= {"n": meta.get("n"), "dropped": bool(meta.get("dropped"))}
            self._keep(record, [] if body is None else [data])
            self._shorten()
            self.turn.notify_all()
            return self._state(shard, rank)

    def _admit(self, client: int, rank: int, number: int, meta: Meta) -> tuple[Shard, Array]:
        """Wait until a push may be applied: no checkpoint holds it back, and the worker's previous push is used."""
        until = _deadline(meta)
        while True:
            shard = self.shard(meta)
            fresh = shard.pace.fresh(client, number)
            stops = self.cut.stops(shard.spec.name, client, number) or shard.pace.is_blocked(rank, fresh)
            if not fresh.any() or not stops:
                if shard.has_room():
                    return shard, fresh
                self._dismiss()
                if time.monotonic() < until:
                    self.turn.wait(_LOOK_S)  # a reader that releases a slot does not notify
                    continue
            self._sleep(until, f"table {shard.spec.name!r}: a push waits for worker {shard.pace.missing()}")

    def _wait(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Wait until a pull may proceed."""
        after, slowest = _whole(meta, "after", 1 << 62), _whole(meta, "slowest", 1 << 62)
        until = _deadline(meta)
        with self.turn:
            while True:
                shard = self.shard(meta)
                if shard.pace.floor() >= after and (not slowest or shard.pace.slowest() >= slowest):
                    return self._state(shard, _whole(meta, "rank", _RANKS_MAX))
                self._sleep(until, f"table {shard.spec.name!r}: a pull waits for worker {shard.pace.missing()}")

    def _pull(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        with self.turn:
            shard = self.shard(meta)
            if not isinstance(shard, DenseShard):
                raise ValueError(f"{shard.spec.name!r} is an embedding")
            return Answer({}, [shard.current.copy()])

    def _rows(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Return the rows of keys; missing rows are created."""
        with self.turn:
            shard = self.shard(meta)
            if not isinstance(shard, EmbeddingShard):
                raise ValueError(f"{shard.spec.name!r} is not an embedding")
            if memoryview(data).nbytes != 8 * _whole(meta, "n", 1 << 40):
                raise ValueError(f"{memoryview(data).nbytes} bytes do not fit {meta['n']} keys")
            keys, where = np.unique(np.frombuffer(data, np.uint64), return_inverse=True)
            shard.check_keys(keys)
            rows = np.empty(len(keys), np.int64)
            if shard.memory.find(keys, rows):
                victims = shard.victims(keys)
                if victims is not None:
                    self._keep({"op": "evict", "table": shard.spec.name}, [victims])
                self._keep({"op": "touch", "table": shard.spec.name}, [keys])
                shard.memory.find(keys, rows)
            return Answer({}, [np.ascontiguousarray(shard.values[rows][where.reshape(-1)])])

    def _open(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Give a process a table's state and, on this machine, the memory."""
        with self.turn:
            shard = self.shard(meta)
            readers = caller.kept.setdefault("readers", {})
            shown, reader = readers.get(shard.spec.name, (None, -1))
            if shown is not shard:
                if shown is not None:
                    self._leaving.append((shown, reader, caller.wire.peer))
                self._dismiss()
                reader = shard.admit() if caller.wire.is_local else -1
                readers[shard.spec.name] = (shard, reader)
            state = self._state(shard, _whole(meta, "rank", _RANKS_MAX)).meta
            fds = [shard.memory.fd] if reader >= 0 else []
            return Answer({**state, "parts": shard.parts, "reader": reader}, fds=fds)

    def _lane(self, caller: Caller, meta: Meta, fds: Any) -> Answer:
        """Map the memory through which a client of this machine sends its pushes."""
        try:
            if len(fds) != 1 or not caller.wire.is_local:
                raise ValueError("a lane needs one descriptor, from a process of this machine")
            # If the client could shrink the memory, a read behind its end would kill this process.
            if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("a lane's memory must be sealed against shrinking")
            caller.kept["lane"] = mmap.mmap(fds[0], 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            for fd in fds:
                os.close(fd)
        return Answer({})

    def _from_lane(self, caller: Caller, nbytes: Any) -> memoryview:
        lane = caller.kept.get("lane")
        if lane is None or not isinstance(nbytes, int) or not 0 <= nbytes <= len(lane):
            raise ValueError(f"{nbytes!r} bytes do not fit a lane of {0 if lane is None else len(lane)} bytes")
        return memoryview(lane)[:nbytes]

    def _bye(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        with self.turn:
            self._keep({"op": "bye", "client": caller.hello["client"]}, [])
        return Answer({})

    def _stats(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        with self.turn:
            tables = {
                name: {
                    "parts": len(shard.parts),
                    "rows": getattr(shard.memory, "count", None),
                    "floor": shard.pace.floor(),
                }
                for name, shard in self.shards.items()
            }
            return Answer(
                {"tables": tables, "log_bytes": self.journal.log_bytes, "generation": self.journal.generation}
            )

    # ---- journal ----

    def _keep(self, record: dict[str, Any], parts: Sequence[Any]) -> None:
        """Write a change to the journal, then make it."""
        self.journal.append(record, parts)
        data = parts[0] if len(parts) == 1 else b""
        self._replay(record, data)

    def _replay(self, meta: dict[str, Any], data: Any) -> None:
        """Make a change that is in the journal."""
        op = meta["op"]
        if op == "epoch":
            self.epoch = meta["epoch"]
        elif op in ("create", "shard"):
            spec = Spec.from_json(meta["spec"])
            shard: Shard = (DenseShard if spec.kind == "dense" else EmbeddingShard)(spec, meta["parts"])
            if op == "shard":
                shard.load(meta["parts"], unpack(meta["arrays"], data))
            elif isinstance(shard, DenseShard) and spec.init is None:
                shard.fill(np.frombuffer(data, np.float32))
            self.shards[spec.name] = shard
            if op == "create":
                self.epoch = meta["epoch"]
        elif op == "bye":
            for shard in self.shards.values():
                shard.pace.forget(meta["client"])
        else:
            self._replay_on(self.shards[meta["table"]], meta, data)

    def _replay_on(self, shard: Shard, meta: dict[str, Any], data: Any) -> None:
        op = meta["op"]
        if op == "push":
            fresh = shard.pace.fresh(meta["client"], meta["seq"])
            shard.pace.note(meta["client"], meta["rank"], meta["seq"], fresh)
            body: Any = None if meta["dropped"] else shard.body(meta, data)
            shard.push(meta["rank"], fresh, meta["lr"], body)
        elif isinstance(shard, EmbeddingShard):
            keys = np.frombuffer(data, np.uint64)
            if op == "evict":
                shard.evict(keys)
            else:
                shard.find_or_make(keys)

    def _shorten(self) -> None:
        if self.journal.is_long(sum(one.state_bytes for one in self.shards.values())):
            try:
                self.snapshot()
            except StateDirectoryError as error:  # the push is in the log, which continues
                _log.warning("server %d cannot make a snapshot to shorten its log: %s", self.index, str(error))

    def snapshot(self) -> None:
        """Write a snapshot, after which the log is empty."""
        self.journal.snapshot(self._records())

    def _records(self) -> Iterator[Written]:
        yield {"op": "epoch", "epoch": self.epoch}, ()
        for shard in self.shards.values():
            listed, arrays = pack(shard.dump(shard.parts))
            yield {"op": "shard", "spec": shard.spec.to_json(), "parts": shard.parts, "arrays": listed}, arrays

    def _state(self, shard: Shard, rank: int) -> Answer:
        pace = shard.pace
        return Answer({"floor": pace.floor(), "clock": pace.clock(rank), "slowest": pace.slowest()})

    def _sleep(self, until: float, what: str) -> None:
        if not self.turn.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
            raise TableTimeoutError(f"{what}, and the timeout has passed")


def _is_alive(pid: int | None) -> bool:
    """Whether a process exists that can still read its mapped memory."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _parts(meta: Meta, spec: Spec) -> list[int]:
    parts = meta.get("parts")
    if not isinstance(parts, list) or not all(isinstance(k, int) and 0 <= k < spec.parts for k in parts):
        raise ValueError(f"{parts!r} are not parts of table {spec.name!r}")
    return sorted(set(parts))


def _whole(meta: Meta, name: str, most: int) -> int:
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from 0 to {most - 1}")
    return value


def _deadline(meta: Meta) -> float:
    timeout = meta.get("timeout")
    if not isinstance(timeout, (int, float)) or not 0 <= timeout <= _WAIT_S_MAX:
        raise ValueError(f"the timeout is {timeout!r} s; it must be from 0 to {_WAIT_S_MAX:g}")
    return time.monotonic() + timeout
