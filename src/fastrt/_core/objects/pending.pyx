# cython: language_level=3, freethreading_compatible=True
"""Pending results: one thread that waits for many of them, and operations on their tasks.

A Watch sleeps in the same futex as every other wait of this process, and is woken through the same bits. The thread
that adds a reference sets the wait bit itself, so it need not wake the sleeper. A Watch does not poll; the end of a nap
only covers a waker that was killed between its store and its wake. The table of entries belongs to the waiting thread;
other threads append to `incoming` in the Watch's critical section, and count the additions.
"""
cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from fastrt._core.memory.clients cimport Client, client_wake
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.wait cimport wait_nap
from fastrt._core.objects.handles cimport Ref, ref_use
from fastrt._core.objects.objects cimport object_is_sealed
from fastrt._core.objects.references cimport links_unwait

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    NAP_NS = 1000000000  # a death wakes every client: the nap is for the time without a daemon
    IDLE_NAP_S = 5

DONE, QUEUED, RUNNING = 0, 1, 2


cdef class Watch:
    """References of this process and their waiters, for one thread that calls `wait`."""

    def __cinit__(self, Client client):
        client.ensure()
        self.client = client
        self.kept = []
        self.incoming = []
        self.removed = []

    def __dealloc__(self):
        free(self.entries)

    def __len__(self):
        return len(self.kept) + len(self.incoming)

    @cython.critical_section
    def add(self, Ref ref, who):
        """Make `wait` return (ref, who) once, when `ref` is ready. Any thread may call this."""
        cdef frt_ctx *x = &self.client.x
        self.client.ensure()
        ref_use(self.client, ref)
        self.incoming.append((ref, who))
        a32_add_sc(&self.added, 1)
        a64_or_sc(frt_mine(x, ref.index, FRT_WAITS), x.me_bit)
        # The sealer stores the state and then reads the bits; here it is the other way round.
        if object_is_sealed_sc(x, ref.index):
            self._poke()

    @cython.critical_section
    def remove(self, who):
        """Stop watching all references that were added for `who`. Any thread may call this; `wait` carries it out."""
        self.removed.append(who)
        self._poke()

    def poke(self):
        """Make `wait` return soon, with or without a result. Any thread may call this."""
        self._poke()

    cdef int _poke(self) except -1:
        a32_add_sc(&self.poked, 1)
        if a32_load_sc(&self.asleep) and self.client.usable():
            client_wake(&self.client.x, self.client.x.me)

    def word(self):
        """Return the wake word of this client: every wake of the client changes it."""
        self.client.ensure()
        return a32_load_sc(&self.client.x.clients[self.client.x.me].wake)

    @cython.critical_section
    def wait(self, double timeout_s, seen=None):
        """Sleep until some references are ready. One thread at a time may call this.

        Args:
            timeout_s: the longest wait, in seconds.
            seen: an earlier `word`: return also when this client was woken since, for any reason.
        Returns:
            A list of (ref, who), which are not watched any more; empty after the timeout, after such a wake, and after
            a `poke` since the last `wait` returned.
        Raises:
            StaleReferenceError, NotInitializedError: the session has ended.
        """
        cdef frt_ctx *x = &self.client.x
        cdef int64_t deadline = frt_now_ns() + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
        cdef uint32_t added, poked, word = 0
        cdef bint any_wake = seen is not None
        cdef int rc = FRT_OK
        if any_wake:
            word = seen
        while True:
            self.client.ensure()
            poked = a32_load_sc(&self.poked)
            self._merge()
            if self.removed:
                self._remove()
            added = a32_load_sc(&self.added)
            if self.incoming:
                continue
            found = self._collect()
            if found or poked != self.answered or frt_now_ns() >= deadline or \
                    any_wake and a32_load_sc(&x.clients[x.me].wake) != word:
                self.answered = poked
                return found
            with nogil:
                rc = self._sleep(x, added, poked, any_wake, word, deadline)
            PyErr_CheckSignals()
            self.client.ensure()
            if rc != FRT_TIMEOUT and rc != FRT_INTERRUPTED:
                check(rc)

    @cython.critical_section
    def take_all(self):
        """Stop watching: return a list of (ref, who) of all references that are left."""
        kept, self.kept = self.kept + self.incoming, []
        self.incoming = []
        self.count = 0
        return kept

    cdef int _merge(self) except -1:
        """Move the references that other threads have added into the table."""
        cdef uint32_t *more
        cdef uint32_t room
        cdef list incoming = self.incoming
        self.incoming = []
        if self.count + len(incoming) > self.room:
            room = 2 * (self.count + <uint32_t>len(incoming)) + 64
            more = <uint32_t *>realloc(self.entries, <size_t>room * sizeof(uint32_t))
            if more == NULL:
                self.incoming = incoming + self.incoming
                raise MemoryError("no memory for the references that are waited for")
            self.entries, self.room = more, room
        for ref, who in incoming:
            self.entries[self.count] = (<Ref>ref).index
            self.count += 1
            self.kept.append((ref, who))
        return 0

    cdef int _remove(self) except -1:
        """Take the references of those that were removed out of the table."""
        cdef list removed = self.removed
        cdef list kept = self.kept
        cdef uint32_t k, left = 0
        self.removed = []
        for k in range(self.count):
            if not any(kept[k][1] is who for who in removed):
                self.entries[left] = self.entries[k]
                kept[left] = kept[k]
                left += 1
        del kept[left:]
        self.count = left
        return 0

    cdef list _collect(self):
        """Remove the ready references from the table and return them."""
        cdef frt_ctx *x = &self.client.x
        cdef uint32_t k, left = 0
        cdef list found = []
        cdef list kept
        for k in range(self.count):
            if object_is_sealed(x, self.entries[k]):
                break
        else:
            return found
        kept = self.kept
        left = k
        for k in range(k, self.count):
            if object_is_sealed(x, self.entries[k]):
                found.append(kept[k])
            else:
                self.entries[left] = self.entries[k]
                kept[left] = kept[k]
                left += 1
        del kept[left:]
        self.count = left
        return found

    cdef int _sleep(self, frt_ctx *x, uint32_t added, uint32_t poked, bint any_wake, uint32_t word,
                    int64_t deadline) noexcept nogil:
        """Sleep until an entry of the table is sealed, another thread adds a reference or pokes, or any wake comes."""
        cdef uint32_t seen, k
        cdef int rc = FRT_OK
        cdef int64_t nap = NAP_NS if self.count else <int64_t>IDLE_NAP_S * 1000000000
        a32_store_sc(&self.asleep, 1)
        while rc == FRT_OK:
            seen = a32_load_sc(&x.clients[x.me].wake)
            if a32_load_sc(&self.poked) != poked or any_wake and seen != word:
                break
            for k in range(self.count):
                if object_is_sealed_sc(x, self.entries[k]):
                    break
            else:
                rc = wait_nap(x, seen, deadline, nap)
                # A reference that was added meanwhile may be the reason for the wake.
                if rc == FRT_OK and a32_load_sc(&self.added) == added:
                    continue
            break
        a32_store_sc(&self.asleep, 0)
        return rc


