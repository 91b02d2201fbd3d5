# cython: language_level=3
"""Counts of the tables, and pages of their rows: one pass over a table, without a Python object for each record.

A pass reads without a lock, as `inspect` does: each record is seen at some moment of the pass, so a record that stays
in a state during the pass is counted in that state. It runs without the interpreter's lock. Records are copied out of
the segment's file, 64 KiB at a time: through the mapping, the kernel would map and unmap each page. State words are
read through the read-only mapping, before the copy and after it, and its pages are given back: a pass over gigabytes
leaves the reader small.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.functions cimport functions_counts
from fastrt._core.repair.inspect cimport inspect_object, inspect_task

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *, size_t, int)
    int MADV_DONTNEED

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int, void *, size_t, long)

cdef enum:
    GROUPS = 4096  # slots of the table of functions in one pass, a power of two; half of them are used
    STATES = 16
    KIND_CODES = 1 << 16
    TYPES = 32
    WHATS = 4
    PIECE = 32768  # objects whose state words are given back together

VALUE, RESULT, ACTOR, FUNCTION = 0, 1, 2, 3
ROWS_MAX = 10000  # of a page


cdef struct group:
    uint64_t function
    uint32_t number  # of the object, or of the method
    uint32_t actor   # index + 1 of an actor that has such a call; 0: a task
    uint64_t states[STATES]
    uint64_t total


cdef struct grouping:
    group *slots
    group other  # of functions that found no slot
    uint32_t used


cdef group *_group(grouping *g, uint64_t function, uint32_t number, uint32_t actor, bint make) noexcept nogil:
    """The slot of a function; NULL or the slot of all others when there is none."""
    cdef uint64_t h = (function * FRT_PATH_STEP + number + (<uint64_t>(actor != 0) << 32)) * FRT_PATH_STEP
    cdef uint32_t k = <uint32_t>(h >> 40) & (GROUPS - 1)
    cdef group *slot
    while True:
        slot = g.slots + k
        if slot.total == 0:
            break
        if slot.function == function and slot.number == number and (slot.actor != 0) == (actor != 0):
            return slot
        k = (k + 1) & (GROUPS - 1)
    if not make or g.used >= GROUPS // 2:
        return &g.other if make else NULL
    g.used += 1
    slot.function, slot.number, slot.actor = function, number, actor
    return slot


cdef void _give_back(const char *first, const char *end) noexcept nogil:
    """Drop whole pages of [first, end) from this process's mapping; the memory itself stays."""
    cdef size_t at = (<size_t>first + 4095) & ~<size_t>4095
    cdef size_t to = <size_t>end & ~<size_t>4095
    if to > at:
        madvise(<void *>at, to - at, MADV_DONTNEED)


cdef void pages_copy(frt_ctx *x, const void *first, size_t nbytes, char *to) noexcept nogil:
    """Copy a part of the segment that has memory, given by its address in the process's mapping."""
    cdef size_t at = <char *>first - x.base
    cdef size_t done = 0
    cdef ssize_t n = 1
    while done < nbytes and n > 0:
        n = pread(x.fd, to + done, nbytes - done, <long>(at + done))
        done += <size_t>n if n > 0 else 0
    if done < nbytes:  # interrupted, or not a file that can be read: through the mapping
        memcpy(to + done, x.view + at + done, nbytes - done)


cdef pages_pass *pages_begin(frt_ctx *x, uint32_t records, uint32_t states) except NULL:
    """Begin a pass over the first records of a table that are in one of the states. The caller frees it."""
    cdef pages_pass *p = <pages_pass *>malloc(sizeof(pages_pass))
    if p == NULL:
        raise MemoryError()
    p.r = x[0]  # the process's view of the segment, with the words' addresses in the read-only mapping
    p.r.ctl = <uint64_t *>(x.view + (<char *>x.ctl - x.base))
    p.r.task_words = <uint64_t *>(x.view + (<char *>x.task_words - x.base))
    p.n, p.next, p.states = records, 0, states & PAGES_EXISTING
    return p


