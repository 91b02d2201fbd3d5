# cython: language_level=3, freethreading_compatible=True
"""Tasks that demand resources: submitted with a reference to their demand, held until the node daemon admits them.

They are submitted, cancelled and recovered like every task. Held tasks are on a list in the arena (`references`). The
node daemon takes them off it, remembers them, and makes them READY one by one. When a daemon dies, the tasks that it
remembered are found by their words: the next daemon calls `take_over`.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.handles cimport Ref, ref_wrap
from fastrt._core.objects.objects cimport object_acquire
from fastrt._core.objects.references cimport (
    links_relist, links_take_held, links_take_waiting, links_tell_held, task_is_mine)
from fastrt._core.tasks.tasks cimport task_start

DEMAND = FRT_TASK_DEMAND
# Where a task is, for `states`.
cdef enum:
    _GONE, _WAITING, _QUEUED, _RUNNING, _BLOCKED
GONE, WAITING, QUEUED, RUNNING, BLOCKED = _GONE, _WAITING, _QUEUED, _RUNNING, _BLOCKED


def demand_of(Client client, uint32_t t, uint64_t id):
    """Return a reference to a task's demand; None when the record was used again for another task."""
    cdef frt_ctx *x = &client.x
    cdef frt_body body
    cdef frt_refslot slot
    cdef Ref ref
    client.ensure()
    if t >= frt_tasks(x) or not _is(x, t, id) or not frt_task_body(x, t, &body) or body.ndeps == 0:
        return None
    slot = body.refs[body.ndeps - 1]
    if slot.index >= x.objects_max or object_acquire(x, slot.index, slot.objref, False) != FRT_OK:
        return None
    ref = ref_wrap(client, slot.index)
    return ref if _is(x, t, id) else None


def named(Client client, uint32_t t, uint64_t id):
    """Return the numbers of the objects that a task's arguments name; none when the record was used again."""
    cdef frt_ctx *x = &client.x
    cdef frt_body body
    cdef uint32_t k
    cdef list found = []
    client.ensure()
    if t >= frt_tasks(x) or not _is(x, t, id) or not frt_task_body(x, t, &body):
        return found
    for k in range(body.nrefs - min(body.nrefs, frt_task_extras(x.tasks[t].flags))):
        if k + 1 != body.ndeps:  # which is the demand
            found.append(body.refs[k].objref)
    return found if _is(x, t, id) else []


cdef bint _is(frt_ctx *x, uint32_t t, uint64_t id) noexcept nogil:
    """Return whether the record is that task's, and counts the objects that it names."""
    return x.tasks[t].id == id and x.tasks[t].flags & FRT_TASK_DEMAND and x.tasks[t].flags & FRT_TASK_COUNTED


def take_held(Client client):
    """Take all held tasks off the list: (index, id) of each, the oldest first. The same task may come again."""
    cdef frt_ctx *x = &client.x
    cdef list found = []
    cdef int t
    client.ensure()
    while a32_load_acq(&x.sb.held):
        t = links_take_held(x)
        if t == FRT_NOT_FOUND:
            break
        check(t)
        found.append((t, x.tasks[t].id))
    return found


def take_over(Client client):
    """Put the tasks on the list again that a dead daemon had taken off it.

    Returns:
        (index, id) of the tasks that it had admitted and that have not ended.
    """
    client.ensure()
    links_relist(&client.x)
    return admitted(client)


