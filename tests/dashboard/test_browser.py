"""The dashboard in a real Chromium: a user reads the pages, processes die, and pages of other sites try their luck."""

import contextlib
import http.server
import os
import signal
import threading
from pathlib import Path

import pytest

from support.browser import WIDTHS, chromium, open_page
from support.dashboard import Dashboard

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
PATIENCE_MS = 20_000
# Two workers; each line that arrives in the fifo `gates` lets one step begin.
COUNTING = """
import fastrt
fastrt.init(2, "64MiB")

@fastrt.remote
def double(x):
    return 2 * x

print("ready", flush=True)
with open("gates") as gates:
    for _ in gates:
        fastrt.get([double.remote(k) for k in range(20_000)])
        print("done", flush=True)
"""
# A program with a bit of everything: a running and a waiting task, an actor, values, a placement group.
BUSY = r"""
import os, signal, threading, fastrt
fastrt.init(2, "64MiB", record_call_sites=True)

@fastrt.remote
def held(value):
    threading.Event().wait()

@fastrt.remote
class Counter:
    def add(self):
        return 1

@fastrt.remote(max_retries=0)
def fails(number):
    raise ValueError(f"a message of some length that says what is wrong with number {number}")

counter = Counter.options(name="one").remote()
fastrt.get(counter.add.remote())
failed = fastrt.wait([fails.remote(1)])
value = fastrt.put(bytes(1 << 20))
group = fastrt.util.placement_group([{"CPU": 1}])
first = held.remote(value)
second = held.options(name="later").remote(first)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def dash(runtime_dir):
    with Dashboard(runtime_dir) as running:
        yield running


@pytest.fixture
def visit(browser, dash):
    """Open the dashboard as a user does, by the printed address; no page of the test may do anything wrong."""
    opened = []

    def open_view(view="overview", width=1280, scheme="light"):
        page, wrong = open_page(browser, f"http://127.0.0.1:{dash.port}/", width, scheme)
        page.set_default_timeout(PATIENCE_MS)
        page.goto((dash.next_url() if opened else dash.url) + f"#{view}")
        opened.append(wrong)
        return page

    yield open_view
    assert [line for wrong in opened for line in wrong] == []


def go(page, view):
    """Follow the address of a view, and wait for its sections."""
    page.evaluate("view => { location.hash = view; }", view)
    page.wait_for_function(
        "view => location.hash === '#' + view && !document.querySelector('#page').hasAttribute('aria-busy')", arg=view
    )


def fact(page, label):
    """A figure of the page, as shown."""
    return page.locator("dl.facts div", has=page.get_by_text(label, exact=True)).locator("dd").first


def number(page, label):
    """A figure as a number, once the page shows it."""
    return int(fact(page, label).inner_text().replace(",", ""))


def test_hundred_thousand_tasks_count_up_and_end_exact(visit, program, tmp_path, wait_until):
    os.mkfifo(tmp_path / "gates")
    one = program(COUNTING)
    one.wait_for_line("ready")
    page = visit()
    fact(page, "tasks ended").wait_for()
    shown = [number(page, "tasks ended")]
    with open(tmp_path / "gates", "w", buffering=1) as gates:
        for step in range(1, 6):
            gates.write("go\n")
            one.wait_for_line("done")
            wait_until(lambda: number(page, "tasks ended") > shown[-1], "a larger number")
            wait_until(lambda step=step: number(page, "tasks ended") >= 20_000 * step, "the step's tasks")
            shown.append(number(page, "tasks ended"))
        assert shown == [20_000 * step for step in range(6)]
        assert number(page, "ready") == 0
        page.locator("p.words.big", has_text="Nothing runs").wait_for()
        assert page.locator("figure.chart polyline.line").count() >= 5
    one.finish()
    page.locator("#banner", has_text="This session has ended").wait_for()
    assert number(page, "tasks ended") == 100_000


def processes_of(page):
    """The shown processes: kind by pid."""
    return dict(page.evaluate(
        "[...document.querySelectorAll('tbody tr')].map(row => [row.cells[0].innerText, row.cells[1].innerText])"
    ))  # fmt: skip


def test_killed_worker_daemon_and_program_are_noticed_by_the_page(visit, program, wait_until):
    one = program(BUSY)
    one.wait_for_line("ready")
    page = visit("workers")
    page.locator("tbody tr", has_text="held").wait_for()
    pid = page.locator("tbody tr", has_text="held").locator("td").first.inner_text()
    page.locator("tbody a", has_text=pid).first.click()
    page.locator("dl.facts", has_text="held").wait_for()
    os.kill(int(pid), signal.SIGKILL)
    page.locator("p.words.warn", has_text=f"Process {pid} has left the session").wait_for()
    page.get_by_role("link", name="all processes").click()
    page.locator("tbody tr", has_text="held").wait_for()  # retried, on another one
    assert pid not in processes_of(page)

    daemon = next(int(pid) for pid, kind in processes_of(page).items() if kind == "daemon")
    os.kill(one.pid, signal.SIGSTOP)  # it would start another one at once
    try:
        os.kill(daemon, signal.SIGKILL)
        page.locator("#banner.bad", has_text="the daemon is away").wait_for()
        page.locator("tbody tr", has_text="held").wait_for()  # what is in the arena is shown all the same
    finally:
        os.kill(one.pid, signal.SIGCONT)
    page.locator("#banner").wait_for(state="hidden")
    wait_until(lambda: {"daemon", "driver"} <= set(processes_of(page).values()), "another daemon")
    assert str(daemon) not in processes_of(page)

    go(page, "overview")
    page.locator("td", has_text="held").first.wait_for()
    one.process.kill()
    page.locator("#banner.warn", has_text="This session has ended").wait_for()
    fact(page, "tasks ended").wait_for()  # the last view stays
    go(page, "memory")
    page.locator("p.words", has_text="The session has ended. Still here: overview, tasks").wait_for()


FAILING = """
import ctypes, signal, fastrt
fastrt.init(2, "64MiB")

