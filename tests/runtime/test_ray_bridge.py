"""Nodes of `fastrt start` at their scheduler, as a client sees them that speaks the seed's protocols only."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from click.testing import CliRunner

import fastrt
from fastrt.cli.main import main
from fastrt.net.grpc.auth import TlsFiles, read_token
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set
from fastrt.net.grpc.identity import Identity
from fastrt.observe import profile
from fastrt.runtime.ray_bridge import BRIEF_WORKERS, exported
from fastrt.scheduler import SchedulerClient
from fastrt.scheduler.client import SchedulerError
from fastrt.transfer import obj
from support.certificates import certificates

START = [sys.executable, "-c", "from fastrt.cli.main import main; main()", "start"]
MESSAGES = message_set("ray")
Call = MESSAGES.message("Call")
PATIENCE_S = 30.0


class Cluster:
    """A head with a scheduler and a node beside it, both with functions to call."""

    def __init__(self, runtime_dir: Path, stack: contextlib.ExitStack) -> None:
        self._env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}
        self._env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), self._env.get("PYTHONPATH", "")])
        self._stack = stack
        self.head, said = self._start("--head", "--port", "0", "--scheduler-port", "0")
        joined = re.search(r"--address (\S+) ", said)[1]
        self.scheduler = re.search(r"^scheduler: +(\S+)", said, re.M)[1]
        self.token_file = re.search(r"--token-file (\S+)", said)[1]
        self.identity = Identity.from_token(read_token(self.token_file)).for_programs()
        self.joined = joined
        _, more = self._start("--address", joined, "--scheduler", self.scheduler)
        self.stores = [re.search(r"^store: +(\S+)", text, re.M)[1] for text in (said, more)]

    def _start(self, *options: str) -> tuple[subprocess.Popen, str]:
        words = [*START, *options, "--num-workers", "1", "--export", "exported_work"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=self._env)
        self._stack.callback(self._end, process)
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("use it:"):
                return process, text
        raise AssertionError(f"the node did not start:\n{text}")

    def _end(self, process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)

    def look(self, store: str, *refs: int):
        """ObjStoreInfo of one node's store."""
        request, reply = MESSAGES.methods("ObjStore")["ObjStoreInfo"]
        with open_channel(store, self.identity.channel_credentials(), self.identity.channel_options()) as channel:
            call = channel.unary_unary("/ObjStore/ObjStoreInfo", request.SerializeToString, reply.FromString)
            return call(request(objref=refs), timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("runtime"), stack)


@pytest.fixture
def client(runtime, wait_until):
    with SchedulerClient(runtime.scheduler, identity=runtime.identity) as made:

        def both_are_there():
            table = made.info().function_table
            return "exported_work.square" in table and len(table["exported_work.square"].workerid) >= 2

        wait_until(both_are_there, "both nodes have registered", PATIENCE_S)
        yield made


def submit(client, name, *args):
    """Call a function; what is no reference is sent as a value."""
    call = Call(name=f"exported_work.{name}")
    for arg in args:
        if isinstance(arg, list):
            client.increment(arg)  # the message's
            call.arg.add(ref=arg[0])
        else:
            call.arg.add().obj.CopyFrom(obj.to_obj(arg))
    return client.remote_call(call)


def fetch(runtime, wait_until, ref):
    """A result's `Obj`, from whichever store has it."""
    found = []

    def is_there():
        for store in runtime.stores:
            with contextlib.suppress(grpc.RpcError):  # while it is being replaced
                if ref in runtime.look(store).objref:
                    found[:] = runtime.look(store, ref).obj
        return found

    wait_until(is_there, f"the object of {ref}", PATIENCE_S)
    return found[0]


