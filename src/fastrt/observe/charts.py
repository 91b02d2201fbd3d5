"""Draw a profile: as a self-contained page that any browser shows, or as a PNG by matplotlib.

Both have the same charts over the size of the value: rate, time per object and CPU, each with a line for each path;
and the split of an operation's time into its parts, with a bar for each path and size.
"""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.observe.profile import LIMITS, Profile, Row, size_name

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 880, 460, 64, 48, 24, 150
_BAR, _GAP = 12, 6  # of the split: a bar's height, and the space between sizes
_COLOURS = {
    "memcpy": "#9aa0a6", "plain TCP": "#5f6368", "put": "#1a73e8", "get": "#12b5cb", "same node": "#9334e6",
    "native": "#188038", "grpc": "#e8710a",
}  # fmt: skip
_PARTS = {"serialize": "#fbbc04", "copy": "#1a73e8", "wire": "#34a853", "wait": "#dadce0"}


@dataclass
class _Chart:
    """One quantity over the size of the value.

    Attributes:
        title: the quantity's name and unit, for people.
        unit: the unit in tooltips.
        value: returns the value of a row; None or 0: the row has none.
    """

    title: str
    unit: str
    value: Callable[[Row], float | None]


_CHARTS = (
    # `get` moves no bytes, so its rate and its CPU per GB would mislead.
    _Chart("GB (10\u2079 bytes) a second", "GB/s", lambda row: None if row.path == "get" else row.rate),
    _Chart("Microseconds for one object", "us", lambda row: row.seconds * 1e6),
    _Chart("CPU seconds for each GB in this process", "s/GB", lambda row: None if row.path == "get" else row.cpu_here),
    _Chart("CPU seconds for each GB in the process at the other end", "s/GB", lambda row: row.cpu_there),
)
_Lines = dict[str, list[tuple[int, float]]]  # points of each path


def check(path: Path) -> None:
    """Check before minutes of measuring that a plot can be drawn.

    Raises:
        FastrtError: the name does not end with .html or .png, or matplotlib is missing.
    """
    if path.suffix not in (".html", ".png"):
        raise FastrtError(f"{path}: a plot's name must end with .html or .png")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise FastrtError("PNG files need matplotlib: pip install 'fastrt[plot]', or give a name with .html")


def write(profile: Profile, path: Path) -> None:
    """Draw rate, time, CPU and the parts of an operation over the size of the value.

    Args:
        profile: the measurements.
        path: of the file to write; its name ends with .html or .png.
    Raises:
        FastrtError: the name ends otherwise, or matplotlib is missing.
    """
    check(path)
    if path.suffix == ".html":
        path.write_text(_page(profile))
    else:
        _png(profile, path)


def _lines(profile: Profile, chart: _Chart) -> _Lines:
    found: _Lines = {}
    for path in LIMITS:
        values = [(row.nbytes, chart.value(row)) for row in profile.rows if row.path == path]
        points = [(nbytes, value) for nbytes, value in values if value]
        if points:
            found[path] = points
    return found


def _split(profile: Profile) -> list[tuple[Row, dict[str, float]]]:
    """The rows with known parts, each with the share of each part, ordered by size and path."""
    found = []
    for row in sorted(profile.rows, key=lambda row: (row.nbytes, [*LIMITS].index(row.path))):
        whole = sum(row.parts.values())
        if whole and row.path != "get":
            found.append((row, {name: row.parts[name] / whole for name in _PARTS if row.parts.get(name)}))
    return found


# A page


def _page(profile: Profile) -> str:
    style = "text{font:12px sans-serif;fill:#3c4043}.grid{stroke:#dadce0}body{font-family:sans-serif;margin:2em}"
    charts = [
        f"<h2>{chart.title}</h2>{_drawn(lines, chart.unit)}" for chart in _CHARTS if (lines := _lines(profile, chart))
    ]
    split = _split(profile)
    if split:
        charts.append(f"<h2>Where the time of an operation goes</h2>{_bars(split)}")
    return (
        f'<!doctype html><meta charset="utf-8"><title>fastrt profile transfer</title><style>{style}</style>'
        f"<h1>Transfer</h1><p>By the size of the value. Dashed: what the machine can do.</p>{''.join(charts)}\n"
    )


