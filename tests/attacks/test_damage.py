"""Damage of durable state: each injection ends in "all acknowledged data is right" or in a refusal in words.

Every victim writes its files, which are then copied as a kill would leave them. An injection changes the copy, and the
victim starts on it. A start that gives other data than was acknowledged, without a word, fails the test. With
`accept_loss` the start succeeds, and says what is gone. Run with `-s` for a line per injection.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastrt.coordination import events as cev
from fastrt.coordination.engine import Core
from fastrt.coordination.state import Settings
from fastrt.durable import DamagedStateError, Journal, Mark, StateDirectoryError, WriteLog
from fastrt.net.grpc.descriptors import message_set
from fastrt.ps.head_state import HeadFile
from fastrt.ps.journal import FolderMedium
from fastrt.ps.journal import Journal as PushJournal
from fastrt.ps.optimizers import SGD
from fastrt.ps.spec import Spec
from fastrt.scheduler.log import EventLog
from fastrt.scheduler.state import Settings as SchedulerSettings
from fastrt.scheduler.wire import METHODS, parse_request

KEYS = 60
_PAGE = 4096
Injection = Callable[[Path, Path], None]


class Coordinator:
    """A coordinator's records, and the writes of its front that are not yet among them."""

    name = "coordinator"
    files = ("state-1.log", "state.mark", "writes-1.log", "writes.mark")

    def make(self, folder: Path, older: Path, key: str = "key") -> dict[str, bytes]:
        """Write acknowledged keys; `older` gets a copy from half-way."""
        journal = Journal(folder)
        core = Core(Settings(roles={"job": 1}), journal, front=7)
        log = WriteLog(folder)
        kept = {}
        for number in range(KEYS):
            name, value = f"{key}/{number}", b"%d" % number * 20
            kept[name] = value
            if number % 2:
                core._handle(cev.InsertKey(0, name, value, True))
                core.settle()
            else:
                log.append(number // 2 + 1, name, value)
            if number == KEYS // 2:
                for done in range(number // 2 + 1):
                    core.write(done + 1, f"{key}/{2 * done}", kept[f"{key}/{2 * done}"])
                core.settle()
                shutil.copytree(folder, older)
        _leave(folder)
        log.close()
        journal.close()
        return kept

    def load(self, folder: Path, accept_loss: bool = False) -> tuple[dict[str, bytes], list[str]]:
        """The keys that a start finds, and the losses that it states."""
        journal = Journal(folder, accept_loss=accept_loss)
        try:
            core = Core(Settings(roles={"job": 1}), journal, front=8)
            state = core.state.keys
            return {key: state.value(key) for key in state.all_keys()}, journal.losses
        finally:
            journal.close()


class Scheduler:
    """A scheduler's events."""

    name = "scheduler"
    files = ("state-1.log", "state.mark")

    def make(self, folder: Path, older: Path, key: str = "store") -> dict[str, bytes]:
        """Register stores, each of them acknowledged."""
        log = EventLog(Journal(folder), SchedulerSettings())
        request, _ = message_set("ray").methods("Scheduler")["RegisterObjStore"]
        path = next(path for path in METHODS if path.endswith("/RegisterObjStore"))
        kept = {}
        for number in range(KEYS):
            body = request(objstore_address=f"{key}-{number}").SerializeToString()
            event = parse_request(path, body, number)
            log.keep(event, (path, body), log.state.handle(event))
            log.write()
            kept[f"{key}-{number}"] = b""
            if number == KEYS // 2:
                shutil.copytree(folder, older)
        _leave(folder)
        log.close()
        return kept

    def load(self, folder: Path, accept_loss: bool = False) -> tuple[dict[str, bytes], list[str]]:
        """See `Coordinator`."""
        log = EventLog(Journal(folder, accept_loss=accept_loss), SchedulerSettings())
        try:
            return dict.fromkeys(log.state.stores, b""), log.losses
        finally:
            log.close()


class Server:
    """A parameter server's journal: pushes, and a snapshot of the first of them."""

    name = "server"
    files = ("server-1/log", "server-1/snapshot-0", "server-1/snapshot-1", "server-1/mark")

    def make(self, folder: Path, older: Path, key: str = "push") -> dict[str, bytes]:
        """Append acknowledged pushes, with two snapshots on the way."""
        place = folder / ("server-1" if key == "push" else "server-2")
        journal = PushJournal(FolderMedium(place))
        assert list(journal.recover()) == []
        kept: dict[str, bytes] = {}
        for number in range(KEYS):
            name, value = f"{key}-{number}", b"%d" % number * 20
            journal.append({"name": name}, [value])
            kept[name] = value
            if number in (KEYS // 4, KEYS // 3):
                journal.snapshot([({"name": one}, [value]) for one, value in kept.items()])
            if number == KEYS // 2:
                shutil.copytree(folder, older)
        _leave(folder)
        journal.close()
        return kept

    def load(self, folder: Path, accept_loss: bool = False) -> tuple[dict[str, bytes], list[str]]:
        """See `Coordinator`."""
        journal = PushJournal(FolderMedium(folder / "server-1"), accept_loss=accept_loss, expected=True)
        try:
            return {meta["name"]: bytes(data) for meta, data in journal.recover()}, journal.losses
        finally:
            journal.close()


class Head:
    """The file of a parameter server cluster's head."""

    name = "head"
    files = ("head.json", "head.mark")

    def make(self, folder: Path, older: Path, key: str = "table") -> dict[str, bytes]:
        """Define tables, each of them acknowledged."""
        file = HeadFile(folder)
        spec = Spec("w", "dense", (4,), SGD(), None, (0, 4))
        tables = {}
        for number in range(8):
            file.folder_of(number).mkdir()
            tables[f"{key}-{number}"] = (spec, [number])
            file.write(number + 1, tables, {})
            if number == 4:
                shutil.copytree(folder, older)
        _leave(folder)
        file.close()
        return dict.fromkeys(tables, b"")

    def load(self, folder: Path, accept_loss: bool = False) -> tuple[dict[str, bytes], list[str]]:
        """See `Coordinator`."""
        file = HeadFile(folder, accept_loss)
        try:
            file.write(file.epoch, file.tables, file.options)
            return dict.fromkeys(file.tables, b""), file.losses
        finally:
            file.close()


VICTIMS = [Coordinator(), Scheduler(), Server(), Head()]


def _leave(folder: Path) -> None:
    """Copy the files as they are while the process lives: what a kill leaves."""
    shutil.copytree(folder, folder.with_name(folder.name + "-killed"))


def _frames(data: bytes) -> list[tuple[int, int]]:
    """Begin and end of each frame of a log."""
    found, at = [], 0
    while data[at : at + 4] in (b"frLg", b"frpj"):
        if data[at : at + 4] == b"frLg":
            end = at + 32 + struct.unpack_from("<I", data, at + 28)[0]
        else:
            end = at + 32 + struct.unpack_from("<I", data, at + 16)[0] + struct.unpack_from("<Q", data, at + 24)[0]
        found.append((at, end))
        at = end
    return found


def _edit(change: Callable[[bytes], bytes]) -> Injection:
    def inject(path: Path, _: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return inject


def _flip(place: Callable[[bytes], int]) -> Injection:
    def change(data: bytes) -> bytes:
        at = place(data)
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    return _edit(change)


def _frame(data: bytes, share: float) -> tuple[int, int]:
    frames = _frames(data) or [(0, len(data))]
    return frames[min(len(frames) - 1, int(share * len(frames)))]


def _flips() -> Iterator[tuple[str, Injection]]:
    fields = {"magic": 0, "crc": 4, "salt": 8, "number": 16, "chain": 24, "length": 28, "payload": 34}
    for where, share in (("first", 0.0), ("middle", 0.5), ("last", 1.0)):
        for name, offset in fields.items():
            yield (
                f"flip {name} of {where} frame",
                _flip(lambda d, s=share, o=offset: min(_frame(d, s)[0] + o, len(d) - 1)),  # type: ignore[misc]
            )


def _cuts() -> Iterator[tuple[str, Injection]]:
    for where, share in (("start", 0.0), ("middle", 0.5), ("last", 1.0)):
        yield f"cut at {where} frame", _edit(lambda d, s=share: d[: _frame(d, s)[0]])  # type: ignore[misc]
        yield f"cut in {where} frame", _edit(lambda d, s=share: d[: sum(_frame(d, s)) // 2])  # type: ignore[misc]


def _replaced(name: str) -> Injection:
    """Another session's file, or one of an older moment."""

    def inject(path: Path, base: Path) -> None:
        source = next((base / name).rglob(path.name), None)
        if source is not None:
            shutil.copy(source, path)
        else:
            path.unlink()

    return inject


def _swap(path: Path, base: Path) -> None:
    """Exchange the file with the next of its directory."""
    others = sorted(p for p in path.parent.iterdir() if p.suffix == path.suffix and p != path)
    if others:
        first, second = path.read_bytes(), others[0].read_bytes()
        path.write_bytes(second)
        others[0].write_bytes(first)


def _without(share: float, count: int = 1) -> Injection:
    def change(data: bytes) -> bytes:
        frames = _frames(data)
        if len(frames) < 3:
            return data[: len(data) // 2]
        first = min(int(share * len(frames)), len(frames) - count)
        return data[: frames[first][0]] + data[frames[first + count - 1][1] :]

    return _edit(change)


def _doubled(data: bytes) -> bytes:
    begin, end = _frame(data, 0.5)
    return data[:end] + data[begin:end] + data[end:]


def _doubled_at_end(data: bytes) -> bytes:
    frames = _frames(data) or [(0, len(data))]
    end = frames[-1][1]
    return data[:end] + data[frames[len(frames) // 2][0] : frames[-1][1]]


def _exchanged(data: bytes) -> bytes:
    frames = _frames(data)
    if len(frames) < 4:
        return data[::-1]
    (a, b), (_, c) = frames[len(frames) // 2], frames[len(frames) // 2 + 1]
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _zeroed(data: bytes) -> bytes:
    end = (_frames(data) or [(0, len(data))])[-1][1]
    at = end // 2 // _PAGE * _PAGE
    return data[:at] + bytes(min(_PAGE, len(data) - at)) + data[at + _PAGE :]


def _half_a_record(data: bytes) -> bytes:
    """The process has died within a write: the frame is there in part, and was not acknowledged."""
    begin, end = _frame(data, 1.0)
    return data[:end] + data[begin : (begin + end) // 2]


INJECTIONS: dict[str, Injection] = {
    "nothing": lambda path, base: None,
    **dict(_flips()),
    **dict(_cuts()),
    "emptied": _edit(lambda d: b""),
    "removed": lambda path, base: path.unlink(),
    "swapped with its neighbour": _swap,
    "of an older moment": _replaced("older"),
    "of another session": _replaced("other"),
    "record removed": _without(0.5),
    "three records removed": _without(0.5, 3),
    "newest record removed": _without(1.0),
    "record doubled": _edit(_doubled),
    "records doubled at the end": _edit(_doubled_at_end),
    "two records exchanged": _edit(_exchanged),
    "garbage appended": _edit(lambda d: d[: (_frames(d) or [(0, len(d))])[-1][1]] + random.Random(1).randbytes(9000)),
    "zeros appended": _edit(lambda d: d + bytes(9000)),
    "page zeroed": _edit(_zeroed),
    "all zeroed": _edit(lambda d: bytes(len(d))),
    "half a record at the end": _edit(_half_a_record),
}
# Of the end of a log: no acknowledged record is touched.
HARMLESS = {
    "nothing",
    "records doubled at the end",
    "garbage appended",
    "zeros appended",
    "half a record at the end",
}


# The ones that differ most; the others are for the long run.
QUICK = {
    *(name for name in INJECTIONS if not name.startswith(("flip", "cut"))),
    "flip length of middle frame",
    "flip payload of middle frame",
    "flip crc of last frame",
    "cut at middle frame",
    "cut in last frame",
} - {"three records removed", "all zeroed", "zeros appended", "record doubled"}
# Each quick injection is made to every other victim; the long run makes the others.
CHOSEN = [
    pytest.param(
        victim,
        name,
        marks=[] if name in QUICK and (place + number) % 2 == 0 else pytest.mark.long,
        id=f"{victim.name}-{name}",
    )
    for place, victim in enumerate(VICTIMS)
    for number, name in enumerate(INJECTIONS)
]
_made: dict[str, tuple[Path, dict[str, bytes]]] = {}


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A victim, the folder with its files and those of other moments, and what was acknowledged."""
    victim = request.param
    if victim.name not in _made:
        base = tmp_path_factory.mktemp(victim.name)
        kept = victim.make(base / "now", base / "older")
        victim.make(base / "another", base / "another-older", "foreign")
        (base / "another-killed").rename(base / "other")
        _made[victim.name] = base, kept
    return victim, *_made[victim.name]


def _outcome(victim: Any, folder: Path, kept: dict[str, bytes], accept_loss: bool) -> str:
    try:
        found, losses = victim.load(folder, accept_loss)
    except StateDirectoryError as error:
        words = str(error)
        assert str(folder) in words, f"a refusal names the files: {words}"
        return f"refused: {words}"
    if found == kept:
        return "right"
    assert losses, f"SILENT: {len(set(kept.items()) - set(found.items()))} of {len(kept)} acknowledged are gone"
    assert set(found.items()) <= set(kept.items()), "SILENT: other data than was acknowledged"
    return f"{len(found)} of {len(kept)}, stated: {losses[0]}"


@pytest.mark.parametrize(("made", "name"), CHOSEN, indirect=["made"])
def test_damage_is_harmless_or_refused_in_words(made: Any, tmp_path: Path, name: str) -> None:
    victim, base, kept = made
    for file in victim.files:
        folder = tmp_path / f"{Path(file).name}-damaged"
        shutil.copytree(base / "now-killed", folder)
        INJECTIONS[name](folder / file, base)
        again = tmp_path / f"{Path(file).name}-again"
        shutil.copytree(folder, again)
        outcome = _outcome(victim, folder, kept, False)
        assert outcome.startswith(("right", "refused"))
        if name in HARMLESS and file.endswith("log"):
            assert outcome == "right"
        if outcome != "right":
            accepted = _outcome(victim, again, kept, True)
            assert not accepted.startswith("refused"), accepted
            assert any(path.name.startswith("damaged-") for path in again.rglob("*")) or accepted == "right"
            first = victim.load(again)
            assert victim.load(again) == first, "the start after that is like any other"


def test_loss_of_power_may_take_a_tail_and_says_so(tmp_path: Path) -> None:
    """Another boot: an unsynced tail may be missing by contract, a hole may not."""
    victim, base = Scheduler(), tmp_path
    kept = victim.make(base / "now", base / "older")
    folder = tmp_path / "lost"
    shutil.copytree(base / "now-killed", folder)
    mark = Mark.unpack((folder / "state.mark").read_bytes())
    mark.boot_id = bytes(16)
    (folder / "state.mark").write_bytes(mark.pack().ljust(128, b"\0"))
    whole = (folder / "state-1.log").read_bytes()
    hole = tmp_path / "hole"
    shutil.copytree(folder, hole)
    frames = _frames(whole)
    (folder / "state-1.log").write_bytes(whole[: frames[-3][0] + 10])
    found, losses = victim.load(folder)
    assert "lost power" in losses[0]
    assert set(found.items()) < set(kept.items())
    assert victim.load(folder) == (found, [])
    begin, end = frames[-10]
    (hole / "state-1.log").write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
    with pytest.raises(DamagedStateError, match=f"records? {len(frames) - 10} is lost there"):
        victim.load(hole)


def test_tail_missing_after_a_clean_end_is_damage_also_after_another_boot(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(10):
        journal.write({("key", str(number)): b"v"})
    journal.close()
    mark = Mark.unpack((tmp_path / "state.mark").read_bytes())
    mark.boot_id = bytes(16)
    (tmp_path / "state.mark").write_bytes(mark.pack().ljust(128, b"\0"))
    os.truncate(tmp_path / "state-1.log", _frames((tmp_path / "state-1.log").read_bytes())[-2][0])
    with pytest.raises(DamagedStateError, match="records 9 to 10 are lost"):
        Journal(tmp_path)
