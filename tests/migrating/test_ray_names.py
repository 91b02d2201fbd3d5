"""Names of Ray under `fastrt.ray`: the page of them is true, complete, and each refusal says what it refuses."""

import importlib
import inspect
import subprocess
import sys

import pytest

from fastrt.errors import FastrtError, UnsupportedError
from fastrt.ray import exceptions, refusals
from support import ray_page
from support.on_ray import needs_ray
from support.ray_env import python_with_ray


def test_page_says_what_is_there():
    version, names = ray_page.read()
    assert ray_page.render(version, names) == ray_page.PAGE.read_text()
    assert sum(map(len, names.values())) > 350


def test_page_without_a_name_that_is_there_is_noticed():
    _, names = ray_page.read()
    assert "`put`" in ray_page.render("1", {"ray": names["ray"]})
    assert "Refused: `nothing`" not in ray_page.render("1", {"ray": names["ray"]})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ray_page.render("1", {"ray": ["nothing"]})


# Their references are named otherwise: every program gives them by position.
NO_KEYWORD = 1


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(150)
def test_page_has_all_names_of_an_installed_ray():
    of_ray = ray_page.from_ray(python_with_ray())
    assert ray_page.read() == (of_ray["version"], {part: sorted(names) for part, names in of_ray["names"].items()})
    wrong = []
    for name, bases in of_ray["tree"].items():
        ours = {base.__name__: base for base in getattr(exceptions, name).__mro__}
        missing = [
            base
            for base in bases
            if base not in ours and not issubclass(getattr(exceptions, name), getattr(exceptions, base, Exception))
        ]
        wrong += [(name, base) for base in missing]
    assert wrong == []
    assert len(of_ray["parameters"]) > 70
    assert missing_parameters(of_ray["parameters"]) == dict.fromkeys(("ray.get", "ray.cancel"), NO_KEYWORD)


def missing_parameters(of_ray):
    """Functions of Ray that are there and lack some of its parameters; how many."""
    missing = {}
    for where, wanted in of_ray.items():
        module, _, name = where.rpartition(".")
        owner, _, cls = module.rpartition(".")
        if cls[:1].isupper():
            found = getattr(importlib.import_module(f"fastrt.{owner}"), cls)
        else:
            found = importlib.import_module(f"fastrt.{module}")
        try:
            ours = inspect.signature(getattr(found, name)).parameters
        except AttributeError:  # refused: the page says why
            continue
        lacking = [one for one in wanted if one not in ours and one not in ("args", "kwargs")]
        if lacking and not any(one.kind is one.VAR_KEYWORD for one in ours.values()):
            missing[where] = len(lacking)
    return missing


def test_exceptions_are_in_rays_tree():
    for name in exceptions.__all__:
        assert issubclass(getattr(exceptions, name), exceptions.RayError)
    assert issubclass(exceptions.ActorDiedError, exceptions.RayActorError)
    assert not issubclass(exceptions.ActorDiedError, exceptions.ActorUnavailableError)
    assert issubclass(exceptions.OwnerDiedError, exceptions.ObjectLostError)
    assert issubclass(exceptions.ActorAlreadyExistsError, ValueError)


@pytest.mark.parametrize("module", [name for name in refusals.REFUSED if name.startswith("ray")])
def test_refused_name_says_so(module):
    found = importlib.import_module(f"fastrt.{module}")
    for name in refusals.REFUSED[module]:
        assert not hasattr(found, name)
        with pytest.raises(UnsupportedError, match=rf"fastrt has no {module}\.{name}: .*engine=\"ray\""):
            getattr(found, name)


def test_refused_module_can_be_done_without(program):
    one = program(
        """
        from fastrt.ray import alias
        alias.install()
        for name in ("ray.tune", "ray.util.horovod", "ray.train.torch"):
            try:
                __import__(name)
            except ImportError as exc:
                print(exc)
        try:
            from ray import serve
        except ImportError as exc:
            print(exc)
        try:
            from ray import nothing
        except ImportError as exc:
            print(exc)
        """
    )
    said = one.finish()[0].splitlines()
    assert [line.split(":")[0] for line in said[:4]] == [
        "fastrt has no ray.tune", "fastrt has no ray.util.horovod", "fastrt has no ray.train", "fastrt has no ray.serve"
    ]  # fmt: skip
    assert "cannot import name 'nothing'" in said[4]


def test_alias_is_refused_beside_ray_itself(program):
    one = program(
        """
        import sys, types
        sys.modules["ray"] = types.ModuleType("ray")
        sys.modules["ray"]._config = None
        from fastrt.ray import alias
        alias.install()
        """
    )
    assert "has imported Ray itself" in one.finish(1)[1]


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("fastrt.ray.dag", "dag"),
        ("fastrt.ray.dag.input_node", "dag.input_node"),
        ("fastrt.ray.dag.output_node", "dag.output_node"),
        ("fastrt.ray.util.accelerators", "util.accelerators"),
        ("fastrt.ray.job_config", "job_config"),
        ("fastrt.ray.remote_function", "remote_function"),
        ("fastrt.ray.runtime_env", "runtime_env"),
        ("fastrt.ray.types", "types"),
        ("fastrt.ray.util.actor_pool", "util.actor_pool"),
        ("fastrt.ray.util.joblib", "util.joblib"),
        ("fastrt.ray.util.multiprocessing", "util.multiprocessing"),
        ("fastrt.ray.util.queue", "util.queue"),
        ("fastrt.ray.util.scheduling_strategies", "util.scheduling_strategies"),
        ("fastrt.ray.util.state", "util.state"),
    ],
)
def test_module_is_an_attribute_of_its_parent(module, attribute):
    code = (
        f"import fastrt.ray as ray; found = ray.{attribute}; assert found.__name__ == {module!r}, found;"
        "assert all(hasattr(found, name) for name in found.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_of_fastrt_does_not_import_rays_names():
    lazy = ("fastrt.ray", "fastrt.ids", "fastrt.tasks.dag")
    code = f"import sys, fastrt; print([name for name in sys.modules if name.startswith({lazy})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_unknown_option_of_init_is_refused():
    from fastrt.ray import init

    with pytest.raises(TypeError, match="it must be a ray"):
        init(job_config=object())
    with pytest.raises(UnsupportedError, match="option 'colour' of init"):
        init(colour="blue")
    with pytest.raises(UnsupportedError, match="client for 'ray://"):
        init("ray://somewhere:10001")
    with pytest.raises(FastrtError, match="num_workers"):
        init(num_cpus=-1)
