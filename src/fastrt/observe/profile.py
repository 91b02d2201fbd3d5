"""Measure the speed of put, get and transfers within a node and between nodes, compared with the machine's limits.

All paths are measured in turns, round by round, so that a busy moment affects all of them alike, and the medians are
compared: `put` with a memcpy between warm buffers, transfers with plain TCP between warm buffers. The first round of
each path is reported separately: it includes the cost of memory that was never touched before.

The other node is a separate process on this machine, with a separate arena; or any store, given by its address: then
only transfers to it are measured, and the limits are those of this machine alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fastrt._core.memory.clients import KIND_DRIVER, KIND_TOOL, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt.config import SHM_DIR, size_text
from fastrt.errors import FastrtError
from fastrt.folders import free_bytes
from fastrt.foreign_text import read_object
from fastrt.net import supervise
from fastrt.net.address import AddressError, join_address, own_host_toward
from fastrt.net.grpc.channel import bearer, open_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.objstore.push import CHUNK_BYTES, Pusher
from fastrt.objstore.service import MEASURE, ObjStoreServer
from fastrt.observe.chrome import micros
from fastrt.store.client import Store
from fastrt.store.serialize import serialize

_END_S = 30.0
_ROUNDS_MIN, _ROUNDS_MAX, _ROW_S = 3, 100, 0.5
_ROOM_BYTES = 64 << 20
_TCP_BYTES = 4 << 20  # in one call; the fastest size here
_BATCH_BYTES = 256 << 10  # small operations are repeated up to so many bytes, so that the clock's cost does not count
_SLOW = ("plain TCP", "native", "grpc")  # paths that take long enough by themselves
_OBJREF = 1
_MANY_FROM = 1000  # objrefs of the small objects
_EACH_FROM = 1 << 32  # and of those that are delivered one after the other
_PAGE_BYTES = 16 << 10  # of the arena: an object's block is rounded up to a multiple
# Each path, and the path whose rate is its limit.
LIMITS = {"memcpy": "", "plain TCP": "", "put": "memcpy", "get": "", "same node": "memcpy", "native": "plain TCP",
          "grpc": "plain TCP"}  # fmt: skip


@dataclass
class Row:
    """One path at one size; times in seconds, medians of all rounds but the first.

    Attributes:
        path: "memcpy", "plain TCP", "put", "get", "same node", "native" or "grpc".
        nbytes: of the value.
        seconds: of one operation.
        first_s: of the first one, on fresh memory.
        rounds: how many were measured.
        limit: the path's rate divided by the rate of its limit; 0 if it has none.
        cpu_here, cpu_there: seconds of processor time per GB in this process and in the other; None if unknown.
        parts: seconds of an operation by part: serialize, copy, wire, wait.
    """

    path: str
    nbytes: int
    seconds: float = 0.0
    first_s: float = 0.0
    rounds: int = 0
    limit: float = 0.0
    cpu_here: float | None = None
    cpu_there: float | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """GB (10^9 bytes) per second."""
        return self.nbytes / self.seconds / 1e9


@dataclass
class Profile:
    """The result of one run: rows in order of size, and every single operation as an event for a trace."""

    rows: list[Row] = field(default_factory=list)
    events: list[tuple[str, int, float, float, dict[str, float]]] = field(default_factory=list)  # path, bytes, start, s

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON for programs."""
        return [{**vars(row), "GB_per_s": row.rate} for row in self.rows]


def sizes(most: int) -> list[int]:
    """The sizes to measure: from 1 KiB, each 16 times the one before, and `most` itself."""
    found = []
    nbytes = 1024
    while nbytes < most:
        found.append(nbytes)
        nbytes *= 16
    return [*found, most]


def transfer(
    most: int,
    planes: tuple[str, ...] = ("native", "grpc"),
    address: str | None = None,
    token: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    insecure: bool = False,
    progress: Callable[..., None] = lambda path, done, total: None,
) -> Profile:
    """Measure every path over sizes up to `most` bytes.

    Args:
        most: the largest size.
        planes: which of "native" and "grpc" to measure between nodes.
        address: host:port of another store; None starts one in a separate process.
        token: the token of that store's cluster; unused without an address.
        chunk_bytes: size of a message of StreamObj.
        insecure: allow unencrypted transfers to an address on another machine.
        progress: called as `progress(path, done=, total=)` with the number of finished sizes and of all sizes.
    Returns:
        The rows and events.
    Raises:
        FastrtError: there is too little room in /dev/shm, or the other store cannot be reached.
    """
    _check_room(most, 1 if address else 2)
    with ExitStack() as stack:
        token = token or new_token()
        bench = stack.enter_context(TwoNodes(most, token, planes, chunk_bytes, address, insecure))
        profile = Profile()
        listed = sizes(most)
        for k, nbytes in enumerate(listed):
            tell = functools.partial(progress, done=k, total=len(listed))
            profile.rows += _measure(bench, nbytes, profile, tell)
        return profile


