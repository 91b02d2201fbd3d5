"""The site: what the code says is in its reference, every link leads somewhere, and a browser shows each page well."""

import dataclasses
import functools
import http.server
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fastrt
from fastrt.config import Config
from support.browser import WIDTHS, open_page

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
REFERENCE = [("reference/fastrt.rst", "fastrt", "the names")]


def load(name):
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages():
    return load("pages")


@pytest.fixture(scope="module")
def reference():
    return load("reference")


def test_links_of_all_pages_lead_to_pages_of_the_site(pages, tmp_path):
    pages.write_pages(tmp_path, REFERENCE)
    index = (tmp_path / "index.md").read_text()
    assert "[fastrt](reference/fastrt.rst) | the names" in index
    assert "\nStart <start>\n" in index
    for path in tmp_path.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([\w./-]+\.md)[)#]", text):
            assert (path.parent / link).is_file(), f"{path.name}: {link}"


def test_link_to_a_missing_file_is_noticed(pages):
    names = pages.site_names()
    text = "[a](../README.md#x) `[b](c.md)`\n"
    assert pages.adapt("docs/start.md", text, names) == text.replace("../README.md", "overview.md")
    assert pages.adapt("docs/start.md", "[the code](../setup.py)", names) == "the code\n"
    with pytest.raises(pages.PageError, match=r"gone\.md leads nowhere"):
        pages.adapt("docs/start.md", "[a](gone.md)", names)


def test_page_that_the_index_lacks_is_noticed(pages, tmp_path, monkeypatch):
    names = {**pages.site_names(), "docs/tasks.md": "other.md"}
    monkeypatch.setattr(pages, "site_names", lambda: {**names, "Makefile": "extra.md"})
    with pytest.raises(pages.PageError, match=r"does not link to: extra\.md"):
        pages.write_pages(tmp_path, REFERENCE)


def test_every_public_name_has_a_place_in_the_reference(reference, monkeypatch):
    page = reference.main_page({})
    documented = set(re.findall(r"^\.\. auto(?:class|function):: fastrt\.(\w+)$", page, re.M))
    documented |= set(re.findall(r"^``fastrt\.(\w+)`` is ", page, re.M))
    errors = {name for name in fastrt.__all__ if name in dir(fastrt.errors)}
    assert documented == set(fastrt.__all__) - errors - {"exceptions", "util"}
    monkeypatch.setattr(fastrt, "__all__", [*fastrt.__all__, "__version__"])
    with pytest.raises(reference.MissingError, match="__version__"):
        reference.main_page({})


def test_settings_have_their_values_of_the_code(reference, monkeypatch):
    monkeypatch.setenv("FASTRT_SPIN_US", "7")  # the page holds defaults, not the values of the machine that builds it
    found = {name: rest for name, *rest in reference.settings()}
    assert list(found) == [field.name for field in dataclasses.fields(Config)]
    assert found["spin_us"][:3] == ["FASTRT_SPIN_US", "100", "from 0 to 100000"]
    assert found["keep_bytes"][:3] == ["FASTRT_KEEP_BYTES", "100KiB", "from 0 to 64TiB"]
    assert found["num_workers"][1] == ""  # it depends on the machine; the meaning says how
    assert "default: the CPUs" in found["num_workers"][3]
    page = reference.settings_page()
    assert all(f"``FASTRT_{name.upper()}``" in page for name in found)


