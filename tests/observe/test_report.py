"""`with fastrt.report(...)`: the sums over the trace rings, and the page as a browser shows it."""

import os
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

import fastrt
from fastrt._core.memory import trace
from fastrt.observe import usage
from fastrt.observe.usage import Lengths, Parts, Usage
from fastrt.store import client as store_client
from fastrt.store import warnings
from support.browser import open_page


@fastrt.remote
def quick(number):
    return number


@fastrt.remote(name="<img src=x onerror=alert(1)>")
def nested(number):
    return fastrt.get(quick.remote(number))


@fastrt.remote
def held(path):
    with open(path) as file:
        return file.read(1)


@fastrt.remote
class Adder:
    def add(self, one, two):
        return one + two


class Tables(HTMLParser):
    """The cells of a page's tables by row, its paragraphs, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.loads, self._inside = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "action")]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self._inside = self._inside or tag == "td"

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "td"

    def handle_data(self, data):
        if self._inside:
            self.rows[-1][-1] += data

    def functions(self):
        return {row[0]: row[1:] for row in self.rows if len(row) == 8}


def test_page_counts_runs_by_function(rt, tmp_path, wait_until):
    client = store_client.require().client
    was = trace.enabled(client)
    with fastrt.report(tmp_path / "run.html", title="A <b> run"):
        assert trace.enabled(client)
        adder = Adder.remote()
        fastrt.get([quick.remote(k) for k in range(3000)])
        fastrt.get([nested.remote(k) for k in range(4)])
        fastrt.get([adder.add.remote(1, 2) for _ in range(5)])
        ref = fastrt.put(np.zeros(1 << 20, np.uint8))
        wait_until(lambda: not fastrt.list_tasks(), "the records of tasks to go")
    del adder, ref
    assert trace.enabled(client) == was
    text = (tmp_path / "run.html").read_text()
    page = Tables(text)
    assert page.loads == []
    assert "A &lt;b&gt; run" in text
    assert "&lt;img src=x" in text
    runs = {name: row[0] for name, row in page.functions().items()}
    assert runs == {"quick": "3,004", "<img src=x onerror=alert(1)>": "4", "Adder.add": "5"}
    assert "default-src 'none'" in text
    assert re.search(r"At most [\d.,]+ [KM]iB of", text)
    assert len(text) < 100_000


@fastrt.remote(max_retries=0)
def fails(number):
    raise ValueError(f"<i>bad</i> {number % 2}")


def test_failures_are_counted_and_shown_in_groups(rt, tmp_path, wait_until):
    with pytest.raises(fastrt.TaskError):
        fastrt.get(fails.remote(0))  # not on the page
    wait_until(lambda: not fastrt.list_tasks(), "the records of tasks to go")
    with fastrt.report(tmp_path / "run.html"):
        refs = [fails.remote(k) for k in (0, 1, 1)]
        for ref in refs:
            with pytest.raises(fastrt.TaskError):
                fastrt.get(ref)
        fastrt.get([quick.remote(k) for k in range(7)])
        wait_until(lambda: not fastrt.list_tasks(), "the records of tasks to go")
    text = (tmp_path / "run.html").read_text()
    (row,) = [row for row in Tables(text).rows if len(row) == 6]
    assert row == ["fails", "3", "0", "0", "0", "0"]
    assert "2 × fails: ValueError: &lt;i&gt;bad&lt;/i&gt; 1</summary>" in text
    assert "1 × fails: ValueError" in text
    assert "in fails" in text  # of the traceback
    assert '<span class="dim">tasks and calls</span><b>10</b>' in text


def test_page_is_written_when_the_block_fails(rt, tmp_path):
    with pytest.raises(ZeroDivisionError), fastrt.report(tmp_path / "run.html"):
        _ = 1 / 0
    assert "ZeroDivisionError: division by zero" in (tmp_path / "run.html").read_text()


def test_wrong_name_is_noticed_before_the_run(rt, tmp_path):
    with pytest.raises(FileNotFoundError), fastrt.report(tmp_path / "none" / "run.html"):
        raise AssertionError("the block has run")


def test_advice_is_on_the_page(rt, tmp_path, monkeypatch):
    monkeypatch.setattr(warnings, "_given", {"cause": "gets in turn & others"})
    with fastrt.report(tmp_path / "run.html"):
        pass
    assert "No task or call has failed." in (tmp_path / "run.html").read_text()
    assert "gets in turn &amp; others" in (tmp_path / "run.html").read_text()


def test_session_that_ends_inside_of_the_block_leaves_a_page(program, tmp_path, runtime_dir):
    driver = program(f"""
        import fastrt
        fastrt.init(num_workers=1, object_store_memory=64 << 20)
        with fastrt.report({str(tmp_path / "run.html")!r}):
            fastrt.shutdown()
    """)
    driver.process.communicate(timeout=40)
    assert driver.process.returncode == 0
    assert "No task or call has ended." in (tmp_path / "run.html").read_text()


def test_action_is_counted_once_it_has_ended(rt, tmp_path, wait_until):
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDWR)
    client = store_client.require().client
    trace.switch(client, True)
    sums = Usage(store_client.require())
    ref = held.remote(str(tmp_path / "fifo"))
    wait_until(lambda: fastrt.list_tasks(name="held", state="running"), "the task to run")
    fastrt.get([quick.remote(k) for k in range(10)])

    def counted(name, count):
        sums.read()
        return name in sums.functions and sums.functions[name].count == count

    wait_until(lambda: counted("quick", 10), "the ends of the short tasks")
    assert "held" not in sums.functions
    assert sums.unfinished >= 1
    os.write(fd, b"x")
    assert fastrt.get(ref) == "x"
    os.close(fd)
    wait_until(lambda: counted("held", 1), "the end of the long task")
    trace.switch(client, False)
    assert sums.functions["quick"].count == 10
    assert sums.functions["held"].total > sums.functions["quick"].total
    assert sums.lost == 0
    assert sums.parts.busy.sum() == pytest.approx(sum(one.total for one in sums.functions.values()), rel=1e-6)


def test_quantiles_are_within_their_class():
    lengths = Lengths()
    values = np.arange(1, 100_001)
    for part in np.array_split(values, 7):
        lengths.add(part)
    assert (lengths.count, lengths.total, lengths.longest) == (100_000, values.sum(), 100_000)
    for part in (0.1, 0.5, 0.99):
        assert lengths.quantile(part) == pytest.approx(part * 100_000, rel=0.06)
    assert Lengths().quantile(0.5) == 0


def test_parts_keep_the_whole_time_when_they_become_longer():
    parts = Parts(1000)
    parts.sample(1000, 2, 7, 100)
    starts = np.array([1000, 1000 + 3 * parts.length, 0])
    ends = np.array([1000 + 10 * parts.length + 5, 1000 + 3 * parts.length + 9, 1000])
    parts.cover(starts, ends, 1)
    assert parts.busy.sum() == 10 * parts.length + 5 + 9
    before = parts.length
    parts.cover(np.array([1000]), np.array([1000 + 3 * usage.PARTS * before]), 1)
    assert parts.length == 4 * before
    assert parts.busy.sum() == 10 * before + 14 + 3 * usage.PARTS * before
    assert parts.busy[0] == 4 * before * 2 + 9
    assert (parts.runners[0], parts.queued[0], parts.store[0]) == (2, 7, 100)
    parts.sample(1000 + 5 * parts.length, 3, 1, 50)
    assert parts.runners[:7].tolist() == [2, 3, 3, 3, 3, 3, 0]
    parts.cover(np.array([1000]), np.array([1000 + before]), -1)
    assert parts.busy[0] == 7 * before + 9


def test_copied_records_are_those_of_drain(rt):
    client = store_client.require().client
    trace.switch(client, True)
    fastrt.get([quick.remote(k) for k in range(20_000)])  # the rings go round
    trace.switch(client, False)
    for slot in range(3):
        rows, following = trace.drain(client, slot)
        first, data, end, (ticks, ns, pace) = trace.copied(client, slot)
        copied = np.frombuffer(data, usage._RECORD)
        assert end == following
        assert len(copied) == len(rows)
        if not rows:
            continue
        assert first == rows[0][0]
        assert copied["id"].tolist() == [row[4] for row in rows]
        starts = ns + (copied["start"] - ticks) * pace
        assert np.abs(starts - [row[1] for row in rows]).max() < 1e6
        assert trace.copied(client, slot, end)[:3] == (end, b"", end)


@pytest.mark.long  # a million tasks, and a browser
@pytest.mark.timeout(300)
def test_browser_shows_a_run_of_a_million_tasks(rt, tmp_path, browser, wait_until):
    begun = time.monotonic()
    with fastrt.report(tmp_path / "run.html"):
        for _ in range(100):
            fastrt.get([quick.remote(k) for k in range(10_000)])
        fastrt.get(nested.remote(1))
        wait_until(lambda: not fastrt.list_tasks(), "the records of tasks to go")
    seconds = time.monotonic() - begun
    assert (tmp_path / "run.html").stat().st_size < 1_000_000
    assert "<b>1,000,002</b>" in (tmp_path / "run.html").read_text()  # counted by the core
    seen = int(Tables((tmp_path / "run.html").read_text()).functions()["quick"][0].replace(",", ""))
    assert seen <= 1_000_001
    assert seen > 100_000, f"{seen} of a million in {seconds:.0f} s"
    for width, scheme in ((1280, "light"), (390, "dark")):
        page, wrong = open_page(browser, "file:", width, scheme)
        page.goto((tmp_path / "run.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(18, 22, 28)" if scheme == "dark" else "rgb(246, 247, 249)")
        assert page.locator("svg polygon").count() == 4
        assert page.locator("h2").all_inner_texts() == [
            *(
                "Busy processes",
                "Time by function",
                "Failures",
                "Memory of the store",
                "Queued tasks",
                "Advice",
                "Versions",
            ),
        ]
        assert page.locator("td", has_text="<img src=x").count() == 1
        page.screenshot(path=tmp_path / f"{width}.png", full_page=True)
        assert wrong == []
        page.close()
