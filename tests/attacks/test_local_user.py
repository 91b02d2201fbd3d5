"""Attacks by another Unix user of the same machine, through folders, files, links, Unix sockets and /proc.

The attacker is a real one: a forked child with another uid. The victim is the user that runs the tests, which is root.
"""

import ctypes
import dataclasses
import errno
import importlib
import json
import os
import pickle
import pkgutil
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

import fastrt
from fastrt._core.memory.segment import start_time
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.cli.main import main
from fastrt.coordination.service import Coordinator, CoordinatorOptions
from fastrt.durable import Journal, StateDirectoryError
from fastrt.errors import AttachError, FastrtError
from fastrt.net.grpc.auth import TokenFileError, read_token
from fastrt.ps.head_state import HeadFile
from fastrt.ps.journal import FolderMedium
from fastrt.runtime.nodefile import nodes_here
from fastrt.store import client as store_client
from fastrt.store import join
from fastrt.store.messages import ListNodes, NodeList

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")

ATTACKER = 40001
PTRACE_SEIZE = 0x4206
MIB = 1 << 20
HEADER = 64  # bytes of a spilled value's file before the value
SESSION = "0123456789abcdef" * 2


with Coordinator(CoordinatorOptions()):  # gRPC opens here what it keeps open for good
    pass


def become_attacker() -> None:
    os.setgroups([])
    os.setresgid(ATTACKER, ATTACKER, ATTACKER)
    os.setresuid(ATTACKER, ATTACKER, ATTACKER)


