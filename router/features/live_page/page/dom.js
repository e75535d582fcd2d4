// Elements and numbers. Everything that is shown is set as text or as an attribute, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function cell(name, ...children) {
  return element("span", { role: "cell", class: name }, ...children);
}

// A cell whose heading is not on show: on a narrow screen the column titles are hidden.
export function labelled(name, label, ...children) {
  const title = element("span", { class: "label", "aria-hidden": "true" }, label);
  return cell(name, title, ...children);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Makes the children of `container` those of `items`, in their order, and keeps the nodes that are there.
export function keyed(container, items, keyOf, create, update) {
  const known = (container.known ??= new Map());
  const keys = new Set(items.map(keyOf));
  for (const [key, node] of known) {
    if (!keys.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let before = container.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = known.get(key);
    if (node === undefined) known.set(key, (node = create(item)));
    update(node, item);
    if (node === before) before = before.nextElementSibling;
    else container.insertBefore(node, before);
  }
}

// Whether the page is being read here, so that nothing should move.
export function isInUse(container) {
  return container.matches(":hover") || container.contains(document.activeElement);
}

const whole = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const count = (number) => whole.format(number);
export const compact = (number) => short.format(number);
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(number) {
  const power = number < 1 ? 0 : Math.min(BYTES.length - 1, Math.floor(Math.log2(number) / 10));
  const value = number / 1024 ** power;
  return `${power > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} ${BYTES[power]}`;
}

export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");
export const rate = (number) => (number === 0 || number >= 100 ? whole.format(Math.round(number)) : number.toFixed(1));

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10_000 ? `${(value / 1000).toFixed(1)} s` : value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

export function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86_400)} d ago`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// Parts of a whole as a bar: [[class, amount], …]. The text beside it says the same.
export function bar(name) {
  return element("span", { class: `bar-of ${name}`, "aria-hidden": "true" });
}

export function setBar(node, parts, all) {
  keyed(node, parts, ([name]) => name, ([name]) => element("i", { class: name }), (part, [, amount]) => {
    part.style.width = all > 0 ? `${(100 * amount) / all}%` : "0";
  });
}
