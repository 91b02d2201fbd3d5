"""Devices such as GPUs: which ones this machine gives to fastrt, and how a process is restricted to some of them.

A device has a number on its node, which records in the arena use, and a name, which stands in variables such as
CUDA_VISIBLE_DEVICES. Where such a variable is set (by Slurm, a container's runtime, or the user) it names the devices
that fastrt may assign, and their names stay as they are there: indexes, UUIDs, or names of MIG slices. Otherwise the
devices of the machine are counted and named by their indexes.

Source:
    The kinds and variables of Ray's accelerators.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICES_MAX = 32  # of one node: a task's record has one bit for each
_NO_DEVICE = ("", "-1", "none", "void", "NoDevFiles")
_DEV = Path("/dev")
_HIDE = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


@dataclass(frozen=True)
class Kind:
    """One make of devices.

    Attributes:
        resource: the resource that tasks ask for.
        variable: restricts a process to some devices.
        above: a variable that restricts first, so that `variable` counts within its devices.
        prefix: of the value of `variable`.
        files: pattern of the device files to count, below /dev; "": there are none of its own.
        beside: a file below /dev without which `files` mean something else.
        opened: parts of the paths that a process has open or mapped once its library has looked for devices.
        left_alone: a variable of Ray that says not to set `variable`.
    """

    resource: str
    variable: str
    above: str = ""
    prefix: str = ""
    files: str = ""
    beside: str = ""
    opened: tuple[str, ...] = ()
    left_alone: str = ""


NVIDIA = Kind(
    "GPU", "CUDA_VISIBLE_DEVICES", files="nvidia[0-9]*", opened=("/dev/nvidia", "/libcuda.so"),
    left_alone="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
)  # fmt: skip
KINDS = (
    NVIDIA,
    Kind("GPU", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", files="dri/renderD*", beside="kfd", opened=("/dev/kfd",),
         left_alone="RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"),
    Kind("GPU", "ONEAPI_DEVICE_SELECTOR", prefix="level_zero:", opened=("/dev/dri/", "/libze_loader.so"),
         left_alone="RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR"),
    Kind("TPU", "TPU_VISIBLE_CHIPS", files="accel[0-9]*", opened=("/dev/accel", "/dev/vfio", "/libtpu.so"),
         left_alone="RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS"),
    Kind("HPU", "HABANA_VISIBLE_MODULES", files="accel/accel[0-9]*", opened=("/dev/accel/",),
         left_alone="RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES"),
    Kind("NPU", "ASCEND_RT_VISIBLE_DEVICES", files="davinci[0-9]*", opened=("/dev/davinci",),
         left_alone="RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"),
    Kind("neuron_cores", "NEURON_RT_VISIBLE_CORES", opened=("/dev/neuron",),
         left_alone="RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES"),
)  # fmt: skip
RESOURCES = tuple(dict.fromkeys(kind.resource for kind in KINDS))


@dataclass(frozen=True)
class Device:
    """One device of a node; its number is its place in the list of them.

    Attributes:
        resource: the resource that it is one of.
        variable: the variable that names it.
        name: its name there.
    """

    resource: str
    variable: str
    name: str


def detect(environ: Mapping[str, str] = os.environ, dev: Path = _DEV) -> dict[str, int]:
    """Count the devices that this process may use, by resource; resources without any are left out."""
    found = {resource: len(_there(resource, environ, dev)[1]) for resource in RESOURCES}
    return {resource: count for resource, count in found.items() if count}


def named(amounts: Mapping[str, float], environ: Mapping[str, str] = os.environ, dev: Path = _DEV) -> list[Device]:
    """Return the devices of a node that offers these amounts.

    Args:
        amounts: by resource; those of other resources than devices are ignored. More than were found are named by
            their indexes: for tests, and for devices that cannot be counted.
        environ, dev: as for `detect`.
    Raises:
        ValueError: a variable names fewer devices, or there are more than DEVICES_MAX.
    """
    found: list[Device] = []
    for resource in sorted(RESOURCES):
        count = -int(-amounts.get(resource, 0) // 1)  # a part of a device is on one of its own
        if not count:
            continue
        kind, names, is_subset = _there(resource, environ, dev)
        if count > len(names) and is_subset:
            raise ValueError(
                f"{count} of {resource}, but {kind.variable}={environ.get(kind.variable, '')!r} names {len(names)}"
            )
        names = [*names, *(str(k) for k in range(len(names), count))] if count > len(names) else names
        found += [Device(resource, kind.variable, name) for name in names[:count]]
    if len(found) > DEVICES_MAX:
        raise ValueError(f"{len(found)} devices; fastrt assigns at most {DEVICES_MAX} on one node")
    return found


def of_bits(devices: Sequence[Device], bits: int) -> list[Device]:
    """Return the devices of a record."""
    return [device for k, device in enumerate(devices) if bits >> k & 1]


def restrict(chosen: Sequence[Device], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with which a process sees only these devices of their kinds."""
    names: dict[str, list[str]] = {}
    for device in chosen:
        names.setdefault(device.variable, []).append(device.name)
    kinds = {kind.variable: kind for kind in KINDS}
    return {
        variable: kinds[variable].prefix + ",".join(there)
        for variable, there in names.items()
        if environ.get(kinds[variable].left_alone, "0") in ("", "0", "false")
    }


