"""Remote functions: how they are made, called, refused, and what they return."""

import functools
import gc
import os
import threading
import weakref

import numpy as np
import pytest

import fastrt
from fastrt.errors import NotInitializedError, TaskError
from fastrt.store import warnings

pytestmark = pytest.mark.usefixtures("rt")


@fastrt.remote
def echo(*args, **kwargs):
    return args, kwargs


@fastrt.remote
def fib(n):
    return n if n < 2 else sum(fastrt.get([fib.remote(n - 1), fib.remote(n - 2)]))


def call(function, *args, **kwargs):
    return fastrt.get(function.remote(*args, **kwargs), timeout=30)


# ---- calls ----


def test_call_with_all_kinds_of_arguments_gets_them(rt):
    ref = fastrt.put([1])
    array = np.arange(50_000)
    args, kwargs = call(echo, 1, "a", None, 2.5, b"x", [ref], a=ref, b=array, c={"d": (1,)})
    assert args[:5] == (1, "a", None, 2.5, b"x")
    assert fastrt.get(args[5]) == [[1]]
    assert kwargs["a"] == [1]
    assert kwargs["b"].sum() == array.sum()
    assert kwargs["c"] == {"d": (1,)}


@pytest.mark.parametrize("count", [0, 1, 10, 5000])
def test_call_with_many_arguments_gets_them_in_order(rt, count):
    assert call(echo, *range(count))[0] == tuple(range(count))
    names = {f"k{i}": i for i in range(min(count, 300))}
    assert call(echo, **names) == ((), names)


def test_call_with_many_references_gets_their_values(rt):
    refs = [fastrt.put(i) for i in range(500)] + [echo.remote(i) for i in range(20)]
    args, _ = call(echo, *refs)
    assert args == (*range(500), *[((i,), {}) for i in range(20)])
    same = fastrt.put("s")
    assert call(echo, same, same, x=same) == (("s", "s"), {"x": "s"})


@pytest.mark.parametrize("size", [100, 1900, 2048, 2049, 33_000, 3_000_000])
def test_arguments_of_any_size_arrive(rt, size):
    for value in (b"x" * size, "x" * size, [b"y" * size], np.ones(size, np.uint8)):
        (got,), _ = call(echo, value)
        assert len(got) == len(value)
        assert np.array_equal(got, value)


def test_large_arguments_are_views_that_cannot_be_changed(rt):
    @fastrt.remote
    def change(array):
        array[0] = 1

    with pytest.raises(ValueError, match="read-only"):
        call(change, np.zeros(100_000))
    with pytest.raises(ValueError, match="read-only"):
        call(change, fastrt.put(np.zeros(3)))


def test_defaults_keywords_and_keyword_only_arguments_work(rt):
    @fastrt.remote
    def function(a, b=2, /, c=3, *rest, d, e=5, **more):
        return a, b, c, rest, d, e, more

    assert call(function, 1, d=4) == (1, 2, 3, (), 4, 5, {})
    assert call(function, 1, 2, 3, 4, 5, d=0, z=9) == (1, 2, 3, (4, 5), 0, 5, {"z": 9})
    for args, kwargs in (((), {"d": 1}), ((1,), {})):
        with pytest.raises(TypeError, match="missing a required"):
            function.remote(*args, **kwargs)


