"""Uses of the public API for type checkers, read by `test_types.py` and never run.

A line with the comment `wrong` must be reported by mypy, pyright, pyrefly and ty, one with `wrong, not to mypy` by all
but mypy. One with `not for pyrefly` is reported by pyrefly although it is right. No other line may be reported.
"""

import concurrent.futures
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import fastrt
from fastrt import ActorHandle, ObjectRef, ObjectRefGenerator, RemoteFunction, collective, ps
from fastrt.actor import Actor, method
from fastrt.tasks.actor_handle import ActorMethod

# ---- remote functions ----


@fastrt.remote
def add(a: int, b: int) -> int:
    return a + b


@fastrt.remote
def scale(values: list[float], by: float = 2.0, *, offset: float = 0.0) -> list[float]:
    return [value * by + offset for value in values]


@fastrt.remote
def name(of: object) -> str:
    return str(of)


@fastrt.remote
def nothing() -> None:
    return None


@fastrt.remote
def perhaps(a: int | None, b: Sequence[float] = ()) -> int | None:
    return a


@fastrt.remote
def total(*values: int) -> int:
    return sum(values)


@fastrt.remote
def labelled(label: str, *values: int, start: int = 0) -> dict[str, int]:
    return {label: sum(values, start)}


@fastrt.remote
def count(n: int) -> Iterator[int]:
    yield from range(n)


@fastrt.remote
def six(a: int, b: str, c: float, d: bytes, e: bool, f: list[int]) -> tuple[int, str]:
    return a, b


@fastrt.remote
def apply(function: Callable[[int], str], value: int) -> str:
    return function(value)


@fastrt.remote
def untyped(n, by=2):  # type: ignore[no-untyped-def]
    yield n * by


# No literals: ty would keep them as the types of the values.
number: ObjectRef[int] = fastrt.put(int("1"))
text: ObjectRef[str] = fastrt.put(str(1))
floats: ObjectRef[list[float]] = fastrt.put([1.0])
unknown: ObjectRef = fastrt.put(1)

assert_type(add.remote(1, 2), ObjectRef[int])
assert_type(add.remote(1, b=2), ObjectRef[int])
assert_type(add.remote(a=1, b=2), ObjectRef[int])
assert_type(add.remote(number, 2), ObjectRef[int])
assert_type(add.remote(1, number), ObjectRef[int])
assert_type(add.remote(number, number), ObjectRef[int])
assert_type(add.remote(number, b=2), ObjectRef[int])
assert_type(add.remote(unknown, unknown), ObjectRef[int])
assert_type(add.remote(add.remote(1, 2), add.remote(3, 4)), ObjectRef[int])
assert_type(fastrt.get(add.remote(1, 2)), int)
assert_type(add.function(1, 2), int)
assert_type(scale.remote([1.0]), ObjectRef[list[float]])
assert_type(scale.remote([1.0], 3.0), ObjectRef[list[float]])
assert_type(scale.remote([1.0], by=3.0), ObjectRef[list[float]])
assert_type(scale.remote([1.0], 3, offset=1), ObjectRef[list[float]])
assert_type(scale.remote(floats), ObjectRef[list[float]])
assert_type(scale.remote(floats, 2.0), ObjectRef[list[float]])
assert_type(scale.remote(floats, offset=1.0), ObjectRef[list[float]])
assert_type(scale.remote(floats, number), ObjectRef[list[float]])
assert_type(scale.remote([1.0], number), ObjectRef[list[float]])
assert_type(scale.remote([1.0], number, offset=1.0), ObjectRef[list[float]])
assert_type(scale.remote(scale.remote([1.0])), ObjectRef[list[float]])
assert_type(name.remote(1), ObjectRef[str])
assert_type(name.remote(text), ObjectRef[str])
assert_type(name.remote([text, number]), ObjectRef[str])
assert_type(nothing.remote(), ObjectRef[None])
assert_type(perhaps.remote(None), ObjectRef[int | None])
assert_type(perhaps.remote(number), ObjectRef[int | None])
assert_type(perhaps.remote(number, floats), ObjectRef[int | None])
assert_type(perhaps.remote(1, (1.0, 2.0)), ObjectRef[int | None])
assert_type(total.remote(), ObjectRef[int])
assert_type(total.remote(1, 2, 3), ObjectRef[int])
assert_type(total.remote(number, number, number), ObjectRef[int])
assert_type(total.remote(1, number), ObjectRef[int])
assert_type(total.remote(number, 1, number), ObjectRef[int])  # not for pyrefly
assert_type(total.remote(1, number, 2, number), ObjectRef[int])  # not for pyrefly
assert_type(total.remote(*[1, 2]), ObjectRef[int])
assert_type(total.remote(*[number, number]), ObjectRef[int])
assert_type(labelled.remote("a", 1, 2), ObjectRef[dict[str, int]])
assert_type(labelled.remote("a", 1, start=2), ObjectRef[dict[str, int]])
assert_type(labelled.remote(text, 1, start=2), ObjectRef[dict[str, int]])
assert_type(labelled.remote(text, number, start=2), ObjectRef[dict[str, int]])
assert_type(labelled.remote("a", *[number, number]), ObjectRef[dict[str, int]])
assert_type(six.remote(1, "a", 1.0, b"", True, [1]), ObjectRef[tuple[int, str]])
assert_type(six.remote(1, text, 1.0, b"", True, [1]), ObjectRef[tuple[int, str]])
assert_type(six.remote(1, "a", 1.0, b"", True, fastrt.put([1])), ObjectRef[tuple[int, str]])
assert_type(six.remote(number, text, 1.0, fastrt.put(b""), e=True, f=[]), ObjectRef[tuple[int, str]])
assert_type(fastrt.get(six.remote(1, "a", 1.0, b"", True, [1])), tuple[int, str])
assert_type(apply.remote(str, 1), ObjectRef[str])
assert_type(apply.remote(lambda value: str(value), number), ObjectRef[str])