def _measure(bench: TwoNodes, nbytes: int, profile: Profile, tell: Callable[[str], None]) -> list[Row]:
    """Measure all paths at one size, in turns."""
    bench.prepare(nbytes)
    paths = bench.paths()
    rows = {path: Row(path, nbytes) for path in paths}
    times: dict[str, list[float]] = {path: [] for path in paths}
    parts: dict[str, list[dict[str, float]]] = {path: [] for path in paths}
    cpu = {path: [0.0, 0.0] for path in paths}
    began = time.perf_counter()
    for turn in range(_ROUNDS_MAX + 1):
        if turn > _ROUNDS_MIN and time.perf_counter() - began > _ROW_S * len(paths):
            break
        # Each turn begins with another path, so that not always the same path gains from warm caches.
        for path in [*paths][turn % len(paths) :] + [*paths][: turn % len(paths)]:
            tell(path)
            here, there = _cpu_of_this(), bench.cpu_there()
            start = time.perf_counter()
            found = _repeated(paths[path], 1 if turn == 0 or path in _SLOW else max(1, _BATCH_BYTES // nbytes))
            after = _cpu_of_this()
            count = found.pop("count")
            seconds = found.pop("seconds")
            used = [(after[k] - here[k]) / count for k in (0, 1)]
            profile.events.append((path, nbytes, start, seconds, found))
            if turn == 0:
                rows[path].first_s = seconds
                continue
            times[path].append(seconds)
            cpu[path][0] += sum(used)
            cpu[path][1] += bench.cpu_there() - there
            parts[path].append(found or _split(path, seconds, *used))
    for path, row in rows.items():
        row.rounds, row.seconds = len(times[path]), statistics.median(times[path])
        names = {name for one in parts[path] for name in one}
        row.parts = {name: statistics.median(one.get(name, 0.0) for one in parts[path]) for name in sorted(names)}
        moved = nbytes * row.rounds / 1e9
        row.cpu_here = cpu[path][0] / moved
        row.cpu_there = cpu[path][1] / moved if bench.far is not None and path in ("plain TCP", *bench.planes) else None
        limit = rows.get(LIMITS[path])
        row.limit = limit.seconds / row.seconds if limit is not None else 0.0
    return list(rows.values())


def _repeated(run: Callable[[], dict[str, float]], count: int) -> dict[str, float]:
    """Run a path `count` times; return the means of its seconds and of its parts."""
    start = time.perf_counter()
    found = [run() for _ in range(count)]
    took = (time.perf_counter() - start) / count
    names = {name for one in found for name in one}
    means = {name: sum(one.get(name, 0.0) for one in found) / count for name in names}
    return {"seconds": took, **means, "count": count}


def _split(path: str, seconds: float, user: float, system: float) -> dict[str, float]:
    """Split the time of an operation by this process's clocks: user code, the kernel's sockets, waiting."""
    if LIMITS[path] == "plain TCP" or path == "plain TCP":
        return {"copy": user, "wire": system, "wait": max(0.0, seconds - user - system)}
    return {"copy": seconds}


def _cpu_of_this() -> tuple[float, float]:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime, found.ru_stime


class TwoNodes:
    """Both ends of a measurement, with a function for each path that runs it once. A context manager.

    Args:
        most: the largest value.
        token: the token of the session.
        planes: which of "native" and "grpc" to measure.
        chunk_bytes: size of a message of StreamObj.
        address: of the other store; None starts a process.
        insecure: whether values may be sent to another machine unencrypted.
        many: number and size of the small objects that the other process creates for `pull_many`.
    """

    def __init__(
        self,
        most: int,
        token: str,
        planes: tuple[str, ...] = ("native", "grpc"),
        chunk_bytes: int = CHUNK_BYTES,
        address: str | None = None,
        insecure: bool = False,
        many: tuple[int, int] = (0, 0),
    ) -> None:
        self._stack = stack = ExitStack()
        try:
            self._open(most, token, planes, chunk_bytes, address, insecure, many)
        except BaseException:
            stack.close()
            raise

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _open(
        self, most: int, token: str, planes: tuple[str, ...], chunk_bytes: int, address: str | None, insecure: bool,
        many: tuple[int, int],
    ) -> None:  # fmt: skip
        stack = self._stack
        self._many = range(_MANY_FROM, _MANY_FROM + many[0])
        self.planes = planes
        self.far = stack.enter_context(_Far(most, token, many)) if address is None else None
        self._address = self.far.address if self.far is not None else str(address)
        self._segment, self._store = _open_store(3 * most + many[0] * (many[1] + _PAGE_BYTES) + _ROOM_BYTES)
        stack.callback(self._segment.unlink)
        index, gen = admit(self._segment, os.getpid(), KIND_TOOL, "profile")
        self._other = Store(Client(self._segment, index, gen), 0.0)
        host = "127.0.0.1" if address is None else _own_host(address)
        identity = None if address is None else Identity.from_token(token).for_programs()
        shown: dict[str, Any] = {"identity": identity}
        if identity is None:
            shown = {"token": token, "native_identity": Identity.from_token(token)}
        self._server = ObjStoreServer(self._store, **shown, address=join_address(host, 0), insecure=insecure)
        stack.callback(self._server.stop)
        self._server.start()
        table = self._server.table
        options = identity.channel_options() if identity is not None else ()
        credentials = identity.channel_credentials() if identity is not None else None
        # Between two processes of one run, the token belongs to this run only; the token of a cluster is never sent.
        own = token if identity is None else None
        self._pushers = {
            plane: Pusher(table, own, credentials, native_address, chunk_bytes, options=options, source=source)
            for plane, native_address, source in (
                ("native", self._server.native_address, self._server._source),
                ("grpc", None, None),
            )
        }
        for pusher in self._pushers.values():
            stack.callback(pusher.close)
        request, reply = message_set("ray").methods("ObjStore")["DeallocateObject"]
        channel: Any = stack.enter_context(open_channel(self._address, credentials, options))
        call = channel.unary_unary("/ObjStore/DeallocateObject", request.SerializeToString, reply.FromString)
        metadata = bearer(own) if own is not None else None
        self._objref = self._name_there(channel, most) if address else _OBJREF
        self._drop_there: Callable[[int], Any] = lambda objref: call(
            request(canonical_objref=objref), timeout=60, metadata=metadata
        )
        self._value: Any = None
        self._target: Any = None

    def _name_there(self, channel: Any, most: int) -> int:
        """Get the name under which the other store accepts values, until this object is closed.

        A fastrt store assigns one. Any other store accepts any name.
        """
        request, reply = message_set("transfer").methods("fastrt.transfer.Transfer")["Measure"]
        call = channel.unary_stream(MEASURE, request.SerializeToString, reply.FromString)(request(nbytes=most))
        self._stack.callback(call.cancel)
        try:
            return int(next(call).objref)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        return secrets.randbits(48) << 8

    def prepare(self, nbytes: int) -> None:
        """Create the value of a size."""
        table = self._server.table
        if self._value is not None:
            table.drop(self._objref)
        self._value = np.arange(nbytes // 8, dtype=np.uint64).view(np.uint8)
        self._value = self._value if nbytes % 8 == 0 else np.zeros(nbytes, np.uint8)
        self._target = np.zeros(nbytes, np.uint8)
        table.add(self._objref, self._store.put(self._value))

    def paths(self) -> dict[str, Callable[[], dict[str, float]]]:
        """The paths to measure, limits first."""
        found = {"memcpy": self._memcpy, "put": self._put, "get": self._get, "same node": self._same_node}
        if self.far is not None:
            found = {"memcpy": self._memcpy, "plain TCP": self._plain, **found}
        for plane in self.planes:
            found[plane] = lambda plane=plane: self._deliver(plane)  # type: ignore[misc]
        return found

    def pull_many(self) -> None:
        """Fetch the small objects, all in one request."""
        assert self.far is not None
        assert self._server.puller is not None
        self._server.puller.bring(self._many, self.far.native_address).result()

    def drop_many(self) -> None:
        """Free the small objects."""
        for objref in self._many:
            self._server.table.drop(objref)

    def deliver_each(self, count: int, nbytes: int) -> float:
        """Deliver small objects by the native stream, one after the other, and drop all; mean seconds of a delivery."""
        table, names = self._server.table, range(_EACH_FROM, _EACH_FROM + count)
        for objref in names:
            table.add(objref, self._store.put(np.zeros(nbytes, np.uint8)))
        deliver = self._pushers["native"].deliver
        start = time.perf_counter()
        for objref in names:
            deliver(self._address, objref)
        seconds = (time.perf_counter() - start) / count
        for objref in names:
            table.drop(objref)
            self._drop_there(objref)
        return seconds

    def send_each(self, count: int, nbytes: int) -> float:
        """Send as many bytes by plain TCP, each after the answer to the one before; mean seconds of one."""
        assert self.far is not None
        data = memoryview(bytes(nbytes))
        start = time.perf_counter()
        for _ in range(count):
            self.far.send(data)
        return (time.perf_counter() - start) / count

    def cpu_there(self) -> float:
        """Processor time of the other process so far; 0 for a store that this run did not start."""
        return self.far.cpu() if self.far is not None else 0.0

    def _memcpy(self) -> dict[str, float]:
        np.copyto(self._target, self._value)
        return {}

    def _plain(self) -> dict[str, float]:
        assert self.far is not None
        self.far.send(memoryview(self._value))
        return {}

    def _put(self) -> dict[str, float]:
        start = time.perf_counter()
        parts = serialize(self._value)
        serialized = time.perf_counter()
        ref = self._store.put_serialized(parts)
        done = time.perf_counter()
        del ref
        return {"seconds": done - start, "serialize": serialized - start, "copy": done - serialized}

    def _get(self) -> dict[str, float]:
        ref = self._server.table.find(self._objref)
        assert ref is not None
        start = time.perf_counter()
        value = self._store.get(ref)
        seconds = time.perf_counter() - start
        del value
        return {"seconds": seconds}

    def _same_node(self) -> dict[str, float]:
        """Measure a put, and a get by another client of the arena, with the name that a task would receive."""
        start = time.perf_counter()
        parts = serialize(self._value)
        serialized = time.perf_counter()
        ref = self._store.put_serialized(parts)
        copied = time.perf_counter()
        there = handles.acquire(self._other.client, ref.objref, ref.index)
        value = self._other.get(there)
        done = time.perf_counter()
        del ref, there, value
        parts_s = {"serialize": serialized - start, "copy": copied - serialized, "wait": done - copied}
        return {"seconds": done - start, **parts_s}

    def _deliver(self, plane: str) -> dict[str, float]:
        here, start = _cpu_of_this(), time.perf_counter()
        self._pushers[plane].deliver(self._address, self._objref)
        seconds = time.perf_counter() - start
        after = _cpu_of_this()
        self._drop_there(self._objref)
        return {"seconds": seconds, **_split(plane, seconds, after[0] - here[0], after[1] - here[1])}


def _open_store(nbytes: int) -> tuple[Segment, Store]:
    segment = Segment.create(nbytes, objects_max=1 << 16, tasks_max=1 << 10)
    index, gen = admit(segment, os.getpid(), KIND_DRIVER, "profile")
    client = Client(segment, index, gen)
    client.adopt_job(client.job)
    return segment, Store(client, 0.0)


def _check_room(most: int, nodes: int) -> None:
    free, needed = free_bytes(SHM_DIR), (3 + 2 * (nodes - 1)) * most + 2 * _ROOM_BYTES
    if free < needed:
        raise FastrtError(
            f"values of {size_text(most)} need {size_text(needed)} of {SHM_DIR}, which has {size_text(free)} "
            "free; give a smaller --size"
        )


def _own_host(address: str) -> str:
    """The address of this machine on the route to another one."""
    try:
        return own_host_toward(address)
    except (OSError, AddressError) as exc:
        raise FastrtError(f"{address} cannot be reached: {exc}; give the host:port of a node's store") from None


# ---- the other process ----


class _Far:
    """The other node: a process with a separate arena, and a socket for plain TCP."""

    def __init__(self, most: int, token: str, many: tuple[int, int]) -> None:
        pipe = subprocess.PIPE
        self._process = supervise.spawn(
            "fastrt.observe.profile", "main()", name="profile", stdin=pipe, stdout=pipe, new_session=False
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"bytes": most, "token": token, "many": many}).encode() + b"\n")
        self._process.stdin.flush()
        answer = read_object(self._process.stdout.readline() or b"{}", "the answer of the other node", own=True)
        if "address" not in answer:
            supervise.reap(self._process, 0)
            raise FastrtError(f"the other node could not start: {answer.get('error', 'see its error output')}")
        self.address: str = answer["address"]
        self.native_address: str = answer["native"]
        self._sock = socket.create_connection(("127.0.0.1", answer["port"]))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pid = self._process.pid
        self._tasks = Path(f"/proc/{self.pid}/task")

    def __enter__(self) -> _Far:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the process ends when its standard input ends
        supervise.reap(self._process, _END_S)

    def cpu(self) -> float:
        """Seconds of processor time of its threads so far."""
        total = 0
        for task in self._tasks.iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:  # the thread has just ended
                continue
        return total / 1e9

    def send(self, data: memoryview) -> None:
        """Send bytes and wait until all of them have arrived."""
        self._sock.sendall(len(data).to_bytes(8, "little"))
        for start in range(0, len(data), _TCP_BYTES):
            self._sock.sendall(data[start : start + _TCP_BYTES])
        if self._sock.recv(1) != b"!":
            raise FastrtError("the other node went away while plain TCP was measured")


def _sink(listener: socket.socket, most: int) -> None:
    """Receive the bytes of `_Far.send` into warm memory."""
    room = memoryview(bytearray(most))
    sock, _ = listener.accept()
    with sock:
        while True:
            head = sock.recv(8, socket.MSG_WAITALL)
            if len(head) < 8:
                return
            done, wanted = 0, int.from_bytes(head, "little")
            while done < wanted:
                got = sock.recv_into(room[done : min(wanted, done + _TCP_BYTES)])
                if not got:
                    return
                done += got
            sock.sendall(b"!")


def main() -> None:
    """Run the other node until standard input ends."""
    order = read_object(sys.stdin.readline(), "the order of a measurement", own=True)
    with ExitStack() as stack:
        try:
            count, nbytes = order["many"]
            segment, store = _open_store(2 * order["bytes"] + count * (nbytes + _PAGE_BYTES) + _ROOM_BYTES)
            stack.callback(segment.unlink)
            identity = Identity.from_token(order["token"])
            server = ObjStoreServer(store, token=order["token"], native_identity=identity)
            stack.callback(server.stop)
            for k in range(count):
                server.table.add(_MANY_FROM + k, store.put(np.full(nbytes, k % 251, np.uint8)))
        except (FastrtError, OSError) as exc:
            sys.stdout.write(json.dumps({"error": str(exc)}) + "\n")
            return
        server.start()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=_sink, args=(listener, order["bytes"]), daemon=True).start()
        sys.stdout.write(
            json.dumps({"address": server.address, "native": server.native_address, "port": listener.getsockname()[1]})
            + "\n"
        )
        sys.stdout.flush()
        sys.stdin.readline()


