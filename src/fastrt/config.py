"""Every setting of a runtime: its type, its default, its environment variable and its allowed values.

A setting comes from the first of: a keyword of `Config.load`, the variable `FASTRT_<NAME>`, the default. Defaults
that depend on the machine (CPUs, memory) are measured once, in `load`; a Config never changes afterwards.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastrt.devices import RESOURCES, Device, detect, named
from fastrt.errors import ConfigError
from fastrt.folders import RANDOM_BYTES, default_folder, free_bytes, takes_entries, temporary_folder
from fastrt.foreign_text import read_json

RUNTIME_FOLDER = "the runtime folder (FASTRT_RUNTIME_DIR)"  # for messages about it
SPILL_FOLDER = "the spill folder (FASTRT_SPILL_DIR)"
SHM_DIR = Path("/dev/shm")  # where POSIX segments live on Linux; shm_open(3) has no other place
_CGROUP_DIR = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# A Unix socket's name has 107 bytes; what a session adds below the folder takes at most 47 of them.
RUNTIME_BYTES_MAX = 60
_SPILL_BYTES_MAX = 200
_URL_BYTES_MAX = 1000
_PORT_MOST = (1 << 16) - 1
_LOGGING_BYTES_MAX = 16 << 10
STORE_BYTES_MIN = 16 << 20
LOG_BYTES_MIN = 1 << 20
_POPULATE_BYTES = 5 << 29  # 2.5 GiB
# The bound of lineage is Ray's, 1 GiB. Ray's counts descriptions of tasks; lineage here keeps the arguments' values,
# too, so that a lost value takes one run and not that of all before it. They may be spilled. Beside a small store the
# disk is often small, too: there they take about as much of it as the store has.
_LINEAGE_BYTES = 1 << 30
_LINEAGE_STORES = 2
_CLIENTS_MOST = 8192
_CLIENTS_DEFAULT = 4096
_CLIENTS_DENSE_MOST = 256  # clients with preallocated bits in every object's record: 96 bytes for 256 of them
_CLIENTS_BESIDE = 2  # the driver and the node daemon need slots in addition to the workers
_WORKERS_MOST = _CLIENTS_DENSE_MOST - _CLIENTS_BESIDE
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
          "ti": 1 << 40}  # fmt: skip
DESCRIPTORS_MAX = 65_536
LABELS_MAX, LABEL_NAME_MAX = 64, 128  # labels of one node; characters of a label and of its value
RESOURCE_PARTS = 10_000  # amounts are counted in whole parts of 1/10,000, so that sums are exact
_RESOURCE_NAME_MAX = 100
_RESOURCE_MOST = 10**9
_BYTES_MOST = 1 << 46
_ROUNDING = 1e-9
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Config:
    """The settings of one runtime, checked. Make one with `Config.load`.

    Attributes:
        num_workers: worker processes; default: the CPUs this process may use, by affinity and cgroup quota. With 0
            only actors and tasks with `num_cpus=0` run on the node; its other tasks run on other nodes.
        object_store_memory: size of the store in bytes; accepts "512MiB"; default: the smallest of 30 % of
            available memory, half of the cgroup's limit and 80 % of free /dev/shm.
        memory: bytes that tasks and actors with the option `memory=` share; accepts "2GiB"; default: the memory that
            is available to this process, by the machine and its cgroups, less object_store_memory.
        memory_threshold: the share of the machine's memory, or of a cgroup's limit, from which on the daemon ends a
            worker that uses much of it, before the kernel ends one: 0.95 for 95 %. 0 or 1: it never does.
        populate_bytes: free memory of the store that the daemon makes ready in the background, so that the first puts
            run at full speed; never more than leaves half of the machine's memory, of the cgroup's limit, and of
            `memory_threshold` free. 0: none; a put that finds none takes 4 MiB, and later steps up to 64 MiB.
        huge_pages: whether the store asks for huge pages; small ones are used where there are none.
        numa: where the store's memory lies on a machine with several nodes of memory: "interleave" spreads it,
            "local" puts a page on the node of the process that first writes there; nothing is populated then.
        clients_max: processes that can be attached at once, drivers and workers and actors and the daemon together;
            default: 4096, or `clients_dense` where the address space is limited (`ulimit -v`): the segment's address
            range grows with this setting, but its memory only with the processes that attach.
        objects_max: objects that can be alive at once on the node.
        tasks_max: tasks that can be unfinished at once on the node.
        resources: other resources that tasks may request, with their amounts: {"gpu": 1, "license": 2.5}. CPUs are
            set by num_workers; devices such as GPUs are found, unless an amount of them is given. As text it is JSON.
        detect_devices: whether the node has the devices that it finds; False: only those that `resources` names.
        labels: what a `label_selector` can ask for, such as {"zone": "north"}. As text it is JSON, or "zone=north".
        lineage_bytes: bytes of task records and arguments that a node of a cluster may keep to make objects of a lost
            node again; accepts "2GiB"; default: 1 GiB, or twice object_store_memory if that is less.
        keep_bytes: a task's result of at least this many bytes (and 16 KiB) stays on the node of a cluster that made
            it, until another node reads it; 0: results travel to the node that submitted the task as they are made.
        peer_idle_s: seconds after which the uplink closes a connection to another node that neither uses.
        runtime_dir: folder of the sockets, tokens and logs of sessions; rejected if another user could change it.
        spill_dir: folder for values that do not fit into memory; on a disk, not on a memory file system.
        spill_fallback: whether a value that finds no room in the store, even after others were spilled, goes to a file
            of its own in `spill_dir`, which its readers map (fallback memory). If not, it waits for room.
        spill_url: object storage for spilled values, such as s3://bucket/prefix: a URL that fsspec knows. Values that
            find no room stay in `spill_dir`. "": spilled values are files in `spill_dir`, too.
        store_patience_s: seconds that a value waits for room in a full store while all processes of the node wait too;
            it waits longer as long as one of them works, or memory becomes free.
        spin_us: microseconds that a wait spins before it sleeps; 0 never spins.
        library_threads: threads that BLAS, OpenMP and torch use in a worker; 0: as many as the task has CPUs. If the
            program sets OMP_NUM_THREADS, that value is used.
        log_to_driver: whether the driver prints the output of workers.
        log_rate: bytes a second of workers' output that this node's drivers print, four seconds' worth at once; lines
            beyond it are counted, and are only in the log files. 0: no limit.
        log_fold: whether equal lines, of several processes or of one, are printed once, with their number.
        log_bytes: bytes of the session's log files, for `fastrt logs`; the oldest lines make room. 0: no log files.
        logging: settings of the module `logging` in workers and actors: a level ("DEBUG", or a number), "json" for a
            JSON object a line, or a dictionary for `logging.config.dictConfig`, also as JSON. "": Python's defaults.
        trace: whether processes record their events from the start, for `fastrt timeline`.
        record_call_sites: whether each object records the line that created it, for `fastrt memory`.
        post_mortem: whether a task that raises, and is not run again, waits for `fastrt debug` at that frame.
        debugger: what `breakpoint()` in a task waits for: "pdb" for `fastrt debug`, "debugpy" or "debugpy:PORT" for an
            editor that speaks the Debug Adapter Protocol; without PORT, each stop takes a free one.
        advice: whether fastrt warns about known causes of slow programs.
        start_timeout_s: seconds that a runtime or a worker may take to start before it is an error.
        cleanup_timeout_s: seconds for the cleanup code of an actor that ends, before its process is killed; tasks that
            still run at the end of the session get at most one second of it.
    """

    num_workers: int
    object_store_memory: int
    memory: int
    memory_threshold: float
    populate_bytes: int
    huge_pages: bool
    numa: str
    clients_max: int
    objects_max: int
    tasks_max: int
    resources: Mapping[str, float]
    detect_devices: bool
    labels: Mapping[str, str]
    lineage_bytes: int
    keep_bytes: int
    peer_idle_s: float
    runtime_dir: Path
    spill_dir: Path
    spill_fallback: bool
    spill_url: str
    store_patience_s: float
    spin_us: int
    library_threads: int
    log_to_driver: bool
    log_rate: int
    log_fold: bool
    log_bytes: int
    logging: str
    trace: bool
    record_call_sites: bool
    post_mortem: bool
    debugger: str
    advice: bool
    start_timeout_s: float
    cleanup_timeout_s: float

    @classmethod
    def load(cls, **overrides: Any) -> Config:
        """Collect the settings from `overrides`, the environment and the machine, and check them.

        Args:
            **overrides: attributes of Config by name; None means "not given". Text is read as in the environment.
        Returns:
            The checked settings.
        Raises:
            ConfigError: an unknown name, or a value that cannot be read or is out of range.
        """
        names = [field.name for field in fields(cls)]
        for name in overrides:
            if name not in names:
                raise ConfigError(f"unknown setting {name!r}; there are: {', '.join(names)}")
        values: dict[str, Any] = {}
        for name in names:
            source, value = name, overrides.get(name)
            if value is None:
                source, value = _variable(name), os.environ.get(_variable(name)) or None
            values[name] = _default(name, values) if value is None else _SETTINGS[name].read(source, value)
        if values["num_workers"] and values["detect_devices"]:
            values["resources"] = {**detect(), **values["resources"]}
        config = cls(**values)
        config._check_together()
        return config

    @property
    def devices(self) -> list[Device]:
        """The devices of the node that tasks can get, in order of their numbers.

        Raises:
            ConfigError: a variable names fewer of them than `resources`, or there are more than a node can have.
        """
        try:
            return named(self.resources)
        except ValueError as exc:
            raise ConfigError(f"resources: {exc}") from None

    @property
    def clients_dense(self) -> int:
        """The number of clients with preallocated bits in every object's record; it always includes the workers."""
        if self.clients_max <= _CLIENTS_DENSE_MOST:
            return self.clients_max
        return _dense(self.num_workers)

    def _check_together(self) -> None:
        needed = self.num_workers + _CLIENTS_BESIDE
        if self.clients_max < needed:
            raise ConfigError(
                f"clients_max is {self.clients_max}, but {self.num_workers} workers, a driver and the daemon need "
                f"{needed}; raise clients_max or lower num_workers"
            )
        self.devices  # noqa: B018  (raises)


