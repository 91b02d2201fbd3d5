# cython: language_level=3, freethreading_compatible=True
"""The actor's side: its calls in the order in which they were made, each claimed when it is about to run.

An Inbox is private to the actor's process. Its cells are only hints, and the records stay READY until they are claimed,
so a death loses nothing. It takes the whole list of the mailbox at once and reverses it, oldest first. When a link
leads to a record that was used again, the list below it is lost. Then, and at the start of each process, the calls are
looked up in the table of tasks and sorted by their ids, which grow in each caller. A call found there has been pushed
before, or is about to be, so a second look at the mailbox finds all earlier calls of the same caller.

A call whose arguments are not ready is held back, and with it, if order matters, all later calls of its caller; calls
of others go on. A call that is pushed and not READY yet is held back, too: its caller is between two instructions, or
dead.
"""
cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.wait cimport wait_nap, wait_spin_on
from fastrt._core.objects.mailbox cimport mailbox_before, mailbox_take
from fastrt._core.tasks.records cimport task_works_on

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    STALE = -1  # the call has ended, or runs already
    HELD = -2
    LOOK_AT_HELD = 64  # calls taken between two looks at those that are held back
    SPINS_PER_LOOK = 32
    IDLE_NAP_NS = 1000000000
    LAST_NAP_NS = 5000000  # without handles, the actor ends with its last call


@cython.no_gc
cdef class Inbox:
    """The calls of the actor whose process this client is.

    Args:
        client: this process's.
        actor: the actor's index.
        ordered: whether a call waits for all earlier ones of its caller.
    """

    def __cinit__(self, Client client, uint32_t actor, bint ordered):
        client.ensure()
        if actor >= frt_actors(&client.x):
            raise IndexError(f"there is no actor {actor}")
        self.client, self.index, self.ordered = client, actor, ordered
        self.actor = client.x.actors + actor

    def __dealloc__(self):
        free(self.cells)
        free(self.held)

    def next(self, double timeout_s, double spin_s):
        """Claim the next call and mark it RUNNING.

        Args:
            timeout_s: how long to wait, in seconds, at most until some news comes.
            spin_s: how much of it to spend spinning before going to sleep.
        Returns:
            The call's task index; -11 (`tasks.NO_TASK`) when there was none.
        """
        return inbox_next(self, timeout_s, spin_s)

    def take(self, double timeout_s, double spin_s):
        """Wait as `next` does, and take all calls that can run, without claiming them: a list of cells for `claim`."""
        cdef list taken = []
        cdef uint64_t cell = 0
        if not _find(self, &cell):
            _wait(self, timeout_s, spin_s)
            if not _find(self, &cell):
                return taken
        taken.append(cell)
        while _find(self, &cell):
            taken.append(cell)
        return taken

    def arm(self):
        """Have the next call, or other news (an order, the actor's end), wake this client, until the next `look`.

        Returns:
            Whether there is news already.
        """
        cdef frt_ctx *x = &self.client.x
        self.client.ensure()
        a32_store_sc(&self.actor.asleep, 1)
        # A client that makes news stores it and then reads `asleep`; this is the other way round.
        return _news(x, self, True) or a32_load_sc(&self.actor.order) != 0 or \
            a32_load_sc(&self.actor.released) != self.released

    def look(self):
        """Take all calls that can run, without waiting or claiming them: a list of cells for `claim`."""
        cdef list taken = []
        cdef uint64_t cell = 0
        self.client.ensure()
        a32_store_sc(&self.actor.asleep, 0)
        self.released = a32_load_sc(&self.actor.released)
        while _find(self, &cell):
            taken.append(cell)
        return taken

    def claim(self, uint64_t cell):
        """Mark a call RUNNING that `take` has returned: its task index, or -11 when it was cancelled meanwhile."""
        self.client.ensure()
        return _claim(self, cell)


cdef int inbox_next(Inbox self, double timeout_s, double spin_s) except -100:
    cdef uint64_t cell
    cdef bint waited = False
    cdef int t
    self.client.ensure()
    while True:
        while _find(self, &cell):
            t = _claim(self, cell)
            if t >= 0:
                self.quiet = False
                return t
        if waited:
            self.quiet = True
            return FRT_NOT_FOUND
        _wait(self, timeout_s, 0.0 if self.quiet else spin_s)
        waited = True


