"""A profile as a picture: a page of its own that any browser shows, or a PNG by matplotlib."""

from __future__ import annotations

import html
import importlib.util
import math
from pathlib import Path

from fastrt.errors import FastrtError
from fastrt.observe.profile import LIMITS, Profile, Row, size_name

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 880, 460, 64, 48, 24, 150
_COLOURS = {
    "memcpy": "#9aa0a6", "plain TCP": "#5f6368", "put": "#1a73e8", "get": "#12b5cb", "same node": "#9334e6",
    "native": "#188038", "grpc": "#e8710a",
}  # fmt: skip


def check(path: Path) -> None:
    """Refuse at once what could not be drawn after minutes of measuring.

    Raises:
        FastrtError: the name ends with something else than .html or .png, or matplotlib is missing.
    """
    if path.suffix not in (".html", ".png"):
        raise FastrtError(f"{path}: a plot's name ends with .html or .png")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise FastrtError("matplotlib draws PNG files; pip install 'fastrt[plot]', or give a name with .html")


def write(profile: Profile, path: Path) -> None:
    """Draw the rate of every path over the size of the value.

    Args:
        profile: what was measured.
        path: of the file to write; its name ends with .html or .png.
    Raises:
        FastrtError: the name ends with something else, or matplotlib is missing.
    """
    check(path)
    if path.suffix == ".html":
        path.write_text(_page(profile))
    else:
        _png(profile, path)


def _lines(profile: Profile) -> dict[str, list[Row]]:
    """The rows of each path; `get` moves no bytes, so its rate says nothing."""
    found: dict[str, list[Row]] = {}
    for row in profile.rows:
        if row.path != "get":
            found.setdefault(row.path, []).append(row)
    return {path: found[path] for path in LIMITS if path in found}


def _page(profile: Profile) -> str:
    lines = _lines(profile)
    points = [row for rows in lines.values() for row in rows]
    low_x, high_x = math.log2(min(r.nbytes for r in points)), math.log2(max(r.nbytes for r in points))
    low_y = math.floor(math.log10(min(r.rate for r in points)))
    high_y = math.ceil(math.log10(max(r.rate for r in points)))

    def x(nbytes: float) -> float:
        return _LEFT + (math.log2(nbytes) - low_x) / max(1e-9, high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(rate) - low_y) / max(1, high_y - low_y) * (_HEIGHT - _BOTTOM - _TOP)

    shapes = []
    for power in range(low_y, high_y + 1):
        at = y(10**power)
        shapes.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        shapes.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for nbytes in sorted({row.nbytes for row in points}):
        place = f'x="{x(nbytes):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle"'
        shapes.append(f"<text {place}>{size_name(nbytes)}</text>")
    for k, (path, rows) in enumerate(lines.items()):
        colour = _COLOURS[path]
        track = " ".join(f"{x(row.nbytes):.1f},{y(row.rate):.1f}" for row in rows)
        dash = ' stroke-dasharray="5 4"' if not LIMITS[path] else ""
        shapes.append(f'<polyline points="{track}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for row in rows:
            told = html.escape(f"{path}, {size_name(row.nbytes)}: {row.rate:.2f} GB/s")
            spot = f'cx="{x(row.nbytes):.1f}" cy="{y(row.rate):.1f}" r="3.5" fill="{colour}"'
            shapes.append(f"<circle {spot}><title>{told}</title></circle>")
        down = _TOP + 16 + 20 * k
        shapes.append(f'<rect x="{_WIDTH - _RIGHT + 16}" y="{down - 9}" width="10" height="10" fill="{colour}"/>')
        shapes.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{down}">{path}</text>')
    style = "text{font:12px sans-serif;fill:#3c4043}.grid{stroke:#dadce0}body{font-family:sans-serif;margin:2em}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>fastrt profile transfer</title><style>{style}</style>'
        f"<h1>Transfer</h1><p>GB (10<sup>9</sup> bytes) a second by the size of the value.</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{"".join(shapes)}</svg>\n'
    )


def _png(profile: Profile, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, rows in _lines(profile).items():
        style = "--" if not LIMITS[name] else "-"
        axes.loglog([r.nbytes for r in rows], [r.rate for r in rows], style, marker="o", c=_COLOURS[name], label=name)
    measured = sorted({row.nbytes for row in profile.rows})
    axes.set_xticks(measured, [size_name(nbytes) for nbytes in measured])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axes.set_title("Transfer (dashed: what the machine can do)")
    axes.set_xlabel("size of the value")
    axes.set_ylabel("GB (10\u2079 bytes) a second")
    axes.grid(True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)  # beside: it would cover points
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
