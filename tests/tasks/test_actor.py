"""Actors: made, called, named, passed on, and ended; wrong use is told at the call."""

import os
import threading

import pytest

import fastrt
from fastrt.errors import (
    ActorDiedError,
    ActorNotFoundError,
    ConfigError,
    NameTakenError,
    SerializationError,
    TaskError,
)

pytestmark = pytest.mark.usefixtures("rt")
SOON_S = 20.0


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote
class Counter:
    """What it is told, in order."""

    def __init__(self, start=0, *, step=1):
        self.value, self.step, self.seen = start, step, []

    def add(self, by=1):
        self.value += by * self.step
        return self.value

    def see(self, what):
        self.seen.append(what)

    def all_seen(self):
        return self.seen

    def pid(self):
        return os.getpid()

    @fastrt.method(num_returns=2)
    def pair(self, a, b):
        return a, b

    def fail(self, text):
        raise KeyError(text)

    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def title(cls):
        return cls.__name__

    def __call__(self, x):
        return x + 1


@fastrt.remote
def add_to(counter, by):
    return fastrt.get(counter.add.remote(by))


@fastrt.remote
def after(path, value):
    pause = threading.Event()
    while not os.path.exists(path):
        pause.wait(0.002)
    return value


def is_gone(pid):
    return not os.path.exists(f"/proc/{pid}")


# ---- calls ----


def test_actor_keeps_its_state_in_a_process_of_its_own():
    one, other = Counter.remote(10), Counter.remote(step=3)
    assert get([one.add.remote(), one.add.remote(5), other.add.remote(), other.add.remote(by=2)]) == [11, 16, 3, 9]
    pids = get([one.pid.remote(), one.pid.remote(), other.pid.remote()])
    assert pids[0] == pids[1] != pids[2] != os.getpid()


def test_calls_of_one_caller_run_in_order():
    actor = Counter.remote()
    for k in range(3000):
        actor.see.options(num_returns=0).remote(k)
    assert get(actor.all_seen.remote()) == list(range(3000))


def test_call_waits_for_its_arguments_and_so_do_later_calls_of_the_same_caller(tmp_path):
    actor = Counter.remote()
    first = actor.see.remote(after.remote(str(tmp_path / "go"), "late"))
    second = actor.see.remote("early")
    assert get(add_to.remote(actor, 1)) == 1, "another caller's call waits, too"
    assert fastrt.wait([first, second], timeout=0)[0] == []
    (tmp_path / "go").touch()
    get([first, second])
    assert get(actor.all_seen.remote()) == ["late", "early"]


def test_arguments_and_results_of_all_kinds_travel():
    actor = Counter.remote()
    inner = fastrt.put("inner")
    assert get(actor.pair.remote(1, b=[1, 2])) == [1, [1, 2]]
    assert get(actor.pair.remote(fastrt.put((1, 2)), {"ref": inner})) == [(1, 2), {"ref": inner}]
    assert get(actor.pair.remote(b"x" * 100_000, None)) == [b"x" * 100_000, None]
    assert get([actor.twice.remote(4), actor.title.remote(), actor.__call__.remote(1)]) == [8, "Counter", 2]


def test_num_returns_of_a_method_and_of_a_call():
    actor = Counter.remote()
    a, b = actor.pair.remote(1, 2)
    assert get([a, b]) == [1, 2]
    assert get(actor.pair.options(num_returns=1).remote(1, 2)) == (1, 2)
    assert actor.see.options(num_returns=0).remote("x") is None
    get([actor.see.remote(k) for k in range(2)])
    for ref in actor.all_seen.options(num_returns=2).remote():
        with pytest.raises(ValueError, match="num_returns=2, its function returned 3"):
            get(ref)


def test_exception_of_a_method_is_raised_by_get_and_the_actor_goes_on():
    actor = Counter.remote()
    with pytest.raises(KeyError, match="lost") as caught:
        get(actor.fail.remote("lost"))
    assert isinstance(caught.value, TaskError)
    assert caught.value.task_name == "Counter.fail"
    assert get(actor.add.remote()) == 1


def test_constructor_gets_the_values_of_references():
    actor = Counter.remote(fastrt.put(40), step=fastrt.put(2))
    assert get(actor.add.remote()) == 42


def test_handle_works_in_tasks_and_in_other_actors():
    @fastrt.remote
    class Relay:
        def __init__(self, target):
            self.target = target

        def pass_on(self, by):
            return fastrt.get(self.target["counter"].add.remote(by))

    counter = Counter.remote()
    relay = Relay.remote({"counter": counter})
    assert get(relay.pass_on.remote(1)) == 1
    assert get(add_to.remote(counter, 2)) == 3
    assert get([add_to.remote(counter, 1) for _ in range(4)][-1]) >= 4


def test_actor_made_inside_a_task_or_an_actor():
    @fastrt.remote
    def make():
        return Counter.remote(7)

    @fastrt.remote
    class Maker:
        def make(self):
            self.made = Counter.remote(8)
            return self.made

    assert get(get(make.remote()).add.remote()) == 8
    maker = Maker.remote()
    assert get(get(maker.make.remote()).add.remote()) == 9


