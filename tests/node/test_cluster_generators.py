"""Generators that run on another node: their items as they are made, room, ends, deaths and the loss of that node."""

import asyncio
import os
import signal
import threading

import pytest

import fastrt
from fastrt.errors import ActorDiedError, WorkerCrashedError
from support.amounts import counted as without_memory
from support.cluster import two_nodes

SOFT = fastrt.NodeAffinity("two", soft=True)


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def runtime(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@pytest.fixture
def rt(runtime):
    """For the one test that looks whether everything was given back: that takes seconds."""
    return runtime


@pytest.fixture(autouse=True)
def two(runtime, wait_until):
    wait_until(lambda: len(fastrt.nodes()) == 2, "the other node to be known")


def get(refs):
    return fastrt.get(refs, timeout=30)


def values(generator):
    return [get(ref) for ref in generator]


def size(path):
    return path.stat().st_size if path.exists() else 0


def count(path, most, gate=0):
    """Numbers; writes down how many it has made; waits at `gate` until somebody lets it on."""
    try:
        for k in range(most):
            if gate and k == gate:
                while not os.path.exists(f"{path}-go"):
                    threading.Event().wait(0.005)
            with open(path, "a") as file:
                file.write("x")
            yield k
    finally:
        open(f"{path}-closed", "w").close()


counted = fastrt.remote(count).options(scheduling="two")


def fail_once(path, most, how):
    for k in range(most):
        if k == 3 and not os.path.exists(path):
            open(path, "w").close()
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(k)
        yield k


@fastrt.remote(scheduling="two")
class Source:
    def count(self, path, most, gate=0):
        yield from count(path, most, gate)

    async def put(self, most):
        for k in range(most):
            await asyncio.get_running_loop().run_in_executor(None, int)
            yield fastrt.put([k])


def test_items_come_while_the_task_runs_and_in_order(rt, tmp_path):
    np = pytest.importorskip("numpy")
    slow = counted.remote(str(tmp_path / "slow"), 4, 2)
    assert [get(next(slow)) for _ in range(2)] == [0, 1]
    assert fastrt.wait([slow.completed()], timeout=0)[0] == []
    (tmp_path / "slow-go").touch()
    assert values(slow) == [2, 3]
    assert slow.is_finished()

    @fastrt.remote(scheduling="two")
    def mixed(sizes):
        for k, size in enumerate(sizes):
            yield np.full(size, k) if size else k

    sizes = [0, 3 << 20, 0, 10, 1 << 16, 0, 1 << 18, 2]
    found = values(mixed.remote(sizes))
    assert [np.size(one) for one in found] == [size or 1 for size in sizes]
    assert [int(np.max(one)) for one in found] == list(range(len(sizes)))

    async def read():
        return [await ref async for ref in counted.remote(str(tmp_path / "async"), 20)]

    assert asyncio.run(read()) == list(range(20))
    many = fastrt.remote(lambda most: range(most)).options(scheduling="two", num_returns="streaming").remote(3000)
    assert sum(values(many)) == 4498500
    source = Source.remote()
    assert get(values(source.put.remote(5))) == [[k] for k in range(5)]
    assert values(source.count.remote(str(tmp_path / "call"), 5)) == list(range(5))


def test_limit_of_unread_items_holds_over_both_nodes(runtime, tmp_path, wait_until):
    source = Source.remote()
    for kind, limit in ((counted, 1), (counted, 4), (source.count, 3)):
        path = tmp_path / f"{limit}"
        generator = kind.options(generator_backpressure=limit).remote(str(path), 50)
        for read in range(3):
            wait_until(lambda path=path, least=read + limit: size(path) == least, "it to wait for room")
            assert fastrt.wait([generator.completed()], timeout=0.03)[0] == []
            assert size(path) == read + limit
            assert get(next(generator)) == read
        assert values(generator) == list(range(3, 50))


def test_generator_that_nobody_reads_is_closed_over_there(runtime, tmp_path, wait_until):
    source = Source.remote()
    for name, call in (("task", counted), ("call", source.count)):
        for limit in (2, -1):
            path = tmp_path / f"{name}{limit}"
            generator = call.options(generator_backpressure=limit).remote(str(path), 1 << 30, 0 if limit > 0 else 5)
            assert get(next(generator)) == 0
            del generator
            if limit < 0:
                threading.Event().wait(0.2)  # until it is told that it is read no more; later would be right, too
                (tmp_path / f"{path}-go").touch()
            wait_until((tmp_path / f"{path}-closed").exists, "its end")
    end = counted.remote(str(tmp_path / "end"), 100, 2).completed()
    (tmp_path / "end-go").touch()
    assert get(end) is None
    assert size(tmp_path / "end") == 100, "whoever waits for its end lets it run"
    generator = counted.remote(str(tmp_path / "cancel"), 1 << 30, 2)
    assert get(next(generator)) == 0
    fastrt.cancel(generator)
    with pytest.raises(fastrt.TaskCancelledError):
        values(generator)
    wait_until((tmp_path / "cancel-closed").exists, "its end over there")


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_next_attempt_over_there_repeats_nothing_and_errors_stand_at_their_place(runtime, tmp_path, how):
    fail = fastrt.remote(fail_once).options(scheduling="two", retry_exceptions=True, max_retries=2)
    assert values(fail.remote(str(tmp_path / "again"), 6, how)) == list(range(6))
    generator = fail.options(max_retries=0).remote(str(tmp_path / "once"), 6, how)
    assert [get(next(generator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError if how == "raises" else WorkerCrashedError):
        get(next(generator))
    assert list(generator) == []


@fastrt.remote(scheduling="two")
def read_there(generator, most=None):
    """Values of so many items, and how it went on."""
    found = []
    try:
        for ref in generator:
            found.append(fastrt.get(ref))
            if len(found) == most:
                return found, "stopped"
    except KeyError as exc:
        return found, exc.args[0]
    return found, generator.is_finished()


@fastrt.remote
class Reader:
    async def read(self, generator):
        return [await ref async for ref in generator]


@pytest.mark.parametrize("where", ["one", "two"])
def test_handles_are_read_on_another_node(rt, tmp_path, where):
    def failing(most):
        yield from range(most)
        raise KeyError(most)

    generator = counted.options(scheduling=where).remote(str(tmp_path / "a"), 300, 3)
    assert get(next(generator)) == 0
    reading = read_there.remote(generator)
    there = [read_there.remote(fastrt.remote(failing).options(scheduling=where).remote(5)), reading]
    open(tmp_path / "a-go", "w").close()
    assert get(there) == [([0, 1, 2, 3, 4], 5), (list(range(1, 300)), True)]

    both = counted.options(scheduling=where).remote(str(tmp_path / "b"), 1000)
    first, state = get(read_there.remote(both, 10))
    assert (first, state) == (list(range(10)), "stopped")

    source = Source.options(scheduling=where).remote()
    reader = Reader.options(scheduling="two").remote()
    assert get(get(reader.read.remote(source.put.remote(100)))) == [[k] for k in range(100)]
    assert get(reader.read.remote(fastrt.remote(lambda: iter(())).options(num_returns="streaming").remote())) == []


def test_everything_is_given_back(rt, wait_until):
    wait_until(lambda: without_memory(fastrt.available_resources()) == {"CPU": 3.0}, "everything to be free")


def test_lost_node_leaves_what_came_and_the_next_attempt_goes_on(nodes, runtime, tmp_path):
    paths = [tmp_path / name for name in ("task", "once", "call", "one call")]
    retried, once = counted.options(scheduling=None, scheduling_strategy=SOFT), {"max_retries": 0}
    source = Source.options(scheduling=None, scheduling_strategy=SOFT)
    actors = source.options(max_restarts=1, max_task_retries=1).remote(), source.remote()
    calls = [retried, retried.options(**once), *(actor.count for actor in actors)]
    generators = [call.remote(str(path), 8, 4) for call, path in zip(calls, paths, strict=True)]
    assert [[get(next(one)) for _ in range(3)] for one in generators[:2]] == [[0, 1, 2]] * 2
    assert [get(next(one)) for one in generators[2:]] == [0, 0]
    nodes[1].kill()
    for path in paths:
        (tmp_path / f"{path}-go").touch()
    assert values(generators[0]) == [3, 4, 5, 6, 7]
    assert values(generators[2]) == [1, 2, 3, 4, 5, 6, 7]
    for generator, error in ((generators[1], WorkerCrashedError), (generators[3], ActorDiedError)):
        with pytest.raises(error, match="node two was lost"):
            values(generator)
