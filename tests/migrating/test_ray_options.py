"""Options that only Ray has: translated, without effect, or refused."""

import pytest

import fastrt
from fastrt.errors import UnsupportedError
from fastrt.ray.runtime_env import RuntimeEnv, RuntimeEnvConfig
from fastrt.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from fastrt.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy


@fastrt.remote
def group_here():
    here = fastrt.util.get_current_placement_group()
    return None if here is None else here.id


@fastrt.remote(max_restarts=1, max_task_retries=0)
class Restarting:
    @fastrt.method(max_task_retries=2)
    def retried(self):
        return 1

    def plain(self):
        return 2


def test_placement_group_as_an_option_is_a_strategy(rt):
    group = placement_group([{"CPU": 1}])
    assert group.wait(timeout_seconds=20)
    assert not group.is_empty
    inside = group_here.options(placement_group=group, placement_group_bundle_index=0)
    assert fastrt.get(inside.remote()) == group.id
    assert fastrt.get(group_here.options(placement_group="default").remote()) is None
    assert fastrt.get(group_here.options(placement_group=None).remote()) is None
    remove_placement_group(group)


def test_group_and_strategy_are_refused_together_wherever_they_are_given():
    group = PlacementGroup("00", ({"CPU": 1.0},), "PACK", "", "")
    strategies = ["SPREAD", NodeAffinitySchedulingStrategy("n"), PlacementGroupSchedulingStrategy(group)]
    for what in (lambda: 1, type("Plain", (), {})):
        for strategy in strategies:
            by_strategy = fastrt.remote(scheduling_strategy=strategy)(what)
            by_group = fastrt.remote(placement_group=group)(what)
            for make in (
                lambda by_strategy=by_strategy: by_strategy.options(placement_group=group),
                lambda by_group=by_group, strategy=strategy: by_group.options(scheduling_strategy=strategy),
                lambda what=what, s=strategy: fastrt.remote(placement_group=group, scheduling_strategy=s)(what),
            ):
                with pytest.raises(ValueError, match="give placement_group or a scheduling_strategy, not both"):
                    make()
            by_strategy.options(scheduling_strategy="SPREAD", placement_group="default")
            by_strategy.options(placement_group=None)
            by_group.options(placement_group=group, placement_group_bundle_index=0)
        fastrt.remote(scheduling_strategy="DEFAULT")(what).options(placement_group=group)


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match="placement_group is 5"):
        fastrt.remote(placement_group=5)(lambda: 1)
    with pytest.raises(ValueError, match="bundle index must be -1 without a placement_group, not 0"):
        fastrt.remote(placement_group_bundle_index=0)(lambda: 1)
    with pytest.raises(ValueError, match="no resource can have the name 'bundle'"):
        placement_group([{"bundle": 1}])
    group = PlacementGroup("00", ({"CPU": 1.0},), "PACK", "", "")
    with pytest.raises(ValueError, match="the group has 1 bundles"):
        fastrt.remote(placement_group=group, placement_group_bundle_index=4)(lambda: 1)


def test_amount_that_is_no_number_is_a_type_error_as_on_ray():
    for options in ({"num_cpus": "x"}, {"num_gpus": "1"}, {"resources": 5}):
        with pytest.raises(TypeError):
            fastrt.remote(**options)(lambda: 1)
    with pytest.raises(ValueError, match="must be a number from 0"):
        fastrt.remote(num_cpus=-1)(lambda: 1)


def test_accelerator_type_is_a_resource():
    made = fastrt.remote(accelerator_type="A100", resources={"x": 1})(lambda: 1)
    assert dict(made._demand.amounts)["accelerator_type:A100"] == 10
    assert dict(made._demand.amounts)["x"] == 10_000


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"object_store_memory": 5}, "object_store_memory"),
        ({"_num_objects_per_yield": 2}, "_num_objects_per_yield"),
    ],
)
def test_option_that_would_have_an_effect_is_refused(options, name):
    for make in (lambda: fastrt.remote(**options)(len), lambda: group_here.options(**options)):
        with pytest.raises(UnsupportedError, match=rf"no option {name!r} of remote functions: .*engine=\"ray\""):
            make()


@pytest.mark.parametrize("options", [{"enable_tensor_transport": True}, {"object_store_memory": 1 << 20}])
def test_option_of_classes_that_would_have_an_effect_is_refused(options):
    for make in (lambda: fastrt.remote(**options)(Restarting.cls), lambda: Restarting.options(**options)):
        with pytest.raises(UnsupportedError, match=f"no option '{next(iter(options))}' of remote classes"):
            make()


def test_options_without_effect_are_taken(rt):
    assert fastrt.get(fastrt.remote(enable_task_events=False, memory=10, _labels=None)(abs).remote(-1)) == 1
    plain = {"max_pending_calls": -1, "allow_out_of_order_execution": True, "enable_tensor_transport": None}
    actor = Restarting.options(**plain).remote()
    assert fastrt.get(actor.plain.options(name="a name", enable_task_events=False).remote()) == 2


def test_order_of_calls_that_run_at_once_is_refused():
    class Waits:
        async def wait(self):
            pass

    class Plain:
        pass

    ordered = {"allow_out_of_order_execution": False}
    for make in (
        lambda: fastrt.remote(**ordered)(Waits),
        lambda: fastrt.remote(Waits).options(**ordered),
        lambda: fastrt.remote(max_concurrency=2, **ordered)(Plain),
        lambda: fastrt.remote(max_concurrency=2)(Plain).options(**ordered),
    ):
        with pytest.raises(ValueError, match="so its calls run at once"):
            make()
    assert fastrt.remote(**ordered)(Plain).options(**ordered).cls is Plain


def test_methods_retries_take_precedence_over_the_actors(rt):
    actor = Restarting.remote()
    assert (actor.retried._retries, actor.plain._retries) == (2, 0)
    assert actor.retried.options(max_task_retries=5)._retries == 5
    assert fastrt.get([actor.retried.remote(), actor.plain.remote()]) == [1, 2]
    with pytest.raises(ValueError, match="max_task_retries is -2"):
        fastrt.method(max_task_retries=-2)


def test_wrong_options_are_errors_of_both_kinds():
    """Ray raises a ValueError for them."""

    async def coroutine():
        pass

    for make in (
        lambda: fastrt.remote(foo=1)(len),
        lambda: Restarting.options(foo=1),
        lambda: fastrt.remote(coroutine),
    ):
        with pytest.raises(ValueError, match=r"option|coroutine") as info:
            make()
        assert isinstance(info.value, TypeError)


def test_owner_of_a_value_has_no_effect(rt):
    assert fastrt.get(fastrt.put(5, _owner=Restarting.remote())) == 5


def test_config_of_an_environment_is_checked_and_has_no_effect():
    task = fastrt.remote(lambda: 1)
    for good in ({"setup_timeout_seconds": 10}, {"setup_timeout_seconds": -1, "eager_install": False}, {}):
        for config in (good, RuntimeEnvConfig(**good)):
            assert task.options(runtime_env={"config": config})
            assert RuntimeEnv(config=config) == {}
    for bad in ({"setup_timeout_seconds": 0}, {"setup_timeout_seconds": 1.0}, {"eager_install": 1}):
        for refuse in (
            lambda bad=bad: task.options(runtime_env={"config": bad}),
            lambda bad=bad: RuntimeEnvConfig(**bad),
            lambda bad=bad: RuntimeEnv(config=bad),
        ):
            with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
                refuse()
    with pytest.raises(TypeError, match="must be a dict or a RuntimeEnvConfig"):
        task.options(runtime_env={"config": 5})
