// Agreements beyond those that are shown: found by name, a page at a time, read again every 5 s.

import {call} from "./api.js";
import {setText} from "./dom.js";
import {count} from "./format.js";
import {showFound} from "./views.js";

const $ = (id) => document.getElementById(id);
const PAGE = 50;
const REFRESH_MS = 5000;
let asked = null; // {match, after} of the page that is shown; null while none is
let earlier = []; // `after` of the pages before it
let turn = 0; // answers of an older question are dropped

// One row an objective; one that services have said nothing of has no state.
function objectives(agreement) {
  const known = new Map(agreement.live.map((row) => [row.objective, row]));
  if (!agreement.objectives.length) return [{name: agreement.name, priority: agreement.priority, state: "no-objective"}];
  return agreement.objectives.map(({name, metric}) => ({name: agreement.name, objective: name, metric,
    priority: agreement.priority, ...known.get(name)}));
}

async function refresh() {
  const number = ++turn;
  const query = new URLSearchParams({limit: PAGE});
  for (const [name, value] of Object.entries(asked)) if (value) query.set(name, value);
  const answer = await call("GET", `/slas?${query}`).catch(() => null); // the banner says that the server is away
  if (number !== turn || !asked || !answer) return;
  const {items, next, count: all, before} = answer.body;
  showFound(items.flatMap(objectives));
  const words = items.length < all ? `${count(before + 1)} to ${count(before + items.length)} of ` : "";
  setText($("find-count"), `${words}${count(all)} ${all === 1 ? "agreement" : "agreements"}${asked.match ? ` with “${asked.match}” in the name` : ""}`);
  $("found").hidden = $("find-close").hidden = $("find-count").hidden = false;
  $("find-next").hidden = !next;
  $("find-next").dataset.after = next || "";
  $("find-back").hidden = !earlier.length;
}

function ask(question, before = []) {
  asked = question;
  earlier = before;
  if (asked) refresh();
  else for (const id of ["found", "find-close", "find-next", "find-back", "find-count"]) $(id).hidden = true;
}

export function startFind() {
  const form = $("find");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask({match: form.elements.match.value.trim(), after: ""});
  });
  $("find-next").addEventListener("click", () =>
    ask({...asked, after: $("find-next").dataset.after}, [...earlier, asked.after]));
  $("find-back").addEventListener("click", () => ask({...asked, after: earlier.at(-1)}, earlier.slice(0, -1)));
  $("find-close").addEventListener("click", () => ask(null));
  setInterval(() => { if (asked && !document.hidden && !form.hidden) refresh(); }, REFRESH_MS);
}
