"""Functions and actor classes that two nodes have sent each other over one stream.

A function is sent once, before the first task that names it by its digest; the receiver holds a reference to it. When
the sender's node has dropped the function, no task can name it any more: the sender sends `forget`, and the receiver
releases its reference. The receiving node then removes the function as soon as no task or actor there uses it. The
receiver counts how often it received a digest, because one frame may forget a function and bring it again.
"""

from __future__ import annotations

from typing import Any

from fastrt._core.objects import functions, handles
from fastrt.cluster.outbox import Outgoing
from fastrt.cluster.references import References
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks.functions import digest_of

_Function = message_set("node").message("fastrt.node.Function")


class SentFunctions:
    """The functions that were sent over one stream, in both directions.

    Args:
        store: this process's attachment.
        references: the exports and imports of the stream.
        out: the queue of messages to the peer.
    """

    def __init__(self, store: Store, references: References, out: Outgoing) -> None:
        self._store = store
        self._client = store.client
        self._references = references
        self._out = out
        self._sent: dict[int, tuple[int, bytes]] = {}  # index and digest by objref
        self._received: dict[bytes, tuple[ObjectRef, int]] = {}  # and how often it was received

    def send(self, objref: int, index: int) -> bytes:
        """Send a function unless the peer has it; return its digest.

        Raises:
            FastrtError: the function cannot be read.
        """
        if objref not in self._sent:
            ref = handles.acquire(self._client, objref, index)
            kind, _, data = self._store.read(ref)
            inner = handles.contained(self._client, ref)
            digest = digest_of(self._client.segment.session, data, inner)
            contains = [self._references.name(one) for one in inner]
            name = functions.function_name(self._client, objref)
            message = _Function(digest=digest, name=name, kind=kind, value=bytes(data), contains=contains)
            self._out.add("function", message, len(data))
            self._sent[objref] = index, digest
        return self._sent[objref][1]

    def on_function(self, message: Any) -> None:
        """Store a function that the peer has sent."""
        contains = [self._references.resolve(one) for one in message.contains]
        found = functions.find_function(self._client, message.digest)
        if found is None:
            writer = self._store.create(len(message.value), message.kind, len(contains))
            writer.copy(0, message.value)
            found = functions.add_function(self._client, message.digest, writer.seal(contains), message.name, False)
        _, count = self._received.get(message.digest, (found, 0))
        self._received[message.digest] = found, count + 1

    def received(self, digest: bytes) -> ObjectRef | None:
        """Return a function that the peer has sent and not forgotten; None when there is none."""
        found = self._received.get(digest)
        return None if found is None else found[0]

    def on_forget(self, digest: bytes) -> None:
        """Release a function that the peer has dropped."""
        found = self._received.pop(digest, None)
        if found is not None and found[1] > 1:
            self._received[digest] = found[0], found[1] - 1

    def tidy(self) -> None:
        """Send `forget` for the functions that this node has dropped."""
        for objref, (index, digest) in list(self._sent.items()):
            if not functions.is_stored(self._client, objref, index):
                del self._sent[objref]
                self._out.add("forget", digest)

    def clear(self) -> None:
        """Release all functions, because the stream has ended."""
        self._sent.clear()
        self._received.clear()
