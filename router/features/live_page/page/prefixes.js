// The prefixes as a tree: what prompts have in common, where it lies, who has used it.

import { ago, bar, cell, compact, count, element, isInUse, keyed, labelled, setAttribute, setBar, setText } from "./dom.js";

const FIRST_TOP = 12;
const FIRST_CHILDREN = 3;
const MORE_CHILDREN = 40;
const OPEN_LEVELS = 1;
const SHOWN_USERS = 2;
const SHOWN_HOLDERS = 3;
const NOWHERE = "not in the index";

const rows = document.getElementById("prefixes");
const table = rows.parentElement;
const note = document.getElementById("prefixes-note");
const toggled = new Map();
const numShown = new Map();
let latest = null;
let places = new Map();

export function showPrefixes(answer, order) {
  const isHeld = latest !== null && isInUse(rows);
  latest = { ...answer, order };
  if (!isHeld) places = new Map(answer.nodes.map((node, place) => [node.id, place]));
  draw();
}

export function forgetPrefixes() {
  toggled.clear();
  numShown.clear();
  places = new Map();
}

function draw() {
  const { nodes, order } = latest;
  const below = new Map();
  for (const node of nodes) {
    const above = node.parent ?? `root ${node.place.root}`;
    if (!below.has(above)) below.set(above, []);
    below.get(above).push(node);
  }
  const keyOf = (node) => node.key || (node.several_keys ? "several keys" : "");
  const byId = new Map(nodes.map((node) => [node.id, node]));
  // A key is shown once, where it begins.
  for (const node of nodes) node.label = keyOf(node) === keyOf(byId.get(node.parent) ?? {}) ? "" : keyOf(node);
  const most = nodes.reduce((largest, node) => Math.max(largest, node.requests), 1);
  const lines = [];
  const roots = new Map(nodes.filter((node) => node.parent === null).map((node) => [node.place.root, node.place]));
  for (const [root, place] of roots) {
    if (roots.size > 1) lines.push({ key: `root ${root}`, place });
    list(below, `root ${root}`, 0, lines, most);
  }
  keyed(rows, lines, (line) => line.key, create, (row, line) => row.update(line));
  const parts = [`${count(latest.num_nodes)} kept`];
  if (latest.num_nodes > nodes.length) parts.push(`${count(nodes.length)} ${order === "used" ? "most used" : "most recent"} here`);
  if (latest.num_forgotten) parts.push(`${count(latest.num_forgotten)} older ones forgotten`);
  setText(note, nodes.length ? parts.join(", ") : "No prompt with a full block has been answered yet.");
}

function list(below, above, level, lines, most) {
  const place = (node) => places.get(node.id) ?? -1;
  const all = (below.get(above) ?? []).toSorted((one, other) => place(one) - place(other));
  const shown = all.slice(0, numShown.get(above) ?? (level ? FIRST_CHILDREN : FIRST_TOP));
  for (const node of shown) {
    const hasBelow = below.has(node.id);
    const isOpen = hasBelow && (toggled.get(node.id) ?? level < OPEN_LEVELS);
    lines.push({ key: node.id, node, level, hasBelow, isOpen, most });
    if (isOpen) list(below, node.id, level + 1, lines, most);
  }
  if (all.length > shown.length) lines.push({ key: `more ${above}`, above, level, rest: all.length - shown.length, shown: shown.length });
}

function create(line) {
  if (line.place) return createPlace();
  return line.node ? createNode(line.node) : createMore();
}

function createPlace() {
  const text = element("span", {});
  const row = element("div", { class: "row place", role: "row" }, cell("whole", text));
  row.update = ({ place }) => {
    const parts = [place.model, place.adapter && `adapter ${place.adapter}`, place.tenant === "default" ? "no salt" : place.tenant];
    setText(text, `${parts.filter(Boolean).join(" · ")}`);
  };
  return row;
}

function createMore() {
  const button = element("button", { type: "button", class: "link" });
  const row = element("div", { class: "row more", role: "row" }, cell("whole", button));
  row.update = ({ above, rest, shown, level }) => {
    row.style.setProperty("--level", level);
    setText(button, `${count(rest)} more`);
    button.onclick = () => {
      numShown.set(above, shown + MORE_CHILDREN);
      draw();
    };
  };
  return row;
}

