// One backend: what it carries now and did over time, what it can take, who shares it and what control did there.

import {follow, startAddress} from "../address.js";
import {call, read} from "../api.js";
import {agreementAddress, volumeAddress} from "../cells.js";
import {element, fillTable, setBadge, setText} from "../dom.js";
import {startForm} from "../form.js";
import * as f from "../format.js";
import {showDecisions, showFigures, showMissing, showVolumes} from "../parts.js";
import {showMoves, spanOf, startUntil, untilMs} from "../past.js";
import {drawCapacity, drawLines} from "../plot.js";

const $ = (id) => document.getElementById(id);
const LIVE_MS = 3000;
const SLOW_MS = 30000;
const HOUR_MS = 3600e3;
const DAY_MS = 24 * HOUR_MS;
const RANGES = {"1h": ["1 hour", HOUR_MS], "1d": ["24 hours", DAY_MS], "7d": ["7 days", 7 * DAY_MS], "30d": ["30 days", 30 * DAY_MS]};
const MEMBERS = 25;
const MOST_DECISIONS = 40;
const MOST_STEPS = 500;
const STEPS = "start,pre-position,decrease,increase,release,unattributed,infeasible,control-oscillation,ahead-off";
let name = "";
let shell = null;
let row = null;
let address = null;
let past = null; // of the range: /backends/NAME/history
let steps = null; // what control did in it, newest first; null: this account is not told
const seen = {at: [], values: []}; // the load since the view was opened
const MOST_LIVE = 1200; // an hour

const range = () => RANGES[address.get().range] || RANGES["1h"];
const until = () => untilMs(address, range()[1]);
const within = () => (until() === null ? `in the last ${range()[0]}` : "in this range");

const keyOf = (one) => `${one.sla}/${one.objective}/${one.step ?? 0}`;

function showCapacity(row) {
  fillTable($("capacity"), [
    {label: "To keep", cls: "wrap head", fill: (td, one) => {
      if (!td.firstChild) td.append(element("a", {href: agreementAddress(one.sla, one.objective)}, `${one.sla}/${one.objective}`));
    }},
    {label: "At most", cls: "num", title: f.WEIGHTED, text: (one) => (one.cost_per_s == null ? "not known" : f.weighted(one.cost_per_s))},
    {label: "Because", cls: "wrap full", text: (one) => f.plain(one.reason) || f.DASH},
    {label: "", cls: "full", fill: (td, one) => {
      const isDrawn = row.curves.some((curve) => keyOf(curve) === keyOf(one));
      if (isDrawn && !td.firstChild) td.append(follow(address, element("a", {"aria-label": `Curve of ${one.sla}/${one.objective}`}, "curve"), {curve: keyOf(one)}));
    }},
  ], row.capacity, keyOf, () =>
    ["Not known yet: the policy job finds it from stored load and latencies. Run it: ", element("code", {}, "sla policy run")]);
}

// The curve that the address names, else that of the least capacity: what was seen, what was fitted, and where it is now.
function showCurve() {
  const drawn = row.capacity.filter((one) => row.curves.some((curve) => keyOf(curve) === keyOf(one)));
  const least = [...drawn].sort((one, other) => (one.cost_per_s ?? Infinity) - (other.cost_per_s ?? Infinity))[0];
  const chosen = drawn.find((one) => keyOf(one) === address.get().curve) || least;
  $("curve").hidden = !chosen;
  if (!chosen || document.hidden) return;
  const load = row.live?.cost_per_s;
  const step = chosen.step ? `, step ${chosen.step + 1} of its curve` : "";
  const most = chosen.cost_per_s == null ? "no limit is known" : `the promise is kept up to ${f.weighted(chosen.cost_per_s)}`;
  setText($("curve-title"), `${chosen.sla}/${chosen.objective}${step}: latency, as a share of what is promised, by the load of all volumes together. `
    + `${f.count(chosen.points)} intervals were seen (dots are means of them); ${most}${load == null ? "" : `, and the load is ${f.weighted(load)} now`}.`);
  const curve = row.curves.find((one) => keyOf(one) === keyOf(chosen));
  drawCapacity($("curve-plot"), {...curve, capacity: chosen.cost_per_s, load});
}

