"""Encodes named arrays for messages and records: a list of their names, types and shapes, and 8-byte aligned bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_DTYPES = {"<f4", "<f8", "<i8", "<u8", "|b1", "|u1"}
_NAMES_MAX = 1 << 16
_ALIGN = 8


def pack(found: dict[str, Array]) -> tuple[list[Any], list[Any]]:
    """Encode arrays: the list that describes them, and the pieces of their bytes."""
    listed, parts = [], []
    for name, array in found.items():
        whole = np.ascontiguousarray(array)
        listed.append([name, whole.dtype.str, list(whole.shape)])
        parts += [whole, bytes(-whole.nbytes % _ALIGN)]
    return listed, parts


def unpack(listed: Any, data: Any) -> dict[str, Array]:
    """Decode arrays, as views of the bytes.

    Raises:
        ValueError: the list is invalid, or the bytes do not fit it.
    """
    if not isinstance(listed, list) or len(listed) > _NAMES_MAX:
        raise ValueError("the description of the arrays is not a list")
    found: dict[str, Array] = {}
    view, at = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b""), 0
    for one in listed:
        if not (isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and one[1] in _DTYPES):
            raise ValueError(f"{one!r} does not describe an array")
        name, dtype, shape = one
        if not isinstance(shape, list) or len(shape) > 4 or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"{shape!r} is not a shape")
        count = math.prod(shape)
        nbytes = count * np.dtype(dtype).itemsize
        if at + nbytes > view.nbytes:
            raise ValueError(f"array {name!r} has {nbytes} bytes, but only {view.nbytes - at} are left")
        found[name] = np.frombuffer(view, dtype, count, at).reshape(shape) if count else np.empty(shape, dtype)
        at += nbytes + -nbytes % _ALIGN
    return found
