"""A node's end of a stream to another node, without processes: frames are passed by hand."""

import asyncio
import contextlib
import os

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import functions
from fastrt._core.repair.fsck import fsck
from fastrt._core.tasks import submission
from fastrt._core.tasks import tasks as core
from fastrt.cluster.peer_stream import Exchange
from fastrt.net.grpc.descriptors import message_set
from fastrt.store.client import Store
from fastrt.store.waiter import LoopWaiter

Frame = message_set("node").message("fastrt.node.Frame")
PATIENCE_S = 30.0


class Side:
    """A node without daemon and workers: an arena, and its end of the stream."""

    def __init__(self):
        self.segment = Segment.create(64 << 20, clients_max=64, objects_max=1 << 12, tasks_max=1 << 12, trace=False)
        index, gen = clients.admit(self.segment, os.getpid(), clients.KIND_DRIVER, "test")
        self.client = Client(self.segment, index, gen)
        self.store = Store(self.client, 0.0)
        self.waiter = LoopWaiter(self.store, asyncio.get_running_loop())
        self.exchange = Exchange(self.store, self.waiter)
        self.function = functions.add_function(self.client, b"f" * 16, self.store.put(b"code" * 10), "f")

    def submit(self, *args, retries=0):
        """Submit a task; its result."""
        return submission.submit(self.client, submission.TaskOptions(self.function, retries=retries), args)

    def forward(self, *args, retries=0):
        """Submit a task and forward it; return its result."""
        ref = self.submit(*args, retries=retries)
        self.exchange.forward(core.next_task(self.client, 0.0, 0.0))
        return ref

    async def frames(self, enough):
        """One frame with everything that comes until `enough(frame)`."""
        return await frames_of(self.exchange, enough)

    def close(self):
        self.exchange.close("the test is over")
        self.waiter.close()
        assert fsck(self.client, True) == []
        self.client.close()
        self.segment.unlink()


async def frames_of(exchange, enough):
    whole = Frame()
    while not enough(whole):
        whole.MergeFrom(await asyncio.wait_for(exchange.out.next_frame(), PATIENCE_S))
    return whole


@contextlib.asynccontextmanager
async def pair():
    here, there = Side(), Side()
    try:
        yield here, there
    finally:
        here.close()
        there.close()


def in_loop(test):
    """Run a coroutine test; the interpreter's own loop is enough."""

    def run():
        asyncio.run(test())

    run.__name__ = test.__name__
    return run
