"""What a program may rely on, whatever engine runs it.

Run: python behaviour.py ENGINE [ADDRESS]      (Ray's Python has no pytest; elsewhere test_engines.py runs the checks)
"""

import asyncio
import contextlib
import logging
import sys
import traceback

import numpy as np

import fastrt

SOON_S = 30.0
CHECKS = []


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


def check(function):
    CHECKS.append(function)
    return function


@contextlib.contextmanager
def raises(kind, text=""):
    found = []
    try:
        yield found
    except kind as exc:
        found.append(exc)
    assert found, f"{kind.__name__} was not raised"
    assert text in str(found[0]), f"{text!r} is not in {found[0]}"


@fastrt.remote
def add(a, b=1):
    return a + b


@fastrt.remote
def append_to(items, item):
    items.append(item)
    return items


@fastrt.remote
def fail(text):
    raise KeyError(text)


@fastrt.remote
def total(parts):
    return sum(fastrt.get(parts))


@fastrt.remote
def fan_out(count):
    return sum(fastrt.get([add.remote(k) for k in range(count)]))


@fastrt.remote
def context():
    return fastrt.runtime_context()


@fastrt.remote
class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, by=1):
        self.value += by
        return self.value

    @fastrt.method(num_returns=2)
    def twice(self):
        return self.value, self.value

    def fail(self):
        raise ValueError("no")

    def leave(self):
        fastrt.exit_actor()

    def count(self, n):
        yield from range(n)

    def context(self):
        return fastrt.get_runtime_context()

    def where(self, ref):
        return fastrt.get(ref[0])


@fastrt.remote
class Broken:
    def __init__(self):
        raise RuntimeError("cannot begin")

    def work(self):
        return 1


@fastrt.remote
class Gate:
    def __init__(self):
        self.open = asyncio.Event()

    async def wait(self, k):
        await self.open.wait()
        return k

    async def unlock(self):
        self.open.set()

    async def through(self, gate, k):
        return await gate.wait.remote(k)


@fastrt.remote
def count_in(counter, by):
    return fastrt.get(counter.add.remote(by))


@check
def values_come_back_and_are_nobody_elses():
    assert get(fastrt.put({"a": [1, None, "x"]})) == {"a": [1, None, "x"]}
    array = np.arange(5000.0)
    back = get(fastrt.put(array))
    assert (back == array).all()
    assert not back.flags.writeable
    items = [1]
    assert get(append_to.remote(items, 2)) == [1, 2]
    assert items == [1]
    with raises(TypeError):
        fastrt.put(fastrt.put(1))
    with raises(TypeError):
        fastrt.get(1)


@check
def references_among_arguments_are_values_and_inside_of_them_references():
    assert get(add.remote(fastrt.put(2), b=add.remote(3))) == 6
    assert get(total.remote([add.remote(k) for k in range(4)])) == 10
    inner = get(fastrt.put({"ref": add.remote(5)}))["ref"]
    assert isinstance(inner, fastrt.ObjectRef)
    assert get(inner) == 6
    assert inner == get(fastrt.put([inner]))[0]
    assert len({inner, get(fastrt.put([inner]))[0]}) == 1
    assert get(fan_out.remote(5)) == 15


@check
def numbers_of_returns():
    @fastrt.remote(num_returns=2)
    def two(value):
        return value

    assert get(two.remote([1, 2])) == [1, 2]
    assert two.options(num_returns=0).remote([1, 2]) is None
    assert get(two.options(num_returns=1).remote([1, 2])) == [1, 2]
    for ref in two.remote([1, 2, 3]):
        with raises(ValueError):
            get(ref)


@check
def errors_are_the_functions_own_and_pass_through_dependents():
    with raises(KeyError):
        get(fail.remote("why"))
    with raises(fastrt.TaskError, "behaviour.py") as found:
        get(add.remote(fail.remote("why")))
    assert isinstance(found[0], KeyError)
    assert isinstance(found[0].cause, KeyError)
    assert "why" in str(found[0])
    with raises(fastrt.exceptions.RayTaskError):
        get([add.remote(1), fail.remote("x")])


