"""The comparison: it runs, checks what it measures, and judges the figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def modules(monkeypatch):
    """The comparison's own modules, imported by their own names."""
    monkeypatch.syspath_prepend(BENCH)
    import report
    import workloads

    yield report, workloads
    for name in ("report", "workloads", "peers", "peers.base"):
        sys.modules.pop(name, None)


@pytest.mark.timeout(120)
def test_comparison_of_two_rows_prints_ratios(tmp_path):
    target = tmp_path / "figures.json"
    arguments = ["--parts", "rows", "--rows", "task_one", "put_1048576", "--peers", "pool", "--quick", "--rounds", "2"]
    result = subprocess.run(
        [sys.executable, BENCH / "compare.py", *arguments, "--json", target, "--logs", tmp_path / "logs"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(target.read_text())["rows"]
    assert set(rows["task_one"]["figures"]) == {"fastrt", "pool"}
    assert set(rows["put_1048576"]["figures"]) == {"fastrt", "memcpy"}
    for row in rows.values():
        for figure in row["figures"].values():
            assert 0 < figure["p50_us"] <= figure["p99_us"]
    assert "20 x ProcessPoolExecutor" in result.stdout
    assert "0.85 x memcpy" in result.stdout


def test_task_that_ran_in_the_driver_is_noticed(modules):
    _, workloads = modules
    with pytest.raises(AssertionError, match="ran in the driver"):
        workloads.check(workloads.stamp(5), 5)
    with pytest.raises(AssertionError, match="returned 5, not 6"):
        workloads.check(5 << 23 | os.getppid(), 6)


def test_figures_are_judged(modules):
    report, _ = modules
    figure = {"p50_us": 2.0, "p99_us": 3.0, "per_second": 1.0, "ratio": 19.0}
    found = {
        "rows": {"task_one": {"title": "", "figures": {"fastrt": figure, "pool": figure}}},
        "start": {"fastrt": {"p50_s": 0.2}},
    }
    judged = {target.what: target for target in report.targets(found)}
    assert not judged["tasks, one at a time"].reached
    assert judged["start-up to first result"].reached
