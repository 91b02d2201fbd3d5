"""Programs of fastrt on a Ray cluster: a real one, which `make check` installs (see ray_env.py)."""

import pytest

import fastrt
from fastrt.errors import ConfigError
from support import behaviour
from support.on_ray import needs_ray, on_ray


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(180)
def test_program_may_rely_on_the_same_on_ray():
    said = on_ray(behaviour.__file__, "ray", "ADDRESS")
    assert "passed" in said
    assert "FAILED" not in said, said


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(180)
def test_what_ray_has_no_counterpart_of_says_so_at_the_call(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import sys, logging, fastrt, ray

@fastrt.remote
def work(x):
    return x

@fastrt.remote(num_returns=2)
def pair():
    return 1, 2

def said(call, kind):
    try:
        call()
    except kind as exc:
        return str(exc)
    raise AssertionError(f"no {kind.__name__}")

with fastrt.init(engine="ray", address=sys.argv[1], logging_level=logging.ERROR) as session:
    assert "ray" in repr(session), session
    from fastrt.store import client
    assert "no counterpart" in said(client.require, fastrt.UnsupportedError)
    from fastrt.engines.ray import _options
    assert "'timeout' of remote functions" in said(
        lambda: _options("remote functions", ["num_returns"], {"timeout": 1}), fastrt.UnsupportedError)
    assert "option 'priority' of remote functions has no counterpart in Ray" in said(
        lambda: fastrt.remote(priority=1)(abs).remote(1), fastrt.UnsupportedError)
    assert "already" in said(lambda: fastrt.init(), fastrt.FastrtError)
    @ray.remote
    class Foreign:
        pass
    kept = Foreign.options(name="foreign").remote()
    assert "uses Ray directly" in said(lambda: fastrt.get_actor("foreign"), fastrt.UnsupportedError)
    old, handle = work.remote(1), None
    refs = pair.remote()
assert not fastrt.is_initialized() and not ray.is_initialized()
assert "ended" in said(lambda: fastrt.get(old), fastrt.StaleReferenceError)
with fastrt.init(local_mode=True):
    assert "ended" in said(lambda: fastrt.get(old), fastrt.StaleReferenceError)
with fastrt.init(1, "64MiB"):
    assert "ended" in said(lambda: fastrt.get(old), fastrt.StaleReferenceError)
    assert "ended" in said(lambda: work.remote(refs[0]), fastrt.StaleReferenceError)
assert "Ray cannot be used" in said(lambda: fastrt.init(engine="ray", address="127.0.0.1:1"), fastrt.ConfigError)
assert "its own settings" in said(lambda: fastrt.init(2, engine="ray", address=sys.argv[1]), fastrt.ConfigError)
print("all said")
"""
    )
    assert "all said" in on_ray(program, "ADDRESS")


def test_engine_that_is_not_here_says_what_to_install(program):
    """In a Python without Ray, which is hidden where it is installed."""
    one = program(
        """
        import sys
        sys.modules["ray"] = None
        import fastrt
        try:
            fastrt.init(engine="ray")
        except fastrt.ConfigError as exc:
            print(exc)
        print("fastrt.engines.local" in sys.modules, fastrt.is_initialized())
        """
    )
    said = one.finish()[0]
    assert "pip install 'fastrt[ray]'" in said
    assert "False False" in said


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"engine": "spark"}, "engine is 'spark'"),
        ({"engine": "ray", "local_mode": True}, "leave out engine='ray'"),
        ({"local_mode": True, "address": "auto"}, "local mode has no address"),
        ({"local_mode": True, "resources": {"a": -1}}, "resources"),
        ({"local_mode": True, "num_workers": -1}, "num_workers"),
    ],
)
def test_wrong_choice_of_an_engine_is_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        fastrt.init(**settings)
    assert not fastrt.is_initialized()
