"""The common part of executors with the interface of concurrent.futures: tasks only, no store, no dependencies."""

from __future__ import annotations

import os
from concurrent.futures import Executor

from peers.base import Peer, now
from workloads import check, check_many, look_at, stamp


class Futures(Peer):
    """A running executor."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor

    def first(self) -> None:
        x = self.fresh()
        check(self._executor.submit(stamp, x).result(), x)

    def close(self) -> None:
        self._executor.shutdown()

    def task_one(self) -> int:
        submit, x = self._executor.submit, self.fresh()
        start = now()
        value = submit(stamp, x).result()
        took = now() - start
        check(value, x)
        return took

    def task_many(self, count: int) -> int:
        submit, x = self._executor.submit, self.fresh(count)
        start = now()
        futures = [submit(stamp, k) for k in range(x, x + count)]
        values = [future.result() for future in futures]
        del futures
        took = now() - start
        check_many(values, x)
        return took

    def argument(self, nbytes: int) -> int:
        array = self.array(nbytes)
        array[0] = self.fresh()
        start = now()
        found, length, pid = self._executor.submit(look_at, array).result()
        took = now() - start
        assert (found, length) == (array[0] + array[-1], len(array))
        assert pid != os.getpid()
        return took
