"""Groups of actors, made by the driver, beside groups of tasks in the same session."""

import os
import signal
import time

import numpy as np
import pytest

import fastrt
from fastrt.collective import CollectiveTimeout, PeerDied, create_group, get_group, init_group
from fastrt.coordination import Coordinator, CoordinatorOptions
from fastrt.errors import ActorDiedError, FastrtError

SOON_S = 50.0
NOTICED_S = 25.0  # well below the group's timeout of 30 s: the death was noticed, not waited for


@fastrt.remote
class Member:
    def __init__(self, number):
        self.number = number

    def total(self, name="default"):
        return float(get_group(name).all_reduce(np.full(1000, self.number))[0])

    def place(self, name="default"):
        group = get_group(name)
        return group.rank, group.world_size, group.name

    def reduce_until_it_fails(self):
        group, array = get_group(), np.ones(1 << 18, np.float32)
        while True:
            began = time.monotonic()
            try:
                group.all_reduce(array)
            except PeerDied as error:
                return error.rank, time.monotonic() - began < NOTICED_S

    def raise_what_the_group_raises(self):
        get_group().barrier()

    def die_soon(self):
        group, array = get_group(), np.ones(1 << 18, np.float32)
        for _ in range(20):
            group.all_reduce(array)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_busy(self, path):
        open(path + "-begun", "w").close()
        while not os.path.exists(path):
            os.sched_yield()


@fastrt.remote
def total_in_a_task(rank, world_size):
    with init_group(name="default", rank=rank, world_size=world_size) as group:
        return float(group.all_reduce(np.ones(3))[0])


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@pytest.fixture
def members(rt):
    """Three actors, ended with the test."""
    made = [Member.remote(n + 1.0) for n in range(3)]
    yield made
    while made:  # pytest itself keeps the list for longer than the test
        fastrt.kill(made.pop())


def totals(actors, name="default"):
    return get([actor.total.remote(name) for actor in actors])


def test_actors_make_groups_in_the_drivers_order_and_tasks_make_theirs(members):
    backwards = members[::-1]
    with create_group(backwards, name="all") as group, create_group(members[:2]) as two:
        assert get([one.place.remote("all") for one in backwards]) == [(rank, 3, "all") for rank in range(3)]
        calls = [one.total.remote(name) for one in members[:2] for name in ("all", "default")]
        last = members[2].total.remote("all")
        tasks = [total_in_a_task.remote(rank, 2) for rank in range(2)]  # a group of the same name, and another
        assert get([*calls, last]) == [6, 3, 6, 3, 6]
        assert get(tasks) == [2, 2]
        with create_group(members[1:]):  # the actor that is in both leaves the first
            assert totals(members[1:]) == [5, 5]
            with pytest.raises(PeerDied, match="rank 1 has destroyed its side"):
                get(members[0].raise_what_the_group_raises.remote())
        assert (group.world_size, two.world_size) == (3, 2)
    with pytest.raises(FastrtError, match=r"in no group 'all' made by create_group; it is in: none"):
        get(members[0].place.remote("all"))


def test_death_of_an_actor_is_told_to_the_others_which_go_on_when_rebuilt(members):
    group = create_group(members)
    ends = [members[0].reduce_until_it_fails.remote(), members[2].reduce_until_it_fails.remote()]
    with pytest.raises(ActorDiedError):
        get(members[1].die_soon.remote())
    assert get(ends) == [(1, True)] * 2
    with pytest.raises(PeerDied) as told:
        get(members[0].raise_what_the_group_raises.remote())
    assert told.value.rank == 1
    with group.rebuild() as smaller:
        assert smaller.actors == [members[0], members[2]]
        assert totals(smaller.actors) == [4, 4]
    began = time.monotonic()
    with pytest.raises(ActorDiedError, match="rank 1 cannot join"):
        create_group(members)
    assert time.monotonic() - began < NOTICED_S


def test_restarted_actor_is_taken_in_again(rt):
    pair = [Member.options(max_restarts=1).remote(n + 1.0) for n in range(2)]
    group = create_group(pair)
    fastrt.kill(pair[0], no_restart=False)
    group = group.rebuild()
    assert totals(pair) == [3, 3]
    for one in pair:
        fastrt.kill(one)
    with pytest.raises(ActorDiedError, match="none of its actors is alive"):
        group.rebuild()


def test_actors_of_several_machines_meet_at_a_coordinator(members):
    with Coordinator(CoordinatorOptions(num_tasks=1)) as at, create_group(members, address=at.address) as group:
        assert totals(members) == [6] * 3
        assert group.world_size == 3


def test_what_is_no_group_is_refused(members, tmp_path):
    with pytest.raises(TypeError, match="handles of actors, not int"):
        create_group([7])
    for wrong in ([], [members[0], members[0]]):
        with pytest.raises(ValueError, match="each only once"):
            create_group(wrong)
    with pytest.raises(FastrtError, match="in no group 'default'"):
        get_group()
    gate = str(tmp_path / "gate")
    busy = members[1].is_busy.remote(gate)
    with pytest.raises(CollectiveTimeout, match=r"they are busy: (0, )?1"):  # on a busy machine rank 0 may be, too
        create_group(members, timeout=0.3)
    open(gate, "w").close()
    get(busy)


def test_function_is_called_with_an_actors_instance(members):
    call = members[1].__fastrt_call__
    assert get(call.remote(lambda self, factor, more=0: self.number * factor + more, 10, more=1)) == 21
    get(call.remote(setattr, "number", 7))
    assert get(call.remote(getattr, "number")) == 7
    with pytest.raises(ZeroDivisionError):
        get(call.remote(lambda self: 1 / 0))
    with pytest.raises(TypeError, match="__fastrt_call__"):
        call.remote()
