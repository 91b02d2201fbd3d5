"""The same checks on each engine that needs nothing but fastrt; those on Ray are in test_ray.py."""

import cloudpickle
import pytest

import fastrt
from support import behaviour


@pytest.fixture(scope="module", params=["fastrt", "local"])
def runtime(request, runtime_dir):
    cloudpickle.register_pickle_by_value(behaviour)
    settings = {"runtime_dir": runtime_dir, "spill_dir": runtime_dir.parent / "spill"}
    with fastrt.init(2, "256MiB", engine=request.param, **settings) as session:
        yield session
    cloudpickle.unregister_pickle_by_value(behaviour)


@pytest.mark.parametrize("check", behaviour.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("runtime")
def test_program_may_rely_on(check):
    check()