cdef inline uint32_t _read_words(pages_pass *p, const uint64_t *words, size_t stride, uint32_t n) noexcept nogil:
    """Read n state words; whether one is in a state of the pass."""
    cdef uint32_t k
    cdef uint32_t there = 0
    for k in range(n):
        p.words[k] = a64_load_acq(words + k * stride)
        there |= <uint32_t>1 << (frt_word_state(p.words[k]) & 31)
    return there & p.states


cdef inline uint32_t _keep(pages_pass *p, const uint64_t *words, size_t stride, uint32_t n) noexcept nogil:
    """Keep the records that are in a state of the pass, and were not reused while they were copied; how many."""
    cdef uint32_t k, same
    cdef uint32_t found = 0
    for k in range(n):
        p.at[found] = <uint16_t>k
        same = frt_word_gen(a64_load_acq(words + k * stride)) == frt_word_gen(p.words[k])
        found += p.states >> (frt_word_state(p.words[k]) & 31) & same
    return found


cdef uint32_t pages_next_tasks(pages_pass *p) noexcept nogil:
    """Copy the next tasks of a pass; how many are in `at`, 0 at the end.

    Of a record that is reused meanwhile, the first use is left out: its task has just ended.
    """
    cdef uint32_t step = PAGES_COPIED // sizeof(frt_task)
    cdef uint32_t n
    cdef uint32_t found = 0
    cdef uint64_t *words
    while found == 0 and p.next < p.n:
        p.first, n = p.next, min(step, p.n - p.next)
        p.next += n
        words = p.r.task_words + p.first
        if _read_words(p, words, 1, n):
            pages_copy(&p.r, p.r.tasks + p.first, n * sizeof(frt_task), p.records)
            found = _keep(p, words, 1, n)
    if found == 0 and p.n:
        _give_back(<char *>p.r.task_words, <char *>(p.r.task_words + p.n))
    return found


cdef uint32_t pages_next_objects(pages_pass *p) noexcept nogil:
    """Copy the next objects of a pass; how many are in `at`, 0 at the end."""
    cdef uint32_t step = PAGES_COPIED // sizeof(frt_entry)
    cdef uint32_t n
    cdef uint32_t found = 0
    cdef uint64_t *words
    while found == 0:
        if p.next and (p.next % PIECE == 0 or p.next == p.n):  # the words of what the caller has seen
            _give_back(<char *>frt_state(&p.r, p.next - 1 - (p.next - 1) % PIECE), <char *>frt_state(&p.r, p.next))
        if p.next == p.n:
            break
        p.first, n = p.next, min(step, p.n - p.next)
        p.next += n
        words = frt_state(&p.r, p.first)
        if _read_words(p, words, p.r.stride, n):
            pages_copy(&p.r, p.r.entries + p.first, n * sizeof(frt_entry), p.records)
            found = _keep(p, words, p.r.stride, n)
    return found


cdef void _count_tasks(pages_pass *p, grouping *g, uint64_t *calls) noexcept nogil:
    cdef uint32_t j, actor
    cdef frt_task *task
    cdef group *last = &g.other
    cdef uint32_t live = pages_next_tasks(p)
    while live:
        for j in range(live):
            task = <frt_task *>p.records + p.at[j]
            actor = task.actor
            if last == &g.other or last.function != task.function or last.number != task.function_index or \
                    (last.actor != 0) != (actor != 0):
                last = _group(g, task.function, task.function_index, actor, True)
            last.states[frt_word_state(p.words[p.at[j]])] += 1
            last.total += 1
            if 0 < actor <= <uint32_t>FRT_ACTORS:
                calls[actor - 1] += 1
        live = pages_next_tasks(p)


