"""The comparison of whole programs reads what they say, and needs equal results."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import click
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/compare_programs.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_programs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_result_and_time_are_read(script):
    assert script.read("warm\n[1, 2]\nseconds: 0.250\n", 1.5) == ("[1, 2]", 0.25, 1.5)
    with pytest.raises(click.ClickException, match="did not say"):
        script.read("seconds: 0.250\n", 1.5)


def test_table_has_medians_and_ratios_of_rounds(script, capsys):
    script.show({"tree_reduction": [(1.0, 2.0, 4.0, 20.0), (1.0, 2.0, 5.0, 30.0), (2.0, 4.0, 8.0, 40.0)]}, True)
    assert "| tree reduction | 1.00 | 5.00 | 4.0 | 2.00 | 30.00 | 10.0 |" in capsys.readouterr().out


def test_programs_that_say_different_things_are_an_error(script, monkeypatch):
    monkeypatch.setattr(script, "run", lambda python, program, *options: (f"[{options[-1]!r}]", 1.0, 2.0))
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess([], 0))
    with pytest.raises(click.ClickException, match="fastrt says"):
        script.main.main(["--ray-python", sys.executable, "tree_reduction"], standalone_mode=False)
