"""Arrays that are filled in the store: `fastrt.empty` allocates one, and `put` seals it where it lies.

The array's memory belongs to a `Writer`. If the array is collected before it was put, the memory is freed; if its
process dies, recovery frees it, as that of every value that was being written. After `put` the array is read-only, and
pins the value like a view that `get` returned.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastrt._core.objects.handles import Writer
from fastrt.store import client as store_client
from fastrt.store import engine as engines
from fastrt.store.arrays import aligned, dtype_text, header_of
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import NDARRAY

if TYPE_CHECKING:
    import numpy


def empty(shape: int | Sequence[int], dtype: Any = float, order: str = "C") -> numpy.ndarray[Any, Any]:
    """Allocate an array in shared memory, to be filled in place and then given to `put`, which does not copy it.

    The array is an ordinary NumPy array until `put` has returned; then it is read-only, like those that `get` returns.
    Do not write to views of it that were made before. `put` copies a slice or a reshaped view of it, and a task copies
    it when it returns it or takes it as an argument: pass the reference of `put` instead. An array that is never put
    gives its memory back when it is collected, or when its process or session ends.

    Args:
        shape: an int or a sequence of ints.
        dtype: a NumPy type, or what NumPy makes one of; a type with Python objects is refused.
        order: "C" or "F".
    Returns:
        A NumPy array of arbitrary content. With another engine than fastrt's own it is not in shared memory.
    Raises:
        ValueError: a dimension is negative, or the order is neither "C" nor "F".
        TypeError: arrays of the type cannot be in shared memory.
        ObjectStoreFullError: there is no room.
    Source:
        The arguments of `numpy.empty`.
    """
    import numpy

    kind = numpy.dtype(dtype)
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"the shape is {sizes}; dimensions must not be negative")
    if order not in ("C", "F"):
        raise ValueError(f"order is {order!r}; it must be 'C' or 'F'")
    if not dtype_text(kind):
        raise TypeError(f"arrays of {kind!r} cannot be in shared memory; use a type of a fixed size without objects")
    if store_client.current() is None and engines.current() is not None:
        return numpy.empty(sizes, kind, order="F" if order == "F" else "C")
    start = aligned(len(header_of(sizes, kind, order == "F")))
    store = store_client.require()
    store_client.install_drafts(_seal)
    writer: Any = store.create(start + math.prod(sizes) * kind.itemsize, NDARRAY, 0, in_file=True)
    array: numpy.ndarray[Any, Any] = numpy.ndarray(sizes, kind, writer, start, order="F" if order == "F" else "C")
    return array


def _seal(store: store_client.Store, value: Any) -> ObjectRef | None:
    """Seal an array of `empty` where it lies; None if `value` is anything else, or is sealed already."""
    writer = getattr(value, "base", None)
    if not isinstance(writer, Writer) or writer.owner is not store.client or not dtype_text(value.dtype):
        return None
    head = header_of(value.shape, value.dtype, not value.flags.c_contiguous)
    if not value.flags.forc or aligned(len(head)) + value.nbytes != len(writer):
        return None  # its type or shape was set to another one
    try:
        writer.copy(0, head)
    except BufferError:
        return None
    value.flags.writeable = False
    ref: ObjectRef = writer.seal_in_place()
    if store.note is not None:
        store.note(ref)
    return ref
