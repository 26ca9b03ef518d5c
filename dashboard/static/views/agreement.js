// One agreement: how it is kept in its period, hour by hour, and why; what was agreed, and when that changed.

import {follow, startAddress} from "../address.js";
import {call, read} from "../api.js";
import {code, keyOf, seesAll} from "../cells.js";
import {element, fillList, fillTable, setBadge, setText} from "../dom.js";
import * as f from "../format.js";
import {daysOf, drawHeat} from "../heat.js";
import {startMaintenance} from "../maintenance.js";
import {showDecisions, showFigures, showMissing, showVersions} from "../parts.js";
import {drawLines} from "../plot.js";
import {startInline, whyAddress} from "../why.js";
import {zone} from "../zone.js";

const $ = (id) => document.getElementById(id);
const HOUR_US = 3600e6;
const DAY_US = 24 * HOUR_US;
const LIVE_MS = 3000;
const SLOW_MS = 30000;
const DECISIONS_US = 31 * DAY_US; // an answer has no more
const MOST_EPISODES = 20;
const FIELDS = {objective: "", hour: "", at: "", before: ""};
const page = {name: "", base: "", row: null, hours: null, slices: [], address: null};

const objectives = () => page.row?.spec?.spec?.objectives || [];
const chosen = () => page.address.get().objective || objectives()[0]?.name || "";
const query = (more = {}) => {
  const given = {objective: chosen(), ...more};
  return new URLSearchParams(Object.entries(given).filter(([, value]) => value)).toString();
};

function objectiveWords(one) {
  const {metric, percentile} = one.indicator || {};
  const steps = (one.demand_curve || []).map((step) => `${f.latency(step.value_ms * 1000)}${step.up_to_iops ? ` up to ${f.count(step.up_to_iops)} IOPS` : ""}`);
  const what = metric === "latency" ? `p${percentile} of latency at most ${steps.join(", ")}`
    : metric === "mean_latency" ? `mean latency at most ${steps.join(", ")}`
    : metric === "iops" ? `at least ${f.count(one.promised_iops)} IOPS when asked for`
    : metric === "throughput" ? `at least ${one.promised_mbps} MB/s when asked for`
    : `no stall longer than ${one.outage}`;
  const {slice, target} = one.budgeting || {};
  const length = String(slice || "").replace(/^(\d+)([smhd])$/, (_, n, unit) => ` of ${n} ${{s: "s", m: "min", h: "h", d: "d"}[unit]}`);
  return `${what}, in ${f.percent(target, 2)} of the slices${length}`;
}

// Of a past period what its slices give, in place of what is so in the one that goes on.
function inPeriod(live, hours) {
  if (!page.address.get().at || !hours) return live;
  const slices = {};
  for (const hour of hours.items) {
    for (const key of ["good", "bad", "no_data", "not_applicable", "excluded"]) slices[key] = (slices[key] || 0) + hour[key];
  }
  const left = hours.budget_s - hours.bad_s;
  return {...live, slices, target: hours.target, compliance: hours.compliance, coverage: hours.coverage,
    budget_remaining: hours.budget_s ? left / hours.budget_s : null, budget_minutes_left: Math.max(0, left) / 60};
}

function showLive() {
  const {row, hours} = page;
  const live = inPeriod(row.live.find((one) => one.objective === chosen()) || {}, hours);
  setBadge($("state"), ...f.stateOf(objectives().length ? live.state : "no-objective"));
  const {parties, window: period, scope} = row.spec?.spec || {};
  const agreed = objectives().find((one) => one.name === chosen());
  const about = [parties ? `${parties.provider} to ${parties.customer}` : "", row.priority,
    scope ? `volumes ${scope.volumes.join(", ")}` : "", agreed ? objectiveWords(agreed) : "",
    row.ended_us ? `ended ${f.moment(row.ended_us)}` : `version ${row.version}, in force since ${f.moment(row.applied_us)}`];
  setText($("about"), about.filter(Boolean).join(" · "));
  const left = live.budget_remaining;
  const [burnt, alerts] = [].concat(f.burn(live));
  const s = live.slices || {};
  showFigures($("figures"), [["Measured now", f.measured(live), live.measured || live.latency_us ? f.metric(live) : ""],
    ["Promised", f.promised(live), f.promised(live) === f.DASH ? "" : f.bound(live)],
    ["Compliance", f.percent(live.compliance, 3), live.target ? `${f.percent(live.target, 3)} agreed` : "",
      live.compliance != null && live.compliance < live.target ? "trouble" : ""],
    ["Error budget left", f.percent(left, 1), f.budgetRest(live), left < 0 ? "trouble" : ""],
    ["Burn, last hour", burnt, alerts || (live.burn_1h === 0 ? "fewer than 3 bad slices" : "1 × spends it by the end")],
    ["Coverage", f.percent(live.coverage, 1), "of the time was measured"],
    ["Slices", `${f.count(s.good)} good, ${f.count(s.bad)} bad`,
      `${f.count(s.no_data)} without data, ${f.count((s.not_applicable || 0) + (s.excluded || 0))} not judged`],
    periodFigure(hours, period)]);
}

