// What each part of the page shows of a snapshot. Actions are handed in, so this file only draws.

import * as f from "./format.js";
import {drawSpark} from "./chart.js";
import {element, fillList, fillTable, setBadge, setPair, setText} from "./dom.js";
import {whyAddress} from "./why.js";

const $ = (id) => document.getElementById(id);
const code = (text) => element("code", {}, text);
const MOST_ROWS = 50; // of a table: those that need a look, or use most; the others are a step away
let allVolumes = false;
const NEEDS_A_LOOK = ["violating", "at-risk", "no-data"];

export const keyOf = (sla) => `${sla.name}/${sla.objective}`;

// How many there are of what a large installation's snapshot lists only in part.
function totalsOf(snapshot) {
  const totals = snapshot.totals || {};
  const states = totals.slas || Object.fromEntries(snapshot.slas.map((row) =>
    [row.state, snapshot.slas.filter((other) => other.state === row.state).length]));
  const promises = Object.values(states).reduce((sum, count) => sum + count, 0);
  return {states, promises, volumes: totals.volumes || snapshot.volumes.length};
}

export function showSummary(snapshot) {
  const totals = totalsOf(snapshot);
  const tally = (state) => totals.states[state] || 0;
  const named = (states) => states
    .map(([state, words]) => (tally(state) ? `${tally(state)} ${words}` : "")).filter(Boolean);
  const states = named([["violating", "violated"], ["at-risk", "at risk"], ["no-data", "without data"]]);
  const quiet = named([["excluded", "excluded"], ["out-of-curve", "above demand"], ["not-applicable", "not applying"],
    ["idle", "idle"], ["ok", "kept"]]);
  const promises = totals.promises === 0 ? "No promises to keep yet"
    : tally("ok") === totals.promises ? "All promises are kept"
      : `${f.plural(totals.promises, "promise")}: ${(states.length ? states : quiet).join(", ")}`;
  const throttled = new Set(snapshot.throttles.filter((row) => row.state !== "observed").map((row) => row.volume)).size;
  const held = throttled ? `${f.plural(throttled, "volume")} throttled` : "nobody is throttled";
  const promisesShown = Math.min(snapshot.slas.length, MOST_ROWS);
  const volumesShown = shownVolumes(snapshot).length;
  const part = totals.promises > promisesShown || totals.volumes > volumesShown
    ? ` Shown are ${f.count(promisesShown)} of ${f.plural(f.count(totals.promises), "promise")} and ` +
      `${f.count(volumesShown)} of ${f.plural(f.count(totals.volumes), "volume")}, those that need a look or use most.` : "";
  $("find").hidden = totals.promises <= promisesShown;
  setText($("summary"), `${promises}; ${held}.${part}`);
  document.title = states.length ? `(${states[0]}) Storage SLA` : "Storage SLA";
}

export function showSlas(snapshot, selected, onSelect) {
  const columns = [
    {label: "State", cls: "head", fill: fillState},
    {label: "Agreement", cls: "wrap head", fill: (td, row) => {
      if (!td.firstChild) {
        td.append(element("button", {type: "button", class: "link", title: "Show in the chart",
          onclick: () => onSelect(keyOf(row))}, row.name), " ", element("a", {class: "why",
          href: whyAddress("sla", row.name, row.objective)}, "why?"), element("small"));
      }
      td.firstChild.setAttribute("aria-pressed", String(keyOf(row) === selected));
      setText(td.lastChild, `${row.objective} · ${row.priority}`);
    }},
    {label: "Measured", cls: "num", text: (row) => [f.measured(row), f.metric(row)]},
    {label: "Promised", cls: "num", text: promisedPair},
    {label: "Last 2 minutes", cls: "full", fill: (td, row) => {
      if (!td.firstChild) {
        const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        for (const [name, value] of Object.entries({class: "spark", viewBox: "0 0 190 38", preserveAspectRatio: "none",
          "aria-hidden": "true"})) svg.setAttribute(name, value);
        td.append(svg);
      }
      drawSpark(td.firstChild, keyOf(row));
    }},
    {label: "Compliance", cls: "num", title: "Good slices of those judged, with the share of time measured",
      text: compliancePair},
    {label: "Error budget left", fill: (td, row) => {
      if (!td.firstChild) td.append(element("meter", {min: 0, max: 1, low: 0.25, high: 0.5, optimum: 1}), " ",
        element("span"), element("small"));
      const left = row.budget_remaining;
      td.querySelector("meter").hidden = left == null;
      td.querySelector("meter").value = Math.max(0, left ?? 0);
      setText(td.querySelector("span"), f.percent(left, 0));
      setText(td.querySelector("small"), row.budget_minutes_left == null ? "" : `${f.minutes(row.budget_minutes_left)} of bad time`);
    }},
    {label: "Slices", text: (row) => {
      const s = row.slices || {};
      const rest = (s.not_applicable || 0) + (s.excluded || 0);
      return [`${f.count(s.good || 0)} good, ${f.count(s.bad || 0)} bad`,
        [s.no_data ? `${f.count(s.no_data)} no data` : "", rest ? `${f.count(rest)} not judged` : ""].filter(Boolean).join(", ")];
    }},
  ];
  const rank = (row) => (NEEDS_A_LOOK.indexOf(row.state) + 4) % 4;  // others last, else as they come: by name
  const rows = [...snapshot.slas].sort((one, other) => rank(one) - rank(other)).slice(0, MOST_ROWS);
  fillTable($("slas"), columns, rows, keyOf, () =>
    ["No promise to keep yet. Write an agreement in YAML and apply it: ", code("sla apply -f agreement.yaml")]);
}

