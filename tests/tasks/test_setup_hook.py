"""`worker_process_setup_hook`: a function that each worker calls once before the tasks of an environment."""

import os
import sys
import threading

import pytest

import fastrt
from fastrt.errors import ActorDiedError, ConfigError, RuntimeEnvError
from fastrt.tasks.runtime_env import environment_of

SOON_S = 30.0
NAME = "FASTRT_TEST_HOOK"


def get(refs):
    return fastrt.get(refs, timeout=SOON_S)


def prepare():
    """Change what a hook can change, and count its runs in this process."""
    sys.hooks = getattr(sys, "hooks", 0) + 1
    os.environ[NAME] = "prepared"
    os.environ.pop("PREPARED_AWAY", None)
    sys.path.insert(0, "/prepared")
    os.chdir("/usr")


@fastrt.remote
def look():
    return os.environ.get(NAME), "/prepared" in sys.path, os.getcwd(), getattr(sys, "hooks", 0), os.getpid()


@fastrt.remote
class Looker:
    def look(self):
        return os.environ.get(NAME), "/prepared" in sys.path, os.getcwd(), getattr(sys, "hooks", 0)


INSIDE = {"worker_process_setup_hook": prepare}
PREPARED = ("prepared", True, "/usr", 1)


def test_hook_runs_once_in_a_worker_and_its_changes_hold_for_its_tasks_only(rt):
    for _ in range(3):
        found = get([look.options(runtime_env=INSIDE).remote() for _ in range(4)])
        assert [one[:4] for one in found] == [PREPARED] * 4
        assert {one[:2] for one in get([look.remote() for _ in range(4)])} == {(None, False)}
    away = {**INSIDE, "env_vars": {"PREPARED_AWAY": "1", NAME: "replaced by the hook"}}
    gone = fastrt.remote(runtime_env=away)(lambda: (os.environ.get("PREPARED_AWAY"), os.environ[NAME]))
    assert get([gone.remote(), gone.remote()]) == [(None, "prepared")] * 2
    assert os.environ.get(NAME) is None


def test_hook_runs_in_an_actor_and_in_tasks_from_inside(rt):
    actor = Looker.options(runtime_env=INSIDE).remote()
    assert get(actor.look.remote()) == PREPARED
    outer = fastrt.remote(runtime_env=INSIDE)(lambda: get(look.remote())[:3])
    assert get(outer.remote()) == PREPARED[:3]


def test_hook_is_imported_by_its_name(rt, tmp_path):
    (tmp_path / "hooks_here.py").write_text(f"import os\ndef begin():\n    os.environ[{NAME!r}] = 'imported'\n")
    env = {"worker_process_setup_hook": "hooks_here.begin", "import_paths": [tmp_path]}
    assert get(look.options(runtime_env=env).remote())[0] == "imported"
    with pytest.raises(RuntimeEnvError, match=r"hook hooks_here.begin .* failed: ModuleNotFoundError"):
        get(look.options(runtime_env={"worker_process_setup_hook": "hooks_here.begin"}).remote())


def test_hook_that_fails_fails_the_task_in_words_and_the_worker_goes_on(rt):
    def fail():
        os.environ[NAME] = "spoiled"
        raise KeyError("no table")

    env = {"worker_process_setup_hook": fail}
    with pytest.raises(fastrt.exceptions.RuntimeEnvSetupError, match=r"hook .*fail of .* failed: KeyError: 'no table'"):
        get(look.options(runtime_env=env).remote())
    with pytest.raises(ActorDiedError, match="no table"):
        get(Looker.options(runtime_env=env).remote().look.remote())
    assert get(look.remote())[0] is None


def test_wrong_hook_is_refused_where_it_is_given(rt):
    ref = fastrt.put(1)
    for given, error, says in [
        (3, TypeError, "must be a function or the name of one"),
        ("begin", ConfigError, "must be like 'package.module.function'"),
        ("hooks.not a name", ConfigError, "must be like"),
        (lambda: ref, ConfigError, "names references"),
        (lambda text="x" * (1 << 21): text, ConfigError, "at most 1048576 bytes"),
    ]:
        with pytest.raises(error, match=says):
            environment_of({"worker_process_setup_hook": given})
    lock = threading.Lock()
    with pytest.raises(RuntimeEnvError, match="lock"):
        environment_of({"worker_process_setup_hook": lambda: lock})
