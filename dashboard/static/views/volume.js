// One volume: what it does now and did over time, how it was held back and why, and who shares its backend.

import {follow, startAddress} from "../address.js";
import {call, read} from "../api.js";
import {backendLink, seesAll} from "../cells.js";
import {element, fillTable, setText} from "../dom.js";
import * as f from "../format.js";
import {showDecisions, showFigures, showMissing, showVolumes} from "../parts.js";
import {showMoves, spanOf, startUntil, untilMs} from "../past.js";
import {drawLines} from "../plot.js";
import {openThrottle, release, startThrottle} from "../throttle.js";
import {startInline, whyAddress} from "../why.js";

const $ = (id) => document.getElementById(id);
const HOUR_MS = 3600e3;
const RANGES = {"1h": ["1 hour", HOUR_MS], "24h": ["24 hours", 24 * HOUR_MS], "7d": ["7 days", 168 * HOUR_MS], "30d": ["30 days", 720 * HOUR_MS]};
const CAP_KINDS = "cap-set,cap-changed,cap-released,observed,not-effective";
const LIVE_MS = 3000;
const SLOW_MS = 60000;
const SHARED = 12;
const MOST_CLIENTS = 25;
const MOST_STREAMS = 100;
const MOST_CAPS = 6; // clients with a line of their own: the newest decisions first
const CAP_COLOURS = ["bad", "warn", "accent", "ok"];
const page = {name: "", base: "", row: null, history: null, decisions: null, capsLeftOut: 0, address: null, shell: null};

const range = () => RANGES[page.address.get().range] || RANGES["1h"];

const until = () => untilMs(page.address, range()[1]);

async function loadLive() {
  try {
    page.row = (await call("GET", `${page.base}?streams=${MOST_STREAMS}`)).body;
  } catch (error) {
    if (error.status) showMissing(error);
    return false;
  }
  const {row} = page;
  const live = row.live || {};
  const backend = live.backend || row.backend;
  if ($("about").dataset.shown !== backend) {
    $("about").dataset.shown = backend;
    $("about").replaceChildren(...(backend ? ["on ", backendLink(backend)] : ["on no backend that is known"]),
      element("span"));
  }
  setText($("about").lastChild, [row.size_bytes ? ` · ${f.size(row.size_bytes)}` : "", row.read_only ? " · read only" : "",
    row.owners?.length ? ` · of ${row.owners.join(", ")}` : ""].join(""));
  const cap = f.volumeCap(live);
  showFigures($("figures"), [
    ["IOPS", f.count(live.iops), row.live ? `${f.count(live.read_iops)} read, ${f.count(live.write_iops)} written` : "not seen now"],
    ["Throughput", f.bytesRate(live.bytes_per_s)],
    ["Latency p50", f.latency(live.p50_us), "half are faster"],
    ["Latency p95", f.latency(live.p95_us), live.service_p95_us ? `${f.latency(live.service_p95_us)} at the storage` : ""],
    ["Latency p99", f.latency(live.p99_us)],
    ["Queue", f.count(live.inflight), live.held ? `${f.count(live.held)} held back` : row.live ? "none held back" : ""],
    ["Cap", cap || (row.live ? "none" : f.count(null)), cap ? `delays an I/O by ${f.latency(live.delay_us)}` : ""],
    ["I/Os in total", f.count(row.reads + row.writes), row.errors ? `${f.count(row.errors)} errors` : "no errors"]]);
  showStreams(row.by_stream, row.streams);
  $("release").hidden = !row.throttled_by_hand;
  return true;
}

const clientColumn = {label: "Client", cls: "wrap head", title: "Its latency and load over time", fill: (td, row) => {
  if (!td.firstChild) td.append(row.client ? element("a") : element("span"), element("small"));
  if (row.client) follow(page.address, td.firstChild, {client: row.client});
  setText(td.firstChild, row.client || "unknown");
  setText(td.lastChild, row.planes ? `plane ${row.planes}` : "");
}};

function note(node, words) {
  setText(node, words);
  node.hidden = !words;
}

// Rates and latencies of each client over the range, the busiest first.
function showClients({items, count, read_every: every}) {
  const all = items.reduce((sum, row) => sum + row.cost_per_s, 0);
  fillTable($("clients"), [
    clientColumn,
    {label: "IOPS", cls: "num", title: "On average over the range", text: (row) => [f.count(row.iops), `${f.count(row.read_iops)} read, ${f.count(row.write_iops)} written`]},
    {label: "Throughput", cls: "num", text: (row) => f.bytesRate(row.bytes_per_s)},
    {label: "Of the load", cls: "num", title: f.WEIGHTED, text: (row) => (items.length < count ? f.weighted(row.cost_per_s) : f.share(all ? row.cost_per_s / all : null))},
    {label: "p50", cls: "num", title: "Half of its I/Os are faster", text: (row) => f.latency(row.p50_us)},
    {label: "p95", cls: "num", title: "95 of 100 I/Os are faster", text: (row) => f.latency(row.p95_us)},
    {label: "p99", cls: "num", title: "99 of 100 I/Os are faster", text: (row) => f.latency(row.p99_us)},
    {label: "Errors", cls: "num", text: (row) => f.count(row.errors)},
  ], items, (row) => row.client, () => ["No client used it in this range."]);
  note($("clients-note"), [items.length < count ? `The ${f.count(items.length)} busiest of ${f.count(count)}; sla get clients ${page.name} lists all.` : "",
    every > 1 ? `It has too many clients to add up all: of ${f.count(every)} hours one was read.` : ""].filter(Boolean).join(" "));
}

