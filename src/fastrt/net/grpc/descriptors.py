"""Protobuf messages, made at import from the descriptor sets that the build compiled.

Each set has a separate descriptor pool. So one process can hold two versions of an upstream message, and can import
tensorflow, jax or ray beside fastrt without a name clash in protobuf's global pool.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fastrt.errors import FastrtError

# Not by `importlib.resources`: with all that it imports it takes 11 ms of the start of each process that uses gRPC.
_FOLDER = Path(__file__).with_name("descriptors")


class MessageSet:
    """The messages and services of one folder of `protos/`.

    Args:
        name: the folder's name.

    Raises:
        FastrtError: the package was built without this descriptor set.
    """

    def __init__(self, name: str) -> None:
        try:
            data = (_FOLDER / f"{name}.binpb").read_bytes()
        except FileNotFoundError:
            raise FastrtError(
                f"The wire descriptions {name}.binpb are missing from this installation of fastrt. They are made by "
                "the build: install fastrt with pip, or run `python setup.py build_py` in a source tree."
            ) from None
        self.name = name
        self._files = descriptor_pb2.FileDescriptorSet.FromString(data).file
        self.pool = descriptor_pool.DescriptorPool()
        for file in self._files:
            self.pool.AddSerializedFile(file.SerializeToString())

    def message(self, full_name: str) -> Any:
        """Return the class of a message, by its full protobuf name."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(full_name))

    def methods(self, service: str) -> dict[str, tuple[Any, Any]]:
        """Return the request and response class of each method of a service, by method name."""
        described = self.pool.FindServiceByName(service)
        return {
            method.name: (
                message_factory.GetMessageClass(method.input_type),
                message_factory.GetMessageClass(method.output_type),
            )
            for method in described.methods
        }

    def service_names(self) -> list[str]:
        """Return the full names of the services in this set."""
        return [f"{file.package}.{service.name}".lstrip(".") for file in self._files for service in file.service]


@cache
def message_set(name: str) -> MessageSet:
    """Return the message set of one folder of `protos/`, loaded once.

    Raises:
        FastrtError: the package was built without it.
    """
    return MessageSet(name)
