"""Records on disk behind a state machine: SQLite in WAL mode, one transaction per batch.

A state machine orders `Persist(kind, key, value)`; its shell collects the records of everything that happened in one
batch, writes them here, and only then lets answers out. So whatever a caller was told is on disk, and one commit
serves all the callers of the batch.

What a commit survives: with `synchronous=NORMAL` (the default) the death of every process at any instruction, since
the log's pages are in the kernel by then; with `power=True` the machine losing power too, at the price of an fsync
per batch.

Source: https://www.sqlite.org/wal.html, `PRAGMA synchronous`.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastrt.errors import FastrtError
from fastrt.folders import UnsafeFolderError, open_private, private_folder

_SCHEMA_VERSION = 1
# How many pages the log may hold before they go to the database, which costs two fsyncs and a write of each page that
# changed. The default of 1,000 does that every 300 small batches, a third of their whole cost.
_CHECKPOINT_PAGES = 8000
_LOOK_AGAIN_S = 0.02
# A plain table and an index, not WITHOUT ROWID: rows of 1 KiB would overflow an index page each.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (kind TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS records_by_key ON records (kind, key);
"""
_PUT = (
    "INSERT INTO records (kind, key, value) VALUES (?, ?, ?) "
    "ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value"
)
_DROP = "DELETE FROM records WHERE kind = ? AND key = ?"

_WRITES = "CREATE TABLE IF NOT EXISTS writes (number INTEGER PRIMARY KEY, key BLOB NOT NULL, value BLOB NOT NULL)"
_APPEND = "INSERT INTO writes (number, key, value) VALUES (?, ?, ?)"
_AFTER = "SELECT number, key, value FROM writes WHERE number > ? ORDER BY number"


class StateDirectoryError(FastrtError):
    """A state directory cannot be used: it is in use, of another version, damaged or not writable."""


class Journal:
    """The records of one state machine. Not thread-safe.

    Args:
        directory: where the database lives; made, with mode 0700, when missing.
        power: survive the loss of power too, at the price of an fsync per batch.
        wait_s: how long to wait for another process that uses the directory to end.

    Raises:
        StateDirectoryError: another process uses the directory, or it cannot be read or written.
    """

    def __init__(self, directory: str | os.PathLike[str], power: bool = False, wait_s: float = 0.0) -> None:
        self.directory = Path(directory)
        try:
            private_folder(self.directory, "a state directory")
            self._lock = open_private(self.directory, "lock", os.O_CREAT | os.O_RDWR)
        except (OSError, UnsafeFolderError) as error:
            raise StateDirectoryError(f"Cannot use the state directory {self.directory}: {error}.") from error
        try:
            self._take_lock(time.monotonic() + wait_s)
            self._database = self._open(power)
        except BaseException:
            os.close(self._lock)
            raise

    def records(self) -> Iterator[tuple[str, str, bytes]]:
        """All records: kind, key, value."""
        for kind, key, value in self._database.execute("SELECT kind, key, value FROM records"):
            yield kind, _text(key), value

    def write(self, records: Mapping[tuple[str, str], bytes | None]) -> None:
        """Write a batch; when this returns, it survives.

        Args:
            records: values by kind and key; None drops a record.

        Raises:
            StateDirectoryError: the disk is full or failing. Nothing of the batch was written.
        """
        database = self._database
        puts = [(kind, _blob(key), value) for (kind, key), value in records.items() if value is not None]
        drops = [(kind, _blob(key)) for (kind, key), value in records.items() if value is None]
        try:
            database.execute("BEGIN IMMEDIATE")
            try:
                if puts:
                    database.executemany(_PUT, puts)
                if drops:
                    database.executemany(_DROP, drops)
                database.execute("COMMIT")
            except BaseException:
                database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StateDirectoryError(
                f"Cannot write {len(records)} records to {self.directory}: {error}. Free space there, or move the "
                "state directory."
            ) from error

    def close(self) -> None:
        """Close the database and give the directory free."""
        self._database.close()
        os.close(self._lock)

    def _take_lock(self, until: float) -> None:
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise StateDirectoryError(
                        f"The state directory {self.directory} is in use by another process. Stop it, or name another "
                        "one."
                    ) from None
            time.sleep(_LOOK_AGAIN_S)

    def _open(self, power: bool) -> sqlite3.Connection:
        path = self.directory / "state.sqlite"
        try:
            _make_file(self.directory, path.name)
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"PRAGMA synchronous = {'FULL' if power else 'NORMAL'}")
            database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _SCHEMA_VERSION):
                raise StateDirectoryError(
                    f"{path} was written in format {version}, and this fastrt knows format {_SCHEMA_VERSION}. Use the "
                    "fastrt that wrote it, or another state directory."
                )
            database.executescript(_SCHEMA)
            database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except (sqlite3.Error, OSError, UnsafeFolderError) as error:
            raise StateDirectoryError(
                f"Cannot open {path}: {error}. If it is damaged, move it away: the service then starts empty."
            ) from error
        return database


def _make_file(directory: Path, name: str) -> None:
    """Make a database's file with mode 0600, or refuse a link in its place: SQLite would follow it.

    Not while this process has the database open: closing any descriptor of a file ends the locks that SQLite has on it.
    """
    os.close(open_private(directory, name, os.O_RDWR | os.O_CREAT))


class WriteLog:
    """Keys that one process has set on behalf of another, which takes them into its own records later.

    The writer answers as soon as `append` returns. When the writer has died, whoever takes its place reads here what
    was not yet taken in. Lives beside the records of a `Journal`; open in one process at a time, which saves the locks
    that would be half of an append's cost. Not thread-safe.

    Args:
        directory: of the journal.

    Raises:
        StateDirectoryError: the log cannot be read or written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / "writes.sqlite"
        try:
            _make_file(self._path.parent, self._path.name)
            self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            self._database.execute(_WRITES)
        except (sqlite3.Error, OSError, UnsafeFolderError) as error:
            raise self._failed(error) from error

    def append(self, number: int, key: str, value: bytes) -> None:
        """Keep one write; when this returns, it survives the death of every process.

        Raises:
            StateDirectoryError: the disk is full or failing. Nothing was written.
        """
        try:
            self._database.execute(_APPEND, (number, _blob(key), value))
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def after(self, number: int) -> list[tuple[int, str, bytes]]:
        """The writes with higher numbers, in order: number, key, value.

        Raises:
            StateDirectoryError: the log cannot be read.
        """
        try:
            found = self._database.execute(_AFTER, (number,)).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return [(taken, _text(key), value) for taken, key, value in found]

    def drop(self, number: int) -> None:
        """Forget the writes up to a number, which are in the records by now.

        Raises:
            StateDirectoryError: the disk is full or failing.
        """
        try:
            self._database.execute("DELETE FROM writes WHERE number <= ?", (number,))
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the log."""
        self._database.close()

    def _failed(self, error: Exception) -> StateDirectoryError:
        return StateDirectoryError(f"Cannot use {self._path}: {error}. Free space there, or move the state directory.")


def _blob(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")
