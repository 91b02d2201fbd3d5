"""A coordinator in this process, and hand-made calls in any of its dialects."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import support.grpc_opened  # noqa: F401
from fastrt.coordination import Coordinator, CoordinatorOptions
from fastrt.coordination.engine import METHODS
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set

_SETS = {
    "xla.coordination.CoordinationService": "coordination_xla",
    "tensorflow.CoordinationService": "coordination_tensorflow",
    "xla.DistributedRuntimeService": "runtime_v3",
    "fastrt.coordination.Inspector": "coordination",
}


class Raw:
    """Calls made by hand: `raw.xla("Barrier", barrier_id=...)` returns a future."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(address)

    def call(self, service: str, method: str, timeout: float = 50.0, **fields: Any) -> Any:
        request, response = message_set(_SETS[service]).methods(service)[method]
        stub = self.channel.unary_unary(f"/{service}/{method}", request.SerializeToString, response.FromString)
        return stub.future(request(**fields), timeout=timeout)

    def xla(self, method: str, **fields: Any) -> Any:
        return self.call("xla.coordination.CoordinationService", method, **fields)

    def tensorflow(self, method: str, **fields: Any) -> Any:
        return self.call("tensorflow.CoordinationService", method, **fields)

    def runtime(self, method: str, **fields: Any) -> Any:
        return self.call("xla.DistributedRuntimeService", method, **fields)

    def snapshot(self, **fields: Any) -> Any:
        return self.call("fastrt.coordination.Inspector", "Snapshot", **fields).result()

    def bytes(self, path: str, body: bytes, timeout: float = 50.0) -> Any:
        return self.channel.unary_unary(path).future(body, timeout=timeout)


def refused(future: Any) -> tuple[str, str]:
    """The status code's name and the words of a call that must fail."""
    error = future.exception(timeout=50)
    assert isinstance(error, grpc.RpcError), f"the call was answered: {future.result()}"
    return error.code().name, error.details()


@pytest.fixture(name="refused")
def _refused() -> Callable[[Any], tuple[str, str]]:
    return refused


@pytest.fixture
def serve() -> Iterator[Callable[..., Coordinator]]:
    """Start coordinators; they are stopped at the test's end, and must be sound then."""
    with contextlib.ExitStack() as stack:

        def start(num_tasks: int = 2, **options: Any) -> Coordinator:
            service = Coordinator(CoordinatorOptions(num_tasks=num_tasks, **options))
            stack.enter_context(service)
            stack.callback(lambda: service._core.state.check_invariants())
            return service

        yield start


@pytest.fixture
def raw() -> Iterator[Callable[[str], Raw]]:
    """Hand-made calls to an address."""
    with contextlib.ExitStack() as stack:

        def to(address: str) -> Raw:
            made = Raw(address)
            stack.callback(made.channel.close)
            return made

        yield to


@pytest.fixture
def paths() -> list[str]:
    return list(METHODS)
