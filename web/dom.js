// Making and changing elements. Data becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

// make("p", { class: "note", hidden: true }, "some ", make("b", {}, "text")); a property `on…`
// with a function listens.
export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else set(element, name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Touches the document only where something is different: a page with a thousand steps is told of
// changes many times a second, and a screen reader hears every one that is made.
export function set(element, name, value) {
  const wanted = value === true ? "" : value;
  if (wanted === false || wanted === null || wanted === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(wanted)) {
    element.setAttribute(name, wanted);
  }
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function find(id) {
  return document.getElementById(id);
}

// The mark of a look, from the drawings in index.html. It is always beside a word that says it.
export function mark(look = "queued") {
  const use = draw("use", { href: `#mark-${look}` });
  return draw("svg", { class: "mark", viewBox: "0 0 16 16", "aria-hidden": "true" }, use);
}

// A word with its mark and its tones: <span class="badge" data-look="done">✓ done</span>.
export function badge() {
  return make("span", { class: "badge" }, mark(), make("span", {}));
}

export function showBadge(element, look, word) {
  set(element, "data-look", look);
  set(element.querySelector("use"), "href", `#mark-${look}`);
  say(element.lastElementChild, word);
}

export function time(at, words) {
  return make("time", { datetime: at, title: at }, words);
}
