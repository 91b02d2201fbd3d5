"""Kills for lack of memory: real ones in a memory control group, and the kernel's counters in all their forms."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastrt.config import MemoryLevel
from fastrt.node.janitor import explain
from fastrt.node.memory_limit import KillCounters
from fastrt.node.memory_monitor import Candidate, above, choose, own_bytes, pause_s

VMSTAT = "nr_free_pages 5820931\noom_kill {}\nnuma_hit 0\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
MOUNT = "31 23 0:28 {root} {top} rw,relatime shared:9 - {kind} {kind} {options}\n"
GROUP_BYTES = 256 << 20


class Machine:
    """A made-up /proc, and control groups in the places that it names."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.top = folder / "cgroup"
        self.write(self.proc / "vmstat", VMSTAT.format(3))
        self.mount("", "")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mount(self, mounts: str, groups: str) -> None:
        self.write(self.proc / "self/mountinfo", mounts)
        self.write(self.proc / "self/cgroup", groups)

    def version_2(self) -> None:
        self.mount(MOUNT.format(root="/", top=self.top, kind="cgroup2", options="rw"), "0::/a/b\n")
        for name in ("a", "a/b"):
            self.write(self.top / name / "memory.events", EVENTS.format(1))

    def version_1(self, root: str = "/") -> None:
        mounts = MOUNT.format(root="/", top="/nowhere", kind="cgroup2", options="rw")
        mounts += MOUNT.format(root="/", top="/nowhere", kind="cgroup", options="rw,cpu")
        mounts += MOUNT.format(root=root, top=self.top, kind="cgroup", options="rw,memory")
        self.mount(mounts, "4:cpu:/other\n3:memory:/docker/17\n0::/\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_kill_is_no_story(machine):
    machine.version_2()
    counters = KillCounters(0.0, machine.proc)
    counters.look(1.0)
    assert counters.story() == ""


def test_kill_in_the_own_group_is_told_with_its_limit(machine):
    machine.version_2()
    machine.write(machine.top / "a/b/memory.max", f"{512 << 20}\n")
    counters = KillCounters(0.0, machine.proc)
    machine.write(machine.top / "a/b/memory.events", EVENTS.format(2))
    machine.write(machine.top / "a/memory.events", EVENTS.format(2))
    machine.write(machine.proc / "vmstat", VMSTAT.format(4))
    group = machine.top / "a/b"
    assert f"control group for lack of memory at that moment ({group}, limited to 512 MiB)" in counters.story()


def test_kill_in_a_group_above_is_told(machine):
    machine.version_2()
    machine.write(machine.top / "a/memory.max", "max\n")
    counters = KillCounters(0.0, machine.proc)
    machine.write(machine.top / "a/memory.events", EVENTS.format(2))
    assert f"({machine.top}/a, without a limit of its own)" in counters.story()


@pytest.mark.parametrize(("root", "folder"), [("/", "docker/17"), ("/docker", "17"), ("/docker/17", "."), ("/x", ".")])
def test_version_1_is_read_where_it_is_mounted(machine, root, folder):
    machine.version_1(root)
    machine.write(machine.top / folder / "memory.oom_control", CONTROL.format(0))
    machine.write(machine.top / folder / "memory.limit_in_bytes", f"{9 << 20}\n")
    counters = KillCounters(0.0, machine.proc)
    machine.write(machine.top / folder / "memory.oom_control", CONTROL.format(1))
    assert "limited to 9 MiB" in counters.story()


def test_kill_that_no_group_of_ours_counted_is_told_of_the_machine(machine):
    counters = KillCounters(0.0, machine.proc)
    machine.write(machine.proc / "vmstat", VMSTAT.format(4))
    assert counters.story() == "the kernel killed a process of this machine for lack of memory at that moment"


def test_kill_is_forgotten_after_some_seconds(machine):
    counters = KillCounters(0.0, machine.proc)
    machine.write(machine.proc / "vmstat", VMSTAT.format(4))
    for now in (0.1, 1.0, 4.0, 5.5):
        counters.look(now)
    assert counters.story() != ""
    for now in (8.0, 10.0, 12.0):
        counters.look(now)
    assert counters.story() == ""


@pytest.mark.parametrize("text", ["", "oom_kill", "oom_kill many\n"], ids=["empty", "short", "no number"])
def test_kernel_without_the_counter_is_no_story(machine, text):
    machine.write(machine.proc / "vmstat", text)
    (machine.proc / "self/mountinfo").unlink()
    assert KillCounters(0.0, machine.proc).story() == ""


def test_only_a_kill_signal_can_come_from_lack_of_memory():
    assert explain(9, "the kernel did it") == "was killed by signal 9 (SIGKILL, Killed); the kernel did it"
    assert explain(11, "the kernel did it") == "was killed by signal 11 (SIGSEGV, Segmentation fault)"
    assert explain(0, "the kernel did it") == "exited with code 0"


# ---- the real thing ----


def own_folder(top: Path, controller: str) -> Path:
    """This process's folder in a hierarchy, or its top where that is elsewhere."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controller in controllers.split(",") and (top / own.lstrip("/")).is_dir():
            return top / own.lstrip("/")
    return top


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group with a small limit."""
    version_1 = own_folder(Path("/sys/fs/cgroup/memory"), "memory")
    # A version 2 group with processes in it can have no limited children; its neighbours can.
    version_2 = [own_folder(Path("/sys/fs/cgroup"), ""), Path("/sys/fs/cgroup")]
    for parent, limit in [(version_1, "memory.limit_in_bytes"), *((folder, "memory.max") for folder in version_2)]:
        folder = parent / f"fastrt-test-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(GROUP_BYTES))
                for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
                    with contextlib.suppress(OSError):
                        (folder / swap).write_text(str(GROUP_BYTES if "memsw" in swap else 0))
                yield folder
                return
            finally:
                os.rmdir(folder)  # its processes are gone, or this fails
    pytest.skip("no memory control group can be made here")


KILLED = """
    import os, signal
    import fastrt

    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
        file.write("0")


    @fastrt.remote(max_retries=0, name="greedy")
    def greedy(bytes_wanted):
        return len(bytearray(os.urandom(1)) * bytes_wanted)


    @fastrt.remote(max_retries=0, name="hit")
    def hit():
        os.kill(os.getpid(), signal.SIGKILL)


    def failure(ref):
        try:
            return fastrt.get(ref, timeout=30)
        except fastrt.WorkerCrashedError as error:
            return error


    with fastrt.init(num_workers=1, object_store_memory="16MiB", memory_threshold=0):  # only the kernel ends processes
        print("hit:", failure(hit.remote()))
        print("modest:", failure(greedy.remote(1 << 20)))
        print("greedy:", failure(greedy.remote(1 << 30)))
        print("modest:", failure(greedy.remote(1 << 20)))
"""


def test_worker_killed_for_memory_says_so(program, group):
    out, _ = program(KILLED, GROUP=str(group)).finish()
    hit, before, greedy, after = out.splitlines()
    assert "signal 9 (SIGKILL, Killed)" in hit
    assert "memory" not in hit
    assert before == after == f"modest: {1 << 20}"
    assert "task 'greedy' was given up after attempt 1" in greedy
    assert "was killed by signal 9 (SIGKILL, Killed)" in greedy
    assert f"for lack of memory at that moment ({group}, limited to {GROUP_BYTES >> 20} MiB)" in greedy


ENDED = """
    import os, threading
    import fastrt
    import fastrt.exceptions

    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
        file.write("0")


    @fastrt.remote(max_retries=1)
    def hungry():
        # With what the session takes, 180 MiB are above the threshold and below the limit.
        pieces, pause = [], threading.Event()
        while len(pieces) < 90:
            pieces.append(bytearray(os.urandom(1)) * (2 << 20))
            pause.wait(0.01)
        pause.wait(60)


    with fastrt.init(num_workers=1, object_store_memory="16MiB", memory_threshold=0.8, populate_bytes=0):
        try:
            fastrt.get(hungry.remote(), timeout=60)
        except fastrt.exceptions.OutOfMemoryError as error:
            print(error)
        print("alive:", fastrt.get(fastrt.remote(abs).remote(-1), timeout=30))
"""


def test_task_that_fills_the_memory_is_ended_before_the_kernel_ends_a_process(program, group):
    out, err = program(ENDED, GROUP=str(group)).finish()
    assert "task 'hungry' was given up after attempt 2: its worker, process " in out
    assert f"was ended by fastrt for lack of memory: {group} uses " in out
    assert f"of {GROUP_BYTES >> 20} MiB, more than 80% (memory_threshold)" in out
    assert "memory of workers and actors at that moment:" in out
    assert out.splitlines()[-1] == "alive: 1"
    assert "killed by signal" not in out
    assert err.count("(task 'hungry', ") == 2


NEWEST = """
    import os, threading
    import fastrt

    with open(os.environ["GROUP"] + "/cgroup.procs", "w") as file:
        file.write("0")


    @fastrt.remote
    class Hoard:
        def __init__(self):
            self.pieces = []

        def grow(self, count):
            pause = threading.Event()
            for _ in range(count):
                self.pieces.append(bytearray(os.urandom(1)) * (2 << 20))
                pause.wait(0.01)
            return len(self.pieces)


    with fastrt.init(num_workers=1, object_store_memory="16MiB", memory_threshold=0.8, populate_bytes=0):
        old, new = Hoard.remote(), Hoard.remote()
        print(fastrt.get([old.grow.remote(35), new.grow.remote(1)], timeout=60))
        try:
            fastrt.get(new.grow.remote(50), timeout=60)
        except fastrt.ActorDiedError as error:
            print("lack of memory" in str(error))
        print(fastrt.get(old.grow.remote(0), timeout=30))
"""


def test_newest_of_two_actors_is_ended_though_it_is_the_smaller(program, group):
    assert program(NEWEST, GROUP=str(group)).finish()[0] == "[35, 1]\nTrue\n35\n"


def candidate(pid, mib=100, loses=1, age=0):
    return Candidate(pid, "task", mib << 20, loses, age)


def test_process_that_loses_least_is_ended_first():
    idle, old, new = candidate(1, 20, 0), candidate(2, 100, 1, 7), candidate(3, 50, 1, 9)
    fails, actor = candidate(4, 90, 2, 12), candidate(5, 100, 1, 0)
    assert choose([old, new, fails, actor, idle]) == idle
    assert choose([old, fails, actor, new]) == new
    assert choose([actor, fails, old]) == old
    assert choose([fails, actor]) == actor


def test_process_whose_end_would_free_little_is_left_alone():
    assert choose([]) is None
    assert choose([candidate(1, 15)]) is None
    assert choose([candidate(1, 20, 0), candidate(2, 300, 2)]).pid == 2


def test_monitor_looks_more_often_the_less_memory_is_left():
    machine, group = MemoryLevel("this machine", 8 << 30, 16 << 30), MemoryLevel("group", 900, 1000)
    assert above([machine], 0.6) is None
    assert above([machine, group], 0.45) == group
    assert pause_s([machine], 0.9) == 1.0
    assert pause_s([MemoryLevel("this machine", 8 << 30, 9 << 30)], 0.9444444444444445) == pytest.approx(0.25)
    assert pause_s([machine, group], 0.95) == 0.05


def test_processes_of_a_group_count_with_their_leader(tmp_path):
    for pid, group, resident, shared in ((7, 7, 500, 100), (8, 7, 50, 0), (9, 9, 30, 30)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) S 1 {group} {group} 0")
        (tmp_path / str(pid) / "statm").write_text(f"9999 {resident} {shared} 1 0 1 0")
    (tmp_path / "10").mkdir()
    page = os.sysconf("SC_PAGE_SIZE")
    assert own_bytes(tmp_path) == {7: 450 * page, 9: 0}
