"""The programs of bench/compare_data.py give right results; small sizes, on fastrt only."""

import hashlib
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 1 << 20


@pytest.fixture(scope="module")
def compare():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
    yield importlib.import_module("compare_data")
    sys.path.pop(0)


@pytest.fixture(scope="module")
def rt(compare, tmp_path_factory):
    on = compare.OnFastrt(32 * MIB, str(tmp_path_factory.mktemp("spill")))
    yield on
    on.close()


def test_sort_of_four_times_the_store_has_every_value_and_spills(compare, rt, tmp_path):
    found = compare.sort(rt, 32 * MIB, tmp_path)
    made = [compare.make(k, 4 * 32 * MIB // 8 // 32) for k in range(32)]
    assert sum(count for count, *_ in found) == sum(len(part) for part in made)
    assert sum(one for _, one, _, _ in found) % 2**64 == sum(int(part.sum(dtype=np.uint64)) for part in made) % 2**64
    assert [one for *_, one, _ in found] == sorted(one for *_, one, _ in found)
    assert rt.spilled("") > 64 * MIB


def test_group_by_counts_every_row(compare, rt, tmp_path):
    pytest.importorskip("pyarrow")
    rows, _ = compare.group_by(rt, 16 * MIB, tmp_path)
    assert sum(row["count_sum"] if "count_sum" in row else row["count"] for row in rows) == 16 * MIB // 16
    assert [row["key"] for row in rows] == list(range(1000))


def test_product_is_that_of_whole_matrices(compare, rt, tmp_path):
    found = compare.product(rt, 2 * MIB, tmp_path)
    side = int((2 * MIB / 32) ** 0.5) // 4
    a, b = (
        np.block([[compare.block(first + 4 * i + j, side) for j in range(4)] for i in range(4)]) for first in (0, 100)
    )
    parts = [(a @ b)[i * side : (i + 1) * side, j * side : (j + 1) * side] for i in range(4) for j in range(4)]
    assert found == [hashlib.sha256(np.ascontiguousarray(part)).hexdigest() for part in parts]
