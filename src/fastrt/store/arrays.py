"""NumPy arrays as bytes, in any layout: the stored form of an array by itself, and arrays inside a pickle.

An array by itself is a header, the text of its type, and its bytes. The header has a number for the order of the bytes:
0 for C, 1 for Fortran, and 2 for another order of the axes, which then follows the text. An array that is not
contiguous (a slice, a column, a transposed array) is copied once, straight to its place, with its axes sorted by their
strides; so it comes back with the same order of axes, and dense.

NumPy itself puts only contiguous arrays of types that the buffer protocol knows out of band. `reduce_array` does it for
the others: strided arrays, dates, records, and types of other packages such as bfloat16.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

ALIGNMENT = 64
# Below this size a buffer is cheaper inside the pickle than beside it.
OUT_OF_BAND_MIN = 1024
# Dimensions, order, length of the type's text, shape; NumPy has at most 64 dimensions.
_HEADS = [struct.Struct(f"<BBH{ndim}Q") for ndim in range(65)]
_ROWS, _COLUMNS, _AXES = 0, 1, 2  # the order of an array's bytes
_FOREIGN_TYPES = 256  # NPY_USERDEF: type numbers of other packages begin here
_TEXT_MAX = 0xFFFF
_PICKLED = 0x80  # the first byte of every pickle, and of no text of NumPy
_texts: dict[Any, bytes] = {}
_dtypes: dict[bytes, Any] = {}


class Strided(bytearray):
    """A part of a value that is not contiguous: an array that is copied straight to its place.

    It is a buffer without bytes, because the pickler takes only contiguous buffers.
    """

    __slots__ = ("array", "nbytes", "readonly")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.nbytes = array.nbytes
        self.readonly = not array.flags.writeable

    def copy_to(self, place: Any, offset: int) -> None:
        """Copy the items, densely and in C order, to `offset` of a writable buffer."""
        import numpy

        numpy.ndarray(self.array.shape, self.array.dtype, place, offset)[...] = self.array


def dtype_text(dtype: Any) -> bytes:
    """The portable name of a type, or its pickle; empty if an array of it must be pickled item by item."""
    text = _texts.get(dtype)
    if text is None:
        if dtype.hasobject or dtype.itemsize == 0 or dtype.subdtype is not None:
            text = _texts[dtype] = b""
        elif dtype.names is None and dtype.num < _FOREIGN_TYPES:
            text = _texts[dtype] = dtype.str.encode()
        else:  # not kept: types that are equal may differ, for example in their alignment
            try:
                text = pickle.dumps(dtype, 5)
            except Exception:  # a type of another package, which may raise anything
                return b""
            if len(text) > _TEXT_MAX:
                return b""
    return text


def header_of(shape: tuple[int, ...], dtype: Any, columns: bool) -> bytes:
    """Return the header of a contiguous array of a type that has a text; with `columns` in Fortran order."""
    # An array of one axis or one item has both orders.
    columns = columns and sum(size != 1 for size in shape) > 1 and 0 not in shape
    return _head(shape, _COLUMNS if columns else _ROWS, dtype_text(dtype))


def _head(shape: tuple[int, ...], order: int, text: bytes) -> bytes:
    return _HEADS[len(shape)].pack(len(shape), order, len(text), *shape) + text


def write_array(array: Any, numpy: Any) -> tuple[int, list[tuple[int, Any]]]:
    """Return the size and the parts of an array that has a text."""
    dtype, flags, nbytes = array.dtype, array.flags, array.nbytes
    text = _texts.get(dtype) or dtype_text(dtype)
    order, part = _ROWS, array
    if not flags.c_contiguous:
        if flags.f_contiguous:
            order = _COLUMNS
        else:
            order, after, part = _arranged(array)
            text += after
    ndim = array.ndim
    head = _HEADS[ndim].pack(ndim, order, len(text) - ndim if order == _AXES else len(text), *array.shape) + text
    if not nbytes:
        return aligned(len(head)), [(0, head)]
    if part is array and (order or dtype.kind not in "biufc"):
        # A flat byte view, because the buffer protocol does not support the type (datetime64) or the order.
        part = array.reshape(-1, order="F" if order else "C").view(numpy.uint8)
    start = aligned(len(head))
    return start + nbytes, [(0, head), (start, part)]


def _arranged(array: Any) -> tuple[int, bytes, Strided]:
    """Return the order of a strided array's axes, their numbers if they must be stored, and the array to be copied."""
    axes = _axes_by_stride(array)
    part = Strided(array.transpose(axes))
    if axes == sorted(axes):
        return _ROWS, b"", part
    if axes == sorted(axes, reverse=True):
        return _COLUMNS, b"", part
    return _AXES, bytes(axes), part


def read_array(data: Any) -> Any:
    """Make an array over the bytes of a stored one.

    Raises:
        ImportError, AttributeError: the package of its type is missing here.
    """
    import numpy

    view = memoryview(data)
    ndim, order, length, *shape = _HEADS[view[0]].unpack_from(view)
    at = _HEADS[ndim].size
    end = at + length
    text = bytes(view[at:end])
    dtype = _dtypes.get(text)
    if dtype is None:
        dtype = _dtypes[text] = pickle.loads(text) if text[0] == _PICKLED else numpy.dtype(text.decode())
    if order > 1:
        axes = list(view[end : end + ndim])
        dense: Any = numpy.ndarray([shape[axis] for axis in axes], dtype, data, aligned(end + ndim))
        return dense.transpose(_inverse(axes))
    return numpy.ndarray(shape, dtype, data, aligned(end), order="F" if order else "C")


def reduce_array(array: Any) -> tuple[Any, ...] | None:
    """Reduce an array inside a value to a buffer; None if NumPy does the same, or if the array is small."""
    dtype = array.dtype
    contiguous = array.flags.forc
    if array.nbytes < OUT_OF_BAND_MIN or (contiguous and dtype.kind not in "mMV") or dtype.hasobject:
        return None
    axes = None if array.flags.c_contiguous else _axes_by_stride(array)
    dense = array if axes is None else array.transpose(axes)
    if dtype.kind in "mMV":  # the buffer protocol knows no dates, and no types of other packages
        dense = dense.view(f"V{dtype.itemsize}")
    places = None if axes is None or axes == sorted(axes) else _inverse(axes)
    buffer = pickle.PickleBuffer(dense if dense.flags.c_contiguous else Strided(dense))
    return rebuild_array, (buffer, dtype, dense.shape, places)


def rebuild_array(buffer: Any, dtype: Any, shape: tuple[int, ...], axes: list[int] | None) -> Any:
    """Make an array over a buffer; the reverse of `reduce_array`."""
    import numpy

    array: Any = numpy.ndarray(shape, dtype, buffer)
    return array if axes is None else array.transpose(axes)


def aligned(n: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return (n + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def _axes_by_stride(array: Any) -> list[int]:
    """List the axes so that the items of the last one are closest together."""
    strides = array.strides
    return sorted(range(array.ndim), key=lambda axis: -abs(strides[axis]))


def _inverse(axes: list[int]) -> list[int]:
    return sorted(range(len(axes)), key=axes.__getitem__)
