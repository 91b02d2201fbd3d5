"""`runtime_env` in sessions of their own: a job's default, a worker that runs two tasks at once, other engines."""

import os
import sys
import threading

import pytest

import fastrt
from fastrt.errors import ConfigError, RuntimeEnvError, UnsupportedError
from fastrt.tasks import runtime_env
from fastrt.tasks.runtime_env import environment_of

SOON_S = 30.0
NAME = "FASTRT_TEST_ENVIRONMENT"


@pytest.fixture
def whole(tmp_path):
    """An environment with everything but `import_paths`."""
    (tmp_path / "wares").mkdir()
    (tmp_path / "wares" / "__init__.py").write_text("COUNT = [0]\n")
    (tmp_path / "desk").mkdir()
    return {
        "env_vars": {NAME: "a"},
        "working_dir": str(tmp_path / "desk"),
        "py_modules": [str(tmp_path / "wares")],
    }


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


@fastrt.remote
def look():
    try:
        import wares

        wares.COUNT[0] += 1
        count = wares.COUNT[0]
    except ImportError:
        count = 0
    return os.environ.get(NAME), os.getcwd(), count


@fastrt.remote
def steps(n):
    for _ in range(n):
        yield look.function()


@fastrt.remote
class Plain:
    def look(self):
        return look.function()


@fastrt.remote
def look_on_top():
    return os.environ.get(NAME), os.environ.get("CHANGED"), os.getcwd(), os.getpid()


@fastrt.remote
def wait(own):
    os.environ["CHANGED"] = "within"
    os.chdir("/")
    other = look_on_top.options(runtime_env=own)
    on_top = [fastrt.get(look_on_top.remote()), fastrt.get(other.remote())]  # get with a timeout would run nothing
    return on_top, fastrt.get(look.remote()), look_on_top.function()


@fastrt.remote
def look_below(own):
    return get(look.options(runtime_env=own).remote()), get(look_deeper.remote())


@fastrt.remote
def look_deeper():
    return get(look.remote())


def test_nested_tasks_inherit_and_their_own_keys_win(whole, tmp_path):
    desk = whole["working_dir"]
    with fastrt.init(1, "64MiB"):
        outer = look_below.options(runtime_env=whole)
        own, deeper = get(outer.remote(None))
        assert own[:2] == deeper[:2] == ("a", desk)
        assert min(own[2], deeper[2]) > 0
        own, deeper = get(outer.remote({"env_vars": {NAME: "own"}, "py_modules": []}))
        assert own == ("own", desk, 0)
        assert deeper[:2] == ("a", desk)
        assert {found[0] for found in get(look_below.remote(None))} == {None}


def test_what_a_waiting_task_runs_meanwhile_is_outside_of_its_environment(whole):
    desk = whole["working_dir"]
    with fastrt.init(num_workers=1, clients_max=3, object_store_memory=64 << 20):  # no other worker can be started
        before = get(look_on_top.remote())
        assert before[:2] == (None, None)
        pid = before[-1]
        for count in (1, 2):
            on_top, below, after = get(wait.options(runtime_env=whole).remote({"env_vars": {NAME: "b"}}))
            assert on_top == [("a", None, desk, pid), ("b", None, desk, pid)]
            assert below == ("a", desk, count)
            assert after == ("a", "within", "/", pid)
            assert get(look_on_top.remote()) == before


@fastrt.remote
def import_for_good(folder):
    sys.path.insert(0, folder)
    import wares
    import wares.more

    return wares.WHOSE, wares.more.WHOSE


@fastrt.remote
def whose():
    import wares

    return getattr(wares, "WHOSE", None), "wares.more" in sys.modules, id(wares)


def check_other_modules_of_the_same_name(whole, tmp_path):
    (tmp_path / "worker" / "wares").mkdir(parents=True)
    for name in ("__init__", "more"):
        (tmp_path / "worker" / "wares" / f"{name}.py").write_text("WHOSE = 'worker'\n")
    assert get(import_for_good.remote(str(tmp_path / "worker"))) == ("worker", "worker")
    before = get(whose.remote())
    assert before[:2] == ("worker", True)
    assert get(whose.options(runtime_env=whole).remote())[:2] == (None, False)
    same = {"import_paths": [tmp_path / "worker"]}  # where the worker has it from
    assert [get(whose.options(runtime_env=env).remote()) for env in (same, {}, same)] == [before] * 3
    assert get(whose.remote()) == before


def test_job_has_a_default_that_nothing_in_this_process_notices(whole, tmp_path):
    here = os.environ.get(NAME), os.getcwd(), list(sys.path)
    desk = whole["working_dir"]
    with fastrt.init(1, "64MiB", runtime_env=whole):
        assert get(look.remote()) == ("a", desk, 1)
        assert get(look.options(runtime_env={"env_vars": {NAME: "b"}}).remote())[:2] == ("b", desk)
        assert get(Plain.remote().look.remote()) == ("a", desk, 1)
        assert get(next(steps.remote(1)))[:2] == ("a", desk)
        assert (os.environ.get(NAME), os.getcwd(), list(sys.path)) == here
    assert runtime_env.current() is None
    with fastrt.init(1, "64MiB"):
        assert get(look.remote())[0] is None
        check_other_modules_of_the_same_name(whole, tmp_path)
    with pytest.raises(ConfigError, match="'conda'"):
        fastrt.init(1, "64MiB", runtime_env={"conda": "science"})
    assert not fastrt.is_initialized()


def test_job_has_a_setup_hook_for_all_its_workers():
    def prepare():
        os.environ[NAME] = "prepared"

    with fastrt.init(1, "64MiB", runtime_env={"worker_process_setup_hook": prepare}):
        assert get(look.remote())[0] == get(Plain.remote().look.remote())[0] == "prepared"
        assert get(look.options(runtime_env={"env_vars": {"OTHER": "b"}}).remote())[0] == "prepared"
        assert os.environ.get(NAME) is None
    lock = threading.Lock()
    with pytest.raises(RuntimeEnvError, match=r"(?s)setup_hook .* cannot be sent: cannot pickle"):
        fastrt.init(1, runtime_env={"worker_process_setup_hook": lambda: lock})
    assert not fastrt.is_initialized()


def test_local_mode_refuses_and_ray_is_given_what_it_has(whole, tmp_path):
    with pytest.raises(UnsupportedError, match="local mode"):
        fastrt.init(local_mode=True, runtime_env={"env_vars": {"A": "1"}})
    with fastrt.init(local_mode=True):
        for call in (look.options(runtime_env=whole), Plain.options(runtime_env=whole)):
            with pytest.raises(UnsupportedError, match="local mode"):
                call.remote()
    assert environment_of(whole).for_ray() == whole
    with pytest.raises(UnsupportedError, match=r"give it to init\(runtime_env="):
        environment_of({"worker_process_setup_hook": "a.b"}).for_ray()
    with pytest.raises(UnsupportedError, match="import_paths"):
        environment_of({"import_paths": [tmp_path]}).for_ray()
