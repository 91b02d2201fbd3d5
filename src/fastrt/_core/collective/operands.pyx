# cython: language_level=3, freethreading_compatible=True
"""The arrays of an operation: their memory, held while the operation lasts, and the type of their elements.

This uses the buffer protocol, not NumPy's headers, so ctypes arrays, bytearrays and memory maps are accepted, too.
"""
from fastrt._core.collective.reduce import DTYPES as _DTYPES

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport strchr

from fastrt._core.collective.reduce cimport *

NAMES = {**{code: name for name, code in _DTYPES.items()}, BYTES_DTYPE: "bytes"}


cdef int dtype_of(Py_buffer *view) except -1:
    """The type code of a buffer's elements; BYTES_DTYPE for elements that can be moved but not reduced."""
    cdef const char *f = view.format
    cdef char c = b"B"
    if f != NULL:
        if strchr(f, b"O") != NULL:
            raise TypeError("arrays of Python objects cannot be sent; see all_gather_object")
        if f[0] == b"<" or f[0] == b"=" or f[0] == b"@" or f[0] == b"|":
            f += 1
        if f[0] == 0 or f[1] != 0:
            return BYTES_DTYPE
        c = f[0]
    if c == b"f":
        return FRT_F32
    if c == b"d":
        return FRT_F64
    if c == b"e":
        return FRT_F16
    if c in b"bhilqn":
        return FRT_I8 if view.itemsize == 1 else FRT_I16 if view.itemsize == 2 else FRT_I32 \
            if view.itemsize == 4 else FRT_I64
    if c in b"BHILQN":
        return FRT_U8 if view.itemsize == 1 else FRT_U16 if view.itemsize == 2 else FRT_U32 \
            if view.itemsize == 4 else FRT_U64
    return BYTES_DTYPE


cdef class Held:
    """A contiguous buffer and the type code of its elements; released with this object."""

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef Held hold(as_buffer, array, bint writable):
    """Hold an array's memory. If the array exports no usable buffer, `as_buffer` makes one and names the type."""
    cdef Held held = Held.__new__(Held)
    cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    cdef str name = None
    try:
        PyObject_GetBuffer(array, &held.view, flags)
    except (TypeError, ValueError, BufferError):
        array, name = as_buffer(array, writable)
        PyObject_GetBuffer(array, &held.view, flags)
    held.held = True
    if name is None:
        held.dtype, held.item_bytes = dtype_of(&held.view), held.view.itemsize
    else:
        held.dtype = _DTYPES[name]
        held.item_bytes = FRT_ITEM_BYTES[held.dtype]
    held.count = held.view.len // held.item_bytes
    return held
