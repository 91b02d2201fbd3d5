"""A program that is not fastrt's: a client, an object store and a worker in plain grpc, made from protos/ray alone.

`Cluster` starts a node with a scheduler beside it; `Foreign` connects to them with the certificates that the node
issues. `Nothing` is a scheduler that answers and does nothing else: the floor of a whole call. `Empty` is a handler
that does nothing, served and called by the same plain grpc: the floor of one RPC.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil

from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import new_token

RAY = message_set("ray")
Call = RAY.message("Call")
START_S = 60.0
EXPORTS = "import fastrt\n@fastrt.remote\ndef square(x):\n    return x * x\n"
_CLI = [sys.executable, "-c", "from fastrt.cli.main import main; main()"]
_THREADS = 4


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Certified:
    """The certificates that `fastrt token --pem` issues to a program, and the name that servers of the cluster show.

    Args:
        folder: for the files.
        token_file: of the cluster.
        env: the environment of the command.
    """

    def __init__(self, folder: Path, token_file: str, env: dict[str, str]) -> None:
        self.folder = folder / "pem"
        words = ["token", "--token-file", token_file, "--pem", str(self.folder)]
        shown = subprocess.run([*_CLI, *words], env=env, capture_output=True, text=True, check=True).stdout
        self.ca, self.key, self.chain = ((self.folder / f"{name}.pem").read_bytes() for name in ("ca", "key", "cert"))
        self.credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.chain)
        self.options = [("grpc.ssl_target_name_override", find(r"servers' name: (\S+)", shown))]

    def server_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a server that the scheduler and the node's store may call."""
        return grpc.ssl_server_credentials([(self.key, self.chain)], self.ca, require_client_auth=True)

    def open_channel(self, address: str) -> grpc.Channel:
        """Open a channel to one of the cluster's services."""
        return grpc.secure_channel(address, self.credentials, self.options)


def find(pattern: str, text: str) -> str:
    """The first group of a pattern in what a command printed."""
    found = re.search(pattern, text, re.M)
    if found is None:
        raise RuntimeError(f"the command did not succeed; it printed:\n{text}")
    return found[1]