@dataclass(frozen=True)
class Origin:
    """A setting, and where its value comes from.

    Attributes:
        name: of the attribute of `Config`.
        variable: the environment variable that sets it.
        value: the setting's value; None if it cannot be read.
        is_default: whether the variable is not set.
        error: why the value cannot be read; empty: it can.
    """

    name: str
    variable: str
    value: Any
    is_default: bool
    error: str = ""


def origins() -> list[Origin]:
    """Return every setting of a runtime that is started here without arguments, also the wrong ones."""
    found: list[Origin] = []
    values: dict[str, Any] = {}
    for field in fields(Config):
        name, variable, error = field.name, _variable(field.name), ""
        text = os.environ.get(variable) or None
        try:
            values[name] = _default(name, values) if text is None else _SETTINGS[name].read(variable, text)
        except (ConfigError, OSError) as exc:
            error = str(exc)
        found.append(Origin(name, variable, values.get(name), text is None, error))
    return found


def raise_descriptors() -> int:
    """Raise this process's soft limit on descriptors to the hard limit, as servers do, but at most to DESCRIPTORS_MAX.

    Returns:
        The soft limit before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def _dense(workers: int) -> int:
    # Room for twice the workers (others sleep inside tasks), drivers and tools; a multiple of 64, because each 64
    # clients cost every object 24 bytes and every release another word to read.
    return min(_CLIENTS_DENSE_MOST, 64 * ((2 * workers + 32 + 63) // 64))


def parse_bytes(text: str) -> int:
    """Read a size: "4096", "512MiB", "1.5 GB", "2g". KB is 1000 bytes, KiB is 1024.

    Args:
        text: a number and, with or without a space, a unit in any case.
    Returns:
        The size in bytes.
    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for instance 536870912, 512MiB or 1.5GB")
    return int(float(match[1]) * _UNITS[match[2] or ""]) if "." in match[1] else int(match[1]) * _UNITS[match[2] or ""]


