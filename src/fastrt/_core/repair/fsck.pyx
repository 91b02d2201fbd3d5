# cython: language_level=3, freethreading_compatible=True
"""Check the arena's invariants. The result is a list of sentences, one for each invariant that does not hold.

Some can be checked only while no process works (`quiet`): derived structures and counts change a moment after
the words that they are derived from.
"""
import os

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastrt._core.memory.arena cimport arena_block_bytes, arena_owner
from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.priority_queue cimport ranked_key
from fastrt._core.memory.trace cimport trace_wanted
from fastrt._core.objects.functions cimport functions_counts
from fastrt._core.objects.references cimport links_names
from fastrt._core.repair.passes cimport (
    PASS_EXISTING, PASS_THREADS, pass_begin, pass_objects, pass_read, pass_threads, table_pass,
)


cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)


cdef bint _stamped_by_living(frt_ctx *x, uint64_t word) noexcept:
    cdef uint32_t c = frt_word_client(word)
    return c < frt_clients(x) and frt_word_state(x.clients[c].word) != FRT_CLIENT_FREE


cdef list _check_objects(frt_ctx *x, uint32_t *counted, bint quiet):
    cdef list bad = []
    cdef uint32_t i, c, w, task, empty = 0
    cdef int state
    cdef uint64_t word, bits
    cdef frt_entry *entry
    for i in range(frt_objects(x)):
        word = frt_state(x, i)[0]
        state = frt_word_state(word)
        entry = x.entries + i
        if state > FRT_OBJ_RESTORING:
            bad.append(f"object {i} is in state {state}, which does not exist")
            continue
        if state == FRT_OBJ_EMPTY:
            empty += 1
        elif state != FRT_OBJ_PENDING and state != FRT_OBJ_SEALED and not _stamped_by_living(x, word):
            bad.append(f"object {i} in state {state} is stamped by client {frt_word_client(word)}, which is gone")
        if entry.offset and state == FRT_OBJ_EMPTY:
            bad.append(f"empty object {i} names a block")
        if entry.offset and arena_owner(x, entry.offset) != i + 1:
            bad.append(f"object {i} names block {entry.offset}, whose owner word is {arena_owner(x, entry.offset)}")
        if entry.offset and state == FRT_OBJ_SEALED and arena_block_bytes(x, entry.offset) < entry.bytes:
            bad.append(f"object {i} of {entry.bytes} bytes lies in a block of {arena_block_bytes(x, entry.offset)}")
        for w in range(frt_words(x)):
            bits = frt_bits(x, i, FRT_REFS, w)[0] | frt_bits(x, i, FRT_PINS, w)[0]
            while bits:
                c = w * 64 + frt_lowest(bits)
                bits &= bits - 1
                if frt_word_state(x.clients[c].word) == FRT_CLIENT_FREE:
                    bad.append(f"object {i} is held by client {c}, which is gone")
        task = entry.task
        if quiet and state == FRT_OBJ_PENDING and (task == 0 or task > frt_tasks(x) or frt_word_state(
                x.task_words[task - 1]) in (FRT_TASK_EMPTY, FRT_TASK_RESERVED)):
            bad.append(f"object {i} waits for task {<int>task - 1}, which does not exist")
        if quiet and (state == FRT_OBJ_SEALED or state == FRT_OBJ_SPILLED):
            if not (frt_held(x, i) or counted[i]):
                bad.append(f"sealed object {i} has no holder")
        if quiet and state == FRT_OBJ_SPILLED and entry.offset and entry.nrefs == 0:
            bad.append(f"spilled object {i} names a block")
        if quiet and state in (FRT_OBJ_PENDING, FRT_OBJ_SEALED, FRT_OBJ_SPILLED) and entry.counted != counted[i]:
            bad.append(f"object {i} is counted {entry.counted} times, {counted[i]} records name it")
    if quiet and empty != x.sb.objects.free_count:
        bad.append(f"{empty} objects are empty, the free stack holds {x.sb.objects.free_count}")
    return bad


