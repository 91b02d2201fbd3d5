"""`with fastrt.report("run.html")`: one page about a run, without scripts, that needs no other file and no network.

A thread adds the session's trace rings up while the block runs (`usage`); the page is written at its end. Its size does
not depend on the number of tasks.
"""

from __future__ import annotations

import html
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import numpy as np

from fastrt._core.memory import arena, trace
from fastrt.config import size_text
from fastrt.errors import FastrtError
from fastrt.observe import ended as ended_tasks
from fastrt.observe.build import this_build
from fastrt.observe.ended import Failure, Outcome
from fastrt.observe.usage import Array, Usage
from fastrt.store import client as store_client
from fastrt.store import warnings

_POLL_S = 0.02  # a ring of 16,384 records is full after 50 ms at the greatest rates
_SETTLE_S = 1.0
_ROWS_MAX = 200
_GROUPS_MAX = 50
_OUTCOMES = ("succeeded", "failed", "cancelled", "crashed", "retried", "forwarded")
_WIDTH, _HEIGHT = 600, 120
_STYLE = """
:root {
  color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #1b2430; --dim: #556070; --line: #d9dee5;
  --c0: #0b7a57; --c2: #3f6fd1; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12161c; --card: #1a2028; --text: #e3e8ee; --dim: #9aa7b6; --line: #2e3742;
    --c0: #3fc492; --c2: #86a9f5; --bad: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif;
}
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
section { padding: .8rem 1rem; margin: 1rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { font-family: ui-monospace, monospace; max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
@media (max-width: 30rem) { td:first-child { max-width: 10rem; } }
th, .dim { color: var(--dim); font-weight: normal; }
.tiles { display: flex; flex-wrap: wrap; gap: .3rem 2rem; padding: 0; margin: .6rem 0 0; list-style: none; }
.tiles b { display: block; font-size: 1.15rem; }
svg { display: block; width: 100%; height: 120px; overflow: visible; }
.c0 { fill: var(--c0); } .c2 { fill: var(--c2); }
.bar { display: inline-block; height: .6rem; background: var(--c0); border-radius: 2px; min-width: 1px; }
.bad { color: var(--bad); white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; margin: .3rem 0; font-size: .85rem; }
summary { cursor: pointer; overflow-wrap: anywhere; padding: .3rem 0; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
"""