def size_text(nbytes: float) -> str:
    """Write a size for people: "1.5 MiB", "12 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes:.0f} B"


def read_resources(source: str, value: Any) -> dict[str, float]:
    """Check amounts of resources by name.

    Args:
        source: name of the setting, for messages.
        value: a mapping, or JSON of one. "gpu" in any case becomes "GPU".
    Returns:
        The amounts; those of 0 are left out, except of devices.
    Raises:
        ConfigError: it is not a mapping, or an amount is not a multiple of 0.0001.
    """
    if isinstance(value, str):
        try:
            value = read_json(value, source)
        except ValueError:
            raise _refuse(source, value, 'must be JSON such as {"gpu": 1}') from None
    if not isinstance(value, Mapping):
        raise _refuse(source, value, "must be amounts by name")
    found: dict[str, float] = {}
    for name, amount in value.items():
        if not isinstance(name, str) or not name or len(name) > _RESOURCE_NAME_MAX:
            raise _refuse(source, name, f"a resource's name must be text of at most {_RESOURCE_NAME_MAX} characters")
        if "@" in name:
            raise _refuse(source, name, "a resource's name must not contain @: placement groups use it")
        if name.upper() == "CPU":
            raise _refuse(source, dict(value), "CPUs are not set in resources: say num_cpus")
        if name == "memory":
            raise _refuse(source, dict(value), "memory is not set in resources: say memory")
        checked = read_amount(f"{source}[{name!r}]", amount)
        if checked or name.upper() == "GPU" or name in RESOURCES:  # 0: those that are found are not for tasks
            found["GPU" if name.upper() == "GPU" else name] = checked
    return found


def read_labels(source: str, value: Any) -> dict[str, str]:
    """Check labels of a node.

    Args:
        source: name of the setting, for messages.
        value: values by label, JSON of them, or text such as "zone=north,disk=fast".
    Raises:
        ConfigError: it is not that; there are more than 64; or a text is empty, longer than 128 characters, or has
            characters that a selector cannot name: `!`, `,`, `(`, `)`, and those that cannot be printed.
    """
    if isinstance(value, str):
        try:
            value = read_json(value, source) if value.startswith("{") else _pairs(value)
        except ValueError:
            raise _refuse(
                source, value, 'must be like zone=north,disk=fast, or JSON such as {"zone": "north"}'
            ) from None
    if not isinstance(value, Mapping):
        raise _refuse(source, value, "must be values by label")
    if len(value) > LABELS_MAX:
        raise _refuse(source, dict(value), f"must be at most {LABELS_MAX} labels")
    for text in (text for pair in value.items() for text in pair):
        if not isinstance(text, str) or not is_label(text):
            raise _refuse(
                source, text, f"a label must be text of 1 to {LABEL_NAME_MAX} characters, none of them among !,()"
            )
    return dict(value)


def is_label(text: str) -> bool:
    """Whether a text can be a label, or the value of one."""
    return (
        0 < len(text) <= LABEL_NAME_MAX and text.isprintable() and text == text.strip() and not set(text) & set("!,()")
    )


def _pairs(text: str) -> dict[str, str]:
    """Read "zone=north,disk=fast".

    Raises:
        ValueError: a part has no "=".
    """
    parts = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in parts):
        raise ValueError("a label without a value")
    return {label.strip(): value.strip() for label, _, value in parts}


def read_amount(source: str, value: Any) -> float:
    """Check one amount of a resource; it is rounded down to parts of 0.0001: three thirds are not more than one.

    Raises:
        ConfigError: it is not a number, is negative, or less than a part.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _RESOURCE_MOST:
        raise _refuse(source, value, f"must be a number from 0 to {_RESOURCE_MOST}")
    parts = int((value + _ROUNDING) * RESOURCE_PARTS)
    if value and not parts:
        raise _refuse(source, value, f"the smallest part of a resource is {1 / RESOURCE_PARTS}")
    return parts / RESOURCE_PARTS


