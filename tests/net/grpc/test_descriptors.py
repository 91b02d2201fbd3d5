"""Descriptor sets: upstream's field numbers, private pools, and no clash with anybody else's messages."""

import json
import subprocess
import sys

import pytest
from google.protobuf import descriptor_pool

from fastrt.errors import FastrtError
from fastrt.net.grpc.descriptors import MessageSet, message_set

# Message, field, number: those that differ between dialects, or are easy to get wrong.
NUMBERS = [
    ("coordination_xla", "xla.coordination.BarrierRequest", "counter", 6),
    ("coordination_xla", "xla.coordination.Incarnations", "service_incarnation", 3),
    ("coordination_xla", "xla.coordination.TaskInfo", "incarnation", 6),
    ("coordination_tensorflow", "tensorflow.BarrierRequest", "counter", 5),
    ("coordination_tensorflow", "tensorflow.WaitForAllTasksRequest", "local_device_info", 4),
    ("coordination_tensorflow", "tensorflow.WaitForAllTasksRequest", "device_info", 6),
    ("coordination_tensorflow", "tensorflow.WaitForAllTasksResponse", "cluster_device_info", 3),
    ("coordination_tensorflow", "tensorflow.WaitForAllTasksResponse", "device_info", 4),
    ("coordination_tensorflow", "tensorflow.CancelBarrierRequest", "source_task", 2),
    ("runtime_v1", "xla.LocalTopologyProto", "devices", 2),
    ("runtime_v3", "xla.LocalTopologyProto", "devices", 3),
    ("runtime_v3", "xla.EnumerateDevicesRequest", "local_topology", 3),
]
CLASH = """
from google.protobuf import descriptor_pb2, descriptor_pool
foreign = descriptor_pb2.FileDescriptorProto(name="coordination_service.proto", package="tensorflow")
foreign.message_type.add(name="CoordinatedTask")
descriptor_pool.Default().AddSerializedFile(foreign.SerializeToString())
import fastrt.coordination
"""
LAZY = """
import json, sys
import fastrt
print(json.dumps("grpc" in sys.modules))
"""


@pytest.mark.parametrize(("name", "message", "field", "number"), NUMBERS)
def test_field_numbers_are_upstreams(name: str, message: str, field: str, number: int) -> None:
    assert message_set(name).message(message).DESCRIPTOR.fields_by_name[field].number == number


def test_two_versions_of_one_message_live_side_by_side() -> None:
    old, new = (message_set(f"runtime_v{version}").message("xla.LocalTopologyProto") for version in (1, 3))
    assert "boot_id" not in old.DESCRIPTOR.fields_by_name
    assert "boot_id" in new.DESCRIPTOR.fields_by_name
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("xla.LocalTopologyProto")


def test_foreign_messages_of_the_same_names_do_not_clash() -> None:
    subprocess.run([sys.executable, "-c", CLASH], check=True)


def test_fastrt_alone_does_not_import_grpc() -> None:
    result = subprocess.run([sys.executable, "-c", LAZY], check=True, capture_output=True)
    assert json.loads(result.stdout) is False


def test_missing_set_says_how_it_is_made() -> None:
    with pytest.raises(FastrtError, match="install fastrt with pip"):
        MessageSet("nothing")