def _drawn(lines: _Lines, unit: str) -> str:
    points = [point for path in lines.values() for point in path]
    low_x, high_x = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))
    low_y, high_y = math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points)))

    def x(nbytes: float) -> float:
        return _LEFT + (math.log2(nbytes) - low_x) / max(1e-9, high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(value) - low_y) / max(1, high_y - low_y) * (_HEIGHT - _BOTTOM - _TOP)

    shapes = []
    for power in range(low_y, high_y + 1):
        at = y(10.0**power)
        shapes.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        shapes.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for nbytes in sorted({nbytes for nbytes, _ in points}):
        place = f'x="{x(nbytes):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle"'
        shapes.append(f"<text {place}>{size_name(nbytes)}</text>")
    for k, (path, measured) in enumerate(lines.items()):
        colour = _COLOURS[path]
        track = " ".join(f"{x(nbytes):.1f},{y(value):.1f}" for nbytes, value in measured)
        dash = ' stroke-dasharray="5 4"' if not LIMITS[path] and path != "get" else ""
        shapes.append(f'<polyline points="{track}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for nbytes, value in measured:
            shown = html.escape(f"{path}, {size_name(nbytes)}: {value:.3g} {unit}")
            spot = f'cx="{x(nbytes):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}"'
            shapes.append(f"<circle {spot}><title>{shown}</title></circle>")
        shapes += _legend(k, path, colour)
    return _svg(shapes, _HEIGHT)


def _bars(split: list[tuple[Row, dict[str, float]]]) -> str:
    left, right = 2 * _LEFT, _WIDTH - _RIGHT
    shapes: list[str] = []
    for k, (name, colour) in enumerate(_PARTS.items()):
        shapes += _legend(k, name, colour)
    top, before = _TOP, split[0][0].nbytes
    for row, shares in split:
        top += _GAP if row.nbytes != before else 0
        before = row.nbytes
        label = f"{row.path}, {size_name(row.nbytes)}"
        shapes.append(f'<text x="{left - 8}" y="{top + _BAR - 2}" text-anchor="end">{html.escape(label)}</text>')
        start = float(left)
        for name, share in shares.items():
            width = share * (right - left)
            shown = html.escape(f"{label}: {name} {share:.0%}, {share * row.seconds * 1e6:.3g} us")
            place = f'x="{start:.1f}" y="{top}" width="{width:.1f}" height="{_BAR - 1}" fill="{_PARTS[name]}"'
            shapes.append(f"<rect {place}><title>{shown}</title></rect>")
            start += width
        top += _BAR
    return _svg(shapes, max(top, _TOP + 20 * len(_PARTS)) + _GAP)


def _legend(place: int, name: str, colour: str) -> list[str]:
    down = _TOP + 16 + 20 * place
    return [
        f'<rect x="{_WIDTH - _RIGHT + 16}" y="{down - 9}" width="10" height="10" fill="{colour}"/>',
        f'<text x="{_WIDTH - _RIGHT + 32}" y="{down}">{name}</text>',
    ]


def _svg(shapes: list[str], height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">{"".join(shapes)}</svg>'


# A picture


def _png(profile: Profile, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [(chart, lines) for chart in _CHARTS if (lines := _lines(profile, chart))]
    split = _split(profile)
    heights = [5.0] * len(drawn) + ([1.0 + 0.18 * len(split)] if split else [])
    figure, all_axes = pyplot.subplots(
        len(heights), figsize=(9, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    figure.suptitle("Transfer (dashed: what the machine can do)")
    for (chart, lines), axes in zip(drawn, all_axes[:, 0], strict=False):
        _plot(axes, chart, lines)
    if split:
        _plot_bars(all_axes[-1, 0], split)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot(axes: Any, chart: _Chart, lines: _Lines) -> None:
    for name, points in lines.items():
        style = "--" if not LIMITS[name] and name != "get" else "-"
        axes.loglog(*zip(*points, strict=True), style, marker="o", c=_COLOURS[name], label=name)
    measured = sorted({nbytes for points in lines.values() for nbytes, _ in points})
    axes.set_xticks(measured, [size_name(nbytes) for nbytes in measured])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("size of the value")
    axes.set_ylabel(chart.title)
    axes.grid(True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)  # outside, where it covers no points


def _plot_bars(axes: Any, split: list[tuple[Row, dict[str, float]]]) -> None:
    places = range(len(split))
    starts = [0.0] * len(split)
    for name, colour in _PARTS.items():
        shares = [found.get(name, 0.0) for _, found in split]
        axes.barh(places, shares, left=starts, color=colour, label=name)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    axes.set_yticks(places, [f"{row.path}, {size_name(row.nbytes)}" for row, _ in split])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("where the time of an operation goes")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
