# cython: language_level=3, freethreading_compatible=True
"""Shared-memory objects by name: posix_ipc opens them where it is installed, `shm_open` elsewhere."""

import os
import resource

try:
    import posix_ipc
except ImportError:  # it has no wheels for this Python
    posix_ipc = None

from libc.errno cimport ENOENT, errno
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t

from fastrt._core.memory.layout cimport a64_load_rlx, a64_store_rlx


cdef extern from "<sys/mman.h>" nogil:
    int shm_open(const char *, int, unsigned int)
    int shm_unlink(const char *)
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int PROT_WRITE, MAP_SHARED, MAP_NORESERVE
    void *MAP_FAILED

cdef extern from "<fcntl.h>" nogil:
    int O_RDWR, O_CREAT, O_EXCL


cdef int open_shm(str name, uint64_t create_bytes=0) except -1:
    """Open a shared-memory object: an existing one, or a new one of `create_bytes`, with mode 0600.

    Raises:
        OSError: FileNotFoundError, FileExistsError or another error of the kernel.
    """
    cdef int fd, code
    cdef bytes path = os.fsencode(name)
    if posix_ipc is not None:
        try:
            if create_bytes:
                return posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=create_bytes).fd
            return posix_ipc.SharedMemory(name).fd
        except posix_ipc.ExistentialError as e:
            raise (FileExistsError if create_bytes else FileNotFoundError)(str(e)) from None
        except (posix_ipc.Error, ValueError) as e:
            raise OSError(str(e)) from None
    fd = shm_open(path, O_RDWR | (O_CREAT | O_EXCL if create_bytes else 0), 0o600)
    if fd < 0:
        code = errno
        raise OSError(code, os.strerror(code), name)
    if create_bytes:
        try:
            os.ftruncate(fd, create_bytes)
        except BaseException:
            os.close(fd)
            shm_unlink(path)
            raise
    return fd


cdef int create_shm(str name, uint64_t nbytes) except -1:
    """Make a shared-memory object of nbytes, with mode 0600; an OSError names it and what may be in the way."""
    try:
        return open_shm(name, nbytes)
    except OSError as e:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        advice = "" if limit == resource.RLIM_INFINITY else f"; files are limited to {limit} bytes (ulimit -f)"
        raise OSError(f"cannot make /dev/shm{name} of {nbytes} bytes: {e}{advice}") from None


cdef bint unlink_shm(str name) except -1:
    """Remove the name; say whether it was there."""
    if shm_unlink(os.fsencode(name)) == 0:
        return True
    cdef int code = errno
    if code != ENOENT:
        raise OSError(code, os.strerror(code), name)
    return False


# Where this process, or the one that it was forked from, last mapped an object for writing.
cdef uint64_t _writable = 0


cdef void *map_aligned(int fd, uint64_t nbytes, uint64_t align, int access) noexcept nogil:
    """Map a shared-memory object from a multiple of `align` on, as huge pages need it. MAP_FAILED if it cannot.

    A forked child finds the gap that its parent's mapping for writing has left, and fills it: inherited arrays of
    `fastrt.empty` are at the same addresses again.
    """
    cdef char *wanted = <char *>a64_load_rlx(&_writable) if access & PROT_WRITE else NULL
    cdef char *found = <char *>mmap(wanted, nbytes, access, MAP_SHARED | MAP_NORESERVE, fd, 0)
    if found != MAP_FAILED and <uint64_t>found % align:
        munmap(found, nbytes)
        found = <char *>mmap(NULL, nbytes + align, access, MAP_SHARED | MAP_NORESERVE, fd, 0)
        if found != MAP_FAILED:
            munmap(found, nbytes + align)
            found += (align - <uint64_t>found % align) % align
            found = <char *>mmap(found, nbytes, access, MAP_SHARED | MAP_NORESERVE, fd, 0)
    if found != MAP_FAILED and access & PROT_WRITE:
        a64_store_rlx(&_writable, <uint64_t>found)
    return found