def hidden(devices: Sequence[Device], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with which a process sees no device that fastrt assigns, if the user wants that.

    Source:
        Ray's RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, which is off by default in Ray 2.60.
    """
    if environ.get(_HIDE, "0").lower() not in ("1", "true"):
        return {}
    return dict.fromkeys((device.variable for device in devices), "")


def are_open(chosen: Sequence[Device], proc: Path = Path("/proc/self")) -> str:
    """Return a path that shows that a process has looked for devices of these kinds already; "" if there is none.

    The libraries of devices read their variables once, so it is too late to restrict such a process.
    """
    marks = {mark for kind in KINDS for device in chosen if kind.variable == device.variable for mark in kind.opened}
    return next((path for path in _paths(proc) if any(mark in path for mark in marks)), "")


def _paths(proc: Path) -> Iterator[str]:
    """The files that a process has open or mapped."""
    with contextlib.suppress(OSError):
        for line in (proc / "maps").read_text().splitlines():
            at = line.find("/")
            if at >= 0:
                yield line[at:]
    with contextlib.suppress(OSError):
        for name in os.listdir(proc / "fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                yield os.readlink(proc / "fd" / name)


def _there(resource: str, environ: Mapping[str, str], dev: Path) -> tuple[Kind, list[str], bool]:
    """The make of a resource's devices here, their names, and whether a variable chose them."""
    kinds = [kind for kind in KINDS if kind.resource == resource]
    for kind in kinds:
        if kind.variable in environ and environ[kind.variable].startswith(kind.prefix):
            return kind, _listed(environ[kind.variable][len(kind.prefix) :]), True
        if kind.above and kind.above in environ:
            return kind, [str(k) for k in range(len(_listed(environ[kind.above])))], True
    for kind in kinds:
        names = _nvidia_names() if kind is NVIDIA and dev == _DEV else None
        if names is None:
            count = len(list(dev.glob(kind.files))) if kind.files and (dev / kind.beside).exists() else 0
            names = [str(k) for k in range(count)]
        if names:
            return kind, names, False
    return kinds[0], [], False


def _listed(text: str) -> list[str]:
    """Read "0,2", "0-3" or "GPU-...,MIG-...". Devices after one that is not there do not count."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if part in _NO_DEVICE:
            break
        several = re.fullmatch(r"(\d{1,4})-(\d{1,4})", part)
        names += [str(k) for k in range(int(several[1]), int(several[2]) + 1)] if several else [part]
    return names


def _nvidia_names() -> list[str] | None:
    """Ask NVML for the names of NVIDIA's devices; None where the package or the driver is missing.

    Returns:
        Indexes; UUIDs on a machine with MIG slices, which only UUIDs can choose.
    Source:
        NVML, by the package nvidia-ml-py.
    """
    try:
        import pynvml
    except ImportError:
        return None
    names, is_sliced = [], False
    try:
        pynvml.nvmlInit()
        for k in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(k)
            slices = list(_slices_of(device))
            is_sliced = is_sliced or bool(slices)
            names += slices or [_text(pynvml.nvmlDeviceGetUUID(device))]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return names if is_sliced else [str(k) for k in range(len(names))]


def _slices_of(device: object) -> Iterator[str]:
    """The UUIDs of a GPU's MIG slices."""
    import pynvml

    try:
        if pynvml.nvmlDeviceGetMigMode(device)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(device)
    except pynvml.NVMLError:  # a GPU that has no MIG
        return
    for k in range(most):
        with contextlib.suppress(pynvml.NVMLError):  # there are fewer
            yield _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, k)))


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
