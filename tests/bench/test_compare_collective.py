"""The comparison of collective operations: it runs, and judges its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.long
def test_comparison_measures_this_library_alone_where_there_is_no_other(tmp_path):
    target = tmp_path / "figures.json"
    words = ["--rounds", "1", "--sizes", "0,4096", "--peers", "", "--json", target]
    result = subprocess.run(
        [sys.executable, BENCH / "compare_collective.py", *words], capture_output=True, text=True, timeout=50
    )
    assert result.returncode == 0, result.stderr
    rows = {tuple(row["key"]): row["seconds"] for row in json.loads(target.read_text())["rows"]}
    assert {key[3] for key in rows} == {"barrier", "in_place", "out", "shared"}
    assert all(0 < seconds < 1 for times in rows.values() for seconds in times)
    assert "4 KiB" in result.stdout


def test_bars_are_judged_by_the_ratio_within_a_round(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import compare_collective

    size = 64 << 20
    results = {
        (size, False, "fastrt", "in_place", "private"): [1.0, 10.0, 2.0],
        (size, False, "mpi", "in_place", "private"): [2.0, 30.0, 8.0],
    }
    (verdict,) = compare_collective.judge(results)
    assert verdict["ratio"] == pytest.approx(3.0)
    assert verdict["least"] == 2.5
    sys.modules.pop("compare_collective")
