"""Calls of the coordination service for asyncio, used by all clients of fastrt.

After a restart of the coordinator, blocked and failed calls are repeated, except those that must not happen twice. The
texts of the clients' errors are made here, too.

Source: the wire is `tensorflow.CoordinationService`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from fastrt.coordination.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    CoordinatorLostError,
    KeyExistsError,
    KeyMissingError,
)
from fastrt.net.grpc.channel import open_aio_channel
from fastrt.net.grpc.descriptors import message_set

_SERVICE = "tensorflow.CoordinationService"
_SET = message_set("coordination_tensorflow")
_METHODS = _SET.methods(_SERVICE)
_ErrorPayload = _SET.message("tensorflow.CoordinationServiceError")
_Payloads = message_set("coordination").message("fastrt.coordination.StatusPayloads")
_ERROR_URL = "type.googleapis.com/tensorflow.CoordinationServiceError"
RETRY_S = 0.2
# Longer timeouts, infinite ones too, count as none: neither gRPC's clock nor the wire's milliseconds can hold them.
LONG_S = 1e9


class Connection:
    """A connection to a coordinator; it belongs to the running event loop.

    Args:
        address: `host:port` of the coordinator.
        ended: the error message of a call after `close`.
        credentials: for a coordinator that uses TLS.
    """

    def __init__(self, address: str, ended: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.address = address
        self._ended = ended
        self._channel = open_aio_channel(address, credentials)
        self._stubs: dict[str, Any] = {}
        self._calls: set[Any] = set()
        self._lost = ""
        self._closed = False

    async def call(
        self,
        method: str,
        timeout_s: float | None,
        repeatable: bool = True,
        again: list[bool] | None = None,
        **fields: Any,
    ) -> Any:
        """Make a call; repeat it if the coordinator broke it off.

        Args:
            method: the method of the service.
            timeout_s: for all attempts together; None: no limit.
            repeatable: whether the call may be repeated.
            again: gets an entry for each repetition.
            **fields: the fields of the request.
        Returns:
            The response.
        Raises:
            CoordinationTimeoutError: there was no response in time; the message says why.
            CoordinatorLostError: the call was broken off and is not repeatable, or the coordinator was given up.
            CoordinationError: the service rejected it.
        """
        request_class, response_class = _METHODS[method]
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = self._channel.unary_unary(
                f"/{_SERVICE}/{method}", request_class.SerializeToString, response_class.FromString
            )
        if self._closed:
            raise CoordinationError(f"{method}: {self._ended}", "FAILED_PRECONDITION")
        request = message(method, request_class, **fields)
        if timeout_s is not None and not timeout_s < LONG_S:
            timeout_s = None
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
            self._refuse_if_lost(method)
            call = stub(request, timeout=left_s, wait_for_ready=True)
            self._calls.add(call)
            try:
                return await call
            except asyncio.CancelledError:
                self._refuse_if_lost(method)
                raise
            except grpc.aio.AioRpcError as error:
                if not _is_broken_off(error):
                    unanswered = self._unanswered(method, timeout_s, fields)
                    raise _explained(method, error, unanswered) from None
                if not repeatable:
                    words = f"{method} on {self.address} was broken off: {error.details()}."
                    raise CoordinatorLostError(words, "UNAVAILABLE") from None
            finally:
                self._calls.discard(call)
            if again is not None:
                again.append(True)
            await asyncio.sleep(RETRY_S)

    def _refuse_if_lost(self, method: str) -> None:
        if self._lost:
            raise CoordinatorLostError(f"{method}: {self._lost}", "UNAVAILABLE")

    def _unanswered(self, method: str, timeout_s: float | None, fields: dict[str, Any]) -> str:
        """The error message for a missing answer, by the method and the state of the connection."""
        within = f"within {timeout_s or 0.0:g} s"
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return f"no coordinator answered on {self.address} {within}; is it running?"
        if method == "RegisterTask":
            look = f"`fastrt coordinator barriers --address {self.address}` names the missing"
            return f"not all tasks have joined the coordinator on {self.address} {within}; {look}."
        if method == "GetKeyValue":
            return f"key {fields['key']!r} was not set {within}."
        return f"the coordinator on {self.address} had no answer {within}."

    def give_up(self, words: str) -> None:
        """Give the coordinator up: calls under way and later ones end with this message."""
        self._lost = words
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        """End the connection."""
        self._closed = True
        await self._channel.close()


def _is_broken_off(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call ended because its coordinator ended, and not by an answer."""
    ended = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() in ended and _source(error) is None


def _source(error: grpc.aio.AioRpcError) -> str | None:
    """The task that an error names as its source; "" for the caller itself, None for an error of the connection."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            payload = _Payloads.FromString(value).payloads.get(_ERROR_URL)
            if payload is not None:
                named = _ErrorPayload.FromString(payload)
                has_source = named.HasField("source_task")
                return f"{named.source_task.job_name}/{named.source_task.task_id}" if has_source else ""
    return None


def message(method: str, kind: Any, **fields: Any) -> Any:
    """Build a protobuf message.

    Raises:
        CoordinationError: a field's value cannot be sent.
    """
    try:
        return kind(**fields)
    except ValueError as error:
        raise CoordinationError(f"{method}: an argument cannot be sent: {error}.", "INVALID_ARGUMENT") from None


def _explained(method: str, error: grpc.aio.AioRpcError, unanswered: str) -> CoordinationError:
    code, details = error.code().name, error.details() or ""
    kind: type[CoordinationError] = CoordinationError
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind = CoordinationTimeoutError
        if _source(error) is None:
            details = unanswered
    elif error.code() is grpc.StatusCode.ALREADY_EXISTS and method == "InsertKeyValue":
        kind = KeyExistsError
    elif error.code() is grpc.StatusCode.NOT_FOUND:
        kind = KeyMissingError
    return kind(f"{method}: {details}", code, _source(error) or None)
