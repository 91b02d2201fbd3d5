"""The comparison's figures as tables, and each required figure beside the measured one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from peers import PEERS
from rich import box
from rich.console import Console
from rich.table import Table
from workloads import ROWS, Row

COLUMNS = ("pool", "loky", "ray", "dask", "memcpy")
TITLES = {**{name: title for name, (_, _, _, title) in PEERS.items()}, "memcpy": "memcpy"}
SHORT = {**TITLES, "pool": "ProcessPool"}
WIDTH = 180  # when the output is no terminal
Result = dict[str, Any]


class Target(NamedTuple):
    """A figure that must be reached."""

    what: str
    required: str
    measured: str
    reached: bool


# (part, key of a measure, figure, title, upper bound, unit)
LIMITS = (
    ("start", "fastrt", "p50_s", "start-up to first result", 0.3, "s"),
    ("alone", "further_worker", "p50_ms", "a further worker", 10.0, "ms"),
    ("rest", "fastrt", "anonymous_MB", "memory of all processes at rest", 120.0, "MB"),
    ("rest", "fastrt", "cpu_percent", "CPU used when idle", 0.2, "% of a core"),
    ("alone", "after_idle", "p50_us", "one task after 10 ms idle, p50", 60.0, "us"),
    ("alone", "after_idle", "p99_us", "one task after 10 ms idle, p99", 300.0, "us"),
    ("alone", "objects_alive", "ratio", "put + get + release beside a million objects", 1.5, "x an empty store's"),
    ("alone", "tasks_queued", "ratio", "a task with a million queued, submit to release", 1.5, "x among 10,000"),
    ("alone", "wait_growth", "wait", "wait one by one, a ref of 8,000", 2.0, "x that of 1,000"),
    ("alone", "wait_growth", "as_completed", "as_completed, a ref of 8,000", 2.0, "x that of 1,000"),
)


def targets(found: Result) -> Iterator[Target]:
    """Judge all required figures that were measured."""
    rows = found.get("rows", {})
    for row in ROWS:
        figures = rows.get(row.key, {}).get("figures", {})
        for peer, factor in row.required:
            if peer in figures:
                ratio = figures[peer]["ratio"]
                yield Target(row.title, f"{factor:g} x {TITLES[peer]}", _ratio(ratio), ratio >= factor)
        if row.most_us and figures:
            value = figures["fastrt"]["p50_us"]
            yield Target(row.title, f"under {row.most_us:g} us", f"{value:.2f} us", value < row.most_us)
    for part, key, figure, what, most, unit in LIMITS:
        measured = found.get(part, {}).get(key)
        if measured:
            value = growth(measured, figure) if key == "wait_growth" else measured[figure]
            yield Target(what, f"at most {most:g} {unit}", f"{value:.3g} {unit}", value <= most)


def growth(measured: dict[str, float], way: str) -> float:
    """The cost of a reference among 8,000 over that among 1,000: 1 is linear, 8 quadratic."""
    return measured[f"{way}_8000_us_a_ref"] / measured[f"{way}_1000_us_a_ref"]


def show(found: Result, markdown: bool) -> list[Target]:
    """Print all tables.

    Returns:
        The targets that were missed.
    """
    judged = list(targets(found))
    rows = [row for row in ROWS if row.key in found.get("rows", {})]
    used = [name for name in COLUMNS if any(name in found["rows"][row.key]["figures"] for row in rows)]
    line = _line_of_ratios if markdown else _line
    tables = [
        ("The same work", _head(used, markdown), [line(row, found, used) for row in rows]),
        ("Start-up and rest", ("", "start-up, s", "processes", "anonymous MB", "CPU idle, %"), list(_rest(found))),
        ("fastrt alone", ("measure", "figures"), [(k, _figures(v)) for k, v in found.get("alone", {}).items()]),
        (
            "What it must reach",
            ("workload", "required", "measured", ""),
            [(t.what, t.required, t.measured, "reached" if t.reached else "MISSED") for t in judged],
        ),
    ]
    console = Console(width=None if Console().is_terminal else WIDTH)
    for title, head, lines in tables:
        if lines and markdown:
            console.print(f"\n**{title}**\n\n" + _markdown(head, lines), markup=False, highlight=False, soft_wrap=True)
        elif lines:
            table = Table(*head, title=title, box=box.SIMPLE, title_justify="left")
            for cells in lines:
                table.add_row(*cells)
            console.print(table)
    about = found["machine"]
    versions = ", ".join(f"{TITLES[name]} {version}" for name, version in about["versions"].items())
    console.print(f"{about['cpus']} CPUs ({about['cpu']}), Python {about['python']}; {versions}", highlight=False)
    return [target for target in judged if not target.reached]


def _markdown(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _head(used: list[str], ratios: bool) -> tuple[str, ...]:
    if ratios:
        return ("workload, two workers", "fastrt", "p50 / p99", *(f"x {SHORT[name]}" for name in used))
    return ("workload", "unit", "fastrt", "p50, us", "p99, us", *(SHORT[name] for name in used))


def _line(row: Row, found: Result, used: list[str]) -> tuple[str, ...]:
    figures = found["rows"][row.key]["figures"]
    ours = figures["fastrt"]
    cells = [row.title, f"{row.ops:,}", _figure(row, ours), f"{ours['p50_us']:,.3g}", f"{ours['p99_us']:,.3g}"]
    for name in used:
        theirs = figures.get(name)
        cells.append(f"{_figure(row, theirs)} ({_ratio(theirs['ratio'])})" if theirs else "-")
    return tuple(cells)


def _line_of_ratios(row: Row, found: Result, used: list[str]) -> tuple[str, ...]:
    figures = found["rows"][row.key]["figures"]
    times = " / ".join(_time(figures["fastrt"][name]) for name in ("p50_us", "p99_us"))
    ratios = [_ratio(figures[name]["ratio"]).removesuffix(" x") if name in figures else "-" for name in used]
    return (row.title, _figure(row, figures["fastrt"]), times, *ratios)


def _time(value_us: float) -> str:
    return f"{value_us:.3g} us" if value_us < 1000 else f"{value_us / 1000:.3g} ms"


def _ratio(value: float) -> str:
    return f"{value:.2f} x" if value < 10 else f"{value:,.0f} x"


def _figure(row: Row, figure: dict[str, float]) -> str:
    """A rate, or a time for rows that are about latency."""
    if row.latency:
        return f"{figure['p50_us']:,.3g} us"
    if row.nbytes:
        return f"{figure['GB_per_s']:.3g} GB/s"
    return f"{figure['per_second']:,.0f}/s"


def _rest(found: Result) -> Iterator[tuple[str, ...]]:
    starts, rests = found.get("start", {}), found.get("rest", {})
    for name in dict.fromkeys([*starts, *rests]):
        start, rest = starts.get(name), rests.get(name)
        yield (
            TITLES[name],
            f"{start['p50_s']:.3f}" if start else "-",
            str(rest["processes"]) if rest else "-",
            f"{rest['anonymous_MB']:.0f}" if rest else "-",
            f"{rest['cpu_percent']:.2f}" if rest else "-",
        )


def _figures(values: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in values.items())
