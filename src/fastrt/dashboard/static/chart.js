// Charts as SVG elements, coloured by the style sheet.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 72;

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Lines over time, the newest value at the right; the scale begins at 0.
export function chart(section, write) {
  const highest = Math.max(section.top, ...section.lines.flatMap(line => line.values), 1e-9);
  const longest = Math.max(2, ...section.lines.map(line => line.values.length));
  const words = section.lines.map(line => `${line.name}: now ${write(line.values.at(-1) ?? 0, section.as)}`).join(", ");
  const drawn = shape("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${section.title}: ${words}; the scale ends at ${write(highest, section.as)}`});
  for (const part of [0.5, 1]) {
    drawn.append(shape("line", {class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - part * (HEIGHT - 4), y2: HEIGHT - part * (HEIGHT - 4)}));
  }
  section.lines.forEach((line, k) => {
    const points = line.values.map((value, at) => {
      const x = WIDTH - (line.values.length - 1 - at) * WIDTH / (longest - 1);
      return `${x.toFixed(1)},${(HEIGHT - value / highest * (HEIGHT - 4)).toFixed(1)}`;
    });
    if (points.length > 1) {
      drawn.append(shape("polygon", {class: `area line${k}`, points: `${points[0].split(",")[0]},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`}));
      drawn.append(shape("polyline", {class: `line line${k}`, points: points.join(" ")}));
    }
  });
  const top = document.createElement("span");
  top.className = "top";
  top.textContent = section.lines.some(line => line.values.length) ? write(highest, section.as) : "";
  const both = document.createElement("div");
  both.className = "drawn";
  both.append(top, drawn);
  return both;
}

// One row for each process, with its slices between `from` and `to` (seconds).
export function lanes(section, write) {
  const rows = document.createElement("div");
  rows.className = "rows";
  for (const lane of section.lanes) {
    const drawn = shape("svg", {viewBox: "0 0 1000 18", preserveAspectRatio: "none", role: "img",
      "aria-label": `${lane.name}: ${lane.slices.length} slices`});
    for (const [start, length, colour, title] of lane.slices) {
      const tip = shape("title", {});
      tip.textContent = title;
      drawn.append(shape("rect", {x: (start * 1000).toFixed(2), y: 1, width: Math.max(0.8, length * 1000).toFixed(2), height: 16, class: `slice hue${colour}`}, tip));
    }
    const row = document.createElement("div"), name = document.createElement("span");
    row.className = "lane";
    name.textContent = lane.name;
    row.append(name, drawn);
    rows.append(row);
  }
  const scale = document.createElement("p");
  scale.className = "scale";
  scale.textContent = section.scale;
  rows.append(scale);
  return rows;
}
