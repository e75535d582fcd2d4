// The three charts: counts per slot of some seconds, the newest on the right.

import { clock, compact, count, drawing, element, milliseconds, percent, rate, setAttribute, setText } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;

class Chart {
  constructor(figure, name, keys) {
    this.title = element("p", { class: "readout" });
    this.most = element("span", { class: "most", "aria-hidden": "true" });
    this.plot = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.cross = drawing("line", { class: "crosshair", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.marks = keys.map((key) => drawing("path", { class: key }));
    this.plot.append(
      drawing("line", { class: "grid", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }),
      drawing("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
      ...this.marks,
      drawing("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      this.cross,
    );
    const frame = element("div", { class: "plot" }, this.plot, this.most);
    const times = element("p", { class: "times", "aria-hidden": "true" }, element("span", {}, "5 min ago"), element("span", {}, "now"));
    figure.append(this.title, frame, times);
    this.name = name;
    this.pointed = null;
    frame.addEventListener("pointermove", (event) => {
      const box = frame.getBoundingClientRect();
      this.pointed = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      this.read();
    });
    frame.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.read();
    });
  }

  // `describe` writes a slot, or all of them if there is none, as text.
  show(slots, most, mostText, paths, describe) {
    this.slots = slots;
    this.describe = describe;
    setText(this.most, mostText);
    for (const [place, path] of paths.entries()) setAttribute(this.marks[place], "d", path);
    setAttribute(this.plot, "aria-label", `${this.name}, last five minutes: ${describe(null)}`);
    this.read();
  }

  read() {
    if (this.slots === undefined) return;
    const { most, complete } = this.slots;
    const place = this.pointed === null ? -1 : Math.floor(this.pointed * most) - (most - complete);
    const isOn = place >= 0 && place < complete;
    setText(this.title, isOn ? `${clock(this.slots.start + place * this.slots.seconds)}  ${this.describe(place)}` : this.describe(null));
    const x = ((place + 0.5 + most - complete) * WIDTH) / most;
    setAttribute(this.cross, "visibility", isOn ? "visible" : "hidden");
    setAttribute(this.cross, "x1", x);
    setAttribute(this.cross, "x2", x);
  }
}

const ORIGINS = ["cross_user", "own", "unattributed", "computed"];
const ORIGIN_CLASSES = ["cross", "own", "unattributed", "computed"];
const ORIGIN_NAMES = ["cross-user", "own", "unattributed", "computed"];

export class Charts {
  constructor() {
    const figure = (id) => document.getElementById(id);
    this.origin = new Chart(figure("chart-origin"), "Prompt tokens by origin", ORIGIN_CLASSES);
    this.requests = new Chart(figure("chart-requests"), "Requests per second", ["requests", "errors"]);
    this.ttft = new Chart(figure("chart-ttft"), "Time to first token", ["p90", "p50"]);
  }

  show(columns) {
    // The slot that is not over yet would look like a drop.
    const complete = columns.requests.length - 1;
    const slots = { ...columns, complete };
    this.showOrigins(slots);
    this.showRequests(slots);
    this.showTtft(slots);
  }

  showOrigins(slots) {
    const all = slots.computed.map((_, place) => ORIGINS.reduce((sum, name) => sum + slots[name][place], 0));
    const most = nice(Math.max(1, ...all.slice(0, slots.complete)) / slots.seconds) * slots.seconds;
    const bases = all.map(() => 0);
    const paths = ORIGINS.map((name) => {
      const path = bars(slots, (place) => [bases[place] / most, (bases[place] + slots[name][place]) / most]);
      slots[name].forEach((amount, place) => (bases[place] += amount));
      return path;
    });
    const describe = (place) => {
      const amounts = ORIGINS.map((name) => (place === null ? total(slots[name]) : slots[name][place]));
      const tokens = amounts.reduce((sum, amount) => sum + amount, 0);
      if (tokens === 0) return "no prompts";
      const shares = amounts.map((amount, index) => [amount, `${percent(amount, tokens)} ${ORIGIN_NAMES[index]}`]);
      const shown = shares.filter(([amount], index) => amount > 0 || index !== 2).map(([, text]) => text);
      return `${percent(tokens - amounts[3], tokens)} hit: ${shown.slice(0, -1).join(", ")}`;
    };
    this.origin.show(slots, most, `${compact(most / slots.seconds)} tokens/s`, paths, describe);
  }

  showRequests(slots) {
    const most = nice(Math.max(1, ...slots.requests.slice(0, slots.complete)) / slots.seconds) * slots.seconds;
    const paths = [
      bars(slots, (place) => [0, slots.requests[place] / most]),
      bars(slots, (place) => [0, slots.errors[place] / most]),
    ];
    const describe = (place) => {
      if (place !== null) return `${rate(slots.requests[place] / slots.seconds)}/s, errors ${rate(slots.errors[place] / slots.seconds)}/s`;
      const errors = total(slots.errors);
      return `${rate(latest(slots, slots.requests))}/s now, ${count(total(slots.requests))} in 5 min, ${count(errors)} failed`;
    };
    this.requests.show(slots, most, `${rate(most / slots.seconds)}/s`, paths, describe);
  }

  showTtft(slots) {
    const known = [...slots.ttft_p90.slice(0, slots.complete)].filter((value) => value !== null);
    const most = nice(Math.max(1, ...known));
    const paths = [line(slots, slots.ttft_p90, most), line(slots, slots.ttft_p50, most)];
    const describe = (place) => {
      const at = place ?? slots.ttft_p50.slice(0, slots.complete).findLastIndex((value) => value !== null);
      if (at < 0 || slots.ttft_p50[at] === null) return "no first token";
      return `p50 ${milliseconds(slots.ttft_p50[at])}, p90 ${milliseconds(slots.ttft_p90[at])}`;
    };
    this.ttft.show(slots, most, milliseconds(most), paths, describe);
  }
}

// Per second, of the last two slots that are over.
export function latest(slots, values) {
  const complete = values.length - 1;
  const recent = values.slice(Math.max(0, complete - 2), complete);
  return recent.length ? total(recent) / (recent.length * slots.seconds) : total(values) / slots.seconds;
}

export function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

// The next of 1, 2, 5, 10, …, so that the scale seldom changes.
function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value * 0.999);
}

