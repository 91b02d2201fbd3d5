"""Deaths around actors: of the actor's process, of callers, of the daemon; restarts, and calls that run again."""

import os
import signal
import threading
import time

import pytest

import fastrt
from fastrt._core.memory import clients
from fastrt._core.tasks import actors
from fastrt.errors import ActorDiedError, ActorUnavailableError
from fastrt.store import client as store_client

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 30.0


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote
class Log:
    """Counts the instances that were built, and the runs of each call, in files."""

    def __init__(self, folder):
        self.folder, self.calls = folder, 0
        self.note("built")

    def note(self, what):
        with open(f"{self.folder}/{what}", "a") as file:
            file.write("x")
        self.calls += 1
        return self.calls

    def pid(self):
        return os.getpid()

    def die(self, what="died", most=1 << 30):
        """Kill the own process, in the first `most` runs."""
        self.note(what)
        if runs(self.folder, what) <= most:
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def wait_for(self, what):
        self.note("waiting")
        pause = threading.Event()
        while not os.path.exists(f"{self.folder}/{what}"):
            pause.wait(0.002)
        return what


def runs(folder, what):
    try:
        return os.stat(f"{folder}/{what}").st_size
    except FileNotFoundError:
        return 0


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def test_death_of_the_process_fails_the_call_that_ran_and_those_behind_it(folder):
    actor = Log.remote(folder)
    died, behind = actor.die.remote(), actor.note.remote("behind")
    with pytest.raises(
        ActorDiedError, match=r"actor Log died while it ran this call: its process \d+ was killed by si"
    ):
        get(died)
    for ref in (behind, actor.note.remote("late")):
        with pytest.raises(
            ActorDiedError, match=r"actor Log is dead: its process \d+ was killed by signal 9 \(SIGKILL, Killed\)"
        ):
            get(ref)
    assert (runs(folder, "behind"), runs(folder, "late")) == (0, 0)


def test_call_that_ran_when_its_actor_was_killed_names_the_kill(folder, wait_until):
    actor = Log.remote(folder)
    ref = actor.wait_for.remote("nothing")
    wait_until(lambda: runs(folder, "waiting") > 0, "the call")
    fastrt.kill(actor)
    with pytest.raises(ActorDiedError, match=r"Log died while it ran this call: it was killed by fastrt\.kill"):
        get(ref)


def test_exit_of_the_process_is_told_with_its_code(folder):
    @fastrt.remote
    class Leaver:
        def leave(self):
            os._exit(3)

    with pytest.raises(ActorDiedError, match="exited with code 3"):
        get(Leaver.remote().leave.remote())


def test_restart_builds_a_new_instance_and_runs_the_calls_that_had_not_begun(folder):
    actor = Log.options(max_restarts=1).remote(folder)
    first = get(actor.pid.remote())
    died, behind = actor.die.remote(), [actor.note.remote("behind") for _ in range(5)]
    with pytest.raises(ActorUnavailableError, match=r"died while it ran this call: .*; the actor is started again"):
        get(died)
    assert get(behind) == [2, 3, 4, 5, 6]  # counted from its constructor's one
    assert get(actor.pid.remote()) != first
    assert runs(folder, "built") == 2
    with pytest.raises(ActorDiedError) as last:
        get(actor.die.remote())
    assert last.type is ActorDiedError
    with pytest.raises(ActorDiedError, match=r"it had been started again 1 times \(max_restarts=1\)"):
        get(actor.note.remote("late"))


def test_call_is_retried_as_often_as_it_may_and_keeps_its_place(folder):
    actor = Log.options(max_restarts=-1, max_task_retries=2).remote(folder)
    calls = [actor.note.remote("a"), actor.die.remote("twice", 2), actor.note.remote("b")]
    assert get(calls[1:]) == ["alive", 3]  # the instance that ran both was built, ran one, and then the other
    assert (runs(folder, "twice"), runs(folder, "built")) == (3, 3)
    with pytest.raises(ActorDiedError, match="died while it ran"):
        get(actor.die.remote("thrice", 3))
    assert runs(folder, "thrice") == 3
    assert get(actor.die.options(max_task_retries=-1).remote("often", 5)) == "alive"
    with pytest.raises(ActorDiedError, match="died while it ran"):
        get(actor.die.options(max_task_retries=0).remote("once"))


def test_kill_without_no_restart_starts_it_again(folder):
    actor = Log.options(max_restarts=1).remote(folder)
    first = get(actor.pid.remote())
    fastrt.kill(actor, no_restart=False)
    assert get(actor.pid.remote()) != first


