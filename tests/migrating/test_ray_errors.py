"""Errors of tasks in programs for Ray: their names, Ray's constructor, and exceptions that allow no second base."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt
from fastrt import ray
from fastrt.ray.exceptions import RayTaskError

NAMES = """
import ray

class Own(ValueError):
    pass

@ray.remote
def fail():
    raise Own("text")

@ray.remote
def fail_again(value):
    return value

@ray.remote
def seen():
    try:
        ray.get(fail.remote())
    except ValueError as exc:
        return repr(exc)

ray.init(num_cpus=1)
print(ray.get(seen.remote()))
for ref in (fail.remote(), fail_again.remote(fail.remote())):
    try:
        ray.get(ref)
    except ValueError as exc:
        print(repr(exc), type(exc).__module__, isinstance(exc, Own), isinstance(exc, ray.exceptions.RayTaskError))
"""


class Pair(Exception):
    def __init__(self, one, two):
        self.one, self.two = one, two

    def __reduce__(self):
        return type(self), (self.one, self.two)


class Final(Exception):
    def __init_subclass__(cls):
        raise TypeError("no subclass of this")


@ray.remote
def raise_final():
    raise Final("of the task")


def test_errors_have_their_names_on_ray(runtime_dir):
    env = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1]), "FASTRT_RUNTIME_DIR": str(runtime_dir)}
    command = [sys.executable, "-m", "fastrt.ray", "-c", NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "RayTaskError(Own)('text')\n" + "RayTaskError(Own)('text') ray.exceptions True True\n" * 2


def test_error_is_made_by_the_constructor_of_ray():
    error = RayTaskError(function_name="f", traceback_str="lines", cause=Pair("a", "b"))
    assert (error.function_name, error.traceback_str, error.pid) == ("f", "lines", os.getpid())
    for dual in (error.make_dual_exception_instance(), error.as_instanceof_cause()):
        again = pickle.loads(ray.cloudpickle.dumps(dual))
        assert isinstance(again, RayTaskError)
        assert isinstance(again, Pair)
        assert (again.one, again.two, str(again)) == ("a", "b", str(error))
        assert again.as_instanceof_cause() is again


def test_class_that_allows_no_second_base_is_named_in_a_warning(rt, caplog):
    with pytest.raises(RayTaskError) as info:
        ray.get(raise_final.remote())
    assert type(info.value) is RayTaskError
    assert isinstance(info.value.cause, Final)
    assert "This exception is raised as TaskError only. You can use `task_error.cause` to access" in caplog.text
    assert "Final'>, which task 'raise_final' raised" in caplog.text
