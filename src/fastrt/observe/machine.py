"""Whether this machine can run fastrt: facts that are read once, and functions that judge them.

`read_machine` reads `/proc` and `/sys` below any root, so that a test can describe a machine by a few files. Each
`check_` function gets the facts and returns one finding; none reads anything.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastrt.config import STORE_BYTES_MIN, cgroup_cpus, cgroup_memory_bytes, cgroup_processes, size_text
from fastrt.net.packages import is_of_services

FINE, NOTE, WRONG = "fine", "note", "wrong"
PYTHONS = ((3, 10), (3, 15))  # the first and the last that fastrt is built and tested for
_SMALL_SHM = 512 << 20
_GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen", "timebase")
_THP = "/sys/kernel/mm/transparent_hugepage"
_OLDEST_TIME = 1_735_689_600  # 2025-01-01: a clock before it was never set
_FILES_BESIDE = 64  # descriptors of a session, beside those for each worker
_FILES_OF_WORKER = 4
_THREADS_OF_WORKER = 4
_PROCESSES_BESIDE = 3  # the driver, the daemon and the zygote


@dataclass(frozen=True)
class Finding:
    """One line of `fastrt doctor`.

    Attributes:
        name: the subject.
        found: the facts.
        level: FINE; NOTE, fastrt works, but something could be better; or WRONG, it cannot work.
        advice: what to do; empty if nothing is to be done.
    """

    name: str
    found: str
    level: str = FINE
    advice: str = ""


@dataclass(frozen=True)
class Disk:
    """Size and free bytes of a file system."""

    size: int
    free: int


@dataclass(frozen=True)
class Machine:
    """The facts about a machine, as far as they could be read.

    Attributes:
        kernel: release of the kernel; "" if this is not Linux.
        uid: of this user.
        shm: the file system of shared memory; None: there is none.
        memory: /proc/meminfo in bytes by name.
        limits: soft and hard limit by the name in /proc/self/limits; None: unlimited.
        cpus: that the affinity allows.
        cgroup: version 2 or 1; 0: none.
        cgroup_cpus, cgroup_memory, cgroup_threads: limits of the cgroup; None: unlimited.
        threads: of this user on the machine, or of the cgroup if it is limited.
        huge: the chosen word of each file of transparent huge pages.
        ptrace_scope: of the Yama security module; None: it is not in use.
        clocksource: of the kernel.
    """

    kernel: str = ""
    uid: int = 0
    shm: Disk | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    cpus: int = 1
    cgroup: int = 0
    cgroup_cpus: float | None = None
    cgroup_memory: int | None = None
    cgroup_threads: int | None = None
    threads: int = 0
    huge: Mapping[str, str] = field(default_factory=dict)
    ptrace_scope: int | None = None
    clocksource: str = ""


def read_machine(root: Path = Path("/"), shm: Disk | None = None, uid: int | None = None) -> Machine:
    """Read the facts about a machine.

    Args:
        root: the folder that holds `proc` and `sys`.
        shm: size of the shared memory's file system, see `disk_of`.
        uid: the user; default: of this process.
    """
    uid = os.getuid() if uid is None else uid
    limits = _limits(_text(root / "proc/self/limits"))
    most, now = cgroup_processes(root)
    limited = limits.get("Max processes", (None, None))[0] is not None
    meminfo = re.findall(r"^(\S+): +(\d+) kB", _text(root / "proc/meminfo"), re.M)
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    top = root / "sys/fs/cgroup"
    return Machine(
        kernel=_text(root / "proc/sys/kernel/osrelease"),
        uid=uid,
        shm=shm,
        memory={name: int(kib) << 10 for name, kib in meminfo},
        limits=limits,
        cpus=_cpus(_text(root / "proc/self/status")),
        cgroup=2 if (top / "cgroup.controllers").exists() else int((top / "memory").is_dir() or (top / "cpu").is_dir()),
        cgroup_cpus=cgroup_cpus(root),
        cgroup_memory=cgroup_memory_bytes(root),
        cgroup_threads=most,
        threads=max(now, _threads(root / "proc", uid) if limited and uid else 0),
        huge={name: _chosen(_text(root / _THP[1:] / name)) for name in ("enabled", "shmem_enabled")},
        ptrace_scope=int(scope) if scope.isdigit() else None,
        clocksource=_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
    )


def disk_of(folder: Path) -> Disk | None:
    """Return size and free bytes of the file system of a folder; None if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Disk(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def check_kernel(machine: Machine) -> Finding:
    """Linux is needed."""
    if not machine.kernel:
        return Finding("system", "not Linux, or /proc is not mounted", WRONG, "run on Linux, with /proc mounted")
    return Finding("system", f"Linux {machine.kernel}")


def check_python(version: tuple[int, int], implementation: str) -> Finding:
    """CPython is needed, in a version that fastrt is tested with."""
    text = f"{implementation} {version[0]}.{version[1]}"
    tested = " to ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    if implementation != "cpython":
        return Finding("python", text, WRONG, f"install CPython {tested}")
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        return Finding("python", text, NOTE, f"fastrt is tested with {tested}: use one of them")
    return Finding("python", text)


def check_packages(
    requirements: list[str], versions: Mapping[str, str], python: tuple[int, int] = sys.version_info[:2]
) -> Finding:
    """Every required package must be installed, in a version within its bounds; those of services may be missing.

    Args:
        requirements: such as "protobuf<8,>=4.25"; those of extras and of other Pythons are left out.
        versions: of the installed packages, by name.
        python: the version of Python.
    """
    wrong, texts, services = [], [], []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)([^;]*)(.*)", requirement)
        if match is None or "extra" in match[3]:
            continue
        older = re.search(r'python_version < "3\.(\d+)"', match[3])
        if older is not None and python >= (3, int(older[1])):
            continue
        name, bounds = match[1], match[2].strip()
        version = versions.get(name)
        texts.append(f"{name} {version or 'missing'}")
        if version is None and is_of_services(name):
            services.append(f"'{name}{bounds}'")
        elif version is None or not all(
            _within(version, bound.strip()) for bound in bounds.split(",") if bound.strip()
        ):
            wrong.append(f"'{name}{bounds}'")
    if wrong:
        return Finding("packages", ", ".join(texts), WRONG, f"pip install {' '.join(wrong)}")
    if services:
        advice = f"for clusters and services: pip install {' '.join(services)}"
        return Finding("packages", ", ".join(texts), NOTE, advice)
    return Finding("packages", ", ".join(texts))


