// The page: takes the live feed, draws it, and sends changes through the REST API.

import {call, read} from "./api.js";
import {addPoint, drawChart, hasTrend, loadTrend, spanMs} from "./chart.js";
import {element, setText} from "./dom.js";
import {startFind} from "./find.js";
import {clock, duration, helpedBy, measured, metric, promised, sentence, stateWords} from "./format.js";
import {startFeed} from "./feed.js";
import {refreshInbox, startInbox} from "./inbox.js";
import {startPools} from "./pools.js";
import * as views from "./views.js";
import {startWhy} from "./why.js";

const $ = (id) => document.getElementById(id);
const STALE_MS = 5000;
const ACTIVE = new Set(["requested", "sent", "confirmed", "seen"]);
const page = {snapshot: null, takenMs: Date.now(), connection: "connecting", selected: null, totals: new Map(),
  policy: null, jobs: [], signedIn: false, notice: "", database: "", old: null};

function draw() {
  const {snapshot} = page;
  if (!snapshot) return;
  views.showSummary(snapshot);
  views.showSlas(snapshot, page.selected, select);
  views.showVolumes(snapshot, page.totals, {signedIn: page.signedIn, throttle: openDialog, release});
  views.showThrottles(snapshot, snapshot.at_us);
  views.showGateways(snapshot, snapshot.at_us);
  views.showEvents(snapshot);
  views.showProcesses(snapshot.processes);
  views.showPolicy(snapshot, page.policy);
  views.showJobs(page.jobs);
  for (const button of $("mode").children) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === snapshot.mode));
    button.disabled = !page.signedIn;
  }
  chart();
}

function chart() {
  const row = page.snapshot.slas.find((sla) => views.keyOf(sla) === page.selected);
  $("chart").hidden = !row || !hasTrend(page.selected) || row.promised != null; // the chart is of latencies
  if ($("chart").hidden) return;
  const [startMs, endMs] = spanMs(page.selected);
  const title = `${row.name}, ${metric(row)} of the last ${duration((endMs - startMs) / 1000)}: measured (line), promised (dashed); now `
    + `${measured(row)} of ${promised(row)}, ${stateWords(row.state)}.`;
  if ($("chart-title").dataset.shown !== title) {
    $("chart-title").dataset.shown = title;
    $("chart-title").replaceChildren(title, element("span", {class: "key"}), "a neighbour is throttled for it");
  }
  if (!document.hidden) drawChart($("plot"), page.selected).catch(() => { $("plot").hidden = true; });
}

function select(key) {
  page.selected = key;
  draw();
}

function onSnapshot(snapshot) {
  const newPolicy = snapshot.policy?.version !== page.snapshot?.policy?.version;
  page.snapshot = snapshot;
  page.takenMs = snapshot.at_us === page.old?.atUs ? page.old.takenMs : Date.now();
  page.database = snapshot.database || "";
  const acting = snapshot.throttles.filter((row) => ACTIVE.has(row.state));
  const names = acting.flatMap((row) => helpedBy(row, snapshot.backends));
  const helped = new Set(names.map((name) => name.split("/")[0]));
  for (const row of snapshot.slas) addPoint(views.keyOf(row), snapshot.at_us, row, helped.has(row.name));
  if (!snapshot.slas.some((row) => views.keyOf(row) === page.selected)) {
    const worst = snapshot.slas.find((row) => row.state === "violating") || snapshot.slas[0];
    page.selected = worst ? views.keyOf(worst) : null;
  }
  if (newPolicy) loadPolicy();
  draw();
  showFeed();
}

function onConnection(connection) {
  if (page.connection === "lost" && connection !== "lost") loadSlow();
  page.connection = connection;
  showFeed();
}

function showFeed() {
  const ageMs = Date.now() - page.takenMs;
  const stale = ageMs > STALE_MS;
  const lost = page.connection === "lost";
  const [cls, words] = lost ? ["bad", "connection lost"] : stale ? ["bad", "no live data"]
    : page.connection === "polling" ? ["ok", "live (polling)"] : page.snapshot ? ["ok", "live"] : ["", "connecting"];
  $("feed").className = `chip ${cls}`;
  setText($("feed"), words);
  const banner = lost ? "Connection to the server lost, retrying. What you see is what was last known."
    : stale && page.database ? `${sentence(page.database)} The services part waits for it. What you see is what was last known.`
    : stale ? `No live data for ${duration(ageMs / 1000)}: the services part does not answer (it is restarted by itself; `
      + "‘sla-server status’ says more)."
    : page.notice || [
      page.database ? `${sentence(page.database)} Live values go on; totals, compliance and events are those last read.` : "",
      troubles(),
    ].filter(Boolean).join(" ");
  const problem = lost || stale || (page.database && !page.notice);
  $("banner").hidden = !banner;
  $("banner").classList.toggle("notice", !problem);
  setText($("banner"), banner);
  document.body.classList.toggle("stale", lost || stale);
}

