"""A few keys at a coordinator, for processes that are no tasks of its job: where rank 0 of a group listens."""

from __future__ import annotations

from typing import Any

import grpc

from fastrt.errors import CollectiveTimeout
from fastrt.rpc.channel import open_channel
from fastrt.rpc.descriptors import message_set

_SERVICE = "tensorflow.CoordinationService"
_METHODS = message_set("coordination_tensorflow").methods(_SERVICE)


class Directory:
    """A connection to the coordinator at `host:port`; end it with `close`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)

    def set(self, key: str, value: bytes, timeout: float) -> None:
        """Set a key, whatever it was before.

        Raises:
            CollectiveTimeout: the coordinator did not answer in time.
        """
        self._call("InsertKeyValue", timeout, kv={"key": key, "value": value}, allow_overwrite=True)

    def get(self, key: str, timeout: float) -> bytes:
        """The value of a key; waits until there is one.

        Raises:
            CollectiveTimeout: it was not set in time.
        """
        return bytes(self._call("GetKeyValue", timeout, key=key).kv.value)

    def delete(self, key: str, timeout: float) -> None:
        """Remove a key.

        Raises:
            CollectiveTimeout: the coordinator did not answer in time.
        """
        self._call("DeleteKeyValue", timeout, key=key)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _call(self, method: str, timeout: float, **fields: Any) -> Any:
        request, response = _METHODS[method]
        stub = self._channel.unary_unary(
            f"/{_SERVICE}/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return stub(request(**fields), timeout=max(timeout, 0.01), wait_for_ready=True)
        except grpc.RpcError as error:
            raise CollectiveTimeout(f"the coordinator at {self.address}: {error.details()}") from None
