# cython: language_level=3, freethreading_compatible=True
"""The task path: claim, run, finish, cancel; `submission` is its beginning.

No system call and no daemon takes part when both sides are awake.

    WAITING -> READY -> CLAIMED -> RUNNING (<-> BLOCKED) -> gone, its results sealed
    WAITING | READY -> ENDING (cancelled)   RUNNING | BLOCKED of a dead worker -> READY again, or ENDING

Commit points: a task is submitted by the store of WAITING or READY, claimed by the swap to CLAIMED, and ended by
sealing its last result and then giving the record back. The record counts the objects that it names (`references`)
from before the first commit until the end.
"""
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastrt._core.memory.clients cimport Client, client_new_objref, client_stops
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.queue cimport queue_length, queue_pop, queue_push, queue_report_load, queue_wake_idle
from fastrt._core.memory.wait cimport wait_task
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.objects cimport *
from fastrt._core.objects.references cimport links_hold, links_unwait, task_is_mine, task_result
from fastrt._core.objects.scalar cimport args_read, scalar_size, scalar_write
from fastrt._core.tasks.failures cimport failures_mend
from fastrt._core.tasks.records cimport *
from fastrt._core.tasks.tally cimport tally_one, tally_outcome, tally_retried
from fastrt.errors import FastrtError

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    SIGNALS_NS = 1000000000  # a signal that came before the first sleep does not end it: look after this time
    IDLE_S = 5  # the sleeps after that; 20 looks a second cost 0.15 % CPU, one 0.03 %
    SOURCE_BYTES_MAX = 64  # of a promise
    CHILDREN_MAX = 1 << 24  # of one task; their paths come after its own, and no other task's are that near

RETRY_ERRORS = FRT_TASK_RETRY_ERRORS
NO_TASK = FRT_NOT_FOUND
PATH_STEP = FRT_PATH_STEP


# ---- results without a function ----

