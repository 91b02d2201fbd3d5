"""Calls of the coordination service, for asyncio: how every process of fastrt's own speaks to a coordinator.

A coordinator that is restarted on its records is found again: blocked and failed calls are made again, except those
whose effect would then be doubled. What an error says is written here, too.

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
# Longer timeouts, infinite ones too, are none: neither gRPC's clock nor the wire's milliseconds hold them all.
LONG_S = 1e9


class Connection:
    """A connection to a coordinator; it belongs to the running event loop.

    Args:
        address: `host:port` of the coordinator.
        ended: what a call is told after `close`.
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
        """Make a call, again if the coordinator broke it off.

        Args:
            method: of the service.
            timeout_s: for all of that; None: as long as it takes.
            repeatable: whether it may be made again.
            again: gets an entry each time that happens.
            **fields: of the request.
        Returns:
            The response.
        Raises:
            CoordinationTimeoutError: there was none in time; the message says what that means.
            CoordinatorLostError: it was broken off and cannot be repeated, or the coordinator is given up.
            CoordinationError: the service refused it.
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
        """What no answer in time means, as far as this side can tell."""
        within = f"within {timeout_s or 0.0:g} s"
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return f"nobody answered on {self.address} {within}; is the coordinator running?"
        if method == "RegisterTask":
            look = f"`fastrt coordinator barriers --address {self.address}` names the missing"
            return f"not all tasks have come to the coordinator on {self.address} {within}; {look}."
        if method == "GetKeyValue":
            return f"key {fields['key']!r} was not set {within}."
        return f"the coordinator on {self.address} had no answer {within}."

    def give_up(self, words: str) -> None:
        """Take the coordinator for lost: calls under way and to come end with these words."""
        self._lost = words
        for call in list(self._calls):
            call.cancel()

    async def close(self) -> None:
        """End the connection."""
        self._closed = True
        await self._channel.close()


def _is_broken_off(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call ended because its coordinator did, and not by an answer to it."""
    ended = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return error.code() in ended and _source(error) is None


def _source(error: grpc.aio.AioRpcError) -> str | None:
    """The task that an error names as its source; "" for the caller's own, None when it is no error of the service."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            payload = _Payloads.FromString(value).payloads.get(_ERROR_URL)
            if payload is not None:
                named = _ErrorPayload.FromString(payload)
                has_source = named.HasField("source_task")
                return f"{named.source_task.job_name}/{named.source_task.task_id}" if has_source else ""
    return None


def message(method: str, kind: Any, **fields: Any) -> Any:
    """A message of some fields.

    Raises:
        CoordinationError: it cannot hold one of them.
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