const zoneOf = (period) => (period?.type === "calendar" ? period.tz || "UTC" : null);

// The days that were agreed, in the agreement's own zone: the page's may be another one.
function periodFigure(hours, period) {
  if (!hours) return ["Period", f.DASH];
  const days = f.daysOfPeriod(hours, zoneOf(period));
  if (days) return ["Period", days[0], [days[1] === days[0] ? "" : `to ${days[1]}`, period.tz].filter(Boolean).join(", ")];
  return ["Period", f.moment(hours.from_us), `to ${f.moment(hours.to_us)}${period?.type === "rolling" ? ", rolling" : ""}`];
}

function showTabs() {
  $("objectives").hidden = objectives().length < 2;
  $("objectives").replaceChildren(...objectives().map((one) => {
    const link = follow(page.address, element("a", {}, one.name), {objective: one.name, hour: "", before: ""});
    if (one.name === chosen()) link.setAttribute("aria-current", "true");
    return link;
  }));
}

async function loadLive() {
  try {
    page.row = (await call("GET", page.base)).body;
  } catch (error) {
    if (!error.status) return false;
    showMissing(error);
    return false;
  }
  showLive();
  return true;
}

function budgetLine({items, from_us: from, to_us: to, judged_us: judged, budget_s: whole}) {
  const [at, left] = [[from / 1000], [100]];
  let bad = 0;
  for (const hour of items) {
    at.push(hour.hour_us / 1000);
    left.push(100 * (1 - bad / whole));
    bad += hour.bad_s;
  }
  at.push(Math.min(judged, to) / 1000);
  left.push(100 * (1 - bad / whole));
  return {at, left, bad};
}

function showBudget() {
  const {hours} = page;
  const {at, left, bad} = budgetLine(hours);
  const rest = hours.budget_s - bad;
  setText($("budget-title"), !hours.budget_s ? "No bad time is allowed in this period."
    : `Share of the error budget that is left (line), and what would be left if it were spent evenly (dashed): ${f.exact(bad)} of `
    + `${f.exact(hours.budget_s)} spent, ${rest < 0 ? `${f.exact(-rest)} more than allowed` : `${f.exact(rest)} left`}.`);
  $("budget-plot").hidden = !hours.budget_s;
  if (!hours.budget_s || document.hidden) return;
  drawLines($("budget-plot"), [
    {name: "left", at, values: left},
    {name: "spent evenly", at: [hours.from_us / 1000, hours.to_us / 1000], values: [100, 0], dash: true, colour: "soft"},
  ], {from: hours.from_us / 1000, to: hours.to_us / 1000, suffix: " %", most: 105, least: Math.min(0, ...left) * 1.1,
    keep: `${chosen()},${hours.from_us}`}).catch(() => { $("budget-plot").hidden = true; });
}

function hourCell(hour) {
  const at = f.clockOf(hour.hour_us);
  const counts = [["good", "good"], ["bad", "bad"], ["no_data", "without data"], ["not_applicable", "not applying"], ["excluded", "excluded"]]
    .filter(([key]) => hour[key]).map(([key, words]) => `${hour[key]} ${words}`);
  const judged = hour.good + hour.bad;
  const share = judged ? hour.bad / judged : 0;
  const cls = share > 0.25 ? "b3" : share > 0.05 ? "b2" : share > 0 ? "b1" : hour.no_data ? "d" : judged ? "g" : "x";
  const minutes = Math.round(hour.bad_s / 60);
  return {cls, words: `${at}: ${counts.join(", ")}`, text: hour.bad ? String(minutes || "<1") : "",
    ...(hour.bad || hour.no_data ? {onclick: () => page.address.go({hour: String(hour.hour_us)}),
      pressed: page.address.get().hour === String(hour.hour_us)} : {})};
}