def test_kill_before_the_process_is_up_counts_as_a_restart(folder):
    once, twice = Log.remote(folder), Log.options(max_restarts=1).remote(folder)
    for actor in (once, twice):
        fastrt.kill(actor, no_restart=False)
    with pytest.raises(ActorDiedError, match="killed"):
        get(once.pid.remote())
    get(twice.pid.remote())
    fastrt.kill(twice, no_restart=False)
    with pytest.raises(ActorDiedError):
        get(twice.pid.remote())


def test_death_inside_the_constructor_counts_as_a_restart(folder):
    @fastrt.remote(max_restarts=2)
    class Fragile:
        def __init__(self):
            with open(f"{folder}/tried", "a") as file:
                file.write("x")
            if runs(folder, "tried") < 3:
                os.kill(os.getpid(), signal.SIGSEGV)

        def hello(self):
            return "hello"

    assert get(Fragile.remote().hello.remote()) == "hello"
    assert runs(folder, "tried") == 3
    os.unlink(f"{folder}/tried")
    with pytest.raises(ActorDiedError, match=r"signal 11.*started again 1 times"):
        get(Fragile.options(max_restarts=1).remote().hello.remote())


def test_death_of_a_caller_inside_a_call_harms_nobody(folder, wait_until):
    @fastrt.remote(max_retries=0)
    def call_and_die(actor):
        refs = [actor.note.remote("by the dead") for _ in range(50)]
        os.kill(os.getpid(), signal.SIGKILL)
        return refs

    actor = Log.remote(folder)
    with pytest.raises(fastrt.WorkerCrashedError):
        get(call_and_die.remote(actor))
    assert get(actor.note.remote("mine")) >= 2
    wait_until(lambda: runs(folder, "by the dead") == 50, "all of its calls to run")


def test_death_of_another_driver_drops_its_calls_and_spares_the_actor(folder, program, rt, wait_until):
    actor = Log.options(name="shared").remote(folder)
    pid = get(actor.pid.remote())
    other = program(
        f"""
        import fastrt
        from fastrt.runtime.session import Attached
        from fastrt.config import Config
        from fastrt.store import client

        runtime = Attached(Config.load(num_workers=1, object_store_memory=64 << 20), {rt.socket_path!r}, 1)
        client.set_store(runtime._store)
        actor = fastrt.get_actor("shared")
        refs = [actor.wait_for.remote("go")] + [actor.note.remote("by the dead") for _ in range(5)]
        print("called", flush=True)
        fastrt.wait(refs, timeout=60)
        """
    )
    other.wait_for_line("called")
    wait_until(lambda: runs(folder, "waiting"), "the other driver's call to run")
    os.kill(other.pid, signal.SIGKILL)
    other.finish(-signal.SIGKILL)
    mine = actor.note.remote("mine")
    rows = clients.table
    segment = store_client.require().client.segment
    wait_until(lambda: other.pid not in [row["pid"] for row in rows(segment)], "the driver to be buried")
    with open(f"{folder}/go", "w"):
        pass
    get(mine)
    assert get(actor.pid.remote()) == pid
    assert runs(folder, "by the dead") in range(6)


def test_daemon_that_is_replaced_keeps_actors_and_goes_on_looking_after_them(program):
    program(
        """
        import os, signal, threading, psutil, fastrt
        from fastrt.errors import ActorDiedError

        @fastrt.remote
        class Counter:
            def __init__(self):
                self.n = 0
            def add(self):
                self.n += 1
                return self.n
            def pid(self):
                return os.getpid()

        def daemon():
            found = [p for p in psutil.Process().children() if "fastrt.node" in " ".join(p.cmdline())]
            return found[0].pid if found else None

        def get(ref):
            return fastrt.get(ref, timeout=40)

        with fastrt.init(1, "64MiB"):
            kept = Counter.options(max_restarts=1).remote()
            pid = get(kept.pid.remote())
            first = daemon()
            os.kill(first, signal.SIGKILL)
            assert get(kept.add.remote()) == 1  # straight to its process, daemon or not
            made = Counter.remote()  # while there is perhaps no daemon
            assert get(made.add.remote()) == 1
            assert get(kept.add.remote()) == 2
            assert daemon() not in (None, first)
            os.kill(pid, signal.SIGKILL)
            while True:  # a call may run into the death; the restart comes from the new daemon
                try:
                    assert get(kept.pid.remote()) != pid
                    break
                except ActorDiedError as exc:
                    assert "died while it ran this call" in str(exc), exc
            fastrt.kill(made)
            try:
                get(made.add.remote())
            except ActorDiedError as exc:
                assert "killed by fastrt.kill" in str(exc), exc
            else:
                raise AssertionError("a killed actor answered")
        """
    ).finish()


