# cython: language_level=3, freethreading_compatible=True
"""The loop in which a worker runs user code: claim, call, seal, and the next, without a line of Python between.

It handles the common case by itself: scalars in, a scalar out, a loaded function. For all else it calls its worker: to
`prepare` a call, to `seal` a value, to make results of an error (`fail`). It is compiled because most tasks of a worker
that has slept start in a cold cache: the interpreter's path through the same steps costs 25 us more then, and 0.15 us
with a hot cache.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.trace cimport FRT_TRACE_TASK, frt_trace_begin, frt_trace_end
from fastrt._core.objects.scalar cimport args_read
from fastrt._core.tasks.inbox cimport Inbox, inbox_next
from fastrt._core.tasks.records cimport task_is_cancelled
from fastrt._core.tasks.tasks cimport ARGS_SCALARS, finish_scalar, next_task
from fastrt.errors import ObjectStoreFullError

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef list _NO_REFS = []

cdef enum:
    TASKS_PER_LOOK = 64  # functions in C alone never reach the interpreter's own checks of signals and threads


cdef class Runner:
    """Runs tasks of one client on one thread.

    Attributes:
        stack: running tasks, the innermost last; more than one where a task waits and others run on top of it.
        interruptible: whether user code runs at this moment, so that a signal's handler may raise.
        leaving: when set, `run` and `serve` return after the task that runs.
        ends: an exception once the process must end, None before. A task whose arguments were loaded when the signal
            came raises it where its function would begin.

    Args:
        client: whose tasks are run.
        loaded: functions, (name, callable) by objref; the worker may add to it.
        prepare: makes (function, args, kwargs or None) of a task that is not of the common kind.
        seal: seals a value that is no scalar, and ends the task.
        fail: seals an exception, and ends the task.
        leave: called in a child that user code forked and that came back here, with its exception or None; it
            must not return.
        outputs: streams to `flush` after user code when they are `pending`.
        methods: of the actor whose calls these are, by their numbers, None for those that need `prepare`; None when
            they are tasks.
        enter_job: called with the number of a task's job if the task before was of another one; it must not raise.
    """

    def __init__(
            self, Client client, dict loaded, prepare, seal, fail, leave, outputs, list methods=None, enter_job=None):
        self.client = client
        self.loaded = loaded
        self.prepare, self.seal, self.fail, self.leave = prepare, seal, fail, leave
        self.outputs = tuple(outputs)
        self.methods = methods
        self.stack = []
        self.interruptible = self.leaving = False
        self.ends = None
        self.last_objref = 0
        self.last_function = None
        self.enter_job = enter_job
        self.job = 0

    def use(self, dict loaded):
        """Look functions up in another dict from now on."""
        self.loaded = loaded
        self.last_function = None

    def run(self, double timeout_s, double spin_s):
        """Run tasks until there was none for `timeout_s`, of which the first `spin_s` are spent spinning."""
        cdef int t
        cdef uint32_t count = 0
        while not self.leaving:
            t = next_task(self.client, timeout_s, spin_s)
            if t < 0:
                self.last_function = None  # the caller may drop it from `loaded`: this would keep what it captures
                return
            _execute(self, t)
            count += 1
            if count % TASKS_PER_LOOK == 0:
                PyErr_CheckSignals()
                with nogil:
                    pass  # another thread may have waited for the interpreter

    def serve(self, Inbox inbox, double timeout_s, double spin_s):
        """Run an actor's calls until there was none for `timeout_s`, or there is other news for this client.

        Of the time, the first `spin_s` are spent spinning.
        """
        cdef int t
        cdef uint32_t count = 0
        while not self.leaving:
            t = inbox_next(inbox, timeout_s, spin_s)
            if t < 0:
                return
            _execute(self, t)
            count += 1
            if count % TASKS_PER_LOOK == 0:
                PyErr_CheckSignals()
                with nogil:
                    pass

    def execute(self, uint32_t task):
        """Run one task that this client has claimed, and end it; its errors become results."""
        if task >= self.client.x.sb.tasks.fresh:
            raise IndexError(f"there is no task {task}")
        _execute(self, task)


cdef int _execute(Runner self, uint32_t t) except -1:
    cdef object value
    cdef frt_ctx *x = &self.client.x
    cdef frt_task *task = x.tasks + t
    cdef uint32_t outer
    cdef uint64_t path = a64_load_rlx(&x.path)
    cdef uint64_t traced = frt_trace_begin(x, FRT_TRACE_TASK, task.id, task.function_index, task.actor)
    a64_store_rlx(&x.path, task.path * FRT_PATH_STEP)
    self.stack.append(t)
    try:
        if task.job != self.job and self.enter_job is not None:
            _enter_job(self, task.job)
        value = _call(self, t)
        if not self.client.usable() and self.client.forked:
            self.leave(None)
        if not _seal_scalar(self, t, value):
            self.seal(t, value)
    except BaseException as exc:  # an error of any kind in user code is the task's result
        if not self.client.usable() and self.client.forked:
            self.leave(exc)
        self.fail(t, exc)
    finally:
        a64_store_rlx(&x.path, path)
        self.stack.pop()
        if self.stack and self.enter_job is not None:
            outer = self.stack[len(self.stack) - 1]
            if x.tasks[outer].job != self.job:
                _enter_job(self, x.tasks[outer].job)
        frt_trace_end(x, traced)
    return 0


cdef int _enter_job(Runner self, uint64_t job) except -1:
    """Work for another job; where it runs on top of a task of the one before, that one is entered again afterwards."""
    self.job = job
    self.enter_job(job)
    return 0


cdef object _call(Runner self, uint32_t t):
    """Call the task's function with its arguments."""
    cdef frt_ctx *x = &self.client.x
    cdef frt_body body
    cdef object function = None
    cdef tuple args
    cdef dict kwargs = None
    if x.tasks[t].kind == ARGS_SCALARS and frt_task_body(x, t, &body) and body.nrefs == 0:
        if self.methods is None:
            function = _function(self, x.tasks[t].function)
        elif x.tasks[t].function_index < <uint32_t>len(self.methods):
            function = self.methods[x.tasks[t].function_index]
    if function is None:
        function, args, kwargs = self.prepare(t)
    else:
        args = args_read(body.args, body.bytes, _NO_REFS)
    try:
        self.interruptible = True
        if task_is_cancelled(x, t):
            raise KeyboardInterrupt
        if self.ends is not None:
            raise self.ends
        return function(*args, **kwargs) if kwargs else function(*args)
    finally:
        self.interruptible = False
        for output in self.outputs:
            if output.pending:  # before the result: its reader may end the session
                try:
                    output.flush()
                except (OSError, ValueError):
                    pass


cdef object _function(Runner self, uint64_t objref):
    """Return the callable with that number; None when it is not loaded."""
    if objref != self.last_objref or self.last_function is None:
        found = self.loaded.get(objref)
        if found is None:
            return None
        self.last_objref, self.last_function = objref, found[1]
    return self.last_function


cdef bint _seal_scalar(Runner self, uint32_t t, object value) except -1:
    try:
        return finish_scalar(self.client, t, value)
    except ObjectStoreFullError:
        return False  # the worker waits for room
