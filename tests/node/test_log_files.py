"""Log files: rotation, five sessions, filters, a full disk, a killed daemon."""

import os
import shutil
import stat
import sys

import pytest

import fastrt
from fastrt.folders import UnsafeFolderError
from fastrt.node import log_files
from fastrt.node.log_files import LogFiles, Wanted, decode, encode, find_folders, read_page
from fastrt.node.logs import Printed
from fastrt.store.session_folder import MARK, make_session_folder
from fastrt.tasks.marks import Source
from support.disks import small_disk

SESSION = "0123456789abcdef" * 2
WORK = Source(0x10003, "work", 0xA1, 0xB2)
ACTOR = Source(0x10003, "Counter", 0, 0, "bob")


def printed(*lines, source=WORK, pid=7, is_error=False):
    return Printed(list(lines), is_error, source, pid)


@pytest.fixture
def runtime(tmp_path):
    folder = tmp_path / "rt"
    folder.mkdir(0o700)
    return folder


@pytest.fixture
def files(runtime):
    made = LogFiles(runtime, SESSION, 1 << 20, lambda: {"node": "one", "program": "a.py"}, pytest.fail)
    yield made
    made.close()


def texts(folder, wanted=Wanted(), limit=1000):  # noqa: B008
    found, after = [], ""
    while True:
        page = read_page(folder, wanted, after, limit)
        found += [line.text for line in page.lines]
        after = page.after
        if page.is_end:
            return found


def test_line_is_read_as_it_was_written():
    line = decode(encode(printed("a\tb \u6f22", source=ACTOR, is_error=True), 1e9 + 0.25).rstrip(b"\n"))
    assert line == (1e9 + 0.25, True, 7, ACTOR, "a\tb \u6f22")
    assert decode(encode(printed("", source=Source(1, "a\tb")), 1e9).rstrip(b"\n")).source.name == "a b"


@pytest.mark.parametrize(
    "line", [b"", b"\t" * 8, b"x\tout\t1\t1\t1\t1\ta\tb\tc", b"\xff" * 100, b"2026-11-24\tno\t1\t1\t1\t1\t\t\t"]
)
def test_other_lines_are_skipped(line):
    assert decode(line) is None