function showHeat() {
  const days = daysOf(page.hours.items, hourCell);
  const agreed = zoneOf(page.row.spec?.spec?.window);
  setText($("heat-zone"), agreed && agreed !== zone ? `· Hours are of ${zone}; the period is of ${agreed}.` : "");
  const heads = Array.from({length: 24}, (_, hour) => (hour % 3 ? "" : String(hour).padStart(2, "0")));
  if (days.length) drawHeat($("heat"), "", heads, days);
  else $("heat").replaceChildren(element("caption", {class: "empty"}, "No slice of this period was judged yet: the first comes a minute or two after the agreement was applied."));
}

async function showHour() {
  const {hour} = page.address.get();
  const from = Number(hour);
  const answer = from ? await read(`${page.base}/slices?${query({from_us: from, to_us: from + HOUR_US})}`) : null;
  $("hour").hidden = !answer;
  if (!answer) return;
  setText($("hour-title"), `${f.moment(from)} to ${f.clockOf(from + HOUR_US)}: slices that are not good`);
  const columns = [
    {label: "From", cls: "head", text: (row) => f.clockOf(row.start_us)},
    {label: "State", text: (row) => [f.SLICES[row.state] || row.state, row.inexact ? "by an upper bound" : ""]},
    {label: "I/Os", cls: "num", text: (row) => f.count(row.n)},
    {label: "Missed", cls: "num", text: (row) => (row.missed ? [f.count(row.missed), f.percent(row.missed / row.n)] : f.DASH)},
    {label: "Limit", cls: "num", text: (row) => f.latency(row.threshold_us)},
    {label: "Why", cls: "wrap", text: (row) => [row.reason || f.DASH, row.failed ? `${f.plural(row.failed, "I/O")} failed` : ""]},
    {label: "", fill: (td, row) => { if (!td.firstChild) td.append(element("a", {class: "why", href: whyAddress("sla", page.name, chosen(), row.start_us)}, "why then?")); }},
  ];
  fillTable($("minutes"), columns, answer.items.filter((row) => row.state !== "good"), (row) => row.start_us, () => ["All slices of this hour are good."]);
}

function showEpisodes(rows, next) {
  const columns = [
    {label: "Began", cls: "head", text: (row) => f.moment(row.opened_us)},
    {label: "Lasted", cls: "num", text: (row) => (row.closed_us ? f.duration((row.closed_us - row.opened_us) / 1e6) : "goes on")},
    {label: "Bad slices", cls: "num", text: (row) => f.count(row.slices_bad)},
    {label: "At worst", cls: "num", text: (row) => (row.worst_u ? [`${row.worst_u.toFixed(1)} ×`, "the slow I/Os allowed"] : f.DASH)},
    {label: "Cause", fill: (td, row) => {
      if (!td.firstChild) td.append(element("a", {class: "why", href: whyAddress("sla", row.name, row.objective, row.closed_us ? Math.round((row.opened_us + row.closed_us) / 2) : row.opened_us)}, "why then?"));
    }},
  ];
  fillTable($("episodes"), columns, rows, (row) => row.episode_id, () => ["It was not violated in this period."]);
  const {before} = page.address.get();
  const links = [...(before ? [follow(page.address, element("a", {rel: "prev"}, "Newest violations"), {before: ""})] : []),
    ...(next ? [follow(page.address, element("a", {rel: "next"}, "Older violations"), {before: next})] : [])];
  const shown = links.map((link) => link.getAttribute("href")).join(" ");
  if ($("episodes-pager").dataset.shown === shown) return; // the focus stays where it is
  $("episodes-pager").dataset.shown = shown;
  $("episodes-pager").replaceChildren(...links);
}

function showPeriods(rows) {
  const columns = [
    {label: "Period", cls: "head wrap", fill: (td, row) => {
      if (!td.firstChild) td.append(element("a"), element("small"));
      follow(page.address, td.firstChild, {at: row.is_over ? String(row.to_us - 1) : "", hour: "", before: ""});
      const [first, last] = f.daysOfPeriod(row, zoneOf(page.row.spec?.spec?.window)) || [f.day(row.from_us), f.day(row.to_us)];
      setText(td.firstChild, first);
      setText(td.lastChild, !row.is_over ? "goes on" : last === first ? "" : `to ${last}`);
    }},
    {label: "Compliance", cls: "num", text: (row) => f.percent(row.compliance, 3)},
    {label: "Budget left", cls: "num", text: (row) => f.percent(row.budget_remaining, 0)},
    {label: "Bad time", cls: "num", text: (row) => f.exact(row.bad_s)},
    {label: "Coverage", cls: "num", text: (row) => f.percent(row.coverage, 1)},
  ];
  fillTable($("periods"), columns, rows, (row) => row.from_us, () => ["No period was judged yet."]);
}