function fillState(td, row) {
  if (!td.firstChild) td.append(element("span"), element("small", {class: "reason"}));
  setBadge(td.firstChild, ...f.stateOf(row.state));
  const reason = ["excluded", "no-data"].includes(row.state) && row.reason || "";
  setText(td.lastChild, reason);
  td.lastChild.title = reason;
}

const promisedPair = (row) => (f.promised(row) === f.DASH ? f.DASH : [f.promised(row), f.bound(row)]);

const compliancePair = (row) => [f.percent(row.compliance, 2),
  row.compliance == null ? "no slice judged yet" : `${f.percent(row.coverage, 1)} covered`];

// Agreements looked for by name, of all there are: one row an objective, without what only the live feed says.
export function showFound(rows) {
  const columns = [
    {label: "State", cls: "head", fill: fillState},
    {label: "Agreement", cls: "wrap head full", fill: (td, row) => {
      if (!td.firstChild) {
        td.append(element("strong", {}, row.name), " ", element("a", {class: "why",
          href: whyAddress("sla", row.name, row.objective)}, "why?"), element("small"));
      }
      setText(td.lastChild, [row.objective, row.priority].filter(Boolean).join(" · "));
    }},
    {label: "Promised", cls: "num", text: promisedPair},
    {label: "Compliance", cls: "num", text: compliancePair},
    {label: "Error budget left", cls: "num", text: (row) => f.percent(row.budget_remaining, 0)},
  ];
  fillTable($("found"), columns, rows, keyOf, () => ["No agreement in force has this in its name."]);
}

const shownVolumes = (snapshot) => (allVolumes ? snapshot.volumes : snapshot.volumes.slice(0, MOST_ROWS));

export function showVolumes(snapshot, totals, actions) {
  const more = $("more-volumes");
  more.hidden = snapshot.volumes.length <= MOST_ROWS;
  setText(more, allVolumes ? `Show ${MOST_ROWS} only` : `Show all ${f.count(snapshot.volumes.length)}`);
  more.onclick = () => {
    allVolumes = !allVolumes;
    showSummary(snapshot);
    showVolumes(snapshot, totals, actions);
  };
  const manual = new Set(snapshot.throttles.filter((row) => row.source === "manual").map((row) => row.volume));
  const columns = [
    {label: "Volume", cls: "wrap head full", fill: (td, row) => {
      if (!td.firstChild) {
        td.append(row.volume, " ", element("a", {class: "why", href: whyAddress("volume", row.volume)}, "why?"),
          element("small"));
      }
      setText(td.lastChild, `on ${row.backend}`);
    }},
    {label: "IOPS", cls: "num", text: (row) => [f.count(row.iops), `${f.count(row.read_iops)} r, ${f.count(row.write_iops)} w`]},
    {label: "Throughput", cls: "num", text: (row) => f.bytesRate(row.bytes_per_s)},
    {label: "p50", cls: "num", text: (row) => f.latency(row.p50_us)},
    {label: "p95", cls: "num", text: (row) => f.latency(row.p95_us)},
    {label: "p99", cls: "num", text: (row) => f.latency(row.p99_us)},
    {label: "Queue", cls: "num", title: "At the storage, and held back by our throttle",
      text: (row) => [f.count(row.inflight), row.held ? `${f.count(row.held)} held` : ""]},
    {label: "Cap", cls: "num", title: "What the volume may do at most; a cost is 1 an I/O and 1 per 64 KiB",
      text: (row) => (f.volumeCap(row) ? [f.volumeCap(row), `delays ${f.latency(row.delay_us)}`] : "none")},
    {label: "I/Os in total", cls: "num", fill: (td, row) => {
      const sum = totals.get(row.volume);
      td.toggleAttribute("data-total", Boolean(sum));
      setPair(td, sum ? [f.count(sum.reads + sum.writes), sum.errors ? `${f.count(sum.errors)} errors` : ""] : f.DASH);
    }},
    {label: "", cls: "full", fill: (td, row) => {
      if (!td.firstChild && actions.signedIn) {
        td.append(element("button", {type: "button", onclick: () => actions.throttle(row.volume)}, "Throttle…"),
          element("button", {type: "button", onclick: () => actions.release(row.volume)}, "Release"));
      }
      if (!actions.signedIn) td.replaceChildren();
      else td.lastChild.hidden = !manual.has(row.volume);
    }},
  ];
  fillTable($("volumes"), columns, shownVolumes(snapshot), (row) => row.volume, () =>
    ["No volume seen yet. Start a gateway agent beside the storage: ", code("gateway-agent run --config FILE")]);
}