def attacker(do: Callable[..., Any], *args: Any) -> Any:
    """Run a function as the other user; what it returns, as JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_attacker()
            answer = json.dumps({"result": do(*args)})
        except BaseException:
            answer = json.dumps({"error": traceback.format_exc()})
        try:
            os.write(writer, answer.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert "error" not in answer, answer["error"]
    return answer["result"]


class HostileDaemon:
    """A process of the other user that listens at a path and answers as a node daemon would.

    Attributes:
        heard: what it was sent; there once it has ended.
    """

    def __init__(self, path: Path) -> None:
        self.heard = b""
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                become_attacker()
                self._serve(path, writer)
            finally:
                os._exit(0)
        os.close(writer)
        assert os.read(self._reader, 1) == b"!"

    @staticmethod
    def _serve(path: Path, writer: int) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(8)
        os.write(writer, b"!")
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(5)
                if heard := sock.recv(4096):
                    os.write(writer, heard)
                    sock.sendall(b'{"op": "joined", "segment": "/fastrt-hostile", "slot": 1, "gen": 1}\n')

    def end(self) -> bytes:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with open(self._reader, "rb") as pipe:
            self.heard = pipe.read()
        return self.heard


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: every user may make entries, and remove only their own."""
    folder = Path(tempfile.mkdtemp(prefix="frt-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def mine() -> Iterator[Path]:
    """A folder that only the victim may enter."""
    with tempfile.TemporaryDirectory(prefix="frt-mine-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def defaults(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared folder as the one where fastrt's default folders lie."""
    for name in ("XDG_RUNTIME_DIR", "FASTRT_RUNTIME_DIR", "FASTRT_SPILL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("FASTRT_OBJECT_STORE_MEMORY", "32MiB")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    return shared


def squat(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def arrays(count: int) -> list[fastrt.ObjectRef]:
    return [fastrt.put(np.full(MIB, i % 251, dtype=np.uint8)) for i in range(count)]


def command(*words: str) -> tuple[int, str]:
    """Exit code and output of a command that this process runs."""
    done = CliRunner().invoke(main, words)
    return done.exit_code, done.output


def program(folder: Path) -> list[str]:
    """The command as a file: `--detach` starts it again."""
    path = folder / "command.py"
    path.write_text("from fastrt.cli.main import main; main()")
    return [sys.executable, str(path)]


# ---- spilled values ----


def test_a_squatted_spill_folder_is_not_used_and_values_still_spill(defaults: Path) -> None:
    squatted = defaults / "fastrt-spill-0"
    attacker(squat, squatted)
    with fastrt.init(num_workers=1, runtime_dir=defaults / "rt"):
        refs = arrays(48)
        assert spill.totals(store_client.require().client)["spilled_objects"] >= 16
        assert all(fastrt.get(ref)[0] == i % 251 for i, ref in enumerate(refs))
        assert list(squatted.iterdir()) == []
        del refs


def test_a_spill_folder_of_another_user_is_refused_in_words(defaults: Path) -> None:
    folder = defaults / "mine"
    attacker(squat, folder)
    with fastrt.init(num_workers=1, runtime_dir=defaults / "rt", spill_dir=folder):
        with pytest.raises(fastrt.ObjectStoreFullError, match=r"spilling failed: .* cannot be the spill folder"):
            arrays(64)
        assert list(folder.iterdir()) == []


class Exploit:
    """Pickled, it makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._marker,)


def _replace(how: str, files: Path, victim: int, other: int, exploit: bytes, folder: Path) -> None:
    """Put other bytes where a spilled value was."""
    path = files / f"{victim:016x}"
    content = path.read_bytes()
    nbytes = struct.unpack_from("<Q", content, 16)[0]
    payload = exploit.ljust(nbytes, b".")  # text in a list is a pickle from its first byte
    if how == "forged":
        path.write_bytes(content[:HEADER] + payload + b"t" * 16)
    elif how == "forged as before":
        header = struct.pack("<8sQQI4x", b"fastrtS1", victim, len(payload), zlib.crc32(payload))
        path.write_bytes(header + payload)
    elif how == "swapped":
        swapped = bytearray((files / f"{other:016x}").read_bytes())
        swapped[8:16] = struct.pack("<Q", victim)
        path.write_bytes(swapped)
    elif how == "of another session":
        path.write_bytes(_from_another_session(victim, content, folder))
    elif how == "longer":
        path.write_bytes(content + b"\0")
    elif how == "linked":
        path.rename(files / "elsewhere")
        path.symlink_to("elsewhere")


def test_a_replaced_file_costs_its_value_and_runs_nothing(defaults: Path) -> None:
    marker = defaults / "marker"
    ways = ["forged", "forged as before", "swapped", "of another session", "longer", "linked"]
    with fastrt.init(num_workers=1, runtime_dir=defaults / "rt"):
        client = store_client.require().client
        refs = [fastrt.put([i, "x" * MIB]) for i in range(48)]
        files = Path(spill.directory(client))
        other, *victims = [ref for ref in refs if spill.is_spilled(client, ref)][: 1 + len(ways)]
        exploit = pickle.dumps(Exploit(marker))
        for how, victim in zip(ways, victims, strict=True):
            _replace(how, files, victim.objref, other.objref, exploit, defaults)
        for how, victim in zip(ways, victims, strict=True):
            with pytest.raises(fastrt.ObjectLostError, match=str(files)):
                pytest.fail(f"{how}: {fastrt.get(victim)!r:.100}")
            assert not marker.exists(), how
        assert all(fastrt.get(ref)[0] == i for i, ref in enumerate(refs) if ref not in victims)
        assert fsck.fsck(client) == []
        (files / "elsewhere").unlink(missing_ok=True)
        del other, victims, victim, refs


def _from_another_session(objref: int, content: bytes, folder: Path) -> bytes:
    """The file that another session of this user would write for the same value."""
    from fastrt.store.spill_files import SpillFiles

    (folder / "other").mkdir(mode=0o700)
    files = SpillFiles(folder / "other" / "spill", folder / "other")
    files.make_key()
    files.write(objref, memoryview(content)[HEADER:-16])
    return files.path(objref).read_bytes()


# ---- the runtime folder ----


def plant(folder: Path, victim_pid: int, victim_file: Path) -> None:
    """As the other user: make a runtime folder with a log, a session and a node that is the victim's process."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (folder / "node.log").symlink_to(victim_file)
    session = folder / SESSION
    session.mkdir()
    session.chmod(0o777)
    note = {
        "head": "127.0.0.1:1", "name": "x", "is_head": True, "address": "127.0.0.1:1", "num_workers": 1,
        "socket_path": str(session / "node.sock"), "token_file": str(folder / "token"), "pid": victim_pid,
        "start_time": start_time(victim_pid),
    }  # fmt: skip
    (session / "cluster.json").write_text(json.dumps(note))


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the victim's that has nothing to do with fastrt."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_squatted_runtime_folder_reaches_nothing_and_stops_nothing(
    defaults: Path, victim: subprocess.Popen[bytes], mine: Path
) -> None:
    squatted, file = defaults / "fastrt-0", mine / "file"
    file.write_text("mine\n")
    attacker(plant, squatted, victim.pid, file)
    hostile = HostileDaemon(squatted / SESSION / "node.sock")
    try:
        assert "no node runs here" in command("stop")[1]
        assert "no session is running here" in command("status")[1]
        assert "no session is running here" in command("list", "tasks")[1]
        with pytest.raises(AttachError, match="no node of 'auto' runs on this machine"):
            fastrt.init(address="auto")
        # The victim can work all the same, and finds its own node.
        words = [*program(mine), "start", "--head", "--port", "0", "--num-workers", "0", "--detach"]
        started = subprocess.run(words, capture_output=True, text=True)
        assert started.returncode == 0, started.stderr
        assert "no session" not in command("status")[1]
        assert "1 node ended" in command("stop")[1]
    finally:
        assert hostile.end() == b""
    assert victim.poll() is None
    assert file.read_text() == "mine\n"


@pytest.mark.parametrize("variable", ["FASTRT_RUNTIME_DIR", "XDG_RUNTIME_DIR"])
def test_a_named_runtime_folder_of_another_user_is_refused_or_passed_over(
    defaults: Path, victim: subprocess.Popen[bytes], mine: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folder, file = defaults / "named", mine / "file"
    runtime_dir = folder if variable == "FASTRT_RUNTIME_DIR" else folder / "fastrt"
    file.write_text("mine\n")
    attacker(plant, runtime_dir, victim.pid, file)
    hostile = HostileDaemon(runtime_dir / SESSION / "node.sock")
    monkeypatch.setenv(variable, str(folder))
    try:
        for words in (["stop"], ["status"], ["list", "tasks"], ["memory"]):
            code, said = command(*words)
            if variable == "FASTRT_RUNTIME_DIR":
                assert code == 1
                assert f"it belongs to uid {ATTACKER}" in said, said
            else:  # of the user before `sudo`: the default is the other one
                assert "running here" in said or "runs here" in said, said
        if variable == "FASTRT_RUNTIME_DIR":
            with pytest.raises(FastrtError, match=f"it belongs to uid {ATTACKER}"):
                fastrt.init(address="auto")
            with pytest.raises(FastrtError, match=f"it belongs to uid {ATTACKER}"):
                fastrt.init(num_workers=1)
            words = [*program(mine), "start", "--head", "--port", "0", "--detach"]
            started = subprocess.run(words, capture_output=True, text=True)
            assert f"it belongs to uid {ATTACKER}" in started.stderr
    finally:
        assert hostile.end() == b""
    assert victim.poll() is None
    assert file.read_text() == "mine\n"


def test_a_socket_of_another_user_is_asked_nothing(shared: Path) -> None:
    hostile = HostileDaemon(shared / "node.sock")
    try:
        for ask in (
            lambda path: join.join(path, "driver", "x"),
            lambda path: join.rejoin(path),
            lambda path: join.inquire(path, ListNodes(), NodeList),
        ):
            with pytest.raises(AttachError, match=f"a process of uid {ATTACKER} listens at"):
                ask(str(shared / "node.sock"))
    finally:
        assert hostile.end() == b""


def test_a_coordinators_unix_socket_is_for_its_user_only(shared: Path) -> None:
    def connect() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(str(shared / "socket"))

    before = os.umask(0)
    try:
        with Coordinator(CoordinatorOptions(f"unix:{shared}/socket", num_tasks=1)):
            assert connect() == 0
            assert attacker(connect) == errno.EACCES
    finally:
        os.umask(before)


# ---- state ----


@pytest.mark.parametrize(
    ("opens", "name"),
    [
        (lambda folder: Journal(folder).close(), "lock"),
        (lambda folder: HeadFile(folder).close(), "lock"),
        (lambda folder: os.close(FolderMedium(folder).open("log")), "log"),
    ],
    ids=["journal", "head", "server"],
)
def test_a_squatted_state_folder_is_refused_and_no_link_is_followed(
    shared: Path, mine: Path, opens: Callable[[Path], None], name: str
) -> None:
    folder, file = shared / "state", mine / "file"
    file.write_bytes(b"")
    file.chmod(0o640)

    def squat_with_a_link() -> None:
        squat(folder)
        (folder / name).symlink_to(file)

    attacker(squat_with_a_link)
    with pytest.raises(StateDirectoryError, match=f"it belongs to uid {ATTACKER}"):
        opens(folder)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"", 0o640)


def test_links_in_a_folder_that_was_open_before_are_not_followed(mine: Path) -> None:
    folder, file = mine / "state", mine / "file"
    folder.mkdir(mode=0o700)
    file.write_bytes(b"")
    for link, opens in (
        ("lock", lambda: Journal(folder)),
        ("lock", lambda: HeadFile(folder)),
        ("log", lambda: FolderMedium(folder).open("log")),
    ):
        for make in (Path.symlink_to, Path.hardlink_to):
            make(folder / link, file)
            with pytest.raises(StateDirectoryError, match=r"is a link|has 2 names"):
                opens()
            (folder / link).unlink()
    assert file.read_bytes() == b""


# ---- what a running node lets others see ----


def look_around(runtime_dir: Path, paths: list[str], pids: list[int], secrets: list[str]) -> list[str]:
    """As the other user: try every file, folder, socket, segment and process; what could be had."""
    had = []
    for path in [str(runtime_dir), *paths]:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            had.append(f"read {path}")
        except OSError:
            pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            if sock.connect_ex(path) == 0:
                had.append(f"connected to {path}")
        try:
            os.link(path, runtime_dir.parent / "mine")
            had.append(f"linked {path}")
        except OSError:
            pass
    for name in os.listdir("/dev/shm"):
        try:
            if name.startswith("fastrt-"):
                os.close(os.open(f"/dev/shm/{name}", os.O_RDONLY))
                had.append(f"opened the segment {name}")
        except OSError:
            pass
    for pid in pids:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        had += [f"a secret in the arguments of {pid}" for secret in secrets if secret in shown]
        for name in ("environ", "mem", "maps", "fd", "cwd"):
            try:
                os.listdir(f"/proc/{pid}/fd") if name == "fd" else os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
                had.append(f"/proc/{pid}/{name}")
            except OSError:
                pass
    return had


@pytest.mark.long
def test_a_running_node_shows_nothing_and_its_token_goes_with_it(
    shared: Path, mine: Path, wait_until: Callable[..., None]
) -> None:
    runtime_dir = shared / "rt"
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "32MiB"}
    env["FASTRT_SPILL_DIR"] = str(shared / "spill")
    words = [*program(mine), "start", "--head", "--port", "0", "--num-workers", "0"]

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        next(line for line in lines if line.startswith("use it:"))
        (node,) = nodes_here(runtime_dir)
        return process, Path(node.token_file)

    process, token_file = start()
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    try:
        token = token_file.read_text().strip()
        paths = [str(path) for path in runtime_dir.rglob("*")]
        assert any(path.endswith("node.sock") for path in paths)
        assert attacker(look_around, runtime_dir, paths, [one.pid for one in everything], [token]) == []
    finally:
        for one in everything:
            one.suspend()
        for one in everything:
            one.kill()
        process.communicate()
    psutil.wait_procs(everything, 10)
    assert token_file.exists()
    process, new = start()
    try:
        files = [path for path in runtime_dir.rglob("*") if path.is_file()]
        assert [path for path in files if token in path.read_text(errors="replace")] == []
        assert new.read_text().strip() != token
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    wait_until(lambda: not list(runtime_dir.iterdir()), "an empty runtime folder")


# ---- secrets ----


def test_a_token_file_of_another_user_is_refused(shared: Path) -> None:
    def write() -> None:
        (shared / "token").touch(mode=0o600)
        (shared / "token").write_text("secret")

    attacker(write)
    with pytest.raises(TokenFileError, match=f"belongs to uid {ATTACKER}"):
        read_token(shared / "token")


def test_another_user_reads_no_log_file_and_a_squatted_log_folder_is_not_written_to(mine: Path) -> None:
    @fastrt.remote
    def speak() -> None:
        sys.stdout.write("a secret\n")

    with fastrt.init(1, "64MiB", runtime_dir=mine / "rt", spill_dir=mine / "spill", log_to_driver=False):
        fastrt.get(speak.remote())
    (file,) = (mine / "rt" / "logs").glob("*/*.log")
    assert b"a secret" in file.read_bytes()

    def tries(path: str) -> list[str]:
        got = []
        for look in (lambda: os.listdir(os.path.dirname(path)), lambda: Path(path).read_bytes()):
            try:
                got.append(repr(look()))
            except OSError as exc:
                got.append(errno.errorcode[exc.errno or 0])
        return got

    assert attacker(tries, str(file)) == ["EACCES", "EACCES"]
    shutil.rmtree(mine / "rt" / "logs")
    (mine / "rt" / "logs").mkdir(0o777)
    (mine / "rt" / "logs").chmod(0o777)
    os.chown(mine / "rt" / "logs", ATTACKER, ATTACKER)
    with fastrt.init(1, "64MiB", runtime_dir=mine / "rt", spill_dir=mine / "spill", log_to_driver=False):
        fastrt.get(speak.remote())
    assert list((mine / "rt" / "logs").iterdir()) == []
    result = CliRunner().invoke(main, ["logs"], env={"FASTRT_RUNTIME_DIR": str(mine / "rt")})
    assert (result.exit_code, "belongs to uid" in result.output) == (1, True)


def test_another_user_reads_no_memory_and_traces_no_worker() -> None:
    with fastrt.init(1, "64MiB", log_to_driver=False):
        pid = fastrt.get(fastrt.remote(os.getpid).remote())

        def tries(pid: int) -> list[str]:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
            libc.ptrace.restype = ctypes.c_long
            got = []
            for name in ("mem", "environ", "maps"):
                try:
                    os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
                    got.append("opened")
                except OSError as exc:
                    got.append(errno.errorcode[exc.errno or 0])
            assert libc.ptrace(PTRACE_SEIZE, pid, None, None) == -1
            return [*got, errno.errorcode[ctypes.get_errno()]]

        assert attacker(tries, pid) == ["EACCES", "EACCES", "EACCES", "EPERM"]


def test_no_object_that_holds_a_secret_shows_it() -> None:
    found = []
    for info in pkgutil.walk_packages(fastrt.__path__, "fastrt."):
        if "__main__" in info.name or info.name.startswith(("fastrt.bench", "fastrt.ray.path")):
            continue  # the last one makes this process import fastrt.ray as ray
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # of an engine that is not installed
            continue
        for kind in {kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == info.name}:
            shown: list[str] = []
            if dataclasses.is_dataclass(kind):
                shown = [field.name for field in dataclasses.fields(kind) if field.repr]
            elif issubclass(kind, tuple) and kind.__repr__.__module__ != kind.__module__:  # not one that it defines
                shown = list(getattr(kind, "_fields", ()))
            found += [f"{info.name}.{kind.__name__}" for name in shown if name.strip("_") in ("token", "secret")]
    assert found == []
