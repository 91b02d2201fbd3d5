"""Series of figures that programs record by `fastrt.util.metrics`, in files of the session's folder.

Each process has a mapped file of its own, named by its pid and start time. One process writes it, without a lock that
others share; any process of the user reads it at any time. A file holds a word with the bytes in use, then records: the
sizes, the definition as JSON, the values as doubles. A record is complete before the word counts it in; that store is
its commit point. A value is one aligned store. The parts of a histogram are separate stores, so that a reader may see
one observation in a bucket before it is in the sum.

A dead process leaves its file, and its counters and histograms go on counting until the session ends. When there are
more than FILES_MAX files, the next process that starts one adds those of dead processes up in the file ENDED, which
names them, too: a death between its replacement and their removal adds nothing twice. A reader starts again when ENDED
was replaced meanwhile.

The files are outside of the arena, because the arena's tables have a fixed size and hold what every process needs: no
session pays for series that few programs have, and a process that writes nonsense damages its own file only.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from fastrt._core.memory.segment import start_time
from fastrt.errors import FastrtError
from fastrt.folders import open_private, private_folder, replace_private
from fastrt.foreign_text import read_object

FOLDER = "metrics"  # in the session's
ENDED = "ended"
FILE_BYTES = 1 << 20
FILES_MAX = 64
SERIES_MAX = 10_000  # that are read, and kept of dead processes
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
_USED = struct.Struct("<Q")
_SIZES = struct.Struct("<II")  # bytes of the definition, number of values
_VALUE_BYTES = 8
_PURPOSE = "the folder of programs' metrics"


@dataclass(frozen=True, slots=True)
class Definition:
    """One series: a metric with values of its tags.

    Attributes:
        name, description: as the program gave them.
        kind: COUNTER, GAUGE or HISTOGRAM.
        tags: (key, value) in the order of the keys.
        boundaries: of a histogram's buckets.
    """

    name: str
    kind: str
    description: str
    tags: tuple[tuple[str, str], ...]
    boundaries: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """The number of its values: of a histogram, one for each bucket, the last without a bound, and the sum."""
        return len(self.boundaries) + 2 if self.kind == HISTOGRAM else 1


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one series: of one process (`pid`), or of ended ones (`pid` is 0)."""

    definition: Definition
    values: tuple[float, ...]
    pid: int