def promise(Client client, bytes source=b""):
    """Make an object that this client will seal later; any process may name it and wait for it at once.

    It is the result of a task without a function that this client runs from the start: seal it by
    `handles.result(client, task, 0, ...)` and end the task by `finish`. When the client dies first, the process that
    recovers its slot must end the task, or pass it to another client by `hand_over` if it has a source.

    Args:
        source: where the value will come from, as text for the client that takes the task over; at most 64 bytes.
    Returns:
        (task, Ref).
    Raises:
        ObjectStoreFullError: no room for another task or object.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_task *task
    cdef frt_refslot *slots
    cdef uint32_t t, i, nbytes = <uint32_t>len(source)
    client.ensure()
    if nbytes > SOURCE_BYTES_MAX:
        raise ValueError(f"a source of {nbytes} bytes: at most {SOURCE_BYTES_MAX} are stored")
    t = check(task_record(x, 1, 0, nbytes))
    task = x.tasks + t
    task.id = client_new_objref(x)
    task.function, task.function_index, task.job = 0, 0, a64_load_rlx(&x.clients[x.me].job)
    task.cancelled, task.path, task.kind, task.retries, task.attempts = 0, 0, 0, 0, 1
    task.hops, task.priority = 0, 0  # the record's last task may have come from another node; this one has not
    slots = task_slots(x, t)
    memcpy(slots + 1, <const char *>source, nbytes)
    i = slots[0].index
    task_announce(x, t)
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_RUNNING, x.me, frt_word_gen(x.task_words[t])))  # commit
    return t, ref_wrap(client, i)


def promises(Client client):
    """List the tasks without a function and with a source that this client runs.

    Returns:
        Tuples (task, Ref, source).
    """
    cdef frt_ctx *x = &client.x
    cdef frt_task *task
    cdef frt_body body
    cdef uint32_t t
    cdef uint64_t word
    cdef int i
    client.ensure()
    rows = []
    for t in range(frt_tasks(x)):
        word = a64_load_acq(x.task_words + t)
        task = x.tasks + t
        if frt_word_state(word) != FRT_TASK_RUNNING or frt_word_client(word) != x.me or task.function or \
                task.bytes == 0 or task.bytes > SOURCE_BYTES_MAX or not frt_task_body(x, t, &body):
            continue
        i = task_result(x, t, 0)
        if i >= 0:
            check(object_acquire(x, i, x.entries[i].objref, False))
            rows.append((t, ref_wrap(client, i), body.args[:body.bytes]))
    return rows


def hand_over(Client client, uint32_t t, uint32_t to):
    """Pass a task that this client must end to another client, which runs it from now on.

    The caller is the process that recovers the slots of dead clients: if the other client dies now, the caller finds
    the task among that one's tasks.

    Returns:
        False when the other client has ended.
    """
    cdef frt_ctx *x = &client.x
    _check_mine(client, t)
    if to >= frt_clients(x) or frt_word_state(a64_load_acq(&x.clients[to].word)) != FRT_CLIENT_LIVE:
        return False
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_RUNNING, to, frt_word_gen(x.task_words[t])))  # commit
    return True


# ---- run: a worker's side ----

cpdef int next_task(Client client, double timeout_s, double spin_s) except -100:
    """Claim the next task and mark it RUNNING.

    Args:
        timeout_s, spin_s: how long to wait, in seconds, and how much of it to spend spinning.
    Returns:
        The task's index; NO_TASK after the timeout or a signal.
    """
    cdef frt_ctx *x = &client.x
    cdef int64_t now, look, deadline, spin, nap = SIGNALS_NS
    cdef int t
    client.ensure()
    t = queue_pop(x)  # a busy worker never looks at the clock: 25 ns
    if t >= 0:
        return task_start(x, t)
    PyErr_CheckSignals()  # one may have come while the last task ended
    now = frt_now_ns()
    deadline = now + <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
    spin = <int64_t>(min(max(spin_s, 0.0), 1e9) * 1e9)
    t = FRT_TIMEOUT
    queue_report_load(x)  # this worker is idle
    while t == FRT_TIMEOUT:
        look = now + spin + nap
        with nogil:
            t = wait_task(x, look if look < deadline else deadline, spin)
        now = frt_now_ns()
        spin, nap = 0, <int64_t>IDLE_S * 1000000000
        if t < 0:
            PyErr_CheckSignals()
            client.ensure()
            if t == FRT_INTERRUPTED or t == FRT_TIMEOUT and now >= deadline:
                return NO_TASK
    t = task_start(x, check(t))
    queue_report_load(x)  # and now it is busy
    return t


cdef uint32_t task_start(frt_ctx *x, uint32_t t) noexcept nogil:
    """A claimed task's user code is about to run."""
    task_works_on(x, t)
    if x.tasks[t].attempts < 255:
        x.tasks[t].attempts += 1
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_RUNNING, x.me, frt_word_gen(x.task_words[t])))
    return t


def function_of(Client client, uint32_t t):
    """(objref, index) of the function that a claimed task runs."""
    _check_task(client, t)
    return client.x.tasks[t].function, client.x.tasks[t].function_index


def arguments(Client client, uint32_t t, bint raw=False):
    """The arguments of a claimed task.

    Args:
        raw: leave them as they are written, for `submit` on another node.
    Returns:
        (kind, args, refs): for kind ARGS_SCALARS `args` is the tuple, with Refs in the places of dependencies;
        otherwise the serialized bytes. `refs` are references to all that the arguments name.
    """
    _check_mine(client, t)
    cdef frt_ctx *x = &client.x
    cdef uint16_t kind = x.tasks[t].kind
    cdef frt_body body
    cdef frt_refslot slot
    cdef list refs = []
    cdef uint32_t k, extras = frt_task_extras(x.tasks[t].flags)
    if not frt_task_body(x, t, &body) or body.nrefs < extras:
        check(FRT_CORRUPT)
    for k in range(body.nrefs - extras):
        if k + 1 == body.ndeps and x.tasks[t].flags & FRT_TASK_DEMAND:
            continue
        slot = body.refs[k]
        check(object_acquire(x, slot.index, slot.objref, False))
        refs.append(ref_wrap(client, slot.index))
    if kind == ARGS_SCALARS and not raw:
        return ARGS_SCALARS, args_read(body.args, body.bytes, refs), refs
    return kind, body.args[:body.bytes], refs


