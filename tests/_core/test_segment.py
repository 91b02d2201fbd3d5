"""Segments: who may attach, what is refused, and what stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest

import fastrt
from fastrt._core.memory import clients, segment
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.repair.fsck import fsck, usage
from fastrt.errors import ArenaCorrupt, AttachError, ObjectStoreFullError

# Offsets in the superblock (include/layout.h).
VERSION, ABI, TOTAL_BYTES, PAGES_MAX, CTL_OFFSET, BOOT, PID_NAMESPACE = 8, 12, 16, 52, 72, 248, 256
STATIC_BYTES, CRC, STATE, DAEMON_PID = 272, 280, 284, 288


def path_of(made: Segment) -> Path:
    return Path("/dev/shm") / made.name[1:]


def patch(made: Segment, offset: int, data: bytes, mend_crc: bool = False) -> None:
    with path_of(made).open("r+b") as f:
        f.seek(offset)
        f.write(data)
        if mend_crc:
            f.seek(0)
            crc = zlib.crc32(f.read(STATIC_BYTES))
            f.seek(CRC)
            f.write(crc.to_bytes(4, "little"))


@pytest.fixture
def made(drop_arguments):
    made = Segment.create(1 << 20)
    yield made
    made.unlink()


@pytest.fixture
def leftover():
    """A file in /dev/shm with the name of a segment."""
    path = Path("/dev/shm/fastrt-0123456789abcdef0123456789abcdef")
    yield path
    path.unlink(missing_ok=True)


def test_create_gives_a_private_sparse_file_that_attach_maps(made):
    info = path_of(made).stat()
    assert info.st_mode & 0o777 == 0o600
    assert info.st_size == made.total_bytes
    assert info.st_blocks * 512 < 8 << 20
    there = Segment.attach(made.name)
    assert (there.name, there.total_bytes, there.session) == (made.name, made.total_bytes, made.session)
    assert there.daemon == (os.getpid(), segment.start_time(os.getpid()))


def test_two_segments_have_names_of_their_own(made):
    other = Segment.create(1 << 20)
    try:
        assert len(other.session) == len(made.session) == 32
        assert other.session != made.session
        assert {made.name, other.name} <= set(segment.segments())
    finally:
        other.unlink()


@pytest.mark.parametrize(
    "name", ["/fastrt-" + "0" * 32, "", "/", "/..", "/a/b", "x" * 300, "/a\0b", "/fastrt-" + "G" * 32]
)
def test_attach_unknown_name_is_refused(name):
    with pytest.raises(AttachError):
        Segment.attach(name)


@pytest.mark.parametrize("name", [None, 5, b"/fastrt-0"])
def test_attach_name_of_other_type_is_refused(name):
    with pytest.raises(TypeError):
        Segment.attach(name)


@pytest.mark.parametrize(
    ("offset", "data", "match"),
    [
        (0, b"\0" * 8, "not a fastrt segment"),
        (0, b"elf\x7f", "not a fastrt segment"),
        (VERSION, b"\xff", "layout 255"),
        (ABI, b"\1\2\3\4", "same fastrt and interpreter build"),
        (TOTAL_BYTES, b"\xff", "damaged"),
        (PAGES_MAX, b"\xff\xff\xff\xff", "damaged"),
        (CTL_OFFSET, b"\xff\xff", "damaged"),
        (CRC, b"\0\0\0\0", "damaged"),
        (STATE, b"\0", "state is 0"),
        (STATE, b"\3", "state is 3"),
    ],
)
def test_attach_changed_superblock_is_refused(made, offset, data, match):
    patch(made, offset, data)
    with pytest.raises(AttachError, match=match):
        Segment.attach(made.name)


@pytest.mark.parametrize(
    ("offset", "match"),
    [(TOTAL_BYTES, "damaged"), (PAGES_MAX, "damaged"), (CTL_OFFSET, "damaged"), (BOOT, "before this boot"),
     (PID_NAMESPACE, "PID namespace")],
)  # fmt: skip
def test_attach_of_another_world_is_refused(made, offset, match):
    patch(made, offset, b"\1\2\3\4\5\6\7", mend_crc=True)
    with pytest.raises(AttachError, match=match):
        Segment.attach(made.name)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o400])
def test_attach_other_mode_is_refused(made, mode):
    path_of(made).chmod(mode)
    with pytest.raises(AttachError, match=f"{mode:o}|Permission"):
        Segment.attach(made.name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_attach_other_uid_is_refused(made):
    os.chown(path_of(made), 65534, -1)
    with pytest.raises(AttachError, match="uid 65534"):
        Segment.attach(made.name)
    assert made.name not in segment.segments()


@pytest.mark.parametrize("nbytes", [0, 100, 4095, 4096, 1 << 20])
def test_attach_file_that_is_no_segment_is_refused(leftover, nbytes):
    with leftover.open("wb") as f:
        os.chmod(f.fileno(), 0o600)
        f.truncate(nbytes)
    with pytest.raises(AttachError, match=r"no superblock|not a fastrt segment"):
        Segment.attach("/" + leftover.name)


@pytest.mark.parametrize(
    "sizes",
    [
        {"store_bytes": -1},
        {"store_bytes": 0},
        {"store_bytes": (1 << 20) - 1},
        {"store_bytes": 1 << 45},
        {"store_bytes": 1 << 46},
        {"store_bytes": 1 << 64},
        {"clients_max": 0},
        {"clients_max": 8193},
        {"clients_dense": 0},
        {"clients_max": -1},
        {"objects_max": 63},
        {"objects_max": (1 << 26) + 1},
        {"tasks_max": 0},
        {"tasks_max": 1 << 32},
        {"node": -1},
        {"node": 1 << 16},
    ],
)
def test_create_size_out_of_range_is_refused(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} is -?[0-9]+; it must be"):
        Segment.create(**{"store_bytes": 1 << 20, **sizes})


@pytest.mark.parametrize("store_bytes", [None, "1 MiB", 2.5e6, [1]])
def test_create_size_of_other_type_is_refused(store_bytes):
    with pytest.raises(TypeError):
        Segment.create(store_bytes)


@pytest.mark.skipif("FASTRT_SANITIZE" in os.environ, reason="a sanitizer's shadow needs terabytes of address space")
def test_create_without_address_space_is_refused_and_leaves_nothing():
    code = """
        import resource
        from fastrt._core.memory import segment
        resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
        try:
            segment.Segment.create(1 << 32)
        except segment.AttachError as exc:
            answer = str(exc)
    """
    answer = run_code(code)
    assert "ulimit -v" in answer
    assert answer.split(" of ")[1].split(":")[0] not in segment.segments()


def test_unlink_twice_is_harmless(made):
    made.unlink()
    made.unlink()
    with pytest.raises(AttachError, match="its session has ended"):
        Segment.attach(made.name)


def test_value_read_before_unlink_stays_readable(make_node):
    node = make_node()
    view = memoryview(handles.read(node.client, node.put(100_000))[2])
    node.segment.unlink()
    assert bytes(view[:3]) == bytes([100_000 % 251]) * 3
    view.release()


def test_poisoned_segment_refuses_every_call(make_node):
    made = Segment.create(1 << 20)
    try:
        client = clients.Client(made, *clients.admit(made, os.getpid(), clients.KIND_TOOL))
        ref = handles.put_scalar(client, 1)
        made.poison("a test says so " + "x" * 200)
        calls = [
            lambda: handles.put_scalar(client, 2),
            lambda: handles.read(client, ref),
            lambda: handles.create(client, 10, 16),
            lambda: handles.wait_all(client, [ref], None, 0.0),
            lambda: fsck(client),
        ]
        for call in calls:
            with pytest.raises(ArenaCorrupt, match="a test says so"):
                call()
        with pytest.raises(AttachError, match="poisoned: a test says so"):
            Segment.attach(made.name)
    finally:
        made.unlink()


# ---- what a crash leaves ----


def sweep_of(*names: str) -> list[str]:
    """Which of `names` a sweep removes; other sessions on this machine may end at any moment."""
    swept = segment.sweep()
    return [name for name in names if name in swept]


def test_segment_without_posix_ipc_is_the_same():
    # posix_ipc has no wheels for Python 3.14; where it is installed, the processes of a session may differ in that.
    code = textwrap.dedent("""
        import sys
        sys.modules["posix_ipc"] = None
        from fastrt._core.memory import segment
        from fastrt.errors import AttachError
        given = segment.Segment.attach(sys.argv[1])
        try:
            segment.Segment.attach("/fastrt-" + "0" * 32)
        except AttachError as exc:
            print(exc)
        made = segment.Segment.create(1 << 20)
        print(made.name)
        kept = segment.Segment.create(1 << 20)
        kept.unlink()
        kept.unlink()
        print(kept.name in segment.segments(), given.session)
    """)
    given = Segment.create(1 << 20)
    try:
        words = [sys.executable, "-c", code, given.name]
        done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=True)
        refused, name, *rest = done.stdout.split("\n")
        assert refused == f"/fastrt-{'0' * 32} does not exist: its session has ended"
        assert rest[0] == f"False {given.session}"
        info = Path("/dev/shm", name[1:]).stat()
        assert (info.st_mode & 0o7777, info.st_size) == (0o600, given.total_bytes)
        assert name in segment.sweep()
        assert name not in segment.segments()
    finally:
        given.unlink()


def test_sweep_removes_only_the_segments_of_the_dead(made, lone_peers):
    dead, alive = lone_peers(), lone_peers()
    name = dead.run("s = segment.Segment.create(1 << 20)\ns.name")
    shared = dead.run("t = segment.Segment.create(1 << 20)\nt.name")
    index, gen = dead.run(f"clients.admit(t, {alive.pid}, clients.KIND_TOOL)")
    alive.run(f"c = clients.Client(segment.Segment.attach({shared!r}), {index}, {gen})")
    assert sweep_of(name, shared, made.name) == []
    dead.kill()
    assert sweep_of(name, shared, made.name) == [name]
    alive.kill()
    assert sweep_of(shared, made.name) == [shared]
    assert made.name in segment.segments()


def test_sweep_leaves_another_versions_segment_to_those_who_have_it_mapped(lone_peers):
    maker, member = lone_peers(), lone_peers()
    name = maker.run("s = segment.Segment.create(1 << 20)\ns.name")
    member.run(f"t = segment.Segment.attach({name!r})")
    with open(f"/dev/shm{name}", "r+b") as file:
        file.seek(VERSION)
        file.write(b"\xff\xff")
    maker.kill()
    assert sweep_of(name) == []
    member.kill()
    assert sweep_of(name) == [name]


def test_sweep_removes_a_segment_of_an_earlier_boot(made):
    patch(made, BOOT, b"\1\2\3\4\5\6\7", mend_crc=True)
    assert sweep_of(made.name) == [made.name]


@pytest.mark.parametrize("offset", [PID_NAMESPACE, 0])
def test_sweep_leaves_what_it_cannot_judge(made, offset):
    patch(made, DAEMON_PID, b"\xff\xff\xff\x7f")
    patch(made, offset, b"\1\2\3\4\5\6\7", mend_crc=True)
    assert sweep_of(made.name) == []


@pytest.mark.parametrize("nbytes", [0, 1 << 20])
def test_sweep_takes_a_half_made_segment_once_it_is_old(leftover, nbytes):
    leftover.touch(0o600)
    os.truncate(leftover, nbytes)
    assert sweep_of("/" + leftover.name) == []
    os.utime(leftover, (0, 0))
    assert sweep_of("/" + leftover.name) == ["/" + leftover.name]


def test_start_time_of_nobody_is_zero(lone_peers):
    peer = lone_peers()
    assert segment.start_time(peer.pid) > 0
    os.kill(peer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    assert segment.start_time(peer.pid) == 0  # a zombie
    peer.close()
    assert segment.start_time(peer.pid) == 0
    assert segment.start_time(-1) == 0


# ---- forks ----


def test_forked_child_cannot_use_the_parents_mapping_but_reads_its_views(node, client):
    view = memoryview(handles.read(client, node.put(100_000))[2])
    writer = handles.create(client, 100_000, node.KIND)
    reader, to = os.pipe()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (
            lambda: node.segment.poison("x"),
            lambda: node.segment.daemon,
            lambda: clients.table(node.segment),
            lambda: clients.admit(node.segment, os.getpid(), 1),
            lambda: clients.Client(node.segment, client.index, client.gen),
            lambda: writer.copy(0, b"x"),
            lambda: memoryview(writer),
            lambda: writer.seal(),
            lambda: client.wake(0),
        ):
            with contextlib.suppress(AttachError, clients.ForkedHandle):
                call()
                refused -= 1
            refused += 1
        os.write(to, bytes([refused]) + bytes(view[:2]))
        os._exit(0)
    os.close(to)
    assert os.read(reader, 10) == bytes([9]) + bytes(view[:2])
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0
    view.release()


# ---- a full /dev/shm ----


def run_code(code: str, shm_bytes: int | None = None, options: str = "rw") -> str:
    """The value of `answer` after `code` has run in a process of its own, with a /dev/shm of its own if asked for."""
    command = [sys.executable, "-c", f"{textwrap.dedent(code)}\nprint(answer)"]
    if shm_bytes is not None:
        mount = f'mount -t tmpfs -o {options},size={shm_bytes} tmpfs /dev/shm && exec "$@"'
        unshare = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]
        command = [*unshare, "sh", "-c", mount, "sh", *command]
    environ = {**os.environ, "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ, check=False)
    if shm_bytes is not None and done.returncode == 1 and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"a /dev/shm of one's own is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    return done.stdout.strip()


PRELUDE = """
import gc, os
from fastrt._core.memory import clients, segment
from fastrt._core.repair import fsck
from fastrt._core.objects import handles
from fastrt._core.tasks import tasks, submission
from fastrt.errors import AttachError, ObjectStoreFullError

