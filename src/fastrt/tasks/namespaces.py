"""Names of actors and the namespaces that they are in: one text in an actor's record, which all nodes compare.

The namespace of a driver's `init(namespace=...)` holds for all its tasks and actors. It is noted in the arena for the
driver's job and read only where a name is looked up, so tasks pay nothing for it. An actor carries it in its
environment, as it outlives the job and is called by others; so does a task that is forwarded to another node. The
session's default namespace is the empty one, and its names are written without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastrt._core.objects import functions
from fastrt._core.tasks import tasks as core
from fastrt._core.tasks.actors import NAME_BYTES_MAX
from fastrt.errors import ArgumentError
from fastrt.store import client as store_client
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks import runtime_env
from fastrt.tasks.runtime_env import Environment

_MARK = "\x1e"


def checked(what: str, value: Any) -> str:
    """Return a name or a namespace if it can be one.

    Args:
        what: "name" or "namespace", for messages.
        value: the text.
    Raises:
        TypeError, ValueError: it cannot be one.
    """
    if not isinstance(value, str):
        raise ArgumentError(f"{what} is {value!r}; it must be text")
    if any(one in value for one in "\x1e\x1f"):
        raise ValueError(f"{what} is {value!r}; it must not have the characters \\x1e and \\x1f")
    return value


def here() -> str:
    """Return the namespace of the code that runs here."""
    now = runtime_env.current()
    if now is not None and now.namespace is not None:
        return now.namespace
    store = store_client.current()
    if store is None or store.actor_here is not None:
        return ""
    return of_job(store, job_here(store))


def job_here(store: Store) -> int:
    """Return the number of the job for which the code that calls this runs; 0: unknown."""
    task = store.task_here()
    return store.client.working_job if task is None else core.info(store.client, task)["job"]


def note(store: Store, namespace: str) -> ObjectRef:
    """Put the job of this process, a driver, into a namespace; it is in it as long as the reference returned is held.

    Tasks of the job end with its driver, so nothing looks for the namespace later.
    """
    what = f"namespace {namespace}"
    noted: ObjectRef = functions.add_function(
        store.client, _digest(store.client.job), store.put(namespace), what, lasting=False
    )
    return noted


def of_job(store: Store, job: int) -> str:
    """Return the namespace that a job is in."""
    ref = functions.find_function(store.client, _digest(job))
    return "" if ref is None else str(store.get(ref))


def inside(namespace: str, own: Environment | None) -> Environment | None:
    """Return an environment with the namespace, for a process or a node that does not know the job."""
    if not namespace or (own is not None and own.namespace is not None):
        return own
    return replace(own or Environment(), namespace=namespace)


def _digest(job: int) -> bytes:
    import hashlib  # here: it loads OpenSSL, which most processes never need

    return hashlib.blake2b(job.to_bytes(8, "little"), digest_size=16, person=b"namespace").digest()


def stored(name: str, namespace: str | None) -> str:
    """Return a name as the record has it; a namespace of None is the one that this code is in.

    Raises:
        TypeError, ValueError: it cannot be a name.
    """
    space = here() if namespace is None else checked("namespace", namespace)
    whole = f"{_MARK}{space}{_MARK}{checked('name', name)}" if space else checked("name", name)
    if not name:
        raise ValueError("Actor name cannot be an empty string.")
    if len(whole.encode()) > NAME_BYTES_MAX:
        inside = f" with namespace {space!r} and 2 more" if space else ""
        raise ValueError(f"name{inside} has {len(whole.encode())} bytes; it must have {NAME_BYTES_MAX} at most")
    return whole


def split(whole: str) -> tuple[str, str]:
    """Split the text of a record into (namespace, name)."""
    if not whole.startswith(_MARK):
        return "", whole
    _, space, name = whole.split(_MARK, 2)
    return space, name


def listed(whole: list[str], all_namespaces: bool) -> list[Any]:
    """Return the texts of records in the form of `fastrt.list_named_actors`."""
    found = sorted(map(split, whole))
    if all_namespaces:
        return [{"name": name, "namespace": space} for space, name in found]
    space_here = here()
    return [name for space, name in found if space == space_here]
