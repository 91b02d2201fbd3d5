"""Placement groups on one node."""

import contextlib
import os
import signal
import threading

import psutil
import pytest

import fastrt
from fastrt import PlacementGroupSchedulingStrategy as InGroup
from fastrt.errors import ActorDiedError, InfeasibleTaskError, NameTakenError, NotFoundError, ObjectStoreFullError
from support.amounts import counted


@pytest.fixture(scope="module")
def rt(runtime_dir):
    with fastrt.init(2, "64MiB", runtime_dir=runtime_dir, resources={"license": 2}) as runtime:
        yield runtime


@fastrt.remote
def pid(*after):
    return os.getpid()


@fastrt.remote
class Licensed:
    def pid(self):
        return os.getpid()


def get(refs):
    return fastrt.get(refs, timeout=30)


def has(**amounts):
    return counted(fastrt.available_resources()) == amounts


ALL = {"CPU": 2.0, "license": 2.0}


def test_group_reserves_for_its_tasks_and_actors_and_gives_back(rt, wait_until):
    group = fastrt.placement_group([{"CPU": 1, "license": 0.5}, {"license": 1}])
    assert group.wait(30)
    assert get(group.ready()) == group
    assert has(CPU=1.0, license=0.5)
    assert counted(fastrt.cluster_resources()) == ALL
    about = fastrt.placement_group_table(group)
    assert about["state"] == "CREATED"
    assert about["bundles"] == {0: {"CPU": 1.0, "license": 0.5}, 1: {"license": 1.0}}
    assert about["bundles_to_node_id"] == {0: rt.session, 1: rt.session}
    assert about["stats"]["scheduling_state"] == "FINISHED"
    assert 0 <= about["stats"]["scheduling_latency_ms"] <= about["stats"]["end_to_end_creation_latency_ms"]
    inside = pid.options(scheduling_strategy=InGroup(group, 0), resources={"license": 0.5})
    assert len(get([inside.remote() for _ in range(20)])) == 20
    actor = Licensed.options(scheduling_strategy=InGroup(group), resources={"license": 1}).remote()
    get(actor.pid.remote())
    waiting = pid.options(scheduling_strategy=InGroup(group, 1), num_cpus=0, resources={"license": 1}).remote()
    assert fastrt.wait([waiting], timeout=0)[0] == []
    assert has(CPU=1.0, license=0.5), "what they take is the group's"
    fastrt.remove_placement_group(group)
    with pytest.raises(ActorDiedError, match="its placement group was removed"):
        get(actor.pid.remote())
    with pytest.raises(InfeasibleTaskError, match=f"resources of placement group {group.id}, which was removed"):
        get(waiting)
    wait_until(lambda: has(**ALL), "everything to be free")
    gone = fastrt.placement_group_table(group)
    assert (gone["state"], gone["stats"]["scheduling_state"]) == ("REMOVED", "REMOVED")
    assert gone.keys() == about.keys()
    assert gone["bundles"] == about["bundles"]
    assert type(gone["placement_group_id"]) is type(about["placement_group_id"]) is str
    assert gone["stats"].keys() == about["stats"].keys()
    assert fastrt.placement_group_table() == {}
    with pytest.raises(NotFoundError, match="is not there any more"):
        get(group.ready())
    with pytest.raises(InfeasibleTaskError, match="was removed"):
        get(inside.remote())


def test_all_bundles_or_none_are_reserved(rt, wait_until):
    first = fastrt.placement_group([{"license": 1.5}])
    second = fastrt.placement_group([{"license": 0.5}, {"license": 1}], strategy="STRICT_PACK")
    assert first.wait(30)
    assert not second.wait(0)
    assert fastrt.placement_group_table(second)["state"] == "PENDING"
    assert has(CPU=2.0, license=0.5)
    early = pid.options(scheduling_strategy=InGroup(second), num_cpus=0, resources={"license": 1}).remote()
    assert fastrt.wait([early], timeout=0)[0] == []
    fastrt.remove_placement_group(first)
    assert second.wait(30)
    get(early)
    fastrt.remove_placement_group(second)
    wait_until(lambda: has(**ALL), "everything to be free")


def test_names_and_lifetimes(rt, program, wait_until):
    group = fastrt.placement_group([{"license": 1}], name="mine", lifetime="detached")
    assert group.wait(30)
    assert fastrt.get_placement_group("mine") == group
    assert fastrt.list_named_actors() == []
    with pytest.raises(NameTakenError, match="'mine' is there already"):
        fastrt.placement_group([{"license": 1}], name="mine")

    @fastrt.remote(max_retries=0)
    def reserve():
        assert fastrt.placement_group([{"CPU": 1}], name="theirs").wait(30)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(fastrt.WorkerCrashedError):
        get(reserve.remote())
    fastrt.remove_placement_group(fastrt.get_placement_group("theirs"))  # it ends with this program, not with the task
    wait_until(lambda: has(CPU=2.0, license=1.0), "what the dead one had reserved to be free")
    fastrt.remove_placement_group(fastrt.get_placement_group("mine"))
    with pytest.raises(NotFoundError, match="has the name 'mine'"):
        fastrt.get_placement_group("mine")


