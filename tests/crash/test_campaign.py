"""The short form of the kill campaign; `make chaos` runs the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(300)  # it compiles the core with failpoints when its sources have changed
def test_kill_at_every_point_of_the_core_loses_nothing() -> None:
    done = subprocess.run([sys.executable, str(HERE / "chaos.py"), "--short"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
