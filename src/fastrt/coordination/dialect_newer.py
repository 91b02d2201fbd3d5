"""The common part of the two newer dialects: the same responses, with other names for a few fields.

Calls about keys name no member, so their part of the table is common too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.dialects import Build, Dialect, Parse, nothing, shown
from fastrt.coordination.events import MemberView
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Failure, Member


class NewerDialect(Dialect):
    """Builds the responses of `tensorflow.CoordinationService` and `xla.coordination.CoordinationService`.

    Args:
        service, write, error: arguments of `Dialect`.
        classes: the classes of each method's request and response.
        incarnation: the field of responses with the service's incarnation.
        put: writes a member into an entry of `task_state`.
    """

    def __init__(
        self,
        service: str,
        write: Callable[[Member], str],
        error: Callable[[Failure], bytes],
        classes: Mapping[str, Any],
        incarnation: str,
        put: Callable[[Any, Member], None],
    ) -> None:
        super().__init__(service, write, error)
        self._classes = classes
        self._incarnation = incarnation
        self._put = put

    def response(self, request: Any) -> Any:
        """An empty response to a request."""
        return self._classes[request.DESCRIPTOR.name.removesuffix("Request")][1]()

    def response_with_incarnation(self, request: Any, state: CoordinationState) -> Any:
        """A response that names the service's incarnation, and nothing else yet."""
        answer = self.response(request)
        setattr(answer, self._incarnation, state.settings.incarnation)
        return answer

    def incarnation(self, value: Any, request: Any, state: CoordinationState) -> bytes:
        """The response of a method that answers with the service's incarnation."""
        return bytes(self.response_with_incarnation(request, state).SerializeToString())

    def key_value(self, value: Any, request: Any, state: CoordinationState) -> bytes:
        """The response of a method that answers with the value of one key."""
        answer = self.response(request)
        answer.kv.key, answer.kv.value = request.key, value
        return bytes(answer.SerializeToString())

    def key_values(self, value: Any, request: Any, state: CoordinationState) -> bytes:
        """The response of a method that lists keys and their values."""
        answer = self.response(request)
        add = answer.kv.add
        for key, one in value:
            add(key=shown(key), value=one)
        return bytes(answer.SerializeToString())

    def counter(self, value: Any, request: Any, state: CoordinationState) -> bytes:
        """The response of a barrier: the number of the round that passed."""
        return bytes(self._classes["Barrier"][1](counter=value).SerializeToString())

    def states(self, value: Any, request: Any, state: CoordinationState) -> bytes:
        """The response of a method that answers with the states of members."""
        answer = self.response(request)
        self._describe(value, answer)
        return bytes(answer.SerializeToString())

    def watched(self, value: Any, request: Any, state: CoordinationState) -> bytes:
        """The response of a method that answers with the states of members and their version."""
        answer = self.response(request)
        answer.version_number, views = value
        self._describe(views, answer)
        return bytes(answer.SerializeToString())

    def _describe(self, views: list[MemberView], answer: Any) -> None:
        for view in views:
            info = answer.task_state.add()
            self._put(info, view.member)
            info.state, info.incarnation = view.state, view.incarnation
            if view.error is not None:
                info.error_code = int(view.error.code)
                info.error_message = self.message(view.error)
                payload = Failure(view.error.code, (), source=view.member)
                info.error_payload.ParseFromString(self.source_error(payload))

    def key_table(self) -> dict[str, tuple[Parse, Build]]:
        """The part of the dialect's table that is about keys."""
        return {
            "InsertKeyValue": (lambda r, c, s: ev.InsertKey(c, r.kv.key, r.kv.value, r.allow_overwrite), nothing),
            "GetKeyValue": (lambda r, c, s: ev.GetKey(c, r.key), self.key_value),
            "TryGetKeyValue": (lambda r, c, s: ev.TryGetKey(c, r.key), self.key_value),
            "IncrementKeyValue": (lambda r, c, s: ev.IncrementKey(c, r.key, r.increment), self.key_value),
            "GetKeyValueDir": (lambda r, c, s: ev.ListKeys(c, r.directory_key), self.key_values),
            "DeleteKeyValue": (lambda r, c, s: ev.DeleteKey(c, r.key), nothing),
        }


def version_seen(request: Any) -> int | None:
    """The version that the caller of a watching method has seen; any negative number says none."""
    return request.version_number if request.version_number >= 0 else None
