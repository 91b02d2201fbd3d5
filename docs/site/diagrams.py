"""Mermaid's diagrams in the pages, without Mermaid: flowcharts become drawings, state diagrams become tables.

A browser needs no program for either, and the build no network. The drawing is a layered layout: each node gets a row
by its longest path from a start, edges that cross rows get a place of their own in each of them, and the places of a
row are ordered by the mean of their neighbours.
"""

import html
import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

_EDGE = re.compile(r"\s*(<-->|-->|<-\.->|-\.->)\s*(?:\|([^|]*)\|)?\s*")
_NODE = re.compile(r"(\w+)\s*(?:\(\[(.*?)\]\)|\[\((.*?)\)\]|\[(.*?)\])?")
_STATE = re.compile(r"(\S+) --> (\S+?)(?:: (.+))?")
_CHAR, _LINE, _PAD, _GAP, _BETWEEN = 6.8, 18.0, 10.0, 16.0, 48.0  # pixels, for text of 13 pixels
_SWEEPS = 6
_START = "[*]"
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


class DiagramError(Exception):
    """A line of a diagram that cannot be read."""


@dataclass
class Box:
    """A node, or the place of an edge in a row that it crosses."""

    lines: list[str] = field(default_factory=list)
    store: bool = False
    row: int = 0
    x: float = 0.0
    y: float = 0.0  # of the centre

    @property
    def width(self) -> float:
        """Pixels; few for the place of an edge."""
        return max(map(len, self.lines)) * _CHAR + 2 * _PAD if self.lines else 4.0

    @property
    def height(self) -> float:
        """Pixels."""
        return len(self.lines) * _LINE + _PAD if self.lines else 0.0


