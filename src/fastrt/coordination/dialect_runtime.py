"""The oldest dialect: `xla.DistributedRuntimeService`, in the seed's version 1 and in version 3 of jaxlib 0.4.13.

The two versions differ in the topology messages only. So EnumerateDevices is parsed with the topology as bytes, which
are read by the version that the node gave at Connect. Keys are bytes here and text elsewhere: keys that are not UTF-8
are kept by surrogate escapes.
"""

from __future__ import annotations

from typing import Any

from fastrt.coordination import events as ev
from fastrt.coordination.dialects import Build, Dialect, Method, Parse, nothing, table_methods
from fastrt.coordination.events import Event
from fastrt.coordination.legacy_runtime import VERSIONS
from fastrt.coordination.state import CoordinationState
from fastrt.coordination.status import Code, Failure, failure
from fastrt.coordination.topology import is_topology, merge_nodes
from fastrt.net.grpc.descriptors import message_set

_SERVICE = "xla.DistributedRuntimeService"
_SETS = {version: message_set(f"runtime_v{version}") for version in VERSIONS}
_EnumerateDevices = message_set("coordination").message("fastrt.coordination.EnumerateDevices")
_TopologyHead = message_set("coordination").message("fastrt.coordination.TopologyHead")
_ENUMERATE_ANSWERS = {version: one.methods(_SERVICE)["EnumerateDevices"][1] for version, one in _SETS.items()}
_CLASSES: dict[str, Any] = {
    **_SETS[3].methods(_SERVICE),
    "EnumerateDevices": (_EnumerateDevices, None),
}
_DIALECT = Dialect(_SERVICE, lambda member: str(member.rank), lambda problem: b"")


def methods() -> list[Method]:
    """The dialect's methods."""
    return table_methods(_DIALECT, _CLASSES, _TABLE)


def _key(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _connect(request: Any, call: int, state: CoordinationState) -> Event:
    timeout_s = request.timeout_milliseconds / 1000
    return ev.NodeConnect(call, request.node_id, request.client_id, timeout_s, request.protocol_version)


def _enumerate(request: Any, call: int, state: CoordinationState) -> Event | Failure:
    topology = request.local_topology
    try:
        node = _TopologyHead.FromString(topology).node_id
        known = is_topology(_version(state, node), topology)
    except Exception:  # protobuf's DecodeError differs between its runtimes
        known = False
    if not known:
        words = "EnumerateDevices: local_topology is no xla.LocalTopologyProto of the version given at Connect."
        return failure(Code.INVALID_ARGUMENT, words, marked=False)
    return ev.NodeEnumerate(call, request.session_id, node, topology)


def _version(state: CoordinationState, node: int) -> int:
    nodes = state.nodes.nodes
    return nodes[node].version if 0 <= node < len(nodes) else VERSIONS[-1]


def _devices(value: Any, request: Any, state: CoordinationState) -> bytes:
    version = _version(state, _TopologyHead.FromString(request.local_topology).node_id)
    answer = _ENUMERATE_ANSWERS[version](global_topology=merge_nodes(version, value))
    return bytes(answer.SerializeToString())


def _key_get(request: Any, call: int, state: CoordinationState) -> Event:
    return ev.NodeGetKey(call, request.session_id, _key(request.key), request.timeout_milliseconds / 1000)


def _barrier(request: Any, call: int, state: CoordinationState) -> Event:
    timeout_s = request.timeout_milliseconds / 1000
    return ev.NodeBarrier(call, request.session_id, request.node_id, request.barrier_id, timeout_s)


_TABLE: dict[str, tuple[Parse, Build]] = {
    "Connect": (_connect, lambda value, r, s: bytes(_CLASSES["Connect"][1](session_id=value).SerializeToString())),
    "EnumerateDevices": (_enumerate, _devices),
    "Heartbeat": (lambda r, c, s: ev.NodeHeartbeat(c, r.session_id, r.node_id), nothing),
    "Shutdown": (lambda r, c, s: ev.NodeShutdown(c, r.session_id, r.node_id), nothing),
    "KeyValueGet": (
        _key_get,
        lambda value, r, s: bytes(_CLASSES["KeyValueGet"][1](found=True, value=value).SerializeToString()),
    ),
    "KeyValueSet": (lambda r, c, s: ev.NodeSetKey(c, r.session_id, _key(r.key), r.value), nothing),
    "WaitAtBarrier": (_barrier, nothing),
}
