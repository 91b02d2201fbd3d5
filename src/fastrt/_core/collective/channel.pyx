# cython: language_level=3, freethreading_compatible=True
"""Messages from one rank to another of the same node, through a ring of bytes with one writer and one reader.

A message is a head {bytes, tag} and its bytes. It may be larger than the ring: sender and receiver then work at the
same time. Messages of a pair arrive in order; a message whose tag the receiver does not want now is kept aside.
A side that gives up inside a message breaks that direction for good, because the start of the next message is then
unknown: it sets the top bit of its counter. Such a counter is larger than any value, so it also ends the other side's
wait.
"""
from fastrt.errors import CollectiveMismatch, CollectiveTimeout

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from fastrt._core.collective.groups cimport *
from fastrt._core.memory.layout cimport a32_load_sc, a64_load_acq, a64_store_sc

cdef struct frt_message:
    uint64_t nbytes
    int64_t tag

cdef uint64_t BROKEN = <uint64_t>1 << 63


cdef class Channels(GroupPart):
    """One rank's messages to and from the others. One thread at a time may use each direction of each pair.

    Args:
        memory: this rank's mapping of the group's memory.
    """
    cdef dict aside  # source -> [(tag, bytes)], in order of arrival

    def __cinit__(self, GroupMemory memory):
        self.aside = {}

    cdef int _move(self, frt_channel *c, int source, int target, char *at, uint64_t nbytes, bint out,
                   int64_t *deadline_ns) noexcept nogil:
        """Write (`out`) or read `nbytes` bytes of the ring; one of WAIT_*."""
        cdef uint64_t size = self.memory.ring_bytes
        cdef char *ring = self.memory.ring(source, target)
        cdef uint64_t mine = c.head if out else c.tail
        cdef uint64_t *other = &c.tail if out else &c.head
        cdef uint64_t theirs, n
        cdef int rc
        while nbytes:
            theirs = a64_load_acq(other)
            if (theirs | mine) & BROKEN:
                return WAIT_BROKEN
            n = size - (mine - theirs) if out else theirs - mine
            if n == 0:
                rc = self.memory.wait(other, theirs + 1, target if out else source, 0, deadline_ns)
                if rc != WAIT_MET:
                    return rc
                continue
            n = min(n, nbytes, size // 4, size - mine % size)  # in quarters, so that both sides work at the same time
            if out:
                memcpy(ring + mine % size, at, n)
            else:
                memcpy(at, ring + mine % size, n)
            mine += n
            at += n
            nbytes -= n
            a64_store_sc(&c.head if out else &c.tail, mine)
            if a32_load_sc(&self.memory.head.sleepers):
                self.memory.wake_all()
        return WAIT_MET

    cdef int _check(self, int rc, frt_channel *c, uint64_t before, bint out, int peer) except -1:
        """Raise the error that ended a transfer; break the direction if it ended inside a message."""
        cdef uint64_t *mine = &c.head if out else &c.tail
        if rc == WAIT_MET:
            return 0
        if mine[0] != before and rc != WAIT_BROKEN:
            a64_store_sc(mine, mine[0] | BROKEN)
            self.memory.wake_all()
        where = f"{'to' if out else 'from'} rank {peer}"
        if rc == WAIT_SIGNALLED:
            raise self.memory.take_raised()
        if rc == WAIT_BROKEN:
            raise CollectiveTimeout(
                f"a message {where} was given up half-way; that direction is closed until rebuild()")
        if rc == WAIT_DEAD:
            return 1
        raise CollectiveTimeout(f"no {'room for a message' if out else 'message'} {where} in time")

    def send(self, array, int peer, int64_t tag, double timeout):
        """Send the bytes of a contiguous buffer; returns when they are in the ring or received.

        Args:
            timeout: in seconds, for the whole message.
        Returns:
            True; False when a rank has died.
        Raises:
            CollectiveTimeout: the ring had no room in time, because the receiver did not read.
        """
        cdef Py_buffer view
        cdef frt_message head
        cdef frt_channel *c = self._channel(self.memory.rank, peer)
        cdef uint64_t before = c.head
        cdef int64_t deadline = -<int64_t>(min(max(timeout, 1e-9), 1e9) * 1e9)
        cdef int rc
        PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
        try:
            head.nbytes, head.tag = view.len, tag
            with nogil:
                rc = self._move(c, self.memory.rank, peer, <char *>&head, sizeof(head), True, &deadline)
                if rc == WAIT_MET:
                    rc = self._move(c, self.memory.rank, peer, <char *>view.buf, view.len, True, &deadline)
        finally:
            PyBuffer_Release(&view)
        return self._check(rc, c, before, True, peer) == 0

    def receive(self, array, int peer, int64_t tag, double timeout):
        """Receive the next message of a tag into a contiguous writable buffer of its size.

        Args:
            timeout: in seconds.
        Returns:
            True; False when a rank has died.
        Raises:
            CollectiveTimeout: the message did not come in time.
            CollectiveMismatch: the message has another size; it is kept.
        """
        cdef Py_buffer view
        cdef frt_message head
        cdef frt_channel *c = self._channel(peer, self.memory.rank)
        cdef uint64_t before
        cdef int64_t deadline = -<int64_t>(min(max(timeout, 1e-9), 1e9) * 1e9)
        cdef int rc
        cdef bytearray other
        cdef char *at
        PyObject_GetBuffer(array, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
        try:
            if self._take_aside(&view, peer, tag):
                return True
            while True:
                before = c.tail
                with nogil:
                    rc = self._move(c, peer, self.memory.rank, <char *>&head, sizeof(head), False, &deadline)
                if self._check(rc, c, before, False, peer):
                    return False
                if head.tag == tag and <Py_ssize_t>head.nbytes == view.len:
                    with nogil:
                        rc = self._move(c, peer, self.memory.rank, <char *>view.buf, view.len, False, &deadline)
                    return self._check(rc, c, before, False, peer) == 0
                other = bytearray(head.nbytes)
                at = other
                with nogil:
                    rc = self._move(c, peer, self.memory.rank, at, head.nbytes, False, &deadline)
                if self._check(rc, c, before, False, peer):
                    return False
                self.aside.setdefault(peer, []).append((head.tag, other))
                self._take_aside(&view, peer, tag)  # raises on a wrong size
        finally:
            PyBuffer_Release(&view)

    cdef bint _take_aside(self, Py_buffer *view, int peer, int64_t tag) except -1:
        """Take a message that was kept aside; False if there is none with this tag."""
        cdef bytearray body
        kept = self.aside.get(peer, ())
        for k, (its_tag, found) in enumerate(kept):
            if its_tag == tag:
                body = found
                if len(body) != view.len:
                    raise CollectiveMismatch(
                        f"rank {peer} sent {len(body)} bytes with tag {tag}; the array has {view.len}")
                memcpy(view.buf, <char *>body, len(body))
                del kept[k]
                return True
        return False

    cdef frt_channel *_channel(self, int source, int target) except NULL:
        self.check_open()
        if not 0 <= source < self.memory.world_size or not 0 <= target < self.memory.world_size or source == target:
            raise ValueError(f"a message from rank {source} to rank {target} in a group of {self.memory.world_size}")
        return self.memory.channel(source, target)
