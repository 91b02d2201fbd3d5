"""Actors that end by themselves: what becomes of the call, of others, and of what was to be started again."""

import asyncio
import atexit
import threading

import pytest

import fastrt
from fastrt.actor import exit_actor
from fastrt.errors import ActorDiedError, ActorNotFoundError

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 30.0
LEFT = r"is dead: it left by fastrt\.exit_actor \(INTENDED_USER_EXIT\)"  # which Ray calls it


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote(max_restarts=-1, max_task_retries=-1)
class Guest:
    def __init__(self, folder):
        self.folder = folder
        self.note("built")

    def note(self, what):
        with open(f"{self.folder}/{what}", "a") as file:
            file.write("x")

    def tidy_up(self):
        atexit.register(self.note, "tidied")

    def leave(self):
        try:
            exit_actor()
        except Exception as exc:  # which is no way to stay
            self.note(type(exc).__name__)

    def items(self):
        yield 1
        exit_actor()

    def stay(self):
        self.note("stayed")
        threading.Event().wait(SOON_S)


@fastrt.remote(max_restarts=-1)
class AsyncGuest:
    async def leave(self):
        exit_actor()

    async def stay(self):
        await asyncio.Event().wait()


def test_actor_that_leaves_is_not_started_again_and_its_calls_say_so(tmp_path, wait_until):
    guest = Guest.options(name="guest").remote(str(tmp_path))
    get(guest.tidy_up.remote())
    calls = [guest.leave.remote(), guest.note.remote("late")]
    for ref in calls:
        with pytest.raises(ActorDiedError, match=f"Guest {LEFT}"):
            get(ref)
    wait_until((tmp_path / "tidied").exists, "the function for the end")
    with pytest.raises(ActorDiedError, match=LEFT):
        get(guest.note.remote("later"))
    with pytest.raises(ActorNotFoundError):
        fastrt.get_actor("guest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "tidied"]
    assert (tmp_path / "built").read_text() == "x"


def test_generator_that_leaves_ends_with_the_error_at_its_place(tmp_path):
    first, last = Guest.remote(str(tmp_path)).items.remote()
    assert get(first) == 1
    with pytest.raises(ActorDiedError, match=LEFT):
        get(last)


def test_actor_of_threads_leaves_while_other_calls_run(tmp_path, wait_until):
    guest = Guest.options(max_concurrency=3, max_task_retries=0).remote(str(tmp_path))
    staying = guest.stay.remote()
    wait_until((tmp_path / "stayed").exists, "the call that runs")
    for ref in (guest.leave.remote(), staying):
        with pytest.raises(ActorDiedError):
            get(ref)
    assert (tmp_path / "built").read_text() == "x"


def test_actor_of_coroutines_leaves_while_other_calls_run():
    guest = AsyncGuest.remote()
    staying = [guest.stay.remote() for _ in range(5)]
    with pytest.raises(ActorDiedError, match=LEFT):
        get(guest.leave.remote())
    for ref in staying:
        with pytest.raises(ActorDiedError):
            get(ref)


def test_process_that_left_leaves_nothing_behind(tmp_path, wait_until):
    wait_until(lambda: not [row for row in fastrt.list_actors() if row["state"] == "ALIVE"], "an empty session")
    guest = Guest.remote(str(tmp_path))
    guest.leave.remote()
    with pytest.raises(ActorDiedError, match=LEFT):
        get(guest.note.remote("late"))
    del guest
    wait_until(lambda: not fastrt.list_actors(), "the record's end")


def test_who_is_no_actor_cannot_leave():
    with pytest.raises(TypeError, match="this is no actor"):
        exit_actor()
    with pytest.raises(TypeError, match="this is no actor"):
        get(fastrt.remote(exit_actor).remote())
