"""The scheduler on a socket: who may call, what is refused, and that nothing a caller sends ends it."""

import random
import threading
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from fastrt.errors import ConfigError
from fastrt.net.address import InsecureBindError
from fastrt.net.grpc.auth import TlsFiles
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerError, SchedulerOptions
from fastrt.scheduler import events as ev
from fastrt.scheduler.wire import CLASSES, MESSAGE_BYTES_MAX, METHODS
from support.certificates import certificates

TOKEN = "5f" * 32


@pytest.fixture
def scheduler():
    with Scheduler(SchedulerOptions()) as made:
        yield made
        made.check_invariants()


@pytest.mark.parametrize("token", [None, "", "5f" * 31, "6f" * 32])
def test_calls_without_the_token_get_nothing(token):
    with Scheduler(SchedulerOptions(token=TOKEN)) as scheduler, SchedulerClient(scheduler.address, token) as client:
        for method in CLASSES:
            with pytest.raises(SchedulerError, match="session token") as caught:
                client.call(method)
            assert caught.value.code == "UNAUTHENTICATED"
        with SchedulerClient(scheduler.address, TOKEN) as friend:
            assert list(friend.info().reference_count) == []
            assert friend.register_store("127.0.0.1:9") == 0


@pytest.mark.parametrize("insecure", [False, True])
def test_token_goes_in_the_clear_to_workers_only_when_that_is_asked_for(grpc_world, insecure):
    world = grpc_world(token=TOKEN, insecure=insecure)
    store = world.store()
    seen: list[Any] = []
    worker = world.worker(store, "f")

    class Listen(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            seen.append(dict(details.invocation_metadata).get("authorization"))
            return continuation(details)

    server = grpc.server(futures.ThreadPoolExecutor(1), interceptors=[Listen()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    world.servers.append(server)
    world.call("RegisterWorker", worker_address=f"127.0.0.1:{port}", objstore_address=store.address)
    world.call("RegisterFunction", workerid=1, fnname="g", num_return_vals=0)
    world.remote("g")
    world.expect(lambda: seen, [f"Bearer {TOKEN}" if insecure else None])
    assert worker.log == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": "0.0.0.0:0"}, "without authentication"),
        ({"address": "0.0.0.0:0", "insecure": True}, "without authentication"),
        ({"address": "10.0.0.1:0", "token": TOKEN}, "in the clear"),
        ({"address": "[::]:0", "token": TOKEN}, "in the clear"),
    ],
)
def test_open_addresses_are_refused(options, words):
    with pytest.raises(InsecureBindError, match=words):
        Scheduler(SchedulerOptions(**options))


def test_open_addresses_are_allowed_on_purpose(tmp_path):
    files = TlsFiles(tmp_path / "cert", tmp_path / "key")
    SchedulerOptions(address="0.0.0.0:0", token=TOKEN, insecure=True).check()
    SchedulerOptions(address="0.0.0.0:0", token=TOKEN, tls=files).check()
    with pytest.raises(ConfigError, match="lost_after_s"):
        SchedulerOptions(lost_after_s=0).check()


def test_mutual_tls_to_clients_and_to_workers(tmp_path, wait_until):
    """A stranger with the token and without a certificate gets nothing; a worker is called over TLS too."""
    tls = certificates(tmp_path)
    invoked: list[bytes] = []

    def invoke(body: bytes, context: Any) -> bytes:
        invoked.append(body)
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handlers = {"InvokeCall": grpc.unary_unary_rpc_method_handler(invoke)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("WorkerService", handlers),))
    worker_address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', tls.server_credentials())}"
    server.start()
    options = SchedulerOptions(token=TOKEN, tls=tls, credentials=tls.channel_credentials())
    stranger = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    with Scheduler(options) as scheduler:
        with SchedulerClient(scheduler.address, TOKEN, tls.channel_credentials()) as client:
            client.register_store("127.0.0.1:9")
            worker = client.register_worker(worker_address, "127.0.0.1:9")
            client.register_function(worker, "f", 0)
            client.call("RemoteCall", call={"name": "f"})
            wait_until(lambda: len(invoked) == 1, "the call to arrive")
        for credentials in (stranger, None):
            with SchedulerClient(scheduler.address, TOKEN, credentials, timeout_s=5) as unknown:
                with pytest.raises(SchedulerError) as caught:
                    unknown.info()
                assert caught.value.code == "UNAVAILABLE"
    server.stop(None).wait()


def test_taken_address_is_refused(scheduler):
    other = Scheduler(SchedulerOptions(address=scheduler.address))
    with pytest.raises(OSError, match="Cannot listen"):
        other.start()
    other.stop()


