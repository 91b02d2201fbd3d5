"""The older runtime service's session: nodes connect together, exchange devices, and shut down together.

It differs from the newer service in two ways. There is one session, from the moment the last node connects until all
nodes have shut down or one stops sending heartbeats. And each waiting call has its own timeout. `SESSION` lists the
moves.

Source: `DistributedRuntimeServiceImpl` in XLA, as jaxlib 0.4.13 ships it; protocol version 1 is the seed's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastrt.coordination import events as ev
from fastrt.coordination.events import Answer, Persist
from fastrt.coordination.keyvalues import Emit, KeyValues, refused_key
from fastrt.coordination.status import Code, Failure, dump_failure, failure, load_failure, to_json
from fastrt.foreign_text import STATE_BYTES_MAX, read_object
from fastrt.transitions import Transitions

if TYPE_CHECKING:
    from fastrt.coordination.state import Settings

INITIALIZING, RUNNING, CLOSED = "initializing", "running", "closed"
SESSION = Transitions(
    "session",
    {
        INITIALIZING: {"connected": RUNNING, "close": CLOSED},  # closed before it ran: the service stops
        RUNNING: {"close": CLOSED},  # all nodes shut down, a shutdown timed out, a node is silent, or a stop
        CLOSED: {"new_run": INITIALIZING},
    },
)
VERSIONS = (1, 3)


@dataclass
class Node:
    """One node. `calls` wait in Connect."""

    client: int | None = None
    version: int = VERSIONS[-1]
    last_heard: float = 0.0
    calls: dict[int, float] = field(default_factory=dict)
    topology: bytes | None = None


@dataclass
class _Meeting:
    """Nodes that wait for each other: an id's barrier, the enumeration of devices, or the shutdown."""

    name: str
    arrived: set[int] = field(default_factory=set)
    calls: dict[int, float] = field(default_factory=dict)
    expired: bool = False


