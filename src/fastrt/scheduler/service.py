"""The scheduler in this process: serves the seed's `Scheduler` to any gRPC client, and calls workers and stores.

This is a thin shell around `SchedulerState`. Requests become events on the server's thread, facts from the peers'
connections on the threads of `Outgoing`; `_lock` serialises them. The state's effects go to `Outgoing`, which never
blocks. A process of fastrt that serves many ports attaches a link, and then exchanges batches with the scheduler. With
a state directory, every event is on disk before any of its effects leaves: answers and orders wait in `_effects` for
one write that serves all pending calls.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fastrt.durable import DiskFullError, Journal, StateDirectoryError
from fastrt.errors import ConfigError
from fastrt.net.address import check_bind, with_port
from fastrt.net.grpc.auth import TlsFiles, refused_token
from fastrt.net.grpc.contract import Metadata, Stream
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity
from fastrt.net.grpc.server import open_server
from fastrt.net.grpc.standard import CHECK_PATH, StandardServices
from fastrt.net.local_calls import LocalCall, LocalServer, Wire
from fastrt.scheduler import events as ev
from fastrt.scheduler.events import Answer, Code, Effect, Event, Failure, Refused
from fastrt.scheduler.holdings import Holdings
from fastrt.scheduler.locate import LOCATE, Locator
from fastrt.scheduler.locate import SERVICE as LOCATOR
from fastrt.scheduler.log import EventLog
from fastrt.scheduler.outgoing import Outgoing, OutgoingOptions
from fastrt.scheduler.state import SchedulerState, Settings
from fastrt.scheduler.wire import (
    ATTACH,
    CLASSES,
    EXCHANGE,
    LINK,
    LINK_SERVICE,
    MESSAGE_BYTES_MAX,
    METHODS,
    REFS_MAX,
    SERVICE,
    parse_request,
)

_log = logging.getLogger(__name__)

_OK = 0
_FULL_RETRY_S = 0.2
_LOOK_S, _LOOK_S_MAX = 0.1, 5.0  # the first and the longest time between two looks at the connections of lost peers
_OWN_CALL = 0  # the number of a request that the scheduler makes itself; no caller's call has it
_NO_EVENT = ev.SchedulerInfo(0)
_DECREMENT = f"/{SERVICE}/DecrementRefCount"
_REQUEST_BYTES = 4096  # the most that a request adds to the log beside twice its bytes
# Messages travel in HTTP/2 headers; clients accept 8 KiB of those.
_MESSAGE_CHARS_MAX = 3000


@dataclass
class SchedulerOptions:
    """The options of a scheduler.

    Attributes:
        address: `host:port`; port 0 takes any free one.
        token: the bearer token that every call must carry; None accepts any call, on loopback only. It is sent to
            workers and stores that TLS has authenticated, or with `insecure` to all.
        identity: a cluster's identity: callers and peers prove by TLS that they are part of it. Token, tls and
            credentials are not used then.
        settings: the limits of the state machine.
        tls: PEM files, None for plain text.
        credentials: for calls to workers and stores that use TLS.
        insecure: serve beyond loopback in plain text.
        accept_loss: continue with the readable part of a damaged `state_dir`; see `Journal`.
        local_socket: where processes of this user on this machine attach links without gRPC, in a private folder; None:
            nowhere.
        state_dir: directory that keeps references, counts, aliases, functions, workers, stores and calls over
            restarts; None keeps nothing.
        power: keep them over a loss of power too (an fsync per batch).
        lost_after_s: a worker or store that cannot be reached for this long is lost.
        call_timeout_s: time for a worker to accept a call.
        delivery_timeout_s: time for a store to deliver an object.
    """

    address: str = "127.0.0.1:0"
    token: str | None = field(default=None, repr=False)
    identity: Identity | None = None
    settings: Settings = field(default_factory=Settings)
    tls: TlsFiles | None = None
    credentials: grpc.ChannelCredentials | None = None
    insecure: bool = False
    state_dir: str | os.PathLike[str] | None = None
    accept_loss: bool = False
    power: bool = False
    local_socket: str | None = None
    lost_after_s: float = 10.0
    call_timeout_s: float = 30.0
    delivery_timeout_s: float = 600.0

    def check(self) -> None:
        """Reject invalid options, and those that would let anyone in.

        Raises:
            ConfigError: a number is out of range.
            InsecureBindError: the address is not loopback, and calls need no token or travel in the clear.
        """
        if min(self.lost_after_s, self.call_timeout_s, self.delivery_timeout_s) <= 0:
            raise ConfigError("lost_after_s, call_timeout_s and delivery_timeout_s must be more than 0.")
        if self.identity is None:
            clear = self.tls is None and not self.insecure
            check_bind(self.address, authenticated=self.token is not None, encrypted=not clear)


@dataclass
class _Batch:
    """A call of `Link.Exchange`.

    Attributes:
        finish: answers it: called with code, message and body.
        connection: over which it has come.
        reply: its reply.
        left: how many of its calls have no answer yet.
    """

    finish: Callable[[int, str, bytes], object]
    connection: Any
    reply: Any
    left: int


class Scheduler:
    """A scheduler inside this process.

    Args:
        options: see `SchedulerOptions`.
        on_request_failed: called when a requested object will not come; the seed's protocol has no message for
            that. It runs under the scheduler's lock: it must be quick, and must not call this object.

    Raises:
        ConfigError: an option is invalid.
        InsecureBindError: the address is reachable by other machines without protection.
        StateDirectoryError: the state directory cannot be used.
    """

    def __init__(
        self, options: SchedulerOptions, on_request_failed: Callable[[ev.RequestFailed], None] | None = None
    ) -> None:
        options.check()
        self.options = options
        self.address = ""
        journal = None
        if options.state_dir is not None:
            journal = Journal(options.state_dir, options.power, accept_loss=options.accept_loss)
        self._log = EventLog(journal, options.settings) if journal is not None else None
        self._state = SchedulerState(options.settings) if self._log is None else self._log.state
        self._lock = threading.Lock()
        self._on_request_failed = on_request_failed
        self._outgoing: Outgoing | None = None
        self._paths: dict[int, str] = {}
        self._holdings = Holdings()
        self._is_watching = False  # a look at the connections of lost peers is due
        self._look_s = _LOOK_S
        self._effects: list[
            tuple[Effect, Event, int]
        ] = []  # effects that wait for the write, with the numbers of orders
        self._broken: StateDirectoryError | None = None
        self._retry_at: float | None = None
        self._locator = Locator()
        self._batches: dict[int, tuple[_Batch, Any]] = {}  # where the answers to calls of a batch go
        self._next_part = 0  # numbers of calls of batches: below 0, where those of the server are above
        sets = [message_set(name) for name in ("ray", "scheduler", "transfer")]
        self._standard = StandardServices([SERVICE, LINK_SERVICE, LOCATOR], sets)
        authorize = self._authorize if options.token is not None and options.identity is None else None
        paths = [*METHODS, EXCHANGE, LOCATE, CHECK_PATH]
        streams = {ATTACH: self._on_attach, **self._standard.streams}
        self._server = open_server(self, paths, streams, MESSAGE_BYTES_MAX, authorize)
        self._local: LocalServer | None = None

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen and serve until `stop`.

        Raises:
            OSError: the address cannot be bound.
        """
        options = self.options
        served = options.identity or options.tls
        port = self._server.bind(options.address, served.server_credentials() if served else None)
        self.address = with_port(options.address, port)
        self._outgoing = Outgoing(
            OutgoingOptions(
                *self._shown(),
                options.lost_after_s,
                options.call_timeout_s,
                options.delivery_timeout_s,
            ),
            self.report,
            self._order_answered,
        )
        self._resume()
        self._server.start()
        if options.local_socket is not None:
            self._local = LocalServer(options.local_socket, [self._attach, self._on_local_exchange])
        _log.info("scheduler on %s", self.address)

    def _shown(self) -> tuple[str | None, grpc.ChannelCredentials | None, tuple[tuple[str, Any], ...]]:
        """Token, credentials and options for calls to workers and stores."""
        options = self.options
        if options.identity is not None:
            return None, options.identity.channel_credentials(), options.identity.channel_options()
        is_proved = options.credentials is not None or options.insecure
        return options.token if is_proved else None, options.credentials, ()

    def stop(self) -> None:
        """Stop serving. Workers and stores are not notified: a scheduler may start here again."""
        self._standard.set_serving(False)
        if self._outgoing is not None:
            self._outgoing.stop()  # first: a link that ends with the server must not have its calls repeated
        if self._local is not None:
            self._local.close()
        self._server.stop()
        with self._lock:
            if self._log is not None and self._broken is None:
                self._settle()
                self._log.close()
                self._broken = StateDirectoryError("The scheduler has stopped.")

    def report(self, event: Event) -> None:
        """Handle a fact without a waiting caller, such as `WorkerLost`. May be called from any thread."""
        with self._lock:
            self._handle(event, None)
            self._settle()
        assert self._outgoing is not None
        self._outgoing.flush()

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        with self._lock:
            self._state.check_invariants()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Turn a call into an event; without a log, answer at once."""
        if method == CHECK_PATH:
            code, message, answer = self._standard.check(body)
            self._server.finish(call, code, message, answer)
            return
        if method == EXCHANGE:
            self._exchange(partial(self._server.finish, call), self._server.peer(call), body, self._log is None)
            return
        if method == LOCATE:
            with self._lock:
                found = self._locator.ask(call, body, self._state)
                self._found([found] if found is not None else [])
                if self._log is None:
                    self._settle()
            return
        with self._lock:
            self._take(call, method, body)
            if self._log is None:
                self._settle()

    def _take(self, call: int, method: str, body: bytes) -> None:
        """Turn a request into an event, and handle it."""
        try:
            event = parse_request(method, body, call)
        except Refused as refused:
            self._refuse(call, refused.failure)
            return
        if self._log is not None and METHODS[method].changes and not self._has_room(self._log, len(body)):
            words = f"The disk under the scheduler's state directory {self.options.state_dir} is full. Free space."
            self._refuse(call, Failure(Code.RESOURCE_EXHAUSTED, words))
            return
        self._paths[call] = method
        self._handle(event, (method, body))

    def _on_local_exchange(self, call: LocalCall, body: bytes) -> None:
        self._exchange(call.finish, call.connection, body, True)
        assert self._outgoing is not None
        self._outgoing.flush()

    def _exchange(
        self, finish: Callable[[int, str, bytes], object], connection: Any, body: bytes, settles: bool
    ) -> None:
        """Take a batch of a link: the answers to orders, then calls, in order.

        Args:
            finish, connection: as in `_Batch`.
            body: the request.
            settles: whether the effects are carried out now; else `on_idle` does it.
        """
        outgoing = self._outgoing
        assert outgoing is not None
        try:
            request = LINK["Exchange"][0].FromString(body)
        except DecodeError as error:
            finish(int(Code.INVALID_ARGUMENT), f"{EXCHANGE}: {error}", b"")
            return
        if request.address:
            outgoing.extend(request.link, request.address)
        facts = outgoing.take_answers(request.link, request.answer)
        batch = _Batch(finish, connection, LINK["Exchange"][1](), len(request.call))
        with self._lock:
            for fact in facts:
                self._handle(fact, None)
            for each in request.call:
                self._next_part -= 1
                self._batches[self._next_part] = batch, batch.reply.answer.add()
                if each.path in METHODS:
                    self._take(self._next_part, each.path, each.body)
                else:
                    self._refuse(self._next_part, Failure(Code.UNIMPLEMENTED, f"There is no method {each.path} here."))
            if settles:
                self._settle()
        if not request.call:
            finish(_OK, "", b"")

    def _on_attach(self, stream: Stream) -> None:
        """Wait for the addresses of a link, the stream's only message."""

        def receive(body: bytes | None) -> None:
            if body is not None:
                stream.receiver = lambda body: None
                self._attach(stream, body)

        stream.receiver = receive

    def _attach(self, stream: Stream | LocalCall, body: bytes) -> None:
        """Send the calls to some addresses over a stream, as long as it lasts."""
        outgoing = self._outgoing
        assert outgoing is not None
        try:
            addresses = LINK["Attach"][0].FromString(body).address
        except DecodeError as error:
            stream.finish(int(Code.INVALID_ARGUMENT), f"{ATTACH}: {error}")
            return
        link = outgoing.attach(stream, addresses)
        stream.send(LINK["Attach"][1](link=link.name).SerializeToString())
        stream.on_closed = partial(outgoing.detach, link)

    def on_cancel(self, call: int) -> None:
        """Forget a call that waits for an object; others are carried out, whether their caller waits or not."""
        with self._lock:
            self._locator.cancel(call)

    def on_idle(self) -> float | None:
        """Write the batch and send its effects; returns when to try a full disk again."""
        with self._lock:
            self._settle()
            retry_at = self._retry_at
        assert self._outgoing is not None
        self._outgoing.flush()
        return retry_at

    def on_stop(self) -> None:
        """Do nothing: `stop` writes the last batch."""

    def _handle(self, event: Event, wire: tuple[str, bytes] | None) -> None:
        if self._broken is not None:
            if wire is not None:
                self._refuse(event.call, Failure(Code.UNAVAILABLE, str(self._broken)))  # type: ignore[union-attr]
            return
        effects = self._state.handle(event)
        log = self._log
        refused = bool(effects) and isinstance(effects[0], Answer) and isinstance(effects[0].value, Failure)
        if not refused:
            asked = event.call if isinstance(event, ev.Call) else 0
            connection = None
            if asked:
                connection = self._batches[asked][0].connection if asked < 0 else self._server.peer(asked)
            self._holdings.note(event, effects, connection, self._state.tasks)
            self._watch_leaving()
        if log is not None and not refused and (wire is None or METHODS[wire[0]].changes):
            log.keep(event, wire, effects)
        for effect in effects:
            number = 0
            if log is not None and isinstance(effect, ev.NotifyAlias | ev.DeallocateObject):
                number = log.order(effect)
            self._effects.append((effect, event, number))
        if not refused:
            self._found(self._locator.answers(event, self._state))

    def _found(self, answers: list[Answer]) -> None:
        """Answer calls that waited for an object, when what they say is on disk."""
        for answer in answers:
            self._paths[answer.call] = LOCATE
            self._effects.append((answer, _NO_EVENT, 0))

    def _watch_leaving(self) -> None:
        """Look again soon at the connections of peers that are lost, unless that is due already."""
        if self._holdings.is_waiting() and not self._is_watching and self._outgoing is not None:
            self._is_watching = True
            self._outgoing.after(self._look_s, self._return_counts)
            self._look_s = min(2 * self._look_s, _LOOK_S_MAX)

    def _return_counts(self) -> None:
        """Drop the counts that dead peers held."""
        with self._lock:
            self._is_watching = False
            for counts in self._holdings.dead(self._is_open):
                refs = self._state.objects.refs
                alive = {ref: min(count, refs.count(ref)) for ref, count in counts.items() if refs.is_alive(ref)}
                held = [ref for ref, count in alive.items() for _ in range(count)]
                _log.info("a peer that is gone gives back %d counts", len(held))
                for at in range(0, len(held), REFS_MAX):
                    batch = held[at : at + REFS_MAX]
                    body = CLASSES["DecrementRefCount"][0](objref=batch).SerializeToString()
                    self._paths[_OWN_CALL] = _DECREMENT
                    self._handle(ev.DecrementRefs(_OWN_CALL, batch), (_DECREMENT, body))
                    self._settle()
            if not self._holdings.is_waiting():
                self._look_s = _LOOK_S
            self._watch_leaving()

    def _is_open(self, connection: Any) -> bool:
        return not connection.has_ended if isinstance(connection, Wire) else self._server.is_open(connection)

    def _has_room(self, log: EventLog, body_bytes: int) -> bool:
        """Whether a request and the records of its effects can be kept."""
        return self._retry_at is None and log.has_room(2 * body_bytes + _REQUEST_BYTES)

    def _settle(self) -> None:
        """Write the events of the batch, then carry out their effects."""
        if self._log is not None and self._broken is None:
            if self._retry_at is not None and time.monotonic() < self._retry_at:
                return
            try:
                if self._log.write():
                    self._state = self._log.state
                self._retry_at = None
            except DiskFullError as error:
                # Answers and orders wait: no effect may leave that a crash would undo.
                if self._retry_at is None:
                    _log.critical("the scheduler waits for room: %s", error)
                self._retry_at = time.monotonic() + _FULL_RETRY_S
                return
            except StateDirectoryError as error:
                # The state in memory is now ahead of the disk, so no effect of it may leave.
                _log.critical("the scheduler cannot go on: %s", error)
                self._broken = error
                self._effects = [each for each in self._effects if isinstance(each[0], Answer)]
                for effect, _, _ in self._effects:
                    self._refuse(effect.call, Failure(Code.UNAVAILABLE, str(error)))  # type: ignore[union-attr]
                self._effects = []
        effects, self._effects = self._effects, []
        for effect, event, number in effects:
            self._carry_out(effect, event, number)

    def _resume(self) -> None:
        """Continue after a restart: connect to the known peers, and send the unconfirmed orders again."""
        assert self._outgoing is not None
        stores, workers = self._state.peers()
        for store, address in stores.items():
            self._outgoing.add_store(store, address)
        for worker, address in workers.items():
            self._outgoing.add_worker(worker, address)
        if self._log is not None:
            for number, order in list(self._log.orders.items()):
                self._carry_out(order, _NO_EVENT, number)
            for effect in self._state.unfinished():
                self._carry_out(effect, _NO_EVENT, 0)

    def _order_answered(self, number: int) -> None:
        if self._log is not None:
            with self._lock:
                self._log.answered(number)  # written with the next event; an order that is sent twice does no harm

    def _carry_out(self, effect: Effect, event: Event, number: int) -> None:
        outgoing = self._outgoing
        assert outgoing is not None, "the scheduler was not started"
        match effect:
            case Answer():
                self._add_peer(effect, event)
                self._answer(effect)
            case ev.InvokeCall():
                outgoing.invoke(effect)
            case ev.DeliverObj():
                outgoing.deliver(effect)
            case ev.NotifyAlias():
                outgoing.notify(number, effect)
            case ev.DeallocateObject():
                outgoing.deallocate(number, effect)
            case ev.ForgetWorker():
                outgoing.remove_worker(effect.worker)
            case ev.ForgetStore():
                outgoing.remove_store(effect.store)
            case ev.RequestFailed():
                _log.info("object %d will not come to worker %d: %s", effect.ref, effect.worker, effect.reason)
                if self._on_request_failed is not None:
                    self._on_request_failed(effect)

    def _add_peer(self, answer: Answer, event: Event) -> None:
        assert self._outgoing is not None
        if isinstance(event, ev.RegisterWorker) and not isinstance(answer.value, Failure):
            self._outgoing.add_worker(answer.value, event.address)
        elif isinstance(event, ev.RegisterObjStore):
            self._outgoing.add_store(answer.value, event.address)

    def _answer(self, answer: Answer) -> None:
        path = self._paths.pop(answer.call)
        if isinstance(answer.value, Failure):
            self._refuse(answer.call, answer.value)
        elif path == LOCATE:
            self._server.finish(answer.call, _OK, "", answer.value)
        else:
            self._finish(answer.call, _OK, "", METHODS[path].build(answer.value))

    def _refuse(self, call: int, failure: Failure) -> None:
        words = failure.message
        if len(words) > _MESSAGE_CHARS_MAX:
            words = words[:_MESSAGE_CHARS_MAX] + f"... ({len(words) - _MESSAGE_CHARS_MAX} characters more)"
        self._finish(call, int(failure.code), words)

    def _finish(self, call: int, code: int, message: str = "", body: bytes = b"") -> None:
        """Answer a call, or add its answer to its batch."""
        if call >= 0:
            self._server.finish(call, code, message, body)
            return
        batch, answer = self._batches.pop(call)
        answer.code, answer.message, answer.body = code, message, body
        batch.left -= 1
        if not batch.left:
            batch.finish(_OK, "", batch.reply.SerializeToString())

    def _authorize(self, method: str, metadata: Metadata) -> str | None:
        assert self.options.token is not None
        return None if method == CHECK_PATH else refused_token(metadata, self.options.token)
