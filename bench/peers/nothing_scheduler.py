"""A scheduler and a store that answer each RPC of early Ray's protocol at once, and do nothing else.

`RemoteCall` gets the next number, `RequestObj` is followed by the `StreamObj` of a small value, and `DecrementRefCount`
by `DeallocateObject`. `foreign.Nothing` starts this program with the folder of its certificates and the servers' name.
"""

import json
import sys
from pathlib import Path

import grpc

from fastrt._core.transfer import chunk
from fastrt.net.grpc.caller import Caller, open_caller
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.server import open_server

RAY = message_set("ray")
SCHEDULER, STORE = RAY.methods("Scheduler"), RAY.methods("ObjStore")
CALL_S = 30.0
VALUE = RAY.message("Obj")(int_data={"data": 49}).SerializeToString()


class Nothing:
    """Handles the calls."""

    def __init__(self, shown: dict[str, str]) -> None:
        ca, key, chain = (Path(shown["folder"], f"{name}.pem").read_bytes() for name in ("ca", "key", "cert"))
        self._credentials = grpc.ssl_channel_credentials(ca, key, chain)
        self._options = [("grpc.ssl_target_name_override", shown["name"])]
        self._scheduler: Caller | None = None  # the two connections to the foreign store
        self._store: Caller | None = None
        self._last = -1
        self._server = open_server(self, [f"/Scheduler/{name}" for name in SCHEDULER])
        served = grpc.ssl_server_credentials([(key, chain)], ca, require_client_auth=True)
        self.address = f"127.0.0.1:{self._server.bind('127.0.0.1:0', served)}"
        self._server.start()

    def on_call(self, call: int, method: str, body: bytes) -> None:
        """Answer a call, then make those that follow from it."""
        name = method.rpartition("/")[2]
        request = SCHEDULER[name][0].FromString(body)
        reply = SCHEDULER[name][1]()
        if name == "RemoteCall":
            self._last += 1
            reply.result.append(self._last)
        elif name == "RegisterObjStore":
            self._scheduler, self._store = self._open(request.objstore_address), self._open(request.objstore_address)
        self._server.finish(call, body=reply.SerializeToString())
        if name == "RequestObj":
            piece = chunk.encode(request.objref, len(VALUE), memoryview(VALUE))
            self._call(self._store, "/ObjStore/StreamObj", piece)
        elif name == "DecrementRefCount":
            for ref in request.objref:
                dropped = STORE["DeallocateObject"][0](canonical_objref=ref)
                self._call(self._scheduler, "/ObjStore/DeallocateObject", dropped.SerializeToString())

    def on_cancel(self, call: int) -> None:
        """Ignore it: calls are answered at once."""

    def on_idle(self) -> float | None:
        """Nothing waits for a time."""
        return None

    def on_stop(self) -> None:
        """No call is open."""

    def _open(self, address: str) -> Caller:
        return open_caller(address, self._credentials, [*self._options, ("grpc.use_local_subchannel_pool", 1)])

    def _call(self, caller: Caller | None, path: str, body: bytes) -> None:
        assert caller is not None
        caller.call(path, body, CALL_S, lambda code, message, answer: None, wait_for_ready=True)


if __name__ == "__main__":
    print(Nothing(json.loads(sys.argv[1])).address, flush=True)
    sys.stdin.read()
