"""Exceptions and their causes as they travel between processes: each one of a chain is pickled separately.

If one cannot be pickled, or the receiver cannot restore it, only that one is lost. This module imports nothing of
fastrt.
"""

from __future__ import annotations

import pickle
from typing import Any

_CHAIN_MOST = 50  # exceptions of one chain (causes and contexts) that are sent
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement, not a built-in


def assign(exc: BaseException, **fields: Any) -> None:
    """Set attributes of an exception, even if its class forbids it, as a frozen dataclass does."""
    for name, value in fields.items():
        object.__setattr__(exc, name, value)


def blank(kind: type, args: tuple[Any, ...]) -> Any:
    """Create an instance without running its class's __init__, which may have side effects or need other arguments.

    Python requires the __new__ of the class that defines the instance's layout: the first built-in along __base__.
    """
    maker: type = kind
    while maker.__flags__ & _HEAP_TYPE and maker.__base__ is not None:
        maker = maker.__base__
    return maker.__new__(kind, *args)


# One pickled exception of a chain: its bytes (None if it cannot be pickled), the positions of its cause and context in
# the list of links, and its __suppress_context__.
Link = tuple[bytes | None, int | None, int | None, bool]


def links_of(cause: BaseException | None) -> list[Link]:
    """Pickle an exception and its causes and contexts; the exception itself comes first."""
    if cause is None:
        return []
    chain, places = [cause], {id(cause): 0}
    for exc in chain:  # grows meanwhile
        for other in (exc.__cause__, exc.__context__):
            if other is not None and id(other) not in places and len(chain) < _CHAIN_MOST:
                places[id(other)] = len(chain)
                chain.append(other)
    return [
        (_to_bytes(exc), places.get(id(exc.__cause__)), places.get(id(exc.__context__)), exc.__suppress_context__)
        for exc in chain
    ]


def _to_bytes(exc: BaseException) -> bytes | None:
    """Pickle an exception; part by part if it cannot be pickled and restored as a whole."""
    import cloudpickle  # here: only a failed task pays for the import, and this module stays light

    try:
        data = bytes(cloudpickle.dumps(exc))
        if isinstance(pickle.loads(data), BaseException):
            return data
    except BaseException:  # a user's __reduce__ or __init__ may raise anything; the worker must survive it
        pass
    try:
        return bytes(cloudpickle.dumps(_parts_of(exc, frozenset())))
    except BaseException:
        return None


class _Parts:
    """The type, arguments and attributes of an exception, which is restored without calling its class's methods."""

    def __init__(self, kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        self.kind, self.args, self.fields = kind, args, fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_together, (self.kind, self.args, self.fields)


def _put_together(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    exc: BaseException = blank(kind, args)
    exc.__dict__.update(fields)
    return exc


def _parts_of(exc: BaseException, outer: frozenset[int]) -> _Parts:
    outer |= {id(exc)}
    args = tuple(_portable(arg, outer) for arg in exc.args)
    return _Parts(type(exc), args, {name: _portable(value, outer) for name, value in vars(exc).items()})


def _portable(value: Any, outer: frozenset[int]) -> Any:
    """Return the value if it can be pickled, else its `repr`.

    Of the exceptions in it, as a group has them in a list, only the parts that cannot be pickled become their `repr`.

    Args:
        value: an argument or attribute of an exception, or an item of one.
        outer: ids of the exceptions and containers around it, as one of them may contain itself.
    """
    import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(value))
        return value
    except Exception:  # a user's class may refuse in any way it likes
        pass
    if id(value) not in outer:
        if isinstance(value, BaseException):
            return _parts_of(value, outer)
        if type(value) in (list, tuple):
            return type(value)(_portable(one, outer | {id(value)}) for one in value)
    return repr(value)


def restore(links: list[Link]) -> BaseException | None:
    """Return the first exception of a chain that `links_of` has pickled; None: it cannot be restored here."""
    chain: list[BaseException | None] = []
    for data, _, _, _ in links:
        try:
            exc = None if data is None else pickle.loads(data)
        except Exception:  # the class is missing here
            exc = None
        chain.append(exc if isinstance(exc, BaseException) else None)
    for exc, (_, cause, context, suppress) in zip(chain, links, strict=True):
        if exc is not None:
            assign(exc, __cause__=None if cause is None else chain[cause])
            assign(exc, __context__=None if context is None else chain[context])
            # A library that pickles tracebacks, such as tblib, restores them with this frame and its callers: a cycle.
            assign(exc, __suppress_context__=suppress, __traceback__=None)
    return chain[0] if chain else None
