"""Callers that wait for bad news: one poll a member, answered when anybody fails.

The first error is the one that everybody is told, now and later; upstream calls this error polling.

Invariants (`check_invariants`): a member polls once; nobody polls any more once an error was told.

Source: `CoordinationService::ErrorPollingState` in XLA.
"""

from __future__ import annotations

from fastrt.coordination.events import Answer, Persist
from fastrt.coordination.keyvalues import Emit
from fastrt.coordination.status import Code, Failure, Member, dump_failure, failure, load_failure, to_json
from fastrt.foreign_text import STATE_BYTES_MAX, read_json


class Polls:
    """The error polling part of the coordination state machine.

    Args:
        emit: takes the effects.

    Attributes:
        begun: anybody has polled, so errors can be told this way.
        error: what all are told; None while there is none.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._call_of: dict[Member, int] = {}
        self._member_of: dict[int, Member] = {}
        self.begun = False
        self.error: Failure | None = None

    def __len__(self) -> int:
        return len(self._call_of)

    def add(self, member: Member, call: int) -> None:
        """A member polls; its earlier poll is cancelled."""
        self.drop(member, "new request from the same task")
        self._call_of[member] = call
        self._member_of[call] = member

    def drop(self, member: Member, reason: str) -> None:
        """A member polls no more."""
        call = self._call_of.pop(member, None)
        if call is not None:
            del self._member_of[call]
            self._emit(Answer(call, failure(Code.CANCELLED, f"Cancelled error polling because: {reason}")))

    def tell(self, error: Failure) -> None:
        """Answer everybody with an error, unless they were told an earlier one."""
        if self.error is not None:
            return
        self.error = error
        self._emit(Persist("state", "error", to_json(dump_failure(error))))
        self._answer_all(error)

    def forget(self, call: int) -> bool:
        """A caller went away; True when it polled."""
        member = self._member_of.pop(call, None)
        if member is None:
            return False
        del self._call_of[member]
        return True

    def clear(self) -> None:
        """Forget the error: a new run begins."""
        self.error = None
        self._emit(Persist("state", "error", None))

    def stop(self) -> None:
        """The service shuts down, which is no error of anybody's."""
        words = "Coordination service is shutting down. Cancelling PollForErrorAsync()"
        self._answer_all(failure(Code.CANCELLED, words, marked=False))

    def restore(self, data: bytes) -> None:
        """Take the error from the durable store."""
        self.error = load_failure(read_json(data, "the record of an error", own=True, bytes_max=STATE_BYTES_MAX))
        self.begun = True

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert self._member_of == {call: member for member, call in self._call_of.items()}
        assert not (self.error and self._call_of), "an error was told, but callers still poll"

    def _answer_all(self, problem: Failure) -> None:
        calls = list(self._member_of)
        self._call_of.clear()
        self._member_of.clear()
        for call in calls:
            self._emit(Answer(call, problem))