def events_of(profile: Profile) -> Iterator[dict[str, Any]]:
    """The events in Chrome's trace format: a track for each path, with the parts inside each operation."""
    tracks = {path: k for k, path in enumerate(LIMITS)}
    began = min((start for _, _, start, _, _ in profile.events), default=0.0)
    title = {"ph": "M", "pid": 1, "ts": 0}
    yield {**title, "name": "process_name", "tid": 0, "args": {"name": "fastrt profile transfer"}}
    for path, track in tracks.items():
        yield {**title, "name": "thread_name", "tid": track, "args": {"name": path}}
        yield {**title, "name": "thread_sort_index", "tid": track, "args": {"sort_index": track}}
    for path, nbytes, start, seconds, parts in profile.events:
        at = round((start - began) * 1e9)
        length = round((start + seconds - began) * 1e9) - at
        args = {"bytes": nbytes, "GB_per_s": nbytes / seconds / 1e9}
        event = {"ph": "X", "pid": 1, "tid": tracks[path], "cat": "transfer"}
        name = f"{path} {size_name(nbytes)}"
        yield {**event, "name": name, "ts": micros(at), "dur": micros(length), "args": args}
        # Several threads together may spend more time than the operation took; its parts are scaled to fit into it.
        whole, done = max(sum(parts.values()), seconds), 0.0
        for name, part in parts.items():
            begin, done = min(length, int(done / whole * length)), done + part
            end = min(length, int(done / whole * length))
            yield {**event, "name": name, "ts": micros(at + begin), "dur": micros(end - begin), "args": {}}


def size_name(nbytes: int) -> str:
    """Write a size with the unit that fits: 65536 is "64 KiB"."""
    return size_text(nbytes).replace(".0 ", " ")
