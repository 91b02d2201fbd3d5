"""The look-alike of `multiprocessing.Pool` where Ray has it: `from fastrt.util.multiprocessing import Pool`."""

from multiprocessing import TimeoutError

from fastrt.util.pool import AsyncResult, Pool

__all__ = ["AsyncResult", "Pool", "TimeoutError"]
