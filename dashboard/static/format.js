// Numbers, times and states in words. Null and undefined are shown as a dash, never as 0.

import {elementWords, eventKind} from "./words.js";
import {dayKey, words} from "./zone.js";

export const DASH = "–";
const number = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const missing = (value) => value === null || value === undefined;

// In a narrow cell: 950, 1.2k, 34k.
export const short = (value) => (missing(value) ? DASH : value < 999.5 ? String(Math.round(value))
  : value < 9950 ? `${(value / 1000).toFixed(1)}k` : `${Math.round(value / 1000)}k`);

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 && power < units.length - 1) [bytes, power] = [bytes / 1024, power + 1];
  return power ? `${bytes.toFixed(1)} ${units[power]}` : `${bytes} B`;
}

export const count = (value) => (missing(value) ? DASH : number.format(value));

export function latency(us) {
  if (missing(us)) return DASH;
  if (us < 995) return `${Math.round(us)} µs`;
  const ms = us / 1000;
  if (ms < 1000) return `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
  return `${(ms / 1000).toFixed(1)} s`;
}

export function bytesRate(value) {
  if (missing(value)) return DASH;
  return value < 1e6 ? `${(value / 1e3).toFixed(0)} kB/s` : `${(value / 1e6).toFixed(1)} MB/s`;
}

// A value of an indicator without a percentile, measured or promised.
export const rate = (metric, value) => (metric === "iops" && !missing(value) ? `${count(value)} IOPS` : bytesRate(value));
const isRate = (row) => ["iops", "throughput"].includes(row.metric);
export const metric = (row) => ((row.metric || "latency") === "latency" ? `p${row.percentile}`
  : {mean_latency: "mean", availability: "longest stall"}[row.metric] || "delivered");

// What is measured now, in us: a latency, or for how long nothing was answered; null for rates.
export function measuredUs(row) {
  if (isRate(row)) return null;
  return (row.metric === "availability" ? row.measured ?? row.stall_us : row.latency_us ?? row.measured) ?? null;
}
export const measured = (row) => (isRate(row) ? rate(row.metric, row.measured) : latency(measuredUs(row)));
export const promised = (row) => (isRate(row) ? rate(row.metric, row.promised) : latency(row.threshold_us));
export const bound = (row) => (isRate(row) ? "at least" : "at most");

// Rounded down: 99.996 % must not read as 100 %.
export function percent(ratio, digits = 1) {
  if (missing(ratio)) return DASH;
  const scale = 10 ** digits;
  return `${(Math.floor(ratio * 100 * scale + 1e-9) / scale).toFixed(digits)} %`;
}

// A part of a whole, to the nearest: parts of 12.8 % and 87.2 % are 13 % and 87 %.
export function share(ratio) {
  if (missing(ratio)) return DASH;
  return ratio > 0 && ratio < 0.005 ? "< 1 %" : `${Math.round(ratio * 100)} %`;
}

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

// How far a gateway's clock is ahead (+) or behind; offsetUs is what corrects it.
export function skew(offsetUs) {
  if (missing(offsetUs)) return DASH;
  if (Math.abs(offsetUs) < 1000) return "< 1 ms";
  const sign = offsetUs < 0 ? "+" : "−";
  const ms = Math.abs(offsetUs) / 1000;
  return ms < 999.5 ? `${sign}${Math.round(ms)} ms` : `${sign}${(ms / 1000).toFixed(1)} s`;
}

// How fast an error budget is spent: 1 spends exactly all of it by the end of the period.
export function burn(row) {
  if (missing(row.burn_1h)) return DASH;
  const alerts = (row.alerts || []).map((name) => BURN_ALERTS[name] || name);
  return [`${row.burn_1h.toFixed(row.burn_1h > 0 && row.burn_1h < 10 ? 1 : 0)} ×`, alerts.join(", ")];
}
// What an error budget has to do with a row that is of now: words, as its figures are of a period.
export function spentWords(row) {
  if (row.budget_remaining != null && row.budget_remaining <= 0) return "The error budget is spent.";
  const [worst] = ["fast", "medium", "slow"].filter((name) => row.alerts?.includes(name));
  if (worst) return `The error budget is being spent ${BURN_ALERTS[worst]}.`;
  return row.alerts?.length ? "Bad slices follow each other." : "";
}
const BURN_ALERTS = {fast: "much too fast", medium: "too fast", slow: "too fast for days", consecutive: "10 bad in a row"};

export const PHASES = {idle: "idle", decrease: "slowing neighbours down", hold: "neighbours held back", increase: "giving back in steps"};

// What is known of a violation's depth: how many times more misses there were than allowed.
export function episodeWords(row) {
  const bad = row.slices_bad ? `${plural(row.slices_bad, "bad slice")}` : "";
  const depth = row.worst_u ? `at worst ${row.worst_u.toFixed(1)} times the slow I/Os that are allowed` : "";
  return [bad, depth].filter(Boolean).join(", ");
}

// In two units: parts of a budget must add up to it.
export function exact(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 5400 || s >= 8640000) return duration(s);
  const [many, few, large, small] = s < 172800 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
  const units = Math.round(s / few);
  const rest = units % (many / few);
  return `${Math.floor(units / (many / few))} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

export const minutes = (value) => (missing(value) ? DASH : exact(value * 60));
// Of an error budget that is overspent nothing is left; how much more it was the chart of the agreement says.
export const budgetRest = (row) => (missing(row.budget_minutes_left) ? ""
  : row.budget_remaining < 0 ? "more bad time than allowed" : `${minutes(row.budget_minutes_left)} of bad time`);

// Time of day; with the date in front when it was not today, and with its year when that may not be clear.
const FAR_MS = 180 * 86400e3;
export function clock(us) {
  if (!us) return DASH;
  const ms = us / 1000;
  const time = words(ms, {timeStyle: "medium"});
  if (Math.abs(ms - Date.now()) > FAR_MS) return moment(us);
  return dayKey(ms) === dayKey(Date.now()) ? time : `${words(ms, {day: "numeric", month: "short"})} ${time}`;
}

// An error's text as a sentence.
export const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

// Texts of the server, in the page's words.
export const plain = (text) => String(text ?? "").replaceAll(" cost/s", " weighted IOPS");

export const WEIGHTED = "Weighted IOPS: an I/O counts once, and once more per 64 KiB, or as the storage's cost model says";

const POLICY_STATES = {"in-force": ["ok", "in force"], pinned: ["ok", "in force, pinned"], published: ["", "published"],
  superseded: ["", "superseded"], "rolled-back": ["warn", "rolled back"], rejected: ["warn", "rejected"],
  "rejected-pinned": ["warn", "rejected, pinned"]};
export const policyState = (state) => POLICY_STATES[state] || ["", state];
export const backTest = (found) => (found?.reason ? sentence(plain(found.reason)) : "It was not tried on stored I/O.");

const DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
// An hour of the week, 0 is Monday 00 UTC: "Sat 23:00 UTC", not "hour 143".
export const weekHour = (hour) => `${DAYS[Math.floor(hour / 24)]} ${String(hour % 24).padStart(2, "0")}:00 UTC`;
export const weekDay = (day) => DAYS[day];

// Day and time, always with the date.
export const moment = (us) => (us ? words(us / 1000, {day: "numeric", month: "short", year: "numeric",
  hour: "2-digit", minute: "2-digit"}) : DASH);

export const day = (us) => (us ? words(us / 1000, {day: "numeric", month: "short", year: "numeric"}) : DASH);

// The days of a period, the last one included: a month that was agreed in Berlin begins on the 1st whatever zone the page
// shows. [first, last], or null where it does not begin and end at midnight there: a rolling one.
export function daysOfPeriod({from_us: from, to_us: to}, timeZone) {
  const isMidnight = (us) => words(us / 1000, {hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone}) === "00:00";
  const named = (us) => words(us / 1000, {day: "numeric", month: "short", year: "numeric", timeZone});
  return timeZone && isMidnight(from) && isMidnight(to) ? [named(from), named(to - 1)] : null;
}

export const clockOf = (us) => words(us / 1000, {hour: "2-digit", minute: "2-digit"});

export const SLICES = {good: "good", bad: "bad", no_data: "no data", not_applicable: "does not apply", excluded: "excluded"};

const DECISIONS = {start: "slowed neighbours down", "pre-position": "slowed neighbours down ahead of a burst", decrease: "slowed neighbours down further",
  increase: "gave some back", release: "released all", unattributed: "found no cause among the neighbours",
  infeasible: "cannot help: all are at their floors", "control-oscillation": "went up and down too often", "ahead-off": "stopped acting ahead of bursts",
  "not-effective": "a cap does not show in the measured rate"};

// What was decided, without the figures of the loop.
export function decisionWords(row) {
  const {after, in_force: held} = row.figures || {};
  const whom = row.figures?.client ? `${row.volume}/${row.figures.client}` : row.volume;
  if (row.kind === "cap-released") return `${whom} is free again`;
  if (row.kind === "observed") return `${whom} would be held to ${capWords(after || held || {})}`;
  if (row.kind.startsWith("cap-")) return `${whom} held to ${capWords(held || after || {})}`;
  return `${row.backend}: ${DECISIONS[row.kind] || row.kind}`;
}

// I/Os a second in which a large I/O counts more: as an I/O, and once per 64 KiB.
export const weighted = (value) => (missing(value) ? DASH : `${count(value)} weighted IOPS`);

// State of an agreement's objective: [badge class, words, explanation].
export const SLA_STATES = {
  ok: ["ok", "✓ kept", "What is measured is within the promise."],
  "at-risk": ["warn", "! at risk", "Close to the promise; neighbours are slowed down before it breaks."],
  violating: ["bad", "✗ violated", "The promise is broken now: what is measured is worse than it allows."],
  "no-data": ["warn", "? no data", "No gateway reports its volumes: see the view of gateways."],
  idle: ["", "idle", "Too few I/Os to judge."],
  "no-objective": ["", "no objective", "It only says how its volumes are treated as neighbours."],
  "out-of-curve": ["", "above demand", "Demand is above what the agreement covers."],
  "not-applicable": ["", "does not apply", "Its I/Os are not such as the promise is about: too few, too large, too many writes."],
  excluded: ["", "excluded", "Nothing is promised now: maintenance, or outside service hours."],
};
export const stateOf = (state) => SLA_STATES[state] || ["", state || "unknown", ""];

// The same in a sentence, without the badge's symbol; some states have none.
export const stateWords = (state) => stateOf(state)[1].replace(/^[^\p{L}]+/u, "");

export const SEVERITIES = {critical: "bad", error: "bad", warning: "warn"};

const SOURCES = {manual: "set by hand", control: "by the control loop", policy: "by the policy"};
const THROTTLE_STATES = {
  observed: "observed only, nobody is slowed down",
  requested: "asked for",
  sent: "sent to the gateway",
  confirmed: "confirmed by the gateway",
  seen: "confirmed, and seen in the measured rate",
};

// Promises that a throttle helps, first the one that asked for it: the loop helps all of its backend by each.
export function helpedBy(row, backends) {
  const own = [row.victim].filter(Boolean);
  if (row.source !== "control" || row.state === "observed") return own;
  const others = backends.find((each) => each.backend === row.backend)?.victims;
  return [...new Set([...own, ...(others || [])])];
}
const MOST_HELPED = 5;

export function throttleWords(row, backends) {
  const named = row.source === "manual" && row.who ? `set by hand by ${row.who}` : SOURCES[row.source] || row.source;
  const source = row.reason === "agreed-cap" ? "the cap of its own agreement" : named;
  const helped = helpedBy(row, backends);
  const more = helped.length > MOST_HELPED ? ` and ${helped.length - MOST_HELPED} more` : "";
  const victims = helped.length ? ` to keep ${helped.slice(0, MOST_HELPED).join(", ")}${more}` : "";
  return `${source}${victims} · ${THROTTLE_STATES[row.state] || row.state}`;
}

export function throttled(row) {
  if (row.group_name) return `group ${row.group_name}`;
  if (row.client && !row.volume) return `client ${row.client}`;
  return row.client ? `${row.volume}/${row.client}` : row.volume;
}

export function capWords(row) {
  const parts = [];
  if (row.cost_per_s) parts.push(`${count(row.cost_per_s)} weighted IOPS`);
  if (row.ops_per_s) parts.push(`${count(row.ops_per_s)} IOPS`);
  if (row.bytes_per_s) parts.push(bytesRate(row.bytes_per_s));
  if (row.peak_ops_per_s) parts.push(`bursts of ${count(row.peak_ops_per_s)} IOPS`);
  else if (row.burst_s) parts.push(`burst ${row.burst_s} s`);
  return parts.join(", ") || DASH;
}

// What holds of a throttle, and what was asked for where a floor lies above it.
export const enforcedWords = (row) => (row.lifted_to ? `${capWords(row.lifted_to)} (asked: ${capWords(row)})` : capWords(row));

// What a volume may do at most, of all its throttles; "" for anything.
export function volumeCap(row) {
  const caps = {cost_per_s: row.cap_cost_per_s, ops_per_s: row.cap_ops_per_s, bytes_per_s: row.cap_bytes_per_s};
  const words = Object.values(caps).some((rate) => !missing(rate)) ? [capWords(caps)] : [];
  return [...words, row.cap_group ? `group ${row.cap_group}` : ""].filter(Boolean).join(", ");
}

// What an event is about: its kind, and the volume, agreement or gateway.
export const aboutEvent = (row) => [eventKind(row.kind || ""), [elementWords(row.element || ""), row.subject].filter(Boolean).join(" ")].filter(Boolean).join(" · ");
