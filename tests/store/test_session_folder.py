"""Folders of sessions that several machines or containers share: none removes what another one uses."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt.node.leftovers import sweep_sessions
from fastrt.store import client as store_client
from fastrt.store.session_folder import MARK, Beat, make_session_folder, may_be_removed
from support.disks import with_own_shm

MIB = 1 << 20
SESSION = "0123456789abcdef" * 2
# Says when it has spilled values, and reads them at the end.
CONTAINED = """
import sys
import numpy as np
import fastrt
with fastrt.init(1, 32 << 20, advice=False):
    refs = [fastrt.put(np.full(1 << 20, k)) for k in range(12)]
    print("spilled", flush=True)
    sys.stdin.readline()
    print(sum(int(fastrt.get(ref)[-1]) for ref in refs), flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    return make_session_folder(tmp_path / "spill" / SESSION, "the spill folder")


def marked(folder, *, machine=None, boot=None, shm=None):
    """Change the mark to that of another place."""
    fields = (folder / MARK).read_text().split()
    new = [given or had for given, had in zip((machine, boot, shm), fields, strict=True)]
    (folder / MARK).write_text(" ".join(new))


@pytest.fixture
def swept(folder, runtime_dir):
    def sweep():
        sweep_sessions(runtime_dir, folder.parent)
        return not folder.exists()

    return sweep


@pytest.mark.parametrize(
    ("where", "goes"),
    [
        ({}, True),
        ({"boot": "earlier"}, True),
        ({"boot": "earlier", "shm": "77"}, True),
        ({"shm": "77"}, False),
        ({"machine": "renamed"}, True),
        ({"machine": "other", "boot": "its"}, False),
        ({"machine": "other", "boot": "its", "shm": "77"}, False),
    ],
    ids=["here", "earlier boot", "earlier boot, container", "container", "host name", "other machine", "its container"],
)
def test_only_folders_of_dead_sessions_of_this_machine_are_removed(folder, swept, where, goes):
    marked(folder, **where)
    assert swept() is goes


def test_folder_of_another_machine_goes_when_it_has_given_no_sign_for_a_day(folder, swept):
    marked(folder, machine="other", boot="its")
    beat = Beat([folder, folder.with_name("missing")])
    now = time.monotonic()
    for hours, goes in ((23, False), (25, True)):
        then = time.time() - 3600 * hours
        os.utime(folder / MARK, (then, then))
        assert may_be_removed(folder) is goes
    beat.tend(now + 60)
    assert may_be_removed(folder)
    beat.tend(now + 3600)
    assert not swept()


def test_folder_without_a_mark_may_be_in_the_making_for_a_minute(folder, swept):
    (folder / MARK).unlink()
    assert not swept()
    then = time.time() - 61
    os.utime(folder, (then, then))
    assert swept()


def test_link_instead_of_a_mark_keeps_the_folder(folder, swept, tmp_path):
    mark = (folder / MARK).rename(tmp_path / "elsewhere")
    (folder / MARK).symlink_to(mark)
    assert not swept()


def test_session_in_a_container_keeps_its_files_when_another_session_starts_beside_it(runtime_dir, tmp_path):
    other = runtime_dir.with_name("other")  # each has a runtime folder of its own, and they share the spill folder
    folders = {"FASTRT_RUNTIME_DIR": str(other), "FASTRT_SPILL_DIR": str(tmp_path)}
    command = [*with_own_shm("256m"), sys.executable, "-c", CONTAINED]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **folders}, **pipes) as contained:
        assert contained.stdout.readline() == "spilled\n"
        with fastrt.init(1, 32 * MIB, runtime_dir=runtime_dir, spill_dir=tmp_path, advice=False):
            assert fastrt.get(fastrt.put(np.ones(3)))[0] == 1
            assert not spill.totals(store_client.require().client)["spilled_objects"]
        out, _ = contained.communicate("go on\n", timeout=60)
        assert (contained.returncode, out) == (0, f"{sum(range(12))}\n")
    assert not list(tmp_path.iterdir())
    assert not [path for path in other.iterdir() if path.is_dir()]