function createNode(node) {
  const toggle = element("button", { type: "button", class: "toggle" });
  const name = element("code", {}, node.hash);
  const key = element("span", { class: "tag cut" });
  const size = labelled("number", "tokens", element("span", { class: "value" }));
  const requests = labelled("number", "requests", element("span", { class: "value" }));
  const share = bar("hits");
  const hits = element("span", { class: "small cut" });
  const users = cell("users");
  const holders = cell("holders");
  const last = cell("number last", element("span", { class: "value" }));
  const row = element("div", { class: "row", role: "row" }, cell("prefix", toggle, name, key), size, requests, cell("hit", share, hits), users, holders, last);
  toggle.onclick = () => {
    toggled.set(node.id, toggle.getAttribute("aria-expanded") !== "true");
    draw();
  };
  row.update = (line) => {
    const now = line.node;
    row.style.setProperty("--level", line.level);
    toggle.hidden = !line.hasBelow;
    setAttribute(toggle, "aria-expanded", String(line.isOpen));
    setAttribute(toggle, "aria-label", `Prefix ${now.hash}, level ${line.level + 1}: what begins with it`);
    setText(key, now.label);
    key.hidden = !now.label;
    key.title = "prompt_cache_key";
    setText(size.lastElementChild, count(now.end - now.start));
    size.title = `tokens ${count(now.start + 1)} to ${count(now.end)} of the prompt`;
    setText(requests.lastElementChild, count(now.requests));
    showHits(now, share, hits, line.most);
    showUsers(now, users);
    showHolders(now, holders);
    setText(last.lastElementChild, ago(latest.now - now.last));
  };
  return row;
}

function showHits(node, share, hits, most) {
  // A hit that is own in part and cross-user in part counts once here, as cross-user.
  const cross = node.cross_user_hits;
  const own = Math.min(node.own_hits, node.hits - cross);
  const rest = node.hits - cross - own;
  setBar(share, [["cross", cross], ["own", own], ["unattributed", rest], ["computed", node.requests - node.unreported - node.hits]], Math.max(node.requests, most / 8));
  const parts = [cross && `${compact(cross)} cross-user`, own && `${compact(own)} own`, rest && `${compact(rest)} unattributed`].filter(Boolean);
  hits.title = "Requests that read all of it from cache. Replicas report totals for a prompt: whose tokens a part had is certain only at times.";
  setText(hits, node.hits ? `${compact(node.hits)}×: ${parts.join(", ")}` : node.unreported === node.requests ? "not reported" : "never");
}

function showUsers(node, users) {
  const more = node.users.length - SHOWN_USERS;
  const tags = node.users.slice(0, SHOWN_USERS).map(([user, number]) => ({ user, text: `${user} ${compact(number)}×` }));
  if (more > 0 || node.requests_of_other_users) tags.push({ user: "more", text: node.requests_of_other_users ? "and more" : `+${more}` });
  if (node.requests_without_user) tags.push({ user: "nobody", text: `no user ${compact(node.requests_without_user)}×` });
  keyed(users, tags, (tag) => tag.user, () => element("span", { class: "tag" }), (tag, { text }) => setText(tag, text));
}

function showHolders(node, holders) {
  const tags = node.holders.slice(0, SHOWN_HOLDERS).map(([id, depth]) => ({ id, depth }));
  if (node.num_holders > tags.length) tags.push({ id: `+${node.num_holders - tags.length}`, depth: node.end });
  if (!tags.length) tags.push({ id: NOWHERE, depth: node.end });
  keyed(
    holders,
    tags,
    (tag) => tag.id,
    (tag) => element("span", { class: tag.id === NOWHERE ? "none" : "tag place-tag" }),
    (shown, { id, depth }) => {
      const isWhole = depth >= node.end;
      setText(shown, isWhole ? id : `${id} ${compact(depth - node.start)} of ${compact(node.end - node.start)}`);
      shown.title = isWhole ? "" : `holds the prompt up to token ${count(depth)}, as far as the index, which keeps only some blocks, can tell`;
    },
  );
}