def test_call_that_does_not_fit_the_signature_is_refused_here_and_submits_nothing(rt):
    @fastrt.remote
    def two(a, b=1):
        return a, b

    for args, kwargs, text in (
        ((), {}, "missing a required argument: 'a'"), ((1, 2, 3), {}, "too many positional"),
        ((1,), {"a": 2}, "multiple values"), ((1,), {"c": 2}, "unexpected keyword"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=text):
            two.remote(*args, **kwargs)


def test_anything_callable_can_be_remote(rt):
    class Adder:
        def __init__(self, n):
            self.n = n

        def __call__(self, x):
            return x + self.n

        def add(self, x):
            return x + self.n

    assert call(fastrt.remote(Adder(2)), 1) == 3
    assert call(fastrt.remote(Adder(2).add), 1) == 3
    assert call(fastrt.remote(functools.partial(Adder(2).add, 4))) == 6
    assert call(fastrt.remote(lambda x: x * 2), 4) == 8
    assert call(fastrt.remote(len), [1, 2]) == 2
    assert call(fastrt.remote(max), 3, 5) == 5
    assert call(fastrt.remote(os.getpid)) != os.getpid()
    assert call(fastrt.remote(np.add), 1, 2) == 3


def test_decorated_function_keeps_its_name_and_is_not_called_directly(rt):
    @fastrt.remote
    def documented():
        """Say so."""

    assert documented.__doc__ == "Say so."
    assert documented.__name__ == "documented"
    assert "documented" in repr(documented)
    with pytest.raises(TypeError, match=r"documented.*\.remote"):
        documented()
    assert documented.function() is None


def test_attributes_of_a_function_do_not_replace_those_of_the_remote_function(rt):
    def function():
        return 7

    function.remote = function._bound = function._name = function.options = 5
    assert call(fastrt.remote(function)) == 7


def test_remote_function_calls_itself_and_travels_as_an_argument(rt):
    assert call(fib, 12) == 144

    @fastrt.remote
    def apply(function, *args):
        return fastrt.get(function.remote(*args))

    assert call(apply, fib, 5) == 5
    assert call(apply, fib.options(name="other"), 6) == 8


def test_deep_recursion_over_all_workers_does_not_multiply_functions(rt):
    from fastrt._core.repair import fsck
    from fastrt.store import client

    call(fib, 5)
    before = fsck.usage(client.require().client)["functions"]
    for _ in range(5):
        call(fib, 9)
    assert fsck.usage(client.require().client)["functions"] <= before + 2


def test_function_sees_the_values_that_it_had_when_it_was_first_called(rt):
    values = [1]

    @fastrt.remote
    def look():
        return values

    assert call(look) == [1]
    values.append(2)
    assert call(look) == [1]
    assert call(look.options()) == [1, 2]


# ---- results ----


@pytest.mark.parametrize("count", [2, 3, 100, 2000])
def test_num_returns_gives_a_list_of_references(rt, count):
    @fastrt.remote(num_returns=count)
    def many(kind):
        return kind(range(count))

    for kind in (tuple, list):
        refs = many.remote(kind)
        assert len(refs) == count
        assert fastrt.get(refs) == list(range(count))


def test_num_returns_zero_gives_none_and_runs(rt, tmp_path, wait_until):
    @fastrt.remote(num_returns=0)
    def touch(path, fail=False):
        open(path, "w").close()
        if fail:
            raise ValueError

    assert touch.remote(str(tmp_path / "a")) is None
    assert touch.options(max_retries=0).remote(str(tmp_path / "b"), fail=True) is None
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, "both files")


@pytest.mark.parametrize(
    ("value", "text"),
    [([1, 2, 3], "returned 3"), ((1,), "returned 1"), (5, "a int"), ("ab", "a str"), (None, "None")],
)
def test_wrong_number_of_returns_is_an_error_at_each_result(rt, value, text):
    refs = fastrt.remote(num_returns=2)(lambda: value).remote()
    for ref in refs:
        with pytest.raises(ValueError, match=f"num_returns=2, its function returned .*{text.split()[-1]}"):
            fastrt.get(ref)


def test_results_before_one_that_cannot_be_sent_are_there(rt):
    @fastrt.remote(num_returns=3)
    def partly():
        return 1, threading.Lock(), 3

    first, second, third = partly.remote()
    assert fastrt.get(first) == 1
    for ref in (second, third):
        with pytest.raises(fastrt.SerializationError, match="lock"):
            fastrt.get(ref)


def test_result_that_is_a_reference_comes_back_as_one(rt):
    @fastrt.remote
    def submit(x):
        return echo.remote(x)

    ref = call(submit, 3)
    assert isinstance(ref, fastrt.ObjectRef)
    assert fastrt.get(ref) == ((3,), {})
    nested = call(fastrt.remote(lambda: {"r": [fastrt.put("deep"), fastrt.put(np.ones(10_000))]}))
    assert fastrt.get(nested["r"][0]) == "deep"
    assert fastrt.get(nested["r"][1]).sum() == 10_000


def test_references_dropped_at_once_stay_alive_until_the_task_has_run(rt, tmp_path):
    @fastrt.remote
    def late(path, box, direct):
        pause = threading.Event()
        while not os.path.exists(path):
            pause.wait(0.002)
        return fastrt.get(box["r"])["inner"][0], fastrt.get(fastrt.get(box["r"])["inner"][1]), direct

    gate = str(tmp_path / "gate")
    refs = [
        late.remote(gate, {"r": fastrt.put({"inner": [i, fastrt.put(str(i))]})}, fastrt.put([i])) for i in range(10)
    ]
    gc.collect()
    filler = [fastrt.put(np.zeros(100_000)) for _ in range(20)]
    open(gate, "w").close()
    assert fastrt.get(refs, timeout=30) == [(i, str(i), [i]) for i in range(10)]
    del filler


def test_chain_and_tree_of_dependent_tasks_give_the_right_sum(rt):
    add = fastrt.remote(lambda *values: sum(values))
    ref = fastrt.put(0)
    for _ in range(2000):
        ref = add.remote(ref, 1)
    assert fastrt.get(ref, timeout=30) == 2000
    level = [add.remote(i) for i in range(256)]
    while len(level) > 1:
        level = [add.remote(*level[k : k + 4]) for k in range(0, len(level), 4)]
    assert fastrt.get(level[0], timeout=30) == sum(range(256))