cdef int _check_task(Client client, uint32_t t) except -1:
    client.ensure()
    if t >= frt_tasks(&client.x):
        raise IndexError(f"there is no task {t}")
    return 0


cdef int _check_mine(Client client, uint32_t t) except -1:
    client.ensure()
    if not task_is_mine(&client.x, t):
        raise FastrtError(f"task {t} is not this client's to run or to end")
    return 0


def finish(Client client, uint32_t t, int outcome=-1):
    """End a task that this client runs or ends.

    Args:
        outcome: how it is counted: SUCCEEDED, FAILED, CANCELLED, CRASHED or FORWARDED of `tally`; -1: by its results.
    Raises:
        RuntimeError: a result of it is not sealed.
    """
    cdef frt_ctx *x = &client.x
    _check_mine(client, t)
    if not task_results_sealed(x, t):
        raise RuntimeError(f"task {t} has results that are not sealed")
    if outcome < 0:
        outcome = tally_outcome(x, x.me, t)
    elif outcome >= <int>FRT_OUTCOMES:
        raise ValueError(f"{outcome} is no outcome of a task")
    frt_threads_take(x)
    tally_one(x, t, outcome)
    if client_stops(x, t):
        x.clients[x.me].tasks_done += 1
    frt_threads_give(x)
    if x.tasks[t].attempts > 1 and outcome == <int>x.succeeded:
        failures_mend(x, x.tasks[t].id)
    check(task_done(x, t))


cpdef bint finish_scalar(Client client, uint32_t t, object value) except -1:
    """Seal a task's only result and end the task.

    Returns:
        False when the value is not a scalar, the task has another number of results, its result is sealed already,
        or it is an actor's call that was cancelled (nothing happened).
    Raises:
        ObjectStoreFullError: no room for the value.
    """
    cdef frt_ctx *x = &client.x
    cdef uint16_t kind = 0
    cdef Py_ssize_t n
    cdef int i, rc = FRT_OK
    cdef char *room
    _check_mine(client, t)
    if x.tasks[t].nreturns != 1 or x.tasks[t].actor and task_is_cancelled(x, t):
        return False
    n = scalar_size(value, &kind)
    if n < 0:
        return False
    i = task_result(x, t, 0)
    if i < 0:
        return False
    if x.entries[i].offset or x.entries[i].flags:
        check(object_empty(x, i))  # an attempt that died left something
    room = object_room(x, i, n, 0, &rc)
    if room == NULL:
        check(rc)
    scalar_write(value, kind, room, n)
    x.entries[i].kind = kind
    frt_threads_take(x)
    a32_store_rlx(&x.clients[x.me].task, 0)
    x.clients[x.me].tasks_done += 1
    tally_one(x, t, x.succeeded)
    frt_threads_give(x)
    if x.tasks[t].attempts > 1:
        failures_mend(x, x.tasks[t].id)
    object_seal_pending(x, i)
    check(task_done(x, t))
    return True


