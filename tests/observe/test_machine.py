"""The facts that `fastrt doctor` reads, from made-up trees of /proc and /sys, and what it makes of them."""

import dataclasses

import pytest

from fastrt.observe.machine import (
    FINE,
    NOTE,
    WRONG,
    Disk,
    Machine,
    check_all,
    check_packages,
    check_python,
    read_machine,
)

GIB = 1 << 30
NOW = 1_790_000_000.0
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max processes             300                  300                  processes
Max open files            1024                 4096                 files
Max locked memory         8388608              8388608              bytes
Max address space         unlimited            unlimited            bytes
"""
GOOD = Machine(
    kernel="6.1.0",
    uid=1000,
    shm=Disk(8 * GIB, 7 * GIB),
    memory={"MemTotal": 16 * GIB, "MemAvailable": 12 * GIB},
    limits={"Max open files": (1024, 65536)},
    cpus=4,
    cgroup=2,
    huge={"enabled": "madvise", "shmem_enabled": "never"},
    ptrace_scope=1,
    clocksource="tsc",
)


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/sys/kernel/osrelease", "6.1.0-9-amd64\n")
    write("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugetlb:  2048 kB\n")
    write("proc/self/limits", LIMITS)
    write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-3,8\n")
    for pid, uid, threads in ((1, 0, 50), (7, 1000, 3), (9, 1000, 4)):
        write(f"proc/{pid}/status", f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nThreads:\t{threads}\n")
    write("proc/sys/kernel/yama/ptrace_scope", "2\n")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n")
    write("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    return write


def test_facts_are_read_below_any_root(write, tmp_path):
    machine = read_machine(tmp_path, Disk(GIB, GIB), uid=1000)
    assert machine.kernel == "6.1.0-9-amd64"
    assert machine.memory == {"MemTotal": 16 * GIB, "MemAvailable": 8 * GIB, "Hugetlb": 2 << 20}
    assert machine.limits["Max processes"] == (300, 300)
    assert machine.limits["Max open files"] == (1024, 4096)
    assert machine.limits["Max address space"] == (None, None)
    assert (machine.cpus, machine.threads, machine.ptrace_scope) == (5, 7, 2)
    assert machine.huge == {"enabled": "never", "shmem_enabled": "advise"}
    assert (machine.cgroup, machine.cgroup_cpus, machine.cgroup_memory) == (0, None, None)
    assert machine.clocksource == "hpet"


def test_limits_of_a_version_2_cgroup_are_found_above_the_process(write, tmp_path):
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n")
    write("sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    write("sys/fs/cgroup/a/memory.max", f"{2 * GIB}\n")
    write("sys/fs/cgroup/a/b/pids.max", "100\n")
    write("sys/fs/cgroup/a/b/pids.current", "12\n")
    machine = read_machine(tmp_path, uid=0)
    assert (machine.cgroup, machine.cgroup_cpus, machine.cgroup_memory) == (2, 1.5, 2 * GIB)
    assert (machine.cgroup_threads, machine.threads) == (100, 12)


def test_limits_of_a_version_1_cgroup_are_found(write, tmp_path):
    write("proc/self/cgroup", "5:memory:/job\n3:cpu,cpuacct:/job\n4:pids:/job\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{GIB}\n")
    write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n")
    write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    write("sys/fs/cgroup/pids/job/pids.max", "64\n")
    machine = read_machine(tmp_path, uid=0)
    assert (machine.cgroup, machine.cgroup_cpus, machine.cgroup_memory) == (1, 0.5, GIB)
    assert machine.cgroup_threads == 64


def test_empty_tree_is_no_linux(tmp_path):
    findings = {one.name: one for one in check_all(read_machine(tmp_path), 2, NOW)}
    assert findings["system"].level == WRONG
    assert findings["/dev/shm"].level == WRONG


def test_good_machine_has_nothing_to_do():
    for finding in check_all(GOOD, 4, NOW):
        assert (finding.level, finding.advice) == (FINE, ""), finding


@pytest.mark.parametrize(
    ("change", "name", "level", "advice"),
    [
        ({"kernel": ""}, "system", WRONG, "Linux"),
        ({"shm": None}, "/dev/shm", WRONG, "mount -t tmpfs"),
        ({"shm": Disk(64 << 20, 8 << 20)}, "/dev/shm", WRONG, "docker run --shm-size"),
        ({"shm": Disk(64 << 20, 64 << 20)}, "/dev/shm", NOTE, "docker run --shm-size"),
        ({"memory": {"MemAvailable": 1 << 20}}, "memory", WRONG, "end other programs"),
        ({"huge": {"enabled": "never"}}, "huge pages", NOTE, "echo madvise"),
        ({"memory": {"MemTotal": GIB, "MemAvailable": GIB, "Hugetlb": GIB // 2}}, "huge pages", NOTE, "nr_hugepages"),
        ({"limits": {"Max open files": (64, 64)}}, "open files", WRONG, "LimitNOFILE"),
        ({"limits": {"Max open files": (64, 1024)}}, "open files", NOTE, "ulimit -Hn"),
        ({"limits": {"Max processes": (40, 40)}, "threads": 38}, "processes", WRONG, "ulimit -u"),
        ({"limits": {"Max processes": (40, 40)}, "threads": 30}, "processes", NOTE, "ulimit -u"),
        ({"limits": {"Max processes": (1, 1)}, "uid": 0}, "processes", FINE, ""),
        ({"cgroup_threads": 5, "uid": 0}, "processes", WRONG, "--pids-limit"),
        ({"limits": {"Max locked memory": (0, 0)}}, "locked memory", FINE, ""),
        ({"limits": {"Max address space": (1 << 36, None)}}, "address space", NOTE, "ulimit -v"),
        ({"cgroup_cpus": 0.5}, "CPUs", NOTE, "whole CPU"),
        ({"cgroup_cpus": 2.5}, "CPUs", FINE, ""),
        ({"cgroup_memory": 16 << 20}, "memory limit", WRONG, "--memory"),
        ({"cgroup_memory": GIB}, "memory limit", FINE, ""),
        ({"ptrace_scope": 2}, "ptrace scope", NOTE, "sysctl kernel.yama"),
        ({"ptrace_scope": 3}, "ptrace scope", NOTE, "next boot"),
        ({"clocksource": "hpet"}, "clock", NOTE, "echo tsc"),
    ],
)
def test_each_fault_is_judged_and_has_advice(change, name, level, advice):
    findings = {one.name: one for one in check_all(dataclasses.replace(GOOD, **change), 4, NOW)}
    assert findings[name].level == level, findings[name]
    assert advice in findings[name].advice
    assert bool(findings[name].advice) == (level != FINE)
    assert [one.name for one in findings.values() if one.level == WRONG] == [name] * (level == WRONG)


def test_clock_that_was_never_set_is_wrong():
    assert {one.name: one.level for one in check_all(GOOD, 4, 100.0)}["clock"] == WRONG


@pytest.mark.parametrize(
    ("version", "implementation", "level"),
    [
        ((3, 10), "cpython", FINE),
        ((3, 15), "cpython", FINE),
        ((3, 16), "cpython", NOTE),
        ((3, 9), "cpython", NOTE),
        ((3, 11), "pypy", WRONG),
    ],
)
def test_python_is_judged(version, implementation, level):
    assert check_python(version, implementation).level == level


def test_package_that_is_missing_or_too_old_is_named():
    needed = ["click>=8.1.0", "protobuf<8,>=4.25", "numpy>=1.23.3", "pytest; extra == 'test'"]
    good = {"click": "8.1", "protobuf": "7.34.1rc1", "numpy": "2.0.0"}
    assert check_packages(needed, good).level == FINE
    assert "pytest" not in check_packages(needed, good).found
    finding = check_packages(needed, {**good, "protobuf": "8.0", "numpy": "1.9"})
    assert (finding.level, finding.advice) == (WRONG, "pip install 'protobuf<8,>=4.25' 'numpy>=1.23.3'")
    other = [*needed, 'posix_ipc>=1.1.0; python_version < "3.14"']
    assert check_packages(other, good, (3, 14)).level == FINE
    assert check_packages(other, good, (3, 13)).advice == "pip install 'posix_ipc>=1.1.0'"
    light = check_packages(needed, {name: version for name, version in good.items() if name != "protobuf"})
    assert (light.level, light.advice) == (NOTE, "for clusters and services: pip install 'protobuf<8,>=4.25'")
    del good["click"]
    assert check_packages(needed, good).advice == "pip install 'click>=8.1.0'"