function troubles() {
  const rows = (page.snapshot?.problems || []).filter((row) => !(page.database && row.what === "database"));
  const words = rows.slice(0, 3).map((row) => `${row.process}, since ${clock(row.since_us)}: ${sentence(row.reason)}`);
  return words.join(" ") + (rows.length > 3 ? ` And ${rows.length - 3} more, see /api/v1/health.` : "");
}

async function loadPolicy() {
  const answer = await read("/policies?limit=20");
  page.policy = answer?.items.find((row) => row.version === page.snapshot?.policy?.version) || null;
  if (page.snapshot) draw();
}

async function loadJobs() {
  const answer = await read("/jobs?limit=3");
  if (answer) page.jobs = answer.items;
}

async function loadTotals() {
  const answer = await read("/volumes");
  if (answer) page.totals = new Map(answer.items.map((row) => [row.volume, row]));
}

async function loadSession() {
  const answer = await read("/session");
  if (answer?.login_needed) location.assign("/login");
  page.signedIn = Boolean(answer?.signed_in) && answer.role !== "viewer"; // whether it may change something
  const node = $("session");
  if (answer?.signed_in) node.replaceChildren(`signed in: ${answer.who} (${answer.role}) `, element("button", {type: "button", onclick: signOut}, "Sign out"));
  else node.replaceChildren("read only; ", element("a", {href: "/login"}, "sign in"), " or ", element("code", {}, "sla login"), " lets you make changes");
  refreshInbox();
}

// A feed begins with the newest snapshot, however old it is: the server says when that came.
async function loadAge() {
  const answer = await read("/live");
  if (answer?.server.stale) page.old = {atUs: answer.at_us, takenMs: Date.now() - (answer.server.age_s ?? 0) * 1000};
}

async function loadSlow() {
  await Promise.all([loadTotals(), loadJobs(), loadSession(), loadAge(), read("/live/trend").then((answer) => answer && loadTrend(answer))]);
  draw();
}

async function everySoOften() {
  await Promise.all([loadTotals(), loadJobs()]);
  if (Date.now() - page.takenMs > STALE_MS) {
    const live = await read("/live"); // who waits for the database says nothing: ask for it ourselves
    if (live) page.database = live.server.database;
    const answer = await read("/processes");
    if (answer) views.showProcesses(answer.items);
  }
}

function notice(text) {
  page.notice = text;
  showFeed();
  setTimeout(() => { if (page.notice === text) { page.notice = ""; showFeed(); } }, 8000);
}

async function change(method, path, body) {
  try {
    const answer = await call(method, path, body);
    if (answer.status === 202) notice("The change is on its way: the services part has not answered yet.");
  } catch (error) {
    notice(error.message);
  }
}

const release = (volume) => change("DELETE", `/throttles?volume=${encodeURIComponent(volume)}`);
const signOut = async () => { await change("DELETE", "/session"); await loadSession(); draw(); };
$("mode").addEventListener("click", (event) => {
  const {mode} = event.target.dataset;
  if (mode && mode !== page.snapshot?.mode) change("PUT", "/mode", {mode});
});

function openDialog(volume) {
  const form = $("throttle-form");
  form.reset();
  form.dataset.volume = volume;
  setText($("throttle-title"), `Throttle ${volume}`);
  form.querySelector(".problem").hidden = true;
  form.querySelector(".force").hidden = true;
  $("throttle-dialog").showModal();
}

$("throttle-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const given = Object.fromEntries(new FormData(form));
  const rate = Number(given.rate) * (given.unit === "bytes_per_s" ? 1e6 : 1);
  try {
    const {body} = await call("POST", "/throttles", {volume: form.dataset.volume, [given.unit]: rate,
      duration_s: given.duration ? Number(given.duration) : null, reason: given.reason, ...(given.force ? {force: true} : {})});
    $("throttle-dialog").close();
    if (body?.holds) notice(`${form.dataset.volume} may do ${body.holds}: the floor that its agreement promises lies above the rate asked for.`);
  } catch (error) {
    form.querySelector(".problem").hidden = false;
    form.querySelector(".force").hidden = error.status !== 409; // it would break the volume's own promise
    setText(form.querySelector(".problem"), error.message);
  }
});
$("throttle-form").querySelector("[value=cancel]").addEventListener("click", () => $("throttle-dialog").close());

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.addEventListener("visibilitychange", draw);
startWhy();
startInbox({signedIn: () => page.signedIn, notice});
startFind();
startPools();
setInterval(showFeed, 1000);
setInterval(everySoOften, 5000);
loadSlow().then(() => startFeed({onSnapshot, onConnection}));
