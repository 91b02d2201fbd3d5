"""Records on disk: what was written is there, whatever happens to the process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastrt.durable import Journal, StateDirectoryError, WriteLog

KILLED = """
import os, signal, sys
from fastrt.durable import Journal
journal = Journal(sys.argv[1])
for number in range(int(sys.argv[2])):
    journal.write({("n", str(number)): b"x" * 100, ("last", "number"): str(number).encode()})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_records_are_there_again_and_dropped_ones_are_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write({("a", "k\udcff"): b"\x00", ("a", "gone"): b"1", ("b", ""): b""})
    journal.write({("a", "gone"): None, ("b", ""): b"2"})
    journal.close()
    again = Journal(tmp_path)
    assert sorted(again.records()) == [("a", "k\udcff", b"\x00"), ("b", "", b"2")]
    again.close()


def test_written_batches_survive_sigkill(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "50"], check=False, env=os.environ)
    assert died.returncode == -signal.SIGKILL
    journal = Journal(tmp_path)
    found = {(kind, key): value for kind, key, value in journal.records()}
    assert found["last", "number"] == b"49"
    assert len(found) == 51
    journal.close()


def test_directory_is_private_and_used_by_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "state.sqlite").stat().st_mode & 0o077 == 0
    with pytest.raises(StateDirectoryError, match="in use by another process"):
        Journal(tmp_path / "new")
    journal.close()


def test_foreign_or_damaged_files_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "state.sqlite").write_bytes(b"this is no database, whatever it is called" * 100)
    with pytest.raises(StateDirectoryError, match="move it away"):
        Journal(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectoryError, match="Cannot use the state directory"):
        Journal(tmp_path / "file")


def test_other_format_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal._database.execute("PRAGMA user_version = 99")
    journal.close()
    with pytest.raises(StateDirectoryError, match="format 99"):
        Journal(tmp_path)


def test_log_of_writes_gives_them_back_in_order_until_they_are_dropped(tmp_path: Path) -> None:
    log = WriteLog(tmp_path)
    for number in range(1, 6):
        log.append(number, f"k\udcff{number}", b"v%d" % number)
    log.drop(2)
    log.close()
    again = WriteLog(tmp_path)
    assert again.after(3) == [(4, "k\udcff4", b"v4"), (5, "k\udcff5", b"v5")]
    assert [number for number, _, _ in again.after(0)] == [3, 4, 5]
    again.close()
    (tmp_path / "writes.sqlite").write_bytes(b"no database" * 500)
    with pytest.raises(StateDirectoryError, match=r"writes\.sqlite"):
        WriteLog(tmp_path)


def test_directory_of_one_that_ends_soon_is_waited_for(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    ending = threading.Timer(0.1, first.close)
    ending.start()
    Journal(tmp_path, wait_s=50.0).close()
    ending.join()
