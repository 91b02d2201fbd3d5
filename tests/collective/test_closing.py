"""Groups that end while a connection of theirs is being made, or whose ranks do not all come: nothing stays open."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastrt.collective import init_group
from fastrt.collective.access import Access, find_access
from fastrt.collective.peers import Peers
from fastrt.collective.tcp_rendezvous import Assembled, Place, assemble
from fastrt.coordination import Coordinator, CoordinatorOptions
from fastrt.errors import CollectiveTimeout, PeerDied
from fastrt.net.grpc.identity import Identity, new_token

TOKEN = new_token()


@pytest.fixture(scope="module")
def coordinator():
    with Coordinator(CoordinatorOptions(num_tasks=1)) as service:
        yield service.address


def test_connection_that_is_made_while_the_group_ends_is_closed():
    access = Access(Identity.from_token(TOKEN))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    places = [Place(q, f"node{q}", *listeners[q].getsockname(), os.getpid()) for q in range(2)]
    first, second = (Assembled("group", access, places, listeners[q]) for q in range(2))
    sender = Peers(first, 0, [1], "first")
    sending = sender.run(True, "send", np.ones(8, np.uint8), 1, 0, 20.0, None)
    listeners[1].accept()[0].close()  # the first try has begun, and the next one waits for an answer
    sender.close()
    receiver = Peers(second, 1, [0], "second")
    try:
        with pytest.raises(PeerDied):
            sending.wait(20)
        assert not any(frames.usable for frames in sender._frames.values())
    finally:
        receiver.close()


def test_group_whose_ring_is_not_closed_leaves_no_thread_and_no_socket(coordinator, name):
    """Rank 1 joins and accepts the connection of rank 0, but opens none itself, so the ring is never complete."""

    def meet() -> Peers:
        access = find_access(name, TOKEN, False)
        return Peers(assemble(coordinator, name, 1, 2, 20.0, "b", access), 1, [0], "other")

    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet)
        with pytest.raises(CollectiveTimeout, match="rank 1 did not connect in time") as late:
            init_group(name=name, rank=0, world_size=2, address=coordinator, timeout=3.0, node="a", token=TOKEN)
        other = meeting.result()
    try:
        (mine,) = [one.frame.f_locals["behind"] for one in late.traceback if one.name == "_make_ring"]
        assert not mine.usable
        assert f"fastrt-{name}-door" not in [one.name for one in threading.enumerate()]
    finally:
        other.close()
