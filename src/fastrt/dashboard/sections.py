"""The parts of a page, as JSON for the browser: texts, figures, charts, tables. Pure.

The browser builds elements from these and sets every text as text, so a name or a log line is never read as HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Section = dict[str, Any]
# How the browser writes a value: "text", "message" (a long one), "count", "number", "bytes", "seconds", "time",
# "state", "code" or "place" (a line of a file, which may be long).
Columns = Sequence[tuple[str, str]]
_TEXT_MAX = 20_000
_CELL_MAX = 300


def many(number: int, what: str, several: str = "") -> str:
    """Name a number of things: "1 task", "2,000 tasks"; `several` is the word for more than one, if it is no s more."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {several or what + 's'}"


def text(name: str, words: str, tone: str = "plain") -> Section:
    """A paragraph.

    Args:
        name: of the section, one in a page.
        words: its text.
        tone: "plain", "big", "good", "warn" or "bad".
    """
    return {"id": name, "kind": "text", "text": words, "tone": tone}


def points(name: str, title: str, words: Iterable[str]) -> Section:
    """Several sentences, one below the other."""
    return {"id": name, "kind": "points", "title": title, "points": list(words)}


def facts(name: str, values: Iterable[tuple[str, Any, str]]) -> Section:
    """Figures beside each other: (label, value, how to write it)."""
    return {"id": name, "kind": "facts", "facts": [list(one) for one in values]}


def chart(name: str, title: str, unit: str, series: Mapping[str, Sequence[float]], top: float = 0.0) -> Section:
    """Lines over time.

    Args:
        name, title: of the section.
        unit: how to write a value.
        series: values by the name of the line, one a second, the newest last.
        top: the least upper end of the scale.
    """
    lines = [{"name": one, "values": [float(f"{value:.4g}") for value in values]} for one, values in series.items()]
    return {"id": name, "kind": "chart", "title": title, "as": unit, "lines": lines, "top": top}


def table(
    name: str, title: str, columns: Columns, rows: Iterable[Sequence[Any]], empty: str, next_page: Section | None = None
) -> Section:
    """Rows; a cell is a value, or made by `link`, `parts` or `part`.

    Args:
        name, title: of the section.
        columns: heading, and how to write the values.
        rows: the cells.
        empty: the text for no rows; it says what to do.
        next_page: a `link` to more rows.
    """
    found = [[_cell(cell) for cell in row] for row in rows]
    about = {"title": title, "columns": [list(column) for column in columns], "rows": found, "empty": empty}
    return {"id": name, "kind": "table", **about, **({"next": next_page} if next_page else {})}


def link(words: Any, view: str, **args: Any) -> Section:
    """A cell that leads to another page."""
    return {"text": _cell(str(words)), "view": view, "args": {name: str(value) for name, value in args.items()}}


def parts(values: Mapping[str, int]) -> Section:
    """A cell that shows shares as a bar: counts by state."""
    return {"parts": [[name, count] for name, count in values.items() if count]}


def share(of: float, whole: float) -> Section:
    """A cell that shows a share as a bar."""
    return {"share": round(min(1.0, of / whole), 3) if whole > 0 else 0.0}


def lines(name: str, title: str, words: str, empty: str = "") -> Section:
    """A text of several lines, such as a traceback or a log; of a long one the end."""
    shown = words if len(words) <= _TEXT_MAX else "... " + words[-_TEXT_MAX:]
    return {"id": name, "kind": "lines", "title": title, "text": shown, "empty": empty}


def log(
    name: str, title: str, found: Iterable[Sequence[Any]], empty: str, follows: bool, args: Mapping[str, str],
    next_page: Section | None = None,
) -> Section:  # fmt: skip
    """Lines of a log.

    Args:
        name, title: of the section.
        found: (time, whether from stderr, name, pid, task's id or "", text) of each line.
        empty: the text for no lines.
        follows: whether more lines come at the end.
        args: arguments of the links to the log of one task.
        next_page: a `link` to more lines.
    """
    about = {"title": title, "lines": [list(line) for line in found], "empty": empty, "follows": follows}
    return {"id": name, "kind": "log", **about, "args": dict(args), **({"next": next_page} if next_page else {})}


def choices(name: str, fields: Iterable[tuple[str, str, str, Sequence[str]]]) -> Section:
    """Fields that filter the page: (argument, label, value, choices); without choices any text."""
    return {
        "id": name,
        "kind": "choices",
        "fields": [[a, label, value, list(some)] for a, label, value, some in fields],
    }


def buttons(name: str, found: Iterable[tuple[str, str, Mapping[str, Any], str]]) -> Section:
    """Buttons that send a request: (label, path, body, question to confirm; "": none)."""
    return {"id": name, "kind": "buttons", "buttons": [[a, path, dict(body), ask] for a, path, body, ask in found]}


def is_action(section: Section) -> bool:
    """Whether it has buttons that change the program."""
    return any(path.startswith("act/") for _, path, _, _ in section.get("buttons", ()))


def way(name: str, steps: Iterable[Section]) -> Section:
    """Links that lead from the general to this page."""
    return {"id": name, "kind": "way", "steps": list(steps)}


def links(name: str, found: Iterable[Section]) -> Section:
    """Links to related pages."""
    return {"id": name, "kind": "links", "links": list(found)}


def changes(before: Mapping[str, Section], after: Sequence[Section]) -> dict[str, Any]:
    """Find the difference that a browser with `before` needs in order to show `after`.

    Args:
        before: sections by name.
        after: all sections of the page.
    Returns:
        order: the names; set: the sections that are new or differ.
    """
    return {
        "order": [section["id"] for section in after],
        "set": [section for section in after if before.get(section["id"]) != section],
    }


def _cell(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _CELL_MAX:
        return value[:_CELL_MAX] + "..."
    return value
