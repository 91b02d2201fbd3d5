"""Reducers for values of other libraries, so that their memory is stored as it is, and their copies share the store's.

Each reducer returns what pickle's `__reduce__` would, with `PickleBuffer`s for large memory; or None, and then the
library's own pickle is used. No library is imported here: a reducer is found by the name of a value's class, so the
program has imported the library. Where a value is rebuilt, its library is imported as pickle does it.

A buffer that is read-only when it is reduced is a view of the store when it is read. Arrow's buffers are always reduced
as read-only: no function of Arrow writes to a buffer that it was given. All other writable memory becomes private.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from fastrt._core.objects import arrow
from fastrt.store.arrays import OUT_OF_BAND_MIN, reduce_array

Reduced = tuple[Any, ...] | None
# A slice of Arrow data keeps all of the memory that it was cut from. It is copied if it uses less than 1/_SLICE of it.
_SLICE = 2

_by_kind: dict[type, Callable[[Any], Reduced]] = {}
# The packages of the classes below, and of those derived from them in the same package.
_ROOTS = frozenset(["builtins", "mmap", "numpy", "pyarrow", "polars", "torch", "jaxlib"])


def reducer_of(kind: type) -> Callable[[Any], Reduced] | None:
    """Find the reducer for the values of a class; None if there is none."""
    found = _by_kind.get(kind)
    if found is None:
        module = kind.__module__
        # A class can set any __module__.
        if type(module) is str and module.partition(".")[0] in _ROOTS:
            found = _by_kind[kind] = _find(kind, module)
    return found


def register(kind: type, reduce: Callable[[Any], Reduced] | None) -> None:
    """Use a program's own reducer for the values of a class, but not for those of its subclasses.

    Args:
        kind: the class.
        reduce: the reducer; None removes it.
    """
    _by_kind.pop(kind, None)
    if reduce is not None:
        _by_kind[kind] = reduce


def _find(kind: type, module: str) -> Callable[[Any], Reduced]:
    name = kind.__name__
    root = module.partition(".")[0]
    if root == "pyarrow" and name.endswith("Array") and issubclass(kind, sys.modules["pyarrow"].Array):
        return _reduce_arrow_array
    if root == "torch" and (module, name) != ("torch", "Tensor"):
        return _leave
    return _REDUCERS.get((root, name), _leave)


def _leave(value: Any) -> Reduced:
    """Leave a value to its own pickle."""


# ---- memory ----


def _reduce_memory(value: Any) -> Reduced:
    """Reduce a memoryview or an mmap; both come back as memoryviews."""
    view = memoryview(value)
    if not view.nbytes:
        return rebuild_memory, (b"", "B", None)
    buffer: Any = pickle.PickleBuffer(view) if view.c_contiguous else pickle.PickleBuffer(view.tobytes())
    shape = view.shape
    if view.format == "B" and len(shape or ()) == 1:
        shape = None
    try:
        memoryview(b"").cast(view.format)  # type: ignore[call-overload]  # that it may be wrong is the question
    except ValueError:  # a record, or another byte order: only its bytes
        return rebuild_memory, (buffer, "B", None)
    return rebuild_memory, (buffer, view.format, shape)


def rebuild_memory(buffer: Any, form: str, shape: tuple[int, ...] | None) -> memoryview:
    """Make a memoryview of a buffer's bytes; the reverse of `_reduce_memory`."""
    view = memoryview(buffer)
    return view if shape is None else view.cast(form, shape)  # type: ignore[call-overload]


# ---- NumPy: classes derived from its array ----


def _reduce_derived(array: Any) -> Reduced:
    """Reduce a matrix, a memory map or an array of records. NumPy copies these into the pickle."""
    if array.nbytes < OUT_OF_BAND_MIN or array.dtype.hasobject:
        return None
    numpy = sys.modules["numpy"]
    return rebuild_derived, (type(array), numpy.ndarray.view(array, numpy.ndarray))


def rebuild_derived(kind: Any, array: Any) -> Any:
    """Make an array of a derived class; the reverse of `_reduce_derived`."""
    return array.view(kind)


def _reduce_masked(array: Any) -> Reduced:
    if array.nbytes < OUT_OF_BAND_MIN or array.dtype.hasobject or array._baseclass is not sys.modules["numpy"].ndarray:
        return None
    mask = array._mask if array._mask.shape else None
    return rebuild_masked, (array._data, mask, array._fill_value, array.hardmask)


