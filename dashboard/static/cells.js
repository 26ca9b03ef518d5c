// Cells of tables that several views have.

import * as f from "./format.js";
import {element, setBadge, setText} from "./dom.js";
import {whyAddress} from "./why.js";
import {showWords} from "./words.js";

export const code = (text) => element("code", {}, text);
export const agreementAddress = (name, objective = "") =>
  `/agreements/${encodeURIComponent(name)}${objective ? `?objective=${encodeURIComponent(objective)}` : ""}`;
export const volumeAddress = (name) => `/volumes/${encodeURIComponent(name)}`;
export const seesAll = !document.body.hasAttribute("data-own"); // not an account with labels: backends answer it nothing
export const backendLink = (name) => (seesAll ? element("a", {href: backendAddress(name)}, name) : name);
export const backendAddress = (name) => `/backends/${encodeURIComponent(name)}`;
export const keyOf = (row) => `${row.name}/${row.objective}`;
export const whyLink = (...what) => element("a", {class: "why", href: whyAddress(...what)}, "why?");

// A badge with the state, and in small letters since when, or why there is none.
export function fillState(td, row) {
  if (!td.firstChild) td.append(element("span"), element("small", {class: "reason"}));
  setBadge(td.firstChild, ...f.stateOf(row.state));
  const reason = ["excluded", "no-data"].includes(row.state) && row.reason || "";
  const since = row.since_us ? `since ${f.clock(row.since_us)}` : "";
  setText(td.lastChild, [reason, since].filter(Boolean).join(" · "));
  td.lastChild.title = reason;
}

// What was asked for is older than the snapshot: since when is of the state of then, so of no other one.
export function factsNow(facts, row) {
  const {state, since_us: since, ...more} = facts || {};
  return {...more, since_us: state === row.state ? since : null};
}

// Name as a link to its view; below it what there is more to say.
export function fillAgreement(td, row) {
  if (!td.firstChild) {
    td.append(element("a", {class: "name", href: agreementAddress(row.name, row.objective)}, row.name), " ",
      whyLink("sla", row.name, row.objective), element("small"));
  }
  const whom = row.customer ? `for ${row.customer}` : "";
  setText(td.lastChild, [row.objective, row.priority, whom].filter(Boolean).join(" · "));
}

export function fillLink(td, href, text, small = "") {
  if (!td.firstChild) td.append(element("a", {class: "name"}), element("small"));
  if (td.firstChild.getAttribute("href") !== href) td.firstChild.setAttribute("href", href);
  setText(td.firstChild, text);
  setText(td.lastChild, small);
}

export function fillBudget(td, row) {
  if (!td.firstChild) td.append(element("meter", {min: 0, max: 1, low: 0.25, high: 0.5, optimum: 1}), " ",
    element("span"), element("small"));
  const left = row.budget_remaining;
  td.querySelector("meter").hidden = left == null;
  td.querySelector("meter").value = Math.max(0, left ?? 0);
  setText(td.querySelector("span"), f.percent(left, 0));
  const rest = row.budget_minutes_left == null ? "" : `${f.budgetRest(row)}, this period`;
  const alerts = row.alerts?.length ? `spent ${f.burn({...row, burn_1h: 0})[1]}` : "";
  setText(td.querySelector("small"), [rest, alerts].filter(Boolean).join("; "));
}

export const measuredPair = (row) => [f.measured(row), f.metric(row)];
export const promisedPair = (row) => (f.promised(row) === f.DASH ? f.DASH : [f.promised(row), f.bound(row)]);
export const compliancePair = (row) => [f.percent(row.compliance, 2),
  row.compliance == null ? "no slice judged yet" : row.target ? `${f.percent(row.target, 2)} agreed` : `${f.percent(row.coverage, 1)} covered`];

export function fillEvents(fillList, list, rows, empty) {
  fillList(list, rows, (row) => row.event_id,
    () => element("li", {}, element("time", {class: "soft"}), element("span"), element("p"), element("p", {class: "soft"})),
    (li, row) => {
      setText(li.querySelector("time"), f.clock(row.at_us));
      setBadge(li.querySelector("span"), f.SEVERITIES[row.severity] || "", row.severity, row.kind);
      const [what, about] = li.querySelectorAll("p");
      setText(what, f.plain(row.text || row.kind));
      showWords(about, f.aboutEvent(row), row.kind);
    }, empty);
}
