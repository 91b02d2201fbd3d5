"""Dask's distributed scheduler with a local cluster of single-threaded worker processes."""

from __future__ import annotations

import logging
import os
from typing import Any

import dask
from distributed import Client, LocalCluster, wait
from peers.base import Peer, now
from workloads import check, check_many, look_at, next_stamp, stamp


class Dask(Peer):
    """A LocalCluster and its client."""

    def __init__(self, workers: int, store_bytes: int) -> None:
        super().__init__()
        dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 GB"})
        self._cluster = LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs=logging.ERROR,
        )
        self._client = Client(self._cluster)

    def _submit(self, function: Any, argument: Any) -> Any:
        return self._client.submit(function, argument, pure=False)

    def first(self) -> None:
        x = self.fresh()
        check(self._submit(stamp, x).result(), x)

    def close(self) -> None:
        self._client.close()
        self._cluster.close()

    def task_one(self) -> int:
        x = self.fresh()
        start = now()
        value = self._submit(stamp, x).result()
        took = now() - start
        check(value, x)
        return took

    def task_many(self, count: int) -> int:
        x = self.fresh(count)
        start = now()
        futures = [self._submit(stamp, k) for k in range(x, x + count)]
        values = self._client.gather(futures)
        del futures
        took = now() - start
        check_many(values, x)
        return took

    def chain(self, count: int) -> int:
        x = self.fresh(count)
        start = now()
        future = self._submit(stamp, x)
        for _ in range(count - 1):
            future = self._submit(next_stamp, future)
        value = future.result()
        del future
        took = now() - start
        check(value, x + count - 1)
        return took

    def wait_each(self, count: int) -> int:
        x = self.fresh(count)
        start = now()
        futures = [self._submit(stamp, k) for k in range(x, x + count)]
        seen = 0
        while futures:
            done, futures = wait(futures, return_when="FIRST_COMPLETED")
            seen += len(done)
            futures = list(futures)
        took = now() - start
        assert seen == count
        return took

    def put_small(self, count: int) -> int:
        x = self.fresh(count)
        start = now()
        futures = [self._client.scatter(k, hash=False) for k in range(x, x + count)]
        del futures
        return now() - start

    def prepare_get_small(self, count: int) -> list[Any]:
        return [self._client.scatter(k, hash=False) for k in range(count)]

    def get_small(self, count: int) -> int:
        futures = self.kept["get_small"]
        start = now()
        values = [future.result() for future in futures]
        took = now() - start
        assert values == list(range(count))
        return took

    def prepare_put_array(self, nbytes: int) -> list[Any]:
        return [None]

    def put_array(self, nbytes: int) -> int:
        array = self.array(nbytes)
        kept = self.kept["put_array"]
        start = now()
        kept[0] = None
        kept[0] = self._client.scatter(array, hash=False)
        return now() - start

    def prepare_get_array(self, nbytes: int) -> list[Any]:
        return [self._client.scatter(self.array(nbytes), hash=False)]

    def get_array(self, nbytes: int) -> int:
        future = self.kept["get_array"][0]
        start = now()
        value = future.result()
        took = now() - start
        assert value.nbytes == nbytes
        start = now()
        del value
        return took + now() - start

    def argument(self, nbytes: int) -> int:
        array = self.array(nbytes)
        array[0] = self.fresh()
        start = now()
        found, length, pid = self._submit(look_at, array).result()
        took = now() - start
        assert (found, length) == (array[0] + array[-1], len(array))
        assert pid != os.getpid()
        return took
