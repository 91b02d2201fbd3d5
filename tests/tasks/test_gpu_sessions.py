"""Devices of sessions of their own: after the death of a daemon, and by the user's variables."""

import os
import signal
import threading
from pathlib import Path

import pytest

import fastrt
from fastrt.errors import ConfigError
from fastrt.store import client as store_client


def seen():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@fastrt.remote(num_gpus=1)
def one(folder=None):
    if folder is not None:
        Path(folder, "began").touch()
        while not Path(folder, "gate").exists():
            threading.Event().wait(0.002)
    return seen(), fastrt.get_gpu_ids()


@fastrt.remote(num_cpus=0.1)
def nothing():
    return seen(), fastrt.get_gpu_ids()


@fastrt.remote
class Holder:
    def look(self):
        return seen()


def test_killed_daemon_leaves_devices_with_their_holders(tmp_path, wait_until):
    with fastrt.init(3, "64MiB", num_gpus=3, spill_dir=tmp_path):
        actor = Holder.options(num_gpus=1).remote()
        mine = fastrt.get(actor.look.remote(), timeout=30)
        task = one.remote(str(tmp_path))
        wait_until((tmp_path / "began").exists, "the task")
        old = store_client.require().client.segment.daemon[0]
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: store_client.require().client.segment.daemon[0] not in (old, 0), "another daemon")
        (third, _) = fastrt.get(one.remote(), timeout=30)
        waiting = one.options(num_gpus=2).remote()
        assert fastrt.wait([waiting], timeout=0.3)[0] == []
        (tmp_path / "gate").touch()
        names = fastrt.get(task, timeout=30)[0]
        assert {mine, names, third} == {"0", "1", "2"}
        assert mine not in fastrt.get(waiting, timeout=30)[0].split(",")


def test_subset_that_the_user_or_slurm_gives_is_kept_by_its_names(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a1b,3")
    monkeypatch.setenv("FASTRT_DETECT_DEVICES", "1")
    with fastrt.init(2, "64MiB", spill_dir=tmp_path):
        assert fastrt.cluster_resources()["GPU"] == 2
        names, ids = fastrt.get(one.options(num_gpus=2).remote())
        assert (names, ids) == ("GPU-5a1b,3", ["GPU-5a1b", 3])
        assert fastrt.get(fastrt.remote(lambda: fastrt.runtime_context().get_accelerator_ids()["GPU"]).remote()) == []
        assert fastrt.get(nothing.remote())[0] == "GPU-5a1b,3"  # as in Ray: left alone
    with pytest.raises(ConfigError, match="3 of GPU, but CUDA_VISIBLE_DEVICES='GPU-5a1b,3' names 2"):
        fastrt.init(2, "64MiB", num_gpus=3)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    with fastrt.init(2, "64MiB", num_gpus=1, spill_dir=tmp_path):
        assert fastrt.get(nothing.remote())[0] == ""
        assert fastrt.get(one.remote())[0] == "GPU-5a1b"
    with fastrt.init(2, "64MiB", num_gpus=0, spill_dir=tmp_path):
        assert "GPU" not in fastrt.cluster_resources()