class SeriesFile:
    """The file of this process; one thread at a time.

    Args:
        session_folder: the session's.
    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, session_folder: Path) -> None:
        folder = private_folder(session_folder / FOLDER, _PURPOSE)
        fold(folder)
        fd = open_private(folder, _name(os.getpid()), os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, FILE_BYTES)
            self._map = mmap.mmap(fd, FILE_BYTES)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("d")
        self._used = _USED.size

    def add(self, definition: Definition, values: Iterable[float]) -> memoryview[float]:
        """Add a series.

        Args:
            definition: of the series.
            values: the first ones.
        Returns:
            Its values, which may be written to as long as the file is open.
        Raises:
            FastrtError: the file is full.
        """
        text = json.dumps(astuple(definition)).encode()
        text += b" " * (-len(text) % _VALUE_BYTES)
        begin = self._used + _SIZES.size + len(text)
        end = begin + definition.size * _VALUE_BYTES
        if end > FILE_BYTES:
            raise FastrtError(
                f"metric {definition.name!r}: this process has no room for one more series of metrics (1 MiB is in "
                "use). Each combination of tags' values is a series: use tags with fewer values"
            )
        _SIZES.pack_into(self._map, self._used, len(text), definition.size)
        self._map[self._used + _SIZES.size : begin] = text
        cells = self._words[begin // _VALUE_BYTES : end // _VALUE_BYTES]
        for k, value in enumerate(values):
            cells[k] = value
        self._used = end
        _USED.pack_into(self._map, 0, end)  # the commit point
        return cells

    def close(self, views: Iterable[memoryview[float]]) -> None:
        """Unmap the file, which stays. `views` are all that `add` returned."""
        for view in views:
            view.release()
        self._words.release()
        self._map.close()


def read(session_folder: Path) -> tuple[list[Series], int]:
    """Read the series of a session.

    Returns:
        (series, left_out): at most SERIES_MAX, and how many more there are.
    """
    folder = session_folder / FOLDER
    while True:
        before = _identity(folder / ENDED)
        folded, series, left_out = _read_ended(folder)
        for name in sorted(_files(folder) - folded):
            pid = int(name.partition("-")[0])
            series += [Series(one, values, pid if _lives(name) else 0) for one, values in _read_file(folder / name)]
        if _identity(folder / ENDED) == before:
            return series[:SERIES_MAX], left_out + max(0, len(series) - SERIES_MAX)


def fold(folder: Path) -> None:
    """Add the files of dead processes up, if there are more than FILES_MAX files and no other process does so."""
    if len(_files(folder)) <= FILES_MAX:
        return
    lock = open_private(folder, "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _fold(folder)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _fold(folder: Path) -> None:
    folded, series, left_out = _read_ended(folder)
    dead = {name for name in _files(folder) if not _lives(name)}
    sums: dict[Definition, tuple[float, ...]] = {one.definition: one.values for one in series}
    for name in dead - folded:
        for one, values in _read_file(folder / name):
            if one.kind == GAUGE:
                continue
            if one not in sums and len(sums) >= SERIES_MAX:
                left_out += 1
                continue
            sums[one] = tuple(map(sum, zip(sums.get(one, (0.0,) * one.size), values, strict=True)))
    kept = [[*astuple(one), values] for one, values in sums.items()]
    about = {"folded": sorted(dead), "series": kept, "left_out": left_out}
    replace_private(folder, ENDED, json.dumps(about).encode())
    for name in dead:
        (folder / name).unlink(missing_ok=True)


def _read_ended(folder: Path) -> tuple[set[str], list[Series], int]:
    try:
        about = read_object((folder / ENDED).read_bytes(), "the metrics of ended processes", own=True)
        series = [Series(_defined(row[:-1]), tuple(map(float, row[-1])), 0) for row in about["series"]]
        return set(about["folded"]), series, int(about["left_out"])
    except FileNotFoundError:
        return set(), [], 0


def _identity(path: Path) -> tuple[int, int]:
    """Changes when the file is replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _files(folder: Path) -> set[str]:
    with suppress(FileNotFoundError):
        return {entry.name for entry in os.scandir(folder) if entry.name[0].isdigit()}
    return set()


def _read_file(path: Path) -> Iterator[tuple[Definition, tuple[float, ...]]]:
    """The complete records of a file; none if it is gone or damaged."""
    with suppress(FileNotFoundError, ValueError, TypeError, struct.error, FastrtError):
        with path.open("rb") as file:
            (used,) = _USED.unpack(file.read(_USED.size))
            data = file.read(min(used, FILE_BYTES) - _USED.size if used else 0)
        at = 0
        while at < len(data):
            length, size = _SIZES.unpack_from(data, at)
            text = data[at + _SIZES.size : at + _SIZES.size + length]
            definition = _defined(read_object(b'{"row":' + text + b"}", "a metric", own=True)["row"])
            if size != definition.size:
                raise ValueError(f"{definition.name} has {size} values")
            at += _SIZES.size + length
            yield definition, struct.unpack_from(f"<{size}d", data, at)
            at += size * _VALUE_BYTES


def _defined(row: list) -> Definition:  # type: ignore[type-arg]
    name, kind, description, tags, boundaries = row
    return Definition(name, kind, description, tuple((key, value) for key, value in tags), tuple(boundaries))


def _name(pid: int) -> str:
    return f"{pid}-{start_time(pid)}"


def _lives(name: str) -> bool:
    pid, _, started = name.partition("-")
    return str(start_time(int(pid))) == started
