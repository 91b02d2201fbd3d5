"""Arguments on their way to a task: references among them become dependencies, the rest is serialized.

Plain scalars and references take the core's own form. Other arguments are serialized as the pair (args, kwargs), with
the number of a dependency in the place of every top-level reference: into the task's record when the pair is small,
into an object of its own (which the worker reads without a copy) when it is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrt._core.objects import unread
from fastrt._core.tasks.submission import PackedArgs, pack_scalars
from fastrt.store import warnings
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import deserialize, is_large_array, serialize

IN_OBJECT = 32  # the pair is the value of the first reference; the serializer has the other kinds
# Up to this size the arguments travel in the task's record; above, their buffers are worth reading in place.
RECORD_BYTES_MAX = 32 << 10
# An array argument from this size on is put by itself and passed by reference: it is then read without pickle.
PUT_BYTES_MIN = 4 << 10
_SCALARS = frozenset([int, float, bool, str, bytes, type(None)])


class Dependency:
    """The place of an argument, in pickled arguments, that is the value of the task's dependency `number`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Dependency, (self.number,)


def _put_array(store: Store, array: Any) -> ObjectRef:
    if array.nbytes >= warnings.LARGE_BYTES:
        warnings.array_passed(array)
    return store.put(array)


def pack(store: Store, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedArgs:
    """Put large arrays among the positional arguments into the store, and serialize the rest.

    Raises:
        SerializationError: an argument cannot be pickled.
        ObjectStoreFullError: there is no room for large arguments.
    """
    values, places = list(args), []
    plain = not kwargs
    for at, arg in enumerate(args):
        if type(arg) in _SCALARS:
            continue
        if isinstance(arg, ObjectRef):
            places.append(at)
        elif is_large_array(arg, PUT_BYTES_MIN):
            values[at] = _put_array(store, arg)
            places.append(at)
        else:
            plain = False
    scalars = pack_scalars(tuple(values)) if plain else None
    if scalars is not None:
        return scalars
    deps: list[ObjectRef] = []
    for at in places:
        values[at] = _replace(values[at], deps)
    kwargs = {name: _replace(arg, deps) for name, arg in kwargs.items()}
    parts = serialize((tuple(values), kwargs))
    if parts.nbytes <= RECORD_BYTES_MAX:
        return PackedArgs(parts.kind, parts.to_bytes(), deps + parts.refs, len(deps))
    if parts.nbytes >= warnings.LARGE_BYTES:
        warnings.value_passed(parts.nbytes, parts.parts)
    return PackedArgs(IN_OBJECT, b"", [store.put_serialized(parts, in_file=True), *deps], 1 + len(deps))


def unpack(store: Store, kind: int, data: bytes, refs: Sequence[ObjectRef], ndeps: int) -> tuple[Any, dict[str, Any]]:
    """Build (args, kwargs) again in the worker, with the values of dependencies in their places.

    Raises:
        TaskError: a dependency is an error; it is raised unchanged.
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
