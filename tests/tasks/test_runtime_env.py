"""`runtime_env`: what tasks and actors find around them, what they pass on, and that nothing of it stays."""

import os
import sys
import threading

import pytest

import fastrt
from fastrt.errors import ActorDiedError, ConfigError, TaskCancelledError, TaskError
from fastrt.tasks.runtime_env import Environment, environment_of

SOON_S = 30.0
NAME = "FASTRT_TEST_ENVIRONMENT"


@pytest.fixture(scope="module")
def rt(runtime_dir):
    """One worker, and no task here waits for another: what runs next runs where the last one ran."""
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir, spill_dir=runtime_dir.parent / "spill") as runtime:
        yield runtime


@pytest.fixture
def folder(tmp_path):
    """Two places with a module and a package of the same names, and a place to work."""
    for place in ("one", "two"):
        (tmp_path / place / "wares").mkdir(parents=True)
        (tmp_path / place / "wares" / "__init__.py").write_text(f"PLACE = {place!r}\n")
        (tmp_path / place / "wares" / "inner.py").write_text("from wares import PLACE\nCOUNT = [0]\n")
        (tmp_path / place / "goods.py").write_text(GOODS)
    (tmp_path / "desk").mkdir()
    return tmp_path


GOODS = """
import os
VALUE = os.environ.get("FASTRT_TEST_ENVIRONMENT")

class Good:
    def __init__(self, name):
        self.name = name

def make(name):
    return Good(name)
"""


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


def whole(folder, value="a", place="one"):
    modules = [str(folder / place / "wares")]
    return {"env_vars": {NAME: value}, "working_dir": str(folder / "desk"), "py_modules": modules}


@fastrt.remote
def look():
    try:
        from wares import inner

        inner.COUNT[0] += 1
        wares = inner.PLACE, inner.COUNT[0]
    except ImportError:
        wares = None
    return os.environ.get(NAME), os.getcwd(), wares, list(sys.path), os.getpid()


@fastrt.remote
def spoil_and_fail():
    os.environ[NAME] = "spoiled"
    os.environ[NAME + "_MORE"] = "spoiled"
    os.chdir("/")
    sys.path.insert(0, "/nowhere")
    raise ValueError(os.environ["ONE"])


@fastrt.remote(num_returns=0)
def say(name):
    with open(name, "w") as file:
        file.write(os.environ[NAME])


@fastrt.remote
def stay():
    get_on = threading.Event()
    open("here", "w").close()
    while True:
        get_on.wait(0.002)


@fastrt.remote
def steps(n):
    for _ in range(n):
        yield os.environ.get(NAME), os.getcwd()


@fastrt.remote
class Looker:
    def __init__(self):
        self.first = look.function()[:3]

    def look(self):
        return self.first, look.function()[:3], get(look.remote())[:3]

    async def look_later(self):
        return look.function()[:3]


@fastrt.remote
class Plain:
    def look(self):
        return look.function()[:3]


def test_environment_is_there_for_a_task_and_gone_for_the_next(rt, folder):
    before = get(look.remote())
    assert before[0] is None
    assert before[2] is None
    one, two = look.options(runtime_env=whole(folder)), look.options(runtime_env=whole(folder, "b", "two"))
    desk = str(folder / "desk")
    for k in (1, 2):  # the second time the modules are those of the first
        found = get(one.remote())
        assert found[:3] == ("a", desk, ("one", k))
        assert found[3][:2] == [desk, str(folder / "one")]
        assert found[4] == before[4]
        assert get(look.remote()) == before
        assert get(two.remote())[:3] == ("b", desk, ("two", k))
        assert get(look.remote()) == before


def test_variables_are_made_of_the_workers(rt):
    @fastrt.remote
    def of_worker(*names):
        return [os.environ.get(name) for name in names]

    (path,) = get(of_worker.remote("PATH"))
    inner = {"PATH": "/in:${PATH}", NAME: "a${FASTRT_TEST_ABSENT}b$FASTRT_TEST_ABSENT"}

    @fastrt.remote
    def nested():
        return [of_worker.options(runtime_env={"env_vars": inner}).remote("PATH", NAME)]

    values = [f"/in:{path}", "ab$FASTRT_TEST_ABSENT"]
    assert get(of_worker.options(runtime_env={"env_vars": inner}).remote("PATH", NAME)) == values
    assert get(get(nested.options(runtime_env={"env_vars": {"PATH": "/out:${PATH}"}}).remote())) == [values]
    assert get(of_worker.remote("PATH", NAME)) == [path, None]


def test_environment_is_gone_after_an_exception_and_what_the_task_itself_did_too(rt, folder):
    before = get(look.remote())
    with pytest.raises(TaskError, match="here"):
        get(spoil_and_fail.options(runtime_env={"env_vars": {"ONE": "here"}}).remote())
    assert get(look.remote()) == before
    failing = spoil_and_fail.options(runtime_env={"env_vars": {"ONE": "here"}}, retry_exceptions=True, max_retries=2)
    with pytest.raises(TaskError, match="here"):
        get(failing.remote())
    assert get(look.remote()) == before


