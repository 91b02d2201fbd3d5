"""The comparison of parameter tables: it runs, and judges its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.long
def test_comparison_measures_all_rows(tmp_path):
    target = tmp_path / "figures.json"
    words = ["--rounds", "1", "--rows", "5000", "--mib", "1", "--json", target]
    result = subprocess.run(
        [sys.executable, BENCH / "compare_tables.py", *words], capture_output=True, text=True, timeout=50
    )
    assert result.returncode in (0, 1), result.stderr  # such small ones may miss what large ones must reach
    times = json.loads(target.read_text())["times"]
    assert {"push + Adam", "lookup", "update"} <= set(times)
    assert all(0 < seconds < 10 for row in times.values() for side in row.values() for seconds in side)


def test_bars_are_judged_by_the_ratio_within_a_round(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    import compare_tables

    assert compare_tables.ratio({"ours": [1.0, 10.0, 2.0], "numpy": [2.0, 30.0, 8.0]}) == 3.0
    assert set(compare_tables.REQUIRED) == {"push + Adam", "lookup"}
    sys.modules.pop("compare_tables")
