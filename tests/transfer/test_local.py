"""GetObj: a program on this machine gets objects through shared memory."""

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from fastrt.net.grpc.descriptors import message_set
from fastrt.objstore.service import GET, ObjStoreServer
from fastrt.transfer import obj
from support.sites import PATIENCE_S, Caller, Site

Make = Callable[..., Any]
# The seed's messages: a foreign program has them from protos/ray alone.
REQUEST, REPLY = message_set("ray").message("GetObjRequest"), message_set("ray").message("GetObjReply")


def ask(call: Caller, objref: int) -> Any:
    method = call.channel.unary_unary(GET, REQUEST.SerializeToString, REPLY.FromString)
    return method.future(REQUEST(objref=objref), timeout=PATIENCE_S, metadata=call.metadata)


def fetch(reply: Any) -> int | None:
    """The descriptor of an object, None if it is not given."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect("\0" + reply.bucket.removeprefix("@"))
        sock.sendall(struct.pack("<Q", reply.handle))
        with contextlib.suppress(ConnectionError):
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            return fds[0] if fds else None
    return None


@contextlib.contextmanager
def mapped(reply: Any) -> Iterator[tuple[int, mmap.mmap]]:
    fd = fetch(reply)
    assert fd is not None
    try:
        with mmap.mmap(fd, reply.size, prot=mmap.PROT_READ) as view:
            yield fd, view
    finally:
        os.close(fd)


@pytest.mark.parametrize("value", [7, b"b" * (5 << 20), np.arange(1e6), ["x", {"k": 1.5}]], ids=lambda v: type(v))
def test_object_is_mapped_and_cannot_be_changed(site: Site, call: Caller, value: Any) -> None:
    site.put(5, value)
    with mapped(ask(call, 5).result()) as (fd, view):
        np.testing.assert_equal(obj.from_bytes(bytes(view), False), value)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError):
            os.write(fd, b"x")
        with pytest.raises(OSError):
            mmap.mmap(fd, 0, prot=mmap.PROT_WRITE | mmap.PROT_READ)
        with open(f"/proc/self/fd/{fd}", "rb+") as again, pytest.raises(OSError):  # not by another descriptor either
            again.truncate(0)
        call("DeallocateObject", canonical_objref=5)
        site.wait_until_empty()
        np.testing.assert_equal(obj.from_bytes(bytes(view), False), value)  # the mapping outlives the object


def test_handle_is_good_for_one_fetch(site: Site, call: Caller) -> None:
    site.put(5, "value")
    reply = ask(call, 5).result()
    assert fetch(REPLY(bucket=reply.bucket, handle=reply.handle ^ 1)) is None
    with mapped(reply):
        pass
    assert fetch(reply) is None


def test_caller_waits_until_the_object_is_here(
    site: Site, server: ObjStoreServer, call: Caller, wait_until: Make
) -> None:
    waiting, leaving = ask(call, 5), ask(call, 6)
    wait_until(lambda: len(server._getting) == 2, "both calls wait")
    leaving.cancel()
    wait_until(lambda: len(server._getting) == 1, "one has gone")
    assert list(server.table._waiting) == [5]
    data = obj.to_bytes("value")
    call.stream([(5, len(data), data)])
    with mapped(waiting.result()) as (_, view):
        assert obj.from_bytes(bytes(view), False) == "value"


def test_objects_that_nobody_fetches_do_not_fill_the_memory(make_site: Make, closing: Make, caller: Make) -> None:
    site = make_site(16 << 20)
    server = closing(site.serve())
    call = caller(server.address)
    site.put(5, b"b" * (5 << 20))
    replies = [ask(call, 5).result() for _ in range(2)]
    with pytest.raises(grpc.RpcError, match="offered to programs") as refused:
        [ask(call, 5).result() for _ in range(2)]
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with mapped(replies[0]):
        ask(call, 5).result()  # there is room again