def admitted(Client client):
    """Return (index, id) of the tasks with demands that are admitted and have not ended."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t t
    cdef int state
    cdef list found = []
    client.ensure()
    for t in range(frt_tasks(x)):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state >= FRT_TASK_READY and state <= FRT_TASK_BLOCKED and x.tasks[t].flags & FRT_TASK_DEMAND:
            found.append((t, x.tasks[t].id))
    return found


def states(Client client, list tasks):
    """Return where tasks are.

    Args:
        tasks: (index, id) of each.
    Returns:
        (state, client) of each: GONE; WAITING: submitted, not admitted; QUEUED: admitted; RUNNING and BLOCKED:
        `client` has claimed it, and runs it or has forwarded it to another node.
    """
    cdef uint64_t word = 0
    cdef int state
    cdef list found = []
    client.ensure()
    for t, id in tasks:
        state = _where(&client.x, t, id, &word)
        found.append((state, frt_word_client(word) if state >= _RUNNING else 0))
    return found


cdef int _where(frt_ctx *x, uint32_t t, uint64_t id, uint64_t *word) noexcept nogil:
    """Return where a task is, as `states`, and its record's word."""
    cdef int state
    if t >= frt_tasks(x):
        return _GONE
    word[0] = a64_load_acq(x.task_words + t)
    state = frt_word_state(word[0])
    # An ending task drops its counts before it gives its record back.
    if state < FRT_TASK_WAITING or state == FRT_TASK_ENDING or x.tasks[t].id != id or \
            not x.tasks[t].flags & FRT_TASK_COUNTED:
        return _GONE
    if state == FRT_TASK_WAITING:
        return _WAITING
    if state == FRT_TASK_READY:
        return _QUEUED
    return _BLOCKED if state == FRT_TASK_BLOCKED else _RUNNING


cdef struct _Row:
    uint64_t id
    uint64_t word  # of the record at the last look; 0: not looked at yet
    uint32_t t  # FRT_NONE: the task is not watched any more


cdef class Watch:
    """The tasks that the daemon has placed: finds those that have moved. Each other one costs a look at its record.

    Args:
        client: an attachment to the session.
    """
    cdef Client _client
    cdef dict _at  # by task: its row
    cdef list _tasks  # of the rows, in the order in which they were added
    cdef _Row *_rows
    cdef Py_ssize_t _room

    def __init__(self, Client client):
        self._client = client
        self._at = {}
        self._tasks = []

    def __dealloc__(self):
        free(self._rows)

    def __len__(self):
        return len(self._at)

    def add(self, task):
        """Watch a task: a tuple that begins with its index and its id. The next `moved` returns it."""
        cdef Py_ssize_t k = self._at.setdefault(task, len(self._tasks))
        cdef _Row *rows
        if k == len(self._tasks):
            if k == self._room:
                rows = <_Row *>realloc(self._rows, (2 * k + 64) * sizeof(_Row))
                if rows == NULL:
                    del self._at[task]
                    raise MemoryError
                self._rows, self._room = rows, 2 * k + 64
            self._tasks.append(task)
        self._rows[k].t, self._rows[k].id, self._rows[k].word = task[0], task[1], 0

    def remove(self, task):
        """Do not watch a task any more, if it is watched."""
        cdef Py_ssize_t k = self._at.pop(task, -1)
        if k >= 0:
            self._rows[k].t = FRT_NONE
            self._tasks[k] = None
            if len(self._tasks) > 2 * len(self._at) + 64:
                self._close_gaps()

    cdef _close_gaps(self):
        cdef Py_ssize_t k, count = 0
        for k in range(len(self._tasks)):
            if self._rows[k].t != FRT_NONE:
                self._rows[count] = self._rows[k]
                self._tasks[count] = self._tasks[k]
                self._at[self._tasks[count]] = count
                count += 1
        del self._tasks[count:]

    def moved(self):
        """Return (task, state, client) of each watched task that may have moved; see `states`.

        These are the tasks whose records have changed since the last call, and each time all that wait or are gone, or
        that a worker runs: it may have begun to sleep.
        """
        cdef frt_ctx *x = &self._client.x
        cdef _Row *row
        cdef uint64_t word
        cdef uint32_t records = frt_tasks(x)
        cdef int state
        cdef Py_ssize_t k
        cdef list found = []
        self._client.ensure()
        for k in range(len(self._tasks)):
            row = self._rows + k
            # A word has the generation of its record: the same one is of the same task.
            if row.t == FRT_NONE or (row.t < records and a64_load_acq(x.task_words + row.t) == row.word and
                                     _is_settled(x, row.word)):
                continue
            word = 0
            state = _where(x, row.t, row.id, &word)
            row.word = 0 if state == _GONE else word
            found.append((self._tasks[k], state, frt_word_client(word) if state >= _RUNNING else 0))
        return found