cdef list _check_files(frt_ctx *x):
    """Check the files of values: each spilled value has one, and each file belongs to a value."""
    cdef list bad = []
    cdef uint32_t i
    cdef dict files = {}
    folder = x.sb.spill_dir[:strnlen(x.sb.spill_dir, 256)]
    if not folder:
        return bad
    for i in range(frt_objects(x)):
        if frt_word_state(frt_state(x, i)[0]) > FRT_OBJ_PENDING and x.entries[i].flags & FRT_ENTRY_FILE:
            files[b"%016x" % x.entries[i].objref] = i, frt_word_state(frt_state(x, i)[0])
    try:
        found = {name for name in os.listdir(folder) if not name.startswith(b".")}  # its mark
    except FileNotFoundError:
        found = set()
    for name in sorted(found - files.keys()):
        bad.append(f"the file {name.decode('utf-8', 'replace')} belongs to no object")
    for name, (i, state) in files.items():
        if state == FRT_OBJ_SPILLED and name not in found:
            bad.append(f"spilled object {i} has no file")
    return bad


cdef void _recount(frt_ctx *x, uint32_t *counted) noexcept:
    """Compute the `counted` words from the records."""
    cdef uint32_t i, n
    cdef frt_refslot *slots
    cdef frt_body body
    for i in range(frt_objects(x)):
        if x.entries[i].flags & FRT_ENTRY_COUNTED and frt_word_state(frt_state(x, i)[0]) != FRT_OBJ_EMPTY:
            slots = frt_entry_refs(x, i, &n)
            _count(x, counted, slots, n)
        if x.entries[i].flags & FRT_ENTRY_STREAM and frt_word_state(frt_state(x, i)[0]) != FRT_OBJ_EMPTY:
            _count_items(x, counted, i)
    for i in range(frt_tasks(x)):
        if x.tasks[i].flags & FRT_TASK_COUNTED and frt_word_state(x.task_words[i]) != FRT_TASK_EMPTY:
            frt_task_body(x, i, &body)
            _count(x, counted, body.refs, body.nrefs)
    for i in range(frt_functions(x)):
        if functions_counts(x.functions + i):
            n = x.functions[i].index
            if n < x.objects_max:
                counted[n] += 1
    for i in range(frt_actors(x)):
        n = x.actors[i].index
        if x.actors[i].flags & FRT_ACTOR_COUNTED and n < x.objects_max and \
                frt_word_state(x.actors[i].word) != FRT_ACTOR_EMPTY:
            counted[n] += 1


cdef void _count(frt_ctx *x, uint32_t *counted, const frt_refslot *slots, uint32_t n) noexcept:
    cdef uint32_t k, i
    for k in range(n):
        i = slots[k].index
        if i < x.objects_max:
            counted[i] += 1


cdef void _count_items(frt_ctx *x, uint32_t *counted, uint32_t s) noexcept:
    """Count the items in a stream's list, as far as the list can be followed."""
    cdef uint32_t item = <uint32_t>frt_stream_of(x, s).head
    cdef uint32_t left = x.objects_max
    while 0 < item <= x.objects_max and left:
        left -= 1
        counted[item - 1] += 1
        item = x.entries[item - 1].next


