"""Tasks, actors and bundles get devices of their own. No device is needed: with `num_gpus=` names are given out."""

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

import fastrt
from fastrt._core.memory import clients
from fastrt._core.tasks import admission
from fastrt.config import RESOURCE_PARTS
from fastrt.store import client as store_client
from fastrt.util.placement_group import placement_group, remove_placement_group


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    with fastrt.init(4, "64MiB", num_gpus=2, spill_dir=tmp_path_factory.mktemp("spill")) as runtime:
        yield runtime


def seen():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@fastrt.remote(num_gpus=1)
def one(folder=None, k=0):
    """Hold a device, whose file no other process may have, until the gate is open; without a folder at once."""
    if folder is not None:
        Path(folder, f"began{k}").touch()
        files = [os.open(Path(folder, f"device{name}"), os.O_CREAT | os.O_EXCL) for name in seen().split(",")]
        while not Path(folder, "gate").exists():
            threading.Event().wait(0.002)
        for name in seen().split(","):
            Path(folder, f"device{name}").unlink()
        for file in files:
            os.close(file)
    return seen(), fastrt.get_gpu_ids(), os.getpid()


@fastrt.remote(num_cpus=0.1)
def nothing():
    return seen(), fastrt.get_gpu_ids(), os.getpid()


class Late:
    """An object that becomes the variable CUDA_VISIBLE_DEVICES of the process that unpickles it."""

    def __reduce__(self):
        return seen, ()


@fastrt.remote
class Holder:
    def __init__(self, at_first=None):
        self.at_first = at_first

    def look(self):
        return seen(), fastrt.get_gpu_ids(), os.getpid(), self.at_first


def slots():
    return clients.table(store_client.require().client.segment)


def holders():
    return admission.device_holders(store_client.require().client)


def test_two_tasks_see_different_devices_and_others_see_none(gpus, tmp_path, wait_until):
    refs = [one.remote(str(tmp_path), k) for k in range(3)]
    wait_until(lambda: len(list(tmp_path.glob("began*"))) == 2, "two tasks with a device each")
    assert {devices for _, _, devices, _, _ in holders()} == {1, 2}
    assert fastrt.get(nothing.remote())[:2] == (None, [])
    assert not (tmp_path / "began2").exists()
    (tmp_path / "gate").touch()
    found = fastrt.get(refs, timeout=30)
    assert [(str(ids[0]), len(ids)) for _, ids, _ in found] == [(names, 1) for names, _, _ in found]
    assert {names for names, _, _ in found[:2]} == {"0", "1"}
    assert len({pid for _, _, pid in found}) == 3  # each process serves one task
    assert fastrt.get_gpu_ids() == []


def test_task_with_two_devices_sees_both_and_its_code_is_loaded_with_them(gpus):
    names, argument = fastrt.get(fastrt.remote(num_gpus=2)(lambda late: (seen(), late)).remote(Late()))
    assert names == argument == "0,1"


def test_halves_share_one_device_and_leave_the_other_to_a_whole(gpus):
    halves = [Holder.options(num_gpus=0.5).remote(Late()) for _ in range(2)]
    found = fastrt.get([half.look.remote() for half in halves], timeout=30)
    assert len({names for names, *_ in found}) == 1
    assert all(names == at_first for names, _, _, at_first in found)
    (whole, _, _) = fastrt.get(one.remote(), timeout=30)
    assert whole != found[0][0]
    assert fastrt.get(Holder.remote().look.remote())[:2] == (None, [])


def test_parts_that_fit_into_no_single_device_wait(gpus, wait_until):
    first, second = (Holder.options(num_gpus=0.6).remote() for _ in range(2))
    assert len(set(fastrt.get([actor.look.remote() for actor in (first, second)])[0][:1])) == 1
    third = Holder.options(num_gpus=0.6).remote().look.remote()
    assert fastrt.wait([third], timeout=0.3)[0] == []  # 0.8 are free, on two devices
    held = fastrt.get(first.look.remote())[0]
    fastrt.kill(first)
    assert fastrt.get(third, timeout=30)[0] == held


def test_parts_of_more_than_one_device_are_refused(gpus):
    with pytest.raises(ValueError, match=r"1\.5 of GPU; it must be a whole number"):
        one.options(num_gpus=1.5).remote()
    with pytest.raises(ValueError, match=r"1\.5 of GPU"):
        placement_group([{"GPU": 1.5}])


def test_killed_worker_gives_its_device_back(gpus, tmp_path, wait_until):
    ref = one.options(num_gpus=2, max_retries=1).remote(str(tmp_path))
    wait_until((tmp_path / "device1").exists, "the task that has opened both")
    ((client, _, devices, parts, _),) = holders()
    assert (devices, parts) == (3, RESOURCE_PARTS)
    for file in tmp_path.glob("*"):  # before the death: the next attempt begins at once
        file.unlink()
    os.kill(next(row["pid"] for row in slots() if row["client"] == client), signal.SIGKILL)
    (tmp_path / "gate").touch()
    assert fastrt.get(ref, timeout=30)[0] == "0,1"


def test_bundles_keep_their_devices_and_their_tasks_use_them(gpus):
    group = placement_group([{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}])
    assert group.wait(30)
    inside = [
        one.options(
            scheduling_strategy=fastrt.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=k % 2)
        ).remote()
        for k in range(4)
    ]
    found = [names for names, _, _ in fastrt.get(inside, timeout=30)]
    assert found[0] == found[2] != found[1] == found[3]
    outside = one.remote()
    assert fastrt.wait([outside], timeout=0.2)[0] == []
    remove_placement_group(group)
    assert fastrt.get(outside, timeout=30)[0] in ("0", "1")


def test_worker_whose_code_has_opened_devices_is_replaced_first(gpus, tmp_path, monkeypatch):
    # A process that has mapped the library of the driver: a file of its name will do.
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"\0" * 4096)

    @fastrt.remote(num_cpus=0.01)
    def open_devices(path):
        import mmap

        globals()["kept"] = mmap.mmap(os.open(path, os.O_RDONLY), 4096, prot=mmap.PROT_READ)
        threading.Event().wait(0.05)
        return os.getpid()

    tainted = set(fastrt.get([open_devices.remote(str(library)) for _ in range(8)]))
    found = fastrt.get([one.remote() for _ in range(4)], timeout=30)
    assert not tainted & {pid for _, _, pid in found}


def test_no_process_is_left_that_holds_a_device(gpus, wait_until):
    wait_until(lambda: not holders(), "the processes with devices to end")
    wait_until(lambda: all(psutil.pid_exists(row["pid"]) for row in slots()), "the slots of ended processes to be free")
