"""fastrt, and memcpy in the same process and the same mapping: the upper bound of a put."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from peers.base import Peer, now
from workloads import AsyncStamper, Stamper, blocks_for, check, check_many, look_at, next_stamp, stamp, stamps

import fastrt


class Fastrt(Peer):
    """An embedded session."""

    def __init__(self, workers: int, store_bytes: int) -> None:
        super().__init__()
        fastrt.init(num_workers=workers, object_store_memory=store_bytes)
        self._stamp = fastrt.remote(stamp)
        self._next = fastrt.remote(next_stamp)
        self._look = fastrt.remote(look_at)
        self._stamps = fastrt.remote(stamps)

    def first(self) -> None:
        x = self.fresh()
        check(fastrt.get(self._stamp.remote(x)), x)

    def close(self) -> None:
        fastrt.shutdown()

    # ---- tasks ----

    def task_one(self) -> int:
        get, remote, x = fastrt.get, self._stamp.remote, self.fresh()
        start = now()
        value = get(remote(x))
        took = now() - start
        check(value, x)
        return took

    def task_many(self, count: int) -> int:
        get, remote, x = fastrt.get, self._stamp.remote, self.fresh(count)
        start = now()
        refs = [remote(k) for k in range(x, x + count)]
        values = get(refs)
        del refs
        took = now() - start
        check_many(values, x)
        return took

    def chain(self, count: int) -> int:
        get, remote, x = fastrt.get, self._next.remote, self.fresh(count)
        start = now()
        ref = self._stamp.remote(x)
        for _ in range(count - 1):
            ref = remote(ref)
        value = get(ref)
        del ref
        took = now() - start
        check(value, x + count - 1)
        return took

    def wait_each(self, count: int) -> int:
        wait, remote, x = fastrt.wait, self._stamp.remote, self.fresh(count)
        start = now()
        refs = [remote(k) for k in range(x, x + count)]
        rounds = 0
        while refs:
            _, refs = wait(refs)
            rounds += 1
        took = now() - start
        assert rounds == count
        return took

    # ---- actors ----

    def prepare_actor_one(self, argument: int | None) -> list[Any]:
        return [fastrt.remote(Stamper).remote()]

    def actor_one(self) -> int:
        get, remote, x = fastrt.get, self.kept["actor_one"][0].stamp.remote, self.fresh()
        start = now()
        value = get(remote(x))
        took = now() - start
        check(value, x)
        return took

    def prepare_actor_many(self, count: int) -> list[Any]:
        return [fastrt.remote(Stamper).remote()]

    def actor_many(self, count: int) -> int:
        return self._calls(self.kept["actor_many"][0], count)

    def prepare_actor_async(self, count: int) -> list[Any]:
        return [fastrt.remote(AsyncStamper).remote()]

    def actor_async(self, count: int) -> int:
        return self._calls(self.kept["actor_async"][0], count)

    def generator(self, count: int) -> int:
        get, x = fastrt.get, self.fresh(count)
        start = now()
        values = [get(ref) for ref in self._stamps.remote(x, count)]
        took = now() - start
        check_many(values, x)
        return took

    def _calls(self, actor: Any, count: int) -> int:
        get, remote, x = fastrt.get, actor.stamp.remote, self.fresh(count)
        start = now()
        refs = [remote(k) for k in range(x, x + count)]
        values = get(refs)
        del refs
        took = now() - start
        check_many(values, x)
        return took

    # ---- values ----

    def put_small(self, count: int) -> int:
        put, x = fastrt.put, self.fresh(count)
        start = now()
        refs = [put(k) for k in range(x, x + count)]
        del refs
        return now() - start

    def prepare_get_small(self, count: int) -> list[Any]:
        return [fastrt.put(k) for k in range(count)]

    def get_small(self, count: int) -> int:
        get, refs = fastrt.get, self.kept["get_small"]
        start = now()
        values = [get(ref) for ref in refs]
        took = now() - start
        assert values == list(range(count))
        return took

    def prepare_put_array(self, nbytes: int) -> list[Any]:
        return [None] * blocks_for(nbytes)

    def put_array(self, nbytes: int) -> int:
        array, kept = self.array(nbytes), self.kept["put_array"]
        slot = self.fresh() % len(kept)
        start = now()
        kept[slot] = None
        kept[slot] = fastrt.put(array)
        return now() - start

    def prepare_get_array(self, nbytes: int) -> list[Any]:
        return [fastrt.put(self.array(nbytes))]

    def get_array(self, nbytes: int) -> int:
        get, ref = fastrt.get, self.kept["get_array"][0]
        start = now()
        view = get(ref)
        took = now() - start
        assert view.nbytes == nbytes
        start = now()
        del view
        return took + now() - start

    def argument(self, nbytes: int) -> int:
        array = self.array(nbytes)
        array[0] = self.fresh()
        start = now()
        found, length, pid = fastrt.get(self._look.remote(array))
        took = now() - start
        assert (found, length) == (array[0] + array[-1], len(array))
        assert pid != os.getpid()
        return took

    # ---- memcpy, as a peer of its own ----

    def prepare_memcpy(self, nbytes: int) -> list[Any]:
        return writable_blocks(nbytes, blocks_for(nbytes))

    def memcpy(self, nbytes: int) -> int:
        source, blocks = self.array(nbytes), self.kept["memcpy"]
        to, come = address(blocks[self.fresh() % len(blocks)]), source.ctypes.data
        start = now()
        ctypes.memmove(to, come, nbytes)
        return now() - start


def writable_blocks(nbytes: int, count: int) -> list[Any]:
    """Blocks of this process's own mapping of the store, not sealed; given back when they are dropped."""
    from fastrt._core.objects import handles
    from fastrt.store import client

    return [handles.create(client.require().client, nbytes, 16) for _ in range(count)]


def address(block: Any) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
