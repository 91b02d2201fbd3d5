"""Values in the form of early Ray's stores: a serialised `Obj`, with pickles inside of it.

Values that `Obj` has a field for are written there, so that a client in any language can read them; all others are a
`PyObj`, a pickle. A value in fastrt's arena format becomes a pickle without being rebuilt: a fixed head, the arena's
bytes, a fixed tail (`envelope`). Another fastrt store recognises the head and writes the bytes straight into its arena;
any other Python with fastrt unpickles it.

    Python                    Obj
    str                       string_data (UTF-8)       String and Unicode become str, or bytes if not UTF-8
    bytes                     string_data, marked       the mark makes bytes of what could be text
    int within 64 bits        int_data                  else long_data, decimal digits
    float, bool, None         double_data, bool_data, empty_data
    list, tuple, dict         list_data, tuple_data, dict_data of such values
    NumPy array               array_data; bool, integers, float32 and float64
    NumPy scalar              array_data with is_scalar, of the same types
    ObjectRef                 objref_data, by its name in the cluster
    an error, as a result     dict_data, marked: its type, text and traceback
    anything else             pyobj_data

A mark is a field that the seed's messages do not have (protos/transfer/marks.proto); its programs skip it. Received
depths and shapes are checked before they are used. A pickle is opened only when the caller says that its sender has
shown the session's token.

Source: types.proto, L. types of ray-legacy of April 2016, with the fields that it gained later.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from fastrt.errors import FastrtError, SerializationError, TaskError, format_user_traceback
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import NDARRAY, PICKLE, PICKLE5, deserialize, serialize

KIND_STR, KIND_BYTES = 5, 6
_RAW_KINDS = (KIND_STR, KIND_BYTES, PICKLE, PICKLE5, NDARRAY)
_DEPTH_MAX = 30  # protobuf's own parsers stop at 100 messages in each other, and a dict's value is the third
_LONG_DIGITS_MAX = 4000  # below Python's own limit for text that becomes an int
_INT64 = 1 << 63
_MESSAGES = message_set("ray")
Obj = _MESSAGES.message("Obj")

# NumPy types with the same number on all platforms, with the field that carries them.
_ARRAY_FIELDS = {"b": "uint_data", "i": "int_data", "u": "uint_data", "f4": "float_data", "f8": "double_data"}
_ARRAY_CODES = "?bBhHiIlLqQfd"

_MARK = b"\xa0\x06\x01"  # field 100, true
_MARK_NUMBER = 100
_ERROR_KEYS = ("type", "text", "traceback")
_PIECE_BYTES = 1 << 20  # smaller values are copied into their message

# PROTO 4, GLOBAL, BININT2 kind, NEWTRUE or NEWFALSE, BINBYTES8 length ... TUPLE3, REDUCE, STOP
_HEAD = re.compile(rb"\x80\x04cfastrt\.transfer\.obj\nrestore\nM(..)([\x88\x89])\x8e(.{8})", re.S)
TAIL = b"\x87R."


class ObjError(FastrtError, ValueError):
    """The bytes are not an `Obj`, or one with an impossible value; the message names the part."""


class UntrustedPickleError(FastrtError):
    """A pickled value came from a sender that has not shown the session's token; it was not opened."""


class ForeignError(FastrtError):
    """A function failed in a program of another language, or its error arrived as text.

    Attributes:
        type_name: the error's type, as its program names it.
        text: its message.
        traceback_text: where it was raised; empty if that is not known.
    """

    def __init__(self, type_name: str, text: str, traceback_text: str = "") -> None:
        super().__init__(type_name, text, traceback_text)
        self.type_name = type_name
        self.text = text
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        lines = [f"{self.type_name}: {self.text}", self.traceback_text.rstrip()]
        return "\n".join(line for line in lines if line)


# ---- pickles around bytes of the arena ----


def envelope(kind: int, is_error: bool, nbytes: int) -> bytes:
    """The head of an `Obj` whose `PyObj` holds `nbytes` bytes in the arena's format; `TAIL` follows them."""
    flag = b"\x88" if is_error else b"\x89"
    head = b"\x80\x04cfastrt.transfer.obj\nrestore\nM" + struct.pack("<H", kind) + flag + b"\x8e"
    head += struct.pack("<Q", nbytes)
    field = _length_field(1, len(head) + nbytes + len(TAIL))
    return _length_field(6, len(field) + len(head) + nbytes + len(TAIL)) + field + head


