// The last decisions, newest first; each can be opened to see what was weighed.

import { bar, cell, clock, count, element, isInUse, keyed, labelled, milliseconds, setAttribute, setBar, setText } from "./dom.js";

const MOST_ROWS = 60;
const LARGE_BLOCK = 128;

const REMARKS = {
  never_cached: "not seen before",
  below_a_block: "less than a block",
  prefix_changed: "prompt changed",
  other_namespace: "other namespace",
  not_yet_written: "being computed just then",
  held_elsewhere: "held by another replica",
  not_worth_moving: "sooner computed than moved",
  lost_in_transfer: "lost on its way to the device",
  not_resumable: "no layer state to resume from",
  evicted: "evicted",
  expired: "lease ran out",
  lease_broken: "lease broken",
  file_lost: "file lost",
  cleared: "cache emptied",
  replica_restarted: "replica restarted",
  unknown: "gone, not known why",
  not_reported: "the engine does not say",
};

const rows = document.getElementById("decisions");
const note = document.getElementById("decisions-note");
const heldButton = document.getElementById("held");
const open = new Set();
let shown = [];
let held = [];
let newest = 0;

heldButton.addEventListener("click", () => {
  open.clear();
  rows.parentElement.scrollTop = 0;
  release();
});

export const newestNumber = () => newest;

export function showDecisions(answer) {
  for (const decision of answer.decisions) newest = Math.max(newest, decision.number);
  held = [...answer.decisions, ...held].slice(0, MOST_ROWS);
  setText(note, newest ? `${count(answer.num_decisions)} since the router started` : "No request has been answered yet.");
  // A line must not move away from under a reader's eyes.
  if (open.size || isInUse(rows) || rows.parentElement.scrollTop > 0) {
    heldButton.hidden = held.length === 0;
    setText(heldButton, `Show ${held.length === MOST_ROWS ? `${MOST_ROWS} or more` : held.length} new`);
  } else release();
}

export function forgetDecisions() {
  newest = 0;
  shown = [];
  held = [];
  open.clear();
  release();
}

function release() {
  shown = [...held, ...shown].slice(0, MOST_ROWS);
  held = [];
  heldButton.hidden = true;
  keyed(rows, shown, (decision) => decision.number, create, () => {});
}

function create(decision) {
  const isFailed = decision.error !== null;
  const details = element("div", { class: "details", id: `decision-${decision.number}`, hidden: true });
  const button = element(
    "button",
    { type: "button", class: "link time", "aria-expanded": "false", "aria-controls": details.id, "aria-label": `Request ${decision.number} at ${clock(decision.at)}: explain` },
    clock(decision.at),
  );
  const origin = bar("origin");
  const cached = decision.cached_tokens ?? 0;
  const cross = decision.cross_user_tokens ?? 0;
  const own = decision.own_tokens ?? 0;
  setBar(origin, [["cross", cross], ["own", own], ["unattributed", cached - cross - own], ["computed", decision.cached_tokens === null ? 0 : decision.prompt_tokens - cached]], decision.prompt_tokens);
  const remark = isFailed ? element("span", { class: "failed" }, `${decision.status} ${decision.error}`) : element("span", {}, decision.difference ?? remarkOf(decision));
  const number = (label, value) => labelled("number", label, element("span", { class: "value" }, value === null ? "–" : count(value)));
  const line = element(
    "div",
    { class: "row", role: "row" },
    cell("request", button),
    cell("user", decision.user === null ? element("span", { class: "none" }, "no user") : element("span", { class: "tag" }, decision.user)),
    cell("to cut", decision.replica === null ? "–" : decision.computed_at === decision.replica ? decision.replica : `${decision.computed_at} → ${decision.replica}`),
    cell("reason", decision.reason ?? "–"),
    cell("origins", origin, tiersOf(decision), imagesOf(decision)),
    number("expected", decision.expected_tokens),
    number("cached", decision.cached_tokens),
    number("tokens", decision.prompt_tokens),
    labelled("number", "TTFT", element("span", { class: "value" }, milliseconds(decision.ttft_ms))),
    cell("remark cut", remark),
  );
  const toggle = () => explain(decision.number, button, details);
  line.addEventListener("click", toggle);
  return element("div", { class: "entry" }, line, details);
}

function remarkOf({ finding, block_size: blockSize }) {
  if (finding === "below_a_block" && blockSize > LARGE_BLOCK) return `less than a block of ${count(blockSize)}`;
  return REMARKS[finding] ?? "";
}

// From where the cached tokens were read, if not all of them were on the device.
function tiersOf(decision) {
  const host = decision.host_tokens ?? 0;
  const disk = decision.disk_tokens ?? 0;
  if (host + disk === 0) return null;
  const parts = [["on the device", decision.cached_tokens - host - disk], ["from host memory", host], ["from disk", disk]];
  const text = parts.filter(([, amount]) => amount > 0).map(([name, amount]) => `${count(amount)} ${name}`);
  return element("span", { class: "small tiers" }, text.join(", "));
}

