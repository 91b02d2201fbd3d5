"""Actors on two nodes: where they are placed, calls from one node to the other, names, and what deaths leave."""

import os
import signal
import threading

import pytest

import fastrt
from fastrt import PlacementGroupSchedulingStrategy as InGroup
from fastrt.errors import (
    ActorDiedError,
    ActorNotFoundError,
    InfeasibleTaskError,
    NameTakenError,
    NotFoundError,
    PendingCallsError,
)
from support.amounts import counted
from support.cluster import RunningNode, two_nodes


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 2, "--resources", '{"seat": 2}') as nodes:
        yield nodes


@pytest.fixture(scope="module")
def runtime(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@pytest.fixture
def rt(runtime):
    """For the one test that looks whether everything was given back: that takes seconds."""
    return runtime


@pytest.fixture
def two(runtime, wait_until):
    wait_until(lambda: len(fastrt.nodes()) == 2, "the other node to be known")
    return fastrt.nodes()[1]["NodeID"]


def free_seats():
    return fastrt.available_resources().get("seat", 0)


def get(refs):
    return fastrt.get(refs, timeout=30)


@fastrt.remote
class Counter:
    def __init__(self, start=0):
        self.value = start
        self.seen = []

    def add(self, by=1):
        self.value += by
        return self.value

    def see(self, what):
        self.seen.append(what)
        return self.seen

    def where(self):
        from fastrt.store import client

        return client.require().client.segment.session, os.getpid()

    def fail(self, what):
        raise KeyError(what)

    def split(self, big):
        return big[:2], big.nbytes

    def wait(self, path):
        while not os.path.exists(path):
            threading.Event().wait(0.005)
        return "waited"


@fastrt.remote
def use(counter, by):
    return get_there(counter, by)


def get_there(counter, by):
    return [fastrt.get(counter.add.remote(by)) for _ in range(3)], fastrt.get(counter.where.remote())


def test_actor_goes_where_its_resources_are_and_holds_them_while_it_lives(runtime, two, wait_until):
    actor = Counter.options(resources={"seat": 1.5}).remote(5)
    assert get(actor.add.remote()) == 6
    assert get(actor.where.remote())[0] == two
    wait_until(lambda: free_seats() == 0.5, "what it takes to be told")
    here = Counter.remote()
    assert get(here.where.remote())[0] == runtime.session
    waits = Counter.options(resources={"seat": 1}).remote(100)
    late = waits.add.remote()
    assert fastrt.wait([late], timeout=0)[0] == []
    del actor
    assert get(late) == 101
    del waits, here
    wait_until(lambda: free_seats() == 2, "everything to be free")


def test_calls_to_the_other_node_keep_order_and_bring_results_errors_and_arrays(two, tmp_path):
    np = pytest.importorskip("numpy")
    actor = Counter.options(scheduling="two").remote()
    for k in range(500):
        actor.see.options(num_returns=0).remote(k)
    late = actor.see.remote(use_later.remote(str(tmp_path / "go"), "late"))
    early = actor.see.remote("early")
    assert fastrt.wait([late, early], timeout=0.05)[0] == []
    (tmp_path / "go").touch()
    assert get(early) == [*range(500), "late", "early"]
    with pytest.raises(KeyError, match="lost") as caught:
        get(actor.fail.remote("lost"))
    assert caught.value.task_name == "Counter.fail"
    big = np.arange(1 << 18)
    first, size = get(actor.split.options(num_returns=2).remote(fastrt.put(big)))
    assert list(first) == [0, 1]
    assert size == big.nbytes


@fastrt.remote
def use_later(path, value):
    while not os.path.exists(path):
        threading.Event().wait(0.005)
    return value


def test_handles_work_in_tasks_and_actors_of_other_nodes(runtime, two):
    @fastrt.remote
    class Relay:
        def __init__(self, target):
            self.target = target["counter"]

        def pass_on(self, by):
            return fastrt.get(self.target.add.remote(by))

        def target_back(self):
            return self.target

    here = Counter.remote()
    there = Counter.options(scheduling="two").remote(10)
    assert get(use.options(scheduling="two").remote(here, 1)) == ([1, 2, 3], get(here.where.remote()))
    assert get(use.options(scheduling="two").remote(there, 1)) == ([11, 12, 13], get(there.where.remote()))
    assert get(use.options(scheduling="one").remote(there, 1))[0] == [14, 15, 16]
    relays = [Relay.options(scheduling="two").remote({"counter": target}) for target in (here, there)]
    assert get([relay.pass_on.remote(1) for relay in relays]) == [4, 17]
    assert get(relays[0].target_back.remote()) == here
    assert get(relays[1].target_back.remote()) == there

    @fastrt.remote(scheduling="two")
    def make():
        return Counter.options(scheduling="two").remote(7)

    made = get(make.remote())
    assert get(made.add.remote()) == 8
    assert get(made.where.remote())[0] == two
    assert get(use.options(scheduling="two").remote(made, 1))[0] == [9, 10, 11]


def test_limit_of_pending_calls_holds_for_an_actor_on_another_node(two, tmp_path):
    there = Counter.options(scheduling="two", max_pending_calls=2).remote()
    path = str(tmp_path / "go")

    def fill(handle):
        made = [handle.wait.remote(path), handle.add.remote()]
        try:
            handle.add.remote()
        except PendingCallsError:
            return made
        return None

    made = fill(there)
    near = get(fastrt.remote(scheduling="two")(fill).remote(there))
    (tmp_path / "go").touch()
    assert get([*made, *near]) == ["waited", 1, "waited", 2]
    assert get(there.add.remote()) == 3


def test_actor_that_leaves_on_another_node_is_not_built_again(runtime, two):
    @fastrt.remote(max_restarts=-1, max_task_retries=-1, scheduling="two")
    class Guest:
        def here(self):
            return fastrt.get_runtime_context().node_id

        def leave(self):
            fastrt.exit_actor()

    guest = Guest.remote()
    assert get(guest.here.remote()) == two
    for call in (guest.leave, guest.here):
        with pytest.raises(ActorDiedError, match=r"it left by fastrt\.exit_actor"):
            get(call.remote())


def test_namespace_of_a_driver_holds_on_other_nodes(runtime_dir, nodes, runtime, two, program):
    """For plain tasks, those with a policy, actors, and names of placement groups; this driver is in another one."""
    group = fastrt.placement_group([{"CPU": 0.1}], name="shared")
    other = program(
        f"""
        import fastrt

        @fastrt.remote
        class Named:
            def where(self):
                return fastrt.get_runtime_context().namespace

            def find(self):
                return fastrt.get(fastrt.get_actor("own").where.remote())

        def find():
            return fastrt.get_runtime_context().namespace, fastrt.get(fastrt.get_actor("own").where.remote())

        with fastrt.init(address={nodes[0].head!r}, runtime_dir={str(runtime_dir)!r}, namespace="team"):
            own = Named.options(name="own").remote()
            away = Named.options(scheduling="two").remote()
            plain = fastrt.remote(scheduling="two")(find)
            special = fastrt.remote(scheduling="two", timeout=30, retry_exceptions=[KeyError])(find)
            print(fastrt.get([own.where.remote(), away.where.remote(), away.find.remote()]))
            print(fastrt.get([plain.remote(), special.remote()]), fastrt.list_named_actors())
            group = fastrt.placement_group([{{"CPU": 0.1}}], name="shared")
            found = fastrt.remote(scheduling="two")(fastrt.get_placement_group).remote("shared")
            print(fastrt.get_placement_group("shared") == group == fastrt.get(found))
        """
    )
    said = other.finish()[0].splitlines()
    assert said == ["['team', 'team', 'team']", "[('team', 'team'), ('team', 'team')] ['own']", "True"]
    assert fastrt.get_placement_group("shared") == group
    fastrt.remove_placement_group(group)
    assert get(fastrt.remote(scheduling="two")(fastrt.get_runtime_context).remote()).namespace == ""


def test_names_are_found_and_actors_killed_on_other_nodes(runtime, two, wait_until):
    @fastrt.remote(scheduling="two")
    def make():
        Counter.options(name="keeper", lifetime="detached", scheduling="two").remote(40)
        return fastrt.get_actor("here").add.options().remote(1)

    mine = Counter.options(name="here").remote(1)
    assert get(get(make.remote())) == 2
    keeper = fastrt.get_actor("keeper")
    assert get(keeper.add.remote(2)) == 42
    assert get(keeper.where.remote())[0] == two
    assert fastrt.list_named_actors() == ["here", "keeper"]
    with pytest.raises(NameTakenError, match="The name 'keeper' is already taken by an actor in this session"):
        Counter.options(name="keeper").remote()
    assert Counter.options(name="keeper", get_if_exists=True).remote(100) == keeper
    fastrt.kill(keeper)
    with pytest.raises(ActorDiedError, match=r"it was killed by fastrt\.kill"):
        get([keeper.add.remote() for _ in range(2)])
    wait_until(lambda: fastrt.list_named_actors() == ["here"], "the name to be free")
    with pytest.raises(
        ActorNotFoundError, match="Failed to look up actor with name 'keeper' in this session; there are: here"
    ):
        fastrt.get_actor("keeper")
    away = Counter.options(scheduling="two", name="away").remote()
    get(away.add.remote())
    fastrt.kill(away)
    with pytest.raises(ActorDiedError, match=r"it was killed by fastrt\.kill"):
        get(away.add.remote())
    del mine


def test_death_of_the_process_over_there_is_told_and_restarts_are_made_here(two, tmp_path, wait_until):
    once = Counter.options(scheduling="two").remote()
    _, pid = get(once.where.remote())
    running = once.wait.remote(str(tmp_path / "never"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=f"(?s)its process {pid} was killed by signal 9"):
        get(running)
    with pytest.raises(ActorDiedError, match=r"Counter is dead: .* on node two"):
        get(once.add.remote())
    more = Counter.options(scheduling="two", max_restarts=1, max_task_retries=1).remote(3)
    _, pid = get(more.where.remote())
    running = more.wait.remote(str(tmp_path / "go"))
    behind = more.add.remote()
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert get([running, behind]) == ["waited", 4], "a new instance, built from the same arguments"
    broken = Broken.options(scheduling="two", max_restarts=5).remote()
    with pytest.raises(ActorDiedError, match=r"(?s)its constructor raised.*RuntimeError: no luck.*on node two"):
        get(broken.hello.remote())


class Flaky:
    def fail(self, path, good, die=0):
        with open(path, "a") as file:
            file.write("x")
        runs = os.path.getsize(path)
        if runs == die:
            os.kill(os.getpid(), signal.SIGKILL)
        if runs < good:
            raise ConnectionError("busy")
        return runs

    def count(self, most):
        for k in range(most):
            if k == 3:
                raise IndexError("three")
            yield k

    def wait(self, begun, ended):
        open(begun, "w").close()
        try:
            threading.Event().wait(30)
        finally:
            open(ended, "w").close()


class FlakyLoop(Flaky):
    async def fail_later(self, path, good):
        return self.fail(path, good)


@pytest.mark.parametrize("kind", ["alone", "threads", "loop"])
def test_calls_are_run_by_their_policy_on_the_other_node(two, tmp_path, kind):
    more = {"max_concurrency": 2} if kind == "threads" else {}
    actor = fastrt.remote(FlakyLoop if kind == "loop" else Flaky).options(scheduling="two", **more).remote()
    fail = actor.fail_later if kind == "loop" else actor.fail
    again = fail.options(retry_exceptions=[OSError], retry_delay=0.01, max_task_retries=3)
    assert get(again.remote(str(tmp_path / "few"), 3)) == 3
    for k, (options, runs) in enumerate(
        [({"retry_exceptions": True, "max_task_retries": 1}, 2), ({"retry_exceptions": [KeyError]}, 1), ({}, 1)]
    ):
        with pytest.raises(ConnectionError, match="busy"):
            get(fail.options(**{"max_task_retries": -1, **options}).remote(str(tmp_path / f"{k}"), 100))
        assert (tmp_path / f"{k}").stat().st_size == runs
    items = get(actor.count.options(num_returns="dynamic").remote(5))
    assert get(items[:3]) == [0, 1, 2]
    with pytest.raises(IndexError, match="three"):
        get(items[3])


def test_attempts_are_counted_over_exceptions_and_deaths_there(two, tmp_path, wait_until):
    actor = fastrt.remote(Flaky).options(scheduling="two", max_restarts=-1).remote()
    fail = actor.fail.options(retry_exceptions=True, max_task_retries=3)
    assert get(fail.remote(str(tmp_path / "enough"), 4, 3)) == 4
    with pytest.raises(ActorDiedError, match="died while it ran this call"):
        get(fail.options(max_task_retries=2).remote(str(tmp_path / "deadly"), 100, 3))
    with pytest.raises(ConnectionError):
        get(fail.options(max_task_retries=3).remote(str(tmp_path / "bad"), 100, 3))
    assert (tmp_path / "bad").stat().st_size == 4
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    running, queued = actor.wait.remote(str(begun), str(ended)), actor.wait.remote(str(tmp_path / "not"), str(ended))
    wait_until(begun.exists, "the call's start")
    fastrt.cancel(queued)
    with pytest.raises(fastrt.TaskCancelledError):
        get(queued)
    with pytest.raises(ValueError, match=r"force=True is not supported .* force would end the actor"):
        fastrt.cancel(running, force=True)
    fastrt.cancel(running)
    with pytest.raises(fastrt.TaskCancelledError):
        get(running)
    wait_until(ended.exists, "its end there")
    assert not (tmp_path / "not").exists()


@fastrt.remote
class Broken:
    def __init__(self):
        raise RuntimeError("no luck")

    def hello(self):
        return 1


@fastrt.remote
def hand_over():
    return Counter.options(scheduling="two").remote()


@pytest.mark.long
def test_killed_uplinks_are_dead_processes(nodes, two, wait_until):
    for victim in nodes:
        more = Counter.options(scheduling="two", max_restarts=-1, max_task_retries=-1).remote(5)
        assert get(more.add.remote()) == 6
        dead = victim.kill_child("fastrt.runtime.uplink")
        wait_until(
            lambda victim=victim, dead=dead: victim.child("fastrt.runtime.uplink") not in (None, dead), "another"
        )
        wait_until(lambda: len(fastrt.nodes()) == 2, "both nodes")
        assert get(more.add.remote()) in (6, 7)
        assert get(more.where.remote())[0] == two


def test_placement_groups_lie_on_nodes_as_they_say_and_give_back(nodes, runtime, two, wait_until):
    @fastrt.remote
    def where():
        return current_session()

    def nodes_of(group):
        assert group.wait(30)
        return list(fastrt.placement_group_table(group)["bundles_to_node_id"].values())

    strict = fastrt.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    assert set(nodes_of(strict)) == {runtime.session, two}
    tasks = [where.options(scheduling_strategy=InGroup(strict, k)).remote() for k in (0, 1)]
    assert get(tasks) == nodes_of(strict)
    packed = fastrt.placement_group([{"CPU": 0.5}, {"CPU": 0.5}], strategy="STRICT_PACK")
    assert nodes_of(packed) == [two, two]
    nested = fastrt.remote(make_inside).options(scheduling_strategy=InGroup(packed, 0), num_cpus=0.5).remote(packed)
    assert get(nested) == (two, two)
    actor = Counter.options(scheduling_strategy=InGroup(packed, 1), num_cpus=0.5).remote(1)
    place = get(actor.where.remote())
    assert place[0] == two
    nodes[0].child("fastrt.node.__main__").kill()  # the next one finds the bundles of both nodes as they are
    assert [nodes_of(packed), set(nodes_of(strict))] == [[two, two], {runtime.session, two}]
    assert get(actor.where.remote()) == place
    late = fastrt.placement_group([{"CPU": 1}, {"seat": 1}], strategy="SPREAD")
    assert not late.wait(0.3)
    fastrt.remove_placement_group(strict)
    assert late.wait(30)
    fastrt.remove_placement_group(packed)
    with pytest.raises(ActorDiedError, match="its placement group was removed"):
        wait_until(lambda: get(actor.add.remote()) < 0, "the other node to be told")
    inside = fastrt.remote(make_inside).options(scheduling="two").remote(packed)  # there it is not known to be removed
    with pytest.raises(InfeasibleTaskError, match=f"resources of placement group {packed.id}, which was removed"):
        get(inside)
    fastrt.remove_placement_group(late)
    wait_until(lambda: counted(fastrt.available_resources()) == {"CPU": 3.0, "seat": 2.0}, "everything to be free")


def test_placement_groups_are_found_by_name_on_every_node(runtime, two, wait_until):
    def find(name):
        group = fastrt.get_placement_group(name)
        return group, group.wait(10), fastrt.placement_group_table(group)["state"], current_session()

    @fastrt.remote(scheduling="two")
    def make(name):
        group = fastrt.placement_group([{"seat": 0.5}], name=name, lifetime="detached")
        group.wait(10)
        try:
            fastrt.placement_group([{"seat": 0.5}], name="mine")
        except NameTakenError as exc:
            return group, str(exc)

    mine = fastrt.placement_group([{"seat": 0.5}], name="mine")
    theirs, words = get(make.remote("theirs"))
    assert "the name 'mine' is there already" in words
    with pytest.raises(NameTakenError, match="'theirs' is there already"):
        fastrt.placement_group([{"seat": 0.5}], name="theirs")
    assert find("theirs") == (theirs, True, "CREATED", runtime.session)
    assert get(fastrt.remote(find).options(scheduling="two").remote("mine")) == (mine, True, "CREATED", two)
    for name in ("theirs", "mine"):
        fastrt.remove_placement_group(fastrt.get_placement_group(name))
        with pytest.raises(NotFoundError, match=f"no placement group has the name '{name}' in this session"):
            fastrt.get_placement_group(name)
    assert fastrt.placement_group_table(theirs)["state"] == "REMOVED"
    wait_until(lambda: free_seats() == 2, "everything to be free")


def current_session():
    from fastrt.store import client

    return client.require().client.segment.session


def make_inside(group):
    """A task of a group starts another one of it, on whatever node it runs."""
    inner = fastrt.remote(current_session).options(scheduling_strategy=InGroup(group, 1), num_cpus=0.5).remote()
    return current_session(), fastrt.get(inner)


@pytest.mark.long
def test_calls_from_node_to_node_by_a_third_that_is_then_lost(nodes, runtime, two, runtime_dir, wait_until):
    third = RunningNode(runtime_dir, "--address", nodes[0].head, "--num-workers", "1", "--name", "three")
    wait_until(lambda: len(fastrt.nodes()) == 3, "the third node")
    there = Counter.options(scheduling="three").remote()
    theirs = get(hand_over.options(scheduling="three").remote())
    assert len({get(one.where.remote())[0] for one in (there, theirs)} - {two, runtime.session}) == 1
    for one in (there, theirs):
        assert get(use.options(scheduling="two").remote(one, 1))[0] == [1, 2, 3]
    third.kill()
    with pytest.raises(ActorDiedError, match=r"Counter .* node three was lost"):
        get(theirs.add.remote())


def test_everything_is_given_back(rt, wait_until):
    wait_until(lambda: free_seats() == 2, "everything to be free")


def test_lost_node_is_a_dead_process(nodes, runtime, two):
    soft = fastrt.NodeAffinity("two", soft=True)
    once = Counter.options(scheduling_strategy=soft).remote()
    more = Counter.options(scheduling_strategy=soft, max_restarts=1, max_task_retries=-1).remote(5)
    theirs = get(hand_over.options(scheduling="two").remote())
    group = fastrt.placement_group([{"CPU": 0.5}], strategy="PACK")
    strict = fastrt.placement_group([{"CPU": 0.5}] * 2, strategy="STRICT_SPREAD")
    assert strict.wait(30)
    gone = get(make_group.options(scheduling="two").remote())
    assert {get(one.where.remote())[0] for one in (once, more, theirs)} == {two}
    nodes[1].kill()
    for actor in (once, theirs):
        with pytest.raises(ActorDiedError, match=r"Counter .* node two was lost"):
            get(actor.add.remote())
    assert get(more.add.remote()) == 6
    assert get(more.where.remote())[0] == runtime.session
    assert group.wait(30)
    assert fastrt.placement_group_table(group)["bundles_to_node_id"] == {0: runtime.session}
    assert fastrt.placement_group_table(strict)["state"] == "RESCHEDULING"
    assert not strict.wait(0)
    with pytest.raises(NotFoundError, match="which is lost"):
        gone.wait(10)
    for one in (group, strict):
        fastrt.remove_placement_group(one)


@fastrt.remote
def make_group():
    return fastrt.placement_group([{"CPU": 0.1}], lifetime="detached")
