// The overview: which promises need a look, for whom, since when and what the server does; then its own health.

import {follow, startAddress} from "../address.js";
import {read} from "../api.js";
import {backendAddress, code, fillAgreement, fillEvents, fillState, keyOf, measuredPair, promisedPair,
  factsNow, seesAll, volumeAddress, whyLink} from "../cells.js";
import {addPoint, drawChart, drawSpark, hasTrend, loadTrend, spanMs} from "../chart.js";
import {element, fillList, fillTable, setBadge, setText} from "../dom.js";
import * as f from "../format.js";
import {showMoves, startUntil, untilMs} from "../past.js";
import {drawTimeline} from "../timeline.js";
import {headlineOf} from "../why.js";

const $ = (id) => document.getElementById(id);
const MOST_ROWS = 50; // those that need a look; all others are a step away
const MOST_EVENTS = 12;
const MOST_LISTED = 12; // throttles and backends; of a large site there are hundreds
const MOST_OPEN = 10;
const REFRESH_MS = 5000;
const MOST_WHYS = 4; // rows that say why at once: a question each
const REST = 10; // times what the last answers took: of a very large installation some seconds
const HOUR_MS = 3600e3;
const SPANS = {"1h": ["1 hour", HOUR_MS], "6h": ["6 hours", 6 * HOUR_MS], "24h": ["24 hours", 24 * HOUR_MS], "7d": ["7 days", 168 * HOUR_MS]};
const TIMELINE_ROWS = 200; // of each; the timeline has the newest eight of them by name
const TIMELINE_MS = 30000;
const NEEDS_A_LOOK = ["violating", "at-risk", "no-data"];
const ACTIVE = new Set(["requested", "sent", "confirmed", "seen"]);
const page = {snapshot: null, selected: null, facts: new Map(), episodes: [], policy: null, whys: new Map(), whysMs: 0,
  past: null, pastSpan: "", pastMs: 0, hasAllThrottles: false, hasMoreEpisodes: false,
  budgets: null};
let shell = null;
let address = null;

function totalsOf(snapshot) {
  const totals = snapshot.totals || {};
  const states = totals.slas || Object.fromEntries(snapshot.slas.map((row) =>
    [row.state, snapshot.slas.filter((other) => other.state === row.state).length]));
  return {states, promises: Object.values(states).reduce((sum, count) => sum + count, 0)};
}

function showSummary(snapshot) {
  const totals = totalsOf(snapshot);
  const tally = (state) => totals.states[state] || 0;
  const named = (states) => states
    .map(([state, words]) => (tally(state) ? `${tally(state)} ${words}` : "")).filter(Boolean);
  const states = named([["violating", "violated"], ["at-risk", "at risk"], ["no-data", "without data"]]);
  const quiet = named([["excluded", "excluded"], ["out-of-curve", "above demand"], ["not-applicable", "not applying"],
    ["idle", "idle"], ["ok", "kept"]]);
  const {spent = 0, too_fast: fast = 0} = page.budgets || {};
  const budgets = [spent ? `${f.count(spent)} ${spent === 1 ? "has" : "have"} spent the error budget of the period` : "",
    fast ? `${f.count(fast)} ${fast === 1 ? "spends" : "spend"} it too fast` : ""].filter(Boolean).join(", ");
  const promises = totals.promises === 0 ? "No promises to keep yet"
    : tally("ok") === totals.promises ? "All promises are kept now"
      : `${f.plural(totals.promises, "promise")}: ${(states.length ? states : quiet).join(", ")}`;
  const throttled = new Set(snapshot.throttles.filter((row) => row.state !== "observed").map((row) => row.volume)).size;
  const least = (snapshot.totals?.throttles || 0) > snapshot.throttles.length ? "at least " : "";
  const held = throttled ? `${least}${f.plural(throttled, "volume")} throttled` : "nobody is throttled";
  setText($("summary"), `${[promises, budgets, shell.labels() ? "" : held].filter(Boolean).join("; ")}.`);
  const shown = Math.min(snapshot.slas.length, MOST_ROWS);
  const all = $("all-promises");
  setText(all, totals.promises > shown ? `Shown are ${f.count(shown)} of ${f.plural(totals.promises, "promise")}: `
    + "those that need a look. All agreements" : "All agreements");
  document.title = states.length ? `(${states[0]}) Storage SLA` : "Storage SLA";
}

