"""Views of any library's arrays as buffers for the core, and new arrays for results."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrt._core.collective.dlpack import Borrowed


class Bits:
    """An array of a type that NumPy does not have; made by `as_bfloat16`.

    Attributes:
        array: the bits of the elements, as integers of the same size.
        dtype: name of the elements' type.
    """

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array = array
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(int(n) for n in self.array.shape)


def as_bfloat16(array: np.ndarray[Any, Any]) -> Bits:
    """Mark an array of 16-bit integers as bfloat16, for programs without `ml_dtypes`.

    Args:
        array: of uint16 or int16.
    Returns:
        An object that all operations accept in place of the array, without a copy; new results are such objects too.
    Raises:
        TypeError: the array has another type.
    """
    if not isinstance(array, np.ndarray) or array.dtype not in (np.uint16, np.int16):
        raise TypeError(f"as_bfloat16 takes an array of 16-bit integers, not {getattr(array, 'dtype', type(array))}")
    return Bits(array, "bfloat16")


def as_buffer(array: Any, writable: bool) -> tuple[Any, str | None]:
    """Make a contiguous buffer over an array that does not export one with a type that the core knows.

    Args:
        array: a NumPy array of bfloat16 (`ml_dtypes`), or any array with `__dlpack__` in the CPU's memory.
        writable: whether the buffer will be written.
    Returns:
        The buffer, without a copy, and the name of its type; None if the buffer itself names it.
    Raises:
        TypeError: not an array, or one in another device's memory.
        ValueError: not contiguous, or read-only although it must be writable.
    """
    if isinstance(array, Bits):
        return as_buffer(array.array, writable)[0], array.dtype
    if isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise ValueError("the array is not C-contiguous: pass numpy.ascontiguousarray(array)")
        if writable and not array.flags.writeable:
            raise ValueError("the array is read-only")
        if array.dtype.hasobject:
            raise TypeError("arrays of Python objects cannot be sent; see all_gather_object")
        if array.dtype.name == "bfloat16":
            return array.view(np.uint16), "bfloat16"
        return array.view(f"V{array.dtype.itemsize}"), None
    if hasattr(array, "__dlpack__"):
        borrowed = Borrowed(array)
        return borrowed, borrowed.dtype
    try:
        memoryview(array)
    except TypeError:
        raise TypeError(f"the operation needs an array or another buffer, not {type(array).__name__}") from None
    raise ValueError("the buffer is read-only or not contiguous")


def shape_of(array: Any) -> tuple[int, ...]:
    """Return the shape of an array or buffer."""
    if hasattr(array, "shape"):
        return tuple(int(n) for n in array.shape)
    return Borrowed(array).shape if hasattr(array, "__dlpack__") else tuple(memoryview(array).shape or ())


def new_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Make an uninitialised NumPy array of the same type.

    Raises:
        TypeError: NumPy does not have this type (bfloat16 needs `ml_dtypes`); pass `out`.
    """
    if isinstance(array, Bits):
        return Bits(np.empty(shape, array.array.dtype), array.dtype)
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        name = Borrowed(array).dtype if hasattr(array, "__dlpack__") else memoryview(array).format
        try:
            dtype = np.dtype(name)
        except TypeError:
            raise TypeError(f"NumPy has no type {name}: pass an array for the result as out=") from None
    return np.empty(shape, dtype)


def raw_bytes(array: Any, writable: bool) -> tuple[np.ndarray[Any, Any], str]:
    """Return an array's memory as bytes, without a copy, and the name of its type.

    Raises:
        TypeError: not an array, or one in another device's memory.
        ValueError: not contiguous, or read-only although it must be writable.
    """
    name: str | None = None
    try:
        buffer: Any = memoryview(array)
        if not buffer.c_contiguous or (writable and buffer.readonly):
            raise ValueError("not usable as it is")
        name = np.dtype(buffer.format).name
    except (TypeError, ValueError, BufferError):
        buffer, name = as_buffer(array, writable)
    view = memoryview(buffer)
    if view.nbytes == 0:
        return np.empty(0, np.uint8), name or "bytes"
    return np.frombuffer(view, np.uint8), name or "bytes"
