"""Cleanup code of actors and workers that end gently: it runs, in a limited time; and what else ends an actor."""

import asyncio
import atexit
import multiprocessing
import os
import signal
import sys
import threading

import pytest

import fastrt
from fastrt.actor import exit_actor
from fastrt.errors import ActorDiedError, WorkerCrashedError

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 30.0
ALL = ["atexit", "deleted", "log", "shutdown"]
TEXT = {"log": "unflushed", "global": "unflushed"}

kept = []  # in the actor's process: files that nothing but this list has


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


def note(folder, what):
    with open(f"{folder}/{what}", "a") as file:
        file.write("x")


def wait_for_file(path):
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.002)


@fastrt.remote
class Tidy:
    def __init__(self, folder, leave=None):
        self.folder = str(folder)
        self.log = open(f"{folder}/log", "w")  # noqa: SIM115
        self.log.write("unflushed")
        atexit.register(note, self.folder, "atexit")
        if leave is not None:
            leave()

    def ping(self):
        return os.getpid()

    def do(self, function):
        return function()

    def keep_file(self):
        kept.append(open(f"{self.folder}/global", "w"))  # noqa: SIM115
        kept[-1].write("unflushed")

    def hold(self):
        try:
            note(self.folder, "held")
            threading.Event().wait(SOON_S)
        finally:
            note(self.folder, "finally")

    def __ray_shutdown__(self):
        note(self.folder, "shutdown")
        assert get(fastrt.put(1)) == 1  # the session is there

    def __del__(self):
        note(self.folder, "deleted")


@fastrt.remote
class AsyncTidy(Tidy.cls):
    async def wait(self):
        try:
            note(self.folder, "held")
            await asyncio.Event().wait()
        finally:
            note(self.folder, "finally")

    async def passed(self):
        return True

    async def in_background(self, function):
        self.task = asyncio.create_task(self.soon(function))

    async def soon(self, function):
        await asyncio.wait_for(self.passed(), SOON_S)
        function()

    async def __ray_shutdown__(self):
        await asyncio.wait_for(self.passed(), SOON_S)
        note(self.folder, "shutdown")


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_tidied(folder, wait_until, *more):
    wait_until(lambda: set(left_in(folder)) >= {*ALL, *more}, "the cleanup code to run")
    wait_until(lambda: (folder / "log").read_text() == "unflushed", "the file to be flushed")
    assert left_in(folder) == sorted([*ALL, *more])


def test_actor_without_handles_runs_its_cleanup_code(tmp_path, wait_until):
    actor = Tidy.remote(tmp_path)
    get(actor.keep_file.remote())
    del actor
    assert_tidied(tmp_path, wait_until, "global")
    wait_until(lambda: (tmp_path / "global").read_text() == "unflushed", "the global's file to be flushed")


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 2}], ids=["one", "threads"])
def test_actor_that_exits_runs_its_cleanup_code(tmp_path, wait_until, options):
    actor = Tidy.options(**options).remote(tmp_path)
    with pytest.raises(ActorDiedError, match=r"left by fastrt\.exit_actor"):
        get(actor.do.remote(exit_actor))
    assert_tidied(tmp_path, wait_until)


def test_actor_of_coroutines_cancels_what_runs_and_awaits_its_shutdown(tmp_path, wait_until):
    actor = AsyncTidy.remote(tmp_path)
    running = actor.wait.remote()
    wait_until((tmp_path / "held").exists, "the call to run")
    actor.__ray_terminate__.remote()
    with pytest.raises(ActorDiedError):
        get(running)
    assert_tidied(tmp_path, wait_until, "held", "finally")


def test_exit_in_a_constructor_is_no_failure_of_it(tmp_path, wait_until):
    actor = Tidy.options(max_restarts=-1).remote(tmp_path, exit_actor)
    with pytest.raises(ActorDiedError, match=r"is dead: it left by fastrt.exit_actor \(INTENDED_USER_EXIT\)$"):
        get(actor.ping.remote())
    wait_until(lambda: left_in(tmp_path) == ["atexit", "deleted", "log"], "the cleanup code to run")


@pytest.mark.parametrize("leave", [exit_actor, sys.exit], ids=["exit_actor", "sys.exit"])
def test_exit_in_a_task_of_the_event_loop_ends_the_actor(tmp_path, wait_until, leave):
    actor = AsyncTidy.options(max_restarts=-1).remote(tmp_path)
    get(actor.in_background.remote(leave))
    wait_until(lambda: fastrt.list_actors()[0]["state"] == "dead", "the actor's end")
    with pytest.raises(ActorDiedError):
        get(actor.ping.remote())
    assert_tidied(tmp_path, wait_until)


