"""Spilled values in object storage: a folder as fsspec sees it, and S3 as moto serves it on loopback."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from fastrt.store.spill_storage import ObjectStorage, stub
from support.sites import Proxy

pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'fastrt[spill]'")

MIB = 1 << 20
STORE = 32 * MIB


class Folder:
    """A folder as object storage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"file://{path}"

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())

    def get(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()


class Bucket:
    """A bucket of a local S3 server."""

    def __init__(self, address: str) -> None:
        self._at = f"http://{address}/bucket"
        self.url = "s3://bucket/values"

    def ask(self, method: str, path: str = "", data: bytes | None = None) -> bytes:
        # moto checks that a request is signed, and not the signature.
        signed = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        request = urllib.request.Request(self._at + path, data, {"Authorization": signed}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def names(self) -> list[str]:
        listed = self.ask("GET", "?list-type=2").decode()
        return sorted(part.split("</Key>")[0].removeprefix("values/") for part in listed.split("<Key>")[1:])

    def get(self, name: str) -> bytes:
        return self.ask("GET", f"/values/{name}")

    def put(self, name: str, data: bytes) -> None:
        self.ask("PUT", f"/values/{name}", data)

    def remove(self, name: str) -> None:
        self.ask("DELETE", f"/values/{name}")


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path: Path, monkeypatch, wait_until: Callable) -> Iterator[Folder | Bucket]:
    if request.param == "folder":
        yield Folder(tmp_path / "storage")
        return
    for package in ("moto", "s3fs", "flask"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install s3fs 'moto[server]'")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            bucket = Bucket(f"127.0.0.1:{port}")
            wait_until(lambda: _answers(port), "the S3 server", 60)
            bucket.ask("PUT")
            yield bucket
        finally:
            server.kill()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def spills(tmp_path: Path, storage) -> Iterator[Path]:
    """A session that spills into the storage; the folder of its stubs."""
    with fastrt.init(1, STORE, spill_dir=tmp_path / "spill", spill_url=storage.url, advice=False):
        yield Path(spill.directory(client()))
    assert storage.names() == []


def client():
    return store_client.require().client


def array(k: int, nbytes: int = MIB) -> np.ndarray:
    return np.full(nbytes, k % 251, np.uint8)


def put_arrays(count: int) -> list[fastrt.ObjectRef]:
    return [fastrt.put(array(k)) for k in range(count)]


def spilled_of(refs: list[fastrt.ObjectRef]) -> list[fastrt.ObjectRef]:
    return [ref for ref in refs if spill.is_spilled(client(), ref)]


@fastrt.remote
def first_of(value: np.ndarray) -> int:
    return int(value[0])


def test_values_go_to_the_storage_come_back_and_are_removed_with_their_last_reference(spills, storage, wait_until):
    refs = put_arrays(48)
    spilled = spilled_of(refs)
    assert len(spilled) >= 16
    names = {f"{client().segment.session}/{ref.objref:016x}" for ref in spilled}
    assert names <= set(storage.names())
    assert {(spills / f"{ref.objref:016x}").stat().st_size for ref in spilled} == {4096}
    for k, ref in enumerate(refs):
        assert np.array_equal(fastrt.get(ref), array(k))
    assert fastrt.get([first_of.remote(ref) for ref in refs]) == list(range(48))
    assert fsck.fsck(client()) == []
    del refs, spilled, ref
    wait_until(lambda: not list(spills.glob("[0-9a-f]*")), "no stub left")
    wait_until(lambda: storage.names() == [], "no object left", 20)


@pytest.mark.parametrize("damage", ["missing", "short", "changed", "other"])
def test_damaged_object_costs_its_value_only(spills, storage, damage):
    refs = put_arrays(44)
    victim, other = spilled_of(refs)[:2]
    name, second = (f"{client().segment.session}/{ref.objref:016x}" for ref in (victim, other))
    content = storage.get(name)
    if damage == "missing":
        storage.remove(name)
    else:
        changed = content[:MIB] + bytes([content[MIB] ^ 1]) + content[MIB + 1 :]
        storage.put(name, {"short": content[:-9], "changed": changed, "other": storage.get(second)}[damage])
    with pytest.raises(fastrt.ObjectLostError):
        fastrt.get(victim)
    others = [(k, ref) for k, ref in enumerate(refs) if ref != victim]
    assert all(fastrt.get(ref)[0] == k for k, ref in others)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
@pytest.mark.parametrize("falls_back", [True, False])
def test_storage_that_does_not_answer_for_a_while_costs_no_value(
    tmp_path, storage, monkeypatch, wait_until, capfd, falls_back
):
    """The first reader got ObjectLostError, and the value was lost."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    proxy = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
    port = int(proxy.address.rpartition(":")[2])
    folders = {"spill_dir": tmp_path / "spill", "spill_url": storage.url}
    with fastrt.init(1, STORE, spill_fallback=falls_back, advice=False, **folders), ThreadPoolExecutor(1) as pool:
        refs = put_arrays(44)
        spilled = spilled_of(refs)
        victim, k = spilled[0], refs.index(spilled[0])
        if not falls_back:  # room for it: to spill others, the storage is needed, too
            refs = spilled
        proxy.close()
        proxy = Proxy(server, then=("reset", 0), port=port)
        value = pool.submit(fastrt.get, victim)
        wait_until(lambda: "cannot be read back" in capfd.readouterr().err, "the daemon to fail")
        proxy.close()
        proxy = Proxy(server, port=port)
        assert value.result(60)[0] == k
        del refs, spilled, victim, value
    proxy.close()


def test_node_sends_values_that_are_in_the_storage_to_another_node(start, runtime_dir, tmp_path, storage, monkeypatch):
    """Its uplink never waits for them: it would answer no other node meanwhile."""
    monkeypatch.setenv("FASTRT_SPILL_URL", storage.url)
    head = start("--head", "--port", "0", "--num-workers", "0", "--object-store-memory", str(STORE))
    start("--address", head.head, "--num-workers", "1", "--object-store-memory", str(STORE))
    with fastrt.init(address=head.head, runtime_dir=runtime_dir, advice=False):
        refs = [fastrt.put(array(k, 60_000)) for k in range(900)]
        stored = spilled_of(refs)
        assert len(stored) > 100
        began = time.monotonic()
        with pytest.raises(BlockingIOError, match="is a stub"):
            store_client.require().read(stored[-1], at_once=True)
        assert time.monotonic() - began < 0.5
        wanted = stored[:20]
        assert fastrt.get([first_of.remote(ref) for ref in wanted], timeout=60) == [refs.index(r) % 251 for r in wanted]
        del refs, stored, wanted


def test_value_larger_than_the_store_stays_on_the_disk(spills, storage):
    ref = fastrt.put(array(3, 2 * STORE))
    assert storage.names() == []
    assert fastrt.get(first_of.remote(ref)) == 3
    del ref


def test_session_without_files_for_lack_of_room_reads_spilled_values(tmp_path, storage):
    folders = {"spill_dir": tmp_path / "spill", "spill_url": storage.url}
    with fastrt.init(1, STORE, spill_fallback=False, advice=False, **folders):
        refs = put_arrays(40)
        assert storage.names()
        assert [int(fastrt.get(ref)[0]) for ref in refs] == list(range(40))
        del refs
    assert storage.names() == []


def test_next_session_removes_the_objects_of_a_crashed_one(runtime_dir, tmp_path, storage):
    session = "ab" * 16
    folder = tmp_path / "spill" / session
    folder.mkdir(parents=True, mode=0o700)
    (folder / f"{7:016x}").write_bytes(stub(7, 5, storage.url))
    os.utime(folder, (0, 0))  # a new folder without a mark may be another machine's, which is about to mark it
    storage.put(f"{session}/{7:016x}", b"value")
    storage.put(f"{'cd' * 16}/{7:016x}", b"of another session")
    code = "import sys, pathlib; from fastrt.node.leftovers import sweep_sessions; "
    code += "sweep_sessions(*map(pathlib.Path, sys.argv[1:]))"  # a process of its own: fsspec keeps a thread
    subprocess.run([sys.executable, "-c", code, runtime_dir, tmp_path / "spill"], check=True)
    assert storage.names() == [f"{'cd' * 16}/{7:016x}"]
    assert not folder.exists()


def test_storage_that_cannot_be_used_is_named_and_the_session_goes_on(tmp_path):
    url = "no-such-scheme://bucket"
    with pytest.raises(OSError, match=f"{url} cannot be written: .*no-such-scheme"):
        ObjectStorage(url, "session").write("name", [b"value"])
    with fastrt.init(1, STORE, spill_dir=tmp_path / "spill", spill_url=url, spill_fallback=False, advice=False):
        with pytest.raises(fastrt.ObjectStoreFullError, match="spilling failed: no-such-scheme://bucket"):
            refs = put_arrays(40)
        refs = put_arrays(4)
        assert [int(fastrt.get(ref)[0]) for ref in refs] == list(range(4))
        del refs
    with fastrt.init(1, STORE, spill_dir=tmp_path / "spill", spill_url=url, advice=False):
        refs = put_arrays(40)  # those that find no room are in files on the disk
        assert [int(fastrt.get(ref)[0]) for ref in refs] == list(range(40))
        del refs


def test_environment_names_the_storage(monkeypatch):
    from fastrt.config import Config

    monkeypatch.setenv("FASTRT_SPILL_URL", "s3://bucket/a")
    assert Config.load().spill_url == "s3://bucket/a"
    for bad in ("bucket", "s3:/bucket", "s3://", 7, "s3://" + "x" * 1000):
        with pytest.raises(fastrt.ConfigError, match=r"URL|bytes long"):
            Config.load(spill_url=bad)