@check
def calls_that_do_not_fit_are_told_at_the_call():
    counter = Counter.remote()
    for call in (
        lambda: add.remote(),
        lambda: add.remote(1, 2, 3),
        lambda: add.remote(1, c=2),
        lambda: Counter.remote(1, 2),
        lambda: counter.add.remote(1, 2),
        lambda: counter.add(1),
        lambda: add(1),
        lambda: fastrt.kill(1),
        lambda: fastrt.cancel(1),
        lambda: fastrt.wait([1]),
        lambda: add.options(nonsense=1),
        lambda: counter.add.options(nonsense=1),
    ):
        with raises(TypeError):
            call()
    with raises(AttributeError, "no method 'subtract'; it has add"):
        _ = counter.subtract
    with raises(ValueError):
        fastrt.wait([fastrt.put(1)], num_returns=2)


@check
def retries_of_exceptions():
    @fastrt.remote
    class Tries:
        def __init__(self):
            self.count = 0

        def next(self):
            self.count += 1
            return self.count

    @fastrt.remote(max_retries=2, retry_exceptions=True)
    def third_time(tries):
        if fastrt.get(tries.next.remote()) < 3:
            raise ValueError("again")
        return "there"

    assert get(third_time.remote(Tries.remote())) == "there"
    with raises(ValueError):
        get(third_time.options(max_retries=1).remote(Tries.remote()))


@check
def wait_and_as_completed():
    refs = [add.remote(k) for k in range(5)]
    ready, others = fastrt.wait(refs, num_returns=5, timeout=SOON_S)
    assert (ready, others) == (refs, [])
    assert len(fastrt.wait(refs, num_returns=2)[0]) == 2
    assert len(fastrt.wait([refs[0], refs[0]], num_returns=2, timeout=SOON_S)[0]) == 2
    assert sorted(get(list(fastrt.as_completed(refs, timeout=SOON_S)))) == [1, 2, 3, 4, 5]
    assert refs[0].future().result(SOON_S) == 1

    async def driver():
        return [await ref for ref in refs]

    assert asyncio.run(driver()) == [1, 2, 3, 4, 5]


@check
def attribute_of_an_instance_does_not_hide_a_method():
    @fastrt.remote
    class Model:
        def __init__(self):
            self.size, self.late = 3, 4

        def size(self):
            return self.size

        async def late(self):
            return self.late

    model = Model.remote()
    assert get([model.size.remote(), model.late.remote()]) == [3, 4]


@check
def actors_keep_their_state_and_their_order():
    counter = Counter.remote(10)
    assert get([counter.add.remote(), counter.add.remote(by=5)]) == [11, 16]
    assert get(counter.twice.remote()) == [16, 16]
    assert get(counter.twice.options(num_returns=1).remote()) == (16, 16)
    assert get(count_in.remote(counter, 4)) == 20
    assert get(counter.add.remote(add.remote(1))) == 22
    assert get(counter.where.remote([add.remote(1)])) == 2
    assert get(get(fastrt.put([counter]))[0].add.remote()) == 23
    with raises(ValueError, "no"):
        get(counter.fail.remote())
    assert get(counter.add.remote()) == 24, "it goes on"


@check
def names_of_actors():
    counter = Counter.options(name="counter", lifetime="detached").remote(1)
    assert get(fastrt.get_actor("counter").add.remote()) == 2
    assert fastrt.list_named_actors() == ["counter"]
    with raises(fastrt.NameTakenError):
        Counter.options(name="counter").remote()
    assert get(Counter.options(name="counter", get_if_exists=True).remote().add.remote()) == 3
    fastrt.kill(counter)
    with raises(fastrt.ActorDiedError):
        get(counter.add.remote())
    with raises(fastrt.ActorNotFoundError):
        fastrt.get_actor("counter")


@check
def names_in_namespaces():
    kept = [Counter.options(name="here").remote(1), Counter.options(name="here", namespace="there").remote(5)]
    assert get(fastrt.get_actor("here").add.remote()) == 2
    assert get(fastrt.get_actor("here", namespace="there").add.remote()) == 6
    assert fastrt.list_named_actors() == ["here"]
    assert {"name": "here", "namespace": "there"} in fastrt.list_named_actors(all_namespaces=True)
    assert len(fastrt.list_named_actors(all_namespaces=True)) == 2
    with raises(fastrt.ActorNotFoundError, "there are: "):
        fastrt.get_actor("here", namespace="nowhere")
    for actor in kept:
        fastrt.kill(actor)


@check
def actor_that_cannot_begin_says_so_at_each_call():
    with raises(fastrt.ActorDiedError, "cannot begin"):
        get(Broken.remote().work.remote())


