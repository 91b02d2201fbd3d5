"""Keys that a front reads and sets by itself, so that such a call does not cross to the keeper and back.

The keeper tells the front every key that a batch of calls set, removed or read, together with the answers of that
batch, and the front takes these in before it lets any of the answers out. So when a writer hears that its value is
set, later reads see it here; and no read sees a value here that a caller could not have been told. A key that is
missing here may exist: the keeper knows. When the keeper dies everything here is forgotten, because what it had under
way may or may not be on disk.

While all keys are here (`complete`), the front can also tell that a key is new, and set it: it writes that to a log of
its own, answers, and passes the write on. See `Front` for the order in which the keeper gets these and calls.

Values are kept up to `bytes_max` in all; the oldest make room.
"""

from __future__ import annotations

from fastrt.coordination import events as ev
from fastrt.coordination.dialects import parse_request
from fastrt.coordination.engine import INSERT_PATHS, METHODS, READ_PATHS, Reply
from fastrt.coordination.keyvalues import normalized, refused_key
from fastrt.coordination.state import CoordinationState, Settings

VALUE_BYTES_MAX = 1 << 20
BYTES_MAX = 64 << 20
# What a key costs beside its text and value, roughly: the objects and the table's entry.
ENTRY_BYTES = 200


class Replica:
    """Some of the keys of a keeper, as of the last answer that went out.

    Args:
        settings: of the service, its incarnation above all, which requests must name.
        bytes_max: how much to keep.

    Attributes:
        complete: a key that is not here does not exist.
    """

    def __init__(self, settings: Settings, bytes_max: int = BYTES_MAX) -> None:
        # An empty state machine: dialects read requests with the settings in view, and nothing else of it.
        self._context = CoordinationState(settings)
        self._room = settings.keys_bytes_max, settings.keys_max
        self._bytes_max = bytes_max
        self._values: dict[str, bytes] = {}
        self.bytes_count = 0
        self.complete = False

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, key: str, value: bytes | None) -> None:
        """A key has this value now; None: it has none."""
        old = self._values.pop(key, None)
        if old is not None:
            self.bytes_count -= len(key) + len(old) + ENTRY_BYTES
        if value is None:
            return
        self._values[key] = value
        self.bytes_count += len(key) + len(value) + ENTRY_BYTES
        while self.bytes_count > self._bytes_max:
            self.omit(next(iter(self._values)))

    def omit(self, key: str) -> None:
        """A key has a value that is not to be here."""
        self.apply(key, None)
        self.complete = False

    def read(self, call: int, path: str, body: bytes) -> Reply | None:
        """The answer to a call; None when it is the keeper's to give."""
        if path not in READ_PATHS or not self._values:
            return None
        method = METHODS[path]
        request, event = parse_request(method, body, call, self._context)
        if not isinstance(event, (ev.GetKey, ev.TryGetKey)):
            return None
        value = self._values.get(normalized(event.key))
        if value is None:
            return None
        return Reply(call, 0, "", b"", method.build(value, request, self._context))

    def insert(self, call: int, path: str, body: bytes) -> tuple[str, bytes, Reply] | None:
        """A call that sets a key, as key, value and answer, for the front to carry out; None: it is the keeper's."""
        if path not in INSERT_PATHS or not self.complete:
            return None
        method = METHODS[path]
        request, event = parse_request(method, body, call, self._context)
        if not isinstance(event, ev.InsertKey) or len(event.value) > VALUE_BYTES_MAX:
            return None
        key = normalized(event.key)
        if (key in self._values and not event.overwrite) or refused_key(key) is not None:
            return None  # the keeper knows the words
        size = len(key) + len(event.value)
        if self.bytes_count + size > self._room[0] or len(self._values) >= self._room[1]:
            return None  # it counts fewer bytes a key, so that it never refuses what was set here
        return key, event.value, Reply(call, 0, "", b"", method.build(None, request, self._context))
