"""The transfer profile on small sizes: every path is measured, and what is drawn of it can be read."""

import importlib.util
import os
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest

from fastrt._core.memory.clients import KIND_DRIVER, Client, admit
from fastrt._core.memory.segment import Segment
from fastrt.config import SHM_DIR
from fastrt.errors import FastrtError
from fastrt.net.grpc.identity import Identity, new_token
from fastrt.objstore.service import ObjStoreServer
from fastrt.observe import charts
from fastrt.observe import profile as measured
from fastrt.observe.profile import LIMITS, Profile, Row
from fastrt.store.client import Store
from support import traces

SIZE = 20_000
TOKEN = new_token()
if importlib.util.find_spec("matplotlib") is not None:
    with tempfile.NamedTemporaryFile(suffix=".png") as _file:  # matplotlib opens now the fonts that it keeps open
        charts.write(Profile([Row("put", 1024, 1e-6)]), Path(_file.name))


@pytest.fixture(scope="module")
def found() -> Profile:
    """One run, with the least number of rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "_ROW_S", 0.0)
        return measured.transfer(SIZE)


def test_every_path_is_measured_at_every_size(found: Profile) -> None:
    assert measured.sizes(SIZE) == [1024, 16_384, SIZE]
    assert {(row.path, row.nbytes) for row in found.rows} == {(p, n) for p in LIMITS for n in measured.sizes(SIZE)}
    for row in found.rows:
        assert row.seconds > 0
        assert row.first_s > 0
        assert row.rounds >= 3
        assert row.rate == pytest.approx(row.nbytes / row.seconds / 1e9)
        assert set(row.parts) <= {"serialize", "copy", "wire", "wait"}
        assert row.cpu_here is not None
        assert (row.cpu_there is not None) == (row.path in ("plain TCP", "native", "grpc"))


def test_share_of_the_limit_is_that_of_the_rates(found: Profile) -> None:
    by_path = {row.path: row for row in found.rows if row.nbytes == SIZE}
    for path, limit in LIMITS.items():
        expected = by_path[path].rate / by_path[limit].rate if limit else 0.0
        assert by_path[path].limit == pytest.approx(expected)


def test_trace_has_every_operation_and_its_parts_inside(found: Profile) -> None:
    events = list(measured.events_of(found))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(names.values()) == set(LIMITS)
    puts = [event for event in events if event["ph"] == "X" and names[event["tid"]] == "put"]
    whole = [event for event in puts if event["name"].startswith("put ")]
    assert len(whole) == len([event for event in found.events if event[0] == "put"])
    assert {event["name"] for event in puts if event not in whole} == {"serialize", "copy"}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0.0


def test_trace_keeps_perfettos_rules(found: Profile) -> None:
    traces.check(list(measured.events_of(found)))


def test_trace_keeps_perfettos_rules_whatever_the_clock_says() -> None:
    """Parts that fill their operation to the last digit, which is not the same one in sums and in products."""
    rng = random.Random(3)
    profile, now = Profile(), rng.uniform(0, 1e6)
    for _ in range(3000):
        parts = {name: rng.choice((0.0, 1e-9, rng.expovariate(1e6), rng.random())) for name in ("copy", "wire", "wait")}
        seconds = rng.choice((sum(parts.values()), rng.random())) or 1e-9
        profile.events.append((rng.choice([*LIMITS]), 1024, now, seconds, parts))
        now += seconds + rng.choice((0.0, 1e-7))
    traces.check(list(measured.events_of(profile)))


def test_page_shows_rate_time_and_cpu_of_each_path_and_where_the_time_goes(found: Profile, tmp_path: Path) -> None:
    charts.write(found, tmp_path / "plot.html")
    text = (tmp_path / "plot.html").read_text()
    rate, time, here, there, split = (ElementTree.fromstring(one) for one in re.findall("<svg.*?</svg>", text))
    # `get` moves nothing, so it has a time only; the other process takes part in three paths.
    expected = {rate: len(LIMITS) - 1, time: len(LIMITS), there: 3}
    for picture, count in expected.items():
        lines = picture.findall("polyline")
        assert len(lines) == count
        assert all(len((line.get("points") or "").split()) == 3 for line in lines)
    assert here.findall("polyline")
    bars = [title.text or "" for title in split.iter("title")]
    assert {bar.partition(",")[0] for bar in bars} == set(LIMITS) - {"get"}
    assert any(bar.startswith("put, 1 KiB: serialize ") for bar in bars)
    assert "nan" not in text
    assert "0.00 " not in text


def test_page_of_a_single_point_can_be_drawn(tmp_path: Path) -> None:
    charts.write(Profile([Row("put", 1024, 1e-6)]), tmp_path / "plot.html")
    page = (tmp_path / "plot.html").read_text()
    assert "1 KiB: 1.02 GB/s" in page
    assert "1 KiB: 1 us" in page


def test_picture_needs_matplotlib_and_says_so(found: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(FastrtError, match=r"pip install 'fastrt\[plot\]'"):
        charts.write(found, tmp_path / "plot.png")
    with pytest.raises(FastrtError, match=r"must end with \.html or \.png"):
        charts.write(found, tmp_path / "plot.pdf")


def test_picture_names_the_sizes_and_covers_no_point(found: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    charts.write(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_size_beyond_shared_memory_is_refused_before_anything_starts() -> None:
    disk = os.statvfs(SHM_DIR)
    with pytest.raises(FastrtError, match="give a smaller --size"):
        measured.transfer(disk.f_blocks * disk.f_frsize)


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest) -> Iterator[ObjStoreServer]:
    """A store that the profile has not started."""
    segment = Segment.create(64 << 20)
    try:
        index, gen = admit(segment, os.getpid(), KIND_DRIVER, "test")
        identity = Identity.from_token(TOKEN).for_programs()
        server = ObjStoreServer(Store(Client(segment, index, gen), 0.0), identity=identity)
        server.start()
        yield server
        server.stop()
        request.node.funcargs.clear()  # pytest would keep it for longer than the test
    finally:
        segment.unlink()


def test_other_store_is_measured_by_its_address_and_left_as_it_was(
    elsewhere: ObjStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_ROW_S", 0.0)
    found = measured.transfer(2000, address=elsewhere.address, token=TOKEN)
    paths = {row.path for row in found.rows}
    assert paths == set(LIMITS) - {"plain TCP"}
    assert all(row.cpu_there is None and row.limit == 0.0 for row in found.rows if row.path in ("native", "grpc"))
    assert elsewhere.table.listed() == []
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        measured.transfer(2000, address=elsewhere.address, token=new_token())


def test_many_small_objects_are_brought_here() -> None:
    with measured.TwoNodes(1 << 20, new_token(), many=(100, 5000)) as nodes:
        for _ in range(2):
            nodes.pull_many()
            nodes.drop_many()


def test_address_that_is_none_is_refused() -> None:
    with pytest.raises(FastrtError, match="cannot be reached"):
        measured.transfer(2000, address="nonsense", token=TOKEN)
