// The programs of agents: where each has its home, and which of them wait. Nothing is shown while there are none.

import { ago, cell, count, element, keyed, labelled, setText } from "./dom.js";

const rows = document.getElementById("programs");
const note = document.getElementById("programs-note");
const section = rows.closest("section");

export function showPrograms(answer) {
  const { tenants, programs } = answer;
  section.hidden = !programs.length;
  const parts = tenants.map(({ tenant, active, paused, waiting }) => `${tenant}: ${active} active, ${paused} paused, ${waiting} waiting`);
  setText(note, parts.join(" · "));
  keyed(rows, programs, keyOf, create, (row, program) => row.update(program));
}

const keyOf = ({ tenant, model, source, session, agent }) => JSON.stringify([tenant, model, source, session, agent]);

function create() {
  const names = [["name cut"], ["cut"], ["state"], ["home cut"], ["number", "tokens"], ["number", "turns"], ["number", "served"], ["number last", "paused"]];
  const values = names.map(([name, label]) => {
    const value = element("span", { class: "value" });
    return label ? labelled(name, label, value) : cell(name, value);
  });
  const row = element("div", { class: "row", role: "row" }, ...values);
  row.update = (program) => {
    const waits = program.waits_seconds;
    const texts = [
      `${program.source} ${program.session}`,
      program.agent ?? "main",
      waits === null ? program.state : `waiting ${Math.round(waits)} s`,
      program.home ?? "–",
      count(program.tokens),
      count(program.turns),
      `${program.attained_seconds.toFixed(1)} s`,
      program.paused_seconds === null ? "–" : ago(program.paused_seconds),
    ];
    texts.forEach((text, place) => setText(values[place].lastElementChild, text));
    row.title = `${program.tenant}, ${program.model}`;
  };
  return row;
}
