"""The allocator: one block allocated and freed, for each path through it."""

import pytest

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles

# Values up to 72 bytes lie in their entry: that row is the cost around the allocator. Slabs serve up to 8 KiB.
SIZES = {
    "entry 64 B": 64,
    "slab 256 B": 256,
    "slab 1 KiB": 1 << 10,
    "slab 8 KiB": 8 << 10,
    "run 16 KiB": 16 << 10,
    "run 1 MiB": 1 << 20,
    "run 64 MiB": 64 << 20,
}
KIND = 16


@pytest.mark.benchmark(group="arena alloc/free")
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES.keys())
def test_alloc_free(measure, core: Client, nbytes: int) -> None:
    def alloc_free() -> None:
        handles.create(core, nbytes, KIND)  # dropped unsealed: the block goes back

    measure(alloc_free)


@pytest.mark.benchmark(group="arena alloc/free")
def test_alloc_free_1000_alive(measure, core: Client) -> None:
    """A thousand blocks of mixed sizes at once: lists grow, runs split and join again."""
    sizes = [(256 << (k % 8)) - 8 for k in range(1000)]

    def alloc_free() -> None:
        _ = [handles.create(core, nbytes, KIND) for nbytes in sizes]

    measure(alloc_free)