def opened(start: bytes | memoryview, total: int) -> tuple[int, bool, int, int] | None:
    """Recognise the head that `envelope` writes.

    Args:
        start: the first bytes of an object.
        total: its size.
    Returns:
        (kind, is_error, bytes of the value, bytes of the head); None when the bytes are no such head.
    """
    text = bytes(start[:128])
    match = _HEAD.search(text)
    if match is None:
        return None
    (kind,), (nbytes,) = struct.unpack("<H", match[1]), struct.unpack("<Q", match[3])
    is_error = match[2] == b"\x88"
    if kind not in _RAW_KINDS or nbytes > total or not text.startswith(head := envelope(kind, is_error, nbytes)):
        return None
    return (kind, is_error, nbytes, len(head)) if len(head) + nbytes + len(TAIL) == total else None


def restore(kind: int, is_error: bool, data: bytes) -> Any:
    """Rebuild a value; the pickle around bytes of the arena calls this.

    Raises:
        BaseException: the value itself, where it is an error.
    """
    if kind == KIND_STR:
        return data.decode()
    value = data if kind == KIND_BYTES else deserialize(kind, data, [])
    if is_error and isinstance(value, BaseException):
        raise value
    return value


def is_raw(kind: int) -> bool:
    """Whether values of a kind can be sent in an envelope."""
    return kind in _RAW_KINDS


# ---- values ----


def to_obj(value: Any, name: Callable[[ObjectRef], int] | None = None) -> Any:
    """Make the `Obj` of a value.

    Args:
        value: anything that can be pickled.
        name: returns the name of a reference in the cluster; without it references are rejected.
    Raises:
        SerializationError: a part cannot be pickled, or is a reference without a name.
    """
    message = Obj()
    _fill(message, value, name, 0)
    return message


def to_bytes(value: Any, name: Callable[[ObjectRef], int] | None = None) -> bytes:
    """Serialise the `Obj` of a value.

    Raises:
        SerializationError: as for `to_obj`; or it has more than 2 GiB, more than protobuf can write.
    """
    try:
        data: bytes = to_obj(value, name).SerializeToString()
    except (EncodeError, ValueError) as exc:
        raise SerializationError(f"a {type(value).__name__} is too large for one protobuf message: {exc}") from exc
    return data


def to_parts(value: Any, name: Callable[[ObjectRef], int] | None = None) -> list[bytes | memoryview]:
    """Serialise the `Obj` of a value in pieces; bytes, strings and arrays of floats are not copied, and have no limit.

    Raises:
        SerializationError: as for `to_bytes`.
    """
    data: bytes | memoryview | None = None
    field, head, tail = 1, b"", b""
    if type(value) is bytes:
        data, tail = value, _MARK
    elif type(value) is str and len(value) >= _PIECE_BYTES and _is_unicode(value):
        data = value.encode()
    elif _is_numpy(value, "ndarray") and value.dtype.str in ("<f4", "<f8") and value.flags.c_contiguous:
        array = _MESSAGES.message("Array")(shape=value.shape, dtype=value.dtype.num)
        field, head = 5, array.SerializeToString()
        data = memoryview(value).cast("B") if value.nbytes else b""
    if data is None or len(data) < _PIECE_BYTES:
        return [to_bytes(value, name)]
    inner = 1 if field == 1 else 3 if value.dtype.char == "d" else 4
    head += _length_field(inner, len(data))
    return [_length_field(field, len(head) + len(data) + len(tail)) + head, data, tail]


def error_to_bytes(exc: BaseException) -> bytes:
    """Serialise the `Obj` of an error that is a result: its type, text and traceback, with the mark of an error."""
    if isinstance(exc, ForeignError):
        said = exc.args
    else:
        cause = exc.cause if isinstance(exc, TaskError) and exc.cause is not None else exc
        kind = type(cause)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = exc.traceback_text if isinstance(exc, TaskError) else format_user_traceback(exc)
        said = (name, _text_of(cause), text)
    parts = [part.encode(errors="backslashreplace") for part in said]
    message = Obj(dict_data={"elem": [
        {"key": {"string_data": {"data": key.encode()}}, "value": {"string_data": {"data": part}}}
        for key, part in zip(_ERROR_KEYS, parts, strict=True)
    ]})  # fmt: skip
    data: bytes = message.SerializeToString()
    return data + _MARK


