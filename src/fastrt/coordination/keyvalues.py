"""Key-values: a flat table of values, the directories above them, and the callers that wait for a key.

Keys are paths. A directory's index holds the names of its direct children. So the cost of listing or deleting a
directory depends on its own keys only, and setting a key in a known directory costs one hash insert.

Invariants (`check_invariants`): every key is reachable from the root; no directory is empty; the byte count is right.

Source: XLA's `KeyValueStore` (normalised keys, ordered directory listings, waiting getters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastrt.coordination.events import Answer, Persist
from fastrt.coordination.status import Code, Failure, failure

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
# The most characters of a number and the spaces around it: longer text is not a 64-bit integer.
_INTEGER_CHARS_MAX = 64
# A new key enters each directory above it into the index under its whole path, so a key costs at most its length
# times its levels: a mebibyte of slashes would cost a terabyte.
_LEVELS_MAX = 1000
_KEY_CHARS_MAX = 1 << 16

Emit = Callable[["Answer | Persist"], None]


def normalized(key: str) -> str:
    """The key without leading, trailing and doubled slashes."""
    if "//" in key or key[:1] == "/" or key[-1:] == "/":
        return "/".join([name for name in key.split("/") if name])
    return key


def refused_key(key: str) -> Failure | None:
    """The failure if a normalised key is too long to be set, else None."""
    if len(key) <= _LEVELS_MAX:
        return None
    levels = key.count("/") + 1
    if len(key) <= _KEY_CHARS_MAX and levels <= _LEVELS_MAX:
        return None
    words = (
        f"A key has {len(key)} characters in {levels} levels; at most {_KEY_CHARS_MAX} characters and {_LEVELS_MAX} "
        "levels can be set. Put long data into the value."
    )
    return failure(Code.INVALID_ARGUMENT, words, marked=False)


class KeyValues:
    """The key-value part of the coordination state machine.

    Args:
        emit: receives the effects: answers to callers and records to keep.
        bytes_max: the most bytes of all keys and values.
        keys_max: the most keys.
    """

    def __init__(self, emit: Emit, bytes_max: int = 2 << 30, keys_max: int = 10_000_000) -> None:
        self._emit = emit
        self._bytes_max = bytes_max
        self._keys_max = keys_max
        self._names_size = 0
        self._values: dict[str, bytes] = {}
        self._children: dict[str, set[str]] = {}
        self._waiting: dict[str, list[int]] = {}
        self._key_of_call: dict[int, str] = {}
        self.bytes_count = 0
        self.on_answered: Callable[[int], None] = lambda call: None

    def __len__(self) -> int:
        return len(self._values)

    def restore(self, key: str, value: bytes) -> None:
        """Restore a key from the durable store, without effects."""
        self._store(key, value)

    def insert(self, call: int, key: str, value: bytes, overwrite: bool) -> None:
        """Set a key, and answer all calls that wait for it; ALREADY_EXISTS when it is set and `overwrite` is False."""
        key = normalized(key)
        problem = refused_key(key)
        if problem is None and not overwrite and key in self._values:
            problem = failure(Code.ALREADY_EXISTS, f"key {key} already exists.", marked=False)
        if problem is None:
            problem = self.refused_room(key, value)
        if problem is None:
            self.put(key, value)
        self._emit(Answer(call, problem))

    def refused_room(self, key: str, value: bytes) -> Failure | None:
        """The failure if there is no room for a normalised key, else None. A value that is not longer always fits."""
        old = self._values.get(key)
        more = len(value) - len(old) if old is not None else len(key) + len(value)
        used = self.bytes_count + self._names_size
        if old is None and len(self._values) >= self._keys_max:
            words = f"The service has {self._keys_max} keys, which is as many as it takes (keys_max)."
        elif more > 0 and used + more > self._bytes_max:
            words = (
                f"Key {key} has no room: keys and values have {used} bytes, and with {more} more they would have more "
                f"than {self._bytes_max} (keys_bytes_max)."
            )
        else:
            return None
        return failure(Code.RESOURCE_EXHAUSTED, words + " Delete keys, or start the service with more.", marked=False)

    def put(self, key: str, value: bytes) -> None:
        """Set a key that was normalised (the older runtime service's never are) and has room."""
        self._store(key, value)
        self._emit(Persist("key", key, value))
        waiting = self._waiting.pop(key, None)
        if waiting:
            for call in waiting:
                del self._key_of_call[call]
                self.on_answered(call)
                self._emit(Answer(call, value))

    def get(self, call: int, key: str) -> bool:
        """Answer with the value, or let the caller wait until the key is set; True when answered."""
        value = self._values.get(key)
        if value is not None:
            self._emit(Answer(call, value))
            return True
        self._waiting.setdefault(key, []).append(call)
        self._key_of_call[call] = key
        return False

    def try_get(self, call: int, key: str) -> None:
        """Answer with the value, or with NOT_FOUND, which names the key as the caller wrote it."""
        value = self._values.get(normalized(key))
        if value is None:
            self._emit(Answer(call, failure(Code.NOT_FOUND, f"Config key {key} not found.")))
        else:
            self._emit(Answer(call, value))

    def increment(self, call: int, key: str, amount: int) -> None:
        """Add to a decimal value and answer the new text; other text is FAILED_PRECONDITION."""
        key = normalized(key)
        problem = refused_key(key)
        if problem is not None:
            self._emit(Answer(call, problem))
            return
        text = self._values.get(key, b"0")
        number = _parsed(text)
        if number is None:
            shown = text[:_INTEGER_CHARS_MAX].decode("utf-8", "replace")
            message = f'Failed to parse value "{shown}" as an integer.'
            self._emit(Answer(call, failure(Code.FAILED_PRECONDITION, message)))
            return
        total = number + amount
        if not _INT64_MIN <= total <= _INT64_MAX:
            message = f"Incrementing key {key} from {number} by {amount} leaves the range of a 64-bit integer."
            self._emit(Answer(call, failure(Code.OUT_OF_RANGE, message)))
            return
        value = b"%d" % total
        problem = self.refused_room(key, value)
        if problem is not None:
            self._emit(Answer(call, problem))
            return
        self.put(key, value)
        self._emit(Answer(call, value))

    def list_below(self, call: int, directory: str) -> None:
        """Answer with the (key, value) pairs below a directory, ordered by key."""
        directory = normalized(directory)
        keys = sorted(self.below(directory)) if directory else []
        values = self._values
        self._emit(Answer(call, [(key, values[key]) for key in keys]))

    def delete(self, call: int, key: str) -> None:
        """Remove a key and everything below it; a missing one is no error."""
        key = normalized(key)
        doomed = list(self.below(key)) if key else []
        if key in self._values:
            doomed.append(key)
        for name in doomed:
            self.bytes_count -= len(self._values.pop(name))
            self._names_size -= len(name)
            self._emit(Persist("key", name, None))
        if key:
            self._children_dropped(key)
        self._emit(Answer(call, None))

    def clear(self) -> None:
        """Remove all keys; waiting callers keep waiting."""
        for key in self._values:
            self._emit(Persist("key", key, None))
        self._values.clear()
        self._children.clear()
        self.bytes_count = self._names_size = 0

    def forget(self, call: int) -> bool:
        """Drop a waiting caller; True when it waited for a key."""
        key = self._key_of_call.pop(call, None)
        if key is None:
            return False
        waiting = self._waiting[key]
        waiting.remove(call)
        if not waiting:
            del self._waiting[key]
        return True

    def waiting_key(self, call: int) -> str | None:
        """The key that a caller waits for, None when it waits for none."""
        return self._key_of_call.get(call)

    def waiting_calls(self) -> list[int]:
        """The callers that wait for a key."""
        return list(self._key_of_call)

    def below(self, directory: str) -> Iterator[str]:
        """The keys below a normalised directory, in no order; "" is the root, above all keys."""
        pending = [directory]
        while pending:
            path = pending.pop()
            for name in self._children.get(path, ()):
                child = f"{path}/{name}" if path else name
                if child in self._values:
                    yield child
                if child in self._children:
                    pending.append(child)

    def value(self, key: str) -> bytes:
        """The value of a key that exists."""
        return self._values[key]

    def find(self, key: str) -> bytes | None:
        """The value of a normalised key, None when it is not set."""
        return self._values.get(key)

    def all_keys(self) -> list[str]:
        """All keys, in no order."""
        return list(self._values)

    def check_invariants(self) -> None:
        """Raise AssertionError when the index and the values disagree. Costs a walk over all keys."""
        found = set(self.below(""))
        plain = {key for key in self._values if normalized(key) == key and key}
        assert found == plain, f"index and keys differ in {sorted(found ^ plain)[:3]}"
        assert all(self._children.values()), "an empty directory is still listed"
        assert self.bytes_count == sum(map(len, self._values.values())), "byte count is off"
        assert self._names_size == sum(map(len, self._values)), "count of the keys' own bytes is off"
        waited = sorted(call for calls in self._waiting.values() for call in calls)
        assert waited == sorted(self._key_of_call), "waiting callers and their keys differ"

    def _store(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        self._values[key] = value
        if old is not None:
            self.bytes_count += len(value) - len(old)
            return
        self.bytes_count += len(value)
        self._names_size += len(key)
        if key and normalized(key) == key:
            self._index(key)

    def _index(self, key: str) -> None:
        """Enter a key into its directory, and new directories into theirs."""
        while True:
            directory, _, name = key.rpartition("/")
            names = self._children.get(directory)
            if names is not None:
                names.add(name)
                return
            self._children[directory] = {name}
            if not directory:
                return
            key = directory

    def _children_dropped(self, key: str) -> None:
        """Remove a deleted path and everything below it from the index."""
        pending = [key]
        while pending:
            path = pending.pop()
            for name in self._children.pop(path, ()):
                child = f"{path}/{name}"
                if child in self._children:
                    pending.append(child)
        while key:
            directory, _, name = key.rpartition("/")
            names = self._children.get(directory)
            if names is None:
                return
            names.discard(name)
            if names:
                return
            del self._children[directory]
            if directory in self._values:
                return
            key = directory


def _parsed(text: bytes) -> int | None:
    """A 64-bit decimal integer, or None."""
    stripped = text.strip()
    digits = stripped[1:] if stripped[:1] in (b"-", b"+") else stripped
    if len(text) > _INTEGER_CHARS_MAX or not digits.isdigit():
        return None
    number = int(stripped)
    return number if _INT64_MIN <= number <= _INT64_MAX else None
