// Agreements beyond those that the live feed lists: found by name, a page at a time, read again every 5 s.

import {call} from "./api.js";
import {showFound} from "./views.js";

const $ = (id) => document.getElementById(id);
const PAGE = 100;
const REFRESH_MS = 5000;
let asked = null; // {match, after} of the page that is shown; null while none is
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
  showFound(answer.body.items.flatMap(objectives));
  $("found").hidden = $("find-close").hidden = false;
  $("find-next").hidden = !answer.body.next;
  $("find-next").dataset.after = answer.body.next || "";
}

function ask(question) {
  asked = question;
  if (asked) refresh();
  else $("found").hidden = $("find-close").hidden = $("find-next").hidden = true;
}

export function startFind() {
  const form = $("find");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask({match: form.elements.match.value.trim(), after: ""});
  });
  $("find-next").addEventListener("click", () => ask({...asked, after: $("find-next").dataset.after}));
  $("find-close").addEventListener("click", () => ask(null));
  setInterval(() => { if (asked && !document.hidden && !form.hidden) refresh(); }, REFRESH_MS);
}
