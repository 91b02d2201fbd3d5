# cython: language_level=3, freethreading_compatible=True
"""The last failures of a session, in a ring in the arena: see frt_failure. Nothing here runs while tasks succeed."""
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit
from fastrt._core.objects.functions cimport functions_name

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

cdef extern from *:
    """
    #include <time.h>
    static inline int64_t frt_wall_ns(void) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return now.tv_sec * 1000000000LL + now.tv_nsec;
    }
    """
    int64_t frt_wall_ns() noexcept nogil

cdef enum:
    TRIES = 16  # places that other processes are writing to
    TEXT_BYTES = sizeof(frt_failure) - 64
    HAS_RESULTS = 2  # a flag, beside FRT_FAILURE_RETRIED

MOST = FRT_FAILURES
_LIMITS = (200, 200, 1024, TEXT_BYTES, 200)  # bytes of each text; the traceback has what the others leave
_CUT = "[...]\n".encode()


cdef frt_failure *_begin(frt_ctx *x, uint64_t *number) noexcept nogil:
    """Take a place in the ring, which this client is writing from now on; NULL if there is none, or no memory."""
    cdef uint64_t *word
    cdef uint64_t seen, mine
    cdef uint32_t place, _try
    for _try in range(TRIES):
        number[0] = a64_add_rlx(&x.sb.failures, 1) + 1
        place = <uint32_t>((number[0] - 1) % FRT_FAILURES)
        word = x.failure_words + place
        seen = a64_load_acq(word)
        if frt_word_state(seen) == <int>FRT_FAILURE_WRITING or frt_failure_number(seen) > number[0]:
            continue
        mine = frt_failure_word(FRT_FAILURE_WRITING, x.me, number[0])
        if not a64_cas_sc(word, seen, mine):
            continue
        if frt_word_state(seen) == <int>FRT_FAILURE_EMPTY and \
                segment_commit(x, <char *>(x.failures + place) - x.base, sizeof(frt_failure)) != FRT_OK:
            a64_store_rel(word, 0)
            return NULL
        a_fence_rel()  # a reader that finds any of what follows finds the place's word changed
        memset(x.failures + place, 0, 64)
        return x.failures + place
    return NULL


cdef void _commit(frt_ctx *x, uint64_t number) noexcept nogil:
    a64_store_sc(x.failure_words + (number - 1) % FRT_FAILURES, frt_failure_word(FRT_FAILURE_KEPT, x.me, number))


cdef void _about_task(frt_ctx *x, uint32_t t, frt_failure *f) noexcept nogil:
    cdef frt_task *task = x.tasks + t
    f.time = frt_wall_ns()
    f.id, f.function, f.method, f.actor = task.id, task.function, task.function_index, task.actor
    f.attempt, f.retries = task.attempts, task.retries
    f.flags = HAS_RESULTS if task.nreturns else 0


cdef bint _is_kept(frt_ctx *x, uint64_t id, uint8_t attempt) noexcept nogil:
    """Whether the ring has a failure of that attempt already."""
    cdef uint32_t k
    for k in range(FRT_FAILURES):
        if frt_word_state(a64_load_acq(x.failure_words + k)) >= <int>FRT_FAILURE_KEPT and x.failures[k].id == id and \
                x.failures[k].attempt == attempt:
            return True
    return False


cdef void failure_crashed(frt_ctx *x, uint32_t v, uint32_t t, const char *type, const char *message, int signal,
                          bint retried) noexcept nogil:
    """Keep that an attempt ended with the process of client v; once, also if its recovery is repeated."""
    cdef uint64_t number
    cdef frt_failure *f
    cdef const char *name
    cdef char *to
    cdef size_t n
    if x.tasks[t].function == 0 or _is_kept(x, x.tasks[t].id, x.tasks[t].attempts):
        return
    f = _begin(x, &number)
    if f == NULL:
        return
    _about_task(x, t, f)
    f.pid, f.signal = x.clients[v].pid, <uint8_t>signal
    f.flags |= FRT_FAILURE_RETRIED if retried else 0
    to = f.text
    name = NULL if f.actor else functions_name(x, f.function)
    if name != NULL:
        n = strnlen(name, FRT_NAME_BYTES)
        memcpy(to, name, n)
        f.lengths[FRT_TEXT_NAME] = <uint16_t>n
        to += n
    n = strnlen(type, 200)
    memcpy(to, type, n)
    f.lengths[FRT_TEXT_TYPE] = <uint16_t>n
    to += n
    n = strnlen(message, 1024)
    memcpy(to, message, n)
    f.lengths[FRT_TEXT_MESSAGE] = <uint16_t>n
    _commit(x, number)


cdef void failures_mend(frt_ctx *x, uint64_t id) noexcept nogil:
    """Note at the kept failures of a task that a later attempt has succeeded."""
    cdef uint32_t k
    cdef uint64_t word
    for k in range(FRT_FAILURES):
        word = a64_load_acq(x.failure_words + k)
        if frt_word_state(word) == <int>FRT_FAILURE_KEPT and x.failures[k].id == id:
            # The swap fails if the place has another failure by now.
            a64_cas_sc(x.failure_words + k, word, frt_failure_word(FRT_FAILURE_MENDED, x.me, frt_failure_number(word)))


