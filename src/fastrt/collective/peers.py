"""Connections between single ranks of different nodes: opened at the first use, one for each direction.

A thread accepts the callers of this rank's listener: two ranks may call each other at the same time, and a rank that
computes must not delay its callers. The thread sleeps without callers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

import numpy as np

from fastrt.collective.frames import Broken, Frames, has_ended
from fastrt.collective.greetings import Greetings, NotAdmitted, dial
from fastrt.collective.handles import Handle
from fastrt.collective.tcp_rendezvous import Assembled
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied
from fastrt.foreign_text import ForeignTextError, check_object
from fastrt.net.background import Line
from fastrt.net.grpc.sealed import BULK_BYTES, Link

_LOOK_S = 0.5  # interval of checks whether a rank that does not connect is alive
_RETRY_S = 0.05
_TAG = struct.Struct("<q")


class Peers:
    """This rank's connections.

    Args:
        assembled: addresses of all ranks, and this rank's listener.
        rank: this process's number.
        others: the ranks that connections are possible with.
        name: the group's name, for the thread.
    """

    def __init__(self, assembled: Assembled, rank: int, others: list[int], name: str) -> None:
        self._assembled = assembled
        self._rank = rank
        self._others = set(others)
        self._listener = assembled.listener
        self._purpose = f"fastrt collective link {assembled.group_id}"
        self._came = threading.Condition()
        self._waiting: dict[tuple[int, str], Frames] = {}  # accepted connections that are not used yet
        self._closed = False
        self._frames: dict[tuple[str, int], Frames] = {}
        self._aside: dict[int, list[tuple[int, bytes]]] = {}
        self._lines: dict[tuple[str, int], Line] = {}
        self._door: threading.Thread | None = None
        if others:
            greetings = Greetings(self._listener, assembled.access, self._purpose, BULK_BYTES)
            self._door = threading.Thread(target=self._take_callers, args=(greetings,), name=f"fastrt-{name}-door")
            self._door.daemon = True
            self._door.start()

    def close(self) -> None:
        """Close everything and wake all threads that wait."""
        for line in self._lines.values():
            line.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._door is not None:
            self._door.join()
        self._listener.close()
        with self._came:
            self._closed = True
            self._came.notify_all()
            open_ones = [*self._frames.values(), *self._waiting.values()]
        for frames in open_ones:
            frames.close()

    def connect(self, rank: int, use: str, deadline: float) -> Frames:
        """Connect to a rank.

        Raises:
            PeerDied: no process listens there any more.
            CollectiveTimeout: the rank did not answer in time.
        """
        place = self._assembled.places[rank]
        where = f"rank {rank} at {place.host}:{place.port}"
        greeting = {"rank": self._rank, "use": use}
        while True:
            left = max(deadline - time.monotonic(), 0.01)
            try:
                access, where_to = self._assembled.access, (place.host, place.port)
                return Frames(dial(where_to, access, self._purpose, greeting, left, BULK_BYTES))
            except TimeoutError:
                raise CollectiveTimeout(f"{where} did not answer in time") from None
            except NotAdmitted as error:
                if time.monotonic() > deadline:
                    raise PeerDied(f"{where} has ended: {error}", rank) from None
                time.sleep(_RETRY_S)  # strangers may occupy its places; if it has ended, the next try fails
            except OSError as error:
                raise PeerDied(f"{where} has ended: {error}", rank) from None

    def accept(self, rank: int, use: str, deadline: float) -> Frames:
        """Wait for a rank to connect.

        Raises:
            CollectiveTimeout: it did not connect in time.
            PeerDied: its process has ended.
        """
        place = self._assembled.places[rank]
        while True:
            with self._came:
                left = min(deadline - time.monotonic(), _LOOK_S)
                self._came.wait_for(lambda: (rank, use) in self._waiting or self._closed, max(left, 0.0))
                if (rank, use) in self._waiting:
                    return self._waiting.pop((rank, use))
                if self._closed:
                    raise Broken("the group is destroyed")
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"rank {rank} did not connect in time")
            if has_ended((place.host, place.port)):
                raise PeerDied(f"rank {rank} at {place.host}:{place.port} has ended", rank)

    def _take_callers(self, greetings: Greetings) -> None:
        """Accept callers until the listener is shut down; runs in the thread."""
        try:
            while True:
                for link, greeting in greetings.wait(None):
                    self._take(link, greeting)
        except EOFError:
            pass
        finally:
            greetings.close()

    def _take(self, link: Link, greeting: dict[str, Any]) -> None:
        try:
            check_object(greeting, "a rank's greeting", {"rank": int, "use": str})
            if greeting["rank"] not in self._others:
                raise ForeignTextError(f"rank {greeting['rank']} may not connect to this one")
            frames = Frames(link)
        except (OSError, ForeignTextError):
            link.close()
            return
        with self._came:
            old = self._waiting.pop((greeting["rank"], greeting["use"]), None)
            self._waiting[greeting["rank"], greeting["use"]] = frames
            self._came.notify_all()
        if old is not None:
            old.close()

    # ---- messages ----

    def run(
        self, async_op: bool, what: str, data: np.ndarray[Any, Any], peer: int, tag: int, patience: float, result: Any
    ) -> Any:
        """Send or receive, in the background or now, in order with the operations in the background.

        Raises:
            ValueError: there is no such rank.
        """
        if peer not in self._others:
            raise ValueError(f"rank {self._rank} cannot exchange messages with rank {peer}, which does not exist")
        key = (what, peer)
        if not async_op and key not in self._lines:
            return self._now(what, data, peer, tag, patience, result)
        if key not in self._lines:
            self._lines[key] = Line(f"fastrt-{what}-{peer}", Handle)
        handle = self._lines[key].submit(self._now, what, data, peer, tag, patience, result)
        return handle if async_op else handle.wait()

    def _now(self, what: str, data: np.ndarray[Any, Any], peer: int, tag: int, patience: float, result: Any) -> Any:
        deadline = time.monotonic() + patience
        try:
            if what == "send":
                frames = self._get("send", peer, deadline)
                frames.send(0, _TAG.pack(tag), patience)
                frames.send(0, data, patience)
            else:
                self._receive(data, peer, tag, deadline)
        except Broken:
            raise PeerDied(f"rank {peer} has ended", peer) from None
        return result

    def _get(self, what: str, peer: int, deadline: float) -> Frames:
        key = (what, peer)
        if key not in self._frames:
            made = (self.connect if what == "send" else self.accept)(peer, "message", deadline)
            with self._came:
                self._frames[key] = made
                if self._closed:  # meanwhile, in another thread
                    made.close()
        return self._frames[key]

    def _receive(self, data: np.ndarray[Any, Any], peer: int, tag: int, deadline: float) -> None:
        kept = self._aside.setdefault(peer, [])
        while True:
            for k, (its_tag, body) in enumerate(kept):
                if its_tag == tag:
                    if len(body) != data.size:
                        raise CollectiveMismatch(
                            f"rank {peer} sent {len(body)} bytes with tag {tag}; the array has {data.size}"
                        )
                    data[:] = np.frombuffer(body, np.uint8)
                    del kept[k]
                    return
            frames = self._get("recv", peer, deadline)
            head = bytearray(frames.wait(0, deadline))
            frames.receive(head, deadline)
            size = frames.wait(0, deadline)
            (its_tag,) = _TAG.unpack(head)
            if its_tag == tag and size == data.size:
                frames.receive(data, deadline)
                return
            other = bytearray(size)
            frames.receive(other, deadline)
            kept.append((its_tag, bytes(other)))
