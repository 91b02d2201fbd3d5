"""Merges the device topologies of all members into one with global device ids.

Ids count from 0 in order of rank, then of each member's list. Members on one machine (same boot id) share a slice
index; the seed's messages have no such field.

Source: `BuildGlobalTopology` and the device aggregation of XLA's `DistributedRuntimeService` in jaxlib 0.4.13; for
the seed's messages `AggregateClusterDevices` of TensorFlow's coordination service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrt.net.grpc.descriptors import message_set

_TENSORFLOW = message_set("coordination_tensorflow")
_RUNTIME = {1: message_set("runtime_v1"), 3: message_set("runtime_v3")}
_LOCAL_TYPE = "xla.LocalTopologyProto"
_GLOBAL_URL = "type.googleapis.com/xla.GlobalTopologyProto"

DeviceInfo = _TENSORFLOW.message("tensorflow.DeviceInfo")
SeedDeviceInfo = _TENSORFLOW.message("tensorflow.CoordinationServiceDeviceInfo")


def merge_nodes(version: int, locals_: Sequence[tuple[int, bytes]]) -> Any:
    """The global topology in one protocol version, from each node's version and bytes.

    Raises:
        google.protobuf.message.DecodeError: a node's bytes are not a topology of its version.
    """
    merged = _RUNTIME[version].message("xla.GlobalTopologyProto")()
    for theirs, data in locals_:
        local = _RUNTIME[theirs].message(_LOCAL_TYPE).FromString(data)
        node = merged.nodes.add()
        if theirs == version:
            node.CopyFrom(local)
            continue
        node.node_id = local.node_id
        if version != 1:
            node.boot_id = ""
        for device in local.devices:
            copied = node.devices.add()
            for name in ("local_device_ordinal", "name", "vendor"):
                setattr(copied, name, getattr(device, name))
    _number(merged.nodes, has_slices=version != 1)
    return merged


def is_topology(version: int, data: bytes) -> bool:
    """Whether bytes are a local topology of a protocol version."""
    try:
        _RUNTIME[version].message(_LOCAL_TYPE).FromString(data)
    except Exception:  # protobuf's DecodeError differs between its runtimes
        return False
    return True


def merge_devices(all_devices: Sequence[bytes]) -> Any:
    """Merge devices of the later messages: one global topology, or all messages in a row if one is unknown."""
    merged = DeviceInfo()
    for data in all_devices:
        merged.MergeFrom(DeviceInfo.FromString(data))
    names = {item.type_url.rpartition("/")[2] for item in merged.device}
    if names != {_LOCAL_TYPE}:
        return merged
    locals_ = [(3, item.value) for item in merged.device]
    if not all(is_topology(3, data) for _, data in locals_):
        return merged
    whole = DeviceInfo()
    whole.device.add(type_url=_GLOBAL_URL, value=merge_nodes(3, locals_).SerializeToString())
    return whole


def seed_devices_kind(data: bytes) -> str | None:
    """The kind of devices in the seed's message of one task: "TensorFlow" or "XLA"; None if it lists none."""
    return {"tf": "TensorFlow", "xla": "XLA"}.get(SeedDeviceInfo.FromString(data).WhichOneof("type"))


def merge_seed_devices(all_devices: Sequence[bytes]) -> Any:
    """Merge the seed's devices: TensorFlow's lists are appended, XLA's get global numbers."""
    merged = SeedDeviceInfo()
    for data in all_devices:
        info = SeedDeviceInfo.FromString(data)
        kind = info.WhichOneof("type")
        if kind == "tf":
            merged.tf.devices.extend(info.tf.devices)
        elif kind == "xla":
            merged.xla.devices.nodes.extend(info.xla.devices.nodes)
    if merged.WhichOneof("type") == "xla":
        _number(merged.xla.devices.nodes, has_slices=False)
    return merged


def _number(nodes: Any, has_slices: bool) -> None:
    slices: dict[str, int] = {}
    count = 0
    for node in nodes:
        if has_slices:
            slice_index = slices.setdefault(node.boot_id, len(slices))
        for device in node.devices:
            device.global_device_id = count
            count += 1
            if has_slices:
                device.slice_index = slice_index
