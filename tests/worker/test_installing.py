"""Packages that pip installs for tasks and actors, from wheels that the tests make."""

import fcntl
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import fastrt
from fastrt.errors import ConfigError, TaskCancelledError
from fastrt.store import client as store_client
from fastrt.tasks.packages import folder_of
from fastrt.worker import installing

pytest.importorskip("pip")  # an environment may have none

PATIENCE_S = 50.0


@pytest.fixture(scope="module")
def rt(runtime_dir):
    with fastrt.init(num_workers=1, runtime_dir=runtime_dir) as runtime:
        yield runtime


def wheel(folder, name, version):
    """Write a wheel with one module, which knows its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as out:
        for file, text in files.items():
            out.writestr(file, text)
        out.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{about}/RECORD"]))
    return str(path)


@fastrt.remote
def version():
    try:
        import fastrt_tiny
    except ImportError:
        return None, None
    return fastrt_tiny.VERSION, fastrt_tiny.__file__


@fastrt.remote
class Versions:
    def version(self):
        return version.function()


def test_tasks_and_actors_have_the_packages_of_their_lists(rt, tmp_path):
    one, two = ({"pip": [wheel(tmp_path, "fastrt_tiny", number)]} for number in ("1.0", "2.0"))
    found = [version.options(runtime_env=env).remote() for env in (one, two, None, one)]
    (first, file), second, nothing, again = fastrt.get(found, timeout=PATIENCE_S)
    assert [first, second[0], nothing[0]] == ["1.0", "2.0", None]
    assert again == (first, file)  # installed once
    actor = Versions.options(runtime_env={"pip": {"packages": one["pip"], "pip_check": False}}).remote()
    assert fastrt.get(actor.version.remote(), timeout=PATIENCE_S) == (first, file)
    fastrt.kill(actor)
    listed = tmp_path / "requirements.txt"
    listed.write_text(f"# a list\n\n{one['pip'][0]}\n")
    in_file = version.options(runtime_env={"pip": str(listed)})
    assert fastrt.get(in_file.remote(), timeout=PATIENCE_S) == (first, file)


def test_tasks_without_packages_do_not_wait_for_an_installation(rt, tmp_path):
    wanted = (wheel(tmp_path, "fastrt_tiny", "3.0"),)
    made = installing.place_of(folder_of(store_client.require()), "pip", wanted)
    made.parent.mkdir(mode=0o700, exist_ok=True)
    with open(made.with_name(made.name + ".making"), "w") as lock:
        os.fchmod(lock.fileno(), 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a process that installs them
        task = version.options(runtime_env={"pip": list(wanted)}, max_retries=0)
        refs = [task.remote() for _ in range(40)]  # more than the workers that may wait
        assert fastrt.get(version.remote(), timeout=PATIENCE_S) == (None, None)
        assert fastrt.wait(refs, timeout=0)[0] == []
        fastrt.cancel(refs[20])
        with pytest.raises(TaskCancelledError):
            fastrt.get(refs.pop(20), timeout=PATIENCE_S)
    assert {found for found, _ in fastrt.get(refs, timeout=PATIENCE_S)} == {"3.0"}


def test_processes_that_waited_for_an_installation_use_it_while_others_do(tmp_path, monkeypatch):
    """A lock belongs to an open file, so threads stand for processes here; the installer only marks its folder."""

    class Forgets(dict):
        def get(self, key):
            """None: each thread opens the lock itself."""

    def install(tool, wanted, made, site):
        made.mkdir()
        (made / "ready").write_text("0")

    def use(number):
        found.append(installing._installed(tmp_path, "pip", (f"package-{number}",)))

    monkeypatch.setattr(installing, "_install", install)
    monkeypatch.setattr(installing, "_in_use", Forgets())
    found = []  # they are kept, with their locks
    for number in range(20):
        threads = [threading.Thread(target=use, args=[number], daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(found) == 8 * (number + 1)


def test_list_that_cannot_be_installed_fails_its_tasks_with_the_words_of_pip(rt, tmp_path):
    broken = tmp_path / "fastrt_broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no wheel")
    with pytest.raises(ConfigError, match=r"pip could not install .*fastrt_broken") as caught:
        fastrt.get(version.options(runtime_env={"pip": [str(broken)]}).remote(), timeout=PATIENCE_S)
    assert "ERROR" in str(caught.value)


def test_other_version_of_a_module_that_workers_begin_with_is_refused(rt, tmp_path):
    env = {"pip": [wheel(tmp_path, "cloudpickle", "99.0")]}
    with pytest.raises(ConfigError, match="installs cloudpickle, and this worker began with another one"):
        fastrt.get(version.options(runtime_env=env).remote(), timeout=PATIENCE_S)


def test_uv_that_fails_or_is_not_there_is_named(rt):
    with pytest.raises(ConfigError, match=r"uv could not install /no/such\.whl"):
        fastrt.get(version.options(runtime_env={"uv": ["/no/such.whl"]}).remote(), timeout=PATIENCE_S)


def test_unused_installations_beyond_the_limit_are_removed_the_longest_unused_first(tmp_path):
    def makes(name, bytes, used_at):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").touch()
        ready = tmp_path / name / "ready"
        ready.write_text(f"{bytes}")
        os.utime(ready, (used_at, used_at))

    def left():
        return sorted(path.name for path in tmp_path.iterdir() if path.is_dir())

    for number in (1, 2, 3):
        makes(f"pip-{number}", 1000, number)
    makes("uv-4", 500, 4)
    holds = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True)"
    user = subprocess.Popen(
        [sys.executable, "-c", holds + "; sys.stdin.read()", str(tmp_path / "pip-1.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with user:
        user.stdout.readline()
        installing.remove_unused(tmp_path, 3500)
        assert left() == ["pip-1", "pip-2", "pip-3", "uv-4"]
        installing.remove_unused(tmp_path, 2500)
        assert left() == ["pip-1", "pip-3", "uv-4"]  # the longest unused one is in use
        installing.remove_unused(tmp_path, 0)
        assert left() == ["pip-1"]
        user.kill()
    installing.remove_unused(tmp_path, 0)  # the kernel has released the lock of the killed process
    assert left() == []


def test_requirements_are_read_where_they_are_given(tmp_path, monkeypatch):
    from fastrt.tasks.runtime_env import environment_of

    monkeypatch.chdir(tmp_path)
    Path("tiny.whl").touch()
    assert environment_of({"pip": ["tiny.whl", " requests ", "# words"]}).pip == (
        str(tmp_path / "tiny.whl"),
        "requests",
    )