@check
def actor_ends_by_itself_or_when_it_is_asked_to():
    counter = Counter.remote()
    assert get(counter.__ray_ready__.remote()) is True
    assert get(counter.__ray_call__.remote(lambda self, by: self.add(by), 3)) == 3
    end = counter.leave.remote()
    with raises(fastrt.ActorDiedError):
        get(end)
    with raises(fastrt.ActorDiedError):
        get(counter.add.remote())
    other, gate = Counter.remote(), Gate.remote()
    last = other.add.remote()
    ends = [other.__ray_terminate__.remote(), gate.__ray_terminate__.remote()]
    assert get(last) == 1, "what was called before it has run"
    for actor, end in ((other, ends[0]), (gate, ends[1])):
        with raises(fastrt.ActorDiedError):
            get(end)
        with raises(fastrt.ActorDiedError):
            get(actor.__ray_ready__.remote())
    with raises(AttributeError):
        _ = counter.__ray_nonsense__
    with raises(TypeError):
        fastrt.exit_actor()


@check
def coroutines_wait_for_each_other():
    gate, other = Gate.remote(), Gate.remote()
    waiting = [gate.wait.remote(k) for k in range(10)] + [other.through.remote(gate, 10)]
    assert fastrt.wait(waiting, timeout=0.01)[0] == []
    with raises(fastrt.GetTimeoutError):
        fastrt.get(waiting, timeout=0.01)
    get(gate.unlock.remote())
    assert get(waiting) == list(range(11))


@check
def coroutine_is_cancelled():
    gate = Gate.remote()
    ref = gate.wait.remote(1)
    fastrt.wait([ref], timeout=0.2)  # it has begun, or has not: both are cancelled
    fastrt.cancel(ref)
    with raises(fastrt.TaskCancelledError):
        get(ref)


def generators_give_references_one_by_one():
    def count(n):
        yield from range(n)

    counting = fastrt.remote(count)
    assert [get(ref) for ref in counting.remote(3)] == [0, 1, 2]
    assert get(get(counting.options(num_returns="dynamic").remote(3))) == [0, 1, 2]
    assert get(counting.options(num_returns=2).remote(2)) == [0, 1]
    value, stream = fastrt.put(7), counting.remote(2)
    assert fastrt.wait([value, stream], num_returns=2, timeout=SOON_S) == ([value, stream], [])
    assert [get(next(stream)), get(next(stream))] == [0, 1]
    counter = Counter.remote()
    assert [get(ref) for ref in counter.count.remote(3)] == [0, 1, 2]
    assert [get(ref) for ref in counter.count.options(generator_backpressure=1).remote(3)] == [0, 1, 2]
    assert get(counter.count.options(num_returns=2).remote(2)) == [0, 1]

    def fails():
        yield 0
        raise ValueError("after one")

    first, second = fastrt.remote(fails).options(num_returns=2).remote()
    assert get(first) == 0
    with raises(ValueError, "after one"):
        get(second)


if hasattr(fastrt, "ObjectRefGenerator"):
    check(generators_give_references_one_by_one)


@check
def context_tells_where_the_code_runs():
    here, there = fastrt.runtime_context(), get(context.remote())
    assert here.task_id is None
    assert there.task_name.endswith("context")
    assert here.get_job_id() == there.get_job_id()
    assert here.get_node_id() == there.get_node_id() == fastrt.nodes()[0]["NodeID"]
    assert get(context.remote()).task_id != there.task_id
    actor = Counter.options(name="named").remote()
    inside = get(actor.context.remote())
    assert (inside.actor_name, inside.was_current_actor_reconstructed) == ("named", False)
    assert inside.get_actor_id()
    assert fastrt.cluster_resources()["CPU"] == 2.0


@check
def options_of_tasks_and_actors_are_taken():
    assert get(add.options(num_cpus=0.5, name="half", max_retries=0).remote(1)) == 2
    assert get(add.options(scheduling_strategy="SPREAD").remote(1)) == 2
    assert get(Counter.options(num_cpus=0, max_restarts=1, max_task_retries=1).remote().add.remote()) == 1


def main(engine, address):
    settings = {"engine": engine, "address": address}
    if engine == "ray":
        settings.update(log_to_driver=False, logging_level=logging.ERROR)
    failed = 0
    with fastrt.init(**settings):
        for one in CHECKS:
            try:
                one()
            except Exception:
                failed += 1
                sys.stdout.write(f"FAILED {one.__name__}\n{traceback.format_exc()}\n")
            else:
                sys.stdout.write(f"passed {one.__name__}\n")
    assert not fastrt.is_initialized()
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:], *[None] * (3 - len(sys.argv))))
