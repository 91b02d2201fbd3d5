"""The comparison of two nodes runs, and counts nothing that was not made on the other node."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/compare_two_nodes.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_two_nodes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_it_runs_without_ray():
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--count", "50", "--ray-python", "no-such-python"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Ray is not here" in result.stdout
    assert "fastrt" in result.stdout


@pytest.mark.parametrize(
    ("values", "there"),
    [([(1, "a")], "a"), ([(4, "b")], "a"), ([(4, "a")], "a"), ([], "b"), ([(4, "b"), (4, "b")], "b")],
)
def test_wrong_values_and_places_are_noticed(script, values, there):
    space = {"__name__": "work"}
    exec(script.WORK, space)  # noqa: S102  (the driver's own program)
    with pytest.raises(AssertionError):
        space["measure"](lambda k: k, lambda refs: values, "a", there, 1, 1)


def test_what_is_required_is_judged_by_the_ratios_of_rounds(script, capsys):
    assert script.show({"fastrt": [100.0, 50.0, 90.0], "Ray": [10.0, 10.0, 10.0]}, 1000)
    assert "9.0 x Ray; 10 x is required: MISSED" in capsys.readouterr().out
    assert not script.show({"fastrt": [110.0, 50.0, 100.0], "Ray": [10.0, 10.0, 10.0]}, 1000)
    assert "10.0 x Ray; 10 x is required: reached" in capsys.readouterr().out
