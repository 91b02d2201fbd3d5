"""Python values as bytes in the arena, and back.

Three forms beside the core's scalars:
  PICKLE    one pickle.
  PICKLE5   u32 length of the pickle, u32 number of buffers, (u64 offset, u64 length) of each, the pickle, and
            the buffers, each aligned to 64 bytes: pickle protocol 5 with out-of-band data (PEP 574). The lowest bit
            of an offset (OWN) marks a buffer that was writable.
  NDARRAY   a NumPy array by itself: a small header and its bytes (see `store.arrays`). Three times faster to read than
            its pickle.

The reducers of `store.reducers` put the memory of other libraries' values out of band. A part of at least 64 KiB that
stays in the pickle (bytes, a bytearray) is a part by itself, too, so that only its way to the store copies it.

Libraries write to buffers that were writable, and some ignore NumPy's flag: torch has no read-only tensors, and
compiled code of scikit-learn updates a model in place. In the arena's read-only pages such a write is a segmentation
fault. So a buffer marked OWN is read back private: small ones as copies, large ones as pages that are copied when they
are written. Buffers that were read-only (Arrow's), and arrays that are the whole value, are views of the arena.

References inside a value are not pickled: they become numbers into the list of contained references that the
object table keeps, so that the store can count them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import mmap
import pickle
import struct
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
from cloudpickle.cloudpickle import _dynamic_class_reduce as dynamic_class

from fastrt._core.objects import scalar
from fastrt._core.objects.handles import Pin
from fastrt._core.objects.private import map_private
from fastrt.errors import SerializationError
from fastrt.store import job_folders, namespaces, reducers
from fastrt.store.arrays import OUT_OF_BAND_MIN, Strided, aligned, dtype_text, read_array, write_array
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:
    from fastrt._core.objects.handles import Writer

PICKLE, PICKLE5, NDARRAY = 16, 17, 18
OWN = 1
# From this size on a private mapping is cheaper than a copy. For 1 MiB a mapping takes 16 us and a copy 70 us if
# nothing is read, and both take the same if all is read. For 512 KiB that are then written, a copy takes 42 us and a
# mapping 220 us.
_MAP_BYTES_MIN = 1 << 20
# A value is fully reachable while it is rebuilt, so a garbage collection meanwhile finds nothing. Python starts one for
# every 700 new containers, each a little longer than the one before. Smaller values have too few objects to start one.
_PAUSE_BYTES_MIN = 4096
_HEAD = struct.Struct("<II")
_NO_FILE = "<dynamic-code>"  # from 3.1.3 on, cloudpickle says that every function comes from this file
_SPAN = struct.Struct("<QQ")

_reading = threading.local()
# A global that pickled code names: the dict, the name and the value that was sent.
Watched = tuple[dict[str, Any], str, Any]
_job: Callable[[], str] = str  # names this process's job; "" without a session


def install(job: Callable[[], str]) -> None:
    """Set the function that returns the cluster-wide name of this process's job."""
    global _job
    _job = job


class Serialized:
    """A value ready to be written: its kind, its size, its parts in order, and the references it contains."""

    __slots__ = ("kind", "nbytes", "parts", "refs")

    def __init__(self, kind: int, nbytes: int, parts: list[tuple[int, Any]], refs: list[ObjectRef]) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.parts = parts
        self.refs = refs

    def write(self, writer: Writer) -> None:
        """Copy every part to its place in the arena. This is the only copy that a `put` makes."""
        for offset, part in self.parts:
            if type(part) is Strided:
                part.copy_to(writer, offset)
            else:
                writer.copy(offset, part)

    def to_bytes(self) -> bytes:
        """Return the same bytes in one piece, for arguments that are stored in a task's record."""
        if len(self.parts) == 1:
            return bytes(self.parts[0][1])
        out = bytearray(self.nbytes)
        for offset, part in self.parts:
            if type(part) is Strided:
                part.copy_to(out, offset)
                continue
            flat = memoryview(part).cast("B")
            out[offset : offset + flat.nbytes] = flat
        return bytes(out)


