"""A sort of more data than the store holds: `python bench/external_sort.py --mib 2048 --store-mib 512 --parts 32`.

Tasks make the data in parts, sort and cut each into as many pieces, and merge the pieces of one range of keys. Each
merged part is checked against its neighbours, and all together against the sum of the unsorted data. Prints one line:
the seconds, the bytes that were spilled, restored, and written to files for lack of room.
"""

import time
from itertools import pairwise

import click
import numpy as np

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client

MIB = 1 << 20
KEYS = 1 << 62


def make(number: int, count: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, KEYS, count)


def cut(values: np.ndarray, parts: int) -> list[np.ndarray]:
    ordered = np.sort(values)
    return np.split(ordered, np.searchsorted(ordered, [KEYS // parts * k for k in range(1, parts)]))


def merge(*pieces: np.ndarray) -> np.ndarray:
    merged = np.concatenate(pieces)
    merged.sort()
    return merged


def check(values: np.ndarray) -> tuple[int, int, int, int]:
    """The number of values, their sum, the first and the last; the sum wraps around."""
    assert bool(np.all(values[:-1] <= values[1:])), "a part is out of order"
    return len(values), int(values.sum(dtype=np.uint64)), int(values[0]), int(values[-1])


def total(values: np.ndarray) -> tuple[int, int]:
    return len(values), int(values.sum(dtype=np.uint64))


def sort(nbytes: int, parts: int) -> None:
    """Sort so many bytes in so many parts; raises if anything is missing or out of order."""
    remote = fastrt.remote
    made = [remote(make).remote(k, nbytes // 8 // parts) for k in range(parts)]
    sums = [remote(total).remote(ref) for ref in made]
    # With one result, `remote` returns no list.
    cuts = [remote(num_returns=parts)(cut).remote(ref, parts) for ref in made] if parts > 1 else [made]
    del made
    merged = [remote(merge).remote(*share) for share in zip(*cuts, strict=True)]
    del cuts
    found = fastrt.get([remote(check).remote(ref) for ref in merged])
    before = fastrt.get(sums)
    assert sum(count for count, *_ in found) == sum(count for count, _ in before), "values are missing"
    assert (sum(one[1] for one in found) - sum(one for _, one in before)) % (1 << 64) == 0, "values have changed"
    assert all(one[3] <= other[2] for one, other in pairwise(found)), "the parts are out of order"


@click.command()
@click.option("--mib", default=2048, show_default=True, help="data")
@click.option("--store-mib", default=512, show_default=True, help="the store")
@click.option("--parts", default=32, show_default=True)
@click.option("--workers", default=2, show_default=True)
def main(mib: int, store_mib: int, parts: int, workers: int) -> None:
    with fastrt.init(workers, store_mib * MIB, advice=False):
        client = store_client.require().client
        began = time.monotonic()
        sort(mib * MIB, parts)
        seconds = time.monotonic() - began
        totals = {name: count // MIB for name, count in spill.totals(client).items() if name.endswith("bytes")}
        assert fsck.fsck(client) == []
        click.echo(
            f"{mib} MiB through {store_mib} MiB, {parts} parts: {seconds:.1f} s; MiB spilled "
            f"{totals['spilled_bytes']}, restored {totals['restored_bytes']}, "
            f"in files for lack of room {totals['mapped_bytes']}"
        )


if __name__ == "__main__":
    main()