def retry(Client client, uint32_t t):
    """Queue a task that this client runs once more (its function raised and may be retried).

    Returns:
        False when its attempts are used up or it was cancelled.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_task *task = x.tasks + t
    _check_mine(client, t)
    if task.attempts > task.retries or task_is_cancelled(x, t):
        return False
    tally_retried(x, x.me, t)
    task_requeue(x, t)
    return True


def give_back(Client client, uint32_t t):
    """Queue a task again that this client has claimed and not begun; the claim does not count as an attempt.

    Returns:
        False when it was cancelled meanwhile: this client must end it.
    Raises:
        FastrtError: this client has not claimed it.
    """
    cdef frt_ctx *x = &client.x
    _check_mine(client, t)
    if task_is_cancelled(x, t):
        return False
    if x.tasks[t].attempts:
        x.tasks[t].attempts -= 1
    task_requeue(x, t)
    return True


cdef void task_requeue(frt_ctx *x, uint32_t t) noexcept nogil:
    """Queue a task again that this client has claimed; a task with a demand waits for its admission again."""
    if x.tasks[t].flags & FRT_TASK_DEMAND:
        links_hold(x, t)
        return
    frt_threads_take(x)
    client_stops(x, t)  # not for a parked task, when this client runs another one
    a32_store_rel(&x.clients[x.me].pushing, t + 1)
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, frt_word_gen(x.task_words[t])))
    queue_push(x, t, False)
    a32_store_rel(&x.clients[x.me].pushing, 0)
    frt_threads_give(x)


def set_blocked(Client client, uint32_t t, bint blocked):
    """Note in the task's word that it sleeps in a get or wait, or that it goes on."""
    cdef frt_ctx *x = &client.x
    _check_mine(client, t)
    x.clients[x.me].blocked = 1 if blocked else 0
    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_BLOCKED if blocked else FRT_TASK_RUNNING, x.me,
                                            frt_word_gen(x.task_words[t])))


def claim_for(Client client, Ref ref):
    """Claim the task that `ref` waits for, or a task that this one waits for in turn, if none has started it.

    For a worker that must wait while no other worker can be had: running just these tasks cannot deadlock,
    because the waiting task cannot go on without them. A generator is never claimed: it may wait for its reader.
    Nor is a task with devices: it needs a process of its own.

    Returns:
        The task's index, now RUNNING here; NO_TASK when other processes run the needed tasks.
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t i, t, task, dep
    cdef uint32_t left = x.tasks_max
    cdef uint64_t word, objref
    cdef frt_body body
    cdef frt_refslot slot
    client.ensure()
    ref_use(client, ref)
    i, objref = ref.index, ref.objref
    while left:
        left -= 1
        task = a32_load_rlx(&x.entries[i].task)
        if task == 0 or task > frt_tasks(x):
            break
        t = task - 1
        word = a64_load_sc(x.task_words + t)
        # We hold only the first of these objects. Another may be deleted while we look, and its entry and record be
        # used again. If the object still exists after the word was read, the word is its task's, or the swap fails.
        if frt_word_state(a64_load_sc(frt_state(x, i))) != FRT_OBJ_PENDING or \
                a64_load_rlx(&x.entries[i].objref) != objref or a32_load_rlx(&x.entries[i].task) != task:
            break
        if frt_word_state(word) == FRT_TASK_READY and x.tasks[t].actor == 0 and \
                not x.tasks[t].flags & FRT_TASK_STREAM and not _has_devices(x, t):
            if a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(word))):
                return task_start(x, t)
        elif frt_word_state(word) == FRT_TASK_WAITING and frt_task_body(x, t, &body):
            dep = x.tasks[t].dep
            if dep >= body.ndeps:
                break
            slot = body.refs[dep]
            i, objref = slot.index, slot.objref
            if i >= frt_objects(x):
                break
        else:
            break
    return NO_TASK


cdef bint _has_devices(frt_ctx *x, uint32_t t) noexcept nogil:
    """Return whether a task was given devices: it needs a process of its own."""
    cdef frt_body body
    return x.tasks[t].flags & FRT_TASK_DEMAND and frt_task_body(x, t, &body) and body.ndeps and \
        a32_load_acq(&body.refs[body.ndeps - 1].extra) != 0


def resume(Client client, uint32_t t):
    """Note that this client is back at task `t` after it ran another one on top of it."""
    _check_mine(client, t)
    task_works_on(&client.x, t)


# ---- look and cancel ----

def info(Client client, uint32_t t):
    """Return a task's record as a dict, for the daemon, listings and error messages."""
    _check_task(client, t)
    cdef frt_ctx *x = &client.x
    cdef frt_task *task = x.tasks + t
    cdef uint64_t word = a64_load_acq(x.task_words + t)
    return {"task": t, "id": task.id, "path": task.path, "state": frt_word_state(word), "client": frt_word_client(word),
            "function": (task.function, task.function_index), "job": task.job, "attempts": task.attempts,
            "retries": task.retries, "signal": task.signal, "returns": task.nreturns, "refs": task.nrefs,
            "deps": task.ndeps - (task.flags & FRT_TASK_DEMAND != 0), "flags": task.flags, "kind": task.kind,
            "priority": task_priority(x, t), "cancelled": task_is_cancelled(x, t),
            "hops": 0 if task.actor else task.hops,
            "actor": None if task.actor == 0 else task.actor - 1}