function bars(slots, span) {
  const step = WIDTH / slots.most;
  let path = "";
  for (let place = 0; place < slots.complete; place++) {
    const [low, high] = span(place);
    if (high <= low) continue;
    const x = (place + slots.most - slots.complete) * step;
    path += `M${(x + 0.5).toFixed(1)} ${y(low)}V${y(high)}H${(x + step - 0.5).toFixed(1)}V${y(low)}Z`;
  }
  return path;
}

function line(slots, values, most) {
  const step = WIDTH / slots.most;
  let path = "";
  let isOpen = false;
  for (let place = 0; place < slots.complete; place++) {
    if (values[place] === null) {
      isOpen = false;
      continue;
    }
    const x = ((place + 0.5 + slots.most - slots.complete) * step).toFixed(1);
    const alone = !isOpen && (place + 1 === slots.complete || values[place + 1] === null);
    path += `${isOpen ? "L" : "M"}${x} ${y(values[place] / most)}${alone ? "h0.01" : ""}`;
    isOpen = true;
  }
  return path;
}

const y = (share) => (HEIGHT - Math.min(1, share) * (HEIGHT - 2)).toFixed(1);

// Bars without any text, for a row of a table.
export function sparkline() {
  return drawing("svg", { class: "spark", viewBox: `0 0 120 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, drawing("path"));
}

export function setSparkline(svg, values, most, length) {
  const step = 120 / length;
  let path = "";
  for (const [place, value] of values.slice(0, -1).entries()) {
    if (value === 0) continue;
    const x = (place + length - values.length + 1) * step;
    path += `M${x.toFixed(1)} 20V${(20 - (19 * value) / most).toFixed(1)}h${(step * 0.8).toFixed(2)}V20Z`;
  }
  setAttribute(svg.firstElementChild, "d", path);
}