def test_group_that_cannot_be_is_named(rt):
    group = fastrt.placement_group([{"CPU": 1}, {"CPU": 2}], strategy="STRICT_PACK")
    with pytest.raises(
        InfeasibleTaskError, match=r"bundles \(CPU 1; CPU 2\) as STRICT_PACK, for which the nodes do not"
    ):
        get(group.ready())
    fastrt.remove_placement_group(group)
    group = fastrt.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    with pytest.raises(InfeasibleTaskError, match="STRICT_SPREAD"):
        group.wait(30)
    with pytest.raises(InfeasibleTaskError, match=f"of placement group {group.id}, which has bundles .* as STRICT_SP"):
        get(pid.options(scheduling_strategy=InGroup(group)).remote())
    assert fastrt.placement_group_table() == {}
    fastrt.remove_placement_group(group)


def test_wrong_use_is_told_at_once(rt):
    group = fastrt.placement_group([{"license": 1}])
    for make, error, text in [
        (lambda: fastrt.placement_group([]), ValueError, "there are 0 bundles"),
        (lambda: fastrt.placement_group({"CPU": 1}), TypeError, "it must be a list"),
        (lambda: fastrt.placement_group({"CPU": 1}), ValueError, "it must be a list"),  # as on Ray
        (lambda: fastrt.get_placement_group("no such"), ValueError, "no placement group has the name 'no such'"),
        (lambda: fastrt.placement_group([{"CPU": 0}]), ValueError, "it reserves nothing"),
        (lambda: fastrt.placement_group([{"CPU": -1}]), ValueError, "must be a number"),
        (lambda: fastrt.placement_group([{"CPU": 1}], strategy="NEAR"), ValueError, "strategy is 'NEAR'"),
        (lambda: fastrt.placement_group([{"CPU": 1}], lifetime="long"), ValueError, "lifetime is 'long'"),
        (lambda: InGroup("mine"), TypeError, "made by placement_group"),
        (lambda: InGroup(group, 0, 1), TypeError, "placement_group_capture_child_tasks must be True or False"),
        (lambda: pid.options(scheduling_strategy=InGroup(group)), ValueError, "CPU 1 is demanded .* no bundle has it"),
        (lambda: pid.options(scheduling_strategy=InGroup(group, 1), num_cpus=0), ValueError, "has 1 bundles"),
        (lambda: fastrt.remove_placement_group("mine"), TypeError, "takes a placement group"),
    ]:
        with pytest.raises(error, match=text):
            make()
    fastrt.remove_placement_group(group)


def test_killed_daemon_loses_no_reservation(rt, wait_until):
    group = fastrt.placement_group([{"license": 1.5}])
    assert group.wait(30)
    held = Licensed.options(resources={"license": 0.5}).remote()
    before = get(held.pid.remote())
    rt._processes.daemon.kill()
    wait_until(lambda: has(CPU=2.0), "another daemon that knows of it")
    assert get(held.pid.remote()) == before
    get(pid.options(scheduling_strategy=InGroup(group, 0), num_cpus=0, resources={"license": 1.5}).remote())
    fastrt.remove_placement_group(group)
    del held
    wait_until(lambda: has(**ALL), "everything to be free")


def has_died(rt):
    """Kill the node daemon; another one takes its place soon."""
    rt._restarts._deaths.clear()  # or it counts as one that dies too often
    rt._processes.daemon.kill()


def test_calls_that_need_the_daemon_wait_for_the_one_that_takes_its_place(rt, wait_until):
    has_died(rt)
    assert counted(fastrt.available_resources()) == ALL
    group = fastrt.placement_group([{"CPU": 2, "license": 1}])
    assert group.wait(30)
    has_died(rt)
    assert fastrt.placement_group_table(group)["state"] == "CREATED"
    assert counted(fastrt.nodes()[0]["Available"]) == {"CPU": 0.0, "license": 1.0}
    has_died(rt)
    fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "everything to be free")


def test_ready_of_groups_outlives_the_daemon(rt, wait_until):
    first, second = (fastrt.placement_group([{"license": 1.5}]) for _ in range(2))
    early, late = first.ready(), second.ready()
    has_died(rt)
    assert get(early) == first
    assert fastrt.wait([late], timeout=0)[0] == []
    has_died(rt)
    fastrt.remove_placement_group(first)
    assert get(late) == second
    assert second.wait(30)
    fastrt.remove_placement_group(second)
    wait_until(lambda: has(**ALL), "everything to be free")


