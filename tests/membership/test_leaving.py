"""Schedulers and members that stop: no socket of theirs stays open, however slow the other end is."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from fastrt.errors import FastrtError
from fastrt.membership import ClusterTimeoutError, MemberUnreachableError, Role, wire
from fastrt.membership.wire import Command
from fastrt.net.address import split_address
from fastrt.net.grpc.identity import new_token
from fastrt.net.grpc.trust import trust_of

TOKEN = new_token()
SECURE = {"token": TOKEN, "allow_anonymous": False}
PATIENCE_S = 20.0


def connections_to(port: int) -> int:
    """How many sockets of this process are connected to a port."""
    return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections("tcp"))


def port_of(address: str) -> int:
    return split_address(address)[1]


@contextlib.contextmanager
def held(loop: Any) -> Iterator[None]:
    """Keep an event loop busy, as that of a process that gets no processor: it answers nothing meanwhile."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait(PATIENCE_S)

    loop.call_soon_threadsafe(hold)
    assert is_held.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def test_scheduler_stops_while_a_member_does_not_answer_and_leaves_no_socket(serve: Any, join: Any) -> None:
    """TLS's closing handshake waits for the peer, also on the connection that the scheduler has opened."""
    service = serve(1, 1, **SECURE)
    member, other = (join(service.address, role, token=TOKEN) for role in (Role.WORKER, Role.SERVER))
    member.wait_ready(PATIENCE_S)
    other.wait_ready(PATIENCE_S)
    assert connections_to(port_of(member.address)) == 1
    with held(member._loop._thread.loop):
        service.stop()
        assert connections_to(port_of(member.address)) == 0


def test_member_closes_while_the_scheduler_does_not_answer_and_leaves_no_socket(serve: Any, join: Any) -> None:
    service = serve(1, 1, **SECURE)
    member = join(service.address, token=TOKEN)
    assert connections_to(port_of(service.address)) == 1
    with held(service._thread.loop):
        member.close()
        assert connections_to(port_of(service.address)) == 0


def test_member_closes_while_it_sends_to_a_member_that_does_not_answer(serve: Any, join: Any) -> None:
    service = serve(1, 1, **SECURE)
    answering, go_on = threading.Event(), threading.Event()

    def answer(*call: Any) -> bytes:
        answering.set()
        go_on.wait(PATIENCE_S)
        return b""

    member = join(service.address, token=TOKEN)
    server = join(service.address, Role.SERVER, token=TOKEN, on_data=answer)
    member.wait_ready(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(member.send, 0, b"data")
        try:
            assert answering.wait(PATIENCE_S)
            with held(server._loop._thread.loop):
                member.close()
                assert connections_to(port_of(server.address)) == 1  # the scheduler's
        finally:
            go_on.set()
        with pytest.raises(MemberUnreachableError):
            sending.result(PATIENCE_S)


def test_call_that_is_under_way_ends_with_its_member(serve: Any, join: Any, wait_until: Any) -> None:
    """A member repeats an unanswered call on its next connection. When it closes, there is none: the call must end."""
    service = serve(1, 1, **SECURE)
    member = join(service.address, token=TOKEN, heartbeat_s=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool, held(service._thread.loop):
        calling = pool.submit(member.fetch)
        wait_until(lambda: member._scheduler._caller._waiting, "the request to be sent")
        member.close()
        with pytest.raises(FastrtError, match=r"The member has been closed\."):
            calling.result(PATIENCE_S)


def test_member_that_gives_up_a_handshake_leaves_no_socket(join: Any, listener: Callable[..., Any]) -> None:
    silent = listener()
    with pytest.raises(ClusterTimeoutError):
        join(f"127.0.0.1:{silent.port}", token=TOKEN, call_timeout_s=0.2)
    assert connections_to(silent.port) == 0


def test_scheduler_that_stops_within_a_handshake_leaves_no_socket(
    serve: Any, raw: Any, listener: Callable[..., Any]
) -> None:
    service, silent = serve(1, 0, **SECURE), listener()
    connection = raw(service.address)
    trust = trust_of(TOKEN)
    connection.socket = trust.client.wrap_socket(connection.socket, server_hostname=trust.name)
    message = wire.RegisterMessage(ip="127.0.0.1", port=silent.port, node_id="w0", role=int(Role.WORKER))
    with connection.socket:
        connection.request(Command.REGISTER, message.SerializeToString(), rank=None)
        connection.read()
        silent.accept()  # for the cluster's metadata; its TLS handshake is not answered
        service.stop()
        assert connections_to(silent.port) == 0
