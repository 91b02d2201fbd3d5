"""Values that a front answers reads from, so that a read does not cross to the keeper and back.

The keeper tells the front every key that a batch of calls set, removed or read, together with the answers of that
batch, and the front takes these in before it lets any of the answers out. So when a writer hears that its value is
set, later reads see it here; and no read sees a value here that a caller could not have been told. A key that is
missing here may exist: the keeper knows. When the keeper dies everything here is forgotten, because what it had under
way may or may not be on disk.

Values are kept up to `bytes_max` in all; the oldest make room.
"""

from __future__ import annotations

from fastrt.coordination import events as ev
from fastrt.coordination.core import METHODS, READ_PATHS, Reply
from fastrt.coordination.dialects import parse_request
from fastrt.coordination.keyvalues import normalized
from fastrt.coordination.state import CoordinationState, Settings

VALUE_BYTES_MAX = 1 << 20
_BYTES_MAX = 64 << 20
# What a key costs beside its text and value, roughly: the objects and the table's entry.
_ENTRY_BYTES = 200


class Replica:
    """Some of the keys of a keeper, as of the last answer that went out.

    Args:
        settings: of the service, its incarnation above all, which requests must name.
        bytes_max: how much to keep.
    """

    def __init__(self, settings: Settings, bytes_max: int = _BYTES_MAX) -> None:
        # An empty state machine: dialects read requests with the settings in view, and nothing else of it.
        self._context = CoordinationState(settings)
        self._bytes_max = bytes_max
        self._values: dict[str, bytes] = {}
        self.bytes_count = 0

    def __len__(self) -> int:
        return len(self._values)

    def apply(self, key: str, value: bytes | None) -> None:
        """A key has this value now; None: it has none, or one that is too long to keep here."""
        old = self._values.pop(key, None)
        if old is not None:
            self.bytes_count -= len(key) + len(old) + _ENTRY_BYTES
        if value is None:
            return
        self._values[key] = value
        self.bytes_count += len(key) + len(value) + _ENTRY_BYTES
        while self.bytes_count > self._bytes_max:
            self.apply(next(iter(self._values)), None)

    def clear(self) -> None:
        """Forget everything."""
        self._values = {}
        self.bytes_count = 0

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
