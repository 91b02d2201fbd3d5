# cython: language_level=3, freethreading_compatible=True
"""Listings of the tables for people: one row per record, read without a lock and without a hold.

Records may change during the read, so a row shows some moment of it; a record that is reused during the read is left
out. Nothing here is on a hot path.
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
    """The objref of the first argument without a value, or None."""
    cdef frt_refslot slot
    cdef uint32_t k
    for k in range(body.ndeps):
        slot = body.refs[k]
        if slot.index < frt_objects(x) and a64_load_rlx(&x.entries[slot.index].objref) == slot.objref and \
                frt_word_state(a64_load_acq(frt_state(x, slot.index))) == FRT_OBJ_PENDING:
            return slot.objref
    return None


cdef object inspect_object(frt_ctx *x, uint32_t i):
    """The row of one object, see `objects`; None if the entry is free or is reused meanwhile."""
    cdef frt_entry *entry = x.entries + i
    cdef uint64_t word = a64_load_acq(frt_state(x, i))
    cdef uint64_t offset = a64_load_rlx(&entry.offset)
    if frt_word_state(word) <= FRT_OBJ_RESERVED:
        return None
    row = {
        "index": i, "objref": entry.objref, "state": OBJECT_STATES.get(frt_word_state(word), "?"),
        "bytes": entry.bytes, "room": arena_block_bytes(x, offset) if offset else 0, "kind": entry.kind,
        "error": (entry.flags & FRT_ENTRY_ERROR) != 0, "refs": _clients_in(x, i, FRT_REFS),
        "pins": _clients_in(x, i, FRT_PINS), "counted": entry.counted, "contains": entry.nrefs,
        "made_by_task": entry.task != 0, "is_actor": (entry.flags & FRT_ENTRY_ACTOR) != 0, "site": entry.site,
        "used": entry.used, "node": "",
    }
    missing = frt_word_state(word) == FRT_OBJ_SPILLED and not entry.flags & FRT_ENTRY_FILE
    if missing or entry.flags & FRT_ENTRY_REMOTE:
        row["node"] = (<char *>(<frt_source *>entry.inlined).node)[:16].hex()
        row["state"] = "remote" if missing else row["state"]
    return row if frt_word_gen(a64_load_acq(frt_state(x, i))) == frt_word_gen(word) else None


def objects(Client client, uint64_t bytes_min=0, size_t most=1 << 31):
    """List the objects in the table.

    Args:
        bytes_min: leave out smaller values.
        most: the largest number of rows.
    Returns:
        A list of dicts: index, objref, state (a word), bytes of the value, room (bytes of its block; 0 if the value is
        in the entry), kind, error, refs and pins (clients), counted (values and tasks that name it), contains (number
        of references), made_by_task, is_actor, site, used (the store's clock at the last read), node (the session of
        the node that keeps a remote value; else "").
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t i
    client.ensure()
    rows = []
    for i in range(frt_objects(x)):
        if frt_word_state(a64_load_acq(frt_state(x, i))) <= FRT_OBJ_RESERVED or \
                a64_load_rlx(&x.entries[i].bytes) < bytes_min:
            continue
        row = inspect_object(x, i)
        if row is not None:
            rows.append(row)
            if len(rows) >= most:
                break
    return rows


