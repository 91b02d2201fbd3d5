"""Values in mapped files as the core sees them: written, read, freed, and fetched from another node."""

import os
from pathlib import Path

import pytest

from fastrt._core.objects import handles, mapped, private, remote, spill
from fastrt._core.repair import fsck
from fastrt._core.tasks import tasks
from fastrt.errors import FastrtError

KIND, LARGE, THERE = 18, 300_000, "5e" * 16


@pytest.fixture
def folder(client, tmp_path):
    spill.configure(client, str(tmp_path))
    yield tmp_path
    assert fsck.fsck(client, quiet=True) == []


def begin(folder: Path, writer, before: int = 64, after: int = 16) -> None:
    with open(folder / f"{writer.name():016x}", "xb+") as file:
        file.truncate(before + len(writer) + after)
        writer.map(file.fileno(), before, after, memoryview)


def put(folder: Path, client, data: bytes, refs=()):
    writer = mapped.create(client, len(data), KIND, len(refs))
    begin(folder, writer)
    writer.copy(0, data)
    return writer.seal(refs)


def read(folder: Path, client, ref):
    kind, error, nbytes, _ = mapped.look(client, ref)
    path = folder / f"{ref.objref:016x}"
    with open(path, "rb") as file:
        return mapped.decode(client, ref, kind, error, mapped.map_file(file.fileno(), str(path), 64, nbytes, 16), False)


def names(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_value_larger_than_the_store_is_written_read_and_freed(node, client, folder):
    data = os.urandom(fsck.usage(client)["bytes_max"] + 1)
    used = fsck.usage(client)["bytes_used"]
    ref = put(folder, client, data)
    assert handles.is_ready(client, ref)
    assert handles.read(client, ref) is None
    kind, error, pin = read(folder, client, ref)
    assert (kind, error, bytes(pin)) == (KIND, False, data)
    assert memoryview(pin).readonly
    assert fsck.usage(client)["bytes_used"] == used
    assert spill.totals(client)["mapped_bytes"] == len(data)
    del ref
    assert names(folder) == 0
    assert bytes(pin) == data, "the bytes stay while they are mapped"


@pytest.mark.parametrize("count", [1, 4, 5, 40])
def test_references_stay_in_the_arena_and_keep_what_they_name(node, client, folder, count):
    inner = [node.put(100) for _ in range(count)]
    named = [ref.objref for ref in inner]
    ref = put(folder, client, b"x" * LARGE, inner)
    del inner
    assert fsck.fsck(client, quiet=True) == []
    assert [one.objref for one in handles.contained(client, ref)] == named
    assert spill.begin_restore(client, ref.index, ref.objref) is None
    del ref
    assert fsck.usage(client)["objects"] == 0


def test_writer_that_is_dropped_leaves_no_file(node, client, folder):
    mapped.create(client, LARGE, KIND, 9)
    writer = mapped.create(client, LARGE, KIND)
    with pytest.raises(BufferError, match="not mapped"):
        writer.copy(0, b"x")
    with pytest.raises(BufferError, match="not mapped"):
        writer.seal()
    begin(folder, writer)
    with pytest.raises(FastrtError, match="mapped already"):
        begin_again(folder, writer)
    del writer
    assert names(folder) == 0
    assert fsck.usage(client)["objects"] == 0


def rss(path: Path) -> int:
    """KiB of a file in this process's page tables."""
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"{path}\n")
    return int(mapping.partition("Rss:")[2].split()[0])


@pytest.mark.parametrize("mapped_first", [True, False])
def test_copies_are_written_by_calls_until_the_memory_is_used_through_the_mapping(node, client, folder, mapped_first):
    writer = mapped.create(client, LARGE, KIND)
    begin(folder, writer)
    path, data = folder / f"{writer.name():016x}", os.urandom(LARGE)
    if mapped_first:
        memoryview(writer)[:10] = data[:10]
    writer.copy(10, data[10:-10])
    assert (rss(path) > 0) == mapped_first
    memoryview(writer)[-10:] = data[-10:]
    writer.copy(0, data[:10])
    for at, part in [(-1, b"x"), (LARGE, b"x"), (LARGE + 1, b""), (1, data)]:
        with pytest.raises(ValueError, match="do not fit"):
            writer.copy(at, part)
    ref = writer.seal()
    with pytest.raises(BufferError):
        writer.copy(0, b"x")
    assert bytes(read(folder, client, ref)[2]) == data
    assert path.stat().st_size == 64 + LARGE + 16


