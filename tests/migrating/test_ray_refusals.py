"""Calls that `fastrt.ray` refuses as Ray does, in its words, where fastrt's own API takes them."""

import pytest

import fastrt
from fastrt import ray
from fastrt.errors import UnsupportedError
from fastrt.ray.exceptions import RayError, RaySystemError
from fastrt.ray.runtime_env import RuntimeEnv
from fastrt.ray.util import annotations


@ray.remote
def one():
    return 1


@ray.remote
class Holder:
    def get(self):
        return ray.get_runtime_context().is_canceled()


@ray.remote
class Coroutines:
    async def get(self):
        return ray.get_runtime_context().is_canceled()


@ray.remote
def count():
    yield 1


def test_wait_takes_each_reference_once(rt):
    first, second = ray.put(1), ray.put(2)
    with pytest.raises(ValueError, match="Wait requires a list of unique ray_waitables"):
        ray.wait([first, first])
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"Invalid number of objects to return {wrong}"):
            ray.wait([first], num_returns=wrong)
    with pytest.raises(ValueError, match="num_returns cannot be greater than the number of ray_waitables"):
        ray.wait([first, second], num_returns=3)
    with pytest.raises(ValueError, match="The 'timeout' argument must be nonnegative"):
        ray.wait([first], timeout=-1)
    for wrong, got in ((first, "<class .*ObjectRef"), ([first, 1], "list containing <class 'int'>"), ([{}], "dict")):
        with pytest.raises(TypeError, match=rf"expected a list of ray\.ObjectRef or .*{got}"):
            ray.wait(wrong)
    assert ray.wait(ray_waitables=[first, second], num_returns=2, fetch_local=False) == ([first, second], [])
    assert ray.wait([], num_returns=5) == ([], [])
    assert fastrt.wait([first, first], num_returns=2) == ([first, first], [])


def test_empty_names_are_refused(rt):
    with pytest.raises(ValueError, match="Please supply a non-empty value to get_actor"):
        ray.get_actor("")
    with pytest.raises(ValueError, match="Actor name cannot be an empty string"):
        Holder.options(name="").remote()
    with pytest.raises(ValueError, match="Please supply a non-empty value to get_placement_group"):
        ray.util.get_placement_group("")
    for make in (
        lambda space: ray.get_actor("a", namespace=space),
        lambda space: Holder.options(name="a", namespace=space),
        lambda space: ray.init("local", namespace=space, ignore_reinit_error=True),
    ):
        with pytest.raises(ValueError, match='"" is not a valid namespace'):
            make("")
        with pytest.raises(TypeError, match=r"namespace .*123"):
            make(123)


def test_name_of_a_placement_group_is_taken(rt):
    group = ray.util.placement_group([{"CPU": 1}], name="taken")
    assert group.wait(20)
    with pytest.raises(RaySystemError, match="because name 'taken' already exists") as info:
        ray.util.placement_group([{"CPU": 1}], name="taken")
    assert isinstance(info.value, ValueError)
    with pytest.raises(ValueError, match="Failed to look up placement group with name: other"):
        ray.util.get_placement_group("other")
    ray.util.remove_placement_group(group)


def test_strategy_that_is_another_text_is_refused_at_the_call(rt):
    for call in (
        lambda: one.options(scheduling_strategy="node").remote(),
        lambda: Holder.options(scheduling_strategy="node").remote(),
        lambda: ray.remote(scheduling_strategy="node")(one.function).remote(),
    ):
        with pytest.raises(ValueError, match="Invalid scheduling_strategy value"):
            call()
    without = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placement_group=None)
    for target in (one, Holder):
        with pytest.raises(ValueError, match="placement_group needs to be an instance of PlacementGroup"):
            target.options(scheduling_strategy=without).remote()
    assert ray.get(one.options(scheduling_strategy="SPREAD").remote()) == 1


def test_decorator_with_empty_parentheses_is_refused():
    for wrong in (lambda: ray.remote(), lambda: ray.remote(5), lambda: ray.remote(len, num_cpus=1)):
        with pytest.raises(AssertionError, match="must be applied either with no arguments and no parentheses"):
            wrong()
    assert fastrt.remote()(len).function is len


def test_functions_and_classes_that_capture_too_much_are_refused(rt, monkeypatch):
    large = bytes(1 << 20)

    class Large:
        def get(self):
            return len(large)

    for made, name in ((ray.remote(lambda: len(large)), "remote function"), (ray.remote(Large), "actor Large")):
        monkeypatch.setattr(type(made), "_captured_max", 1 << 20)
        with pytest.raises(ValueError, match=f"The {name}.* is too large .1 MiB > FUNCTION_SIZE_ERROR_THRESHOLD=1"):
            made.remote()
    assert fastrt.get(fastrt.remote(lambda: len(large)).remote()) == 1 << 20


