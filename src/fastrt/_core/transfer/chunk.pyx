# cython: language_level=3, freethreading_compatible=True
"""Encode and decode ObjChunk, the message of the object stores, with one copy of the data.

`encode` is a serializer and `decode` a deserializer for grpcio. Protobuf's own classes would copy each payload twice
more. A decoded Chunk is a view of the data inside the message; the caller makes the one copy, into the arena.

Invariant: nothing outside the message is read; every length is compared with the rest of the message before it is used.
The rules are proto3's: fields come in any order, the last of several counts, unknown fields and groups are skipped, a
field with a wrong wire type is unknown, zero and empty fields are not written.
Source: ObjChunk in protos/ray/objstore.proto; protobuf's encoding guide.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    VARINT = 0
    FIXED64 = 1
    LENGTH = 2
    GROUP = 3
    GROUP_END = 4
    FIXED32 = 5
    VARINT_BYTES_MAX = 10
    TAG_BYTES_MAX = 5
    DEPTH_MAX = 100  # of nested groups, as in protobuf's own parsers
    HEAD_BYTES_MAX = 3 * (1 + VARINT_BYTES_MAX)
    GIL_BYTES_MIN = 65536  # smaller copies take less time than releasing the GIL


# ---- writing ----

cdef int _put_varint(uint8_t *at, uint64_t value) noexcept nogil:
    cdef int n = 0
    while value > 127:
        at[n] = <uint8_t>(value | 128)
        value >>= 7
        n += 1
    at[n] = <uint8_t>value
    return n + 1


cdef int _put_field(uint8_t *at, int tag, uint64_t value) noexcept nogil:
    """Write a field's tag and value, unless the value is zero: how many bytes."""
    if value == 0:
        return 0
    at[0] = <uint8_t>tag
    return 1 + _put_varint(at + 1, value)


def encode(uint64_t objref, uint64_t totalsize, data):
    """Write an ObjChunk.

    Args:
        objref, totalsize: as in the message.
        data: any contiguous buffer; copied once.
    Returns:
        The message, with the same bytes that protobuf would write.
    """
    cdef uint8_t head[HEAD_BYTES_MAX]
    cdef Py_buffer view
    cdef char *out
    cdef int n
    n = _put_field(head, 1 << 3 | VARINT, objref)
    n += _put_field(head + n, 2 << 3 | VARINT, totalsize)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        n += _put_field(head + n, 3 << 3 | LENGTH, <uint64_t>view.len)
        message = PyBytes_FromStringAndSize(NULL, n + view.len)
        out = PyBytes_AS_STRING(message)
        memcpy(out, head, n)
        if view.len >= GIL_BYTES_MIN:
            with nogil:
                memcpy(out + n, view.buf, view.len)
        elif view.len:
            memcpy(out + n, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return message


# ---- reading ----

@cython.no_gc
cdef class Chunk:
    """A decoded ObjChunk. Its buffer is a read-only view of the data inside the message."""

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <void *>self.data, self.nbytes, 1, flags)

    def __len__(self):
        return self.nbytes


cdef Py_ssize_t _varint(const uint8_t *at, const uint8_t *end, int most, uint64_t *value) noexcept nogil:
    """Read a varint: how many bytes it has, or -1 if it is cut off or too long."""
    cdef uint64_t found = 0
    cdef int n = 0
    while n < most and at + n < end:
        found |= <uint64_t>(at[n] & 127) << (7 * n)
        if at[n] < 128:
            value[0] = found
            return n + 1
        n += 1
    return -1


cdef Py_ssize_t _tag(const uint8_t *at, const uint8_t *end, uint64_t *tag) noexcept nogil:
    """Read a field's number and wire type: how many bytes, or -1 if it is cut off or the number is not valid."""
    cdef Py_ssize_t n = _varint(at, end, TAG_BYTES_MAX, tag)
    return -1 if n < 0 or tag[0] > <uint64_t>0xffffffff or tag[0] >> 3 == 0 else n


cdef Py_ssize_t _value(const uint8_t *at, const uint8_t *end, int wire, uint64_t *value) noexcept nogil:
    """Read or measure the value of a field that is not a group: all its bytes, or -1.

    `value` is the number; for a LENGTH field, the length of the data at the end of these bytes.
    """
    cdef Py_ssize_t n
    if wire == FIXED64 or wire == FIXED32:
        n = 8 if wire == FIXED64 else 4
        return n if end - at >= n else -1
    n = _varint(at, end, VARINT_BYTES_MAX, value)
    if wire == VARINT or n < 0:
        return n
    if wire != LENGTH or value[0] > <uint64_t>(end - at - n):
        return -1
    return n + <Py_ssize_t>value[0]


cdef Py_ssize_t _group(const uint8_t *start, const uint8_t *end, uint64_t opening) noexcept nogil:
    """Skip the rest of a group and the groups inside it: how many bytes, or -1."""
    cdef uint32_t fields[DEPTH_MAX]
    cdef int depth = 1
    cdef int wire
    cdef uint64_t tag = 0
    cdef uint64_t ignored = 0
    cdef const uint8_t *at = start
    cdef Py_ssize_t n
    fields[0] = <uint32_t>(opening >> 3)
    while depth:
        n = _tag(at, end, &tag)
        if n < 0:
            return -1
        at += n
        wire = tag & 7
        if wire == GROUP:
            if depth == DEPTH_MAX:
                return -1
            fields[depth] = <uint32_t>(tag >> 3)
            depth += 1
        elif wire == GROUP_END:
            depth -= 1
            if fields[depth] != tag >> 3:
                return -1
        else:
            n = _value(at, end, wire, &ignored)
            if n < 0:
                return -1
            at += n
    return at - start


cdef Py_ssize_t _parse(const uint8_t *start, const uint8_t *end, uint64_t *objref, uint64_t *totalsize,
                       const uint8_t **data, Py_ssize_t *nbytes) noexcept nogil:
    """Read a whole message: -1, or the position of the malformed field."""
    cdef const uint8_t *at = start
    cdef const uint8_t *field
    cdef uint64_t tag = 0
    cdef uint64_t value = 0
    cdef Py_ssize_t n
    while at < end:
        field = at
        n = _tag(at, end, &tag)
        if n < 0:
            return field - start
        at += n
        n = _group(at, end, tag) if tag & 7 == GROUP else _value(at, end, tag & 7, &value)
        if n < 0:
            return field - start
        at += n
        if tag == (1 << 3 | VARINT):
            objref[0] = value
        elif tag == (2 << 3 | VARINT):
            totalsize[0] = value
        elif tag == (3 << 3 | LENGTH):
            data[0], nbytes[0] = at - value, <Py_ssize_t>value
    return -1


def decode(bytes body):
    """Read an ObjChunk.

    Args:
        body: the message.
    Returns:
        A `Chunk`, whose data are a view of `body`.
    Raises:
        ValueError: it is not a protobuf message; the text names the position of the malformed field.
    """
    cdef const uint8_t *start = <const uint8_t *>PyBytes_AS_STRING(body)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(body)
    cdef const uint8_t *data = start
    cdef Py_ssize_t nbytes = 0
    cdef Py_ssize_t bad
    cdef Chunk chunk = Chunk.__new__(Chunk)
    bad = _parse(start, start + size, &chunk.objref, &chunk.totalsize, &data, &nbytes)
    if bad >= 0:
        raise ValueError(f"this is not an ObjChunk: the field at byte {bad} of {size} is cut off or malformed")
    chunk.body, chunk.data, chunk.nbytes = body, <const char *>data, nbytes
    return chunk
