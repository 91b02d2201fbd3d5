"""Parameter tables of one worker and one server; `compare_tables.py` sets local arrays beside them."""

from collections.abc import Iterator

import numpy as np
import pytest

from fastrt import ps

F = np.float32
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
ROWS, KEYS, DIM = 1_000_000, 4096, 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[ps.Cluster]:
    """One server; this process is the worker."""
    with ps.start(1) as made:
        yield made


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_push(measure, benchmark, cluster: ps.Cluster, nbytes: int) -> None:
    """Adam, logged."""
    benchmark.group = "push of a dense table, and Adam"
    grad = np.ones(nbytes // 4, F)
    measure(cluster.table(f"w{nbytes}", (nbytes // 4,), optimizer=ps.Adam()).push, grad, nbytes=nbytes)


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_pull(measure, benchmark, cluster: ps.Cluster, nbytes: int) -> None:
    """Mapped, not copied."""
    benchmark.group = "pull of a dense table"
    measure(cluster.table(f"w{nbytes}", (nbytes // 4,), optimizer=ps.Adam()).pull, nbytes=nbytes)


@pytest.fixture(scope="module")
def embedding(cluster: ps.Cluster) -> ps.Embedding:
    """With all its rows made."""
    made = cluster.embedding("e", DIM, init=0.0)
    for begin in range(0, ROWS, 50_000):
        made.pull(np.arange(begin, begin + 50_000))
    return made


@pytest.mark.benchmark(group="4,096 of a million rows of 64")
def test_lookup(measure, embedding: ps.Embedding) -> None:
    keys = np.random.default_rng(1).integers(0, ROWS, KEYS)
    measure(embedding.pull, keys, per=KEYS)


@pytest.mark.benchmark(group="4,096 of a million rows of 64")
def test_update(measure, embedding: ps.Embedding) -> None:
    """Lazy Adam, logged."""
    keys = np.random.default_rng(1).integers(0, ROWS, KEYS)
    measure(embedding.push, keys, np.ones((KEYS, DIM), F), per=KEYS)