// How many images the prompt has, and how many of the tokens that stand for them were cached.
function imagesOf(decision) {
  if (!decision.images) return null;
  const cached = `${count(decision.cached_image_tokens)} of ${count(decision.image_tokens)} tokens cached`;
  return element("span", { class: "small images" }, `${count(decision.images)} ${decision.images === 1 ? "image" : "images"}, ${cached}`);
}

async function explain(number, button, details) {
  const isOpen = open.has(number);
  setAttribute(button, "aria-expanded", String(!isOpen));
  details.hidden = isOpen;
  if (isOpen) {
    open.delete(number);
    return;
  }
  open.add(number);
  if (details.childElementCount) return;
  const answer = await fetch(`/live/decisions/${number}`).catch(() => null);
  const body = answer === null ? null : await answer.json().catch(() => null);
  if (answer === null || !answer.ok || body === null) {
    details.replaceChildren(element("p", {}, body?.error?.message ?? "The router does not answer."));
    open.delete(number);
    return;
  }
  details.replaceChildren(...explained(body));
}

function explained(decision) {
  const facts = [
    ["request", decision.request_id],
    ["route", decision.route],
    ["model", decision.adapter ? `${decision.model} (adapter)` : decision.model],
    ["namespace", decision.tenant === "default" ? "no salt" : decision.tenant],
    ["prompt_cache_key", decision.key ?? "none"],
    ["rank in the affinity order", decision.rank === null ? "–" : decision.rank === 0 ? "0 (home)" : count(decision.rank)],
    ["output tokens", count(decision.output_tokens)],
    ["whole answer", milliseconds(decision.ended_ms)],
  ];
  const list = element("dl", {});
  for (const [name, value] of facts) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, String(value))));
  const parts = [];
  if (decision.replica !== null) parts.push(element("p", { class: "because" }, `Sent to ${decision.replica}: ${decision.because}.`));
  if (decision.split !== null) parts.push(element("p", {}, splitOf(decision.split)));
  const tiers = tiersOf(decision);
  if (tiers !== null) parts.push(element("p", {}, `Cached tokens: ${tiers.textContent}.`));
  const images = imagesOf(decision);
  if (images !== null) parts.push(element("p", {}, `Of the prompt: ${images.textContent}.`));
  if (decision.difference !== null) parts.push(element("p", { class: "difference" }, `It leaves the nearest earlier prompt: ${decision.difference}.`));
  for (const candidate of decision.candidates) {
    if (candidate.tiers?.sentence) parts.push(element("p", {}, `Expected ${candidate.tiers.sentence}.`));
  }
  for (const finding of decision.findings) parts.push(element("p", {}, finding.text));
  if (decision.candidates.length) parts.push(candidates(decision));
  return [...parts, list];
}

function splitOf(split) {
  const pair = `computed at ${split.prefiller} and decoded at ${split.decoder}`;
  const [apart, alone] = [milliseconds(split.split_ms), milliseconds(split.alone_ms)];
  if (split.is_split) return `The prompt was ${pair}: expected cost ${apart}, all at one replica ${alone}.`;
  return `Expected cost ${alone} at one replica; ${pair} ${apart}.`;
}

function candidates(decision) {
  const hasTiers = decision.candidates.some((candidate) => candidate.tiers);
  const depths = hasTiers ? ["Device", "Host", "Disk"] : [];
  const isSparse = decision.candidates.some((candidate) => candidate.reached_tokens);
  const times = ["wait", ...(hasTiers ? ["move"] : []), "prefill", "delay", "room", "cost"];
  const titles = ["Compared", "Rank", "Overlap", ...(isSparse ? ["Held to"] : []), ...depths, "Requests", "Pending", ...times.map((name) => name[0].toUpperCase() + name.slice(1))];
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const body = decision.candidates.map((candidate) => {
    const seconds = times.map((name) => milliseconds(1000 * candidate[`${name}_seconds`]));
    const reached = depths.map((name) => (candidate.tiers ? count(candidate.tiers[`${name.toLowerCase()}_tokens`]) : "–"));
    const values = [candidate.rank, count(candidate.overlap_tokens), ...(isSparse ? [count(candidate.reached_tokens)] : []), ...reached, count(candidate.num_requests), count(candidate.num_pending_tokens), ...seconds];
    const isChosen = candidate.replica === decision.replica;
    return element(
      "tr",
      { class: isChosen ? "chosen" : null },
      element("th", { scope: "row" }, isChosen ? `${candidate.replica} (chosen)` : candidate.replica),
      ...values.map((value) => element("td", {}, String(value))),
    );
  });
  const table = element("table", { class: "candidates" }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Candidates and their costs" }, table);
}