def test_write_that_the_file_system_refuses_fails_that_value_alone(node, client, folder):
    peer = node.peer()
    peer.run(f"""
import resource
spill.configure(client, {str(folder)!r})
writer = mapped.create(client, {LARGE}, {KIND})
with open(f"{folder}/{{writer.name():016x}}", "xb+") as file:
    file.truncate({LARGE})
    writer.map(file.fileno(), 0, 0, memoryview)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    writer.copy(0, bytes({LARGE}))
except OSError as exc:
    assert exc.errno == 27 and "of {LARGE} bytes cannot be written" in str(exc), exc
else:
    raise AssertionError("it was written")
del writer
""")
    assert names(folder) == 0
    assert fsck.usage(client)["objects"] == 0


def begin_again(folder: Path, writer) -> None:
    with open(folder / f"{writer.name():016x}", "rb+") as file:
        writer.map(file.fileno(), 64, 16, memoryview)


def test_restored_value_leaves_its_file_to_the_caller(node, client, folder):
    data = os.urandom(LARGE)
    ref = put(folder, client, data)
    room = spill.begin_restore(client, ref.index, ref.objref)
    memoryview(room)[:] = data
    del room
    spill.finish_restore(client, ref.index, True)
    assert mapped.look(client, ref) is None
    assert bytes(handles.read(client, ref)[2]) == data


def test_private_pages_are_of_the_same_file_only(node, client, folder):
    data = os.urandom(LARGE)
    ref = put(folder, client, data)
    pin = read(folder, client, ref)[2]
    own = private.map_private(pin)
    memoryview(own)[:5] = b"hello"
    assert bytes(own) == b"hello" + data[5:]
    assert bytes(pin) == data
    path = folder / f"{ref.objref:016x}"
    path.rename(folder / "other")
    path.write_bytes(bytes(LARGE + 80))
    assert private.map_private(pin) is None
    (folder / "other").unlink()
    path.unlink()
    assert private.map_private(pin) is None
    path.touch()


def test_result_is_written_to_a_file_and_a_later_attempt_begins_again(node, client, folder):
    task, ref = tasks.promise(client)
    begin(folder, mapped.result(client, task, 0, LARGE, KIND, 7))
    writer = mapped.result(client, task, 0, LARGE, KIND)
    assert names(folder) == 0
    begin(folder, writer)
    writer.copy(LARGE - 1, b"z")
    assert writer.seal() is None
    assert mapped.result(client, task, 0, LARGE, KIND) is None
    tasks.finish(client, task)
    assert bytes(read(folder, client, ref)[2])[-1:] == b"z"


def remote_value(client):
    task, _ = tasks.promise(client)
    ref = remote.seal_result(client, task, 0, LARGE, KIND, THERE, 7)
    tasks.finish(client, task)
    return ref


def test_remote_value_is_fetched_into_a_file_and_needs_its_source_no_more(node, client, folder):
    ref = remote_value(client)
    fill = mapped.fetch(client, ref)
    assert mapped.fetch(client, ref) is None
    begin(folder, fill)
    fill.abort()
    assert names(folder) == 0
    assert remote.is_missing(client, ref)
    fill = mapped.fetch(client, ref)
    begin(folder, fill)
    fill.copy(0, b"here")
    fill.seal()
    assert not remote.is_missing(client, ref)
    assert remote.detach(client, ref)
    assert bytes(read(folder, client, ref)[2])[:4] == b"here"
    assert spill.wait_restored(client, ref, 0.0) is False


def test_lost_remote_value_is_replaced_in_a_file(node, client, folder):
    ref = remote_value(client)
    fill = mapped.replace(client, ref, 2 * LARGE, KIND + 1)
    begin(folder, fill)
    fill.seal()
    kind, _, pin = read(folder, client, ref)
    assert (kind, len(pin)) == (KIND + 1, 2 * LARGE)


def test_death_of_a_writer_leaves_no_file(node, client, folder):
    """Of new values, which their entries name, and of remote ones, which recovery finds by their state."""
    ref = remote_value(client)
    peer = node.peer()
    peer.run(f"""
ref = handles.acquire(client, {ref.objref}, {ref.index})
kept = [mapped.fetch(client, ref), mapped.create(client, {LARGE}, {KIND})]
for one in kept:
    with open(f"{folder}/{{one.name():016x}}", "xb+") as file:
        file.truncate({LARGE})
        one.map(file.fileno(), 0, 0, memoryview)
""")
    assert names(folder) == 2
    peer.kill()
    node.bury(peer)
    assert names(folder) == 0
    assert remote.is_missing(client, ref)
    assert mapped.fetch(client, ref) is not None


def test_file_of_a_value_that_is_freed_while_a_new_daemon_names_the_folder_is_removed(node, client, folder):
    peer = node.peer()
    peer.start(f"for _ in range(300_000): spill.configure(client, {str(folder)!r})")
    for _ in range(300):
        ref = put(folder, client, b"x" * 100)
        del ref
    peer.finish(60.0)
    assert names(folder) == 0
