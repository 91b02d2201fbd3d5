"""`ray.util.multiprocessing`: the interface of `multiprocessing.Pool`."""

from multiprocessing import JoinableQueue, TimeoutError

from fastrt.ray.util.multiprocessing.pool import AsyncResult, Pool

__all__ = ["AsyncResult", "JoinableQueue", "Pool", "TimeoutError"]