def read_memory(source: str, value: Any) -> int:
    """Check an amount of memory, and return it in whole bytes.

    Raises:
        ConfigError: it is no number from 0 to 64 TiB.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _BYTES_MOST:
        raise _refuse(source, value, f"must be a number of bytes from 0 to {_BYTES_MOST}")
    return int(value)


def cpu_count() -> int:
    """Count the CPUs that this process may use: affinity, then the cgroup's quota rounded up.

    Returns:
        At least 1.
    """
    usable = len(os.sched_getaffinity(0))
    quota = cgroup_cpus()
    return max(1, usable if quota is None else min(usable, math.ceil(quota)))


def default_store_bytes() -> int:
    """Choose the store's size: min(30 % of available memory, half the cgroup's limit, 80 % of free /dev/shm).

    Returns:
        Bytes, a multiple of 1 MiB.
    Raises:
        ConfigError: so little is free in /dev/shm or in memory that no useful store fits.
    """
    available = _meminfo_bytes("MemAvailable")
    free = free_bytes(SHM_DIR)
    limit = cgroup_memory_bytes()
    store = min(available * 3 // 10, free * 8 // 10, *([] if limit is None else [limit // 2]))
    store -= store % (1 << 20)
    if store < STORE_BYTES_MIN:
        raise ConfigError(
            f"no room for an object store: {available >> 20} MiB of memory available, {free >> 20} MiB free in "
            f"{SHM_DIR}, {STORE_BYTES_MIN >> 20} MiB needed at least; free some, or enlarge {SHM_DIR} "
            "(docker run --shm-size=1g)"
        )
    return store


def _default_memory(store: int) -> int:
    """Choose the memory for tasks and actors: what the machine and the cgroups leave, less the store; whole MiB."""
    free = min(level.limit - level.used for level in memory_levels())
    return max(0, free - store) >> 20 << 20


def default_runtime_dir() -> Path:
    """Choose the sessions' folder: $XDG_RUNTIME_DIR/fastrt, else fastrt-<uid> in the temporary folder, else in /tmp.

    A folder is skipped if this process cannot create files in it (after `su`, in cron and batch jobs `$XDG_RUNTIME_DIR`
    may belong to another user, or be gone), or if its path is too long for the sockets below it.

    Returns:
        The path. If another user has taken the name, it ends in another one: see `fastrt.folders.default_folder`.
    Raises:
        ConfigError: this process can create files in none of them.
    """
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and _fits(xdg, "fastrt", RUNTIME_BYTES_MAX) and _is_mine(xdg):
        return Path(xdg, "fastrt")
    name = f"fastrt-{os.getuid()}"
    temporary = temporary_folder()
    return default_folder(temporary if _fits(temporary, name, RUNTIME_BYTES_MAX) else "/tmp", name)


def default_spill_dir() -> Path:
    """Choose the folder of spilled values: fastrt-spill-<uid> in $TMPDIR, else in /var/tmp, which is kept on a disk.

    `$TMPDIR` is skipped if this process cannot create files in it, or if its path is too long.

    Returns:
        The path. If another user has taken the name, it ends in another one: see `fastrt.folders.default_folder`.
    """
    name = f"fastrt-spill-{os.getuid()}"
    temporary = os.environ.get("TMPDIR", "")
    return default_folder(temporary if _fits(temporary, name, _SPILL_BYTES_MAX) else "/var/tmp", name)


def _fits(parent: str, name: str, bytes_max: int) -> bool:
    """Whether this process can create the folder `name` in `parent`, and its path stays short enough."""
    return takes_entries(parent) and len(os.fsencode(Path(parent, name))) + RANDOM_BYTES <= bytes_max


def _is_mine(folder: str) -> bool:
    try:
        return os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def _variable(name: str) -> str:
    return f"FASTRT_{name.upper()}"


def _default(name: str, values: Mapping[str, Any]) -> Any:
    """Return a setting's default; `values` are those of the settings before it."""
    if name == "clients_max" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return _dense(values.get("num_workers", 1))
    if name == "memory":
        return _default_memory(values.get("object_store_memory", 0))
    if name == "lineage_bytes":
        return min(_LINEAGE_BYTES, _LINEAGE_STORES * values.get("object_store_memory", _LINEAGE_BYTES))
    return _SETTINGS[name].default()


