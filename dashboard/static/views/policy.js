// One policy version: whether it would have helped, its caps by hour of the week, and what it changes.

import {follow} from "../address.js";
import {call, read} from "../api.js";
import {ask} from "../ask.js";
import {agreementAddress, backendAddress, volumeAddress} from "../cells.js";
import {element, fillList, fillTable, setBadge, setText} from "../dom.js";
import * as f from "../format.js";
import {showHarms} from "../harms.js";
import {drawHeat} from "../heat.js";
import {startList} from "../list.js";
import {showMissing} from "../parts.js";

const $ = (id) => document.getElementById(id);
const HOURS = Array.from({length: 24}, (_, hour) => String(hour).padStart(2, "0"));
let base = "";
let list = null;
let shown = null;
let first = "";
let shell = null;
let policy = null;
const IN_FORCE = ["in-force", "pinned", "rejected-pinned"];
const USABLE = ["published", "superseded", "in-force", "pinned"]; // of these the newest is in force, unless one is pinned

const columns = [
  {label: "Volume", cls: "wrap head", fill: (td, row) => {
    if (!td.firstChild) td.append(element("a", {class: "name"}, row.volume));
    follow(list.address, td.firstChild, {volume: row.volume});
  }},
  {label: "Hours with a cap", cls: "num", text: (row) => `${f.count(row.hours)} of 168`},
  {label: "Lowest cap", cls: "num", title: f.WEIGHTED, text: (row) => f.weighted(row.lowest_cost_per_s)},
  {label: "Highest demand", cls: "num", title: "The p95 of its busiest hour of the week", text: (row) => f.weighted(row.highest_demand_p95)},
];

function cellOf(hour, row) {
  if (!row) return null;
  const capped = row.cost_per_s !== null && row.cost_per_s !== undefined;
  const below = capped && row.demand_p95 !== null && row.cost_per_s < row.demand_p95;
  const demand = row.demand_p95 == null ? "" : `, usual demand up to ${f.count(row.demand_p95)}`;
  const burst = capped && row.burst_s ? `, ${f.count(row.burst_s * row.cost_per_s)} at once after a quiet time` : "";
  return {cls: !capped ? "g" : below ? "b3" : "b1", text: capped ? f.short(row.cost_per_s) : "",
    words: `${f.weekHour(hour)}: ${capped ? `at most ${f.weighted(row.cost_per_s)}` : "no cap"}${burst}${demand}`};
}

// The week of the volume that was chosen, else of the first one in the list.
async function showWeek() {
  const volume = list.address.get().volume || first;
  if (volume === shown) return;
  shown = volume;
  const answer = volume ? await read(`${base}/volumes/${encodeURIComponent(volume)}`) : null;
  $("week").hidden = !answer;
  if (!answer) return;
  $("week-title").replaceChildren(element("a", {href: volumeAddress(volume)}, volume),
    answer.backend ? ` on ${answer.backend}` : "", ", hours in UTC");
  const hours = new Map(answer.hours.map((row) => [row.hour_of_week, row]));
  drawHeat($("heat"), "UTC", HOURS, Array.from({length: 7}, (_, day) => ({label: f.weekDay(day),
    cells: HOURS.map((_hour, hour) => cellOf(day * 24 + hour, hours.get(day * 24 + hour)))})));
}

function showReport(row) {
  setBadge($("state"), ...f.policyState(row.state));
  const job = row.job || {};
  setText($("about"), [`computed ${f.moment(row.created_us)}`, row.published_by ? `by ${row.published_by}` : "",
    job.rollups ? `from ${f.count(job.rollups)} rows of statistics${job.window_days ? ` of ${f.plural(job.window_days, "day")}` : ""}` : ""].filter(Boolean).join(" · "));
  const tested = row.report?.back_test;
  setText($("test"), `${f.backTest(tested)}${tested?.publish === false ? " So it was not put in force." : ""}`);
  fillList($("test-notes"), tested?.notes || [], (note) => note, () => element("li"), (li, note) => setText(li, note), () => []);
  $("test-notes").hidden = !tested?.notes?.length;
  fillTable($("capacity"), [
    {label: "Backend", cls: "wrap head", fill: (td, one) => { if (!td.firstChild) td.append(element("a", {href: backendAddress(one.backend)}, one.backend)); }},
    {label: "To keep", cls: "wrap", fill: (td, one) => {
      if (!td.firstChild) td.append(element("a", {href: agreementAddress(one.sla, one.objective)},
        `${one.sla}/${one.objective}${one.step ? ` step ${one.step + 1}` : ""}`));
    }},
    {label: "At most", cls: "num", text: (one) => (one.cost_per_s == null ? "not known" : f.weighted(one.cost_per_s))},
    {label: "Because", cls: "wrap full", text: (one) => f.plain(one.reason) || f.DASH},
  ], row.report?.capacity || [], (one) => `${one.backend}/${one.sla}/${one.objective}/${one.step ?? 0}`, () => ["It found no capacity."]);
}

