# cython: language_level=3, freethreading_compatible=True
"""Counts of the tables, and pages of their rows: one pass over a table, without a Python object for each record.

`passes` says what a row is that changes during the pass. It runs without the interpreter's lock, for a long table in
some threads, each with sums of its own that are added in the end.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.functions cimport functions_counts
from fastrt._core.repair.inspect cimport inspect_object, inspect_task
from fastrt._core.repair.passes cimport (
    PASS_EXISTING, pass_begin, pass_copy, pass_objects, pass_read, pass_tasks, pass_threads, table_pass,
)

cdef enum:
    GROUPS = 4096  # slots of the table of functions in one pass, a power of two; half of them are used
    STATES = 16
    KIND_CODES = 1 << 16
    TYPES = 32
    WHATS = 4

VALUE, RESULT, ACTOR, FUNCTION = 0, 1, 2, 3
ROWS_MAX = 10000  # of a page


cdef struct group:
    uint64_t function
    uint32_t number  # of the object, or of the method
    uint32_t actor   # index + 1 of an actor that has such a call; 0: a task
    uint64_t states[STATES]
    uint64_t total


cdef struct grouping:
    uint32_t used
    group slots[GROUPS + 1]  # the last one: of functions that found no slot


cdef struct task_sums:
    grouping groups
    uint64_t *calls  # by actor


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
        return g.slots + GROUPS if make else NULL
    g.used += 1
    slot.function, slot.number, slot.actor = function, number, actor
    return slot


cdef void _count_tasks(table_pass *p, void *into) noexcept nogil:
    cdef task_sums *sums = <task_sums *>into
    cdef grouping *g = &sums.groups
    cdef uint32_t j, actor
    cdef frt_task *task
    cdef group *other = g.slots + GROUPS
    cdef group *last = other
    cdef uint32_t live = pass_tasks(p)
    while live:
        for j in range(live):
            task = <frt_task *>p.records + p.at[j]
            actor = task.actor
            if last == other or last.function != task.function or last.number != task.function_index or \
                    (last.actor != 0) != (actor != 0):
                last = _group(g, task.function, task.function_index, actor, True)
            last.states[frt_word_state(p.words[p.at[j]])] += 1
            last.total += 1
            if 0 < actor <= <uint32_t>FRT_ACTORS:
                sums.calls[actor - 1] += 1
        live = pass_tasks(p)


cdef void _add_tasks(task_sums *to, const task_sums *more) noexcept nogil:
    """Add what another thread has counted."""
    cdef uint32_t k, s
    cdef const group *one
    cdef group *slot
    for k in range(FRT_ACTORS):
        to.calls[k] += more.calls[k]
    for k in range(GROUPS + 1):
        one = more.groups.slots + k
        if one.total:
            slot = to.groups.slots + GROUPS
            if k < GROUPS:
                slot = _group(&to.groups, one.function, one.number, one.actor, True)
            slot.total += one.total
            for s in range(STATES):
                slot.states[s] += one.states[s]


def count_tasks(Client client):
    """Count the tasks that have not ended.

    Returns:
        (rows, calls): a row for each function, (objref, number, actor, counts by state); actor is the index of an actor
        that has such a call, or None for a task; the objref of the row of functions that found no place is None. The
        dict `calls` has the unfinished calls by actor, for those that have any.
    """
    cdef frt_ctx *x = &client.x
    cdef task_sums *sums
    cdef uint64_t *calls
    cdef table_pass *some = NULL
    cdef uint32_t k, n, threads
    cdef group *slot
    client.ensure()
    n = frt_tasks(x)
    threads = pass_threads(n)
    sums = <task_sums *>calloc(threads, sizeof(task_sums))
    calls = <uint64_t *>calloc(threads, FRT_ACTORS * sizeof(uint64_t))
    try:
        if sums == NULL or calls == NULL:
            raise MemoryError()
        for k in range(threads):
            sums[k].calls = calls + k * FRT_ACTORS
        some = pass_begin(x, n, PASS_EXISTING, threads)
        with nogil:
            pass_read(some, threads, _count_tasks, sums, sizeof(task_sums))
            for k in range(1, threads):
                _add_tasks(sums, sums + k)
        rows = []
        for k in range(GROUPS + 1):
            slot = sums.groups.slots + k
            if slot.total:
                rows.append((slot.function if k < GROUPS else None, slot.number,
                             slot.actor - 1 if slot.actor else None, [slot.states[s] for s in range(STATES)]))
        return rows, {k: sums.calls[k] for k in range(FRT_ACTORS) if sums.calls[k]}
    finally:
        free(sums)
        free(calls)
        free(some)


cdef struct object_sums:
    uint64_t count[STATES][WHATS][TYPES]
    uint64_t nbytes[STATES][WHATS][TYPES]
    const uint8_t *functions
    const uint8_t *types


cdef uint8_t _bit(const uint8_t *bits, uint32_t i) noexcept nogil:
    return bits[i >> 3] >> (i & 7) & 1


cdef uint32_t pages_what(const frt_entry *entry, uint32_t i, const uint8_t *functions) noexcept nogil:
    """VALUE, RESULT, ACTOR or FUNCTION."""
    if _bit(functions, i):
        return 3
    if entry.flags & FRT_ENTRY_ACTOR:
        return 2
    return 1 if entry.task else 0


cdef void _count_objects(table_pass *p, void *into) noexcept nogil:
    cdef object_sums *sums = <object_sums *>into
    cdef uint32_t j, state, what, kind
    cdef uint64_t nbytes
    cdef frt_entry *entry
    cdef uint32_t live = pass_objects(p)
    while live:
        for j in range(live):
            entry, state = <frt_entry *>p.records + p.at[j], frt_word_state(p.words[p.at[j]])
            what = pages_what(entry, p.first + p.at[j], sums.functions)
            kind, nbytes = sums.types[entry.kind], entry.bytes
            if state == <uint32_t>FRT_OBJ_PENDING:
                kind, nbytes = 0, 0
            elif state == <uint32_t>FRT_OBJ_SPILLED and not entry.flags & FRT_ENTRY_FILE:
                state = STATES - 1  # another node keeps it
            sums.count[state][what][kind] += 1
            sums.nbytes[state][what][kind] += nbytes
        live = pass_objects(p)


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
    cdef table_pass *some = NULL
    cdef uint8_t *functions
    cdef uint32_t n, k, s, w, t, threads
    client.ensure()
    if len(types) != KIND_CODES or max(types) >= TYPES:
        raise ValueError("types must be 65,536 bytes below 32")
    n = frt_objects(x)
    threads = pass_threads(n)
    functions = pages_functions(x, n)
    sums = <object_sums *>calloc(threads, sizeof(object_sums))
    try:
        if sums == NULL:
            raise MemoryError()
        some = pass_begin(x, n, PASS_EXISTING, threads)
        for k in range(threads):
            sums[k].functions, sums[k].types = functions, <const uint8_t *><const char *>types
        with nogil:
            pass_read(some, threads, _count_objects, sums, sizeof(object_sums))
            for k in range(1, threads):
                for s in range(STATES):
                    for w in range(WHATS):
                        for t in range(TYPES):
                            sums.count[s][w][t] += sums[k].count[s][w][t]
                            sums.nbytes[s][w][t] += sums[k].nbytes[s][w][t]
        return [(s, w, t, sums.count[s][w][t], sums.nbytes[s][w][t])
                for s in range(STATES) for w in range(WHATS) for t in range(TYPES) if sums.count[s][w][t]]
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
    const void *filter  # a task_filter or an object_filter


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


cdef heap *_heaps(uint32_t threads, uint32_t limit, const void *filter) except NULL:
    """An empty heap for each thread; the caller frees them."""
    cdef uint32_t most = min(limit, <uint32_t>ROWS_MAX)
    cdef heap *h = <heap *>calloc(1, threads * (sizeof(heap) + (most + 1) * sizeof(found)))
    cdef uint32_t k
    if h == NULL:
        raise MemoryError()
    for k in range(threads):
        h[k].rows, h[k].limit, h[k].filter = <found *>(h + threads) + k * (most + 1), most, filter
    return h


cdef list _taken(heap *h, uint32_t threads):
    """(number, index) of the records that all heaps keep together, smallest number first; adds up in the first one."""
    cdef uint32_t k, i
    for k in range(1, threads):
        h.total += h[k].total
        for i in range(h[k].used):
            _offer(h, h[k].rows[i].number, h[k].rows[i].index)
    return sorted([(h.rows[i].number, h.rows[i].index) for i in range(h.used)])


cdef struct task_filter:
    uint64_t after, id
    uint32_t client, actor
    int cancelled  # 0 or 1; -1: any
    int attempts   # -1: any
    grouping *only  # only functions in it; NULL: any


cdef void _page_tasks(table_pass *p, void *into) noexcept nogil:
    cdef heap *h = <heap *>into
    cdef const task_filter *f = <const task_filter *>h.filter
    cdef uint32_t j, state
    cdef uint64_t word
    cdef frt_task *task
    cdef uint32_t live = pass_tasks(p)
    while live:
        for j in range(live):
            word, task = p.words[p.at[j]], <frt_task *>p.records + p.at[j]
            state = frt_word_state(word)
            if (
                    f.client == FRT_NONE or state >= <uint32_t>FRT_TASK_CLAIMED and frt_word_client(word) == f.client
            ) and (f.id == 0 or task.id == f.id) and (f.actor == FRT_NONE or task.actor == f.actor + 1) and \
                    (f.attempts < 0 or task.attempts == f.attempts) and \
                    (f.cancelled < 0 or frt_cancels(task.cancelled, task.id) == (f.cancelled == 1)) and \
                    (f.only == NULL or _group(f.only, task.function, task.function_index, task.actor, False) != NULL):
                h.total += 1
                if task.id > f.after:
                    _offer(h, task.id, p.first + p.at[j])
        live = pass_tasks(p)


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
    cdef task_filter f
    cdef heap *h = NULL
    cdef table_pass *some = NULL
    cdef uint32_t n, threads
    client.ensure()
    n = frt_tasks(x)
    threads = pass_threads(n)
    f.after, f.id = after, id
    f.client = FRT_NONE if client_index is None else client_index
    f.actor = FRT_NONE if actor is None else actor
    f.cancelled = -1 if cancelled is None else bool(cancelled)
    f.attempts = -1 if attempts is None else attempts
    f.only = NULL
    try:
        if functions is not None:
            f.only = <grouping *>calloc(1, sizeof(grouping))
            if f.only == NULL:
                raise MemoryError()
            for function, number, call in functions:
                _group(f.only, function, number, 1 if call else 0, True).total = 1
        h = _heaps(threads, limit, &f)
        some = pass_begin(x, n, states, threads)
        with nogil:
            pass_read(some, threads, _page_tasks, h, sizeof(heap))
        taken = _taken(h, threads)
        return _page(h, taken, [inspect_task(x, index) for _, index in taken], "id")
    finally:
        free(f.only)
        free(h)
        free(some)


cdef struct object_filter:
    uint64_t after, objref, bytes_min
    uint32_t states, whats
    uint32_t holder, pinner
    int error      # 0 or 1; -1: any
    bint remote    # whether values that other nodes keep match
    const uint8_t *kinds
    const uint8_t *functions
    const uint8_t *named
    frt_ctx *x


cdef bint _has_bit(frt_ctx *x, uint32_t i, uint32_t kind, uint32_t client) noexcept nogil:
    return client == FRT_NONE or client < frt_clients(x) and \
        a64_load_acq(frt_bits(x, i, kind, client >> 6)) >> (client & 63) & 1


cdef bint _matches(frt_ctx *x, const frt_entry *entry, uint32_t i, uint32_t state,
                   const object_filter *f) noexcept nogil:
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


cdef void _page_objects(table_pass *p, void *into) noexcept nogil:
    cdef heap *h = <heap *>into
    cdef const object_filter *f = <const object_filter *>h.filter
    cdef uint32_t j, i
    cdef frt_entry *entry
    cdef uint32_t live = pass_objects(p)
    while live:
        for j in range(live):
            entry, i = <frt_entry *>p.records + p.at[j], p.first + p.at[j]
            if _matches(f.x, entry, i, frt_word_state(p.words[p.at[j]]), f):
                h.total += 1
                if entry.objref > f.after:
                    _offer(h, entry.objref, i)
        live = pass_objects(p)


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
    cdef heap *h = NULL
    cdef object_filter f
    cdef table_pass *some = NULL
    cdef uint8_t *all_functions = NULL
    cdef uint8_t *named = NULL
    cdef uint32_t n, i, threads
    client.ensure()
    n = frt_objects(x)
    threads = pass_threads(n)
    if kinds is not None and len(kinds) != KIND_CODES + 1:
        raise ValueError("kinds must be 65,537 bytes")
    f.x, f.after, f.objref, f.bytes_min, f.states, f.remote = x, after, objref, bytes_min, states, remote
    f.whats = FRT_NONE if whats is None else sum([1 << what for what in set(whats)])
    f.holder = FRT_NONE if holder is None else holder
    f.pinner = FRT_NONE if pinner is None else pinner
    f.error = -1 if error is None else bool(error)
    f.kinds = NULL if kinds is None else <const uint8_t *><const char *>kinds
    try:
        all_functions = pages_functions(x, n)
        named = <uint8_t *>calloc(n // 8 + 1, 1)
        if named == NULL:
            raise MemoryError()
        for i in functions:
            if i < n:
                named[i >> 3] |= <uint8_t>(1 << (i & 7))
        f.functions, f.named = all_functions, named
        h = _heaps(threads, limit, &f)
        some = pass_begin(x, n, states | (<uint32_t>1 << FRT_OBJ_SPILLED if remote else 0), threads)
        with nogil:
            pass_read(some, threads, _page_objects, h, sizeof(heap))
        taken = _taken(h, threads)
        return _page(h, taken, [inspect_object(x, index) for _, index in taken], "objref")
    finally:
        free(h)
        free(some)
        free(all_functions)
        free(named)


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
        pass_copy(x, frt_state(x, i), sizeof(word), <char *>&word)
        if frt_word_state(word) == FRT_OBJ_SEALED:
            pass_copy(x, x.entries + i, sizeof(entry), <char *>&entry)
            found += entry.task == 0 and entry.bytes <= bytes_max
    return <uint64_t>found * n // looked if looked else 0
