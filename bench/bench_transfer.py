"""Objects between two stores on this machine, by the native stream and by gRPC, and plain TCP beside them."""

from collections.abc import Iterator

import pytest

from fastrt.net.grpc.identity import new_token
from fastrt.observe.profile import TwoNodes

SIZES = {"1 KiB": 1 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
MANY, EACH = 1000, 64 << 10


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """A store here, and one in a process of its own with small objects to fetch."""
    with TwoNodes(max(SIZES.values()), new_token(), many=(MANY, EACH)) as both:
        yield both


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("path", ["plain TCP", "native", "grpc"])
def test_transfer(measure, benchmark, nodes: TwoNodes, path: str, nbytes: int) -> None:
    """The answer that the object has arrived included; for the stores also its deallocation there."""
    benchmark.group = f"transfer, {path}"
    nodes.prepare(nbytes)
    measure(nodes.paths()[path], nbytes=nbytes)


@pytest.mark.benchmark(group="transfer, 1,000 objects of 64 KiB at once")
def test_pull_many(measure, nodes: TwoNodes) -> None:
    def there_and_gone() -> None:
        nodes.pull_many()
        nodes.drop_many()

    measure(there_and_gone, per=MANY, nbytes=MANY * EACH)