@dataclass
class Edge:
    """An edge, and the boxes that it passes from its upper end to its lower one."""

    source: str
    target: str
    label: str
    both: bool
    dashed: bool
    path: list[Box] = field(default_factory=list)
    upwards: bool = False

    @property
    def labelled(self) -> Box:
        """The box below which the label stands."""
        return self.path[(len(self.path) - 1) // 2]


def as_html(text: str) -> str:
    """Make HTML of a diagram.

    Raises:
        DiagramError: it is neither a flowchart nor a state diagram, or a line cannot be read.
    """
    kind = text.split(maxsplit=1)[0]
    if kind not in ("flowchart", "stateDiagram-v2"):
        raise DiagramError(f"neither a flowchart nor a state diagram: {kind}")
    return draw_flowchart(text) if kind == "flowchart" else state_table(text)


def parse_flowchart(text: str) -> tuple[dict[str, Box], list[Edge], dict[str, set[str]]]:
    """Read a flowchart.

    Returns:
        The nodes by name, the edges, and the nodes of each subgraph by its title.
    Raises:
        DiagramError: a line cannot be read.
    """
    boxes: dict[str, Box] = {}
    edges: list[Edge] = []
    groups: dict[str, set[str]] = {}
    group = ""
    for line in map(str.strip, text.splitlines()[1:]):
        if match := re.fullmatch(r'subgraph \w+\["(.*)"\]', line):
            group = match[1]
            groups[group] = set()
        elif line == "end":
            group = ""
        elif line:
            parts = _EDGE.split(line)
            ends = [[_node(name, boxes) for name in part.split("&")] for part in parts[::3]]
            if group:
                groups[group] |= {name for end in ends for name in end}
            for i, (kind, label) in enumerate(zip(parts[1::3], parts[2::3], strict=True)):
                pairs = [(source, target) for source in ends[i] for target in ends[i + 1]]
                for number, (source, target) in enumerate(pairs):
                    # One label is enough for the edges that are written as one.
                    said = (label or "").strip('" ') if number == len(pairs) // 2 else ""
                    edges.append(Edge(source, target, said, kind.startswith("<"), "." in kind))
    return boxes, edges, groups


def _node(text: str, boxes: dict[str, Box]) -> str:
    match = _NODE.fullmatch(text.strip())
    if match is None:
        raise DiagramError(f"not a node: {text!r}")
    name, *labels = match.groups()
    box = boxes.setdefault(name, Box([name]))
    label = next((label for label in labels if label is not None), None)
    if label is not None:
        box.lines = re.split(r"<br/?>", label.strip('"'))
        box.store = match[3] is not None
    return name


def _rows(boxes: dict[str, Box], edges: list[Edge], groups: dict[str, set[str]]) -> None:
    """Give each node a row; edges that would close a circle run upwards."""
    after = defaultdict(list)
    for edge in edges:
        after[edge.source].append(edge)
    state: dict[str, int] = {}
    order: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        for edge in after[name]:
            if state.get(edge.target) == 1:
                edge.upwards = True
            elif edge.target not in state:
                visit(edge.target)
        state[name] = 2
        order.append(name)

    for name in boxes:
        if name not in state:
            visit(name)
    ends = {id(edge): (edge.target, edge.source) if edge.upwards else (edge.source, edge.target) for edge in edges}
    for _ in boxes:  # the longest path; as many rounds as it can have steps
        for upper, lower in ends.values():
            boxes[lower].row = max(boxes[lower].row, boxes[upper].row + 1)
    starts = set(boxes) - {lower for _, lower in ends.values()}
    for name in starts:
        nexts = [boxes[lower].row for upper, lower in ends.values() if upper == name]
        boxes[name].row = max(0, min(nexts, default=1) - 1)
    inside = set().union(*groups.values())
    if inside:
        last = max(boxes[name].row for name in inside)
        for name in boxes.keys() - inside:
            boxes[name].row = last + 1


def _places(boxes: dict[str, Box], edges: list[Edge]) -> list[list[Box]]:
    """Order the boxes of each row, and those of the edges between them."""
    rows: list[list[Box]] = [[] for _ in range(max(box.row for box in boxes.values()) + 1)]
    for box in boxes.values():
        rows[box.row].append(box)
    for edge in edges:
        upper, lower = boxes[edge.source], boxes[edge.target]
        if upper.row > lower.row:
            upper, lower, edge.upwards = lower, upper, True
        crossed = [Box(row=c) for c in range(upper.row + 1, lower.row)]
        for box in crossed:
            rows[box.row].append(box)
        edge.path = [upper, *crossed, lower]
    beside = defaultdict(list)
    for edge in edges:
        for a, b in pairwise(edge.path):
            beside[id(a)].append(b)
            beside[id(b)].append(a)
    for sweep in range(_SWEEPS):
        ranks = {id(box): (i + 0.5) / len(row) for row in rows for i, box in enumerate(row)}
        for row in rows if sweep % 2 == 0 else reversed(rows):
            means = {id(b): sum(ranks[id(o)] for o in beside[id(b)]) / (len(beside[id(b)]) or 1) for b in row}
            row.sort(key=lambda box: means[id(box)])
            ranks |= {id(box): (i + 0.5) / len(row) for i, box in enumerate(row)}
    return rows


def draw_flowchart(text: str) -> str:
    """Draw a flowchart as SVG, from the top down so that it fits on a narrow screen.

    Args:
        text: Mermaid's source.
    Raises:
        DiagramError: a line cannot be read.
    """
    boxes, edges, groups = parse_flowchart(text)
    _rows(boxes, edges, groups)
    rows = _places(boxes, edges)
    labels = [[edge for edge in edges if edge.label and edge.labelled.row == i] for i in range(len(rows))]
    wide = max(sum(box.width + _GAP for box in row) for row in rows)
    y = _PAD + (_LINE if groups else 0)
    for row, said in zip(rows, labels, strict=True):
        tall = max(box.height for box in row)
        x = _GAP / 2 + (wide - sum(box.width + _GAP for box in row)) / 2 + _PAD
        for box in row:
            box.x, box.y = x + box.width / 2, y + tall / 2
            x += box.width + _GAP
        y += tall + _BETWEEN + max(0, len(said) - 1) * _LINE
    height = max(box.y + box.height / 2 for box in boxes.values()) + _PAD
    ports = _ports(edges)
    inner = [_group(title, [boxes[name] for name in names], wide) for title, names in groups.items()]
    inner += [_curve(edge, ports[id(edge)]) for edge in edges] + [_box(box) for box in boxes.values()]
    spans, width = [], wide + 2 * _PAD
    for said in labels:
        for i, edge in enumerate(sorted(said, key=lambda edge: edge.labelled.x)):
            x, y = _place_of_label(edge, ports[id(edge)], i)
            half = len(edge.label) * _CHAR / 2
            x = min(max(x, half), width - half) if 2 * half < width else width / 2
            spans.append(_text([edge.label], x, y, 'class="label"'))
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<div class="diagram"><svg {size} role="img" font-size="13">{_TIP}{"".join(inner + spans)}</svg></div>'


def _ports(edges: list[Edge]) -> dict[int, tuple[float, float]]:
    """The places at which each edge leaves the lower side of its first box and enters the upper side of its last."""
    sides = defaultdict(list)
    for edge in edges:
        sides[id(edge.path[0]), 0].append((edge.path[1].x, id(edge), edge.path[0]))
        sides[id(edge.path[-1]), 1].append((edge.path[-2].x, id(edge), edge.path[-1]))
    found: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (_, side), meeting in sides.items():
        for i, (_, edge_id, box) in enumerate(sorted(meeting, key=lambda entry: entry[0])):
            found[edge_id][side] = box.x + ((i + 1) / (len(meeting) + 1) - 0.5) * (box.width - _PAD)
    return {edge_id: (first, last) for edge_id, (first, last) in found.items()}


def _points(edge: Edge, ports: tuple[float, float]) -> list[tuple[float, float]]:
    first, last = edge.path[0], edge.path[-1]
    crossed = [(box.x, box.y) for box in edge.path[1:-1]]
    return [(ports[0], first.y + first.height / 2), *crossed, (ports[1], last.y - last.height / 2)]


def _curve(edge: Edge, ports: tuple[float, float]) -> str:
    points = _points(edge, ports)
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (ax, ay), (bx, by) in pairwise(points):
        path += f"C{ax:.1f} {(ay + by) / 2:.1f} {bx:.1f} {(ay + by) / 2:.1f} {bx:.1f} {by:.1f}"
    tips = ' marker-start="url(#tip)"' if edge.both or edge.upwards else ""
    tips += ' marker-end="url(#tip)"' if edge.both or not edge.upwards else ""
    dashes = ' stroke-dasharray="4 4"' if edge.dashed else ""
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity="0.7"{dashes}{tips}/>'


def _place_of_label(edge: Edge, ports: tuple[float, float], line: int) -> tuple[float, float]:
    """A point on the edge below the box that has its label; labels of one row take a line each."""
    points = _points(edge, ports)
    start = edge.path.index(edge.labelled)
    (ax, ay), (bx, by) = points[start], points[start + 1]
    y = edge.labelled.y + edge.labelled.height / 2 + _BETWEEN / 2 + line * _LINE
    share = min(max((y - ay) / (by - ay), 0.0), 1.0)
    low, high = 0.0, 1.0  # the curve's parameter at that height
    for _ in range(20):
        t = (low + high) / 2
        reached = 1.5 * t * (1 - t) ** 2 + 1.5 * t**2 * (1 - t) + t**3
        low, high = (t, high) if reached < share else (low, t)
    return ax + (bx - ax) * (3 * low**2 - 2 * low**3), y


def _box(box: Box) -> str:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    look = 'class="store"' if box.store else 'class="box"'
    radius = 4 if box.store else min(14.0, box.height / 2)
    rect = f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="{radius}" {look}/>'
    return rect + _text(box.lines, box.x, box.y, "")


def _group(title: str, boxes: list[Box], wide: float) -> str:
    bottom = max(box.y + box.height / 2 for box in boxes) + _PAD
    frame = f'<rect x="2" y="2" width="{wide + 2 * _PAD - 4:.1f}" height="{bottom - 2:.1f}" rx="6" class="group"/>'
    return frame + f'<text x="{_PAD + 2}" y="20" fill="currentColor">{html.escape(title)}</text>'


def _text(lines: list[str], x: float, y: float, look: str) -> str:
    top = y - (len(lines) - 1) * _LINE / 2 + 4.5
    return "".join(
        f'<text x="{x:.1f}" y="{top + i * _LINE:.1f}" text-anchor="middle" fill="currentColor" {look}>'
        f"{html.escape(line)}</text>"
        for i, line in enumerate(lines)
    )


def state_table(text: str) -> str:
    """Write a state diagram as a table in HTML: state, event, next state.

    Raises:
        DiagramError: a line cannot be read.
    """
    rows, first, previous = [], "", ""
    for line in map(str.strip, text.splitlines()[1:]):
        match = _STATE.fullmatch(line)
        if match is None:
            raise DiagramError(f"not a move: {line!r}")
        state, following, event = match.groups()
        if state == _START:
            first = following
            continue
        shown = "" if state == previous else f"<code>{html.escape(state)}</code>"
        note = " (first)" if shown and state == first else ""
        previous = state
        cells = (shown + note, html.escape(event or ""), f"<code>{html.escape(following)}</code>")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>in state</th><th>event</th><th>next state</th></tr>"
    table = f'<table class="docutils"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="table-wrapper docutils container">{table}</div>'
