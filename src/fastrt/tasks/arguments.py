"""Arguments on their way to a task: references among them become dependencies, the rest is serialized.

Plain scalars and references take the core's own form and never come here. What comes here is the pair
(args, kwargs) with every top-level reference replaced by its number: in the task's record when it is small,
as an object of its own (read by the worker without a copy) when it is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrt._core.objects import unread
from fastrt.store import warnings
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import deserialize, is_large_array, serialize

IN_OBJECT = 32  # the pair is the value of the first reference; other kinds are those of the serializer
# Below this the arguments travel in the task's record; above, their buffers are worth reading in place.
RECORD_BYTES_MAX = 32 << 10
# An array argument from this size on is put by itself and passed by reference: it is then read without pickle.
PUT_BYTES_MIN = 4 << 10


class Dependency:
    """Stands in pickled arguments for the value of the task's dependency number `number`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Dependency, (self.number,)


def put_large_arrays(store: Store, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace large arrays among positional arguments by references to them."""
    return tuple(_put_array(store, arg) if is_large_array(arg, PUT_BYTES_MIN) else arg for arg in args)


def _put_array(store: Store, array: Any) -> ObjectRef:
    if array.nbytes >= warnings.LARGE_BYTES:
        warnings.array_passed(array)
    return store.put(array)


def pack(store: Store, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bytes, list[ObjectRef], int]:
    """Serialize arguments.

    Returns:
        (kind, bytes, refs, ndeps) as `_core.tasks.tasks.submit` takes them: the first `ndeps` of `refs` are the
        dependencies, the others are only kept alive.
    Raises:
        SerializationError: an argument cannot be pickled.
        ObjectStoreFullError: there is no room for large arguments.
    """
    deps: list[ObjectRef] = []
    args = tuple(_replace(arg, deps) for arg in args)
    kwargs = {name: _replace(arg, deps) for name, arg in kwargs.items()}
    parts = serialize((args, kwargs))
    if parts.nbytes <= RECORD_BYTES_MAX:
        return parts.kind, parts.to_bytes(), deps + parts.refs, len(deps)
    if parts.nbytes >= warnings.LARGE_BYTES:
        warnings.value_passed(parts.nbytes, parts.parts)
    return IN_OBJECT, b"", [store.put_serialized(parts), *deps], 1 + len(deps)


def unpack(store: Store, kind: int, data: bytes, refs: Sequence[ObjectRef], ndeps: int) -> tuple[Any, dict[str, Any]]:
    """Build (args, kwargs) again in the worker, with the values of dependencies in their places.

    Raises:
        TaskError: a dependency is an error; it is raised as it is.
        SerializationError: something cannot be rebuilt here.
    """
    if kind == IN_OBJECT:
        args, kwargs = store.load(refs[0])
        deps = refs[1:]
    else:
        args, kwargs = deserialize(kind, data, refs[ndeps:])
        deps = refs[:ndeps]
    deps = deps[: ndeps if kind != IN_OBJECT else ndeps - 1]
    try:
        values = [store.load(ref) for ref in deps]
    except BaseException:
        unread.mark(store.client, deps)  # one error stands for those of all arguments
        raise
    args = tuple(values[arg.number] if type(arg) is Dependency else arg for arg in args)
    kwargs = {name: values[arg.number] if type(arg) is Dependency else arg for name, arg in kwargs.items()}
    return args, kwargs


def _replace(arg: Any, deps: list[ObjectRef]) -> Any:
    if not isinstance(arg, ObjectRef):
        return arg
    deps.append(arg)
    return Dependency(len(deps) - 1)