@dataclass(frozen=True)
class _Setting:
    read: Callable[[str, Any], Any]
    default: Callable[[], Any]


def _refuse(source: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{source}={value!r}: {wanted}")


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(source: str, value: Any) -> int:
        try:
            number = int(value, 10) if isinstance(value, str) else value
        except ValueError:
            raise _refuse(source, value, "must be a whole number") from None
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise _refuse(source, value, "must be a whole number")
        number = int(number)
        if not low <= number <= high:
            raise _refuse(source, value, f"must be from {low} to {high}")
        return number

    return read


def _size_from(low: int) -> Callable[[str, Any], int]:
    def read(source: str, value: Any) -> int:
        if isinstance(value, str):
            try:
                value = parse_bytes(value)
            except ConfigError as exc:
                raise ConfigError(f"{source}: {exc}") from None
        return _integer(low, _BYTES_MOST)(source, value)

    return read


def _log_bytes(source: str, value: Any) -> int:
    size = _size_from(0)(source, value)
    if 0 < size < LOG_BYTES_MIN:
        raise _refuse(source, value, f"must be 0 or at least {LOG_BYTES_MIN}")
    return size


def _flag(source: str, value: Any) -> bool:
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise _refuse(source, value, "must be true or false")
    return value


def _one_of(*words: str) -> Callable[[str, Any], str]:
    def read(source: str, value: Any) -> str:
        if value not in words:
            raise _refuse(source, value, f"must be {' or '.join(words)}")
        return str(value)

    return read


def _debugger(source: str, value: Any) -> str:
    found = re.fullmatch(r"pdb|debugpy(?::([1-9][0-9]{0,4}))?", value) if isinstance(value, str) else None
    if found is None or int(found[1] or 0) > _PORT_MOST:
        raise _refuse(source, value, f"must be pdb, debugpy, or debugpy:PORT with a port from 1 to {_PORT_MOST}")
    if value != "pdb" and importlib.util.find_spec("debugpy") is None:
        raise _refuse(source, value, "needs debugpy: pip install 'fastrt[debugpy]'")
    return str(value)


def _logging(source: str, value: Any) -> str:
    """Read settings of `logging` as text: "", "json", the number of a level, or the JSON of a dictionary."""
    wanted = 'must be a level such as "INFO", "json", or a dictionary for logging.config.dictConfig'
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("{"):
            try:
                value = read_json(text, source, bytes_max=_LOGGING_BYTES_MAX)
            except ValueError as exc:
                raise _refuse(source, value, f"{wanted}: {exc}") from None
        elif text.lower() in ("", "json"):
            return text.lower()
        else:
            level = int(text) if text.isdecimal() else logging.getLevelName(text.upper())
            value = level if isinstance(level, int) else value  # an unknown name gives a text
    if isinstance(value, Mapping):
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as exc:
            raise _refuse(
                source,
                value,
                f"the dictionary travels to workers as JSON, so its values must be texts, numbers, ...: {exc}",
            ) from None
        if value.get("version") != 1:
            raise _refuse(source, value, "the dictionary needs 'version': 1, the only one that dictConfig knows")
        if len(text) > _LOGGING_BYTES_MAX:
            raise _refuse(source, text[:80], f"the dictionary has more than {_LOGGING_BYTES_MAX} characters as JSON")
        return text
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1000:
        raise _refuse(source, value, wanted)
    return str(value)


def _seconds(source: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        raise _refuse(source, value, "must be a number of seconds") from None
    if not 0 < number <= 86400:
        raise _refuse(source, value, "must be more than 0 and at most 86400 seconds")
    return number


def _share(source: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        raise _refuse(source, value, "must be a number from 0 to 1") from None
    if not 0 <= number <= 1:
        raise _refuse(source, value, "must be from 0 to 1")
    return number


def _url(source: str, value: Any) -> str:
    if not isinstance(value, str) or (value and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\0\n]+", value)):
        raise _refuse(source, value, "must be a URL such as s3://bucket/prefix")
    if len(value.encode()) > _URL_BYTES_MAX:
        raise _refuse(source, value, f"must be at most {_URL_BYTES_MAX} bytes long")
    if value and importlib.util.find_spec("fsspec") is None:
        raise _refuse(source, value, "needs fsspec: pip install 'fastrt[spill]', and its package for the URL's scheme")
    return value


def _path(bytes_max: int, why: str) -> Callable[[str, Any], Path]:
    def read(source: str, value: Any) -> Path:
        if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
            raise _refuse(source, value, "must be a path")
        path = Path(os.path.abspath(Path(value).expanduser()))
        if len(os.fsencode(path)) > bytes_max:
            raise _refuse(source, value, f"must be at most {bytes_max} bytes long, {why}")
        return path

    return read


_SETTINGS: Mapping[str, _Setting] = {
    "num_workers": _Setting(_integer(0, _WORKERS_MOST), lambda: min(cpu_count(), _WORKERS_MOST)),
    "object_store_memory": _Setting(_size_from(STORE_BYTES_MIN), default_store_bytes),
    "memory": _Setting(_size_from(0), lambda: 0),  # `_default` measures it
    "memory_threshold": _Setting(_share, lambda: 0.95),
    "populate_bytes": _Setting(_size_from(0), lambda: _POPULATE_BYTES),
    "huge_pages": _Setting(_flag, lambda: True),
    "numa": _Setting(_one_of("interleave", "local"), lambda: "interleave"),
    "clients_max": _Setting(_integer(1 + _CLIENTS_BESIDE, _CLIENTS_MOST), lambda: _CLIENTS_DEFAULT),
    "objects_max": _Setting(_integer(1 << 10, 1 << 28), lambda: 1 << 22),
    "tasks_max": _Setting(_integer(1 << 10, 1 << 26), lambda: 1 << 21),
    "resources": _Setting(read_resources, dict),
    "detect_devices": _Setting(_flag, lambda: True),
    "labels": _Setting(read_labels, dict),
    "lineage_bytes": _Setting(_size_from(0), lambda: _LINEAGE_BYTES),  # `_default` looks at the store
    "keep_bytes": _Setting(_size_from(0), lambda: 100 << 10),
    "peer_idle_s": _Setting(_seconds, lambda: 60.0),
    "runtime_dir": _Setting(
        _path(RUNTIME_BYTES_MAX, "or the paths of the sockets below it are too long"), default_runtime_dir
    ),
    "spill_dir": _Setting(_path(_SPILL_BYTES_MAX, "or it does not fit into the segment"), default_spill_dir),
    "spill_fallback": _Setting(_flag, lambda: True),
    "spill_url": _Setting(_url, lambda: ""),
    "store_patience_s": _Setting(_seconds, lambda: 10.0),
    "spin_us": _Setting(_integer(0, 100_000), lambda: 100),
    "library_threads": _Setting(_integer(0, 1 << 16), lambda: 0),
    "log_to_driver": _Setting(_flag, lambda: True),
    "log_rate": _Setting(_size_from(0), lambda: 4 << 20),
    "log_fold": _Setting(_flag, lambda: True),
    "log_bytes": _Setting(_log_bytes, lambda: 64 << 20),
    "logging": _Setting(_logging, lambda: ""),
    "trace": _Setting(_flag, lambda: False),
    "record_call_sites": _Setting(_flag, lambda: False),
    "post_mortem": _Setting(_flag, lambda: False),
    "debugger": _Setting(_debugger, lambda: "pdb"),
    "advice": _Setting(_flag, lambda: True),
    "start_timeout_s": _Setting(_seconds, lambda: 30.0),
    "cleanup_timeout_s": _Setting(_seconds, lambda: 5.0),
}


def _meminfo_bytes(field: str, root: Path | None = None) -> int:
    for line in ((root or Path("/")) / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) << 10
    raise ConfigError(f"/proc/meminfo has no {field}; set object_store_memory")


def cgroup_cpus(root: Path | None = None) -> float | None:
    """The CPUs that the cgroup's quota allows, version 1 or 2; None: no limit.

    Args:
        root: the folder with `proc` and `sys` to read; None: this machine's.
    """
    quotas = []
    for text in _read_all(*[folder / "cpu.max" for folder in _cgroup_dirs("", root)]):
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            quotas.append(int(quota) / int(period or 100_000))
    for folder in [*_cgroup_dirs("cpu", root), _cgroup_root(root) / "cpu"]:
        version1 = _read_all(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        if len(version1) == 2 and int(version1[0]) > 0:
            quotas.append(int(version1[0]) / int(version1[1]))
    return min(quotas, default=None)


def cgroup_memory_bytes(root: Path | None = None) -> int | None:
    """The cgroup's limit of memory, version 1 or 2; None: no limit. `root` is as for `cgroup_cpus`."""
    return _least(
        *[folder / "memory.max" for folder in _cgroup_dirs("", root)],
        *[f / "memory.limit_in_bytes" for f in [*_cgroup_dirs("memory", root), _cgroup_root(root) / "memory"]],
    )


@dataclass(frozen=True)
class MemoryLevel:
    """A limit of memory that concerns this process, and how much of it is used.

    Attributes:
        where: "this machine", or the cgroup's folder.
        used, limit: bytes; pages of files that the kernel can drop at once are not counted as used.
    """

    where: str
    used: int
    limit: int


def memory_levels(root: Path | None = None) -> list[MemoryLevel]:
    """Return the machine's memory, and that of each cgroup with a limit; `root` is as for `cgroup_cpus`."""
    total = _meminfo_bytes("MemTotal", root)
    levels = [MemoryLevel("this machine", total - _meminfo_bytes("MemAvailable", root), total)]
    version1 = [*_cgroup_dirs("memory", root), _cgroup_root(root) / "memory"]
    for folder, limit_file, usage_file in [
        *[(folder, "memory.max", "memory.current") for folder in _cgroup_dirs("", root)],
        *[(folder, "memory.limit_in_bytes", "memory.usage_in_bytes") for folder in version1],
    ]:
        limit = _least(folder / limit_file)
        if limit is not None:
            stat = dict(line.split()[:2] for text in _read_all(folder / "memory.stat") for line in text.splitlines())
            used = (_least(folder / usage_file) or 0) - int(stat.get("inactive_file", 0))
            levels.append(MemoryLevel(str(folder), used, limit))
    return levels


def spare_memory(root: Path | None = None, share: float = 0.5) -> int:
    """Return the bytes that can be used until a share of the machine's memory, or of a cgroup's limit, is used.

    Args:
        root: as for `cgroup_cpus`.
    Returns:
        0 if it is used already. Pages of files that the kernel can drop at once count as free.
    """
    return max(0, min(int(level.limit * share) - level.used for level in memory_levels(root)))


def cgroup_processes(root: Path | None = None) -> tuple[int | None, int]:
    """The cgroup's limit of processes and threads, None for no limit, and how many there are."""
    for folder in [*_cgroup_dirs("", root), *_cgroup_dirs("pids", root)]:
        limit, now = _least(folder / "pids.max"), _least(folder / "pids.current")
        if limit is not None:
            return limit, now or 0
    return None, 0


def _cgroup_root(root: Path | None) -> Path:
    return _CGROUP_DIR if root is None else root / _CGROUP_DIR.relative_to("/")


def _cgroup_dirs(controller: str, root: Path | None = None) -> list[Path]:
    """List the folders of this process's cgroup up to the root: any of them may hold the tightest limit.

    Args:
        controller: of version 1, such as "memory"; "" for version 2. A hierarchy of version 1 may have several.
        root: as for `cgroup_cpus`.
    """
    try:
        lines = (_OWN_CGROUPS if root is None else root / _OWN_CGROUPS.relative_to("/")).read_text().splitlines()
    except OSError:
        return []
    for line in lines:  # number:controllers:path
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            top = _cgroup_root(root) / controllers
            own = top / path.lstrip("/")
            return [own, *[p for p in own.parents if p == top or top in p.parents]]
    return []


def _read_all(*paths: Path) -> list[str]:
    """Read the control files that exist: the root group has no limits, and many hosts have no version 1 files."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text().strip())
        except OSError:
            continue
    return texts


def _least(*paths: Path) -> int | None:
    # Version 1 writes "no limit" as a number near 2^63.
    return min((int(text) for text in _read_all(*paths) if text.isdigit() and int(text) < 1 << 60), default=None)