# ---- its life ----


def test_class_whose_constructor_takes_arguments_makes_more_of_itself():
    @fastrt.remote
    class Node:
        """A tree."""

        def __init__(self, depth, *, width=2):
            self.children = [Node.remote(depth - 1, width=width) for _ in range(width)] if depth else []

        def count(self):
            return 1 + sum(fastrt.get([child.count.remote() for child in self.children]))

        def wrong(self):
            with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
                Node.remote(0, height=1)
            return Node.__doc__

    root = Node.remote(1, width=2)
    assert get([root.count.remote(), root.wrong.remote()]) == [3, "A tree."]


def test_attribute_of_the_instance_does_not_hide_the_method_of_its_name():
    @fastrt.remote
    class Model:
        def __init__(self):
            self.size, self.title, self.twice, self.late = 3, "mine", None, 4

        def size(self):
            return self.size

        @classmethod
        def title(cls):
            return cls.__name__

        @staticmethod
        def twice(x):
            return 2 * x

        async def late(self):
            return self.late

    model = Model.remote()
    calls = [model.size.remote(), model.title.remote(), model.twice.remote(4), model.late.remote()]
    assert get(calls) == [3, "Model", 8, 4]


def test_dir_has_what_a_shell_completes(rt):
    class Plain:
        LIMIT = 5

        def forget(self):
            pass

        def add(self):
            pass

    def shown(what):
        return {name for name in dir(what) if not name.startswith("_")}

    remote = fastrt.remote(Plain)
    assert shown(remote) == {"LIMIT", "add", "bind", "forget", "options", "remote"}
    assert shown(Counter) == {"add", "all_seen", "fail", "pair", "pid", "see", "title", "twice", *shown(remote)} - {
        "LIMIT", "forget"
    }  # fmt: skip
    actor = remote.remote()
    assert shown(actor) == {"add", "forget"}
    assert set(dir(actor)) == {"__init__", "__ray_call__", "__ray_ready__", "__ray_terminate__", "add", "forget"}
    assert shown(actor.add) == {"bind", "options", "remote"}
    assert shown(fastrt.remote(shown)) == {"bind", "function", "options", "remote"}


def test_handle_is_written_the_same_in_all_processes(rt):
    actor = Counter.options(name="written").remote()
    text = repr(actor)
    assert text == f"Actor(Counter, {actor._actor_id})"
    assert get(fastrt.remote(repr).remote(actor)) == repr(fastrt.get_actor("written")) == text


def test_actor_ends_with_its_last_handle_and_its_process_too(wait_until):
    actor = Counter.remote()
    pid = get(actor.pid.remote())
    box = fastrt.put([actor])
    del actor
    assert get(get(box)[0].pid.remote()) == pid, "a handle inside a value keeps it alive"
    del box
    wait_until(lambda: is_gone(pid), "the actor's process to end")


def test_calls_made_before_the_last_handle_went_still_run():
    assert get(Counter.remote(4).add.remote()) == 5
    method = Counter.remote(5).add
    assert get([method.remote(), method.remote()]) == [6, 7]


def test_kill_ends_the_process_and_fails_calls_now_and_later(tmp_path, wait_until):
    actor = Counter.remote()
    pid = get(actor.pid.remote())
    waiting = actor.see.remote(after.remote(str(tmp_path / "go"), 1))
    fastrt.kill(actor)
    wait_until(lambda: is_gone(pid), "the actor's process to end")
    for ref in (waiting, actor.add.remote(), *actor.pair.remote(1, 2)):
        with pytest.raises(ActorDiedError, match=r"actor Counter is dead: it was killed by fastrt\.kill"):
            get(ref)
    fastrt.kill(actor)
    (tmp_path / "go").touch()


def test_actor_killed_before_it_began_never_runs(tmp_path):
    @fastrt.remote
    class Touch:
        def __init__(self, go, path):
            open(path, "w").close()

        def hello(self):
            return "hello"

    actor = Touch.remote(after.remote(str(tmp_path / "go"), 1), str(tmp_path / "made"))
    hello = actor.hello.remote()
    fastrt.kill(actor)
    with pytest.raises(ActorDiedError, match="killed"):
        get(hello)
    (tmp_path / "go").touch()
    assert not (tmp_path / "made").exists()


def test_constructor_that_raises_is_told_by_every_call(wait_until):
    @fastrt.remote
    class Broken:
        def __init__(self, why):
            raise RuntimeError(why)

        def hello(self):
            return "hello"

    actor = Broken.remote("no luck")
    for _ in range(2):
        with pytest.raises(ActorDiedError, match=r"(?s)Broken is dead: its constructor raised.*no luck") as caught:
            get(actor.hello.remote())
        assert caught.value.actor_init_failed
        assert caught.value.actor_id.startswith(actor._actor_id)


