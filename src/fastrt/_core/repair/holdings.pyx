# cython: language_level=3, freethreading_compatible=True
"""Sums of all objects by the source line that made them and by the process that holds them, in one pass.

The pass is that of `pages`: it takes no lock and makes no Python object for a record. An object that several processes
hold counts for each of them.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastrt._core.memory.arena cimport arena_block_bytes
from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.repair.pages cimport pages_functions, pages_what
from fastrt._core.repair.passes cimport PASS_EXISTING, pass_begin, pass_objects, table_pass

cdef enum:
    LINES = 4096  # slots of the table of lines, a power of two; half of them are used
    USES = 4      # `pages.VALUE` and the like
    KINDS = 6

# The kinds of the totals: pinned and inline values are parts of the stored ones.
PENDING, STORED, SPILLED, REMOTE, PINNED, INLINE = range(KINDS)


cdef struct line:
    uint32_t site, what
    uint64_t count, nbytes, stored, pinned, spilled


cdef struct held:
    uint64_t objects, nbytes, pinned, stored


cdef struct summing:
    line *lines         # LINES, and one more for the lines that found no slot
    uint32_t *holders   # objects by slot and client
    held *clients
    uint32_t used, nclients
    uint64_t count[KINDS]
    uint64_t nbytes[KINDS]
    const uint8_t *functions


cdef uint32_t _slot(summing *s, uint32_t site, uint32_t what) noexcept nogil:
    cdef uint32_t k = ((site * USES + what) * <uint32_t>2654435761) >> 20
    while s.lines[k].count:
        if s.lines[k].site == site and s.lines[k].what == what:
            return k
        k = (k + 1) & (LINES - 1)
    if s.used >= LINES // 2:
        return LINES
    s.used += 1
    s.lines[k].site, s.lines[k].what = site, what
    return k


cdef void _add(summing *s, frt_ctx *r, const frt_entry *entry, uint32_t i, uint32_t state) noexcept nogil:
    cdef uint32_t kind = 1, w, c, k
    cdef uint64_t nbytes = entry.bytes
    cdef uint64_t room = arena_block_bytes(r, entry.offset) if entry.offset else 0
    cdef uint64_t pins, bits
    cdef uint64_t any_pins = 0
    cdef held *client
    cdef line *one
    if state == <uint32_t>FRT_OBJ_PENDING:
        kind, nbytes = 0, 0
    elif state == <uint32_t>FRT_OBJ_SPILLED:
        kind, room = 2 if entry.flags & FRT_ENTRY_FILE else 3, 0
    k = _slot(s, entry.site, pages_what(entry, i, s.functions))
    for w in range(s.nclients // 64):
        pins = a64_load_acq(frt_bits(r, i, FRT_PINS, w))
        bits = pins | a64_load_acq(frt_bits(r, i, FRT_REFS, w))
        any_pins |= pins
        while bits:
            c = w * 64 + frt_lowest(bits)
            client = s.clients + c
            client.objects += 1
            client.nbytes += nbytes
            client.stored += room
            client.pinned += nbytes if pins >> (c & 63) & 1 else 0
            s.holders[k * s.nclients + c] += 1
            bits &= bits - 1
    s.count[kind] += 1
    s.nbytes[kind] += nbytes
    if any_pins:
        s.count[4] += 1
        s.nbytes[4] += nbytes
    if kind == 1 and room == 0:
        s.count[5] += 1
        s.nbytes[5] += nbytes
    one = s.lines + k
    one.count += 1
    one.nbytes += nbytes
    one.stored += room
    one.pinned += any_pins != 0
    one.spilled += kind == 2


cdef void _sum(table_pass *p, summing *s) noexcept nogil:
    cdef uint32_t j
    cdef uint32_t live = pass_objects(p)
    while live:
        for j in range(live):
            _add(s, &p.r, <frt_entry *>p.records + p.at[j], p.first + p.at[j], frt_word_state(p.words[p.at[j]]))
        live = pass_objects(p)


def holdings(Client client):
    """Sum all objects.

    Returns:
        (lines, holders, totals): for each line and use (site or None for the lines beyond the first 2,048, use as of
        `pages.count_objects`, objects, bytes, bytes of their blocks, pinned objects, spilled objects, and objects by
        client); by client (objects, bytes, pinned bytes, bytes of the blocks); (objects, bytes) of PENDING and so on.
    """
    cdef frt_ctx *x = &client.x
    cdef summing s
    cdef table_pass *some = NULL
    cdef uint8_t *functions = NULL
    cdef uint32_t n, k, c
    cdef line *one
    client.ensure()
    n, s.used, s.nclients = frt_objects(x), 0, frt_clients(x)
    s.lines = <line *>calloc(LINES + 1, sizeof(line))
    s.holders = <uint32_t *>calloc(<size_t>(LINES + 1) * s.nclients, sizeof(uint32_t))
    s.clients = <held *>calloc(s.nclients, sizeof(held))
    for k in range(KINDS):
        s.count[k] = s.nbytes[k] = 0
    try:
        if s.lines == NULL or s.holders == NULL or s.clients == NULL:
            raise MemoryError()
        functions = pages_functions(x, n)
        s.functions = functions
        some = pass_begin(x, n, PASS_EXISTING, 1)
        with nogil:
            _sum(some, &s)
        rows = []
        for k in range(LINES + 1):
            one = s.lines + k
            if one.count:
                by_client = {c: s.holders[k * s.nclients + c] for c in range(s.nclients)
                             if s.holders[k * s.nclients + c]}
                rows.append((None if k == LINES else one.site, one.what, one.count, one.nbytes, one.stored,
                             one.pinned, one.spilled, by_client))
        holders = {c: (s.clients[c].objects, s.clients[c].nbytes, s.clients[c].pinned, s.clients[c].stored)
                   for c in range(s.nclients) if s.clients[c].objects}
        return rows, holders, [(s.count[k], s.nbytes[k]) for k in range(KINDS)]
    finally:
        free(some)
        free(functions)
        free(s.lines)
        free(s.holders)
        free(s.clients)