def queued(Client client):
    """Return how many tasks are ready and not claimed."""
    client.ensure()
    return queue_length(&client.x)


def queue_ends(Client client):
    """Return the positions in the ready queue of the next task that a worker takes, and of the next that is queued.

    Tasks with a priority are not in it.
    """
    client.ensure()
    cdef uint64_t head = a64_load_sc(&client.x.sb.ring_head)
    return head, a64_load_sc(&client.x.sb.ring_tail)


def load(Client client, bint watch=False):
    """A number that changes with the load of this node: whether tasks are queued, and how many workers are idle.

    Args:
        watch: wake this client at the next change. One wake is sent for each call, to the last client that called.
    """
    client.ensure()
    if watch:  # before the load is read: a process that changes the load checks the watcher afterwards
        a32_store_sc(&client.x.sb.load_watcher, client.x.me + 1)
    return _load(&client.x)


def stand_by(Client client, bint on):
    """Count as an idle worker, which a push may wake to call `next_task`, or end that; whether tasks are queued."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    if on:
        a64_or_sc(&x.sb.idle[x.me_word], x.me_bit)
    elif not a64_and_sc(&x.sb.idle[x.me_word], ~x.me_bit) & x.me_bit and queue_length(x):
        queue_wake_idle(x)  # a push has chosen this client instead of a worker
    return queue_length(x) > 0


cdef uint32_t _load(frt_ctx *x) noexcept nogil:
    cdef uint32_t i, idle = 0
    for i in range(frt_clients(x)):
        idle += frt_word_state(x.clients[i].word) != FRT_CLIENT_FREE and x.clients[i].kind == FRT_KIND_WORKER and \
            a32_load_rlx(&x.clients[i].task) == 0
    return 2 * idle + (queue_length(x) > 0)


def cancelled(Client client, uint32_t t):
    """Return whether the task was cancelled."""
    _check_task(client, t)
    return task_is_cancelled(&client.x, t)


def cancel_terms(Client client, uint32_t t):
    """Return how a task was cancelled: (whether its process must end for it, whether its children are spared).

    None when the task was not cancelled.
    """
    _check_task(client, t)
    cdef uint64_t mark = a64_load_sc(&client.x.tasks[t].cancelled)
    if not frt_cancels(mark, client.x.tasks[t].id):
        return None
    return mark & FRT_CANCEL_FORCE != 0, mark & FRT_CANCEL_ALONE != 0


def cancel(Client client, Ref ref, bint force=False, bint alone=False, bint spares_begun=False):
    """Cancel the task that will make `ref`.

    Args:
        force: its process must end for it.
        alone: the tasks that it submitted are spared. The process that runs it reads both.
        spares_begun: a task that has begun goes on: the answer is "done".
    Returns:
        (what, task, pid): "ending" when the task had not started: this client must now end it, by sealing its
        results with an error and `finish`; "running" when process `pid` runs it and must be interrupted; else "done".
    """
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    client.ensure()
    ref_use(client, ref)
    t = a32_load_rlx(&x.entries[ref.index].task)
    if t == 0 or object_is_sealed(x, ref.index):
        return "done", 0, 0
    if t > frt_tasks(x):
        check(FRT_CORRUPT)
    return _cancel(x, t - 1, ref.index, 0, _how(force, alone), spares_begun)


def cancel_task(Client client, uint32_t t, uint64_t id, bint force=False, bint alone=False):
    """Cancel the task of that id, if it is still in record `t`; otherwise like `cancel`."""
    client.ensure()
    if t >= frt_tasks(&client.x):
        return "done", 0, 0
    return _cancel(&client.x, t, FRT_NONE, id, _how(force, alone), False)


cdef inline uint32_t _how(bint force, bint alone) noexcept:
    return (FRT_CANCEL_FORCE if force else 0) | (FRT_CANCEL_ALONE if alone else 0)


cdef tuple _cancel(frt_ctx *x, uint32_t t, uint32_t i, uint64_t id, uint32_t how, bint spares_begun):
    """Cancel the task that will make entry i, or the one of that id; unless it has begun, if those are spared."""
    cdef uint64_t word
    cdef int state, pid
    while True:
        word = a64_load_sc(x.task_words + t)
        state = frt_word_state(word)
        # After the word was read: it is the task's, or another generation is on it.
        if object_is_sealed(x, i) if i != FRT_NONE else a64_load_acq(&x.tasks[t].id) != id:
            return "done", 0, 0
        if state == FRT_TASK_WAITING or state == FRT_TASK_READY:
            if a64_cas_sc(x.task_words + t, word, frt_word(FRT_TASK_ENDING, x.me, frt_word_gen(word))):
                links_unwait(x, t)
                return "ending", t, 0
        elif spares_begun:
            return "done", 0, 0
        elif state == FRT_TASK_RUNNING or state == FRT_TASK_BLOCKED or state == FRT_TASK_CLAIMED:
            pid = check(task_mark_cancelled(x, t, word, how))
            if pid > 0:
                return "running", t, pid
        elif state == FRT_TASK_ENDING and x.tasks[t].function == 0 and x.tasks[t].actor == 0:
            # A stand-in whose client has died. The client that takes it over reads the mark.
            if check(task_mark_cancelled(x, t, word, how)) > 0:
                return "done", 0, 0
        else:
            return "done", 0, 0


def begin_path(Client client, uint64_t parent):
    """Count the paths of the tasks that this client submits from now on up from a parent that is no task."""
    client.ensure()
    # Its number may be some task's path, too.
    a64_store_rlx(&client.x.path, (parent ^ <uint64_t>1 << 63) * FRT_PATH_STEP)


def maker_of(Client client, Ref ref):
    """Return (job, path) of the task that will make `ref`, for `children`; None when the value is sealed."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    cdef uint64_t job, path
    client.ensure()
    ref_use(client, ref)
    t = a32_load_rlx(&x.entries[ref.index].task)
    if t == 0 or t > frt_tasks(x):
        return None
    job, path = x.tasks[t - 1].job, x.tasks[t - 1].path
    return None if object_is_sealed(x, ref.index) else (job, path)  # while it is not, the record is its task's


def children(Client client, uint64_t job, uint64_t path):
    """Find the tasks in the table that the task of a job with that path has submitted.

    Returns:
        A list of (index, id, path, whether it is an actor's call).
    """
    cdef frt_ctx *x = &client.x
    cdef frt_task *task
    cdef uint32_t t
    cdef uint64_t word
    cdef uint64_t first = path * FRT_PATH_STEP
    cdef list found = []
    cdef tuple row
    client.ensure()
    if path == 0:
        return found  # no task: 0 is the parent of all that drivers and idle processes submit
    for t in range(frt_tasks(x)):
        word = a64_load_acq(x.task_words + t)
        if frt_word_state(word) <= FRT_TASK_RESERVED:
            continue
        task = x.tasks + t
        if task.job == job and task.path - first - 1 < CHILDREN_MAX:
            row = (t, task.id, task.path, task.actor != 0)
            if a64_load_acq(x.task_words + t) == word or frt_word_gen(x.task_words[t]) == frt_word_gen(word):
                found.append(row)
    return found