// Which promise's capacity the load is nearest to.
function tightest(row) {
  const load = row.live?.cost_per_s;
  const known = row.capacity.filter((one) => one.cost_per_s);
  if (load == null || !known.length) return ["Headroom", f.DASH, "its capacity is not known"];
  const least = known.reduce((one, other) => (other.cost_per_s < one.cost_per_s ? other : one));
  const share = load / least.cost_per_s;
  return ["Load of what it can take", f.percent(share, 0), `${f.weighted(least.cost_per_s)} for ${least.sla}/${least.objective}`];
}

async function loadLive() {
  try {
    row = (await call("GET", `/backends/${encodeURIComponent(name)}`)).body;
  } catch (error) {
    if (error.status) showMissing(error);
    return false;
  }
  const live = row.live || {};
  setBadge($("state"), live.fault ? "bad" : live.phase && live.phase !== "idle" ? "warn" : row.live ? "ok" : "",
    live.fault ? `storage ${live.fault}` : row.live ? f.PHASES[live.phase] || live.phase : "not seen now");
  showFigures($("figures"), [
    ["Load now", f.weighted(live.cost_per_s), "all its volumes together"],
    tightest(row),
    ["Held to", live.cap_cost_per_s ? f.weighted(live.cap_cost_per_s) : "no cap", "volumes that are slowed down, together"],
    ["Helps", f.plural((live.victims || []).length, "promise"), (live.victims || []).slice(0, 3).join(", ")],
    ["Mode", row.mode || "the server's", row.mode ? "its own" : ""],
    ["Volumes", f.count(row.volume_count), row.policy_version ? `capacity by policy ${row.policy_version}` : ""]]);
  showCapacity(row);
  showCurve();
  if (row.live?.cost_per_s != null) addLive(Date.now(), row.live.cost_per_s);
  if (until() === null) drawLoad();
  setText($("all-members"), row.volume_count > MEMBERS ? `All ${f.count(row.volume_count)} volumes` : "As a list with filters");
  return true;
}

function addLive(at, value) {
  seen.at.push(at);
  seen.values.push(value);
  for (const column of Object.values(seen)) if (column.length > MOST_LIVE) column.shift();
}

const least = () => row.capacity.filter((one) => one.cost_per_s).sort((one, other) => one.cost_per_s - other.cost_per_s)[0];

// What throttled volumes were held to together, as steps: what each decision left in force until the next one.
function heldTo(from, to) {
  const rows = (steps || []).filter((one) => one.mode !== "observe" && one.figures && "c_after" in one.figures).reverse();
  const now = until() === null ? row.live?.cap_cost_per_s ?? null : null;
  if (!rows.length) return {at: [from, to], values: [now, now]};
  // Before its first step a loop had held nobody: what that step began from is what they used.
  const before = ["start", "pre-position"].includes(rows[0].kind) ? null : rows[0].figures.c_before ?? null;
  return {at: [from, ...rows.map((one) => one.at_us / 1000), to],
    values: [before, ...rows.map((one) => one.figures.c_after ?? null), rows.at(-1).figures.c_after ?? null]};
}

