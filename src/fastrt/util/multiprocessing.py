"""The replacement of `multiprocessing.Pool`, under Ray's path: `from fastrt.util.multiprocessing import Pool`."""

from multiprocessing import TimeoutError

from fastrt.util.pool import AsyncResult, Pool

__all__ = ["AsyncResult", "Pool", "TimeoutError"]