cdef void failures_of_dead(frt_ctx *x, uint32_t v) noexcept nogil:
    """Empty the places that a dead client was writing."""
    cdef uint32_t k
    cdef uint64_t word
    for k in range(FRT_FAILURES):
        word = a64_load_acq(x.failure_words + k)
        if frt_word_state(word) == <int>FRT_FAILURE_WRITING and frt_word_client(word) == v:
            a64_cas_sc(x.failure_words + k, word, 0)


cdef bytes _text(object text, size_t most, bint from_the_end):
    """A text in at most so many bytes; without its beginning, or its end, if it is longer."""
    cdef bytes data = str(text).encode("utf-8", "replace")
    if <size_t>len(data) <= most:
        return data
    if from_the_end:
        data = data[len(data) - most + len(_CUT):].decode("utf-8", "ignore").encode()
        return _CUT + data
    return data[:most - 3].decode("utf-8", "ignore").encode() + b"..."


cdef int _fill(frt_failure *f, object texts) except -1:
    """Write the texts, in their order; the traceback gets what the others leave."""
    cdef char *to = f.text
    cdef size_t left = TEXT_BYTES
    cdef uint32_t k
    cdef bytes data
    short = [_text(text, _LIMITS[k], False) for k, text in enumerate(texts) if k != 3]
    left -= sum([len(data) for data in short])
    short.insert(3, _text(texts[3], left, True))
    for k in range(FRT_TEXTS):
        data = short[k]
        memcpy(to, <char *>data, len(data))
        f.lengths[k] = <uint16_t>len(data)
        to += len(data)
    return 0


def keep(Client client, uint32_t t, texts, int pid, uint8_t signal=0, bint retried=False):
    """Keep that an attempt of a task has failed, which this client runs or ends.

    Args:
        client: an attachment.
        t: the task.
        texts: the task's name, the exception's class, its message, the traceback, and the name of the node that ran it
            ("": this one). They are cut to fit into 4 KiB.
        pid: of the process that ran it.
        signal: that ended this process; 0: none.
        retried: whether another attempt follows.
    Returns:
        Whether it is kept; False if there was no memory for it.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t number = 0
    cdef frt_failure *f
    cdef frt_failure made
    client.ensure()
    if t >= frt_tasks(x):
        raise IndexError(f"there is no task {t}")
    memset(&made, 0, sizeof(made))
    _fill(&made, texts)
    _about_task(x, t, &made)
    made.pid, made.signal = pid, signal
    made.flags |= FRT_FAILURE_RETRIED if retried else 0
    f = _begin(x, &number)
    if f == NULL:
        return False
    memcpy(f, &made, sizeof(made))
    _commit(x, number)
    return True


cdef object _row(frt_ctx *x, uint32_t place, uint64_t number):
    """A kept failure as a dict; None if it is overwritten meanwhile."""
    cdef frt_failure f
    cdef uint64_t word
    cdef uint32_t k, at = 0
    memcpy(&f, x.failures + place, sizeof(f))
    a_fence_sc()
    word = a64_load_acq(x.failure_words + place)
    if frt_word_state(word) < <int>FRT_FAILURE_KEPT or frt_failure_number(word) != number:
        return None
    texts = []
    for k in range(FRT_TEXTS):
        if f.lengths[k] > TEXT_BYTES - at:
            return None
        texts.append(f.text[at:at + f.lengths[k]].decode("utf-8", "replace"))
        at += f.lengths[k]
    return {
        "number": number, "time_ns": f.time, "id": f.id, "result": f.id + 1 if f.flags & HAS_RESULTS else 0,
        "function": (f.function, f.method),
        "actor": f.actor - 1 if f.actor else None, "pid": f.pid, "attempt": f.attempt, "retries": f.retries,
        "signal": f.signal, "retried": f.flags & FRT_FAILURE_RETRIED != 0,
        "mended": frt_word_state(word) == <int>FRT_FAILURE_MENDED, "name": texts[0], "type": texts[1],
        "message": texts[2], "traceback": texts[3], "node": texts[4],
    }


def read(Client client, object after=None, uint32_t limit=0):
    """The kept failures, oldest first.

    Args:
        after: only those of larger numbers; None: the newest.
        limit: the largest number of them; 0: all.
    Returns:
        Dicts: number, time_ns (of the system's clock), id of the task, result (the number of its first result; 0: it
        has none), function (as in `inspect.tasks`), actor (index
        or None), pid, attempt, retries, signal, retried, mended, name, type, message, traceback, node.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t k
    cdef uint64_t word, first = after or 0
    client.ensure()
    places = []
    for k in range(FRT_FAILURES):
        word = a64_load_acq(x.failure_words + k)
        if frt_word_state(word) >= <int>FRT_FAILURE_KEPT and frt_failure_number(word) > first:
            places.append((frt_failure_number(word), k))
    places.sort()
    if limit and len(places) > limit:
        places = places[:limit] if after is not None else places[len(places) - limit:]
    rows = [_row(x, place, number) for number, place in places]
    return [row for row in rows if row is not None]


def total(Client client):
    """How many failures there have been in this session, those that are not kept any more included."""
    client.ensure()
    return a64_load_acq(&client.x.sb.failures)