cdef object inspect_task(frt_ctx *x, uint32_t t):
    """The row of one task, see `tasks`; None if the record is free or changes meanwhile."""
    cdef frt_task *task = x.tasks + t
    cdef frt_body body
    cdef uint32_t extras
    cdef uint64_t word = a64_load_acq(x.task_words + t)
    cdef uint32_t state = frt_word_state(word)
    if state <= <uint32_t>FRT_TASK_RESERVED:
        return None
    frt_task_body(x, t, &body)
    waits, held, policy, extras = None, False, None, frt_task_extras(task.flags)
    if task.flags & FRT_TASK_POLICY and body.nrefs >= extras:
        policy = body.refs[body.nrefs - extras].objref, body.refs[body.nrefs - extras].index
    if state == <uint32_t>FRT_TASK_WAITING and task.dep < body.ndeps:
        waits = body.refs[task.dep].objref
    elif state == <uint32_t>FRT_TASK_WAITING:
        held = True
    elif task.actor and state == <uint32_t>FRT_TASK_READY:  # a call is READY at once; its actor waits for the arguments
        waits = _not_ready(x, &body)
    row = {
        "task": t, "id": task.id, "state": TASK_STATES.get(state, "?"),
        "client": frt_word_client(word) if state >= <uint32_t>FRT_TASK_CLAIMED else None,
        "function": (task.function, task.function_index), "actor": task.actor - 1 if task.actor else None,
        "attempts": task.attempts, "retries": task.retries, "waits_for": waits, "held": held,
        "returns": [body.results[k].objref for k in range(min(body.nreturns, <uint32_t>16))],
        "cancelled": task_is_cancelled(x, t), "priority": task_priority(x, t), "policy": policy, "job": task.job,
    }
    return row if a64_load_acq(x.task_words + t) == word else None


def tasks(Client client):
    """List the tasks and calls that have not ended.

    Returns:
        A list of dicts: task, id, state (a word), client (that runs it, or None), function (objref and index of its
        object, or objref of the class and the number of the method), actor (index or None), attempts, retries, returns
        (objrefs), waits_for (objref of the argument it waits for, or None), held (whether it waits for resources),
        cancelled, priority, policy (objref and index of the object that describes how it is run, or None), job (its
        number).
    """
    cdef uint32_t t
    client.ensure()
    rows = [inspect_task(&client.x, t) for t in range(frt_tasks(&client.x))]
    return [row for row in rows if row is not None]


def task(Client client, uint32_t t):
    """The row of the task in record `t`, as of `tasks`; None if there is none."""
    client.ensure()
    return inspect_task(&client.x, t) if t < frt_tasks(&client.x) else None


def unfinished(Client client):
    """Count the tasks and calls that have not ended, without the stand-ins for objects of other nodes."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t, count = 0
    cdef int state
    client.ensure()
    for t in range(frt_tasks(x)):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state >= FRT_TASK_WAITING and state <= FRT_TASK_BLOCKED:
            count += x.tasks[t].function != 0 or x.tasks[t].actor != 0
    return count


def dependencies(Client client, uint32_t t):
    """The objects that a task's record names before it runs, and the bytes of its own arguments.

    Returns:
        (nbytes, rows): the bytes that lie in the record, and for each object (objref, index, state as a word, bytes,
        record + 1 of the task that makes it or 0). Objects that are gone are left out.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_body body
    cdef frt_refslot slot
    cdef uint32_t k, extras
    cdef frt_entry *entry
    client.ensure()
    if t >= frt_tasks(x):
        raise IndexError(f"there is no task {t}")
    rows = []
    frt_task_body(x, t, &body)
    extras = frt_task_extras(x.tasks[t].flags)
    for k in range(body.nrefs - extras if extras < body.nrefs else 0):
        slot = body.refs[k]
        if k + 1 == body.ndeps and x.tasks[t].flags & FRT_TASK_DEMAND or slot.index >= frt_objects(x):
            continue
        entry = x.entries + slot.index
        state = OBJECT_STATES.get(frt_word_state(a64_load_acq(frt_state(x, slot.index))), "?")
        nbytes, maker = entry.bytes, entry.task
        if a64_load_acq(&entry.objref) == slot.objref:
            rows.append((slot.objref, slot.index, state, nbytes, maker))
    return body.bytes, rows


def actors(Client client):
    """The indexes of all actors; a dead one is listed while a handle of it exists."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    return [a for a in range(frt_actors(x)) if frt_word_state(a64_load_acq(&x.actors[a].word)) != FRT_ACTOR_EMPTY]


def functions(Client client):
    """List the functions, classes and demands in the function table: (objref, index of the object, name)."""
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
    """How many workers sleep because no task is ready."""
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


def set_site(Client client, Ref ref, uint32_t site):
    """Record which source line made an object, as a number that listings translate."""
    client.ensure()
    ref_use(client, ref)
    a32_store_rlx(&client.x.entries[ref.index].site, site)