def test_named_actor_is_found_until_it_ends(wait_until):
    actor = Counter.options(name="a").remote(3)
    other = fastrt.get_actor("a")
    assert other == actor
    assert get(other.add.remote()) == 4
    assert fastrt.list_named_actors() == ["a"]
    with pytest.raises(NameTakenError, match="The name 'a' is already taken by an actor in this session"):
        Counter.options(name="a").remote()
    assert Counter.options(name="a", get_if_exists=True).remote(100) == actor
    del actor, other
    wait_until(lambda: not fastrt.list_named_actors(), "the name to be free")
    with pytest.raises(ActorNotFoundError, match="Failed to look up actor with name 'a'"):
        fastrt.get_actor("a")
    fastrt.kill(Counter.options(name="a", get_if_exists=True).remote())


def test_detached_actor_outlives_its_handles(wait_until):
    actor = Counter.options(name="keeper", lifetime="detached").remote(1)
    pid = get(actor.pid.remote())
    del actor
    again = fastrt.get_actor("keeper")
    assert get([again.pid.remote(), again.add.remote()]) == [pid, 2]
    fastrt.kill(again)
    wait_until(lambda: is_gone(pid), "the actor's process to end")
    wait_until(lambda: not fastrt.list_named_actors(), "the name to be free")


def test_name_is_free_at_once_after_kill():
    for start in range(3):
        actor = Counter.options(name="again").remote(start)
        assert get(actor.add.remote()) == start + 1
        fastrt.kill(actor)


# ---- wrong use ----


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda a: a.subtract,
            AttributeError,
            "actor class Counter has no method 'subtract'; it has add, all_seen, fail",
        ),
        (lambda a: a.add(1), TypeError, r"methods cannot be called directly: .* call .add.remote\(...\)"),
        (lambda a: a.add.remote(1, 2), TypeError, r"too many positional arguments; its signature is add\(by=1\)"),
        (lambda a: a.add.remote(to=1), TypeError, r"add\(\) got an unexpected keyword argument 'to'"),
        (lambda a: a.see.remote(), TypeError, r"see\(\) missing a required argument: 'what'"),
        (lambda a: a.add.options(num_returns=-1), ValueError, "num_returns is -1"),
        (lambda a: a.see.remote(threading.Lock()), SerializationError, "lock"),
        (lambda a: Counter(1), TypeError, r"cannot be instantiated directly: .* by Counter.remote\(...\)"),
        (lambda a: Counter.remote(1, 2), TypeError, r"Counter\(\) too many positional arguments"),
        (lambda a: Counter.remote(threading.Lock()), SerializationError, "lock"),
        (lambda a: Counter.options(colour=1), TypeError, "'colour' is not an option of remote classes"),
        (lambda a: Counter.options(max_restarts=-2), ValueError, "max_restarts is -2"),
        (lambda a: Counter.options(max_concurrency=0), ValueError, "max_concurrency is 0"),
        (lambda a: Counter.options(lifetime="long"), ValueError, "lifetime is 'long'"),
        (lambda a: Counter.options(name="n" * 192), ValueError, "name has 192 bytes"),
        (lambda a: Counter.options(get_if_exists=True), ValueError, "get_if_exists finds an actor by its name"),
        (lambda a: Counter.options(num_cpus=-1), ValueError, "num_cpus=-1"),
        (lambda a: fastrt.remote(max_restarts=1)(len), TypeError, "max_restarts"),
        (lambda a: fastrt.kill(fastrt.put(1)), TypeError, "kill takes the handle of an actor, not ObjectRef"),
        (lambda a: fastrt.get_actor(1), TypeError, "name is 1"),
    ],
)
def test_wrong_use_is_told_at_the_call(call, error, text):
    actor = Counter.remote()
    with pytest.raises(error, match=text):
        call(actor)


def test_wrong_class_is_told_when_it_is_made():
    with pytest.raises(TypeError, match="Inheriting from actor classes is not currently supported"):

        class Derived(Counter):
            pass

    @fastrt.remote(concurrency_groups={"io": 2})
    class Grouped:
        @fastrt.method(concurrency_group="net")
        def load(self):
            return 1

    with pytest.raises(ConfigError, match=r"load is of concurrency group 'net'; there are \['io'\]"):
        Grouped.remote()
    with pytest.raises(ValueError, match="num_returns is 'two'"):
        fastrt.method(num_returns="two")


def test_handle_of_an_ended_session_is_stale(program):
    program(
        """
        import fastrt
        from fastrt.errors import StaleReferenceError

        @fastrt.remote
        class Counter:
            def add(self, by=1):
                return by

        with fastrt.init(1, "64MiB"):
            actor = Counter.remote()
            assert fastrt.get(actor.add.remote(), timeout=60) == 1
            used = actor.add
        for call in (used.remote, lambda: actor.add.remote(), lambda: fastrt.kill(actor)):
            for again in range(2):
                try:
                    call()
                except StaleReferenceError as exc:
                    assert "session that has ended" in str(exc), exc
                else:
                    raise AssertionError("a stale handle was used")
                if not again and not fastrt.is_initialized():
                    fastrt.init(1, "64MiB")
            fastrt.shutdown()
        """
    ).finish()


def test_many_actors_at_once_work_and_leave_nothing():
    """More than the objects have bits for from the start."""
    actors = [Counter.remote(k) for k in range(66)]
    assert get([actor.add.remote() for actor in actors]) == list(range(1, 67))
