"""`Pool` of `fastrt.ray`: what it has beside the interface of the standard library's pool."""

import os
import warnings
from multiprocessing import TimeoutError

import pytest

from fastrt import ray
from fastrt.ray.util.annotations import RayDeprecationWarning
from fastrt.ray.util.multiprocessing import Pool


@pytest.fixture(autouse=True)
def session(monkeypatch):
    monkeypatch.delenv("FASTRT_ADDRESS", raising=False)
    yield
    ray.shutdown()


def half(x):
    if x == 2:
        raise ArithmeticError(x)
    return os.getpid(), x / 2


def test_pool_starts_a_session_and_spreads_calls_over_its_processes(tmp_path):
    def initialise(folder):
        (folder / str(os.getpid())).touch()

    with Pool(2, initialise, (tmp_path,)) as pool:
        assert ray.cluster_resources()["CPU"] == 2
        pids = {int(path.name) for path in tmp_path.iterdir()}
        assert len(pids) == 2
        found = pool.map(half, range(3, 1003))
        assert [pid for pid, _ in found].count(min(pids)) > 400
        assert [x for _, x in found] == [x / 2 for x in range(3, 1003)]
        for items in (pool.imap(half, iter(range(5)), 2), pool.imap_unordered(half, range(5), 2)):
            errors = [one for one in items if isinstance(one, ArithmeticError)]
            assert [one.args for one in errors] == [(2,)]  # the error of a call ends no other
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert next(pool.imap(abs, -3)) == 3
        assert [one.category for one in seen] == [RayDeprecationWarning]
    with pytest.raises(ValueError, match="Pool not running"):
        pool.apply(abs, (1,))


def test_terminate_ends_calls_and_close_lets_them_end():
    @ray.remote
    class Gate:
        async def wait(self):
            import asyncio

            await asyncio.Event().wait()

    def blocked(gate):
        ray.get(gate.wait.remote())

    pool, gate = Pool(2, ray_remote_args={"num_cpus": 0}), Gate.remote()
    waiting = pool.map_async(blocked, [gate] * 4)
    with pytest.raises(TimeoutError):
        waiting.get(timeout=0)
    pool.terminate()
    pool.join()
    waiting.wait(20)
    assert not waiting.successful()
    with pytest.raises(ray.exceptions.RayActorError):
        waiting.get()
    other = Pool(1, maxtasksperchild=2)
    results = [other.apply_async(os.getpid) for _ in range(6)]
    other.close()
    other.join()
    assert len({one.get() for one in results}) == 3