def test_new_daemon_knows_all_groups_before_the_zygote_has_named_its_workers(rt, wait_until):
    groups = [fastrt.placement_group([{"license": 1.5}]) for _ in range(2)]
    assert groups[0].wait(30)
    zygote = psutil.Process(rt._processes.zygote.pid)
    zygote.suspend()
    try:
        has_died(rt)
        states = [fastrt.placement_group_table(group)["state"] for group in groups]
    finally:
        zygote.resume()
    assert states == ["CREATED", "PENDING"]
    for group in groups:
        fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "everything to be free")


@pytest.mark.parametrize("reserved", [True, False])
def test_group_that_is_removed_while_the_daemon_is_replaced_leaves_nothing_reserved(rt, wait_until, reserved):
    """A new daemon learns of groups that wait later than of those that have something."""
    other = fastrt.placement_group([{"license": 1}])
    assert other.wait(30)
    group = fastrt.placement_group([{"CPU": 1, "license": 1 if reserved else 2}])
    assert group.wait(30 if reserved else 0) == reserved
    has_died(rt)
    fastrt.remove_placement_group(group)
    fastrt.remove_placement_group(other)
    wait_until(lambda: has(**ALL), "everything to be free")
    assert fastrt.placement_group_table() == {}
    has_died(rt)  # the next daemon finds no record of the group, whose id says that it was made here
    with pytest.raises(InfeasibleTaskError, match=f"resources of placement group {group.id}, which was removed"):
        fastrt.get(pid.options(scheduling_strategy=InGroup(group)).remote(), timeout=30)


@fastrt.remote
def until(path):
    open(path + "-begun", "w").close()
    while not os.path.exists(path):
        threading.Event().wait(0.002)


def test_group_is_ready_once_the_tasks_that_run_on_its_cpus_have_ended(rt, tmp_path, wait_until):
    running = [until.remote(str(tmp_path / str(k))) for k in range(2)]
    wait_until(lambda: len(list(tmp_path.glob("*-begun"))) == 2, "both to run")
    groups = [fastrt.placement_group([{"CPU": 1}]), fastrt.placement_group([{"license": 1}, {"CPU": 1}])]
    inside = pid.options(scheduling_strategy=InGroup(groups[0])).remote()
    groups.append(fastrt.placement_group([{"license": 1}]))
    assert groups[2].wait(30), "it does not take a CPU"
    assert not groups[1].wait(0.2)
    assert not groups[0].wait(0)
    assert fastrt.placement_group_table(groups[0])["state"] == "PENDING"
    (tmp_path / "0").touch()
    assert groups[0].wait(30)
    get(inside)
    assert not groups[1].wait(0.2)
    (tmp_path / "1").touch()
    assert groups[1].wait(30)
    get(running)
    for group in groups:
        fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "everything to be free")


def test_many_groups_that_wait_cost_no_more_each_than_a_few(rt, wait_until):
    """By the time that the daemon works: 400 groups, all made and asked for, within a few times what 100 take."""
    daemon = psutil.Process(rt._processes.daemon.pid)

    def seconds(count):
        before = sum(daemon.cpu_times()[:2])
        groups = [fastrt.placement_group([{"license": 2}]) for _ in range(count)]
        refs = [group.ready() for group in groups]
        assert fastrt.wait(refs, num_returns=1, timeout=60)[0]
        for group in groups:
            fastrt.remove_placement_group(group)
        wait_until(lambda: has(**ALL), "everything to be free", 60)
        return sum(daemon.cpu_times()[:2]) - before

    few, many = seconds(100), seconds(400)
    assert many < 10 * few + 0.5


def test_full_table_of_actors_and_bundles_is_named(rt, wait_until):
    groups = [fastrt.placement_group([{"license": 0.004}] * 500) for _ in range(16)]
    with pytest.raises(ObjectStoreFullError, match=r"placement groups.*8192"):
        fastrt.placement_group([{"license": 0.004}] * 500)

    def takes_the_rest():
        with contextlib.suppress(ObjectStoreFullError):
            groups.append(fastrt.placement_group([{"license": 0.01}] * 192))
        return len(groups) == 17

    wait_until(takes_the_rest, "the room that the one which failed had")
    with pytest.raises(ObjectStoreFullError, match=r"actors.*8192"):
        Licensed.remote()
    for group in groups:
        fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "everything to be free")


def here():
    group = fastrt.util.get_current_placement_group()
    return None if group is None else group.id


@fastrt.remote
class Where:
    def here(self):
        return here()

    def of_task(self):
        return fastrt.get(fastrt.remote(here).remote())


