"""The ring of TCP connections between the leaders of several nodes, and its operations on whole byte arrays.

all_reduce is the classic ring: in n - 1 steps each leader adds its slice to a received one and passes the sum on; in
n - 1 more steps the finished slices go round. Each slice is summed in one place in the order of the ring, so all
leaders get the same bits.

Before every operation the leaders pass round what they are about to do, and whether it has already failed on their
node. A leader that fails during the exchange sends a last frame with the reason, which the others pass on.
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
_PIECE_BYTES = 1 << 20  # received, reduced and passed on at a time, so that it stays in the cache
_INLINE_BYTES = 1 << 15  # fits into the buffers of any socket, so sending it needs no thread
_POISON = (1 << 64) - 1
_LAST_WORDS_S = 1.0
_WORD_BYTES_MAX = 1 << 20
_ERRORS: dict[str, type[FastrtError]] = {"timeout": CollectiveTimeout, "mismatch": CollectiveMismatch}


class Ring:
    """One leader's place in the ring.

    Args:
        index, count: this node's number, and the number of nodes.
        before, behind: connections to the leaders of the previous and the next node.
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
        self._sent: Future[None] | None = None  # the last send in the thread

    def close(self) -> None:
        """Close both connections."""
        self._before.close()
        self._behind.close()
        self._sender.shutdown(wait=False)

    # ---- agreement before an operation ----

    def agree(self, seq: int, what: str, error: FastrtError | None, deadline: float) -> None:
        """Pass round this node's operation, or why it failed here.

        Raises:
            CollectiveTimeout: not all leaders came in time, or not all ranks of a node.
            CollectiveMismatch: nodes, or ranks of a node, call different operations.
            PeerDied: a rank has ended.
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
                failure = unpack_error(one["error"])
                if isinstance(failure, PeerDied):
                    self.fail(failure)  # another leader may have no error yet, and wait for this one's part
                raise failure
        if len({one["what"] for one in seen}) > 1:
            story = "; ".join(f"rank {self._leaders[one['node']]} and its node: {one['what']}" for one in seen)
            raise CollectiveMismatch(f"operation {seq} is not the same on all nodes: {story}")

    def fail(self, error: FastrtError) -> None:
        """Send the others the reason why this leader stops during an operation; the ring is unusable afterwards."""
        if self._dead is None:
            self._dead = error if isinstance(error, PeerDied) else PeerDied(str(error), self._leaders[self.index])
            self.settle()  # a frame that the thread is sending must be complete
            try:
                self._behind.send(_POISON, json.dumps(pack_error(self._dead)).encode(), _LAST_WORDS_S)
            except (Broken, CollectiveTimeout):
                pass  # the next leader has ended too
            self._before.close()

    def settle(self) -> bool:
        """After a timeout: whether the next operation can use the connections. Leaders drop late frames of this one."""
        if self._sent is not None:
            try:
                self._sent.result(_LAST_WORDS_S)
            except (Broken, CollectiveTimeout, FutureTimeout):
                return False
        return self._before.usable and self._behind.usable

    def _gone(self, node: int) -> PeerDied:
        rank = self._leaders[node % self.count]
        return PeerDied(f"rank {rank}, the leader of its node, has ended; the others can continue with rebuild()", rank)

    def _hear(self, seq: int, deadline: float) -> dict[str, Any]:
        size = self._wait(seq, deadline)
        body = bytearray(size)
        self._before.receive(body, deadline)
        return read_object(body, "a message of the previous node", bytes_max=_WORD_BYTES_MAX)

    def _wait(self, seq: int, deadline: float) -> int:
        try:
            return self._before.wait(seq, deadline)
        except CollectiveTimeout:
            last = self._before.last_words(_POISON, deadline)
            if last is None:
                raise
            error = unpack_error(read_object(last, "the last message of the previous node", bytes_max=_WORD_BYTES_MAX))
            self.fail(error)  # passes it on to the next leader
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
        """Fill in the other leaders' parts; this leader's part is there."""
        for step in range(self.count - 1):
            sent = self._send(seq, parts[(self.index - step) % self.count], deadline)
            self._receive(seq, parts[(self.index - step - 1) % self.count], deadline)
            self._finish(sent, deadline)

    def broadcast(self, seq: int, data: Bytes, root: int, deadline: float) -> None:
        """Copy the root's bytes to all leaders, a piece at a time."""
        for at in range(0, data.size, _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            if self.index != root:
                self._receive(seq, piece, deadline)
            if (self.index + 1) % self.count != root:
                self._finish(self._send(seq, piece, deadline), deadline)

    def _send(self, seq: int, data: Bytes, deadline: float) -> Future[None] | None:
        """Send; in the background if the receiver may have to read first, since it may be sending too."""
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
        """Receive a frame into an array, or combine it with the array's contents, the received data first."""
        try:
            size = self._wait(seq, deadline)
            if size != into.size:
                raise CollectiveMismatch(f"{size} bytes came from the previous node, but {into.size} were expected")
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
    """Convert a failure of an operation to plain data."""
    if error is None:
        return None
    if isinstance(error, PeerDied):
        return {"kind": "died", "text": str(error), "rank": error.rank}
    return {"kind": "mismatch" if isinstance(error, CollectiveMismatch) else "timeout", "text": str(error)}


def unpack_error(error: dict[str, Any]) -> FastrtError:
    """Make an exception from the result of `pack_error`.

    Raises:
        ForeignTextError: the data have another form.
    """
    check_object(error, "a failure of another node", {"kind": str, "text": str})
    if error["kind"] == "died":
        check_object(error, "a failure of another node", {"rank": int})
        return PeerDied(error["text"], error["rank"])
    return _ERRORS.get(error["kind"], CollectiveTimeout)(error["text"])
