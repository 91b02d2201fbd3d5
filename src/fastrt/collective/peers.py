"""Connections between single ranks of different nodes: made when first needed, one for each direction."""

from __future__ import annotations

import hmac
import json
import struct
import threading
import time
from typing import Any

import numpy as np

from fastrt.collective.assembly import Assembled
from fastrt.collective.frames import Broken, Frames, dial, has_ended
from fastrt.collective.greetings import Greetings
from fastrt.collective.handles import Line
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied

_LOOK_S = 0.5  # how often a rank that does not connect is looked at
_TAG = struct.Struct("<q")


class Peers:
    """This rank's connections.

    Args:
        assembled: where everybody is.
        rank: this process's number.
        others: the ranks that it may have connections with.
    """

    def __init__(self, assembled: Assembled, rank: int, others: list[int]) -> None:
        self._assembled = assembled
        self._rank = rank
        self._others = set(others)
        self._listener = assembled.listener
        self._greetings = Greetings(self._listener)
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, str], Frames] = {}  # accepted for somebody else than who did
        self._frames: dict[tuple[str, int], Frames] = {}
        self._aside: dict[int, list[tuple[int, bytes]]] = {}
        self._lines: dict[tuple[str, int], Line] = {}

    def close(self) -> None:
        """Close everything; whoever waits is woken."""
        for line in self._lines.values():
            line.close()
        for frames in [*self._frames.values(), *self._waiting.values()]:
            frames.close()
        self._greetings.close()
        self._listener.close()

    def connect(self, rank: int, use: str, deadline: float) -> Frames:
        """Connect to a rank.

        Raises:
            PeerDied: nobody listens there any more.
            CollectiveTimeout: it did not answer in time.
        """
        place = self._assembled.places[rank]
        hello = json.dumps({"token": self._assembled.token, "rank": self._rank, "use": use}).encode()
        try:
            return Frames(dial((place.host, place.port), hello, max(deadline - time.monotonic(), 0.01)))
        except TimeoutError:
            raise CollectiveTimeout(f"rank {rank} at {place.host}:{place.port} did not answer in time") from None
        except OSError as error:
            raise PeerDied(f"rank {rank} at {place.host}:{place.port} has ended: {error}", rank) from None

    def accept(self, rank: int, use: str, deadline: float) -> Frames:
        """Wait for a rank to connect.

        Raises:
            CollectiveTimeout: it did not in time.
            PeerDied: it has ended.
        """
        place = self._assembled.places[rank]
        look_at = time.monotonic() + _LOOK_S
        while True:
            with self._lock:  # several threads may wait for different ranks: each takes its turn at the listener
                if (rank, use) in self._waiting:
                    return self._waiting.pop((rank, use))
                self._accept_one()
            now = time.monotonic()
            if now > deadline:
                raise CollectiveTimeout(f"rank {rank} did not connect in time")
            if now > look_at:
                if has_ended((place.host, place.port)):
                    raise PeerDied(f"rank {rank} at {place.host}:{place.port} has ended", rank)
                look_at = time.monotonic() + _LOOK_S

    def _accept_one(self) -> None:
        for sock, line in self._greetings.wait(0.05):
            try:
                hello = json.loads(line)
                if hmac.compare_digest(hello["token"], self._assembled.token) and hello["rank"] in self._others:
                    self._waiting[hello["rank"], hello["use"]] = Frames(sock)
                    continue
            except (OSError, ValueError, KeyError, TypeError):
                pass
            sock.close()  # a stranger

    # ---- messages ----

    def run(
        self, async_op: bool, what: str, data: np.ndarray[Any, Any], peer: int, tag: int, patience: float, result: Any
    ) -> Any:
        """Send or receive, in the background or now, in order with what is in the background already.

        Raises:
            ValueError: there is no such rank.
        """
        if peer not in self._others:
            raise ValueError(f"a message from rank {self._rank} to or from rank {peer}, which does not exist")
        key = (what, peer)
        if not async_op and key not in self._lines:
            return self._now(what, data, peer, tag, patience, result)
        if key not in self._lines:
            self._lines[key] = Line(f"fastrt-{what}-{peer}")
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
            make = self.connect if what == "send" else self.accept
            self._frames[key] = make(peer, "message", deadline)
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
