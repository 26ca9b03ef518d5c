// The text of a document from the fields of its form, a function a kind; what YAML would read as another thing is quoted.

import {zone} from "./zone.js";

const PLAIN = /^(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][\w.-]*$/i;

const scalar = (text) => (PLAIN.test(text) ? text : JSON.stringify(text));
export const names = (text) => (text || "").split(",").map((name) => name.trim()).filter(Boolean);
const list = (text) => `[${names(text).map(scalar).join(", ")}]`;
// Of [key, value as YAML] those that have a value, in braces.
const braces = (pairs) => `{${pairs.filter(([, value]) => value).map(([key, value]) => `${key}: ${value}`).join(", ")}}`;
const given = (values, ...keys) => keys.map((key) => [key, values[key] ? scalar(values[key]) : ""]);

function objective({metric, percentile, value, demand, rate, target}) {
  const indicator = metric === "latency" ? `{metric: latency, percentile: ${percentile}}` : `{metric: ${metric}}`;
  const promised = {latency: `demand_curve: [{up_to_iops: ${demand}, value_ms: ${value}}]`, iops: `promised_iops: ${rate}`,
    throughput: `promised_mbps: ${rate}`}[metric];
  return ["  objectives:", `  - name: ${metric}`, `    indicator: ${indicator}`, `    ${promised}`,
    `    budgeting: {method: timeslices, slice: 1m, target: ${Number((target / 100).toFixed(7))}}`];
}

function agreement(values) {
  const parties = given(values, "provider", "customer");
  return [...(parties.some(([, value]) => value) ? [`  parties: ${braces(parties)}`] : []), `  scope: {volumes: ${list(values.volumes)}}`,
    `  priority: ${values.priority}`, ...(values.metric ? objective(values) : []), `  window: {type: calendar, period: ${values.period}, tz: ${zone}}`];
}

// What each way out of the server needs; its secrets are files, never in a document.
const WAYS = {
  webhook: (values) => braces(given(values, "url", "url_file", "secret_file")),
  alertmanager: (values) => braces(given(values, "url", "url_file", "bearer_file")),
  heartbeat: (values) => braces(given(values, "url", "url_file")),
  apprise: (values) => braces(given(values, "url_file")),
  smtp: (values) => braces([...given(values, "server", "security", "sender"), ["to", list(values.to)], ...given(values, "user", "password_file")]),
  syslog: (values) => braces([...given(values, "server"), ["tls", values.tls ? "true" : ""]]),
  file: (values) => braces(given(values, "path")),
  command: ({argv}) => braces([["argv", `[${argv.split(/\s+/).filter(Boolean).map(scalar).join(", ")}]`]]),
  inbox: () => "{}",
};

function route(values) {
  const match = [["severities", values.severities], ["kinds", values.kinds], ["agreements", values.agreements]]
    .map(([key, text]) => [key, names(text).length ? list(text) : ""]);
  const {escalate, after, remind} = values;
  return [...(match.some(([, value]) => value) ? [`  match: ${braces(match)}`] : []), `  recipients: ${list(values.recipients)}`,
    ...(remind ? [`  remind: ${remind}`] : []), ...(names(escalate).length ? [`  escalate: {after: ${after}, recipients: ${list(escalate)}}`] : [])];
}

// "tier=gold, env-": env is taken away.
function labels(text) {
  return braces(names(text).map((pair) => {
    const [key, ...value] = pair.split("=");
    return value.length ? [scalar(key), scalar(value.join("="))] : [scalar(key.replace(/-$/, "")), "null"];
  }));
}

const SPECS = {
  SLA: agreement,
  Recipient: (values) => [`  ${values.way}: ${WAYS[values.way](values)}`],
  Route: route,
  Calendar: (values) => [`  tz: ${zone}`, "  hours:",
    `  - {days: ${list(values.days)}, from: ${JSON.stringify(values.opens)}, to: ${JSON.stringify(values.closes === "00:00" ? "24:00" : values.closes)}}`,
    ...(names(values.holidays).length ? [`  holidays: ${list(values.holidays)}`] : [])],
  VolumeLabels: (values) => [`  volumes: ${list(values.volumes)}`, `  labels: ${labels(values.labels)}`],
  Maintenance: (values) => [`  scope: {${values.about}: ${list(values.names)}}`, `  start: ${JSON.stringify(values.start)}`,
    `  duration: ${values.duration}`, `  tz: ${zone}`, `  reason: ${JSON.stringify(values.reason)}`],
};

export const isKind = (kind) => Object.hasOwn(SPECS, kind);

// values: of the fields, trimmed.
export const compose = (kind, values) => ["apiVersion: storage-sla/v1", `kind: ${kind}`, `metadata: {name: ${scalar(values.name)}}`, "spec:",
  ...SPECS[kind](values), ""].join("\n");