// What each did in all, as exact counts. Of very many the first; a command lists them.
function showStreams(rows, count) {
  note($("streams-note"), rows.length < count ? `The first ${f.count(rows.length)} of ${f.count(count)}; sla get streams ${page.name} lists all.` : "");
  fillTable($("streams"), [
    clientColumn,
    {label: "Read", cls: "num", text: (row) => [f.count(row.reads), f.size(row.read_bytes || 0)]},
    {label: "Written", cls: "num", text: (row) => [f.count(row.writes), f.size(row.write_bytes || 0)]},
    {label: "Errors", cls: "num", text: (row) => f.count(row.errors)},
    {label: "Last I/O", cls: "num", text: (row) => f.clock(row.last_us)},
  ], rows, (row) => row.stream_id, () => ["Nothing is stored of its clients: none has used it yet."]);
}

// Rates that were in force, as steps, a line for the whole volume and one for each client with a cap of its own: what
// holds one client back says nothing of the others. What held before the first decision is in its figures.
// Who is told of no decisions is not told when a cap held.
function capLines(fromMs, toMs) {
  if (!page.decisions) return [];
  const chosen = page.address.get().client;
  const rows = page.decisions.filter((row) => row.kind.startsWith("cap-") && row.mode !== "observe");
  const clients = [...new Set(rows.map((row) => row.figures?.client || ""))].filter((client) => client && (!chosen || client === chosen));
  page.capsLeftOut = Math.max(0, clients.length - MOST_CAPS);
  return [...(chosen ? [] : [""]), ...clients.slice(0, MOST_CAPS)].map((client, index) => ({name: client ? `cap of ${client}` : "cap",
    colour: CAP_COLOURS[index % CAP_COLOURS.length], dash: true, steps: true,
    ...capSteps(rows.filter((row) => (row.figures?.client || "") === client).reverse(), client, fromMs, toMs)}))
    .filter((line) => line.values.some((value) => value !== null)); // those in bytes a second are in the list below only
}

function capSteps(rows, client, fromMs, toMs) {
  const rate = (caps) => caps?.cost_per_s ?? caps?.ops_per_s ?? null; // both are I/Os a second
  const live = client || until() !== null ? null : page.row?.live?.cap_cost_per_s ?? page.row?.live?.cap_ops_per_s ?? null;
  if (!rows.length) return {at: [fromMs, toMs], values: [live, live]};
  const at = [fromMs];
  const values = [rate(rows[0].figures?.before)];
  for (const row of rows) {
    at.push(row.at_us / 1000);
    values.push(row.kind === "cap-released" ? null : rate(row.figures?.in_force) ?? rate(row.figures?.after));
  }
  at.push(toMs);
  values.push(values.at(-1));
  return {at, values};
}

// A gap where slots are missing: idle, or nobody reported.
function column(rows, value) {
  const [at, values] = [[], []];
  let last = null;
  for (const row of rows) {
    if (last !== null && row.slot_us > last) { at.push(last / 1000); values.push(null); }
    at.push(row.slot_us / 1000);
    values.push(value(row));
    last = row.slot_us + (row.length_us || 0);
  }
  return {at, values};
}

const ms = (us) => (us === null || us === undefined ? null : us / 1000);
const weighted = (row) => (row.cost_milli == null || row.iops == null ? null : row.cost_milli * 1000 / row.length_us);

function drawHistory() {
  if (!page.history || document.hidden) return;
  const {items, from_us: from, to_us: to} = page.history;
  const {range: length, until: end, client} = page.address.get();
  const span = {from: from / 1000, to: to / 1000, keep: [length, end, client].join()};
  const step = items[0]?.length_us;
  const caps = capLines(span.from, span.to);
  setText($("history-note"), !items.length ? page.history.note || "Nothing is stored of this time: the volume was idle, or its gateway was away."
    : `One point ${step === HOUR_MS * 1000 ? "an hour" : `each ${f.duration(step / 1e6)}`}; drag over a chart to zoom, double click to see all again.`
      + (page.capsLeftOut ? ` Caps of ${f.plural(page.capsLeftOut, "more client")} are in the list below only.` : ""));
  $("latency-plot").hidden = $("load-plot").hidden = !items.length;
  if (!items.length) return;
  const failed = (node) => () => { node.hidden = true; };
  drawLines($("latency-plot"), [["p50", "ok"], ["p95", "accent"], ["p99", "warn"]].map(([name, colour]) =>
    ({name, colour, ...column(items, (row) => ms(row[`${name}_us`]))})), {...span, suffix: " ms"}).catch(failed($("latency-plot")));
  drawLines($("load-plot"), [{name: "IOPS", colour: "ok", ...column(items, (row) => row.iops)},
    {name: "weighted IOPS", colour: "accent", ...column(items, weighted)},
    ...caps], span).catch(failed($("load-plot")));
}