def rebuild_masked(data: Any, mask: Any, fill_value: Any, hard: bool) -> Any:
    """Make a masked array; the reverse of `_reduce_masked`."""
    from numpy import ma

    make: Any = ma.MaskedArray  # NumPy 2.2 says nothing of its arguments
    array = make(data, ma.nomask if mask is None else mask, hard_mask=hard)
    array._fill_value = fill_value
    return array


# ---- Arrow ----


def _reduce_arrow_buffer(buffer: Any) -> Reduced:
    if not buffer.is_cpu or not buffer.size:
        return None
    return rebuild_arrow_buffer, (pickle.PickleBuffer(memoryview(buffer).toreadonly()),)


def rebuild_arrow_buffer(buffer: Any) -> Any:
    """Make an Arrow buffer over memory; the reverse of `_reduce_arrow_buffer`."""
    import pyarrow  # present where Arrow data are unpickled

    return pyarrow.py_buffer(buffer)


def _reduce_arrow_array(array: Any) -> Reduced:
    """Copy a small slice of a large array, so that not all of its memory is stored."""
    total = array.get_total_buffer_size()
    if total < OUT_OF_BAND_MIN or total < _SLICE * array.nbytes:
        return None
    pyarrow = sys.modules["pyarrow"]
    try:
        dense = pyarrow.concat_arrays([array])
    except pyarrow.ArrowException:  # a type that it cannot copy
        return None
    return dense.__reduce__()  # type: ignore[no-any-return]


def _reduce_arrow_table(table: Any) -> Reduced:
    """Reduce a table of one chunk; others go array by array, so that each column keeps its chunks."""
    if any(column.num_chunks != 1 for column in table.columns):
        return None
    made = _taken(table)
    # The class of an extension type comes with PyArrow's own pickle only.
    return None if made is None or b"ARROW:extension:name" in made[0] else (rebuild_arrow_table, made)


def _taken(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]] | None:
    """Describe Arrow data for `arrow.Stream`; None if they do not go by it."""
    try:
        head, parts = arrow.take(value)
    except (AttributeError, TypeError):  # an older library; another type, or a small slice
        return None
    return head, [pickle.PickleBuffer(part) for part in parts]


def rebuild_arrow_table(head: bytes, buffers: list[Any]) -> Any:
    """Make an Arrow table over buffers; the reverse of `_reduce_arrow_table`."""
    import pyarrow  # present where Arrow data are unpickled

    return pyarrow.table(arrow.Stream(head, buffers))


def _reduce_arrow_tensor(tensor: Any) -> Reduced:
    return rebuild_arrow_tensor, (tensor.to_numpy(), tensor.dim_names)


def rebuild_arrow_tensor(array: Any, names: Any) -> Any:
    """Make an Arrow tensor over an array; the reverse of `_reduce_arrow_tensor`."""
    import pyarrow  # present where Arrow data are unpickled

    return pyarrow.Tensor.from_numpy(array, names or None)


# ---- Polars ----


def _reduce_frame(frame: Any) -> Reduced:
    """Reduce a Polars frame to its Arrow data. Its own pickle copies it four times."""
    if not frame.width or any(_has_objects(kind) for kind in frame.dtypes):
        return None
    made = _taken(frame)
    return None if made is None else (rebuild_frame, made)


def _reduce_series(series: Any) -> Reduced:
    made = _reduce_frame(series.to_frame())
    return None if made is None else (rebuild_series, made[1])


def _has_objects(kind: Any) -> bool:
    """Whether a type of Polars holds Python objects."""
    polars = sys.modules["polars"]
    if isinstance(kind, (polars.List, polars.Array)):
        return _has_objects(kind.inner)
    if isinstance(kind, polars.Struct):
        return any(_has_objects(field.dtype) for field in kind.fields)
    return kind == polars.Object  # type: ignore[no-any-return]


def rebuild_frame(head: bytes, buffers: list[Any]) -> Any:
    """Make a Polars frame over buffers; the reverse of `_reduce_frame`."""
    import polars

    return polars.DataFrame(arrow.Stream(head, buffers))


def rebuild_series(head: bytes, buffers: list[Any]) -> Any:
    """Make a Polars series over buffers; the reverse of `_reduce_series`."""
    return rebuild_frame(head, buffers).to_series()