def count_tasks(Client client):
    """Count the tasks that have not ended.

    Returns:
        (rows, calls): a row for each function, (objref, number, actor, counts by state); actor is the index of an actor
        that has such a call, or None for a task; the objref of the row of functions that found no place is None. The
        dict `calls` has the unfinished calls by actor, for those that have any.
    """
    cdef frt_ctx *x = &client.x
    cdef grouping g
    cdef uint64_t *calls
    cdef pages_pass *some = NULL
    cdef uint32_t k
    cdef group *slot
    client.ensure()
    g.slots = <group *>calloc(GROUPS + 1, sizeof(group))
    calls = <uint64_t *>calloc(FRT_ACTORS, sizeof(uint64_t))
    try:
        if g.slots == NULL or calls == NULL:
            raise MemoryError()
        g.used = 0
        g.other = g.slots[GROUPS]
        some = pages_begin(x, frt_tasks(x), PAGES_EXISTING)
        with nogil:
            _count_tasks(some, &g, calls)
        rows = []
        for k in range(GROUPS):
            slot = g.slots + k
            if slot.total:
                rows.append((slot.function, slot.number, slot.actor - 1 if slot.actor else None,
                             [slot.states[s] for s in range(STATES)]))
        if g.other.total:
            rows.append((None, 0, None, [g.other.states[s] for s in range(STATES)]))
        return rows, {k: calls[k] for k in range(FRT_ACTORS) if calls[k]}
    finally:
        free(g.slots)
        free(calls)
        free(some)


cdef struct object_sums:
    uint64_t count[STATES][WHATS][TYPES]
    uint64_t nbytes[STATES][WHATS][TYPES]


cdef uint8_t _bit(const uint8_t *bits, uint32_t i) noexcept nogil:
    return bits[i >> 3] >> (i & 7) & 1


cdef uint32_t pages_what(const frt_entry *entry, uint32_t i, const uint8_t *functions) noexcept nogil:
    """VALUE, RESULT, ACTOR or FUNCTION."""
    if _bit(functions, i):
        return 3
    if entry.flags & FRT_ENTRY_ACTOR:
        return 2
    return 1 if entry.task else 0


cdef void _count_objects(pages_pass *p, const uint8_t *functions, const uint8_t *types,
                         object_sums *sums) noexcept nogil:
    cdef uint32_t j, state, what, kind
    cdef uint64_t nbytes
    cdef frt_entry *entry
    cdef uint32_t live = pages_next_objects(p)
    while live:
        for j in range(live):
            entry, state = <frt_entry *>p.records + p.at[j], frt_word_state(p.words[p.at[j]])
            what, kind, nbytes = pages_what(entry, p.first + p.at[j], functions), types[entry.kind], entry.bytes
            if state == <uint32_t>FRT_OBJ_PENDING:
                kind, nbytes = 0, 0
            elif state == <uint32_t>FRT_OBJ_SPILLED and not entry.flags & FRT_ENTRY_FILE:
                state = STATES - 1  # another node keeps it
            sums.count[state][what][kind] += 1
            sums.nbytes[state][what][kind] += nbytes
        live = pages_next_objects(p)


