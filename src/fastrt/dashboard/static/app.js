// The page: reads the address (#view?name=value), follows that view's stream, and keeps the elements as it says.
import {build} from "./build.js";

const VIEWS = [
  ["overview", "Overview"], ["tasks", "Tasks"], ["failures", "Failures"], ["actors", "Actors"], ["workers", "Workers"],
  ["memory", "Memory"], ["timeline", "Timeline"], ["logs", "Logs"], ["nodes", "Nodes"], ["services", "Services"],
];
const TITLES = {rows: "Tasks", task: "Task", failure: "Failure", actor: "Actor", process: "Process"};
const PARENTS = {rows: "tasks", task: "tasks", failure: "failures", actor: "actors", process: "workers"};
const RETRY_MS = 1500;
const place = document.getElementById("page");
const banner = document.getElementById("banner");
let running = null;  // aborts the stream that is followed now
let session = "";
let shown = {sections: new Map(), order: []};  // of the stream that is followed

// The key lives in this origin's storage: other ports of this host cannot read it, as they could a cookie.
const given = document.querySelector("meta[name=fastrt-key]").content;
if (given) {
  localStorage.setItem("fastrt-key", given);
  history.replaceState(null, "", location.pathname + location.hash);
}

function asked() {
  const [view, query] = location.hash.slice(1).split("?");
  return {view: view || "overview", args: Object.fromEntries(new URLSearchParams(query ?? ""))};
}

export function address(view, args) {
  const query = new URLSearchParams(Object.entries(args).filter(([, value]) => value !== "")).toString();
  return `#${view}${query ? "?" + query : ""}`;
}

function send(path, options = {}) {
  const headers = {...options.headers, "X-Fastrt-Key": localStorage.getItem("fastrt-key") ?? ""};
  return fetch(path, {...options, headers, credentials: "same-origin"});
}

function say(words, tone = "warn") {
  banner.textContent = words;
  banner.className = tone;
  banner.hidden = !words;
}

// ---- following a view ----

function open() {
  running?.abort();
  running = new AbortController();
  const {view, args} = asked();
  document.getElementById("title").textContent = TITLES[view] ?? Object.fromEntries(VIEWS)[view] ?? view;
  document.title = `${document.getElementById("title").textContent} - fastrt`;
  for (const link of document.querySelectorAll("#nav a")) {
    const here = link.dataset.view === (PARENTS[view] ?? view);
    link.toggleAttribute("aria-current", here);
    if (here) { link.setAttribute("aria-current", "page"); link.scrollIntoView({block: "nearest", inline: "nearest"}); }
  }
  place.replaceChildren();
  place.setAttribute("aria-busy", "true");
  follow({...args, view, session: args.session ?? session}, running.signal);
}

async function follow(args, signal) {
  const path = "stream?" + new URLSearchParams(args);
  while (!signal.aborted) {
    try {
      const answer = await send(path, {signal});
      if (!answer.ok) {
        say(await answer.text(), "bad");
        if (answer.status === 401 || answer.status === 403) return;
      } else {
        await read(answer.body, signal);
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    if (signal.aborted) return;
    if (banner.className !== "bad" || banner.hidden) say("The dashboard does not answer: was it stopped? Trying again.", "bad");
    await new Promise(done => setTimeout(done, RETRY_MS));
  }
}

async function read(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  const sections = new Map();  // a stream begins with all sections
  shown = {sections, order: []};
  while (!signal.aborted) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) show(JSON.parse(event.slice(6)), sections);
    }
  }
}

// A log that a user has scrolled back stays as it is until it is scrolled to its end again.
function isHeld(element) {
  const area = element.querySelector("[data-follow]");
  return area !== null && !isAtEnd(area);
}

function isAtEnd(area) {
  return area.scrollHeight - area.scrollTop - area.clientHeight < 4;
}

function show(news, sections) {
  shown.order = news.order;
  for (const section of news.set) sections.set(section.id, section);
  place.removeAttribute("aria-busy");
  const head = sections.get("head");
  if (head) showHead(head);
  const changed = new Set(news.set.map(section => section.id));
  const old = new Map([...place.children].map(element => [element.dataset.id, element]));
  let last = null;
  for (const id of news.order) {
    if (id === "head") continue;
    let element = old.get(id);
    if (!element || changed.has(id)) {
      const fresh = build(sections.get(id), address);
      fresh.dataset.id = id;
      if (element && isHeld(element)) element.classList.add("held");
      else if (element && element.dataset.kind === fresh.dataset.kind) morph(element, fresh);
      else { element?.remove(); element = fresh; }
    }
    const next = last ? last.nextElementSibling : place.firstElementChild;
    if (next !== element) {
      place.insertBefore(element, next);
      for (const area of element.querySelectorAll("[data-follow]")) area.scrollTop = area.scrollHeight;
    }
    last = element;
  }
  for (const element of [...place.children]) if (!news.order.includes(element.dataset.id)) element.remove();
}