def test_files_are_private_rotated_and_bounded(files, runtime):
    for k in range(20_000):
        files.write(printed(f"{k} " + "x" * 100))
    (found,) = find_folders(runtime)
    assert (found.session, found.node, found.program) == (SESSION, "one", "a.py")
    assert (1 << 20) * 3 // 4 < found.nbytes <= 1 << 20
    assert len(list(found.path.glob("*.log"))) == log_files.PARTS
    for path in (found.path, found.path.parent, *found.path.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    numbers = [int(text.split()[0]) for text in texts(found.path)]
    assert numbers == list(range(numbers[0], 20_000))


def test_reader_that_follows_reads_each_line_once_also_over_rotation(files, runtime):
    read, after = [], ""
    for k in range(6000):
        files.write(printed(f"{k} " + "x" * 100))
        if k % 500 == 499:
            while True:
                page = read_page(find_folders(runtime)[0].path, Wanted(), after, 100)
                read += [int(line.text.split()[0]) for line in page.lines]
                after = page.after
                if page.is_end:
                    break
    assert read == list(range(6000))


def test_lines_are_found_by_task_actor_and_process(files, runtime):
    files.write(printed("one"))
    files.write(printed("two", source=WORK._replace(task=0xA2, path=0xB3), pid=8))
    files.write(printed("three", source=ACTOR, pid=9))
    files.write(printed("a1 Counter 9"))
    (found,) = find_folders(runtime)
    assert texts(found.path, Wanted(task=f"{0xA2:016x}")) == ["two"]
    assert texts(found.path, Wanted(task=f"{0xB2:016x}")) == ["one", "a1 Counter 9"]
    assert texts(found.path, Wanted(actor="bob")) == texts(found.path, Wanted(actor="Counter")) == ["three"]
    assert texts(found.path, Wanted(actor="work")) == []
    assert texts(found.path, Wanted(worker=9)) == ["three"]
    assert texts(found.path, limit=1) == ["one", "two", "three", "a1 Counter 9"]
    with pytest.raises(ValueError, match="no place in log files"):
        read_page(found.path, Wanted(), "../x")


def test_next_daemon_continues_the_file_and_ends_a_torn_line(files, runtime):
    files.write(printed("one"))
    (found,) = find_folders(runtime)
    with open(found.path / "00000001.log", "ab") as file:
        file.write(b"2026-11-24T04:17:31\tout\t1")
    other = LogFiles(runtime, SESSION, 1 << 20, dict, pytest.fail)
    other.write(printed("two"))
    other.close()
    assert texts(found.path) == ["one", "two"]


def test_sessions_that_run_and_the_last_five_are_kept(runtime):
    """Also one that runs on another machine, or in a container, with the same runtime folder."""
    (runtime / "logs").mkdir(0o700)
    elsewhere = make_session_folder(runtime / f"{1:032x}", "a session's folder")
    (elsewhere / MARK).write_text("another machine 1")
    for k in range(9):
        made = LogFiles(runtime, f"{k:032x}", 1 << 20, dict, pytest.fail)
        made.write(printed("x"))
        made.close()
        os.utime(runtime / "logs" / f"{k:032x}" / "00000001.log", (1000 + k, 1000 + k))
    assert [int(one.session, 16) for one in find_folders(runtime)] == [8, 7, 6, 5, 4, 1]
    make_session_folder(runtime / f"{7:032x}", "a session's folder")  # of one that was killed here
    assert [int(one.session, 16) for one in find_folders(runtime) if one.is_alive] == [1]


def test_link_in_the_place_of_a_file_is_not_followed(files, runtime, tmp_path):
    files.write(printed("one"))
    (found,) = find_folders(runtime)
    os.replace(found.path / "00000001.log", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", found.path / "00000001.log")
    with pytest.raises(UnsafeFolderError, match="is a link"):
        read_page(found.path, Wanted())


def test_full_disk_is_reported_once_and_the_missing_lines_are_counted(tmp_path):
    told = []
    with small_disk(tmp_path, 1 << 20) as disk:
        runtime = disk / "rt"
        runtime.mkdir(0o700)
        made = LogFiles(runtime, SESSION, 64 << 20, dict, told.append)
        for k in range(300):
            made.write(printed(f"{k} " + "x" * 10_000))
        assert len(told) == 1
        assert "No space left" in told[0]
        made.write(printed("lost"))
        (found,) = find_folders(runtime)
        written = len(texts(found.path))
        (disk / "rt" / "logs" / SESSION / "00000001.log").write_bytes(b"")
        made._retry_at = 0.0
        made.write(printed("again"))
        assert texts(found.path) == [f"{301 - written} lines are missing here: they could not be written", "again"]
        made.close()
    assert len(told) == 1


def test_killed_daemon_loses_no_whole_line_and_tasks_that_print_nothing_make_no_file(runtime_dir, wait_until):
    with fastrt.init(1, "64MiB", runtime_dir=runtime_dir, log_to_driver=False) as runtime:
        quiet = fastrt.remote(lambda: None)
        fastrt.get([quiet.remote() for _ in range(100)])
        assert find_folders(runtime_dir) == []

        @fastrt.remote
        def speak():
            for k in range(40_000):
                sys.stdout.write(f"{k}\n")

        ref = speak.remote()
        for _ in range(3):
            size = sum(one.nbytes for one in find_folders(runtime_dir))
            wait_until(
                lambda size=size: (
                    sum(o.nbytes for o in find_folders(runtime_dir)) > size or fastrt.wait([ref], timeout=0)[0]
                ),
                "more lines",
            )
            daemon = runtime._processes.daemon
            daemon.kill()
            wait_until(lambda daemon=daemon: runtime._processes.daemon is not daemon, "another daemon")
        fastrt.get(ref)
    (found,) = find_folders(runtime_dir)
    assert not found.is_alive
    numbers = [int(text) for text in texts(found.path) if text.isdigit()]
    missing = set(range(40_000)) - set(numbers)
    assert len(missing) <= 3  # the lines under way
    shutil.rmtree(runtime_dir / "logs")