[fastrt.get(item) for item in untyped.remote(number)]

add.remote("a", 2)  # wrong: type of an argument
add.remote(1, "b")  # wrong: type of an argument
add.remote(1)  # wrong: count
add.remote()  # wrong: count
add.remote(1, 2, 3)  # wrong: count
add.remote(number)  # wrong, not to mypy: count
add.remote(number, number, number)  # wrong, not to mypy: count
add.remote(1, c=2)  # wrong: keyword
add.remote(number, c=2)  # wrong: keyword
add.remote(text, 2)  # wrong: type of a reference's value
add.remote(1, text)  # wrong: type of a reference's value
add.remote(number, text)  # wrong: type of a reference's value
add.remote("a", number)  # wrong: type beside a reference
add.remote(number, "b")  # wrong: type beside a reference
scale.remote([1.0], ofset=1.0)  # wrong: keyword
scale.remote([1.0], 1.0, 2.0)  # wrong: count
scale.remote(floats, "a")  # wrong: type beside a reference
scale.remote(["a"])  # wrong: type of an argument
nothing.remote(1)  # wrong: count
total.remote("a")  # wrong: type of an argument
total.remote(1, text)  # wrong: type of a reference's value
labelled.remote(1)  # wrong: type of an argument
six.remote(1, "a", 1.0, b"", True, text)  # wrong: type of a reference's value
six.remote(1, "a", 1.0, b"", True)  # wrong: count
apply.remote(len, 1)  # wrong: type of an argument
wrong_result: ObjectRef[str] = add.remote(1, 2)  # wrong: type of the result
wrong_value: str = fastrt.get(add.remote(1, 2))  # wrong: type of the result
fastrt.get(add.remote(1, 2)).upper()  # wrong: type of the result
add.remotely(1, 2)  # wrong: no such method
fastrt.remotely(len)  # wrong: no such name

# ---- generators ----

