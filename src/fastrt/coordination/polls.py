"""Error polling: each member has one call that waits, and is answered when any member fails.

All members get the first error, also those that poll later.

Invariants (`check_invariants`): a member has one poll; no poll waits once an error was reported.

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
        begun: whether any member has polled, so that errors can be reported this way.
        error: the error that all members get; None while there is none.
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
        """Add a member's poll; its earlier poll is cancelled."""
        self.drop(member, "new request from the same task")
        self._call_of[member] = call
        self._member_of[call] = member

    def drop(self, member: Member, reason: str) -> None:
        """Cancel a member's poll."""
        call = self._call_of.pop(member, None)
        if call is not None:
            del self._member_of[call]
            self._emit(Answer(call, failure(Code.CANCELLED, f"Cancelled error polling because: {reason}")))

    def report(self, error: Failure) -> None:
        """Answer all polls with an error, unless an earlier error was reported."""
        if self.error is not None:
            return
        self.error = error
        self._emit(Persist("state", "error", to_json(dump_failure(error))))
        self._answer_all(error)

    def forget(self, call: int) -> bool:
        """Drop the poll of a caller that disconnected; True when it polled."""
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
        """Cancel all polls because the service shuts down, which is not an error of a member."""
        words = "Coordination service is shutting down. Cancelling PollForErrorAsync()"
        self._answer_all(failure(Code.CANCELLED, words, marked=False))

    def restore(self, data: bytes) -> None:
        """Restore the error from the durable store."""
        self.error = load_failure(read_json(data, "the record of an error", own=True, bytes_max=STATE_BYTES_MAX))
        self.begun = True

    def check_invariants(self) -> None:
        """Raise AssertionError when the tables disagree."""
        assert self._member_of == {call: member for member, call in self._call_of.items()}
        assert not (self.error and self._call_of), "an error was reported, but callers still poll"

    def _answer_all(self, problem: Failure) -> None:
        calls = list(self._member_of)
        self._call_of.clear()
        self._member_of.clear()
        for call in calls:
            self._emit(Answer(call, problem))
