# cython: language_level=3
"""The native data plane's hands: scatter and gather between memory of any kind and a TCP socket, and a checksum.

Data go from the arena to the socket and from the socket to the arena without a copy in user space and without the
GIL. Neither function ever waits longer than its timeout without moving a byte, both let Ctrl-C through, and a socket
that another thread shuts down ends either. The frames that are moved this way are the business of whoever calls.

Why plain sendmsg and recvmsg (measured here, 1 GiB over loopback, warm memory on both sides): they reach 5.0 GB/s
with 2 to 8 MiB a call and 3.5 with 64 MiB; sendfile from the segment 2.1 (its pipe hands on 64 KiB at a time); fixed
socket buffers are never faster than the kernel's own tuning, and small ones halve the rate. MSG_ZEROCOPY copies all
the same over loopback.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t

from fastrt._core.memory.layout cimport frt_now_ns

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    object PyErr_SetFromErrno(object)

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    int MSG_DONTWAIT, MSG_NOSIGNAL, SOL_SOCKET, SO_RCVLOWAT
    int setsockopt(int, int, int, const void *, unsigned int)
    Py_ssize_t sendmsg(int, const msghdr *, int)
    Py_ssize_t recvmsg(int, msghdr *, int)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    short POLLIN, POLLOUT
    int poll(pollfd *, unsigned long, int)

cdef extern from "<string.h>" nogil:
    void *memset(void *, int, size_t)

cdef extern from * nogil:
    """
    #include <malloc.h>
    static inline int frt_keep_freed(int nbytes) {
    #ifdef __GLIBC__
        return mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, nbytes);
    #else
        (void)nbytes;
        return 0;
    #endif
    }
    """
    int frt_keep_freed(int) noexcept

cdef extern from "crc32c.h" nogil:
    ctypedef struct frt_crc_tables:
        pass
    void frt_crc_init(frt_crc_tables *) noexcept
    int frt_crc_has_hardware() noexcept
    uint32_t frt_crc_soft(const frt_crc_tables *, uint32_t, const uint8_t *, size_t) noexcept
    uint32_t frt_crc_hard(const frt_crc_tables *, uint32_t, const uint8_t *, size_t) noexcept

cdef enum:
    PARTS = 64  # buffers in one call; more make the call itself slow, as each is acquired and released
    LOOK_MS = 200  # how often a wait looks for signals that came before it began
    GIL_BYTES_MIN = 16384
    WAKE_BYTES = 2 << 20  # a receiver that needs more sleeps until so much has come
    WAKE_BYTES_MIN = 128 << 10
    TIMED_OUT = -1
    CLOSED = -2
    FAILED = -3
    SIGNALLED = -4

PARTS_MAX = PARTS
cdef frt_crc_tables _tables
frt_crc_init(&_tables)
HARDWARE = bool(frt_crc_has_hardware())
cdef bint _hardware = HARDWARE


def crc32c(data, uint32_t value=0, bint software=False):
    """The CRC-32C of a buffer.

    Args:
        data: any contiguous buffer.
        value: the checksum of what comes before it.
        software: compute it by tables also where the processor has an instruction for it.
    Returns:
        A number of 32 bits.
    Source:
        RFC 3720, B.4.
    """
    cdef Py_buffer view
    cdef bint hard = _hardware and not software
    cdef const uint8_t *at
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    at = <const uint8_t *>view.buf
    try:
        if view.len < GIL_BYTES_MIN:
            return frt_crc_hard(&_tables, value, at, view.len) if hard else frt_crc_soft(&_tables, value, at, view.len)
        with nogil:
            value = frt_crc_hard(&_tables, value, at, view.len) if hard else frt_crc_soft(&_tables, value, at, view.len)
        return value
    finally:
        PyBuffer_Release(&view)


@cython.final
cdef class _Parts:
    """The buffers of one call, held while the kernel reads or writes them."""

    cdef Py_buffer views[PARTS]
    cdef iovec spans[PARTS]
    cdef int count
    cdef int first  # the first span that is not done
    cdef Py_ssize_t total
    cdef int wake_bytes  # the socket's SO_RCVLOWAT

    def __cinit__(self, list parts, bint writable):
        cdef object part
        self.wake_bytes = 1
        if len(parts) > PARTS:
            raise ValueError(f"{len(parts)} parts in one call; at most {PARTS}")
        for part in parts:
            PyObject_GetBuffer(part, &self.views[self.count], PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
            self.spans[self.count].iov_base = self.views[self.count].buf
            self.spans[self.count].iov_len = self.views[self.count].len
            self.total += self.views[self.count].len
            self.count += 1

    def __dealloc__(self):
        cdef int k
        for k in range(self.count):
            PyBuffer_Release(&self.views[k])


cdef void _advance(_Parts parts, Py_ssize_t n) noexcept nogil:
    """Take n bytes off the front; empty spans there go too."""
    cdef iovec *span
    while parts.first < parts.count:
        span = &parts.spans[parts.first]
        if <Py_ssize_t>span.iov_len > n:
            span.iov_base = <char *>span.iov_base + n
            span.iov_len -= n
            return
        n -= span.iov_len
        parts.first += 1


cdef int _wait(int fd, short events, int64_t deadline_ns) noexcept nogil:
    """Wait until the socket is ready: 0, TIMED_OUT, FAILED, or SIGNALLED when signals should be looked at."""
    cdef pollfd p
    cdef int64_t left = (deadline_ns - frt_now_ns() + 999999) // 1000000
    cdef int rc
    if left <= 0:
        return TIMED_OUT
    p.fd, p.events, p.revents = fd, events, 0
    rc = poll(&p, 1, <int>(left if left < LOOK_MS else LOOK_MS))
    if rc > 0:
        return 0  # also on an error or a hang-up: the next call on the socket says which
    return SIGNALLED if rc == 0 or errno == EINTR else FAILED


cdef void _wake_at(int fd, int *now, Py_ssize_t needed) noexcept nogil:
    """Have the kernel wake us for a batch and not for every segment: that many bytes, in steps worth a call.

    A sleeper that is woken for 64 KiB at a time is also drawn to the sender's processor, and takes turns with it.
    """
    cdef int wanted = 1
    if needed >= WAKE_BYTES_MIN:
        wanted = <int>(needed if needed < WAKE_BYTES else WAKE_BYTES)
    if wanted != now[0] and setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(int)) == 0:
        now[0] = wanted


cdef Py_ssize_t _move(int fd, _Parts parts, bint out, Py_ssize_t needed, int64_t deadline_ns) noexcept nogil:
    """Send or receive once, waiting for the socket if need be: how many bytes, or a negative reason."""
    cdef msghdr message
    cdef Py_ssize_t n
    cdef int rc
    while True:
        memset(&message, 0, sizeof(message))
        message.msg_iov = &parts.spans[parts.first]
        message.msg_iovlen = parts.count - parts.first
        n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) if out else recvmsg(fd, &message, MSG_DONTWAIT)
        if n > 0:
            _advance(parts, n)
            return n
        if n == 0:
            return CLOSED
        if errno == EINTR:
            return SIGNALLED
        if errno != EAGAIN:
            return FAILED
        if not out:
            _wake_at(fd, &parts.wake_bytes, needed)
        rc = _wait(fd, POLLOUT if out else POLLIN, deadline_ns)
        if rc != 0:
            return rc


cdef Py_ssize_t _move_all(int fd, _Parts parts, bint out, Py_ssize_t least, double timeout_s) except -1:
    cdef int64_t patience = <int64_t>(min(max(timeout_s, 0.0), 1e9) * 1e9)
    cdef int64_t deadline = frt_now_ns() + patience
    cdef Py_ssize_t done = 0
    cdef Py_ssize_t n = 0
    _advance(parts, 0)
    try:
        while done < least:
            with nogil:
                while done < least:
                    n = _move(fd, parts, out, least - done, deadline)
                    if n < 0:
                        break
                    done += n
                    deadline = frt_now_ns() + patience
            if n == SIGNALLED:
                PyErr_CheckSignals()
            elif n == TIMED_OUT:
                raise TimeoutError(f"the connection moved no byte for {timeout_s:g} s, {done} of {least} bytes "
                                   f"{'sent' if out else 'received'}")
            elif n == CLOSED:
                raise EOFError(f"the other end closed the connection after {done} of {least} bytes")
            elif n == FAILED:
                PyErr_SetFromErrno(OSError)
    finally:
        if parts.wake_bytes != 1:  # whoever waits next may need one byte only
            _wake_at(fd, &parts.wake_bytes, 0)
    return done


def send_parts(int fd, list parts, double timeout_s):
    """Send the bytes of several buffers, one after the other.

    Args:
        fd: a connected socket's descriptor.
        parts: contiguous buffers, at most PARTS_MAX; what they show must not change meanwhile.
        timeout_s: how long the other end may take no byte at all, in seconds.
    Returns:
        How many bytes that were.
    Raises:
        TimeoutError: it took none for so long.
        OSError: the connection is broken; it cannot be known how much has arrived.
    """
    cdef _Parts held = _Parts(parts, False)
    return _move_all(fd, held, True, held.total, timeout_s)


def receive_parts(int fd, list parts, Py_ssize_t least, double timeout_s):
    """Receive into several buffers, one after the other.

    Args:
        fd: a connected socket's descriptor.
        parts: writable contiguous buffers, at most PARTS_MAX.
        least: return when so many bytes have come; more are taken if they are there already.
        timeout_s: how long no byte at all may come, in seconds.
    Returns:
        How many bytes have been received, from `least` to the size of all parts.
    Raises:
        ValueError: `least` is more than the parts can take.
        TimeoutError: none came for so long.
        EOFError: the other end has closed the connection.
        OSError: the connection is broken.
    """
    cdef _Parts held = _Parts(parts, True)
    if least > held.total:
        raise ValueError(f"{least} bytes wanted, the parts take {held.total}")
    return _move_all(fd, held, False, least, timeout_s)


def keep_freed_memory(int nbytes):
    """Let malloc keep up to so many freed bytes of this process, instead of giving each large buffer back at once.

    gRPC allocates a fresh buffer for every message; without this the kernel clears new pages for each, which is half
    of what receiving costs (0.43 instead of 0.23 s of system time a GiB). For processes that move data by gRPC.

    Returns:
        Whether that could be done (glibc only).
    """
    return bool(frt_keep_freed(nbytes))
