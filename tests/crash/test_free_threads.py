"""Threads on Python without a GIL, where this machine has one; see tests/free_python.py."""

import subprocess
from pathlib import Path

import pytest

from support import free_env

HERE = Path(__file__).resolve().parent
FOUND = free_env.interpreters()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(max(1, len(FOUND))))
def test_threads_of_one_process_run_at_once_without_a_gil(number):
    """With an interpreter that was built with ThreadSanitizer, no race is reported either."""
    if not FOUND:
        pytest.skip("there is no Python without a GIL: name one in FASTRT_FREE_PYTHON, or put python3.14t on PATH")
    if not free_env.is_whole(FOUND[number], number):
        pytest.skip(f"{FOUND[number]} has no environment yet: run python tests/support/free_env.py")
    command = [free_env.environment(number), HERE / "free_threads.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-20000:]