def test_exit_in_a_thread_ends_the_actor_after_its_call(tmp_path, wait_until):
    def from_a_thread():
        thread = threading.Thread(target=exit_actor)
        thread.start()
        thread.join()
        return "ended in order"

    actor = Tidy.options(max_restarts=-1).remote(tmp_path)
    first, second = actor.do.remote(from_a_thread), actor.ping.remote()
    assert get(first) == "ended in order"
    with pytest.raises(ActorDiedError, match=r"left by fastrt\.exit_actor"):
        get(second)
    assert_tidied(tmp_path, wait_until)


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 2}], ids=["one", "threads"])
def test_sys_exit_in_a_method_ends_the_actor_for_good(tmp_path, wait_until, options):
    actor = Tidy.options(max_restarts=-1, **options).remote(tmp_path)
    with pytest.raises(ActorDiedError, match=r"is dead: it called sys\.exit"):
        get(actor.do.remote(sys.exit))
    with pytest.raises(ActorDiedError, match=r"is dead: it called sys\.exit"):
        get(actor.ping.remote())
    assert_tidied(tmp_path, wait_until)


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 2}], ids=["one", "threads"])
def test_sys_exit_with_a_code_is_a_crash_that_restarts_allow_for(tmp_path, options):
    actor = Tidy.options(max_restarts=1, **options).remote(tmp_path)
    first = get(actor.ping.remote())
    with pytest.raises(ActorDiedError, match=r"died while it ran this call: its process .* exited with code 3"):
        get(actor.do.remote(lambda: sys.exit(3)))
    assert get(actor.ping.remote()) != first
    assert (tmp_path / "deleted").exists()


def test_exit_of_a_task_that_a_method_waits_for_is_an_error_of_that(tmp_path):
    leave = fastrt.remote(sys.exit)
    actor = Tidy.remote(tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit) as caught:
            get(actor.do.remote(lambda: fastrt.get(leave.remote(7))))
        assert caught.value.code == 7


def test_sigterm_interrupts_the_call_and_runs_cleanup_code(tmp_path, wait_until):
    actor = Tidy.options(max_restarts=0).remote(tmp_path)
    pid, running = get(actor.ping.remote()), actor.hold.remote()
    wait_until((tmp_path / "held").exists, "the call to run")
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ActorDiedError, match=r"signal 15 \(SIGTERM, Terminated\)"):
        get(running)
    assert_tidied(tmp_path, wait_until, "held", "finally")


def terminate_here():
    os.kill(os.getpid(), signal.SIGTERM)


class Terminating:
    """A value during whose loading the process gets SIGTERM."""

    def __reduce__(self):
        return terminate_here, ()


@pytest.mark.parametrize("kind", ["task", "call", "constructor"])
def test_sigterm_while_arguments_are_loaded_ends_the_process_before_the_code_begins(tmp_path, kind):
    def begun(value):
        note(tmp_path, "begun")
        threading.Event().wait(SOON_S)

    class Waiting:
        def __init__(self, value=None):
            if kind == "constructor":
                begun(value)

        def call(self, value):
            begun(value)

    if kind == "task":
        ref = fastrt.remote(max_retries=0)(begun).remote(Terminating())
    elif kind == "call":
        actor = fastrt.remote(Waiting).remote()
        ref = actor.call.remote(Terminating())
    else:
        actor = fastrt.remote(Waiting).remote(Terminating())
        ref = actor.call.remote(None)
    with pytest.raises(WorkerCrashedError if kind == "task" else ActorDiedError, match="SIGTERM"):
        get(ref)
    assert not (tmp_path / "begun").exists()


def test_process_that_a_call_has_forked_ends_by_sigterm(tmp_path):
    def fork_and_terminate():
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
        child.start()
        child.terminate()
        child.join(SOON_S)
        return child.exitcode

    assert get(fastrt.remote(fork_and_terminate).remote()) == -signal.SIGTERM
    assert get(Tidy.remote(tmp_path).do.remote(fork_and_terminate)) == -signal.SIGTERM


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 2}], ids=["one", "threads"])
def test_gentle_kill_runs_cleanup_code_and_says_who_asked_for_it(tmp_path, wait_until, options):
    actor = Tidy.options(max_restarts=-1, **options).remote(tmp_path)
    running = actor.hold.remote()
    wait_until((tmp_path / "held").exists, "the call to run")
    fastrt.kill(actor, force=False)
    with pytest.raises(ActorDiedError):
        get(running)
    wait_until(lambda: {*ALL} <= set(left_in(tmp_path)) or options, "the cleanup code to run")
    with pytest.raises(ActorDiedError, match=f"killed by fastrt.kill, called by the driver in process {os.getpid()} "):
        get(actor.ping.remote())
    wait_until(lambda: {"atexit", "log", "shutdown"} <= set(left_in(tmp_path)), "the cleanup code to run")


def test_gentle_kill_that_allows_a_restart_starts_the_actor_again(tmp_path, wait_until):
    actor = Tidy.options(max_restarts=1).remote(tmp_path)
    first = get(actor.ping.remote())
    fastrt.kill(actor, no_restart=False, force=False)
    wait_until((tmp_path / "shutdown").exists, "the cleanup code to run")
    wait_until(lambda: fastrt.list_actors()[0]["restarts"] == 1, "the restart")
    assert get(actor.ping.remote()) != first


def test_kill_by_a_task_is_told_with_its_name(tmp_path):
    @fastrt.remote
    def murder(actor):
        fastrt.kill(actor)
        return os.getpid()

    actor = Tidy.remote(tmp_path)
    pid = get(murder.options(name="murder").remote(actor))
    with pytest.raises(ActorDiedError, match=f"called by task 'murder' in process {pid} on"):
        get(actor.ping.remote())
