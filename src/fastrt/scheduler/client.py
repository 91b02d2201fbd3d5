"""The scheduler's clients for fastrt's processes: one blocks for each call of the seed's protocol, one makes batches.

A link costs a node one batch where single calls would cost it the report of each result, the drop of the references and
the worker's readiness, and one stream where the scheduler would call each of its ports.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import grpc

from fastrt.errors import FastrtError
from fastrt.net.grpc.caller import Caller, open_caller
from fastrt.net.grpc.channel import bearer, open_channel
from fastrt.net.grpc.identity import Identity
from fastrt.net.local_calls import LocalCaller
from fastrt.scheduler.wire import ATTACH, CLASSES, EXCHANGE, LINK, REFS_MAX, SERVICE, LinkAnswer

_PROBE_S = 2.0
_TIMEOUT_S = 30.0
_OK = 0
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.value[0]
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
_BATCH_BYTES = 1 << 20
_ATTACH_S = 5.0
# An answer waits so long for a batch to travel with, unless as many others wait: no call depends on it soon. The
# scheduler limits the deliveries of a store that it has no answer for, so the number stays below that limit.
_LAZY_S, _LAZY_MAX = 0.02, 8


class SchedulerError(FastrtError):
    """The scheduler rejected a call, or could not be reached. A rejected call has changed nothing.

    Args:
        message: the scheduler's message.
        code: the gRPC status code's name, as `NOT_FOUND`.
    """

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


class SchedulerClient:
    """A connection to a scheduler. Its methods may be called from any thread, and raise `SchedulerError`.

    Args:
        address: `host:port`.
        token: the scheduler's bearer token, sent with each call; None for a scheduler without one.
        credentials: for a scheduler that uses TLS.
        timeout_s: of each call.
        identity: of a scheduler that serves under a cluster's identity; instead of token and credentials.
    """

    def __init__(
        self,
        address: str,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = 30.0,
        identity: Identity | None = None,
    ) -> None:
        self._address, self._identity = address, identity
        if identity is not None:
            self._channel = open_channel(address, identity.channel_credentials(), identity.channel_options())
        else:
            self._channel = open_channel(address, credentials)
        self._metadata = bearer(token) if token is not None else None
        self._timeout_s = timeout_s
        self._methods = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}", lambda request: request.SerializeToString(), reply.FromString
            )
            for name, (_, reply) in CLASSES.items()
        }

    def __enter__(self) -> SchedulerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def call(self, method: str, **fields: Any) -> Any:
        """Call a method by its name; returns the reply's message.

        Args:
            method: its name in protos/ray/scheduler.proto.
            fields: of the request.
        Raises:
            SchedulerError: the scheduler rejected the call, or cannot be reached in time.
        """
        request = CLASSES[method][0](**fields)
        try:
            return self._methods[method](request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            why = None
            if self._identity is not None and error.code() is grpc.StatusCode.UNAVAILABLE:
                why = self._identity.why_refused(self._address, _PROBE_S)  # gRPC does not report certificate errors
            raise SchedulerError(f"{method}: {why or error.details()}", error.code().name) from None

    def register_store(self, address: str) -> int:
        """Register an object store that serves at an address; returns its number."""
        return int(self.call("RegisterObjStore", objstore_address=address).objstoreid)

    def register_worker(self, address: str, store_address: str) -> int:
        """Register a worker that serves at an address and uses a registered store; returns its number."""
        reply = self.call("RegisterWorker", worker_address=address, objstore_address=store_address)
        return int(reply.workerid)

    def register_function(self, worker: int, name: str, result_count: int = 1) -> None:
        """Register a function that a worker can run."""
        self.call("RegisterFunction", workerid=worker, fnname=name, num_return_vals=result_count)

    def remote_call(self, call: Any) -> Sequence[int]:
        """Submit a `Call` message; returns the references of its results, each counted for the caller.

        The caller counts each reference in the arguments for the message; the worker drops these.
        """
        return tuple(self.call("RemoteCall", call=call).result)

    def increment(self, refs: Iterable[int]) -> None:
        """Count references once more each; a batch larger than a message is sent in parts, in order."""
        self._change("IncrementRefCount", refs)

    def decrement(self, refs: Iterable[int]) -> None:
        """Count references once less each; large batches are split as in `increment`."""
        self._change("DecrementRefCount", refs)

    def push(self, worker: int) -> int:
        """Make a reference, counted once, for an object that this worker will put into its store."""
        return int(self.call("PushObj", workerid=worker).objref)

    def request(self, worker: int, ref: int) -> None:
        """Request an object in a worker's store, now or once it exists."""
        self.call("RequestObj", workerid=worker, objref=ref)

    def alias(self, alias: int, target: int) -> None:
        """Make a reference an alias of another one."""
        self.call("AliasObjRefs", alias_objref=alias, target_objref=target)

    def ready(self, ref: int, store: int) -> None:
        """Report that a store has a complete object."""
        self.call("ObjReady", objref=ref, objstoreid=store)

    def contain(self, ref: int, contained: Iterable[int]) -> None:
        """Report the references that an object contains; each was counted for it before."""
        self.call("AddContainedObjRefs", objref=ref, contained_objref=contained)

    def worker_ready(self, worker: int) -> None:
        """Report that a worker has ended its call."""
        self.call("WorkerReady", workerid=worker)

    def info(self) -> Any:
        """The `SchedulerInfoReply`."""
        return self.call("SchedulerInfo")

    def _change(self, method: str, refs: Iterable[int]) -> None:
        batch = array("Q", refs)
        for at in range(0, len(batch), REFS_MAX):
            self.call(method, objref=batch[at : at + REFS_MAX])