// What is done for a promise now: throttles that help it.
function actionsFor(row, snapshot) {
  const own = keyOf(row);
  const helping = snapshot.throttles.filter((each) => f.helpedBy(each, snapshot.backends).includes(own));
  if (shell.labels()) return "";
  if (!helping.length) return row.state === "violating" || row.state === "at-risk" ? "nobody is throttled for it" : "";
  const [first, ...more] = helping;
  const verb = first.state === "observed" ? "would be held to" : "held to";
  return `${f.throttled(first)} ${verb} ${f.enforcedWords(first)}${more.length ? ` and ${more.length} more` : ""}`;
}

const COLUMNS = [
  {label: "State", cls: "head", fill: fillState},
  {label: "Agreement", cls: "wrap head", fill: fillAgreement},
  {label: "Measured", cls: "num", title: "Over the last seconds", text: measuredPair},
  {label: "Promised", cls: "num", text: promisedPair},
  {label: "Course", cls: "full", title: "How it came to that: what was measured over the last 2 minutes", fill: (td, row) => {
    if (!td.firstChild) {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      for (const [name, value] of Object.entries({class: "spark", viewBox: "0 0 190 38", preserveAspectRatio: "none",
        "aria-hidden": "true"})) svg.setAttribute(name, value);
      const key = keyOf(row);
      td.append(element("button", {type: "button", class: "bare", "aria-label": `Show ${key} in the chart`,
        title: "Show in the chart", onclick: () => { page.selected = key; draw(); }}, svg));
    }
    td.firstChild.setAttribute("aria-pressed", String(keyOf(row) === page.selected));
    drawSpark(td.firstChild.firstChild, keyOf(row));
  }},
  {label: "What the server does", title: "And what was found", cls: "wrap full", fill: (td, row) => {
    if (!td.firstChild) td.append(element("span"), element("small", {class: "because"}), element("small"));
    setText(td.firstChild, actionsFor(row, page.snapshot));
    const why = page.whys.get(keyOf(row));
    const because = why && why.state === row.state ? why.headline : "";
    setText(td.children[1], [because, f.spentWords(row)].filter(Boolean).join(" "));
    const volumes = row.volumes || [];
    const rest = (row.volume_count || 0) - volumes.length;
    setText(td.lastChild, volumes.length ? `its volumes: ${volumes.join(", ")}${rest > 0 ? ` and ${rest} more` : ""}` : "");
  }},
];

// Others last and as they come, by name. Of those that need a look, or spend their budget too fast, first those with the
// least of it left: there may be hundreds that are violated.
const rank = (row) => (NEEDS_A_LOOK.includes(row.state) ? NEEDS_A_LOOK.indexOf(row.state) : row.alerts?.length ? 3 : 4);
const left = (row) => (rank(row) < 4 ? row.budget_remaining ?? 2 : 0);
const ranked = (snapshot) => [...snapshot.slas].sort((one, other) => rank(one) - rank(other) || left(one) - left(other));

// Why the first of those that need a look, and are in force, are as they are; of what has changed since, nothing is said.
async function loadWhys() {
  if (!seesAll || !page.snapshot || document.hidden || Date.now() < page.whysMs) return;
  const beganMs = Date.now();
  page.whysMs = Infinity;
  const rows = ranked(page.snapshot).slice(0, MOST_WHYS).filter((row) => NEEDS_A_LOOK.includes(row.state) && page.facts.has(keyOf(row)));
  const said = await Promise.all(rows.map(async (row) => [keyOf(row), {state: row.state, headline: await headlineOf("sla", row.name, row.objective)}]));
  page.whys = new Map(said);
  page.whysMs = Date.now() + Math.max(REFRESH_MS, REST * (Date.now() - beganMs));
}

function showPromises(snapshot) {
  const rows = ranked(snapshot).slice(0, MOST_ROWS)
    .map((row) => ({...row, ...factsNow(page.facts.get(keyOf(row)), row)}));
  fillTable($("slas"), COLUMNS, rows, keyOf, () =>
    ["No promise to keep yet. Write an agreement in YAML and apply it: ", code("sla apply -f agreement.yaml")]);
}

