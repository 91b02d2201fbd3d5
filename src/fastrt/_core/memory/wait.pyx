# cython: language_level=3, freethreading_compatible=True
"""All waits of the core: for one object, for several, for a task to run.

Every client has one wake word, a futex. A waiter reads its wake word, sets its bit at the object, checks the object
again, and sleeps while the word is unchanged. The process that seals the object sees the bit and bumps the word. A
round trip by sleeping and waking costs 6 us, by spinning 0.4 us: a wait spins first, for a time the caller gives, then
sleeps. No sleep is longer than 50 ms (5 s for an idle worker), so a waker that was killed between its store and its
wake delays no waiter for longer, even while there is no daemon to wake all clients.

All functions run without the GIL and return FRT_INTERRUPTED after a signal, so that Ctrl-C works in each.
"""
from libc.errno cimport EINTR
from libc.stdint cimport int64_t, uint32_t, uint64_t

from fastrt._core.memory.layout cimport *
from fastrt._core.memory.queue cimport queue_any, queue_length, queue_pop, queue_wake_idle

cdef enum:
    NAP_NS = 50000000
    IDLE_NAP_S = 5  # a wake costs 55 to 300 us in a cold cache: one a second took 0.03 % of a core for each worker
    NO_YIELD_NS = 4000  # spin this long before yielding: a round trip between two spinning processes takes 1 to 2 us
    SPINS_PER_LOOK = 32  # a pause takes 20 to 40 cycles: read the clock about twice per microsecond

cdef frt_yields _yields


cdef int wait_nap(frt_ctx *x, uint32_t seen, int64_t deadline_ns, int64_t nap_ns=NAP_NS) noexcept nogil:
    """Sleep until the wake word changes from `seen`, a signal, the deadline, or the end of the nap."""
    cdef frt_client *me = x.clients + x.me
    cdef int64_t left = deadline_ns - frt_now_ns()
    cdef int rc
    if left <= 0:
        return FRT_TIMEOUT
    if a32_load_acq(&x.sb.state) != <uint32_t>FRT_SEG_READY:
        return FRT_CORRUPT
    a32_add_sc(&me.sleepers, 1)
    rc = frt_futex_wait(&me.wake, seen, left if left < nap_ns else nap_ns)
    a32_sub_sc(&me.sleepers, 1)
    return FRT_INTERRUPTED if rc == EINTR else FRT_OK


cdef bint wait_spin_on(int64_t started, int64_t spin_ns) noexcept nogil:
    """Whether a spin may go on: its time is not over. Called between two checks.

    After 4 microseconds each call yields the processor: on a busy machine the process that will end the wait may be
    queued on this same processor (without the yield a round trip then lasts as long as the spin). While yields are
    late, the spin is over: a sleeper is woken sooner than a process that yields.
    """
    cdef int64_t now = frt_now_ns()
    if now - started > NO_YIELD_NS and not frt_yield(&_yields, &now):
        return False
    return now - started < spin_ns


cdef inline bint _sealed(frt_ctx *x, uint32_t i) noexcept nogil:
    return frt_word_state(a64_load_sc(frt_state(x, i))) != FRT_OBJ_PENDING


cdef bint spin_sealed(frt_ctx *x, uint32_t i, int64_t spin_ns) noexcept nogil:
    """Spin until entry i, which the caller holds, is sealed, or the time is over: True if it is sealed."""
    cdef int64_t started
    cdef int _k
    if _sealed(x, i):
        return True
    started = frt_now_ns()
    while wait_spin_on(started, spin_ns):
        for _k in range(SPINS_PER_LOOK):
            if _sealed(x, i):
                return True
            a_relax()
    return False


cdef int wait_sealed(frt_ctx *x, uint32_t i, int64_t deadline_ns, int64_t spin_ns) noexcept nogil:
    """Wait until entry i, which the caller holds, is sealed: FRT_OK, FRT_TIMEOUT or FRT_INTERRUPTED."""
    cdef uint64_t *bits
    cdef uint32_t seen
    cdef int rc
    if spin_sealed(x, i, spin_ns):
        return FRT_OK
    bits = frt_mine(x, i, FRT_WAITS)
    while True:
        seen = a32_load_sc(&x.clients[x.me].wake)
        a64_or_sc(bits, x.me_bit)
        if _sealed(x, i):
            return FRT_OK
        rc = wait_nap(x, seen, deadline_ns)
        if _sealed(x, i):
            return FRT_OK
        if rc != FRT_OK:
            return rc


cdef int wait_resident(frt_ctx *x, uint32_t i, int64_t deadline_ns) noexcept nogil:
    """Wait until a spilled entry's bytes are in memory again, or a remote one's in a file: FRT_OK, or the code of
    `wait_nap`."""
    cdef uint64_t *bits = frt_mine(x, i, FRT_WAITS)
    cdef uint32_t seen
    cdef int state, rc
    cdef unsigned before = a8_load_sc(&x.entries[i].flags) & FRT_ENTRY_FILE
    while True:
        seen = a32_load_sc(&x.clients[x.me].wake)
        a64_or_sc(bits, x.me_bit)
        state = frt_word_state(a64_load_sc(frt_state(x, i)))
        if state != FRT_OBJ_SPILLED and state != FRT_OBJ_RESTORING:
            return FRT_OK
        if state == FRT_OBJ_SPILLED and (a8_load_sc(&x.entries[i].flags) & FRT_ENTRY_FILE) != before:
            return FRT_OK
        rc = wait_nap(x, seen, deadline_ns)
        if rc != FRT_OK:
            return rc