cdef inline bint object_is_sealed_sc(frt_ctx *x, uint32_t i) noexcept nogil:
    return frt_word_state(a64_load_sc(frt_state(x, i))) > FRT_OBJ_PENDING


cdef int _task_of(Client client, Ref ref) except -2:
    """The task that will make `ref`; -1 when the value exists."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    client.ensure()
    ref_use(client, ref)
    t = a32_load_rlx(&x.entries[ref.index].task)
    if t == 0 or object_is_sealed(x, ref.index):
        return -1
    if t > frt_tasks(x):
        check(FRT_CORRUPT)
    return <int>t - 1


def stage(Client client, Ref ref):
    """The progress of the task that makes `ref`: QUEUED until it is claimed, RUNNING until the value exists, DONE."""
    cdef frt_ctx *x = &client.x
    cdef int t = _task_of(client, ref)
    cdef int state
    if t < 0:
        return DONE
    state = frt_word_state(a64_load_sc(x.task_words + t))
    if object_is_sealed(x, ref.index):  # the record may have belonged to another task already
        return DONE
    return QUEUED if state == FRT_TASK_WAITING or state == FRT_TASK_READY else RUNNING


def withdraw(Client client, Ref ref):
    """Withdraw the task that will make `ref`, if no process has claimed it.

    Returns:
        The task's index; this client must now end it, by sealing its results with an error and `tasks.finish`. -1 when
        it is too late.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t word
    cdef int state
    cdef int t = _task_of(client, ref)
    while t >= 0:
        word = a64_load_sc(x.task_words + t)
        state = frt_word_state(word)
        # If it was sealed after the word was read, the word may belong to the record's next task.
        if object_is_sealed(x, ref.index) or state != FRT_TASK_WAITING and state != FRT_TASK_READY:
            break
        if a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_ENDING, x.me, frt_word_gen(word))):
            links_unwait(x, t)
            return t
    return -1