# ---- options ----


def test_options_change_a_copy_only(rt):
    two = echo.options(num_returns=2, name="pair")
    assert len(two.remote(1)) == 2
    assert isinstance(echo.remote(1), fastrt.ObjectRef)
    assert repr(two) == "RemoteFunction(pair)"


def test_name_stands_in_errors(rt):
    def fail():
        raise ValueError("x")

    with pytest.raises(TaskError, match=r"task 'a name that is longer than sixty-three bytes é\w+' failed"):
        call(fastrt.remote(name="a name that is longer than sixty-three bytes é" + "x" * 60)(fail))


OPTIONS = {
    "unknown": ({"num_cpus_of": 1}, TypeError, "'num_cpus_of' is not an option"),
    "returns negative": ({"num_returns": -1}, ValueError, "num_returns is -1; it must be from 0"),
    "returns huge": ({"num_returns": 1 << 40}, ValueError, "num_returns is"),
    "returns text": ({"num_returns": "2"}, ValueError, "num_returns is '2'"),
    "returns float": ({"num_returns": 2.0}, TypeError, "num_returns is 2.0"),
    "returns bool": ({"num_returns": True}, TypeError, "num_returns is True"),
    "returns None": ({"num_returns": None}, TypeError, "num_returns is None"),
    "retries negative": ({"max_retries": -2}, ValueError, "max_retries is -2"),
    "retries many": ({"max_retries": 1000}, ValueError, "max_retries is 1000"),
    "retries text": ({"max_retries": "x"}, TypeError, "max_retries is 'x'"),
    "exceptions int": ({"retry_exceptions": 1}, TypeError, "retry_exceptions is 1"),
    "exceptions text": ({"retry_exceptions": ["ValueError"]}, TypeError, "list of exception classes"),
    "name int": ({"name": 5}, TypeError, "name is 5"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_option_is_refused_by_remote_and_by_options(rt, name):
    options, kind, text = OPTIONS[name]
    for make in (lambda: fastrt.remote(**options)(lambda: 1), lambda: echo.options(**options)):
        with pytest.raises(kind) as info:
            make()
        assert text in str(info.value)


async def coroutine():
    pass


async def generator():
    yield


FUNCTIONS = {
    "int": (5, "not int"), "text": ("x", "not str"), "remote": (echo, "remote already"),
    "coroutine": (coroutine, "coroutine"), "generator": (generator, "coroutine"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_cannot_be_remote_is_refused(name):
    value, text = FUNCTIONS[name]
    with pytest.raises(TypeError, match=text):
        fastrt.remote(value)


def test_remote_with_function_and_options_at_once_is_refused():
    with pytest.raises(TypeError, match="not both"):
        fastrt.remote(lambda: 1, num_returns=2)
    with pytest.raises(TypeError, match="positional"):
        fastrt.remote(lambda: 1, 2)


# ---- what is kept ----


def test_remote_function_that_is_dropped_is_gone(rt):
    function = fastrt.remote(lambda: 1)
    assert call(function) == 1
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


def test_error_of_an_argument_says_so_without_frames_of_fastrt(rt):
    @fastrt.remote
    def divide(by):
        return 1 / by

    with pytest.raises(ZeroDivisionError) as caught:
        fastrt.get(divide.remote(divide.remote(0)), timeout=30)
    text = str(caught.value)
    assert "One of its arguments could not be computed:\nfastrt.errors.TaskError" in text
    assert text.count("return 1 / by") == 1
    assert "_load_arguments" not in text


def test_argument_that_cannot_be_pickled_names_it_and_submits_nothing(rt):
    for args, kwargs, where in (
        ((1, [threading.Lock()]), {}, r"\[0\]\[1\]\[0\]"),
        ((), {"k": threading.Lock()}, r"\['k'\]"),
    ):
        with pytest.raises(fastrt.SerializationError, match=f"lock.* at value.*{where}"):
            echo.remote(*args, **kwargs)


def test_function_that_captures_what_cannot_be_pickled_says_which(rt):
    lock = threading.Lock()
    with pytest.raises(fastrt.SerializationError, match=r"function '.*lambda.*cannot be sent to workers.*lock"):
        fastrt.remote(lambda: lock).remote()


def test_function_that_captures_a_large_array_warns_and_works(rt):
    array = np.ones(2 << 20)
    warnings.configure(True)
    with pytest.warns(UserWarning, match="captures 16 MiB; put large values once"):
        assert call(fastrt.remote(lambda: array.sum())) == 2 << 20


def test_store_that_goes_while_a_function_is_submitted_is_an_error(monkeypatch):
    from fastrt.store import client

    monkeypatch.setattr(client, "_store", None)
    monkeypatch.setattr(client, "_start", None)
    with pytest.raises(NotInitializedError, match=r"fastrt\.init"):
        echo.remote(1)