assert_type(count.remote(3), ObjectRefGenerator[int])
assert_type(count.remote(number), ObjectRefGenerator[int])
assert_type(next(count.remote(3)), ObjectRef[int])
assert_type(count.remote(3).next(timeout=1.0), ObjectRef[int])
assert_type(fastrt.get(next(count.remote(3))), int)
assert_type([fastrt.get(item) for item in count.remote(3)], list[int])
assert_type(count.remote(3).is_finished(), bool)
count.remote("a")  # wrong: type of an argument


async def items() -> list[int]:
    found = []
    async for item in count.remote(3):
        assert_type(item, ObjectRef[int])
        assert_type(await item, int)
        found.append(await item)
    return found


# ---- options ----


@fastrt.remote(max_retries=1, num_cpus=0.5)
def with_options(a: int) -> str:
    return str(a)


@fastrt.remote(num_cpus=2)
def with_common_options(a: int) -> str:
    return str(a)


@fastrt.remote()
def without_options(a: int) -> str:
    return str(a)


@fastrt.remote(timeout=1.0)
def count_slowly(n: int) -> Iterator[str]:
    yield from map(str, range(n))


@fastrt.remote(num_returns=2)
def pair(a: int) -> tuple[int, int]:
    return a, a


@fastrt.remote(num_returns=0)
def without_result(a: int) -> None:
    return None


@fastrt.remote(num_returns="streaming")
def stream(n: int) -> list[bytes]:
    return [b""] * n


assert_type(with_options.remote(1), ObjectRef[str])
assert_type(with_options.remote(number), ObjectRef[str])
assert_type(with_common_options.remote(1), ObjectRef[str])
assert_type(with_common_options.remote(number), ObjectRef[str])
assert_type(without_options.remote(1), ObjectRef[str])
assert_type(count_slowly.remote(1), ObjectRefGenerator[str])
assert_type(count_slowly.remote(number), ObjectRefGenerator[str])
assert_type(pair.remote(1), list[ObjectRef[Any]])
assert_type(pair.remote(number), list[ObjectRef[Any]])
assert_type(stream.remote(1), ObjectRefGenerator[bytes])
assert_type(add.options(num_cpus=2).remote(1, 2), ObjectRef[int])
assert_type(add.options(num_cpus=2).remote(number, 2), ObjectRef[int])
assert_type(add.options(max_retries=-1, retry_exceptions=[ValueError]).remote(1, 2), ObjectRef[int])
assert_type(add.options(num_returns=1).remote(1, 2), ObjectRef[int])
assert_type(add.options(num_returns=3).remote(1, 2), list[ObjectRef[Any]])
assert_type(add.options(name="sum").options(priority=3).remote(1, 2), ObjectRef[int])
assert_type(count.options(generator_backpressure=4).remote(1), ObjectRefGenerator[int])
assert_type(count.options(num_returns="dynamic").remote(1), ObjectRef[Any])
assert_type(stream.options(timeout=2).remote(1), ObjectRefGenerator[bytes])
assert_type(scale.options(num_returns="streaming").remote([1.0]), ObjectRefGenerator[float])
assert_type(add.options(runtime_env={"env_vars": {"A": "b"}}).function(1, 2), int)
assert_type(fastrt.remote(len).remote([1]), ObjectRef[int])
assert_type(fastrt.remote(max_retries=0)(len).remote([1]), ObjectRef[int])

with_options.remote("a")  # wrong: type of an argument
with_common_options.remote("a")  # wrong: type of an argument
pair.remote()  # wrong: count
add.options(cpus=2)  # wrong: option
add.options(num_cpus="2")  # wrong: type of an option
add.options(max_restarts=1)  # wrong: option of a class
add.options(num_cpus=2).remote("a", 2)  # wrong: type of an argument
fastrt.remote(cpus=2)  # wrong: option
fastrt.remote(num_cpus="two")  # wrong: type of an option
fastrt.remote(max_retries=1, max_restarts=1)  # wrong: options of functions and of classes

# ---- references ----