class Cluster:
    """A head of `fastrt start` with a scheduler and two workers, which exports `square`.

    Args:
        stack: ends it when it is closed.
        python_path: the folder of the fastrt that the node runs; None: that of this process.
    """

    def __init__(self, stack: ExitStack, python_path: str | None = None) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "exported_square.py").write_text(EXPORTS)
        source = python_path or os.environ.get("PYTHONPATH", "")
        self._env = {
            **os.environ,
            "FASTRT_RUNTIME_DIR": str(folder / "run"),
            "FASTRT_OBJECT_STORE_MEMORY": "256MiB",
            "PYTHONPATH": os.pathsep.join([str(folder), source]),
        }
        (folder / "run").mkdir(0o700)
        options = ["start", "--head", "--port", "0", "--scheduler-port", "0", "--num-workers", "2"]
        self._head = subprocess.Popen(
            [*_CLI, *options, "--export", "exported_square"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=self._env,
        )
        stack.callback(self._end)
        printed = ""
        for line in self._head.stdout or ():
            printed += line
            if line.startswith("use it:"):
                break
        self.scheduler = find(r"^scheduler: +(\S+)", printed)
        self.store = find(r"^store: +(\S+)", printed)
        self.certified = Certified(folder, find(r"--token-file (\S+)", printed), self._env)

    def processes(self) -> dict[str, int]:
        """Ids of the node's processes, by what they are."""
        names = {"side_services": "scheduler", "ray_bridge": "bridge"}
        found = {}
        for child in psutil.Process(self._head.pid).children(recursive=True):
            words = " ".join(child.cmdline())
            for module, name in names.items():
                if module in words:
                    found[name] = child.pid
        rest = [child.pid for child in psutil.Process(self._head.pid).children(recursive=True)]
        return {**found, **{f"other {pid}": pid for pid in (self._head.pid, *rest) if pid not in found.values()}}

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used so far by the scheduler, the bridge and all other processes of the node."""
        used: dict[str, float] = Counter()
        for name, pid in self.processes().items():
            used[name.split(" ", maxsplit=1)[0]] += cpu_s(pid)
        return used

    def _end(self) -> None:
        self._head.send_signal(signal.SIGTERM)
        self._head.communicate(timeout=START_S)


class Nothing:
    """A scheduler and store that answer at once and do nothing else (`peers/nothing_scheduler.py`).

    It takes the same RPCs of a foreign program and makes the same ones, on fastrt's server and caller. No function
    runs, no state is kept, and there is no second process: what remains is gRPC, and the foreign program itself.

    Args:
        stack: ends it when it is closed.
    """

    def __init__(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        token_file = folder / "token"
        token_file.write_text(new_token())
        token_file.chmod(0o600)
        self.certified = Certified(folder, str(token_file), dict(os.environ))
        # Its text, not its file: in that folder `import fastrt` would find another one.
        text = (Path(__file__).parent / "peers" / "nothing_scheduler.py").read_text()
        shown = json.dumps({"folder": str(self.certified.folder), "name": self.certified.options[0][1]})
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, shown], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(self._process.communicate)
        assert self._process.stdout is not None
        self.scheduler = self._process.stdout.readline().strip()

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used so far."""
        return {"scheduler": cpu_s(self._process.pid)}


class Foreign:
    """A client that has a store and a worker, all in this process and in plain grpc.

    Args:
        cluster: the scheduler's address, and certificates.
        stack: ends it when it is closed.
        function: the name of a function that its worker registers; None: none.
    """

    def __init__(self, cluster: Cluster | Nothing, stack: ExitStack, function: str | None = None) -> None:
        self.rpcs: Counter[str] = Counter()
        self.on_arrival: Callable[[int], None] = lambda ref: None
        self._channel = stack.enter_context(cluster.certified.open_channel(cluster.scheduler))
        self._methods = {
            name: self._channel.unary_unary(f"/Scheduler/{name}", request.SerializeToString, reply.FromString)
            for name, (request, reply) in RAY.methods("Scheduler").items()
        }
        self._requests = {name: request for name, (request, _) in RAY.methods("Scheduler").items()}
        self._ack = RAY.message("AckReply")()
        self._lock = threading.Lock()
        self._arrived: dict[int, threading.Event] = {}
        self._dropped: deque[int] = deque()
        self._dropping = False
        self._working: threading.Thread | None = None
        self.stored: dict[int, bytes] = {}
        self.dropped = 0
        server = grpc.server(ThreadPoolExecutor(_THREADS), options=[("grpc.so_reuseport", 0)])
        self._serve(server, "ObjStore", "StreamObj", self._stream_obj, grpc.stream_unary_rpc_method_handler)
        self._serve(server, "ObjStore", "DeallocateObject", self._deallocate, grpc.unary_unary_rpc_method_handler)
        self._serve(server, "WorkerService", "InvokeCall", self._invoke, grpc.unary_unary_rpc_method_handler)
        address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', cluster.certified.server_credentials())}"
        server.start()
        stack.callback(lambda: server.stop(None).wait())
        stack.callback(lambda: self._working and self._working.join())
        self.store_number = self.call("RegisterObjStore", objstore_address=address).objstoreid
        self.worker = self.call("RegisterWorker", worker_address=address, objstore_address=address).workerid
        if function is not None:
            self.call("RegisterFunction", workerid=self.worker, fnname=function, num_return_vals=1)

    def call(self, method: str, **fields: Any) -> Any:
        """Call a method of the scheduler and wait for its answer."""
        self.rpcs[method] += 1
        return self._methods[method](self._requests[method](**fields), timeout=START_S)

    def start_call(self, method: str, then: Callable[[Any], object], **fields: Any) -> None:
        """Call a method of the scheduler; `then` gets the answer, on grpc's thread."""
        self.rpcs[method] += 1
        future = self._methods[method].future(self._requests[method](**fields), timeout=START_S)

        def ended(done: Any) -> None:
            if done.code() is not grpc.StatusCode.CANCELLED:  # by the end of this program
                then(done.result())

        future.add_done_callback(ended)

    def square(self, x: int, name: str = "exported_square.square") -> Any:
        """The `Call` message of a function of one number."""
        call = Call(name=name)
        call.arg.add().obj.int_data.data = x
        return call

    def fetch(self, call: Any) -> tuple[int, bytes]:
        """Make a call, and wait until its result is in this process's store; returns its name and bytes."""
        ref = self.call("RemoteCall", call=call).result[0]
        with self._lock:
            arrived = self._arrived[ref] = threading.Event()
        self.call("RequestObj", workerid=self.worker, objref=ref)
        if ref not in self.stored and not arrived.wait(START_S):
            raise TimeoutError(f"object {ref} did not arrive")
        del self._arrived[ref]
        return ref, self.stored[ref]

    def drop(self, ref: int) -> None:
        """Drop a reference; those that come while a request is under way go together in the next one."""
        with self._lock:
            self._dropped.append(ref)
            if self._dropping:
                return
            self._dropping = True
        self._drop_next(None)

    def run(self, calls: list[Any], in_flight: int) -> None:
        """Make calls, so many at a time, until the results of all are in this store; drops their references."""
        waiting = deque(calls)
        left = len(calls)
        lock, ended = threading.Lock(), threading.Event()

        def begin() -> None:
            try:
                call = waiting.popleft()
            except IndexError:
                return
            self.start_call("RemoteCall", lambda reply: request(reply.result[0]), call=call)

        def request(ref: int) -> None:
            self.start_call("RequestObj", lambda reply: None, workerid=self.worker, objref=ref)

        def arrived(ref: int) -> None:
            nonlocal left
            begin()
            self.drop(ref)
            with lock:
                left -= 1
                if not left:
                    ended.set()

        self.on_arrival = arrived
        for _ in range(in_flight):
            begin()
        if not ended.wait(START_S):
            raise TimeoutError(f"{left} results did not arrive")
        self.on_arrival = lambda ref: None

    def _drop_next(self, reply: Any) -> None:
        with self._lock:
            refs = list(self._dropped)
            self._dropped.clear()
            self._dropping = bool(refs)
        if refs:
            self.start_call("DecrementRefCount", self._drop_next, objref=refs)

    def _serve(self, server: grpc.Server, service: str, name: str, function: Any, make: Any) -> None:
        request, _ = RAY.methods(service)[name]

        def counted(body: Any, context: Any) -> Any:
            self.rpcs[name] += 1
            return function(body)

        handler = make(counted, request.FromString, lambda message: message.SerializeToString())
        handlers = grpc.method_handlers_generic_handler(service, {name: handler})
        server.add_generic_rpc_handlers((handlers,))

    def _stream_obj(self, chunks: Any) -> Any:
        data, ref = b"", 0
        for chunk in chunks:
            ref, data = chunk.objref, data + chunk.data
        self._keep(ref, data)
        self.start_call("ObjReady", lambda reply: None, objref=ref, objstoreid=self.store_number)
        self.on_arrival(ref)
        return self._ack

    def _keep(self, ref: int, data: bytes) -> None:
        self.stored[ref] = data
        with self._lock:
            waiting = self._arrived.get(ref)
        if waiting is not None:
            waiting.set()

    def _deallocate(self, request: Any) -> Any:
        self.stored.pop(request.canonical_objref, None)
        self.dropped += 1
        return self._ack

    def _invoke(self, request: Any) -> Any:
        """Run a call, whose result is its argument, on another thread than the one that accepts it."""
        self._working = threading.Thread(target=self._work, args=(request.call,))
        self._working.start()
        return RAY.message("InvokeCallReply")()

    def _work(self, call: Any) -> None:
        (ref,) = call.result
        self._keep(ref, call.arg[0].obj.SerializeToString())
        self.call("ObjReady", objref=ref, objstoreid=self.store_number)
        self.call("DecrementRefCount", objref=[ref])
        self.call("WorkerReady", workerid=self.worker)


class Empty:
    """A handler that does nothing, in a process of its own, in plain grpc.

    Args:
        stack: ends it when it is closed.
    """

    SERVER = """
import sys, grpc
from concurrent.futures import ThreadPoolExecutor
class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Handler(),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""

    def __init__(self, stack: ExitStack) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", self.SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.communicate)
        self.pid = process.pid
        assert process.stdout is not None
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{process.stdout.readline().strip()}"))
        self._call = channel.unary_unary("/empty/Call")

    def __call__(self) -> None:
        self._call(b"", timeout=START_S)

    def run(self, count: int, in_flight: int) -> None:
        """Make calls, so many at a time, and wait for all answers."""
        room, ended = threading.Semaphore(in_flight), threading.Semaphore(0)

        def answered(call: Any) -> None:
            room.release()
            ended.release()

        for _ in range(count):
            room.acquire()
            self._call.future(b"", timeout=START_S).add_done_callback(answered)
        for _ in range(count):
            ended.acquire()
