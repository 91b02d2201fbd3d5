"""Shipping functions: by content, once; and what a worker says of one that it cannot load."""

import sys
import types

import numpy as np
import pytest

import fastrt
from fastrt._core.repair import fsck
from fastrt.errors import FunctionNotFoundError, ObjectStoreFullError
from fastrt.ray import cloudpickle as ray_cloudpickle
from fastrt.store import client as store_client
from fastrt.store import warnings

pytestmark = pytest.mark.usefixtures("rt")


def call(function, *args):
    return fastrt.get(fastrt.remote(function).remote(*args), timeout=30)


def count():
    return fsck.usage(store_client.require().client)["functions"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder on the path of the workers; autouse, so that it is there before the session starts."""
    path = tmp_path_factory.mktemp("modules")
    sys.path.append(str(path))
    yield path
    sys.path.remove(str(path))


@pytest.fixture
def module(folder, monkeypatch):
    """Make a module that this process has imported from `here`, and that workers find as `there`, or not at all."""

    def make(name, here, there=None):
        made = types.ModuleType(name)
        exec(here, made.__dict__)  # noqa: S102  a module with a source of its own in each process
        monkeypatch.setitem(sys.modules, name, made)
        if there is not None:
            (folder / f"{name}.py").write_text(there)
        return made

    return make


def test_functions_of_the_same_code_that_capture_other_references_are_different():
    @fastrt.remote
    class Holder:
        def __init__(self, value):
            self._value = value

        def value(self):
            return self._value

    def asks(actor):
        return fastrt.remote(lambda: fastrt.get(actor.value.remote()))

    def reads(ref):
        return fastrt.remote(lambda: fastrt.get(ref))

    def reader(ref):
        class Reader:
            def read(self):
                return fastrt.get(ref)

        return fastrt.remote(Reader)

    actors = [Holder.remote(k) for k in range(3)]
    assert fastrt.get([asks(actor).remote() for actor in actors], timeout=30) == [0, 1, 2]
    refs = [fastrt.put(k) for k in range(3)]
    assert fastrt.get([reads(ref).remote() for ref in refs], timeout=30) == [0, 1, 2]
    assert fastrt.get([reader(ref).remote().read.remote() for ref in refs], timeout=30) == [0, 1, 2]
    first = reads(refs[0])
    fastrt.get(first.remote(), timeout=30)
    before = count()
    assert fastrt.get(reads(refs[0]).remote(), timeout=30) == 0
    assert count() == before, "stored once"


def test_function_of_a_module_that_workers_lack_names_the_module_and_what_to_do(module):
    only_here = module("only_here", "def f(): return 1")
    for _ in range(2):
        with pytest.raises(FunctionNotFoundError, match=r"No module named 'only_here'.*importable"):
            call(only_here.f)


def test_argument_of_a_module_that_workers_lack_names_the_module(module):
    only_here = module("only_here_too", "class C: pass")
    with pytest.raises(fastrt.SerializationError, match=r"No module named 'only_here_too'.*importable"):
        call(lambda x: 1, only_here.C())
    with pytest.raises(fastrt.SerializationError, match="only_here_too"):
        call(lambda x: 1, fastrt.put([only_here.C()]))


ACTORS_ONLY_HERE = """
import fastrt

BASE = 5

@fastrt.remote
def plain():
    return BASE

@fastrt.remote(num_cpus=0)
class Box:
    class Inner:
        @staticmethod
        def made():
            return Box.Inner()

        def number(self):
            return BASE + 2

    @staticmethod
    def helper(x):
        return BASE + x

    @classmethod
    def name(cls):
        return cls.__name__

    def __init__(self):
        super().__init__()
        self.inner = Box.Inner()

    @property
    def three(self):
        return 3

    def get(self, called=None):
        return BASE, self.helper(1), self.inner.number(), self.three, self.name(), called and called(1)
"""


def test_remote_class_of_a_module_that_workers_lack_travels_by_value_with_all_that_is_inside_it(module):
    here = module("actors_only_here", ACTORS_ONLY_HERE)
    box = here.Box
    assert fastrt.get(here.plain.remote(), timeout=30) == 5
    assert fastrt.get(box.remote().get.remote(box.helper), timeout=30) == (5, 6, 7, 3, "Box", 6)
    assert call(lambda: box.Inner().number()) == 7
    assert call(lambda data: ray_cloudpickle.loads(data)(2), ray_cloudpickle.dumps(box.helper)) == 7


@pytest.mark.parametrize(
    ("name", "there", "text"),
    [
        ("raises_there", "raise ValueError('not in workers')", "not in workers"),
        ("exits_there", "import sys; sys.exit('bye')", "bye"),
        ("differs_there", "def g(): return 1", "f"),
        ("broken_there", "def f(:", "broken_there"),
    ],
)
def test_module_that_fails_in_workers_costs_no_worker(module, name, there, text):
    made = module(name, "def f(): return 1", there)
    for _ in range(3):
        with pytest.raises(FunctionNotFoundError, match=text):
            fastrt.get(fastrt.remote(max_retries=0)(made.f).remote(), timeout=30)
    assert call(len, [1]) == 1


def test_same_function_is_stored_once(rt):
    def function(x):
        return x + 1

    before = count()
    for _ in range(50):
        assert call(function, 1) == 2
        assert fastrt.get(fastrt.remote(function).options(max_retries=1, num_returns=1).remote(2)) == 3
    assert count() <= before + 1  # functions of the tests before may be swept meanwhile


def test_functions_are_told_apart_by_what_they_capture(rt):
    made = [lambda x, k=k: x + k for k in range(300)]
    refs = [fastrt.remote(function).remote(1) for function in made]
    assert fastrt.get(refs, timeout=30) == [1 + k for k in range(300)]


def test_deep_closures_and_captured_arrays_arrive(rt):
    def wrap(function, k):
        return lambda: function() + k

    function, array = (lambda: 0), np.arange(1000)
    for k in range(40):
        function = wrap(function, k)
    assert call(function) == sum(range(40))
    assert call(lambda: int(array.sum())) == 499_500


def test_closure_too_deep_for_pickle_is_an_error(rt):
    def wrap(function):
        return lambda: function()

    function = int
    for _ in range(3000):
        function = wrap(function)
    with pytest.raises((fastrt.SerializationError, RecursionError)):
        call(function)


def test_function_larger_than_the_store_is_refused(rt):
    array = np.empty(300 << 20, np.uint8)
    warnings.configure(True)
    with pytest.warns(UserWarning, match="captures 300 MiB"), pytest.raises(ObjectStoreFullError, match="300"):
        fastrt.remote(lambda: array).remote()


def test_session_with_very_many_functions_takes_more(program):
    """More than its first table of functions has room for; most come straight from the core, to be quick."""
    one = program(
        """
        import hashlib
        import fastrt
        from fastrt._core.objects import functions
        from fastrt.store import client as store_client

        with fastrt.init(2, "64MiB"):
            store = store_client.require()
            for k in range(17_000):
                digest = hashlib.blake2b(str(k).encode(), digest_size=16).digest()
                functions.add_function(store.client, digest, store.put(k), f"f{k}")
            made = [fastrt.remote(lambda k=k: k) for k in range(300)]
            print(fastrt.get([one.remote() for one in made]) == list(range(300)))
            counter = fastrt.remote(type("Counter", (), {"count": lambda self: 7})).remote()
            print(fastrt.get(counter.count.remote()))
            print(fastrt.get(fastrt.remote(num_cpus=0.5, timeout=30)(len).remote("abc")))
        """
    )
    assert one.finish()[0].split() == ["True", "7", "3"]


@pytest.mark.parametrize("there", [None, "raise ValueError('not in workers')", "import sys; sys.exit('bye')"])
def test_exception_to_retry_that_workers_lack_is_the_error_of_the_task_and_costs_no_worker(module, there):
    name = f"errors_only_here_{'absent' if there is None else there[0]}"
    only_here = module(name, "class Passing(Exception): pass", there)

    class Calls:
        def __init__(self):
            self.calls = 0

        def fail(self):
            self.calls += 1
            raise KeyError(self.calls)

    class OnLoop(Calls):
        async def wait(self):
            raise KeyError(self.calls)

    plain, on_loop = fastrt.remote(Calls).remote(), fastrt.remote(OnLoop).remote()
    threads = fastrt.remote(max_concurrency=2)(Calls).remote()
    calls = [fastrt.remote(lambda: 1), plain.fail, on_loop.fail, on_loop.wait, threads.fail]
    for one in calls * 2:
        with pytest.raises(fastrt.SerializationError, match=f"{name}|not in workers|bye"):
            fastrt.get(one.options(retry_exceptions=[only_here.Passing]).remote(), timeout=30)
    for actor in plain, on_loop, threads:
        with pytest.raises(KeyError, match="1"):
            fastrt.get(actor.fail.remote(), timeout=30)
