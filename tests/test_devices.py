"""Which devices a machine gives to fastrt, by its variables and device files; both are made up here."""

import sys
import types
from pathlib import Path

import pytest

from fastrt import devices


@pytest.fixture
def dev(tmp_path):
    def make(*names):
        for name in names:
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.touch()
        return tmp_path

    return make


def names(amounts, environ, dev):
    return [(one.variable, one.name) for one in devices.named(amounts, environ, dev)]


def test_machine_without_devices_has_none(dev):
    assert devices.detect({}, dev("null", "nvidiactl")) == {}
    assert devices.named({"CPU": 2, "license": 3}, {}, dev()) == []


@pytest.mark.parametrize(
    ("files", "environ", "found"),
    [
        (["nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"], {}, {"GPU": 2}),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, {"GPU": 1}),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, {}),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, {"GPU": 1}),
        ([], {"CUDA_VISIBLE_DEVICES": "GPU-1a,MIG-2b"}, {"GPU": 2}),
        (["dri/renderD128", "dri/renderD129"], {}, {}),
        (["kfd", "dri/renderD128", "dri/renderD129"], {}, {"GPU": 2}),
        (["kfd"], {"ROCR_VISIBLE_DEVICES": "2,3"}, {"GPU": 2}),
        ([], {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,1"}, {"GPU": 2}),
        ([], {"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}, {}),
        (["accel0", "accel1", "accel2", "accel3"], {}, {"TPU": 4}),
        (["accel0", "accel1"], {"TPU_VISIBLE_CHIPS": "1"}, {"TPU": 1}),
        ([], {"NEURON_RT_VISIBLE_CORES": "4-7"}, {"neuron_cores": 4}),
    ],
)
def test_devices_are_counted_by_variables_first_and_files_second(dev, files, environ, found):
    assert devices.detect(environ, dev(*files)) == found


def test_names_are_those_of_the_variable_and_indexes_elsewhere(dev):
    assert names({"GPU": 2}, {"CUDA_VISIBLE_DEVICES": "GPU-1a, 5,7"}, dev()) == [
        ("CUDA_VISIBLE_DEVICES", "GPU-1a"), ("CUDA_VISIBLE_DEVICES", "5"),
    ]  # fmt: skip
    assert names({"GPU": 2.5}, {}, dev()) == [("CUDA_VISIBLE_DEVICES", str(k)) for k in range(3)]
    assert names({"GPU": 1, "TPU": 1}, {"ROCR_VISIBLE_DEVICES": "2,3"}, dev("accel0")) == [
        ("HIP_VISIBLE_DEVICES", "0"), ("TPU_VISIBLE_CHIPS", "0"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="names 1"):
        devices.named({"GPU": 2}, {"CUDA_VISIBLE_DEVICES": "3"}, dev())
    with pytest.raises(ValueError, match="at most 32"):
        devices.named({"GPU": 33}, {}, dev())


def test_process_is_restricted_by_the_variables_of_its_devices(dev):
    found = devices.named({"GPU": 2, "TPU": 1}, {"ONEAPI_DEVICE_SELECTOR": "level_zero:4,6"}, dev("accel0"))
    assert devices.restrict(devices.of_bits(found, 0b110), {}) == {
        "ONEAPI_DEVICE_SELECTOR": "level_zero:6", "TPU_VISIBLE_CHIPS": "0",
    }  # fmt: skip
    left = {"RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1"}
    assert devices.restrict(devices.of_bits(found, 0b111), left) == {"ONEAPI_DEVICE_SELECTOR": "level_zero:4,6"}
    assert devices.hidden(found, {}) == {}
    assert set(devices.hidden(found, {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}).values()) == {""}


def test_process_that_has_opened_or_mapped_a_device_is_known(tmp_path, dev):
    (gpu,) = devices.named({"GPU": 1}, {}, dev())
    (tmp_path / "fd").mkdir()
    (tmp_path / "maps").write_text("7f00-7f01 r--p 0 08:01 5   /usr/lib/libc.so.6\n7f01-7f02 rw-p 0 00:00 0\n")
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    assert devices.are_open([gpu], tmp_path) == ""
    (tmp_path / "fd" / "1").symlink_to("/dev/nvidiactl")
    assert devices.are_open([gpu], tmp_path) == "/dev/nvidiactl"
    (tmp_path / "maps").write_text("7f00-7f01 r--p 0 08:01 5   /usr/lib/x86_64-linux-gnu/libcuda.so.550.54\n")
    assert devices.are_open([gpu], tmp_path) == "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54"


@pytest.fixture
def nvml(monkeypatch):
    """Stand in for NVIDIA's library, which needs a driver: GPUs with the UUIDs of their MIG slices."""

    def make(gpus, error=None):
        library = types.ModuleType("pynvml")
        library.NVMLError = type("NVMLError", (Exception,), {})
        library.NVML_DEVICE_MIG_ENABLE = 1

        def init():
            if error:
                raise library.NVMLError(error)

        def slice_of(gpu, k):
            if k >= len(gpus[gpu]):
                raise library.NVMLError("not found")
            return gpus[gpu][k]

        library.nvmlInit, library.nvmlShutdown = init, lambda: None
        library.nvmlDeviceGetCount, library.nvmlDeviceGetHandleByIndex = lambda: len(gpus), lambda k: k
        library.nvmlDeviceGetMigMode = lambda gpu: (int(bool(gpus[gpu])), 0)
        library.nvmlDeviceGetMaxMigDeviceCount = lambda gpu: 7
        library.nvmlDeviceGetMigDeviceHandleByIndex = slice_of
        library.nvmlDeviceGetUUID = lambda one: one if isinstance(one, str) else f"GPU-{one}".encode()
        monkeypatch.setitem(sys.modules, "pynvml", library)

    return make


def test_nvml_counts_devices_where_it_is_there(nvml):
    nvml([[], []])
    assert devices.detect({})["GPU"] == 2
    assert [one.name for one in devices.named({"GPU": 2}, {})] == ["0", "1"]
    assert devices.detect({"CUDA_VISIBLE_DEVICES": "1"})["GPU"] == 1  # a variable comes first


def test_slices_are_named_by_their_uuids(nvml):
    nvml([["MIG-a", "MIG-b"], []])
    assert [one.name for one in devices.named({"GPU": 3}, {})] == ["MIG-a", "MIG-b", "GPU-1"]


def test_files_are_counted_where_the_driver_is_missing(nvml, dev):
    nvml([[]], error="Driver Not Loaded")
    assert devices.detect({}, dev("nvidia0", "nvidia1")) == {"GPU": 2}
    assert devices.detect({}).get("GPU", 0) == len(list(Path("/dev").glob("nvidia[0-9]*")))