cdef int _claim(Inbox self, uint64_t cell) except -100:
    cdef frt_ctx *x = &self.client.x
    cdef uint32_t t = <uint32_t>cell - 1
    cdef uint64_t word
    if t >= frt_tasks(x):
        raise IndexError(f"there is no task {t}")
    word = a64_load_sc(x.task_words + t)
    if frt_word_gen(word) != <uint32_t>(cell >> 32) or frt_word_state(word) != FRT_TASK_READY or \
            not a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_RUNNING, x.me, frt_word_gen(word))):
        return FRT_NOT_FOUND
    if x.tasks[t].attempts < 255:
        x.tasks[t].attempts += 1  # after the claim: a process that dies in between has not run it
    task_works_on(x, t)
    return <int>t


cdef bint _find(Inbox self, uint64_t *cell) except -1:
    """Find the oldest call that can run now."""
    cdef frt_ctx *x = &self.client.x
    self.found += 1
    if self.nheld and (self.found % LOOK_AT_HELD == 0 or self.head == self.count) and _find_held(self, cell):
        return True
    while True:
        if self.head == self.count:
            if not a64_load_sc(&self.actor.mailbox) and not a32_load_sc(&self.actor.rescan):
                return False
            _collect(self)
            if self.head == self.count:
                return False
        cell[0] = self.cells[self.head]
        self.head += 1
        if _look(x, self, cell[0]) == FRT_OK:
            return True


cdef int _look(frt_ctx *x, Inbox self, uint64_t cell) except -100:
    """Check whether a call can run: FRT_OK, STALE, or HELD after it was added to the calls that are held back."""
    cdef uint32_t t = <uint32_t>cell - 1
    cdef uint64_t word = a64_load_sc(x.task_words + t)
    cdef uint32_t caller = x.tasks[t].caller % FRT_SLOTS_MOST
    cdef int state = frt_word_state(word)
    if frt_word_gen(word) != <uint32_t>(cell >> 32) or state != FRT_TASK_READY and state != FRT_TASK_RESERVED:
        return STALE
    if state == FRT_TASK_READY and (x.tasks[t].ndeps == 0 or _unsealed(x, t) == FRT_NONE) and \
            not (self.nheld and self.ordered and self.blocked[caller >> 6] >> (caller & 63) & 1):
        return FRT_OK
    self.held = _room(self.held, self.nheld, &self.held_room)
    self.held[self.nheld] = cell
    self.nheld += 1
    self.blocked[caller >> 6] |= <uint64_t>1 << (caller & 63)
    return HELD


