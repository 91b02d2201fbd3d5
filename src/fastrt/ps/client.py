"""One worker's connection to a cluster: the directory of tables, requests to several servers at once, and retries.

The head's directory decides which part of an operation goes to which server. If a server is lost, or parts have moved,
the client fetches the directory again, and plans and sends the whole operation again under the same number, by which
servers recognise the parts that they have done already.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastrt._core.tables.embedding import EmbeddingMemory
from fastrt._core.tables.versions import Versions
from fastrt.errors import ForkedRuntimeError, NotInitializedError
from fastrt.membership.client import ClusterMember
from fastrt.membership.events import Role
from fastrt.membership.options import MemberEvent, MemberOptions
from fastrt.net.grpc.trust import trust_of
from fastrt.ps.errors import ServerLostError, TableTimeoutError
from fastrt.ps.remote_errors import raise_refusal
from fastrt.ps.spec import Spec
from fastrt.ps.wire import VERSION, BrokenWireError, Meta, Wire, dial

_DIAL_S = 10.0
_RETRY_S = 0.02
_GRACE_S = 10.0  # added to a server's timeout, so that the server's error arrives first
_LANE_BYTES_MIN = 1 << 12
Array = np.ndarray[Any, Any]
Callback = Callable[[MemberEvent | int], None]


@dataclass
class Opened:
    """A table's parts at one server, from this process's point of view."""

    parts: list[int]
    reader: int
    memory: Versions | EmbeddingMemory | None
    floor: int
    clock: int
    slowest: int
    epoch: int
    # Identifies this object for caches: `id` may be reused after a server and its memory here were replaced.
    serial: int = field(default_factory=itertools.count().__next__)


@dataclass(eq=False)
class Link:
    """A connection to one server."""

    wire: Wire
    incarnation: str
    opened: dict[str, Opened] = field(default_factory=dict)
    lane: mmap.mmap | None = None

    def close(self) -> None:
        """Close the connection; arrays that were pulled through it stay valid."""
        self.wire.close()


@dataclass
class Request:
    """A request to one server.

    Attributes:
        meta: its JSON part.
        pieces: arrays whose bytes follow, one after the other.
        into: given the answer's meta and data size, returns the buffer for the data.
    """

    meta: Meta
    pieces: Sequence[Array] = ()
    into: Callable[[Meta, int], Any] | None = None


@dataclass
class Directory:
    """Servers, tables and owners of parts at one epoch."""

    epoch: int
    servers: dict[int, dict[str, Any]]
    tables: dict[str, tuple[Spec, list[int]]]


Plan = Callable[[Directory], dict[int, Request]]
Replies = dict[int, tuple[Meta, Any, list[int]]]


class Session:
    """A worker's connection to a cluster. Calls of several threads run one after the other.

    Args:
        address: the head's address.
        token: the cluster's.
        timeout_s: default time limit of an operation.
        insecure: whether the cluster was started without encryption.

    Attributes:
        member: this worker's membership, once joined.
        rank: this worker's number, once joined.

    Raises:
        ServerLostError: no process of this cluster answers.
        ConfigError: the token is damaged.
    """

    def __init__(self, address: str, token: str, timeout_s: float = 60.0, insecure: bool = False) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._trust = trust_of(token, insecure)
        self.member: ClusterMember | None = None
        self.lock = threading.RLock()
        self.callbacks: list[Callback] = []
        self._client = secrets.randbits(62) + 1
        self._number = 0
        self._rounds = 0
        self._rank: int | None = None
        self._links: dict[int, Link] = {}
        self._pid = os.getpid()
        self._closed = False
        try:
            self._head = dial(None, address, self._trust, _DIAL_S)
            self._scheduler = str(self._greet(self._head)["scheduler"])
        except BrokenWireError as error:
            raise ServerLostError(f"no cluster answers at {address}: {error}") from None
        try:
            self.directory = self.refresh(0, 0.0)
        except BaseException:
            self._head.close()
            raise

    def close(self) -> None:
        """Leave the cluster."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            for link in self._links.values():
                try:
                    link.wire.call({"op": "bye"}, timeout_s=1.0)
                except (BrokenWireError, TimeoutError):
                    pass
                link.close()
            self._links.clear()
            self._head.close()
            if self.member is not None:
                self.member.close()  # another worker may take its rank

    @property
    def rank(self) -> int:
        """This worker's number. The first use joins the cluster and waits for all workers.

        Raises:
            TableTimeoutError: a worker did not join in time.
        """
        with self.lock:
            if self._rank is None:
                self.join()
            assert self._rank is not None
            return self._rank

    def join(self) -> ClusterMember:
        """Become a worker of the cluster, and wait until all workers have joined.

        Raises:
            FastrtError: this worker is refused, or the others do not join in time.
        """
        with self.lock:
            self.require()
            if self.member is None:
                options = MemberOptions(
                    self._scheduler,
                    host=self._head.local_host,
                    on_event=self._notify,
                    on_message=self._notify,
                    token=self._trust.token,
                )
                member = ClusterMember(Role.WORKER, options)
                member.start()
                self.member = member
            if self._rank is None:
                self._rank = self.member.wait_ready(self.timeout_s)
            return self.member

    def _notify(self, what: MemberEvent | int) -> None:
        for callback in list(self.callbacks):
            callback(what)

    def require(self) -> None:
        """Check that this connection can be used.

        Raises:
            ForkedRuntimeError: this process was forked from the one that connected.
            NotInitializedError: the connection is closed.
        """
        if os.getpid() != self._pid:
            raise ForkedRuntimeError("parameter tables cannot be used in a forked child: connect again in the child")
        if self._closed:
            raise NotInitializedError("the connection to the parameter servers is closed")

    def next_number(self) -> int:
        """Number for the next push."""
        self._number += 1
        return self._number

    # ---- the head ----

    def ask(self, meta: Meta, pieces: Sequence[Any] = (), timeout_s: float | None = None) -> Meta:
        """Send a request to the head and return its answer.

        Raises:
            ServerLostError: the head has ended.
            TableTimeoutError: the head does not answer in time.
        """
        with self.lock:
            self.require()
            limit = self.timeout_s if timeout_s is None else timeout_s
            try:
                answer = self._ask_once(meta, pieces, limit)
            except BrokenWireError:
                # An interrupt or a timeout ended the connection. The head handles repeated requests.
                try:
                    self._head = dial(None, self.address, self._trust, _DIAL_S)
                    self._greet(self._head)
                    answer = self._ask_once(meta, pieces, limit)
                except BrokenWireError as error:
                    raise ServerLostError(f"the process that started the servers has ended: {error}") from None
            raise_refusal(answer)
            return answer

    def _ask_once(self, meta: Meta, pieces: Sequence[Any], limit: float) -> Meta:
        done = False
        try:
            answer: Meta = self._head.call(meta, pieces, timeout_s=limit + _GRACE_S)[0]
            done = True
        except TimeoutError:
            raise TableTimeoutError(f"the head of the cluster did not answer within {limit:g} s") from None
        finally:
            if not done:
                self._head.close()
        return answer

    def refresh(self, after: int, timeout_s: float) -> Directory:
        """Fetch the directory; waits this long for one that is newer than an epoch.

        Raises:
            ServerLostError: the cluster has given up its servers.
        """
        found = self.ask({"op": "directory", "after": after, "timeout": timeout_s})
        if found["failed"] is not None:
            raise ServerLostError(str(found["failed"]))
        tables = {name: (Spec.from_json(one["spec"]), one["owners"]) for name, one in found["tables"].items()}
        servers = {int(index): place for index, place in found["servers"].items()}
        self.directory = Directory(found["epoch"], servers, tables)
        return self.directory

    def barrier(self, timeout_s: float) -> None:
        """Wait for all workers. A failed call does not count as present: the next call joins the same round."""
        with self.lock:
            meta = {"op": "barrier", "rank": self.rank, "round": self._rounds + 1, "timeout": timeout_s}
            self.ask(meta, timeout_s=timeout_s)
            self._rounds += 1

    # ---- servers ----

    def exchange(self, plan: Plan, timeout_s: float) -> Replies:
        """Send requests to several servers at once, and repeat them until each server has answered.

        Args:
            plan: makes the requests by server; called again with a newer directory if parts have moved.
            timeout_s: for the whole exchange.
        Returns:
            By server: the answer's JSON, data and descriptors; the caller owns the descriptors.
        Raises:
            TableTimeoutError: a server did not answer in time.
            ServerLostError: a server is lost for good.
            FastrtError: the error that a server returned.
        """
        until = time.monotonic() + timeout_s
        with self.lock:
            self.require()
            while True:
                directory = self.directory
                try:
                    return self._exchange_once(plan(directory), directory, until)
                except _Again as again:
                    if time.monotonic() > until:
                        raise TableTimeoutError(f"no answer within {timeout_s:g} s: {again}") from None
                    if again.moved:
                        self.refresh(directory.epoch, min(1.0, max(0.0, until - time.monotonic())))
                    else:
                        time.sleep(_RETRY_S)
                        self.refresh(0, 0.0)

    def _exchange_once(self, requests: dict[int, Request], directory: Directory, until: float) -> Replies:
        """Send each request once. Receives all answers, also after one that asks for a repetition.

        A connection whose answer was not received cannot be used any more, and is closed.
        """
        open_ones: dict[int, Link] = {}
        found: Replies = {}
        broken = ""
        try:
            for index, request in requests.items():
                try:
                    open_ones[index] = self.link(index, directory)
                    self._send(open_ones[index], request)
                except BrokenWireError as error:
                    broken = f"server {index}: {error}"
                    self._drop(index)
                    open_ones.pop(index, None)
            for index in list(open_ones):
                try:
                    left = max(0.0, until - time.monotonic()) + _GRACE_S
                    found[index] = open_ones[index].wire.answer(left, requests[index].into)
                except BrokenWireError as error:
                    broken = f"server {index}: {error}"
                    self._drop(index)
                except TimeoutError:
                    raise TableTimeoutError(f"server {index} did not answer in time") from None
                open_ones.pop(index)
        finally:
            for index in open_ones:
                self._drop(index)
        return self._sorted_out(found, broken)

    def _sorted_out(self, found: Replies, broken: str) -> Replies:
        """Return the answers if all are good, else raise."""
        moved = [meta["text"] for meta, _, _ in found.values() if meta.get("error") == "MovedError"]
        refused = [meta for meta, _, _ in found.values() if "error" in meta and meta["error"] != "MovedError"]
        if not (broken or moved or refused):
            return found
        for _, _, fds in found.values():
            for fd in fds:
                os.close(fd)
        if broken or moved:
            raise _Again(broken or moved[0], moved=not broken)
        raise_refusal(refused[0])
        return found

    def link(self, index: int, directory: Directory) -> Link:
        """The connection to a server, opened at the first use.

        Raises:
            BrokenWireError: no process answers there.
        """
        found = self._links.get(index)
        if found is None:
            place = directory.servers.get(index)
            if place is None:
                raise BrokenWireError(f"server {index} is not in the directory")
            wire = dial(place["unix"], place["address"], self._trust, _DIAL_S)
            found = self._links[index] = Link(wire, str(self._greet(wire)["incarnation"]))
        return found

    def _greet(self, wire: Wire) -> Meta:
        try:
            hello = {"version": VERSION, "client": self._client}
            answer: Meta = wire.call(hello, timeout_s=_DIAL_S)[0]
            raise_refusal(answer)
        except TimeoutError as error:
            raise BrokenWireError(str(error)) from None
        except BaseException:
            wire.close()
            raise
        return answer

    def _drop(self, index: int) -> None:
        link = self._links.pop(index, None)
        if link is not None:
            link.close()

    def _send(self, link: Link, request: Request) -> None:
        nbytes = sum(piece.nbytes for piece in request.pieces)
        if not link.wire.is_local or nbytes < _LANE_BYTES_MIN:
            link.wire.send(request.meta, request.pieces)
            return
        lane, at = self._lane(link, nbytes), 0
        for piece in request.pieces:
            np.copyto(np.frombuffer(lane, np.uint8, piece.nbytes, at), np.frombuffer(piece, np.uint8))
            at += piece.nbytes
        link.wire.send({**request.meta, "lane": nbytes})

    def _lane(self, link: Link, nbytes: int) -> mmap.mmap:
        """Shared memory through which the server reads pushes; replaced by a larger one when it is too small."""
        if link.lane is None or len(link.lane) < nbytes:
            size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            fd = os.memfd_create("fastrt-ps-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                lane = mmap.mmap(fd, size)
                answer = link.wire.call({"op": "lane"}, fds=[fd], timeout_s=_DIAL_S)[0]
            except TimeoutError as error:
                raise BrokenWireError(str(error)) from None
            finally:
                os.close(fd)
            raise_refusal(answer)
            link.lane = lane
        return link.lane

    def opened(self, name: str, timeout_s: float) -> dict[int, Opened]:
        """A table's parts at each server; requested from servers where this process does not know them yet."""
        rank = self.rank

        def plan(directory: Directory) -> dict[int, Request]:
            owners = set(directory.tables[name][1])
            meta = {"op": "open", "table": name, "epoch": directory.epoch, "rank": rank}
            return {index: Request(meta) for index in sorted(owners) if not self._knows(index, name, directory)}

        with self.lock:
            while True:
                replies = self.exchange(plan, timeout_s)
                directory = self.directory
                for index, (meta, _, fds) in replies.items():
                    memory = _attach(directory.tables[name][0], fds)
                    state = (meta["floor"], meta["clock"], meta["slowest"], directory.epoch)
                    self._links[index].opened[name] = Opened(meta["parts"], meta["reader"], memory, *state)
                owners = sorted(set(directory.tables[name][1]))
                if all(self._knows(index, name, directory) for index in owners):
                    return {index: self._links[index].opened[name] for index in owners}

    def _knows(self, index: int, name: str, directory: Directory) -> bool:
        link = self._links.get(index)
        if link is None or not link.wire.is_idle():
            self._drop(index)  # its memory shows an old state; a new process owns the parts by now
            return False
        known = link.opened.get(name)
        return known is not None and known.epoch == directory.epoch

    def note(self, name: str, replies: Replies) -> None:
        """Note the table's progress from the servers' answers."""
        for index, (meta, _, _) in replies.items():
            link = self._links.get(index)
            if link is not None and name in link.opened:
                known = link.opened[name]
                known.floor, known.clock, known.slowest = meta["floor"], meta["clock"], meta["slowest"]


class _Again(Exception):
    """An operation must be planned and sent again."""

    def __init__(self, why: str, moved: bool) -> None:
        super().__init__(why)
        self.moved = moved


def _attach(spec: Spec, fds: list[int]) -> Versions | EmbeddingMemory | None:
    if not fds:
        return None
    try:
        return Versions.attach(fds[0]) if spec.kind == "dense" else EmbeddingMemory.attach(fds[0])
    except BaseException:
        os.close(fds[0])
        raise
