// The shell of every view: header, banner, session and changes. The view itself is a module of views/.
//
// A view that shows what is so this second exports onSnapshot, and gets the live feed; for all others the
// shell asks each 5 s how the server is. start(shell) is called once, onSession when somebody signed in or out,
// onBack when the connection is back.

import {call, read} from "./api.js";
import {ask as askFirst} from "./ask.js";
import {seesAll} from "./cells.js";
import {element, setText} from "./dom.js";
import {clock, duration, plural, sentence} from "./format.js";
import {startFeed} from "./feed.js";
import {startWhy} from "./why.js";
import {startZone} from "./zone.js";

const $ = (id) => document.getElementById(id);
const STALE_MS = 5000;
const REFRESH_MS = 5000;
const page = {snapshot: null, takenMs: Date.now(), connection: "connecting", signedIn: false, role: "", account: "", labels: "", notice: "",
  database: "", standsBy: "", actingPage: null, others: {}, old: null, isOld: false};
const shell = {name: document.body.dataset.name, title: document.body.dataset.title, signedIn: () => page.signedIn, labels: () => page.labels,
  role: () => page.role, account: () => page.account, notice, said, isStale};
const view = await import(`./views/${document.body.dataset.view}.js`);

// Between two questions about the server's health nothing new is known of it.
function isStale() {
  return view.onSnapshot ? Date.now() - page.takenMs > STALE_MS : page.isOld;
}

function onSnapshot(snapshot) {
  page.takenMs = snapshot.at_us === page.old?.atUs ? page.old.takenMs : Date.now();
  take(snapshot);
  view.onSnapshot(snapshot, shell);
}

function take(snapshot) {
  page.snapshot = snapshot;
  page.database = snapshot.database || "";
  showMode();
  showFeed();
}

function showMode() {
  for (const button of $("mode").children) {
    button.setAttribute("aria-pressed", String(button.dataset.mode === page.snapshot?.mode));
    button.disabled = !page.signedIn;
  }
}

function onConnection(connection) {
  const wasLost = page.connection === "lost" && connection !== "lost";
  page.connection = connection;
  if (wasLost) {
    loadSession();
    loadAge();
    view.onBack?.();
  }
  showFeed();
}

// An account with labels is told nothing of the server's health but how old the live values are.
async function askOwn() {
  const {mode, server} = (await call("GET", "/live")).body;
  return [{snapshot_age_s: server.age_s, database: server.database || "ok", problems: []}, {mode}];
}

// A view without the live feed: what of the server the header and the banner say.
async function ask() {
  try {
    const [health, mode] = await (seesAll ? Promise.all([fetch("/api/v1/health").then((answer) => answer.json()), read("/mode")]) : askOwn());
    const ageS = health.snapshot_age_s;
    page.takenMs = ageS === null ? 0 : Date.now() - ageS * 1000;
    page.isOld = ageS === null || ageS * 1000 > STALE_MS;
    onConnection("asking");
    takeServer(health);
    take({mode: mode?.mode, problems: health.problems, database: health.database === "ok" ? "" : health.database});
  } catch {
    onConnection("lost");
  }
}

function showFeed() {
  const ageMs = Date.now() - page.takenMs;
  const stale = isStale() && page.connection !== "connecting";
  const lost = page.connection === "lost";
  const [cls, words] = lost ? ["bad", "connection lost"] : stale ? ["bad", "no live data"]
    : page.connection === "polling" ? ["ok", "live (polling)"] : page.snapshot ? ["ok", "live"] : ["", "connecting"];
  $("feed").className = `chip ${cls}`;
  setText($("feed"), words);
  const silence = page.takenMs ? ` for ${duration(ageMs / 1000)}` : "";
  const banner = lost ? "Connection to the server lost, retrying. What you see is what was last known."
    : stale && page.standsBy ? `${sentence(page.standsBy)} What you see is what is stored.`
    : stale && page.database ? `${sentence(page.database)} The services part waits for it. What you see is what was last known.`
    : stale ? `No live data${silence}: the services part does not answer (it is restarted by itself; `
      + "‘sla-server status’ says more)."
    : page.notice || [
      page.database ? `${sentence(page.database)} Live values go on; totals, compliance and events are those last read.` : "",
      troubles(),
    ].filter(Boolean).join(" ");
  const problem = lost || stale || (page.database && !page.notice);
  $("banner").hidden = !banner;
  $("banner").classList.toggle("notice", !problem);
  const links = lost ? Object.entries(page.others) : stale && page.actingPage ? [["the server that acts", page.actingPage]] : [];
  showBanner(banner, links);
  document.body.classList.toggle("stale", lost || stale);
}