def test_profile_measures_transfers_to_the_store_of_a_started_node(runtime, client, monkeypatch):
    monkeypatch.setenv("FASTRT_TOKEN_FILE", runtime.token_file)
    monkeypatch.setattr(profile, "_ROW_S", 0.0)
    before = [list(runtime.look(store).objref) for store in runtime.stores]
    for store in runtime.stores:
        words = ["profile", "transfer", "--size", "64KiB", "--address", store, "--json"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        measured = {(row["path"], row["nbytes"]) for row in json.loads(result.stdout)}
        assert {(plane, size) for plane in ("native", "grpc") for size in (1 << 10, 1 << 14, 1 << 16)} <= measured
    assert [list(runtime.look(store).objref) for store in runtime.stores] == before


def test_calls_run_as_tasks_and_results_are_in_the_stores(runtime, client, wait_until):
    (first,) = submit(client, "square", 7)
    assert fetch(runtime, wait_until, first).int_data.data == 49
    results = submit(client, "both", [first], 1)
    assert fetch(runtime, wait_until, results[0]).int_data.data == 50
    assert [one.int_data.data for one in fetch(runtime, wait_until, results[1]).list_data.elem] == [49, 1]
    (failed,) = submit(client, "fail")
    error = fetch(runtime, wait_until, failed)
    said = {one.key.string_data.data: one.value.string_data.data for one in error.dict_data.elem}
    assert (said[b"type"], said[b"text"]) == (b"ValueError", b"as it should")
    assert b'exported_work.py", line ' in said[b"traceback"]
    with pytest.raises(obj.ForeignError, match="ValueError: as it should"):
        obj.from_obj(error, False)
    wait_until(lambda: list(client.info().reference_count)[first] == 1, "only the caller counts it")
    client.decrement([first, *results, failed])
    wait_until(lambda: not any(runtime.look(store).objref for store in runtime.stores), "the stores let go")


def test_client_without_a_server_waits_for_results_and_reads_them_in_chunks(runtime, client):
    ours = message_set("transfer")
    credentials = (runtime.identity.channel_credentials(), runtime.identity.channel_options())

    def read(ref):
        request, reply = ours.methods("fastrt.transfer.Locator")["Locate"]
        with open_channel(runtime.scheduler, *credentials) as channel:
            locate = channel.unary_unary("/fastrt.transfer.Locator/Locate", request.SerializeToString, reply.FromString)
            found = locate(request(objref=ref), timeout=PATIENCE_S)
        request, reply = ours.methods("fastrt.transfer.Transfer")["Read"]
        with open_channel(found.objstore_address[0], *credentials) as channel:
            chunks = channel.unary_stream("/fastrt.transfer.Transfer/Read", request.SerializeToString, reply.FromString)
            return obj.Obj.FromString(b"".join(one.data for one in chunks(request(objref=found.objref))))

    small, large, failed = [submit(client, *call)[0] for call in (("square", 7), ("large", 1 << 20), ("fail",))]
    assert read(small).int_data.data == 49
    assert len(read(large).array_data.double_data) == 1 << 20  # 8 MiB: more than one message can bring
    assert [one.key.string_data.data for one in read(failed).dict_data.elem] == [b"type", b"text", b"traceback"]
    client.decrement([small, large, failed])


def test_many_calls_go_to_both_nodes(runtime, client, wait_until, tmp_path):
    met = [submit(client, "meet", str(tmp_path), *names)[0] for names in (("a", "b"), ("b", "a"))]  # on one worker each
    refs = [submit(client, "square", k)[0] for k in range(40)]
    values = [fetch(runtime, wait_until, ref).int_data.data for ref in refs]
    assert values == [k * k for k in range(40)]
    assert [fetch(runtime, wait_until, ref).string_data.data for ref in met] == [b"a", b"b"]
    assert all(runtime.look(store).objref for store in runtime.stores)
    client.decrement([*met, *refs])


def test_node_registers_more_workers_while_calls_are_brief(runtime, client, wait_until):
    def workers():
        return len(client.info().function_table["exported_work.square"].workerid)

    refs = []

    def there_are_more():
        refs.extend(submit(client, "square", k)[0] for k in range(len(refs), len(refs) + 100))
        return workers() == 2 * BRIEF_WORKERS

    wait_until(there_are_more, "the further workers of both nodes", PATIENCE_S)
    refs += [submit(client, "square", k)[0] for k in range(len(refs), len(refs) + 200)]
    for k in (0, len(refs) // 2, len(refs) - 1):
        assert fetch(runtime, wait_until, refs[k]).int_data.data == k * k
    wait_until(lambda: len(client.info().avail_worker) == 2 * BRIEF_WORKERS, "all workers are idle again", PATIENCE_S)
    client.decrement(refs)


def test_killed_bridge_is_replaced_and_known_again(runtime, client, wait_until):
    (bridge,) = [
        p for p in psutil.Process(runtime.head.pid).children() if "runtime.ray_bridge" in " ".join(p.cmdline())
    ]
    bridge.kill()
    (again,) = submit(client, "square", 9)
    assert fetch(runtime, wait_until, again).int_data.data == 81
    client.decrement([again])

    # The call may have run on the other node, before this one's new store listens.
    def listens():
        with contextlib.suppress(grpc.RpcError):
            return runtime.look(runtime.stores[0])

    wait_until(listens, "the head's new store listens at the old address", PATIENCE_S)


def test_link_of_the_schedulers_own_node_is_a_unix_socket_also_after_a_kill(runtime, client, wait_until):
    def scheduler():
        children = psutil.Process(runtime.head.pid).children(recursive=True)
        return next((one for one in children if serves(one)), None)

    def serves(process):
        with contextlib.suppress(psutil.Error):
            return any(one.laddr.endswith("/link.sock") for one in process.net_connections("unix") if one.laddr)
        return False

    def is_linked():
        found = scheduler()
        ends = [] if found is None else found.net_connections("unix")
        return sum(str(one.laddr).endswith("/link.sock") for one in ends) >= 2  # one listens

    wait_until(is_linked, "the bridge is linked", PATIENCE_S)
    killed = scheduler()
    killed.kill()
    wait_until(lambda: scheduler() not in (None, killed) and is_linked(), "it is linked to the next one", PATIENCE_S)

    def both_are_known():
        with contextlib.suppress(SchedulerError):
            table = client.info().function_table
            return "exported_work.square" in table and len(table["exported_work.square"].workerid) >= 2
        return False

    wait_until(both_are_known, "both nodes have registered again", PATIENCE_S)
    (first,) = submit(client, "square", 9)
    assert fetch(runtime, wait_until, first).int_data.data == 81


def test_store_refuses_a_caller_without_a_certificate(runtime):
    request, reply = MESSAGES.methods("ObjStore")["ObjStoreInfo"]
    with grpc.insecure_channel(runtime.stores[0]) as channel:
        call = channel.unary_unary("/ObjStore/ObjStoreInfo", request.SerializeToString, reply.FromString)
        with pytest.raises(grpc.RpcError) as refused:
            call(request(), timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_worker_of_a_node_refuses_garbage_as_an_invalid_argument(runtime, client):
    (bridge,) = [
        p for p in psutil.Process(runtime.head.pid).children() if "runtime.ray_bridge" in " ".join(p.cmdline())
    ]
    answers = []
    for port in {c.laddr.port for c in bridge.net_connections("tcp") if c.status == psutil.CONN_LISTEN}:
        credentials, options = runtime.identity.channel_credentials(), runtime.identity.channel_options()
        with open_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            for body in (b"\xff\xff", b"\x0a\x05x"):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary("/WorkerService/InvokeCall")(body, timeout=PATIENCE_S)
                answers.append((refused.value.code(), refused.value.details()))
    invalid = [text for code, text in answers if code is grpc.StatusCode.INVALID_ARGUMENT]
    assert len(invalid) in (2, 2 * BRIEF_WORKERS), answers
    assert all("no valid InvokeCallRequest" in text for text in invalid)


def test_module_without_functions_is_refused():
    with pytest.raises(fastrt.FastrtError, match="nothing_of_that_name"):
        exported(["nothing_of_that_name"])
    with pytest.raises(fastrt.FastrtError, match="no function there is decorated"):
        exported(["json"])
    assert exported([]) == {}


def test_program_with_pem_files_calls_functions_and_opens_no_link_between_nodes(runtime, client, tmp_path):
    """Plain gRPC, as another language has it: nothing of fastrt but the files and the messages."""
    folder = tmp_path / "pem"
    words = ["token", "--token-file", runtime.token_file, "--pem", str(folder)]
    told = subprocess.run([*START[:-1], *words], capture_output=True, text=True, check=True).stdout
    name = re.search(r"servers' name: (\S+)", told)[1]
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "ca.pem": 0o600, "cert.pem": 0o600, "key.pem": 0o600,
    }  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o700
    ca, key, chain = ((folder / file).read_bytes() for file in ("ca.pem", "key.pem", "cert.pem"))
    credentials = grpc.ssl_channel_credentials(ca, key, chain)
    options = [("grpc.ssl_target_name_override", name)]
    request, reply = MESSAGES.methods("Scheduler")["RemoteCall"]
    call = Call(name="exported_work.square")
    call.arg.add().obj.CopyFrom(obj.to_obj(7))
    with grpc.secure_channel(runtime.scheduler, credentials, options) as channel:
        method = channel.unary_unary("/Scheduler/RemoteCall", request.SerializeToString, reply.FromString)
        assert len(method(request(call=call), timeout=PATIENCE_S).result) == 1
    for store in runtime.stores:
        with grpc.secure_channel(store, credentials, options) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE_S)
    with grpc.secure_channel(runtime.joined, credentials, options) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/fastrt.node.Head/Join")(b"", timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    again = subprocess.run([*START[:-1], *words], capture_output=True, text=True)
    assert "Name a folder that does not exist yet" in again.stderr


@pytest.mark.long
def test_cluster_with_certificates_of_its_own_takes_a_derived_bearer_over_tls(runtime_dir, tmp_path, wait_until):
    certificates(tmp_path)
    files = {"--tls-cert": "own.pem", "--tls-key": "own.key", "--tls-ca": "ca.pem"}
    words = [
        *START,
        "--head",
        "--port",
        "0",
        "--scheduler-port",
        "0",
        "--num-workers",
        "1",
        "--export",
        "exported_work",
    ]
    words += [word for name, file in files.items() for word in (name, str(tmp_path / file))]
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env) as process:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("use it:"):
                break
        identity = Identity.from_token(read_token(re.search(r"--token-file (\S+)", said)[1]))
        address = re.search(r"^scheduler: +(\S+)", said, re.M)[1]
        credentials = TlsFiles(tmp_path / "own.pem", tmp_path / "own.key", tmp_path / "ca.pem").channel_credentials()
        with SchedulerClient(address, identity.key("bearer").hex(), credentials) as friend:
            wait_until(lambda: "exported_work.square" in friend.info().function_table, "the function", PATIENCE_S)
        for token in (None, identity.key("programs").hex()):
            with (
                SchedulerClient(address, token, credentials) as stranger,
                pytest.raises(SchedulerError, match="session token"),
            ):
                stranger.info()
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 0