class report:
    """Writes a page about a block of a program: time by function, utilisation, failures, memory, advice, versions.

        with fastrt.report("run.html"):
            ...

    Without a session, one begins with the block. It records while the block runs (`docs/observing.md` states the cost).
    The page is about this node. It is written also if the block ends by an exception.

    Args:
        filename: of the page.
        title: its heading; default: the program's name.
    Raises:
        OSError: the file cannot be written; at the begin of the block.
    """

    def __init__(self, filename: str | os.PathLike[str], *, title: str | None = None) -> None:
        self._path = Path(filename)
        self._title = title if title is not None else Path(sys.argv[0]).name or "Python"

    def __enter__(self) -> report:
        self._path.open("a").close()  # a wrong name is noticed before the run
        self._store = store_client.require()
        client = self._store.client
        self._usage = Usage(self._store)
        self._room = arena.room(client)[2]
        self._before = {one.name: one for one in ended_tasks.outcomes(self._store)}
        kept = ended_tasks.failures(self._store, limit=1)
        self._last = kept[-1].number if kept else 0
        self._began = time.time()
        self._stop = threading.Event()
        trace.switch(client, True)
        self._thread = threading.Thread(target=self._read, name="fastrt-report", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        ended: list[Outcome] = []
        failures: list[Failure] = []
        try:
            trace.switch(self._store.client, False)
            self._usage.settle(_SETTLE_S)
            ended = _since(self._before, ended_tasks.outcomes(self._store))
            failures = ended_tasks.failures(self._store, after=self._last, limit=0)
        except FastrtError:
            pass  # the session has ended inside of the block
        page = _page(self._title, self._began, self._usage, self._room, error, ended, failures)
        self._path.write_bytes(page.encode("utf-8", "replace"))

    def _read(self) -> None:
        try:
            while not self._stop.wait(_POLL_S):
                self._usage.read()
        except FastrtError:
            return  # the session has ended


def _since(before: Mapping[str, Outcome], now: Iterable[Outcome]) -> list[Outcome]:
    """The tasks that have ended since then, by function; those without any are left out."""
    found = []
    for one in now:
        old = before.get(one.name, Outcome(one.name))
        counts = {name: getattr(one, name) - getattr(old, name) for name in _OUTCOMES}
        if any(counts.values()):
            found.append(Outcome(one.name, **counts))
    return found


def _page(
    title: str,
    began: float,
    usage: Usage,
    room: int,
    error: BaseException | None,
    ended: Sequence[Outcome],
    failures: Sequence[Failure],
) -> str:
    parts = [
        _head(title, began, usage, sum(one.ended for one in ended)),
        *([_section("Failed", f'<p class="bad">{_text(f"{type(error).__name__}: {error}")}</p>')] if error else []),
        _section("Busy processes", _utilisation(usage)),
        _section("Time by function", _functions(usage)),
        _section("Failures", _failures(ended, failures)),
        _section("Memory of the store", _memory(usage, room)),
        _section("Queued tasks", _chart([usage.parts.queued], usage, lambda value: f"{value:,.0f}", "Queued tasks")),
        _section("Advice", _advice()),
        _section("Versions", _versions()),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><main>\n" + "\n".join(parts) + "\n"
        "</main></body></html>\n"
    )


def _head(title: str, began: float, usage: Usage, tasks: int) -> str:
    seconds = (usage.end - usage.begin) / 1e9
    tiles = [
        ("duration", _time(usage.end - usage.begin)), ("tasks and calls", f"{tasks:,}"),
        ("a second", f"{tasks / seconds:,.0f}" if seconds > 0 else "0"),
        ("busy", f"{100 * _share(usage):.0f} %"), ("most in the store", size_text(usage.most_bytes)),
    ]  # fmt: skip
    items = "".join(f'<li><span class="dim">{name}</span><b>{value}</b></li>' for name, value in tiles)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    return f'<h1>{_text(title)}</h1><p class="dim">{when}, {_text(platform.node())}</p><ul class="tiles">{items}</ul>'


def _share(usage: Usage) -> float:
    """The part of the time of workers and actors in which they ran."""
    possible = float(usage.parts.runners.sum()) * usage.parts.length
    return min(1.0, max(0.0, float(usage.parts.busy.sum())) / possible) if possible else 0.0


def _utilisation(usage: Usage) -> str:
    note = "<p>Workers and actors that run a task or call, less the time in which it waits in <code>fastrt.get</code>;"
    there = usage.parts.busy / usage.parts.length
    most = usage.parts.runners
    drawn = _chart([most, np.minimum(there, np.maximum(most, 1))], usage, lambda value: f"{value:,.1f}", "Processes")
    open_now = f" {usage.unfinished:,} actions have not ended." if usage.unfinished else ""
    lost = f" {usage.lost:,} records were overwritten before they were read, and are missing." if usage.lost else ""
    return f"{note} behind it the processes that there are.{open_now}{lost}</p>{drawn}"


def _functions(usage: Usage) -> str:
    if not usage.functions:
        return "<p>No task or call has ended.</p>"
    rows = sorted(usage.functions.items(), key=lambda item: (-item[1].total, item[0]))
    whole = max(1, sum(one.total for _, one in rows))
    body = [
        [
            f'<span title="{_text(name)}">{_text(name[:200])}</span>', f"{one.count:,}", _time(one.total),
            f'<span class="bar" style="width:{6 * one.total / whole:.2f}rem"></span> {100 * one.total / whole:.0f} %',
            _time(one.total / max(1, one.count)), _time(one.quantile(0.5)), _time(one.quantile(0.99)),
            _time(one.longest),
        ]
        for name, one in rows[:_ROWS_MAX]
    ]  # fmt: skip
    more = f"<p>and {len(rows) - _ROWS_MAX:,} more functions</p>" if len(rows) > _ROWS_MAX else ""
    heads = ["function", "runs", "time", "share", "mean", "median", "99 %", "longest"]
    return _table(heads, body) + more


def _failures(ended: Sequence[Outcome], failures: Sequence[Failure]) -> str:
    """Counts of all that did not succeed, and the kept failures in groups, each with its last traceback."""
    bad = [one for one in ended if one.failed or one.cancelled or one.crashed or one.retried]
    if not bad and not failures:
        return "<p>No task or call has failed.</p>"
    rows = [
        [f'<span title="{_text(one.name)}">{_text(one.name[:200])}</span>',
         *(f"{getattr(one, name):,}" for name in ("failed", "crashed", "cancelled", "retried", "succeeded"))]
        for one in sorted(bad, key=lambda one: (-one.failed - one.crashed, one.name))[:_ROWS_MAX]
    ]  # fmt: skip
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        line = failure.message.partition("\n")[0]
        groups.setdefault((failure.name, failure.type, line), []).append(failure)
    parts = (
        [_table(["function", "failed", "crashed", "cancelled", "attempts retried", "succeeded"], rows)] if rows else []
    )
    shown = sorted(groups.items(), key=lambda item: -len(item[1]))[:_GROUPS_MAX]
    for (name, kind, line), some in shown:
        head = f"{len(some):,} × {name}: {kind}: {line}"
        mended = sum(one.mended for one in some)
        mend = f"<p>{mended:,} of them were mended by a later attempt.</p>" if mended else ""
        text = some[-1].traceback or some[-1].message
        parts.append(f"<details><summary>{_text(head[:500])}</summary>{mend}<pre>{_text(text)}</pre></details>")
    if len(groups) > len(shown):
        parts.append(f"<p>and {len(groups) - len(shown):,} more kinds</p>")
    return "".join(parts)


def _memory(usage: Usage, room: int) -> str:
    moved = [
        f"{size_text(usage.moved[f'{word}_bytes'])} {text}"
        for word, text in (
            ("spilled", "went from the store to files"), ("restored", "came back"),
            ("mapped", "were written to files at once, because the store had no room"),
        )
        if usage.moved.get(f"{word}_bytes")
    ]  # fmt: skip
    words = "; ".join([f"At most {size_text(usage.most_bytes)} of {size_text(room)}", *moved])
    return f"<p>{words}.</p>" + _chart([usage.parts.store], usage, size_text, "Bytes in the store")


def _advice() -> str:
    given = warnings.given()
    rows = "".join(f"<p>{_text(line)}</p>" for line in given)
    return rows or "<p>fastrt has noticed nothing in this process that makes the program slow.</p>"


def _versions() -> str:
    rows = [[_text(line)] for line in this_build(version("fastrt")).lines()]
    rows += [[_text(f"{name} {version(name)}")] for name in ("numpy", "cloudpickle")]
    rows.append([_text(f"{platform.system()} {platform.release()}, {len(os.sched_getaffinity(0))} CPUs")])
    return "".join(f"<p>{row[0]}</p>" for row in rows)


def _chart(lines: Sequence[Array], usage: Usage, write: Callable[[float], str], what: str) -> str:
    """Areas over time, each before the last one; the scale begins at 0."""
    count = max(2, min(len(usage.parts.busy), (usage.end - usage.begin) // usage.parts.length + 1))
    highest = max(1e-9, *(float(line[:count].max()) for line in lines))
    shapes = []
    for k, line in enumerate(lines):
        points = " ".join(
            f"{at * _WIDTH / (count - 1):.1f},{_HEIGHT * (1 - max(0.0, float(value)) / highest):.1f}"
            for at, value in enumerate(line[:count])
        )
        colour = "c0" if k == len(lines) - 1 else "c2"
        opacity = "0.8" if k == len(lines) - 1 else "0.2"
        shapes.append(
            f'<polygon class="{colour}" fill-opacity="{opacity}" points="0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"/>'
        )
    scale = f'<p class="dim">top: {write(highest)}; {_time(usage.end - usage.begin)} from left to right</p>'
    label = _text(f"{what} over time, at most {write(highest)}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(shapes)}</svg>{scale}"
    )


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _text(words: str) -> str:
    return html.escape(words[:4000])


def _time(nanoseconds: float) -> str:
    for limit, divisor, unit in ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (120e9, 1e9, "s")):
        if nanoseconds < limit:
            return f"{nanoseconds / divisor:,.3g} {unit}"
    return f"{nanoseconds / 60e9:,.1f} min"
