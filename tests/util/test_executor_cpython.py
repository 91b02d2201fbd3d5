"""CPython's own tests of its executors, run against `fastrt.Executor` where this Python comes with them.

Many come without (distributions leave the tests out); `test_executor.py` retells them. What does not apply:

    WaitTests.test_pending_calls_race (of threads only)   its calls share an event of this process
    ThreadPool..., ProcessPool...Test                     look into their executor's threads, processes and pipes;
                                                          what they find out by that is retold
    test_killed_child, test_deadlock's crashes            a dead worker breaks a ProcessPoolExecutor; here its call
                                                          runs again, or fails alone
    test_max_tasks_per_child*, thread_name_prefix         there is no such setting
"""

import contextlib
import importlib
import os
import re
import unittest
from pathlib import Path

import pytest

import fastrt

pytestmark = pytest.mark.long  # they wait by the clock, a minute in all

try:
    importlib.import_module("test.test_concurrent_futures")
except ImportError:
    pytest.skip("this Python comes without test.test_concurrent_futures", allow_module_level=True)


def from_cpython(name, module):
    """A class of CPython's tests: in a package of modules since 3.12, in one module before."""
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(f"test.test_concurrent_futures.{module}"), name)
    return getattr(importlib.import_module("test.test_concurrent_futures"), name)


class Mixin(from_cpython("ExecutorMixin", "util")):
    executor_type = fastrt.Executor


@pytest.fixture(autouse=True)
def session(rt, monkeypatch):
    """One session for all; and programs that the tests start use fastrt, whose workers' lines have a prefix."""
    shutdown = importlib.import_module(from_cpython("ExecutorShutdownTest", "test_shutdown").__module__)
    run = shutdown.assert_python_ok
    source = str(Path(fastrt.__file__).parents[1])

    def run_with_fastrt(option, code):
        code = code.replace(
            "from concurrent.futures import", "import fastrt; fastrt.init(2, '32MiB')\nfrom fastrt import"
        )
        code = re.sub(r"^( *)import fastrt; (.*)\nfrom", r"\1import fastrt; \2\n\1from", code, flags=re.M)
        code, out, err = run(option, code, PYTHONPATH=source, FASTRT_RUNTIME_DIR=os.environ["FASTRT_RUNTIME_DIR"])
        return code, re.sub(rb"\((\S+ )?pid=\d+\) ", b"", out), err

    monkeypatch.setattr(shutdown, "assert_python_ok", run_with_fastrt)
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(Path(rt.socket_path).parents[1]))


class ExecutorTest(Mixin, from_cpython("ExecutorTest", "executor"), unittest.TestCase):
    pass


class ShutdownTest(Mixin, from_cpython("ExecutorShutdownTest", "test_shutdown"), unittest.TestCase):
    pass


class WaitTest(Mixin, from_cpython("WaitTests", "test_wait"), unittest.TestCase):
    pass


class AsCompletedTest(Mixin, from_cpython("AsCompletedTests", "test_as_completed"), unittest.TestCase):
    pass


# These two bring their own way of making the executor.
class InitializerTest(from_cpython("InitializerMixin", "test_init"), unittest.TestCase):
    executor_type = fastrt.Executor


class FailingInitializerTest(from_cpython("FailingInitializerMixin", "test_init"), unittest.TestCase):
    executor_type = fastrt.Executor
