"""What survives: servers that begin again from their logs, pushes that come twice, parts that move under load, logs
that are cut off or damaged, and checkpoints on other numbers of servers.
"""

import contextlib
import itertools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastrt.durable import StateDirectoryError
from fastrt.errors import ObjectStoreFullError
from fastrt.ps import SGD, Adam, CheckpointError, LazyAdam, Normal, TableTimeoutError
from fastrt.ps.checkpoints import chain_of
from fastrt.ps.journal import FolderMedium, Journal, MemoryMedium
from fastrt.ps.placement import assign, divide, rebalance
from fastrt.ps.rows import part_numbers
from fastrt.ps.wire import VERSION, dial

F = np.float32


def test_servers_that_begin_anew_have_all_that_was_acknowledged(site, together, local, monkeypatch) -> None:
    """Between steps and within one, where one worker of two has pushed; also after snapshots have replaced logs."""
    monkeypatch.setattr("fastrt.ps.journal._LOG_BYTES_MIN", 3000)
    place = site(2, 2)
    sessions = [place.worker(rank) for rank in range(2)]
    shape = (30, 40)
    tables = [place.table(s, "w", shape, Adam(lr=0.1), Normal(1.0), parts=2) for s in sessions]
    rows = [place.embedding(s, "e", 4, LazyAdam(lr=0.1), init=Normal(1.0), capacity=60) for s in sessions]
    keys = np.arange(20)
    alone, alone_rows = local(Adam(lr=0.1), tables[0].pull()), local(LazyAdam(lr=0.1), rows[0].pull(keys))
    dice = np.random.default_rng(4)
    for step in range(8):
        grads = dice.standard_normal((2, *shape)).astype(F)
        row_grads = dice.standard_normal((2, 20, 4)).astype(F)
        tables[0].push(grads[0])
        rows[0].push(keys, row_grads[0])
        for one in place.places.values():
            one.die()
            one.awake()
        tables[1].push(grads[1])
        rows[1].push(keys, row_grads[1])
        if step % 2:
            place.places[0].die()
            place.places[0].awake()
        alone.update(grads.mean(axis=0))
        alone_rows.update(row_grads.mean(axis=0))
        for rank in range(2):
            np.testing.assert_allclose(tables[rank].pull(), alone.param, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(rows[rank].pull(keys), alone_rows.param, rtol=1e-5, atol=1e-5)
    assert all(one.server.journal.generation for one in place.places.values())


def test_push_that_comes_twice_is_applied_once_also_after_a_restart_and_a_move(site) -> None:
    place = site(2, mode="async")
    session = place.worker()
    table = place.table(session, "w", (2048,), SGD(lr=1.0), parts=2)
    table.pull()
    meta = {"op": "push", "table": "w", "rank": 0, "seq": 7, "lr": None, "dropped": False, "timeout": 5}
    hello = {"version": VERSION, "client": 99}

    def push(index: int, elements: int) -> dict[str, Any]:
        one = place.places[index]
        with contextlib.closing(dial(one.unix, one.address, one.trust, 5.0)) as wire:
            wire.call(hello, timeout_s=60)
            data = [np.ones(elements, F)]
            return dict(wire.call({**meta, "epoch": place.head.epoch}, data, timeout_s=60)[0])

    for _ in range(2):
        assert push(0, 1024)["floor"] == 1
    assert (table.pull() == np.repeat([-1, 0], 1024)).all()
    place.places[0].die()
    place.places[0].awake()
    assert push(0, 1024)["floor"] == 1
    place.scale(1)  # server 1, whose part moves, had not got it
    assert push(0, 2048)["floor"] == 1
    assert push(0, 2048)["floor"] == 1
    assert (table.pull() == -1).all()


def test_push_that_reached_one_server_of_two_is_taken_up_by_the_next(site) -> None:
    place = site(2, 2)
    table = place.table(place.worker(), "w", (2048,), SGD(lr=1.0), parts=2)
    hello = {"version": VERSION, "client": 99}

    def other(index: int, number: int) -> None:
        """Worker 1, at one server."""
        one = place.places[index]
        meta = {"op": "push", "table": "w", "epoch": 1, "rank": 1, "seq": number, "lr": None, "timeout": 5}
        with contextlib.closing(dial(one.unix, one.address, one.trust, 5.0)) as wire:
            wire.call(hello, timeout_s=60)
            assert "error" not in wire.call(meta, [np.zeros(1024, F)], timeout_s=60)[0]

    table.push(np.full(2048, 2, F))
    other(0, 1)
    for _ in range(2):  # server 0 takes it, server 1 waits for worker 1
        with pytest.raises(TableTimeoutError, match=r"waits for worker \[1\]"):
            table.push(np.full(2048, 20, F), timeout=0.05)
    other(1, 1)
    table.push(np.full(2048, 20, F))
    other(0, 2)
    other(1, 2)
    assert (table.pull() == -11).all()


def test_push_after_one_that_a_server_refused_reaches_all_servers(site) -> None:
    """Servers that had the refused one do not take the next one for it; the same one again is not made twice."""
    place = site(2, mode="async")
    session = place.worker()
    rows = place.embedding(session, "e", 1, SGD(lr=1.0), capacity=64)
    keys = np.arange(200, dtype=np.uint64)
    owner = np.array(place.head.tables["e"][1])[part_numbers(keys)]
    ours, theirs = keys[owner == 0], keys[owner == 1]
    too_many = np.concatenate([ours[:3], theirs[:50]])
    for _ in range(2):
        with pytest.raises(ObjectStoreFullError, match="50 keys of embedding 'e' in one call"):
            rows.push(too_many, np.ones((53, 1), F))
    rows.push(np.concatenate([ours[:2], theirs[:2]]), np.ones((4, 1), F))
    rows.push(ours[:1], np.ones((1, 1), F))
    assert rows.pull(np.concatenate([ours[:3], theirs[:2]])).ravel().tolist() == [-3, -2, -1, -1, -1]


def test_parts_move_under_load_and_no_update_is_lost_or_made_twice(site, together) -> None:
    place = site(1, 2, mode="async")
    tables, rows = [], []
    for rank in range(2):
        session = place.worker(rank)
        tables.append(place.table(session, "w", (200, 1024), SGD(lr=1.0), parts=50))
        rows.append(place.embedding(session, "e", 8, SGD(lr=1.0)))
    moving = threading.Event()
    counts = [0, 0]
    keys = np.arange(3000)
    shares = []

    def work(rank: int) -> None:
        while not moving.is_set() or counts[rank] < 10:
            tables[rank].push(np.ones((200, 1024), F))
            rows[rank].push(keys, np.ones((3000, 8), F))
            assert tables[rank].pull()[0, 0] <= -counts[rank]
            counts[rank] += 1

    def move() -> None:
        for servers in (2, 3, 4, 3, 1):
            before = {name: list(owners) for name, (_, owners) in place.head.tables.items()}
            had = len(set(before["w"]))
            place.scale(servers)
            for name, (_, owners) in place.head.tables.items():
                moved = sum(a != b for a, b in zip(before[name], owners, strict=True)) / len(owners)
                shares.append((name, had, servers, moved))
        moving.set()

    together(move, lambda: work(0), lambda: work(1))
    assert (tables[0].pull() == -sum(counts)).all()
    assert (rows[1].pull(keys) == -sum(counts)).all()
    for name, had, servers, moved in shares:
        fewest = abs(servers - had) / max(servers, had)
        assert fewest - 0.02 <= moved <= fewest + 0.02, (name, had, servers, moved)


def test_server_that_dies_while_parts_move_is_given_them_again(site, monkeypatch) -> None:
    place = site(2, mode="async")
    session = place.worker()
    table = place.table(session, "w", (8192,), SGD(lr=1.0), np.arange(8192, dtype=F), parts=8)
    rows = place.embedding(session, "e", 2, SGD(lr=1.0))
    rows.push(np.arange(500), np.ones((500, 2), F))
    place.head.add([2])
    died = []
    ask = place.head.ask

    def deadly(index: int, meta: Any, parts: Any = ()) -> Any:
        """Server 2 forgets what it has fetched; server 0, which has parts to give, begins anew."""
        if meta["op"] == "adopt" and index == 2 and not died:
            died.append(index)
            for k in (2, 0):
                place.places[k].die()
                place.places[k].awake()
            assert place.places[0].server.frozen
        return ask(index, meta, parts)

    monkeypatch.setattr(place.head, "ask", deadly)
    place.head.move_to([0, 1, 2])
    assert died
    table.push(np.ones(8192, F))
    assert np.array_equal(table.pull(), np.arange(8192, dtype=F) - 1)
    assert (rows.pull(np.arange(500)) == -1).all()
    assert not any(one.server.frozen for one in place.places.values())


def test_checkpoint_of_two_servers_goes_on_with_three_and_one(site, together, tmp_path) -> None:
    place = site(2, 2)
    sessions = [place.worker(rank) for rank in range(2)]
    optimizers = {"w": Adam(lr=0.1), "e": LazyAdam(lr=0.1)}
    tables = [place.table(s, "w", (64, 64), optimizers["w"], Normal(1.0), parts=4) for s in sessions]
    rows = [place.embedding(s, "e", 4, optimizers["e"], init=Normal(1.0)) for s in sessions]
    dice = np.random.default_rng(5)
    keys = np.arange(100)

    def step(tables: Any, rows: Any, seed: int, some: Any) -> None:
        """The same gradients for all ranks; so the mean is that of one."""
        made = np.random.default_rng(seed)
        grad, row_grad = made.standard_normal((64, 64)).astype(F), made.standard_normal((len(some), 4)).astype(F)

        def work(table: Any, row: Any) -> None:
            table.push(grad)
            row.push(some, row_grad)
            table.pull()
            row.pull(some)

        together(*[lambda t=t, r=r: work(t, r) for t, r in zip(tables, rows, strict=True)])

    step(tables, rows, 1, keys)
    paths = [place.head.checkpoint(tmp_path / "c", False)]
    step(tables, rows, 2, keys[:10])
    paths.append(place.head.checkpoint(tmp_path / "c", True))
    assert sum(f.stat().st_size for f in paths[1].iterdir()) < sum(f.stat().st_size for f in paths[0].iterdir())
    tables[0].push(dice.standard_normal((64, 64)).astype(F))  # half a step: not in what goes on
    rows[0].push(keys[5:200:7], np.ones((len(keys[5:200:7]), 4), F))
    paths.append(place.head.checkpoint(tmp_path / "c", True))
    assert [folder.name for folder, _ in chain_of(tmp_path / "c")] == [path.name for path in paths]
    expected = []
    for servers in (3, 1):
        other = site(servers, 1)
        other.head.checkpoints.load(tmp_path / "c", other.head.options)
        session = other.worker()
        table = other.table(session, "w", (64, 64), optimizers["w"], Normal(1.0), parts=4)
        row = other.embedding(session, "e", 4, optimizers["e"], init=Normal(1.0))
        assert np.array_equal(table.pull(), tables[1].pull())
        assert np.array_equal(row.pull(keys), rows[1].pull(keys))
        step([table], [row], 3, keys)  # also moments and steps
        expected.append((table.pull().copy(), row.pull(keys)))
    assert all(np.array_equal(a, b) for a, b in zip(*expected, strict=True))


def test_cluster_that_was_restored_into_a_folder_is_there_when_it_is_started_again(site, tmp_path) -> None:
    """Also into one that had other tables."""
    place = site(2)
    table = place.table(place.worker(), "w", (4096,), SGD(lr=1.0), 3.0, parts=2)
    table.push(np.ones(4096, F))
    path = place.head.checkpoint(tmp_path / "c", False)
    for folder in (tmp_path / "new", tmp_path / "used", tmp_path / "used"):
        first = site(2, checkpoint_dir=folder)
        if folder.name == "used":
            first.table(first.worker(), "other", (8,), SGD(lr=1.0), 1.0)
        first.head.checkpoints.load(path, first.head.options)
        first.close()
        again = site(2, checkpoint_dir=folder)
        assert list(again.head.tables) == ["w"]
        found = again.table(again.worker(), "w", (4096,), SGD(lr=1.0), 3.0, parts=2)
        assert (found.pull() == 2).all()
        found.push(np.ones(4096, F))
        assert (found.pull() == 1).all()
        again.close()


@pytest.mark.parametrize("op", ["limits", "checkpoint"])
def test_server_that_dies_within_a_checkpoint_takes_no_push_that_others_hold(
    site, tmp_path, monkeypatch, wait_until, op
) -> None:
    """What is restored is of one moment, and what was evicted before that server died stays so."""
    place = site(2, mode="async")
    session = place.worker()
    table = place.table(session, "w", (2048,), SGD(lr=1.0), parts=2)
    rows = place.embedding(session, "e", 2, SGD(lr=1.0), capacity=64)
    table.push(np.ones(2048, F))
    rows.pull(np.arange(40))
    place.head.checkpoint(tmp_path / "c", False)
    rows.pull(np.arange(1000, 1040))
    living = [set(np.concatenate([one.server.shards["e"].dump(range(256))["keys"]]).tolist())
              for one in place.places.values()]  # fmt: skip
    ask, pushing = place.head.ask, threading.Thread(target=lambda: table.push(np.ones(2048, F)))

    def deadly(index: int, meta: Any, parts: Any = ()) -> Any:
        if meta["op"] == op and index == 1 and not pushing.ident:
            place.places[1].server.snapshot()  # its log, which has the evictions, is short now
            place.places[1].die()
            place.places[1].awake()
            pushing.start()
            wait_until(lambda: place.places[1].server.shards["w"].pace.floor() == 2, "the push at that server")
        return ask(index, meta, parts)

    monkeypatch.setattr(place.head, "ask", deadly)
    path = place.head.checkpoint(tmp_path / "c", True)
    pushing.join()
    assert (table.pull() == -2).all()
    other = site(1)
    other.head.checkpoints.load(path, other.head.options)
    assert len(set(other.table(other.worker(), "w", (2048,), SGD(lr=1.0), parts=2).pull().tolist())) == 1
    assert set(other.places[0].server.shards["e"].dump(range(256))["keys"].tolist()) == set.union(*living)


def test_push_that_has_not_come_to_all_servers_is_waited_for(site, tmp_path, monkeypatch) -> None:
    """While its client is connected; one that is gone cannot bring it."""
    monkeypatch.setattr("fastrt.ps.checkpoint_cut._GRACE_S", 0.05)
    monkeypatch.setattr("fastrt.ps.checkpoints._SETTLE_S", 0.3)
    place = site(2, mode="async")
    place.table(place.worker(), "w", (2048,), SGD(lr=1.0), parts=2)
    meta = {"op": "push", "table": "w", "epoch": 1, "rank": 0, "seq": 1, "lr": None, "timeout": 5}
    with contextlib.ExitStack() as stack:
        wires = [dial(None, k.address, k.trust, 5.0) for k in place.places.values()]
        for wire in wires:
            stack.callback(wire.close)
        for wire in wires:
            wire.call({"version": VERSION, "client": 99}, timeout_s=60)
        assert "error" not in wires[0].call(meta, [np.ones(1024, F)], timeout_s=60)[0]
        with pytest.raises(CheckpointError, match=r"did not come to server 1 within 0\.3 s"):
            place.head.checkpoint(tmp_path / "c", False)
        monkeypatch.setattr("fastrt.ps.checkpoints._SETTLE_S", 20.0)
        wires[1].send(meta, [np.ones(1024, F)])
        path = place.head.checkpoint(tmp_path / "c", False)
    other = site(1)
    other.head.checkpoints.load(path, other.head.options)
    table = other.table(other.worker(), "w", (2048,), SGD(lr=1.0), parts=2)
    assert (table.pull() == -1).all()
    with contextlib.closing(dial(None, place.places[0].address, place.places[0].trust, 5.0)) as wire:
        wire.call({"version": VERSION, "client": 99}, timeout_s=60)
        assert "error" not in wire.call({**meta, "seq": 2}, [np.ones(1024, F)], timeout_s=60)[0]
    place.head.checkpoint(tmp_path / "c", False)


def test_checkpoint_is_whole_or_is_none(site, tmp_path, monkeypatch) -> None:
    place = site(1)
    table = place.table(place.worker(), "w", (64,), SGD(lr=1.0), 3.0)
    path = place.head.checkpoint(tmp_path / "c", False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(CheckpointError, match="no room"):
            place.head.checkpoint(tmp_path / "c", False)
    assert [one.name for one in (tmp_path / "c").iterdir()] == [path.name]
    table.push(np.ones(64, F))  # servers go on
    other = site(2)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        other.head.checkpoints.load(tmp_path, other.head.options)
    file = path / "server-0"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="incomplete or damaged"):
            other.head.checkpoints.load(path, other.head.options)
    later = place.head.checkpoint(tmp_path / "c", False)
    file.write_bytes((later / "server-0").read_bytes())  # whole, and of another checkpoint
    with pytest.raises(CheckpointError, match="of another checkpoint"):
        other.head.checkpoints.load(path, other.head.options)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "tables": []}))
    with pytest.raises(CheckpointError, match=r"manifest .* is damaged"):
        other.head.checkpoints.load(path, other.head.options)
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(CheckpointError, match="format 9"):
        other.head.checkpoints.load(path, other.head.options)
    shutil.rmtree(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=40)), max_size=6),
    snapshot_after=st.integers(0, 6),
    where=st.integers(0, 1 << 30),
    damage=st.sampled_from(["none", "torn", "cut", "flip"]),
)
def test_journal_gives_back_a_whole_beginning_of_what_was_put_in(records, snapshot_after, where, damage) -> None:
    """Cut off or damaged anywhere behind its last snapshot, or ended within the next, as a model keeps it: a list."""
    fds = MemoryMedium.make()

    class Same(MemoryMedium):
        def open(self, name: str) -> int:
            return os.dup(super().open(name))

    def journal() -> Journal:
        return Journal(Same(fds))

    first = journal()
    kept: list[tuple[int, bytes]] = []
    for k, (number, data) in enumerate(records):
        if k == snapshot_after:
            first.snapshot([({"n": n}, [d]) for n, d in kept])
        first.append({"n": number}, [data])
        kept.append((number, data))
    if damage == "torn":
        with pytest.raises(ZeroDivisionError):
            first.snapshot(({"n": n // (k < where % 7)}, [d]) for k, (n, d) in enumerate([*kept, *[(0, b"")] * 7]))
    in_log = first.log_bytes
    behind = len(records) - min(snapshot_after, len(records)) if snapshot_after < len(records) else 0
    safe = len(kept) - (behind if first.generation else len(kept))
    first.close()
    if damage in ("cut", "flip") and in_log:
        log = fds[0]
        if damage == "cut":
            os.ftruncate(log, where % in_log)
        else:
            byte = os.pread(log, 1, where % in_log)
            os.pwrite(log, bytes([byte[0] ^ 0x40]), where % in_log)
    second = journal()
    found = [(meta["n"], bytes(data)) for meta, data in second.recover()]
    assert found == kept[: len(found)]
    assert len(found) >= (len(kept) if damage in ("none", "torn") or not in_log else safe)
    second.append({"n": 1}, [b"x"])  # it goes on behind what is whole
    second.close()
    third = journal()
    assert [(meta["n"], bytes(data)) for meta, data in third.recover()] == [*found, (1, b"x")]
    third.close()
    for fd in fds:
        os.close(fd)


def test_record_that_the_disk_does_not_take_is_not_there(tmp_path, monkeypatch) -> None:
    """What follows it is; and of a snapshot that it does not take, the log before it goes on."""
    failing = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # noqa: E731
    with contextlib.closing(Journal(FolderMedium(tmp_path / "j"), power=True)) as journal:
        assert list(journal.recover()) == []
        journal.append({"n": 1}, [b"a"])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            patch.setattr(os, "fsync", failing)
            with pytest.raises(StateDirectoryError, match="Input/output error"):
                journal.append({"n": 2}, [b"b" * 100])
            with pytest.raises(StateDirectoryError, match="Input/output error"):
                journal.snapshot([({"n": 3}, [b"c"])])
        journal.append({"n": 4}, [b"d"])
        monkeypatch.setattr("fastrt.ps.journal._LOCK_S", 0.05)
        with pytest.raises(StateDirectoryError, match="in use by another server"):
            Journal(FolderMedium(tmp_path / "j"))
    with contextlib.closing(Journal(FolderMedium(tmp_path / "j"))) as journal:
        found = [(meta["n"], bytes(data)) for meta, data in journal.recover()]
    assert found == [(1, b"a"), (4, b"d")]


def test_push_that_cannot_be_kept_is_refused_and_not_applied(site, monkeypatch) -> None:
    place = site(1)
    table = place.table(place.worker(), "w", (4,), SGD(lr=1.0))
    table.pull()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(Exception, match="No space left"):
            table.push(np.ones(4, F))
    assert not table.pull(timeout=60).any()
    table.push(np.ones(4, F))
    assert (table.pull() == -1).all()
    with pytest.raises(StateDirectoryError, match="Cannot use"):
        Journal(FolderMedium(Path("/proc/no")))


@settings(max_examples=40)
@given(
    parts=st.integers(1, 256),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_parts_are_shared_out_evenly_and_move_no_more_than_they_must(parts: int, counts: list[int]) -> None:
    owners = assign(parts, range(counts[0]))
    for before, after in itertools.pairwise(counts):
        moved_to = rebalance(owners, range(after))
        held = [moved_to.count(server) for server in range(after)]
        assert max(held) - min(held) <= 1
        moved = sum(a != b for a, b in zip(owners, moved_to, strict=True))
        if parts >= max(before, after):
            assert moved <= -(-parts * abs(after - before) // max(after, before)) + max(after, before)
        owners = moved_to


@settings(max_examples=40)
@given(elements=st.integers(0, 1 << 26), wanted=st.none() | st.integers(1, 100))
def test_parts_of_a_table_are_pages_but_for_the_last(elements: int, wanted: int | None) -> None:
    cuts = divide(elements, wanted)
    assert cuts[0] == 0
    assert cuts[-1] == elements
    assert all(cut % 1024 == 0 for cut in cuts[:-1])
    assert cuts == sorted(cuts)
    assert divide(elements, len(cuts) - 1) == cuts