def check_shm(machine: Machine) -> Finding:
    """The store lies in /dev/shm; by default it takes 80 % of the free part at most."""
    more = "give it more room: docker run --shm-size=2g, or as root: mount -o remount,size=2G /dev/shm"
    if machine.shm is None:
        return Finding("/dev/shm", "missing", WRONG, "mount it: mount -t tmpfs -o size=2G tmpfs /dev/shm")
    text = f"{size_text(machine.shm.size)}, {size_text(machine.shm.free)} free"
    if machine.shm.free * 8 // 10 < STORE_BYTES_MIN:
        return Finding("/dev/shm", text, WRONG, f"remove old files there, or {more}")
    if machine.shm.free < _SMALL_SHM:
        return Finding("/dev/shm", text, NOTE, f"the store will be small, and values beyond it go to disk: {more}")
    return Finding("/dev/shm", text)


def check_memory(machine: Machine) -> Finding:
    """By default the store takes 30 % of the available memory at most."""
    total, available = machine.memory.get("MemTotal", 0), machine.memory.get("MemAvailable", 0)
    text = f"{size_text(total)}, {size_text(available)} available"
    if available * 3 // 10 < STORE_BYTES_MIN:
        return Finding("memory", text, WRONG, "end other programs: no store fits into 30 % of the available memory")
    return Finding("memory", text)