// The load of the range by volume, one on the other, against what the backend can take and what control left to them.
function drawLoad() {
  if (!past || document.hidden) return;
  const {items, volumes, others, read_every: every} = past;
  const [to, isNow] = [until() ?? Date.now(), until() === null];
  const from = to - range()[1];
  const capacity = least();
  const parts = [...volumes.map((volume, index) => ({name: volume, colour: `part-${index + 1}`, value: (item) => item.by_volume[volume]})),
    ...(others ? [{name: f.plural(others, "other volume"), colour: "part-rest",
      value: (item) => Math.max(0, item.cost_per_s - Object.values(item.by_volume).reduce((sum, value) => sum + value, 0))}] : [])];
  const bars = parts.map((part) => ({name: part.name, colour: part.colour, at: items.map((item) => item.slot_us / 1000),
    widths: items.map((item) => item.length_us / 1000), values: items.map(part.value)}));
  const lines = [...(capacity ? [{name: "can take", colour: "bad", at: [from, to], values: [capacity.cost_per_s, capacity.cost_per_s]}] : []),
    ...(steps ? [{name: "held to", colour: "text", dash: true, steps: true, ...heldTo(from, to)}] : []),
    ...(isNow && seen.at.length > 1 ? [{name: "load, live", colour: "text", ...seen}] : [])];
  const length = items[0]?.length_us / 1e6;
  const isEmpty = !items.length && !(isNow && seen.at.length > 1);
  setText($("load-note"), isEmpty ? past.note || "Nothing is stored of this time: no volume here was used, or no gateway reported."
    : [items.length ? `One point ${length === 3600 ? "an hour" : `each ${f.duration(length)}`}; drag over the chart to zoom, double click to see all again.` : past.note || "",
      every > 1 ? `It has too many clients to add up all: of ${f.count(every)} hours one was read.` : ""].filter(Boolean).join(" "));
  setText($("load-title"), "Weighted IOPS of each volume, one on the other"
    + (capacity ? `; the line is what the backend can take while ${capacity.sla}/${capacity.objective} is kept` : "")
    + (steps ? "; dashed: what volumes that were slowed down had together." : "."));
  showShares(parts, items, capacity);
  $("load-plot").hidden = isEmpty;
  if (isEmpty) return;
  drawLines($("load-plot"), lines, {from, to, bars, keep: `${address.get().range},${address.get().until}`})
    .catch(() => { $("load-plot").hidden = true; });
}

// The same in figures.
function showShares(parts, items, capacity) {
  const seconds = items.reduce((sum, item) => sum + item.length_us, 0);
  const all = items.reduce((sum, item) => sum + item.cost_per_s * item.length_us, 0);
  const rows = parts.map((part) => ({name: part.name, isVolume: part.colour !== "part-rest", colour: part.colour,
    mean: items.reduce((sum, item) => sum + part.value(item) * item.length_us, 0) / seconds, most: Math.max(...items.map(part.value))}));
  $("shares").hidden = !rows.length;
  fillTable($("shares"), [
    {label: "Volume", cls: "wrap head", fill: (td, one) => {
      if (td.firstChild) return;
      td.append(one.isVolume ? element("a", {href: volumeAddress(one.name)}, one.name) : one.name);
    }},
    {label: "On average", cls: "num", title: f.WEIGHTED, text: (one) => f.weighted(one.mean)},
    {label: "Of all load", cls: "num", text: (one) => f.share(all ? one.mean * seconds / all : null)},
    {label: "Of what it can take", cls: "num", text: (one) => f.percent(capacity ? one.mean / capacity.cost_per_s : null, 0)},
    {label: "At most", cls: "num", title: f.WEIGHTED, text: (one) => f.weighted(one.most)},
  ], rows, (one) => one.name, () => []);
}

function showUse(row) {
  $("use-note").hidden = !row;
  if (row) setText($("use-note"), `${f.moment(row.at_us)}: ${f.decisionWords(row)}${row.victim ? ` to keep ${row.victim}` : ""}.`);
  fillTable($("use"), [
    {label: "Volume", cls: "wrap head", fill: (td, one) => {
      if (!td.firstChild) td.append(element("a", {href: volumeAddress(one.volume)}, one.volume), element("small", {}, one.priority || ""));
    }},
    {label: "Used", cls: "num", text: (one) => [f.share(one.share_ratio), f.weighted(one.cost_per_s)]},
    {label: "Floor", cls: "num", title: "It is never held below", text: (one) => f.weighted(one.floor_cost_per_s)},
    {label: "Held to", cls: "num", text: (one) => (one.throttled ? f.weighted(one.cap_cost_per_s) : "not held")},
  ], row?.figures?.use || [], (one) => one.volume, () => [`Control has not acted here ${within()}.`]);
}

