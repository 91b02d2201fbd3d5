"""`ray.cloudpickle`: the package `cloudpickle`, which fastrt pickles by, too.

A reference that is pickled here keeps its object until the session ends, as on Ray: its pickle may come back at any
time.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PicklingError
from types import FunctionType
from typing import IO, Any

import cloudpickle
from cloudpickle import load, loads, register_pickle_by_value

from fastrt.store import client as store_client
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import reduce_code

__all__ = [
    "CloudPickler",
    "Pickler",
    "dump",
    "dump_debug",
    "dumps",
    "dumps_debug",
    "load",
    "loads",
    "register_pickle_by_value",
]

VERBOSE = "RAY_PICKLE_VERBOSE_DEBUG"  # a variable: look for the part that cannot be pickled


class _Kept:
    """References that were pickled in this session, by their text."""

    def __init__(self) -> None:
        self._refs: dict[str, ObjectRef] = {}

    def keep(self, ref: ObjectRef) -> None:
        """Keep the object of a reference; those of another engine are not fastrt's to keep."""
        store = store_client.current()
        if store is not None:
            store.users.add(self)
            self._refs[ref.hex()] = ref

    def forget(self) -> None:
        """Drop all: the session ends."""
        self._refs.clear()


_kept = _Kept()


class CloudPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """The pickler of `cloudpickle`, which keeps the objects of references that it pickles."""

    def reducer_override(self, obj: Any) -> Any:
        """Keep the object of a reference, and take code by value that is inside an actor class."""
        if isinstance(obj, ObjectRef):
            _kept.keep(obj)
        if type(obj) is FunctionType or issubclass(type(obj), type):
            return reduce_code(self, obj)
        return super().reducer_override(obj)


Pickler = CloudPickler


def dump(obj: Any, file: IO[bytes], protocol: int | None = None, buffer_callback: Any = None) -> None:
    """Pickle an object into a file, as `cloudpickle.dump` does."""
    CloudPickler(file, protocol=protocol, buffer_callback=buffer_callback).dump(obj)


def dumps(obj: Any, protocol: int | None = None, buffer_callback: Any = None) -> bytes:
    """Return the pickle of an object, as `cloudpickle.dumps` does."""
    with io.BytesIO() as file:
        dump(obj, file, protocol, buffer_callback)
        return file.getvalue()


def dump_debug(obj: Any, *args: Any, **kwargs: Any) -> None:
    """Pickle an object into a file; if that fails, print which part of it cannot be pickled, or say how to learn it.

    Args:
        obj: the object.
        *args, **kwargs: as for `dump`.
    Raises:
        TypeError, PicklingError: it cannot be pickled.
    """
    with _explaining(obj, "dump"):
        dump(obj, *args, **kwargs)


def dumps_debug(obj: Any, *args: Any, **kwargs: Any) -> bytes:
    """Return the pickle of an object; if that fails, print which part of it cannot be pickled, or say how to learn it.

    Args:
        obj: the object.
        *args, **kwargs: as for `dumps`.
    Raises:
        TypeError, PicklingError: it cannot be pickled.
    """
    with _explaining(obj, "dumps"):
        return dumps(obj, *args, **kwargs)


@contextmanager
def _explaining(obj: Any, name: str) -> Iterator[None]:
    """Explain why an object cannot be pickled. With RAY_PICKLE_VERBOSE_DEBUG the parts that cannot are printed.

    Source:
        `dumps_debug` in Ray's `cloudpickle/__init__.py`.
    """
    try:
        yield
    except (TypeError, PicklingError) as exc:
        why = f"ray.cloudpickle.{name}({obj}) failed: {exc}\n{VERBOSE}=1 prints which part cannot be pickled"
        if not os.environ.get(VERBOSE):
            raise type(exc)(why) from exc
        from fastrt.ray.util.check_serialize import inspect_serializability  # here: few programs look so closely

        inspect_serializability(obj)
        raise type(exc)(*exc.args) from exc
