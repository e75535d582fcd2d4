// The replicas: how busy each is, how full its cache, what this router has sent it.

import { latest, setSparkline, sparkline } from "./charts.js";
import { bar, bytes, cell, compact, count, element, keyed, labelled, percent, rate, setAttribute, setBar, setText } from "./dom.js";

const rows = document.getElementById("fleet");
const note = document.getElementById("fleet-note");

export function showFleet(state) {
  const shown = state.replicas.toSorted((one, other) => one.id.localeCompare(other.id, "en", { numeric: true }));
  const busiest = Math.max(1, ...shown.flatMap((replica) => replica.requests));
  keyed(rows, shown, (replica) => replica.id, create, (row, replica) => update(row, replica, state.slots, busiest));
  const ready = shown.filter((replica) => replica.state === "ready").length;
  const cut = state.num_replicas > shown.length ? `; the first ${shown.length} of ${count(state.num_replicas)} are shown` : "";
  const running = shown.reduce((sum, replica) => sum + replica.running, 0);
  const waiting = shown.reduce((sum, replica) => sum + replica.waiting + replica.on_the_way, 0);
  setText(note, shown.length ? `${ready} of ${count(state.num_replicas)} ready, ${count(running)} running, ${count(waiting)} waiting${cut}` : "No replica is known yet.");
}

function create(replica) {
  const name = element("strong", { class: "name", title: replica.id }, replica.id);
  const state = element("span", { class: "state" });
  const parts = {
    running: labelled("number", "running"),
    waiting: labelled("number", "waiting"),
    pending: labelled("number", "pending"),
    rate: labelled("number", "req/s"),
    hits: labelled("number", "hit rate"),
  };
  for (const part of Object.values(parts)) part.append(element("span", { class: "value" }));
  const fill = bar("fill");
  const fillText = element("span", { class: "small" });
  const tiers = element("span", { class: "tiers" });
  const spark = sparkline();
  const model = element("span", { class: "cut" });
  const epoch = element("span", { class: "small cut" });
  const complaint = cell("complaint small failed");
  const row = element(
    "div",
    { class: "row", role: "row" },
    cell("name", name),
    cell("", state),
    parts.running,
    parts.waiting,
    parts.pending,
    cell("cache", fill, fillText, tiers),
    parts.rate,
    cell("sparks", spark),
    parts.hits,
    cell("about", model, epoch),
    complaint,
  );
  row.parts = { ...parts, state, fill, fillText, tiers, spark, model, epoch, complaint };
  return row;
}

const TIERS = { host: "host memory", disk: "disk" };

function createTier(tier) {
  const line = element("span", { class: "tier" });
  line.fill = bar("fill");
  line.text = element("span", { class: "small" });
  line.append(line.fill, line.text);
  line.title = `KV below the device, in ${TIERS[tier.tier]}`;
  return line;
}

function updateTier(line, tier) {
  setBar(line.fill, [["cached", Math.min(tier.bytes, tier.max_bytes)]], tier.max_bytes);
  setText(line.text, `${TIERS[tier.tier]}: ${bytes(tier.bytes)} of ${bytes(tier.max_bytes)}`);
}

function update(row, replica, slots, busiest) {
  const parts = row.parts;
  const value = (name, text) => setText(parts[name].lastElementChild, text);
  setText(parts.state, replica.state);
  setAttribute(parts.state, "data-state", replica.state);
  setText(parts.complaint, replica.complaint ?? "");
  parts.complaint.hidden = replica.complaint === null;
  value("running", count(replica.running));
  value("waiting", replica.on_the_way ? `${count(replica.waiting)}+${count(replica.on_the_way)}` : count(replica.waiting));
  parts.waiting.title = "waiting there, plus what is on its way";
  value("pending", compact(replica.pending_tokens));
  const idle = Math.max(0, replica.cached_blocks - replica.used_blocks);
  const all = replica.total_blocks;
  setBar(parts.fill, [["used", replica.used_blocks], ["cached", Math.min(idle, all - replica.used_blocks)]], all);
  setText(parts.fillText, `${compact(replica.used_blocks)} used, ${compact(replica.cached_blocks)} cached${replica.is_predicted ? " (predicted)" : ""} of ${compact(all)}`);
  parts.fill.parentElement.title = `${count(replica.used_blocks)} blocks held by requests, ${count(replica.cached_blocks)} findable by hash, ${count(all)} in all, of ${replica.block_size ?? "?"} tokens`;
  keyed(parts.tiers, replica.tiers, (tier) => tier.tier, createTier, updateTier);
  value("rate", rate(latest(slots, replica.requests)));
  setSparkline(parts.spark, replica.requests, busiest, slots.most);
  value("hits", percent(replica.cached_tokens, replica.tokens));
  parts.hits.title = `${count(replica.cached_tokens)} of ${count(replica.tokens)} prompt tokens in the last five minutes`;
  parts.model.title = replica.model;
  setText(parts.model, `${replica.role ? `${replica.role}, ` : ""}${replica.engine ?? "?"}, ${replica.model}`);
  setText(parts.epoch, `epoch ${replica.epoch.slice(-8)}`);
  parts.epoch.title = `epoch ${replica.epoch} at ${replica.address}`;
}
