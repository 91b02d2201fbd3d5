"""What arrays of any library look like to the core, and the arrays that operations make for their results."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrt._core.collective.dlpack import Borrowed


class Bits:
    """An array whose elements are what NumPy has no type for; made by `as_bfloat16`.

    Attributes:
        array: the elements' bits, as integers of their size.
        dtype: the name of what they are.
    """

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array = array
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(int(n) for n in self.array.shape)


def as_bfloat16(array: np.ndarray[Any, Any]) -> Bits:
    """Have operations take integers of 16 bits for bfloat16, where there is no `ml_dtypes`.

    Args:
        array: of uint16 or int16.
    Returns:
        What all operations take in the place of the array, no copy; new results are such arrays, too.
    Raises:
        TypeError: it is no such array.
    """
    if not isinstance(array, np.ndarray) or array.dtype not in (np.uint16, np.int16):
        raise TypeError(f"as_bfloat16 takes an array of 16-bit integers, not {getattr(array, 'dtype', type(array))}")
    return Bits(array, "bfloat16")


def as_buffer(array: Any, writable: bool) -> tuple[Any, str | None]:
    """A contiguous buffer over the memory of an array that exports none with a type the core knows.

    Args:
        array: a NumPy array of bfloat16 (`ml_dtypes`), or any array with `__dlpack__` in the CPU's memory.
        writable: whether it will be written.
    Returns:
        The buffer, no copy, and the name of its type, or None if the buffer itself says it.
    Raises:
        TypeError: this is no array, or one of another device.
        ValueError: it is not contiguous, or read-only where it must not be.
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
        raise TypeError(f"an array or another buffer is needed, not {type(array).__name__}") from None
    raise ValueError("the buffer is read-only or not contiguous")


def shape_of(array: Any) -> tuple[int, ...]:
    """The shape of an array or buffer."""
    if hasattr(array, "shape"):
        return tuple(int(n) for n in array.shape)
    return Borrowed(array).shape if hasattr(array, "__dlpack__") else tuple(memoryview(array).shape or ())


def new_like(array: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised NumPy array of an array's type.

    Raises:
        TypeError: NumPy has no such type here (bfloat16 needs `ml_dtypes`); pass `out`.
    """
    if isinstance(array, Bits):
        return Bits(np.empty(shape, array.array.dtype), array.dtype)
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype):
        name = Borrowed(array).dtype if hasattr(array, "__dlpack__") else memoryview(array).format
        try:
            dtype = np.dtype(name)
        except TypeError:
            raise TypeError(f"NumPy has no {name}: pass an array for the result as out=") from None
    return np.empty(shape, dtype)


def raw_bytes(array: Any, writable: bool) -> tuple[np.ndarray[Any, Any], str]:
    """The memory of an array as bytes, no copy, and the name of its type.

    Raises:
        TypeError: this is no array, or one of another device.
        ValueError: it is not contiguous, or read-only where it must not be.
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
