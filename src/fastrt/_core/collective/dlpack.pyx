# cython: language_level=3, freethreading_compatible=True
"""Arrays of other libraries as buffers, through DLPack: in CPU memory, also of types that NumPy lacks (bfloat16).

Source: the DLPack specification, `dlpack.h` 0.x (`DLManagedTensor`), which every producer offers by default.
"""
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

cdef struct dl_tensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t type_code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct dl_managed:
    dl_tensor tensor
    void *context
    void (*deleter)(dl_managed *) noexcept

_TYPES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16",
}


cdef class Borrowed:
    """The bytes of a contiguous CPU array that offers `__dlpack__`. The array is held as long as this object lives.

    Args:
        array: the array.
    Raises:
        TypeError: the array is not in the CPU's memory, or reductions do not support its type.
        ValueError: its elements are not contiguous.
    """
    cdef dl_managed *managed
    cdef uint64_t nbytes
    cdef readonly str dtype
    cdef readonly tuple shape

    def __cinit__(self, array):
        cdef dl_tensor *t
        cdef int64_t expected = 1
        cdef int k
        if tuple(array.__dlpack_device__())[0] != 1:
            raise TypeError("the array is not in the CPU's memory: copy it there first")
        capsule = array.__dlpack__()
        self.managed = <dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")
        PyCapsule_SetName(capsule, "used_dltensor")
        t = &self.managed.tensor
        self.dtype = _TYPES.get((t.type_code, t.bits)) if t.lanes == 1 else None
        if self.dtype is None:
            raise TypeError(f"arrays of DLPack type {t.type_code} with {t.bits} bits are not supported")
        for k in range(t.ndim - 1, -1, -1):
            if t.strides != NULL and t.shape[k] > 1 and t.strides[k] != expected:
                raise ValueError("the array is not contiguous")
            expected *= t.shape[k]
        self.shape = tuple(t.shape[k] for k in range(t.ndim))
        self.nbytes = expected * t.bits // 8

    def __dealloc__(self):
        if self.managed != NULL and self.managed.deleter != NULL:
            self.managed.deleter(self.managed)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <char *>self.managed.tensor.data + self.managed.tensor.byte_offset,
                          self.nbytes, False, flags)
