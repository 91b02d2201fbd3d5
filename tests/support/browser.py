"""Debian's Chromium, driven by playwright, and pages that note what a test must not overlook."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

WIDTHS = {1280: 900, 390: 844}  # a laptop and a telephone


@contextlib.contextmanager
def chromium(*options: str) -> Iterator[Any]:
    """A browser; the test is skipped where there is none.

    Args:
        options: words of its command line.
    """
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="it drives the browser: pip install playwright")
    words = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", *options]
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=words)
        try:
            yield started
        finally:
            started.close()


def open_page(browser: Any, own: str, width: int = 1280, scheme: str = "light") -> tuple[Any, list[str]]:
    """Open an empty page.

    Args:
        browser: from `chromium`.
        own: how the addresses begin that the page may load.
        width: of the window; the height goes with it.
        scheme: "light" or "dark".
    Returns:
        The page, and a list that gets a line for each error of a script, error in the console, dialog, and request to
        an address that is not `own`.
    """
    context = browser.new_context(viewport={"width": width, "height": WIDTHS[width]}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("console", lambda line: wrong.append(f"{page.url}: {line.text}") if line.type == "error" else None)
    page.on("dialog", lambda dialog: (wrong.append(f"{page.url}: dialog {dialog.message}"), dialog.dismiss()))
    # A blob is made by the page itself, of a file to save.
    page.on("request", lambda sent: sent.url.startswith((own, "blob:")) or wrong.append(f"loads {sent.url}"))
    return page, wrong
