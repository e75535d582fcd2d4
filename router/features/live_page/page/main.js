// Asks the router once a second for what it sees, while the page is visible, and hands it to the page's parts.

import { Charts } from "./charts.js";
import { forgetDecisions, newestNumber, showDecisions } from "./decisions.js";
import { clock, setAttribute, setText } from "./dom.js";
import { showFleet } from "./fleet.js";
import { forgetPrefixes, showPrefixes } from "./prefixes.js";
import { showPrograms } from "./programs.js";

const STATE_SECONDS = 1;
const PREFIXES_EVERY = 2;
const TIMEOUT_SECONDS = 10;

const status = document.getElementById("status");
const notice = document.getElementById("notice");
const pause = document.getElementById("pause");
const orders = [...document.querySelectorAll("[data-order]")];
const charts = new Charts();

let order = "used";
let since = null;
let isPaused = false;
let numTurns = 0;
let heardAt = null;
let timer = null;

class Refused extends Error {}

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_SECONDS * 1000), cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Refused(body.error.message);
  return body;
}

async function turn() {
  timer = null;
  if (isPaused || document.hidden) return;
  try {
    const state = await ask("/live/state");
    if (since !== null && since !== state.router.since) startAnew();
    since = state.router.since;
    showState(state);
    if (numTurns++ % PREFIXES_EVERY === 0) {
      await showPrefixTree();
      if (state.router.knows_programs) showPrograms(await ask("/live/programs"));
    }
    if (state.num_decisions > newestNumber()) showDecisions(await ask(`/live/decisions?after=${newestNumber()}`));
    heard();
  } catch (error) {
    missed(error);
  }
  timer = setTimeout(turn, STATE_SECONDS * 1000);
}

async function showPrefixTree() {
  showPrefixes(await ask(`/live/prefixes?order=${order}`), order);
}

function showState(state) {
  charts.show(state.slots);
  showFleet(state);
  const models = [...new Set(state.replicas.map((replica) => replica.model))];
  setText(document.getElementById("models"), models.join(", "));
  const late = state.index.filter((index) => !index.is_connected || index.lag_seconds >= 1);
  const trouble = late.map((index) => (index.is_connected ? `the index of ${index.model} is ${index.lag_seconds.toFixed(1)} s behind` : `the index of ${index.model} is cut off from Redis`));
  const parts = [`as seen by ${state.router.name} since ${clock(state.router.since)}`, `policy ${state.router.policy}`, `${state.router.in_flight} in flight`, ...trouble];
  setText(document.getElementById("scope"), parts.join(" · "));
}

function startAnew() {
  forgetDecisions();
  forgetPrefixes();
  numTurns = 0;
}

function heard() {
  heardAt = Date.now() / 1000;
  setAttribute(status, "data-state", "live");
  setText(status, "live");
  notice.hidden = true;
}

function missed(error) {
  setAttribute(status, "data-state", "lost");
  setText(status, "no answer");
  const last = heardAt === null ? "" : ` This is the state at ${clock(heardAt)}.`;
  setText(notice, error instanceof Refused ? error.message : `The router does not answer; asking again.${last}`);
  notice.hidden = false;
}

function start() {
  if (timer === null && !isPaused && !document.hidden) timer = setTimeout(turn, 0);
}

pause.addEventListener("click", () => {
  isPaused = !isPaused;
  setAttribute(pause, "aria-pressed", String(isPaused));
  setText(pause, isPaused ? "Resume" : "Pause");
  setText(status, isPaused ? "paused" : "live");
  setAttribute(status, "data-state", isPaused ? "paused" : "live");
  start();
});

for (const button of orders) {
  button.addEventListener("click", () => {
    order = button.dataset.order;
    for (const one of orders) setAttribute(one, "aria-pressed", String(one === button));
    forgetPrefixes();
    showPrefixTree().catch(missed);
  });
}

document.addEventListener("visibilitychange", start);
start();