@fastrt.remote
def divide(by):
    print("dividing by", by)
    return 1 // by

@fastrt.remote
def hang():
    ctypes.PyDLL(None).pause()  # in C, with the interpreter's lock

failed = divide.remote(0)
fastrt.wait([failed])
hanging = hang.remote()
print("ready", flush=True)
signal.pause()
"""


def test_failure_leads_to_its_traceback_and_log(visit, program):
    program(FAILING).wait_for_line("ready")
    page = visit()
    page.get_by_role("link", name="ZeroDivisionError").first.click()
    page.locator("pre", has_text="return 1 // by").wait_for()
    page.locator("p.words.bad", has_text="ZeroDivisionError").wait_for()
    page.get_by_role("link", name="log of this task").click()
    page.get_by_text("dividing by 0").wait_for()


def test_stack_of_a_worker_that_hangs_in_c_is_shown(visit, program):
    program(FAILING).wait_for_line("ready")
    page = visit("workers")
    page.locator("tbody tr", has_text="hang").locator("a").first.click()
    page.get_by_role("button", name="Show its stack").click()
    page.locator("pre", has_text="hang").wait_for()
    assert "driver0.py" in page.locator("pre", has_text="hang").inner_text()


def test_stopped_dashboard_is_named_and_the_next_one_is_another(browser, runtime_dir):
    with Dashboard(runtime_dir) as dash:
        page, _ = open_page(browser, dash.url.partition("?")[0])
        page.goto(dash.url)
        page.get_by_text("No session runs here").wait_for()
        port = dash.port
    page.locator("#banner.bad", has_text="The dashboard does not answer").wait_for()
    with Dashboard(runtime_dir, port=port):  # its secrets are others
        page.locator("#banner.bad", has_text="open the address that").wait_for(timeout=PATIENCE_MS)


@contextlib.contextmanager
def other_site(html):
    """A page of another site: any path answers with `html`.

    Yields:
        Its port.
    """

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


# A name that points here is what DNS rebinding makes.
REBOUND = "--host-resolver-rules=MAP evil.test 127.0.0.1"
# What a page of another site can send. Its browser has the dashboard's cookie.
TRIES = """async ([port, name]) => {
  const found = {};
  for (const [what, path, options] of [
    ["view", "view?view=overview", {}],
    ["opaque view", "view?view=overview", {mode: "no-cors"}],
    ["record", "do/record", {method: "POST", body: "{}", mode: "no-cors"}],
    ["json", "do/record", {method: "POST", body: "{}", headers: {"Content-Type": "application/json"}}],
    ["key", "view?view=overview", {headers: {"X-Fastrt-Key": "guess"}}],
  ]) {
    try {
      const answer = await fetch(`http://${name}:${port}/${path}`, {credentials: "include", ...options});
      found[what] = `${answer.type} ${answer.status} ${await answer.text()}`;
    } catch (error) { found[what] = "failed"; }
  }
  return found;
}"""


def test_other_sites_and_foreign_names_get_nothing(runtime_dir, program, wait_until):
    one = program(BUSY)
    one.wait_for_line("ready")
    page_of_evil = "<form method=post enctype=text/plain><input name=a value=b></form><iframe></iframe>"
    with chromium(REBOUND) as browser, Dashboard(runtime_dir) as dash, other_site(page_of_evil) as evil:
        page, wrong = open_page(browser, f"http://127.0.0.1:{dash.port}/")
        page.goto(dash.url)
        fact(page, "tasks ended").wait_for()
        assert wrong == []

        # The dashboard under a name that points here, with a code that is right.
        code = dash.next_url().partition("?")[2]
        stranger = page.context.new_page()
        answer = stranger.goto(f"http://evil.test:{dash.port}/?{code}")
        assert answer.status == 403
        assert "set-cookie" not in answer.headers
        assert "does not answer under this name" in stranger.inner_text("body")

        # A page cannot see the answers; the browser's own protocol can, also of requests before that ask for leave.
        network = page.context.new_cdp_session(stranger)
        network.send("Network.enable")
        statuses, cookies = [], []
        network.on("Network.responseReceivedExtraInfo", lambda event: statuses.append(event["statusCode"])
                   if "cross-origin-resource-policy" in event["headers"] else None)  # fmt: skip
        network.on("Network.requestWillBeSentExtraInfo", lambda event: cookies.extend(
            one["cookie"]["name"] for one in event["associatedCookies"] if not one["blockedReasons"]
        ))  # fmt: skip
        # Pages of another site, and of another port of this host, to which the browser sends the cookie along.
        for site in ("evil.test", "127.0.0.1"):
            stranger.goto(f"http://{site}:{evil}/")
            statuses.clear()
            cookies.clear()
            found = stranger.evaluate(TRIES, [dash.port, "127.0.0.1"])
            assert {what: text.split(" ")[0] for what, text in found.items()} == {
                "view": "failed", "opaque view": "failed", "record": "failed", "json": "failed", "key": "failed"
            }, found  # fmt: skip
            wait_until(lambda: stranger.title() == "" and len(statuses) == 5, "the answers")
            assert set(statuses) == {403}
            assert bool(cookies) == (site == "127.0.0.1")  # SameSite=Strict knows no ports
            with stranger.expect_navigation():
                stranger.evaluate(
                    "at => { document.forms[0].action = at; document.forms[0].submit(); }",
                    f"http://127.0.0.1:{dash.port}/do/record",
                )
            assert "a page of another site has sent this request" in stranger.inner_text("body")

        # Nothing frames the page, and a form from a page of the dashboard's own origin is not taken either.
        stranger.goto(f"http://evil.test:{evil}/")
        stranger.evaluate("at => { document.querySelector('iframe').src = at; }", f"http://127.0.0.1:{dash.port}/")
        stranger.wait_for_function("() => { try { return !frames[0].location.href; } catch { return true; } }")
        assert all(
            "fastrt" not in frame.content() for frame in stranger.frames if frame.url.startswith("chrome-error:")
        )
        status = page.evaluate(
            """() => fetch("do/record", {method: "POST", body: new URLSearchParams({a: 1}),
               headers: {"X-Fastrt-Key": localStorage.getItem("fastrt-key")}}).then(answer => answer.status)"""
        )
        assert status == 415
        go(page, "timeline")
        page.get_by_role("button", name="Record").wait_for()  # nothing has started the recording


HOSTILE = r"""
import os, signal, threading, fastrt
fastrt.init(2, "64MiB", record_call_sites=True)
EVIL = "<img src=x onerror=\"window.hit = 1; alert(1)\">"