async function loadSlow() {
  const members = await read(`/volumes?${new URLSearchParams({backend: name, sort: "busiest", limit: MEMBERS})}`);
  if (members) showVolumes($("members"), members.items);
}

// The load in the range, and what control did. An answer about another range, by now, is dropped.
async function loadPast() {
  const asked = JSON.stringify(address.get());
  const to = until() ?? Date.now();
  const from = to - range()[1];
  const [load, decisions] = await Promise.all([
    read(`/backends/${encodeURIComponent(name)}/history?${new URLSearchParams({from_us: Math.round(from * 1000), to_us: Math.round(to * 1000)})}`),
    read(`/decisions?${new URLSearchParams({backend: name, kind: STEPS, ...spanOf(from, until()), limit: MOST_STEPS})}`)]);
  if (asked !== JSON.stringify(address.get())) return;
  past = load;
  steps = decisions?.items ?? null;
  drawLoad();
  if (!steps) return;
  showDecisions($("decisions"), steps.slice(0, MOST_DECISIONS), `Nothing ${within()}: no promise here was at risk.`);
  setText($("decisions-note"), steps.length > MOST_DECISIONS ? `The newest ${MOST_DECISIONS} of this range.` : "");
  showUse(steps.find((one) => one.figures?.use?.length));
}

function showRange() {
  $("ranges").replaceChildren(...Object.entries(RANGES).map(([key, [words]]) => {
    const link = follow(address, element("a", {}, words), {range: key});
    if (RANGES[key] === range()) link.setAttribute("aria-current", "true");
    return link;
  }));
  showMoves($("moves"), $("until"), address, range()[1]);
  const end = until();
  $("until-note").hidden = end === null;
  setText($("until-note"), end === null ? "" : `Shown is ${f.moment((end - range()[1]) * 1000)} to ${f.moment(end * 1000)}; all else is of now.`);
}

// What the other mode means here and now.
async function modeWords({mode}) {
  const wanted = mode === "inherit" ? (await read("/mode"))?.mode : mode;
  const victims = row?.live?.victims || [];
  const held = row?.live?.cap_cost_per_s;
  if (wanted === "observe") {
    return `Control decides and logs here, and holds nobody back. ${held ? `Volumes that are held to ${f.weighted(held)} together are free at once`
      : "No volume is held now"}${victims.length ? `; ${victims.join(", ")} may break` : ""}.`;
  }
  return `Control holds back volumes of lower priority on ${name} while a promise is at risk: their I/O becomes slower.`
    + ` ${victims.length ? `It would help ${victims.join(", ")} now.` : "No promise here is at risk now."}`;
}

export function onSession() {
  $("actions").hidden = !shell.signedIn();
}

export async function start(around) {
  shell = around;
  name = shell.name;
  address = startAddress({curve: "", range: "1h", until: ""}, null, () => { if (row) showCurve(); showRange(); loadPast(); });
  startUntil($("until"), address);
  $("mode-open").addEventListener("click", startForm(shell, $("backend-mode-dialog"), {
    consequence: modeWords, send: ({mode}) => call("PUT", "/mode", {mode, backend: name}), done: loadLive}));
  $("all-members").href = `/volumes?backend=${encodeURIComponent(name)}`;
  if (!await loadLive()) return;
  showRange();
  await Promise.all([loadSlow(), loadPast()]);
  setInterval(() => { if (!document.hidden) loadLive(); }, LIVE_MS);
  setInterval(() => { if (!document.hidden) loadSlow(); }, SLOW_MS);
  setInterval(() => { if (!document.hidden && until() === null) loadPast(); }, SLOW_MS);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showCurve(); drawLoad(); });
}