// Versions, newest first; and by how many volumes two of them differ.
const versions = async () => (await read("/policies?limit=1000"))?.items || [];
async function differs(one, other) {
  const answer = await read(`/policies/${one}/diff/${other}?limit=1000`);
  if (!answer) return "";
  const {length} = answer.items;
  return length ? ` Caps of ${answer.next ? "more than 1,000" : f.count(length)} volume${length === 1 ? "" : "s"} differ from then on.`
    : " Both cap the same.";
}

async function rollBackWords() {
  const before = (await versions()).find((row) => row.version < policy.version && USABLE.includes(row.state));
  if (!before) return `Version ${policy.version} is taken out of force. No version was in force before it, so no volume has a cap by a policy then.`;
  return `Version ${policy.version} is taken out of force, and version ${before.version} is in force again until another one is published.`
    + await differs(policy.version, before.version);
}

async function pinWords() {
  const now = (await versions()).find((row) => IN_FORCE.includes(row.state));
  return `Version ${policy.version} is in force from now on, whatever is published, until it is unpinned.`
    + (!now || now.version === policy.version ? "" : ` It takes the place of version ${now.version}.${await differs(now.version, policy.version)}`);
}

async function unpinWords() {
  const newest = (await versions()).find((row) => USABLE.includes(row.state));
  return !newest || newest.version === policy.version ? `Version ${policy.version} is the newest: it stays in force until another one is published.`
    : `Version ${newest.version} is the newest, and takes its place now.${await differs(policy.version, newest.version)}`;
}

function question(verb, words, send, said) {
  ask(shell, {title: `${verb} version ${policy.version}?`, button: verb, words, send,
    done: (answer) => { if (answer.status === 200 && !answer.body?.approval) shell.notice(said); loadReport(); }});
}

function startActions() {
  $("roll-back").addEventListener("click", () => question("Roll back", rollBackWords,
    () => call("POST", "/policies/rollback", {version: policy.version}), `Version ${policy.version} is rolled back.`));
  $("pin").addEventListener("click", () => question("Pin", pinWords,
    () => call("PUT", "/policies/pin", {version: policy.version}), `Version ${policy.version} is pinned.`));
  $("unpin").addEventListener("click", () => question("Unpin", unpinWords, () => call("DELETE", "/policies/pin"), `Version ${policy.version} is not pinned any more.`));
}

// What can be done with a version is by its state; one that the back-test rejected is pinned by the command line alone.
function showActions() {
  const {state} = policy || {};
  $("actions").hidden = !policy || !shell.signedIn();
  $("roll-back").hidden = state !== "in-force"; // one that is pinned is unpinned first
  $("unpin").hidden = !["pinned", "rejected-pinned"].includes(state);
  $("pin").hidden = !["published", "superseded", "in-force", "rolled-back"].includes(state);
}

export const onSession = () => showActions();

async function loadReport() {
  policy = (await call("GET", base)).body;
  showReport(policy);
  showActions();
}

async function showDifference(version) {
  const rows = await versions();
  const before = rows.find((row) => row.version < version);
  const answer = before ? await read(`/policies/${before.version}/diff/${version}?limit=200`) : null;
  if (before) setText($("h-diff"), `What differs from version ${before.version}`);
  fillTable($("diff"), [
    {label: "Volume", cls: "wrap head", fill: (td, row) => { if (!td.firstChild) td.append(element("a", {href: volumeAddress(row.volume)}, row.volume)); }},
    {label: "Hours that differ", cls: "num", text: (row) => f.count(row.hours)},
    {label: "New, gone", cls: "num", text: (row) => `${f.count(row.added)}, ${f.count(row.removed)}`},
    {label: "Lower, higher", cls: "num", text: (row) => `${f.count(row.lowered)}, ${f.count(row.raised)}`},
    {label: "Lowest cap", cls: "num", title: f.WEIGHTED, text: (row) => `${f.count(row.lowest_before)} → ${f.count(row.lowest_after)}`},
  ], answer?.items || [], (row) => row.volume, () => [before ? `It caps the same as version ${before.version}.` : "There is no version before it."]);
}

export async function start(around) {
  shell = around;
  base = `/policies/${encodeURIComponent(shell.name)}`;
  startActions();
  try {
    await loadReport();
  } catch (error) {
    if (error.status) showMissing(error);
    return;
  }
  list = startList({path: `${base}/volumes`, id: "caps", columns, keyOf: (row) => row.volume, limit: 20, refreshMs: 60000,
    fields: {match: "", after: "", volume: ""}, mine: ["volume"], onShow: () => list && showWeek(),
    onAnswer: ({items}) => { first ||= items[0]?.volume || ""; if (list) showWeek(); },
    empty: () => ["It says nothing of any volume: it was computed before there was I/O."]});
  await Promise.all([showWeek(), showDifference(Number(shell.name)), showHarms(Number(shell.name))]);
}