def from_bytes(data: bytes, trusted: bool, find: Callable[[int], ObjectRef] | None = None) -> Any:
    """Read a serialised `Obj`.

    Args:
        data: its bytes.
        trusted: whether their sender has shown the session's token.
        find: returns the reference for a name in the cluster.
    Raises:
        ObjError: they are not an `Obj`.
        ForeignError: they are an error's.
        UntrustedPickleError: it holds a pickle and is not trusted.
    """
    message = Obj()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise ObjError(f"these {len(data)} bytes are not an Obj: {exc}") from exc
    return from_obj(message, trusted, find)


def from_obj(message: Any, trusted: bool, find: Callable[[int], ObjectRef] | None = None) -> Any:
    """Read an `Obj`; arguments and errors as for `from_bytes`.

    Raises:
        ObjError: it has no field, several, or one with an impossible value.
        ForeignError: it is an error's.
        UntrustedPickleError: it holds a pickle and is not trusted.
    """
    return _read(message, trusted, find, 0)


def _text_of(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as other:  # a user's __str__ may raise anything
        return f"<no text: {type(other).__name__}>"


def _is_marked(message: Any) -> bool:
    fields: Any = UnknownFieldSet(message)
    return any(field.field_number == _MARK_NUMBER for field in fields)


def _length_field(number: int, length: int) -> bytes:
    out = bytearray([number << 3 | 2])
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


def _fill(message: Any, value: Any, name: Callable[[ObjectRef], int] | None, depth: int) -> None:
    kind = type(value)
    if value is None:
        message.empty_data.SetInParent()
    elif kind is bool:
        message.bool_data.data = value
        message.bool_data.SetInParent()
    elif kind is int:
        _fill_int(message, value)
    elif kind is float:
        message.double_data.data = value
        message.double_data.SetInParent()
    elif kind is str and _is_unicode(value):
        message.string_data.data = value.encode()
        message.string_data.SetInParent()
    elif kind is bytes:
        message.string_data.data = value
        message.string_data.MergeFromString(_MARK)
    elif kind is ObjectRef and name is not None:
        message.objref_data.data = name(value)
        message.objref_data.SetInParent()
    elif kind in (list, tuple) and depth < _DEPTH_MAX:
        target = message.list_data if kind is list else message.tuple_data
        target.SetInParent()
        for item in value:
            _fill(target.elem.add(), item, name, depth + 1)
    elif kind is dict and depth < _DEPTH_MAX:
        message.dict_data.SetInParent()
        for key, item in value.items():
            entry = message.dict_data.elem.add()
            _fill(entry.key, key, name, depth + 1)
            _fill(entry.value, item, name, depth + 1)
    elif not _fill_array(message, value):
        message.pyobj_data.data = _pickled(value)


def _fill_int(message: Any, value: int) -> None:
    if -_INT64 <= value < _INT64:
        message.int_data.data = value
        message.int_data.SetInParent()
    elif abs(value).bit_length() < 3 * _LONG_DIGITS_MAX:
        message.long_data.data = str(value)
    else:
        message.pyobj_data.data = _pickled(value)


def _is_unicode(value: str) -> bool:
    """Whether a string can be written as UTF-8; lone surrogates cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_numpy(value: Any, name: str) -> bool:
    """Whether a value is an `ndarray` or a `generic` of NumPy, which this module does not import for it."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return type(value) is numpy.ndarray if name == "ndarray" else isinstance(value, numpy.generic)


def _fill_array(message: Any, value: Any) -> bool:
    """Write an array or a scalar of a type that `Array` has a field for; False for any other value."""
    is_scalar = _is_numpy(value, "generic")
    if not (is_scalar or _is_numpy(value, "ndarray")):
        return False
    dtype = value.dtype
    field = _ARRAY_FIELDS.get(dtype.kind if dtype.kind != "f" else f"f{dtype.itemsize}")
    if field is None or dtype.char not in _ARRAY_CODES:
        return False
    array = message.array_data
    array.SetInParent()
    array.shape.extend(value.shape)
    array.dtype = dtype.num
    array.is_scalar = is_scalar
    plain = value.astype("u1" if dtype.kind == "b" else dtype.newbyteorder("="))
    getattr(array, field).extend(plain.ravel().tolist())
    return True


def _pickled(value: Any) -> bytes:
    parts = serialize(value)
    if parts.refs:
        raise SerializationError(
            f"a {type(value).__name__} contains references in a part that must be pickled; such values can be sent "
            "between fastrt stores only, over the native stream"
        )
    data = parts.to_bytes()
    if parts.kind == PICKLE:
        return data
    head = envelope(parts.kind, False, len(data))
    return head[head.index(b"\x80\x04c") :] + data + TAIL


def _read(message: Any, trusted: bool, find: Callable[[int], ObjectRef] | None, depth: int) -> Any:
    fields = message.ListFields()
    if len(fields) != 1:
        raise ObjError(f"an Obj has {len(fields)} fields set; it must have exactly one")
    if depth > _DEPTH_MAX:
        raise ObjError(f"an Obj is nested more than {_DEPTH_MAX} deep")
    field, part = fields[0][0].name, fields[0][1]
    if field in ("int_data", "double_data", "bool_data", "unicode_data"):
        return part.data
    if field == "empty_data":
        return None
    if field == "string_data":
        if _is_marked(part):
            return part.data
        try:
            return part.data.decode()
        except UnicodeDecodeError:
            return part.data
    if field == "long_data":
        if not re.fullmatch(rf"-?[0-9]{{1,{_LONG_DIGITS_MAX}}}", part.data):
            raise ObjError(
                f"a Long of {len(part.data)} characters is not a decimal number of at most {_LONG_DIGITS_MAX}"
            )
        return int(part.data)
    if field in ("list_data", "tuple_data"):
        items = [_read(item, trusted, find, depth + 1) for item in part.elem]
        return items if field == "list_data" else tuple(items)
    if field == "dict_data":
        found = _read_dict(part, trusted, find, depth)
        if len(found) == len(_ERROR_KEYS) and _is_marked(message):
            raise ForeignError(*(str(found.get(key, "")) for key in _ERROR_KEYS))
        return found
    if field == "array_data":
        return _read_array(part)
    if field == "objref_data":
        if find is None:
            raise ObjError(f"an Obj names object {part.data:#x}, and references are not known here")
        return find(part.data)
    if not trusted:
        raise UntrustedPickleError("a pickled value came from a caller that has not shown the session's token")
    try:
        return pickle.loads(part.data)
    except Exception as exc:  # the pickle's code can raise anything
        raise ObjError(f"a PyObj of {len(part.data)} bytes cannot be unpickled: {exc!r}") from exc


def _read_dict(part: Any, trusted: bool, find: Callable[[int], ObjectRef] | None, depth: int) -> dict[Any, Any]:
    found = {}
    for entry in part.elem:
        key = _read(entry.key, trusted, find, depth + 1)
        try:
            found[key] = _read(entry.value, trusted, find, depth + 1)
        except TypeError as exc:
            raise ObjError(f"a Dict has a key of type {type(key).__name__}: {exc}") from exc
    return found


def _read_array(part: Any) -> Any:
    import numpy

    known = {numpy.dtype(code).num: numpy.dtype(code) for code in _ARRAY_CODES}
    dtype = known.get(part.dtype)
    if dtype is None:
        raise ObjError(f"an Array has NumPy type number {part.dtype}; known are {sorted(known)}")
    field = _ARRAY_FIELDS[dtype.kind if dtype.kind != "f" else f"f{dtype.itemsize}"]
    data = getattr(part, field)
    shape = () if part.is_scalar else tuple(part.shape)
    if len(shape) > 32 or math.prod(shape) != len(data):
        raise ObjError(f"an Array of shape {list(shape)[:33]} has {len(data)} elements in {field}")
    if dtype.kind == "f":
        floats = numpy.array(data, dtype).reshape(shape)
        return floats[()] if part.is_scalar else floats
    wide = numpy.array(data, numpy.int64 if dtype.kind == "i" else numpy.uint64)
    narrow = wide.astype(dtype)
    if not (narrow == wide).all():
        raise ObjError(f"an Array of {dtype.name} has an element out of its range")
    found = narrow.reshape(shape)
    return found[()] if part.is_scalar else found