def test_environment_is_gone_after_a_task_that_is_cancelled_or_has_no_result(rt, folder, wait_until):
    before = get(look.remote())
    ref = stay.options(runtime_env=whole(folder)).remote()
    wait_until((folder / "desk" / "here").exists, "the task in its folder", SOON_S)
    fastrt.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert get(look.remote()) == before
    say.options(runtime_env=whole(folder)).remote("said")
    assert get(look.remote()) == before
    assert (folder / "desk" / "said").read_text() == "a"


def test_generators_run_in_their_environment(rt, folder):
    before = get(look.remote())
    here = ("a", str(folder / "desk"))
    made = steps.options(runtime_env=whole(folder))
    assert [get(ref) for ref in made.remote(3)] == [here] * 3
    assert [get(ref) for ref in get(made.options(num_returns="dynamic").remote(2))] == [here] * 2
    assert get(made.options(num_returns=2).remote(2)) == [here] * 2
    assert [get(ref) for ref in made.options(generator_backpressure=1).remote(2)] == [here] * 2
    assert get(look.remote()) == before


def test_actors_have_an_environment_for_life_and_pass_it_on(rt, folder):
    desk = str(folder / "desk")
    looker = Looker.options(runtime_env=whole(folder)).remote()
    first, now, below = get(looker.look.remote())
    assert first == ("a", desk, ("one", 1))
    assert now == ("a", desk, ("one", 2))
    assert below[:2] == ("a", desk)
    assert get(looker.look_later.remote()) == ("a", desk, ("one", 3))
    assert get(looker.__fastrt_call__.remote(lambda self: get(Plain.remote().look.remote())))[:2] == ("a", desk)
    assert get(Plain.remote().look.remote())[0] is None


def test_functions_and_results_of_its_modules_are_found_there_alone(rt, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder / "one")  # of this process: the workers have started
    monkeypatch.delitem(sys.modules, "goods", raising=False)
    import goods

    make = fastrt.remote(goods.make)
    modules = {"py_modules": [folder / "one" / "goods.py"]}
    made = get(make.options(runtime_env=modules).remote("x"))
    assert type(made) is goods.Good
    assert made.name == "x"
    with pytest.raises(Exception, match="No module named 'goods'"):
        get(make.remote("x"))
    in_folder = make.options(runtime_env={"import_paths": [folder / "one"]}, num_returns=1)
    assert get(in_folder.remote("y")).name == "y"


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"conda": "base"}, ConfigError, "'conda': only pip and uv install something for a task"),
        ({"pip": ["a"], "uv": ["a"]}, ConfigError, "pip and uv; give one"),
        ({"pip": ["a\nb"]}, TypeError, "it must be a package"),
        ({"pip": "/no/such/requirements.txt"}, ConfigError, "cannot be read here"),
        ({"pip": {"packages": ["a"], "pip_check": True}}, ConfigError, "'pip_check'"),
        ({"uv": {}}, ConfigError, "no packages"),
        ({"workdir": "/"}, ConfigError, "'workdir', which is not known; there are: env_vars, working_dir"),
        ("prod", TypeError, "it must be a dict"),
        ({"env_vars": {"A": 1}}, TypeError, "'A': 1; names and values must be text"),
        ({"env_vars": ["A"]}, TypeError, "it must be a dict of text by name"),
        ({"env_vars": {"A=B": "1"}}, ConfigError, "no variable can be called"),
        ({"env_vars": {"A": "\0"}}, ConfigError, "no variable can be called or be that"),
        ({"working_dir": "/no/such/folder"}, ConfigError, "/no/such/folder is no folder here: make it first"),
        ({"working_dir": 3}, TypeError, "it must be the path"),
        ({"import_paths": "/"}, TypeError, "it must be a list"),
        ({"import_paths": ["/no/such/folder"]}, ConfigError, "is no folder here"),
        ({"py_modules": ["/no/such/package"]}, ConfigError, "it must be a package's folder or a .py file"),
        ({"py_modules": [sys]}, ConfigError, "which has no file"),
        ({"py_modules": [5]}, TypeError, "it must be the path"),
    ],
)
def test_wrong_environment_is_refused_where_it_is_given(given, error, says):
    for place in (
        lambda: fastrt.remote(runtime_env=given)(look.function),
        lambda: look.options(runtime_env=given),
        lambda: Plain.options(runtime_env=given),
    ):
        with pytest.raises(error) as caught:
            place()
        assert says in str(caught.value)


def test_environment_that_is_gone_where_it_is_entered_fails_in_words(rt, folder):
    before = get(look.remote())
    late = folder / "late"
    late.mkdir()
    function = look.options(runtime_env={"working_dir": late, "env_vars": {NAME: "late"}})
    cls = Plain.options(runtime_env={"working_dir": late})
    late.rmdir()
    with pytest.raises(ConfigError, match="late, which is not on this node"):
        get(function.remote())
    with pytest.raises(ActorDiedError, match="late, which is not on this node"):
        get(cls.remote().look.remote())
    assert get(look.remote()) == before


def test_merging_adds_variables_and_replaces_the_rest(folder):
    first = environment_of({"env_vars": {"A": "1", "B": "1"}, "import_paths": [folder / "one"]})
    second = environment_of({"env_vars": {"B": "2"}, "import_paths": []})
    assert first.extended_by(None) is first
    merged = first.extended_by(second)
    assert merged == Environment((("A", "1"), ("B", "2")), None, None, ())
    assert merged.extended_by(second) == merged
    assert environment_of({}) is None
    assert environment_of({"env_vars": None}) is None
