"""Functions in the object store: shipped once per node, found by the hash of their content.

A function stays while a process can submit tasks of it, or a task or an actor of it exists; then the daemon sweeps it.

The stored value is the pair (name, function). Functions of importable modules are pickled by reference and
imported where they run; those of `__main__`, closures and lambdas travel by value (cloudpickle).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastrt._core.objects import functions, handles
from fastrt._core.tasks import tasks as core
from fastrt.errors import FunctionNotFoundError, SerializationError
from fastrt.store import garbage, warnings
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import serialize_code

# A closure above this size is sent with every new worker: most likely an array that should be put instead.
WARN_BYTES = 10 << 20


def export(
    store: Store, name: str, function: Callable[..., Any], captured_max: int = 0
) -> tuple[ObjectRef, functions.Watched | None]:
    """Store a function unless this node has it already.

    Args:
        name: for error messages and listings.
        function: any callable that cloudpickle can take.
        captured_max: the most bytes that it may have with all that it captures; 0: any number.
    Returns:
        The reference that tasks name their function by, and the watch that says when it is out of date: after an
        assignment to one of the globals that travelled with it. None: it names no globals that are watched.
    Raises:
        SerializationError: it captures something that cannot be pickled.
        ValueError: it captures too much.
    """
    try:
        parts, watched = serialize_code(name, function)
    except SerializationError as exc:
        raise SerializationError(f"function {name!r} cannot be sent to workers: {exc}") from exc
    if captured_max and parts.nbytes >= captured_max:
        kind = "actor" if isinstance(function, type) else "remote function"
        raise ValueError(
            f"The {kind} {name} is too large ({parts.nbytes >> 20} MiB > FUNCTION_SIZE_ERROR_THRESHOLD="
            f"{captured_max >> 20} MiB). Check that its definition is not implicitly capturing a large array or other "
            "object in scope. Tip: use ray.put() to put large objects in the Ray object store."
        )
    if parts.nbytes > WARN_BYTES:
        warnings.give(
            f"closure {name}",
            f"function {name!r} captures {parts.nbytes >> 20} MiB; put large values once with fastrt.put and pass "
            "the reference",
        )
    digest = digest_of(store.client.segment.session, parts.to_bytes(), parts.refs)
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        found = functions.add_function(store.client, digest, store.put_serialized(parts), name, False)
    return found, functions.Watched(watched) if watched else None


def digest_of(session: str, data: bytes, refs: Sequence[ObjectRef]) -> bytes:
    """Return the digest by which a node finds a function that it has.

    The references that a function captures, such as handles of actors, are not among its bytes.

    Args:
        session: of the node whose numbers the references have.
        data: the function's bytes.
        refs: the references in it.
    """
    import hashlib  # here: it loads OpenSSL, which most processes never need

    found = hashlib.blake2b(data, digest_size=16)
    if refs:
        found.update(f"{session} {[ref.objref for ref in refs]}".encode())
    return found.digest()


def inner_name(qualified: str) -> str:
    """Return the name of a function or method without the functions that it is defined in."""
    return qualified.rpartition("<locals>.")[2]


class Loaded:
    """Functions that a process has loaded.

    Attributes:
        functions: (name, function) by objref.
        places: the index of each one's object.
        looks_at: with this many loaded, the swept ones are dropped.
    """

    def __init__(self) -> None:
        self.functions: dict[int, tuple[str, Callable[..., Any]]] = {}
        self.places: dict[int, int] = {}
        self.looks_at = 0


class FunctionCache:
    """The functions that this process has loaded.

    Attributes:
        kept: the functions; while one is loaded, others can take their place, whose job it belongs to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.kept = Loaded()

    def get(self, task: int) -> tuple[str, Callable[..., Any]]:
        """Return (name, function) for a task that this process has claimed.

        Raises:
            FunctionNotFoundError: it cannot be rebuilt here; the message names the missing part.
        """
        objref, index = core.function_of(self._store.client, task)
        found = self.kept.functions.get(objref)
        if found is None:
            ref = handles.acquire(self._store.client, objref, index)
            try:
                found = self._store.load(ref)
            except (Exception, SystemExit) as exc:  # its module's code runs here and may raise anything
                raise FunctionNotFoundError(f"this worker cannot load the task's function: {exc}") from exc
            if len(self.kept.functions) >= self.kept.looks_at:
                self.drop_swept()
            self.kept.functions[objref], self.kept.places[objref] = found, index
        return found

    def drop_swept(self) -> None:
        """Drop the functions that no task can name any more: they may have pinned their values."""
        client, kept = self._store.client, self.kept
        for objref in [one for one, index in kept.places.items() if not functions.is_stored(client, one, index)]:
            del kept.places[objref]
            kept.functions.pop(objref, None)
            garbage.expect()
        kept.looks_at = 2 * len(kept.functions)

    def name(self, task: int) -> str:
        """Return the name of a task's function, also of one that cannot be loaded."""
        objref, _ = core.function_of(self._store.client, task)
        found = self.kept.functions.get(objref)
        return functions.function_name(self._store.client, objref) if found is None else found[0]
