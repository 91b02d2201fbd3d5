"""Globals and class attributes that are sent with code by value, and the rules for which of them a receiver adopts.

A function or class of `__main__` is sent with the globals that it names. A worker keeps one dict of globals for each
module of a job, like the sending process: an assignment by one function is visible to the others. The sender numbers
the values that it sends under each name. A worker adopts a value if it has none of that name, or an older one. So an
assignment by the worker's own code stays until the sender assigns another value.

A reference that came as a global, such as an actor's handle, keeps its object on all nodes. So once no code of a module
is left in a worker, `drop_unused` drops the received values that hold references; code that comes later brings its own.

Only the process that a module belongs to numbers its values. A worker that forwards a value keeps its number. A value
that the worker itself has assigned has no number: a receiver adopts it only if it has none of that name. A process that
receives a class that it made itself does not change it.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastrt._core.objects.handles import Ref
from fastrt.store import garbage

Versions = dict[str, int]  # by name; a receiver adopts a value without a number only if it has none of that name
_Digest = Callable[[Any], object]  # a digest of a value's content; None if the value cannot be pickled

_SPACES_MAX = 64  # modules of jobs whose globals a worker keeps
_TEXT_MAX = 256  # longer texts are compared by their digest
_KEPT_TEXT_MAX = 1 << 16
_ITSELF = "__fastrt__"  # a name among globals, while `drop_unused` looks for code that uses them
_SCALARS = frozenset([int, float, complex, bool, str, bytes, type(None)])
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)
_by_identity: tuple[type, ...] = (type, types.FunctionType)
_LOOKED_THROUGH_MAX = 10_000  # objects in one value, to find references
_lock = threading.RLock()  # code that the garbage collector runs may load more


def by_identity(*kinds: type) -> None:
    """Compare objects of these classes by identity: a name is unchanged as long as it refers to the same object."""
    global _by_identity
    _by_identity += kinds


def is_code(value: Any) -> bool:
    """Whether a value is a function, a class, or of a class registered by `by_identity`."""
    return issubclass(type(value), _by_identity)  # isinstance would read value.__class__, which may be anything


def is_comparable(value: Any) -> bool:
    """Whether a value changes only by assignment, and is small enough to keep for a comparison: code, plain data."""
    kind = type(value)
    return (kind in _SCALARS and (kind not in (str, bytes) or len(value) <= _KEPT_TEXT_MAX)) or is_code(value)


# ---- the side that sends ----


class Sent:
    """The values that this process has sent under names of one module or class."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[object, int]] = {}

    def versions(self, values: Mapping[str, Any], digest: _Digest) -> Versions:
        """Number values: the number of a name goes up when its value differs from the one sent before."""
        return {name: self._version(name, _token(name, value, digest)) for name, value in values.items()}

    def _version(self, name: str, token: object) -> int:
        with _lock:
            before, version = self._sent.get(name, (None, 0))
            if not version or before is None or before != token:
                version += 1
                self._sent[name] = (token, version)
            return version


def _token(name: str, value: Any, digest: _Digest) -> object:
    """Make a token that is equal for equal values; None: the value counts as changed each time."""
    kind = type(value)
    if kind in _SCALARS and (kind not in (str, bytes) or len(value) <= _TEXT_MAX):
        return kind, repr(value)
    if kind is types.FunctionType:
        return kind, number_of(value), number_of(value.__code__)
    if kind is types.ModuleType or is_code(value):
        return kind, number_of(value)
    if kind is staticmethod or kind is classmethod:
        return kind, _token(name, value.__func__, digest)
    if kind is property:
        return kind, *(_token(name, part, digest) for part in (value.fget, value.fset, value.fdel))
    if name.startswith("__") and name.endswith("__"):
        return kind  # Python's own attributes of a class: annotations, fields
    return digest(value)


def number_of(thing: Any) -> object:
    """A number that is unique to this object in this process's lifetime; None if the object cannot have one."""
    try:
        found = _numbers.get(thing)
        return _numbers.setdefault(thing, next(_next_number)) if found is None else found
    except TypeError:  # no weak references to it, or no hash
        return None


def digest_of(parts: Iterable[Any]) -> bytes:
    """Digest the buffers that a value is pickled into."""
    import hashlib  # here: it loads OpenSSL, which most processes never need

    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


_modules: dict[str, Sent] = {}
_classes: weakref.WeakKeyDictionary[type, Sent] = weakref.WeakKeyDictionary()  # classes that this process made


class Origin:
    """The origin of a function's globals within one pickle. It unpickles to the dict of globals of the receiver.

    Attributes:
        owned: whether the globals belong to a module of this process.
        received: whether this process is a worker that received them from another process.
    """

    def __init__(self, namespace: dict[str, Any], base: dict[str, Any], job: str) -> None:
        name = namespace.get("__name__")
        space = _spaces_by_id.get(id(namespace))
        self.owned = False
        self.received = space is not None
        self._space = space
        self._base = base
        self._key: tuple[str, str] | None = None
        if space is not None:
            self._key = space.key
        elif isinstance(name, str) and getattr(sys.modules.get(name), "__dict__", None) is namespace:
            self.owned = not _sharing
            self._key = job, name

    def __reduce__(self) -> tuple[Any, ...]:
        return globals_of, (self._key, self._base)

    def versions(self, values: Mapping[str, Any], digest: _Digest) -> Versions:
        """Number the globals that a function names."""
        if self._space is not None:
            came, seen = self._space.came, self._space.seen
            return {name: seen[name] for name, value in values.items() if name in came and came[name] is value}
        if not self.owned or self._key is None:
            return {}
        return _modules.setdefault(self._key[1], Sent()).versions(values, digest)