assert_type(fastrt.put(fastrt.get(number)), ObjectRef[int])
assert_type(fastrt.put([1.0]), ObjectRef[list[float]])
assert_type(fastrt.get(number), int)
assert_type(fastrt.get(text), str)
assert_type(fastrt.get(floats), list[float])
assert_type(fastrt.get(unknown), Any)
assert_type(fastrt.get(number, timeout=1.0), int)
assert_type(fastrt.get(floats, copy=True), list[float])
assert_type(fastrt.get([number, number]), list[int])
assert_type(fastrt.get((text, text)), list[str])
assert_type(fastrt.get([add.remote(k, k) for k in range(3)]), list[int])
assert_type(fastrt.get(next(iter([number]))), int)
assert_type(number.hex(), str)
assert_type(number.future(), concurrent.futures.Future[int])
assert_type(number.future().result(), int)
assert_type(fastrt.get([text])[0].upper(), str)
assert_type(fastrt.wait([number, number]), tuple[list[ObjectRef[int]], list[ObjectRef[int]]])
assert_type(fastrt.wait([text], timeout=0)[0], list[ObjectRef[str]])
assert_type(fastrt.get(fastrt.wait([text])[0]), list[str])
assert_type(fastrt.wait([count.remote(1)])[0], list[ObjectRefGenerator[int]])
assert_type([fastrt.get(ref) for ref in fastrt.as_completed([number])], list[int])
assert_type(fastrt.as_completed([number], timeout=1.0), Iterator[ObjectRef[int]])
assert_type(next(fastrt.as_completed({text})), ObjectRef[str])
assert_type(fastrt.progress([number]).get(), list[int])
assert_type(fastrt.progress([text], "texts").wait(), list[ObjectRef[str]])
assert_type([fastrt.get(ref) for ref in fastrt.progress([number])], list[int])
assert_type(fastrt.cancel(number), None)
widened: ObjectRef[float] = number
bare: ObjectRef = number


async def value() -> str:
    assert_type(await number, int)
    return await text


fastrt.get(1)  # wrong: not a reference
fastrt.get([1])  # wrong: not references
fastrt.get(add)  # wrong: a function
fastrt.get(number, timeout="a")  # wrong: type of an argument
fastrt.wait(number)  # wrong: not a list
fastrt.wait([1])  # wrong: not references
fastrt.as_completed([1])  # wrong: not references
fastrt.progress(number)  # wrong: not a list
fastrt.cancel(1)  # wrong: not a reference
narrowed: ObjectRef[bool] = number  # wrong: type of a value

# ---- actors whose handles are typed ----


class Counter(Actor):
    def __init__(self, start: int, step: int = 1) -> None:
        self.value = start
        self.step = step

    @method()
    def add(self, by: int = 1, *, times: int = 1) -> int:
        self.value += by * times
        return self.value

    @method()
    def reset(self) -> None:
        self.value = assert_type(self.add(1), int)

    @method(timeout=1.0)
    def name(self, prefix: str) -> str:
        return prefix + str(self.value)

    @method()
    def items(self, n: int) -> Iterator[int]:
        yield from range(n)

    @method()
    async def later(self, delay: float) -> bytes:
        return b""

    @method()
    async def texts(self, n: int) -> AsyncIterator[str]:
        yield ""

    @method(num_returns=2)
    def both(self) -> tuple[int, int]:
        return self.value, self.step

    @method(num_returns=0)
    def silent(self, by: int) -> None:
        return None


