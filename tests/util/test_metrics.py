"""`fastrt.util.metrics`: what processes record, added up for a reader."""

import json
import os
import pickle
import signal
import threading
from pathlib import Path

import pytest

import fastrt
from fastrt._core.memory.segment import start_time
from fastrt.observe import program_metrics
from fastrt.observe.program_metrics import Definition, SeriesFile, fold, read
from fastrt.ray.util import metrics as of_ray
from fastrt.store import client as store_client
from fastrt.util import metrics
from fastrt.util.metrics import Counter, Gauge, Histogram


@pytest.fixture(autouse=True)
def book(monkeypatch):
    """Series of this test only, whose file is closed at its end."""
    mine = metrics._Book()
    monkeypatch.setattr(metrics, "_book", mine)
    yield mine
    with mine.lock:
        mine.move(None)


@pytest.fixture
def session(rt):
    """The folder of the running session, without the metrics of earlier tests."""
    folder = Path(store_client.require().socket_path).parent
    for path in (folder / program_metrics.FOLDER).glob("*"):
        path.unlink()
    return folder


def values(folder):
    """The values of all series, by name and tags."""
    found = {}
    for one in read(folder)[0]:
        found.setdefault((one.definition.name, *one.definition.tags), []).append(one.values)
    return found


@fastrt.remote
class Reader:
    def __init__(self):
        self.rows = Counter("rows", "Rows.", tag_keys=("file",))
        self.depth = Gauge("depth", tag_keys=("kind", "place")).set_default_tags({"kind": "queue", "place": "here"})
        self.seconds = Histogram("seconds", boundaries=[0.1, 1.0])

    def read(self, name, count):
        self.rows.inc(count, tags={"file": name})
        self.depth.set(count, tags={"place": name})
        for value in (0.05, 0.1, 0.5, 7):
            self.seconds.observe(value)
        return os.getpid()


def test_processes_are_added_up_and_gauges_go_with_theirs(session, wait_until):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from fastrt.observe.metrics import exposition

    def figures():
        text = exposition(store_client.require()).decode()
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.startswith("fastrt_")
        }

    readers = [Reader.remote() for _ in range(2)]
    pids = fastrt.get([reader.read.remote("a", 10 * k) for k, reader in enumerate(readers, 1)])
    Counter("rows", "Rows.", tag_keys=("file",)).inc(2.5, tags={"file": 'b"\n'})
    found = figures()
    assert found["rows_total", ("file", "a")] == 30
    assert found["rows_total", ("file", 'b"\n')] == 2.5
    assert [found["depth", ("kind", "queue"), ("pid", str(pid)), ("place", "a")] for pid in pids] == [10, 20]
    buckets = {labels[0][1]: value for (name, *labels), value in found.items() if name == "seconds_bucket"}
    assert buckets == {"0.1": 4, "1.0": 6, "+Inf": 8}
    assert found["seconds_count",] == 8
    assert found["seconds_sum",] == pytest.approx(15.3)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not start_time(pids[0]), "the end of the actor")
    found = figures()
    assert found["rows_total", ("file", "a")] == 30
    assert [labels for name, *labels in found if name == "depth"] == [
        [("kind", "queue"), ("pid", str(pids[1])), ("place", "a")]
    ]
    del readers


def test_two_metrics_of_one_name_are_counted_as_left_out(session):
    pytest.importorskip("prometheus_client")
    from fastrt.observe.metrics import exposition

    Counter("twice").inc()
    Gauge("twice").set(3)
    Counter("others", tag_keys=("2 b",)).inc(tags={"2 b": "x"})
    text = exposition(store_client.require()).decode()
    assert "twice_total 1.0" in text
    assert 'others_total{_2_b="x"} 1.0' in text
    assert "fastrt_program_series_left_out 1.0" in text


def test_odd_names_and_values_do_not_cost_the_scrape(session):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from fastrt.observe.metrics import exposition

    Gauge("odd", "\ud800", tag_keys=("pid", "a b", "a-b", "__x", "")).set(
        float("nan"), tags={"pid": "1", "a b": "\ud800", "a-b": "3", "__x": "4", "": "5"}
    )
    Histogram("buckets", boundaries=[1, 1, float("inf"), 0.5], tag_keys=("le",)).observe(3, tags={"le": "x"})
    families = {one.name: one for one in text_string_to_metric_families(exposition(store_client.require()).decode())}
    (odd,) = families["odd"].samples
    assert odd.labels == {"pid_": "1", "a_b": "?", "a_b_": "3", "_x": "4", "_": "5", "pid": str(os.getpid())}
    buckets = [(one.labels["le"], one.value) for one in families["buckets"].samples if one.name == "buckets_bucket"]
    assert buckets == [("0.5", 0), ("1.0", 0), ("+Inf", 1)]


def test_values_without_a_session_are_written_when_there_is_one(session, monkeypatch):
    counter = Counter("early")
    with monkeypatch.context() as patch:
        patch.setattr(store_client, "_store", None)
        counter.inc(4)
        assert values(session) == {}
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "SERIES_MAX", 1)
        with pytest.raises(fastrt.FastrtError, match="this process has 1 series"):
            Counter("more").inc()
    counter.inc()
    assert values(session) == {("early",): [(5.0,)]}


