"""Build the site: `python docs/site/build.py [FOLDER]`, by default in build/site. No step opens a connection.

The pages are written into FOLDER/source, Sphinx turns them into FOLDER/html, and every link within the result is
checked. A warning of Sphinx is an error.
"""

import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import pages  # noqa: E402 (found by the line above)
import reference  # noqa: E402


class _Page(HTMLParser):
    """The links and anchors of a page, and the addresses that a browser loads with it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        if about.get("id"):
            self.anchors.add(about["id"] or "")
        if tag == "a" and about.get("href"):
            self.links.append(about["href"] or "")
        elif tag in ("script", "img", "iframe", "source") and about.get("src"):
            self.loaded.append(about["src"] or "")
        elif tag == "link" and about.get("rel") not in ("canonical", "search", "index", "next", "prev"):
            self.loaded.append(about.get("href") or "")


def write_source(folder: Path) -> None:
    """Write everything that Sphinx reads into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    pages.write_pages(folder, reference.write_reference(folder))


def broken_links(folder: Path) -> list[str]:
    """Check the links within a built site.

    Args:
        folder: the one with index.html.
    Returns:
        A line for each link to a page or a place in a page that does not exist, and for each file that a browser would
        load from another server.
    """
    found = {}
    for path in sorted(folder.rglob("*.html")):
        found[path.resolve()] = page = _Page()
        page.feed(path.read_text())
    complaints = []
    for path, page in found.items():
        name = path.relative_to(folder.resolve())
        complaints += [f"{name} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                complaints.append(f"{name} links to {link}, which does not exist")
            elif parts.fragment and target in found and unquote(parts.fragment) not in found[target].anchors:
                complaints.append(f"{name} links to {link}, but that page has no such place")
    return complaints


def build(folder: Path) -> int:
    """Build the site below `folder`; returns the exit code."""
    from sphinx.cmd.build import main as sphinx

    source, html = folder / "source", folder / "html"
    write_source(source)
    shutil.rmtree(html, ignore_errors=True)  # pages that no longer exist
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(HERE), "-d", str(folder / "doctrees")]
    code = sphinx([*options, str(source), str(html)])
    complaints = [] if code else broken_links(html)
    print(*complaints, sep="\n", file=sys.stderr, end="\n" if complaints else "")  # noqa: T201
    return code or int(bool(complaints))


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[1] / "build" / "site")))