@fastrt.remote(num_cpus=0)
def started():
    """Where a task is, what it starts, what says itself where it runs, and an actor."""
    task, actor = fastrt.remote(num_cpus=0)(here), Where.remote()
    refs = [task.remote(), task.options(scheduling="default").remote(), actor.here.remote()]
    outside = [{"placement_group": None}, {"scheduling_strategy": InGroup(None)}]
    refs += [task.options(**place).remote() for place in outside]
    others = [Where.options(**place).remote() for place in outside]
    return [here(), *fastrt.get([*refs, *(other.here.remote() for other in others)])]


def test_task_and_actor_know_their_group_and_what_they_start_is_outside_of_it(rt, wait_until):
    group = fastrt.placement_group([{"CPU": 1}, {"license": 1}])
    assert group.wait(30)
    assert here() is None
    inside = InGroup(group)
    assert get(fastrt.remote(here).options(scheduling_strategy=inside).remote()) == group.id
    assert get(started.options(scheduling_strategy=inside).remote()) == [group.id, *[None] * 7]
    again = started.options(scheduling_strategy=inside).options(scheduling_strategy="DEFAULT")
    assert get(again.remote()) == [None] * 8
    actor = Where.options(scheduling_strategy=inside).remote()
    assert get([actor.here.remote(), actor.of_task.remote()]) == [group.id, None]
    del actor
    fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "what was reserved")


def assigned():
    return fastrt.get_runtime_context().get_assigned_resources()


@fastrt.remote
class Assigned:
    def __init__(self):
        self.first = assigned()

    def now(self):
        return self.first, assigned()


@pytest.mark.parametrize("bundle", [0, -1])
def test_assigned_resources_in_a_group_are_named_as_they_were_asked_for(rt, wait_until, bundle):
    group = fastrt.placement_group([{"CPU": 1, "license": 2}])
    assert group.wait(30)
    inside = {"scheduling_strategy": InGroup(group, bundle), "resources": {"license": 0.5}}
    assert get(fastrt.remote(assigned).options(**inside).remote()) == {"CPU": 1.0, "license": 0.5}
    assert get(fastrt.remote(assigned).options(**inside, num_cpus=0).remote()) == {"license": 0.5}
    actor = Assigned.options(**inside).remote()
    assert get(actor.now.remote()) == ({"license": 0.5},) * 2
    del actor
    fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "what was reserved")


def test_assigned_resources_of_an_actor_are_what_it_holds_while_it_lives(rt, wait_until):
    assert assigned() == {}
    assert get(fastrt.remote(assigned).remote()) == {"CPU": 1.0}
    for options, expected in [
        ({}, {}),
        ({"num_cpus": 1}, {"CPU": 1.0}),
        ({"num_cpus": 0.5, "resources": {"license": 1}}, {"CPU": 0.5, "license": 1.0}),
    ]:
        actor = Assigned.options(**options).remote()
        assert get(actor.now.remote()) == (expected,) * 2
        del actor
    wait_until(lambda: has(**ALL), "what they held")


@fastrt.remote
def waits_for_children(depth):
    """Tasks of a whole CPU, each of which waits for the one that it starts in the same group."""
    return 1 + fastrt.get(waits_for_children.remote(depth - 1)) if depth else 0


@pytest.mark.parametrize("bundle", [0, -1])
def test_task_that_waits_for_its_child_in_the_same_bundle_lends_it_the_bundles_cpu(rt, wait_until, bundle):
    group = fastrt.placement_group([{"CPU": 1, "license": 1}])
    assert group.wait(30)
    inside = InGroup(group, bundle, placement_group_capture_child_tasks=True)
    parent = waits_for_children.options(scheduling_strategy=inside, resources={"license": 1})
    assert get(parent.remote(2)) == 2
    fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "what was reserved")


def test_group_that_captures_has_what_its_tasks_start_and_what_these_start(rt, wait_until):
    group = fastrt.placement_group([{"CPU": 1, "license": 1}])
    assert group.wait(30)
    inside = InGroup(group, 0, placement_group_capture_child_tasks=True)
    mine = group.id
    assert get(started.options(scheduling_strategy=inside).remote()) == [mine, mine, None, mine, *[None] * 4]

    @fastrt.remote(num_cpus=0, timeout=30)
    def lead():
        return fastrt.get(started.remote())

    assert get(lead.options(scheduling_strategy=inside).remote()) == [mine, mine, None, mine, *[None] * 4]
    actor = Where.options(scheduling_strategy=inside).remote()
    assert get([actor.here.remote(), actor.of_task.remote()]) == [mine, mine]

    @fastrt.remote(num_cpus=0)
    def greedy():
        return fastrt.get(fastrt.remote(resources={"license": 2})(here).remote())

    with pytest.raises(ValueError, match="no bundle has it"):
        get(greedy.options(scheduling_strategy=inside).remote())
    assert get(fastrt.remote(here).remote()) is None, "the workers are outside again"
    del actor
    fastrt.remove_placement_group(group)
    wait_until(lambda: has(**ALL), "what was reserved")