def class_versions(cls: type, values: Mapping[str, Any], digest: _Digest) -> Versions:
    """Number the attributes of a class that is sent by value."""
    if cls in _received:
        return {}
    return _classes.setdefault(cls, Sent()).versions(values, digest)


# ---- the side that receives ----


class _Space:
    """The globals of one module of a job in this worker."""

    def __init__(self, key: tuple[str, str], base: dict[str, Any]) -> None:
        self.key = key
        self.globals = base
        self.seen: Versions = {}
        self.came: dict[str, Any] = {}  # received code and small values, to detect assignments by this worker
        self.holding: dict[str, Any] = {}  # received values that hold references

    def without_code(self) -> _Space:
        """Return a copy without the received code, and without the received values that hold references."""
        code = {name: one for name, one in self.came.items() if is_code(one)}
        gone = code | self.holding
        left = {name: one for name, one in self.globals.items() if gone.get(name, self) is not one}
        fresh = _Space(self.key, left)
        fresh.seen = {name: version for name, version in self.seen.items() if name in left}
        fresh.came = {name: one for name, one in self.came.items() if left.get(name, self) is one}
        return fresh


_sharing = False
updates: dict[str, object] = {"last": None}  # a new object after each update of a value
_room: object = None
_spaces: OrderedDict[tuple[object, tuple[str, str]], _Space] = OrderedDict()
_spaces_by_id: dict[int, _Space] = {}  # by the dict of globals, which the space keeps alive
_received: weakref.WeakKeyDictionary[type, Versions] = weakref.WeakKeyDictionary()


def share() -> None:
    """Keep one dict of globals for each module of a job from now on: this process is a worker."""
    global _sharing
    _sharing = True


def enter(room: object) -> object:
    """Switch to the dicts of another environment, which has different modules; return the one used before."""
    global _room
    before, _room = _room, room
    return before


def globals_of(key: tuple[str, str] | None, base: dict[str, Any]) -> dict[str, Any]:
    """Return the dict of globals for functions of a module, given as (job, name).

    Args:
        key: None for functions whose globals belong to no module; they get a separate dict.
        base: the initial content of a new dict.
    """
    if key is None or not _sharing:
        return base
    with _lock:
        space = _spaces.get((_room, key))
        if space is None:
            space = _spaces[_room, key] = _Space(key, base)
            _spaces_by_id[id(base)] = space
            while len(_spaces) > _SPACES_MAX:
                del _spaces_by_id[id(_spaces.popitem(last=False)[1].globals)]
        _spaces.move_to_end((_room, key))
        return space.globals


def set_function(function: Any, state: tuple[Callable[..., Any], tuple[Any, dict[str, Any]], Versions]) -> None:
    """Set the state of a new function, and the globals of its module that are missing or older here."""
    set_state, (attributes, slots), versions = state
    space = _spaces_by_id.get(id(function.__globals__))
    if space is not None:
        news = _news(slots["__globals__"], versions, space.globals, space.seen)
        space.came.update({name: value for name, value in news.items() if name in versions and is_comparable(value)})
        holding = {name: value for name, value in news.items() if _holds_references(value)}
        if holding:
            space.holding.update(holding)
            garbage.expect()  # the function may be an argument
        slots["__globals__"] = news
    set_state(function, (attributes, slots))


def set_class(cls: type, state: tuple[Callable[..., Any], tuple[dict[str, Any], Any], Versions]) -> None:
    """Set the attributes of a class that are missing or older here: all of a new class, none of one made here."""
    set_state, (attributes, slots), versions = state
    if cls in _classes:
        return
    seen = _received.get(cls)
    if seen is None:
        _received[cls] = versions
    else:
        attributes = _news(attributes, versions, vars(cls), seen)
    set_state(cls, (attributes, slots))


def drop_unused() -> None:
    """Collect the garbage that dropped code has left, if there may be any.

    Received values that hold references go where no code of their module is left in this process.
    """
    if not garbage.is_expected():
        return
    with _lock:
        loose = []
        while held := next((place for place, space in _spaces.items() if space.holding), None):
            space = _spaces.pop(held)
            del _spaces_by_id[id(space.globals)]
            loose.append((held, space.without_code(), weakref.ref(space)))
            space.globals[_ITSELF] = space  # only code that uses the globals keeps both now
            del space
        garbage.collect()  # or a later call does
        for place, fresh, of_code in loose:
            left = of_code() or fresh
            left.globals.pop(_ITSELF, None)
            _spaces[place] = left
            _spaces_by_id[id(left.globals)] = left


def _holds_references(value: Any) -> bool:
    """Whether a value is or holds references to objects, as far as the garbage collector can see."""
    found, left, k = {id(value)}, [value], 0
    while left and k < _LOOKED_THROUGH_MAX:
        one = left.pop()
        k += 1
        kind = type(one)  # isinstance would read one.__class__, which may be anything
        if issubclass(kind, Ref):
            return True
        if not issubclass(kind, types.ModuleType) and not is_code(one):
            inner = [part for part in gc.get_referents(one) if id(part) not in found]
            found.update(map(id, inner))
            left += inner
    return False


def _news(values: dict[str, Any], versions: Versions, here: Mapping[str, Any], seen: Versions) -> dict[str, Any]:
    """Pick the values that are missing here or newer than those received before, and record their numbers."""
    news = {}
    for name, value in values.items():
        version = versions.get(name, 0)
        if version > seen.get(name, 0) or name not in here:
            if name in here:
                updates["last"] = object()
            news[name] = value
            seen[name] = version
    return news
