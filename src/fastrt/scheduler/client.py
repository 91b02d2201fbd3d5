"""The scheduler's client for fastrt's processes: each method of the seed's protocol as a blocking call."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from fastrt.errors import FastrtError
from fastrt.net.grpc.channel import bearer, open_channel
from fastrt.net.grpc.identity import Identity
from fastrt.scheduler.wire import CLASSES, REFS_MAX, SERVICE

_PROBE_S = 2.0


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
