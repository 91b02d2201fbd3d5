"""Each sentence of the threat model in SECURITY.md names a test that shows it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"\[(tests/[\w/]+\.py)::(test_\w+)\]$")


def sentences(text: str) -> list[str]:
    """The list items of the section "Threat model", each on one line."""
    section = text.partition("\n## Threat model\n")[2].partition("\n## ")[0]
    items = re.findall(r"^- (.*(?:\n  .*)*)", section, re.M)
    return [" ".join(item.split()) for item in items]


def missing(items: list[str], root: Path) -> list[str]:
    """Complaints about sentences without a test."""
    found = []
    for item in items:
        match = NAMED.search(item)
        if match is None:
            found.append(f"names no test: {item}")
            continue
        path, name = root / match[1], match[2]
        if not path.exists() or not re.search(rf"^(?:async )?def {name}\(", path.read_text(), re.M):
            found.append(f"there is no {match[1]}::{name}")
    return found


def test_every_sentence_names_a_test():
    items = sentences((ROOT / "SECURITY.md").read_text())
    assert len(items) > 30  # as many as there are, so that a renamed section is noticed
    assert missing(items, ROOT) == []


def test_sentence_without_a_test_is_found():
    items = sentences("\n## Threat model\n\n- One. [tests/x.py::test_none]\n- Two.\n\n## Next\n- Three.\n")
    assert missing(items, ROOT) == ["there is no tests/x.py::test_none", "names no test: Two."]