cdef int wait_news(frt_ctx *x, uint32_t *word, uint32_t seen, int64_t deadline_ns) noexcept nogil:
    """Sleep once, unless `word` differs from `seen` already; a process that changes it wakes every client."""
    cdef uint32_t wake = a32_load_sc(&x.clients[x.me].wake)
    return wait_nap(x, wake, deadline_ns) if a32_load_sc(word) == seen else FRT_OK


cdef uint32_t _count_sealed(frt_ctx *x, const uint32_t *entries, uint32_t n, uint32_t want, bint mark) noexcept nogil:
    """How many of the entries are sealed, counting no further than `want`; `mark` sets this client's wait bits."""
    cdef uint32_t k, ready = 0
    cdef uint64_t *bits
    for k in range(n):
        if _sealed(x, entries[k]):
            ready += 1
            if ready == want:
                return ready
        elif mark:
            bits = frt_mine(x, entries[k], FRT_WAITS)
            if not a64_load_sc(bits) & x.me_bit:
                a64_or_sc(bits, x.me_bit)
                if _sealed(x, entries[k]):
                    ready += 1
                    if ready == want:
                        return ready
    return ready


cdef int wait_any(frt_ctx *x, const uint32_t *entries, uint32_t n, uint32_t want, int64_t deadline_ns,
                  int64_t spin_ns) noexcept nogil:
    """Wait until `want` of n entries are sealed: FRT_OK, FRT_TIMEOUT or FRT_INTERRUPTED."""
    cdef int64_t started
    cdef uint32_t seen
    cdef int rc
    if _count_sealed(x, entries, n, want, False) == want:
        return FRT_OK
    if spin_ns:
        started = frt_now_ns()
        while wait_spin_on(started, spin_ns):
            if _count_sealed(x, entries, n, want, False) == want:
                return FRT_OK
            a_relax()
    while True:
        seen = a32_load_sc(&x.clients[x.me].wake)
        if _count_sealed(x, entries, n, want, True) == want:
            return FRT_OK
        rc = wait_nap(x, seen, deadline_ns)
        if rc != FRT_OK:
            return FRT_OK if _count_sealed(x, entries, n, want, False) == want else rc


cdef int _spin_for_task(frt_ctx *x, int64_t spin_ns) noexcept nogil:
    """Spin for a task, as the one idle worker that does: a claimed task, or FRT_NOT_FOUND when the time is over."""
    cdef int64_t started = frt_now_ns()
    cdef int _k
    cdef int t = FRT_NOT_FOUND
    while t == FRT_NOT_FOUND and wait_spin_on(started, spin_ns):
        for _k in range(SPINS_PER_LOOK):
            if queue_any(x):
                t = queue_pop(x)
                break
            a_relax()
    return t


cdef int wait_task(frt_ctx *x, int64_t deadline_ns, int64_t spin_ns) noexcept nogil:
    """Claim a task: its index, now CLAIMED(me); FRT_INTERRUPTED; or FRT_TIMEOUT, also after a wake for another reason:
    a signal may have come with it, and the caller checks."""
    cdef uint32_t seen = a32_load_sc(&x.clients[x.me].wake)  # read before the spin: a wake during it counts
    cdef int rc = FRT_OK
    cdef int t
    if a32_load_sc(&x.clients[x.me].parked):
        a32_add_sc(&x.sb.held_news, 1)  # its CPU is free: the daemon may wait for it
        frt_futex_wake(&x.sb.held_news)
        rc = wait_nap(x, seen, deadline_ns, <int64_t>IDLE_NAP_S * 1000000000)
        return FRT_TIMEOUT if rc == FRT_OK else rc
    t = queue_pop(x)
    if t != FRT_NOT_FOUND:
        return t
    if spin_ns and a32_load_rlx(&x.sb.spinner) == 0 and a32_cas_sc(&x.sb.spinner, 0, x.me + 1):
        t = _spin_for_task(x, spin_ns)
        a32_store_sc(&x.sb.spinner, 0)
        if t != FRT_NOT_FOUND:
            # Pushes wake no sleeper while a worker spins: this worker, which has spun, wakes one.
            if queue_length(x):
                queue_wake_idle(x)
            return t
    a64_or_sc(&x.sb.idle[x.me_word], x.me_bit)
    t = queue_pop(x)
    if t == FRT_NOT_FOUND:
        rc = wait_nap(x, seen, deadline_ns, <int64_t>IDLE_NAP_S * 1000000000)
        t = queue_pop(x)
    a64_and_sc(&x.sb.idle[x.me_word], ~x.me_bit)
    if t != FRT_NOT_FOUND:
        if queue_length(x):
            queue_wake_idle(x)
        return t
    # A push since the last check may have found this worker's bit and woken it instead of a worker that stays.
    if queue_length(x):
        queue_wake_idle(x)
    return FRT_TIMEOUT if rc == FRT_OK else rc
