"""The comparison of transfers judges by the ratios of rounds, and takes only times from Ray's nodes."""

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench/compare_transfer.py"
# As peers/ray_nodes.py: says things of its own between the lines that count.
RAY_NODES = """
import sys
print("(raylet) 2 nodes are up")
print("ready", flush=True)
for line in sys.stdin:
    print("(raylet) spilled nothing")
    print(0.25, flush=True)
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_transfer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_median_of_the_rounds_ratios_is_judged_and_the_first_round_is_not(script, capsys):
    nbytes = 1 << 30
    times = {"native": [9.0, 1.0, 2.0, 1.0], "Ray": [1.0, 3.5, 4.0, 3.1], "plain TCP": [9.0, 0.5, 1.0, 0.5]}
    script.show(times, dict.fromkeys(times, nbytes))
    lines = {line.split("  ")[1].strip(): line.split() for line in capsys.readouterr().out.splitlines() if "/" in line}
    assert lines["native / Ray"][-2:] == ["3.10", "reached"]
    assert lines["native / plain TCP"][-2:] == ["0.50", "MISSED"]
    assert lines["native / iperf3"][-2:] == ["not", "measured"]


def test_what_rays_nodes_say_of_themselves_is_no_time(script, tmp_path, monkeypatch):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "ray_nodes.py").write_text(RAY_NODES)
    monkeypatch.setattr(script, "__file__", str(tmp_path / "compare_transfer.py"))
    with ExitStack() as stack:
        ray = script.Ray(sys.executable, 1 << 20, stack)
        assert [ray(), ray()] == [0.25, 0.25]
    (tmp_path / "peers" / "ray_nodes.py").write_text("")
    with ExitStack() as stack, pytest.raises(click.ClickException, match="Ray's nodes ended"):
        script.Ray(sys.executable, 1 << 20, stack)
