# cython: language_level=3, freethreading_compatible=True
"""End a process because of one task and no other: by a signal, whose handler checks the task first.

Between a canceller's look at a task and the signal that it sends, the worker may have gone on to the next task; so the
signal does not kill by itself. The handler runs in the thread that runs tasks, which therefore stands still, and ends
the process if the task that runs there was cancelled by force.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.layout cimport *
from fastrt._core.objects.references cimport task_is_mine

cdef extern from *:
    """
    #include <signal.h>
    #include <string.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    /* Of the real-time signals, which a program rarely uses, one that glibc does not. */
    #define frt_stop_signal() (SIGRTMIN + 7)
    static inline int frt_handle_stop(void (*handler)(int)) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = handler;
        action.sa_flags = SA_RESTART | SA_ONSTACK;
        return sigaction(frt_stop_signal(), &action, NULL);
    }
    static inline int frt_this_thread(void) { return (int)syscall(SYS_gettid); }
    static inline void frt_pass_on(int thread, int number) { syscall(SYS_tgkill, getpid(), thread, number); }
    static inline void frt_end_now(void) { kill(getpid(), SIGKILL); }
    """
    int frt_stop_signal() noexcept nogil
    int frt_handle_stop(void (*handler)(int) noexcept nogil) noexcept nogil
    int frt_this_thread() noexcept nogil
    void frt_pass_on(int thread, int number) noexcept nogil
    void frt_end_now() noexcept nogil

cdef Client _client = None  # kept alive for the handler
cdef frt_ctx *_ctx = NULL
cdef int _thread = 0

SIGNAL = frt_stop_signal()
LATE = FRT_TASK_LATE


def listen(Client client):
    """Allow this process to be ended because of a task that this thread runs for `client`.

    Raises:
        OSError: the handler cannot be installed.
    """
    global _client, _ctx, _thread
    client.ensure()
    _client, _ctx, _thread = client, &client.x, frt_this_thread()
    if frt_handle_stop(_on_stop) != 0:
        raise OSError("the handler of the signal that ends tasks cannot be installed")


def end_for(Client client, uint32_t t, uint64_t id, bint again):
    """End this process because of a task, if it still runs that task.

    Called by another thread of this process. While it holds the GIL, or the lock of the threads, no task ends here.

    Args:
        id: of the task.
        again: whether the task may run again; otherwise its error is that it ran for too long.
    Returns:
        False when this process does not run the task any more.
    """
    cdef frt_ctx *x = &client.x
    cdef bint mine
    client.ensure()
    frt_threads_take(x)
    mine = task_is_mine(x, t) and x.tasks[t].id == id and a32_load_rlx(&x.clients[x.me].task) == t + 1
    if mine:
        if not again:
            x.tasks[t].flags |= FRT_TASK_LATE
        frt_end_now()
    frt_threads_give(x)
    return mine


cdef void _on_stop(int number) noexcept nogil:
    """Handle the signal; everything here is safe in a signal handler."""
    cdef frt_ctx *x = _ctx
    cdef uint32_t t
    cdef uint64_t word, mark
    if frt_this_thread() != _thread:
        frt_pass_on(_thread, number)  # in a forked child there is no such thread, and nothing happens
        return
    t = a32_load_acq(&x.clients[x.me].task) - 1
    if t >= frt_tasks(x):
        return
    word = a64_load_acq(x.task_words + t)
    mark = a64_load_sc(&x.tasks[t].cancelled)
    if frt_word_client(word) == x.me and frt_word_state(word) in (FRT_TASK_RUNNING, FRT_TASK_BLOCKED) and \
            frt_cancels(mark, x.tasks[t].id) and mark & FRT_CANCEL_FORCE:
        frt_end_now()
