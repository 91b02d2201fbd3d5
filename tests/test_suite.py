"""The fixtures of tests/conftest.py: a test that fails does not fail the tests after it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OPTIONS = ("-p", "conftest", "-p", "no:cacheprovider", "-rA", "--tb=short")
# Of the tests that share a session, the first takes both workers and fails, the third takes them and passes.
MODULE = """
import conftest
import threading
import fastrt

@fastrt.remote
def hang():
    threading.Event().wait()

@fastrt.remote
def one():
    return 1

KEPT = []  # so that the tasks are not released with the frame of the test

def test_fails_in_a_session_of_its_own():
    fastrt.init(1)
    raise KeyError("on purpose")

def test_after_a_session_of_its_own():
    with fastrt.init(1):
        assert fastrt.get(one.remote(), timeout=60) == 1

def test_fails(rt):
    KEPT.append([hang.remote(), hang.remote()])
    raise KeyError("on purpose")

def test_after_a_failure(rt):
    KEPT.clear()
    assert fastrt.get(one.remote(), timeout=60) == 1

def test_leaves_tasks(rt, monkeypatch):
    monkeypatch.setattr(conftest, "PATIENCE_S", 0.3)
    KEPT.append([hang.remote(), hang.remote()])

def test_after_tasks_left(rt):
    KEPT.clear()
    assert fastrt.get(one.remote(), timeout=60) == 1
"""


@pytest.mark.long
def test_tests_after_one_that_fails_get_a_fresh_session(tmp_path):
    module = tmp_path / "test_on_purpose.py"
    module.write_text(MODULE)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FASTRT_"))}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *OPTIONS,
            "--rootdir",
            tmp_path,
            "-c",
            TESTS.parent / "pyproject.toml",
            module.name,
        ],
        env={**own, "PYTHONPATH": str(TESTS)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    outcomes = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR "))]
    assert sorted(re.sub(r"\S*::| - .*", "", one) for one in outcomes) == [
        "ERROR test_leaves_tasks",
        "FAILED test_fails",
        "FAILED test_fails_in_a_session_of_its_own",
        "PASSED test_after_a_failure",
        "PASSED test_after_a_session_of_its_own",
        "PASSED test_after_tasks_left",
        "PASSED test_leaves_tasks",
    ], done.stdout + done.stderr
