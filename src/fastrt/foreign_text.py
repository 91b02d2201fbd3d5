"""The one parser for text that another process or a file supplies: JSON and whole numbers, with bounds.

`read_json` bounds size, depth, digits and strings before a value reaches its caller, and raises one error for every
fault. Callers check fields and types by `read_object`. This module imports nothing of fastrt except its errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from fastrt.errors import FastrtError

BYTES_MAX = 1 << 16  # of one text, unless the caller allows more
SETTINGS_BYTES_MAX = 1 << 20  # of the settings that a process passes to one that it starts
STATE_BYTES_MAX = 1 << 30  # of one record of durable state
DEPTH_MAX = 32
DIGITS_MAX = 40  # of one whole number: 128 bits have 39
_SHOWN_MAX = 60

Text = bytes | bytearray | memoryview | str
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # linear time: it matches at every quote
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_SURROGATE = re.compile(r"\\u[dD]")
_WHOLE = re.compile(r"-?[0-9]+\Z")


class ForeignTextError(FastrtError, ValueError):
    """A text of another process, or of a file, is malformed or exceeds a bound. The message names the text and why.

    Check its source: another version of fastrt, a damaged file, or a foreign program.
    """


def read_json(
    data: Text, what: str, *, bytes_max: int = BYTES_MAX, depth_max: int = DEPTH_MAX, own: bool = False
) -> Any:
    """Parse JSON of unknown origin.

    Args:
        data: UTF-8 bytes, or text.
        what: name of the text for the error, such as "the greeting of a rank".
        bytes_max: greatest length, in bytes (of `str`: characters).
        depth_max: greatest depth of lists and objects within each other.
        own: whether a process of this user's runtime on this machine wrote it: size, depth and encoding are still
            checked, but infinite numbers and file names that are not valid Unicode are accepted.
    Returns:
        The value: dict, list, str, int, float, bool or None. Numbers are finite and strings are valid Unicode.
    Raises:
        ForeignTextError: the text is too long or too deep, is not UTF-8 or not JSON, names a key twice, or contains
            NaN, an infinite number, a whole number of more than 40 digits or half of a surrogate pair.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > bytes_max:
        raise ForeignTextError(f"{what} has {size} bytes; at most {bytes_max} are allowed")
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")
        if text.count("[") + text.count("{") > depth_max and _is_deeper(text, depth_max):
            raise ForeignTextError(f"{what} nests lists or objects deeper than {depth_max} levels")
        if own:
            return _OWN_DECODER.decode(text)
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except ForeignTextError:
        raise
    except UnicodeError:
        raise ForeignTextError(f"{what} is no JSON: its bytes are not valid UTF-8") from None
    except RecursionError:
        raise ForeignTextError(f"{what} nests lists or objects too deep for this call stack") from None
    except ValueError as error:
        raise ForeignTextError(f"{what} is no JSON: {_shown(str(error))}") from None


def read_object(
    data: Text,
    what: str,
    fields: Mapping[str, type | tuple[type, ...]] | None = None,
    *,
    bytes_max: int = BYTES_MAX,
    own: bool = False,
) -> dict[str, Any]:
    """Parse a JSON object of unknown origin, and check the types of its fields.

    Args:
        data, what, bytes_max, own: see `read_json`.
        fields: type, or types, of each required field; a `bool` is not accepted as an `int`. Other fields are allowed.
    Returns:
        The object.
    Raises:
        ForeignTextError: see `read_json`; or it is not an object, or a field is missing or of another type.
    """
    value = read_json(data, what, bytes_max=bytes_max, own=own)
    return check_object(value, what, fields)


def check_object(value: Any, what: str, fields: Mapping[str, type | tuple[type, ...]] | None = None) -> dict[str, Any]:
    """Check that a parsed value is an object with fields of these types; see `read_object`.

    Returns:
        The value.
    Raises:
        ForeignTextError: it is not an object, or a field is missing or of another type.
    """
    if not isinstance(value, dict):
        raise ForeignTextError(f"{what} is no JSON object")
    for name, kinds in (fields or {}).items():
        if name not in value:
            raise ForeignTextError(f"{what} has no field {name!r}")
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        found = value[name]
        if not isinstance(found, allowed) or (isinstance(found, bool) and bool not in allowed):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ForeignTextError(f"{what}: field {name!r} must be {names}, and is {type(found).__name__}")
    return value


def read_int(data: Text, what: str, minimum: int = 0, maximum: int = (1 << 64) - 1) -> int:
    """Parse a whole number of unknown origin: ASCII digits with an optional minus sign.

    Args:
        data: the text.
        what: name of the number for the error.
        minimum, maximum: the allowed range, both included.
    Returns:
        The number.
    Raises:
        ForeignTextError: it is not a whole number, or out of range.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    text = "" if size > DIGITS_MAX + 1 else data if isinstance(data, str) else str(data, "latin-1")
    if not _WHOLE.match(text):
        raise ForeignTextError(f"{what} is no whole number: {_shown(text) if text else f'{size} bytes'}")
    number = int(text)
    if not minimum <= number <= maximum:
        raise ForeignTextError(f"{what} is {number}; it must be between {minimum} and {maximum}")
    return number


def _is_deeper(text: str, depth_max: int) -> bool:
    """Whether brackets nest deeper than allowed. Unpaired brackets may count as deeper: such a text is not JSON."""
    left = _NO_BRACKETS.sub("", _STRINGS.sub("", text))
    for _ in range(depth_max):
        shorter = left.replace("[]", "").replace("{}", "")
        if len(shorter) == len(left):
            break
        left = shorter
    return bool(left)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > DIGITS_MAX:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


_OWN_DECODER = json.JSONDecoder()
_DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_distinct
)
