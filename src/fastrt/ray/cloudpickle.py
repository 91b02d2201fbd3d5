"""`ray.cloudpickle`: the package `cloudpickle`, which fastrt pickles by, too.

A reference that is pickled here keeps its object until the session ends, as on Ray: its pickle may come back at any
time.
"""

from __future__ import annotations

import io
from types import FunctionType
from typing import IO, Any

import cloudpickle
from cloudpickle import load, loads, register_pickle_by_value

from fastrt.store import client as store_client
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import reduce_code

__all__ = ["CloudPickler", "Pickler", "dump", "dumps", "load", "loads", "register_pickle_by_value"]


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
