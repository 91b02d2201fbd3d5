# cython: language_level=3, freethreading_compatible=True
"""Passes over the tables of tasks and objects: the records that exist, copied out, without a lock or a Python object.

A record is seen at some moment of the pass. One that stays in a state during the pass is seen once, in that state; one
that changes meanwhile is seen in one of its states; one that begins or ends meanwhile is seen or left out. Records are
copied out of the segment's file, 64 KiB at a time: through the mapping, the kernel would map and unmap each page. State
words are read through the read-only mapping, before the copy and after it, and its pages are given back: a pass over
gigabytes leaves the reader small.

Most of a pass is the kernel's copy, 60 ms for 512 MiB. So some threads share a long one: each takes the next PIECE
records that no other has taken, until there are none.
"""
from libc.stddef cimport size_t
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc
from libc.string cimport memcpy

import os

from fastrt._core.memory.layout cimport *

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    int pthread_create(pthread_t *, const void *, void *(*)(void *) noexcept nogil, void *)
    int pthread_join(pthread_t, void **)

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *, size_t, int)
    int MADV_DONTNEED

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int, void *, size_t, long)

cdef enum:
    PIECE = 32768  # records that a thread takes, and whose state words it gives back, together
    SHARED = 2 * PIECE  # records: a shorter table is not worth a second thread


cdef void _give_back(const char *first, const char *end) noexcept nogil:
    """Drop whole pages of [first, end) from this process's mapping; the memory itself stays."""
    cdef size_t at = (<size_t>first + 4095) & ~<size_t>4095
    cdef size_t to = <size_t>end & ~<size_t>4095
    if to > at:
        madvise(<void *>at, to - at, MADV_DONTNEED)


cdef void pass_copy(frt_ctx *x, const void *first, size_t nbytes, char *to) noexcept nogil:
    """Copy a part of the segment that has memory, given by its address in the process's mapping."""
    cdef size_t at = <char *>first - x.base
    cdef size_t done = 0
    cdef ssize_t n = 1
    while done < nbytes and n > 0:
        n = pread(x.fd, to + done, nbytes - done, <long>(at + done))
        done += <size_t>n if n > 0 else 0
    if done < nbytes:  # interrupted, or not a file that can be read: through the mapping
        memcpy(to + done, x.view + at + done, nbytes - done)


cdef uint32_t pass_threads(uint32_t records) except 0:
    """In how many threads a table of so many records is read: one for each processor, at most PASS_THREADS."""
    return min(<uint32_t>len(os.sched_getaffinity(0)), <uint32_t>PASS_THREADS) if records >= SHARED else 1


cdef table_pass *pass_begin(frt_ctx *x, uint32_t records, uint32_t states, uint32_t threads) except NULL:
    """Begin a pass over the first records of a table that are in one of the states, in so many threads.

    Returns:
        One `table_pass` for each thread, side by side. The caller frees the first.
    """
    cdef table_pass *p = <table_pass *>calloc(threads, sizeof(table_pass))
    cdef uint32_t k
    if p == NULL:
        raise MemoryError()
    for k in range(threads):
        p[k].r = x[0]  # the process's view of the segment, with the words' addresses in the read-only mapping
        p[k].r.ctl = <uint64_t *>(x.view + (<char *>x.ctl - x.base))
        p[k].r.task_words = <uint64_t *>(x.view + (<char *>x.task_words - x.base))
        p[k].taken, p[k].n, p[k].states = &p[0].pieces, records, states & PASS_EXISTING
    return p


cdef bint _take(table_pass *p) noexcept nogil:
    """Take the next piece of the table; False at its end."""
    cdef uint64_t first = a64_add_rlx(p.taken, 1) * PIECE
    if first >= p.n:
        return False
    p.next = <uint32_t>first
    p.end = p.next + min(<uint32_t>PIECE, p.n - p.next)
    return True


cdef inline uint32_t _read_words(table_pass *p, const uint64_t *words, size_t stride, uint32_t n) noexcept nogil:
    """Read n state words; whether one is in a state of the pass."""
    cdef uint32_t k
    cdef uint32_t there = 0
    for k in range(n):
        p.words[k] = a64_load_acq(words + k * stride)
        there |= <uint32_t>1 << (frt_word_state(p.words[k]) & 31)
    return there & p.states


cdef inline uint32_t _keep(table_pass *p, const uint64_t *words, size_t stride, uint32_t n) noexcept nogil:
    """Keep the records that are in a state of the pass, and were not reused while they were copied; how many."""
    cdef uint32_t k, same
    cdef uint32_t found = 0
    for k in range(n):
        p.at[found] = <uint16_t>k
        same = frt_word_gen(a64_load_acq(words + k * stride)) == frt_word_gen(p.words[k])
        found += p.states >> (frt_word_state(p.words[k]) & 31) & same
    return found


cdef inline uint32_t _next(table_pass *p, uint64_t *table, size_t stride, const char *records,
                           uint32_t nbytes) noexcept nogil:
    """Copy the next records of a pass; how many are in `at`, 0 at the end.

    Of a record that is reused meanwhile, the first use is left out: it has just ended.

    Args:
        table, stride: the state words of the table, and the distance of two of them.
        records, nbytes: the table, and the size of a record.
    """
    cdef uint32_t n
    cdef uint32_t found = 0
    cdef uint64_t *words
    while found == 0:
        if p.next == p.end:
            if p.end:  # the words of what the caller has seen
                words = table + <size_t>(p.end - 1 - (p.end - 1) % PIECE) * stride
                _give_back(<char *>words, <char *>(table + p.end * stride))
            if not _take(p):
                p.next = p.end = 0
                break
        p.first, n = p.next, min(<uint32_t>PASS_COPIED // nbytes, p.end - p.next)
        p.next += n
        words = table + p.first * stride
        if _read_words(p, words, stride, n):
            pass_copy(&p.r, records + <size_t>p.first * nbytes, <size_t>n * nbytes, p.records)
            found = _keep(p, words, stride, n)
    return found


cdef uint32_t pass_tasks(table_pass *p) noexcept nogil:
    """Copy the next tasks of a pass; how many are in `at`, 0 at the end."""
    return _next(p, p.r.task_words, 1, <char *>p.r.tasks, sizeof(frt_task))


cdef uint32_t pass_objects(table_pass *p) noexcept nogil:
    """Copy the next objects of a pass; how many are in `at`, 0 at the end."""
    return _next(p, p.r.ctl, p.r.stride, <char *>p.r.entries, sizeof(frt_entry))


cdef struct part:
    table_pass *p
    pass_reader read
    void *into
    pthread_t thread
    bint runs


cdef void *_read_part(void *one) noexcept nogil:
    cdef part *mine = <part *>one
    mine.read(mine.p, mine.into)
    return NULL


cdef void pass_read(table_pass *p, uint32_t threads, pass_reader read, void *into, size_t nbytes) noexcept nogil:
    """Read a table in some threads, and return when all have ended. One that cannot be started has nothing to read.

    Args:
        p: from `pass_begin`, for as many threads.
        read: reads records through its `table_pass` until there are none.
        into, nbytes: for `read`, which writes to a place of its own in each thread, and the size of such a place.
    """
    cdef part parts[PASS_THREADS]
    cdef uint32_t k
    for k in range(1, threads):
        parts[k].p, parts[k].read, parts[k].into = p + k, read, <char *>into + k * nbytes
        parts[k].runs = pthread_create(&parts[k].thread, NULL, _read_part, parts + k) == 0
    read(p, into)
    for k in range(1, threads):
        if parts[k].runs:
            pthread_join(parts[k].thread, NULL)