cdef uint8_t *pages_functions(frt_ctx *x, uint32_t n) except NULL:
    """A bit for each of the first n objects: whether the function table holds it. The caller frees it."""
    cdef uint8_t *bits = <uint8_t *>calloc(n // 8 + 1, 1)
    cdef uint32_t k, i
    if bits == NULL:
        raise MemoryError()
    for k in range(frt_functions(x)):
        i = x.functions[k].index
        if functions_counts(x.functions + k) and i < n:
            bits[i >> 3] |= <uint8_t>(1 << (i & 7))
    return bits


def count_objects(Client client, bytes types):
    """Count the objects and their bytes.

    Args:
        types: 65,536 bytes, the class (below 32) of each encoding; pending objects are in class 0.
    Returns:
        Rows (state, what, class, count, bytes); the state is FRT_OBJ_*, or 15 for a value that another node keeps;
        `what` is VALUE, RESULT, ACTOR or FUNCTION.
    """
    cdef frt_ctx *x = &client.x
    cdef object_sums *sums
    cdef pages_pass *some = NULL
    cdef uint8_t *functions
    cdef const uint8_t *classes = types
    cdef uint32_t n
    client.ensure()
    if len(types) != KIND_CODES or max(types) >= TYPES:
        raise ValueError("types must be 65,536 bytes below 32")
    n = frt_objects(x)
    functions = pages_functions(x, n)
    sums = <object_sums *>calloc(1, sizeof(object_sums))
    try:
        if sums == NULL:
            raise MemoryError()
        some = pages_begin(x, n, PAGES_EXISTING)
        with nogil:
            _count_objects(some, functions, classes, sums)
        return [(s, w, k, sums.count[s][w][k], sums.nbytes[s][w][k])
                for s in range(STATES) for w in range(WHATS) for k in range(TYPES) if sums.count[s][w][k]]
    finally:
        free(functions)
        free(sums)
        free(some)


# ---- pages: the rows with the smallest numbers beyond a given one ----

cdef struct found:
    uint64_t number  # of the task or the object
    uint32_t index


cdef struct heap:
    found *rows  # the largest number is on top
    uint32_t used, limit
    uint64_t total  # records that match, also those before the page


cdef void _sift(heap *h, uint32_t k) noexcept nogil:
    cdef found row = h.rows[k]
    cdef uint32_t child
    while 2 * k + 1 < h.used:
        child = 2 * k + 1
        if child + 1 < h.used and h.rows[child + 1].number > h.rows[child].number:
            child += 1
        if h.rows[child].number <= row.number:
            break
        h.rows[k] = h.rows[child]
        k = child
    h.rows[k] = row


cdef void _offer(heap *h, uint64_t number, uint32_t index) noexcept nogil:
    """Keep a record if it is among the `limit` smallest."""
    cdef uint32_t k, parent
    cdef found row
    row.number, row.index = number, index
    if h.used < h.limit:
        k = h.used
        h.used += 1
        while k:
            parent = (k - 1) // 2
            if h.rows[parent].number >= number:
                break
            h.rows[k] = h.rows[parent]
            k = parent
        h.rows[k] = row
    elif h.limit and number < h.rows[0].number:
        h.rows[0] = row
        _sift(h, 0)


cdef list _taken(heap *h):
    """(number, index) of the kept records, smallest number first."""
    return sorted([(h.rows[k].number, h.rows[k].index) for k in range(h.used)])


cdef struct task_filter:
    uint64_t after, id
    uint32_t client, actor
    int cancelled  # 0 or 1; -1: any
    int attempts   # -1: any
    bint only      # only functions in the grouping


cdef void _page_tasks(pages_pass *p, task_filter *f, grouping *g, heap *h) noexcept nogil:
    cdef uint32_t j, state
    cdef uint64_t word
    cdef frt_task *task
    cdef uint32_t live = pages_next_tasks(p)
    while live:
        for j in range(live):
            word, task = p.words[p.at[j]], <frt_task *>p.records + p.at[j]
            state = frt_word_state(word)
            if (
                    f.client == FRT_NONE or state >= <uint32_t>FRT_TASK_CLAIMED and frt_word_client(word) == f.client
            ) and (f.id == 0 or task.id == f.id) and (f.actor == FRT_NONE or task.actor == f.actor + 1) and \
                    (f.attempts < 0 or task.attempts == f.attempts) and \
                    (f.cancelled < 0 or frt_cancels(task.cancelled, task.id) == (f.cancelled == 1)) and \
                    (not f.only or _group(g, task.function, task.function_index, task.actor, False) != NULL):
                h.total += 1
                if task.id > f.after:
                    _offer(h, task.id, p.first + p.at[j])
        live = pages_next_tasks(p)


cdef tuple _page(heap *h, list taken, list rows, str number):
    """A page: the rows that still are those that the pass has found, the number of all, where to go on or 0."""
    kept = [row for row, (found, _) in zip(rows, taken, strict=True) if row is not None and row[number] == found]
    return kept, h.total, taken[len(taken) - 1][0] if taken and len(taken) == h.limit else 0


def page_tasks(Client client, uint64_t after=0, uint32_t limit=100, uint32_t states=0xffffffff, object functions=None,
               object client_index=None, object actor=None, object cancelled=None, object attempts=None,
               uint64_t id=0):
    """The rows of the tasks with the smallest ids that match.

    Args:
        after: only ids above this one.
        limit: the largest number of rows, at most ROWS_MAX.
        states: a bit for each state, 1 << FRT_TASK_*.
        functions: (objref, number, whether it is a call) of those that match; None: all.
        client_index: the client that runs it.
        actor: the index of the actor whose call it is.
        cancelled, attempts: their values.
        id: the task's.
    Returns:
        (rows as of `inspect.tasks`, the number of all tasks that match, the id to go on after or 0 at the end).
    """
    cdef frt_ctx *x = &client.x
    cdef grouping g
    cdef heap h
    cdef task_filter f
    cdef group *slot
    cdef pages_pass *some = NULL
    client.ensure()
    f.after, f.id = after, id
    f.client = FRT_NONE if client_index is None else client_index
    f.actor = FRT_NONE if actor is None else actor
    f.cancelled = -1 if cancelled is None else bool(cancelled)
    f.attempts = -1 if attempts is None else attempts
    f.only = functions is not None
    h.limit, h.used, h.total = min(limit, <uint32_t>ROWS_MAX), 0, 0
    g.slots, g.used = <group *>calloc(GROUPS + 1, sizeof(group)), 0
    h.rows = <found *>calloc(h.limit + 1, sizeof(found))
    try:
        if g.slots == NULL or h.rows == NULL:
            raise MemoryError()
        for function, number, call in functions or ():
            slot = _group(&g, function, number, 1 if call else 0, True)
            slot.total = 1
        some = pages_begin(x, frt_tasks(x), states)
        with nogil:
            _page_tasks(some, &f, &g, &h)
        taken = _taken(&h)
    finally:
        free(g.slots)
        free(h.rows)
        free(some)
    return _page(&h, taken, [inspect_task(x, index) for _, index in taken], "id")


cdef struct object_filter:
    uint64_t after, objref, bytes_min
    uint32_t states, whats
    uint32_t holder, pinner
    int error      # 0 or 1; -1: any
    bint remote    # whether values that other nodes keep match
    const uint8_t *kinds
    const uint8_t *functions
    const uint8_t *named


cdef bint _has_bit(frt_ctx *x, uint32_t i, uint32_t kind, uint32_t client) noexcept nogil:
    return client == FRT_NONE or client < frt_clients(x) and \
        a64_load_acq(frt_bits(x, i, kind, client >> 6)) >> (client & 63) & 1


cdef bint _matches(frt_ctx *x, const frt_entry *entry, uint32_t i, uint32_t state, object_filter *f) noexcept nogil:
    cdef uint32_t what
    if state == <uint32_t>FRT_OBJ_SPILLED and not entry.flags & FRT_ENTRY_FILE:
        if not f.remote:
            return False
    elif not f.states >> state & 1:
        return False
    if f.objref and entry.objref != f.objref or entry.bytes < f.bytes_min:
        return False
    if f.error >= 0 and (entry.flags & FRT_ENTRY_ERROR != 0) != (f.error == 1):
        return False
    if f.kinds != NULL and not f.kinds[0 if state == <uint32_t>FRT_OBJ_PENDING else 1 + entry.kind]:
        return False
    if f.whats != FRT_NONE:
        what = pages_what(entry, i, f.functions)
        if what == 3 and not _bit(f.named, i) or what != 3 and not f.whats >> what & 1:
            return False
    return _has_bit(x, i, FRT_REFS, f.holder) and _has_bit(x, i, FRT_PINS, f.pinner)


cdef void _page_objects(frt_ctx *x, pages_pass *p, object_filter *f, heap *h) noexcept nogil:
    cdef uint32_t j, i
    cdef frt_entry *entry
    cdef uint32_t live = pages_next_objects(p)
    while live:
        for j in range(live):
            entry, i = <frt_entry *>p.records + p.at[j], p.first + p.at[j]
            if _matches(x, entry, i, frt_word_state(p.words[p.at[j]]), f):
                h.total += 1
                if entry.objref > f.after:
                    _offer(h, entry.objref, i)
        live = pages_next_objects(p)


def page_objects(Client client, uint64_t after=0, uint32_t limit=100, uint32_t states=0xffffffff, bint remote=True,
                 uint64_t bytes_min=0, bytes kinds=None, object whats=None, object functions=(), object holder=None,
                 object pinner=None, object error=None, uint64_t objref=0):
    """The rows of the objects with the smallest numbers that match.

    Args:
        after: only objrefs above this one.
        limit: the largest number of rows, at most ROWS_MAX.
        states: a bit for each state, 1 << FRT_OBJ_*; values that other nodes keep are apart:
        remote: whether these match.
        bytes_min: only values of this size or larger.
        kinds: 65,537 bytes, not 0 for those that match: of pending objects, then of each encoding.
        whats: which of VALUE, RESULT and ACTOR match; None: all objects.
        functions: with `whats`, indexes of the functions' objects that match, too.
        holder, pinner: clients with a reference, or with the bytes mapped.
        error: whether the value is an error.
        objref: the object's.
    Returns:
        (rows as of `inspect.objects`, the number of all objects that match, the objref to go on after or 0 at the end).
    """
    cdef frt_ctx *x = &client.x
    cdef heap h
    cdef object_filter f
    cdef pages_pass *some = NULL
    cdef uint8_t *all_functions = NULL
    cdef uint8_t *named = NULL
    cdef uint32_t n, i
    client.ensure()
    n = frt_objects(x)
    if kinds is not None and len(kinds) != KIND_CODES + 1:
        raise ValueError("kinds must be 65,537 bytes")
    f.after, f.objref, f.bytes_min, f.states, f.remote = after, objref, bytes_min, states, remote
    f.whats = FRT_NONE if whats is None else sum([1 << what for what in set(whats)])
    f.holder = FRT_NONE if holder is None else holder
    f.pinner = FRT_NONE if pinner is None else pinner
    f.error = -1 if error is None else bool(error)
    f.kinds = NULL if kinds is None else <const uint8_t *><const char *>kinds
    h.limit, h.used, h.total = min(limit, <uint32_t>ROWS_MAX), 0, 0
    h.rows = <found *>calloc(h.limit + 1, sizeof(found))
    try:
        all_functions = pages_functions(x, n)
        named = <uint8_t *>calloc(n // 8 + 1, 1)
        if h.rows == NULL or named == NULL:
            raise MemoryError()
        for i in functions:
            if i < n:
                named[i >> 3] |= <uint8_t>(1 << (i & 7))
        f.functions, f.named = all_functions, named
        some = pages_begin(x, n, states | (<uint32_t>1 << FRT_OBJ_SPILLED if remote else 0))
        with nogil:
            _page_objects(x, some, &f, &h)
        taken = _taken(&h)
    finally:
        free(h.rows)
        free(some)
        free(all_functions)
        free(named)
    return _page(&h, taken, [inspect_object(x, index) for _, index in taken], "objref")


def small_values(Client client, uint32_t sample, uint64_t bytes_max, uint32_t least):
    """Estimate, from `sample` entries, how many live values of at most `bytes_max` bytes were stored by put.

    The entries are copied, 1 us each: one that is read through the mapping maps 64 KiB around it. Where there are fewer
    than `least` entries, none is read, and the answer is 0.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t k, i, n, looked
    cdef uint32_t found = 0
    cdef uint64_t word
    cdef frt_entry entry
    client.ensure()
    n = frt_objects(x)
    looked = 0 if n < least else min(sample, n)
    for k in range(looked):
        i = <uint32_t>(<uint64_t>k * n // looked)
        pages_copy(x, frt_state(x, i), sizeof(word), <char *>&word)
        if frt_word_state(word) == FRT_OBJ_SEALED:
            pages_copy(x, x.entries + i, sizeof(entry), <char *>&entry)
            found += entry.task == 0 and entry.bytes <= bytes_max
    return <uint64_t>found * n // looked if looked else 0
