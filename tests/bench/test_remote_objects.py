"""The cost of objects that stay on another node is bounded, however many there are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
REST_MOST = 5.0  # percent of a processor; it was 12 to 20


@pytest.mark.long
@pytest.mark.timeout(200)
def test_driver_of_many_objects_of_another_node_is_at_rest_while_nothing_happens():
    words = [BENCH / "remote_objects.py", "--count", "30000", "--rest-s", "5"]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    found = re.search(r"30,000 objects: at rest +([\d.]+) %", result.stdout)
    assert found is not None, result.stdout
    assert float(found[1]) < REST_MOST, result.stdout