def held(name):
    print(EVIL, flush=True)
    threading.Event().wait()

def failing():
    raise ValueError(EVIL)

class Evil:
    def run(self):
        return os.getpid()

held.__name__ = held.__qualname__ = failing.__name__ = failing.__qualname__ = EVIL
Evil.__name__ = Evil.__qualname__ = EVIL
running = fastrt.remote(held).remote(EVIL)
waiting = fastrt.remote(held).options(name="</script><script>window.hit = 2</script>").remote(running)
failed = fastrt.remote(failing).remote()
actor = fastrt.remote(Evil).options(name="javascript:window.hit=3").remote()
fastrt.get(actor.run.remote())
fastrt.wait([failed])
print("ready", flush=True)
signal.pause()
"""


def test_name_with_html_is_text_on_every_page(visit, program):
    one = program(HOSTILE)
    one.wait_for_line("ready")
    page = visit()
    evil = '<img src=x onerror="window.hit = 1; alert(1)">'
    for view in menu(page):
        go(page, view)
        if view == "timeline":
            page.get_by_role("button", name="Record").click()
            page.locator("figure.lanes").wait_for()
        if view in ("overview", "tasks", "actors", "workers"):
            page.get_by_text(evil).first.wait_for()
        assert page.evaluate("[window.hit ?? 0, document.querySelectorAll('img, #page script').length]") == [0, 0], view
        for link in page.locator("#page a[href]").evaluate_all("some => some.map(one => one.getAttribute('href'))"):
            assert link.startswith("#"), link
    go(page, "tasks")
    page.locator("tbody a", has_text=evil).first.click()
    page.locator("tbody tr", has_text="running").locator("a").first.click()
    page.get_by_text("What it waits for").wait_for()
    assert evil in page.inner_text(".way")
    assert page.evaluate("[window.hit ?? 0, document.images.length]") == [0, 0]


def menu(page):
    """The views of the menu."""
    return page.locator("#nav a").evaluate_all("some => some.map(one => one.dataset.view)")


@pytest.fixture
def busy(visit, program):
    """Open the dashboard beside a program that has a bit of everything, once the page has found it."""
    program(BUSY).wait_for_line("ready")

    def open_overview(**options):
        page = visit(**options)
        page.get_by_text("Functions with unfinished tasks").wait_for()
        return page

    return open_overview


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page(busy, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    page = busy(scheme=scheme)
    found = []
    for view in [*menu(page), "rows"]:
        go(page, view)
        if view == "timeline":
            page.get_by_role("button", name="Record").click()
            page.locator("figure.lanes").wait_for()
        for one in axe.run(page).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                found.append(f"{view}: {one['id']}: {one['help']}: {one['nodes'][0]['html']}")
    assert found == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_a_laptop_and_a_telephone(busy, tmp_path, width):
    page = busy(width=width)
    folder = Path(os.environ.get("FASTRT_SCREENSHOTS", tmp_path))
    wrong = []
    for view in [*menu(page), "rows"]:
        go(page, view)
        if view == "timeline":
            page.get_by_role("button", name="Record").click()
            page.locator("figure.lanes").wait_for()
        about = page.evaluate(
            """() => ({
                wide: document.documentElement.scrollWidth - innerWidth,
                small: [...document.querySelectorAll("#page *")].filter(
                    e => e.childElementCount === 0 && e.textContent && parseFloat(getComputedStyle(e).fontSize) < 11
                ).length,
                hidden: [...document.querySelectorAll("#page p, #page dd, #page h2, #page svg, #nav")].filter(e => {
                    const box = e.getBoundingClientRect();
                    return box.width && !e.closest(".wide, pre") && (box.right > innerWidth + 1 || box.left < -1);
                }).length,
                cut: innerWidth < 1000 ? 0 : [...document.querySelectorAll("#page .wide")].filter(
                    e => e.scrollWidth > e.clientWidth
                ).length,
            })"""
        )
        if about != {"wide": 0, "small": 0, "hidden": 0, "cut": 0}:
            wrong.append(f"{view}: {about}")
        page.screenshot(path=folder / f"{width}-{view}.png", full_page=True)
    assert wrong == []


def test_keys_open_the_pages(busy):
    page = busy()
    for number_, view in enumerate(menu(page), 1):
        page.keyboard.press(str(number_ % 10))
        page.wait_for_function("view => location.hash === '#' + view", arg=view)