function showThrottles(snapshot) {
  const nowUs = snapshot.at_us;
  showMoreThrottles(snapshot);
  fillList($("throttles"), page.hasAllThrottles ? snapshot.throttles : snapshot.throttles.slice(0, MOST_LISTED), (row) => row.throttle_id,
    (row) => element("li", {"data-throttle": row.throttle_id}, element("div", {},
      element("strong", {}, row.volume ? element("a", {href: volumeAddress(row.volume)}) : element("span")), " ",
      element("span", {class: "soft"}), " ", whyLink("volume", row.volume)),
      element("p"), element("p", {class: "soft"})),
    (li, row) => {
      setText(li.querySelector("strong").firstChild, `${f.throttled(row)} at most ${f.enforcedWords(row)}`);
      const left = row.expires_us ? `, ${f.duration((row.expires_us - nowUs) / 1e6)} left` : "";
      setText(li.querySelector("div > .soft"), `for ${f.duration((nowUs - row.since_us) / 1e6)}${left}`);
      const [why, how] = li.querySelectorAll("p");
      setText(why, f.plain(row.text || row.reason) + (row.floor ? ` (${row.floor} holds)` : ""));
      setText(how, f.throttleWords(row, snapshot.backends));
    },
    () => ["Nobody is throttled. When a volume is, this list says how far, for whom and why."]);
}

function showMoreThrottles({throttles, totals}) {
  const [listed, all] = [throttles.length, Math.max(throttles.length, totals?.throttles || 0)];
  $("throttles-more").hidden = all <= MOST_LISTED;
  const [button, rest] = $("throttles-more").children;
  button.hidden = listed <= MOST_LISTED;
  setText(button, page.hasAllThrottles ? `Show ${MOST_LISTED}` : `Show ${all > listed ? "" : "all "}${f.count(listed)}`);
  button.setAttribute("aria-expanded", String(page.hasAllThrottles));
  setText(rest, all > listed ? `of ${f.count(all)}; sla get throttles lists all` : "");
}

function showEpisodes() {
  $("episodes-more").hidden = !page.hasMoreEpisodes;
  fillList($("episodes"), page.episodes, (row) => row.episode_id,
    (row) => element("li", {"data-episode": row.episode_id}, element("div", {}, element("a", {class: "name",
      href: `/agreements/${encodeURIComponent(row.name)}?objective=${encodeURIComponent(row.objective)}`}, keyOf(row)),
      " ", element("span", {class: "soft"})), element("p", {class: "soft"})),
    (li, row) => {
      setText(li.querySelector("span"), `violated since ${f.clock(row.opened_us)}, for ${f.duration(Date.now() / 1000 - row.opened_us / 1e6)}`);
      setText(li.querySelector("p"), f.episodeWords(row));
    },
    () => ["No promise is being violated."]);
}

const span = () => SPANS[address.get().span] || SPANS["6h"];

function showSpans() {
  $("spans").replaceChildren(...Object.entries(SPANS).map(([key, [words]]) => {
    const link = follow(address, element("a", {}, words), {span: key});
    if (SPANS[key] === span()) link.setAttribute("aria-current", "true");
    return link;
  }));
  showMoves($("moves"), $("until"), address, span()[1]);
}

// Of the span that is shown only, and not with every round: it changes slowly against its width.
async function loadTimeline() {
  const ms = span()[1];
  const until = untilMs(address, ms);
  const name = JSON.stringify(address.get());
  if (page.pastSpan === name && (until !== null || Date.now() - page.pastMs < TIMELINE_MS)) return showTimeline();
  const began = until === null ? "" : `&before=${Math.round(until * 1000)}:~`; // what began before the end of the range
  const query = `limit=${TIMELINE_ROWS}&since_us=${Math.round(((until ?? Date.now()) - ms) * 1000)}${began}`;
  const [episodes, throttles] = await Promise.all([read(`/episodes?${query}`), read(`/throttles?${query}`)]);
  if (name !== JSON.stringify(address.get())) return;
  if (episodes && throttles) [page.pastSpan, page.pastMs] = [name, Date.now()];
  if (episodes && throttles) page.past = {episodes: episodes.items, rows: throttles.items, oldest: [
    ...(episodes.next ? [episodes.items.at(-1).opened_us] : []), ...(throttles.next ? [throttles.items.at(-1).requested_us] : [])]};
  showTimeline();
}

