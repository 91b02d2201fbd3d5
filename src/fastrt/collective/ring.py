"""The leaders of several nodes in a ring of TCP connections: what their operations do with whole arrays of bytes.

all_reduce is the classic ring: in n - 1 steps each leader passes on a slice that it has added its own to, in n - 1 more
the finished slices go round. Each slice is summed in one place in the order of the ring, so all get the same bits.

Before every operation the leaders pass round what they are about to do, and whether it has failed on their node
already. A leader that fails in the middle sends a last frame that says why, which the others pass on.
"""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from fastrt._core.collective.reduce import reduce_buffers
from fastrt.collective.frames import Broken, Frames
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, FastrtError, PeerDied
from fastrt.foreign_text import check_object, read_object

Bytes = np.ndarray[Any, Any]
_PIECE_BYTES = 1 << 20  # received, reduced and passed on at a time: it stays in the cache
_INLINE_BYTES = 1 << 15  # so much fits into the buffers of any socket: no thread is needed to send it
_POISON = (1 << 64) - 1
_LAST_WORDS_S = 1.0
_WORD_BYTES_MAX = 1 << 20
_ERRORS: dict[str, type[FastrtError]] = {"timeout": CollectiveTimeout, "mismatch": CollectiveMismatch}


class Ring:
    """One leader's place in the ring.

    Args:
        index, count: which node of how many this is.
        before, behind: connections to the leaders of the nodes on both sides.
        leaders: the rank of each node's leader.
    """

    def __init__(self, index: int, count: int, before: Frames, behind: Frames, leaders: list[int]) -> None:
        self.index = index
        self.count = count
        self._before = before
        self._behind = behind
        self._leaders = leaders
        self._sender = ThreadPoolExecutor(1, "fastrt-ring")
        self._scratch = np.empty(_PIECE_BYTES, np.uint8)
        self._dead: PeerDied | None = None
        self._sent: Future[None] | None = None  # what the thread is sending

    def close(self) -> None:
        """Close both connections."""
        self._before.close()
        self._behind.close()
        self._sender.shutdown(wait=False)

    # ---- what the nodes are about to do ----

    def agree(self, seq: int, what: str, error: FastrtError | None, deadline: float) -> None:
        """Pass round what this node does in an operation, or why it cannot.

        Raises:
            CollectiveTimeout: not all leaders came in time, or ranks of a node did not.
            CollectiveMismatch: nodes do different things, or ranks of a node do.
            PeerDied: a rank is gone.
        """
        if self._dead is not None:
            raise self._dead
        carried: dict[str, Any] = {"node": self.index, "what": what, "error": pack_error(error)}
        seen = [carried]
        for _ in range(self.count - 1):
            try:
                self._behind.send(seq, json.dumps(carried).encode(), max(deadline - time.monotonic(), 0.01))
            except Broken:
                seen.append({"error": pack_error(self._gone(self.index + 1))})
            try:
                carried = self._hear(seq, deadline)
            except Broken:
                carried = {"error": pack_error(self._gone(self.index - 1))}
            seen.append(carried)
        for one in seen:
            if one["error"]:
                told = unpack_error(one["error"])
                if isinstance(told, PeerDied):
                    self.fail(told)  # another leader may have heard all that it had to, and wait for our part
                raise told
        if len({one["what"] for one in seen}) > 1:
            story = "; ".join(f"rank {self._leaders[one['node']]} and its node: {one['what']}" for one in seen)
            raise CollectiveMismatch(f"operation {seq} is not the same on all nodes: {story}")

    def fail(self, error: FastrtError) -> None:
        """Tell the others why this leader breaks off in the middle of an operation; the ring is of no use then."""
        if self._dead is None:
            self._dead = error if isinstance(error, PeerDied) else PeerDied(str(error), self._leaders[self.index])
            self.settle()  # not into the middle of what the thread is sending
            try:
                self._behind.send(_POISON, json.dumps(pack_error(self._dead)).encode(), _LAST_WORDS_S)
            except (Broken, CollectiveTimeout):
                pass  # it is gone itself
            self._before.close()

    def settle(self) -> bool:
        """After a time that ran out: whether the next operation can use the connections; the rest of this one's frames
        is thrown away by whoever receives them."""
        if self._sent is not None:
            try:
                self._sent.result(_LAST_WORDS_S)
            except (Broken, CollectiveTimeout, FutureTimeout):
                return False
        return self._before.usable and self._behind.usable

    def _gone(self, node: int) -> PeerDied:
        rank = self._leaders[node % self.count]
        return PeerDied(f"rank {rank}, which leads its node, has ended; the others go on with rebuild()", rank)

    def _hear(self, seq: int, deadline: float) -> dict[str, Any]:
        size = self._wait(seq, deadline)
        body = bytearray(size)
        self._before.receive(body, deadline)
        return read_object(body, "the word of the node before", bytes_max=_WORD_BYTES_MAX)

    def _wait(self, seq: int, deadline: float) -> int:
        try:
            return self._before.wait(seq, deadline)
        except CollectiveTimeout:
            last = self._before.last_words(_POISON, deadline)
            if last is None:
                raise
            error = unpack_error(read_object(last, "the last word of the node before", bytes_max=_WORD_BYTES_MAX))
            self.fail(error)  # the next one has to hear of it, too
            raise error from None

    # ---- operations on bytes ----

    def all_reduce(self, seq: int, data: Bytes, dtype: str, op: str, deadline: float) -> None:
        """Combine the leaders' arrays in place."""
        item = np.dtype("u2" if dtype == "bfloat16" else dtype).itemsize
        elements = data.size // item
        cuts = [elements * k // self.count * item for k in range(self.count + 1)]
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        for step in range(self.count - 1):
            sent = self._send(seq, parts[(self.index - step) % self.count], deadline)
            self._receive(seq, parts[(self.index - step - 1) % self.count], deadline, (op, dtype))
            self._finish(sent, deadline)
        for step in range(self.count - 1):
            sent = self._send(seq, parts[(self.index + 1 - step) % self.count], deadline)
            self._receive(seq, parts[(self.index - step) % self.count], deadline)
            self._finish(sent, deadline)

    def all_gather(self, seq: int, parts: list[Bytes], deadline: float) -> None:
        """Fill in the other leaders' parts; one's own is there."""
        for step in range(self.count - 1):
            sent = self._send(seq, parts[(self.index - step) % self.count], deadline)
            self._receive(seq, parts[(self.index - step - 1) % self.count], deadline)
            self._finish(sent, deadline)

    def broadcast(self, seq: int, data: Bytes, root: int, deadline: float) -> None:
        """Bring the root's bytes to all leaders, a piece at a time."""
        for at in range(0, data.size, _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            if self.index != root:
                self._receive(seq, piece, deadline)
            if (self.index + 1) % self.count != root:
                self._finish(self._send(seq, piece, deadline), deadline)

    def _send(self, seq: int, data: Bytes, deadline: float) -> Future[None] | None:
        """Send in the background what may have to wait for the receiver, which may be sending, too."""
        left = max(deadline - time.monotonic(), 0.01)
        if data.size > _INLINE_BYTES:
            self._sent = self._sender.submit(self._behind.send, seq, data, left)
            return self._sent
        try:
            self._behind.send(seq, data, left)
        except Broken:
            raise self._gone(self.index + 1) from None
        return None

    def _finish(self, sent: Future[None] | None, deadline: float) -> None:
        if sent is not None:
            try:
                sent.result(max(deadline - time.monotonic(), 0.01) + _LAST_WORDS_S)
            except Broken:
                raise self._gone(self.index + 1) from None

    def _receive(self, seq: int, into: Bytes, deadline: float, combine: tuple[str, str] | None = None) -> None:
        """Receive a frame into an array, or combine it with what is there, the received one first."""
        try:
            size = self._wait(seq, deadline)
            if size != into.size:
                raise CollectiveMismatch(f"{size} bytes came from the node before, {into.size} were expected")
            for at in range(0, size, _PIECE_BYTES):
                piece = into[at : at + _PIECE_BYTES]
                if combine is None:
                    self._before.receive(piece, deadline)
                else:
                    came = self._scratch[: piece.size]
                    self._before.receive(came, deadline)
                    reduce_buffers(combine[0], combine[1], piece, [came, piece])
        except Broken:
            raise self._gone(self.index - 1) from None


def pack_error(error: FastrtError | None) -> dict[str, Any] | None:
    """Turn a failure of an operation into plain data."""
    if error is None:
        return None
    if isinstance(error, PeerDied):
        return {"kind": "died", "text": str(error), "rank": error.rank}
    return {"kind": "mismatch" if isinstance(error, CollectiveMismatch) else "timeout", "text": str(error)}


def unpack_error(error: dict[str, Any]) -> FastrtError:
    """Make the failure that `pack_error` was given.

    Raises:
        ForeignTextError: these are other data.
    """
    check_object(error, "a failure of another node", {"kind": str, "text": str})
    if error["kind"] == "died":
        check_object(error, "a failure of another node", {"rank": int})
        return PeerDied(error["text"], error["rank"])
    return _ERRORS.get(error["kind"], CollectiveTimeout)(error["text"])