// Makes an element like another and keeps the nodes that are alike: what is selected, focused or scrolled stays so.
function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) { from.replaceWith(to); return; }
  if (from.nodeType === Node.TEXT_NODE) { if (from.data !== to.data) from.data = to.data; return; }
  if (from === document.activeElement && from.matches("input")) return;
  for (const {name} of [...from.attributes]) if (name !== "style" && !to.hasAttribute(name)) from.removeAttribute(name);
  for (const {name, value} of to.attributes) if (name !== "style" && from.getAttribute(name) !== value) from.setAttribute(name, value);
  if (from.style && to.style.width !== from.style.width) from.style.width = to.style.width;  // no style attribute: the policy forbids it
  const atEnd = from.matches("[data-follow]") && isAtEnd(from);
  const mine = [...from.childNodes], theirs = [...to.childNodes];
  theirs.forEach((child, k) => k < mine.length ? morph(mine[k], child) : from.append(child));
  mine.slice(theirs.length).forEach(child => child.remove());
  if (atEnd) from.scrollTop = from.scrollHeight;
}

function showHead(head) {
  const area = document.getElementById("head");
  const pick = document.createElement("select");
  pick.setAttribute("aria-label", "Session");
  for (const [name, short, state] of head.sessions) {
    const option = new Option(state === "live" ? `session ${short}` : `session ${short} (${state})`, name);
    option.toggleAttribute("selected", name === head.session);
    pick.append(option);
  }
  if (!area.firstChild) area.append(pick);
  else if (area.firstChild.textContent !== pick.textContent || area.firstChild.value !== head.session) area.replaceChildren(pick);
  area.hidden = !head.sessions.length;
  if (head.state === "live" || head.state === "none") { say(""); return; }
  const when = head.seen ? ` Last seen at ${new Date(head.seen * 1000).toLocaleTimeString()}.` : "";
  const words = head.state === "ended" ? "This session has ended" : `This session: ${head.state}`;
  say(`${words}${head.why ? ": " + head.why : ""}.${when}`, head.state === "ended" ? "warn" : "bad");
}

// ---- what a user does ----

document.addEventListener("change", event => {
  if (event.target.closest("#head")) {
    session = event.target.value;
    const {view, args} = asked();
    delete args.session;
    if (location.hash === address(PARENTS[view] ?? view, {})) open();
    else location.hash = address(PARENTS[view] ?? view, {});
  } else if (event.target.closest("form.choices")) filter(event.target.form);
});

document.addEventListener("submit", event => {
  event.preventDefault();
  filter(event.target);
});

function filter(form) {
  const {view, args} = asked();
  delete args.after;
  location.hash = address(view, {...args, ...Object.fromEntries(new FormData(form))});
}

document.addEventListener("click", async event => {
  const button = event.target.closest("button[data-path]");
  const file = event.target.closest("a[data-file]");
  if (button) {
    if (button.dataset.ask && !confirm(button.dataset.ask)) return;
    const body = JSON.stringify({...JSON.parse(button.dataset.body), session: document.querySelector("#head select")?.value ?? ""});
    const answer = await send(button.dataset.path, {method: "POST", body, headers: {"Content-Type": "application/json"}});
    const found = answer.headers.get("content-type")?.includes("json") ? await answer.json() : {said: await answer.text()};
    const note = document.createElement("span");
    note.className = "note";
    note.setAttribute("role", "status");
    note.textContent = found.said;
    button.after(note);
    setTimeout(() => note.remove(), 8000);
  } else if (file) {
    event.preventDefault();
    file.setAttribute("aria-busy", "true");
    const answer = await send(`file/${file.dataset.file}?` + new URLSearchParams({session: document.querySelector("#head select")?.value ?? ""}));
    file.removeAttribute("aria-busy");
    if (!answer.ok) { say(await answer.text()); return; }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = file.dataset.file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }
});

// The keys 1 to 9 and 0 open the pages of the menu, in its order.
document.addEventListener("keydown", event => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.altKey || event.metaKey) return;
  const number = "1234567890".indexOf(event.key);
  if (number >= 0 && VIEWS[number]) location.hash = VIEWS[number][0];
});

document.addEventListener("scroll", event => {
  const element = event.target.closest?.(".held");
  if (!element || isHeld(element)) return;
  element.classList.remove("held");
  if (shown.sections.has(element.dataset.id)) show({order: shown.order, set: [shown.sections.get(element.dataset.id)]}, shown.sections);
}, true);

document.addEventListener("visibilitychange", () => document.hidden ? running?.abort() : open());
window.addEventListener("hashchange", () => { say(""); open(); document.getElementById("main").focus({preventScroll: true}); });

VIEWS.forEach(([view, title], k) => {
  const link = document.createElement("a");
  link.href = `#${view}`;
  link.dataset.view = view;
  link.title = `key ${(k + 1) % 10}`;
  link.textContent = title;
  document.getElementById("nav").append(link);
});
open();