function showTimeline() {
  if (!page.past) return;
  const until = untilMs(address, span()[1]);
  const toMs = until ?? Date.now();
  const fromMs = toMs - span()[1];
  drawTimeline($("timeline"), $("timeline-note"), {...page.past, fromMs, toMs, isPast: until !== null, isCut: page.past.oldest.some((us) => us / 1000 > fromMs)});
}

const GATEWAY_WORDS = {up: "up", recovered: "up", stalled: "stalled", detached: "detached", lost: "lost", refused: "refused"};

function showHealth(snapshot) {
  const tally = {...(snapshot.totals?.gateways || {})};
  if (!snapshot.totals?.gateways) for (const row of snapshot.gateways) tally[row.state] = (tally[row.state] || 0) + 1;
  const words = Object.entries(tally).map(([state, n]) => `${n} ${GATEWAY_WORDS[state] || state}`);
  const node = $("gateway-tally");
  if (words.length) setText(node, `Gateways: ${words.join(", ")}.`);
  else if (!node.querySelector("code")) node.replaceChildren("No gateway has connected. Start one: ", code("gateway-agent run --config FILE"));
  const problems = snapshot.problems || [];
  setText($("problem-tally"), problems.length ? `In trouble: ${f.plural(problems.length, "thing")}, first ${problems[0].process}: ${problems[0].reason}.`
    : "Nothing of the server is in trouble.");
  const backends = snapshot.backends.filter((row) => row.fault || (row.phase && row.phase !== "idle"))
    .sort((one, other) => Boolean(other.fault) - Boolean(one.fault));
  $("backends-more").hidden = backends.length <= MOST_LISTED;
  setText($("backends-more").firstChild, `All ${f.count(backends.length)} that need control or do not answer`);
  fillList($("backend-list"), backends.slice(0, MOST_LISTED), (row) => row.backend,
    (row) => element("li", {}, element("a", {href: backendAddress(row.backend)}, row.backend), element("span", {class: "soft"})),
    (li, row) => setText(li.lastChild, row.fault ? `the storage ${row.fault}` : ` ${f.PHASES[row.phase] || row.phase}`),
    () => ["No backend needs control now."]);
}

function showPolicy(snapshot) {
  const node = $("policy");
  if (!snapshot.policy) {
    if (!node.querySelector("code")) node.replaceChildren("No policy in force. Compute one from what was stored: ", code("sla policy run"));
    return;
  }
  const pinned = snapshot.policy.pinned ? ", pinned" : "";
  const stage = snapshot.policy_stage;
  const above = stage?.would_hold?.length ? ` ${f.plural(stage.would_hold.length, "volume")} above caps that are only observed.` : "";
  const words = `, in force since ${f.clock(snapshot.policy.applied_us)}${pinned}. Its caps are ${stage?.stage === "observe" ? "observed" : "enforced"}.${above}`;
  if (!node.querySelector("a")) node.replaceChildren("Policy ", element("a"), element("span"));
  node.querySelector("a").href = `/policies/${snapshot.policy.version}`;
  setText(node.querySelector("a"), `version ${snapshot.policy.version}`);
  setText(node.querySelector("span"), words);
}

function showProcesses(rows) {
  const recentUs = (Date.now() - 600000) * 1000; // a restart is news for ten minutes, then only a number
  fillList($("processes"), rows, (row) => row.name, () => element("li", {class: "chip"}),
    (li, row) => {
      const up = row.state === "running";
      li.className = `chip ${up ? (row.restarts && row.since_us > recentUs ? "warn" : "") : "bad"}`.trim();
      const restarts = row.restarts ? `, ${f.plural(row.restarts, "restart")}` : "";
      setText(li, up ? `${row.name}${restarts}` : `${row.name}: ${row.state}${restarts}`);
      const fullest = Object.entries(row.pressure?.fullness ?? {}).sort((a, b) => b[1] - a[1])[0];
      const full = fullest ? `; ${fullest[0]} ${f.percent(fullest[1], 0)} full` : "";
      if (fullest && fullest[1] >= 0.8) {
        li.className = "chip warn";
        setText(li, `${row.name}${restarts}${full}`);
      }
      li.title = (row.since_us ? `${row.state} since ${f.clock(row.since_us)}` : row.state) + full;
    }, () => []);
}

