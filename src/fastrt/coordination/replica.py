"""The replica: keys that a front reads and sets itself, which saves the round trip to the keeper.

The keeper reports every key that a batch of calls set, removed or read together with the answers of that batch, and the
front applies these before it passes on any of the answers. So once a writer has the answer that its value is set, later
reads see that value here; and no read sees a value here that was not answered before. A key that is missing here may
exist at the keeper. When the keeper dies the replica is dropped, because writes under way may or may not be on disk.

While all keys are here (`complete`), the front also knows that a key is new, and can set it: it writes the key to its
own log, answers, and passes the write on. `Front` describes the order in which the keeper gets writes and calls.

Values are kept up to `bytes_max` in total; the oldest are dropped first.
"""

from __future__ import annotations

from fastrt.coordination import events as ev
from fastrt.coordination.dialects import parse_request
from fastrt.coordination.engine import INSERT_PATHS, METHODS, READ_PATHS, Reply
from fastrt.coordination.keyvalues import normalized, refused_key
from fastrt.coordination.state import CoordinationState, Settings

VALUE_BYTES_MAX = 1 << 20
BYTES_MAX = 64 << 20
# The approximate cost of a key beside its text and value: the objects and the table's entry.
ENTRY_BYTES = 200


class Replica:
    """Some of the keys of a keeper, as of the last answer that went out.

    Args:
        settings: the service's settings, above all its incarnation, which requests must name.
        bytes_max: the most bytes to keep.

    Attributes:
        complete: all keys are here; a missing key does not exist.
    """

    def __init__(self, settings: Settings, bytes_max: int = BYTES_MAX) -> None:
        # An empty state machine: dialects need one to parse requests, and read only its settings.
        self._context = CoordinationState(settings)
        self._room = settings.keys_bytes_max, settings.keys_max
        self._bytes_max = bytes_max
        self._values: dict[str, bytes] = {}
        self.bytes_count = 0
        self.complete = False

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, key: str, value: bytes | None) -> None:
        """Set the value of a key; None removes it."""
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
        """Remove a key that exists but is not kept here."""
        self.apply(key, None)
        self.complete = False

    def read(self, call: int, path: str, body: bytes) -> Reply | None:
        """The answer to a read; None when the keeper must answer."""
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
        """Key, value and answer of a call that the front may carry out; None when the keeper must."""
        if path not in INSERT_PATHS or not self.complete:
            return None
        method = METHODS[path]
        request, event = parse_request(method, body, call, self._context)
        if not isinstance(event, ev.InsertKey) or len(event.value) > VALUE_BYTES_MAX:
            return None
        key = normalized(event.key)
        if (key in self._values and not event.overwrite) or refused_key(key) is not None:
            return None  # the keeper makes the error message
        size = len(key) + len(event.value)
        if self.bytes_count + size > self._room[0] or len(self._values) >= self._room[1]:
            return None  # the keeper counts fewer bytes a key, so it never rejects a key that was set here
        return key, event.value, Reply(call, 0, "", b"", method.build(None, request, self._context))
