"""The example on real data: two processes reach what one process reaches."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "all_reduce_training.py"


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn brings the data")
@pytest.mark.long
def test_two_processes_train_what_one_process_trains():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fastrt.__file__).parents[1]), *sys.path])}
    result = subprocess.run([sys.executable, EXAMPLE, "2"], capture_output=True, text=True, timeout=50, env=env)
    assert result.returncode == 0, result.stderr
    alone, together, difference = re.findall(r": ([\d.e+-]+)", result.stdout)
    assert together == alone
    assert float(alone) > 0.9
    assert float(difference) < 1e-9