function draw() {
  const {snapshot} = page;
  if (!snapshot) return;
  showSummary(snapshot);
  showPromises(snapshot);
  showThrottles(snapshot);
  showEpisodes();
  showHealth(snapshot);
  fillEvents(fillList, $("events"), snapshot.events.slice(0, MOST_EVENTS), () => ["Nothing has happened yet."]);
  showProcesses(snapshot.processes);
  showPolicy(snapshot);
  chart();
}

function chart() {
  const row = page.snapshot.slas.find((sla) => keyOf(sla) === page.selected);
  $("chart").hidden = !row || !hasTrend(page.selected) || row.promised != null; // the chart is of latencies
  if ($("chart").hidden) return;
  const [startMs, endMs] = spanMs(page.selected);
  const title = `${row.name}, ${f.metric(row)} of the last ${f.duration((endMs - startMs) / 1000)}: measured (line), promised (dashed); now `
    + `${f.measured(row)} of ${f.promised(row)}, ${f.stateWords(row.state)}.`;
  if ($("chart-title").dataset.shown !== title) {
    $("chart-title").dataset.shown = title;
    $("chart-title").replaceChildren(title, element("span", {class: "key"}), "a neighbour is throttled for it");
  }
  if (!document.hidden) drawChart($("plot"), page.selected).catch(() => { $("plot").hidden = true; });
}

export function onSnapshot(snapshot) {
  page.snapshot = snapshot;
  const acting = snapshot.throttles.filter((row) => ACTIVE.has(row.state));
  const helped = new Set(acting.flatMap((row) => f.helpedBy(row, snapshot.backends)).map((name) => name.split("/")[0]));
  for (const row of snapshot.slas) addPoint(keyOf(row), snapshot.at_us, row, helped.has(row.name));
  if (!snapshot.slas.some((row) => keyOf(row) === page.selected)) {
    const worst = snapshot.slas.find((row) => row.state === "violating") || snapshot.slas[0];
    page.selected = worst ? keyOf(worst) : null;
  }
  draw();
  loadWhys();
}

// For whom and since when, of those that are shown; violations that go on.
async function loadFacts() {
  const [promises, episodes] = await Promise.all([read(`/promises?limit=${MOST_ROWS}`), read(`/episodes?open=1&limit=${MOST_OPEN}`)]);
  if (promises) {
    page.budgets = promises.budgets;
    page.facts = new Map(promises.items.map((row) => [keyOf(row),
      {customer: row.customer, volumes: row.volumes, volume_count: row.volume_count, state: row.state,
        since_us: row.since_us}]));
  }
  if (episodes) [page.episodes, page.hasMoreEpisodes] = [episodes.items, Boolean(episodes.next)];
  loadTimeline();
  if (!promises && shell.isStale()) {
    const answer = await read("/processes");
    if (answer) showProcesses(answer.items);
  }
}

const loadTrends = () => read("/live/trend").then((answer) => answer && loadTrend(answer));

export async function start(around) {
  shell = around;
  address = startAddress({span: "6h", until: ""}, null, () => { showSpans(); loadTimeline(); });
  startUntil($("until"), address);
  $("throttles-more").firstChild.addEventListener("click", () => { page.hasAllThrottles = !page.hasAllThrottles; draw(); });
  showSpans();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.addEventListener("visibilitychange", draw);
  setInterval(() => { if (!document.hidden) loadFacts().then(draw); }, REFRESH_MS);
  await Promise.all([loadTrends(), loadFacts()]);
}

// What an account with labels is not told must not be said to be none.
export function onSession() {
  for (const id of ["h-throttles", "h-health", "h-events"]) $(id).closest("section").hidden = Boolean(shell.labels());
  draw();
}

export const onBack = () => Promise.all([loadTrends(), loadFacts()]).then(draw);