cdef uint32_t _unsealed(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return the entry of the first dependency that has no value yet; FRT_NONE when all have one."""
    cdef frt_body body
    cdef uint32_t k, i
    frt_task_body(x, t, &body)
    for k in range(body.ndeps):
        i = body.refs[k].index
        if i < x.objects_max and frt_word_state(a64_load_sc(frt_state(x, i))) == FRT_OBJ_PENDING:
            return i
    return FRT_NONE


cdef bint _find_held(Inbox self, uint64_t *cell) except -1:
    """Look at all calls that are held back once more, and find the first that can run now."""
    cdef frt_ctx *x = &self.client.x
    cdef uint64_t *held = self.held
    cdef uint32_t k, n = self.nheld
    cdef bint found = False
    self.held, self.nheld, self.held_room = NULL, 0, 0
    memset(self.blocked, 0, sizeof(self.blocked))
    try:
        for k in range(n):
            if found:
                self.held = _room(self.held, self.nheld, &self.held_room)
                self.held[self.nheld] = held[k]
                self.nheld += 1
                _block(self, held[k])
            elif _look(x, self, held[k]) == FRT_OK:
                cell[0] = held[k]
                found = True
    finally:
        free(held)
    return found


cdef void _block(Inbox self, uint64_t cell) noexcept:
    cdef uint32_t caller = self.client.x.tasks[<uint32_t>cell - 1].caller % FRT_SLOTS_MOST
    self.blocked[caller >> 6] |= <uint64_t>1 << (caller & 63)


cdef uint64_t *_room(uint64_t *cells, uint32_t used, uint32_t *room) except NULL:
    """Make room for one more cell; without memory the old cells stay."""
    cdef uint64_t *more
    if used < room[0]:
        return cells
    more = <uint64_t *>realloc(cells, <size_t>(2 * room[0] + 64) * sizeof(uint64_t))
    if more == NULL:
        raise MemoryError("no memory for an actor's calls")
    room[0] = 2 * room[0] + 64
    return more


cdef int _append(Inbox self, uint64_t cell) except -1:
    self.cells = _room(self.cells, self.count, &self.room)
    self.cells[self.count] = cell
    self.count += 1
    return 0


cdef int _collect(Inbox self) except -1:
    """Take all calls out of the mailbox. The cells that were taken before are used up."""
    cdef frt_ctx *x = &self.client.x
    cdef uint32_t i, j, t
    cdef uint64_t cell, word
    self.head = self.count = 0
    if _take(self) and not a32_load_sc(&self.actor.rescan):
        i, j = 0, self.count
        while i + 1 < j:
            j -= 1
            cell = self.cells[i]
            self.cells[i] = self.cells[j]
            self.cells[j] = cell
            i += 1
        return 0
    while True:
        a32_store_sc(&self.actor.rescan, 0)
        for t in range(frt_tasks(x)):
            word = a64_load_sc(x.task_words + t)
            # Calls in the making count, too: one that is linked in below a stale one would be lost.
            if frt_word_state(word) in (FRT_TASK_READY, FRT_TASK_RESERVED) and \
                    a32_load_acq(&x.tasks[t].actor) == self.index + 1:
                _append(self, <uint64_t>frt_word_gen(word) << 32 | (t + 1))
        if _take(self):
            break
    # The generation says whether the id is the call's: a record that was used again is stale at any place.
    calls = sorted({(x.tasks[<uint32_t>self.cells[i] - 1].id, self.cells[i]) for i in range(self.count)})
    self.count = 0
    for _, cell in calls:
        _append(self, cell)
    return 0


cdef bint _take(Inbox self) except -1:
    """Append the mailbox's calls, newest first; False when the list is broken."""
    cdef frt_ctx *x = &self.client.x
    cdef uint64_t before, cell = mailbox_take(self.actor)
    cdef uint32_t t, left = x.tasks_max
    while cell:
        t = <uint32_t>cell - 1
        if t >= frt_tasks(x) or left == 0:
            return False
        left -= 1
        before = mailbox_before(x, cell)
        if frt_word_gen(a64_load_sc(x.task_words + t)) != <uint32_t>(cell >> 32) or \
                x.tasks[t].actor != self.index + 1:
            return False
        _append(self, cell)
        cell = before
    return True


cdef int _wait(Inbox self, double timeout_s, double spin_s) except -1:
    """Sleep once, until there may be a call that can run, or other news."""
    cdef frt_ctx *x = &self.client.x
    cdef int64_t started = frt_now_ns()
    cdef int64_t deadline = started + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
    cdef int64_t spin = <int64_t>(min(max(spin_s, 0.0), 1e9) * 1e9)
    cdef uint32_t seen = a32_load_sc(&x.clients[x.me].wake)  # before the spin: a wake-up that comes meanwhile counts
    cdef uint32_t released = a32_load_sc(&self.actor.released)
    cdef int _k
    PyErr_CheckSignals()  # one may have come while the last call ended
    if released and deadline > started + LAST_NAP_NS:
        deadline = started + LAST_NAP_NS
    with nogil:
        while wait_spin_on(started, spin):
            for _k in range(SPINS_PER_LOOK):
                if _news(x, self, False):
                    break
                a_relax()
            else:
                continue
            break
        else:
            a32_store_sc(&self.actor.asleep, 1)
            # A sender stores its news and then looks for sleepers; we note that we sleep and then look for news.
            if not _news(x, self, True) and a32_load_sc(&self.actor.released) == released:
                wait_nap(x, seen, deadline, IDLE_NAP_NS)
            a32_store_sc(&self.actor.asleep, 0)
    PyErr_CheckSignals()
    self.client.ensure()
    return 0


cdef bint _news(frt_ctx *x, Inbox self, bint mark) noexcept nogil:
    """Return whether a call may be able to run. With `mark`, the process that seals a missing argument wakes us."""
    cdef uint64_t behind[FRT_CALLER_WORDS]
    cdef uint64_t cell, word
    cdef uint32_t k, i, t, caller
    if a64_load_sc(&self.actor.mailbox) or a32_load_sc(&self.actor.rescan):
        return True
    if self.nheld == 0:
        return False
    memset(behind, 0, sizeof(behind))
    for k in range(self.nheld):
        cell = self.held[k]
        t = <uint32_t>cell - 1
        word = a64_load_sc(x.task_words + t)
        if frt_word_gen(word) != <uint32_t>(cell >> 32):
            return True
        caller = x.tasks[t].caller % FRT_SLOTS_MOST
        if not (self.ordered and behind[caller >> 6] >> (caller & 63) & 1) and \
                frt_word_state(word) != FRT_TASK_RESERVED:
            i = _unsealed(x, t) if frt_word_state(word) == FRT_TASK_READY else FRT_NONE
            if i != FRT_NONE and mark:
                a64_or_sc(frt_mine(x, i, FRT_WAITS), x.me_bit)
                i = _unsealed(x, t)
            if i == FRT_NONE:
                return True
        behind[caller >> 6] |= <uint64_t>1 << (caller & 63)
    return False