RemoteCounter = fastrt.remote(Counter)
counter = RemoteCounter.remote(1)
assert_type(counter, Counter)
assert_type(RemoteCounter.remote(1, 2), Counter)
assert_type(RemoteCounter.remote(1, step=2), Counter)
assert_type(RemoteCounter.remote(number), Counter)
assert_type(RemoteCounter.remote(number, number), Counter)
assert_type(RemoteCounter.options(name="c", max_restarts=1).remote(1), Counter)
assert_type(fastrt.remote(max_restarts=1)(Counter).remote(1), Counter)
assert_type(fastrt.remote(num_cpus=1)(Counter).remote(1), Counter)
assert_type(counter.add.remote(), ObjectRef[int])
assert_type(counter.add.remote(2), ObjectRef[int])
assert_type(counter.add.remote(by=2), ObjectRef[int])
assert_type(counter.add.remote(2, times=3), ObjectRef[int])
assert_type(counter.add.remote(number), ObjectRef[int])
assert_type(counter.add.remote(number, times=3), ObjectRef[int])
assert_type(counter.add.remote(counter.add.remote()), ObjectRef[int])
assert_type(fastrt.get(counter.add.remote(2)), int)
assert_type(fastrt.get([counter.add.remote(k) for k in range(3)]), list[int])
assert_type(counter.reset.remote(), ObjectRef[None])
assert_type(counter.name.remote("a"), ObjectRef[str])
assert_type(counter.name.remote(text), ObjectRef[str])
assert_type(counter.items.remote(3), ObjectRefGenerator[int])
assert_type(counter.items.remote(number), ObjectRefGenerator[int])
assert_type(fastrt.get(next(counter.items.remote(3))), int)
assert_type(counter.later.remote(1.0), ObjectRef[bytes])
assert_type(counter.texts.remote(1), ObjectRefGenerator[str])
assert_type(counter.both.remote(), list[ObjectRef[Any]])
assert_type(counter.add.options(timeout=1.0).remote(2), ObjectRef[int])
assert_type(counter.add.options(concurrency_group="io", max_task_retries=2).remote(number), ObjectRef[int])
assert_type(fastrt.kill(counter), None)


@fastrt.remote
def use(counter: Counter, by: int) -> int:
    return fastrt.get(counter.add.remote(by))


assert_type(use.remote(counter, 2), ObjectRef[int])
assert_type(use.remote(counter, number), ObjectRef[int])

RemoteCounter.remote()  # wrong: count
RemoteCounter.remote("a")  # wrong: type of an argument
RemoteCounter.remote(text)  # wrong: type of a reference's value
RemoteCounter.remote(1, steps=2)  # wrong: keyword
RemoteCounter.options(max_retries=2)  # wrong: option of a function
RemoteCounter.options(max_restarts="a")  # wrong: type of an option
RemoteCounter.options(lifetime="forever")  # wrong: value of an option
counter.subtract.remote(1)  # wrong: no such method
counter.add.remote("a")  # wrong: type of an argument
counter.add.remote(1, 2)  # wrong: count
counter.add.remote(time=2)  # wrong: keyword
counter.add.remote(text)  # wrong: type of a reference's value
counter.name.remote()  # wrong: count
counter.add.options(cpus=1)  # wrong: option
wrong_count: ObjectRef[str] = counter.add.remote(1)  # wrong: type of the result
fastrt.get(counter.name.remote("a")) + 1  # wrong: type of the result
fastrt.get(counter)  # wrong: not a reference
fastrt.kill(number)  # wrong: not an actor
method(retries=1)  # wrong: option
use.remote(1, 2)  # wrong: not an actor

# ---- other actors: any method may be called ----


class Plain:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, by: int) -> int:
        return self.value + by


RemotePlain = fastrt.remote(Plain)
plain = RemotePlain.remote(1)
assert_type(plain, ActorHandle[Plain])
assert_type(RemotePlain.options(name="plain").remote(1), ActorHandle[Plain])
assert_type(fastrt.remote(max_restarts=1)(Plain).remote(1), ActorHandle[Plain])
assert_type(plain.add.remote(1), Any)
assert_type(plain.__fastrt_call__.remote(len), Any)
assert_type(fastrt.get_actor("plain"), ActorHandle)
assert_type(fastrt.kill(plain), None)
fastrt.kill(Plain(1))  # wrong: not an actor

# ---- Executor ----


def half(n: int, digits: int = 1) -> float:
    return round(n / 2, digits)