def attach(**sizes):
    s = segment.Segment.create(**sizes)
    return clients.Client(s, *clients.admit(s, os.getpid(), clients.KIND_DRIVER))
"""


def test_create_in_a_full_shm_says_what_to_do():
    code = PRELUDE + textwrap.dedent("""
        try:
            attach(store_bytes=1 << 30)
        except ObjectStoreFullError as exc:
            answer = f"{exc} {os.listdir('/dev/shm')}"
    """)
    answer = run_code(code, 64 << 10)
    assert "--shm-size" in answer
    assert "bytes free" in answer
    assert answer.endswith("[]")


@pytest.mark.parametrize(
    ("options", "limit", "why"), [("ro", "-1", "Read-only file system"), ("rw", "1 << 20", "1048576 bytes (ulimit -f)")]
)
def test_refusal_of_the_kernel_names_the_file(options, limit, why):
    code = PRELUDE + textwrap.dedent(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))
        try:
            attach(store_bytes=1 << 30)
        except OSError as exc:
            answer = f"{{exc}} {{os.listdir('/dev/shm')}}"
    """)
    answer = run_code(code, 1 << 20, options)
    assert answer.startswith("cannot make /dev/shm/fastrt-")
    assert why in answer
    assert answer.endswith("[]")


def test_put_into_a_full_shm_raises_and_recovers():
    """A small /dev/shm is used, but for what the tables need, in steps that fit; then every kind of call raises."""
    code = PRELUDE + textwrap.dedent("""
        c = attach(store_bytes=1 << 30)
        held, full = [], 0
        for nbytes in (1 << 20, 1 << 14, 300):
            try:
                while True:
                    held.append(handles.create(c, nbytes, 16))
                    held[-1].copy(0, bytes(nbytes))
                    held[-1] = held[-1].seal()
            except ObjectStoreFullError:
                full += 1
        used = fsck.usage(c)["bytes_used"]
        bad = fsck.fsck(c, True)
        try:
            while True:
                held.append(handles.put_scalar(c, 1))
        except ObjectStoreFullError:
            full += 1
        try:
            while True:
                held.append(submission.submit(c, submission.TaskOptions(held[0]), ()))
        except ObjectStoreFullError:
            full += 1
        while (t := tasks.next_task(c, 0, 0)) >= 0:
            tasks.finish_scalar(c, t, None)
        held.clear()
        held.append(handles.create(c, 4 << 20, 16))
        answer = full, used >> 20, bad, fsck.fsck(c, True)
    """)
    full, used, *bad = eval(run_code(code, 24 << 20))  # noqa: S307 - a tuple that we printed
    assert full == 5
    assert used >= 13
    assert bad == [[], []]