export function showThrottles(snapshot, nowUs) {
  fillList($("throttles"), snapshot.throttles, (row) => row.throttle_id,
    (row) => element("li", {"data-throttle": row.throttle_id}, element("div", {}, element("strong"), " ", element("span", {class: "soft"}),
      " ", element("a", {class: "why", href: whyAddress("volume", row.volume)}, "why?")),
      element("p"), element("p", {class: "soft"})),
    (li, row) => {
      setText(li.querySelector("strong"), `${f.throttled(row)} at most ${f.enforcedWords(row)}`);
      const left = row.expires_us ? `, ${f.duration((row.expires_us - nowUs) / 1e6)} left` : "";
      setText(li.querySelector("span"), `for ${f.duration((nowUs - row.since_us) / 1e6)}${left}`);
      const [why, how] = li.querySelectorAll("p");
      setText(why, (row.text || row.reason) + (row.floor ? ` (${row.floor} holds)` : ""));
      setText(how, f.throttleWords(row, snapshot.backends));
    },
    () => ["Nobody is throttled. When a volume is, this list says how far, for whom and why."]);
}

const GATEWAY_STATES = {up: ["ok", "up"], recovered: ["ok", "up"], stalled: ["warn", "stalled"],
  detached: ["warn", "detached"], lost: ["bad", "lost"], refused: ["bad", "refused"]};

export function showGateways(snapshot, nowUs) {
  const columns = [
    {label: "State", cls: "head", fill: (td, row) => {
      if (!td.firstChild) td.append(element("span"));
      setBadge(td.firstChild, ...(GATEWAY_STATES[row.state] || ["", row.state]));
    }},
    {label: "Gateway", cls: "wrap head", text: (row) => [row.name, row.address || ""]},
    {label: "Last cut", cls: "num", text: (row) => (row.last_cut_us ? `${f.duration((nowUs - row.last_cut_us) / 1e6)} ago` : f.DASH)},
    {label: "Clock", cls: "num", text: (row) => (row.last_cut_us ? f.skew(row.clock_offset_us) : f.DASH)},
    {label: "I/O wait", cls: "num", text: (row) => f.percent(row.io_waited_ratio)},
    {label: "Streams", cls: "num", text: (row) => f.count(row.streams)},
    {label: "Lost cuts", cls: "num", text: (row) => (row.dropped_cuts ? f.count(row.dropped_cuts) : f.DASH)},
  ];
  fillTable($("gateways"), columns, snapshot.gateways, (row) => row.gateway_id, () =>
    ["No gateway has connected. Start one: ", code("gateway-agent run --config FILE")]);
}

export function showEvents(snapshot) {
  fillList($("events"), snapshot.events, (row) => row.event_id,
    () => element("li", {}, element("time", {class: "soft"}), element("span"), element("p"), element("p", {class: "soft"})),
    (li, row) => {
      setText(li.querySelector("time"), f.clock(row.at_us));
      setBadge(li.querySelector("span"), f.SEVERITIES[row.severity] || "", row.severity, row.kind);
      const [what, about] = li.querySelectorAll("p");
      setText(what, row.text || row.kind);
      setText(about, f.aboutEvent(row));
    },
    () => ["Nothing has happened yet."]);
}

export function showProcesses(rows) {
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

export function showPolicy(snapshot, policy) {
  const node = $("policy");
  if (!snapshot.policy) {
    if (!node.querySelector("code")) {
      node.replaceChildren("No policy in force. Compute one from what was stored: ", code("sla policy run"));
    }
    return;
  }
  const when = `in force since ${f.clock(snapshot.policy.applied_us)}`;
  const rows = policy?.job?.rollups ? `, computed from ${f.count(policy.job.rollups)} rollups` : "";
  const pinned = snapshot.policy.pinned ? ", pinned" : "";
  const stage = snapshot.policy_stage;
  const above = stage?.would_hold?.length ? ` ${f.plural(stage.would_hold.length, "volume")} above caps that are only observed.` : "";
  setText(node, `Version ${snapshot.policy.version}${pinned}, ${when}${rows}. Its caps: ${stage?.stage || "enforce"}.${above}`);
}

const JOB_BADGES = {done: "ok", running: "", failed: "bad", killed: "bad"};

export function showJobs(rows) {
  $("jobs").hidden = !rows.length;
  fillList($("jobs"), rows, (row) => row.job_id,
    () => element("li", {}, element("time", {class: "soft"}), element("span"), element("p")),
    (li, row) => {
      setText(li.querySelector("time"), f.clock(row.started_us));
      setBadge(li.querySelector("span"), JOB_BADGES[row.state] ?? "warn", row.state, row.kind);
      const took = row.ended_us ? `took ${f.duration((row.ended_us - row.started_us) / 1e6)}` : "goes on";
      const read = row.rows === null ? "" : `, ${f.count(row.rows)} rows`;
      setText(li.querySelector("p"), `${row.kind} job ${took}${read}${row.text ? `: ${row.text}` : ""}`);
    },
    () => []);
}
