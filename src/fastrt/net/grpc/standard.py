"""gRPC's standard services, from grpcio's packages: health checking, and reflection over private descriptor pools.

Source: `grpc.health.v1.Health`, `grpc.reflection.v1alpha.ServerReflection`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fastrt.net.grpc.contract import Stream
from fastrt.net.grpc.descriptors import MessageSet

CHECK_PATH = "/grpc.health.v1.Health/Check"
_WATCH_PATH = "/grpc.health.v1.Health/Watch"
_REFLECTION_PATH = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class _Context:
    """The part of a call that grpcio's health servicer uses: its status, and a hook for its end."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.callbacks: list[Callable[[], None]] = []

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return True


class StandardServices:
    """Health and reflection for a server.

    Args:
        services: full names of the services to report as serving.
        sets: their descriptions.
    """

    def __init__(self, services: Sequence[str], sets: Sequence[MessageSet]) -> None:
        self._health = health.HealthServicer(experimental_non_blocking=True)
        self._services = [*services, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
        self._reflections = [reflection.ReflectionServicer(self._services, pool=one.pool) for one in sets]
        self._reflections.append(reflection.ReflectionServicer(self._services))
        self.set_serving(True)

    @property
    def streams(self) -> dict[str, Callable[[Stream], None]]:
        """The streaming methods, for `Server`."""
        return {_WATCH_PATH: self._watch, _REFLECTION_PATH: self._reflect}

    def set_serving(self, serving: bool) -> None:
        """Set the answer to health checks from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            self._health.set(name, status)

    def check(self, body: bytes) -> tuple[int, str, bytes]:
        """Answer a health check: code, message, response."""
        try:
            request = health_pb2.HealthCheckRequest.FromString(body)
        except Exception:  # protobuf's DecodeError differs between its runtimes
            return grpc.StatusCode.INVALID_ARGUMENT.value[0], "This is no HealthCheckRequest.", b""
        context = _Context()
        response = self._health.Check(request, context)
        if context.code is not grpc.StatusCode.OK:
            return context.code.value[0], f"There is no service {request.service!r} here.", b""
        return 0, "", response.SerializeToString()

    def _watch(self, stream: Stream) -> None:
        context = _Context()

        def receive(body: bytes | None) -> None:
            if body is None:
                return
            request = health_pb2.HealthCheckRequest.FromString(body)
            self._health.Watch(request, context, send)

        def send(response: Any) -> None:
            if response is not None:
                stream.send(response.SerializeToString())

        def closed() -> None:
            for callback in context.callbacks:
                callback()

        stream.receiver, stream.on_closed = receive, closed

    def _reflect(self, stream: Stream) -> None:
        def receive(body: bytes | None) -> None:
            if body is None:
                stream.finish()
                return
            request = reflection_pb2.ServerReflectionRequest.FromString(body)
            stream.send(self._reflected(request).SerializeToString())

        stream.receiver = receive

    def _reflected(self, request: Any) -> Any:
        """Return the answer of the first pool that knows the requested name."""
        answers: Iterator[Any] = (
            answer for one in self._reflections for answer in one.ServerReflectionInfo(iter([request]), None)
        )
        last = None
        for answer in answers:
            if answer.WhichOneof("message_response") != "error_response":
                return answer
            last = answer
        return last