function showMaintenance(rows) {
  const own = (page.row.spec?.spec?.maintenance?.windows || []).map((one, index) => ({name: `own window ${index + 1}`, state: "agreed",
    reason: one.reason, author: one.author, when: [one.start, one.duration, one.rrule].filter(Boolean).join(", ")}));
  fillList($("maintenance"), [...rows, ...own], (row) => row.name,
    () => element("li", {}, element("div", {}, element("strong"), " ", element("span", {class: "soft"})), element("p")),
    (li, row) => {
      setText(li.querySelector("strong"), row.name);
      setText(li.querySelector("span"), row.when || `${row.state}, ${f.moment(row.from_us)} to ${f.moment(row.to_us)}${row.repeats ? ", repeats" : ""}`);
      setText(li.querySelector("p"), `${row.reason || ""} (${row.author || row.applied_by || "?"})`);
    },
    () => ["None is planned. Announce one: ", code(`sla maintenance start ${page.name} --for 2h --reason TEXT`)]);
}

// What changes by the minute: hours, violations, decisions. An answer about another objective or period, by now, is dropped.
async function loadSlow() {
  if (!objectives().length) return;
  const {at} = page.address.get();
  const asked = JSON.stringify(page.address.get());
  const isAsked = () => asked === JSON.stringify(page.address.get());
  const [hours, periods] = await Promise.all([
    read(`${page.base}/hours?${query(at ? {at_us: at} : {})}`),
    read(`${page.base}/periods?${query()}`)]);
  if (!isAsked()) return;
  if (periods) showPeriods(periods.items);
  if (!hours) return;
  page.hours = hours;
  showBudget();
  showHeat();
  showLive();
  await loadActs(hours, isAsked);
}

// Violations of the period that is shown, and what the server did: of the one that goes on, in its last days.
async function loadActs({from_us: from, to_us: to}, isAsked) {
  const {at, before} = page.address.get();
  const now = Date.now() * 1000;
  const end = at ? {before: `${to - 1}:~`} : {}; // what began before the end of the period
  const span = at ? {from_us: Math.max(from, to - DECISIONS_US), to_us: to} : {from_us: now - 7 * DAY_US};
  const [episodes, decisions] = await Promise.all([
    read(`/episodes?${new URLSearchParams({name: page.name, objective: chosen(), since_us: from, limit: MOST_EPISODES, ...end, ...(before ? {before} : {})})}`),
    read(`/decisions?${new URLSearchParams({victim: keyOf({name: page.name, objective: chosen()}), ...span, limit: 30})}`)]);
  if (!isAsked()) return;
  setText($("h-decisions"), `What the server did for it, ${at ? "in this period" : "last 7 days"}`);
  if (episodes) showEpisodes(episodes.items, episodes.next);
  if (decisions) showDecisions($("decisions"), decisions.items, "Nobody was slowed down for it.");
}

// What changes with a version.
async function loadOnce() {
  setText($("document"), page.row.document || "");
  const [versions, maintenance] = await Promise.all([read(`${page.base}/versions`), read(`/maintenance?agreement=${encodeURIComponent(page.name)}`)]);
  if (versions) showVersions($("versions"), versions.items);
  if (maintenance) showMaintenance(maintenance.items);
}

async function show() {
  if (!page.row) return;
  showTabs();
  for (const part of document.querySelectorAll("[data-judged]")) part.hidden = !objectives().length;
  $("why-then").href = whyAddress("sla", page.name, chosen());
  showLive();
  await Promise.all([loadSlow(), showHour()]);
}

export async function start(shell) {
  page.shell = shell;
  page.name = shell.name;
  $("edit").href = `/apply?name=${encodeURIComponent(shell.name)}`;
  $("maintenance-open").addEventListener("click", startMaintenance(shell, loadOnce));
  page.base = `/slas/${encodeURIComponent(shell.name)}`;
  page.address = startAddress(FIELDS, null, show);
  if (!await loadLive()) return;
  await Promise.all([show(), loadOnce(), seesAll && startInline("inline", () => ({kind: "sla", name: page.name, objective: chosen()}))]);
  setInterval(() => { if (!document.hidden) loadLive(); }, LIVE_MS);
  setInterval(() => { if (!document.hidden) loadSlow(); }, SLOW_MS);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.hours && showBudget());
}

export function onSession() {
  for (const id of ["maintenance-actions", "document-actions"]) $(id).hidden = !page.shell.signedIn();
}
