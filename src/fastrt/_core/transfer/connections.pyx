# cython: language_level=3, freethreading_compatible=True
"""Find and end the TCP connections among the descriptors of this process, without the GIL.

Each descriptor takes five system calls. From Python each call releases the GIL, and taking it back from a busy thread
takes 5 ms: 2,000 connections would take seconds.
"""
from libc.stdint cimport int64_t, uint16_t, uint64_t
from libc.stdlib cimport atoi, free, malloc, realloc

from posix.unistd cimport close

cdef extern from "<dirent.h>" nogil:
    ctypedef struct DIR:
        pass
    struct dirent:
        char d_name[256]
    DIR *opendir(const char *)
    dirent *readdir(DIR *)
    int closedir(DIR *)
    int dirfd(DIR *)

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int, int, ...)
    int F_DUPFD_CLOEXEC

cdef extern from "<sys/stat.h>" nogil:
    struct stat_t "stat":
        uint64_t st_ino
        int64_t st_size
        unsigned int st_mode
    int fstat(int, stat_t *)
    int stat(const char *, stat_t *)
    bint S_ISSOCK(unsigned int)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
    int poll(pollfd *, unsigned long, int)
    short POLLIN

cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    struct sockaddr:
        pass
    struct sockaddr_storage:
        uint16_t ss_family
    struct linger:
        int l_onoff
        int l_linger
    int getsockname(int, sockaddr *, socklen_t *)
    int getpeername(int, sockaddr *, socklen_t *)
    int getsockopt(int, int, int, void *, socklen_t *)
    int setsockopt(int, int, int, const void *, socklen_t)
    int shutdown(int, int)
    int AF_INET, AF_INET6, SOL_SOCKET, SO_LINGER, SHUT_RDWR

cdef extern from "<netinet/in.h>" nogil:
    struct in_addr:
        pass
    struct in6_addr:
        pass
    struct sockaddr_in:
        uint16_t sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        uint16_t sin6_port
        in6_addr sin6_addr
    uint16_t ntohs(uint16_t)
    int IPPROTO_TCP

cdef extern from "<arpa/inet.h>" nogil:
    const char *inet_ntop(int, const void *, char *, socklen_t)

cdef extern from *:
    """
    #include <linux/tcp.h>
    #include <stddef.h>
    """
    struct tcp_info:
        uint64_t tcpi_bytes_acked
        uint64_t tcpi_bytes_received
    int TCP_INFO

cdef struct Found:
    int descriptor
    uint64_t inode
    char host[48]
    int port
    int64_t acked
    int64_t received


cdef int _port(int family, sockaddr_storage *address) noexcept nogil:
    if family == AF_INET:
        return ntohs((<sockaddr_in *>address).sin_port)
    return ntohs((<sockaddr_in6 *>address).sin6_port)


cdef bint _examine(int descriptor, int port, Found *found) noexcept nogil:
    """Whether a descriptor is a connection of the local port; if so, fill in `found`."""
    cdef stat_t status
    cdef sockaddr_storage address
    cdef socklen_t size = sizeof(address)
    cdef tcp_info info
    cdef int family
    if fstat(descriptor, &status) or not S_ISSOCK(status.st_mode):
        return False
    if getsockname(descriptor, <sockaddr *>&address, &size):
        return False
    family = address.ss_family
    if (family != AF_INET and family != AF_INET6) or _port(family, &address) != port:
        return False
    size = sizeof(address)
    if getpeername(descriptor, <sockaddr *>&address, &size):
        return False  # a listening socket, or a connection that has ended
    found.port = _port(family, &address)
    found.descriptor, found.inode = descriptor, status.st_ino
    if family == AF_INET:
        inet_ntop(family, &(<sockaddr_in *>&address).sin_addr, found.host, sizeof(found.host))
    else:
        inet_ntop(family, &(<sockaddr_in6 *>&address).sin6_addr, found.host, sizeof(found.host))
    found.acked = found.received = 0
    size = sizeof(info)
    if getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 and size >= sizeof(info):
        found.acked, found.received = <int64_t>info.tcpi_bytes_acked, <int64_t>info.tcpi_bytes_received
    return True


def count():
    """How many descriptors this process has; 0 before Linux 6.2, which does not say."""
    cdef stat_t about
    if stat(b"/proc/self/fd", &about):
        return 0
    return about.st_size


def watch(int wake, int64_t known, int look_ms, int looks):
    """Sleep until descriptor `wake` can be read, or this process has another number of descriptors than `known`.

    A look takes 40 us of a cold processor here, and four times as much in a thread of the interpreter.

    Args:
        look_ms: between two looks.
        looks: after so many it returns in any case.
    """
    cdef pollfd waited
    cdef stat_t about
    waited.fd, waited.events = wake, POLLIN
    with nogil:
        while looks > 0 and poll(&waited, 1, look_ms) == 0:
            looks -= 1
            if stat(b"/proc/self/fd", &about) or about.st_size != known:
                break


def find(int port, int capacity):
    """Find the connections of this process on a local TCP port.

    Args:
        port: the port of this process's end.
        capacity: the most connections to return.

    Returns:
        For each connection: its descriptor, its inode (which differs if the descriptor is reused), the peer's host and
        port, and how many bytes the peer has acknowledged and sent. None when no descriptor is free to list them.
    """
    cdef int room = 256
    cdef Found *found = <Found *>malloc(room * sizeof(Found))
    cdef Found *grown = found
    cdef DIR *folder = NULL
    cdef dirent *entry
    cdef int count = 0
    cdef int at
    if found == NULL:
        raise MemoryError
    try:
        with nogil:
            folder = opendir("/proc/self/fd")
            if folder != NULL:
                while count < capacity:
                    if count == room:
                        grown = <Found *>realloc(found, 2 * room * sizeof(Found))
                        if grown == NULL:
                            break
                        found, room = grown, 2 * room
                    entry = readdir(folder)
                    if entry == NULL:
                        break
                    if entry.d_name[0] != c'.' and _examine(atoi(entry.d_name), port, found + count):
                        count += 1
                closedir(folder)
        if grown == NULL:
            raise MemoryError
        if folder == NULL:
            return None
        return [
            (found[at].descriptor, found[at].inode, found[at].host, found[at].port, found[at].acked,
             found[at].received)
            for at in range(count)
        ]
    finally:
        free(found)


def end(int descriptor, uint64_t inode):
    """Shut a connection down, although other code holds its descriptor; False if the descriptor was reused.

    Data that the peer has not read is dropped when the descriptor's holder closes it.
    """
    cdef int copy
    cdef int ended = -1
    cdef stat_t status
    cdef linger now
    now.l_onoff, now.l_linger = 1, 0
    with nogil:
        copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0)  # a descriptor that no other thread can close and reuse
        if copy >= 0:
            if fstat(copy, &status) == 0 and status.st_ino == inode:
                setsockopt(copy, SOL_SOCKET, SO_LINGER, &now, sizeof(now))
                ended = shutdown(copy, SHUT_RDWR)
            close(copy)
    return ended == 0