with fastrt.Executor(max_workers=2) as executor:
    assert_type(executor.submit(half, 3).result(), float)
    assert_type(executor.submit(half, 3, 2).result(), float)
    assert_type(executor.submit(half, 3, digits=2).result(timeout=1.0), float)
    assert_type(executor.submit(half, number).result(), float)
    assert_type(executor.submit(half, 3, number).result(), float)
    assert_type(executor.submit(len, "abc").result(), int)
    assert_type(list(executor.map(half, [1, 2])), list[float])
    assert_type(list(executor.map(str, range(3), chunksize=2)), list[str])
    assert_type(executor.shutdown(), None)
    executor.submit(half, "a")  # wrong: type of an argument
    executor.submit(half)  # wrong: count
    executor.submit(half, 1, digit=2)  # wrong: keyword
    executor.submit(half, text)  # wrong: type of a reference's value
    executor.submit(1)  # wrong: not a function

# ---- collectives ----

doubles: npt.NDArray[np.float64] = np.zeros(4)
out: npt.NDArray[np.int32] = np.zeros(4, np.int32)
halves = collective.as_bfloat16(np.zeros(4, np.uint16))
later = bool(input())

with collective.init_group(rank=0, world_size=2) as group:
    assert_type(group.rank, int)
    assert_type(group.barrier(), None)
    assert_type(group.barrier(async_op=True), collective.Handle[None])
    assert_type(group.all_reduce(doubles), npt.NDArray[np.float64])
    assert_type(group.all_reduce(doubles, "max", timeout=1.0), npt.NDArray[np.float64])
    assert_type(group.all_reduce(doubles, out=out), npt.NDArray[np.int32])
    assert_type(group.all_reduce(doubles, async_op=True), collective.Handle[npt.NDArray[np.float64]])
    assert_type(group.all_reduce(doubles, async_op=True).wait(), npt.NDArray[np.float64])
    assert_type(group.all_reduce(doubles, async_op=True).done(), bool)
    assert_type(group.all_reduce(doubles, async_op=later), Any)
    assert_type(group.all_reduce(bytearray(8)), bytearray)
    assert_type(group.all_reduce_shared(doubles), npt.NDArray[np.float64])
    assert_type(group.reduce(doubles, dst=1, op="avg"), npt.NDArray[np.float64] | None)
    assert_type(group.reduce_scatter(doubles), npt.NDArray[np.float64])
    assert_type(group.reduce_scatter(doubles, out=out), npt.NDArray[np.int32])
    assert_type(group.all_gather(doubles), npt.NDArray[np.float64])
    assert_type(group.all_gather(halves, async_op=True).wait().shape, tuple[int, ...])
    assert_type(group.gather(doubles), npt.NDArray[np.float64] | None)
    assert_type(group.broadcast(out, src=1), npt.NDArray[np.int32])
    assert_type(group.broadcast(halves).dtype, str)
    assert_type(group.scatter(doubles), npt.NDArray[np.float64])
    assert_type(group.scatter(out=out, src=1), npt.NDArray[np.int32])
    assert_type(group.all_to_all(doubles, async_op=True).wait(1.0), npt.NDArray[np.float64])
    assert_type(group.send(doubles, 1), None)
    assert_type(group.recv(doubles, 1, tag=3), npt.NDArray[np.float64])
    assert_type(group.isend(doubles, 1), collective.Handle[None])
    assert_type(group.irecv(doubles, 1).wait(), npt.NDArray[np.float64])
    assert_type(group.all_gather_object("a"), list[str])
    assert_type(group.destroy(), None)
    group.all_reduce([1.0])  # wrong: not an array
    group.all_reduce(doubles, "mean")  # wrong: operation
    group.all_reduce(doubles, async_op=1)  # wrong: type of an argument
    group.all_reduce(doubles, async_op=True).sum()  # wrong: a handle has no sum
    group.all_gather(doubles).wait()  # wrong: an array is no handle
    group.broadcast(doubles, root=1)  # wrong: keyword
    group.broadcast()  # wrong: count
    group.scatter(doubles, "a")  # wrong: type of an argument
    group.reduce(doubles).sum()  # wrong: None on other ranks
    group.send(doubles)  # wrong: count
    group.recv("a", 1)  # wrong: not an array
    group.irecv(doubles, 1).wait().upper()  # wrong: type of the result
    group.sum(doubles)  # wrong: no such operation

