"""The rows of the comparison: the work, the operations in a unit, and the bar for fastrt.

A peer that can do a row has a method of the row's name, and `prepare_<method>` if something must be made
first. The method does one unit and returns its nanoseconds; checks of the results lie outside that time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

WORKERS = 2
STORE_BYTES = 2 << 30
MANY = 1000
CHAIN = 100
SMALL = 100
ARGUMENT_BYTES = 100_000_000
_PID_BITS = 23  # a process id has at most 22


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        key: name in the JSON; method: of the peers; argument: given to it, if any.
        title: in the table.
        ops: operations in one unit; nbytes: moved by one unit, when the row is about bytes.
        latency: the time of one operation counts, not the number of operations a second.
        required: (peer, factor): fastrt must reach factor times the peer's rate.
        most_us: or its median time must be at most this.
        round_s: how long one round of it lasts, at least one unit.
    """

    key: str
    title: str
    method: str
    argument: int | None = None
    ops: int = 1
    nbytes: int = 0
    latency: bool = False
    required: tuple[tuple[str, float], ...] = ()
    most_us: float = 0.0
    round_s: float = 0.5


def _put(title: str, nbytes: int) -> Row:
    return Row(
        f"put_{nbytes}", f"put {title}", "put_array", nbytes, nbytes=nbytes, required=(("memcpy", 0.85),), round_s=0.8
    )


def _get(title: str, nbytes: int) -> Row:
    return Row(f"get_{nbytes}", f"get {title}", "get_array", nbytes, latency=True, most_us=3.0, round_s=0.2)


ROWS = (
    Row("task_one", "tasks, one at a time", "task_one", required=(("pool", 20),)),
    Row(
        "task_many",
        f"tasks, {MANY:,} in flight",
        "task_many",
        MANY,
        ops=MANY,
        required=(("pool", 30), ("ray", 150)),
        round_s=1.0,
    ),
    Row("chain", f"chain of {CHAIN} dependent tasks", "chain", CHAIN, ops=CHAIN, required=(("ray", 100),)),
    Row(
        "wait_each",
        f"{MANY:,} tasks, wait one by one",
        "wait_each",
        MANY,
        ops=MANY,
        required=(("ray", 80),),
        round_s=1.0,
    ),
    Row("actor_one", "actor calls, one at a time", "actor_one", required=(("ray", 40),)),
    Row(
        "actor_many",
        f"actor calls, {MANY:,} in flight",
        "actor_many",
        MANY,
        ops=MANY,
        required=(("ray", 40),),
        round_s=1.0,
    ),
    Row(
        "actor_async",
        f"async actor calls, {MANY:,} in flight",
        "actor_async",
        MANY,
        ops=MANY,
        required=(("ray", 20),),
        round_s=1.0,
    ),
    Row(
        "generator",
        f"generator, items of a stream of {MANY:,}, each read",
        "generator",
        MANY,
        ops=MANY,
        required=(("ray", 50),),
    ),
    Row("put_small", "put a small value", "put_small", SMALL, ops=SMALL, required=(("ray", 200),), round_s=0.2),
    Row("get_small", "get a small value", "get_small", SMALL, ops=SMALL, required=(("ray", 100),), round_s=0.2),
    _put("1 MiB", 1 << 20),
    _put("64 MiB", 64 << 20),
    _put("800 MB", 800_000_000),
    _get("64 KiB array", 64 << 10),
    _get("64 MiB array", 64 << 20),
    _get("800 MB array", 800_000_000),
    Row(
        "argument",
        "100 MB array as argument",
        "argument",
        ARGUMENT_BYTES,
        nbytes=ARGUMENT_BYTES,
        required=(("memcpy", 0.8),),
        round_s=1.0,
    ),
)


def blocks_for(nbytes: int) -> int:
    """The number of values that stay alive while more are put: enough to leave the caches, within the store."""
    return max(1, min(8, (128 << 20) // nbytes))


# ---- the tasks: each result is derived from the argument and from the process that made it ----


def stamp(x: int) -> int:
    """Return `x` and the id of the process that runs this."""
    return x << _PID_BITS | os.getpid()


class Stamper:
    """An actor with the work of `stamp`."""

    def stamp(self, x: int) -> int:
        """Return `x` and the id of the actor's process."""
        return stamp(x)


class AsyncStamper:
    """The same with a coroutine."""

    async def stamp(self, x: int) -> int:
        """Return `x` and the id of the actor's process."""
        return stamp(x)


def stamps(x: int, count: int) -> Any:
    """Yield `stamp` of x, x + 1, ..."""
    for k in range(x, x + count):
        yield stamp(k)


def next_stamp(x: int) -> int:
    """Return one more than `stamp`ed x, stamped here."""
    return (x >> _PID_BITS) + 1 << _PID_BITS | os.getpid()


def look_at(array: Any) -> tuple[float, int, int]:
    """Read an array's ends; all of it has arrived if its length is right."""
    return float(array[0]) + float(array[-1]), len(array), os.getpid()


def check(value: int, x: int) -> None:
    """Check that `value` is `x` stamped in another process.

    Raises:
        AssertionError: it is not.
    """
    here = value & (1 << _PID_BITS) - 1 == os.getpid()
    if value >> _PID_BITS != x or here:
        raise AssertionError(f"a task returned {value >> _PID_BITS}, not {x}, or ran in the driver ({here})")


def check_many(values: list[int], first: int) -> None:
    """`check` each of the values of first, first + 1, ..."""
    for k, value in enumerate(values):
        check(value, first + k)