class _Request(NamedTuple):
    """A call that waits for its batch."""

    path: str
    body: bytes
    done: Callable[[SchedulerError | None], None] | None


class SchedulerLink:
    """A link to a scheduler: calls in batches that do not wait, and the scheduler's calls to ports of this process.

    A batch goes when the one before it was answered; calls made meanwhile go together in the next one. At a
    scheduler that is not fastrt's the calls are made one after the other, and `attach` has no effect.

    Args:
        address: `host:port`.
        on_orders: called with the name of the stream and the scheduler's calls, each with `number`, `address`, `path`
            and `body`, on this object's thread; it must not block.
        token, credentials, identity: as for `SchedulerClient`.
        local_socket: of a scheduler on this machine that serves there; the others are not used then.
    """

    def __init__(
        self,
        address: str,
        on_orders: Callable[[int, Sequence[Any]], None],
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        identity: Identity | None = None,
        local_socket: str | None = None,
    ) -> None:
        options: Sequence[tuple[str, Any]] = ()
        if identity is not None:
            credentials, options, token = identity.channel_credentials(), identity.channel_options(), None
        if local_socket is not None:
            self._caller: Caller = LocalCaller(local_socket, [ATTACH, EXCHANGE])
        else:
            self._caller = open_caller(address, credentials, options, bearer(token) if token is not None else ())
        self._on_orders = on_orders
        self._lock = threading.Lock()
        self._requests: list[_Request] = []
        self._answers: list[Any] = []
        self._sending = False
        self._link = 0  # the scheduler's name of the stream
        self._attached = False
        self._addresses: frozenset[str] = frozenset()  # that the stream was asked to serve
        self._no_batches = False  # the scheduler does not know them
        self._closed = False
        self._answered = threading.Event()  # `attach` was, one way or the other
        self._lazy = threading.Event()  # answers wait
        self._thread = threading.Thread(target=self._send_late, name="fastrt-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection; calls under way fail."""
        self._closed = True
        self._lazy.set()
        self._thread.join()
        self._caller.close()

    def attach(self, addresses: Sequence[str]) -> bool:
        """Get the scheduler's calls to these addresses from now on; does nothing while that is so.

        Returns once the scheduler has answered, or after a few seconds: then its calls go to the ports for a while.
        More addresses than before are added to the stream that there is, without a wait.

        Returns:
            Whether the stream is a new one: the scheduler may be another one than before.
        """
        with self._lock:
            if self._no_batches:
                return False
            more = sorted(frozenset(addresses) - self._addresses)
            self._addresses |= frozenset(addresses)
            if self._attached and more:
                batch = LINK["Exchange"][0](link=self._link, address=more)
            was_attached, self._attached = self._attached, True
        if was_attached:
            if more:
                self._caller.call(EXCHANGE, batch.SerializeToString(), _TIMEOUT_S, lambda code, message, body: None)
            return False
        self._answered.clear()
        body = LINK["Attach"][0](address=addresses).SerializeToString()
        self._caller.stream(ATTACH, body, self._receive, self._ended)
        self._answered.wait(_ATTACH_S)
        return True

    def call(self, method: str, done: Callable[[SchedulerError | None], None] | None = None, **fields: Any) -> None:
        """Make a call after those before; `send` sends it.

        Args:
            method: its name in protos/ray/scheduler.proto, of those that return nothing.
            done: called with None, or why the scheduler rejected the call or was not reached.
            fields: of the request.
        """
        body = CLASSES[method][0](**fields).SerializeToString()
        with self._lock:
            self._requests.append(_Request(f"/{SERVICE}/{method}", body, done))

    def answer(self, stream: int, number: int, code: int = _OK, message: str = "", body: bytes = b"") -> None:
        """Answer a call of the scheduler, with the next batch or 20 ms later."""
        answer = LinkAnswer(number=number, code=code, message=message, body=body)
        with self._lock:
            if stream != self._link:
                return  # it has ended, and the scheduler makes the call again
            self._answers.append(answer)
            many = len(self._answers) >= _LAZY_MAX
        if many:
            self.send()
        elif not self._lazy.is_set():
            self._lazy.set()

    def send(self) -> None:
        """Send the calls and answers so far, unless a batch is under way: then they go with the next one."""
        with self._lock:
            if self._sending or not (self._requests or self._answers):
                return
            self._sending = True
            requests = self._take()
            batch = LINK["Exchange"][0](link=self._link, answer=self._answers)
            self._answers = []
            self._lazy.clear()
        if self._no_batches:
            self._one_by_one(requests)
            return
        for request in requests:
            batch.call.add(path=request.path, body=request.body)

        def done(code: int, message: str, body: bytes) -> None:
            if code == _UNIMPLEMENTED:
                self._no_batches = True
                self._one_by_one(requests)
            else:
                self._exchanged(requests, code, message, body)

        self._caller.call(EXCHANGE, batch.SerializeToString(), _TIMEOUT_S, done)

    def _take(self) -> list[_Request]:
        """Remove the requests of the next batch from those that wait. `_lock` is held."""
        size = count = 0
        for request in self._requests:
            count += 1
            size += len(request.body)
            if size >= _BATCH_BYTES:
                break
        taken, self._requests = self._requests[:count], self._requests[count:]
        return taken

    def _exchanged(self, requests: list[_Request], code: int, message: str, body: bytes) -> None:
        with self._lock:
            self._sending = False
        self.send()
        if code != _OK:
            for request in requests:
                _finish(request, code, message)
            return
        for request, answer in zip(requests, LINK["Exchange"][1].FromString(body).answer, strict=True):
            _finish(request, answer.code, answer.message)

    def _one_by_one(self, requests: list[_Request]) -> None:
        if not requests:
            with self._lock:
                self._sending = False
                self._answers = []
            return
        first, *rest = requests

        def done(code: int, message: str, body: bytes) -> None:
            _finish(first, code, message)
            if rest:
                self._one_by_one(rest)
            else:
                self._exchanged([], _OK, "", b"")

        self._caller.call(first.path, first.body, _TIMEOUT_S, done)

    def _receive(self, body: bytes) -> None:
        orders = LINK["Attach"][1].FromString(body)
        self._link = orders.link
        self._answered.set()
        if orders.order:
            self._on_orders(orders.link, orders.order)

    def _ended(self, code: int, message: str) -> None:
        with self._lock:
            self._attached = False
            self._link = 0
            self._answers = []  # the scheduler makes those calls again
            if code == _UNIMPLEMENTED:
                self._no_batches = True
        self._answered.set()

    def _send_late(self) -> None:
        """Send answers for which no batch has come."""
        while True:
            self._lazy.wait()
            time.sleep(_LAZY_S)
            if self._closed:
                return
            self._lazy.clear()
            self.send()


def _finish(request: _Request, code: int, message: str) -> None:
    if request.done is not None:
        method = request.path.rpartition("/")[2]
        request.done(None if code == _OK else SchedulerError(f"{method}: {message}", _NAMES.get(code, str(code))))
