"""A cluster ends the waiting actors, the groups and the forwarded tasks of drivers and actors that were killed."""

import os
import subprocess
import sys
import textwrap

import pytest

import fastrt
from fastrt._core.tasks import actors
from fastrt.tasks.actor_handle import ActorPlan
from fastrt.util.state import list_actors, list_tasks
from support.cluster import two_nodes
from support.sides import in_loop, pair


@pytest.fixture(scope="module")
def nodes(runtime_dir):
    with two_nodes(runtime_dir, 2, "--resources", '{"seat": 1}') as nodes:
        yield nodes


@pytest.fixture(scope="module")
def runtime(runtime_dir, nodes):
    with fastrt.init(address=nodes[0].head, runtime_dir=runtime_dir) as runtime:
        yield runtime


@pytest.fixture
def rt(runtime):
    return runtime


@fastrt.remote(resources={"seat": 1})
class Seat:
    def pid(self):
        return os.getpid()


def get(refs):
    return fastrt.get(refs, timeout=60)


DRIVER = """
    import os, sys, threading
    import fastrt

    @fastrt.remote(resources={"seat": 1})
    class Seat:
        def pid(self):
            return os.getpid()

    with fastrt.init(address=sys.argv[1]):
        waiting = Seat.options(name="waiting").remote()
        impossible = Seat.options(name="impossible", resources={"throne": 1}).remote()
        called = Seat.options(name="called").remote()
        call = called.pid.remote()
        group = fastrt.placement_group([{"seat": 1}], name="group")
        print("made", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_waiting_actors_and_groups_end_with_their_driver(rt, nodes, runtime_dir, wait_until, killed):
    seat = Seat.remote()
    get(seat.pid.remote())
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), nodes[0].head],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir)},
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stdout.readline() == "made\n"
    wait_until(lambda: len(list_actors(state="starting")) == 3, "the actors to be listed")
    if killed:
        driver.kill()
    driver.communicate("")
    wait_until(lambda: not list_actors(state="starting"), "the actors to end")
    for name in ("waiting", "impossible", "called"):
        with pytest.raises(fastrt.ActorNotFoundError):
            fastrt.get_actor(name)
    wait_until(
        lambda: {row["state"] for row in fastrt.placement_group_table().values()} <= {"REMOVED"}, "the group to end"
    )


@fastrt.remote
class Boss:
    def work(self, path):
        """Forward tasks to the other node: one that runs there, and some that wait."""
        self.refs = [sit.options(name="forwarded").remote(path)]
        self.refs += [sit.options(name="forwarded").remote(path) for _ in range(3)]
        return os.getpid()


@fastrt.remote(resources={"seat": 1})
def sit(path):
    with open(path, "w"):
        pass
    import threading

    threading.Event().wait()


def test_forwarded_tasks_of_a_killed_actor_end(rt, tmp_path, wait_until):
    path = tmp_path / "runs"
    boss = Boss.remote()
    pid = get(boss.work.remote(str(path)))
    wait_until(path.exists, "a task to run on the other node")
    os.kill(pid, 9)
    wait_until(lambda: not list_tasks(name="forwarded"), "the tasks to end")
    get(Seat.remote().pid.remote())


@in_loop
async def test_hosted_actor_that_waits_ends_with_its_last_handle_on_its_owner():
    async with pair() as (here, there):
        function = here.function
        init = here.store.put(((), {}))
        plan = ActorPlan("Seat", here.segment.session, (), function, init, 0, 1)
        ref = here.store.put(plan)
        actor = actors.create(here.client, ref, function.objref, "", 0, False)
        assert actors.carry(here.client, actor, actors.info(here.client, actor)["gen"])
        here.exchange.remote_actors.host(actor)
        there.exchange.on_frame(await here.frames(lambda frame: frame.actor))
        assert actors.info(there.client, 0)["state"] == actors.WANTED
        there.exchange.tidy(set())
        here.exchange.on_frame(await there.frames(lambda frame: frame.release))
        del ref, init
        there.exchange.on_frame(await here.frames(lambda frame: frame.unhost))
        assert actors.info(there.client, 0)["released"]
        assert actors.end(there.client, 0, "its last handle is gone") == []
        assert actors.end(here.client, actor, "its last handle is gone") == []
