"""Names the jobs whose tasks run here for other nodes, so that what a task prints reaches its own driver only.

All nodes know a job by its name: the session of the driver's node and the job's number there. Tasks, calls and actors
carry the name from node to node. The uplink submits a task of such a job with its own job number and a tag in the bits
above it. A worker passes the job of a task on to what the task submits, and writes it into its output. So both have the
tag, and the uplink finds the name in its table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from fastrt._core.memory.clients import JOB_BITS, Client
from fastrt.cluster.references import PeerError

_NUMBER_BYTES = 8
_TAGS = 1 << (64 - JOB_BITS)  # tag 0 means none


class Jobs:
    """The jobs of other nodes that this uplink has seen.

    When all tags are in use, a new job takes the tag of the one that was seen the longest time ago.

    Args:
        client: this process's attachment.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session = bytes.fromhex(client.segment.session)
        self._tags: OrderedDict[bytes, int] = OrderedDict()  # by name, the job seen last at the end
        self._names: dict[int, bytes] = {}

    def name(self, job: int) -> bytes:
        """Return the name of a job whose number is from this node; empty if it is unknown."""
        if not job:
            return b""
        if submitter(job) == self._client.job:
            return self._names.get(job >> JOB_BITS, b"")
        if job >> JOB_BITS:
            return b""  # an earlier uplink process has tagged it
        return self._session + job.to_bytes(_NUMBER_BYTES, "big")

    def number(self, name: bytes) -> int:
        """Return the number under which this process submits tasks of a job.

        Raises:
            PeerError: `name` is no job's name.
        """
        if not self._split(name)[1]:
            return self._client.job
        tag = self._tags.get(name)
        if tag is None:
            tag = len(self._tags) + 1 if len(self._tags) < _TAGS - 1 else self._tags.popitem(last=False)[1]
            self._tags[name], self._names[tag] = tag, name
        self._tags.move_to_end(name)
        return tag << JOB_BITS | self._client.job

    @contextmanager
    def of(self, name: bytes) -> Iterator[None]:
        """Submit tasks of a job in a `with` statement.

        Raises:
            PeerError: `name` is no job's name.
        """
        self._client.adopt_job(self.number(name))
        try:
            yield
        finally:
            self._client.adopt_job(self._client.job)

    def here(self, name: bytes) -> int | None:
        """Return the number of a job of this node's drivers; 0: unknown; None: its driver is on another node.

        Raises:
            PeerError: `name` is no job's name.
        """
        node, job = self._split(name)
        return job if not job or node == self._session else None

    def _split(self, name: bytes) -> tuple[bytes, int]:
        """Split a name into the node's session and the number there; an empty name has number 0."""
        if name and len(name) != len(self._session) + _NUMBER_BYTES:
            raise PeerError(f"the name of a job has {len(name)} bytes")
        return name[: len(self._session)], int.from_bytes(name[len(self._session) :], "big")


def submitter(job: int) -> int:
    """Return the number of the process that submits tasks of a job on this node; of another node's job: the uplink."""
    return job & ((1 << JOB_BITS) - 1)


def node_of(name: bytes) -> str:
    """Return the session of the node whose driver a job belongs to; empty if the name is."""
    return name[:-_NUMBER_BYTES].hex()


def number_of(name: bytes) -> int:
    """Return the number of a job on the node of its driver; 0 if the name is empty."""
    return int.from_bytes(name[-_NUMBER_BYTES:], "big")