def check_huge_pages(machine: Machine) -> Finding:
    """Tables of parameter servers ask for transparent huge pages; reserved ones are not used."""
    chosen = machine.huge.get("enabled", "")
    reserved = machine.memory.get("Hugetlb", 0)
    shared = machine.huge.get("shmem_enabled") or "-"
    text = f"transparent: {chosen or 'not in this kernel'}, in shared memory: {shared}, reserved: {size_text(reserved)}"
    if reserved > machine.memory.get("MemTotal", 0) // 4:
        return Finding(
            "huge pages", text, NOTE, "fastrt does not use reserved pages: unless another program needs them, "
            "free their memory as root: sysctl vm.nr_hugepages=0"
        )  # fmt: skip
    if chosen == "never":
        return Finding("huge pages", text, NOTE, f"large tables are faster with them: echo madvise > {_THP}/enabled")
    return Finding("huge pages", text)


def check_files(machine: Machine, workers: int) -> Finding:
    """Each worker takes descriptors of the daemon; fastrt raises the soft limit to the hard one by itself."""
    soft, hard = machine.limits.get("Max open files", (None, None))
    text = f"{_limit(soft)}, may be raised to {_limit(hard)} (fastrt does it)"
    needed = _FILES_BESIDE + _FILES_OF_WORKER * workers
    if hard is not None and hard < needed:
        advice = f"{workers} workers need about {needed}: raise it (ulimit -Hn 65536, LimitNOFILE= of systemd)"
        return Finding("open files", text, WRONG, f"{advice}, or lower FASTRT_NUM_WORKERS")
    if hard is not None and hard < 4096:
        return Finding("open files", text, NOTE, "many drivers, actors or nodes need more: ulimit -Hn 65536")
    return Finding("open files", text)


def check_processes(machine: Machine, workers: int) -> Finding:
    """The limits of processes count threads too; that of the user does not hold for root."""
    most = [machine.cgroup_threads]
    if machine.uid:
        most.append(machine.limits.get("Max processes", (None, None))[0])
    limits = [limit for limit in most if limit is not None]
    if not limits:
        return Finding("processes", "unlimited")
    left = min(limits) - machine.threads
    text = f"at most {min(limits):,} processes and threads, {machine.threads:,} in use"
    raise_it = "raise it (ulimit -u, TasksMax= of systemd, docker run --pids-limit), or lower FASTRT_NUM_WORKERS"
    if left < workers + _PROCESSES_BESIDE:
        return Finding("processes", text, WRONG, f"{workers} workers do not fit: {raise_it}")
    if left < _THREADS_OF_WORKER * (workers + _PROCESSES_BESIDE):
        return Finding("processes", text, NOTE, f"threads of {workers} workers may not fit: {raise_it}")
    return Finding("processes", text)


def check_memlock(machine: Machine) -> Finding:
    """fastrt locks no memory."""
    soft = machine.limits.get("Max locked memory", (None, None))[0]
    text = "unlimited" if soft is None else size_text(soft)
    return Finding("locked memory", f"{text}; fastrt locks none, only drivers of GPUs and networks do")


def check_address_space(machine: Machine) -> Finding:
    """A limit of the address space makes the table of processes smaller."""
    soft = machine.limits.get("Max address space", (None, None))[0]
    if soft is None:
        return Finding("address space", "unlimited")
    return Finding(
        "address space", size_text(soft), NOTE, "fewer processes can attach, and large stores may not be mapped: "
        "remove the limit (ulimit -v unlimited)"
    )  # fmt: skip


def check_cpus(machine: Machine) -> Finding:
    """CPUs by affinity and by the cgroup's quota."""
    name = f"cgroup v{machine.cgroup}" if machine.cgroup else "no cgroup"
    quota = machine.cgroup_cpus
    if quota is None:
        return Finding("CPUs", f"{machine.cpus} usable; {name}: no limit")
    text = f"{machine.cpus} usable; {name}: a quota of {quota:g}"
    if quota < 1:
        return Finding("CPUs", text, NOTE, "workers are halted for most of the time: give the container a whole CPU")
    return Finding("CPUs", text)