# ---- tensors ----


def _reduce_tensor(tensor: Any) -> Reduced:
    """Reduce a tensor of torch in the CPU's memory to an array. Its own pickle copies it twice."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized or not tensor.is_leaf:
        return None
    if tensor.__dict__ or tensor._backward_hooks:
        return None
    wants = tensor.requires_grad
    plain = tensor.detach().resolve_conj().resolve_neg()
    try:
        return rebuild_tensor, (plain.numpy(), None, wants)
    except TypeError:  # NumPy does not have the type: bfloat16, float8
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(plain.element_size())
        return None if whole is None else (rebuild_tensor, (plain.view(whole).numpy(), plain.dtype, wants))


def rebuild_tensor(array: Any, dtype: Any, wants: bool) -> Any:
    """Make a tensor over an array; the reverse of `_reduce_tensor`."""
    import warnings

    import torch  # type: ignore[import-not-found,unused-ignore]  # present where a tensor is unpickled

    with warnings.catch_warnings():  # that a tensor is never read-only: `get(copy=False)` asked for a view
        if not array.flags.writeable:
            warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array)
    if dtype is not None:
        tensor = tensor.view(dtype)
    return tensor.requires_grad_() if wants else tensor


def _reduce_jax(array: Any) -> Reduced:
    return rebuild_jax, (sys.modules["numpy"].asarray(array),)


def rebuild_jax(array: Any) -> Any:
    """Make a JAX array; over the same memory if the array is aligned to 64 bytes. JAX never writes to it."""
    import jax  # type: ignore[import-not-found,unused-ignore]  # present where a JAX array is unpickled

    return jax.device_put(array, jax.local_devices(backend="cpu")[0], may_alias=True)


_REDUCERS: dict[tuple[str, str], Callable[[Any], Reduced]] = {
    ("builtins", "memoryview"): _reduce_memory,
    ("mmap", "mmap"): _reduce_memory,
    ("numpy", "ndarray"): reduce_array,
    ("numpy", "matrix"): _reduce_derived,
    ("numpy", "memmap"): _reduce_derived,
    ("numpy", "recarray"): _reduce_derived,
    ("numpy", "MaskedArray"): _reduce_masked,
    ("pyarrow", "Buffer"): _reduce_arrow_buffer,
    ("pyarrow", "ResizableBuffer"): _reduce_arrow_buffer,
    ("pyarrow", "Table"): _reduce_arrow_table,
    ("pyarrow", "Tensor"): _reduce_arrow_tensor,
    ("polars", "DataFrame"): _reduce_frame,
    ("polars", "Series"): _reduce_series,
    ("torch", "Tensor"): _reduce_tensor,
    ("jaxlib", "ArrayImpl"): _reduce_jax,
}


# ---- values that cannot be pickled, but can be exported ----


class _Stream:
    """An Arrow stream that is taken from its exporter once."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._capsule


def reduce_exporter(value: Any) -> Reduced:
    """Reduce a value without a pickle by the Arrow C data interface or DLPack; None if it has neither, or a pickle.

    A value with `__arrow_c_stream__` becomes a PyArrow table or chunked array, one with `__arrow_c_array__` a PyArrow
    array, and one with `__dlpack__` in the CPU's memory a NumPy array.
    """
    kind = type(value)
    stream, array = hasattr(kind, "__arrow_c_stream__"), hasattr(kind, "__arrow_c_array__")
    if not (stream or array or hasattr(kind, "__dlpack__")):
        return None
    try:
        value.__reduce_ex__(5)
    except Exception:  # no pickle; libraries raise different errors
        try:
            return same, (_imported(value, stream, array),)
        except (ImportError, BufferError):  # PyArrow is not installed; a tensor on another device
            return None
    return None


def _imported(value: Any, stream: bool, array: bool) -> Any:
    if not stream and not array:
        import numpy

        return numpy.from_dlpack(value)
    import pyarrow

    if not stream:
        return pyarrow.array(value)
    chunks = pyarrow.chunked_array(_Stream(value.__arrow_c_stream__()))
    return pyarrow.Table.from_struct_array(chunks) if pyarrow.types.is_struct(chunks.type) else chunks


def same(value: Any) -> Any:
    """Return the value."""
    return value
