// Builds the elements of a section. Every text is set as text: nothing that comes from a program is read as HTML.
import {chart, lanes} from "./chart.js";

const UNITS = [[1 << 30, "GiB"], [1 << 20, "MiB"], [1 << 10, "KiB"]];
const RIGHT = new Set(["count", "number", "bytes", "seconds"]);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== false) element.setAttribute(name, value === true ? "" : value);
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

export function write(value, kind) {
  if (value === null || value === undefined) return "";
  if (kind === "count") return Number(value).toLocaleString("en");
  if (kind === "number") return Number(value).toLocaleString("en", {maximumFractionDigits: value < 10 ? 2 : value < 100 ? 1 : 0});
  if (kind === "bytes") {
    const unit = UNITS.find(([size]) => value >= size);
    return unit ? `${(value / unit[0]).toLocaleString("en", {maximumFractionDigits: 1})} ${unit[1]}` : `${value} B`;
  }
  if (kind === "seconds") return value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (kind === "clock") return `${new Date(value * 1000).toTimeString().slice(0, 8)}.${String(Math.floor(value * 1000) % 1000).padStart(3, "0")}`;
  if (kind === "time") {
    const at = new Date(value * 1000);
    return at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
  }
  return String(value);
}

const KINDS = {
  text: section => make("p", {class: `words ${section.tone}`}, section.text),

  points: section => make("section", {}, make("h2", {}, section.title), make("ul", {class: "points"}, ...section.points.map(one => make("li", {}, one)))),

  facts: section => make("dl", {class: "facts"}, ...section.facts.map(([label, value, kind]) =>
    make("div", {}, make("dt", {}, label), make("dd", {class: kind === "state" ? `state ${value}` : kind}, write(value, kind))))),

  chart: section => make("figure", {class: "chart"},
    make("figcaption", {}, section.title,
      ...section.lines.map((line, k) => make("span", {class: `legend line${k}`}, section.lines.length > 1 ? `${line.name} ` : "",
        make("b", {}, line.values.length ? write(line.values.at(-1), section.as) : "")))),
    chart(section, write)),

  lanes: (section, address) => make("figure", {class: "lanes"}, make("figcaption", {}, section.title), lanes(section, write)),

  lines: section => make("section", {}, make("h2", {}, section.title),
    section.text ? make("pre", {tabindex: "0", role: "region", "aria-label": section.title}, section.text) : make("p", {class: "empty"}, section.empty)),

  log: (section, address) => make("section", {class: "log"}, make("h2", {}, section.title),
    section.lines.length ? make("div", {class: "printed", tabindex: "0", role: "region", "aria-label": section.title, "data-follow": section.follows},
      ...section.lines.map(([time, isError, name, pid, task, text]) => make("p", {class: isError ? "line err" : "line"},
        make("time", {}, write(time, "clock")), make("span", {class: "who"}, name ? make(task ? "a" : "span", task ? {href: address("logs", {...section.args, task})} : {}, name) : "",
          pid ? ` ${pid}` : ""), make("span", {class: "what"}, text)))) : make("p", {class: "empty"}, section.empty),
    section.follows ? make("p", {class: "paused"}, "Paused. Scroll to the end to go on.") : null,
    section.next ? make("p", {}, to(section.next, address)) : null),

  way: (section, address) => make("p", {class: "way"}, ...section.steps.flatMap((step, k) => k ? [" \u203a ", to(step, address)] : [to(step, address)])),

  links: (section, address) => make("p", {class: "buttons"}, ...section.links.map(one => to(one, address))),

  choices: section => make("form", {class: "choices"}, ...section.fields.map(([name, label, value, some]) =>
    make("label", {}, make("span", {}, label), some.length
      ? make("select", {name}, ...some.map(one => make("option", {value: one, selected: one === value}, one || "any")))
      : make("input", {name, value, type: "search", autocomplete: "off", spellcheck: "false"}))),
    make("button", {type: "submit"}, "Filter")),

  buttons: section => make("p", {class: "buttons"}, ...section.buttons.map(([label, path, body, ask]) =>
    make("button", {type: "button", "data-path": path, "data-body": JSON.stringify(body), "data-ask": ask}, label))),

  files: section => make("p", {class: "buttons"}, ...section.files.map(([label, name]) =>
    make("a", {href: "#", class: "button", "data-file": name}, label))),

  table: (section, address) => make("section", {}, make("h2", {}, section.title),
    section.rows.length ? make("div", {class: "wide", tabindex: "0", role: "region", "aria-label": section.title}, make("table", {},
      make("thead", {}, make("tr", {}, ...section.columns.map(([name, kind]) =>
        name ? make("th", {scope: "col", class: RIGHT.has(kind) ? "right" : ""}, name) : make("td")))),
      make("tbody", {}, ...section.rows.map(row => make("tr", {}, ...row.map((cell, k) =>
        make("td", {class: RIGHT.has(section.columns[k][1]) ? "right" : section.columns[k][1]}, inside(cell, section.columns[k][1], address)))))),
    )) : make("p", {class: "empty"}, section.empty),
    section.next ? make("p", {}, to(section.next, address)) : null),
};

export function build(section, address) {
  const element = (KINDS[section.kind] ?? KINDS.text)(section, address);
  element.dataset.kind = section.kind;
  return element;
}

function to(step, address) {
  return make("a", {href: address(step.view, step.args)}, step.text);
}

function inside(cell, kind, address) {
  if (cell === null || typeof cell !== "object") return kind === "state" && cell ? make("span", {class: `state ${String(cell).replace(/\W/g, "")}`}, cell) : write(cell, kind);
  if (cell.parts) {
    const total = cell.parts.reduce((sum, [, count]) => sum + count, 0) || 1;
    return make("span", {class: "bar", title: cell.parts.map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(", ")},
      ...cell.parts.map(([name, count]) => { const part = make("i", {class: `part ${name}`}); part.style.width = `${100 * count / total}%`; return part; }));
  }
  if (cell.share !== undefined) {
    const part = make("i", {class: "part running"});
    part.style.width = `${100 * cell.share}%`;
    return make("span", {class: "bar", title: `${Math.round(100 * cell.share)} %`}, part);
  }
  return to(cell, address);
}
