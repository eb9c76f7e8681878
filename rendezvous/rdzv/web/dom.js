// Elements created only from text: nothing from a node is ever parsed as HTML.

import { duration } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return element;
}

/** Replace an element's children. */
export function fillAnew(element, ...children) {
  element.replaceChildren();
  return fill(element, {}, children);
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** A card that shows its title, and `extra` beside it, until it is opened. */
export const fold = (id, title, extra, ...children) =>
  h("section", { class: "card wide fold", "aria-labelledby": id }, h("details", {}, h("summary", {}, h("h2", { id }, title), extra), ...children));

/** Show names and values; those without a value are left out. */
export function drawFacts(list, facts) {
  keyed(list, facts.filter(([, value]) => value), ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd")), (element, [, value]) => put(element.lastChild, value));
  return list;
}

/** A table; with a `listed` one, a row becomes a short list, with the names of its values, where it is narrow. */
export const table = (caption, heads, body, listed = true) =>
  h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { class: listed ? "listed" : null }, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), body));

/** Set text only if it differs, to avoid disturbing a selection or a screen reader. */
export function put(element, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
  return element;
}

/** Set a sentence that has commands in backticks. */
export function tell(element, text) {
  if (element.told_ === text) return element;
  element.told_ = text;
  const parts = String(text).split("`");
  // An unpaired backtick is an ordinary character.
  const odd = parts.length % 2 === 0 ? "`" + parts.pop() : "";
  element.replaceChildren(...parts.map((part, at) => (at % 2 ? h("code", {}, part) : part)), odd);
  return element;
}

export function mark(element, name, value) {
  const wanted = value === null || value === undefined || value === false ? null : String(value);
  if (element.getAttribute(name) === wanted) return;
  if (wanted === null) element.removeAttribute(name);
  else element.setAttribute(name, wanted);
}

/** Make `items` the children of `parent`, in order; items with a known key keep their element. */
export function keyed(parent, items, key, create, update) {
  const known = (parent.keyed_ ||= new Map());
  const wanted = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = key(item);
    if (wanted.has(id)) continue;
    wanted.add(id);
    let element = known.get(id);
    if (!element) known.set(id, (element = create(item)));
    update(element, item);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  for (const [id, element] of known) {
    if (wanted.has(id)) continue;
    // Keyboard focus moves to a neighbor instead of the top of the page.
    if (element.contains(document.activeElement)) {
      const next = element.nextElementSibling || element.previousElementSibling;
      (next?.querySelector("a,button") || document.getElementById("main")).focus();
    }
    element.remove();
    known.delete(id);
  }
}

// Shapes first, colors second: color alone never conveys a state.
const SHAPES = {
  full: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2Z",
  ring: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2Zm0 2a4 4 0 1 1 0 8 4 4 0 0 1 0-8Z",
  half: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2Zm0 2v8a4 4 0 0 1 0-8Z",
  quarter: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2Zm0 2v4h4a4 4 0 1 1-4-4Z",
  check: "M6.4 13.2 1.9 8.7l1.8-1.8 2.7 2.7 5.9-6 1.8 1.8Z",
  cross: "m3.9 2.1 4.1 4.1 4.1-4.1 1.8 1.8L9.8 8l4.1 4.1-1.8 1.8L8 9.8l-4.1 4.1-1.8-1.8L6.2 8 2.1 3.9Z",
  square: "M3 3h10v10H3Z",
  diamond: "m8 1.6 6.4 6.4L8 14.4 1.6 8Zm0 3L4.6 8 8 11.4 11.4 8Z",
  warning: "M8 1.8 15 14H1Zm-.9 4.6v3.8h1.8V6.4Zm0 4.7v1.6h1.8v-1.6Z",
  dash: "M3 7h10v2H3Z",
  plus: "M7 2h2v5h5v2H9v5H7V9H2V7h5Z",
};

const STATES = {
  running: ["full", "good"],
  queued: ["ring", "warn"],
  joining: ["quarter", "warn"],
  stopping: ["half", "warn"],
  succeeded: ["check", "done"],
  failed: ["cross", "bad"],
  stopped: ["square", "idle"],
  seated: ["full", "good"],
  waiting: ["ring", "warn"],
  spare: ["diamond", "info"],
  away: ["warning", "warn"],
  lost: ["cross", "bad"],
  left: ["dash", "idle"],
  connected: ["full", "good"],
  gone: ["dash", "idle"],
  placed: ["quarter", "info"],
  holding: ["half", "info"],
  hangs: ["warning", "bad"],
  "went on": ["check", "done"],
  cordoned: ["square", "warn"],
  quarantined: ["warning", "bad"],
  unhealthy: ["cross", "bad"],
  draining: ["half", "warn"],
  drained: ["square", "idle"],
  "worker failure": ["cross", "bad"],
  "node lost": ["warning", "warn"],
  "node left": ["dash", "warn"],
  "nodes joined": ["plus", "info"],
  "store host": ["warning", "warn"],
  "start failed": ["cross", "bad"],
  operator: ["square", "info"],
};

export const tone = (state) => (STATES[state] || ["ring", "idle"])[1];
export const shape = (state) => SHAPES[(STATES[state] || ["ring"])[0]];

export function icon(state) {
  return s("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: shape(state) }));
}

/** A state, with its shape and its word. */
export function chip(state) {
  return updateChip(h("span", { class: "chip" }, icon(state), h("span")), state);
}

export function updateChip(element, state) {
  if (element.state === state) return element;
  element.state = state;
  mark(element, "data-tone", tone(state));
  element.firstChild.firstChild.setAttribute("d", shape(state));
  put(element.lastChild, state);
  return element;
}

/** A duration that grows from the value it had when it was received. */
export function age(since) {
  return updateAge(h("time", { class: "age" }), since);
}

export function updateAge(element, since) {
  element.since = since;
  return tick(element);
}

export function tick(element) {
  return put(element, element.since === null ? "" : duration(Date.now() - element.since));
}
