# cython: language_level=3, freethreading_compatible=True
"""The references that one call names, as a C array: a buffer that is not copied, or the items of a list.

Invariant: `refs` points into the held buffer, or into the batch itself.
"""
from array import array

from cpython.buffer cimport PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer


cdef class Batch:
    """The references of one call; holds the buffer that has them.

    Args:
        source: a buffer of 64-bit integers (not copied), or any iterable of ints.

    Raises:
        TypeError: the items are not 64-bit integers.
        OverflowError: an item is negative or too large.
    """

    def __cinit__(self, source):
        cdef Py_ssize_t i
        cdef tuple few
        if type(source) is list or type(source) is tuple:
            # A tuple first: another thread, or an item that is not an int and so runs Python code, may change a list.
            few = tuple(source)
            if len(few) <= FEW:  # this takes a fifth of the time of making and reading an array
                for i in range(len(few)):
                    self.few[i] = few[i]
                self.refs, self.n = self.few, len(few)
                return
            source = few
        if not PyObject_CheckBuffer(source):
            source = array("Q", source)
        PyObject_GetBuffer(source, &self.view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
        self.held = True
        kind = self.view.format.decode("latin-1") if self.view.format != NULL else "B"
        if self.view.itemsize != 8 or kind.lstrip("@=<") not in ("Q", "L", "q", "l"):
            raise TypeError(
                f"References must be 64-bit integers; this buffer's items are of format {kind!r}. "
                "Use numpy.uint64 or array('Q')."
            )
        self.refs = <const uint64_t *>self.view.buf
        self.n = self.view.len // 8

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)