def serialize(value: Any) -> Serialized:
    """Serialize a value of any picklable type.

    Args:
        value: anything; functions and classes of `__main__` and lambdas are sent by value (cloudpickle). NumPy arrays,
            `bytes`-like buffers, Arrow tables, pandas and Polars frames and CPU tensors are stored out of band.
    Returns:
        The parts to be written.
    Raises:
        SerializationError: a part of the value cannot be pickled; the message says which.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and dtype_text(value.dtype):
        nbytes, parts = write_array(value, numpy)
        return Serialized(NDARRAY, nbytes, parts, [])
    if scalar.is_plain(value):
        data = pickle.dumps(value, 5)
        return Serialized(PICKLE, len(data), [(0, data)], [])
    if type(value) is memoryview or type(value) is mmap.mmap:
        return _serialize_any(memoryview(value).toreadonly())  # by itself it comes back as a read-only view
    return _serialize_any(value)


def serialize_code(name: str, code: Any) -> tuple[Serialized, list[Watched]]:
    """Serialize a function or class under its name.

    Args:
        name: for messages; the value is the pair (name, code), which carries the program's folders.
        code: the function or class, which cloudpickle can pickle.
    Returns:
        The parts, and the globals of this process whose next assignment makes the sent code out of date.
    Raises:
        SerializationError: it names something that cannot be pickled; the message has the path to it.
    """
    watched: list[Watched] = []
    try:
        return _serialize_any((job_folders.carrying(name), code), watched), watched
    except SerializationError as exc:
        raise SerializationError(_explain(code, exc.__cause__ or exc, name)) from exc.__cause__


def deserialize(kind: int, data: Any, refs: Sequence[ObjectRef], copy: bool | None = None) -> Any:
    """Rebuild a value from its serialized form.

    Args:
        kind: PICKLE, PICKLE5 or NDARRAY.
        data: bytes or a buffer of the arena; views of it become part of the value.
        refs: the references that the value contains, in order.
        copy: True makes an array that is the whole value private too; False makes all arrays and buffers read-only
            views.
    Returns:
        The value. By default an array that is the whole value and Arrow data are read-only views; arrays and tensors
        inside a value are private.
    Raises:
        SerializationError: a module or attribute of the value is missing here; the message names it.
    """
    if kind == NDARRAY:
        try:
            return read_array(_private(data) if copy else data)
        except (ImportError, AttributeError) as exc:
            raise _missing(exc) from exc
    outer = getattr(_reading, "refs", None)
    _reading.refs = refs
    paused = len(data) >= _PAUSE_BYTES_MIN and gc.isenabled()
    if paused:
        gc.disable()
    try:
        if kind == PICKLE:
            return pickle.loads(data)
        return _read_pickle5(data, 0 if copy is False else OWN)
    except (ImportError, AttributeError) as exc:
        raise _missing(exc) from exc
    finally:
        _reading.refs = outer
        if paused:
            gc.enable()


def _missing(exc: BaseException) -> SerializationError:
    return SerializationError(
        f"cannot rebuild a value in this process: {exc}; make the module importable where the value is used "
        "(install it, or put its folder on PYTHONPATH)"
    )


# ---- arrays ----


def is_large_array(value: Any, least: int) -> bool:
    """Tell whether `value` is a plain NumPy array of at least `least` bytes, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None and type(value) is numpy.ndarray and value.nbytes >= least and bool(dtype_text(value.dtype))
    )


def owned(value: Any) -> Any:
    """Copy a read-only array, or those in a list of values; return anything else as it is."""
    numpy = sys.modules.get("numpy")
    if type(value) is list:
        return [owned(one) for one in value]
    if numpy is not None and type(value) is numpy.ndarray and not value.flags.writeable:
        return value.copy()
    return value


# ---- everything else ----