joined = collective.get_group("workers")
assert_type(joined.all_reduce(doubles), npt.NDArray[np.float64])
assert_type(joined.split("a"), collective.Group | None)
assert_type(collective.create_group([counter, plain]), collective.ActorGroup)
joined.all_reduce(1)  # wrong: not an array
collective.create_group([1])  # wrong: not actors
collective.init_group(rank=0)  # wrong: count
collective.init_group(rank="0", world_size=2)  # wrong: type of an argument


async def reduced() -> None:
    assert_type(await joined.all_reduce(doubles, async_op=True), npt.NDArray[np.float64])
    assert_type(await table.pull(async_op=True), npt.NDArray[np.float32])


# ---- parameter tables ----

servers = ps.start(2, "ssp", staleness=1, num_workers=2)
table = servers.table("weights", (4, 4), init=ps.Normal(0.1), optimizer=ps.Adam(lr=0.1))
rows = servers.embedding("words", 16, init=0.5, capacity=1000)
grad: npt.NDArray[np.float32] = np.zeros((4, 4), np.float32)
assert_type(servers, ps.Cluster)
assert_type(table, ps.Table)
assert_type(rows, ps.Embedding)
assert_type(table.shape, tuple[int, ...])
assert_type(table.pull(), npt.NDArray[np.float32])
assert_type(table.pull(out=grad, timeout=1), npt.NDArray[np.float32])
assert_type(table.pull(async_op=True), ps.Handle[npt.NDArray[np.float32]])
assert_type(table.pull(async_op=True).wait(), npt.NDArray[np.float32])
assert_type(table.pull(async_op=later), npt.NDArray[np.float32] | ps.Handle[npt.NDArray[np.float32]])
assert_type(table.push(grad, lr=0.1), None)
assert_type(table.push(grad, async_op=True), ps.Handle[None])
assert_type(table.push_pull(grad), npt.NDArray[np.float32])
assert_type(table.push_pull(grad, async_op=True).wait(), npt.NDArray[np.float32])
assert_type(rows.dim, int)
assert_type(rows.pull([1, 2]), npt.NDArray[np.float32])
assert_type(rows.pull(np.arange(3)), npt.NDArray[np.float32])
assert_type(rows.pull([[1], [2]], async_op=True).wait(), npt.NDArray[np.float32])
assert_type(rows.push([1, 2], grad), None)
assert_type(rows.push(np.arange(3), grad, async_op=True), ps.Handle[None])
ps.start(2, "fast")  # wrong: value of an argument
ps.start("2")  # wrong: type of an argument
servers.table("weights")  # wrong: count
servers.table("weights", (4, 4), optimizer="adam")  # wrong: not an optimizer
servers.table("weights", (4, 4), nan="ignore")  # wrong: value of an argument
servers.embedding("words", 16, init="normal")  # wrong: type of an argument
table.push([1.0])  # wrong: not an array
table.push(doubles)  # wrong: type of the array's elements
table.push(grad, rate=0.1)  # wrong: keyword
table.pull(async_op=True).sum()  # wrong: a handle has no sum
table.push_pull()  # wrong: count
rows.pull(["a"])  # wrong: keys are integers
rows.pull(doubles)  # wrong: keys are integers
rows.push([1, 2])  # wrong: count
wrong_pull: str = table.pull()  # wrong: type of the result

# ---- annotations ----


def takes_function(function: RemoteFunction[[int, int], int]) -> ObjectRef[int]:
    return function.remote(1, 2)


def takes_any_function(function: RemoteFunction) -> None:
    function.remote(1, a=2)


def takes_method(called: ActorMethod[[str], str]) -> ObjectRef[str]:
    return called.remote("a")


assert_type(takes_function(add), ObjectRef[int])
takes_any_function(scale)
takes_method(counter.name)
takes_function(scale)  # wrong: another function
