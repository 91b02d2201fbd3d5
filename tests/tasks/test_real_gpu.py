"""A real GPU: NVML, torch and JAX agree with fastrt about the device of a task, and its memory is free afterwards.

Machines without one skip this file.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt import devices
from fastrt.errors import WorkerCrashedError

MIB = 1 << 20
FINDS_GPU = "import torch; print(torch.cuda.is_available())"
MOST = 0.7  # of a device's memory: two processes that hold so much do not fit

pytestmark = [
    pytest.mark.timeout(300),  # the first use of CUDA on a machine takes up to a minute
    pytest.mark.filterwarnings("default"),  # torch warns of old ways of its own and of read-only arrays
]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    """A session with the GPUs of this machine; how many there are."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has no NVIDIA GPU")
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    # Not in this process, which would keep what CUDA opens.
    asked = subprocess.run([sys.executable, "-c", FINDS_GPU], capture_output=True, text=True, check=True)
    if asked.stdout != "True\n":
        pytest.skip("torch finds no GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTRT_DETECT_DEVICES", "1")
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        with fastrt.init(4, "512MiB", spill_dir=tmp_path_factory.mktemp("spill")):
            yield int(fastrt.cluster_resources()["GPU"])


@fastrt.remote(num_gpus=1)
def one():
    """The devices that the libraries see: the variable, torch's UUIDs, and JAX's number of devices."""
    import torch

    uuids = [str(torch.cuda.get_device_properties(k).uuid) for k in range(torch.cuda.device_count())]
    count = 1
    with contextlib.suppress(ImportError):
        import jax

        count = len(jax.devices("gpu"))
    return os.environ["CUDA_VISIBLE_DEVICES"], uuids, count


@fastrt.remote(num_gpus=1, max_retries=0)
def fill(folder=None):
    """Take most of the device's memory; with a folder hold it until the process is killed."""
    import torch

    size = int(MOST * torch.cuda.get_device_properties(0).total_memory)
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    held[-1] = 7
    if folder is not None:
        Path(folder, "holder.new").write_text(str(os.getpid()))
        Path(folder, "holder.new").rename(Path(folder, "holder"))
        threading.Event().wait()
    return int(held[-1])


@fastrt.remote
class Half:
    def square(self, x):
        import torch

        there = torch.from_numpy(x).to("cuda")
        return os.environ["CUDA_VISIBLE_DEVICES"], (there * there).cpu().numpy()


def test_nvml_and_the_device_files_count_the_same_devices(gpus):
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    assert gpus == pynvml.nvmlDeviceGetCount() == len(devices._nvidia_names())
    assert gpus == len(list(Path("/dev").glob(devices.NVIDIA.files)))
    pynvml.nvmlShutdown()


def test_torch_and_jax_see_exactly_the_device_of_the_task(gpus):
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    for name, uuids, count in fastrt.get([one.remote() for _ in range(2 * gpus)], timeout=240):
        (uuid,) = uuids
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(name))).removeprefix("GPU-") == uuid
        assert count == 1
    pynvml.nvmlShutdown()


def test_memory_of_a_task_that_has_ended_is_free_for_the_next(gpus):
    assert fastrt.get([fill.remote() for _ in range(3 * gpus)], timeout=240) == [7] * 3 * gpus


def test_memory_of_a_killed_worker_is_free_for_the_next(gpus, tmp_path, wait_until):
    lost = fill.options(num_gpus=gpus).remote(str(tmp_path))
    waiting = fill.remote()
    wait_until((tmp_path / "holder").exists, "the task that holds the memory", 120)
    assert fastrt.wait([waiting], timeout=0.3)[0] == []
    os.kill(int((tmp_path / "holder").read_text()), signal.SIGKILL)
    with pytest.raises(WorkerCrashedError):
        fastrt.get(lost, timeout=60)
    assert fastrt.get(waiting, timeout=120) == 7


def test_halves_compute_on_one_device_with_values_of_the_store(gpus):
    halves = [Half.options(num_gpus=0.5).remote() for _ in range(2)]
    x = fastrt.put(np.arange(MIB, dtype=np.float32))
    (first, a), (second, b) = fastrt.get([half.square.remote(x) for half in halves], timeout=240)
    assert first == second
    assert np.array_equal(a, np.arange(MIB, dtype=np.float32) ** 2)
    assert np.array_equal(a, b)


def test_worker_in_which_other_code_has_opened_the_gpu_gets_no_task_with_one(gpus):
    """CUDA reads its variable once, so a process that has opened all devices cannot be restricted to one."""

    @fastrt.remote(num_cpus=1)
    def opens():
        import torch

        return torch.cuda.device_count(), float(torch.ones(1, device="cuda")[0]), os.getpid()

    @fastrt.remote(num_gpus=1)
    def where():
        return os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()

    opened = fastrt.get([opens.remote() for _ in range(8)], timeout=240)
    assert {(count, value) for count, value, _ in opened} == {(gpus, 1.0)}
    given = fastrt.get([where.remote() for _ in range(8)], timeout=120)
    assert not {pid for _, pid in given} & {pid for _, _, pid in opened}
    assert {name for name, _ in given} <= {str(k) for k in range(gpus)}


def test_tensor_on_the_gpu_is_an_argument_and_a_result(gpus):
    @fastrt.remote(num_gpus=0.5)
    def double(tensor):
        assert tensor.is_cuda
        return tensor * 2

    @fastrt.remote(num_gpus=0.5)
    def twice():
        import torch

        made = fastrt.get(double.remote(double.remote(torch.arange(10, device="cuda"))))
        return made.is_cuda, made.tolist()

    assert fastrt.get(twice.remote(), timeout=240) == (True, [4 * k for k in range(10)])


def test_memory_of_the_store_is_page_locked_and_copied(gpus):
    @fastrt.remote(num_gpus=1)
    def copy(value):
        import torch

        runtime = torch.cuda.cudart()
        refused = int(runtime.cudaHostRegister(value.ctypes.data, value.nbytes, 8))  # cudaHostRegisterReadOnly
        there = torch.from_numpy(value).to("cuda", non_blocking=True)
        total = float(there.sum())
        runtime.cudaHostUnregister(value.ctypes.data)
        return refused, total

    value = np.arange(8 * MIB, dtype=np.float64)
    assert fastrt.get(copy.remote(value), timeout=240) == (0, float(value.sum()))