def test_queue_grows_in_a_full_shm():
    """Memory for the queue is had together with the tasks: what was submitted is run."""
    code = PRELUDE + textwrap.dedent("""
        c = attach(store_bytes=1 << 20, tasks_max=1 << 16, objects_max=1 << 17)
        f = handles.put_scalar(c, b"f")
        for _ in range(20000):
            submission.submit(c, submission.TaskOptions(f, 0), ())
        filler = open("/dev/shm/filler", "wb", buffering=0)
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
        n = 20000
        try:
            while True:
                submission.submit(c, submission.TaskOptions(f, 0), ())
                n += 1
        except ObjectStoreFullError:
            pass
        ran = 0
        while (t := tasks.next_task(c, 0, 0)) >= 0:
            tasks.finish(c, t)
            ran += 1
        answer = n == ran, n > 20000, fsck.fsck(c, True)
    """)
    assert run_code(code, 64 << 20) == "(True, True, [])"


def test_attach_to_a_half_made_segment_in_a_full_shm_is_refused():
    """Looking at memory that was never promised would be SIGBUS."""
    code = PRELUDE + textwrap.dedent("""
        os.truncate(os.open("/dev/shm/fastrt-" + 32 * "a", os.O_CREAT | os.O_RDWR, 0o600), 1 << 20)
        try:
            with open("/dev/shm/filler", "wb", buffering=0) as f:
                while True:
                    f.write(bytes(4096))
        except OSError:
            pass
        try:
            segment.Segment.attach("/fastrt-" + 32 * "a")
        except AttachError as exc:
            answer = exc
    """)
    assert "not initialised" in run_code(code, 1 << 20)


def test_growth_under_a_storm_of_signals_comes_to_an_end(make_node):
    """Each signal makes the kernel undo a fallocate: one of 64 MiB would never get through."""
    rings = []
    old = signal.signal(signal.SIGALRM, lambda *_: rings.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        node = make_node(store_bytes=64 << 20)
        handles.create(node.client, 60 << 20, node.KIND)
        assert usage(node.client)["bytes_committed"] == 64 << 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert rings


def test_store_larger_than_memory_promises_nothing_ahead():
    made = Segment.create(1 << 44)
    try:
        assert path_of(made).stat().st_blocks * 512 < 8 << 20
    finally:
        made.unlink()


def test_object_larger_than_the_store_is_refused(client):
    with pytest.raises(ObjectStoreFullError, match="larger than the whole store"):
        handles.create(client, 1 << 30, 16)
