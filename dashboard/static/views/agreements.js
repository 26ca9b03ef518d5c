// All promises, one row an objective: found by name, filtered by state, sorted and paged by the server.

import {code, compliancePair, fillAgreement, fillBudget, fillState, keyOf, promisedPair, seesAll} from "../cells.js";
import {startDocuments} from "../documents.js";
import {startList} from "../list.js";
import * as f from "../format.js";
import {setText} from "../dom.js";

const columns = [
  {label: "State", cls: "head", sort: "trouble", fill: fillState},
  {label: "Agreement", cls: "wrap head full", sort: "name", fill: fillAgreement},
  {label: "Volumes", cls: "wrap", text: (row) => {
    const rest = (row.volume_count || 0) - (row.volumes || []).length;
    return [(row.volumes || []).join(", ") || f.DASH, rest > 0 ? `and ${rest} more` : ""];
  }},
  {label: "Promised", cls: "num", text: promisedPair},
  {label: "Compliance", cls: "num", sort: "compliance", title: "Good slices of those judged in this period", text: compliancePair},
  {label: "Error budget left", sort: "budget", title: "Of the whole period: bad time that may still come", fill: fillBudget},
  {label: "Burn", cls: "num", sort: "burn", falls: true, title: "How many times faster than the budget allows, over the last hour",
    text: (row) => f.burn(row)},
];

function onAnswer({states}) {
  const words = Object.entries(states || {}).filter(([state]) => state)
    .sort(([, one], [, other]) => other - one).map(([state, n]) => `${f.count(n)} ${f.stateWords(state)}`);
  setText(document.getElementById("tally"), words.join(", "));
}

let shell = null;
let refreshCalendars = null;

export function start(around) {
  shell = around;
  if (seesAll) {
    refreshCalendars = startDocuments(shell, document.getElementById("calendars"), "Calendar",
      "There is none but those built in: always, and business (Monday to Friday).");
  }
  startList({path: "/promises", id: "promises", columns, keyOf, onAnswer,
    fields: {match: "", state: "", sort: "trouble", offset: "0"},
    empty: () => ["No promise to keep yet. Write an agreement in YAML and apply it: ", code("sla apply -f agreement.yaml")]});
}

export function onSession() {
  for (const part of document.querySelectorAll("#actions, #calendar-add")) part.hidden = !shell.signedIn();
  refreshCalendars?.();
}