cdef bint _is_settled(frt_ctx *x, uint64_t word) noexcept nogil:
    """Return whether a task stays where it is as long as its record has this word."""
    cdef int state = frt_word_state(word)
    cdef uint32_t client = frt_word_client(word)
    if state == FRT_TASK_READY:
        return True
    return FRT_TASK_READY < state <= FRT_TASK_BLOCKED and client < frt_clients(x) and \
        x.clients[client].kind != FRT_KIND_WORKER


def admit(Client client, uint32_t t, uint64_t id, uint32_t devices=0, bint first=False):
    """Queue a held task for the workers; False when it is not held any more.

    Args:
        t, id: the task.
        devices: a bit for each device of the node that it is given.
        first: whether it runs before the tasks that are queued already.
    """
    client.ensure()
    return t < frt_tasks(&client.x) and _done(links_take_waiting(&client.x, t, id, FRT_TASK_READY, devices, first))


def devices_of(Client client, uint32_t t, uint64_t id):
    """Return the bits of the devices that a task was given when it was admitted; 0 when the record is another's."""
    cdef frt_ctx *x = &client.x
    cdef frt_body body
    cdef uint32_t devices
    client.ensure()
    if t >= frt_tasks(x) or not _is(x, t, id) or not frt_task_body(x, t, &body) or body.ndeps == 0:
        return 0
    devices = a32_load_acq(&body.refs[body.ndeps - 1].extra)
    return devices if _is(x, t, id) else 0


def hold_devices(Client client, uint32_t devices, uint32_t parts, uint64_t holder):
    """Record in this process's slot that it uses devices until it ends.

    Args:
        devices: a bit for each of them.
        parts: of each of them, in parts of 1/10,000.
        holder: for which task or actor, as `frt_client.device_holder` has it.
    """
    cdef frt_client *slot = client.x.clients + client.x.me
    client.ensure()
    slot.device_parts, slot.device_holder = parts, holder
    a32_store_rel(&slot.devices, devices)


def device_holders(Client client):
    """Return (client, its kind, devices, parts, holder) of each process with devices, as `hold_devices` recorded."""
    cdef frt_ctx *x = &client.x
    cdef frt_client *slot
    cdef uint32_t c, devices
    cdef list found = []
    client.ensure()
    for c in range(frt_clients(x)):
        slot = x.clients + c
        devices = a32_load_acq(&slot.devices)
        if devices and frt_word_state(a64_load_acq(&slot.word)) != FRT_CLIENT_FREE:
            found.append((c, slot.kind, devices, slot.device_parts, slot.device_holder))
    return found


def claim(Client client, uint32_t t, uint64_t id):
    """Claim a held task, to run it here or forward it to another node; False when it is not held any more."""
    client.ensure()
    if t >= frt_tasks(&client.x) or not _done(links_take_waiting(&client.x, t, id, FRT_TASK_CLAIMED, 0, False)):
        return False
    task_start(&client.x, t)
    return True


def refuse(Client client, uint32_t t, uint64_t id):
    """Take a held task to end it with an error; False when it is not held any more."""
    client.ensure()
    return t < frt_tasks(&client.x) and _done(links_take_waiting(&client.x, t, id, FRT_TASK_ENDING, 0, False))


def news(Client client):
    """Return a number that changes when a task is held, and when a task with a demand has ended."""
    client.ensure()
    return a32_load_sc(&client.x.sb.held_news)


def tell(Client client):
    """Wake the threads that sleep in `wait_news`."""
    client.ensure()
    links_tell_held(&client.x)


def is_demanding(Client client, uint32_t t):
    """Return whether a task that this client has claimed has a demand."""
    client.ensure()
    return task_is_mine(&client.x, t) and client.x.tasks[t].flags & FRT_TASK_DEMAND != 0


def wait_news(Client client, uint32_t seen, double timeout_s):
    """Sleep until `news` differs from `seen`, at most `timeout_s` seconds; return the news then."""
    cdef uint32_t *word = &client.x.sb.held_news
    cdef int64_t timeout = <int64_t>(timeout_s * 1e9)
    client.ensure()
    if a32_load_sc(word) == seen:
        with nogil:
            frt_futex_wait(word, seen, timeout)
    return a32_load_sc(word)


cdef bint _done(int rc) except -1:
    if rc == FRT_NOT_FOUND:
        return False
    check(rc)
    return True
