// An agreement's form: fields write the document, the server checks it as it is written, and says whether it could be
// kept beside those in force. It is applied after a question that says what changes.

import {call, read} from "../api.js";
import {agreementAddress} from "../cells.js";
import {element, setBadge, setText} from "../dom.js";
import {startForm} from "../form.js";
import * as f from "../format.js";
import {showVersions} from "../parts.js";
import {zone} from "../zone.js";

const $ = (id) => document.getElementById(id);
const PAUSE_MS = 400;
const PLAIN = /^(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][\w.-]*$/i;
const ADMITTED = {yes: ["ok", "can be kept"], no: ["bad", "cannot be kept"], unknown: ["warn", "not known"]};
const page = {shell: null, turn: 0, timer: 0, checked: null, admitted: null, base: null, conflict: 0};
// What was loaded to be edited is named with its version: a change by others in between is refused, not overwritten.
const address = (query = {}) => `/slas?${new URLSearchParams({...query, ...(page.base ? {based_on: `${page.base.name}:${page.base.version}`} : {})})}`;

const scalar = (text) => (PLAIN.test(text) ? text : JSON.stringify(text));

function objective({metric, percentile, value, demand, rate, target}) {
  const indicator = metric === "latency" ? `{metric: latency, percentile: ${percentile}}` : `{metric: ${metric}}`;
  const promised = {latency: `demand_curve: [{up_to_iops: ${demand}, value_ms: ${value}}]`, iops: `promised_iops: ${rate}`,
    throughput: `promised_mbps: ${rate}`}[metric];
  return ["  objectives:", `  - name: ${metric}`, `    indicator: ${indicator}`, `    ${promised}`,
    `    budgeting: {method: timeslices, slice: 1m, target: ${Number((target / 100).toFixed(7))}}`];
}

function documentOf(given) {
  const volumes = given.volumes.split(",").map((name) => name.trim()).filter(Boolean).map(scalar).join(", ");
  const parties = ["provider", "customer"].filter((who) => given[who].trim()).map((who) => `${who}: ${scalar(given[who].trim())}`);
  return ["apiVersion: storage-sla/v1", "kind: SLA", `metadata: {name: ${scalar(given.name.trim())}}`, "spec:",
    ...(parties.length ? [`  parties: {${parties.join(", ")}}`] : []), `  scope: {volumes: [${volumes}]}`, `  priority: ${given.priority}`,
    ...(given.metric ? objective(given) : []), `  window: {type: calendar, period: ${given.period}, tz: ${zone}}`, ""].join("\n");
}

function showProblems(rows) {
  $("problems").replaceChildren(...rows.map((row) => element("li", {},
    element("p", {}, [row.line ? `Line ${row.line}` : "", row.field, row.problem].filter(Boolean).join(": ")),
    ...(row.fix ? [element("p", {class: "soft"}, row.fix)] : []))));
}

// What would come of it, a sentence a document.
function changeWords({applied, warnings}) {
  const said = applied.map((row) => !row.changed ? `${row.name}: no change, version ${row.version} stays in force.`
    : row.version > 1 ? `${row.name}: version ${row.version} replaces version ${row.version - 1}; slices are judged by it from now on.`
    : `${row.name} comes into force, and is judged from now on.`);
  return [...said, ...(warnings || []).map(f.sentence)].join(" ");
}

function admissionWords(row) {
  const whole = row.promised + row.unpromised_floors + row.added;
  const room = row.capacity === null ? "what it can take is not known" : `it can take ${f.weighted(row.capacity)} for ${row.capacity_of}`;
  return `${row.backend}: ${f.weighted(whole)} would be promised, ${f.weighted(row.added)} of it by this; ${room}.`;
}

function showAdmission(answer, words) {
  setBadge($("admit"), ...(answer ? ADMITTED[answer.answer] || ["", answer.answer] : ["", ""]));
  $("admit").hidden = !answer;
  setText($("admit-words"), words ?? (answer?.answer === "no" ? "The server would not refuse it; the promises could not all be kept at once." : ""));
  $("reasons").replaceChildren(...(answer ? [...answer.backends.flatMap((row) => [admissionWords(row), ...row.reasons]), ...answer.reasons] : [])
    .map((text) => element("li", {}, element("p", {}, f.plain(text)))));
}