def raw(scheduler: Scheduler, method: str, body: bytes) -> grpc.StatusCode:
    with grpc.insecure_channel(scheduler.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        try:
            channel.unary_unary(method)(body, timeout=60)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_messages_that_are_none_or_too_large_are_refused(scheduler):
    for method in METHODS:
        for body in (b"\xff\xff", b"\x0a\x05x", b"\x08"):
            assert raw(scheduler, method, body) is grpc.StatusCode.INVALID_ARGUMENT, method
    assert raw(scheduler, "/Scheduler/Nothing", b"") is grpc.StatusCode.UNIMPLEMENTED
    body = b"\0" * (MESSAGE_BYTES_MAX + 1)
    assert raw(scheduler, "/Scheduler/RemoteCall", body) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_three_thousand_random_messages_leave_the_service_right(scheduler):
    """Valid, truncated, damaged and random requests to every method, of callers that know some numbers."""
    rng = random.Random(7)
    codes = set()
    with grpc.insecure_channel(scheduler.address) as channel:
        methods = {path: channel.unary_unary(path) for path in METHODS}
        pending = []
        for _ in range(3000):
            path = rng.choice(list(METHODS))
            pending.append(methods[path].future(random_body(rng, METHODS[path].request), timeout=30))
        for call in pending:
            codes.add(call.code())
    assert codes <= {getattr(grpc.StatusCode, code.name) for code in ev.Code} | {grpc.StatusCode.OK}
    assert grpc.StatusCode.INTERNAL not in codes
    assert len(codes) >= 4
    scheduler.check_invariants()


def random_body(rng: random.Random, request: Any) -> bytes:
    message = request()
    for field in request.DESCRIPTOR.fields:
        value: Any
        if field.message_type is not None:
            message.call.name = rng.choice(["f", "g", ""])
            for _ in range(rng.randrange(3)):
                message.call.arg.add(ref=rng.randrange(8))
            continue
        if field.type == field.TYPE_STRING:
            value = rng.choice(["f", "g", "127.0.0.1:1", "127.0.0.1:2", "", "x" * 300])
        else:
            value = rng.choice([0, 1, 2, rng.randrange(12), 2**63, 2**64 - 1])
        target = getattr(message, field.name)
        if hasattr(target, "extend"):
            target.extend([value] * rng.randrange(4))
        else:
            setattr(message, field.name, min(value, 3) if field.name == "num_return_vals" else value)
    body = bytes(message.SerializeToString())
    if body and rng.random() < 0.15:
        body = body[: rng.randrange(len(body))]
    return rng.randbytes(rng.randrange(20)) if rng.random() < 0.1 else body


def test_many_clients_count_at_once(scheduler):
    with SchedulerClient(scheduler.address) as client:
        client.register_store("127.0.0.1:9")
        worker = client.register_worker("127.0.0.1:8", "127.0.0.1:9")
        refs = np.array([client.push(worker) for _ in range(50)], np.uint64)

        def count() -> None:
            with SchedulerClient(scheduler.address) as mine:
                for _ in range(20):
                    mine.increment(refs)
                    mine.decrement(refs)

        threads = [threading.Thread(target=count) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(client.info().reference_count) == [1] * 50


def test_batches_larger_than_a_message_are_sent_in_parts(scheduler):
    with SchedulerClient(scheduler.address) as client:
        client.register_store("127.0.0.1:9")
        worker = client.register_worker("127.0.0.1:8", "127.0.0.1:9")
        ref = client.push(worker)
        client.increment(np.full(2_500_000, ref, np.uint64))
        assert list(client.info().reference_count) == [2_500_001]


def test_peer_that_never_serves_is_lost(wait_until):
    with Scheduler(SchedulerOptions(lost_after_s=0.2)) as quick:
        with SchedulerClient(quick.address) as client:
            store = client.register_store("127.0.0.1:9")
            wait_until(lambda: is_lost(client, store), "the store to be lost")
        quick.check_invariants()


def is_lost(client: SchedulerClient, store: int) -> bool:
    try:
        client.ready(0, store)
    except SchedulerError as error:
        return f"Object store {store} is not registered" in str(error)
    return False


def test_request_that_cannot_be_served_any_more_is_told():
    told = []
    with Scheduler(SchedulerOptions(lost_after_s=60), told.append) as scheduler:
        with SchedulerClient(scheduler.address) as client:
            client.register_store("127.0.0.1:9")
            maker, reader = [client.register_worker(f"127.0.0.1:{port}", "127.0.0.1:9") for port in (7, 8)]
            ref = client.push(maker)
            client.request(reader, ref)
            scheduler.report(ev.WorkerLost(maker))
            assert told == [ev.RequestFailed(reader, ref, f"Worker {maker}, which was to make it, is gone.")]
            with pytest.raises(SchedulerError, match="is lost") as caught:
                client.request(reader, ref)
            assert caught.value.code == "DATA_LOSS"
        scheduler.check_invariants()


def test_unknown_scheduler_is_an_error_with_its_code():
    with (
        SchedulerClient("127.0.0.1:1", timeout_s=5) as client,
        pytest.raises(SchedulerError, match="SchedulerInfo") as caught,
    ):
        client.info()
    assert caught.value.code == "UNAVAILABLE"