// Of a past range the words "in the last hour" would be wrong.
const within = () => (until() === null ? `in the last ${range()[0]}` : "in this range");

async function loadSlow() {
  const to = until() ?? Date.now();
  const from = to - range()[1];
  const asked = JSON.stringify(page.address.get());
  const {client} = page.address.get();
  const span = {from_us: Math.round(from * 1000), to_us: Math.round(to * 1000)}; // its length says how fine a history is
  const backend = page.row?.live?.backend || page.row?.backend;
  const [history, decisions, shared, clients] = await Promise.all([
    read(`${page.base}/history?${new URLSearchParams({...span, ...(client ? {client} : {})})}`),
    read(`/decisions?${new URLSearchParams({volume: page.name, kind: CAP_KINDS, limit: 500, ...spanOf(from, until())})}`),
    backend ? read(`/volumes?${new URLSearchParams({backend, sort: "busiest", limit: SHARED})}`) : null,
    read(`${page.base}/clients?${new URLSearchParams({...span, limit: MOST_CLIENTS})}`)]);
  if (asked !== JSON.stringify(page.address.get())) return;
  if (decisions) page.decisions = decisions.items;
  if (history) page.history = history;
  drawHistory();
  if (clients) showClients(clients);
  showDecisions($("decisions"), (page.decisions || []).slice(0, 40), `It was not held back ${within()}.`);
  if (shared) showVolumes($("neighbours"), shared.items, page.name);
  else if (!backend) showVolumes($("neighbours"), []);
  if (seesAll) await loadGraph(span);
}

// Drawn by the server and put into the page; what its lines say is a list below it, too.
async function loadGraph(span) {
  const answer = await fetch(`/volumes/${encodeURIComponent(page.name)}/shared-use.svg?${new URLSearchParams(span)}`).catch(() => null);
  if (!answer?.ok) return;
  const text = (await answer.text()).trim();
  if ($("graph").dataset.shown === text) return;
  $("graph").dataset.shown = text;
  const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  const words = [...svg.querySelectorAll("path > title")].map((title) => title.textContent).reverse();
  if (words.length) $("graph").replaceChildren(document.importNode(svg, true), element("ul", {class: "plain"}, ...words.map((each) => element("li", {}, each))));
  else $("graph").replaceChildren(element("p", {class: "empty"}, `No promise on its backend was at risk ${within()}.`));
}

function show() {
  const {client} = page.address.get();
  $("client-note").hidden = !client;
  setText($("client-name"), client);
  follow(page.address, $("all-clients"), {client: ""});
  $("ranges").replaceChildren(...Object.entries(RANGES).map(([key, [words]]) => {
    const link = follow(page.address, element("a", {}, words), {range: key});
    if (key === page.address.get().range) link.setAttribute("aria-current", "true");
    return link;
  }));
  showPast();
  return loadSlow();
}

function showPast() {
  const [end, length] = [until(), range()[1]];
  showMoves($("moves"), $("until"), page.address, length);
  setText($("until-note"), end === null ? "" : `Shown is ${f.moment((end - length) * 1000)} to ${f.moment(end * 1000)}; the figures above are of now.`);
  $("until-note").hidden = end === null;
}

export async function start(shell) {
  page.name = shell.name;
  page.shell = shell;
  page.base = `/volumes/${encodeURIComponent(shell.name)}`;
  startThrottle(shell);
  $("throttle").addEventListener("click", () => openThrottle(page.name));
  $("release").addEventListener("click", () => release(shell, page.name, loadLive));
  $("why-then").href = whyAddress("volume", page.name);
  page.address = startAddress({range: "1h", until: "", client: ""}, null, () => page.row && show());
  startUntil($("until"), page.address);
  if (!await loadLive()) return;
  await Promise.all([show(), seesAll && startInline("inline", () => ({kind: "volume", name: page.name}))]);
  setInterval(() => { if (!document.hidden) loadLive(); }, LIVE_MS);
  setInterval(() => { if (!document.hidden && until() === null) loadSlow(); }, SLOW_MS);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHistory);
}

export function onSession() {
  $("actions").hidden = !page.shell.signedIn();
}
