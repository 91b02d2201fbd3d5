# The types that state.py is compiled with.
cimport cython
from libc.stdint cimport int64_t, uint64_t

from fastrt.scheduler cimport events as ev
from fastrt._core.refcounts.refcount cimport RefTable
from fastrt.scheduler.objects cimport Entry, Objects
from fastrt.scheduler.policy cimport Backlog, Node, Placement
from fastrt.scheduler.records cimport Function, Group, Groups, Task, Worker


cdef int64_t _IDLE, _BUSY, _REFUSING, _LOST, _WORKER_CALL, _READY, _WORKER_REFUSE, _WORKER_LOSE
cdef int64_t _QUEUED, _SENT, _TAKEN, _QUEUE, _SEND, _TAKE, _END, _REFUSE, _LOSE, _FAIL, _ARGUMENT_LOST


@cython.final
cdef class SchedulerState:
    cdef public object settings
    cdef int64_t _max_retries
    cdef int64_t _tasks_max
    cdef int64_t _objects_max
    cdef list _effects
    cdef object _resolved
    cdef object _failing
    cdef public Objects objects
    cdef public Placement placement
    cdef public Groups groups
    cdef public Backlog backlog
    cdef public list stores
    cdef set _lost_stores
    cdef public dict store_numbers
    cdef public list workers
    cdef public dict worker_numbers
    cdef public dict functions
    cdef public dict tasks
    cdef public int64_t next_task
    cdef dict _handlers

    @cython.locals(effects=list, asked=ev.Call)
    cpdef list handle(self, event)
    cdef _take(self, event)
    cpdef _on_increment(self, ev.IncrementRefs event)

    @cython.locals(freed=list)
    cpdef _on_decrement(self, ev.DecrementRefs event)

    @cython.locals(worker=Worker, task=Task, ref=uint64_t)
    cpdef _on_worker_ready(self, ev.WorkerReady event)

    @cython.locals(
        function=Function, objects=Objects, refs=RefTable, entry=Entry, entries=list, waits_for=dict, task=Task,
        first=uint64_t, count=int64_t, number=int64_t, ref=uint64_t, args=tuple, nested=tuple,
    )
    cpdef _on_remote_call(self, ev.RemoteCall event)

    @cython.locals(shape=tuple, places=tuple, node=Node, group=Group, worker=Worker)
    cdef _place(self, Task task, list entries)

    @cython.locals(entry=Entry)
    cpdef list entries_of(self, Task task)

    @cython.locals(task=Task)
    cdef _feed(self, Worker worker)

    @cython.locals(objects=Objects, refs=RefTable, ref=uint64_t, i=Py_ssize_t)
    cdef _invoke(self, Task task, Worker worker, list entries)

    @cython.locals(task=Task)
    cpdef _on_invoke_taken(self, ev.InvokeTaken event)
    cdef _run_again(self, Task task, str reason)

    @cython.locals(objects=Objects, worker=Worker, freed=list, ref=uint64_t, held=tuple)
    cdef _end(self, Task task)
    cpdef _on_ready(self, ev.ObjReady event)

    @cython.locals(worker=Worker)
    cdef Worker _worker(self, uint64_t number)
    cdef _check_room(self, int64_t objects, int64_t tasks)
