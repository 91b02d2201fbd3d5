"""The pages of the site: those of docs/ and of the root, under their names in the site, with their links adapted.

The index, docs/README.md, is the table of contents: its sections are the parts of the navigation, and the pages that a
section links to are its entries, under the words of the links.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = "docs/README.md"
# Pages outside docs/, and their names in the site.
ROOT_PAGES = {
    "README.md": "overview.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
REFERENCE_MARK = "<!-- the site lists its reference here -->"
_LINK = re.compile(r"(`[^`]*`)|\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


class PageError(Exception):
    """A page has a link to a file that does not exist, or the index lacks a page."""


def site_names() -> dict[str, str]:
    """Map each page of the repository to its name in the site."""
    names = {str(path.relative_to(ROOT)): str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md"))}
    return {**names, INDEX: "index.md", **ROOT_PAGES}


def adapt(page: str, text: str, names: dict[str, str]) -> str:
    """Point the links of a page at the site's pages; links to other files of the repository become plain text.

    Args:
        page: the page's path in the repository.
        text: its Markdown.
        names: as `site_names` returns them.
    Raises:
        PageError: a link names a file that does not exist.
    """

    def adapted(match: re.Match[str]) -> str:
        code, label, target = match.groups()
        if code or re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(page), path))
        if file in names:
            link = os.path.relpath(names[file], os.path.dirname(names[page]) or ".")
            return f"[{label}]({link}{'#' + anchor if anchor else ''})"
        if not (ROOT / file).exists():
            raise PageError(f"{page}: the link {target} leads nowhere")
        return label

    lines, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        lines.append(line if fenced or line.startswith("    ") else _LINK.sub(adapted, line))
    return "\n".join(lines) + "\n"


def contents(index: str) -> list[tuple[str, dict[str, str]]]:
    """Read the parts of the navigation from the adapted index: a caption, and the pages with their labels, in order."""
    parts, seen = [], {"index.md"}
    for section in re.split(r"^## ", "First steps\n" + index.split("\n", 1)[1], flags=re.M):
        caption, _, body = section.partition("\n")
        new: dict[str, str] = {}
        for label, link in re.findall(r"\[([^\[\]]+)\]\(([\w/.-]+\.(?:md|rst))(?:#[\w-]+)?\)", body):
            if link not in seen:
                seen.add(link)
                new[link] = label
        parts.append((caption, new))
    return parts


def write_pages(folder: Path, reference: list[tuple[str, str, str]]) -> None:
    """Write all pages, and the index with the navigation.

    Args:
        folder: where Sphinx will read them.
        reference: name of the file, title and one line about each page of the reference.
    Raises:
        PageError: a link leads nowhere, or a page is missing in the index.
    """
    names = site_names()
    texts = {names[page]: adapt(page, (ROOT / page).read_text(), names) for page in names}
    rows = [f"| [{title}]({file}) | {about} |" for file, title, about in reference]
    index = texts["index.md"].replace(REFERENCE_MARK, "\n".join(["| page | holds |", "|---|---|", *rows]))
    if index == texts["index.md"]:
        raise PageError(f"{INDEX} has lost the line {REFERENCE_MARK!r}")
    parts = contents(index)
    missing = texts.keys() - {"index.md"} - {link for _, links in parts for link in links}
    if missing:
        raise PageError(f"{INDEX} does not link to: {', '.join(sorted(missing))}")
    for caption, links in parts:
        entries = [f"{label} <{link.rpartition('.')[0]}>" for link, label in links.items()]
        index += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```", ""])
    texts["index.md"] = index
    for name, text in texts.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
