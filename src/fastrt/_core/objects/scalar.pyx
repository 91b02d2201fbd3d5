# cython: language_level=3, freethreading_compatible=True
"""Encode plain values as bytes: None, bool, int of 64 bits, float, str, bytes, and argument tuples of them.

Most arguments and results are such values. Pickle takes 0.24 us for each encoding or decoding, of which a task needs
four: more than everything else on the task path together. Only exact types are encoded here: a subclass is pickled and
keeps its class.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.unicode cimport PyUnicode_DecodeUTF8

from fastrt.errors import ArenaCorrupt

from libc.stdint cimport int64_t, uint16_t, uint32_t
from libc.string cimport memcpy

CORE_KINDS_END = 16  # kinds of values below are the core's own; those of serializers begin here

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object, Py_ssize_t *) except NULL

cdef enum:
    TAG_REF = 15  # the argument is a reference; the head has its number among the task's refs
    HEADER = 8    # of one argument: {tag:16 | zero:16 | length or number:32}


cdef Py_ssize_t scalar_size(object value, uint16_t *kind) except -2:
    """How many bytes the value takes, and its kind; -1 when it is not a scalar of these kinds."""
    cdef type t = type(value)
    cdef int overflow = 0
    cdef Py_ssize_t n
    if t is int:
        PyLong_AsLongLongAndOverflow(value, &overflow)
        kind[0] = KIND_INT
        return -1 if overflow else 8
    if value is None:
        kind[0] = KIND_NONE
        return 0
    if t is float:
        kind[0] = KIND_FLOAT
        return 8
    if t is bool:
        kind[0] = KIND_TRUE if value is True else KIND_FALSE
        return 0
    if t is bytes:
        kind[0] = KIND_BYTES
        return PyBytes_GET_SIZE(value)
    if t is str:
        kind[0] = KIND_STR
        try:
            PyUnicode_AsUTF8AndSize(value, &n)
        except UnicodeEncodeError:
            return -1  # lone surrogates: pickle can encode them
        return n
    return -1


cdef int scalar_write(object value, uint16_t kind, char *to, Py_ssize_t nbytes) except -1:
    """Write a value that scalar_size has measured."""
    cdef int64_t whole
    cdef double real
    cdef Py_ssize_t n
    if kind == KIND_INT:
        whole = value
        memcpy(to, &whole, 8)
    elif kind == KIND_FLOAT:
        real = PyFloat_AS_DOUBLE(value)
        memcpy(to, &real, 8)
    elif kind == KIND_STR:
        memcpy(to, PyUnicode_AsUTF8AndSize(value, &n), nbytes)
    elif kind == KIND_BYTES:
        memcpy(to, PyBytes_AS_STRING(value), nbytes)
    return 0


cdef object scalar_read(uint16_t kind, const char *data, Py_ssize_t nbytes):
    """Decode a value: always a new object that owns its bytes."""
    cdef int64_t whole
    cdef double real
    if nbytes != 8 and (kind == KIND_INT or kind == KIND_FLOAT):
        raise ArenaCorrupt(f"a number in the shared segment has {nbytes} bytes, not 8")
    if kind == KIND_INT:
        memcpy(&whole, data, 8)
        return whole
    if kind == KIND_NONE:
        return None
    if kind == KIND_FLOAT:
        memcpy(&real, data, 8)
        return real
    if kind == KIND_TRUE:
        return True
    if kind == KIND_FALSE:
        return False
    if kind == KIND_STR:
        try:
            return PyUnicode_DecodeUTF8(data, nbytes, NULL)
        except UnicodeDecodeError as exc:
            raise ArenaCorrupt(f"a text in the shared segment is not UTF-8: {exc}") from None
    if kind == KIND_BYTES:
        return PyBytes_FromStringAndSize(data, nbytes)
    raise ArenaCorrupt(f"a value in the shared segment is of kind {kind}, which is not a scalar kind")


cdef Py_ssize_t args_write(tuple args, type ref_type, char *to, Py_ssize_t room, list refs) except -2:
    """Encode a tuple of scalars and references; references are appended to `refs`.

    Returns the number of bytes written, or -1 when an argument is of another type or the room is too small.
    """
    cdef Py_ssize_t n, at = 0
    cdef uint16_t kind = 0
    cdef uint32_t head[2]
    cdef object value
    for value in args:
        if isinstance(value, ref_type):
            kind, n = TAG_REF, 0
        else:
            n = scalar_size(value, &kind)
        if n < 0 or at + HEADER + n > room:
            return -1
        head[0] = kind
        if kind == TAG_REF:
            head[1] = <uint32_t>len(refs)
            refs.append(value)
        else:
            head[1] = <uint32_t>n
            scalar_write(value, kind, to + at + HEADER, n)
        memcpy(to + at, head, HEADER)
        at += (HEADER + n + 7) & ~7
    return at if at <= room else -1


cdef tuple args_read(const char *data, Py_ssize_t nbytes, list refs):
    """Decode a tuple of arguments, with the references taken from `refs` by number."""
    cdef Py_ssize_t at = 0
    cdef uint32_t head[2]
    cdef list values = []
    while at < nbytes:
        if nbytes - at < HEADER:
            raise ArenaCorrupt("the arguments of a task are cut off")
        memcpy(head, data + at, HEADER)
        if head[0] == TAG_REF:
            if head[1] >= <uint32_t>len(refs):
                raise ArenaCorrupt("the arguments of a task name a reference that it does not have")
            values.append(refs[head[1]])
        else:
            if head[0] >= TAG_REF or head[1] > nbytes - at - HEADER:
                raise ArenaCorrupt("the arguments of a task are damaged")
            values.append(scalar_read(<uint16_t>head[0], data + at + HEADER, head[1]))
            at += (head[1] + 7) & ~7
        at += HEADER
    return tuple(values)


cpdef bint is_plain(object value, int depth=8) except -1:
    """Whether a value consists of None, bool, int, float, str, bytes and tuples, lists and dicts of these only.

    Such a value means the same under plain pickle in every process: it names no function or class of the sender.
    Deep or long containers count as not plain, so that this check stays cheap; and so do large bytes, which the pickler
    of the store does not copy.
    """
    cdef type t = type(value)
    if value is None or t is int or t is str or t is float or t is bool:
        return True
    if t is bytes:
        return len(<bytes>value) < 65536
    if depth == 0:
        return False
    if t is list or t is tuple:
        if len(value) > 10000:
            return False
        for item in value:
            if not is_plain(item, depth - 1):
                return False
        return True
    if t is dict:
        if len(value) > 10000:
            return False
        for key, item in value.items():
            if not is_plain(key, depth - 1) or not is_plain(item, depth - 1):
                return False
        return True
    return False