def test_full_client_table_is_an_error_at_the_call_and_a_tool_can_look(program):
    program(
        """
        import subprocess, sys
        import fastrt
        from fastrt.errors import AttachError
        from fastrt.store.client import require

        LIST = "from fastrt.cli.main import main; main(['list', 'actors'])"
        STAY = "import sys; from fastrt.store import join; joined = join.join(sys.argv[1], 'tool', 'test'); " \\
               "print('joined', flush=True); sys.stdin.read()"

        @fastrt.remote
        class Holder:
            def hold(self, k):
                return k

        with fastrt.init(1, "64MiB", clients_max=64):
            first = []
            try:
                for _ in range(70):
                    first.append(Holder.remote())
            except AttachError as exc:
                assert "64 (clients_max)" in str(exc) and "Raise clients_max" in str(exc), exc
            assert 50 < len(first) < 64, len(first)
            held = [actor.hold.remote(k) for k, actor in enumerate(first)]
            assert fastrt.get(held, timeout=60) == list(range(len(first)))
            looked = subprocess.run([sys.executable, "-c", LIST], capture_output=True)
            assert looked.returncode == 0, looked
            command = [sys.executable, "-c", STAY, require().socket_path]
            tools = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
            assert [tool.stdout.readline() for tool in tools] == [b"joined\\n"] * 3
            first.pop()
            assert fastrt.get(Holder.remote().hold.remote(1), timeout=60) == 1  # tools have places of their own
            for tool in tools:
                tool.communicate()
        """
    ).finish()


@pytest.mark.long
def test_actor_with_a_demand_that_finds_no_place_waits_for_one_and_says_so(program):
    driver = program(
        """
        import fastrt

        @fastrt.remote(num_cpus=0.01)
        class Holder:
            def hold(self, k):
                return k

        with fastrt.init(1, "64MiB", clients_max=64):
            first = [Holder.remote() for _ in range(70)]
            held = [actor.hold.remote(k) for k, actor in enumerate(first)]
            assert fastrt.get(held[:50], timeout=60) == list(range(50))
            del first
            assert fastrt.get(held, timeout=60) == list(range(70))
        """
    )
    assert "an actor waits until another process ends: 64 client slots" in driver.finish()[1]


def test_actor_whose_processes_cannot_start_is_given_up():
    """As the daemon does it: a process that ends before it has become the actor's."""
    store = store_client.require()
    actor = Log.remote("/nowhere")
    index = actors.index_of(store.client, actor._actor_ref)
    with pytest.raises(ActorDiedError, match=r"(?s)its constructor raised.*No such file"):
        get(actor.pid.remote())
    info = actors.info(store.client, index)
    assert (info["state"], info["ended"], info["pid"]) == (actors.DEAD, actors.FAILED, None)
    assert not actors.end_for_good(store.client, index, actors.KILLED, "too late")
    assert actors.enter(store.client, index) is False


@fastrt.remote(max_restarts=-1)
class Looping:
    """Its process ends in its constructor, until there is a file."""

    def __init__(self, folder):
        with open(f"{folder}/tried", "a") as file:
            file.write("x")
        if not os.path.exists(f"{folder}/mended"):
            os.kill(os.getpid(), signal.SIGKILL)

    def hello(self):
        return "hello"


def test_crash_loop_is_slowed_down_and_goes_on_when_the_cause_has_passed(folder, wait_until):
    actor = Looping.remote(folder)
    call = actor.hello.remote()
    wait_until(lambda: runs(folder, "tried") >= 4, "the first restarts")
    began, before = time.monotonic(), runs(folder, "tried")
    fastrt.wait([call], timeout=1.0)
    assert runs(folder, "tried") - before <= 2 + 2 * (time.monotonic() - began)
    with open(f"{folder}/mended", "w"):
        pass
    assert get(call) == "hello"


def test_crash_loop_ends_when_nothing_can_call_the_actor_and_its_name_is_free(folder, wait_until):
    actor = Looping.options(name="looping").remote(folder)
    wait_until(lambda: runs(folder, "tried") >= 4, "the first restarts")
    assert fastrt.list_named_actors() == ["looping"]
    del actor
    wait_until(lambda: not fastrt.list_actors(), "the end")
    assert fastrt.list_named_actors() == []


def test_call_that_kills_the_process_each_time_is_slowed_down(folder, wait_until):
    actor = Log.options(max_restarts=-1, max_task_retries=-1).remote(folder)
    call = actor.die.remote()
    wait_until(lambda: runs(folder, "died") >= 5, "the first runs")
    began, before = time.monotonic(), runs(folder, "died")
    fastrt.wait([call], timeout=1.0)
    assert runs(folder, "died") - before <= 2 + 2 * (time.monotonic() - began)
    fastrt.kill(actor)
    with pytest.raises(ActorDiedError, match="killed"):
        get(call)