def check_cgroup_memory(machine: Machine) -> Finding:
    """The cgroup's limit of memory; the store takes half of it at most, and counts in it."""
    name = f"cgroup v{machine.cgroup}" if machine.cgroup else "no cgroup"
    limit = machine.cgroup_memory
    if limit is None:
        return Finding("memory limit", f"{name}: no limit")
    text = f"{name}: {size_text(limit)}; values in the store count in it"
    if limit // 2 < STORE_BYTES_MIN:
        return Finding("memory limit", text, WRONG, "give the container more memory (docker run --memory=2g)")
    return Finding("memory limit", text)


def check_ptrace(machine: Machine) -> Finding:
    """fastrt does not trace processes; debuggers of running workers do."""
    scope = machine.ptrace_scope
    if scope is None or scope == 0:
        return Finding("ptrace scope", f"{'not limited' if scope is None else scope}; fastrt needs none")
    text = f"{scope}; fastrt needs none"
    if scope == 1:
        return Finding("ptrace scope", f"{text}, but gdb and py-spy must be run as root to look at a running worker")
    todo = "only root can, until the next boot" if scope >= 3 else "as root: sysctl kernel.yama.ptrace_scope=1"
    return Finding("ptrace scope", text, NOTE, f"to look at a running worker with gdb or py-spy: {todo}")


def check_clock(machine: Machine, now: float) -> Finding:
    """Waits read the clock very often; certificates between nodes have dates."""
    source = machine.clocksource or "unknown"
    text = f"source {source}"
    if now < _OLDEST_TIME:
        return Finding("clock", f"{text}, not set", WRONG, "set it: certificates between nodes are refused")
    if machine.clocksource and machine.clocksource not in _GOOD_CLOCKS:
        path = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
        return Finding("clock", text, NOTE, f"each reading is a system call; if the CPU allows it: echo tsc > {path}")
    return Finding("clock", text)


def check_all(machine: Machine, workers: int, now: float) -> list[Finding]:
    """Run every check of the machine.

    Args:
        machine: its facts.
        workers: that a session would start.
        now: seconds since 1970.
    """
    checks: list[Callable[[Machine], Finding]] = [check_kernel, check_shm, check_memory, check_huge_pages]
    more: list[Callable[[Machine], Finding]] = [check_memlock, check_address_space, check_cpus, check_cgroup_memory]
    found = [check(machine) for check in checks]
    found += [check_files(machine, workers), check_processes(machine, workers)]
    found += [check(machine) for check in more]
    return [*found, check_ptrace(machine), check_clock(machine, now)]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _limits(text: str) -> dict[str, tuple[int | None, int | None]]:
    lines = re.findall(r"^(Max [a-z ]+?) {2,}(\d+|unlimited) +(\d+|unlimited)", text, re.M)
    return {name: (_number(soft), _number(hard)) for name, soft, hard in lines}


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _cpus(status: str) -> int:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.M)
    count = 0
    for part in match[1].split(",") if match else ():
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return max(1, count)


def _threads(proc: Path, uid: int) -> int:
    """Count the threads of a user."""
    count = 0
    for path in proc.glob("[0-9]*/status"):
        text = _text(path)
        user, threads = re.search(r"^Uid:\s*(\d+)", text, re.M), re.search(r"^Threads:\s*(\d+)", text, re.M)
        if user and threads and int(user[1]) == uid:
            count += int(threads[1])
    return count


def _chosen(text: str) -> str:
    """Return the word in brackets of "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _within(version: str, bound: str) -> bool:
    """Whether a version keeps a bound such as ">=4.25"; bounds of other kinds are not checked."""
    match = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
    if match is None:
        return True
    is_older = _numbers(version) < _numbers(match[2])
    return is_older == (match[1] == "<")


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _limit(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"
