"""Programs beside a Ray cluster, where there is a Python that has Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt
from support.ray_env import python_with_ray

HERE = Path(__file__).resolve().parent
needs_ray = pytest.mark.skipif(python_with_ray() is None, reason="needs Ray: python tests/support/ray_env.py")


def on_ray(program, *arguments):
    """Run a program beside a Ray cluster of two CPUs; what it wrote."""
    path = [str(Path(fastrt.__file__).parents[1]), *[p for p in sys.path if p.endswith("site-packages")]]
    command = [python_with_ray(), HERE / "ray_cluster.py", program, *arguments]  # words: nothing here has a space
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
