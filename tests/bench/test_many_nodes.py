"""Many real nodes on one machine: the short form of a shuffle, and of one while nodes are killed."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_shuffle_on_many_nodes_is_right_also_while_nodes_are_killed():
    words = [BENCH / "many_nodes.py", "--nodes", "6", "--kills", "2", "--part", "128KiB"]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    assert "every sum and result is right" in result.stdout
