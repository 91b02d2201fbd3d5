"""Ray on one node, with the features off that a plain program does not need."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from peers.base import Peer, now
from workloads import AsyncStamper, Stamper, blocks_for, check, check_many, look_at, next_stamp, stamp, stamps


class Ray(Peer):
    """A local cluster of one node."""

    def __init__(self, workers: int, store_bytes: int) -> None:
        super().__init__()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=workers,
            object_store_memory=store_bytes,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        self._fresh_bytes = 2 * store_bytes
        self._stamp = ray.remote(stamp)
        self._next = ray.remote(next_stamp)
        self._look = ray.remote(look_at)
        self._stamps = ray.remote(stamps)

    def first(self) -> None:
        x = self.fresh()
        check(ray.get(self._stamp.remote(x)), x)

    def close(self) -> None:
        ray.shutdown()

    def task_one(self) -> int:
        get, remote, x = ray.get, self._stamp.remote, self.fresh()
        start = now()
        value = get(remote(x))
        took = now() - start
        check(value, x)
        return took

    def task_many(self, count: int) -> int:
        get, remote, x = ray.get, self._stamp.remote, self.fresh(count)
        start = now()
        refs = [remote(k) for k in range(x, x + count)]
        values = get(refs)
        del refs
        took = now() - start
        check_many(values, x)
        return took

    def chain(self, count: int) -> int:
        get, remote, x = ray.get, self._next.remote, self.fresh(count)
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
        """The method of Ray's own microbenchmark: only the first call needs to ask for the values."""
        wait, remote, x = ray.wait, self._stamp.remote, self.fresh(count)
        start = now()
        refs = [remote(k) for k in range(x, x + count)]
        rounds, fetch = 0, True
        while refs:
            _, refs = wait(refs, fetch_local=fetch)
            rounds, fetch = rounds + 1, False
        took = now() - start
        assert rounds == count
        return took

    # ---- actors ----

    def prepare_actor_one(self, argument: int | None) -> list[Any]:
        return [ray.remote(Stamper).remote()]

    def actor_one(self) -> int:
        get, remote, x = ray.get, self.kept["actor_one"][0].stamp.remote, self.fresh()
        start = now()
        value = get(remote(x))
        took = now() - start
        check(value, x)
        return took

    def prepare_actor_many(self, count: int) -> list[Any]:
        return [ray.remote(Stamper).remote()]

    def actor_many(self, count: int) -> int:
        return self._calls(self.kept["actor_many"][0], count)

    def prepare_actor_async(self, count: int) -> list[Any]:
        return [ray.remote(AsyncStamper).remote()]

    def actor_async(self, count: int) -> int:
        return self._calls(self.kept["actor_async"][0], count)

    def generator(self, count: int) -> int:
        get, x = ray.get, self.fresh(count)
        start = now()
        values = [get(ref) for ref in self._stamps.remote(x, count)]
        took = now() - start
        check_many(values, x)
        return took

    def _calls(self, actor: Any, count: int) -> int:
        get, remote, x = ray.get, actor.stamp.remote, self.fresh(count)
        start = now()
        refs = [remote(k) for k in range(x, x + count)]
        values = get(refs)
        del refs
        took = now() - start
        check_many(values, x)
        return took

    def put_small(self, count: int) -> int:
        put, x = ray.put, self.fresh(count)
        start = now()
        refs = [put(k) for k in range(x, x + count)]
        del refs
        return now() - start

    def prepare_get_small(self, count: int) -> list[Any]:
        return [ray.put(k) for k in range(count)]

    def get_small(self, count: int) -> int:
        get, refs = ray.get, self.kept["get_small"]
        start = now()
        values = [get(ref) for ref in refs]
        took = now() - start
        assert values == list(range(count))
        return took

    def prepare_put_array(self, nbytes: int) -> list[Any]:
        # Its store frees memory late and takes fresh pages meanwhile: it is warm when it has used all of them.
        while self._fresh_bytes > 0:
            ray.put(self.array(nbytes))
            self._fresh_bytes -= nbytes
        return [None] * blocks_for(nbytes)

    def put_array(self, nbytes: int) -> int:
        array, kept = self.array(nbytes), self.kept["put_array"]
        slot = self.fresh() % len(kept)
        start = now()
        kept[slot] = None
        kept[slot] = ray.put(array)
        return now() - start

    def prepare_get_array(self, nbytes: int) -> list[Any]:
        return [ray.put(self.array(nbytes))]

    def get_array(self, nbytes: int) -> int:
        get, ref = ray.get, self.kept["get_array"][0]
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
        found, length, pid = ray.get(self._look.remote(array))
        took = now() - start
        assert (found, length) == (array[0] + array[-1], len(array))
        assert pid != os.getpid()
        return took