def test_commands_have_every_option_and_variable(reference):
    page = reference.commands_page()
    listed = subprocess.run(
        [sys.executable, "-c", "from fastrt.cli.main import main; main()", "start", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = re.findall(r"^  (--[\w-]+)", listed, re.M)
    assert len(options) > 20
    start = page.partition("\nfastrt start\n")[2].partition("\nfastrt status\n")[0]
    assert [option for option in options if option != "--help" and f"``{option}" not in start] == []
    assert "Variable: ``FASTRT_TOKEN_FILE``" in start
    assert "fastrt coordinator status\n" in page  # commands of a group, too


def test_protocols_have_every_call(reference):
    calls = {
        (str(path.relative_to(ROOT / "protos")), service, call[0])
        for path, _, services in reference.protocols()
        for service, found in services
        for call in found
    }
    written = sum(len(re.findall(r"^\s*rpc ", path.read_text(), re.M)) for path in (ROOT / "protos").glob("*/*.proto"))
    assert len(calls) == written
    assert ("ray/scheduler.proto", "Scheduler", "RemoteCall") in calls
    assert "``stream of Frame`` → ``stream of Frame``" in reference.protocols_page()


def test_errors_have_their_public_names(reference):
    pytest.importorskip("dask", reason="fastrt.dask needs it")
    pytest.importorskip("joblib", reason="fastrt.joblib needs it")
    names = {kind: reference.public_name(kind) for kind in reference.errors()}
    assert names[fastrt.GetTimeoutError] == "fastrt.GetTimeoutError"
    assert "fastrt.collective.PeerDied" in names.values()
    for kind, name in names.items():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is kind
    page = reference.errors_page()
    assert all(f".. autoexception:: {name}\n" in page for name in names.values())


def diagrams_of(page):
    return re.findall(r"^```mermaid\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)


@pytest.mark.parametrize("page", ["concepts.md", "architecture.md"])
def test_flowchart_is_drawn_with_all_its_words_and_without_overlaps(page):
    diagrams = load("diagrams")
    (text,) = diagrams_of(page)
    drawn = diagrams.as_html(text)
    labels = re.findall(r"\(\[(.*?)\]\)|\|\"?(.*?)\"?\||\[\"(.*?)\"\]", text)
    words = [word for found in labels for label in found for word in re.split("<br/>", label) if word]
    assert len(words) > 8
    assert [word for word in words if f">{word}</text>" not in drawn] == []
    boxes = [tuple(map(float, box)) for box in re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" rx="[\d.]+" class="(?:box|store)"', drawn
    )]  # fmt: skip
    assert len(boxes) == len(diagrams.parse_flowchart(text)[0])
    for i, (ax, ay, aw, ah) in enumerate(boxes):
        for bx, by, bw, bh in boxes[:i]:
            assert ax + aw < bx or bx + bw < ax or ay + ah < by or by + bh < ay
    wide = float(re.search(r'viewBox="0 0 (\d+)', drawn)[1])
    assert all(x >= 0 and x + width <= wide for x, _, width, _ in boxes)


def test_state_diagram_becomes_a_table_of_its_moves():
    diagrams = load("diagrams")
    texts = diagrams_of("state_machines.md")
    assert len(texts) == 14
    for text in texts:
        moves = [line for line in text.splitlines() if "-->" in line and "[*]" not in line]
        table = diagrams.as_html(text)
        assert table.count("<tr>") == len(moves) + 1
        assert table.count("(first)") == 1
    assert "<tr><td></td><td>fail</td><td><code>ERROR</code></td></tr>" in diagrams.as_html(texts[0])
    for wrong in ("pie title x", "flowchart LR\n    a -- b c", "stateDiagram-v2\n    A -> B"):
        with pytest.raises(diagrams.DiagramError):
            diagrams.as_html(wrong)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A warning of Sphinx or a broken link fails here."""
    for module in ("sphinx", "furo", "myst_parser", "dask", "joblib"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'fastrt[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Without a network: a connection that a step opens fails the build.
    command = [sys.executable, str(SITE / "build.py"), str(folder)]
    if shutil.which("unshare") and not subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        command = ["unshare", "-rn", *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "html"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture
def address(site):
    """Where a web server shows the site: the search reads pages, which a browser forbids to a page that is a file."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_site_has_a_page_for_each_page_and_every_name(site, pages, reference):
    assert all((site / name.replace(".md", ".html")).is_file() for name in pages.site_names().values())
    text = (site / "reference" / "fastrt.html").read_text()
    assert all(f'id="fastrt.{name}"' in text for names in reference.GROUPS.values() for name in names.split()[:1])
    errors = (site / "reference" / "errors.html").read_text()
    assert 'id="fastrt.ObjectStoreFullError"' in errors


@pytest.mark.long
@pytest.mark.timeout(300)
def test_broken_links_of_a_built_site_are_found(site, tmp_path):
    broken = load("build").broken_links
    assert broken(site) == []
    (tmp_path / "a.html").write_text('<p id="x"><a href="a.html#x">1</a><a href="a.html#y">2</a><a href="b.html">3</a>')
    (tmp_path / "c.html").write_text('<script src="https://example.org/x.js"></script>')
    assert broken(tmp_path) == [
        "a.html links to a.html#y, but that page has no such place",
        "a.html links to b.html, which does not exist",
        "c.html loads https://example.org/x.js",
    ]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", WIDTHS)
def test_browser_shows_every_page(site, browser, width):
    page, wrong = open_page(browser, "file:", width)
    for path in sorted(set(site.rglob("*.html")) - {site / "search.html"}):  # empty without words to search for
        page.goto(path.as_uri())
        about = page.evaluate(
            """() => ({
                wide: document.documentElement.scrollWidth - innerWidth,
                title: document.querySelector("article h1")?.getBoundingClientRect().height ?? 0,
                font: parseFloat(getComputedStyle(document.querySelector("article")).fontSize),
                hidden: [...document.querySelectorAll("article p, article pre, article svg, article li")].filter(e => {
                    const box = e.getBoundingClientRect();
                    const scrolls = e.closest(".table-wrapper, .highlight, .diagram, pre, details, .sig");
                    return box.width && !scrolls && (box.right > innerWidth + 1 || box.left < -1);
                }).length,
            })"""
        )
        if about["wide"] > 0 or about["title"] < 10 or about["font"] < 14 or about["hidden"]:
            wrong.append(f"{path.relative_to(site)}: {about}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", WIDTHS)
def test_reader_finds_a_name_by_menu_and_search(address, browser, width):
    page, wrong = open_page(browser, address, width)
    page.goto(f"{address}index.html")
    menu = page.locator(".sidebar-tree a", has_text="Settings")
    if width < 1000:
        assert not menu.is_visible() or menu.bounding_box()["x"] < 0
        page.locator("label.mobile-header-button, .nav-overlay-icon").first.click()
    menu.click()
    page.wait_for_url("**/reference/settings.html")
    assert "FASTRT_NUM_WORKERS" in page.inner_text("article")
    page.goto(f"{address}search.html?q=as_completed")
    page.locator("#search-results a").first.wait_for()
    assert "as_completed" in page.inner_text("#search-results")
    assert not wrong, "\n".join(wrong)
