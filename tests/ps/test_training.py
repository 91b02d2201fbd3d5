"""The example on real data: workers on parameter servers, and by all_reduce, reach what one process reaches."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parameter_server_training.py"


@pytest.mark.long
@pytest.mark.timeout(150)  # six processes that each import scikit-learn: 41 s with ten others running
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn brings the data")
def test_two_workers_and_two_servers_train_what_one_process_trains():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fastrt.__file__).parents[1]), *sys.path])}
    result = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=140, env=env)
    assert result.returncode == 0, result.stderr
    digits, digits_served, digits_apart, patients, served, reduced, apart = map(
        float, re.findall(r": ([\d.e+-]+)", result.stdout)
    )
    assert digits == digits_served > 0.9
    assert patients > 0.3
    assert served == pytest.approx(patients, abs=1e-3)
    assert reduced == pytest.approx(patients, abs=1e-3)
    assert max(digits_apart, apart) < 1e-4