def test_unknown_fields_of_an_environment_have_no_effect(rt):
    with pytest.warns(UserWarning, match="'colour'"):
        assert ray.get(one.options(runtime_env={"colour": "blue", "env_vars": {"A": "b"}}).remote()) == 1
    with pytest.warns(UserWarning, match="'colour'"):
        ray.remote(runtime_env=RuntimeEnv(colour="blue"))(Holder.cls)
    assert RuntimeEnv(colour="blue") == {"colour": "blue"}
    with pytest.raises(UnsupportedError):
        RuntimeEnv(py_executable="python")
    with pytest.raises(ValueError, match="'colour', which is not known"):
        fastrt.remote(runtime_env={"colour": "blue"})(one.function)


@pytest.mark.filterwarnings("ignore:Use get_")
def test_context_of_a_driver_has_no_task_and_no_actor(rt):
    here = ray.get_runtime_context()
    for name in ("actor_id", "task_id", "was_current_actor_reconstructed"):
        with pytest.raises(AssertionError, match="only available when the process is a worker"):
            getattr(here, name)
    with pytest.raises(AssertionError, match="only available when the process is a worker"):
        here.get_assigned_resources()
    with pytest.raises(RuntimeError, match="only available when the process is a worker"):
        here.is_canceled()
    assert here.get_actor_id() is here.get_task_id() is here.get_task_name() is here.get_actor_name() is None
    assert here.get_job_id() == ray.put(1).job_id().hex() == ray.JobID.from_int(1).hex()
    assert not ray.get(Holder.remote().get.remote())
    with pytest.raises(RuntimeError, match="not supported in an async actor"):
        ray.get(Coroutines.remote().get.remote())


def test_generator_is_not_ready_at_its_end(rt, wait_until):
    items = count.remote()
    wait_until(items.next_ready, "the item")
    next(items)
    ray.wait([items.completed()])
    assert not items.next_ready()
    assert items.is_finished()
    failed = ray.remote(lambda: iter([1 / 0])).options(num_returns="streaming").remote()
    ray.wait([failed.completed()])
    assert failed.next_ready()
    with pytest.raises(ZeroDivisionError):
        ray.get(next(failed))
    assert not failed.next_ready()


def test_deprecated_marks_say_so():
    @annotations.Deprecated(message="use g instead", warning=True)
    def old():
        """Do it."""
        return 3

    @annotations.Deprecated(warning=True)
    class Old:
        pass

    assert "**DEPRECATED**: This API is deprecated" in old.__doc__
    assert old.__doc__.endswith("use g instead\n")
    with pytest.warns(annotations.RayDeprecationWarning, match="use g instead"):
        assert old() == 3
    with pytest.warns(annotations.RayDeprecationWarning):
        Old()
    plain = type("Plain", (), {})
    assert annotations.Deprecated(plain) is plain
    with pytest.raises(ValueError, match="Unknown kwargs"):
        annotations.Deprecated(reason="x")
    assert issubclass(RaySystemError, RayError)


@pytest.mark.parametrize(
    ("options", "target", "words"),
    [
        (
            {"max_retries": 0.5},
            pow,
            "keyword 'max_retries' must be .*'int'>, <class 'NoneType.* received type .*'float'",
        ),
        ({"max_restarts": 0.5}, Exception, "The type of keyword 'max_restarts' must be"),
        ({"_metadata": 3.14}, Exception, "The type of keyword '_metadata' must be"),
        ({"num_returns": 0.5}, pow, "The type of keyword 'num_returns' must be .*'int'>, <class 'str'>"),
        ({"max_calls": -1}, pow, "'max_calls' only accepts None, 0 or a positive integer"),
        ({"max_retries": -2}, pow, "'max_retries' only accepts None, 0, -1 or a positive integer, where -1 represents"),
        ({"max_task_retries": -2}, Exception, "'max_task_retries' only accepts None, 0, -1 or a positive integer"),
        (
            {"num_returns": -1},
            pow,
            '\'num_returns\' only accepts None, a non-negative integer, "streaming" .*"dynamic"',
        ),
        ({"num_gpus": 1e-7}, pow, "quantity of resource num_gpus cannot go beyond 0.0001"),
        ({"resources": {"own": 1e-7}}, pow, "quantity of resource own cannot go beyond 0.0001"),
    ],
)
def test_options_are_refused_in_words_of_ray(options, target, words):
    with pytest.raises((TypeError, ValueError), match=words) as info:
        ray.remote(**options)(target)
    assert isinstance(info.value, TypeError if "type of keyword" in str(info.value) else ValueError)


def test_options_that_only_the_declaration_takes():
    with pytest.raises(ValueError, match=r"Setting 'max_calls' is not supported in '\.options"):
        one.options(max_calls=1)
    with pytest.raises(ValueError, match=r"Setting 'concurrency_groups' is not supported in '\.options"):
        Holder.options(concurrency_groups={"io": 2})
    assert ray.remote(max_calls=3)(pow).options(name="again").options(max_calls=None)