def test_forked_child_counts_for_itself(session):
    counter = Counter("forked")
    counter.inc(10)
    pid = os.fork()
    if pid == 0:
        try:
            counter.inc()
            assert list(values(session)["forked",]) in ([(10.0,), (1.0,)], [(1.0,), (10.0,)], [(10.0,)])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    counter.inc()
    assert max(values(session)["forked",]) == (11.0,)


def test_threads_lose_nothing(session):
    counter, histogram = Counter("threads"), Histogram("many", boundaries=[1])

    def work():
        for _ in range(2000):
            counter.inc()
            histogram.observe(2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(session) == {("threads",): [(8000.0,)], ("many",): [(0.0, 8000.0, 16000.0)]}


def test_full_file_is_an_error_in_words(session):
    counter = Counter("full", tag_keys=("user",))

    def fill():
        for k in range(100_000):
            counter.inc(tags={"user": f"{k:06}"})

    with pytest.raises(fastrt.FastrtError, match="tags with fewer values"):
        fill()
    counter.inc(tags={"user": "000000"})
    found = values(session)
    assert found["full", ("user", "000000")] == [(2.0,)]
    assert 5000 < len(found) < 20_000


def test_files_of_dead_processes_are_added_up_once(session, monkeypatch):
    folder = session / program_metrics.FOLDER
    monkeypatch.setattr(program_metrics, "FILES_MAX", 3)
    one, two = Definition("rows", "counter", "", ()), Definition("depth", "gauge", "", ())
    mine = program_metrics._name(os.getpid())

    def leave(name):
        file = SeriesFile(session)
        file.close([file.add(one, [2.0]), file.add(two, [5.0])])
        (folder / mine).rename(folder / name)

    for k in range(4):
        leave(f"{4_194_304 + k}-1")  # above the greatest pid
    assert len(values(session)["rows",]) == 4
    SeriesFile(session).close([])
    assert sorted(path.name for path in folder.glob("[0-9]*")) == [mine]
    assert values(session) == {("rows",): [(8.0,)]}
    about = json.loads((folder / "ended").read_text())
    for k in range(4):
        leave(f"{4_194_304 + k}-2")
    about["folded"] = [f"{4_194_304 + k}-2" for k in range(3)]  # as after a death before these files' removal
    (folder / "ended").write_text(json.dumps(about))
    assert values(session) == {("rows",): [(8.0,), (2.0,)], ("depth",): [(5.0,)]}
    fold(folder)
    assert not list(folder.glob("[0-9]*"))
    assert values(session) == {("rows",): [(10.0,)]}


def test_damaged_file_is_left_out(session):
    Counter("good").inc()
    folder = session / program_metrics.FOLDER
    for k, data in enumerate((b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"\x05" * 100)):
        (folder / f"1-{k}").write_bytes(data)
    assert values(session) == {("good",): [(1.0,)]}


def test_rays_path_has_the_same_classes():
    assert (of_ray.Counter, of_ray.Gauge, of_ray.Histogram) == (Counter, Gauge, Histogram)


def test_wrong_arguments_are_refused_as_by_ray():
    with pytest.raises(ValueError, match="a metric needs a name"):
        Counter("")
    with pytest.raises(ValueError, match="fastrt's own"):
        Gauge("fastrt_tasks")
    with pytest.warns(UserWarning, match="Invalid metric name: a b"):
        Counter("a b").inc()
    for keys in ("a", ["a"]):
        with pytest.raises(TypeError, match="tuple"):
            Counter("a", tag_keys=keys)
    with pytest.raises(TypeError, match="Tag keys must be str"):
        Counter("a", tag_keys=(1,))
    counter = Counter("a", tag_keys=("x", "y")).set_default_tags({"x": "1"})
    with pytest.raises(ValueError, match="Missing value for tag key"):
        counter.inc()
    with pytest.raises(ValueError, match="Unrecognized tag key z"):
        counter.set_default_tags({"z": "1"})
    with pytest.raises(TypeError, match="Tag values must be str"):
        counter.inc(tags={"y": 2})
    with pytest.raises(ValueError, match=">0"):
        counter.inc(0, tags={"y": "2"})
    with pytest.raises(TypeError, match="int or float"):
        counter.inc("1")
    for boundaries in (None, [], [0], [-1, 1], [float("nan")]):
        with pytest.raises(ValueError, match="boundaries"):
            Histogram("h", boundaries=boundaries)
    Gauge("g").set(None)
    again = pickle.loads(pickle.dumps(counter))
    assert again.info == counter.info == {
        "name": "a", "description": "", "tag_keys": ("x", "y"), "default_tags": {"x": "1"},
    }  # fmt: skip
    histogram = pickle.loads(pickle.dumps(Histogram("h", boundaries=[1, 2])))
    assert histogram.info["boundaries"] == [1, 2]