// Of several servers: which one acts, and where the pages of the others are.
function takeServer(server) {
  page.standsBy = server.stands_by || "";
  page.actingPage = page.standsBy ? server.acting_page || null : null;
  page.others = server.pages || {};
}

// links: [name, page] of other servers, where the same view is shown.
function showBanner(text, links) {
  const shown = JSON.stringify([text, links]);
  if ($("banner").dataset.shown === shown) return;
  $("banner").dataset.shown = shown;
  const view = location.pathname + location.search;
  $("banner").replaceChildren(text, ...links.flatMap(([name, address]) => [" ", element("a", {href: address + view}, `Page of ${name}`)]));
}

function troubles() {
  const rows = (page.snapshot?.problems || []).filter((row) => !(page.database && row.what === "database"));
  const words = rows.slice(0, 3).map((row) => `${row.process}, since ${clock(row.since_us)}: ${sentence(row.reason)}`);
  return words.join(" ") + (rows.length > 3 ? ` And ${rows.length - 3} more, see /api/v1/health.` : "");
}

async function loadSession() {
  const answer = await read("/session");
  if (answer?.login_needed) location.assign("/login");
  page.signedIn = Boolean(answer?.signed_in) && answer.role !== "viewer"; // whether it may change something
  page.role = answer?.signed_in ? answer.role : "";
  page.account = answer?.account || "";
  page.labels = answer?.labels || ""; // of an account that sees its own agreements alone
  const node = $("session");
  if (answer?.signed_in) node.replaceChildren(`signed in: ${answer.who} (${answer.role}) `, element("button", {type: "button", onclick: signOut}, "Sign out"));
  else node.replaceChildren("read only; ", element("a", {href: "/login"}, "sign in"), " or ", element("code", {}, "sla login"), " lets you make changes");
  showMode();
  view.onSession?.();
}

// A feed begins with the newest snapshot, however old it is: the server says when that came.
async function loadAge() {
  const answer = view.onSnapshot && await read("/live");
  if (answer) takeServer(answer.server);
  if (answer?.server.stale) page.old = {atUs: answer.at_us, takenMs: Date.now() - (answer.server.age_s ?? 0) * 1000};
}

// Who waits for the database says nothing: ask for it ourselves.
async function loadDatabase() {
  const live = isStale() ? await read("/live") : null;
  if (live) page.database = live.server.database;
  if (live) takeServer(live.server);
}

function notice(text) {
  page.notice = text;
  showFeed();
  setTimeout(() => { if (page.notice === text) { page.notice = ""; showFeed(); } }, 8000);
}

// A change that was asked for; what the server answers is said in the banner, if it is not just done.
async function change(method, path, body, done = "") {
  try {
    said(await call(method, path, body), done);
  } catch (error) {
    notice(error.message);
  }
}

function said(answer, done = "") {
  if (answer.body?.approval) notice(`${answer.body.detail}.`);
  else if (answer.status === 202) notice("The change is on its way: the services part has not answered yet.");
  else if (done) notice(done);
}

const signOut = async () => { await change("DELETE", "/session"); await loadSession(); };
$("mode").addEventListener("click", (event) => {
  const {mode} = event.target.dataset;
  if (mode && mode !== page.snapshot?.mode) askForMode(mode);
});

// The whole server is switched: not without a question, and not without what it means.
function askForMode(mode) {
  const held = page.snapshot?.throttles && new Set(page.snapshot.throttles.filter((row) => row.state !== "observed").map((row) => row.volume)).size;
  const now = held === undefined ? "" : ` ${held ? plural(held, "volume is", "volumes are") : "None is"} held back now.`;
  const isObserve = mode === "observe";
  askFirst(shell, {
    title: isObserve ? "Only observe?" : "Enforce?",
    button: isObserve ? "Observe" : "Enforce",
    words: isObserve
      ? `Control decides and logs, and holds nobody back any more: promises that rest on it may break.${now}`
      : `Control holds back volumes of lower priority while a promise is at risk: their I/O becomes slower.${now}`,
    send: () => call("PUT", "/mode", {mode})});
}

startWhy();
startZone($("zone"));
setInterval(showFeed, 1000);
await Promise.all([loadAge(), view.start(shell)]);
await loadSession();
if (view.onSnapshot) {
  startFeed({onSnapshot, onConnection});
  setInterval(loadDatabase, REFRESH_MS);
} else {
  const askIfSeen = () => { if (!document.hidden) ask(); };
  setInterval(askIfSeen, REFRESH_MS);
  document.addEventListener("visibilitychange", askIfSeen);
  ask();
}
