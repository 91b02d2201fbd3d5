# cython: language_level=3
"""The tables as people want to see them: rows of what is there, read without a lock and without a hold.

What is read may change meanwhile, so a row is what was true at some moment of the look, and a record that got another
tenant in the middle of it is left out. Nothing here is on anybody's path.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.arena cimport arena_block_bytes
from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.functions cimport functions_counts
from fastrt._core.objects.handles cimport Ref, ref_use
from fastrt._core.tasks.records cimport task_is_cancelled, task_priority

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

OBJECT_STATES = {
    FRT_OBJ_PENDING: "pending", FRT_OBJ_SEALED: "sealed", FRT_OBJ_DELETING: "deleting", FRT_OBJ_FREEING: "freeing",
    FRT_OBJ_SPILLING: "spilling", FRT_OBJ_SPILLED: "spilled", FRT_OBJ_RESTORING: "restoring"}
TASK_STATES = {
    FRT_TASK_WAITING: "waiting", FRT_TASK_READY: "ready", FRT_TASK_CLAIMED: "claimed", FRT_TASK_RUNNING: "running",
    FRT_TASK_BLOCKED: "blocked", FRT_TASK_ENDING: "ending"}


cdef list _clients_in(frt_ctx *x, uint32_t i, uint32_t kind):
    cdef list found = []
    cdef uint64_t left
    cdef uint32_t w
    for w in range(frt_words(x)):
        left = a64_load_acq(frt_bits(x, i, kind, w))
        while left:
            found.append(w * 64 + frt_lowest(left))
            left &= left - 1
    return found


cdef object _not_ready(frt_ctx *x, const frt_body *body):
    """The objref of the first argument whose value is not there yet, or None."""
    cdef frt_refslot slot
    cdef uint32_t k
    for k in range(body.ndeps):
        slot = body.refs[k]
        if slot.index < frt_objects(x) and a64_load_rlx(&x.entries[slot.index].objref) == slot.objref and \
                frt_word_state(a64_load_acq(frt_state(x, slot.index))) == FRT_OBJ_PENDING:
            return slot.objref
    return None


def objects(Client client, uint64_t bytes_min=0, size_t most=1 << 31):
    """What is in the object table.

    Args:
        bytes_min: leave out smaller values.
        most: how many rows at most.
    Returns:
        A list of dicts: index, objref, state (a word), bytes of the value, room (bytes of its block; 0 in the table
        itself), kind, error, refs and pins (clients), counted (values and tasks that name it), contains, made_by_task,
        is_actor, site, used (the store's clock when it was last read).
    """
    cdef frt_ctx *x = &client.x
    cdef frt_entry *entry
    cdef uint64_t word, offset
    cdef uint32_t i
    client.ensure()
    rows = []
    for i in range(frt_objects(x)):
        word = a64_load_acq(frt_state(x, i))
        if frt_word_state(word) <= FRT_OBJ_RESERVED:
            continue
        entry = x.entries + i
        if a64_load_rlx(&entry.bytes) < bytes_min:
            continue
        offset = a64_load_rlx(&entry.offset)
        row = {
            "index": i, "objref": entry.objref, "state": OBJECT_STATES.get(frt_word_state(word), "?"),
            "bytes": entry.bytes, "room": arena_block_bytes(x, offset) if offset else 0, "kind": entry.kind,
            "error": (entry.flags & FRT_ENTRY_ERROR) != 0, "refs": _clients_in(x, i, FRT_REFS),
            "pins": _clients_in(x, i, FRT_PINS), "counted": entry.counted, "contains": entry.nrefs,
            "made_by_task": entry.task != 0, "is_actor": (entry.flags & FRT_ENTRY_ACTOR) != 0, "site": entry.site,
            "used": entry.used,
        }
        if frt_word_gen(a64_load_acq(frt_state(x, i))) == frt_word_gen(word):
            rows.append(row)
            if len(rows) >= most:
                break
    return rows


def tasks(Client client):
    """The tasks and calls that have not ended.

    Returns:
        A list of dicts: task, id, state (a word), client (that runs it, or None), function (objref and index of its
        object, or objref of the class and the number of the method), actor (index or None), attempts, retries, returns
        (objrefs), waits_for (the objref of the argument it waits for; None), held (waits for resources), cancelled.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_task *task
    cdef frt_body body
    cdef uint64_t word
    cdef uint32_t t, state
    client.ensure()
    rows = []
    for t in range(frt_tasks(x)):
        word = a64_load_acq(x.task_words + t)
        state = frt_word_state(word)
        if state <= FRT_TASK_RESERVED:
            continue
        task = x.tasks + t
        frt_task_body(x, t, &body)
        waits, held = None, False
        if state == FRT_TASK_WAITING and task.dep < body.ndeps:
            waits = body.refs[task.dep].objref
        elif state == FRT_TASK_WAITING:
            held = True
        elif task.actor and state == FRT_TASK_READY:  # the actor looks at its arguments itself
            waits = _not_ready(x, &body)
        row = {
            "task": t, "id": task.id, "state": TASK_STATES.get(state, "?"),
            "client": frt_word_client(word) if state >= FRT_TASK_CLAIMED else None,
            "function": (task.function, task.function_index), "actor": task.actor - 1 if task.actor else None,
            "attempts": task.attempts, "retries": task.retries, "waits_for": waits, "held": held,
            "returns": [body.results[k].objref for k in range(min(body.nreturns, <uint32_t>16))],
            "cancelled": task_is_cancelled(x, t), "priority": task_priority(x, t),
        }
        if a64_load_acq(x.task_words + t) == word:
            rows.append(row)
    return rows


def actors(Client client):
    """The indexes of the actors that there are, dead ones too while somebody has a handle."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    return [a for a in range(frt_actors(x)) if frt_word_state(a64_load_acq(&x.actors[a].word)) != FRT_ACTOR_EMPTY]


def functions(Client client):
    """The functions, classes and demands that were shipped: a list of (objref, index of their object, name)."""
    cdef frt_ctx *x = &client.x
    cdef frt_function *f
    cdef uint32_t k
    client.ensure()
    rows = []
    for k in range(frt_functions(x)):
        f = x.functions + k
        if functions_counts(f):
            rows.append((f.objref, f.index, f.name[:strnlen(f.name, 64)].decode("utf-8", "replace")))
    return rows


def idle(Client client):
    """How many workers sleep for want of a task."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t left
    cdef uint32_t w
    cdef uint32_t count = 0
    client.ensure()
    for w in range(frt_words(x)):
        left = a64_load_acq(&x.sb.idle[w])
        while left:
            count += 1
            left &= left - 1
    return count


def small_values(Client client, uint32_t sample, uint64_t bytes_max):
    """How many values of at most so many bytes were put, and are alive: an estimate by `sample` entries."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t n = frt_objects(x)
    cdef uint32_t k, i, looked
    cdef uint32_t found = 0
    client.ensure()
    looked = sample if sample < n else n
    for k in range(looked):
        i = <uint32_t>(<uint64_t>k * n // looked)
        found += frt_word_state(a64_load_acq(frt_state(x, i))) == FRT_OBJ_SEALED and x.entries[i].task == 0 and \
            x.entries[i].bytes <= bytes_max
    return <uint64_t>found * n // looked if looked else 0


def set_site(Client client, Ref ref, uint32_t site):
    """Write down by which line of code an object was made; the number means something to who looks."""
    client.ensure()
    ref_use(client, ref)
    a32_store_rlx(&client.x.entries[ref.index].site, site)