cdef list _check_streams(frt_ctx *x):
    """Check the lists of stream items: they end, each item has a value, and the derived fields agree."""
    cdef list bad = []
    cdef uint32_t s, item, last, there
    cdef frt_stream *stream
    for s in range(frt_objects(x)):
        if not x.entries[s].flags & FRT_ENTRY_STREAM or frt_word_state(frt_state(x, s)[0]) != FRT_OBJ_SEALED:
            continue
        stream = frt_stream_of(x, s)
        item, last, there = <uint32_t>stream.head, 0, 0
        while 0 < item <= x.objects_max and there < x.objects_max:
            if frt_word_state(frt_state(x, item - 1)[0]) not in (FRT_OBJ_SEALED, FRT_OBJ_SPILLED):
                bad.append(f"item {item - 1} of stream {s} is in state {frt_word_state(frt_state(x, item - 1)[0])}")
            there, last = there + 1, item
            item = x.entries[item - 1].next
        if item:
            bad.append(f"the items of stream {s} go on with {item - 1} after {there} of them")
        elif last != stream.last:
            bad.append(f"the items of stream {s} end with {<int>last - 1}, not with {<int>stream.last - 1}")
        if <uint32_t>stream.produced != <uint32_t>(<uint32_t>(stream.head >> 32) + there):
            bad.append(f"stream {s}: {stream.produced} items produced, {stream.head >> 32} taken, {there} unread")
    return bad


cdef list _check_bodies(frt_ctx *x):
    """Check bodies and refs: they lie inside their blocks, and the refs name existing objects."""
    cdef list bad = []
    cdef frt_body body
    cdef frt_refslot *slots
    cdef frt_refslot slot
    cdef uint32_t i, k, n
    for i in range(frt_objects(x)):
        if x.entries[i].flags & FRT_ENTRY_COUNTED and frt_word_state(frt_state(x, i)[0]) != FRT_OBJ_EMPTY:
            slots = frt_entry_refs(x, i, &n)
            if n != x.entries[i].nrefs:
                bad.append(f"object {i} contains {x.entries[i].nrefs} references, which lie outside its block")
            for k in range(n):
                slot = slots[k]
                if not links_names(x, &slot):
                    bad.append(f"object {i} contains object {slot.objref:#x}, which does not exist")
    for i in range(frt_tasks(x)):
        if x.tasks[i].flags & FRT_TASK_COUNTED and frt_word_state(x.task_words[i]) != FRT_TASK_EMPTY:
            if not frt_task_body(x, i, &body):
                bad.append(f"task {i} has a body that lies outside its block")
            for k in range(body.nrefs):
                slot = body.refs[k]
                if not links_names(x, &slot):
                    bad.append(f"task {i} names object {slot.objref:#x}, which does not exist")
    return bad


cdef list _check_tasks(frt_ctx *x, bint quiet):
    cdef list bad = []
    cdef uint32_t t, cells, empty = 0
    cdef int state
    cdef uint64_t k
    cells = x.sb.ring_cells
    if cells == 0 or cells & (cells - 1) or cells > x.ring_max or x.sb.ring_tail - x.sb.ring_head > cells:
        return [f"the ready queue runs from {x.sb.ring_head} to {x.sb.ring_tail} in {cells} cells"]
    ring = {x.ring[k & (cells - 1)] for k in range(x.sb.ring_head, x.sb.ring_tail)}
    ranked = _ranked(x, quiet, bad)
    for t in range(frt_tasks(x)):
        state = frt_word_state(x.task_words[t])
        if state > FRT_TASK_ENDING:
            bad.append(f"task {t} is in state {state}, which does not exist")
        if state == FRT_TASK_EMPTY:
            empty += 1
        if state in (FRT_TASK_RESERVED, FRT_TASK_CLAIMED, FRT_TASK_RUNNING, FRT_TASK_BLOCKED, FRT_TASK_ENDING) \
                and not _stamped_by_living(x, x.task_words[t]):
            bad.append(f"task {t} in state {state} is stamped by client {frt_word_client(x.task_words[t])}, "
                       "which is gone")
        if x.tasks[t].offset and arena_owner(x, x.tasks[t].offset) != (FRT_OWNER_TASK | (t + 1)):
            bad.append(f"task {t} names block {x.tasks[t].offset}, which does not belong to it")
        if state == FRT_TASK_READY and x.tasks[t].actor:
            bad += _check_call(x, t, quiet)
        elif quiet and state == FRT_TASK_READY:
            cell = <uint64_t>frt_word_gen(x.task_words[t]) << 32 | t
            if not x.tasks[t].flags & FRT_TASK_RANKED and cell not in ring:
                bad.append(f"task {t} is ready and not queued")
            elif x.tasks[t].flags & FRT_TASK_RANKED and ranked.get(cell) != ranked_key(x, t):
                bad.append(f"task {t} of priority {x.tasks[t].priority} is ready and not queued with its key")
    if quiet and empty != x.sb.tasks.free_count:
        bad.append(f"{empty} task records are empty, the free stack holds {x.sb.tasks.free_count}")
    return bad


