"""fastrt beside another package that put the same message names into protobuf's global pool."""

import subprocess
import sys

from fastrt.net.grpc.descriptors import message_set

# What an early Ray's generated module does at import: its own files, of the same names, in the default pool.
FOREIGN = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
types = descriptor_pb2.FileDescriptorProto(name="types.proto", syntax="proto3")
call = types.message_type.add(name="Call")
call.field.add(name="entirely_different", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_INT64, label=1)
types.message_type.add(name="AckReply")
scheduler = descriptor_pb2.FileDescriptorProto(name="scheduler.proto", syntax="proto3", dependency=["types.proto"])
scheduler.message_type.add(name="RemoteCallRequest")
scheduler.service.add(name="Scheduler")
pool = descriptor_pool.Default()
for file in (types, scheduler):
    pool.AddSerializedFile(file.SerializeToString())
"""
FASTRT = """
import fastrt
from fastrt.net.grpc.descriptors import message_set
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions
from fastrt.scheduler.client import SchedulerError
with Scheduler(SchedulerOptions()) as scheduler, SchedulerClient(scheduler.address) as client:
    assert client.register_store("127.0.0.1:9") == 0
    call = message_set("ray").message("Call")(name="f")
    try:
        client.remote_call(call)
    except SchedulerError as error:
        assert error.code == "FAILED_PRECONDITION"
"""
SAME = """
theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName("Call"))
assert theirs(entirely_different=5).SerializeToString() == b"\\x08\\x05"
assert message_set("ray").message("Call")(name="f").name == "f"
print("both")
"""


def test_same_names_in_the_global_pool_do_not_clash() -> None:
    for code in (FOREIGN + FASTRT + SAME, FASTRT + FOREIGN + SAME):
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50)
        assert done.stdout == "both\n", done.stderr


def test_services_without_a_package_have_plain_names() -> None:
    assert sorted(message_set("ray").service_names()) == ["ObjStore", "Scheduler", "WorkerService"]
    assert message_set("runtime_v3").service_names() == ["xla.DistributedRuntimeService"]