// What others changed since the text was loaded; the text stays as it was typed.
async function showConflict(number) {
  const {name, version} = page.base;
  const rows = (await read(`/slas/${encodeURIComponent(name)}/versions`))?.items;
  if (number !== page.turn || !rows?.length) return;
  const [newest] = rows;
  page.conflict = newest.ended_us ? 0 : newest.version;
  const since = rows.filter((row) => row.version > version);
  showVersions($("conflict-versions"), since.length ? since : [newest]);
  $("conflict-view").href = agreementAddress(name);
  setText($("conflict-keep"), page.conflict ? `I have seen it: mine replaces version ${page.conflict}` : "I have seen it: mine begins again");
  $("conflict").hidden = false;
}

function keepMine() {
  page.base.version = page.conflict;
  check();
}

async function check() {
  const number = ++page.turn;
  const text = $("text").value;
  page.checked = null;
  $("apply").disabled = true;
  if (!text.trim() || !page.shell.signedIn()) return;
  const [tried, admitted] = await Promise.all([
    call("POST", address({dry_run: 1}), text).then(({status, body}) => ({body: status === 202 ? null : body}), (error) => ({error})),
    call("POST", "/admission", text).then(({body}) => ({body}), (error) => ({error}))]);
  if (number !== page.turn) return;
  const {error, body} = tried;
  showProblems(error?.errors || admitted.error?.errors || []);
  setBadge($("valid"), ...(error ? ["bad", "not valid"] : body ? ["ok", "valid"] : ["warn", "not known"]));
  setText($("valid-words"), error ? error.message : body ? changeWords(body) : "The server has not answered yet. Change something, or wait and try again.");
  showAdmission(admitted.body, error ? "" : admitted.error?.message);
  $("conflict").hidden = true;
  if (error?.status === 409 && page.base) await showConflict(number);
  if (number !== page.turn) return;
  page.checked = body ? text : null;
  page.admitted = admitted.body;
  $("apply").disabled = !page.checked;
}

function onFields() {
  const {metric} = Object.fromEntries(new FormData($("fields")));
  for (const label of $("fields").querySelectorAll("[data-of]")) label.hidden = !label.dataset.of.split(" ").includes(metric);
  const given = Object.fromEntries(new FormData($("fields")));
  if (!$("fields").checkValidity()) return;
  $("text").value = documentOf(given);
  check();
}

const soon = (what) => { clearTimeout(page.timer); page.timer = setTimeout(what, PAUSE_MS); };

export async function start(shell) {
  page.shell = shell;
  const ask = startForm(shell, $("apply-dialog"), {
    consequence: () => `${$("valid-words").textContent} ${page.admitted?.answer === "no" ? "It cannot be kept beside what is promised already." : ""}`,
    send: () => call("POST", address(), page.checked).catch((error) => {
      if (error.status === 409) check(); // changed since it was checked: what changed is shown behind the dialog
      throw error;
    }),
    done: ({body}) => {
      const name = body?.applied?.[0]?.name;
      if (name && (body.applied[0].kind || "SLA") === "SLA") location.assign(agreementAddress(name));
      else if (name) shell.notice(`${name} is in force.`);
    }});
  for (const kind of ["input", "change"]) $("fields").addEventListener(kind, () => { $("apply").disabled = true; soon(onFields); });
  $("fields").addEventListener("submit", (event) => event.preventDefault());
  $("text").addEventListener("input", () => { $("apply").disabled = true; soon(check); });
  $("apply").addEventListener("click", () => page.checked && ask());
  $("conflict-keep").addEventListener("click", keepMine);
  for (const label of $("fields").querySelectorAll("[data-of]")) label.hidden = !label.dataset.of.split(" ").includes("latency");
  const name = new URLSearchParams(location.search).get("name");
  const known = name && await read(`/slas/${encodeURIComponent(name)}`);
  if (known) {
    $("text").value = known.document || "";
    page.base = {name: known.name, version: known.version};
  }
}

export function onSession() {
  $("editor").hidden = !page.shell.signedIn();
  $("not-here").hidden = page.shell.signedIn();
  check();
}