cdef dict _ranked(frt_ctx *x, bint quiet, list bad):
    """The cells of the heap of tasks with a priority, and their keys."""
    cdef uint32_t k, n = x.sb.ranked
    if n > x.sb.ranked_cells or x.sb.ranked_cells > x.tasks_max:
        bad.append(f"the heap of ready tasks has {n} of {x.sb.ranked_cells} cells, for {x.tasks_max} tasks")
        return {}
    for k in range(1, n if quiet else 0):
        if x.ranked[(k - 1) // 2].key > x.ranked[k].key:
            bad.append(f"cell {k} of the heap of ready tasks has a smaller key than the cell above it")
    return {x.ranked[k].cell: x.ranked[k].key for k in range(n)}


cdef list _check_call(frt_ctx *x, uint32_t t, bint quiet):
    """Check a READY call: its actor exists, and when quiet it is not dead (then the call would have been ended)."""
    cdef uint32_t a = x.tasks[t].actor - 1
    if a >= frt_actors(x):
        return [f"task {t} is a call of actor {a}, which does not exist"]
    state = frt_word_state(x.actors[a].word)
    if quiet and (state == FRT_ACTOR_EMPTY or state == FRT_ACTOR_DEAD):
        return [f"task {t} is a call of actor {a}, which is in state {state}"]
    return []


cdef list _check_actors(frt_ctx *x, bint quiet):
    cdef list bad = []
    cdef frt_actor *actor
    cdef uint32_t a
    cdef int state
    for a in range(frt_actors(x)):
        actor = x.actors + a
        state = frt_word_state(actor.word)
        if state > FRT_ACTOR_AWAY:
            bad.append(f"actor {a} is in state {state}, which does not exist")
        if state in (FRT_ACTOR_STARTING, FRT_ACTOR_LIVE, FRT_ACTOR_AWAY) and not _stamped_by_living(x, actor.word):
            bad.append(f"actor {a} in state {state} is stamped by client {frt_word_client(actor.word)}, "
                       "which is gone")
        if quiet and state != FRT_ACTOR_EMPTY and not actor.released and (
                actor.index >= x.objects_max or x.entries[actor.index].objref != actor.objref
                or x.entries[actor.index].actor != a + 1 or not x.entries[actor.index].flags & FRT_ENTRY_ACTOR):
            bad.append(f"actor {a} is not released, and its object {actor.objref:#x} does not exist")
        if quiet and state != FRT_ACTOR_EMPTY and not actor.released and actor.demand and (
                actor.demand_index >= x.objects_max or x.entries[actor.demand_index].objref != actor.demand):
            bad.append(f"actor {a} has the demand in object {actor.demand:#x}, which does not exist")
        if state != FRT_ACTOR_EMPTY and actor.flags & FRT_ACTOR_BARE and (actor.function or actor.mailbox):
            bad.append(f"actor {a} is BARE, and has a class or calls")
        if state == FRT_ACTOR_WANTED and actor.how[0]:
            bad.append(f"actor {a} is WANTED, and its record says how its last process ended")
        if <uint32_t>actor.mailbox > x.tasks_max:
            bad.append(f"the mailbox of actor {a} names task {<int><uint32_t>actor.mailbox - 1}, which is impossible")
    return bad


cdef object _list_problem(frt_ctx *x, uint32_t head, uint32_t i, uint32_t *found):
    """Count the tasks that wait for entry i (FRT_NONE: for admission); return the problem of their list, or None."""
    cdef uint32_t t, after = head, before = 0
    cdef frt_body body
    name = "the list of held tasks" if i == <uint32_t>FRT_NONE else f"the list of tasks that wait for object {i}"
    while after:
        if after > frt_tasks(x) or found[0] == frt_tasks(x):
            return f"{name} goes on with task {<int>after - 1} after {found[0]} others"
        t = after - 1
        if not x.tasks[t].flags & FRT_TASK_LINKED or not frt_task_body(x, t, &body) or \
                frt_word_state(x.task_words[t]) != FRT_TASK_WAITING or \
                (body.refs[x.tasks[t].dep].index if x.tasks[t].dep < body.ndeps else <uint32_t>FRT_NONE) != i:
            return f"{name} has task {t}, which does not wait for it"
        if before and x.tasks[t].before != before:
            return f"task {t} in {name} does not name the one before it"
        before, after = after, x.tasks[t].waiter
        found[0] += 1
    if head and x.tasks[head - 1].before != before:
        return f"the first task in {name} does not name the last"
    return None


cdef list _check_lists(frt_ctx *x):
    """Check the lists of tasks that wait for an object or for admission: each task that says so is in one."""
    cdef uint32_t i, t, found = 0, linked = 0
    cdef list bad = [_list_problem(x, x.sb.held, FRT_NONE, &found)]
    for i in range(frt_objects(x)):
        if x.entries[i].waiter and frt_word_state(frt_state(x, i)[0]) == FRT_OBJ_PENDING:
            bad.append(_list_problem(x, x.entries[i].waiter, i, &found))
    bad = [problem for problem in bad if problem is not None]
    for t in range(frt_tasks(x)):
        linked += (x.tasks[t].flags & FRT_TASK_LINKED) != 0 and frt_word_state(x.task_words[t]) == FRT_TASK_WAITING
    if not bad and linked != found:
        bad.append(f"{linked} tasks are linked in a list of waiting tasks, and the lists have {found}")
    return bad


cdef list _check_outcomes(frt_ctx *x):
    """Check the kept failures and the counts of ended tasks."""
    cdef list bad = []
    cdef uint32_t k, n
    cdef uint64_t word
    cdef frt_failure *f
    for k in range(FRT_FAILURES):
        word = a64_load_acq(x.failure_words + k)
        state = frt_word_state(word)
        if state > <int>FRT_FAILURE_MENDED:
            bad.append(f"failure {k} is in state {state}, which does not exist")
        elif state == <int>FRT_FAILURE_WRITING and not _stamped_by_living(x, word):
            bad.append(f"failure {k} is being written by client {frt_word_client(word)}, which is gone")
        elif state != <int>FRT_FAILURE_EMPTY and (frt_failure_number(word) - 1) % FRT_FAILURES != k:
            bad.append(f"failure {frt_failure_number(word)} is at place {k} of {FRT_FAILURES}")
        elif state >= <int>FRT_FAILURE_KEPT:
            f = x.failures + k
            n = sum([f.lengths[text] for text in range(FRT_TEXTS)])
            if n > sizeof(f.text) and a64_load_acq(x.failure_words + k) == word:
                bad.append(f"failure {frt_failure_number(word)} has texts of {n} bytes")
    for k in range(frt_clients(x)):
        if x.clients[k].tallies > FRT_TALLIES:
            bad.append(f"client {k} counts the tasks of {x.clients[k].tallies} functions, of {FRT_TALLIES} at most")
    return bad


cdef object _owner_problem(frt_ctx *x, uint32_t owner, uint64_t offset):
    """A sentence if the record that an owner word names does not name the block; else None."""
    cdef uint32_t i = (owner & ~FRT_OWNER_TASK) - 1
    if owner & FRT_OWNER_TASK:
        if i >= frt_tasks(x) or x.tasks[i].offset != offset:
            return f"block {offset} belongs to task {i}, which does not name it"
    elif i >= frt_objects(x) or x.entries[i].offset != offset:
        return f"block {offset} belongs to object {i}, which does not name it"
    return None


cdef list _check_pages(frt_ctx *x, bint quiet):
    cdef list bad = []
    cdef uint32_t page = 0
    cdef uint32_t n, b, cls, owner, blocks
    cdef uint64_t used = 0
    cdef uint64_t offset, bits
    while page < frt_pages(x):
        n = <uint32_t>x.pages[page]
        kind = <int>(x.pages[page] >> 56)
        cls = (x.pages[page] >> 48) & 255
        if n == 0 or n > frt_pages(x) - page or kind not in (FRT_PAGE_FREE, FRT_PAGE_RUN, FRT_PAGE_SLAB) \
                or kind == FRT_PAGE_SLAB and (cls >= FRT_CLASSES or n != 1):
            bad.append(f"page {page} has word {x.pages[page]:#x}: the walk over the arena ends here")
            return bad
        offset = x.payload_offset + (<uint64_t>page << FRT_PAGE_SHIFT)
        if kind != FRT_PAGE_FREE:
            used += n
        blocks = 1
        if kind == FRT_PAGE_SLAB:
            blocks = FRT_PAGE_BYTES // FRT_CLASS_BYTES(cls)
        bits = 0
        for b in range(blocks):
            owner = x.owners[<uint64_t>page * FRT_BLOCKS_PER_PAGE + b]
            if kind == FRT_PAGE_FREE:
                if owner:
                    bad.append(f"free page {page} has owner {owner}")
            elif owner:
                problem = _owner_problem(x, owner, offset + b * (FRT_CLASS_BYTES(cls) if blocks > 1 else 0))
                if problem:
                    bad.append(problem)
            else:
                bits |= <uint64_t>1 << b
                if quiet and kind == FRT_PAGE_RUN:
                    bad.append(f"run {page} of {n} pages has no owner")
        if quiet and kind == FRT_PAGE_SLAB and bits != x.bits[page]:
            bad.append(f"slab page {page} has bitmap {x.bits[page]:#x}, its owner words say {bits:#x}")
        page += n
    if page != x.sb.pages_committed:
        bad.append(f"the walk over the pages ends at {page}, not at {x.sb.pages_committed}")
    if quiet and used != x.sb.used_pages:
        bad.append(f"{used} pages are in use, the counter says {x.sb.used_pages}")
    return bad


def fsck(Client client, bint quiet=False):
    """Walk the whole arena and list the invariants that do not hold.

    Args:
        client: an attachment.
        quiet: no process is working now, so that derived structures must agree, too.
    Returns:
        A list of sentences; empty when every invariant holds.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t *counted
    cdef list bad = []
    client.ensure()
    counted = <uint32_t *>calloc(x.objects_max, sizeof(uint32_t))
    if counted == NULL:
        raise MemoryError()
    try:
        _recount(x, counted)
        bad += _check_objects(x, counted, quiet)
        if quiet:
            bad += _check_bodies(x)
            bad += _check_lists(x)
            bad += _check_streams(x)
            bad += _check_files(x)
        bad += _check_tasks(x, quiet)
        bad += _check_actors(x, quiet)
        bad += _check_pages(x, quiet)
        bad += _check_outcomes(x)
        if quiet and (x.sb.trace_on != 0) != trace_wanted(x):
            bad.append(f"recording is {'on' if x.sb.trace_on else 'off'}, against the counts of the clients")
    finally:
        free(counted)
    return bad


cdef struct holding:
    uint64_t nbytes, objects


cdef struct holdings:
    uint32_t words
    holding *clients  # 64 for each word


cdef void _holders(table_pass *p, void *into) noexcept nogil:
    cdef holdings *sums = <holdings *>into
    cdef holding *one
    cdef uint32_t j, i, w
    cdef uint64_t room, bits
    cdef uint32_t live = pass_objects(p)
    while live:
        for j in range(live):
            i, room = p.first + p.at[j], (<frt_entry *>p.records + p.at[j]).offset
            room = arena_block_bytes(&p.r, room) if room else 0
            for w in range(sums.words if room else 0):
                bits = a64_load_acq(frt_bits(&p.r, i, FRT_REFS, w)) | a64_load_acq(frt_bits(&p.r, i, FRT_PINS, w))
                while bits:
                    one = sums.clients + w * 64 + frt_lowest(bits)
                    one.nbytes += room
                    one.objects += 1
                    bits &= bits - 1
        live = pass_objects(p)


def holders(Client client):
    """List the clients that keep memory of the store in use.

    Returns:
        A list of dicts {client, pid, kind, bytes, objects}, one per client that holds an object in a block. An object
        that several clients hold counts for each.
    """
    cdef frt_ctx *x = &client.x
    cdef table_pass *some = NULL
    cdef holdings sums[PASS_THREADS]
    cdef holding *clients
    cdef uint32_t c, k, n, words, threads
    client.ensure()
    n, words = frt_objects(x), frt_words(x)
    threads = pass_threads(n)
    clients = <holding *>calloc(threads * words * 64, sizeof(holding))
    try:
        if clients == NULL:
            raise MemoryError()
        for k in range(threads):
            sums[k].words, sums[k].clients = words, clients + k * words * 64
        some = pass_begin(x, n, PASS_EXISTING, threads)
        with nogil:
            pass_read(some, threads, _holders, sums, sizeof(holdings))
            for c in range(words * 64, threads * words * 64):
                clients[c % (words * 64)].nbytes += clients[c].nbytes
                clients[c % (words * 64)].objects += clients[c].objects
        return [{"client": c, "pid": x.clients[c].pid, "kind": x.clients[c].kind, "bytes": clients[c].nbytes,
                 "objects": clients[c].objects} for c in range(words * 64) if clients[c].objects]
    finally:
        free(clients)
        free(some)


def usage(Client client):
    """Count the records and bytes in use, for listings and tests.

    Returns:
        A dict: objects, tasks and actors in use; functions (their objects are among the objects); reserved (records of
        both tables that clients keep in reserve); queued (tasks); bytes_used (whole pages), bytes_committed and
        bytes_max of the payload.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t i
    cdef uint64_t objects = 0
    cdef uint64_t tasks = 0
    cdef uint64_t actors = 0
    cdef uint64_t functions = 0
    cdef uint64_t reserved = 0
    cdef int state
    client.ensure()
    for i in range(frt_functions(x)):
        functions += functions_counts(x.functions + i)
    for i in range(frt_actors(x)):
        actors += frt_word_state(x.actors[i].word) != FRT_ACTOR_EMPTY
    for i in range(frt_objects(x)):
        state = frt_word_state(frt_state(x, i)[0])
        objects += state > FRT_OBJ_RESERVED
        reserved += state == FRT_OBJ_RESERVED
    for i in range(frt_tasks(x)):
        state = frt_word_state(x.task_words[i])
        tasks += state > FRT_TASK_RESERVED
        reserved += state == FRT_TASK_RESERVED
    return {
        "objects": objects, "tasks": tasks, "actors": actors, "functions": functions, "reserved": reserved,
        "queued": x.sb.ring_tail - x.sb.ring_head + x.sb.ranked,
        "bytes_used": x.sb.used_pages << FRT_PAGE_SHIFT,
        "bytes_committed": <uint64_t>x.sb.pages_committed << FRT_PAGE_SHIFT,
        "bytes_max": <uint64_t>x.pages_max << FRT_PAGE_SHIFT,
    }
