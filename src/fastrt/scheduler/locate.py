"""Calls that wait for an object: the answer names its stores, or says why it will never come.

They change nothing, so the log does not keep them. After an event that may have resolved, lost or deallocated objects,
the calls concerned are looked at again: for `ObjReady` those of one class, for others all of them.

Source: protos/transfer/locate.proto.
"""

from __future__ import annotations

from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Answer, Code, Event, Failure
from fastrt.scheduler.state import SchedulerState

SERVICE = "fastrt.transfer.Locator"
LOCATE = f"/{SERVICE}/Locate"
_REQUEST, _REPLY = message_set("transfer").methods(SERVICE)["Locate"]
_HARMLESS = (ev.IncrementRefs, ev.RemoteCall, ev.PushObj, ev.InvokeTaken, ev.RequestObj, ev.SchedulerInfo)


class Locator:
    """The waiting calls of one scheduler. Not thread-safe: the shell's lock serialises its methods."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[int]] = {}  # calls, by reference
        self._alive = 0  # live references at the last look

    def ask(self, call: int, body: bytes, state: SchedulerState) -> Answer | None:
        """Take a call; returns its answer, None if it has to wait."""
        try:
            ref = int(_REQUEST.FromString(body).objref)
        except Exception:  # protobuf's DecodeError differs between its runtimes
            return Answer(call, Failure(Code.INVALID_ARGUMENT, f"These {len(body)} bytes are no LocateRequest."))
        found = _found(ref, state)
        if found is not None:
            return Answer(call, found)
        self._waiting.setdefault(ref, []).append(call)
        self._alive = state.objects.refs.alive
        return None

    def cancel(self, call: int) -> None:
        """Forget a call whose caller has gone."""
        for ref, calls in self._waiting.items():
            if call in calls:
                calls.remove(call)
                if not calls:
                    del self._waiting[ref]
                return

    def answers(self, event: Event, state: SchedulerState) -> list[Answer]:
        """The answers of the calls that an event has ended."""
        if not self._waiting:
            return []
        refs = state.objects.refs
        alive, self._alive = self._alive, refs.alive
        if isinstance(event, ev.ObjReady) and refs.is_alive(event.ref):
            concerned = refs.members(event.ref)
        elif isinstance(event, _HARMLESS) or (isinstance(event, ev.DecrementRefs) and self._alive == alive):
            return []
        else:
            concerned = list(self._waiting)
        ended = []
        for ref in concerned:
            found = _found(ref, state) if ref in self._waiting else None
            if found is not None:
                ended += [Answer(call, found) for call in self._waiting.pop(ref)]
        return ended


def _found(ref: int, state: SchedulerState) -> bytes | Failure | None:
    """The answer for a reference now, None while its object is expected."""
    objects = state.objects
    if not objects.refs.is_alive(ref):
        known = "is deallocated" if ref < len(objects.refs) else "is unknown"
        return Failure(Code.NOT_FOUND, f"Reference {ref} {known} (objref). Hold a count of it while you wait.")
    entry = objects.resolve(ref)
    if entry is not None:
        addresses = [state.stores[store] for store in objects.stores(entry)]
        data: bytes = _REPLY(objref=entry.ref, objstore_address=addresses).SerializeToString()
        return data
    why = objects.why_lost(ref)
    return Failure(Code.DATA_LOSS, f"Object {ref} is lost. {why}") if why is not None else None