class _Chunks:
    """A file for a pickler. It keeps each piece of the pickle, without a copy of large bytes and bytearrays."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks: list[Any] = []

    def write(self, chunk: Any) -> None:
        """Keep a frame, or the bytes of one large object."""
        # A memoryview shows the text of a str, which may be gone when this pickle is copied to the store.
        self.chunks.append(bytes(chunk) if type(chunk) is memoryview else chunk)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle with references by number, and with the reducers of `store.reducers`."""

    def __init__(
        self,
        file: _Chunks,
        buffers: list[pickle.PickleBuffer],
        refs: list[ObjectRef],
        watched: list[Watched] | None = None,
    ) -> None:
        # The callback is not a method: a pickler that refers to itself is a cycle that only the garbage collector
        # frees, together with its memo, which refers to everything that it has pickled.
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_keep_buffer, buffers))
        self._refs = refs
        self._watched = watched
        self._origins: dict[int, namespaces.Origin] = {}  # by the dict of globals

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is ObjectRef:
            self._refs.append(obj)
            return contained_ref, (len(self._refs) - 1,)
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if kind is types.CodeType:
            return self._reduce_code(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        reduce = reducers.reducer_of(kind)
        if reduce is not None:
            made = reduce(obj)
            if made is not None:
                return made
        return super().reducer_override(obj)

    def _reduce_function(self, function: Any) -> Any:
        """Reduce a function as cloudpickle does, but with the shared globals of its module, not a separate dict."""
        made = self._by_cloudpickle(function)
        if type(made) is not tuple:  # by its name
            return made
        make, (code, base, *rest), state, _, _, set_state = made
        values = state[1]["__globals__"]
        origin = self._origins.get(id(function.__globals__))
        if origin is None:
            origin = self._origins[id(function.__globals__)] = namespaces.Origin(function.__globals__, base, _job())
        versions = origin.versions(values, _digest)
        if self._watched is not None and origin.received:
            self._watched.append((namespaces.updates, "last", namespaces.updates["last"]))
        elif self._watched is not None and origin.owned:
            comparable = namespaces.is_comparable
            self._watched += [(function.__globals__, name, it) for name, it in values.items() if comparable(it)]
        return make, (code, origin, *rest), (set_state, state, versions), None, None, namespaces.set_function

    def _by_cloudpickle(self, function: Any) -> Any:
        """Reduce a function; annotations that name what only type checkers import are sent as text."""
        try:
            return reduce_code(self, function)
        except (NameError, AttributeError):
            if sys.version_info >= (3, 14):  # it evaluates annotations when they are first read
                from annotationlib import Format, get_annotations

                annotate = function.__annotate__
                function.__annotations__ = get_annotations(function, format=Format.STRING)
                try:
                    return reduce_code(self, function)
                finally:
                    function.__annotate__ = annotate  # the annotations are evaluated again when they are read
            raise

    def _reduce_code(self, code: types.CodeType) -> Any:
        """Reduce code as cloudpickle does, but with the name of its file, by which tracebacks find its lines."""
        make, parts = self.dispatch_table[types.CodeType](code)
        return make, tuple(code.co_filename if part == _NO_FILE else part for part in parts)

    def _reduce_class(self, cls: type) -> Any:
        """Reduce a class as cloudpickle does, with numbers that decide which attributes a receiver adopts."""
        made = reduce_code(self, cls)
        if type(made) is not tuple or len(made) < 6:  # by its name
            return made
        make, arguments, state, _, _, set_state = made
        versions = namespaces.class_versions(cls, state[0], _digest)
        return make, arguments, (set_state, state, versions), None, None, namespaces.set_class


def reduce_code(pickler: Any, code: Any) -> Any:
    """Reduce a function or class as cloudpickle does, but by value inside an object that is itself sent by value.

    In a module with an actor class `KV`, the name `KV.get` leads to the method, so cloudpickle would send that name.
    But `KV` there is no class: the class behind it is sent by value, and so must be its methods and inner classes.

    Args:
        pickler: of cloudpickle.
        code: the function or class.
    Returns:
        The parts; NotImplemented if it is sent by its name.
    """
    made = cloudpickle.Pickler.reducer_override(pickler, code)
    if made is not NotImplemented or "." not in code.__qualname__:
        return made
    found = sys.modules.get(code.__module__)
    for name in code.__qualname__.split(".")[:-1]:
        found = getattr(found, name, None)
        if found is None:
            return made
        if not isinstance(found, type):
            return dynamic_class(code) if isinstance(code, type) else pickler._dynamic_function_reduce(code)
    return made


def _digest(value: Any) -> object:
    """Digest the content of a value; None if it cannot be pickled."""
    file = _Chunks()
    buffers: list[pickle.PickleBuffer] = []
    refs: list[ObjectRef] = []
    try:
        _PlainPickler(file, buffers, refs).dump(value)
    except Exception:  # the value's methods may raise anything; it is raised again when the value is pickled
        return None
    parts = [_part(buffer) for buffer in buffers]
    content = namespaces.digest_of(
        [b"".join(file.chunks), *(part.array.tobytes() if type(part) is Strided else part for part in parts)]
    )
    return content, tuple(ref.objref for ref in refs)


class _ExportPickler(_Pickler):
    """A second attempt for a value that cannot be pickled: its parts may have another way to give their memory."""

    def reducer_override(self, obj: Any) -> Any:
        made = reducers.reduce_exporter(obj)
        return super().reducer_override(obj) if made is None else made


class _PlainPickler(_Pickler):
    """A pickler without version numbers, for values that are compared and not sent."""

    def _reduce_function(self, function: Any) -> Any:
        return self._by_cloudpickle(function)

    def _reduce_class(self, cls: type) -> Any:
        return reduce_code(self, cls)


def _keep_buffer(buffers: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Keep a buffer out of band; return True if it must go inside the pickle instead."""
    part = _part(buffer)
    if part is None or part.nbytes < OUT_OF_BAND_MIN:
        return True
    buffers.append(buffer)
    return False


def _part(buffer: pickle.PickleBuffer) -> Any:
    """Return a buffer's bytes, or the strided array that it stands for; None if it is not contiguous."""
    try:
        raw = buffer.raw()
    except BufferError:
        return None
    return raw.obj if type(raw.obj) is Strided else raw


def _serialize_any(value: object, watched: list[Watched] | None = None) -> Serialized:
    try:
        return _serialize_by(_Pickler, value, watched)
    except MemoryError:
        raise
    except Exception as exc:  # the value's methods may raise anything
        with contextlib.suppress(Exception):  # then the first error says more
            return _serialize_by(_ExportPickler, value, watched)
        raise SerializationError(_explain(value, exc)) from exc


def _serialize_by(pickler: type[_Pickler], value: object, watched: list[Watched] | None) -> Serialized:
    buffers: list[pickle.PickleBuffer] = []
    refs: list[ObjectRef] = []
    file = _Chunks()
    pickler(file, buffers, refs, watched).dump(value)
    chunks = file.chunks
    length = len(chunks[0]) if len(chunks) == 1 else sum(map(len, chunks))
    if not buffers:
        return Serialized(PICKLE, length, _in_turn(0, chunks), refs)
    raws = [_part(buffer) for buffer in buffers]
    start = _HEAD.size + _SPAN.size * len(raws)
    at = aligned(start + length)
    parts: list[tuple[int, Any]] = []
    spans = [_HEAD.pack(length, len(raws))]
    for raw in raws:
        spans.append(_SPAN.pack(at | (0 if raw.readonly else OWN), raw.nbytes))
        parts.append((at, raw))
        at = aligned(at + raw.nbytes)
    return Serialized(PICKLE5, at, [(0, b"".join(spans)), *_in_turn(start, chunks), *parts], refs)


def _in_turn(at: int, chunks: list[Any]) -> list[tuple[int, Any]]:
    """Place chunks one after the other from `at` on."""
    if len(chunks) == 1:
        return [(at, chunks[0])]
    parts = []
    for chunk in chunks:
        parts.append((at, chunk))
        at += len(chunk)
    return parts


def _read_pickle5(data: Any, own: int) -> Any:
    """Rebuild a value with out-of-band buffers; those with the bit `own` in their offset become private."""
    view = memoryview(data)
    length, count = _HEAD.unpack_from(view)
    start = _HEAD.size + _SPAN.size * count
    spans = [_SPAN.unpack_from(view, _HEAD.size + _SPAN.size * k) for k in range(count)]
    private = _map_private(data, sum(nbytes for offset, nbytes in spans if offset & own))
    buffers: list[Any] = []
    for offset, nbytes in spans:
        place = slice(offset & ~OWN, (offset & ~OWN) + nbytes)
        if not offset & own:
            buffers.append(view[place])
        else:
            buffers.append(bytearray(view[place]) if private is None else private[place])
    return pickle.loads(view[start : start + length], buffers=buffers)


def _private(data: Any) -> memoryview | bytearray:
    """Return a writable, private copy or mapping of all bytes of a value."""
    return _map_private(data, len(data)) or bytearray(data)


def _map_private(data: Any, nbytes: int) -> memoryview | None:
    """Map a value again, copy-on-write, if so many of its bytes must be private that copying them costs more."""
    if nbytes < _MAP_BYTES_MIN or not isinstance(data, Pin):
        return None
    mapped = map_private(data)
    return None if mapped is None else memoryview(mapped)


def _explain(value: object, exc: BaseException, root: str = "value") -> str:
    """Name the innermost part of a container that cannot be pickled, so that users know which part to remove."""
    path, part = "", value
    for _ in range(20):
        try:
            inner = _first_unpicklable(part)
        except Exception:  # the value's methods may raise here too; then the path ends here
            break
        if inner is None:
            break
        step, part = inner
        path += step
    where = f" at {root}{path}" if path else ""
    return (
        f"cannot pickle {type(part).__name__!r} object{where}: {exc}; pass plain data, and open files, locks and "
        "connections inside the task"
    )


def _first_unpicklable(value: Any) -> tuple[str, Any] | None:
    items: list[tuple[str, Any]]
    if isinstance(value, dict):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = [(f"[{k}]", item) for k, item in enumerate(value)]
    elif isinstance(value, types.FunctionType):
        items = _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        items = [(".__self__", value.__self__), (".__func__", value.__func__)]
    elif isinstance(value, functools.partial):
        items = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    elif isinstance(value, (staticmethod, classmethod)):
        items = [("", value.__func__)]
    elif isinstance(value, property):
        items = [("", part) for part in (value.fget, value.fset, value.fdel) if part is not None]
    elif isinstance(value, type):
        items = [(f".{name}", item) for name, item in vars(value).items() if name not in _OF_A_CLASS]
    elif hasattr(value, "__dict__"):
        items = [(f".{name}", item) for name, item in vars(value).items()]
    else:
        return None
    for step, item in items[:1000]:
        try:
            _PlainPickler(_Chunks(), [], []).dump(item)
        except Exception:  # a user's __reduce__ may raise anything; this is the part to name
            return step, item
    return None


_OF_A_CLASS = ("__dict__", "__weakref__")  # attributes that cloudpickle leaves out


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    """List the values that a function captures: closure, defaults, and the globals that its code names."""
    items: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # the cell is still empty
            items.append((f".<closure {name}>", cell.cell_contents))
    items += [(f".<default {k}>", item) for k, item in enumerate(function.__defaults__ or ())]
    items += [(f".<default {name}>", item) for name, item in (function.__kwdefaults__ or {}).items()]
    reduced = reduce_code(cloudpickle.Pickler(io.BytesIO()), function)
    if type(reduced) is tuple:
        items += [(f".<global {name}>", item) for name, item in reduced[2][1]["__globals__"].items()]
    return items + [(f".{name}", item) for name, item in vars(function).items()]


def contained_ref(position: int) -> ObjectRef:
    """Unpickle a contained reference, given by its position in the list of contained references.

    Raises:
        SerializationError: it is read outside of `deserialize`.
    """
    refs: Sequence[ObjectRef] | None = getattr(_reading, "refs", None)
    if refs is None or position >= len(refs):
        raise SerializationError("a pickled ObjectRef was read outside of the object store that counts it")
    return refs[position]
