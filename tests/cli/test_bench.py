"""`fastrt bench`: its list, its errors, and a real run of one suite."""

import importlib.util
import json
import os

import pytest
from click.testing import CliRunner

from fastrt.cli import bench as bench_module
from fastrt.cli.main import main


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_list_names_every_suite():
    result = run("--list")
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.output.splitlines()]
    first = ["actors", "arena", "collective", "coordination", "generators", "membership", "objects", "put_get"]
    assert names == [*first, "queue", "refcount", "scheduler", "tables", "tasks", "transfer", "wire"]


def test_unknown_suite_is_refused():
    result = run("speed")
    assert result.exit_code == 1
    assert "there is no suite 'speed'; there are: actors, arena, collective" in result.output


def test_missing_extra_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        bench_module.importlib.util, "find_spec", lambda name: None if name == "pytest_benchmark" else found(name)
    )
    result = run("objects")
    assert result.exit_code == 1
    assert "pip install 'fastrt[bench]'" in result.output


@pytest.mark.long
def test_suite_runs_and_prints_p50_and_p99(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # or the suite takes itself for a part of this run, and times nothing
    target = tmp_path / "bench.json"
    result = run("objects", "--quick", "--json", str(target))
    assert result.exit_code == 0, result.output
    assert "p50" in result.output
    assert "p99" in result.output
    rows = json.loads(target.read_text())["benchmarks"]
    assert {row["group"] for row in rows} == {"objects"}
    for row in rows:
        assert 0 < row["stats"]["p50"] <= row["stats"]["p99"] < 0.1
        assert "data" not in row["stats"]
        assert row["name"].removeprefix("test_").replace("_", " ") in result.output


def test_rows_of_one_function_are_told_apart_and_nothing_is_cut_when_piped(capsys):
    stats = {"p50": 0.0000123, "p99": 0.0000456, "rounds": 7_654_321}
    names = [f"test_put_and_get_of_many_values[{kind}-{'x' * 60}]" for kind in ("int", "str", "/array")]
    bench_module._show(
        [{"group": "objects", "name": name, "stats": stats, "extra_info": {"bytes": 9}} for name in names]
    )
    printed = capsys.readouterr().out
    for name in names:
        (line,) = [line for line in printed.splitlines() if name[-64:] in line]
        assert line.split()[-7:] == ["12.3", "us", "45.6", "us", "81,301", "0.000732", "7,654,321"]


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (0.25, "250 ms"), (1.234e-5, "12.3 us"), (5e-8, "50 ns"), (5e-10, "0.5 ns")]
)
def test_seconds_get_a_unit_that_fits(value, text):
    assert bench_module.seconds(value) == text
