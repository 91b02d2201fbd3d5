"""Records on disk: what was written is there, whatever happens to the process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastrt.durable import DamagedStateError, Journal, StateDirectoryError, WriteLog

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


def test_directory_is_private_and_used_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastrt.durable.lock._DYING_S", 0.05)
    journal = Journal(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "state-1.log").stat().st_mode & 0o077 == 0
    with pytest.raises(StateDirectoryError, match="in use by another process"):
        Journal(tmp_path / "new")
    journal.close()


def test_foreign_or_damaged_files_are_refused_in_words(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    (tmp_path / "state-1.log").write_bytes(b"this is no log, whatever it is called" * 100)
    with pytest.raises(DamagedStateError, match=r"ends .or is damaged to its end. at byte 0"):
        Journal(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectoryError, match="Cannot use the state directory"):
        Journal(tmp_path / "file")


def test_other_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fastrt.durable.log.FORMAT", 99)
        Journal(tmp_path / "newer").close()
    with pytest.raises(StateDirectoryError, match="format 99"):
        Journal(tmp_path / "newer")
    (tmp_path / "state.sqlite").write_bytes(b"")
    with pytest.raises(StateDirectoryError, match="earlier fastrt"):
        Journal(tmp_path)


def test_log_of_writes_gives_them_back_in_order_until_they_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StateDirectoryError, match="no records"):
        WriteLog(tmp_path)
    Journal(tmp_path).close()
    log = WriteLog(tmp_path)
    for number in range(1, 6):
        log.append(number, f"k\udcff{number}", b"v%d" % number)
    log.drop()
    log.close()
    again = WriteLog(tmp_path)
    assert again.after(3) == [(4, "k\udcff4", b"v4"), (5, "k\udcff5", b"v5")]
    with monkeypatch.context() as patch:
        patch.setattr("fastrt.durable.journal._WRITES_BYTES_MIN", 0)
        again.drop()
    assert again.after(3) == []
    again.append(8, "k", b"v")
    with pytest.raises(DamagedStateError, match="continues with 1 writes up to 8"):
        again.after(6)
    assert [number for number, _, _ in again.after(7)] == [8]
    again.close()


def test_directory_of_one_that_ends_soon_is_waited_for(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    ending = threading.Timer(0.1, first.close)
    ending.start()
    Journal(tmp_path).close()
    ending.join()