class Nodes:
    """The older service's part of the coordination state machine.

    Args:
        keys: the key-values, shared with the newer dialects; keys are not normalised here.
        settings: timeouts, the number of nodes (the members of the first role), and the incarnation from which the
            session's id is made.
        emit: takes the effects.
    """

    def __init__(self, keys: KeyValues, settings: Settings, emit: Emit) -> None:
        self._keys = keys
        self._settings = settings
        self._emit = emit
        count = next(iter(settings.roles.values()))
        self.nodes = [Node() for _ in range(count)]
        self.state = INITIALIZING
        self.moves = 0
        self.problem: Failure | None = None
        self.session = settings.incarnation
        self._meetings: dict[str, _Meeting] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._place: dict[int, tuple[str, object, float]] = {}
        self._check_at: float | None = None

    def handlers(self) -> Mapping[type, Callable[[Any, float], None]]:
        """The handlers of this part, by event."""
        return {
            ev.NodeConnect: self._on_connect,
            ev.NodeEnumerate: self._on_enumerate,
            ev.NodeHeartbeat: self._on_heartbeat,
            ev.NodeShutdown: self._on_shutdown,
            ev.NodeGetKey: self._on_get_key,
            ev.NodeSetKey: self._on_set_key,
            ev.NodeBarrier: self._on_barrier,
        }

    def next_deadline(self) -> float | None:
        """When the next call times out, or the next node may have missed its heartbeats."""
        heap = self._deadlines
        while heap and heap[0][1] not in self._place:
            heapq.heappop(heap)
        if heap and (self._check_at is None or heap[0][0] < self._check_at):
            return heap[0][0]
        return self._check_at

    def waiting_count(self) -> int:
        """How many calls wait."""
        return len(self._place)

    def key_arrived(self, call: int) -> None:
        """Note that the key was set that a caller of `NodeGetKey` waited for."""
        self._place.pop(call, None)

    def forget(self, call: int) -> bool:
        """Drop a caller that disconnected. Its node stays connected, and counts as arrived."""
        place = self._place.pop(call, None)
        if place is None:
            return False
        kind, where, _ = place
        if kind == "key":
            self._keys.forget(call)
        elif isinstance(where, (Node, _Meeting)):
            where.calls.pop(call, None)
        return True

    def expire(self, now: float) -> None:
        """Answer the calls that have timed out, and close the session when a node is silent."""
        if self._check_at is not None and now >= self._check_at:
            self._check_heartbeats(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            call = heapq.heappop(self._deadlines)[1]
            if call in self._place:
                self._timed_out(call)

    def stop(self) -> None:
        """Answer all waiting calls, because the service shuts down."""
        self._close(failure(Code.FAILED_PRECONDITION, "Service shutting down.", marked=False))
        for call in list(self._place):
            self.forget(call)
            self._emit(Answer(call, self.problem))

    def restore(self, key: str, data: bytes, now: float) -> None:
        """Restore a record from the durable store."""
        kind, _, name = key.partition("/")
        if kind == "session":
            saved = read_object(data, "the record of a session", own=True, bytes_max=STATE_BYTES_MAX)
            self.state, self.problem = saved["phase"], load_failure(saved["problem"])
            for node, (client, version) in zip(self.nodes, saved["nodes"], strict=False):
                node.client, node.version, node.last_heard = client, version, now
            self._check_at = now + self._settings.heartbeat_timeout_s if self.state == RUNNING else None
        elif kind == "topology" and int(name) < len(self.nodes):
            self.nodes[int(name)].topology = data
        elif kind == "meeting":
            saved = read_object(data, "the record of a session", own=True, bytes_max=STATE_BYTES_MAX)
            self._meetings[name] = _Meeting(name, set(saved["arrived"]), expired=saved["expired"])

    def _on_connect(self, event: ev.NodeConnect, now: float) -> None:
        if event.version not in VERSIONS:
            words = f"Invalid protocol version {event.version}; this service speaks versions 1 and 3."
            self._refuse(event.call, Code.INVALID_ARGUMENT, words)
            return
        if self.state == CLOSED and self._settings.clear_after_shutdown:
            self._reset()
        if self.state != INITIALIZING:
            self._refuse(event.call, Code.ABORTED, "Connect() called when system is not initializing.")
            return
        if self._is_bad_node(event.call, event.node):
            return
        node = self.nodes[event.node]
        if node.client is not None and node.client != event.client:
            # A task that restarted, or a second one with the same id: the newest wins.
            for call in list(node.calls):
                self.forget(call)
                self._refuse(call, Code.ABORTED, f"Duplicate node ID {event.node}")
        node.client, node.version = event.client, event.version
        self._wait(event.call, "connect", node, event.timeout_s, now)
        node.calls[event.call] = event.timeout_s
        if all(other.client is not None for other in self.nodes):
            self._begin(now)

    def _on_enumerate(self, event: ev.NodeEnumerate, now: float) -> None:
        if self._is_refused(event.call, event.session, "EnumerateDevices() called when system is not running."):
            return
        if self._is_bad_node(event.call, event.node):
            return
        self.nodes[event.node].topology = event.topology
        self._emit(Persist("node", f"topology/{event.node}", event.topology))
        self._meet(event.call, "devices", event.node, self._settings.register_timeout_s, now)

    def _on_heartbeat(self, event: ev.NodeHeartbeat, now: float) -> None:
        if self._is_refused(event.call, event.session, "Heartbeat() called when system is not running."):
            return
        if not self._is_bad_node(event.call, event.node):
            self.nodes[event.node].last_heard = now
            self._emit(Answer(event.call, None))

    def _on_shutdown(self, event: ev.NodeShutdown, now: float) -> None:
        if self._is_refused(event.call, event.session, "Shutdown() called when system is not running."):
            return
        if not self._is_bad_node(event.call, event.node):
            # jaxlib 0.4.13 names no node here (all say 0), so the calls are counted, as upstream does.
            self._meet(event.call, "shutdown", event.call, self._settings.shutdown_timeout_s, now)

    def _on_get_key(self, event: ev.NodeGetKey, now: float) -> None:
        if self._is_refused(event.call, event.session, "KeyValueGet() called when system is not running."):
            return
        if not self._keys.get(event.call, event.key):
            self._wait(event.call, "key", event.key, event.timeout_s, now)

    def _on_set_key(self, event: ev.NodeSetKey, now: float) -> None:
        words = "KeyValueSet() called when system is not running; clients must call Connect() first"
        if not self._is_refused(event.call, event.session, words):
            problem = refused_key(event.key) or self._keys.refused_room(event.key, event.value)
            if problem is None:
                self._keys.put(event.key, event.value)
            self._emit(Answer(event.call, problem))

    def _on_barrier(self, event: ev.NodeBarrier, now: float) -> None:
        if self._is_refused(event.call, event.session, "WaitAtBarrier() called when system is not running."):
            return
        if self._is_bad_node(event.call, event.node):
            return
        name = "barrier/" + event.barrier_id.decode("latin-1")
        meeting = self._meetings.get(name)
        if meeting is not None and len(meeting.arrived) == len(self.nodes):
            words = "Calling WaitAtBarrier with the same id across barriers is not allowed. Please use unique"
            self._refuse(event.call, Code.FAILED_PRECONDITION, words + " barrier ids across barriers.")
        elif meeting is not None and meeting.expired:
            words = "A process timed out waiting at the barrier. Exiting early because the current process will also"
            self._refuse(event.call, Code.FAILED_PRECONDITION, words + " timeout.")
        else:
            self._meet(event.call, name, event.node, event.timeout_s, now)

    def _begin(self, now: float) -> None:
        """Start the session: the last node has connected."""
        SESSION.move(self, "connected", self.session)
        self._check_at = now + self._settings.heartbeat_timeout_s
        self._keep()
        for node in self.nodes:
            node.last_heard = now
            for call in list(node.calls):
                self.forget(call)
                self._emit(Answer(call, self.session))

    def _reset(self) -> None:
        """Reset the service after a run, so that the next run finds it empty."""
        for name, meeting in self._meetings.items():
            for call in list(meeting.calls):
                self.forget(call)
                self._refuse(call, Code.ABORTED, "Another run has begun.")
            self._emit(Persist("node", f"meeting/{name}", None))
        for index in range(len(self.nodes)):
            self._emit(Persist("node", f"topology/{index}", None))
        self._meetings.clear()
        self._keys.clear()
        self.nodes = [Node() for _ in self.nodes]
        SESSION.move(self, "new_run", self.session)
        self.problem = None
        self._keep()

    def _meet(self, call: int, name: str, who: int, timeout_s: float, now: float) -> None:
        """Let a node wait for all others; the last one releases all."""
        meeting = self._meetings.setdefault(name, _Meeting(name))
        meeting.arrived.add(who)
        meeting.calls[call] = timeout_s
        self._wait(call, "meeting", meeting, timeout_s, now)
        if len(meeting.arrived) < len(self.nodes):
            return
        self._keep_meeting(meeting)
        if name == "shutdown":
            self._close(None)
        answer = [(node.version, node.topology or b"") for node in self.nodes] if name == "devices" else None
        for waiting in list(meeting.calls):
            self.forget(waiting)
            self._emit(Answer(waiting, answer))

    def _timed_out(self, call: int) -> None:
        kind, where, timeout_s = self._place[call]
        self.forget(call)
        if kind == "key":
            self._refuse(call, Code.NOT_FOUND, str(where))
            return
        after = f"Timed out after {_duration(timeout_s)} waiting for all nodes to "
        if isinstance(where, Node):
            if not where.calls:
                where.client = None
            self._refuse(call, Code.DEADLINE_EXCEEDED, after + "call Connect()")
        elif isinstance(where, _Meeting):
            where.expired = True
            self._keep_meeting(where)
            call_name = {"devices": "call EnumerateDevices()", "shutdown": "call Shutdown()"}
            self._refuse(call, Code.DEADLINE_EXCEEDED, after + call_name.get(where.name, "be at WaitAtBarrier()"))
            if where.name == "shutdown":
                self._close(None)

    def _check_heartbeats(self, now: float) -> None:
        silent_s = self._settings.heartbeat_timeout_s
        for index, node in enumerate(self.nodes):
            if node.last_heard <= now - silent_s:
                words = f"Shutting down due to missed heartbeat from task {index}"
                self._close(failure(Code.ABORTED, words, marked=False))
                return
        self._check_at = min(node.last_heard for node in self.nodes) + silent_s

    def _close(self, problem: Failure | None) -> None:
        """End the session; with a problem, all calls that wait for other nodes get it as their answer."""
        if self.state == CLOSED:
            return
        SESSION.move(self, "close", self.session)
        self.problem, self._check_at = problem, None
        self._keep()
        if problem is None:
            return
        for meeting in self._meetings.values():
            for call in list(meeting.calls):
                self.forget(call)
                self._emit(Answer(call, problem))

    def _is_refused(self, call: int, session: int, not_running: str) -> bool:
        """Answer a call of another session, or outside the running phase; True when that was so."""
        if session != self.session:
            words = f"Session ID of request {session} does not match active session ID {self.session}"
            self._refuse(call, Code.FAILED_PRECONDITION, words)
            return True
        if self.state == RUNNING:
            return False
        if self.problem is not None:
            self._emit(Answer(call, self.problem))
        else:
            self._refuse(call, Code.FAILED_PRECONDITION, not_running)
        return True

    def _is_bad_node(self, call: int, node: int) -> bool:
        """Answer a call with a node id out of range; True when that was so."""
        if node < 0:
            self._refuse(call, Code.INVALID_ARGUMENT, f"Invalid node ID {node}, must be non-negative")
            return True
        if node >= len(self.nodes):
            words = f"Invalid node ID {node}, must be in the range [0, {len(self.nodes)})"
            self._refuse(call, Code.FAILED_PRECONDITION, words)
            return True
        return False

    def _refuse(self, call: int, code: Code, words: str) -> None:
        self._emit(Answer(call, failure(code, words, marked=False)))

    def _wait(self, call: int, kind: str, where: object, timeout_s: float, now: float) -> None:
        self._place[call] = (kind, where, timeout_s)
        heapq.heappush(self._deadlines, (now + timeout_s, call))
        if len(self._deadlines) > 2 * len(self._place) + 64:
            # Calls answered before their time leave entries behind: keep the heap in proportion.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._place]
            heapq.heapify(self._deadlines)

    def _keep(self) -> None:
        saved = {
            "phase": self.state,
            "problem": dump_failure(self.problem),
            "nodes": [(node.client, node.version) for node in self.nodes],
        }
        self._emit(Persist("node", "session", to_json(saved)))

    def _keep_meeting(self, meeting: _Meeting) -> None:
        saved = {"arrived": sorted(meeting.arrived), "expired": meeting.expired}
        self._emit(Persist("node", f"meeting/{meeting.name}", to_json(saved)))


def _duration(seconds: float) -> str:
    """A time span as the originals write it: 2s, 1.5s, 100ms."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = (f"{hours:g}h" if hours else "") + (f"{minutes:g}m" if minutes else "")
    return text + (f"{rest:g}s" if rest or not text else "")
