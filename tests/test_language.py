"""The language of code, messages and pages: plain English, by the rules of docs/house_style.md.

Each package has a budget of phrases in the old style. Budgets only fall; a package without one has none left.
"""

import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A phrase, and what to write instead.
PHRASES = {
    r"\b(?:whoever|whosoever|whatever|whichever)\b": "name the component: the caller, any process that ...",
    r"\b(?:somebody|nobody|anybody|everybody)\b": "name the component, or use the passive",
    r"\bfor ever\b": "say forever, or how long",
    r"\banew\b": "again, from the start",
    r"\b(?:told|tells|is to tell)\b": "notifies, reports, sends, says",
    r"\b(?:lend|lends|lent|lending|guest|guests)\b": "forward, accept, hosted",
    r"(?<!know )\bwhat (?:is|was|are|were|has|had|comes|came|goes|waits|lies|stands)\b": "name the thing",
    r'"""(?:What|Who|As|It|See)\b': "a docstring's first sentence says what the thing is or does",
}
PATTERN = re.compile("|".join(PHRASES), re.I)
BUDGETS: dict[str, int] = {
    "scheduler": 2,  # the name of a field in saved snapshots
}


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return parts[0]
    depth = 4 if parts[2] == "_core" else 3
    return "/".join(parts[2:depth]) if len(parts) > depth else "/".join(parts[2:])


@functools.cache  # for two tests
def phrases() -> dict[str, list[str]]:
    """Every phrase of the old style, as path:line: words, by package."""
    paths = [p for f in ("src", "bench", "examples", "docs", "protos") for p in (ROOT / f).rglob("*")]
    paths += [ROOT / name for name in ("setup.py", "Makefile", "README.md", "SECURITY.md", "CONTRIBUTING.md")]
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        if path.suffix in (".py", ".pyi", ".pyx", ".pxd", ".h", ".md", ".proto") or path.name == "Makefile":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for match in PATTERN.finditer(line):
                    place = f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()!r}"
                    found.setdefault(package_of(path), []).append(place)
    return found


def test_no_package_has_more_phrases_of_the_old_style_than_its_budget():
    complaints = []
    for package, places in phrases().items():
        if len(places) > BUDGETS.get(package, 0):
            complaints += [f"{package}: {len(places)} phrases; its budget is {BUDGETS.get(package, 0)}", *places]
    assert not complaints, "\n".join(complaints)


def test_budgets_fall_with_the_phrases():
    found = {package: len(places) for package, places in phrases().items()}
    assert {package: found.get(package, 0) for package in BUDGETS} == BUDGETS


def test_phrase_of_the_old_style_is_noticed():
    for text in ("whoever comes", "it is nobody's", "a lent task", "they are told", '"""What a worker runs."""'):
        assert PATTERN.search(text), text
    assert not PATTERN.search('"""Forward a task to a peer; it may know what is left."""')
    assert Counter(package_of(ROOT / p) for p in ("src/fastrt/_core/memory/wait.pyx", "src/fastrt/config.py")) == {
        "_core/memory": 1,
        "config.py": 1,
    }
